"""The script that the guide shows may run again: after it has ended, and after it was killed at any step."""

from __future__ import annotations

import pytest
import torch
from forks import run
from test_docs import blocks

KILLS = """
import os
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


def ended(where):
    done = run((where / "train.py").read_text(), cwd=where)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def results(where):
    return torch.load(where / "dense.pt")["layer"]


def test_the_script_of_the_guide_goes_on_where_it_was(script, tmp_path):
    assert run(KILLS.format(calls=25), cwd=script).returncode == 9
    assert ended(script) == "trained steps 20 to 60"
    before = results(script)
    assert run(KILLS.format(calls=15), cwd=script).returncode == 9
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
    done = run((script / "train.py").read_text(), cwd=script)
    assert done.returncode == 1
    assert "dense.pt and user.rows are of different runs" in done.stderr
