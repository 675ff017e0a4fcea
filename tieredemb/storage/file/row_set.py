"""The row files of one module or conversion are a set: all are opened, or none.

A survey locks the files of this process and reads their headers; it changes nothing. Then the surveys of all processes
are compared (`check_set`): a set that lacks a file, or has one of another session, is refused as a whole. Only then is
a file created or used.

An opening gets the names of all key spaces and reads all headers under the locks of the files; if it fails, they stay
unchanged. The generation grows by one when rows are first used in a session: then all open files are marked, and their
headers list files that were closed before (`left`), to distinguish these from files of another session. A file whose
initial rows were never completely written says so (`filled`), and its whole set is made anew.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import urllib.parse
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from tieredemb.errors import (
    StorageError,
    StorageExistsError,
    StorageFormatError,
    StorageLockedError,
    UncleanFileError,
    some_of,
)
from tieredemb.storage.file.header import Header, Membership
from tieredemb.storage.file.io import Descriptor, storage_errors
from tieredemb.storage.file.lock import FileLock
from tieredemb.storage.file.slots import HeaderSlots, is_own, is_unfinished
from tieredemb.storage.system import system

# generations: of a set whose rows were never used, of one that 0.1.0 wrote, and of the first session that uses rows
CREATED, UPGRADED, FIRST = 0, 1, 2


class Marked(Protocol):
    """An open file of a set."""

    path: str

    def mark(self) -> None:
        """Marks it unclean, with the generation that the set has, durably."""

    def unmark(self) -> None:
        """It is to be marked again before its rows are used."""


@dataclass
class OpenSet:
    """The open files of a set in this process. `generation`: of the present rows · `begun`: whether they were used in
    this session."""

    identity: str
    members: tuple[str, ...]
    generation: int
    left: dict[str, int] = field(default_factory=dict)  # files that were closed before, and their generations
    begun: bool = False
    files: weakref.WeakSet[Marked] = field(default_factory=weakref.WeakSet)
    lock: threading.RLock = field(default_factory=threading.RLock)  # of the headers, as caches have their own threads

    def membership(self, member: str) -> Membership:
        """The present set in the header of a file."""
        return Membership(self.identity, self.generation, member, self.members, dict(self.left))

    def leave(self, file: Marked, member: str, generation: int) -> None:
        """`file` is closed, with such a generation in its header."""
        with self.lock:
            self.files.discard(file)
            if not self.begun and len(self.files):
                self.left[member] = generation

    def begin(self, file: Marked) -> None:
        """Marks `file` unclean, durably, as its rows are about to be used: in a session the first time all files, with
        the next generation."""
        with self.lock:
            if self.begun:
                file.mark()
                return
            before, files = self.generation, list(self.files)
            self.generation = max(before + 1, FIRST)
            try:
                for each in files:
                    each.mark()
            except BaseException:
                self.generation = before
                for each in files:
                    each.unmark()
                raise
            self.begun = True


@dataclass(frozen=True)
class Claim:
    """A file of the set that exists, and that this process holds. `header`: None where its rows count for nothing, as
    its creation did not finish, or they are to be discarded."""

    path: str
    lock: FileLock
    header: Header | None
    unfinished: str = ""  # the identity of the set, where its first rows were not all written


@dataclass(frozen=True)
class Surveyed:
    """A process's report of its files to the others. `base`: the path that their names begin with · `members`: to be
    opened · `headers`: of existing ones · `others`: members of sets at that path that are not to be opened."""

    base: str
    members: tuple[str, ...]
    headers: dict[str, Header]
    others: tuple[str, ...]
    identity: str  # for the set, if all of it is new
    unfinished: frozenset[str]  # identities of sets whose first rows were not all written


def path_of(base: str, member: str) -> str:
    """Where the file of a member is: `base`, and a suffix where the set has several."""
    return base + ("." + urllib.parse.quote(member, safe="") if member else "")


def claim(path: str, *, fresh: bool) -> Claim | None:
    """Locks the file at `path` for this process, if it exists. Raises `StorageFormatError`, `StorageLockedError` and
    `StorageError`."""
    with storage_errors(path, "opening"):
        try:
            file = Descriptor(system.open(path, os.O_RDWR | os.O_NONBLOCK))
        except FileNotFoundError:
            return None
        if not stat.S_ISREG(system.fstat(file.fd).st_mode):
            file.close()
            raise StorageFormatError(f"{path!r} is no regular file; give the path of a file")
        lock = locked(path, file)
        try:
            is_empty = system.fstat(lock.fd).st_size == 0 or is_unfinished(lock.fd)
            if is_empty or (fresh and is_own(lock.fd)):
                return Claim(path, lock, None)
            header = HeaderSlots.load(path, lock.fd)[1]
            if header.filled or header.membership is None:
                return Claim(path, lock, header)
            return Claim(path, lock, None, header.membership.identity)
        except BaseException:
            lock.release()
            raise


def locked(path: str, file: Descriptor) -> FileLock:
    """Locks the open `file`, which is the lock's from then on. Raises `StorageLockedError`."""
    try:
        return FileLock(file)
    except BlockingIOError as error:
        raise StorageLockedError(
            f"{path!r} is held by {_owner(path)}; close it there first (one cache owns a file at a time)"
        ) from error


