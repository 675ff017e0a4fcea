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

from tieredemb.storage.file.io import Descriptor
from tieredemb.storage.system import system


class FileLock:
    """An exclusive lock on an open file, which it owns from now on. Raises `BlockingIOError` when someone else holds
    it; then the file is closed."""

    def __init__(self, file: Descriptor) -> None:
        self.fd = file.fd
        self._descriptor = file
        with _GUARD:
            _HELD.add(self)
        try:
            system.flock(file.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Gives the lock back. A second call does nothing."""
        self._descriptor.close()


_GUARD = threading.RLock()  # a fork waits for it: no lock is half registered in the child
_HELD: weakref.WeakSet[Any] = weakref.WeakSet()


def _release_in_child() -> None:
    _GUARD.release()
    for lock in list(_HELD):
        lock.release()


os.register_at_fork(before=_GUARD.acquire, after_in_parent=_GUARD.release, after_in_child=_release_in_child)
