"""What a user sees while CPU kernels are compiled: one line, and on a terminal the kernel at work under it.

A second of silence per kernel looks like a hang. The number of kernels of a run is not known before, so there is no
bar. The line of a kernel is removed when it is done, so that the user's own output is not shifted.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any

from numba.core import event

from tieredemb.kernels.kernel_cache import place

SAYING = "tieredemb: compiling CPU kernels (each once; they are cached on disk)"
UNCACHED = (
    "tieredemb: compiling CPU kernels (in each process anew, as there is no directory to cache them in: {}; "
    "see python -m tieredemb doctor)"
)


class CompileNotice(event.Listener):
    """Listens to numba, which compiles one kernel at a time, and its device functions within that."""

    def __init__(self) -> None:
        self._depth = 0
        self._kernels = 0
        self._started = 0.0  # when the first of them began
        self._line = ""  # what stands on the terminal

    def on_start(self, notice: Any) -> None:
        self._begin(notice.data["dispatcher"].py_func)

    def on_end(self, notice: Any) -> None:
        self._finish()

    def silence(self) -> None:
        """Ends all output: in a fork, as the other process prints it."""
        self._depth = 1

    @contextlib.contextmanager
    def at(self, function: Any) -> Iterator[None]:
        """A kernel is waited for inside, which is compiled elsewhere."""
        self._begin(function)
        try:
            yield
        finally:
            self._finish()

    def _begin(self, function: Any) -> None:
        self._depth += 1
        if self._depth > 1 or not str(function.__module__).startswith("tieredemb"):
            return
        if not self._kernels:
            self._started = time.perf_counter()
            print(SAYING if place().path else UNCACHED.format(place().reasons), file=sys.stderr, flush=True)
        self._kernels += 1
        if sys.stderr is not None and sys.stderr.isatty():
            seconds = time.perf_counter() - self._started
            self._line = f"  {seconds:.0f} s, kernel {self._kernels}: {function.__name__}"
            print(self._line, end="\r", file=sys.stderr, flush=True)

    def _finish(self) -> None:
        self._depth -= 1
        if self._line and not self._depth:
            print(" " * len(self._line), end="\r", file=sys.stderr, flush=True)
            self._line = ""


NOTICE = CompileNotice()


def report_compiling() -> None:
    """Shows what numba compiles, from now on, in this process."""
    event.register("numba:compile", NOTICE)
