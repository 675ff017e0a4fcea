"""The locks of several caches, always taken in one order: those of all plans before those of all rows, the caches in
the order in which they were made. Two threads that each hold what the other waits for would wait for ever."""

from __future__ import annotations

from collections.abc import Iterable

from tieredemb.cache.base import Cache


class Locks:
    """Keeps other threads from the `plans` and the `rows` of `caches`, which may be locked by this thread already."""

    def __init__(self, caches: Iterable[Cache], *, plans: bool = True, rows: bool = True) -> None:
        ordered = sorted(caches, key=lambda cache: cache.number)
        self._locks = [cache.plan_lock for cache in ordered] if plans else []
        if rows:
            self._locks += [cache.lock for cache in ordered]
        self._last_first = self._locks[::-1]

    def __enter__(self) -> None:
        taken = 0
        try:
            for lock in self._locks:
                lock.acquire()
                taken += 1
        except BaseException:
            for lock in reversed(self._locks[:taken]):
                lock.release()
            raise

    def __exit__(self, *_: object) -> None:
        for lock in self._last_first:
            lock.release()
