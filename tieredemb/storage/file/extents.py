"""Bytes in a row file behind its rows: the history of an optimizer's steps, written anew at each flush.

A header names the valid extent. The next one is written where it does not overlap that, so that the old header stays
valid until the next one is durable. It is placed before the old extent if there is space, else behind it: the file has
at most about three times the bytes of a history.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

from tieredemb.storage.file.header import Extent
from tieredemb.storage.file.io import pread_all, pwrite_all
from tieredemb.storage.system import system

_ALIGNMENT = 4096
_READ_BYTES = 1 << 20


class StoredExtent(NamedTuple):
    """An extent of the open file `fd`, as `lookup.histories.Stored` describes it."""

    fd: int
    extent: Extent

    @property
    def size_bytes(self) -> int:
        return self.extent.size_bytes

    def read(self, start: int, count: int) -> bytes:
        """Those `count` bytes from `start` on, fewer at the end."""
        count = min(count, self.size_bytes - start)
        data = pread_all(self.fd, count, self.extent.start + start)
        if len(data) < count:
            raise ValueError("the file ends within it")
        return data

    def verify(self) -> None:
        """Raises `ValueError` if the bytes differ from those written."""
        crc = 0
        for start in range(0, self.size_bytes, _READ_BYTES):
            crc = zlib.crc32(self.read(start, _READ_BYTES), crc)
        if crc != self.extent.crc32:
            raise ValueError("its checksum differs")


def extent_for(data: bytes, rows_end: int, before: Extent | None) -> Extent:
    """An extent for `data` in a file whose rows end at `rows_end`, without overlap with the valid extent `before`."""
    crc = zlib.crc32(data)
    if before is not None and (before.size_bytes, before.crc32) == (len(data), crc):
        return before
    if before is None or before.start - rows_end >= len(data):
        return Extent(rows_end, len(data), crc)
    return Extent(-(-before.stop // _ALIGNMENT) * _ALIGNMENT, len(data), crc)


def write_extent(fd: int, data: bytes, extent: Extent, file_bytes: int) -> None:
    """Writes `data` durably, and gives the file the size `file_bytes`. Raises `OSError`."""
    pwrite_all(fd, data, extent.start)
    system.ftruncate(fd, file_bytes)
    system.fsync(fd)
