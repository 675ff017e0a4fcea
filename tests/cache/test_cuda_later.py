"""Rows that a plan leaves for later, which come beside the next plan, against rows that come with their plan. Skips
without a GPU; TIEREDEMB_REQUIRE_CUDA=1 fails."""

from __future__ import annotations

import contextlib

import pytest
import torch
from devices import equal, require_gpu

import tieredemb as te
from tieredemb.cache.device.cache import DeviceCache
from tieredemb.cache.device.planner import DeferredRows
from tieredemb.config import Uniform
from tieredemb.kernels.constants import ARRIVING, ARRIVING_USED
from tieredemb.kernels.streams import current_stream
from tieredemb.storage.base import RowLayout
from tieredemb.storage.initial import InitialRows, InitialTable

ROWS, WIDTH, IDS, BATCHES = 300, 4, 24, 20
AT_ONCE, BEFORE, BESIDE, TWICE = "at once", "before the next plan", "beside the next plan", "twice"


@pytest.fixture(autouse=True)
def gpu():
    require_gpu()


class Run:
    """Plans of batches, each released once the next one's rows are there."""

    def __init__(self, slots, policy):
        device = torch.device("cuda", torch.cuda.current_device())
        cold = te.UnifiedMemory().open(RowLayout(rows=ROWS, width=WIDTH, state_width=1), name="", identity={})
        table = InitialTable(start=0, number=0, init=Uniform(low=0.0, high=1.0), padding_idx=None)
        initial = InitialRows([table], seed=0, state_value=0.0, device=device)
        self.cache = DeviceCache(cold, slots=slots, policy=policy, initial=initial, device=device)
        self.device, self.later, self.last = device, [DeferredRows(current_stream()) for _ in range(2)], None

    def plan(self, number, keys, way):
        """`way`: when the rows of the batch before come."""
        planner = self.cache._planner
        held = {}
        if way == BESIDE:  # it may be found before its rows come, which this makes sure of
            self.cache.place_last()
            self.cache.publish_last()
            held, planner.unfinished = planner.unfinished, {}
        homes = torch.full((IDS,), -1, dtype=torch.int32, device=self.device)
        with contextlib.nullcontext() if way == AT_ONCE else self.cache.defer_rows(self.later[number % 2]):
            ticket = self.cache.plan(keys.to(self.device), homes)
        if held:
            behind, planner.unfinished = planner.unfinished, held
            self.cache.complete_last()
            planner.unfinished = behind
        if way == TWICE:
            left = planner.unfinished.copy()
            self.cache.complete_last()
            planner.unfinished = left
            planner.begin_capture()  # which nobody has seen replayed
            self.cache.complete_last()
            assert planner.is_over
        if self.last is not None:
            self.last.release()
        self.last = ticket

    def end(self):
        """Scores, weights and counters once all rows are there."""
        self.cache.complete_last()
        hot = self.cache.hot
        key, score = hot.key[: hot.slots].cpu(), hot.score[: hot.slots].cpu()
        self.last.release()
        self.cache.flush()
        keys = torch.arange(ROWS)
        cold = self.cache.cold
        weight, state = torch.from_numpy(cold.weight.copy()), torch.from_numpy(cold.state.view("int32").copy())
        for each, its in zip(key.tolist(), score.tolist(), strict=True):
            assert each < 0 or state[each, -1].item() == its
        stats = self.cache.stats()
        self.cache.close()
        return [keys, weight, state], stats


@pytest.mark.parametrize("policy", [te.LFU(), te.LFU(half_life_batches=float("inf")), te.LRU()], ids=str)
@pytest.mark.parametrize("slots", [30, 60, 100])
@pytest.mark.parametrize("way", [BEFORE, BESIDE, TWICE])
def test_rows_left_for_later_are_those_that_come_at_once(slots, policy, way):
    """With 30 slots what is missed gets slots when its rows come, with more at once. Many rows are used in two batches
    in a row: with `BESIDE` again before they have come."""
    generator, ends = torch.Generator().manual_seed(0), []
    batches = [(torch.rand(IDS, generator=generator) ** 3 * ROWS).long() for _ in range(BATCHES)]
    for each in (AT_ONCE, way):
        run = Run(slots, policy)
        for number, keys in enumerate(batches):
            run.plan(number, keys, each)
        ends.append(run.end())
    (expected, counted), (found, seen) = ends
    assert seen.lookups == counted.lookups
    assert seen.unique == counted.unique
    assert all(int(state[:, -1].view(torch.int32).min()) >= 0 for _, _, state in (expected, found))
    if slots > 30:  # hits, and all scores
        assert seen == counted
        assert all(equal(mine, other) for mine, other in zip(found, expected, strict=True))
    else:  # fewer slots are locked, and a row without one is raised once for two batches; rows are what they are
        assert equal(found[1][found[2][:, -1] != 0], expected[1][found[2][:, -1] != 0])


def test_no_row_keeps_the_mark_of_one_that_is_to_come():
    run = Run(60, te.LFU())
    marks = set()
    for number in range(6):
        run.plan(number, torch.arange(IDS) + 12 * number, BESIDE)
        run.cache.place_last()
        marks |= {value & 0xFFFFFFFF for value in run.cache.hot.score.tolist()} & {ARRIVING, ARRIVING_USED}
    assert ARRIVING in marks
    run.cache.complete_last()
    assert not {value & 0xFFFFFFFF for value in run.cache.hot.score.tolist()} & {ARRIVING, ARRIVING_USED}
    run.last.release()
    run.cache.close()
