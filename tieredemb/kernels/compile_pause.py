"""Garbage is not collected while one of the CPU kernels is compiled.

A compilation makes objects by the million, nearly all of which live until it ends, so Python's collector looks through
them again and again, and through the modules of torch: a sixth of the time that the first example of the README
compiled. What cycles there are is collected after the kernel, as ever. A collector that the user has switched off stays
so.
"""

from __future__ import annotations

import gc
from typing import Any

from numba.core import event


class CollectorPause(event.Listener):  # type: ignore[misc]
    """Listens to numba, which compiles one kernel at a time, and its device functions amid it."""

    def __init__(self) -> None:
        self._depth = 0
        self._to_resume = False

    def on_start(self, notice: Any) -> None:
        self._depth += 1
        if self._depth == 1 and str(notice.data["dispatcher"].py_func.__module__).startswith("tieredemb"):
            self._to_resume = gc.isenabled()
            gc.disable()

    def on_end(self, notice: Any) -> None:
        self._depth -= 1
        if self._to_resume and not self._depth:
            self._to_resume = False
            gc.enable()


def pause_collector_for_compiling() -> None:
    """From now on, in this process."""
    event.register("numba:compile", CollectorPause())  # type: ignore[no-untyped-call]
