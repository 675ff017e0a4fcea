# mypy: allow-untyped-calls
"""Kernels that a second process compiles, while this one compiles those that it needs first.

A first run waits for its compiler, some eight seconds for a table under Adam, and numba compiles one kernel at a time,
with any number of threads. So the kernels that are needed last, those of the update, are compiled by a fork of this
process, which writes them to the cache on the disk (kernel_cache.py) and ends. This process reads them there, waits for
the one being compiled, or compiles one that was not begun. Nothing depends on the fork: what it does not compile is
compiled here.

It is a fork, as a new process would first have to import torch, which takes as long. It only compiles: this process's
files are closed in it, no object is collected, no exit handler runs, and it prints nothing.

`TIEREDEMB_COMPILE_BESIDE=0` in the environment switches it off.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import mmap
import os
import select
import signal
import threading
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

from numba import typeof
from numba.core.compiler_lock import global_compiler_lock

from tieredemb.kernels.compile_notice import NOTICE

PATIENCE = 30.0  # seconds without a kernel, after which this process compiles for itself; one takes two, or some more
MOST_SECONDS = 300  # seconds that a fork lives, in case it hangs
FREE, AT_WORK, DONE, TAKEN = range(4)  # states of a kernel: not begun, begun in the fork, compiled, begun here

Call = tuple[Any, tuple[Any, ...]]  # a kernel, and arguments as it will be called with
_known: set[tuple[Any, Any]] = set()  # kernels and types of arguments that were seen to
_forks: list[Beside] = []  # the last one


def compile_beside(calls: Sequence[Call]) -> None:
    """Has the kernels of `calls` compiled by a fork, in order, unless they are compiled, and if there is a core for it.
    Returns at once."""
    wanted = []
    for kernel, args in calls:
        kinds = tuple(map(typeof, args))
        if (kernel, kinds) not in _known:
            _known.add((kernel, kinds))
            if not _is_compiled(kernel, kinds):
                wanted.append((kernel, kinds))
    # one at a time, as each takes a core
    if wanted and _may_fork() and not any(each.is_at_work for each in _forks):
        with contextlib.suppress(OSError, RuntimeError):  # no process, no memory, or the end: they are compiled here
            _forks[:] = [Beside(wanted)]


def _may_fork() -> bool:
    """Whether it is not switched off, and this process's share of the cores is more than one."""
    processes = os.environ.get("LOCAL_WORLD_SIZE", "")  # processes that torchrun has started here
    cores = len(os.sched_getaffinity(0)) // max(1, int(processes) if processes.isdecimal() else 1)
    return cores > 1 and os.environ.get("TIEREDEMB_COMPILE_BESIDE", "1") not in ("", "0")


def _is_compiled(kernel: Any, kinds: tuple[Any, ...]) -> bool:
    """Whether a kernel for arguments of these types is compiled, or on the disk, or cannot be kept on the disk."""
    return kinds in kernel.overloads or not kernel._cache.lacks(kinds, kernel.targetctx)


class Beside:
    """A fork of this process that compiles `wanted`, kernels with the types of their arguments. Raises `OSError` where
    there can be none."""

    def __init__(self, wanted: Sequence[tuple[Any, tuple[Any, ...]]]) -> None:
        self._process = os.getpid()
        self._states = mmap.mmap(-1, len(wanted))  # of each kernel, which both processes see
        self._lock = threading.RLock()
        self._end, written = os.pipe()  # a byte for each kernel that is done; it ends with the fork
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # none is handled in the fork
        try:
            with warnings.catch_warnings(), global_compiler_lock:  # which the fork then has, and no other thread
                warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which the fork has none of
                child = os.fork()
            if child == 0:
                _compile_all(wanted, self._states, written)
            with contextlib.suppress(ChildProcessError):  # other code waits for all children, or they leave no zombies
                os.waitpid(child, 0)
        except (OSError, RuntimeError):
            self._over()
            raise
        finally:
            os.close(written)
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for number, (kernel, _) in enumerate(wanted):
            kernel.compile = functools.partial(self._compile, number, kernel)

    @property
    def is_at_work(self) -> bool:
        """Whether the fork has something to compile, or is at it, as far as this process knows."""
        return self._end >= 0 and any(state in (FREE, AT_WORK) for state in self._states[:])

    def _compile(self, number: int, kernel: Any, given: Any) -> Any:
        """What a kernel's `compile` is until it is first called, for whatever types: then the fork is through with the
        kernel, or leaves it."""
        if os.getpid() == self._process:
            self._wait(number, kernel)
        with contextlib.suppress(AttributeError):  # another thread was here, too
            del kernel.compile
        return type(kernel).compile(kernel, given)

    def _wait(self, number: int, kernel: Any) -> None:
        """Returns when the fork has finished a kernel, or will not begin it."""
        with self._lock:
            if self._states[number] == FREE:
                self._states[number] = TAKEN
            if self._states[number] == AT_WORK:
                with NOTICE.at(kernel.py_func):
                    while self._states[number] == AT_WORK and self._continues():
                        pass
            if all(state in (DONE, TAKEN) for state in self._states[:]):
                self._over()

    def _continues(self) -> bool:
        """Waits until the fork has done something; returns whether it is alive."""
        if self._end < 0:
            return False
        poll = select.poll()
        poll.register(self._end, select.POLLIN)
        if poll.poll(PATIENCE * 1000) and os.read(self._end, 1):
            return True
        self._over()
        return False

    def _over(self) -> None:
        """Nothing is waited for any more. A fork that is yet at work ends when it has something to say."""
        if self._end >= 0:
            end, self._end = self._end, -1
            os.close(end)


def _compile_all(wanted: Sequence[tuple[Any, tuple[Any, ...]]], states: mmap.mmap, report_fd: int) -> NoReturn:
    """The work of the fork, in a second fork: so it is no child that this process has to wait for."""
    try:
        if os.fork():
            os._exit(0)
        gc.disable()  # it must not free objects of this process
        signal.set_wakeup_fd(-1)
        for sent in signal.valid_signals():
            if callable(signal.getsignal(sent)):  # handlers of this process must not run twice
                signal.signal(sent, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(MOST_SECONDS)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        NOTICE.silence()
        nothing = os.open(os.devnull, os.O_RDWR)
        for file in range(3):
            os.dup2(nothing, file)
        os.closerange(3, report_fd)
        os.closerange(report_fd + 1, os.sysconf("SC_OPEN_MAX"))
        for number, (kernel, kinds) in enumerate(wanted):
            if states[number] == FREE:
                states[number] = AT_WORK
                kernel.compile(kinds)
                states[number] = DONE
                os.write(report_fd, b"\0")
    finally:
        os._exit(0)
