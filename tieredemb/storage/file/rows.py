"""The rows of an open file: a shared mapping, written in place by kernels after their pages were reserved."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from tieredemb.errors import ForkedError, StorageError
from tieredemb.storage.base import STATE_DTYPE, ColdRows, RowLayout, RowSet
from tieredemb.storage.file.extents import extent_for, write_extent
from tieredemb.storage.file.header import Header, plain_metadata
from tieredemb.storage.file.io import FULL, Descriptor, pread_all, pread_into, pwrite_all, storage_errors
from tieredemb.storage.file.lock import FileLock
from tieredemb.storage.file.pages import PageMap
from tieredemb.storage.file.row_set import OpenSet
from tieredemb.storage.file.slots import REGION_BYTES, HeaderSlots
from tieredemb.storage.system import system

_READ_BYTES = 1 << 24  # of states at once, which are read whole where scores alone are wanted


def regions(layout: RowLayout, header_bytes: int) -> tuple[int, int, int]:
    """Offsets of weights, state and the end of the file."""
    state = header_bytes + -(-layout.weight_bytes // REGION_BYTES) * REGION_BYTES
    return header_bytes, state, state + -(-layout.state_bytes // REGION_BYTES) * REGION_BYTES


def map_rows(fd: int, size_bytes: int) -> mmap.mmap:
    """Maps the whole file. Random rows: readahead would read 32 pages for one. It also makes large folios, and a
    filesystem may take space for the whole folio at a write fault, its unreserved pages too."""
    mapping = system.map_shared(fd, size_bytes)
    system.madvise(mapping, mmap.MADV_RANDOM, 0, size_bytes)
    return mapping


class FileRows(ColdRows):
    """An open row file. `weight` and `state` are views of a shared mapping: reserve, then write in place.

    What the kernel could not write it may drop, and forget that it failed. So after a failed flush every page that may
    have been written is written again before the next one counts; and where the disk itself has failed, first of all
    the rows have to be saved elsewhere (`kept`), as long as memory still has them.
    """

    kind = "file"
    in_memory = False
    volatile = False

    def __init__(
        self,
        path: str,
        layout: RowLayout,
        lock: FileLock,
        file: Descriptor,
        mapping: mmap.mmap,
        slots: HeaderSlots,
        header: Header,
        row_set: OpenSet,
    ) -> None:
        """Takes over `lock` and `file`. The file is locked, of the right size and mapped, and one of `row_set`."""
        self.path = path
        self._pid, self._closed = os.getpid(), False
        self._lock, self._file, self._map, self._slots, self._header = lock, file, mapping, slots, header
        self._set, self._member = row_set, "" if header.membership is None else header.membership.member
        self._is_marked = False  # unclean in this session, durably
        self._synced = plain_metadata(header.metadata)  # as the file has it
        self._is_to_rewrite = False  # a flush has failed, or was interrupted
        self._failure = ""  # of the disk, as long as rows that it may have lost were not saved elsewhere
        self._is_kept = False  # whether all rows were saved elsewhere since the last change
        weight_at, self._state_at, self._rows_end = regions(layout, slots.region_bytes)
        self._weight_bytes = self._view(weight_at, layout.weight_bytes)
        self._state_bytes = self._view(self._state_at, layout.state_bytes)
        super().__init__(
            layout,
            self._weight_bytes.view(layout.carrier).reshape(layout.rows, layout.columns),
            self._state_bytes.view(STATE_DTYPE).reshape(layout.rows, layout.state_width + 1),
        )
        self.metadata = plain_metadata(header.metadata)
        row_set.files.add(self)
        width_bytes = layout.columns * layout.carrier.itemsize
        self._weight_pages = PageMap(file.fd, weight_at, layout.weight_bytes, width_bytes)
        self._state_pages = PageMap(file.fd, self._state_at, layout.state_bytes, layout.row_bytes - width_bytes)

    def _view(self, offset: int, size_bytes: int) -> np.ndarray[Any, Any]:
        return np.frombuffer(self._map, np.uint8, size_bytes, offset) if size_bytes else np.empty(0, np.uint8)

    def _check_usable(self) -> None:
        if self.released:
            raise StorageError(f"{self.path!r} is closed; open it again")
        if os.getpid() != self._pid:
            raise ForkedError(
                f"{self.path!r} belongs to process {self._pid} and this is a forked child of it; open "
                "tables after the fork, or start workers with the 'spawn' method"
            )

    def begin_changes(self) -> None:
        """Marks the file unclean, once, before a row of it is used: a row in the hot cache may be newer from then
        on."""
        self._is_kept = False
        self._mark()

    def _mark(self) -> None:
        self._check_usable()
        if not self._is_marked:
            self._set.begin(self)

    def mark(self) -> None:
        """Writes the mark, and the generation of the set, durably. For the set, whose files are marked at once."""
        self._check_usable()
        with storage_errors(self.path, "marking"):
            for _ in range(2):  # both copies, so that damage to one does not restore an older "clean"
                self._write_header(metadata=self._synced, clean=False)
        self._is_marked = True

    def unmark(self) -> None:
        """For the set, which could not mark all files: this one is marked again before its rows are used."""
        self._is_marked = False

    def _write_header(self, **changes: Any) -> None:
        """Writes the header with these `changes`, durably."""
        with self._set.lock:
            header = replace(self._header, membership=self._set.membership(self._member), **changes)
            self._slots.write(header)
            self._header = header

    def filled(self) -> None:
        """See `ColdRows`. Rows before the mark, so that no power cut leaves the mark without them."""
        if not self._header.filled:
            self._check_usable()
            with storage_errors(self.path, "flushing"):
                system.msync(self._map)
                self._write_header(filled=True)

    @property
    def row_set(self) -> RowSet:
        """See `ColdRows`."""
        files = sorted(each.path for each in self._set.files)
        return RowSet(self._set.identity, self._set.generation, files)

    def reserve(self, keys: np.ndarray[Any, Any]) -> None:
        """Takes disk space for the pages of the rows. Raises `StorageFullError`; no row was changed then."""
        self.begin_changes() if len(keys) else self._mark()  # then scores alone are about to change
        with storage_errors(self.path, "taking space for rows of"):
            self._weight_pages.reserve(keys)
            self._state_pages.reserve(keys)

    def reserve_range(self, start: int, stop: int) -> None:
        self.begin_changes()
        with storage_errors(self.path, "taking space for rows of"):
            self._weight_pages.reserve_range(start, stop)
            self._state_pages.reserve_range(start, stop)

    def reserve_scores(self, keys: np.ndarray[Any, Any]) -> None:
        """As every tier. On tmpfs merely to read a hole takes a page."""
        self.begin_changes()
        with storage_errors(self.path, "taking space for scores of"):
            self._state_pages.reserve(keys)

    @property
    def has_all_scores_reserved(self) -> bool:
        return self._state_pages.is_whole

    @property
    def has_all_reserved(self) -> bool:
        return self._weight_pages.is_whole and self._state_pages.is_whole

    def copy_range(
        self, start: int, stop: int, weight: np.ndarray[Any, Any], state: np.ndarray[Any, Any]
    ) -> np.ndarray[Any, Any]:
        """As every tier, but through reads: through the mapping tmpfs would give each hole a page, or a signal where it
        has none left."""
        self._check_usable()
        scores = np.empty(stop - start, STATE_DTYPE)
        at_once = max(1, _READ_BYTES // ((self.layout.state_width + 1) * STATE_DTYPE.itemsize))
        with storage_errors(self.path, "reading rows of"):
            if weight.nbytes:
                at = self._slots.region_bytes + start * self.layout.columns * weight.itemsize
                pread_into(self._file.fd, weight, at)
            for lo in range(0, len(scores), at_once):
                part = slice(lo, min(lo + at_once, len(scores)))
                states = np.empty((part.stop - lo, self.layout.state_width + 1), STATE_DTYPE)
                pread_into(self._file.fd, states, self._state_at + (start + lo) * states[0].nbytes)
                state[part], scores[part] = states[:, : state.shape[1]], states[:, -1]
        return scores

    def used_ranges(self) -> Iterator[tuple[int, int]]:
        """The rows whose score is in a data extent of the file: the filesystem skips holes."""
        self._check_usable()
        row_bytes = (self.layout.state_width + 1) * STATE_DTYPE.itemsize
        end, start, stop = self._state_at + self.layout.state_bytes, 0, 0
        for data, hole in self._extents(self._state_at, end):
            first = (data - self._state_at) // row_bytes
            if first > stop:
                if stop > start:
                    yield start, stop
                start = first
            stop = min(-(-(hole - self._state_at) // row_bytes), self.layout.rows)
        if stop > start:
            yield start, stop

    def _extents(self, position: int, end: int) -> Iterator[tuple[int, int]]:
        """Ranges of bytes with data. A filesystem that knows no holes reports one."""
        while position < end:
            try:
                with storage_errors(self.path, "looking for rows in"):
                    data = system.lseek(self._file.fd, position, os.SEEK_DATA)
                    hole = system.lseek(self._file.fd, data, os.SEEK_HOLE) if data < end else data
            except StorageError as error:
                code = getattr(error.__cause__, "errno", None)
                if code == errno.ENXIO:  # no data up to the end of the file
                    return
                if code not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                data, hole = position, end
            if data >= end:
                return
            yield data, min(hole, end)
            position = hole

    def reset(self) -> None:
        """Punches the rows out of the file, whose space returns to the filesystem; the arrays stay valid."""
        self.begin_changes()
        with storage_errors(self.path, "discarding the rows of"):
            self._punch()
        self._weight_pages.clear()
        self._state_pages.clear()
        self.metadata = self.metadata.cleared()

    def _punch(self) -> None:
        """Zeros all rows and frees their blocks."""
        start, stop, fd = self._slots.region_bytes, self._rows_end, self._file.fd
        if start == stop:
            return
        try:
            system.madvise(self._map, mmap.MADV_REMOVE, start, stop - start)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            size = system.fstat(fd).st_size
            behind = pread_all(fd, size - stop, stop)
            try:  # the caller serialises: the mapping is not read between these two lines
                system.ftruncate(fd, start)
            finally:
                system.ftruncate(fd, size)
                pwrite_all(fd, behind, stop)

    def flush(self) -> None:
        """Writes rows, then metadata, to the disk; returns when they are durable. The file stays marked unclean, as the
        hot cache becomes newer again. After a failure rows are unchanged, and another call tries again; if the disk has
        failed, it is refused until the rows were `kept`."""
        self._check_usable()
        self._check_linked()
        self._sync(clean=self._header.clean and not self._is_marked)

    def seal(self) -> None:
        """`flush`, and marks the file clean. Nothing is left to be done where the file was deleted and its rows were
        `kept`."""
        self._check_usable()
        if not self._is_gone():
            self._sync(clean=True)

    def kept(self) -> None:
        """Called when all rows were saved elsewhere: a failed disk no longer prevents closing."""
        self._failure, self._is_kept = "", True

    def _check_linked(self) -> None:
        with storage_errors(self.path, "looking after"):
            linked = system.fstat(self._file.fd).st_nlink
        if not linked:
            raise StorageError(
                f"{self.path!r} was deleted while it was open, so its rows end with this process: "
                "save_checkpoint(directory) keeps them, and close() then lets go of the file"
            )

    def _sync(self, *, clean: bool) -> None:
        if self._failure:
            raise StorageError(self._failure)
        metadata = plain_metadata(self.metadata)
        with storage_errors(self.path, "flushing"):
            if self._is_to_rewrite:
                self._weight_pages.rewrite(self._weight_bytes)
                self._state_pages.rewrite(self._state_bytes)
            self._is_to_rewrite = True
            try:
                system.msync(self._map)
                changes = self._with_history()
                self._is_marked &= not clean  # before the header says so: later changes mark it again
                # the mark is written after the rows: if it fails, the rows are durable
                self._write_header(metadata=metadata, clean=clean, **changes)
            except OSError as error:
                if error.errno is not None and error.errno not in FULL:
                    self._failure = self._explain(error)
                    raise StorageError(self._failure) from error
                raise
        self._is_to_rewrite, self._synced = False, metadata

    def _with_history(self) -> dict[str, Any]:
        """Writes the history of steps durably; returns its fields for a header."""
        if self.history is None:
            return {}
        data, before = self.history.to_bytes(), self._header.history
        extent = extent_for(data, self._rows_end, before)
        if extent == before:
            return {}
        self._mark()
        size_bytes = max(extent.stop, before.stop if before else 0)
        write_extent(self._file.fd, data, extent, size_bytes)
        return {"history": extent, "size_bytes": size_bytes}

    def _explain(self, error: OSError) -> str:
        rows = merged([*self._weight_pages.row_ranges(), *self._state_pages.row_ranges()], self.layout.rows)
        return (
            f"flushing {self.path!r} failed: {error}. What the disk did not take may be lost there, of {rows} (counted "
            "through all tables); memory still has them. save_checkpoint(directory) on another disk keeps them; after "
            "that flush() and close() write all of them again. Until then the file is neither flushed nor closed"
        )

    def close(self) -> None:
        """Closes the file. In a forked child it only closes the descriptor: the parent owns the file."""
        if self._closed:
            return
        self.released = True
        for name in ("weight", "state", "_weight_bytes", "_state_bytes"):
            setattr(self, name, getattr(self, name)[:0].copy())
        self.__dict__.pop("_map", None)  # unmapped when the arrays are no longer referenced
        self._file.close()
        self._lock.release()
        self._set.leave(
            self, self._member, 0 if self._header.membership is None else self._header.membership.generation
        )
        self._closed = True

    def _is_gone(self) -> bool:
        """Whether the file was deleted, and its rows saved elsewhere: nothing is left to be flushed."""
        try:
            self._check_linked()
        except StorageError:
            if not self._is_kept:
                raise
            return True
        return False

    def size_bytes(self) -> dict[str, int]:
        """Sizes in the file's address space; on disk it takes the pages used. `pages`: memory of the
        bitmaps."""
        regions = {
            "weight": self.weight.nbytes,
            "state": self.state.nbytes,
            "header": self._slots.region_bytes,
        }
        return regions | {"pages": self._weight_pages.bits.nbytes + self._state_pages.bits.nbytes}


def merged(ranges: list[tuple[int, int]], rows: int) -> str:
    """Ranges of rows (start, stop) in words, in order and without overlaps; those beyond the first few as a number."""
    joined: list[list[int]] = []
    for start, stop in sorted((start, min(stop, rows)) for start, stop in ranges):
        if joined and start <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], stop)
        else:
            joined.append([start, stop])
    words = ", ".join(f"{start}–{stop - 1}" for start, stop in joined[:8])
    more = f" and {len(joined) - 8} more ranges" if len(joined) > 8 else ""
    return f"rows {words}{more}" if joined else "no row"
