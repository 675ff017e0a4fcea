"""Threads that move rows between cold storage and buffers, and never return to the interpreter.

A row is 500 random bytes in a page of its own: many threads are wanted for some tenths of a millisecond, again and
again, while other threads hold the interpreter. To hand ranges to Python's threads took longer than to move the rows;
here a job costs one system call a thread, and rows are claimed in chunks, so that nobody waits long for a thread that
lost its core.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tieredemb.kernels.cpu import jit, num_threads
from tieredemb.kernels.native import (
    SEMAPHORE_BYTES,
    atomic_add,
    atomic_load,
    copy_bytes,
    copy_line_past,
    load_byte,
    load_long,
    load_word,
    prefetch_to_read,
    prefetch_to_write,
    semaphore_post,
    semaphore_wait,
    sleep_microseconds,
    yield_core,
)
from tieredemb.storage.base import TOLD_NUMBER, Told

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

# Byte offsets on the board. Counters have cache lines of their own: rows claimed, threads that are at the job, whether
# there is one, whether one is waited for, whether in vain. Then the words of the job (`Job.words`), and what threads
# sleep on.
NEXT, AT_IT, OPEN, AWAITED, GIVEN_UP, JOB, SLEEP, WATCH = 0, 64, 128, 192, 256, 320, 448, 512
END = WATCH + SEMAPHORE_BYTES
JOB_WORDS = 12
CHUNK = 64  # rows claimed at once: some 10 microseconds
ALONE = 512  # rows that one thread has moved before another has woken up
AHEAD = 8  # rows asked for before they are moved
LOOKS, NAP = 64, 20  # that a GPU's word is looked for at once, and microseconds between others
LINE = 64


@jit
def _copy_row(target: int, source: int, size: int) -> None:
    """Copies whole cache lines past the caches: to ask memory first for what is overwritten took a fifth of the time
    (H200's host, 15 threads)."""
    if (size | target) % LINE != 0:
        copy_bytes(target, source, size)
        return
    for line in range(0, size, LINE):
        copy_line_past(target + line, source + line)


@jit
def _gather(
    lo: int, hi: int, keys: int, weights: int, states: int, row: int, state: int, to: int, to_state: int
) -> None:
    """Copies the rows keys[lo:hi] of `weights` and `states`, `row` and `state` bytes each, to rows lo … hi - 1 of `to`
    and `to_state`; where the score, which ends the state, is zero the state alone."""
    for i in range(lo, hi):
        if i + AHEAD < hi:
            key = load_long(keys + 8 * (i + AHEAD))
            prefetch_to_read(states + key * state)
            for line in range(0, row, LINE):
                prefetch_to_read(weights + key * row + line)
        key = load_long(keys + 8 * i)
        copy_bytes(to_state + i * state, states + key * state, state)
        if load_word(to_state + i * state + state - 4) != 0:
            _copy_row(to + i * row, weights + key * row, row)


@jit
def _scatter(
    lo: int, hi: int, keys: int, weights: int, states: int, row: int, state: int, of: int, of_state: int, dirty: int
) -> None:
    """Copies rows lo … hi - 1 of `of` and `of_state` to the rows keys[lo:hi]; of a row that is not dirty the score. A
    state comes after its weights: a row is written once it has a score."""
    for i in range(lo, hi):
        if i + AHEAD < hi:
            key = load_long(keys + 8 * (i + AHEAD))
            prefetch_to_write(states + key * state)
            if load_byte(dirty + i + AHEAD) != 0:
                prefetch_to_write(weights + key * row)  # for the page: lines are overwritten
        key = load_long(keys + 8 * i)
        if load_byte(dirty + i) != 0:
            _copy_row(weights + key * row, of + i * row, row)
            copy_bytes(states + key * state, of_state + i * state, state)
        else:
            score = state - 4
            copy_bytes(states + key * state + score, of_state + i * state + score, 4)


@jit
def _work(board: int) -> None:
    """Moves what is left of the job."""
    job = board + JOB
    n, keys, weights, states = load_long(job), load_long(job + 8), load_long(job + 16), load_long(job + 24)
    row, state, rows, row_states = load_long(job + 32), load_long(job + 40), load_long(job + 48), load_long(job + 56)
    dirty = load_long(job + 64)
    while True:
        lo = atomic_add(board + NEXT, CHUNK)
        if lo >= n:
            return
        hi = min(n, lo + CHUNK)
        if dirty == 0:
            _gather(lo, hi, keys, weights, states, row, state, rows, row_states)
        else:
            _scatter(lo, hi, keys, weights, states, row, state, rows, row_states, dirty)


@jit
def _serve(board: int) -> None:
    """Helps with one job after another, for ever. A thread that wakes up too late for one may find the next."""
    while True:
        semaphore_wait(board + SLEEP)  # a signal may end it early: then there is no job
        atomic_add(board + AT_IT, 1)
        if atomic_load(board + OPEN) != 0:
            _work(board)
        atomic_add(board + AT_IT, -1)


@jit
def _begin(board: int, helpers: int) -> None:
    """Lets that many threads go at the job on the board."""
    atomic_add(board + NEXT, -atomic_load(board + NEXT))
    atomic_add(board + OPEN, 1)
    for _ in range(helpers):
        semaphore_post(board + SLEEP)


@jit
def _await(board: int) -> None:
    """Wakes up who waits for a GPU to tell of the job on the board."""
    atomic_add(board + GIVEN_UP, -atomic_load(board + GIVEN_UP))
    atomic_add(board + AWAITED, 1)
    semaphore_post(board + WATCH)


@jit
def _give_up(board: int) -> None:
    """Nobody need wait for a GPU's word any more."""
    atomic_add(board + GIVEN_UP, 1)


@jit
def _watch(board: int) -> None:
    """Waits for one GPU after the other to tell what is to be gathered, for ever, and lets the threads go at it."""
    while True:
        semaphore_wait(board + WATCH)
        if atomic_load(board + AWAITED) == 0:  # a signal has ended it early
            continue
        job, looks = board + JOB, 0
        rows, told, number, helpers = load_long(job), load_long(job + 72), load_long(job + 80), load_long(job + 88)
        while atomic_load(told + 8 * TOLD_NUMBER) < number and atomic_load(board + GIVEN_UP) == 0:
            looks += 1
            if looks > LOOKS:
                sleep_microseconds(NAP)
        count = load_long(told)
        if atomic_load(board + GIVEN_UP) == 0 and count <= rows:
            atomic_add(job, count - rows)
            _begin(board, min(helpers, count // CHUNK))
        atomic_add(board + AWAITED, -1)


@jit
def _finish(board: int) -> bool:
    """Helps with the job, if one was begun, until all of it is done; returns whether there was one. Who has come to it
    has left it then, with all rows that it claimed moved; who comes late finds none."""
    while atomic_load(board + AWAITED) != 0:  # the word is there, or none will come
        yield_core()
    if atomic_load(board + OPEN) == 0:
        return False
    _work(board)
    atomic_add(board + OPEN, -1)
    while atomic_load(board + AT_IT) > 0:
        yield_core()  # to a thread that has claimed rows and lost its core
    return True


@dataclass(eq=False)
class Job:
    """Rows that are to be moved between cold storage, `weights` (rows, D) and `states` (rows, S + 1), and the buffers
    `weight` (K, D) and `state` (K, S + 1): the rows `keys`, int64 (K,). To the buffers without `dirty`, uint8 (K,);
    with it from there. See `ColdRows.gather` and `scatter`; all of it contiguous, in host memory. `told`: who will have
    told the first of the keys, and how many; the job is to begin then, and nothing is moved if there are more · `done`:
    whether all was moved that there was to be."""

    keys: torch.Tensor
    weights: Array
    states: Array
    weight: torch.Tensor
    state: torch.Tensor
    dirty: torch.Tensor | None = None
    told: Told | None = None
    done: bool = False

    def words(self, helpers: int) -> tuple[int, ...]:
        """As `_work` and `_watch` read them. `helpers`: threads that may be woken up for it."""
        sizes = (self.weights.shape[1] * self.weights.itemsize, self.states.shape[1] * self.states.itemsize)
        buffers = (self.weight.data_ptr(), self.state.data_ptr(), 0 if self.dirty is None else self.dirty.data_ptr())
        cold = (self.weights.ctypes.data, self.states.ctypes.data)
        told = (0, 0) if self.told is None else (self.told.words.data_ptr(), self.told.number)
        return len(self.keys), self.keys.data_ptr(), *cold, *sizes, *buffers, *told, helpers


class Movers:
    """The threads of a process that move rows, one job at a time."""

    def __init__(self, *, alone: bool = False) -> None:
        self._lock = threading.RLock()
        self._is_beginning = False
        self._helpers = 0
        self._job: Job | None = None  # the one under way: what it reads and writes is not to be freed
        self._watches = False  # whether there is a thread that waits for GPUs
        self._memory = np.zeros((END + LINE) // 8, np.int64)
        if not alone:  # threads sleep there until the process ends, when Python has freed what it knows of
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._memory))
        self._board = -(-self._memory.ctypes.data // LINE) * LINE
        first = (self._board + JOB - self._memory.ctypes.data) // 8
        self._words = self._memory[first : first + JOB_WORDS]
        # without semaphores that lie in memory (macOS) one thread moves all
        init = ctypes.CDLL(None).sem_init
        sleeps = all([init(ctypes.c_void_p(self._board + place), 0, 0) == 0 for place in (SLEEP, WATCH)])  # noqa: C419
        self._most = sys.maxsize if sleeps and not alone else 0

    def begin(self, job: Job) -> None:
        """Returns once others are at the job, or at once with all of it done; the next job waits until it is, as
        `finish` does."""
        with self._lock:
            if self._is_beginning:  # the garbage collector runs a finaliser in the middle of it, on the same thread
                other = Movers(alone=True)
                other.begin(job)
                return
            self._finish()
            self._is_beginning = True
            try:
                helpers = self._put_up(job)
            finally:
                self._is_beginning = False
            if helpers == 0:
                self._finish()

    def begin_when_told(self, job: Job) -> bool:
        """Returns at once; others will be at the job as soon as a GPU has told of it, unless the next job comes before.
        False, with nothing begun, where none can wait for that, or one that a GPU has yet to tell of is under way."""
        with self._lock:
            if self._is_beginning or _is_awaited(self._job) or not self._may_watch():
                return False
            self._finish()
            self._is_beginning = True
            try:
                self._words[:] = job.words(self._staff(min(len(job.keys) // CHUNK, num_threads() - 1, self._most)))
                self._job = job
                _await(self._board)
            finally:
                self._is_beginning = False
            return True

    def finish(self) -> None:
        """Returns once nothing is under way."""
        with self._lock:
            if not self._is_beginning:  # or a finaliser asks in the middle of it, whose own rows are moved at once
                self._finish()

    def _finish(self) -> None:
        """Ends the job under way. One that a GPU has yet to tell of is given up: who asks next waits for no GPU."""
        if self._job is None:
            return
        if _is_awaited(self._job):
            _give_up(self._board)
        self._job.done = _finish(self._board)
        self._job = None

    def _put_up(self, job: Job) -> int:
        """Puts a job on the board; returns how many threads were woken up for it."""
        n = len(job.keys)
        if n == 0:
            return 0
        helpers = self._staff(0 if n <= ALONE else min(n // CHUNK, num_threads() - 1, self._most))
        self._words[:] = job.words(helpers)
        self._job = job
        _begin(self._board, helpers)
        return helpers

    def _may_watch(self) -> bool:
        """Whether there is a thread that waits for GPUs, or could be started."""
        if not self._watches and self._most and threading.main_thread().is_alive():
            _watch.compile("void(int64)")
            with contextlib.suppress(RuntimeError):
                threading.Thread(target=_watch, args=(self._board,), name="tieredemb-watch", daemon=True).start()
                self._watches = True
        return self._watches

    def _staff(self, wanted: int) -> int:
        """How many threads help, of those wanted."""
        if wanted > self._helpers and threading.main_thread().is_alive():  # no new threads once the interpreter ends
            _serve.compile("void(int64)")
            with contextlib.suppress(RuntimeError):  # no more threads: those that there are do it, or this one
                while self._helpers < wanted:
                    threading.Thread(target=_serve, args=(self._board,), name="tieredemb-mover", daemon=True).start()
                    self._helpers += 1
        return min(wanted, self._helpers)


def _is_awaited(job: Job | None) -> bool:
    """Whether a GPU has yet to tell of it; one that has failed never will."""
    if job is None or job.told is None:
        return False
    try:
        return not job.told.event.query()  # type: ignore[no-untyped-call]
    except RuntimeError:
        return True


_MOVERS: dict[int, Movers] = {}  # by process: a fork leaves the threads behind


def movers() -> Movers:
    """Those of this process."""
    found = _MOVERS.get(os.getpid())
    return _MOVERS.setdefault(os.getpid(), Movers()) if found is None else found
