"""The command's cache against the one that modules use, and against a dict that spells the policies out.

The dict is exact up to ties: of rows of equal (score, last batch) any may go, so that rates agree closely, not to
the last hit.
"""

from __future__ import annotations

import heapq
import math
from types import SimpleNamespace

import numpy as np
import pytest

from tieredemb.cache.host.cache import HostCache
from tieredemb.cache_hit.generate import ZipfTrace, generate
from tieredemb.cache_hit.options import parse_policy
from tieredemb.cache_hit.run import Contender, capacity_for, contenders
from tieredemb.cache_hit.traces import Trace
from tieredemb.cache_hit.workload import Workload
from tieredemb.config import LFU, LRU, Policy
from tieredemb.errors import ConfigError
from tieredemb.storage.base import RowLayout
from tieredemb.storage.host import HostMemory

# the choice among equal rows moves the hit rate: a cache that forgets makes any, the dict the oldest (0.0036 seen)
TIES, TIES_FORGETTING = 0.0025, 0.005


def _used(score: float | None, batch: int, policy: Policy) -> float:
    """The score after a use in `batch`: log2(2^s + 2^(t/h)), a count, or the clock."""
    if isinstance(policy, LRU):
        return batch
    if math.isinf(policy.half_life_batches):
        return (score or 0) + 1
    now = batch / policy.half_life_batches
    return now if score is None else max(score, now) + math.log2(1 + 2 ** -abs(score - now))


def hits_of_dict(ids: np.ndarray, batch_size: int, slots: int, policy: Policy, window: int, first_batch: int) -> int:
    """Hits from `first_batch` on of a cache that is a set of rows and a dict of their scores."""
    resident: set[int] = set()
    scores: dict[int, float] = {}
    last: dict[int, int] = {}
    hits = 0
    for batch, start in enumerate(range(0, len(ids), batch_size)):
        rows = ids[start : start + batch_size].tolist()
        if batch >= first_batch:
            hits += sum(row in resident for row in rows)
        unique = list(dict.fromkeys(rows))
        missed = [row for row in unique if row not in resident]
        if isinstance(policy, LFU) and not policy.remember_evicted:
            for row in missed:
                scores.pop(row, None)
        for row in unique:
            scores[row] = _used(scores.get(row), batch, policy)
            last[row] = batch
        unlocked = (row for row in resident if last[row] < batch - window)
        short = len(missed) - (slots - len(resident))
        if short > 0:
            resident -= set(heapq.nsmallest(short, unlocked, key=lambda row: (scores[row], last[row])))
        resident |= set(missed[: slots - len(resident)])
    return hits


def counts_of_cache(workload: Workload, capacity: int, policy: Policy) -> tuple[int, int | None, int | None]:
    """Hits, fetched rows and evictions of the measured batches, of the cache that modules plan by."""
    ids, size = workload.trace.ids, workload.batch_size
    cold = HostMemory().open(RowLayout(rows=workload.trace.rows, width=0), name="", identity={})
    cache = HostCache(cold, slots=capacity, policy=policy)
    flying = []  # which lock their rows
    for batch, start in enumerate(range(0, ids.size, size)):
        if batch == workload.first_batch:
            before = cache.stats()
        flying.append(cache.plan(ids[start : start + size]))
        if len(flying) > workload.lock_window:
            flying.pop(0).release()
    counted = cache.stats() - before
    cache.close()
    return counted.hits, counted.rows_filled, counted.evictions


def _measured(workload: Workload, capacity: int, policy: Policy) -> tuple[int, int | None, int | None]:
    point = Contender(name="it", policy=policy).measure(workload, capacity)
    return point.hits, point.fetched, point.evictions


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("word", ["lru", "lfu", "lrfu:20", "lrfu:200", "lrfu-forget:20"])
def test_counts_are_those_of_the_cache(word: str, window: int) -> None:
    """To the last one: with one access a batch no two rows are equal in score and last batch."""
    trace = generate(ZipfTrace(alpha=0.9, rows=3000, accesses=3000, drift=0.05, drift_every=800, seed=1))
    workload = Workload(trace=trace, batch_size=1, lock_window=window)
    for capacity in (40, 300):
        policy = parse_policy(word)
        assert _measured(workload, capacity, policy) == counts_of_cache(workload, capacity, policy)


