"""Garbage is not collected while one of the CPU kernels is compiled.

A compilation makes objects by the million, nearly all of which live until it ends, so Python's collector looks through
them again and again, and through the modules of torch: with it off, the kernels of the README's first example took an
eighth less to compile, one after the other. What cycles there are is collected after the kernel, as ever. A collector
that the user has switched off stays so.
"""

from __future__ import annotations

import contextlib
from typing import Any

from numba.core import event

from tieredemb.kernels.captures import no_collector


class CollectorPause(event.Listener):
    """Listens to numba, which compiles one kernel at a time, and its device functions within that."""

    def __init__(self) -> None:
        self._depth = 0
        self._pause = contextlib.ExitStack()

    def on_start(self, notice: Any) -> None:
        self._depth += 1
        if self._depth == 1 and str(notice.data["dispatcher"].py_func.__module__).startswith("tieredemb"):
            self._pause.enter_context(no_collector())

    def on_end(self, notice: Any) -> None:
        self._depth -= 1
        if not self._depth:
            self._pause.close()


def pause_collector_for_compiling() -> None:
    """From now on, in this process."""
    event.register("numba:compile", CollectorPause())
