"""The rows of an open file: a shared mapping, written in place by kernels after their pages were reserved."""

from __future__ import annotations

import errno
import mmap
import os
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tieredemb.errors import ForkedError, StorageError
from tieredemb.storage.base import STATE_DTYPE, ColdRows, HotArrays, Metadata, RowLayout, Told
from tieredemb.storage.file_header import REGION_BYTES, Header, HeaderSlots
from tieredemb.storage.file_io import storage_errors
from tieredemb.storage.file_lock import FileLock
from tieredemb.storage.file_pages import PageMap

if TYPE_CHECKING:
    from tieredemb.storage.movers import Job


def regions(layout: RowLayout, header_bytes: int) -> tuple[int, int, int]:
    """Offsets of weights, state and the end of the file."""
    state = header_bytes + -(-layout.weight_bytes // REGION_BYTES) * REGION_BYTES
    return header_bytes, state, state + -(-layout.state_bytes // REGION_BYTES) * REGION_BYTES


class FileRows(ColdRows):
    """An open row file. `weight` and `state` are views of a shared mapping: reserve, then write in place."""

    kind = "file"
    in_memory = False
    volatile = False

    def __init__(
        self, path: str, layout: RowLayout, lock: FileLock, fd: int, slots: HeaderSlots, header: Header
    ) -> None:
        """Takes over `lock` and `fd`. The file is locked, of the right size and marked unclean."""
        self.path = path
        self._pid, self._closed, self._damaged = os.getpid(), False, False
        self._lock, self._fd, self._slots, self._header = lock, fd, slots, header
        weight_at, self._state_at, end = regions(layout, slots.region_bytes)
        self._map = mmap.mmap(fd, end, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        # Random rows: readahead would read 32 pages for one. It also makes large folios, and a filesystem may take
        # space for the whole folio at a write fault, its unreserved pages too.
        self._map.madvise(mmap.MADV_RANDOM)
        weight = self._view(weight_at, layout.weight_bytes).view(layout.carrier)
        state = self._view(self._state_at, layout.state_bytes).view(STATE_DTYPE)
        super().__init__(
            layout,
            weight.reshape(layout.rows, layout.width),
            state.reshape(layout.rows, layout.state_width + 1),
        )
        self.metadata = header.metadata
        width_bytes = layout.width * layout.carrier.itemsize
        self._weight_pages = PageMap(fd, weight_at, layout.weight_bytes, width_bytes)
        self._state_pages = PageMap(fd, self._state_at, layout.state_bytes, layout.row_bytes - width_bytes)
        self._close_fd = weakref.finalize(self, os.close, fd)
        self._close_fd.atexit = False  # the exit closes it, after the cache has flushed

    def _view(self, offset: int, size_bytes: int) -> np.ndarray[Any, Any]:
        return np.frombuffer(self._map, np.uint8, size_bytes, offset) if size_bytes else np.empty(0, np.uint8)

    def _check_usable(self) -> None:
        if self._closed:
            raise StorageError(f"{self.path!r} is closed; open it again")
        if os.getpid() != self._pid:
            raise ForkedError(
                f"{self.path!r} belongs to process {self._pid} and this is a forked child of it; open "
                "tables after the fork, or start workers with the 'spawn' method"
            )

    def reserve(self, keys: np.ndarray[Any, Any]) -> None:
        """Takes disk space for the pages of the rows. Raises `StorageFullError`; no row was changed then."""
        self._check_usable()
        with storage_errors(self.path, "taking space for rows of"):
            self._weight_pages.reserve(keys)
            self._state_pages.reserve(keys)

    def reserve_range(self, start: int, stop: int) -> None:
        self._check_usable()
        with storage_errors(self.path, "taking space for rows of"):
            self._weight_pages.reserve_range(start, stop)
            self._state_pages.reserve_range(start, stop)

    def read(
        self, keys: np.ndarray[Any, Any], slots: np.ndarray[Any, Any], hot: HotArrays
    ) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """As every tier. Takes space for the scores first, which come back even from a row that stays clean;
        on tmpfs merely reading a hole takes a page."""
        self._reserve_scores(keys)
        return super().read(keys, slots, hot)

    def gather(
        self, keys: torch.Tensor, weight: torch.Tensor, state: torch.Tensor, *, begun: Job | None = None
    ) -> None:
        """As every tier; takes space as `read`."""
        self._reserve_scores(keys.numpy())
        super().gather(keys, weight, state, begun=begun)

    def gather_when_told(self, told: Told, weight: torch.Tensor, state: torch.Tensor) -> Job | None:
        """As every tier, once all scores have their space: nobody else takes it for them."""
        self._check_usable()
        return super().gather_when_told(told, weight, state) if self._state_pages.is_whole else None

    def _reserve_scores(self, keys: np.ndarray[Any, Any]) -> None:
        self._check_usable()
        with storage_errors(self.path, "taking space for scores of"):
            self._state_pages.reserve(keys)

    def used_ranges(self) -> Iterator[tuple[int, int]]:
        """The rows whose score lies in a data extent of the file: holes are skipped by the filesystem."""
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
                    data = os.lseek(self._fd, position, os.SEEK_DATA)
                    hole = os.lseek(self._fd, data, os.SEEK_HOLE) if data < end else data
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
        self._check_usable()
        self.finish()
        with storage_errors(self.path, "discarding the rows of"):
            _punch(self._map, self._fd, self._slots.region_bytes)
        self._weight_pages.clear()
        self._state_pages.clear()
        self.metadata = Metadata()

    def flush(self) -> None:
        """Rows, then metadata, to the disk; returns when they are durable. The file stays marked unclean: the
        hot cache goes on being newer."""
        self._check_usable()
        self._sync(clean=False)

    def _sync(self, *, clean: bool) -> None:
        self.finish()
        if self._damaged:  # the kernel reports a failed write once, then forgets it: a retry looks like success
            raise StorageError(
                f"an earlier flush of {self.path!r} failed, so rows on disk may be old; save a checkpoint "
                "elsewhere, then open the file with fresh=True"
            )
        try:
            with storage_errors(self.path, "flushing"):
                self._map.flush()
                self._slots.write(replace(self._header, metadata=self.metadata, clean=clean))
        except BaseException:
            self._damaged = True
            raise

    def close(self) -> None:
        """Flushes, marks the file clean and gives it back. After a failed flush it stays unclean and this
        raises. In a forked child it only lets go: the file is the parent's."""
        if self._closed:
            return
        try:
            if os.getpid() == self._pid:
                self._sync(clean=True)
        finally:
            self._closed = True
            self.weight, self.state = self.weight[:0].copy(), self.state[:0].copy()
            del self._map  # unmapped when nobody holds the arrays any more
            self._close_fd()
            self._lock.release()

    def size_bytes(self) -> dict[str, int]:
        """Sizes in the file's address space; on disk it takes the pages used. `pages`: memory of the
        bitmaps."""
        regions = {
            "weight": self.weight.nbytes,
            "state": self.state.nbytes,
            "header": self._slots.region_bytes,
        }
        return regions | {"pages": self._weight_pages.bits.nbytes + self._state_pages.bits.nbytes}


def _punch(region: mmap.mmap, fd: int, start: int) -> None:
    """Zeros the mapped file from `start` on and frees its blocks."""
    size = len(region)
    if start == size:
        return
    try:
        region.madvise(mmap.MADV_REMOVE, start, size - start)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        os.ftruncate(fd, start)  # the caller serialises: nobody reads the mapping between these two lines
        os.ftruncate(fd, size)
