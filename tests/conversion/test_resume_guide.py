"""The script that the guide shows may run again: after it has ended, and after it was killed at any step."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from test_docs import blocks

KILLS = """
import os, tieredemb
from tieredemb.modules.embedding_bag import TieredEmbeddingBag as Bag
forward, calls = Bag.forward, []
def killed(self, *args):
    calls.append(1)
    if len(calls) == {calls}:
        os._exit(9)
    return forward(self, *args)
Bag.forward = killed
exec(open("train.py").read())
"""


@pytest.fixture
def script(tmp_path):
    ((_, text),) = blocks("docs/guides/save_and_resume.md", "python train.py")
    (tmp_path / "train.py").write_text(text)
    return tmp_path


def run(where, *args):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, "-W", "ignore", *args], cwd=where, capture_output=True, text=True, timeout=120, check=False,
        env=environment,
    )  # fmt: skip


def ended(where):
    done = run(where, "train.py")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def results(where):
    return torch.load(where / "dense.pt")["layer"]


def test_the_script_of_the_guide_goes_on_where_it_was(script, tmp_path):
    assert run(script, "-c", KILLS.format(calls=25)).returncode == 9
    assert ended(script) == "trained steps 20 to 60"
    before = results(script)
    assert run(script, "-c", KILLS.format(calls=15)).returncode == 9
    assert ended(script) == "trained steps 70 to 110"
    whole = tmp_path / "whole"
    whole.mkdir()
    (whole / "train.py").write_text((script / "train.py").read_text().replace("first + 40", "first + 110"))
    assert ended(whole) == "trained steps 0 to 110"
    assert all(torch.equal(value, results(whole)[name]) for name, value in results(script).items())
    assert not all(torch.equal(value, results(script)[name]) for name, value in before.items())


def test_the_script_of_the_guide_refuses_layers_of_other_files(script):
    assert ended(script) == "trained steps 0 to 40"
    kept = (script / "dense.pt").read_bytes()
    assert ended(script) == "trained steps 40 to 80"
    (script / "dense.pt").write_bytes(kept)
    done = run(script, "train.py")
    assert done.returncode == 1
    assert "dense.pt and user.rows are of different runs" in done.stderr
