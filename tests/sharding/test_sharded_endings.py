"""Processes that torchrun has started end as any other: without `close()`, by an error, or with the groups of torch
gone first. Nobody waits, and nothing aborts."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import textwrap
import time

import pytest
import torch

import tieredemb as te

SCRIPT = """
import sys
import torch
import torch.distributed as dist
import tieredemb as te

how = sys.argv[1]
dist.init_process_group("gloo")
rank = dist.get_rank()
storage = te.File(sys.argv[2]) if how == "without close, on files" else None
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
print(f"ended {rank}\\n", end="")
"""


def leaves_threads(rank, size, closes):
    """How many threads the process has once a collection has come and gone, for the second time and the third."""
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


def run(tmp_path, how):
    """What torchrun and two processes said, and the seconds that it took."""
    script, started = tmp_path / "script.py", time.monotonic()
    script.write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--monitor-interval", "2"]  # torchrun ends the others so much later: they have said why by then
    done = subprocess.run(
        [*command, str(script), how, str(tmp_path / "rows")],
        capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert not re.search(r"terminate called|[Aa]borted|exitcode *: -(6|11)", said), said
    return done, time.monotonic() - started


@pytest.mark.parametrize("how", ["without close, on files", "destroyed"])
def test_processes_end_well(tmp_path, how):
    done, _ = run(tmp_path, how)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n"))[-2:] == ["ended 0", "ended 1"]
    assert "Error" not in done.stderr


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("an error", "PeerError: rank 0"),
        ("destroyed and used", "PeerError: torch.distributed.destroy_process_group() came before this call"),
    ],
)
def test_errors_end_all_processes(tmp_path, how, said):
    done, seconds = run(tmp_path, how)
    assert done.returncode != 0
    assert said in done.stderr
    assert "ended" not in done.stdout
    assert seconds < 90  # and not the half hour of torch's timeout
