"""The cache over a storage: what is resident, locks, order, failures."""

from __future__ import annotations

import gc
import math
import os
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import OracleCache

from tieredemb import LFU, LRU, HostMemory
from tieredemb.cache.base import PlanKind
from tieredemb.cache.host.cache import HostCache
from tieredemb.cache.host.hot_rows import cache_bytes_per_slot
from tieredemb.cache.policy import scoring
from tieredemb.cache.tickets import Flight, TicketLedger
from tieredemb.errors import ForkedError, StorageError, StorageFullError
from tieredemb.hash.slot_map import map_bytes_per_slot
from tieredemb.kernels.constants import DROPPED, MIN_SCORE
from tieredemb.storage.base import RowLayout
from tieredemb.storage.host import HostRows

ROWS, WIDTH, STATE = 64, 3, 2


def make_cache(slots, *, rows=ROWS, cold=None, has_map=False, **keywords):
    cold = cold or HostMemory().open(RowLayout(rows=rows, width=WIDTH, state_width=STATE), name="", identity={})
    if has_map:  # as over other tiers
        cold.as_fast_as_slots = False
    return HostCache(cold, slots=slots, **keywords)


def keys_of(values):
    return np.array(values, np.int64)


def serve(cache, keys, *, add=1.0):
    """Plans `keys` and adds to each unique row what an update would; returns the ticket."""
    ticket = cache.plan(keys_of(keys))
    slots = ticket.unique_slots
    cache.hot.weight[slots] += np.float32(add)
    cache.hot.state[slots] += np.uint32(1)
    cache.hot.dirty[slots] = 1
    return ticket


def whole_table(cache, rows=ROWS):
    weight, state = np.empty((rows, WIDTH), np.float32), np.empty((rows, STATE), np.uint32)
    cache.export_rows(0, rows, weight, state)
    return weight[:, 0].tolist(), state[:, 0].tolist()


def check_consistent(cache):
    """One home: map, slot keys and free slots agree, at the latest when the next call begins."""
    with cache.whole():
        cache._recover()
    hot = cache.hot
    slots = np.flatnonzero(hot.key >= 0)
    assert len(set(hot.key[slots].tolist())) == len(slots)
    found = cache._index.find(hot.key[slots])
    assert found.tolist() == slots.tolist()
    assert (cache._index.find(np.arange(ROWS)) >= 0).sum() == (hot.key[slots] < ROWS).sum()
    assert hot.free == hot.capacity - (slots < hot.capacity).sum()
    assert not set(hot._free.tolist()) & set(slots.tolist())


BATCHES = st.lists(st.lists(st.integers(-1, ROWS - 1), max_size=30), min_size=1, max_size=15)
AGES = st.lists(st.booleans(), min_size=15, max_size=15)


@given(BATCHES, st.integers(1, ROWS), st.data())
def test_rows_survive_any_capacity_and_any_tickets_in_flight(batches, slots, data):
    cache, expected, flying = make_cache(slots, has_map=data.draw(st.booleans())), np.zeros(ROWS), []
    for batch in batches:
        ticket = serve(cache, batch)
        used = sorted({key for key in batch if key >= 0})
        expected[used] += 1
        assert cache.hot.weight[ticket.homes[np.array(batch, int) >= 0], 0].tolist() == [
            expected[key] for key in batch if key >= 0
        ]
        flying.append((ticket, batch, used))
        for other, its_batch, _ in flying:  # the home of a row in flight does not change
            assert cache.hot.key[other.homes[other.homes >= 0]].tolist() == [key for key in its_batch if key >= 0]
        if data.draw(st.booleans()):
            flying.pop(data.draw(st.integers(0, len(flying) - 1)))[0].release()
        check_consistent(cache)
    assert whole_table(cache) == (expected.tolist(), expected.tolist())
    for ticket, _, _ in flying:
        ticket.release()
    serve(cache, [0]).release()
    expected[0] += 1
    assert (cache.hot.key >= 0).sum() <= slots  # capacity is a promise between batches: no lock leaked
    assert whole_table(cache)[0] == expected.tolist()


