"""System calls on files, with errors of our own family: which file, what was being done, and the cause
chained."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from tieredemb.errors import StorageError, StorageFullError, TieredEmbError

_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def storage_errors(path: str, doing: str) -> Iterator[None]:
    """Turns an `OSError` of the block into `StorageError`, or `StorageFullError` where space or quota ran
    out."""
    try:
        yield
    except TieredEmbError:
        raise
    except OSError as error:
        if error.errno in _FULL:
            raise StorageFullError(
                f"no space left while {doing} {path!r}; free space on its filesystem and try again: nothing was lost"
            ) from error
        raise StorageError(f"{doing} {path!r} failed: {error}") from error


def pwrite_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Writes all of `data` at `offset`; `os.pwrite` may stop short."""
    view = memoryview(data).cast("B")
    while view.nbytes:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def pread_all(fd: int, size_bytes: int, offset: int) -> bytes:
    """Reads `size_bytes` at `offset`; fewer only at the end of the file."""
    parts = []
    while size_bytes:
        part = os.pread(fd, size_bytes, offset)
        if not part:
            break
        parts.append(part)
        size_bytes, offset = size_bytes - len(part), offset + len(part)
    return b"".join(parts)


def fsync_directory(path: str) -> None:
    """Makes the directory's entries durable: a new or renamed file may otherwise vanish in a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
