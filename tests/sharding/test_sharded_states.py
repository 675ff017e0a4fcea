"""The optimizer's state of sharded tables in a state dict: what one process has, and what any number of them loads."""

from __future__ import annotations

import copy
from datetime import timedelta

import pytest
import torch
from devices import equal
from sharding.ranks import SHARDINGS, batch_of, joined, step_of, tables_of, uneven
from sharding.test_sharded_failures import raised

import tieredemb as te
from tieredemb.config import TablePart
from tieredemb.sharding.collection import ShardedTieredEmbeddingBagCollection
from tieredemb.tables.row_state import loaded_state

TABLES = tables_of(widths=(4, 8), padding=(None, 0))
WORLD = 3  # ranks whose batches are trained, however many processes do
QUICK = timedelta(seconds=3)
FOLLOWED = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.5}),
    "SGD weight_decay": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "SparseAdam": (torch.optim.SparseAdam, {"lr": 0.05}),
    "Adam L2": (torch.optim.Adam, {"lr": 0.05, "weight_decay": 0.1}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.05}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.05}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
}
FUSED = {
    "fused Adagrad": te.Adagrad(lr=0.1),
    "fused SGD": te.SGD(lr=0.1),
    "fused RowWiseAdagrad": te.RowWiseAdagrad(lr=0.1),
    "fused Adam": te.Adam(lr=0.05),
    "fused NAdam": te.NAdam(lr=0.05),
    "fused SparseLion": te.SparseLion(lr=0.02),
}
KINDS = [*FOLLOWED, *FUSED]


