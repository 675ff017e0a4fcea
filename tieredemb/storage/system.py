"""The system calls of the file tier and of checkpoints, in one place, where tests can make each of them fail.

Tests replace `system` and let every call fail, once or for good, at every position (`tests/disturbances/faults.py`).
The seam is in the library rather than in a preloaded one, as it covers `msync` and `madvise` of a mapping and
calls of Python itself, names the file, and needs no compiler.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from typing import Any


class System:
    """Each method is the call of its name; see there (`map_shared` is mmap). All raise `OSError`, with an errno."""

    def open(self, path: str, flags: int, mode: int = 0o666) -> int:
        return os.open(path, flags | os.O_CLOEXEC, mode)

    def close(self, fd: int) -> None:
        os.close(fd)

    def stat(self, path: str) -> os.stat_result:
        return os.stat(path)

    def statfs(self, path: str) -> int:
        """The type of a filesystem, as linux/magic.h names them: the only field of the result that is used here."""
        buffer = (ctypes.c_long * 64)()  # more than its struct, which begins with the type, has anywhere
        if ctypes.CDLL(None, use_errno=True).statfs(os.fsencode(path), buffer):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)
        return int(buffer[0]) & 0xFFFFFFFF

    def fstat(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def flock(self, fd: int, how: int) -> None:
        fcntl.flock(fd, how)

    def pread(self, fd: int, size_bytes: int, offset: int) -> bytes:
        return os.pread(fd, size_bytes, offset)

    def preadv(self, fd: int, buffers: list[Any], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        return os.pwrite(fd, data, offset)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def ftruncate(self, fd: int, size_bytes: int) -> None:
        os.ftruncate(fd, size_bytes)

    def fallocate(self, fd: int, offset: int, size_bytes: int) -> None:
        os.posix_fallocate(fd, offset, size_bytes)

    def fadvise(self, fd: int, offset: int, size_bytes: int, advice: int) -> None:
        os.posix_fadvise(fd, offset, size_bytes, advice)

    def lseek(self, fd: int, position: int, whence: int) -> int:
        return os.lseek(fd, position, whence)

    def map_shared(self, fd: int, size_bytes: int) -> mmap.mmap:
        return mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)

    def madvise(self, region: mmap.mmap, advice: int, start: int, size_bytes: int) -> None:
        region.madvise(advice, start, size_bytes)

    def msync(self, region: mmap.mmap) -> None:
        region.flush()

    def makedirs(self, path: str) -> None:
        os.makedirs(path, exist_ok=True)

    def listdir(self, path: str) -> list[str]:
        return os.listdir(path)

    def rename(self, source: str, target: str) -> None:
        os.replace(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)


system = System()
