"""Row files of a checkpoint: chunks of keys (int64), weights and states, each with a checksum in the
manifest.

    chunk: keys (n,) int64 | weight (n, D) carrier | state (n, S + 1) uint32        only rows whose score is
    not zero
"""

from __future__ import annotations

import os
import stat
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from tieredemb.errors import CheckpointError
from tieredemb.storage.base import STATE_DTYPE, ColdRows, RowLayout
from tieredemb.storage.file.io import Descriptor, pread_all, pwrite_all
from tieredemb.storage.system import system

Array = np.ndarray[Any, Any]
HeldRows = tuple[Array, Array, Array]  # keys int64 (K,), ascending; weight carrier (K, D); state uint32 (K, S + 1)
_CHUNK_BYTES = 16 << 20  # large enough to stream, small enough to hold a few
_SCAN_ROWS = 1 << 20
_KEY_BYTES = 8


class Chunk(NamedTuple):
    """`rows` rows at byte `offset` of the file, with the CRC-32 of their bytes."""

    offset: int
    rows: int
    crc32: int


def bytes_of(rows: int, layout: RowLayout) -> int:
    """Bytes of a chunk of `rows` rows."""
    return rows * (_KEY_BYTES + layout.row_bytes)


def used_keys(cold: ColdRows, chunk_rows: int) -> Iterator[Array]:
    """The keys of all written rows, ascending, in arrays of `chunk_rows` (the last may be shorter)."""
    held: list[Array] = []
    count = 0
    for start, stop in cold.used_ranges():
        for lo in range(start, stop, _SCAN_ROWS):
            found = lo + np.flatnonzero(cold.state[lo : min(lo + _SCAN_ROWS, stop), -1])
            held.append(found)
            count += len(found)
            if count >= chunk_rows:
                keys = np.concatenate(held)
                whole = count // chunk_rows * chunk_rows
                yield from np.split(keys[:whole], whole // chunk_rows)
                held, count = [keys[whole:]], count - whole
    if count:
        yield np.concatenate(held)


def _rows_of(cold: ColdRows, chunk_rows: int, held: HeldRows | None) -> Iterator[HeldRows]:
    """Keys, weights and states of all written rows, ascending, `chunk_rows` at a time; those `held` instead of what
    storage has."""
    if held is None:
        for keys in used_keys(cold, chunk_rows):
            yield keys.astype(np.int64, copy=False), cold.weight[keys], cold.state[keys]
        return
    held_keys, held_weight, held_state = held
    done = 0
    for stored in (*used_keys(cold, chunk_rows), None):
        end = len(held_keys) if stored is None else int(np.searchsorted(held_keys, stored[-1], "right"))
        some = slice(done, end)
        kept = np.empty(0, np.int64) if stored is None else np.setdiff1d(stored, held_keys[some], assume_unique=True)
        keys = np.concatenate([kept.astype(np.int64, copy=False), held_keys[some]])
        order = np.argsort(keys)
        weight = np.concatenate([cold.weight[kept], held_weight[some]])[order]
        state = np.concatenate([cold.state[kept], held_state[some]])[order]
        for start in range(0, len(keys), chunk_rows):
            part = slice(start, start + chunk_rows)
            yield keys[order][part], weight[part], state[part]
        done = end


def write_rows(path: str, cold: ColdRows, held: HeldRows | None = None) -> list[Chunk]:
    """Writes all written rows of `cold`, and those `held` elsewhere, to the new file `path` and syncs it. Raises
    `OSError`."""
    chunk_rows = max(1, _CHUNK_BYTES // (_KEY_BYTES + cold.layout.row_bytes))
    chunks: list[Chunk] = []
    offset = 0
    fd = system.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        for rows in _rows_of(cold, chunk_rows, held):
            crc, start = 0, offset
            for part in rows:
                data = memoryview(part.reshape(-1).view(np.uint8).data)
                crc = zlib.crc32(data, crc)
                pwrite_all(fd, data, offset)
                offset += data.nbytes
            chunks.append(Chunk(start, len(rows[0]), crc))
        system.fsync(fd)
        system.fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # so that verifying reads what the disk has
    finally:
        system.close(fd)
    return chunks


class RowFile:
    """An open row file of a checkpoint. Raises `OSError`; `CheckpointError` for what it should not hold."""

    def __init__(self, directory: str, name: str) -> None:
        self._path = os.path.join(directory, name)
        # a pipe would keep who opens it waiting for who writes it
        fd = system.open(self._path, os.O_RDONLY | os.O_NONBLOCK)
        if not stat.S_ISREG(system.fstat(fd).st_mode):
            system.close(fd)
            raise CheckpointError(f"{self._path!r} is no regular file; use another checkpoint")
        self._file = Descriptor(fd)

    def __enter__(self) -> RowFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def verify(self, chunks: list[Chunk], layout: RowLayout) -> None:
        """Reads the whole file: size, checksums, keys in range and ascending."""
        expected = sum(bytes_of(chunk.rows, layout) for chunk in chunks)
        size = system.fstat(self._file.fd).st_size
        if size != expected:
            raise CheckpointError(
                f"{self._path!r} has {size} bytes and the manifest says {expected}; use another checkpoint"
            )
        last = -1
        for keys, _, _ in self.chunks(chunks, layout):
            if len(keys) and (keys[0] <= last or keys[-1] >= layout.rows or (np.diff(keys) <= 0).any()):
                raise CheckpointError(f"{self._path!r} holds keys out of order or range; use another checkpoint")
            last = int(keys[-1]) if len(keys) else last

    def chunks(self, chunks: list[Chunk], layout: RowLayout) -> Iterator[tuple[Array, Array, Array]]:
        """Yields keys (n,), weight (n, D) and state (n, S + 1) of each chunk, read-only, with its checksum
        verified."""
        for chunk in chunks:
            data = pread_all(self._file.fd, bytes_of(chunk.rows, layout), chunk.offset)
            if zlib.crc32(data) != chunk.crc32:
                raise CheckpointError(
                    f"{self._path!r} is damaged: the checksum of the {chunk.rows} rows at byte {chunk.offset} "
                    "differs; use another checkpoint"
                )
            weights_at = chunk.rows * _KEY_BYTES
            state_at = weights_at + chunk.rows * layout.columns * layout.carrier.itemsize
            yield (
                np.frombuffer(data, np.int64, chunk.rows),
                np.frombuffer(data, layout.carrier, chunk.rows * layout.columns, weights_at).reshape(
                    chunk.rows, layout.columns
                ),
                np.frombuffer(data, STATE_DTYPE, offset=state_at).reshape(chunk.rows, -1),
            )
