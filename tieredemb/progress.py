"""How far a call is that works on whole tables: a bar on a terminal, once the call has taken two seconds."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

Advance = Callable[[int], object]
_SILENT_SECONDS = 2.0  # what is over by then needs no bar


@contextlib.contextmanager
def progress(title: str, size_bytes: int | None) -> Iterator[Advance]:
    """Yields what is to be called with each number of bytes that is done, of `size_bytes`, where they are known. Shows
    nothing without tqdm, and where stderr is no terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda done: None
        return
    late = _LateBar(title, size_bytes)
    try:
        yield late.advance
    finally:
        if late.bar is not None:
            late.bar.close()


class _LateBar:
    """A bar that is made when it is to be seen. tqdm takes a lock for it that processes share: a child that was killed
    with it keeps all others waiting, who had better not ask for it."""

    def __init__(self, title: str, size_bytes: int | None) -> None:
        self._title, self._size_bytes = title, size_bytes
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
        title = f"tieredemb: {self._title}"
        return tqdm(total=self._size_bytes, desc=title, unit="B", unit_scale=True, unit_divisor=1024, leave=False)
