"""CUDA code that a process has compiled is loaded by the next one, from where only the user can write."""

from __future__ import annotations

import os
import stat
import subprocess
import sys

import pytest

pytestmark = pytest.mark.usefixtures("gpu")

STEP = """
import warnings, torch, cupy, tieredemb as te
compiled = []
ours = cupy.cuda.compiler.compile_using_nvrtc
def note(*args, **keywords):
    compiled.append(1)
    return ours(*args, **keywords)
cupy.cuda.compiler.compile_using_nvrtc = note
bag = te.TieredEmbeddingBag(100, 4, mode="sum", capacity=9, device="cuda", optimizer=te.SGD(lr=1.0))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    bag(torch.tensor([[1, 2]], device="cuda")).sum().backward()
    rows = bag.state_dict()["weight"]
print(len(compiled), float(rows.double().sum()), sum("not used" in str(each.message) or "alone" in str(each.message)
    for each in caught))
"""


def step(cache, **environment):
    """What a process prints that takes a step: files that it compiled, a sum over rows, and warnings of the cache."""
    run = subprocess.run(
        [sys.executable, "-c", STEP], capture_output=True, text=True, timeout=200, check=False,
        env={**os.environ, "CUPY_CACHE_DIR": str(cache), **environment},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    compiled, rows, warned = run.stdout.split()
    return int(compiled), float(rows), int(warned)


def test_a_second_process_compiles_nothing(tmp_path):
    first, rows, _ = step(tmp_path)
    assert first > 0
    assert step(tmp_path) == (0, rows, 0)
    for folder, _, files in os.walk(tmp_path / "tieredemb"):
        for path in (folder, *(os.path.join(folder, name) for name in files)):
            assert not os.stat(path).st_mode & (stat.S_IWGRP | stat.S_IWOTH), path


def test_code_that_was_cut_off_is_compiled_again(tmp_path):
    _, rows, _ = step(tmp_path)
    files = sorted(tmp_path.rglob("*.cubin"))
    for path in files:
        path.write_bytes(path.read_bytes()[:-7])
    compiled, again, _ = step(tmp_path)
    assert (compiled > 0, again) == (True, rows)


def test_a_directory_that_others_can_write_to_is_not_used(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    step(shared, XDG_CACHE_HOME=str(tmp_path / "own"))
    assert not list(shared.iterdir())
    assert list((tmp_path / "own").rglob("*.cubin"))