def _owner(path: str) -> str:
    """The owner of the file by its header: the owner writes its pid once it has the lock."""
    with contextlib.suppress(OSError):
        fd = system.open(path, os.O_RDONLY)
        try:
            pid = HeaderSlots.load(path, fd)[1].pid
        finally:
            system.close(fd)
        return f"this process (pid {pid})" if pid == os.getpid() else f"process {pid}"
    return "another process, which is creating it"


def others_at(base: str, members: Sequence[str]) -> tuple[str, ...]:
    """Members of sets at the path `base` that are none of `members`: files whose names begin with it, and whose headers
    give the rest of their names. Raises `OSError`."""
    directory, name = os.path.split(base)
    found = []
    for entry in system.listdir(directory):
        if entry != name and not entry.startswith(f"{name}."):
            continue
        membership = _membership(os.path.join(directory, entry))
        if membership is None or membership.member in members:
            continue
        if path_of(base, membership.member) == os.path.join(directory, entry):
            found.append(membership.member)
    return tuple(sorted(found))


def _membership(path: str) -> Membership | None:
    """The set of a file; None if it is no row file of a set."""
    with contextlib.suppress(OSError, StorageError):
        fd = system.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        try:
            if stat.S_ISREG(system.fstat(fd).st_mode) and is_own(fd):
                header = HeaderSlots.load(path, fd)[1]
                return header.membership if header.filled else None
        finally:
            system.close(fd)
    return None


def check_set(surveys: Sequence[Surveyed], *, recover: bool, keep: bool, given: str) -> OpenSet:
    """The set that processes have surveyed, `surveys[r]` by process r, if it is complete and may be opened. `given`:
    what would overwrite its rows, "" if nothing would.

    Raises `StorageFormatError` for files of different sets, `StorageExistsError` and `UncleanFileError`.
    """
    base = surveys[0].base
    members = tuple(sorted({member for each in surveys for member in each.members}))
    surveys = [replace(each, headers=_finished(each, surveys)) for each in surveys]
    found = {path_of(each.base, m): header for each in surveys for m, header in each.headers.items()}
    extra = sorted({path_of(each.base, m) for each in surveys for m in each.others if m not in members})
    wanted = [path_of(each.base, member) for each in surveys for member in each.members]
    if extra:
        raise StorageFormatError(
            f"the row files at {base!r} include {some_of(extra)}, and this model opens {some_of(wanted)}: they were "
            f"written by another model, or by other tables of this one (a table was renamed or left out, or the number "
            f"of processes differs); open them with the model that wrote them, give another path, or discard all of "
            f"them with File(path, fresh=True)"
        )
    if not found:
        return OpenSet(surveys[0].identity, members, CREATED)
    _check_members(surveys, members)
    missing = [path for path in wanted if path not in found]
    were_used = any(each.membership is None or each.membership.generation > CREATED for each in found.values())
    if missing and were_used:
        raise StorageFormatError(
            f"the row files at {base!r} are one set, of which {some_of(missing)} is missing and "
            f"{some_of(sorted(found))} is there; restore what is missing, or discard all of them with "
            f"File(path, fresh=True) and load a checkpoint"
        )
    identity = _identity(base, found) or surveys[0].identity
    generation, was_killed = _generation(base, found)
    if given and not keep:
        raise StorageExistsError(
            f"{some_of(sorted(found))} holds rows already (generation {generation}), and {given} would be written "
            f"over them. File(path, keep=True) goes on with the rows of the file, and writes {given} only where there "
            f"is no file yet; File(path, fresh=True) discards the rows of the file"
        )
    unclean = sorted(path for path, header in found.items() if not header.clean)
    if (unclean or was_killed) and not recover:
        how = "keep=True, recover=True" if keep else "recover=True"
        raise UncleanFileError(
            f"{some_of(unclean)} was not closed by its last owner (pid {found[unclean[0]].pid}), so the last updates "
            f"of some rows are missing; take the rows as they are with File(path, {how}), or discard them with "
            f"File(path, fresh=True) and load a checkpoint"
        )
    return OpenSet(identity, members, generation)


