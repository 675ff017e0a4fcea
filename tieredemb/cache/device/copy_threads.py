"""Threads that copy rows between cold storage and buffers, and never return to the interpreter.

A row is some 500 bytes at a random address: many threads are needed for some tenths of a millisecond, again and again,
while other threads hold the interpreter. To hand ranges to Python's threads took longer than to copy the rows; here a
job costs one system call a thread. Rows are claimed in chunks, so that a thread that lost its core delays little.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import sys
import threading
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from tieredemb.cache.device.copy_threads_cpu import (
    ALONE,
    CHUNK,
    END,
    JOB,
    JOB_WORDS,
    LINE,
    LOOKS,
    SLEEP,
    WAITING,
    WATCH,
    job_abort,
    job_await,
    job_begin,
    job_finish,
    jobs_serve,
    jobs_watch,
    report_is_there,
)
from tieredemb.kernels.constants import REPORT_NUMBER, REPORT_WORDS
from tieredemb.kernels.parallel_cpu import num_threads

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

MOST_LOOKS = LOOKS + 100  # at a report, before the GPU is queried for an error: some milliseconds
_NUMBERS = itertools.count(1)  # of jobs


class MissReport(NamedTuple):
    """A GPU's report to the host about the missed rows of a plan. `words`: int64 in pinned memory: the number of missed
    rows, two more words, then `number`, and then the missed keys; the GPU writes `number` last, and it differs from
    that of every earlier report · `event`: after the report, and after the victims' rows were sent to the host."""

    words: torch.Tensor
    number: int
    event: torch.cuda.Event

    def keys(self, rows: int) -> torch.Tensor:
        """The words of up to `rows` keys."""
        return self.words[REPORT_WORDS : REPORT_WORDS + rows]

    @property
    def is_there(self) -> bool:
        """Whether it has arrived, or a later one."""
        return int(self.words[REPORT_NUMBER]) >= self.number

    def wait(self) -> None:
        """Returns once it has arrived, perhaps before its event. Raises if the GPU has failed."""
        while not report_is_there(self.words.data_ptr(), self.number, MOST_LOOKS):
            self.event.query()


@dataclass(eq=False)
class CopyJob:
    """Rows to be copied between cold storage, `weights` (rows, D) and `states` (rows, S + 1), and the buffers `weight`
    (K, D) and `state` (K, S + 1): the rows `keys`, int64 (K,). Without `dirty` they are gathered into the buffers; with
    `dirty`, uint8 (K,), they are scattered to cold storage. All of it is contiguous and in host memory; see
    `RowCopies`.

    `report`: contains the keys and their number; the job begins when the report arrives, and copies nothing if there
    are more than K · `is_done`: whether all of its rows were copied · `number`: unique."""

    keys: torch.Tensor
    weights: Array
    states: Array
    weight: torch.Tensor
    state: torch.Tensor
    dirty: torch.Tensor | None = None
    report: MissReport | None = None
    is_done: bool = False
    number: int = field(default_factory=_NUMBERS.__next__)

    def words(self, helpers: int) -> tuple[int, ...]:
        """The job as `job_work` and `jobs_watch` read it. `helpers`: how many threads may be woken up for it."""
        sizes = (self.weights.shape[1] * self.weights.itemsize, self.states.shape[1] * self.states.itemsize)
        buffers = (self.weight.data_ptr(), self.state.data_ptr(), 0 if self.dirty is None else self.dirty.data_ptr())
        cold = (self.weights.ctypes.data, self.states.ctypes.data)
        report = (0, 0) if self.report is None else (self.report.words.data_ptr(), self.report.number)
        return self.keys.shape[0], self.keys.data_ptr(), *cold, *sizes, *buffers, *report, helpers, self.number


class _Beginning:
    """Lives as long as the call that posts a job on the board, however that ends."""


