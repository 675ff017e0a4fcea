"""How far a call is that takes long: a bar on a terminal, once the call has taken two seconds."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

Advance = Callable[[int], object]  # called with what was done since the last call
_SILENT_SECONDS = 2.0  # what has ended by then needs no bar


@contextlib.contextmanager
def progress(title: str, total: int | None, unit: str = "B") -> Iterator[Advance]:
    """Yields a function to call with each number of bytes, or of another `unit`, that is done, of `total`, if that is
    known. Shows nothing without tqdm, or if stderr is no terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda done: None
        return
    late = _LateBar(title, total, unit)
    try:
        yield late.advance
    finally:
        if late.bar is not None:
            late.bar.close()


class _LateBar:
    """A bar that is made only when it is to be shown: tqdm takes a lock for it that processes share, and a child that
    was killed while it held that lock would make all others wait."""

    def __init__(self, title: str, total: int | None, unit: str) -> None:
        self._title, self._total, self._unit = title, total, unit
        self._begun, self._done = time.monotonic(), 0
        self.bar: Any = None

    def advance(self, done: int) -> None:
        self._done += done
        if self.bar is None and time.monotonic() - self._begun >= _SILENT_SECONDS:
            self.bar = self._made()
        if self.bar is not None:
            self.bar.update(self._done - self.bar.n)

    def _made(self) -> Any:
        try:
            from tqdm import tqdm
        except ImportError:
            self._begun = float("inf")  # it is not tried again
            return None
        title, divisor = f"tieredemb: {self._title}", 1024 if self._unit == "B" else 1000
        return tqdm(total=self._total, desc=title, unit=self._unit, unit_scale=True, unit_divisor=divisor, leave=False)
