"""What a CPU's cache counts for each of several who plan by it, against what can be seen of a plan from outside."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest
from counters import arrivals

import tieredemb as te
from tieredemb.cache.base import PlanKind
from tieredemb.cache.host.cache import HostCache
from tieredemb.cache.host.clients import Planners
from tieredemb.cache.stats import CacheStats
from tieredemb.storage.base import RowLayout

SIZES = (40, 7, 90, 30)  # of tables; nobody looks up in the last
FIRST = np.cumsum([0, *SIZES])


class Clients:
    """Tables that plan by one cache of so many slots; and what each should have been counted of, as `expected`."""

    def __init__(self, slots, resident=()):
        self.layout = RowLayout(rows=int(FIRST[-1]), width=4, state_width=1)
        cold = te.HostMemory().open(self.layout, name="", identity={})
        ranges = [(int(FIRST[table]), SIZES[table]) for table in resident]
        self.cache = HostCache(cold, slots=slots, resident=ranges, clients=FIRST.tolist())
        self.expected = [CacheStats() for _ in SIZES]
        self._touched = {int(FIRST[table]) + row for table in resident for row in range(SIZES[table])}

    def plan(self, ids, **keywords):
        """Plans ids, by table, int64 (N,) each, negative for padding, as one."""
        keys = [np.where(its >= 0, its + FIRST[table], -1) for table, its in ids.items()]
        starts = np.cumsum([0, *map(len, keys)])
        return self.cache.plan(np.concatenate(keys), PlanKind(**keywords), client=Planners(tuple(ids), starts))

    def plan_and_expect(self, ids):
        """The same, and notes what should have been counted."""
        hot = self.cache.hot
        before, dirty = hot.key.copy(), hot.dirty.copy()
        ticket = self.plan(ids)
        before = np.concatenate([before, np.full(len(hot.key) - len(before), -1)])
        slot_of = {int(key): slot for slot, key in enumerate(hot.key) if key >= 0}
        for table, its in ids.items():
            keys = [int(key) for key in its[its >= 0] + FIRST[table]]
            resident = set(before.tolist())
            filled = set(keys) - resident
            evicted = [slot_of[key] for key in filled if before[slot_of[key]] >= 0]
            written = sum(int(dirty[slot]) for slot in evicted)
            self.expected[table] += arrivals(keys, filled, self._touched, len(evicted), written, self.layout.row_bytes)
            self.expected[table] += CacheStats(
                batches=1,
                lookups=len(keys),
                hits=sum(key in resident for key in keys),
                rows_overflow=sum(slot_of[key] >= hot.capacity for key in filled),
            )
            self._touched |= set(keys)
        return ticket

    def stats(self):
        return [self.cache.stats(table) for table in range(len(SIZES))]


def ids_of(rng, table, count):
    """Skewed ids of a table, some of them padding."""
    ids = (rng.random(count) ** 3 * SIZES[table]).astype(np.int64)
    return np.where(rng.random(count) < 0.1, -1, ids)


@pytest.mark.parametrize("resident", [(), (1,)])
@pytest.mark.parametrize("slots", [24, 60, 167])
def test_what_several_plan_as_one_is_counted_for_whose_rows_come(slots, resident):
    clients, rng = Clients(slots, resident), np.random.default_rng(slots)
    for _ in range(40):
        tables = [table for table in range(3) if rng.random() < 0.8]
        counts = [int(rng.integers(0, 8)) for _ in tables]
        clients.plan_and_expect(
            {t: ids_of(rng, t, n) for t, n in zip(tables, counts, strict=True)} or {0: np.arange(2)}
        )
        clients.cache.hot.dirty[rng.integers(0, slots, 3)] = 1
    assert clients.stats() == clients.expected
    assert clients.stats()[3] == CacheStats()
    assert (sum(each.evictions for each in clients.expected) > 0) == (slots < 167)


@pytest.mark.parametrize("slots", [1, 9, 60])
def test_counters_add_up_to_those_of_the_cache(slots):
    """Also those of rows beyond the capacity, and of rows that leave without another one coming."""
    clients, rng = Clients(slots), np.random.default_rng(slots)
    for step in range(30):
        clients.plan({table: ids_of(rng, table, 10) for table in range(3)}).release()
        clients.cache.hot.dirty[:] = 1
        if step % 10 == 9:
            clients.cache.flush()
    stats, totals = clients.stats(), asdict(clients.cache.stats())
    assert (totals["rows_overflow"] > 0) == (slots < 60)
    for name in set(totals) - {"batches"}:
        assert sum(getattr(each, name) for each in stats) == totals[name], name
    assert [each.batches for each in stats] == [30, 30, 30, 0]


def test_what_is_not_scored_is_no_lookup_but_brings_rows():
    clients = Clients(60)
    clients.plan({0: np.arange(5), 2: np.arange(3)}, scored=False).release()
    assert [(each.lookups, each.batches, each.rows_filled) for each in clients.stats()[:3]] == [
        (0, 0, 5),
        (0, 0, 0),
        (0, 0, 3),
    ]


def test_several_plans_of_one_time_are_one_batch_of_each():
    clients = Clients(60)
    clients.plan({0: np.arange(2), 2: np.arange(2)})
    clients.plan({0: np.arange(2)}, ages=False)
    assert [each.batches for each in clients.stats()] == [1, 0, 1, 0]
