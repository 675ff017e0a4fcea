"""Locks of several caches: taken in one order by whoever takes them, and never kept by halves."""

from __future__ import annotations

import threading

import pytest
from training import table_configs

import tieredemb as te
from tieredemb.cache.locks import Locks


class Recorder:
    """A lock that notes when it is taken and given back. Fails to be taken if `fails`."""

    def __init__(self, name, notes, *, fails=False):
        self._name, self._notes, self._fails = name, notes, fails

    def acquire(self):
        if self._fails:
            raise KeyboardInterrupt
        self._notes.append(f"+{self._name}")
        return True

    def release(self):
        self._notes.append(f"-{self._name}")

    def __enter__(self):
        self.acquire()

    def __exit__(self, *_):
        self.release()


class FakeCache:
    def __init__(self, number, notes, *, fails=False):
        self.number = number
        self.plan_lock = Recorder(f"plans{number}", notes)
        self.lock = Recorder(f"rows{number}", notes, fails=fails)


def taken(locks, notes):
    """The order in which `locks` are taken."""
    notes.clear()
    with locks:
        pass
    return [note for note in notes if note.startswith("+")]


def test_locks_are_taken_in_the_order_in_which_caches_were_made():
    notes = []
    first, second = (FakeCache(number, notes) for number in (0, 1))
    for caches in ((first, second), (second, first)):
        notes.clear()
        with Locks(caches):
            # plans before rows, the first cache before the second
            assert notes == ["+plans0", "+plans1", "+rows0", "+rows1"]
            notes.clear()
        assert notes == ["-rows1", "-rows0", "-plans1", "-plans0"]
        assert taken(Locks(caches, rows=False), notes) == ["+plans0", "+plans1"]
        assert taken(Locks(caches, plans=False), notes) == ["+rows0", "+rows1"]


def test_an_error_while_locks_are_taken_gives_them_back():
    notes = []
    caches = [FakeCache(0, notes), FakeCache(1, notes, fails=True)]
    with pytest.raises(KeyboardInterrupt), Locks(caches):
        pass
    assert notes == ["+plans0", "+plans1", "+rows0", "-rows0", "-plans1", "-plans0"]


def test_tables_of_several_widths_take_their_locks_in_the_same_order(monkeypatch):
    """An update of one thread holds one width's rows while it waits for the next: a replay of another must not hold
    those."""
    table = te.TieredEmbeddingBagCollection(table_configs(widths=(4, 5, 8), rows=(3, 3, 3)), capacity=1.0)
    caches, notes = [group.cache for group in table.tables.groups], []
    for number, cache in enumerate(caches):
        monkeypatch.setattr(cache, "plan_lock", Recorder(f"plans{number}", notes))
        monkeypatch.setattr(cache, "lock", Recorder(f"rows{number}", notes))
    plans, rows = ["+plans0", "+plans1", "+plans2"], ["+rows0", "+rows1", "+rows2"]
    for locks in (table.tables.locked(), Locks(reversed(caches))):
        assert taken(locks, notes) == plans + rows
    assert taken(Locks(reversed(caches), rows=False), notes) == plans
    assert taken(Locks(reversed(caches), plans=False), notes) == rows
    monkeypatch.undo()


def test_other_threads_wait_for_what_is_locked_and_the_own_does_not():
    table = te.TieredEmbeddingBagCollection(table_configs(widths=(4, 5), rows=(3, 3)), capacity=1.0)
    cache = table.tables.groups[1].cache
    for locks, waits_to_plan, waits_for_rows in (
        (table.tables.locked(), True, True),
        (Locks([group.cache for group in table.tables.groups], rows=False), True, False),
        (table.tables.placed.now.rows.held(), False, True),
    ):
        with locks, locks, table.tables.locked():
            pass  # whoever holds them may take them again
        with locks:
            assert (not free(cache.plan_lock), not free(cache.lock)) == (waits_to_plan, waits_for_rows)
        assert free(cache.plan_lock)
        assert free(cache.lock)


def free(lock):
    """Whether another thread can take it."""
    results = []

    def take():
        results.append(lock.acquire(blocking=False))
        if results[-1]:
            lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join(30)
    return results[0]
