"""Closes tables when nothing references them any more, on whichever thread the garbage collector runs.

The collector may run while this thread is inside Python's `threading` module and holds a lock that is also taken when a
thread starts or ends. Closing tables starts and ends threads, so closing them there would deadlock. Then a new thread
that `threading` does not know closes them.
"""

from __future__ import annotations

import _thread
import atexit
import functools
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import thread as futures
from typing import Any

# since Python 3.13 threads are counted without the first one; looked up when needed, as a fork gets new ones
_LOCKS = (threading, "_shutdown_locks_lock"), (futures, "_global_shutdown_lock")
_under_way: dict[int, Any] = {}  # a lock for each close on a thread of its own, held until that has ended


def when_collected(owner: object, close: Callable[[], object]) -> weakref.finalize[..., Any]:
    """Calls `close` once nothing references the `owner` any more, or when the process ends."""
    return weakref.finalize(owner, _close, close)


def _close(close: Callable[[], object]) -> None:
    locks = (getattr(module, name, None) for module, name in _LOCKS)
    if any(lock is not None and lock.locked() for lock in locks):
        _close_aside(functools.partial(_for_good, close))
    else:
        _for_good(close)


def _for_good(close: Callable[[], object]) -> None:
    """Closes. An error is reported, not raised: nobody can call this again."""
    try:
        close()
    except Exception as error:
        error.add_note(
            "The process ends, or nobody has these tables any more: rows that were not written are lost with them. "
            "Call tieredemb.close(model) yourself, while its error can still be answered"
        )
        raise


def _close_aside(close: Callable[[], object]) -> None:
    ended = _thread.allocate_lock()
    ended.acquire()

    def run() -> None:
        try:
            close()
        finally:
            _under_way.pop(id(ended), None)
            ended.release()

    _under_way[id(ended)] = ended
    try:
        _thread.start_new_thread(run, ())
    except RuntimeError:  # no more threads: the process's end closes it
        ended.release()
        del _under_way[id(ended)]
        atexit.register(close)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_under_way.clear)  # whose threads are the parent's


@atexit.register
def wait() -> None:
    """Until all of them have ended."""
    for ended in list(_under_way.values()):
        with ended:
            pass
