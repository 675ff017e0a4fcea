"""Trace formats: from a stream of bytes to keys. `traces` says what each one holds.

A decoder reads no further than the trace is used, and refuses what would not fit into memory before it allocates.
"""

from __future__ import annotations

import ast
import io
import re
import warnings
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tieredemb.errors import InvalidInputError

BYTES_PER_ACCESS = 72  # at its most: np.unique takes 57 for 8-byte keys (measured), Belady's uses 65
MAX_ACCESSES = 2**32  # 288 GiB: beyond it a count in an arc line is a typing error, not a trace, whatever the memory

_PIECE_BYTES = 1 << 20
_MAX_LINE = 1024  # characters; four integers of 64 bits take 83
_MAX_BLANK_LINES = 1000  # in a row: --limit counts accesses, so without accesses it would not end the reading
_MAX_NPY_HEADER = 10_000  # bytes; numpy's own limit, as Python's parser is not safe on longer ones


@dataclass(frozen=True, kw_only=True)
class Source:
    """What a decoder reads. `path`: for messages. `limit`: accesses taken, None for all. `available_bytes`: memory that
    may be used. `size_bytes`: of `stream`, None where it is not known before the end."""

    path: str
    stream: io.BufferedReader
    limit: int | None
    available_bytes: int
    size_bytes: int | None

    @property
    def most(self) -> int:
        """The most accesses that fit."""
        return min(MAX_ACCESSES, self.available_bytes // BYTES_PER_ACCESS)

    def taken(self, accesses: int) -> int:
        """How many of `accesses` are taken."""
        return accesses if self.limit is None else min(accesses, self.limit)

    def check(self, accesses: int, line: int | None = None) -> None:
        """Raises `InvalidInputError` if the used part of `accesses` needs more memory than there is. `line`: the line
        of a text at which it has so many."""
        taken = self.taken(accesses)
        if taken <= self.most:
            return
        file = f"trace file {self.path!r}"
        subject = f"{file} holds at least" if line is None else f"line {line} of {file} brings it to"
        raise InvalidInputError(
            f"{subject} {accesses} accesses; to take {taken} of them needs {taken * BYTES_PER_ACCESS / 2**30:.1f} GiB "
            f"of memory, and {self.available_bytes / 2**30:.1f} GiB are available; pass --limit N to take the first N, "
            f"at most {self.most}"
        )

    def read(self, width: int, accesses: int | None) -> bytearray:
        """The next `accesses` keys of `width` bytes, all for None, fewer where the stream ends."""
        content = bytearray()
        wanted = None if accesses is None else accesses * width
        while wanted is None or len(content) < wanted:
            piece = self.stream.read(_PIECE_BYTES if wanted is None else min(_PIECE_BYTES, wanted - len(content)))
            if not piece:
                break
            content += piece
            self.check(len(content) // width)
        return content


# --- big-endian -------------------------------------------------------------------------------------------------------


def _big_endian(source: Source, width: int) -> NDArray[Any]:
    if source.size_bytes is not None:
        source.check(source.size_bytes // width)
    content = source.read(width, source.limit)
    if len(content) % width:
        raise InvalidInputError(
            f"trace file {source.path!r} has {len(content)} bytes, no multiple of {width}: it is truncated, or "
            f"no trace of big-endian {8 * width}-bit keys; check --format"
        )
    keys = np.frombuffer(content, f">u{width}")
    return keys.byteswap(inplace=True).view(f"<u{width}")


def _be64(source: Source) -> NDArray[Any]:
    return _big_endian(source, 8)


def _be32(source: Source) -> NDArray[Any]:
    return _big_endian(source, 4)


# --- arc --------------------------------------------------------------------------------------------------------------


def _arc(source: Source) -> NDArray[Any]:
    starts, counts = array("q"), array("q")
    lines = io.TextIOWrapper(source.stream, encoding="ascii", errors="backslashreplace")
    number = total = blank = 0
    enough = source.taken(source.most + 1)
    while total < enough and (line := lines.readline(_MAX_LINE)):
        number += 1
        if line.isspace() and blank < _MAX_BLANK_LINES:
            blank += 1
            continue
        start, count = _arc_line(line, number, source.path)
        starts.append(start)
        counts.append(count)
        total += count
        blank = 0
    source.check(total, line=number)
    if total == 0:
        return np.empty(0, np.int64)
    counts[-1] -= total - source.taken(total)
    runs = np.frombuffer(counts, np.int64)
    ends = np.cumsum(runs)
    keys = np.repeat(np.frombuffer(starts, np.int64) - (ends - runs), runs)
    keys += np.arange(keys.size)
    return keys


def _arc_line(line: str, number: int, path: str) -> tuple[int, int]:
    if len(line) < _MAX_LINE:
        try:
            start, count, _, _ = map(int, line.split())
            if start >= 0 and count >= 1 and start + count < 2**62:
                return start, count
        except ValueError:
            pass  # raised below, with the line
    raise InvalidInputError(
        f"line {number} of trace file {path!r} is {line.strip()[:60]!r}; the arc format "
        f"needs four integers 'start count 0 request', start at least 0 and count at least 1"
    )


# --- npy: version 1.0 … 3.0 of numpy.lib.format -----------------------------------------------------------------------


def _npy(source: Source) -> NDArray[Any]:
    dtype, accesses = _npy_header(source)
    source.check(accesses)
    taken = source.taken(accesses)
    content = source.read(dtype.itemsize, taken)
    if len(content) < taken * dtype.itemsize:
        raise _no_npy(source, f"it ends after {len(content) // dtype.itemsize} of {accesses} elements")
    whole = source.limit is None or accesses < source.limit
    if whole and source.stream.read(1):
        raise _no_npy(source, f"it goes on after the {accesses} elements of its header")
    return np.frombuffer(content, dtype).astype(dtype.newbyteorder("="), copy=False)


def _npy_header(source: Source) -> tuple[np.dtype[Any], int]:
    """The dtype and the number of elements. numpy's own reader would raise whatever its parsers raise."""
    text = _npy_text(source)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the parser warns of escapes; errors are raised below
            fields = ast.literal_eval(re.sub(r"(\d)L\b", r"\1", text))  # 3L: so Python 2 wrote long integers
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        raise _no_npy(source, f"its header cannot be parsed: {error}") from error
    if not isinstance(fields, dict) or fields.keys() != {"descr", "fortran_order", "shape"}:
        raise _no_npy(source, f"its header is {text.strip()[:60]!r}")
    match fields["descr"], fields["fortran_order"], fields["shape"]:
        case str(descr), bool(), (int(accesses),) if re.fullmatch(r"[<>=|]?[iu][1248]", descr):
            if type(accesses) is int and 0 <= accesses < 2**63:  # True is an int too
                return np.dtype(descr), accesses
    raise InvalidInputError(
        f"trace file {source.path!r} holds {text.strip()[:100]!r}; an array of integers of shape (N,) is needed"
    )


def _npy_text(source: Source) -> str:
    """The header: the text of a dict."""
    start = source.stream.read(8)
    if start not in (b"\x93NUMPY\1\0", b"\x93NUMPY\2\0", b"\x93NUMPY\3\0"):
        raise _no_npy(source, "its first bytes are no header of version 1.0 to 3.0")
    version = start[6]
    width = 2 if version == 1 else 4
    length_field = source.stream.read(width)
    length = int.from_bytes(length_field, "little")
    if length > _MAX_NPY_HEADER:
        raise _no_npy(source, f"its header has {length} bytes, more than {_MAX_NPY_HEADER}")
    header = source.stream.read(length)
    if len(length_field) < width or len(header) < length:
        raise _no_npy(source, "it ends within its header")
    try:
        return header.decode("utf-8" if version == 3 else "latin-1")
    except UnicodeDecodeError as error:
        raise _no_npy(source, f"its header is no UTF-8: {error}") from error


def _no_npy(source: Source, reason: str) -> InvalidInputError:
    return InvalidInputError(f"trace file {source.path!r} is no intact .npy file ({reason}); check --format")


DECODERS: dict[str, Callable[[Source], NDArray[Any]]] = {"be64": _be64, "be32": _be32, "arc": _arc, "npy": _npy}
"""Each takes a `Source` and returns its keys (N,), at most `limit`. Raises `InvalidInputError`."""
