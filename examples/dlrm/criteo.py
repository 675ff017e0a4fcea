"""Criteo's click log as a stream of rows: plain, gzip or xz, never held whole, resumable at any row.

A row's position is its number. A compressed file cannot be entered in the middle, so resuming reads the text before
the position again but only counts its lines (1 to 2 GB/s plain; gzip and xz decompress at about 0.3 and 0.1 GB/s).
"""

from __future__ import annotations

import gzip
import hashlib
import lzma
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from examples.dlrm import text

CHUNK_BYTES = 4 << 20  # of text in memory at a time: large enough that Python's share of the cost vanishes
_MAX_LINE_BYTES = 1 << 20
_MAGIC = {b"\x1f\x8b": gzip.open, b"\xfd7zXZ\x00": lzma.open}
_FOREIGN = {b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"PK\x03\x04": "zip"}


class LogError(ValueError):
    """A click log is missing, empty or malformed; the message names the file and the line."""


@dataclass(frozen=True)
class Rows:
    """Consecutive rows of a log. labels: uint8 (B,), 0 or 1; integers: int64 (B, 13), `text.NO_INTEGER` where empty;
    categories: int64 (B, 26) of 32 bits, `text.NO_CATEGORY` where empty."""

    labels: text.Array
    integers: text.Array
    categories: text.Array

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, part: slice) -> Rows:
        return Rows(self.labels[part], self.integers[part], self.categories[part])


class Log(Protocol):
    """A log of known length whose rows can be streamed from any position. `CriteoFile` reads one, `synthetic`
    generates one."""

    def __len__(self) -> int: ...

    def identity(self) -> dict[str, Any]:
        """What a checkpoint remembers of the log, JSON-able, so that a run is not resumed on another one."""

    def batches(self, start: int, stop: int, size: int) -> Iterator[Rows]:
        """Rows start … stop - 1 in order, `size` at a time, the last batch perhaps smaller."""


def rebatch(blocks: Iterable[Rows], size: int) -> Iterator[Rows]:
    """Cuts blocks of any length into batches of `size` rows; the last one may be smaller."""
    pending: list[Rows] = []
    held = 0
    for block in blocks:
        at = 0
        while held + len(block) - at >= size:
            pending.append(block[at : at + size - held])
            at += size - held
            yield _concatenate(pending)
            pending, held = [], 0
        if at < len(block):
            pending.append(block[at:])
            held += len(block) - at
    if pending:
        yield _concatenate(pending)


def _concatenate(parts: list[Rows]) -> Rows:
    if len(parts) == 1:
        return parts[0]
    return Rows(
        np.concatenate([part.labels for part in parts]),
        np.concatenate([part.integers for part in parts]),
        np.concatenate([part.categories for part in parts]),
    )


