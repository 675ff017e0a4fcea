"""Contract 1 where batches are planned ahead and steps are captured: any depth, with and without a graph, at any
capacity and on every tier, gives the bits of all rows resident in weights, state and outputs, and of whole tables in
integers. Afterwards no row is locked."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from devices import assert_same_bits, given_on_devices
from hypothesis import strategies as st
from oracle import integer_weights
from training import OPTIMIZERS, bits
from training_scripts import Trainee, Turn, WholeTables, assert_rows_can_leave

import tieredemb as te
from tieredemb.errors import MissingDependencyError

pytestmark = pytest.mark.filterwarnings("error:prefetch")  # plans that nothing uses would prove nothing

ROWS, WIDTH, SAMPLES = (27, 13), 4, 2
KEYS = sum(ROWS)
TIERS = {  # the default is unified memory on a GPU, and host memory is pinned there
    "default": lambda path: None,
    "host": lambda path: te.HostMemory(),
    "file": lambda path: te.File(str(path)),
    "pmem": lambda path: te.Pmem(str(path.parent)),
}
STAGED = ("file", "pmem")  # by the host, which no graph can hold


def collection(**keywords):
    tables = [
        te.TableConfig(name=name, num_embeddings=rows, embedding_dim=WIDTH, padding_idx=padding, placement="cached")
        for name, rows, padding in zip("ab", ROWS, (None, 0), strict=True)
    ]
    model = te.TieredEmbeddingBagCollection(tables, **keywords)
    integer_weights(model)
    return model


def turn(keys, number):
    """Trains the rows `keys` of both tables, 0 … KEYS - 1, in their order: the first half of each in the first bag."""
    ids = [[key for key in keys if key < ROWS[0]], [key - ROWS[0] for key in keys if key >= ROWS[0]]]
    sizes = [size for table in ids for size in (len(table) // 2, len(table) - len(table) // 2)]
    upstream = np.random.default_rng(number).integers(-1, 2, (SAMPLES, 2 * WIDTH)).astype(np.float32)
    flat = torch.from_numpy(np.array([row for table in ids for row in table], np.int64))
    offsets = torch.from_numpy(np.cumsum([0, *sizes], dtype=np.int64))
    return Turn([(flat, offsets, None)], torch.from_numpy(upstream))


def check_exact(batches, *, depth, graphed, optimizer, told=False, **keywords):
    """Trains on batches of keys in two ways, and compares with whole tables where the optimizer is that of integers;
    returns the counters of the cache."""
    script = [turn(keys, number) for number, keys in enumerate(batches)]
    plain = Trainee(collection(capacity=1.0, optimizer=optimizer))
    whole = WholeTables(plain.model.tables.config.tables, plain.model.state_dict().values())
    plain.play(script)
    if optimizer == te.SGD(lr=1.0):
        whole.play(script)
        assert_same_bits(plain.seen, whole.seen)
        assert_same_bits(plain.model.state_dict().values(), (torch.from_numpy(w).float() for w in whole.weights))
    trainee = Trainee(collection(optimizer=optimizer, **keywords))
    trainee.play(script, depth=depth, graphed=graphed, told=told)
    stats = trainee.model.stats()
    assert_same_bits(trainee.seen, plain.seen)
    assert_same_bits(bits(trainee.model), bits(plain.model))
    assert_rows_can_leave(trainee.model)
    assert_same_bits(bits(trainee.model), bits(plain.model))  # what left was written back
    trainee.model.close()
    return stats


@pytest.mark.parametrize("tier", TIERS)
def test_any_depth_and_capacity_with_and_without_a_graph_is_exact(device, tmp_path, tier):
    files = (tmp_path / f"rows{number}" for number in itertools.count())
    try:
        collection(storage=TIERS[tier](next(files))).close()
    except MissingDependencyError as error:
        pytest.skip(str(error))

    @given_on_devices(
        st.sampled_from([0, 1, 3]),
        st.just(False) if device == "cuda" and tier in STAGED else st.booleans(),
        st.booleans(),
        st.sampled_from([1, 2, 3, 5, 9, 20, KEYS - 1, KEYS]),
        st.sampled_from([te.SGD(lr=1.0), *OPTIMIZERS]),
        st.lists(st.lists(st.integers(0, KEYS - 1), max_size=14), max_size=9),
        cpu=50,
        cuda=12,
    )
    def check(device, depth, graphed, told, capacity, optimizer, batches):
        check_exact(
            batches,
            depth=depth,
            graphed=graphed,
            told=told,
            capacity=capacity,
            optimizer=optimizer,
            storage=TIERS[tier](next(files)),
        )

    check(device)


# --- hard cases -------------------------------------------------------------------------------------------------------

ALL = list(range(KEYS))


def beyond(depth):
    """Each batch has more rows than there are slots, so that the next one looks up rows while they are updated without
    a slot, and misses them."""
    return 3, [ALL[:6], ALL[5::-1], [0, 3, 5, 30], [30, 31, 5, 4]] * 3, lambda stats: stats.rows_overflow > 0


def dirty(depth):
    """The slots are those of the batches in flight: a batch planned ahead takes those of the last one, just updated."""
    batches = [ALL[n : n + 2] for n in range(0, 24, 2)] * 2
    return 2 * (depth + 1), batches, lambda stats: stats.rows_written_back >= 24


def same(depth):
    return 4, [[1, 2, 30, 2]] * 9, lambda stats: stats.misses == 4


def same_and_more(depth):
    """Rows of every batch, some of them without a slot: they get one as soon as no batch in flight uses them there."""
    return 2, [[1, 2, 30, 4 + n] for n in range(9)], lambda stats: stats.rows_overflow > 0


def overflowing(depth):
    small, batch = [3, 35], ALL + ALL[::3]
    return 5, [small, batch, small, batch, small, small, small, batch, batch], lambda stats: stats.rows_overflow >= 35


def empty(depth):
    return 3, [[], [1, 2], [], [], [2, 30], [], ALL[:9], [], []], lambda stats: stats.lookups >= 13


def all_empty(depth):
    return 3, [[]] * 6, lambda stats: stats.lookups == 0


def turning(depth):
    """Large and small batches in turns: what was used without a slot comes to have one, and back."""
    return 8, [ALL[: 20 if n % 2 else 4] for n in range(12)], lambda stats: stats.rows_overflow > 0


CASES = {case.__name__: case for case in (beyond, dirty, same, same_and_more, overflowing, empty, all_empty, turning)}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("graphed", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_hard_cases_are_exact(device, depth, graphed, case):
    capacity, batches, holds = CASES[case](depth)
    for optimizer in (te.SGD(lr=1.0), te.SparseAdam(lr=0.1)):
        stats = check_exact(batches, depth=depth, graphed=graphed, optimizer=optimizer, told=True, capacity=capacity)
        assert holds(stats), stats  # else it was no such case


@pytest.mark.parametrize("case", ["beyond", "dirty", "overflowing"])
@pytest.mark.parametrize("tier", [tier for tier in TIERS if tier != "default"])
@pytest.mark.parametrize("depth", [1, 3])
def test_hard_cases_are_exact_on_every_tier(device, tmp_path, depth, tier, case):
    capacity, batches, holds = CASES[case](depth)
    keywords = {"capacity": capacity, "storage": TIERS[tier](tmp_path / "rows")}
    try:
        stats = check_exact(batches, depth=depth, graphed=False, optimizer=te.Adagrad(lr=0.5), told=True, **keywords)
    except MissingDependencyError as error:
        pytest.skip(str(error))
    assert holds(stats), stats


@pytest.mark.parametrize("graphed", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("batches", [0, 1, 2, 7])
def test_a_depth_larger_than_the_data_is_exact(device, graphed, batches):
    for told in (False, True):
        keywords = {"graphed": graphed, "told": told, "capacity": 3, "optimizer": te.SGD(lr=1.0)}
        check_exact([ALL[2 * n : 2 * n + 9] for n in range(batches)], depth=20, **keywords)
