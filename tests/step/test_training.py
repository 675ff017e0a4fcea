"""Contract 1: training equals torch, and is bit for bit the same at any capacity, tier and number of threads."""

from __future__ import annotations

import copy
import ctypes.util

import numpy as np
import pytest
import torch
from devices import assert_close, assert_same_bits, equal, from_numpy, given_on_devices, on_cpu
from hypothesis import strategies as st
from oracle import NEEDS_SPARSE_GRADIENTS, OracleCollection, integer_weights, torch_optimizer
from training import NAMES, OPTIMIZERS, bits, table_configs, train

import tieredemb as te


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=NAMES)
@pytest.mark.parametrize("modes", [("sum",), ("mean",), ("sum", "max", "mean")], ids=str)
def test_training_equals_torch(device, optimizer, modes):
    sparse = isinstance(optimizer, NEEDS_SPARSE_GRADIENTS)
    if sparse and "max" in modes:
        modes = ("sum", "mean")  # torch has no sparse gradient for max
    tables = table_configs(modes=modes, widths=(4, 5))
    ours = te.TieredEmbeddingBagCollection(tables, capacity=0.2, optimizer=optimizer)
    theirs = on_cpu(OracleCollection(tables, sparse=sparse).load_from(ours))
    reference = torch_optimizer(optimizer, theirs.parameters())
    mine = train(ours, tables, 12)
    expected = train(theirs, tables, 12, optimizer=reference)
    for a, b in zip(mine, expected, strict=True):
        assert_close(a, b, rtol=2e-5, atol=2e-5)
    for a, bag in zip(ours.state_dict().values(), theirs.bags, strict=True):
        assert_close(a, bag.weight.detach(), rtol=2e-5, atol=2e-5)


@given_on_devices(
    st.integers(1, 62),
    st.sampled_from([("sum",), ("max",), ("sum", "max")]),
    st.booleans(),
    st.sampled_from([(4,), (5, 8), (1,)]),
    cpu=25,
    cuda=12,
)
def test_integer_training_equals_torch_bit_for_bit(device, capacity, modes, weighted, widths):
    weighted = weighted and modes == ("sum",)
    tables = table_configs(modes=modes, widths=widths)
    ours = te.TieredEmbeddingBagCollection(tables, capacity=capacity, optimizer=te.SGD(lr=1.0))
    integer_weights(ours)
    theirs = on_cpu(OracleCollection(tables, sparse=False).load_from(ours))
    reference = torch.optim.SGD(theirs.parameters(), lr=1.0)
    mine = train(ours, tables, 5, integer=True, weighted=weighted)
    expected = train(theirs, tables, 5, integer=True, weighted=weighted, optimizer=reference)
    assert_same_bits(mine, expected)
    assert_same_bits(ours.state_dict().values(), [bag.weight for bag in theirs.bags])


# 16-bit rows of one optimizer without state, of a sparse and of a dense one: each takes kernels of its own
KINDS_OF_ROWS = [(optimizer, torch.float32) for optimizer in OPTIMIZERS] + [
    (OPTIMIZERS[NAMES.index(name)], dtype)
    for name in ("SGD", "SparseAdam", "AdamW weight_decay")
    for dtype in (torch.float16, torch.bfloat16)
]


@given_on_devices(
    st.integers(1, 61),
    st.sampled_from(KINDS_OF_ROWS),
    st.sampled_from([("sum",), ("mean", "sum", "max")]),
    st.sampled_from([te.LFU(), te.LRU(), te.LFU(half_life_batches=float("inf"), remember_evicted=False)]),
    cpu=60,
    cuda=30,
)
def test_any_capacity_policy_and_dtype_gives_the_bits_of_all_rows_resident(device, capacity, rows, modes, policy):
    optimizer, dtype = rows
    tables = table_configs(modes=modes, widths=(4, 5))
    runs = []
    for slots, which in ((1.0, te.LFU()), (capacity, policy)):
        model = te.TieredEmbeddingBagCollection(tables, capacity=slots, optimizer=optimizer, dtype=dtype, policy=which)
        runs.append([*train(model, tables, 6), *bits(model)])
    assert_same_bits(*runs)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=NAMES)
