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

import gzip
import io
import lzma
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tieredemb.errors import ConfigError, InvalidInputError, MissingDependencyError

FORMATS = ("be64", "be32", "arc", "npy")
COMPRESSIONS = (".xz", ".zst", ".gz")
NAME_PATTERNS = (
    ("*.be64", "be64"),
    ("scarab*.trace", "be64"),
    ("*.be32", "be32"),
    ("orm-*.trace", "be32"),
    ("*.lis", "arc"),
    ("*.arc", "arc"),
    ("*.npy", "npy"),
)
MAX_ACCESSES = 2**32  # 32 GiB of ids: beyond it a count in an arc line is a typing error, not a trace


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
    """Reads a trace file, at most its first `limit` accesses. The whole file is held in memory while it is
    decoded.

    `format`: one of `FORMATS`, or "auto": by the file's name (see the module). The compression is told from
    the name's last suffix. Raises `ConfigError` for a missing file or an unknown format, `InvalidInputError`
    for a content that is not of the format, `MissingDependencyError` for `.zst` without `zstandard`.

    >>> read_trace("requests.be64.xz", limit=1_000_000)  # doctest: +SKIP
    """
    path = Path(path)
    if limit is not None and limit < 1:
        raise ConfigError(f"limit must be an access count of at least 1, got {limit}")
    name = path.name.removesuffix(path.suffix) if path.suffix in COMPRESSIONS else path.name
    decode = _decoder(format if format != "auto" else _format_of(path, name))
    if not path.is_file():
        raise ConfigError(f"trace file {str(path)!r} does not exist or is no file; check the path")
    try:
        content = _decompress(path)
    except OSError as error:
        raise InvalidInputError(f"trace file {str(path)!r} cannot be read: {error}") from error
    keys = decode(content, str(path), limit)[:limit]
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


def _decompress(path: Path) -> bytes:
    content = path.read_bytes()
    try:
        if path.suffix == ".xz":
            return lzma.decompress(content)
        if path.suffix == ".gz":
            return gzip.decompress(content)
        return _unzstd(content) if path.suffix == ".zst" else content
    except (lzma.LZMAError, EOFError, zlib.error, OSError) as error:
        raise InvalidInputError(
            f"trace file {str(path)!r} is no intact {path.suffix} file ({error}); fetch it again, or "
            f"rename it if it is not compressed"
        ) from error


def _unzstd(content: bytes) -> bytes:
    """All frames of `content`. zstandard's own stream reader takes a truncated frame for the end of the
    file."""
    try:
        import zstandard
    except ImportError:
        raise MissingDependencyError(
            "reading a .zst trace needs zstandard, which is not installed; run: pip install tieredemb[bench]"
        ) from None
    frames = []
    while content:
        frame = zstandard.ZstdDecompressor().decompressobj()
        try:
            frames.append(frame.decompress(content))
        except zstandard.ZstdError as error:
            raise EOFError(str(error)) from error
        if not frame.eof:
            raise EOFError("compressed file ended before the end of its last frame")
        content = frame.unused_data
    return b"".join(frames)


# --- formats: (content, path for messages, limit) → keys, limit or more of them -----------------------------

Decoder = Callable[[bytes, str, int | None], NDArray[Any]]


def _decoder(format: str) -> Decoder:
    decoders: dict[str, Decoder] = {"be64": _be64, "be32": _be32, "arc": _arc, "npy": _npy}
    if format not in decoders:
        raise ConfigError(f"format must be one of auto, {', '.join(FORMATS)}, got {format!r}")
    return decoders[format]


def _be64(content: bytes, path: str, limit: int | None) -> NDArray[Any]:
    return _big_endian(content, path, ">u8")


def _be32(content: bytes, path: str, limit: int | None) -> NDArray[Any]:
    return _big_endian(content, path, ">u4")


def _big_endian(content: bytes, path: str, dtype: str) -> NDArray[Any]:
    width = np.dtype(dtype).itemsize
    if len(content) % width:
        raise InvalidInputError(
            f"trace file {path!r} has {len(content)} bytes, no multiple of {width}: it is truncated, or "
            f"no trace of big-endian {8 * width}-bit keys; check --format"
        )
    return np.frombuffer(content, dtype).astype(f"u{width}")


def _npy(content: bytes, path: str, limit: int | None) -> NDArray[Any]:
    try:
        keys = np.load(io.BytesIO(content), allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise InvalidInputError(f"trace file {path!r} is no intact .npy file ({error}); check --format") from error
    if not isinstance(keys, np.ndarray) or keys.ndim != 1 or not np.issubdtype(keys.dtype, np.integer):
        given = f"{keys.dtype} {keys.shape}" if isinstance(keys, np.ndarray) else "an archive of arrays"
        raise InvalidInputError(f"trace file {path!r} holds {given}; an array of integers of shape (N,) is needed")
    return keys


def _arc(content: bytes, path: str, limit: int | None) -> NDArray[Any]:
    starts: list[int] = []
    counts: list[int] = []
    total = 0
    for number, line in enumerate(content.splitlines(), start=1):
        if not line or line.isspace():
            continue
        start, count = _arc_line(line, number, path)
        starts.append(start)
        counts.append(count)
        total += count
        if limit is not None and total >= limit:
            counts[-1] -= total - limit
            total = limit
            break
        if total > MAX_ACCESSES:
            raise InvalidInputError(
                f"line {number} of trace file {path!r} brings it to {total} accesses; at most "
                f"{MAX_ACCESSES} are read, pass --limit"
            )
    first = np.cumsum([0, *counts[:-1]]) if counts else np.empty(0, np.int64)
    return np.repeat(np.array(starts, np.int64) - first, counts) + np.arange(total)


def _arc_line(line: bytes, number: int, path: str) -> tuple[int, int]:
    try:
        start, count, _, _ = map(int, line.split())
        if start >= 0 and count >= 1 and start + count < 2**62:
            return start, count
    except ValueError:
        pass  # said below, with the line
    raise InvalidInputError(
        f"line {number} of trace file {path!r} is {line[:60].decode(errors='replace')!r}; the arc format "
        f"needs four integers 'start count 0 request', start at least 0 and count at least 1"
    )
