"""Configs and constructors refuse numbers that are none, or too large, by errors of the library's own."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import tieredemb as te
from tieredemb.cache.policy import scoring
from tieredemb.config import FLOAT32_MAX, MAX_BYTES, MAX_ROWS, MAX_WIDTH, parse_bytes, slots_for
from tieredemb.errors import ConfigError, TieredEmbError, shown, some_of
from tieredemb.lookup.options import LookupOptions
from tieredemb.storage.base import RowLayout
from tieredemb.tables.config import table_set_config
from tieredemb.tables.group import row_layout

HUGE = (2**63, 2**64, 2**70, 2**80, 10**400, 10**5000)  # the last has more digits than Python writes out
NINES = "9" * 400

NASTY = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([*HUGE, *(-number for number in HUGE), 2**31, 2**48, 2**48 + 1, 2**63 - 1]),
    st.floats(),
    st.sampled_from(["", "1", "512MiB", f"{NINES}B", f"{NINES}.{NINES}TiB", "auto", "sum"]),
    st.sampled_from([[], {}, (), (10**5000,), [10**5000], (0.9, 10**400), object(), np.float64(2.0), np.int64(3)]),
)


def table_config(**changed):
    return te.TableConfig(**{"name": "t", "num_embeddings": 10, "embedding_dim": 4} | changed)


def module_config(**changed):
    """All that a module checks before it opens its storage."""
    table_names = ("num_embeddings", "embedding_dim", "padding_idx", "mode", "init", "placement", "name")
    table = table_config(**{name: changed.pop(name) for name in table_names if name in changed})
    given = {"capacity": 2, "policy": None, "storage": None, "optimizer": None, "seed": 0} | changed
    config = table_set_config((table,), dtype=torch.float32, device="cpu", check_ids="deferred", **given)
    layout = row_layout(config, table.num_embeddings, table.embedding_dim)
    slots_for(config.capacity, rows=layout.rows, slot_bytes=layout.row_bytes)


CONSTRUCTORS = {
    te.Normal: ("mean", "std"),
    te.Uniform: ("low", "high"),
    te.LFU: ("half_life_batches",),
    te.SGD: ("lr", "weight_decay_on_use"),
    te.Adagrad: ("lr", "lr_decay", "initial_accumulator_value", "eps", "weight_decay_on_use"),
    te.Adam: ("lr", "betas", "eps", "weight_decay", "weight_decay_on_use"),
    te.Adamax: ("lr", "betas", "eps", "weight_decay"),
    te.NAdam: ("lr", "betas", "eps", "weight_decay", "momentum_decay"),
    te.RMSprop: ("lr", "alpha", "eps", "weight_decay", "momentum"),
    te.RowMeanAdagrad: ("lr", "lr_decay", "initial_accumulator_value", "eps"),
    te.RowWiseAdagrad: ("lr", "initial_accumulator_value", "eps"),
    te.SparseAdam: ("lr", "betas", "eps"),
    te.SparseLion: ("lr", "betas", "weight_decay"),
    LookupOptions: ("max_norm", "norm_type"),
    te.Pmem: ("max_bytes",),
    table_config: ("name", "num_embeddings", "embedding_dim", "mode", "padding_idx", "init", "placement"),
    module_config: ("num_embeddings", "embedding_dim", "padding_idx", "capacity", "policy", "storage", "seed"),
}
REQUIRED = {
    te.Uniform: {"low": 0.0, "high": 1.0},
    te.SGD: {"lr": 0.1},
    te.SparseLion: {"lr": 0.1},
    te.Pmem: {"directory": "rows"},
}


@pytest.mark.parametrize("make", CONSTRUCTORS, ids=lambda make: make.__name__)
@given(data=st.data())
def test_constructor_raises_only_errors_of_the_library(make, data):
    names = data.draw(st.sets(st.sampled_from(CONSTRUCTORS[make]), min_size=1))
    keywords = {name: data.draw(NASTY, label=name) for name in sorted(names)}
    with contextlib.suppress(TieredEmbError):
        make(**REQUIRED.get(make, {}) | keywords)


@pytest.mark.parametrize("number", HUGE, ids=shown)
@pytest.mark.parametrize(("make", "names"), CONSTRUCTORS.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_constructor_refuses_huge_integers_by_name(make, names, number):
    for name in set(names) - {"capacity", "betas"}:
        if name == "seed" and number < 2**64:
            continue
        if number < FLOAT32_MAX and make not in (te.LFU, te.Pmem, table_config, module_config):
            continue  # a float32 holds it
        with pytest.raises(ConfigError, match=name):
            make(**REQUIRED.get(make, {}) | {name: number})


@pytest.mark.parametrize("number", HUGE, ids=shown)
def test_capacity_beyond_the_rows_means_all_of_them(number):
    assert slots_for(number, rows=100, slot_bytes=64) == 100


@pytest.mark.parametrize("text", [f"{NINES}B", f"{NINES}.5TiB", f"{MAX_BYTES * 2}B", "4194305TiB"])
def test_size_beyond_any_memory_is_refused(text):
    with pytest.raises(ConfigError, match="beyond any memory; write a size of at most 4194304TiB"):
        parse_bytes(text)
    with pytest.raises(ConfigError, match="beyond any memory"):
        slots_for(text, rows=100, slot_bytes=64)
    with pytest.raises(ConfigError, match="beyond any memory"):
        te.Pmem("rows", max_bytes=text)
    assert parse_bytes("4194304TiB") == MAX_BYTES


def test_numbers_beyond_float32_are_refused():
    assert np.float32(FLOAT32_MAX) == np.finfo(np.float32).max == FLOAT32_MAX
    te.SGD(lr=FLOAT32_MAX)
    for value in (3.5e38, 1e300, math.inf, -math.inf, math.nan, 2**128):
        for make in (te.SGD, te.Adagrad, te.SparseAdam, te.SparseLion):
            with pytest.raises(ConfigError, match="lr must be a finite number"):
                make(lr=value)
        with pytest.raises(ConfigError, match="mean must be a finite number"):
            te.Normal(mean=value)


def test_half_life_without_end_counts_exactly():
    assert scoring(te.LFU(half_life_batches=1e400)).name == "count"
    with pytest.raises(ConfigError, match="not told apart"):
        te.LFU(half_life_batches=10**400)


def test_half_life_of_numpy_is_named_like_a_plain_one():
    assert scoring(te.LFU(half_life_batches=np.float64(300.0))).name == scoring(te.LFU()).name == "aged:300.0"


@pytest.mark.parametrize(("rows", "width"), [(2**48, 2**20), (2**48, 2**12), (2**40, MAX_WIDTH)])
@pytest.mark.parametrize("storage", ["host", "file"])
def test_table_beyond_all_storages_is_refused(tmp_path, rows, width, storage):
    tier = te.HostMemory() if storage == "host" else te.File(tmp_path / "rows.bin")
    with pytest.raises(ConfigError, match="lower num_embeddings or embedding_dim"):
        te.TieredEmbeddingBag(rows, width, capacity=1, storage=tier, device="cpu")
    assert not list(tmp_path.iterdir())


def test_layout_at_its_limits_is_accepted():
    assert RowLayout(rows=MAX_ROWS, width=0).state_bytes == 2**50
    row_bytes = 4 * (2**12 - 1) + 4
    assert RowLayout(rows=MAX_ROWS, width=2**12 - 1).row_bytes == row_bytes
    assert MAX_ROWS * row_bytes == MAX_BYTES
    with pytest.raises(ConfigError, match="too many"):
        RowLayout(rows=MAX_ROWS + 1, width=0)
    with pytest.raises(ConfigError, match="too many"):
        RowLayout(rows=MAX_ROWS, width=2**12)


def test_tables_of_one_width_share_the_keys_there_are():
    def tables(rows, width):
        return [table_config(name=f"t{i}", num_embeddings=rows, embedding_dim=width + (i == 3)) for i in range(4)]

    for rows in (2**47, 2**48):  # three tables of one width
        with pytest.raises(ConfigError, match=rf"tables of width 1 \('t0', 't1', 't2'\) have {3 * rows} rows together"):
            te.TieredEmbeddingBagCollection(tables(rows, 1), capacity=10, device="cpu")
    with pytest.raises(TieredEmbError, match=r"use File\(path\)|lower num_embeddings"):  # keys there are, memory not
        te.TieredEmbeddingBagCollection(tables(2**46, 1), capacity=10, device="cpu")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dtype": torch.float64}, "dtype of tables 'user', 'item' must be one of torch.float32, .*pass one of them"),
        ({"dtype": "float32"}, "dtype of tables 'user', 'item' must be one of torch.float32, .*got 'float32'"),
        ({"rounding": "stochastic"}, "those of tables 'user', 'item' are of float32; pass dtype=torch.bfloat16"),
        ({"capacity": "8B"}, "no row of each of 2 caches; .* raise the capacity"),
        ({"capacity": 2**34}, "slots for table 'item'; at most .* so lower the capacity"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_tables_that_cannot_be_are_named(change, said):
    tables = [
        table_config(name="user", embedding_dim=4),
        table_config(name="item", num_embeddings=2**34, embedding_dim=8),
    ]
    with pytest.raises(ConfigError, match=said):
        te.TieredEmbeddingBagCollection(tables, **{"capacity": 3, "device": "cpu"} | change)


def test_torchs_default_dtype_that_rows_lack_is_refused_with_the_way_out():
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(ConfigError, match=r"got torch.float64; pass one of them as dtype="):
            te.TieredEmbeddingBag(10, 4, device="cpu")
    finally:
        torch.set_default_dtype(torch.float32)


def test_prefetch_takes_any_depth_and_refuses_what_is_none():
    model = nn.Sequential(te.TieredEmbeddingBag(10, 4, device="cpu"))
    batches = [torch.tensor([[1, 2]]), torch.tensor([[3]])]
    assert len(list(te.prefetch(batches, model, depth=2**70))) == 2
    for depth in (-1, -(10**5000), True, 1.0, None, "1"):
        with pytest.raises(ConfigError, match="depth must be a number of batches"):
            te.prefetch(batches, model, depth=depth)


@pytest.mark.parametrize("max_ids", [-1, 2**31, 2**70, 10**5000, True, 1.5, "8"], ids=shown)
def test_graph_step_refuses_a_number_of_ids_that_no_batch_has(max_ids):
    with pytest.raises(TieredEmbError, match="max_ids must be a number of ids"):
        te.graph_step(lambda batch: None, max_ids=max_ids)


class Unwritable:
    def __repr__(self):
        raise ValueError("planted")


@pytest.mark.parametrize(
    "value", [10**5000, [10**5000], Unwritable(), "x" * 10**6, list(range(10**5))], ids=lambda v: type(v).__name__
)
def test_shown_is_short_and_never_fails(value):
    assert len(shown(value)) <= 101


@pytest.mark.parametrize("value", [0, -1, True, 2**255, 0.5, "text", None, (0.9, 0.999)])
def test_shown_is_the_repr_of_what_is_short(value):
    assert shown(value) == repr(value)


def test_shown_gives_the_size_of_an_integer_that_is_too_long():
    assert shown(10**5000) == "an integer of 16610 bits"
    assert shown(-(2**300)) == "an integer of 301 bits"


@pytest.mark.parametrize(
    ("names", "said"), [("a", "'a'"), ("abc", "'a', 'b', 'c'"), ("abcde", "'a', 'b', 'c' and 2 more")]
)
def test_some_of_names_the_first(names, said):
    assert some_of([*names]) == said


@pytest.mark.parametrize("name", ["SGD", "Adagrad", "SparseAdam", "Adam", "AdamW", "Adamax", "NAdam", "RMSprop"])
def test_hyperparameters_default_to_those_of_torch(name):
    theirs = inspect.signature(getattr(torch.optim, name)).parameters
    ours = {each.name: each.default for each in dataclasses.fields(getattr(te, name)) if each.name in theirs}
    ours.pop("lr" if name == "SGD" else "", None)  # which is to be given
    assert len(ours) > 2
    assert {option: theirs[option].default for option in ours} == ours
