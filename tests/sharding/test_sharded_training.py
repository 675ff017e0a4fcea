"""A collection over several processes trains to the bits of one process that has the batches of all of them."""

from __future__ import annotations

import pytest
import torch
from devices import equal
from sharding.ranks import one_process, seven, sharded_run, tables_of, uneven
from training import NAMES, OPTIMIZERS

import tieredemb as te

STEPS = 3


def compare(world, tables, sharding, samples, *, weighted=False, steps=STEPS, shape=None, **keywords):
    alone, weights = one_process(world.size, tables, steps, samples, weighted, keywords, shape)
    found = world.run(sharded_run, tables, sharding, steps, samples, weighted, keywords, shape)
    for rank, (outputs, its_weights) in enumerate(found):
        for step, (out, gradient) in enumerate(outputs):
            assert equal(out, alone[rank][step][0]), (rank, step)
            assert (gradient is None) == (weighted in (False, "constant"))
            assert gradient is None or equal(gradient, alone[rank][step][1]), (rank, step)
        assert bool(its_weights) == (rank == 0)
    assert found[0][1].keys() == weights.keys()
    for name, weight in weights.items():
        assert equal(found[0][1][name], weight), name


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=NAMES)
def test_every_optimizer(worlds, optimizer):
    compare(worlds(3), tables_of(), "all kinds", seven, optimizer=optimizer, capacity=1.0)


@pytest.mark.parametrize("optimizer", [te.RowWiseAdagrad(lr=0.1), te.Adam(lr=0.05)], ids=["sparse", "dense"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_any_number_of_ranks(worlds, optimizer, size):
    compare(worlds(size), tables_of(), "all kinds", seven, optimizer=optimizer, capacity=1.0)


@pytest.mark.parametrize("sharding", ["rows", "tables", "copies", "chosen"])
@pytest.mark.parametrize("modes", [("sum",), ("mean",), ("max",), ("sum", "mean", "max")], ids="-".join)
def test_every_mode_and_sharding(worlds, sharding, modes):
    tables = tables_of(modes=modes, widths=(4, 8))
    compare(worlds(3), tables, sharding, uneven, optimizer=te.Adagrad(lr=0.1), capacity=1.0)


@pytest.mark.parametrize("capacity", [1, 5, 0.3, 1.0])
@pytest.mark.parametrize("size", [2, 3])
def test_any_capacity(worlds, size, capacity):
    compare(worlds(size), tables_of(), "all kinds", uneven, optimizer=te.Adam(lr=0.05), capacity=capacity, steps=6)


@pytest.mark.parametrize("modes", [("sum",)])
@pytest.mark.parametrize("sharding", ["rows", "tables", "copies"])
def test_weighted(worlds, sharding, modes):
    compare(
        worlds(2), tables_of(modes=modes), sharding, uneven, optimizer=te.Adagrad(lr=0.1), capacity=1.0, weighted=True
    )


@pytest.mark.parametrize(
    "keywords",
    [
        {"max_norm": 0.5, "optimizer": te.Adagrad(lr=0.1)},
        {"max_norm": 0.5, "norm_type": 1.0, "optimizer": te.Adam(lr=0.1)},
        {"scale_grad_by_freq": True, "optimizer": te.Adagrad(lr=0.1)},
        {"dtype": torch.bfloat16, "rounding": "stochastic", "optimizer": te.Adagrad(lr=0.1)},
        {"dtype": torch.float16, "rounding": "stochastic", "optimizer": te.Adam(lr=0.1), "output_dtype": torch.float32},
        {"dtype": torch.bfloat16, "optimizer": te.SGD(lr=0.1)},
        {"policy": te.LRU(), "optimizer": te.SGD(lr=0.1)},
        {"seed": 5, "optimizer": te.SparseAdam(lr=0.1)},
    ],
    ids=lambda keywords: "-".join(map(str, keywords)),
)
def test_every_option(worlds, keywords):
    compare(worlds(3), tables_of(modes=("sum", "mean")), "all kinds", uneven, capacity=0.5, **keywords)
