"""Bags that a GPU finds, against their CPU twin. Skips without a GPU; TIEREDEMB_REQUIRE_CUDA=1 fails."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tieredemb as te
from tieredemb.kernels.constants import DROPPED, MOST_JOINED
from tieredemb.lookup.bags import KeySpace
from tieredemb.lookup.bags_cpu import make_bags
from tieredemb.lookup.device_bags import (
    DeviceBags,
    DeviceKeySpace,
    Edges,
    Joined,
    find_device_bags,
    join_bags,
    kind_of,
    new_device_bags,
    new_faults,
)

pytestmark = pytest.mark.usefixtures("gpu")

SHAPES = {  # tables, samples, ids of a bag
    "one id": (26, 256, lambda rng, bags: np.ones(bags, np.int64)),
    "several ids": (9, 500, lambda rng, bags: rng.integers(0, 5, bags)),
    "mostly empty": (5, 30_000, lambda rng, bags: (rng.random(bags) < 0.01).astype(np.int64)),  # thousands an id
    "two long bags far apart": (4, 20_000, lambda rng, bags: 700 * np.isin(np.arange(bags), [3, bags - 2])),
    "one sample": (300, 1, lambda rng, bags: rng.integers(0, 3, bags)),
    "no ids": (3, 5, lambda rng, bags: np.zeros(bags, np.int64)),
}


def a_batch(shape):
    """Tables, samples, ids and edges; some ids are the padding of their table, which is 0."""
    rng = np.random.default_rng(0)
    count, samples, sizes = SHAPES[shape]
    tables = [
        te.TableConfig(name=f"t{t}", num_embeddings=3 + t % 50, embedding_dim=4, padding_idx=0 if t % 3 else None)
        for t in range(count)
    ]
    edges = np.concatenate([[0], np.cumsum(sizes(rng, count * samples))])
    table = np.searchsorted(edges, np.arange(edges[-1]), side="right") - 1
    rows = np.array([each.num_embeddings for each in tables])[table // samples]
    return tables, samples, (rng.random(len(rows)) * rows).astype(np.int64), edges


def found(tables, chosen, resident, samples, ids, edges, places=None, room=0):
    """Bags of the `chosen` tables, and the three words of a fault. `room`: for more ids than there are."""
    device = torch.get_default_device()
    space = DeviceKeySpace(KeySpace(tables, chosen, [0] * len(tables)), resident, device)
    bags = new_device_bags(len(ids) + room, space, samples, is_all=space.space.is_all(places))
    words = new_faults(1, device).zero_()
    given = Edges(torch.from_numpy(edges).to(device), len(edges), exact=True, ids=len(ids))
    fault, report, ids = words[:3], words[3:].data_ptr(), torch.from_numpy(ids).to(device)
    find_device_bags(bags, ids, given, space, fault, report, places, padding_is_dropped=True)
    return bags, words


def expected(tables, chosen, resident, samples, ids, edges, places=None):
    """The same by the CPU twin: it has no homes, and no place for ids of other tables."""
    space = KeySpace(tables, chosen, [0] * len(tables))
    bags = make_bags(ids, edges, space, samples, padding_is_dropped=True, places=places)
    n, slot = len(bags.keys), np.array(resident)[bags.feature]
    keys, homes, bag = np.full(len(ids), -1), np.full(len(ids), DROPPED, np.int32), np.zeros(len(ids), np.int32)
    keys[:n] = np.where(slot < 0, bags.keys, -1)
    homes[:n] = np.where(bags.keys < 0, DROPPED, np.where(slot < 0, -1, slot + bags.keys - space.first[bags.feature]))
    bag[:n] = bags.feature * samples + bags.sample
    position = None
    if bags.position is not None:
        position = np.zeros(len(ids), np.int64)
        position[:n] = bags.position
    tensors = (
        None if array is None else torch.from_numpy(array) for array in (keys, homes, bags.offsets, bag, position)
    )
    return DeviceBags(*tensors, batch=samples)


@pytest.mark.parametrize("some", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_bags_are_those_of_the_cpu(shape, some):
    tables, *batch = a_batch(shape)
    chosen = list(range(len(tables)))[1::2] if some else list(range(len(tables)))
    resident = [100 * j if j % 4 == 1 else -1 for j in range(len(chosen))]
    bags, words = found(tables, chosen, resident, *batch)
    assert not words.any()
    for name, value in vars(expected(tables, chosen, resident, *batch)).items():
        mine = getattr(bags, name)
        assert torch.equal(mine.cpu(), value) if isinstance(value, torch.Tensor) else mine == value, name


@pytest.mark.parametrize("shape", ["one id", "several ids", "mostly empty", "one sample"])
def test_bad_ids_are_dropped_and_the_first_is_reported(shape):
    tables, samples, ids, edges = a_batch(shape)
    everything, nowhere = list(range(len(tables))), [-1] * len(tables)
    right, _ = found(tables, everything, nowhere, samples, ids, edges)
    bad = np.random.default_rng(1).permutation(len(ids))[:20]
    ids[bad] = np.resize([-1, 60, 2**31, 2**40, -(2**62)], 20)
    bags, words = found(tables, everything, nowhere, samples, ids, edges)
    assert (bags.homes[bad] == DROPPED).all()
    assert (bags.keys[bad] == -1).all()
    good = np.setdiff1d(np.arange(len(ids)), bad)
    assert torch.equal(bags.homes[good], right.homes[good])
    assert torch.equal(bags.keys[good], right.keys[good])
    assert torch.equal(bags.bag, right.bag)
    table = (np.searchsorted(edges, bad.min(), side="right") - 1) // samples
    assert words[3:8].tolist() == [1, 1, table, bad.min(), ids[bad.min()]]


@pytest.mark.parametrize("value", [-1, 3, 2**31, 2**40, -(2**62)])
@pytest.mark.parametrize("shape", ["one id", "several ids", "mostly empty"])
def test_after_a_bad_offset_there_are_no_bags(shape, value):
    tables, samples, ids, edges = a_batch(shape)
    edges[len(edges) // 2] = value
    everything, nowhere = list(range(len(tables))), [-1] * len(tables)
    for chosen in (everything, everything[::2]):
        bags, words = found(tables, chosen, nowhere[: len(chosen)], samples, ids, edges)
        assert (bags.homes == DROPPED).all()
        assert (bags.keys == -1).all()
        assert not bags.offsets.any()
        assert words[3:5].tolist() == [1, 2]


@pytest.mark.parametrize("room", [1, 255, 256, 5000])
@pytest.mark.parametrize("some", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_room_beyond_the_ids_is_dropped(shape, some, room):
    tables, *batch = a_batch(shape)
    chosen = list(range(len(tables)))[1::2] if some else list(range(len(tables)))
    resident = [100 * j if j % 4 == 1 else -1 for j in range(len(chosen))]
    bags, words = found(tables, chosen, resident, *batch, room=room)
    exact, _ = found(tables, chosen, resident, *batch)
    assert not words.any()
    n = len(exact.homes)
    for name, value in vars(exact).items():
        mine = getattr(bags, name)
        if isinstance(value, torch.Tensor):
            assert torch.equal(mine[:n] if len(value) == n and name != "offsets" else mine, value), name
    assert (bags.homes[n:] == DROPPED).all()
    assert (bags.keys[n:] == -1).all()
    assert not bags.bag[n:].any()


@pytest.mark.parametrize("features", [1, 3, MOST_JOINED, 2 * MOST_JOINED + 3])
@pytest.mark.parametrize("pools", [1, 2])
def test_inputs_that_are_joined(features, pools):
    """Of any number of ids, in memory of any kind, of bags of one length or with offsets, one of them wrong."""
    random, batch = np.random.default_rng(features), 5
    ids, offsets, strides, kinds, counts, edges = [], [], [], [], [], []
    pool = [min(pools - 1, f * pools // features) for f in range(features)]
    for f in range(features):
        lengths = np.full(batch, f % 4) if f % 3 == 0 else random.integers(0, 4, batch)
        starts = np.concatenate([[0], lengths.cumsum()])
        own, is_32 = random.integers(0, 99, starts[-1]), f % 2 == 1
        dtype = torch.int32 if is_32 else torch.int64
        stride = 1 + f % 3
        wide = torch.zeros((max(1, len(own)), stride), dtype=dtype)
        wide[: len(own), 0] = torch.tensor(own)
        ids.append(wide[: len(own), 0])
        if f == 1:
            starts = starts + 7  # the first bag does not begin at 0
        offsets.append(None if f % 3 == 0 else torch.tensor(starts[:-1], dtype=dtype))
        is_last = f == features - 1 or pool[f + 1] != pool[f]
        kinds.append(kind_of(dtype, None if f % 3 == 0 else dtype, f % 4 if f % 3 == 0 else -1, is_last=is_last))
        strides.append(stride)
        counts.append(len(own))
        edges.append(starts)
    first = np.concatenate([[0], np.cumsum(counts)])
    before = [int(first[f] - first[pool.index(pool[f])]) for f in range(features)]
    joined = Joined(
        batch, strides, first[:-1].tolist(), counts, before, [batch * f + pool[f] for f in range(features)], kinds
    )
    together, found_edges = join_bags(ids, offsets, joined, features * batch + pool[-1] + 1)
    assert torch.equal(together, torch.cat([each.to(torch.int64) for each in ids]))
    expected = []
    for f in range(features):
        expected += [before[f] + int(edge) for edge in edges[f][:-1]]
        if f == 1:
            expected[-batch] = -(2**61) + 7
        if f == features - 1 or pool[f + 1] != pool[f]:
            expected.append(before[f] + counts[f])
    assert found_edges.tolist() == expected
    alone, none = join_bags(ids, offsets, joined, 0)
    assert none is None
    assert torch.equal(alone, together)
