"""Row files of a checkpoint: chunks of keys (int64), weights and states, each with a checksum in the
manifest.

    chunk: keys (n,) int64 | weight (n, D) carrier | state (n, S + 1) uint32        only rows whose score is
    not zero

Chunk i is in file i mod F, after that file's earlier chunks. A filesystem lets one thread write to a file at a time, so
a large key space has several files; a small one has one, as all had before.

All threads write, read back and load chunks, of 2 MiB, one by one. The places of chunks do not depend on the number of
threads.
"""

from __future__ import annotations

import os
import stat
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from tieredemb.config import Array
from tieredemb.errors import CheckpointError
from tieredemb.kernels.chunks import each
from tieredemb.progress import progress
from tieredemb.storage.base import STATE_DTYPE, ColdRows, RowLayout
from tieredemb.storage.checkpoint.parts import KeyPart
from tieredemb.storage.file.io import Descriptor, pread_all, pread_into, pwrite_all
from tieredemb.storage.system import system

HeldRows = tuple[Array, Array, Array]  # keys int64 (K,), ascending; weight carrier (K, D); state uint32 (K, S + 1)
_CHUNK_BYTES = 2 << 20  # large enough to stream, small enough to stay in a CPU's cache until it is written
_SCAN_ROWS = 1 << 20
_KEY_BYTES = 8
_FILES = 16  # of a large key space
_LARGE_BYTES = 256 << 20
_BUFFERS_BYTES = 256 << 20  # of all threads
_IN_MEMORY = (0x01021994, 0x858458F6)  # the types of tmpfs and ramfs


class Chunk(NamedTuple):
    """`rows` rows at byte `offset` of their file, with the CRC-32 of their bytes."""

    offset: int
    rows: int
    crc32: int


def bytes_of(rows: int, layout: RowLayout) -> int:
    """Bytes of a chunk of `rows` rows."""
    return rows * (_KEY_BYTES + layout.row_bytes)


def is_in_memory(directory: str) -> bool:
    """Whether files there are memory alone: read twice, they are the same."""
    return system.statfs(directory) in _IN_MEMORY


def _parts(memory: Array, rows: int, layout: RowLayout) -> HeldRows:
    """Keys, weights and states of a chunk in `memory`, uint8, as views."""
    weight_at = rows * _KEY_BYTES
    state_at = weight_at + rows * layout.columns * layout.carrier.itemsize
    end = bytes_of(rows, layout)
    return (
        memory[:weight_at].view(np.int64),
        memory[weight_at:state_at].view(layout.carrier).reshape(rows, layout.columns),
        memory[state_at:end].view(STATE_DTYPE).reshape(rows, layout.state_width + 1),
    )


def place_of(keys: Array) -> Array | slice:
    """Ascending keys, not empty, as an index: a slice where they are neighbours, which copies at memory's speed."""
    first, last = int(keys[0]), int(keys[-1])
    return slice(first, last + 1) if last - first == len(keys) - 1 else keys


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


def _rows_of(
    cold: ColdRows, chunk_rows: int, held: HeldRows | None
) -> Iterator[tuple[Array, tuple[Array, Array] | None]]:
    """The keys of all written rows, ascending, `chunk_rows` at a time. Beside them None: the rows are to be copied from
    storage. Where some are `held`, their weights and states, of those instead of what storage has."""
    if held is None:
        for keys in used_keys(cold, chunk_rows):
            yield keys, None
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
            yield keys[order][part], (weight[part], state[part])
        done = end


def write_rows(
    directory: str, names: Iterator[str], cold: ColdRows, held: HeldRows | None = None, part: KeyPart | None = None
) -> tuple[tuple[str, ...], list[Chunk]]:
    """Writes all written rows of `cold`, and those `held` elsewhere, to new files of the next of the `names`, and syncs
    them: under the keys of the whole of which they are a `part`, if they are one. Returns which it took, and the
    chunks. Raises `OSError`."""
    writer = _Writer(directory, names, cold, part)
    try:
        writer.create()
        with progress("writing rows", None) as advance:
            each(writer.write, writer.placed(held), advance, writer.threads)
        each(writer.sync, writer.fds)
    finally:
        for fd in writer.fds:
            system.close(fd)
    return tuple(writer.files), writer.chunks


