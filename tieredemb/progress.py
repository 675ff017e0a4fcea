"""How far a call is that takes long: a bar on a terminal, once the call has taken two seconds."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

Advance = Callable[[int], object]  # told what was done since the last call
_SILENT_SECONDS = 2.0  # what is over by then needs no bar


@contextlib.contextmanager
def progress(title: str, total: int | None, unit: str = "B") -> Iterator[Advance]:
    """Yields what is to be called with each number of bytes, or of another `unit`, that is done, of `total`, where that
    is known. Shows nothing without tqdm, and where stderr is no terminal."""
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
    """A bar that is made when it is to be seen. tqdm takes a lock for it that processes share: a child that was killed
    with it keeps all others waiting, who had better not ask for it."""

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
            self._begun = float("inf")  # nobody asks again
            return None
        title, divisor = f"tieredemb: {self._title}", 1024 if self._unit == "B" else 1000
        return tqdm(total=self._total, desc=title, unit=self._unit, unit_scale=True, unit_divisor=divisor, leave=False)