@pytest.mark.parametrize("word", ["lru", "lfu-forget", "lrfu:20"])
def test_batches_larger_than_the_cache_are_counted_as_by_it(word: str) -> None:
    trace = generate(ZipfTrace(alpha=0.9, rows=3000, accesses=8000))
    workload = Workload(trace=trace, batch_size=64)
    assert _measured(workload, 40, parse_policy(word)) == counts_of_cache(workload, 40, parse_policy(word))


@pytest.mark.parametrize("word", ["lru", "lfu-forget", "lrfu:300"])
def test_hit_rates_of_large_batches_are_those_of_the_cache(word: str) -> None:
    trace = generate(ZipfTrace(alpha=1.05, rows=200_000, accesses=400_000))
    workload = Workload(trace=trace, batch_size=512)
    hits, _, _ = counts_of_cache(workload, 4000, parse_policy(word))
    assert _measured(workload, 4000, parse_policy(word))[0] == pytest.approx(hits, abs=0.002 * workload.lookups)


@pytest.mark.parametrize(("window", "slots"), [(0, 300), (1, 300), (3, 300), (1, 40)])
@pytest.mark.parametrize("word", ["lru", "lfu", "lfu-forget", "lrfu:20", "lrfu:200", "lrfu-forget:20"])
def test_cache_hits_like_the_dict(word: str, window: int, slots: int) -> None:
    """In 40 slots there is no room for a batch."""
    trace = generate(ZipfTrace(alpha=0.9, rows=3000, accesses=60_000, drift=0.05, drift_every=4000, seed=1))
    workload = Workload(trace=trace, batch_size=64, lock_window=window)
    point = Contender(name=word, policy=parse_policy(word)).measure(workload, slots)
    expected = hits_of_dict(trace.ids, 64, slots, parse_policy(word), window, workload.first_batch)
    tolerance = TIES_FORGETTING if "-forget" in word else TIES
    assert point.hit_rate == pytest.approx(expected / workload.lookups, abs=tolerance)


def test_policies_differ_by_more_than_ties() -> None:
    """What the comparison with the dict rests on: a cache with the wrong policy or window would be seen."""
    trace = generate(ZipfTrace(alpha=0.9, rows=3000, accesses=60_000, drift=0.05, drift_every=4000, seed=1))
    rates = sorted(
        Contender(name=word, policy=parse_policy(word))
        .measure(Workload(trace=trace, batch_size=64, lock_window=window), 300)
        .hit_rate
        for word, window in [("lru", 0), ("lfu", 0), ("lfu-forget", 0), ("lrfu:20", 0), ("lrfu:20", 3), ("lrfu:200", 0)]
    )
    assert min(np.diff(rates)) > TIES


@pytest.mark.parametrize(("window", "hits"), [(0, 1), (1, 2)])
def test_lock_window_keeps_the_previous_batch(window: int, hits: int) -> None:
    # Slots 2, batches {0, 1}, {2}, {0, 1}: row 2 evicts one of the others unless both are locked.
    trace = Trace(name="t", ids=np.array([0, 1, 2, 2, 0, 1]), rows=3)
    workload = Workload(trace=trace, batch_size=2, warm_up=0.0, lock_window=window)
    assert Contender(name="lru", policy=LRU()).measure(workload, 2).hits == hits


def test_measured_part_starts_on_a_batch() -> None:
    # Batches {0, 0, 0}, {0, 1, 2}, {0, 1}: half of three batches is one: 1 and 2 are measured.
    trace = Trace(name="t", ids=np.array([0, 0, 0, 0, 1, 2, 0, 1]), rows=3)
    workload = Workload(trace=trace, batch_size=3)
    assert (workload.first_batch, workload.lookups) == (1, 5)
    point = Contender(name="lru", policy=LRU()).measure(workload, 3)
    assert (point.hits, point.lookups, point.fetched, point.evictions) == (3, 5, 2, 0)
    assert Contender(name="static", reference=True).measure(workload, 1).hits == 2
    assert Contender(name="belady", reference=True).measure(workload, 1).hits == 2


