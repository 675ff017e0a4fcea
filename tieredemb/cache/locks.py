"""The locks of several caches, always taken in one order, so that threads cannot deadlock: the locks of all plans
before those of all rows, the caches in the order of their creation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from operator import methodcaller
from typing import Any, Protocol

_ACQUIRE, _TRY, _RELEASE = methodcaller("acquire"), methodcaller("acquire", False), methodcaller("release")


class Lockable(Protocol):
    """A cache. `number`: in the order of creation · `plan_lock`, `lock`: of its plans, and of its rows, each a
    `threading.RLock`."""

    number: int
    plan_lock: Any
    lock: Any


class Locks:
    """Keeps other threads from the `plans` and the `rows` of `caches`, which this thread may have locked already.

    Ctrl-C leaves no lock taken: locks are acquired and noted, and released and removed, in loops of C, in which no
    signal is handled. If it is raised before the release, the locks are released when the object is freed.
    """

    def __init__(self, caches: Iterable[Lockable], *, plans: bool = True, rows: bool = True) -> None:
        ordered = sorted(caches, key=lambda cache: cache.number)
        self._locks: list[Any] = [cache.plan_lock for cache in ordered] if plans else []
        if rows:
            self._locks += [cache.lock for cache in ordered]
        self._taken: list[Any] = []

    def held(self) -> Locks:
        """The same locks, for another `with`: each object serves one at a time."""
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
            with contextlib.suppress(RuntimeError):  # freed on another thread, which does not own them
                self.__exit__()


class TriedLock(Locks):
    """Takes one lock if no other thread has it; `with TriedLock(lock) as taken` returns whether."""

    def __init__(self, lock: Any) -> None:
        super().__init__(())
        self._locks = [lock]

    def __enter__(self) -> bool:  # type: ignore[override]
        self._taken.append(None)
        self._taken.extend(filter(_TRY, self._locks))
        return len(self._taken) > 1
