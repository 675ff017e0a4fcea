"""The locks of several caches, always taken in one order: those of all plans before those of all rows, the caches in
the order in which they were made. Two threads that each hold what the other waits for would wait for ever."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from operator import methodcaller
from typing import Any, Protocol

_ACQUIRE, _TRY, _RELEASE = methodcaller("acquire"), methodcaller("acquire", False), methodcaller("release")


class Lockable(Protocol):
    """A cache. `number`: in the order in which caches are made · `plan_lock`, `lock`: of its plans, and of its rows,
    each a `threading.RLock`."""

    number: int
    plan_lock: Any
    lock: Any


class Locks:
    """Keeps other threads from the `plans` and the `rows` of `caches`, which may be locked by this thread already.

    Ctrl-C leaves none taken: locks are taken and noted, and given back and struck out, in loops of C, in which no
    signal is handled. One that comes before the latter begins is made good when the object goes.
    """

    def __init__(self, caches: Iterable[Lockable], *, plans: bool = True, rows: bool = True) -> None:
        ordered = sorted(caches, key=lambda cache: cache.number)
        self._locks: list[Any] = [cache.plan_lock for cache in ordered] if plans else []
        if rows:
            self._locks += [cache.lock for cache in ordered]
        self._taken: list[Any] = []

    def held(self) -> Locks:
        """The same locks, for another `with`: one object is for one at a time."""
        locks = Locks.__new__(Locks)
        locks._locks, locks._taken = self._locks, []
        return locks

    def __enter__(self) -> None:
        try:
            self._taken.append(None)
            self._taken.extend(filter(_ACQUIRE, self._locks))
        except BaseException:
            if self._taken:
                self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        any(map(_RELEASE, iter(self._taken.pop, None)))

    def __del__(self) -> None:
        if self.__dict__.get("_taken"):  # it may be half made
            with contextlib.suppress(RuntimeError):  # collected on another thread, which has not taken them
                self.__exit__()


class TriedLock(Locks):
    """Takes one lock if nobody else has it, and tells whether: `with TriedLock(lock) as taken`."""

    def __init__(self, lock: Any) -> None:
        super().__init__(())
        self._locks = [lock]

    def __enter__(self) -> bool:  # type: ignore[override]
        self._taken.append(None)
        self._taken.extend(filter(_TRY, self._locks))
        return len(self._taken) > 1
