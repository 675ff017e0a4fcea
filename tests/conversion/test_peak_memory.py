"""What a conversion needs of memory beside its result: one table."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

TABLE = 64 << 20  # bytes of a table's weights
SLACK = 24 << 20  # for each tensor of a table: the parts in which it is copied, and the allocator's
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}  # glibc keeps what is freed otherwise, or not: by its history
SCRIPT = """
    import gc, sys, torch, tieredemb
    from torch import nn

    def status(name):
        (line,) = (line for line in open("/proc/self/status") if line.startswith(name))
        return int(line.split()[1]) << 10

    def converted(rows, trained):
        model = nn.ModuleList([nn.EmbeddingBag(rows, 64, mode="sum") for _ in range(4)])
        optimizer = torch.optim.Adam(model.parameters())
        if trained:
            for number in range(4):
                model[number](torch.tensor([[0]])).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        open("/proc/self/clear_refs", "w").write("5")       # the peak is counted from here on
        return tieredemb.replace_embedding_bags(model, capacity=8, optimizer=optimizer)

    converted(8, True)                                      # loads and compiles
    for trained in (False, True):
        model = converted(int(sys.argv[1]), trained)
        print(status("VmHWM") - status("VmRSS"))
        del model
        gc.collect()
"""


@pytest.fixture(scope="module")
def beside():
    """Bytes that a conversion holds beside its result, of a new model and of one that was trained."""
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(TABLE // 256)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | GIVES_BACK)
    assert done.returncode == 0, done.stderr
    return dict(zip(("new", "trained"), map(int, done.stdout.split()), strict=True))


@pytest.mark.parametrize(("state", "tensors"), [("new", 1), ("trained", 3)])
def test_a_conversion_holds_one_table_beside_its_result(beside, state, tensors):
    """Of four: its weight, and what the optimizer has kept of it."""
    assert beside[state] < tensors * (TABLE + SLACK)
