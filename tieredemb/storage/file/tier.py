"""Cold rows in sparse, memory-mapped files: larger than memory, and still there after the process.

    header (two slots, slots.py) | weights | states and scores | history of steps (extents.py)

Each region starts at a multiple of 64 KiB. Opening maps the file and touches no row, so a billion rows open at once and
cost only the pages of the rows used. From its first use on the file is marked unclean, durably: rows of the hot cache
are newer than the file, and a crash leaves rows of different batches in it. Opening alone marks nothing, so that one
that fails leaves a clean file clean. The files of one module or conversion are one set (row_set.py).
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic, sleep
from types import TracebackType
from typing import Any

from tieredemb.errors import ConfigError, PeerError, StorageError, StorageFormatError, StorageLockedError
from tieredemb.storage.base import Gather, Metadata, RowLayout, Storage, alone
from tieredemb.storage.file.beside import read_beside, remove_beside
from tieredemb.storage.file.extents import StoredExtent, extent_for, write_extent
from tieredemb.storage.file.header import Header, Membership, difference, jsonable, layout_fields
from tieredemb.storage.file.io import Descriptor, fsync_directory, storage_errors
from tieredemb.storage.file.lock import FileLock
from tieredemb.storage.file.row_set import (
    Claim,
    OpenSet,
    Surveyed,
    check_set,
    claim,
    locked,
    others_at,
    path_of,
)
from tieredemb.storage.file.rows import FileRows, map_rows, regions
from tieredemb.storage.file.slots import HeaderSlots
from tieredemb.storage.system import system

_PATIENCE = 1.0  # seconds, which is long for an unlink


@dataclass(frozen=True)
class File(Storage):
    """Rows live in the file `path`, which is created when it is missing.

    A module or conversion whose tables need several files (a collection of several widths, a model of several caches,
    ranks) has one for each, `path` plus a suffix. They are one set: all are opened, or the set is refused if a file
    is missing, left over, renamed or of another session.

    If a file has rows, and rows are given as well (a converted model's weights, `from_pretrained`, `_weight`),
    `keep=True` keeps the rows, optimizer state, steps and scores of the file and does not write the given rows; without
    a file it writes them. `fresh=True` discards the rows of the file, every time it is opened, for example to load a
    checkpoint; it never touches a foreign file. With neither, an existing file is then refused.

    A file that its last owner did not close (a crash, a kill) is refused, unless `recover=True` accepts its rows (some
    may be older than others, as their last updates were in the lost cache; metadata is of the last flush) or
    `fresh=True` discards them.

    A full disk is an error, not a signal, if the filesystem implements `posix_fallocate`; copy-on-write filesystems
    (btrfs, snapshots) do not.

    >>> bag = tieredemb.TieredEmbeddingBag(1_000_000, 4, capacity=100, storage=tieredemb.File("user.rows"))
    >>> rows = bag(torch.tensor([[7, 999_999]]))
    >>> bag.close()    # marks the file clean; done automatically when the process ends
    """

    path: str | os.PathLike[str]
    recover: bool = field(default=False, kw_only=True)
    fresh: bool = field(default=False, kw_only=True)
    keep: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        path = os.fspath(self.path) if isinstance(self.path, (str, os.PathLike)) else None
        if not isinstance(path, str) or not path or "\0" in path:
            raise ConfigError(f"path of File must be a non-empty path, got {self.path!r}")
        for name in ("recover", "fresh", "keep"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} of File must be True or False, got {getattr(self, name)!r}")
        for name in ("recover", "keep"):
            if self.fresh and getattr(self, name):
                raise ConfigError(
                    f"{name}=True keeps the rows of File and fresh=True discards them; give one of the two"
                )
        object.__setattr__(self, "path", path)

    def open(self, layout: RowLayout, *, name: str, identity: dict[str, Any]) -> FileRows:
        """Opens or creates the one file of a set and takes it for this process; see `opening`."""
        with self.opening([name]) as opener:
            return opener.open(layout, name=name, identity=identity)

    @contextlib.contextmanager
    def opening(
        self, names: Sequence[str], *, given: str = "", fills: bool = False, gather: Gather = alone
    ) -> Iterator[FileOpener]:
        """See `Storage.opening`.

        Raises `StorageFormatError` (foreign, newer, truncated, damaged, another layout or identity, files of different
        sets), `StorageExistsError`, `StorageLockedError` (another process has a file), `UncleanFileError`,
        `StorageError` (the system refuses).
        """
        base, claims = os.path.realpath(os.fspath(self.path)), dict[str, Claim]()
        try:
            with storage_errors(base, "opening"):
                row_set = self._checked_set(base, claims, names, given, gather)
            yield FileOpener(base, claims, row_set, fills)
        finally:
            for each in claims.values():  # the claims that were not opened
                each.lock.release()

    def _checked_set(
        self, base: str, claims: dict[str, Claim], names: Sequence[str], given: str, gather: Gather
    ) -> OpenSet:
        """Locks the existing files, in `claims`, and compares them with each other and with those of all processes."""
        try:
            for name in names:
                found = claim(os.path.realpath(path_of(base, name)), fresh=self.fresh)
                if found is not None:
                    claims[name] = found
            others = others_at(base, names)
        except OSError as error:  # among them our own
            gather(f"{error}")
            raise
        headers = {name: each.header for name, each in claims.items() if each.header is not None}
        surveys = []
        unfinished = frozenset(each.unfinished for each in claims.values() if each.unfinished)
        kept = () if self.fresh else others
        for each in gather(Surveyed(base, tuple(names), headers, kept, secrets.token_hex(16), unfinished)):
            if isinstance(each, str):
                raise PeerError(f"another rank could not open its row files: {each}")
            surveys += [each] if isinstance(each, Surveyed) else []
        row_set = check_set(surveys, recover=self.recover, keep=self.keep, given=given)
        for name, each in claims.items():  # of a set that was not finished
            membership = None if each.header is None else each.header.membership
            if membership is not None and membership.identity != row_set.identity:
                claims[name] = replace(each, header=None)
        if self.fresh:
            for member in others:
                if member not in row_set.members:
                    _discard(path_of(base, member), patience=_PATIENCE if len(surveys) > 1 else 0.0)
        return row_set


def _discard(path: str, *, patience: float) -> None:
    """Removes a file of an earlier set, which other processes of this set may be about to remove, too: for as long as
    `patience`, in seconds. Raises `StorageLockedError`."""
    deadline = monotonic() + patience
    while True:
        try:
            found = claim(path, fresh=True)
        except StorageLockedError:
            if monotonic() > deadline:
                raise
            sleep(0.001)
            continue
        if found is not None:
            try:
                with contextlib.suppress(FileNotFoundError):  # another process was faster
                    system.unlink(path)
            finally:
                found.lock.release()
        return


@dataclass(frozen=True)
class FileOpener:
    """Opens the files of a checked set. `claims`: existing files, until they are opened · `fills`: whether the rows of
    new files are written before they are used."""

    base: str
    claims: dict[str, Claim]
    row_set: OpenSet
    fills: bool

    def open(self, layout: RowLayout, *, name: str, identity: dict[str, Any]) -> FileRows:
        """See `RowOpener`."""
        path, identity = os.path.realpath(path_of(self.base, name)), jsonable(identity, "identity")
        with contextlib.ExitStack() as stack, storage_errors(path, "opening"):
            if name not in self.claims:
                lock = _created(path)
                stack.push(_RemovedOnError(path))
                found = Claim(path, lock, None)
            else:
                found = self.claims.pop(name)
            stack.callback(found.lock.release)
            file = Descriptor(system.open(path, os.O_RDWR))  # a second one: the mapping must not hold the lock
            stack.callback(file.close)
            if not os.path.samestat(system.fstat(found.lock.fd), system.fstat(file.fd)):
                raise StorageError(f"{path!r} was replaced while it was being opened; try again")
            if found.header is None:
                membership = self.row_set.membership(name)
                slots, header = _create(path, file.fd, layout, identity, membership, filled=not self.fills)
            else:
                slots, header = _accept(path, file.fd, layout, identity)
                # its own generation, until rows of the set are used: else one that fails now could not be told from
                # one whose rows were
                membership = header.membership or self.row_set.membership(name)
                header = replace(header, membership=membership, pid=os.getpid())
            mapping = map_rows(file.fd, regions(layout, slots.region_bytes)[-1])
            slots.write(header)  # names the owner of the file
            fsync_directory(os.path.dirname(path))
            rows = FileRows(path, layout, found.lock, file, mapping, slots, header, self.row_set)
            rows.is_new, rows.was_recovered = found.header is None, not header.clean
            if header.history is not None:
                rows.saved_history = StoredExtent(file.fd, header.history)
                if header.beside:
                    remove_beside(path, header.history.crc32)
            stack.pop_all()
        return rows


def _create(
    path: str, fd: int, layout: RowLayout, identity: dict[str, Any], membership: Membership, *, filled: bool
) -> tuple[HeaderSlots, Header]:
    header = Header(
        layout_fields(layout), identity, Metadata(), clean=True, pid=os.getpid(), membership=membership, filled=filled
    )
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
    return slots, replace(header, size_bytes=end)


def _accept(path: str, fd: int, layout: RowLayout, identity: dict[str, Any]) -> tuple[HeaderSlots, Header]:
    """Reads the header and compares all of it with the file."""
    slots, header = HeaderSlots.load(path, fd)
    found = difference(header.layout, layout_fields(layout), "layout")
    found = found or difference(header.identity, identity, "identity")
    if found:
        raise StorageFormatError(
            f"{path!r} holds the rows of another model: {found}; give another path, or discard its rows with "
            "File(path, fresh=True)"
        )
    end = regions(layout, slots.region_bytes)[-1]
    _check_size(path, fd, header, end)
    if header.membership is None:  # of 0.1.0
        header = replace(header, size_bytes=end)
        if header.beside:
            data = read_beside(path, header.beside, recover=not header.clean)
            extent = extent_for(data, end, None)
            write_extent(fd, data, extent, extent.stop)
            header = replace(header, history=extent, size_bytes=extent.stop)
    return slots, header


def _check_size(path: str, fd: int, header: Header, end: int) -> None:
    """Raises `StorageFormatError` if the file does not have the size in its header, or an extent overlaps its rows.
    After an interrupted flush an unclean file may be larger or smaller beyond the part that it needs, and after an
    interrupted move of a history larger."""
    size, expected = system.fstat(fd).st_size, header.size_bytes or end
    extent = header.history
    needed = end if extent is None else extent.stop
    is_separate = extent is None or end <= extent.start
    is_exact = header.clean and not header.beside
    if not is_separate or not needed <= expected or size < needed or (is_exact and size != expected):
        raise StorageFormatError(
            f"{path!r} has {size} bytes and its header says {expected}: it was truncated or appended to; restore "
            "it, or open it with File(path, fresh=True) and load a checkpoint"
        )


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


def _created(path: str) -> FileLock:
    """Creates and locks a file that was not there."""
    try:
        file = Descriptor(system.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL))
    except FileExistsError as error:
        raise StorageLockedError(
            f"{path!r} was created by another process while it was being opened; try again"
        ) from error
    try:
        return locked(path, file)
    except StorageLockedError:  # whose file it is now
        raise
    except BaseException:
        with contextlib.suppress(OSError):
            system.unlink(path)
        raise
