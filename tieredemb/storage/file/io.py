"""Complete reads and writes of files, with errors of this library that name the file and the action, with the cause."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np

from tieredemb.errors import StorageError, StorageFullError, TieredEmbError
from tieredemb.storage.refused import refused
from tieredemb.storage.system import system

FULL = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def storage_errors(path: str, doing: str) -> Iterator[None]:
    """Turns an `OSError` of the block into `StorageError`, or `StorageFullError` where space or quota ran
    out."""
    try:
        yield
    except TieredEmbError:
        raise
    except OSError as error:
        if error.errno in FULL:
            raise StorageFullError(
                f"no space left while {doing} {path!r}; free space on its filesystem and try again: nothing is lost "
                "while this process has the rows"
            ) from error
        raise StorageError(f"{doing} {path!r} failed: {refused(error, path)}") from error


def pwrite_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Writes all of `data` at `offset`; `os.pwrite` may stop short."""
    view = memoryview(data).cast("B")
    while view.nbytes:
        written = system.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def pread_all(fd: int, size_bytes: int, offset: int) -> bytes:
    """Reads `size_bytes` at `offset`; fewer only at the end of the file."""
    parts = []
    while size_bytes:
        part = system.pread(fd, size_bytes, offset)
        if not part:
            break
        parts.append(part)
        size_bytes, offset = size_bytes - len(part), offset + len(part)
    return b"".join(parts)


def pread_into(fd: int, array: np.ndarray[Any, Any], offset: int) -> None:
    """Fills a C-contiguous array from `offset` on. Holes read as zeros and stay holes, unlike reads through a
    mapping. Raises `OSError` at the end of the file."""
    view = memoryview(array.reshape(-1).view(np.uint8).data)
    while view.nbytes:
        read = system.preadv(fd, [view], offset)
        if not read:
            raise OSError(errno.EIO, "the file ends before its rows do")
        view, offset = view[read:], offset + read


class Descriptor:
    """An open file, closed once: by `close`, or when it is collected. The end of the process closes it, after all that
    runs there."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._file = io.FileIO(fd, "rb")  # it closes and knows so in one step, which nothing interrupts
        weakref.finalize(self, _close, self._file).atexit = False

    def close(self) -> None:
        """A second call does nothing."""
        _close(self._file)


def _close(file: io.FileIO) -> None:
    # The descriptor is closed even if this fails, and data that must be durable was synced before.
    with contextlib.suppress(OSError):
        file.close()


def fsync_directory(path: str) -> None:
    """Makes the directory's entries durable: a new or renamed file may otherwise vanish in a power cut."""
    fd = system.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        system.fsync(fd)
    finally:
        system.close(fd)
