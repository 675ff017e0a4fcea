"""Cold rows in one sparse, memory-mapped file: larger than memory, and still there after the process.

    header (two slots, file_header.py) | weights | states and scores        each region starts at a multiple
    of 64 KiB

Opening maps the file and touches no row, so a billion rows open at once and cost only the pages of the rows
used. From its first use on the file is marked unclean, durably: rows of the hot cache are newer than the file,
and a crash leaves rows of different batches in it. Opening alone marks nothing, so that one that fails leaves
a clean file clean.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import urllib.parse
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

from tieredemb.errors import (
    ConfigError,
    StorageError,
    StorageFormatError,
    StorageLockedError,
    UncleanFileError,
)
from tieredemb.storage.base import Metadata, RowLayout, Storage
from tieredemb.storage.file.header import (
    Header,
    HeaderSlots,
    difference,
    is_own,
    is_unfinished,
    jsonable,
    layout_fields,
)
from tieredemb.storage.file.history import read_history
from tieredemb.storage.file.io import Descriptor, fsync_directory, storage_errors
from tieredemb.storage.file.lock import FileLock
from tieredemb.storage.file.rows import FileRows, map_rows, regions
from tieredemb.storage.system import system


@dataclass(frozen=True)
class File(Storage):
    """Rows live in the file `path`, which is created when it is missing.

    A file that its last owner did not close (a crash, a kill) is refused, unless `recover=True` takes its
    rows as they are (some may be older than others: their last updates were in the lost cache, and metadata
    is that of the last flush) or `fresh=True` discards its rows, for example to load a checkpoint. `fresh`
    discards any row file of tieredemb at that path, every time it is opened; it never touches a foreign file.
    In a collection of several widths each has a file of its own, `path` plus a suffix.

    A full disk is an error, not a signal, as far as the filesystem keeps what `posix_fallocate` promises;
    copy-on-write filesystems (btrfs, snapshots) do not.
    """

    path: str | os.PathLike[str]
    recover: bool = field(default=False, kw_only=True)
    fresh: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        path = os.fspath(self.path) if isinstance(self.path, (str, os.PathLike)) else None
        if not isinstance(path, str) or not path or "\0" in path:
            raise ConfigError(f"path of File must be a non-empty path, got {self.path!r}")
        for name in ("recover", "fresh"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} of File must be True or False, got {getattr(self, name)!r}")
        if self.recover and self.fresh:
            raise ConfigError("recover=True keeps the rows of File and fresh=True discards them; give one of the two")
        object.__setattr__(self, "path", path)

    def open(self, layout: RowLayout, *, name: str, identity: dict[str, Any]) -> FileRows:
        """Opens or creates the file and takes it for this process.

        Raises `StorageFormatError` (foreign, newer, truncated, damaged, another layout or identity),
        `StorageLockedError` (someone holds it), `UncleanFileError`, `StorageError` (the system refuses).
        """
        suffix = "." + urllib.parse.quote(name, safe="") if name else ""
        path = os.path.abspath(os.fspath(self.path) + suffix)
        identity = jsonable(identity, "identity")
        with contextlib.ExitStack() as stack, storage_errors(path, "opening"):
            lock, created = _lock(path)
            stack.callback(lock.release)
            if created:
                stack.push(_RemovedOnError(path))
            file = Descriptor(system.open(path, os.O_RDWR))  # a second one: the mapping must not hold the lock
            stack.callback(file.close)
            if not os.path.samestat(system.fstat(lock.fd), system.fstat(file.fd)):
                raise StorageError(f"{path!r} was replaced while it was being opened; try again")
            is_new = system.fstat(file.fd).st_size == 0 or is_unfinished(file.fd) or (self.fresh and is_own(file.fd))
            if is_new:
                slots, header = _create(path, file.fd, layout, identity)
            else:
                slots, header = _accept(path, file.fd, layout, identity, recover=self.recover)
            mapping = map_rows(file.fd, regions(layout, slots.region_bytes)[-1])
            slots.write(header)  # who has the file
            fsync_directory(os.path.dirname(path))
            rows = FileRows(path, layout, lock, file, mapping, slots, header)
            rows.is_new = is_new
            rows.saved_history = read_history(path, header.metadata.history, recover=self.recover)
            stack.pop_all()
        return rows


class _RemovedOnError:
    """Removes a file that this call created and could not finish. No generator: one that is collected
    half-way runs its error path, and `ExitStack.pop_all` leaves it so."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __call__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            with contextlib.suppress(OSError):
                system.unlink(self._path)


def _lock(path: str) -> tuple[FileLock, bool]:
    """Opens and locks the file; True when this call created it."""
    try:
        file, created = Descriptor(system.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)), True
    except FileExistsError:
        file, created = Descriptor(system.open(path, os.O_RDWR | os.O_NONBLOCK)), False
    if not stat.S_ISREG(system.fstat(file.fd).st_mode):
        file.close()
        raise StorageFormatError(f"{path!r} is no regular file; give the path of a file")
    try:
        return FileLock(file), created
    except BlockingIOError as error:
        raise StorageLockedError(
            f"{path!r} is held by {_owner(path)}; close it there first (one cache owns a file at a time)"
        ) from error


def _owner(path: str) -> str:
    """Who holds the file, as its header says: the owner writes its pid after it has the lock."""
    with contextlib.suppress(OSError):
        fd = system.open(path, os.O_RDONLY)
        try:
            pid = HeaderSlots.load(path, fd)[1].pid
        finally:
            system.close(fd)
        return f"this process (pid {pid})" if pid == os.getpid() else f"process {pid}"
    return "another process, which is creating it"


def _create(path: str, fd: int, layout: RowLayout, identity: dict[str, Any]) -> tuple[HeaderSlots, Header]:
    header = Header(layout_fields(layout), identity, Metadata(), clean=True, pid=os.getpid())
    system.ftruncate(fd, 0)
    slots = HeaderSlots.create(path, fd, header)
    end = regions(layout, slots.region_bytes)[-1]
    try:
        system.ftruncate(fd, end)
    except OSError as error:
        if error.errno not in (errno.EFBIG, errno.EINVAL):
            raise
        raise StorageError(
            f"the filesystem of {path!r} allows no file of {end / 2**40:.2f} TiB; use one that does (xfs)"
        ) from error
    return slots, header


def _accept(
    path: str, fd: int, layout: RowLayout, identity: dict[str, Any], *, recover: bool
) -> tuple[HeaderSlots, Header]:
    """Reads the header and compares everything that it says with what is there."""
    slots, header = HeaderSlots.load(path, fd)
    found = difference(header.layout, layout_fields(layout), "layout")
    found = found or difference(header.identity, identity, "identity")
    if found:
        raise StorageFormatError(
            f"{path!r} holds the rows of another model: {found}; give another path, or discard its rows with "
            "File(path, fresh=True)"
        )
    size, end = system.fstat(fd).st_size, regions(layout, slots.region_bytes)[-1]
    if size != end:
        raise StorageFormatError(
            f"{path!r} has {size} bytes and its header says {end}: it was truncated or appended to; restore "
            "it, or open it with File(path, fresh=True) and load a checkpoint"
        )
    if not header.clean and not recover:
        raise UncleanFileError(
            f"{path!r} was not closed by its last owner (pid {header.pid}), so the last updates of "
            "some rows are missing; take the rows as they are with File(path, recover=True), or discard them with "
            "File(path, fresh=True) and load a checkpoint"
        )
    return slots, replace(header, pid=os.getpid())