class CriteoFile:
    """A log in Criteo's format on disk. Plain, gzip or xz, told apart by the first bytes.

    `rows`: how many of its rows to use; without it they are all used, and counted in a first pass over the file.
    Raises `LogError` for a file that is missing, empty or in a foreign compression, and, while it is read, for a line
    that is malformed.

    >>> log = CriteoFile(path)
    >>> for batch in log.batches(0, len(log), 256): ...
    """

    def __init__(self, path: str | Path, *, rows: int | None = None) -> None:
        self.path = Path(path)
        if rows is not None and rows < 1:
            raise LogError(f"rows must be at least 1, got {rows}")
        if not self.path.is_file():
            raise LogError(f"there is no file {self.path}; pass a Criteo log (.tsv, .tsv.gz or .tsv.xz)")
        with self.path.open("rb") as file:
            head = file.read(8)
        foreign = [name for magic, name in _FOREIGN.items() if head.startswith(magic)]
        if foreign:
            raise LogError(f"{self.path} is compressed with {foreign[0]}; plain text, gzip and xz can be read")
        self._open: Any = next((opener for magic, opener in _MAGIC.items() if head.startswith(magic)), open)
        self._rows = self._count() if rows is None else rows
        if self._rows == 0:
            raise LogError(f"{self.path} is empty; a log has one row a line with {text.FIELDS} tab-separated fields")

    def __len__(self) -> int:
        return self._rows

    def identity(self) -> dict[str, Any]:
        with self.path.open("rb") as file:
            head = hashlib.sha256(file.read(1 << 20)).hexdigest()
        return {"log": "criteo", "bytes": self.path.stat().st_size, "sha256_of_first_mib": head, "rows": self._rows}

    def batches(self, start: int, stop: int, size: int) -> Iterator[Rows]:
        return rebatch(self._blocks(start, stop), size)

    def _chunks(self) -> Iterator[bytes]:
        """The text in chunks that end with a newline, added after the last line where the file lacks it."""
        rest = b""
        try:
            with self._open(self.path, "rb") as file:
                while chunk := _read(file):
                    cut = chunk.rfind(b"\n") + 1
                    if cut == 0:
                        rest += chunk
                        if len(rest) > _MAX_LINE_BYTES:
                            raise LogError(f"{self.path} holds a line of more than {_MAX_LINE_BYTES} bytes: not a log")
                        continue
                    yield rest + chunk[:cut]
                    rest = chunk[cut:]
        except (EOFError, lzma.LZMAError, gzip.BadGzipFile) as error:
            raise LogError(f"{self.path} is truncated or damaged ({error}); fetch or compress it again") from error
        if rest:
            yield rest + b"\n"

    def _count(self) -> int:
        return sum(chunk.count(b"\n") for chunk in self._chunks())

    def _blocks(self, start: int, stop: int) -> Iterator[Rows]:
        first = 0  # row number of the chunk's first line
        for chunk in self._chunks():
            if first >= stop:
                return
            lines = chunk.count(b"\n")
            if first + lines > start:
                block = self._parse(_skip_lines(chunk, start - first), max(first, start))
                yield block[: stop - max(first, start)]
            first += lines
        if first < stop:
            raise LogError(f"{self.path} ends after {first} rows, where {stop} were asked for; lower the row count")

    def _parse(self, chunk: bytes, first: int) -> Rows:
        lines = chunk.count(b"\n")
        rows = Rows(
            np.empty(lines, np.uint8),
            np.empty((lines, text.INTEGERS), np.int64),
            np.empty((lines, text.CATEGORIES), np.int64),
        )
        buffer = np.frombuffer(chunk, dtype=np.uint8)
        parsed, code, field = text.parse_lines(buffer, rows.labels, rows.integers, rows.categories)
        if code != text.GOOD:
            raise LogError(f"{self.path}, line {first + parsed + 1}: {_fault(chunk, parsed, code, field)}")
        return rows


def _read(file: IO[bytes]) -> bytes:
    return file.read(CHUNK_BYTES)


def _skip_lines(chunk: bytes, lines: int) -> bytes:
    """The chunk without its first `lines` lines (none where it is negative)."""
    if lines <= 0:
        return chunk
    ends = np.flatnonzero(np.frombuffer(chunk, dtype=np.uint8) == ord("\n"))
    return chunk[int(ends[lines - 1]) + 1 :]


def _fault(chunk: bytes, row: int, code: int, field: int) -> str:
    """What is wrong with line `row` of a chunk, in words."""
    fields = chunk.split(b"\n", row + 1)[row].split(b"\t")
    if code in (text.TOO_FEW, text.TOO_MANY):
        return f"expected {text.FIELDS} tab-separated fields (label, 13 integers, 26 categories), got {len(fields)}"
    given = fields[field][:32].decode("ascii", "backslashreplace")
    if code == text.BAD_LABEL:
        return f"the label must be 0 or 1, got {given!r}; a log without labels cannot be trained on"
    if code == text.BAD_INTEGER:
        return f"I{field} must be an integer of at most 18 digits or empty, got {given!r}"
    return f"C{field - text.INTEGERS} must be 8 hexadecimal digits or empty, got {given!r}"
