"""Space for the pages of a sparse file, reserved before they are written.

Writing into a hole of a mapped file on a full disk is SIGBUS, which no program can handle; `posix_fallocate` before
makes it an error. A bit a page records reserved pages, so that a page costs one system call in the life of a process,
and neighbouring pages share one.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from tieredemb.storage.file.io import pread_all, pwrite_all
from tieredemb.storage.system import system

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
        self._claimed: np.ndarray[Any, Any] | None = None  # pages that are marked, or will be, and not reserved yet

    @property
    def is_whole(self) -> bool:
        """Whether every page has its space."""
        self._recover()
        return not self._row_bytes or self._unclaimed == 0

    def reserve(self, keys: np.ndarray[Any, Any]) -> None:
        """Reserves space for the rows `keys` (int64 (K,)). Raises `OSError`; pages reserved before stay reserved."""
        self._recover()
        if not self._row_bytes or not len(keys) or not self._unclaimed:
            return
        from tieredemb.storage.file.pages_cpu import pages_claim

        spans = 1 if PAGE_BYTES % self._row_bytes == 0 else 1 + -(-(self._row_bytes - 1) // PAGE_BYTES)
        missing = np.full(min(len(keys), _KEYS_AT_ONCE) * spans, -1, np.int64)
        for start in range(0, len(keys), _KEYS_AT_ONCE):
            part = keys[start : start + _KEYS_AT_ONCE]
            missing[:] = -1
            self._claimed = missing
            count = pages_claim(0, len(part), part, self._row_bytes, PAGE_SHIFT, self.bits, missing)
            self._unclaimed -= count
            self._allocate(np.sort(missing[:count]))
            self._claimed = None

    def reserve_range(self, start: int, stop: int) -> None:
        """`reserve` for the rows start … stop - 1."""
        self._recover()
        if not self._row_bytes or stop <= start or not self._unclaimed:
            return
        first = start * self._row_bytes // PAGE_BYTES
        end = -(-stop * self._row_bytes // PAGE_BYTES)
        for page in range(first // 8 * 8, end, _PAGES_AT_ONCE):
            last = min(page + _PAGES_AT_ONCE, end)
            free = np.unpackbits(self.bits[page // 8 : -(-last // 8)], bitorder="little")[: last - page] == 0
            free[: max(0, first - page)] = False
            pages = page + np.flatnonzero(free)
            self._claimed = pages
            np.bitwise_or.at(self.bits, pages >> 3, (1 << (pages & 7)).astype(np.uint8))
            self._unclaimed -= len(pages)
            self._allocate(pages)
            self._claimed = None

    def _recover(self) -> None:
        """Unmarks the pages of a call that failed or was interrupted, as some were not reserved."""
        if self._claimed is None:
            return
        pages = self._claimed[self._claimed >= 0]
        np.bitwise_and.at(self.bits, pages >> 3, (~(1 << (pages & 7))).astype(np.uint8))
        self._unclaimed = self.pages - sum(len(taken) for taken in self._taken())
        self._claimed = None

    def _taken(self) -> Iterator[np.ndarray[Any, Any]]:
        """The marked pages, ascending, in parts."""
        for start in range(0, len(self.bits), _PAGES_AT_ONCE // 8):
            part = np.unpackbits(self.bits[start : start + _PAGES_AT_ONCE // 8], bitorder="little")
            yield 8 * start + np.flatnonzero(part)

    def row_ranges(self) -> list[tuple[int, int]]:
        """Rows (start, stop) with a byte in a reserved page, ascending."""
        ranges: list[tuple[int, int]] = []
        for pages in self._taken() if self._row_bytes else ():
            for lo, hi in _runs(pages):
                start, stop = int(pages[lo]) * PAGE_BYTES, (int(pages[hi - 1]) + 1) * PAGE_BYTES
                ranges.append((start // self._row_bytes, -(-stop // self._row_bytes)))
        return ranges

    def rewrite(self, region: np.ndarray[Any, Any]) -> None:
        """Makes every reserved page dirty, with unchanged bytes. `region`: uint8, the region's bytes."""
        for pages in self._taken():
            region[pages * PAGE_BYTES] = region[pages * PAGE_BYTES]

    def _allocate(self, pages: np.ndarray[Any, Any]) -> None:
        """Takes the sorted, marked `pages`."""
        for lo, hi in _runs(pages):
            _take(self._fd, self._offset + int(pages[lo]) * PAGE_BYTES, (hi - lo) * PAGE_BYTES)


def _runs(pages: np.ndarray[Any, Any]) -> list[tuple[int, int]]:
    """Where neighbours among sorted pages begin and end."""
    if not len(pages):
        return []
    breaks = (np.flatnonzero(np.diff(pages) != 1) + 1).tolist()
    return list(zip([0, *breaks], [*breaks, len(pages)], strict=True))


def _take(fd: int, offset: int, size_bytes: int) -> None:
    """Gives the range blocks on disk and leaves its content. Raises `OSError`."""
    try:
        system.fallocate(fd, offset, size_bytes)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        _fill_holes(fd, offset, size_bytes)


def _fill_holes(fd: int, offset: int, size_bytes: int) -> None:
    """Writes zeros over zeros, for a filesystem without fallocate: a page with data is never written.

    It reads the content in place of `SEEK_HOLE`, as filesystems that lack one often lack the other.
    """
    zeros = bytes(PAGE_BYTES)
    for position in range(offset, offset + size_bytes, PAGE_BYTES):
        if pread_all(fd, PAGE_BYTES, position) == zeros:
            pwrite_all(fd, zeros, position)
