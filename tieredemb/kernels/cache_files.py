"""Files of compiled kernels, in directories of the user's own (cache_directory.py).

The names of a directory and of a file determine the content, so a file is written once. It appears complete, by a
rename, and begins with a digest of the rest: a file that a crash has truncated counts as missing. A process that makes
a directory removes those that were not used for long.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import shutil
import stat
import tempfile
import time
import warnings
from collections import defaultdict

from tieredemb.kernels import cache_directory

MOST_OF_A_MODULE = 8  # directories: of checkouts, environments and kinds of CPU that share the place
UNUSED_SECONDS = 90 * 86400
MARK_SECONDS = 3600  # a directory in use is marked as such after that
NAME = re.compile(r"(?P<module>[\w.]+)-[0-9a-f]{32}")


@functools.cache
def warn_once(message: str) -> None:
    """Once in a process."""
    warnings.warn(message, stacklevel=3)


def folder_at(path: str) -> Folder | None:
    """The directory at `path`, which may not exist yet; None, with a warning, if it is not safe."""
    if os.path.lexists(path) and (fault := cache_directory.fault_of(path)):
        warn_once(f"kernels of {os.path.basename(path)} are not cached: {fault}")
        return None
    return Folder(path)


class Folder:
    """Files of one directory."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._is_marked = False

    def holds(self, name: str) -> bool:
        return os.path.exists(os.path.join(self.path, name))

    def read(self, name: str) -> bytes | None:
        """What was written under that name, or None where it is not there, or not whole."""
        try:
            with open(os.path.join(self.path, name), "rb") as file:
                info, content = os.fstat(file.fileno()), file.read()
        except OSError:
            return None
        if info.st_uid != os.geteuid() or info.st_mode & cache_directory.OTHERS or not stat.S_ISREG(info.st_mode):
            return None
        digest, data = content[:32], content[32:]
        if hashlib.sha256(data).digest() != digest:
            return None
        self._mark()
        return data

    def write(self, name: str, data: bytes) -> None:
        """Keeps it, or warns that it cannot be kept."""
        try:
            if not os.path.isdir(self.path):
                if fault := cache_directory.make(self.path):
                    return warn_once(f"kernels cannot be cached: {fault}")
                prune(os.path.dirname(self.path))
            file, unfinished = tempfile.mkstemp(prefix=f"{name}.", suffix=".tmp", dir=self.path)
            try:
                with os.fdopen(file, "wb") as out:
                    out.write(hashlib.sha256(data).digest() + data)
                os.replace(unfinished, os.path.join(self.path, name))
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(unfinished)
                raise
        except OSError as error:
            warn_once(f"kernels cannot be cached in {os.path.dirname(self.path)}: {error.strerror}")

    def _mark(self) -> None:
        """As used, for `prune`: by its time of change."""
        if not self._is_marked:
            self._is_marked = True
            with contextlib.suppress(OSError):
                if os.stat(self.path).st_mtime < time.time() - MARK_SECONDS:
                    os.utime(self.path)


def prune(top: str) -> None:
    """Removes directories of kernels that were not used for long, or that many others of the same module were used
    after, and what a process has left that was killed while it wrote. Whoever yet uses one compiles again."""
    folders: dict[str, list[tuple[float, str]]] = defaultdict(list)
    now = time.time()
    with contextlib.suppress(OSError), os.scandir(top) as entries:
        for entry in entries:
            if (found := NAME.fullmatch(entry.name)) and entry.is_dir(follow_symlinks=False):
                folders[found["module"]].append((entry.stat(follow_symlinks=False).st_mtime, entry.path))
    for of_module in folders.values():
        for number, (used, path) in enumerate(sorted(of_module, reverse=True)):
            if number >= MOST_OF_A_MODULE or used < now - UNUSED_SECONDS:
                shutil.rmtree(path, ignore_errors=True)
            else:
                _remove_unfinished(path, now - MARK_SECONDS)


def _remove_unfinished(path: str, before: float) -> None:
    with contextlib.suppress(OSError), os.scandir(path) as entries:
        for entry in entries:
            if entry.name.endswith(".tmp") and entry.stat(follow_symlinks=False).st_mtime < before:
                os.unlink(entry.path)