def shares(rank, size):
    """The ranks of three whose batches a rank of `size` trains on: one process all of them."""
    return [each for each in range(WORLD) if each * size // WORLD == rank]


def make(kind, size, sharding="rows", **keywords):
    """Tables, their optimizer, and the dense parameter beside them. `size` 0: in one process."""
    dense = torch.nn.Parameter(torch.ones(2))
    optimizer, given = None, FUSED.get(kind)
    if kind in FOLLOWED:
        given, options = FOLLOWED[kind]
        optimizer = given([dense], **options)
    if size == 0:
        model = te.TieredEmbeddingBagCollection(TABLES, capacity=0.5, optimizer=given, **keywords)
    else:
        model = ShardedTieredEmbeddingBagCollection(
            TABLES, sharding=SHARDINGS[sharding], capacity=0.5, optimizer=given, average=False, **keywords
        )
    if optimizer is not None:
        model.follow(optimizer)
    return model, optimizer or model.fused_optimizer, dense


def steps(parts, rank, size, which):
    model, optimizer, dense = parts
    for step in which:
        optimizer.zero_grad()
        dense.grad = torch.full((2,), float(step + 1))
        if isinstance(optimizer, torch.optim.SparseAdam):
            dense.grad = dense.grad.to_sparse()
        batch = joined(TABLES, [batch_of(TABLES, step, each, samples=uneven) for each in shares(rank, max(1, size))])
        step_of(model, batch, weighted=False)
        optimizer.step()


def saved(parts):
    model, optimizer, dense = parts
    return {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict(), "dense": dense.detach().clone()}


def load(parts, state):
    model, optimizer, dense = parts
    state = copy.deepcopy(state)  # torch's optimizers go on in the tensors that they are given, which ranks share here
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    with torch.no_grad():
        dense.copy_(state["dense"])


def trains(rank, size, kind, sharding, which, state=None, where="all"):
    """Loads a `state`, on all ranks or the tables' on rank 0 alone, takes steps, and returns the state then."""
    parts = make(kind, size, sharding)
    if state is not None:
        load(parts, without_tables(state, kind) if where == "rank 0" and rank != 0 else state)
    steps(parts, rank, size, which)
    found = saved(parts)
    parts[0].close()
    return found


def without_tables(state, kind):
    """What other ranks than the first have of a state dict."""
    dense = {} if kind in FUSED else {n: each for n, each in state["optimizer"]["state"].items() if n == 0}
    return {**state, "model": {}, "optimizer": {**state["optimizer"], "state": dense}}


def run(worlds, size, *args):
    """The same in a world of `size`, or here: of each rank."""
    return [trains(0, 0, *args)] if size == 0 else worlds(size).run(trains, *args)


def assert_same(found, expected, at=""):
    """In all bits, names and orders."""
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype, at
        assert equal(found, expected), at
    elif isinstance(expected, dict):
        assert list(found) == list(expected), at
        for name, value in expected.items():
            assert_same(found[name], value, f"{at}.{name}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), at
        for n, (mine, value) in enumerate(zip(found, expected, strict=True)):
            assert_same(mine, value, f"{at}.{n}")
    else:
        assert found == expected, at


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sharding", ["rows", "all kinds"])
def test_rank_0_has_the_state_dict_of_one_process(worlds, kind, sharding):
    (expected,) = run(worlds, 0, kind, sharding, range(6))
    first, *others = run(worlds, WORLD, kind, sharding, range(6))
    assert_same(first, expected)
    if kind not in ("SGD", "SGD weight_decay", "fused SGD"):
        assert len([each for each in expected["optimizer"]["state"].values() if len(each) > 1]) >= len(TABLES)
    marked = {} if kind == "SGD" else {"tables_on_rank": 0}
    for other in others:
        assert_same(other["optimizer"], without_tables(expected, kind)["optimizer"] | marked)


@pytest.mark.parametrize("size", [0, 1, 2])
@pytest.mark.parametrize("kind", ["Adam L2", "fused RowWiseAdagrad"])
def test_the_state_dict_of_another_rank_alone_is_refused(worlds, kind, size):
    other = run(worlds, 2, kind, "rows", range(2))[1]["optimizer"]
    answers = [refuses(0, 0, kind, other)] if size == 0 else worlds(size).run(refuses, kind, other)
    for name, text in answers:
        assert name == "InvalidInputError"
        assert "load that of rank 0, which holds all of it" in text


def refuses(rank, size, kind, state):
    model, optimizer, _ = make(kind, size)
    found = raised(optimizer.load_state_dict, copy.deepcopy(state))
    model.close()
    return found


@pytest.mark.parametrize(
    ("kind", "sizes", "where"),
    [
        ("SGD momentum", (0, 3), "all"),
        ("SGD momentum", (2, 3), "rank 0"),
        ("Adam L2", (0, 3), "rank 0"),
        ("Adam L2", (1, 2), "all"),
        ("AdamW", (3, 0), "all"),
        ("SparseAdam", (3, 1), "all"),
        ("SparseAdam", (0, 3), "rank 0"),
        ("fused RowWiseAdagrad", (0, 3), "all"),
        ("fused RowWiseAdagrad", (3, 1), "all"),
        ("fused Adam", (2, 3), "rank 0"),
        ("fused Adam", (3, 0), "all"),
    ],
    ids=str,
)
def test_what_any_number_of_processes_saved_any_other_goes_on_with(worlds, kind, sizes, where):
    first, later = sizes
    (expected,) = run(worlds, 0, kind, "all kinds", range(8))
    state = run(worlds, first, kind, "all kinds", range(4))[0]
    assert_same(run(worlds, later, kind, "rows", range(4, 8), state, where)[0], expected)


@pytest.mark.parametrize("kind", ["Adam L2", "Adagrad", "fused Adam"])
def test_a_state_of_before_the_first_step_is_that_of_one_process(worlds, kind):
    (expected,) = run(worlds, 0, kind, "rows", range(0))
    assert_same(run(worlds, 2, kind, "rows", range(0))[0], expected)
    (whole,) = run(worlds, 0, kind, "rows", range(3))
    found = worlds(2).run(starts_again, kind, expected)
    assert_same(found[0], whole)


def starts_again(rank, size, kind, state):
    """Loads a state without steps into tables that have taken some."""
    parts = make(kind, size)
    steps(parts, rank, size, range(5, 7))
    load(parts, state)
    steps(parts, rank, size, range(3))
    found = saved(parts)
    parts[0].close()
    return found


def saves_alone(rank, size, kind, does):
    parts = make(kind, size, timeout=QUICK)
    optimizer = parts[1]
    state = optimizer.state_dict()
    if rank == 0:
        return None
    return raised(optimizer.state_dict) if does == "saves" else raised(optimizer.load_state_dict, state)


@pytest.mark.parametrize(("kind", "does"), [("Adam L2", "saves"), ("fused Adam", "loads")])
def test_one_rank_alone_raises_after_the_timeout(worlds, kind, does):
    assert worlds(2).run(saves_alone, kind, does)[1][0] == "PeerError"


def spoilt(state, how):
    """A wrong state dict, and what each rank raises."""
    state = copy.deepcopy(state)
    group, entries = state["param_groups"][0], state["state"]
    table = group["params"][-1]  # t3
    if how == "shape":
        entries[table]["exp_avg"] = torch.zeros(2, 8)
    elif how == "groups":
        group["params"].pop()
    elif how == "steps":
        for number in group["params"][-4:]:
            entries[number]["step"] = torch.tensor(9.0)
            entries[number]["lagging"]["step"] = torch.tensor(9)
    elif how == "lagging":
        entries[table]["lagging"]["rows"] = torch.tensor([77])
    elif how == "alone":
        for number in group["params"][-4:-1]:
            del entries[number]
    return state


def cannot_load(rank, size, kind, how):
    parts = make(kind, size)
    model, optimizer, _ = parts
    steps(parts, rank, size, range(3))
    before = optimizer.state_dict()
    whole = model._states().exchange.broadcast_object(before)
    if rank == 1:
        state = spoilt(whole, how)
    else:
        state = without_tables({"optimizer": whole}, kind)["optimizer"] if how == "alone" else whole
    if how == "full" and rank == 1:
        cold = model._held[1].engine.tables.groups[0].cache.cold

        def full(*_):
            raise te.errors.StorageFullError("no space left")

        cold.reserve_range = full
    found = raised(optimizer.load_state_dict, state)
    after = optimizer.state_dict()
    model.close()
    return found, before, after


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        ("shape", "InvalidInputError", "rank 1: 'exp_avg' of table 't3' must have shape (40, 8), got (2, 8)"),
        ("groups", "InvalidInputError", "rank 1: the state dict"),
        ("steps", "InvalidInputError", "is that of step 3 on rank 0, and of step 9 on rank 1"),
        ("lagging", "InvalidInputError", "rank 1: 'lagging' of table 't3' does not fit its rows"),
        ("alone", "InvalidInputError", "the optimizer's state of table 't3' is given on ranks [1]"),
        ("full", "StorageFullError", "rank 1: no space left"),
    ],
)
@pytest.mark.parametrize("kind", ["Adam L2", "fused Adam"])
def test_what_one_rank_cannot_load_none_loads(worlds, kind, how, error, text):
    for (name, said), before, after in worlds(2).run(cannot_load, kind, how):
        assert name == error
        assert text in said
        assert_same(after, before)


