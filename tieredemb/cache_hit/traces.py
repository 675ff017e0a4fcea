"""Traces: the keys that a cache was asked for, in time order, read from a file into dense row ids.

Formats, told from the file name unless given (`read_trace`), each plain or compressed (`.xz`, `.zst`, `.gz`):

| format | content                                                               | names                     |
|--------|-----------------------------------------------------------------------|---------------------------|
| `be64` | big-endian 64-bit keys                                                | `*.be64`, `scarab*.trace` |
| `be32` | big-endian 32-bit keys                                                | `*.be32`, `orm-*.trace`   |
| `arc`  | lines `start count 0 request`: accesses to start … start + count - 1  | `*.lis`, `*.arc`          |
| `npy`  | a NumPy array of integers, one dimension                              | `*.npy`                   |

Other `*.trace` files come in both widths, and a 32-bit trace read as 64-bit is valid nonsense: they need a
format.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tieredemb.cache_hit.formats import DECODERS, Source
from tieredemb.cache_hit.streams import COMPRESSIONS, open_trace
from tieredemb.errors import ConfigError, InvalidInputError
from tieredemb.tables.table_set import available_memory_bytes

FORMATS = tuple(DECODERS)
NAME_PATTERNS = (
    ("*.be64", "be64"),
    ("scarab*.trace", "be64"),
    ("*.be32", "be32"),
    ("orm-*.trace", "be32"),
    ("*.lis", "arc"),
    ("*.arc", "arc"),
    ("*.npy", "npy"),
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """`ids`: int64 (N,), row ids in [0, rows), in time order. `rows`: rows of the table that they address,
    for a file the number of distinct keys. Raises `InvalidInputError` when there is no access."""

    name: str
    ids: NDArray[np.int64]
    rows: int

    def __post_init__(self) -> None:
        if self.ids.size == 0:
            raise InvalidInputError(f"trace {self.name!r} is empty; a trace needs at least one access")

    @classmethod
    def from_keys(cls, name: str, keys: NDArray[Any]) -> Trace:
        """A trace over arbitrary integer `keys` (N,): each distinct key becomes a row, in order of the
        keys."""
        distinct, ids = np.unique(keys, return_inverse=True)
        return cls(name=name, ids=ids.astype(np.int64, copy=False), rows=distinct.size)


def read_trace(path: str | Path, *, format: str = "auto", limit: int | None = None) -> Trace:
    """Reads a trace file, at most its first `limit` accesses. What comes after them is neither read nor checked.

    `format`: one of `FORMATS`, or "auto": by the file's name (see the module). The compression is told from
    the name's last suffix. Raises `ConfigError` for a missing file or an unknown format, `InvalidInputError`
    for a content that is not of the format, or that this machine's memory cannot hold,
    `MissingDependencyError` for `.zst` without `zstandard`.

    >>> read_trace("requests.be64.xz", limit=1_000_000)  # doctest: +SKIP
    """
    path = Path(path)
    if limit is not None and limit < 1:
        raise ConfigError(f"limit must be an access count of at least 1, got {limit}")
    name = path.name.removesuffix(path.suffix) if path.suffix in COMPRESSIONS else path.name
    format = format if format != "auto" else _format_of(path, name)
    if format not in DECODERS:
        raise ConfigError(f"format must be one of auto, {', '.join(FORMATS)}, got {format!r}")
    if not path.is_file():
        raise ConfigError(f"trace file {str(path)!r} does not exist or is no file; check the path")
    with open_trace(path) as stream:
        source = Source(
            path=str(path),
            stream=stream,
            limit=limit,
            available_bytes=available_memory_bytes(),
            size_bytes=None if path.suffix in COMPRESSIONS else path.stat().st_size,
        )
        keys = DECODERS[format](source)
    if keys.size == 0:
        raise InvalidInputError(f"trace file {str(path)!r} is empty; a trace needs at least one access")
    return Trace.from_keys(Path(name).stem, keys)


def _format_of(path: Path, name: str) -> str:
    for pattern, format in NAME_PATTERNS:
        if fnmatch(name.lower(), pattern):
            return format
    raise ConfigError(
        f"the format of {str(path)!r} cannot be told from its name; pass --format {{{','.join(FORMATS)}}} "
        f"(known names: {', '.join(pattern for pattern, _ in NAME_PATTERNS)})"
    )