class _Writer:
    """Row files that are being written. `files`: their names · `fds`: their descriptors, to be closed."""

    def __init__(self, directory: str, names: Iterator[str], cold: ColdRows, part: KeyPart | None) -> None:
        self._part = part
        self._directory, self._names, self._cold, self._layout = directory, names, cold, cold.layout
        self._chunk_rows = max(1, _CHUNK_BYTES // bytes_of(1, cold.layout))
        self._memories = _Memories(bytes_of(self._chunk_rows, cold.layout))
        rows = sum(stop - start for start, stop in cold.used_ranges())
        self._ends = [0] * (_FILES if rows * cold.layout.row_bytes >= _LARGE_BYTES else 1)
        self.files: list[str] = []
        self.fds: list[int] = []
        self.chunks: list[Chunk] = []

    @property
    def threads(self) -> int:
        """How many may write at a time."""
        return self._memories.threads

    def create(self) -> None:
        """Makes the next file."""
        self.files.append(next(self._names))
        path = os.path.join(self._directory, self.files[-1])
        self.fds.append(system.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))

    def placed(self, held: HeldRows | None) -> Iterator[tuple[int, Array, tuple[Array, Array] | None]]:
        """For each chunk its number, which gives it its place, its keys and weights and states as of `_rows_of`."""
        number = -1
        for keys, rows in self._real(_rows_of(self._cold, self._chunk_rows, held)):
            number += 1
            file = number % len(self._ends)
            if file == len(self.fds):
                self.create()
            self.chunks.append(Chunk(self._ends[file], len(keys), 0))
            self._ends[file] += bytes_of(len(keys), self._layout)
            yield number, keys, rows

    def _real(
        self, found: Iterator[tuple[Array, tuple[Array, Array] | None]]
    ) -> Iterator[tuple[Array, tuple[Array, Array] | None]]:
        """Those that are rows of the whole, where this is a part of one."""
        for keys, rows in found:
            real = None if self._part is None else self._part.holds(keys)
            if real is None or real.all():
                yield keys, rows
            elif real.any():
                yield keys[real], None if rows is None else (rows[0][real], rows[1][real])

    def write(self, item: tuple[int, Array, tuple[Array, Array] | None], thread: int) -> int:
        """Writes a chunk that has its place; returns its bytes."""
        number, keys, rows = item
        crc, offset = 0, self.chunks[number].offset
        named = keys if self._part is None else np.ascontiguousarray(self._part.whole(keys))
        for part in (named, *(rows or _stored(self._cold, keys, self._memories, thread))):
            data = part.reshape(-1).view(np.uint8).data
            crc = zlib.crc32(data, crc)
            pwrite_all(self.fds[number % len(self._ends)], data, offset)
            offset += data.nbytes
        self.chunks[number] = self.chunks[number]._replace(crc32=crc)
        return offset - self.chunks[number].offset

    @staticmethod
    def sync(fd: int, thread: int) -> int:
        """Makes a file durable, and forgets it in memory: verifying then reads what the disk has."""
        system.fsync(fd)
        system.fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return 0


def _stored(cold: ColdRows, keys: Array, memories: _Memories, thread: int) -> tuple[Array, Array]:
    """Weights and states of the rows `keys`: views of storage if these are neighbours, else gathered."""
    place = place_of(keys)
    if isinstance(place, slice):
        return cold.weight[place], cold.state[place]
    _, weight, state = _parts(memories.of(thread), len(keys), cold.layout)
    # "clip": keys are in range, and without a check nothing is copied twice
    np.take(cold.weight, keys, axis=0, out=weight, mode="clip")
    np.take(cold.state, keys, axis=0, out=state, mode="clip")
    return weight, state


