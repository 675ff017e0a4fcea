"""Processes that torchrun has started end as any other: without `close()`, by an error, or with the groups of torch
gone first. Nobody waits, and nothing aborts."""

from __future__ import annotations

import gc
import os
import re

import forks
import pytest
import torch

import tieredemb as te

WAYS = ("without close, on files", "destroyed", "an error", "destroyed and used")
SCRIPT = """
import os
import sys
import time
import torch
import torch.distributed as dist
import tieredemb as te


def trains(how, rows):
    store, rank, size = next(dist.rendezvous("env://"))  # of torchrun, for all ways
    dist.init_process_group("gloo", store=dist.PrefixStore(how, store), rank=rank, world_size=size)
    storage = te.File(rows) if how == "without close, on files" else None
    tables = [te.TableConfig(name="a", num_embeddings=500, embedding_dim=4)]
    model = te.ShardedTieredEmbeddingBagCollection(tables, capacity=0.5, optimizer=te.Adagrad(lr=0.1), storage=storage)
    loader = [(torch.arange(6) + 10 * step, torch.arange(7)) for step in range(4)]
    for step, batch in enumerate(te.prefetch(loader, model)):
        if step == 2 and rank == 1 and how == "an error":
            raise ValueError("the user's own")
        model(*batch).sum().backward()
    if how.startswith("destroyed"):
        dist.destroy_process_group()
        if how == "destroyed and used":
            model.state_dict()
        model.close()
    print(f"ended {rank}")
    return model


where, *ways = sys.argv[1:]
rank = int(os.environ["RANK"])
for number, how in enumerate(ways):
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        for fd, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{where}/{number}-{rank}.{name}", os.O_WRONLY | os.O_CREAT), fd)
        model = trains(how, f"{where}/rows")
        break  # and it ends as any script does, the model in a variable
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with open(f"{where}/{number}-{rank}", "w") as file:
        file.write(f"{code} {time.monotonic() - started}")
"""


def leaves_threads(rank, size, closes):
    """How many threads the process has once a collection was built and closed, for the second time and the third."""
    found = []
    for _ in range(3):
        model = te.ShardedTieredEmbeddingBagCollection(
            [te.TableConfig(name="a", num_embeddings=500, embedding_dim=4)], optimizer=te.Adagrad(lr=0.1)
        )
        model(torch.arange(6), torch.arange(7)).sum().backward()
        if closes:
            model.close()
        del model
        gc.collect()
        found.append(len(os.listdir("/proc/self/task")))
    return found[1:]


@pytest.mark.parametrize("closes", [True, False])
def test_a_collection_that_is_gone_leaves_no_thread_of_its_group(worlds, closes):
    """Threads of gloo drop tensors of the last exchange, and abort a process whose interpreter has ended."""
    for second, third in worlds(2).run(leaves_threads, closes):
        assert third == second


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Of each way the exit code, the output, the errors and the seconds of each rank. What ends are forks of the
    processes of torchrun."""
    where = tmp_path_factory.mktemp("endings")
    (where / "script.py").write_text(SCRIPT)
    done = forks.torchrun("--nproc-per-node", "2", where / "script.py", where, *WAYS, timeout=240)
    assert done.returncode == 0, done.stderr
    found = {}
    for number, how in enumerate(WAYS):
        paths = [where / f"{number}-{rank}" for rank in range(2)]
        codes, seconds = zip(*(path.read_text().split() for path in paths), strict=True)
        said = [[path.with_suffix(kind).read_text() for path in paths] for kind in (".out", ".err")]
        found[how] = [int(code) for code in codes], *said, max(map(float, seconds))
        assert not re.search(r"terminate called|[Aa]borted", "".join(said[0] + said[1])), said
        assert min(found[how][0]) >= 0, found[how]  # no signal
    return found


@pytest.mark.parametrize("how", ["without close, on files", "destroyed"])
def test_processes_end_well(ended, how):
    codes, outputs, errors, _ = ended[how]
    assert codes == [0, 0], errors
    assert outputs == ["ended 0\n", "ended 1\n"]
    assert "Error" not in "".join(errors)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("an error", "PeerError: rank 0"),
        ("destroyed and used", "PeerError: torch.distributed.destroy_process_group() came before this call"),
    ],
)
def test_errors_end_all_processes(ended, how, said):
    codes, outputs, errors, seconds = ended[how]
    assert 0 not in codes
    assert said in "".join(errors)
    assert outputs == ["", ""]
    assert seconds < 90  # and not the half hour of torch's timeout
