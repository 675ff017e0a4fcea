"""References that know the future: hand-counted cases, and Belady against a search over all caches."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tieredemb.cache_hit.references import belady, best_static, uses_of
from tieredemb.cache_hit.traces import Trace


def _trace(*ids: int) -> Trace:
    return Trace(name="t", ids=np.array(ids, np.int64), rows=max(ids) + 1)


def test_uses_name_their_next_use() -> None:
    uses = uses_of(_trace(2, 0, 2, 1, 0, 0, 2), 3)  # batches {0, 2}, {0, 1}, {2}
    assert uses.bounds.tolist() == [0, 2, 4, 5]
    assert uses.rows.tolist() == [2, 0, 1, 0, 2]
    assert uses.occurrences.tolist() == [2, 1, 1, 2, 1]
    assert uses.next_use.tolist() == [4, 3, 5, 5, 5]


def test_belady_keeps_the_row_needed_first() -> None:
    # After batch 0, rows 0 and 1 compete for one slot: row 1 comes first, so row 0 is fetched again later.
    uses = uses_of(_trace(0, 1, 1, 1, 0, 0), 2)
    assert belady(uses, 1, 0) == (2, 3)
    assert belady(uses, 2, 0) == (4, 2)
    assert belady(uses, 2, 1) == (4, 0)


def test_belady_bypasses_a_row_that_is_not_used_again() -> None:
    assert belady(uses_of(_trace(0, 1, 0, 2, 0, 3, 0), 1), 1, 0) == (3, 4)


def test_belady_counts_every_occurrence_of_a_hit() -> None:
    assert belady(uses_of(_trace(0, 1, 0, 0), 2), 1, 0) == (2, 2)


def test_belady_of_all_rows_misses_each_row_once() -> None:
    ids = np.random.default_rng(0).integers(0, 50, 1000)
    trace = Trace(name="t", ids=ids, rows=50)
    assert belady(uses_of(trace, 10), 50, 0)[1] == len(np.unique(ids))


def _fewest_fetches(batches: list[set[int]], capacity: int) -> int:
    """Over every choice, after each batch, of what is held among the rows held before and the batch's."""
    fetches: dict[frozenset[int], int] = {frozenset(): 0}
    for batch in batches:
        following: dict[frozenset[int], int] = {}
        for held, count in fetches.items():
            now = count + len(batch - held)
            for size in range(capacity + 1):
                for kept in map(frozenset, combinations(sorted(held | batch), size)):
                    following[kept] = min(now, following.get(kept, now))
        fetches = following
    return min(fetches.values())


@settings(deadline=None, max_examples=150)
@given(
    ids=st.lists(st.integers(0, 5), min_size=1, max_size=18),
    batch_size=st.integers(1, 4),
    capacity=st.integers(1, 3),
)
def test_belady_fetches_the_fewest_rows_possible(ids: list[int], batch_size: int, capacity: int) -> None:
    batches = [set(ids[start : start + batch_size]) for start in range(0, len(ids), batch_size)]
    assert belady(uses_of(_trace(*ids), batch_size), capacity, 0)[1] == _fewest_fetches(batches, capacity)


@pytest.mark.parametrize(("capacity", "first", "hits"), [(1, 0, 4), (2, 0, 7), (1, 4, 3), (2, 4, 5), (9, 4, 6)])
def test_best_static_counts_the_most_used_rows(capacity: int, first: int, hits: int) -> None:
    # From access 4 on: row 3 three times, row 0 twice, row 2 once.
    assert best_static(_trace(0, 0, 1, 2, 3, 3, 0, 3, 2, 0), capacity, first) == hits
