"""The directory of compiled CPU kernels: one that no other user can write to.

Its files are unpickled and run, so a user who can write there can run code in this process. numba accepts any directory
that it can write to. Here a directory is accepted if it belongs to this user, neither its group nor others may write to
it, and only this user and root can replace it: every directory and link of its path belongs to one of the two, and no
other user may write to those directories, unless the sticky bit (as of /tmp) protects their entries. OpenSSH applies
the same rules to the files that it trusts (`safe_path`). The owner of `/` counts as root: in a container where root is
nobody (`user_namespaces(7)`) its directories belong to another number.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

OTHERS = stat.S_IWGRP | stat.S_IWOTH
MOST_LINKS = 40  # of one path, as Linux


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where kernels are cached. `path`: the directory, which may not exist yet; None if there is none · `refused`:
    directories with precedence that are not used, with reasons."""

    path: str | None
    refused: dict[str, str]

    @property
    def reasons(self) -> str:
        return "; ".join(self.refused.values())


def find_place(chosen: str) -> Place:
    """The first safe directory inside `chosen` (`NUMBA_CACHE_DIR`), if that is not empty, the user's cache directory,
    or that of temporary files. Makes none."""
    refused: dict[str, str] = {}
    for root, path in _candidates(chosen):
        fault = fault_of(root) or fault_of(path)
        if fault is None:
            return Place(path=path, refused=refused)
        refused[root] = fault
    return Place(path=None, refused=refused)


def _candidates(chosen: str) -> Iterator[tuple[str, str]]:
    """Directories of the user, and the names of kernels' directories in them."""
    if chosen:
        root = os.path.abspath(chosen)
        yield root, os.path.join(root, "tieredemb", "kernels")
    caches = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(caches):  # the specification of XDG: a relative path is to be ignored
        caches = os.path.expanduser("~/.cache")
    if os.path.isabs(caches):  # if the home of this user is unknown
        root = os.path.join(caches, "tieredemb")
        yield root, os.path.join(root, "kernels")
    try:
        temporary = tempfile.gettempdir()
    except OSError:
        return
    root = os.path.join(os.path.abspath(temporary), f"tieredemb-{os.geteuid()}")
    yield root, os.path.join(root, "kernels")


def make(path: str) -> str | None:
    """Makes a directory and those above it that are missing, for this user alone. Returns what keeps it from being
    used, or None."""
    missing, above = [], path
    while not os.path.lexists(above):
        missing.append(above)
        above = os.path.dirname(above)
    for each in reversed(missing):
        try:
            os.mkdir(each, 0o700)
        except FileExistsError:
            pass  # another process was faster; the fault below is found where it was another user
        except OSError as error:
            return f"{each} cannot be made ({error.strerror})"
    return fault_of(path)


def fault_of(path: str) -> str | None:
    """Why a directory is not used, or None. What does not exist yet has no fault if it can be made."""
    at, todo, links = "/", path.split("/"), 0
    while todo:
        name = todo.pop(0)
        if name in ("", "."):
            continue
        if name == "..":
            at = os.path.dirname(at)
            continue
        here = os.path.join(at, name)
        try:
            info = os.lstat(here)
            target = os.readlink(here) if stat.S_ISLNK(info.st_mode) else None
        except FileNotFoundError:
            return _fault_of_access(at)
        except OSError as error:
            return f"{here} cannot be looked at ({error.strerror})"
        if fault := _fault_of_owner(here, info):
            return fault
        if target is not None:
            links += 1
            if links > MOST_LINKS:
                return f"{path} leads through more than {MOST_LINKS} links"
            at = "/" if os.path.isabs(target) else at
            todo = target.split("/") + todo
        elif not stat.S_ISDIR(info.st_mode):
            return f"{here} is no directory"
        elif any(todo) and (fault := _fault_of_parent(here, info)):
            return fault
        else:
            at = here
    return _fault_of_end(at)


def _fault_of_owner(path: str, info: os.stat_result) -> str | None:
    if info.st_uid in (0, os.stat("/").st_uid, os.geteuid()):
        return None
    return f"{path} belongs to another user ({_name(info.st_uid)})"


def _fault_of_parent(path: str, info: os.stat_result) -> str | None:
    """Checks a parent directory: whether other users can replace its entries."""
    open_to = info.st_mode & OTHERS
    if not open_to or info.st_mode & stat.S_ISVTX:
        return None
    if open_to == stat.S_IWGRP and _is_private(info.st_gid):
        return None
    return f"other users can write to {path} (mode {stat.S_IMODE(info.st_mode):04o})"


def _fault_of_end(path: str) -> str | None:
    """Of the directory itself, where no link is left in its path."""
    info = os.stat(path)
    if info.st_uid != os.geteuid():
        return f"{path} belongs to another user ({_name(info.st_uid)})"
    if info.st_mode & OTHERS:
        return f"other users can write to {path} (mode {stat.S_IMODE(info.st_mode):04o})"
    return _fault_of_access(path)


def _fault_of_access(path: str) -> str | None:
    return None if os.access(path, os.W_OK | os.X_OK) else f"{path} cannot be written to"


def _is_private(group: int) -> bool:
    """Whether a group is this user's private one: it has the user's name and no other members, as distributions make
    it, whose umask then lets it write. Group 0 never is: in containers it is the group of every user."""
    try:
        user, found = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(group)
    except KeyError:
        return False
    return group != 0 and found.gr_name == user and set(found.gr_mem) <= {user}


def _name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"user {user}"
