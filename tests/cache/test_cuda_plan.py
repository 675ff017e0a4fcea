"""A plan that ends in one launch against one that ends in two, over random states of a cache. Skips without a GPU;
TIEREDEMB_REQUIRE_CUDA=1 fails.
"""

from __future__ import annotations

import pytest
import torch
from devices import require_gpu

from tieredemb.cache.base import USE
from tieredemb.cache.device.hot_rows import DeviceHotRows
from tieredemb.cache.device.plan import DevicePlan, Missed, OverflowRows, field_offsets
from tieredemb.cache.policy import scoring
from tieredemb.config import LFU
from tieredemb.kernels.compiler import Kernel, blocks_for
from tieredemb.kernels.constants import ASSIGN, DROPPED, PUBLISH
from tieredemb.storage.base import RowLayout

BEGUN = 1_000_000  # batches before the first: rows may have been used that long ago


@pytest.fixture(autouse=True)
def gpu():
    require_gpu()
    torch.manual_seed(0)


def current_device():
    return torch.device("cuda", torch.cuda.current_device())


class Plans:
    """Plans of batches of up to `n` ids over the slots of a cache; no row ever moves. Slots are locked by the `lag`
    batches before. `clients`: among how many the keys are divided."""

    def __init__(self, slots, n, lag, clients=0):
        device = current_device()
        self.lag, self.all_keys = lag, torch.arange(4 * max(slots, n), device=device)
        layout = RowLayout(rows=len(self.all_keys), width=4, state_width=1)
        self.rows = DeviceHotRows(layout, slots, (), device)
        first = [len(self.all_keys) * client // clients for client in range(clients + 1)] if clients else ()
        self.plan = DevicePlan(self.rows, scoring(LFU()), device, first)
        self.numbers = torch.arange(clients, dtype=torch.int32, device=device)
        self.plan.restart(BEGUN)
        self.uncached = (lag + 1) * n > slots
        if self.uncached:
            self.plan.records.reserve(min((lag + 1) * n, layout.rows))
        self.state = torch.zeros(layout.rows, 2, dtype=torch.int32, device=device)  # of rows without a slot
        self.overflow = OverflowRows(self.uncached, 0, self.state.data_ptr(), self.plan.records.table)
        self._find = Kernel("hash/slot_map.cu", "slot_map_find")

    def find(self, keys):
        """Begins a plan for `keys` (int64 (N,)), negative where there is nothing to look up."""
        self.keys, self.missed = keys, Missed(len(keys), keys.device)
        self.homes = torch.where(keys >= 0, -1, DROPPED).int()
        self.plan.begin(self.missed, USE, lag=self.lag, client=self.numbers, overflow=self.overflow)
        self.plan.find(keys, self.homes, self.missed, USE, overflow=self.overflow)

    def end_in_two(self):
        self.plan.choose(self.missed)
        self.plan.resolve(self.homes, self.missed, self.overflow, ASSIGN | PUBLISH)

    def end_in_one(self):
        self.plan.place(self.missed, lag=self.lag)
        self.plan.resolve(self.homes, self.missed, self.overflow, PUBLISH)

    def memory(self):
        """All that the end of a plan reads and writes."""
        rows, plan = self.rows, self.plan
        tables = [plan.control, plan.records.table, rows.score, rows.last_batch, rows.key, rows.cells]
        return [*tables, *([plan._clients] if plan.flags else []), self.homes, self.missed._memory]

    def of_clients(self):
        """What each client's counters say, int64 (clients, K)."""
        return torch.tensor([[*self.plan.totals(client).values()] for client in range(len(self.numbers))])

    def counts(self):
        """missed, needed, used, tombstones, uncached, room, record"""
        return self.plan.control[field_offsets().counts : field_offsets().totals].view(torch.int32)[:7].tolist()

    def seen(self):
        """What a plan has ended in, but for which missed key got which slot or record: that may differ."""
        rows, missed, _, used, _, uncached, room, _ = self.rows, *self.counts()
        with_slots = missed - uncached
        selection = field_offsets().selection
        chosen = int(self.plan.control[selection : selection + 4].view(torch.int32))
        slots, records = self.missed.view("slots", missed), self.plan.records.table[: self.plan.records.rows, 0]
        hot, under_records = self.homes >= 0, (self.homes < -1) & (self.homes != DROPPED)
        keys_at_home = torch.full_like(self.keys, -1)
        keys_at_home[hot] = rows.key[self.homes[hot].long()]
        keys_at_home[under_records] = records[-2 - self.homes[under_records].long()] - 1
        found = torch.empty(len(self.all_keys), dtype=torch.int32, device=self.keys.device)
        n_keys = len(self.all_keys)
        self._find(blocks_for(n_keys, 256), 256, rows.cells, rows.cells.shape[0], self.all_keys, n_keys, found)
        # the map knows the keys of the slots, and each home is that of its key
        assert torch.equal(found[rows.key[:used]], torch.arange(used, dtype=torch.int32, device=found.device))
        assert int((found >= 0).sum()) == used
        assert torch.equal(rows.key[slots[:with_slots].long()], self.missed.view("keys", with_slots))
        assert torch.equal(keys_at_home, self.keys.clamp(min=-1))
        return {
            "counts": torch.tensor([*self.counts(), min(chosen, with_slots - room), *self.plan.totals().values()]),
            "victims": self.missed.view("chosen", with_slots - room).sort().values,
            "victims' keys": self.missed.view("victims", missed).sort().values,
            "slots": slots[:with_slots].sort().values,
            "keys": rows.key.sort().values,
            "keys under records": records.sort().values,
            "cells": rows.cells[:, 0].sign(),
            "last batch": rows.last_batch.clone(),
            "score": rows.score.clone(),
            "with a slot": hot,
            "clients": self.of_clients(),
        }

    def rank(self, *, by_age):
        """Ranks the rows by score or by age, no two alike, so that it is no matter of chance which are victims."""
        used = self.counts()[2]
        order = torch.randperm(used, device=self.keys.device, dtype=torch.int32)
        self.rows.score[:used] = 5 if by_age else order + 1
        if by_age:
            self.rows.last_batch[:used] = BEGUN - order


@pytest.mark.parametrize("clients", [0, 3])
@pytest.mark.parametrize(
    ("slots", "n", "lag"),
    [(1, 1, 0), (40, 30, 0), (3000, 1000, 1), (20_000, 6_000, 2), (300, 1500, 0), (5000, 4000, 1), (9000, 15_000, 1)],
)
def test_a_plan_that_ends_in_one_launch_is_the_one_that_ends_in_two(slots, n, lag, clients):
    plans = Plans(slots, n, lag, clients)
    rebuilt = evicted = uncached = 0
    for batch in range(14):
        again = batch % 4 == 3  # nothing is missed: the rows are in slots, or under records
        if not again:
            keys = (torch.rand(n, device=plans.all_keys.device) ** 2 * len(plans.all_keys)).long()
            keys[torch.rand(n, device=keys.device) < 0.1] = -1
        plans.find(keys)
        before = [tensor.clone() for tensor in plans.memory()]
        plans.end_in_two()
        expected = plans.seen()
        for tensor, old in zip(plans.memory(), before, strict=True):
            tensor.copy_(old)
        plans.end_in_one()
        for name, value in plans.seen().items():
            assert torch.equal(value, expected[name]), f"batch {batch}: {name}"
        if clients:
            assert plans.of_clients().sum(0)[1:].tolist() == [*plans.plan.totals().values()][1:]  # all but the batches
        missed, _, _, tombstones, without, room, _ = plans.counts()
        if again:
            assert missed == 0 or (plans.uncached and lag == 0)
        victims = missed - without - room
        evicted, uncached, rebuilt = evicted + victims, uncached + without, rebuilt + (victims > tombstones == 0)
        plans.rank(by_age=batch % 3 == 1)
    assert evicted
    assert rebuilt
    assert bool(uncached) == plans.uncached