@given(BATCHES, AGES, st.integers(1, 20), st.sampled_from([0, 1, 7, 300, math.inf]), st.booleans())
@settings(max_examples=200)
def test_residents_and_hits_are_those_of_the_oracle(batches, ages, slots, half_life, remember):
    policy = LRU() if half_life == 0 else LFU(half_life_batches=half_life, remember_evicted=remember)
    cache = make_cache(slots, policy=policy)
    fixed_point = 8 / scoring(policy).unit if half_life in (1, 7, 300) else 0.0  # each use rounds to half a unit
    oracle = OracleCache(slots, half_life, remember=remember or half_life == 0, precision=fixed_point)
    for batch, is_later in zip(batches, ages, strict=False):
        keys = [key for key in batch if key >= 0]
        before = cache.stats()
        cache.plan(keys_of(batch), PlanKind(ages=is_later)).release()
        counted = cache.stats() - before
        resident = {int(key) for key in cache.hot.key[:slots] if key >= 0}
        hits = oracle.plan(keys, ages=is_later)
        if oracle.ambiguous and resident != oracle.resident:
            return  # of rows of equal score either may go
        assert (counted.hits, counted.lookups) == (hits, len(keys))
        assert cache.stats().batches == oracle.time
        assert resident == oracle.resident


def test_padding_has_no_home_and_counts_nowhere():
    cache = make_cache(4)
    ticket = cache.plan(keys_of([-1, 3, -1]))
    assert ticket.homes[[0, 2]].tolist() == [DROPPED, DROPPED]
    assert ticket.unique_keys.tolist() == [3]
    assert cache.stats().lookups == 1


def test_stats_count_each_kind_of_event():
    cache = make_cache(2)
    serve(cache, [1, 1, 2]).release()
    serve(cache, [2, 3]).release()
    serve(cache, [4, 5, 6]).release()
    s = cache.stats()
    assert (s.batches, s.lookups, s.hits, s.misses, s.unique) == (3, 8, 1, 7, 7)
    assert (s.evictions, s.rows_written_back, s.rows_overflow) == (3, 3, 1)
    assert s.rows_filled == 6
    assert s.hit_rate == 1 / 8


def test_clean_rows_give_back_their_score_alone():
    cache = make_cache(1)
    serve(cache, [1]).release()
    cache.flush()
    cache.plan(keys_of([1])).release()
    before = cache.stats()
    cache.plan(keys_of([2])).release()
    assert (cache.stats() - before).rows_written_back == 0
    assert (cache.stats() - before).bytes_written_back == 4
    assert cache.cold.state[1, -1] > cache.cold.state[2, -1]


def test_score_returns_with_the_row():
    cache = make_cache(2, policy=LFU(half_life_batches=math.inf))
    for _ in range(5):
        cache.plan(keys_of([1])).release()
    for keys in ([2, 3], [4], [4], [1], [5]):  # 1 leaves and returns with its five uses; 4 has two
        cache.plan(keys_of(keys)).release()
    assert 1 in cache.hot.key


def test_batch_without_score_leaves_no_trace_in_scores_and_counters():
    cache = make_cache(8)
    cache.plan(keys_of([1, 2])).release()
    scores, stats = cache.hot.score.copy(), cache.stats()
    cache.plan(keys_of([1, 2]), PlanKind(scored=False)).release()
    assert np.array_equal(cache.hot.score, scores)
    assert (cache.stats() - stats).lookups == 0


def test_rows_planned_without_score_are_kept_when_they_leave():
    cache = make_cache(1)
    cache.plan(keys_of([7]), PlanKind(scored=False)).release()
    cache.hot.weight[:] = 5
    cache.hot.dirty[:] = 1
    cache.plan(keys_of([8])).release()
    assert whole_table(cache)[0][7] == 5


def test_rows_of_a_ticket_in_flight_are_never_evicted():
    cache = make_cache(2)
    first = serve(cache, [1, 2])
    serve(cache, [3, 4]).release()
    assert cache.hot.key[first.homes].tolist() == [1, 2]
    first.release()
    serve(cache, [5, 6]).release()
    assert sorted(cache.hot.key[cache.hot.key >= 0]) == [5, 6]


def test_a_dropped_ticket_is_released_by_the_collector():
    cache = make_cache(2)
    ticket = cache.plan(keys_of([1, 2]))
    assert cache._tickets.live == {ticket.batch}
    del ticket
    gc.collect()
    assert not cache._tickets.live


def test_a_hold_locks_what_is_in_flight_and_what_follows():
    """For a plan that has yet to begin on another thread: whatever ends until then stays locked for it."""
    tickets = TicketLedger()
    first, second = Empty(3, tickets), Empty(4, tickets)
    for flight in (first, second):
        tickets.open(flight, ids=10)
    hold, later = tickets.hold(5), tickets.hold(5)
    first.release()
    assert (tickets.live, tickets.oldest(5)) == ({4}, 3)
    hold.release()
    second.release()
    assert (tickets.live, tickets.oldest(6)) == (set(), 3)
    later.release()
    assert tickets.oldest(6) == 6
    following = tickets.hold(6)  # nothing is in flight, but batches may begin and end before its plan does
    assert tickets.oldest(9) == 6
    del following
    gc.collect()
    assert tickets.oldest(9) == 9


