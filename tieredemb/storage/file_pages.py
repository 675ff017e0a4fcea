"""Space for the pages of a sparse file, taken before they are written.

Writing into a hole of a mapped file on a full disk is SIGBUS, which no program can handle; `posix_fallocate`
beforehand makes it an error. A bit a page remembers what has been asked for, so that a page costs one system
call in the life of a process, and neighbouring pages share one.
"""

from __future__ import annotations

import errno
import os
from typing import Any

import numpy as np

from tieredemb.storage.file_io import pread_all, pwrite_all

# A write fault takes space for a whole page, and the regions of a file start at a multiple of every page
# size.
PAGE_BYTES = max(4096, os.sysconf("SC_PAGE_SIZE"))
PAGE_SHIFT = PAGE_BYTES.bit_length() - 1
_KEYS_AT_ONCE = 1 << 16  # bounds the scratch: wide rows span many pages
_PAGES_AT_ONCE = 1 << 20
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


class PageMap:
    """The pages of one region (`offset`, `size_bytes`, rows of `row_bytes`) of the file `fd`."""

    def __init__(self, fd: int, offset: int, size_bytes: int, row_bytes: int) -> None:
        self._fd, self._offset, self._row_bytes = fd, offset, row_bytes
        self.pages = -(-size_bytes // PAGE_BYTES)
        self.clear()

    def clear(self) -> None:
        """Forgets every page: the file was punched."""
        self.bits = np.zeros(-(-self.pages // 8), np.uint8)  # calloc: untouched parts take no memory
        self._unclaimed = self.pages

    @property
    def is_whole(self) -> bool:
        """Whether every page has its space."""
        return not self._row_bytes or self._unclaimed == 0

    def reserve(self, keys: np.ndarray[Any, Any]) -> None:
        """Takes space for the rows `keys` (int64 (K,)). Raises `OSError`; what was taken before stays
        taken."""
        if not self._row_bytes or not len(keys) or not self._unclaimed:
            return
        from tieredemb.storage.file_pages_cpu import pages_claim

        spans = 1 if PAGE_BYTES % self._row_bytes == 0 else 1 + -(-(self._row_bytes - 1) // PAGE_BYTES)
        missing = np.empty(min(len(keys), _KEYS_AT_ONCE) * spans, np.int64)
        for start in range(0, len(keys), _KEYS_AT_ONCE):
            part = keys[start : start + _KEYS_AT_ONCE]
            count = pages_claim(0, len(part), part, self._row_bytes, PAGE_SHIFT, self.bits, missing)
            self._unclaimed -= count
            self._allocate(np.sort(missing[:count]))

    def reserve_range(self, start: int, stop: int) -> None:
        """`reserve` for the rows start … stop - 1."""
        if not self._row_bytes or stop <= start or not self._unclaimed:
            return
        first = start * self._row_bytes // PAGE_BYTES
        end = -(-stop * self._row_bytes // PAGE_BYTES)
        for page in range(first // 8 * 8, end, _PAGES_AT_ONCE):
            last = min(page + _PAGES_AT_ONCE, end)
            free = np.unpackbits(self.bits[page // 8 : -(-last // 8)], bitorder="little")[: last - page] == 0
            free[: max(0, first - page)] = False
            pages = page + np.flatnonzero(free)
            self._mark(pages)
            self._allocate(pages)

    def _mark(self, pages: np.ndarray[Any, Any]) -> None:
        np.bitwise_or.at(self.bits, pages >> 3, (1 << (pages & 7)).astype(np.uint8))
        self._unclaimed -= len(pages)

    def _unmark(self, pages: np.ndarray[Any, Any]) -> None:
        np.bitwise_and.at(self.bits, pages >> 3, (~(1 << (pages & 7))).astype(np.uint8))
        self._unclaimed += len(pages)

    def _allocate(self, pages: np.ndarray[Any, Any]) -> None:
        """Takes the sorted, marked `pages`; unmarks those that it could not take."""
        if not len(pages):
            return
        breaks = np.flatnonzero(np.diff(pages) != 1) + 1
        first, end = [0, *breaks.tolist()], [*breaks.tolist(), len(pages)]
        for lo, hi in zip(first, end, strict=True):
            try:
                _take(self._fd, self._offset + int(pages[lo]) * PAGE_BYTES, (hi - lo) * PAGE_BYTES)
            except BaseException:
                self._unmark(pages[lo:])
                raise


def _take(fd: int, offset: int, size_bytes: int) -> None:
    """Gives the range blocks on disk and leaves its content. Raises `OSError`."""
    try:
        os.posix_fallocate(fd, offset, size_bytes)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        _fill_holes(fd, offset, size_bytes)


def _fill_holes(fd: int, offset: int, size_bytes: int) -> None:
    """Writes zeros where there are zeros, for a filesystem without fallocate: a page with data is never
    written.

    The content is asked, not `SEEK_HOLE`: filesystems that lack one often lack the other.
    """
    zeros = bytes(PAGE_BYTES)
    for position in range(offset, offset + size_bytes, PAGE_BYTES):
        if pread_all(fd, PAGE_BYTES, position) == zeros:
            pwrite_all(fd, zeros, position)
