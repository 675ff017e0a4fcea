"""Writes what this version of the library leaves on a disk into an archive, which later versions are tested with:

    python tests/formats/write.py tests/formats/NAME.tar.xz

Row files, with what lies beside them, and checkpoints of each model of `models.py`, of one process and of two ranks. As
`expected.pt` the rows and the optimizer's state that they hold, and those a few steps later.
"""

from __future__ import annotations

import os
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from formats.models import (
    LATER_STEPS,
    ONE_PROCESS,
    RANK_KINDS,
    STEPS,
    collection,
    collection_rows,
    converted,
    converted_rows,
    sharded,
    train_collection,
    train_converted,
    whole,
)

import tieredemb as te


def write_collection(name: str, where: Path) -> dict[str, dict[str, torch.Tensor]]:
    model = collection(name, te.File(where / "rows"))
    train_collection(model, 0, STEPS)
    now = collection_rows(model)
    model.save_checkpoint(where / "checkpoint", extra={"step": STEPS})
    if name == "unclean":  # as after a kill that followed a flush
        model.flush()
        for path in where.glob("rows*"):
            shutil.copy(path, where / f"copy-{path.name}")
    model.close()
    for path in where.glob("copy-*"):
        os.replace(path, where / path.name.removeprefix("copy-"))
    again = collection(name)
    again.load_checkpoint(where / "checkpoint")
    train_collection(again, STEPS, LATER_STEPS)
    return {"now": now, "later": collection_rows(again)}


def write_converted(where: Path) -> dict[str, dict[str, torch.Tensor]]:
    model, optimizer = converted(te.File(where / "rows"))
    train_converted(model, optimizer, 0, STEPS)
    now = converted_rows(model, optimizer)
    for name in ("user", "word"):  # the item table shares the cache of the first
        model[name].save_checkpoint(where / f"checkpoint-{name}", extra={"step": STEPS})
    te.save_checkpoint(whole(model), where / "checkpoint-model", extra={"step": STEPS})
    for module in model.values():
        module.close()
    again, optimizer = converted()
    for name in ("user", "word"):
        again[name].load_checkpoint(where / f"checkpoint-{name}")
    train_converted(again, optimizer, STEPS, LATER_STEPS)
    return {"now": now, "later": converted_rows(again, optimizer)}


def write_ranks(where: Path) -> None:
    """In two processes of one thread each; rank 0 keeps what is expected."""
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            dist.init_process_group("gloo", f"file://{where}/meeting", rank=rank, world_size=2)
            expected = {}
            for name in RANK_KINDS:
                (where / name).mkdir(exist_ok=True)
                model = sharded(name, te.File(where / name / "rows"))
                train_collection(model, 0, STEPS, seed=rank)
                now = collection_rows(model)
                model.save_checkpoint(where / name / "checkpoint", extra={"step": STEPS})
                model.close()
                again = sharded(name)
                again.load_checkpoint(where / name / "checkpoint")
                train_collection(again, STEPS, LATER_STEPS, seed=rank)
                expected[name] = {"now": now, "later": collection_rows(again)}
            if rank == 0:
                torch.save(expected, where / "expected.pt")
            dist.barrier()
            os._exit(0)
        children.append(child)
    if any(os.waitpid(child, 0)[1] for child in children):
        raise SystemExit("a rank has failed")
    (where / "meeting").unlink(missing_ok=True)


def main(archive: str) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        top = Path(scratch)
        (top / "ranks").mkdir()
        write_ranks(top / "ranks")
        expected = {}
        for name in ONE_PROCESS:
            (top / name).mkdir()
            expected[name] = write_converted(top / name) if name == "converted" else write_collection(name, top / name)
        torch.save(expected, top / "expected.pt")
        with tarfile.open(archive, "w:xz", preset=9) as out:
            out.add(top, arcname=".")


if __name__ == "__main__":
    main(*sys.argv[1:])
