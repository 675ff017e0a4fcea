"""A model with sharded tables in `torch.distributed.checkpoint`: what works as with any model, and what is refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from sharding.ranks import batch_of, tables_of
from sharding.test_sharded_failures import raised
from sharding.test_sharded_states import assert_same
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import tieredemb as te
from tieredemb.sharding.collection import ShardedTieredEmbeddingBagCollection
from tieredemb.sharding.layout import RowWise

TABLES = tables_of(widths=(4, 8))
WIDTH = sum(table.embedding_dim for table in TABLES)


class Model(nn.Module):
    def __init__(self, seed, optimizer):
        super().__init__()
        torch.manual_seed(seed)
        self.tables = ShardedTieredEmbeddingBagCollection(TABLES, sharding=RowWise(), capacity=0.5, optimizer=optimizer)
        self.top = nn.Linear(WIDTH, 1)

    def forward(self, ids, offsets):
        return self.top(self.tables(ids, offsets))


def make(seed=0, optimizer=None):
    """A model in DistributedDataParallel, and a torch optimizer of its dense layer."""
    model = nn.parallel.DistributedDataParallel(Model(seed, optimizer or te.Adam(lr=0.05)))
    return model, torch.optim.Adam(model.parameters(), lr=0.05)


def steps(model, optimizer, rank, which):
    for step in which:
        ids, offsets, *_ = batch_of(TABLES, step, rank, samples=lambda rank: 8)
        optimizer.zero_grad()
        model(ids, offsets).mean().backward()
        optimizer.step()


def saves_names(rank, size, where, wrapped):
    """By torch's functions, the whole model or that in DistributedDataParallel, and into another one."""
    model, optimizer = make()
    steps(model, optimizer, rank, range(2))
    named = get_model_state_dict(model if wrapped else model.module)
    dcp.save({"model": named}, checkpoint_id=where)
    other, _ = make(seed=1)
    taken = get_model_state_dict(other.module)
    dcp.load({"model": taken}, checkpoint_id=where)
    set_model_state_dict(other.module, taken)
    found, expected = dict(other.module.state_dict()), dict(model.module.state_dict())
    model.module.tables.close()
    other.module.tables.close()
    return list(named), found, expected


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_model_goes_through_dcp_by_its_names(worlds, tmp_path, wrapped):
    tables, dense = [f"tables.tables.{table.name}.weight" for table in TABLES], ["top.weight", "top.bias"]
    answers = worlds(2).run(saves_names, tmp_path / "saved", wrapped)
    for rank, (names, found, expected) in enumerate(answers):
        assert sorted(names) == sorted([*dense, *(tables if rank == 0 else [])])
        assert_same(found, expected)


def saves_raw(rank, size, where):
    """What `model.state_dict()` has, as it is."""
    model, optimizer = make()
    steps(model, optimizer, rank, range(2))
    dcp.save({"model": model.state_dict()}, checkpoint_id=where)
    other, _ = make(seed=1)
    taken = other.state_dict()
    dcp.load({"model": taken}, checkpoint_id=where)
    other.load_state_dict(taken)
    found, expected = dict(other.state_dict()), dict(model.state_dict())
    model.module.tables.close()
    other.module.tables.close()
    return found, expected


def test_a_state_dict_goes_through_dcp_as_it_is(worlds, tmp_path):
    for found, expected in worlds(2).run(saves_raw, tmp_path / "saved"):
        assert_same(found, expected)


def broadcasts(rank, size):
    """What rank 0 alone has is set on all ranks; and what is given to DistributedDataParallel itself."""
    model, optimizer = make()
    steps(model, optimizer, rank, range(2))
    whole = dict(model.module.state_dict())
    other, _ = make(seed=1)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other.module, dict(whole) if rank == 0 else {}, options=options)
    found = dict(other.module.state_dict())
    refused = raised(set_model_state_dict, other, dict(whole))
    model.module.tables.close()
    other.module.tables.close()
    return found, whole, refused


def test_what_rank_0_has_is_set_on_all_ranks(worlds):
    for found, expected, (kind, text) in worlds(2).run(broadcasts):
        assert_same(found, expected)
        assert kind == "RuntimeError"
        assert "module.tables.tables.t0.weight" in text


def dense_of(model, optimizer):
    dense = model.module.top
    return {"dense": get_model_state_dict(dense), "optimizer": get_optimizer_state_dict(dense, optimizer)}


def begins(rank, size, where):
    """Trains three steps, and saves: the dense layers by torch, the tables beside; then three more."""
    model, optimizer = make()
    steps(model, optimizer, rank, range(3))
    dcp.save(dense_of(model, optimizer), checkpoint_id=where / "dense")
    model.module.tables.save_checkpoint(where / "tables", extra={"step": 3})
    steps(model, optimizer, rank, range(3, 6))
    found = dict(model.module.state_dict())
    model.module.tables.close()
    return found


def resumes(rank, size, where):
    model, optimizer = make(seed=1)
    kept = dense_of(model, optimizer)
    dcp.load(kept, checkpoint_id=where / "dense")
    set_model_state_dict(model.module.top, kept["dense"])
    set_optimizer_state_dict(model.module.top, optimizer, kept["optimizer"])
    extra = model.module.tables.load_checkpoint(where / "tables")
    steps(model, optimizer, rank, range(extra["step"], 6))
    found = dict(model.module.state_dict())
    model.module.tables.close()
    return found


def test_a_run_goes_on_from_dcp_and_a_checkpoint_beside_it(worlds, tmp_path):
    expected = worlds(2).run(begins, tmp_path / "saved")
    for found, its in zip(worlds(2).run(resumes, tmp_path / "saved"), expected, strict=True):
        assert_same(found, its)


def names_params(rank, size):
    """Of an optimizer that tables follow, and of the tables' own."""
    model, optimizer = make(optimizer=torch.optim.Adam)
    model.module.tables.follow(optimizer)
    steps(model, optimizer, rank, range(1))
    fused, _ = make()
    found = [
        raised(get_optimizer_state_dict, model, optimizer),
        raised(get_optimizer_state_dict, fused, fused.module.tables.fused_optimizer),
    ]
    steps(model, optimizer, rank, range(1, 2))
    model.module.tables.close()
    fused.module.tables.close()
    return found


def test_an_optimizer_whose_params_have_no_names_is_refused_on_all(worlds):
    for found in worlds(2).run(names_params):
        for kind, text in found:
            assert kind == "UnsupportedError"
            assert "save_checkpoint(directory)" in text


def test_a_collection_of_one_process_has_names_too():
    model = nn.Sequential(te.TieredEmbeddingBagCollection(TABLES, capacity=0.5), nn.Linear(WIDTH, 1))
    named = get_model_state_dict(model)
    assert list(named) == list(model.state_dict())
    expected = {name: value + 1 for name, value in named.items()}
    set_model_state_dict(model, dict(expected))
    assert_same(dict(model.state_dict()), expected)