class CopyThreads:
    """The threads of a process that copy rows, one job at a time; a second job may wait for its report. With `alone`
    there are no threads: the caller copies all rows."""

    def __init__(self, *, alone: bool = False) -> None:
        self._lock = threading.RLock()
        self._beginning: weakref.ref[_Beginning] | None = None
        self._helpers = 0
        # the current jobs, of which the last may wait: their memory must not be freed
        self._job: CopyJob | None = None
        self._before: CopyJob | None = None
        self._watches = False  # whether there is a thread that waits for reports
        self._memory = np.zeros((END + LINE) // 8, np.int64)
        if not alone:  # threads sleep there until the process ends, longer than Python's objects live
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._memory))
        self._board = -(-self._memory.ctypes.data // LINE) * LINE
        self._words, self._waiting_words = self._at(JOB), self._at(WAITING)
        # without semaphores in memory (macOS) one thread copies all
        init = ctypes.CDLL(None).sem_init
        sleeps = all([init(ctypes.c_void_p(self._board + place), 0, 0) == 0 for place in (SLEEP, WATCH)])  # noqa: C419
        self._most = sys.maxsize if sleeps and not alone else 0

    def begin(self, job: CopyJob) -> None:
        """Starts a job, after the last one has finished. Returns once other threads work on it, or it is done; `finish`
        waits for the rest."""
        with self._lock:
            if self._is_beginning:  # a finaliser runs during this call, on the same thread
                other = CopyThreads(alone=True)
                other.begin(job)
                return
            self._finish()
            here = _Beginning()
            self._beginning = weakref.ref(here)
            try:
                helpers = self._post(job)
            finally:
                self._beginning = None
            if helpers == 0:
                self._finish()

    def begin_when_reported(self, job: CopyJob) -> bool:
        """Returns at once. Other threads start the job once its report has arrived and the current job is done, unless
        another job is begun before. Returns False, with nothing begun, if no thread can wait for a report, or the
        current job still waits for its own."""
        with self._lock:
            if self._is_beginning or _is_awaited(self._job) or not self._may_watch():
                return False
            if self._before is not None or (self._job is not None and self._job.report is not None):
                self._finish()
            here = _Beginning()
            self._beginning = weakref.ref(here)
            try:
                helpers = self._ensure_helpers(min(job.keys.shape[0] // CHUNK, _most_helpers(), self._most))
                self._waiting_words[:] = job.words(helpers)
                self._before, self._job = self._job, job
                job_await(self._board)
            finally:
                self._beginning = None
            return True

    def finish(self) -> None:
        """Returns once no job is left. A job whose report has not arrived is aborted."""
        with self._lock:
            if not self._is_beginning:  # else it is called by a finaliser, whose own rows are copied at once
                self._finish()

    @property
    def _is_beginning(self) -> bool:
        """Whether a call is posting a job on the board."""
        return self._beginning is not None and self._beginning() is not None

    def _finish(self) -> None:
        """Ends the current jobs. A job whose report has not arrived is aborted: the caller never waits for a GPU."""
        job, before = self._job, self._before
        if job is None:
            return
        if _is_awaited(job):
            job_abort(self._board)
        opened = job_finish(self._board)
        # a finaliser may have ended it meanwhile, and run jobs of its own
        job.is_done = job.is_done or opened == job.number
        if self._job is job:
            self._job = None
        if self._before is before:
            self._before = None

    def _at(self, place: int) -> Array:
        """The words of a job at this place on the board."""
        first = (self._board + place - self._memory.ctypes.data) // 8
        return self._memory[first : first + JOB_WORDS]

    def _post(self, job: CopyJob) -> int:
        """Posts a job on the board; returns how many threads were woken up for it."""
        n = job.keys.shape[0]
        if n == 0:
            return 0
        helpers = self._ensure_helpers(0 if n <= ALONE else min(n // CHUNK, _most_helpers(), self._most))
        self._words[:] = job.words(helpers)
        self._job = job
        job_begin(self._board, helpers)
        return helpers

    def _may_watch(self) -> bool:
        """Whether there is a thread that waits for reports, or could be started."""
        if not self._watches and self._most and threading.main_thread().is_alive():
            with contextlib.suppress(RuntimeError):
                self._start(jobs_watch, "tieredemb-watch")
                self._watches = True
        return self._watches

    def _start(self, serves: Any, name: str) -> None:
        serves.compile("void(int64)")
        threading.Thread(target=serves, args=(self._board,), name=name, daemon=True).start()

    def _ensure_helpers(self, wanted: int) -> int:
        """Starts threads up to `wanted`; returns how many of these there are."""
        if wanted > self._helpers and threading.main_thread().is_alive():  # no new threads once the interpreter ends
            with contextlib.suppress(RuntimeError):  # no more threads: the present ones do it, or this one
                while self._helpers < wanted:
                    self._start(jobs_serve, "tieredemb-copy")
                    self._helpers += 1
        return min(wanted, self._helpers)


def _most_helpers() -> int:
    """How many threads may help the one that leads a job. Cores are left for threads that compute and launch: of 16, a
    step beside 7 or 9 helpers took a tenth less than beside 15 (H200's host)."""
    threads = num_threads()
    return threads - 1 - 3 * threads // 8


def _is_awaited(job: CopyJob | None) -> bool:
    """Whether the job still waits for its report, which never arrives from a GPU that has failed."""
    return job is not None and job.report is not None and not job.report.is_there


_THREADS: dict[int, CopyThreads] = {}  # by process: a fork leaves the threads behind


def copy_threads() -> CopyThreads:
    """The copy threads of this process."""
    found = _THREADS.get(os.getpid())
    return _THREADS.setdefault(os.getpid(), CopyThreads()) if found is None else found
