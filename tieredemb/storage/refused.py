"""What to do about a file or directory that the system refuses, for what users meet: rights, read-only filesystems,
paths that lead nowhere, limits of a process."""

from __future__ import annotations

import errno
import os

_RIGHTS = (errno.EACCES, errno.EPERM)


def refused(error: OSError, path: str, *, writes: bool = True) -> str:
    """The system's error for `path` or a file in it, and what to do about it, if known. `writes`: whether it was to be
    written, or only read."""
    place = error.filename if isinstance(error.filename, str) else path
    known = _known(error.errno, place, writes)
    return f"{error}; {known}" if known else str(error)


def _known(number: int | None, place: str, writes: bool) -> str:
    directory, is_there = os.path.dirname(place) or ".", os.path.exists(place)
    if number in _RIGHTS and not is_there and writes:
        return f"this user needs the right to create files in {directory!r}: change its mode, or give another path"
    if number in _RIGHTS:
        need = "read and write" if writes else "read"
        return f"this user needs the right to {need} {place!r}: change its mode or owner, or give another path"
    if number == errno.EROFS:
        return (
            f"the filesystem of {place!r} is read-only: mount it writable, or give a path on another one. A row file "
            f"is written to whatever it is used for; a checkpoint is loaded from where nothing can be written"
        )
    if number == errno.ENOENT and writes:
        missing = place if os.path.isdir(directory) else directory
        return f"there is no {missing!r}: create that directory, or give another path"
    if number in (errno.ENOTDIR, errno.EEXIST):
        return f"a file stands where {place!r} needs a directory: give another path"
    if number == errno.EISDIR:
        return f"{place!r} is a directory: give the path of a file"
    if number == errno.EMFILE:
        return "this process has as many files open as it may: raise the limit (ulimit -n), or close some"
    if number == errno.ENOLCK:
        return (
            f"the filesystem of {place!r} gives no locks (flock), as that of some networks: give a path on another one"
        )
    return ""
