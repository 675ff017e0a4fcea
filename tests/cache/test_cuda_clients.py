"""What a GPU's cache counts for each of several who plan by it, against what can be seen of a plan from outside. Skips
without a GPU; TIEREDEMB_REQUIRE_CUDA=1 fails."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest
import torch
from counters import arrivals
from devices import require_gpu

import tieredemb as te
from tieredemb.cache.base import PlanKind
from tieredemb.cache.device.cache import DeviceCache
from tieredemb.cache.stats import CacheStats
from tieredemb.config import Uniform
from tieredemb.kernels.constants import DROPPED
from tieredemb.storage.base import RowLayout
from tieredemb.storage.initial import InitialRows, InitialTable

SIZES = (40, 7, 90, 30)  # of tables; nobody looks up in the last
RESIDENT = (1,)
WIDTH = 4
STORAGES = ["in place", "staged"]


@pytest.fixture(autouse=True)
def gpu():
    require_gpu()


def current_device():
    return torch.device("cuda", torch.cuda.current_device())


def make_cache(cold, slots, resident, clients):
    """A cache of `slots` beside those of the `resident` ranges."""
    device = current_device()
    table = InitialTable(start=0, number=0, init=Uniform(low=0.0, high=1.0), padding_idx=None)
    initial = InitialRows([table], seed=0, state_value=0.0, device=device)
    slots += sum(rows for _, rows in resident)
    return DeviceCache(cold, slots=slots, initial=initial, device=device, resident=resident, clients=clients)


class Clients:
    """Tables of `sizes` that plan by one cache of `slots` beside those of `resident` ones; and what each should have
    been counted of, as `expected`."""

    def __init__(self, slots, sizes=SIZES, resident=RESIDENT, storage=None):
        self.first = np.cumsum([0, *sizes])
        self.resident = resident
        self.layout = RowLayout(rows=int(self.first[-1]), width=WIDTH, state_width=1)
        cold = (storage or te.UnifiedMemory()).open(self.layout, name="", identity={})
        ranges = [(int(self.first[table]), sizes[table]) for table in resident]
        self.cache = make_cache(cold, slots, ranges, [int(key) for key in self.first])
        self.device = self.cache.hot.key.device
        self.expected = [CacheStats() for _ in sizes]
        self._touched = set()
        self._flying = None  # the ticket of the batch before, and the keys that it has left without a slot

    def numbers(self, *tables):
        return torch.tensor(tables, dtype=torch.int32, device=self.device)

    def plan(self, ids, client, *, order=None, **keywords):
        """Plans `ids`, (table, int64 (N,)) each, negative where there is nothing to look up; `order`: another order of
        all of them."""
        keys, homes = [], []
        for table, its in ids:
            is_id = its >= 0
            if table in self.resident:
                first_slot = self.cache.hot.resident[self.resident.index(table)].first_slot
                keys.append(torch.full_like(its, -1))
                homes.append(torch.where(is_id, its + first_slot, DROPPED))
            else:
                keys.append(torch.where(is_id, its + int(self.first[table]), -1))
                homes.append(torch.where(is_id, -1, DROPPED))
        keys, homes = torch.cat(keys), torch.cat(homes).int()
        if order is not None:
            keys, homes = keys[order], homes[order]
        return self.cache.plan(keys.to(self.device), homes.to(self.device), kind=PlanKind(**keywords), client=client)

    def plan_and_expect(self, ids, client=None, **keywords):
        """The same, while the batch before is in flight; notes what should have been counted."""
        hot, before, dirty = self.cache.hot, self.cache.hot.key.cpu(), self.cache.hot.dirty.cpu()
        client = self.numbers(*sorted({table for table, _ in ids})) if client is None else client
        ticket = self.plan(ids, client, **keywords)
        after, found = hot.key.cpu(), set(before[before >= 0].tolist())
        slots = torch.nonzero(before != after).flatten().tolist()
        arrived = {int(after[slot]): slot for slot in slots}
        in_slots, away = set(after.tolist()), self._flying[1] if self._flying else set()
        for table in sorted({table for table, _ in ids}):
            its = torch.cat([each for number, each in ids if number == table])
            its = its[its >= 0].tolist()
            keys = [] if table in self.resident else [number + int(self.first[table]) for number in its]
            filled = set(keys) & arrived.keys()
            evicted = {key for key in filled if before[arrived[key]] >= 0}
            written = sum(int(dirty[arrived[key]]) for key in evicted)
            self.expected[table] += arrivals(keys, filled, self._touched, len(evicted), written, self.layout.row_bytes)
            self.expected[table] += CacheStats(
                batches=1,
                lookups=len(its),
                hits=len(its) if table in self.resident else sum(key in found for key in keys),
                rows_overflow=len(set(keys) - in_slots),
            )
        cached = [its[its >= 0] + int(self.first[table]) for table, its in ids if table not in self.resident]
        every = set(torch.cat(cached).tolist())
        assert arrived.keys() <= every
        assert away & every <= every - in_slots  # under records they stay
        self._touched |= every
        self.land()
        self._flying = ticket, every - in_slots
        return ticket

    def land(self):
        """The batch in flight is over."""
        if self._flying:
            self._flying[0].release()
        self._flying = None

    def use(self, rows, seed):
        """Some of the rows in slots are updated."""
        generator = torch.Generator("cpu").manual_seed(seed)
        some = torch.nonzero(torch.rand(len(rows), generator=generator) < 0.5).flatten()
        self.cache.hot.dirty[some.to(self.device)] = 1

    def stats(self):
        return [self.cache.stats(table) for table in range(len(self.expected))]

    def check(self):
        """Each was counted as expected, and all together are the totals."""
        stats, totals = self.stats(), asdict(self.cache.stats())
        for table, (counted, expected) in enumerate(zip(stats, self.expected, strict=True)):
            assert counted == expected, f"table {table}"
        for name in totals.keys() - {"batches"}:
            assert sum(getattr(each, name) for each in stats) == totals[name], name


def storage_of(kind, path):
    return te.File(str(path / "rows")) if kind == "staged" else te.UnifiedMemory()


def ids_of(rng, table, n, sizes=SIZES, padding=0.1):
    """Some ids of a table, few of them over and over, and padding."""
    ids = (rng.random(n) ** 2 * sizes[table]).astype(np.int64)
    return table, torch.from_numpy(np.where(rng.random(n) < padding, -1, ids))


@pytest.mark.parametrize("kind", STORAGES)
@pytest.mark.parametrize("slots", [1, 24, 160])
@pytest.mark.parametrize("mixed", [False, True])
def test_a_plan_of_several_counts_for_each(tmp_path, kind, slots, mixed):
    clients, rng = Clients(slots, storage=storage_of(kind, tmp_path)), np.random.default_rng(slots)
    for step in range(12):
        ids = [ids_of(rng, 0, 30), ids_of(rng, 1, 12), ids_of(rng, 2, 50 + 300 * (step == 5)), ids_of(rng, 0, 5)]
        ids = ids[: 2 + step % 3]
        order = torch.from_numpy(rng.permutation(sum(len(each) for _, each in ids))) if mixed else None
        if step % 3 == 0:
            clients.land()
        clients.plan_and_expect(ids, order=order)
        clients.use(clients.cache.hot.key, step)
        clients.check()
    counted = clients.cache.stats()
    assert counted.hits > 0
    assert (counted.rows_overflow > 0) == (slots < 160)
    assert (counted.evictions > 0) == (slots < 160) or slots == 1  # whose row may be one of every batch


@pytest.mark.parametrize("kind", STORAGES)
def test_a_plan_of_one_counts_for_it_alone(tmp_path, kind):
    clients, rng = Clients(24, storage=storage_of(kind, tmp_path)), np.random.default_rng(0)
    for step in range(15):
        table = (0, 2)[step % 2]
        clients.plan_and_expect([ids_of(rng, table, 400 if step == 9 else 40)], client=table)
        clients.use(clients.cache.hot.key, step)
        clients.check()
    assert clients.stats()[1] == clients.stats()[3] == CacheStats()


def test_plans_of_each_count_what_one_of_all_does():
    joint, apart = Clients(160), Clients(160)
    rng = np.random.default_rng(3)
    for _ in range(6):
        ids = [ids_of(rng, table, 40) for table in (0, 1, 2)]
        joint.plan(ids, joint.numbers(0, 1, 2)).release()
        for number, each in enumerate(ids):
            apart.plan([each], each[0], ages=number == 0).release()
        assert joint.stats() == apart.stats()
    assert joint.cache.stats() == apart.cache.stats()


@pytest.mark.parametrize("slots", [50, 600])
def test_many_clients_in_one_block_are_told_apart(slots):
    sizes = (3,) * 200  # more than a block keeps lines for, and in every warp many
    clients, rng = Clients(slots, sizes, resident=()), np.random.default_rng(slots)
    for step in range(5):
        ids = [ids_of(rng, table, 7, sizes) for table in range(200)]
        clients.plan_and_expect(ids, order=torch.from_numpy(rng.permutation(1400)))
        clients.use(clients.cache.hot.key, step)
        clients.check()
    assert (clients.cache.stats().rows_overflow > 0) == (slots == 50)


@pytest.mark.parametrize("mixed", [False, True])
def test_resident_rows_count_for_each(mixed):
    """Where all are resident plans count, and move nothing."""
    sizes = (300, 5, 70)
    clients, rng = Clients(0, sizes, resident=(0, 1, 2)), np.random.default_rng(0)
    lookups = np.zeros(3, np.int64)
    for step in range(4):
        ids = [ids_of(rng, table, 100 + 50 * table + 3000 * step, sizes) for table in range(3)]
        order = torch.from_numpy(rng.permutation(sum(len(each) for _, each in ids))) if mixed else None
        clients.plan(ids, clients.numbers(0, 1, 2), order=order).release()
        lookups += [int((each >= 0).sum()) for _, each in ids]
    for counted, expected in zip(clients.stats(), lookups.tolist(), strict=True):
        assert counted == CacheStats(batches=4, lookups=expected, hits=expected)
    assert clients.cache.stats() == CacheStats(batches=4, lookups=int(lookups.sum()), hits=int(lookups.sum()))


@pytest.mark.parametrize("resident", [(1,), (0, 1, 2, 3)])
def test_several_plans_of_one_time_are_one_batch_of_a_client(resident):
    clients, ids = Clients(160 if resident == (1,) else 0, resident=resident), torch.tensor([1, 2, 2])

    def batches(client, **keywords):
        clients.plan([(0, ids), (2, ids)], client, **keywords).release()
        return [each.batches for each in clients.stats()]

    assert batches(clients.numbers(0, 2)) == [1, 0, 1, 0]
    assert batches(clients.numbers(2, 0, 2), ages=False) == [1, 0, 1, 0]
    assert batches(clients.numbers(2, 0, 2)) == [2, 0, 2, 0]
    assert batches(clients.numbers(0, 1), ages=False) == [2, 1, 2, 0]
    assert batches(3) == [2, 1, 2, 1]
    assert batches(None) == [2, 1, 2, 1]
    lookups = [each.lookups for each in clients.stats()]
    assert batches(0, scored=False) == [2, 1, 2, 1]
    assert [each.lookups for each in clients.stats()] == lookups == [18, 0, 18, 0]


@pytest.mark.parametrize("kind", STORAGES)
def test_a_flush_counts_for_those_whose_rows_it_writes(tmp_path, kind):
    clients, rng = Clients(160, storage=storage_of(kind, tmp_path)), np.random.default_rng(1)
    clients.plan_and_expect([ids_of(rng, table, 60) for table in (0, 1, 2)])
    clients.land()
    hot, row_bytes = clients.cache.hot, clients.layout.row_bytes
    hot.dirty[torch.arange(0, 160, 3, device=clients.device)] = 0
    ((_, first_slot, _),) = hot.resident
    hot.dirty[first_slot + 2 : first_slot + 6] = 1
    slots = torch.nonzero(hot.key >= 0).flatten()
    keys, dirty = hot.key[slots].cpu(), hot.dirty[slots].cpu() != 0
    clients.cache.flush()
    table_of = np.searchsorted(clients.first, keys.numpy(), side="right") - 1
    for table in (0, 2):
        written, clean = (int(each[table_of == table].sum()) for each in (dirty, ~dirty))
        assert written
        assert clean
        clients.expected[table] += CacheStats(
            rows_written_back=written, bytes_written_back=written * row_bytes + 4 * clean
        )
    clients.expected[1] += CacheStats(rows_written_back=4, bytes_written_back=4 * row_bytes)
    clients.check()


@pytest.mark.parametrize("kind", STORAGES)
def test_loads_count_for_nobody(tmp_path, kind):
    clients, rng = Clients(24, storage=storage_of(kind, tmp_path)), np.random.default_rng(2)
    for _ in range(3):
        clients.plan_and_expect([ids_of(rng, table, 60) for table in (0, 1, 2)])
    clients.land()
    clients.cache.flush()
    before, totals = clients.stats(), clients.cache.stats()
    clients.cache.forget()
    assert clients.stats() == before
    assert clients.cache.stats() == totals


def test_replays_count_for_each():
    clients = Clients(160)
    numbers, both = clients.numbers(0, 2), torch.arange(20, device=clients.device)
    keys, homes = torch.empty_like(both), torch.empty(20, dtype=torch.int32, device=clients.device)

    def load(step):
        keys.copy_(torch.where(both < 8, (both + step) % 40, 47 + both * 3 + step))
        homes.fill_(-1)

    def plan():
        clients.cache.plan(keys, homes, client=numbers).release()

    for step in range(3):
        load(step)
        plan()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan()
    for step in range(3, 6):
        load(step)
        graph.replay()
    first, _, second, _ = clients.stats()
    assert (first.batches, first.lookups, first.rows_filled) == (6, 48, 13)
    assert (second.batches, second.lookups) == (6, 72)
    assert second.lookups - second.hits == second.rows_filled