def test_whole_cache_is_served_from_one_slot():
    cache = make_cache(1)
    for _ in range(3):
        serve(cache, range(ROWS)).release()
    assert whole_table(cache) == ([3.0] * ROWS, [3] * ROWS)
    assert len(cache.hot.transients()) == ROWS - 1
    serve(cache, []).release()
    assert len(cache.hot.transients()) == 0


# --- failures ---------------------------------------------------------------------------------------------------------


class FailingRows(HostRows):
    """Fails a read or a write half-way, as a broken disk would."""

    def __init__(self, layout, **keywords):
        super().__init__(layout)
        self.fail_write = self.fail_read = False

    def write(self, keys, slots, hot):
        if self.fail_write:
            half = len(keys) // 2
            super().write(keys[:half], slots[:half], hot)
            raise StorageFullError("no space left on the test device")
        super().write(keys, slots, hot)

    def read(self, keys, slots, hot):
        if self.fail_read:
            half = len(keys) // 2
            super().read(keys[:half], slots[:half], hot)
            raise StorageError("the test device does not answer")
        return super().read(keys, slots, hot)


def failing_cache(slots):
    return make_cache(slots, cold=FailingRows(RowLayout(rows=ROWS, width=WIDTH, state_width=STATE)))


@pytest.mark.parametrize("slots", [1, 4, 10])
def test_failed_write_back_loses_nothing_and_the_cache_goes_on(slots):
    cache = failing_cache(slots)
    serve(cache, range(8)).release()
    cache.cold.fail_write = True
    for _ in range(2):
        with pytest.raises(StorageFullError, match="no space left"):
            serve(cache, range(20, 40))
        check_consistent(cache)
    cache.plan(keys_of(cache.hot.key[: min(slots, 8)])).release() if slots >= 8 else None  # hits need no space
    cache.cold.fail_write = False
    serve(cache, range(4, 24)).release()
    check_consistent(cache)
    expected = [1.0] * 4 + [2.0] * 4 + [0.0] * 12 + [1.0] * 4 + [0.0] * 40
    expected[8:24] = [1.0] * 16
    assert whole_table(cache)[0] == expected


@pytest.mark.parametrize("slots", [1, 4, 30])
def test_failed_fill_publishes_nothing_and_the_cache_goes_on(slots):
    cache = failing_cache(slots)
    serve(cache, range(8)).release()
    cache.cold.fail_read = True
    with pytest.raises(StorageError, match="does not answer"):
        serve(cache, range(4, 20))
    check_consistent(cache)
    cache.cold.fail_read = False
    serve(cache, range(4, 20)).release()
    check_consistent(cache)
    assert whole_table(cache)[0] == [1.0] * 4 + [2.0] * 4 + [1.0] * 12 + [0.0] * 44


def test_failed_flush_keeps_rows_dirty():
    cache = failing_cache(8)
    serve(cache, range(8)).release()
    cache.cold.fail_write = True
    with pytest.raises(StorageFullError):
        cache.flush()
    cache.cold.fail_write = False
    cache.flush()
    assert cache.cold.weight[:8, 0].tolist() == [1.0] * 8


# --- whole-cache calls ------------------------------------------------------------------------------------------------


def test_flush_makes_cold_storage_the_truth_and_keeps_the_rows():
    cache = make_cache(8)
    serve(cache, [1, 2, 3]).release()
    cache.flush()
    assert cache.cold.weight[[1, 2, 3], 0].tolist() == [1.0] * 3
    assert cache.cold.state[[1, 2, 3], 0].tolist() == [1] * 3
    assert not cache.hot.dirty.any()
    before = cache.stats()
    cache.plan(keys_of([1, 2, 3])).release()
    assert (cache.stats() - before).hits == 3


def test_import_rows_reaches_rows_in_flight():
    cache = make_cache(2)
    ticket = serve(cache, [1, 2, 3])
    cache.import_rows(0, np.full((ROWS, WIDTH), 9, np.float32), None)
    assert cache.hot.weight[ticket.homes].tolist() == [[9.0] * WIDTH] * 3
    assert cache.hot.state[ticket.homes, 0].tolist() == [1] * 3
    ticket.release()
    assert whole_table(cache)[0] == [9.0] * ROWS


