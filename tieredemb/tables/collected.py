"""Closes what nobody has any more, wherever the garbage collector finds that out.

It may do so inside Python's own bookkeeping of threads, where this thread has a lock that starting and ending another
one wants, too: closing tables there, which threads help with, would wait for itself. So it is
left to a thread of which that bookkeeping knows nothing.
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
_under_way: dict[int, Any] = {}  # locks that are taken until a close on a thread of its own has ended


def when_collected(owner: object, close: Callable[[], object]) -> weakref.finalize[..., Any]:
    """Has `close` called once nobody has the `owner` any more, or when the process ends."""
    return weakref.finalize(owner, _close, close)


def _close(close: Callable[[], object]) -> None:
    locks = (getattr(module, name, None) for module, name in _LOCKS)
    if any(lock is not None and lock.locked() for lock in locks):
        _close_aside(functools.partial(_for_good, close))
    else:
        _for_good(close)


def _for_good(close: Callable[[], object]) -> None:
    """Closes what nobody can close again."""
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