class _Memories:
    """A buffer of `size_bytes` for each thread, made when it is needed."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._by_thread: dict[int, Array] = {}

    @property
    def threads(self) -> int:
        """How many may have one at a time."""
        return max(1, min(torch.get_num_threads(), _BUFFERS_BYTES // max(1, self._size_bytes)))

    def of(self, thread: int) -> Array:
        if thread not in self._by_thread:
            self._by_thread[thread] = np.empty(self._size_bytes, np.uint8)
        return self._by_thread[thread]


class RowFiles:
    """The open files of a key space of a checkpoint, and its chunks. Raises `OSError`; `CheckpointError` for what they
    should not hold."""

    def __init__(self, directory: str, names: Sequence[str], chunks: list[Chunk], layout: RowLayout) -> None:
        self._directory, self._chunks, self._layout = directory, chunks, layout
        self._is_certain = False  # was verified, and is the same when it is read again
        self._sizes = [bytes_of(chunk.rows, layout) for chunk in chunks]
        self._files: list[tuple[str, Descriptor]] = []
        try:
            for name in names:
                path = os.path.join(directory, name)
                self._files.append((path, _opened(path)))
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> RowFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            file[1].close()

    def verify(self) -> None:
        """Reads all files: sizes, checksums, keys in range and ascending."""
        for number, (path, file) in enumerate(self._files):
            size, expected = system.fstat(file.fd).st_size, sum(self._sizes[number :: len(self._files)])
            if size != expected:
                raise CheckpointError(
                    f"{path!r} has {size} bytes and the manifest says {expected}; use another checkpoint"
                )
        ends = np.zeros((len(self._chunks), 2), np.int64)  # first and last key of each chunk

        def check(number: int, keys: Array, weight: Array, state: Array) -> None:
            ends[number] = keys[0], keys[-1]
            if keys[0] < 0 or keys[-1] >= self._layout.rows or (keys[1:] <= keys[:-1]).any():
                self._refuse_keys(number)

        self.read("verifying rows", check)
        for before in np.flatnonzero(ends[1:, 0] <= ends[:-1, 1]).tolist():
            self._refuse_keys(before + 1)
        self._is_certain = is_in_memory(self._directory)

    def _refuse_keys(self, number: int) -> None:
        path, _ = self._files[number % len(self._files)]
        raise CheckpointError(f"{path!r} holds keys out of order or range; use another checkpoint")

    def read(
        self, title: str, take: Callable[[int, Array, Array, Array], object], *, threads: int | None = None
    ) -> None:
        """Calls `take` with the number, keys (n,), weight (n, D) and state (n, S + 1) of each chunk, whose checksum was
        verified, on several threads at once and in any order. The memory of the rows is reused."""
        memories = _Memories(max(self._sizes, default=0))

        def work(number: int, thread: int) -> int:
            memory, chunk = memories.of(thread)[: self._sizes[number]], self._chunks[number]
            path, file = self._files[number % len(self._files)]
            pread_into(file.fd, memory, chunk.offset)
            if not self._is_certain and zlib.crc32(memory.data) != chunk.crc32:
                raise CheckpointError(
                    f"{path!r} is damaged: the checksum of the {chunk.rows} rows at byte {chunk.offset} differs; use "
                    "another checkpoint"
                )
            take(number, *_parts(memory, chunk.rows, self._layout))
            return len(memory)

        with progress(title, sum(self._sizes)) as advance:
            each(work, range(len(self._chunks)), advance, threads or memories.threads)


class CheckedFile:
    """An open file whose size and checksum the manifest knows: of what an optimizer remembers of its steps, as
    `lookup.histories.Stored` describes it, or of dense layers. Raises `OSError`, and `CheckpointError` for a file of
    another size."""

    def __init__(self, path: str, size_bytes: int, crc32: int | None) -> None:
        self.size_bytes = size_bytes
        self._crc32 = crc32
        self._file = _opened(path)
        found = system.fstat(self._file.fd).st_size
        if found != size_bytes:
            self._file.close()
            raise CheckpointError(
                f"{path!r} has {found} bytes and the manifest says {size_bytes}; use another checkpoint"
            )

    def __enter__(self) -> CheckedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, start: int, count: int) -> bytes:
        """Those `count` bytes from `start` on, fewer at the end."""
        return pread_all(self._file.fd, min(count, self.size_bytes - start), start)

    def verify(self) -> None:
        """Raises `ValueError` if the bytes differ from those written."""
        if self._crc32 is None:
            return
        crc = 0
        for start in range(0, self.size_bytes, _CHUNK_BYTES):
            crc = zlib.crc32(self.read(start, _CHUNK_BYTES), crc)
        if crc != self._crc32:
            raise ValueError("its checksum differs")


def _opened(path: str) -> Descriptor:
    fd = system.open(path, os.O_RDONLY | os.O_NONBLOCK)  # opening a pipe would wait for its writer
    if not stat.S_ISREG(system.fstat(fd).st_mode):
        system.close(fd)
        raise CheckpointError(f"{path!r} is no regular file; use another checkpoint")
    return Descriptor(fd)