def test_export_writes_nothing():
    cache = make_cache(2)
    serve(cache, [5]).release()
    before = whole_table(cache)
    assert not cache.cold.state.any()
    cache.flush()
    assert np.flatnonzero(cache.cold.state[:, -1]).tolist() == [5]
    assert whole_table(cache) == before


def test_closed_cache_refuses_work():
    cache = make_cache(2)
    cache.close()
    cache.close()
    with pytest.raises(StorageError, match="closed"):
        cache.plan(keys_of([1]))


def test_forked_child_is_refused():
    cache = make_cache(2)
    cache.plan(keys_of([1])).release()
    pid = os.fork()
    if pid == 0:
        try:
            cache.plan(keys_of([1]))
        except ForkedError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_callers_on_several_threads_are_serialised():
    cache, threads = make_cache(5), []

    def work(seed):
        rng = np.random.default_rng(seed)
        for _ in range(50):
            with cache.lock:
                serve(cache, rng.integers(0, ROWS, 12)).release()

    for seed in range(4):
        threads.append(threading.Thread(target=work, args=(seed,)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    check_consistent(cache)
    assert sum(whole_table(cache)[0]) == cache.stats().unique


def test_memory_report_adds_up_to_the_capacity_in_bytes():
    layout = RowLayout(rows=100_000, width=16, state_width=16)
    cold = HostMemory().open(layout, name="", identity={})
    cache = HostCache(cold, slots=1000)
    assert sum(cache.memory_report()["cache"].values()) == 1000 * cache_bytes_per_slot(layout)
    assert cache.memory_report()["cold"]["weight"] >= 100_000 * 64
    before = cache.memory_report()
    cache.plan(np.arange(10_000)).release()  # what a batch beyond the capacity takes is no part of it
    report = cache.memory_report()
    assert report["cache"] == before["cache"]
    assert before["batch"]["transient_map"] == 0
    assert report["batch"]["transient_map"] == 0  # an index of all rows has room for them
    assert report["cold"]["index"] == 100_000 * 4 - 1000 * map_bytes_per_slot()  # what the capacity has not paid for
    assert report["batch"]["transient_rows"] >= 9000 * 64


def test_memory_report_counts_plans_and_transient_rows():
    cache = make_cache(1)
    assert cache.memory_report()["batch"] == {"transient_rows": 0, "transient_map": 0, "plans": 0}
    ticket = cache.plan(keys_of([1, 2, 2]))
    report = cache.memory_report()["batch"]
    assert report["plans"] == 3 * 4 + 3 * 4 + 2 * 8 + 2 * 4
    assert report["transient_rows"] > 0
    del ticket
    assert cache.memory_report()["batch"]["plans"] == 0


# --- what a cache must not lose or confuse ----------------------------------------------------------------------------


class Sevens:
    """Initial rows that no storage would come up with."""

    def generate(self, keys, rows, weight, state, state_width):
        weight[rows] = 7
        state[rows, :state_width] = self.state(state_width)

    def state(self, state_width):
        return np.full(state_width, 77, np.uint32)


def test_rows_that_were_only_read_keep_their_initial_values():
    cache = make_cache(1, initial=Sevens())
    for _ in range(3):
        for key in (1, 2, 3):
            ticket = cache.plan(keys_of([key]))
            assert cache.hot.weight[ticket.homes].tolist() == [[7.0] * WIDTH]
            assert cache.hot.state[ticket.homes].tolist() == [[77] * STATE]
            ticket.release()


def test_rows_read_again_are_clean():
    cache = make_cache(1)
    serve(cache, [1]).release()
    cache.plan(keys_of([2])).release()
    before = cache.stats()
    for key in (1, 2, 1):
        cache.plan(keys_of([key])).release()
    counted = cache.stats() - before
    assert (counted.rows_filled, counted.evictions) == (3, 3)
    assert counted.rows_written_back == 1  # 2, which cold storage did not know


@pytest.mark.parametrize(("remember", "kept"), [(True, 1), (False, 2)])
def test_a_returning_row_starts_again_unless_it_is_remembered(remember, kept):
    cache = make_cache(2, policy=LFU(half_life_batches=math.inf, remember_evicted=remember))
    for _ in range(5):
        cache.plan(keys_of([1])).release()
    for _ in range(2):
        cache.plan(keys_of([2])).release()
    cache.plan(keys_of([3, 4])).release()  # both leave
    cache.plan(keys_of([1, 2])).release()  # and return: 1 with 6 uses or 1, 2 with 3 or 1
    cache.plan(keys_of([2])).release()  # 4 or 2
    cache.plan(keys_of([5])).release()
    assert kept in cache.hot.key[:2]
    assert 3 - kept not in cache.hot.key[:2]


def test_scores_of_another_policy_are_dropped_and_rows_stay_written():
    cache = make_cache(2, policy=LRU())
    serve(cache, [1, 2, 3]).release()
    cache.flush()
    cold = cache.cold
    scores = cold.state[:, -1].copy()
    assert scores.max() > MIN_SCORE
    HostCache(cold, slots=2, policy=LRU())
    assert np.array_equal(cold.state[:, -1], scores)
    other = HostCache(cold, slots=2, policy=LFU())
    assert cold.state[:, -1].tolist() == np.minimum(scores, MIN_SCORE).tolist()
    assert whole_table(other)[0][:4] == [0.0, 1.0, 1.0, 1.0]


def test_no_memory_for_transient_rows_changes_nothing(monkeypatch):
    cache = make_cache(4)
    serve(cache, [1, 2, 3, 4]).release()
    before = cache.hot.key.copy(), cache.stats()

    def grow(slots):
        raise MemoryError("planted")

    with monkeypatch.context() as patched:
        patched.setattr(cache.hot, "_grow", grow)
        with pytest.raises(MemoryError):
            cache.plan(keys_of(range(10, 20)))
    assert np.array_equal(cache.hot.key, before[0])
    assert cache.stats() == before[1]
    check_consistent(cache)
    serve(cache, range(ROWS)).release()
    assert whole_table(cache)[0] == [1.0, 2.0, 2.0, 2.0, 2.0] + [1.0] * (ROWS - 5)


def test_forget_empties_the_cache_for_a_storage_that_was_replaced():
    cache = make_cache(3)
    serve(cache, [1, 2, 3, 4]).release()
    cache.cold.reset()
    cache.forget()
    check_consistent(cache)
    assert cache.hot.free == 3
    serve(cache, [2, 4, 5]).release()
    assert whole_table(cache)[0][:6] == [0.0, 0.0, 1.0, 0.0, 1.0, 1.0]


def test_import_of_one_part_generates_the_other():
    for weight, state in ((9, None), (None, 99)):
        cache = make_cache(2, initial=Sevens())
        cache.import_rows(
            0,
            None if weight is None else np.full((ROWS, WIDTH), weight, np.float32),
            None if state is None else np.full((ROWS, STATE), state, np.uint32),
        )
        assert whole_table(cache) == ([weight or 7.0] * ROWS, [state or 77] * ROWS)
        ticket = cache.plan(keys_of([5]))
        assert cache.hot.weight[ticket.homes, 0].tolist() == [weight or 7.0]
        assert cache.hot.state[ticket.homes, 0].tolist() == [state or 77]


# --- tickets ----------------------------------------------------------------------------------------------------------


class Empty(Flight):
    def size_bytes(self):
        return 0


def test_batches_released_after_a_ticket_in_flight_count_as_locked():
    """Their rows are: the lock asks whether a row's last batch is older than the oldest ticket."""
    tickets = TicketLedger()
    flights = [Empty(batch, tickets) for batch in range(1, 6)]
    for flight, uncached in zip(flights, (False, False, True, False, False), strict=True):
        tickets.open(flight, ids=10 * flight.batch, uncached=uncached)
    flights[0].release()
    for flight in flights[2:]:
        flight.release()
    assert (tickets.live, tickets.oldest(6)) == ({2}, 2)
    assert tickets.locked(2) == (20 + 30 + 40 + 50, True)
    flights[1].release()
    assert (tickets.live, tickets.oldest(6)) == (set(), 6)
    assert tickets.locked(5) == (50, False)  # released batches lock on while an older one is in flight
    tickets.reset()  # batches go back, as after a checkpoint
    assert tickets.locked(2) == (0, False)
    tickets.open(Empty(2, tickets), ids=7)
    assert tickets.locked(2) == (7, False)
    assert tickets.locked(3) == (0, False)


def test_ticket_whose_finaliser_was_interrupted_is_forgotten():
    """Python drops an interrupt that comes in a finaliser, and with it what that had yet to do."""
    cache = make_cache(2)
    ticket = serve(cache, [1, 2])
    ticket._released = None  # as if it had said so
    del ticket
    cache.check_idle("test")
