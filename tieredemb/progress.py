"""How far a call is that works on whole tables: a bar on a terminal, once the call has taken two seconds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

Advance = Callable[[int], object]
_SILENT_SECONDS = 2.0  # what is over by then needs no bar


@contextlib.contextmanager
def progress(title: str, size_bytes: int | None) -> Iterator[Advance]:
    """Yields what is to be called with each number of bytes that is done, of `size_bytes`, where they are known. Shows
    nothing without tqdm, and where stderr is no terminal."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda done: None
        return
    options = {"unit": "B", "unit_scale": True, "unit_divisor": 1024, "leave": False, "delay": _SILENT_SECONDS}
    with tqdm(total=size_bytes, desc=f"tieredemb: {title}", disable=None, **options) as bar:
        yield bar.update