def test_resident_tables_give_the_bits_of_cached_ones(device, optimizer):
    runs = []
    for placement, capacity in (("cached", 5), ("resident", 1.0), ("cached", 1.0)):
        tables = table_configs(widths=(4, 5), modes=("sum", "mean", "max"), placement=placement)
        model = te.TieredEmbeddingBagCollection(tables, capacity=capacity, optimizer=optimizer)
        runs.append([*train(model, tables, 6), *bits(model)])
    assert_same_bits(runs[1], runs[0])
    assert_same_bits(runs[2], runs[0])


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=NAMES)
def test_every_tier_gives_the_same_bits(device, tmp_path, optimizer):
    tables = table_configs(widths=(4, 8))
    storages = [None, te.HostMemory(), te.File(str(tmp_path / "rows"))]
    if ctypes.util.find_library("memkind"):
        storages.append(te.Pmem(str(tmp_path)))
    runs = []
    for storage in storages:
        model = te.TieredEmbeddingBagCollection(tables, capacity=5, optimizer=optimizer, storage=storage)
        runs.append([*train(model, tables, 8), *bits(model)])
        model.close()
    for run in runs[1:]:
        assert_same_bits(run, runs[0])


def test_results_do_not_depend_on_the_number_of_threads():
    tables = [te.TableConfig(name=str(n), num_embeddings=n, embedding_dim=32) for n in (3, 2000, 50_000)]
    before, runs = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            model = te.TieredEmbeddingBagCollection(tables, capacity=0.05, optimizer=te.RowWiseAdagrad(lr=0.1))
            runs.append([*train(model, tables, 3, batch=4000), *bits(model)])
    finally:
        torch.set_num_threads(before)
    assert_same_bits(runs[1], runs[0])
    assert_same_bits(runs[2], runs[0])


def test_long_segments_sum_in_chunks_from_the_first_occurrence(device):
    """A row's 1,000 gradients are summed in chunks of 64, whatever shares the batch with it."""
    rng = np.random.default_rng(0)
    gradients = (rng.standard_normal(1000) * 10.0 ** rng.integers(-4, 5, 1000)).astype(np.float32)
    total = np.float32(0)
    for start in range(0, 1000, 64):
        part = np.float32(0)
        for value in gradients[start : start + 64]:
            part += value
        total += part
    for others in (0, 1, 77):
        bag = te.TieredEmbeddingBag(100, 1, mode="sum", capacity=5, optimizer=te.SGD(lr=1.0))
        bag.load_state_dict({"weight": torch.zeros(100, 1)})
        ids = torch.cat([torch.arange(1, others + 1), torch.zeros(1000, dtype=torch.int64)])
        upstream = torch.cat([torch.ones(others), from_numpy(gradients)])[:, None]
        bag(ids, torch.arange(len(ids))).backward(upstream)
        assert bag.state_dict()["weight"][0].item() == -total


def test_half_precision_rows_are_rounded_once_an_update(device):
    for dtype in (torch.float16, torch.bfloat16):
        bag = te.TieredEmbeddingBag(10, 1, mode="sum", capacity=1, optimizer=te.SGD(lr=1.0), dtype=dtype)
        bag.load_state_dict({"weight": torch.full((10, 1), 256.0, dtype=dtype)})
        ids = torch.zeros(40, dtype=torch.int64)
        # forty steps of 1/16 vanish one by one in either format, summed they do not
        bag(ids, torch.arange(40)).backward(torch.full((40, 1), 1 / 16, dtype=dtype))
        assert bag.state_dict()["weight"][0].item() == torch.tensor(256 - 40 / 16).to(dtype).item()


