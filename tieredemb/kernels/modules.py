"""Compiled CUDA files, each made once for its flags and a device: at its first use, or before on another thread.

NVRTC takes up to a second a file, and compiles several at once.

When tables are built, the files that the first steps will launch begin to compile (`Kernel.prepare`); a launch waits
for its own file.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

MOST_THREADS = 8
Key = tuple[str, tuple[str, ...], int]  # file, flags, device


class Modules:
    """The modules that `compiled(file, flags, device, name)` returns; `name`: of one of the file's kernels. Several
    threads may call it."""

    def __init__(self, compiled: Callable[[str, tuple[str, ...], int, str], Any]) -> None:
        self._compiled = compiled
        self._lock = threading.Lock()
        self._made: dict[Key, Future[Any]] = {}
        self._begun: dict[Key, Future[Any]] = {}  # ahead, on another thread
        self._threads = ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1), thread_name_prefix="tieredemb-nvrtc")

    def get(self, file: str, flags: tuple[str, ...], device: int, name: str) -> Any:
        """The module. Waits if another thread makes it. Raises the compiler's errors; the next call tries again."""
        key = file, flags, device
        with self._lock:
            made = self._made.get(key)
            if is_mine := made is None:
                made = self._made[key] = Future()
        if is_mine:
            try:
                made.set_result(self._compiled(*key, name))
            except BaseException as error:
                del self._made[key]
                made.set_exception(error)
                raise
        return made.result()

    def wait_for_begun(self) -> None:
        """Returns once no module is being compiled ahead."""
        for begun in list(self._begun.values()):
            begun.exception()

    def prepare(self, file: str, flags: tuple[str, ...], device: int, name: str) -> None:
        """Begins to make it on another thread, unless it was. If that fails, `get` raises."""
        key = file, flags, device
        if key not in self._made and key not in self._begun and threading.main_thread().is_alive():
            self._begun[key] = self._threads.submit(self.get, *key, name)
