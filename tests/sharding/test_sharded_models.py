"""A whole model whose tables lie on several ranks, saved and loaded as one: by any world, whatever saved it."""

from __future__ import annotations

import os

import pytest
import torch
from devices import equal
from sharding.ranks import step_of
from sharding.test_sharded_checkpoints import batch_for, make
from sharding.test_sharded_failures import raised
from torch import nn

import tieredemb as te

ADAGRAD = te.Adagrad(lr=0.1)


def model_of(size, sharding, *, more=None):
    """Two collections, the second of which is `more` if given, and a dense layer with its optimizer."""
    other = make(size, "rows", te.Adam(lr=0.05)) if more is None else more
    model = nn.ModuleDict({"first": make(size, sharding, ADAGRAD), "second": other, "top": nn.Linear(2, 1)})
    return model, torch.optim.Adam(model["top"].parameters(), lr=0.1)


def trains(rank, size, sharding, steps, load_from, save_to):
    """Loads, takes steps, and saves; `size` 0: in one process. Returns all weights, as rank 0 has them."""
    torch.manual_seed(0)
    model, optimizer = model_of(size, sharding)
    if load_from is not None:
        extra = te.load_checkpoint(model, load_from, optimizer=optimizer)
        assert extra == {"step": steps[0]}
    for step in steps:
        for name in ("first", "second"):
            step_of(model[name], batch_for(step, rank, max(1, size)), weighted=False)
        optimizer.zero_grad()
        model["top"](torch.full((1, 2), float(step))).sum().backward()  # the same on all ranks
        optimizer.step()
    te.save_checkpoint(model, save_to, extra={"step": steps[-1] + 1}, optimizer=optimizer)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    te.close(model)
    return weights


def run(worlds, size, *args):
    return trains(0, 0, *args) if size == 0 else worlds(size).run(trains, *args)[0]


@pytest.mark.parametrize("sizes", [(0, 2, 3), (2, 0, 1), (3, 2, 0)], ids=str)
def test_a_model_that_any_world_has_saved_goes_on_in_any_other(worlds, tmp_path, sizes):
    expected = trains(0, 0, "rows", range(9), None, tmp_path / "whole")
    last = None
    for turn, size in enumerate(sizes):
        found = run(
            worlds, size, ("all kinds", "tables", "rows")[turn], range(3 * turn, 3 * turn + 3), last, tmp_path / "it"
        )
        last = tmp_path / "it"
    assert found.keys() == expected.keys()
    assert [name for name, weight in expected.items() if not equal(found[name], weight)] == []


def refuses(rank, size, where):
    """What every rank raises for models that cannot be saved, or loaded."""
    mixed, _ = model_of(size, "rows", more=te.TieredEmbeddingBag(9, 4))
    found = [raised(te.save_checkpoint, mixed, where)]
    model, _ = model_of(size, "rows")
    found.append(raised(te.save_checkpoint, model, where, extra={"a": object()} if rank == 0 else {}))
    te.save_checkpoint(model, where)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    model["top"] = nn.Linear(3, 1) if rank == 1 else model["top"]
    found.append(raised(te.load_checkpoint, model, where))
    after = model.state_dict()
    te.close(model)
    same = all(equal(after[name], weight) for name, weight in before.items() if not name.startswith("top"))
    return found, same


def test_what_one_rank_cannot_do_none_does(worlds, tmp_path):
    for found, same in worlds(2).run(refuses, tmp_path / "it"):
        (mixed, extra, other) = found
        assert mixed[0] == "UnsupportedError"
        assert "'second' has tables of each process" in mixed[1]
        assert extra[1].startswith("rank 0: ")
        assert other[0] == "CheckpointError"
        assert "'top.weight' has the shape" in other[1]
        assert same
    assert [name for name in os.listdir(tmp_path / "it") if name.startswith("dense-")] != []