def test_initial_rows_depend_on_seed_table_and_id_alone(device):
    def rows(seed, capacity, dtype=torch.float32, names=("a", "b")):
        tables = [te.TableConfig(name=n, num_embeddings=50, embedding_dim=6) for n in names]
        model = te.TieredEmbeddingBagCollection(tables, capacity=capacity, seed=seed, dtype=dtype)
        with torch.no_grad():
            model(torch.tensor([7, 3, 3, 9]), torch.tensor([0, 2, 4]))
        return list(model.state_dict().values())

    assert_same_bits(rows(3, 2), rows(3, 1.0))
    assert not equal(rows(3, 2)[0], rows(4, 2)[0])
    assert not equal(rows(3, 2)[0], rows(3, 2)[1])
    assert equal(rows(3, 2, torch.bfloat16)[0], rows(3, 2)[0].bfloat16())
    assert equal(rows(3, 2, names=("a",) * 1 + ("c",))[0], rows(3, 2)[0])


def test_initial_values_are_distributed_as_asked(device):
    normal = te.TieredEmbedding(20_000, 32, init=te.Normal(mean=1.0, std=0.5)).state_dict()["weight"].double()
    assert abs(normal.mean() - 1.0) < 0.005
    assert abs(normal.std() - 0.5) < 0.005
    assert abs(((normal - 1) / 0.5).pow(4).mean() - 3) < 0.05
    uniform = te.TieredEmbedding(20_000, 32, init=te.Uniform(low=-2.0, high=1.0)).state_dict()["weight"].double()
    assert uniform.min() >= -2
    assert uniform.max() <= 1
    assert abs(uniform.mean() + 0.5) < 0.01
    assert abs(uniform.var() - 9 / 12) < 0.01
    padded = te.TieredEmbeddingBag(10, 4, padding_idx=-2).state_dict()["weight"]
    assert padded[8].tolist() == [0.0] * 4
    assert padded[[0, 9]].all()


def test_initial_bits_are_pinned(device):
    """A checkpoint holds touched rows alone: the others must come out the same in every version, on every device."""
    weight = te.TieredEmbedding(5, 4, seed=7).state_dict()["weight"]
    pinned = "0x1.e20a320000000p-3 -0x1.1376720000000p-1 0x1.e4e7d80000000p-1 -0x1.b186860000000p-4"
    assert [value.hex() for value in weight[1].tolist()] == pinned.split()
    looked_up = te.TieredEmbedding(5, 4, seed=7, capacity=1)(torch.tensor([1]))
    assert [value.hex() for value in looked_up[0].tolist()] == pinned.split()


def test_deepcopy_trains_on_its_own(device):
    tables = table_configs()
    first = te.TieredEmbeddingBagCollection(tables, capacity=5, optimizer=te.SparseAdam(lr=0.1))
    train(first, tables, 3)
    second = copy.deepcopy(first)
    expected = [*train(first, tables, 4), *bits(first)]
    assert_same_bits([*train(second, tables, 4), *bits(second)], expected)


def test_sgd_rounds_an_update_once(device):
    """A fused multiply-add: the product of two float32 is exact in float64."""
    rng = np.random.default_rng(3)
    weight, gradient = rng.standard_normal((2, 50, 8)).astype(np.float32)
    bag = te.TieredEmbeddingBag(50, 8, mode="sum", capacity=3, optimizer=te.SGD(lr=0.1))
    bag.load_state_dict({"weight": torch.from_numpy(weight)})
    bag(torch.arange(50), torch.arange(50)).backward(from_numpy(gradient))
    expected = (weight.astype(np.float64) - np.float64(np.float32(0.1)) * gradient).astype(np.float32)
    assert np.array_equal(bag.state_dict()["weight"].cpu().numpy(), expected)
    assert not np.array_equal(expected, weight - np.float32(0.1) * gradient)
