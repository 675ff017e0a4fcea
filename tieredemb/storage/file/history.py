"""What an optimizer remembers of its steps, beside a row file: `<path>.history`, replaced as a whole at each flush."""

from __future__ import annotations

import os
import zlib

from tieredemb.errors import StorageFormatError
from tieredemb.storage.file.io import fsync_directory, pread_all, pwrite_all
from tieredemb.storage.system import system


def history_path(path: str) -> str:
    """Where the history of the row file `path` is."""
    return f"{path}.history"


def write_history(path: str, data: bytes) -> int:
    """Replaces the history of the row file `path`, durably; returns its checksum, which is never 0. Raises
    `OSError`."""
    target, pending = history_path(path), f"{history_path(path)}.pending"
    fd = system.open(pending, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        pwrite_all(fd, data, 0)
        system.fsync(fd)
    finally:
        system.close(fd)
    system.rename(pending, target)
    fsync_directory(os.path.dirname(path))
    return checksum(data)


def read_history(path: str, expected: int, *, recover: bool) -> bytes | None:
    """The history whose checksum the header says, or with `recover` the one that is there; None where the header says
    that there is none. Raises `StorageFormatError` and `OSError`."""
    if not expected:
        return None
    target = history_path(path)
    try:
        fd = system.open(target, os.O_RDONLY)
    except FileNotFoundError as error:
        raise StorageFormatError(
            f"{target!r} is missing, which holds the optimizer's steps for {path!r}; restore it, or open the rows with "
            "File(path, fresh=True) and load a checkpoint"
        ) from error
    try:
        data = pread_all(fd, system.fstat(fd).st_size, 0)
    finally:
        system.close(fd)
    if checksum(data) != expected and not recover:
        raise StorageFormatError(
            f"{target!r} is not the history that {path!r} was closed with; restore both, or open the rows with "
            "File(path, fresh=True) and load a checkpoint"
        )
    return data


def checksum(data: bytes) -> int:
    return zlib.crc32(data) or 1