def is_short_of_memory(rank, size, kind):
    parts = make(kind, size)
    model, optimizer, _ = parts
    steps(parts, rank, size, range(2))
    from tieredemb.tables import table_set

    real = table_set.available_memory_bytes
    if rank == 0:
        table_set.available_memory_bytes = lambda: 1500  # what it has of each fits, and t3 whole does not
    try:
        found = raised(optimizer.state_dict)
    finally:
        table_set.available_memory_bytes = real
    if kind in FOLLOWED:
        model.follow(optimizer, in_state_dict=False)
        assert set(optimizer.state_dict()["state"]) == {0}
    model.close()
    return found


@pytest.mark.parametrize("kind", ["Adam L2", "fused Adam"])
def test_a_state_that_memory_cannot_hold_is_raised_on_all(worlds, kind):
    for name, text in worlds(2).run(is_short_of_memory, kind):
        assert name == "StorageFullError"
        assert text.startswith("rank 0: table 't3' as one tensor")
        assert "save_checkpoint" in text


def test_a_part_of_no_rows_is_a_new_row():
    """Each rank has a row of a table, even if nobody requests it: it is caught up to the loaded step, as others are."""
    model = te.TieredEmbeddingBagCollection(TABLES[:1], optimizer=te.Adam(lr=0.1))
    step_of(model, batch_of(TABLES[:1], 0, 0, samples=uneven), weighted=False)
    entry = model.fused_optimizer.state_dict()["state"][0]
    for part, rows in ((TablePart(0, 0, 1, 1), entry["exp_avg"]), (TablePart(0, 1, 1, 1), torch.zeros(1, 4))):
        found = loaded_state(model.tables, model.fused_optimizer.config, 0, entry, part)
        assert found.step == 1
        words = torch.cat(found.words, dim=1)
        assert equal(words[:, :4], rows)
        assert words.shape == (1, 8)
