"""One owner a file: an exclusive `flock` that dies with the process, and that no forked child keeps alive.

A flock belongs to an open file description and lasts until the last descriptor of it is closed. Descriptors
are inherited by a fork (and mappings keep their own description open), so the lock has a description for
itself, is closed on exec, and is closed in a forked child. Closing it there leaves the parent's lock in
place.
"""

from __future__ import annotations

import fcntl
import os
import threading
import weakref
from typing import Any


class FileLock:
    """An exclusive lock on `fd`, which it owns from now on. Raises `BlockingIOError` when someone else holds
    it; then `fd` is closed."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._close = weakref.finalize(self, os.close, fd)
        self._close.atexit = False  # the exit closes it, after the cache has flushed
        with _GUARD:
            _HELD.add(self)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Gives the lock back. A second call does nothing."""
        self._close()


_GUARD = threading.Lock()  # a fork waits for it: no lock is half registered in the child
_HELD: weakref.WeakSet[Any] = weakref.WeakSet()


def _release_in_child() -> None:
    _GUARD.release()
    for lock in list(_HELD):
        lock.release()


os.register_at_fork(before=_GUARD.acquire, after_in_parent=_GUARD.release, after_in_child=_release_in_child)