def test_capacity_for_is_the_smallest_that_reaches_the_target() -> None:
    trace = generate(ZipfTrace(alpha=1.0, rows=2000, accesses=40_000))
    workload = Workload(trace=trace, batch_size=100)
    for contender in contenders({"lrfu": LFU()}, references=True):
        found = capacity_for(0.5, contender, workload)
        assert found is not None
        assert found.hit_rate >= 0.5
        below = found.capacity - max(1, int(found.capacity * 0.01))
        assert contender.measure(workload, below).hit_rate < 0.5
        known = [contender.measure(workload, capacity) for capacity in (50, 1000)]
        again = capacity_for(0.5, contender, workload, known)
        assert again is not None
        assert again.capacity == pytest.approx(found.capacity, rel=0.011)


def test_a_capacity_between_known_points_is_found_in_a_few_runs(monkeypatch) -> None:
    """By halves it takes seven between 20,000 and 50,000, and a run takes seconds."""
    runs = []

    def measured(self: Contender, workload: Workload, capacity: int, advance: object = None) -> SimpleNamespace:
        runs.append(capacity)
        return SimpleNamespace(capacity=capacity, hit_rate=0.08 * math.log(capacity) - 0.03 * (capacity / 50_000) ** 2)

    monkeypatch.setattr(Contender, "measure", measured)
    contender = Contender(name="lru", policy=LRU())
    known = [measured(contender, None, capacity) for capacity in (5_000, 20_000, 50_000)]
    for target in np.linspace(known[1].hit_rate + 1e-3, known[2].hit_rate - 1e-3, 20):
        runs.clear()
        found = capacity_for(target, contender, None, known)
        assert len(runs) <= 6
        assert found.hit_rate >= target
        assert measured(contender, None, found.capacity - int(0.011 * found.capacity)).hit_rate < target


def test_contenders_adds_the_references_that_are_not_asked_for() -> None:
    chosen = contenders({"lru": LRU(), "lrfu": LFU()}, references=True)
    names = {contender.name: contender.reference for contender in chosen}
    assert len(names) == len(chosen)
    assert names == {"lru": False, "lrfu": False, "lfu-forget": True, "static": True, "belady": True}
    assert [contender.name for contender in contenders({"lru": LRU()}, references=False)] == ["lru"]


def test_capacity_for_says_when_no_capacity_is_enough() -> None:
    trace = Trace(name="once", ids=np.arange(1000), rows=1000)
    assert capacity_for(0.1, Contender(name="lru", policy=LRU()), Workload(trace=trace, batch_size=10)) is None


@pytest.mark.parametrize(
    ("batch_size", "warm_up", "window", "message"),
    [
        (11, 0.5, 0, "batch size 11 is not possible .* 10 accesses"),
        (0, 0.5, 0, "batch size 0 "),
        (5, 1.0, 0, "warm-up .* got 1.0"),
        (5, -0.1, 0, "warm-up .* got -0.1"),
        (5, 0.5, -1, "lock window must be at least 0 batches, got -1"),
    ],
)
def test_workload_refuses_the_impossible(batch_size: int, warm_up: float, window: int, message: str) -> None:
    trace = Trace(name="t", ids=np.arange(10), rows=10)
    with pytest.raises(ConfigError, match=message):
        Workload(trace=trace, batch_size=batch_size, warm_up=warm_up, lock_window=window)


@pytest.mark.parametrize("capacity", [0, 11])
@pytest.mark.parametrize("name", ["lru", "static", "belady"])
def test_contender_refuses_a_capacity_beyond_the_rows(name: str, capacity: int) -> None:
    workload = Workload(trace=Trace(name="t", ids=np.arange(10), rows=10), batch_size=2)
    contender = Contender(name=name, policy=LRU() if name == "lru" else None)
    with pytest.raises(ConfigError, match=rf"capacity of {capacity} rows .* 1 … 10"):
        contender.measure(workload, capacity)
