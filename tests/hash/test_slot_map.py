"""What finds the slots of keys, a map or an index of all rows, against a dict."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tieredemb.hash.row_index_cpu import RowIndex
from tieredemb.hash.slot_map_cpu import SlotMap
from tieredemb.kernels.constants import NOT_FOUND


def find(index, keys):
    return index.find(np.array(keys, np.int64)).tolist()


@given(
    st.booleans(),
    st.integers(1, 40),
    st.lists(st.tuples(st.sampled_from(["insert", "erase"]), st.sets(st.integers(0, 60), min_size=1)), max_size=30),
)
def test_inserts_and_erases_agree_with_a_dict(is_map, slots, steps):
    index, expected = SlotMap(slots) if is_map else RowIndex(70), {}
    for verb, keys in steps:
        if verb == "insert":
            new = [key for key in keys if key not in expected][: slots - len(expected)]
            free = [slot for slot in range(slots) if slot not in expected.values()][: len(new)]
            index.insert(np.array(new, np.int64), np.array(free, np.int32))
            expected |= dict(zip(new, free, strict=True))
        else:
            gone = [key for key in keys if key in expected]
            index.erase(np.array(gone, np.int64))
            for key in gone:
                del expected[key]
        assert find(index, range(-3, 70)) == [expected.get(key, NOT_FOUND) for key in range(-3, 70)]


def test_slot_map_keeps_probe_chains_that_wrap_around_the_end():
    for seed in range(50):
        rng = np.random.default_rng(seed)
        keys = rng.choice(10_000, 8, replace=False).astype(np.int64)
        index = SlotMap(8)
        index.insert(keys, np.arange(8, dtype=np.int32))
        index.erase(keys[::2])
        assert find(index, keys) == [NOT_FOUND if i % 2 == 0 else i for i in range(8)]


def test_slot_map_grows_with_its_content():
    index = SlotMap(2)
    index.insert(np.array([5, 9]), np.array([0, 1], np.int32))
    index.grow(1000)
    index.insert(np.arange(100, 1000), np.arange(2, 902, dtype=np.int32))
    assert find(index, [5, 9, 100, 999, 50]) == [0, 1, 2, 901, NOT_FOUND]


@pytest.mark.parametrize("kind", [SlotMap, RowIndex])
def test_finds_are_the_same_on_any_number_of_threads(kind):
    keys = np.random.default_rng(0).permutation(200_000).astype(np.int64)
    index = kind(len(keys))
    index.insert(keys[:100_000], np.arange(100_000, dtype=np.int32))
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(find(index, keys))
    finally:
        torch.set_num_threads(before)
    assert results[0] == results[1] == results[2] == [*range(100_000), *([NOT_FOUND] * 100_000)]


@pytest.mark.parametrize("key", [0, 2**31, 2**40 + 1, 2**48 - 1])
def test_slot_map_holds_large_keys(key):
    index = SlotMap(1)
    index.insert(np.array([key]), np.array([0], np.int32))
    assert find(index, [key, key ^ 1]) == [0, NOT_FOUND]
