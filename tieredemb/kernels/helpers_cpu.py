# mypy: allow-untyped-defs, allow-untyped-calls
"""Threads that help with CPU kernels. They wait for work in compiled code, without the interpreter.

The caller of a kernel works on its ranges too, and waits only for helpers that have begun one: if cores are busy, the
caller does most of the work itself, whereas the barrier of an OpenMP team would wait until each thread has had a core
(beside one busy process a step of 26 tables took 20 times as long). A helper looks for the next call for a moment
before it sleeps, as the kernels of a step follow closely: then a call of two empty ranges takes 4 microseconds. Through
Python's queues and locks it took 80.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from numba.core import types

from tieredemb.kernels.cpu import c_function, inline
from tieredemb.kernels.native import (
    atomic_add,
    atomic_exchange,
    atomic_load,
    call_with,
    condition_broadcast,
    condition_signal,
    condition_wait,
    load_long,
    mutex_lock,
    mutex_unlock,
    pause,
    store_long,
    yield_core,
)

LINE = 128  # bytes: cache lines are fetched in pairs
# Byte offsets on a board, each in its own cache line: whether there is a job, threads that work on it, helpers that
# were called and have not begun, helpers asleep, whether they are to end, the semaphore on which they sleep; then the
# job: the addresses of a function and of its argument.
OPEN, AT_IT, CALLED, ASLEEP, IS_OVER, MUTEX, CONDITION, JOB, END = range(0, 9 * LINE, LINE)
LOOKS = 1000  # of a helper that waits for a call, with a pause each, before others may have the core: 25 microseconds
PATIENCE = 8  # times that it does so before it sleeps, which would make it late for the small kernels of a step


@inline
def takes_call(board):
    """Whether a helper was called; takes the call, so that no other helper does."""
    if atomic_load(board + CALLED) <= 0:
        return False
    if atomic_add(board + CALLED, -1) > 0:
        return True
    atomic_add(board + CALLED, 1)  # another was faster
    return False


@inline
def wait_for_call(board):
    for _ in range(PATIENCE):
        for _ in range(LOOKS):
            if takes_call(board) or atomic_load(board + IS_OVER) != 0:
                return
            pause()
        yield_core()
    mutex_lock(board + MUTEX)
    atomic_add(board + ASLEEP, 1)
    while not takes_call(board) and atomic_load(board + IS_OVER) == 0:
        condition_wait(board + CONDITION, board + MUTEX)
    atomic_add(board + ASLEEP, -1)
    mutex_unlock(board + MUTEX)


def helper_serve(board):
    """Works on one job after another, until the board is marked over. A helper that is late may find the next job."""
    while atomic_load(board + IS_OVER) == 0:
        wait_for_call(board)
        atomic_add(board + AT_IT, 1)
        if atomic_load(board + OPEN) != 0:
            call_with(load_long(board + JOB), load_long(board + JOB + 8))
        atomic_add(board + AT_IT, -1)


def job_run(board, helpers, function, data):
    """Calls `function(data)`, both of them addresses, on this thread and on up to `helpers` others. Returns once this
    thread and the helpers that have begun are done; a late helper finds no job."""
    store_long(board + JOB, function)
    store_long(board + JOB + 8, data)
    atomic_exchange(board + OPEN, 1)
    atomic_exchange(board + CALLED, helpers)
    asleep = atomic_load(board + ASLEEP)
    if asleep > 0:
        mutex_lock(board + MUTEX)
        for _ in range(min(helpers, asleep)):
            condition_signal(board + CONDITION)
        mutex_unlock(board + MUTEX)
    call_with(function, data)
    atomic_exchange(board + OPEN, 0)
    atomic_exchange(board + CALLED, 0)
    looks = 0
    while atomic_load(board + AT_IT) > 0:
        looks += 1
        if looks < LOOKS:
            pause()
        else:
            yield_core()  # to one that has begun and lost its core


def helpers_end(board):
    """Lets all helpers go, those too that an interrupt has kept from being counted."""
    atomic_exchange(board + IS_OVER, 1)
    mutex_lock(board + MUTEX)
    condition_broadcast(board + CONDITION)
    mutex_unlock(board + MUTEX)


@functools.cache
def compiled(function: Callable[..., None]) -> Any:
    """One of these, whose arguments are int64, as a C function. It is compiled when it is first needed."""
    arguments = [types.int64] * len(inspect.signature(function).parameters)
    return c_function(function, arguments)


class Board:
    """Where one thread calls its helpers to work; they end with it."""

    def __init__(self) -> None:
        self._memory = np.zeros(END // 8 + LINE // 8, np.int64)
        self.address: int = -(-self._memory.ctypes.data // LINE) * LINE
        self._helpers = 0
        self.run: int = compiled(job_run).address
        for function in (helper_serve, helpers_end):  # now: where they are called, threads wait for them
            compiled(function)
        for init, place in (("pthread_mutex_init", MUTEX), ("pthread_cond_init", CONDITION)):
            error = getattr(ctypes.CDLL(None), init)(ctypes.c_void_p(self.address + place), None)
            if error:
                raise OSError(error, os.strerror(error))
        # not at the end of the process: its threads end with it, asleep on memory that their frames hold
        weakref.finalize(self, _end, self._memory, self.address).atexit = False

    def staff(self, wanted: int) -> int:
        """How many helpers there are, at most `wanted`."""
        if wanted > self._helpers and threading.main_thread().is_alive():  # no new threads once the interpreter ends
            with contextlib.suppress(RuntimeError):  # no more threads: the present ones help
                while self._helpers < wanted:
                    serve = threading.Thread(target=_serve, args=(self._memory, self.address), daemon=True)
                    serve.name = "tieredemb-helper"
                    serve.start()
                    self._helpers += 1
        return min(wanted, self._helpers)


def _end(memory: object, address: int) -> None:
    """`memory`: of the board, kept alive until then."""
    compiled(helpers_end).ctypes(address)


def _serve(memory: object, address: int) -> None:
    compiled(helper_serve).ctypes(address)


class _Boards(threading.local):
    """That of each thread."""

    board: Board | None = None


_boards = _Boards()
_left_behind: list[_Boards] = []


def _leave_behind() -> None:
    """A forked child has none of its parent's threads."""
    global _boards
    _left_behind.append(_boards)
    _boards = _Boards()


os.register_at_fork(after_in_child=_leave_behind)


def called(helpers: int) -> tuple[int, int, int]:
    """The helpers of this thread: the address of `job_run`, of its board, and how many of `wanted` there are."""
    if _boards.board is None:
        _boards.board = Board()
    board = _boards.board
    return board.run, board.address, board.staff(helpers)