def _finished(survey: Surveyed, surveys: Sequence[Surveyed]) -> dict[str, Header]:
    """The headers of a survey, without those of unfinished sets: if the initial rows of one file were not completely
    written, its owner was killed before any row of the set was used."""
    unfinished = frozenset[str]().union(*(each.unfinished for each in surveys))
    return {
        member: header
        for member, header in survey.headers.items()
        if header.membership is None or header.membership.identity not in unfinished
    }


def _check_members(surveys: Sequence[Surveyed], members: tuple[str, ...]) -> None:
    """Raises `StorageFormatError` for a file of a set of other members, or with the name of another member."""
    for each in surveys:
        for member, header in each.headers.items():
            path, membership = path_of(each.base, member), header.membership
            if membership is None:
                continue
            if membership.members != members:
                raise StorageFormatError(
                    f"{path!r} belongs to a set of {len(membership.members)} row files ({_named(membership.members)}), "
                    f"and this model opens {len(members)} ({_named(members)}); open them with the model that wrote "
                    f"them, give another path, or discard them with File(path, fresh=True)"
                )
            if membership.member != member:
                raise StorageFormatError(
                    f"{path!r} is the file {path_of('', membership.member)!r} of its set under another name; rename it "
                    f"back, or discard the set with File(path, fresh=True)"
                )


def _named(members: Sequence[str]) -> str:
    return some_of([member or "the path itself" for member in members])


def _identity(base: str, found: dict[str, Header]) -> str | None:
    """The identity of the set that all these files have; None where 0.1.0 wrote them. Raises `StorageFormatError`."""
    of: dict[str, list[str]] = {}
    for path, header in found.items():
        if header.membership:
            of.setdefault(header.membership.identity, []).append(path)
    if len(of) > 1:
        one, other, *_ = sorted(of.values())
        raise StorageFormatError(
            f"the row files at {base!r} are of different sets: {some_of(one)} of one, {some_of(other)} of another; "
            f"restore the files that were closed together, or discard all of them with File(path, fresh=True) and load "
            f"a checkpoint"
        )
    return next(iter(of), None)


def _generation(base: str, found: dict[str, Header]) -> tuple[int, bool]:
    """The generation of all these files, and whether their owner was killed after marking only some of them: these are
    unclean, and the others one behind. A file that was closed before may be further behind, as the headers of the
    newest ones tell. Raises `StorageFormatError`."""
    of = {path: header.membership.generation if header.membership else UPGRADED for path, header in found.items()}
    newest = max(of.values())
    new = [header for path, header in found.items() if of[path] == newest]
    left = [item for header in new if header.membership for item in header.membership.left.items()]
    behind = {
        path: header
        for path, header in found.items()
        if of[path] != newest and (header.membership is None or (header.membership.member, of[path]) not in left)
    }
    is_mixed = newest > UPGRADED and any(header.membership is None for header in found.values())
    if not behind and not is_mixed:
        return newest, False
    before = max((of[path] for path in behind), default=newest)
    one_behind = all(of[path] == before and header.clean for path, header in behind.items())
    if one_behind and not is_mixed and newest == max(before + 1, FIRST) and not any(header.clean for header in new):
        return newest, True
    raise StorageFormatError(
        f"the row files at {base!r} are of different days: {some_of([path for path in of if of[path] == newest])} of "
        f"generation {newest}, {some_of(sorted(behind))} of generation {before}; restore the files that were closed "
        f"together, or discard all of them with File(path, fresh=True) and load a checkpoint"
    )
