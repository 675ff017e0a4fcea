"""The history of an optimizer's steps in the form of tieredemb 0.1.0: in `<path>.history`, beside its row file. It is
read once, when the row file is opened, and moved into that."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import zlib

from tieredemb.errors import StorageFormatError
from tieredemb.storage.file.io import pread_all
from tieredemb.storage.system import system

_MOST_BYTES = 1 << 36  # of a history of 600 million steps: a larger file is no history


def _path(path: str) -> str:
    return f"{path}.history"


def read_beside(path: str, expected: int, *, recover: bool) -> bytes:
    """The history beside the row file `path`, with the checksum `expected` from the header; with `recover` any history,
    as it is replaced before the header. Raises `StorageFormatError` and `OSError`."""
    target = _path(path)
    try:  # a pipe would keep the caller waiting, and a link may lead to anything
        fd = system.open(target, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except FileNotFoundError as error:
        raise StorageFormatError(
            f"{target!r} is missing, which holds the optimizer's steps for {path!r}; restore it, or open the rows with "
            "File(path, fresh=True) and load a checkpoint"
        ) from error
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise _foreign(path) from error
    try:
        found = system.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size > _MOST_BYTES:
            raise _foreign(path)
        data = pread_all(fd, found.st_size, 0)
    finally:
        system.close(fd)
    if (zlib.crc32(data) or 1) != expected and not recover:
        raise _foreign(path)
    return data


def _foreign(path: str) -> StorageFormatError:
    return StorageFormatError(
        f"{_path(path)!r} is not the history that {path!r} was closed with; restore both, or open the rows with "
        "File(path, fresh=True) and load a checkpoint"
    )


def remove_beside(path: str, crc32: int) -> None:
    """Removes the history beside the row file `path`, if it has this checksum."""
    with contextlib.suppress(OSError, StorageFormatError):
        read_beside(path, crc32 or 1, recover=False)
        system.unlink(_path(path))
