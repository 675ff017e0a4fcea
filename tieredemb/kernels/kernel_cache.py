# mypy: allow-untyped-calls, allow-subclassing-any
"""Compiled CPU kernels on the disk, for other processes.

numba's own cache looks at the file of the kernel alone, so it runs device functions and constants that other files no
longer hold; it takes any directory that it can write to; and two processes that compile one kernel for different types
may take one file for both. Here the name of a file says all that its content depends on, so it is written once, and
what is read is what was wanted:

    <directory>/<module>-<digest>/<kernel>-<digest>.nbc

The first digest is of the sources that the module reaches (source_digest.py), of the versions of what compiles them,
of the settings of numba that change code, and of the CPU; the second of the kernel and the types of its arguments. A
file appears as a whole, by a rename, and begins with a digest of the rest: what a crash has cut is compiled again.
A process that begins a directory removes those that were not used for long.

This is the interface of a cache that numba's dispatchers have (`numba.core.caching._Cache`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pickle
import re
import shutil
import stat
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import llvmlite
import numba
import numpy as np
from numba.core.caching import NullCache
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

from tieredemb.kernels import cache_directory
from tieredemb.kernels.row_format import encodings
from tieredemb.kernels.source_digest import NoDigestError, source_digest

CONFIG: Any = numba.config  # has no types
LAYOUT = 1  # of the files
SETTINGS = (
    "OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "ENABLE_AVX", "USING_SVML", "BOUNDSCHECK", "DEBUGINFO_DEFAULT",
    "EXTEND_VARIABLE_LIFETIMES", "LLVM_REFPRUNE_PASS", "LLVM_REFPRUNE_FLAGS", "NRT_STATS", "DEBUG_NRT",
)  # fmt: skip
MOST_OF_A_MODULE = 8  # directories: of checkouts, environments and kinds of CPU that share the place
UNUSED_SECONDS = 90 * 86400
MARK_SECONDS = 3600  # a directory in use is marked as such after that
UNUSABLE = re.compile(r"[^\w.]")  # in the name of a file
NAME = re.compile(r"(?P<module>[\w.]+)-[0-9a-f]{32}")


@functools.cache
def place() -> cache_directory.Place:
    """Where this process caches kernels. Warns where that is not in `NUMBA_CACHE_DIR`, though there is one."""
    chosen: str = CONFIG.CACHE_DIR
    found = cache_directory.find_place(chosen)
    if chosen and (fault := found.refused.get(os.path.abspath(chosen))):
        instead = f"kernels are cached in {found.path}" if found.path else "kernels are not cached"
        _warn(
            f"NUMBA_CACHE_DIR={chosen} is not used: {fault}. Processes run the compiled kernels that lie there, so it "
            f"must be a directory that only you can write to; {instead}. Set it to one of your own "
            f"(mkdir -m 700 DIRECTORY), or unset it"
        )
    return found


@functools.cache
def _warn(message: str) -> None:
    """Once in a process."""
    warnings.warn(message, stacklevel=3)


class KernelCache(NullCache):
    """The compiled forms of one kernel, by the types of its arguments. A function with free variables is not cached:
    their values are in no source."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    @property
    def cache_path(self) -> str | None:
        """The directory of all kernels."""
        return place().path

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """What numba made of the kernel for arguments of these types, or None."""
        target_context.refresh()
        folder = self._folder(target_context)
        reduced = None if folder is None else folder.read(self._name(sig), sig)
        return None if reduced is None else CompileResult._rebuild(target_context, *reduced)

    def save_overload(self, sig: Any, cres: Any) -> None:
        """Keeps it for others."""
        folder = self._folder(cres.target_context)
        if folder is None:
            return
        if cres.lifted or cres.library.has_dynamic_globals:
            _warn(f"kernel {self._function.__qualname__} cannot be cached: it holds addresses of this process")
            return
        folder.write(self._name(sig), sig, cres._reduce())

    def lacks(self, sig: Any, target_context: Any) -> bool:
        """Whether the kernel has yet to be compiled for these types, and could be kept."""
        folder = self._folder(target_context)
        return folder is not None and not folder.holds(self._name(sig))

    def _folder(self, target_context: Any) -> Folder | None:
        if self._function.__closure__ or place().path is None:
            return None
        codecs = tuple(sorted(each.codec for each in encodings().values() if each.codec))
        return _folder_of(self._function.__module__, codecs, target_context.codegen().magic_tuple())

    def _name(self, sig: Any) -> str:
        code, name = self._function.__code__, self._function.__qualname__
        digest = hashlib.sha256(f"{name} {code.co_firstlineno} {sig}".encode()).hexdigest()
        module = os.path.basename(code.co_filename).removesuffix(".py")
        return f"{module}.{UNUSABLE.sub('', name)}-{digest[:32]}.nbc"


@functools.cache
def _folder_of(module: str, codecs: tuple[str, ...], cpu: tuple[Any, ...]) -> Folder | None:
    """Where the kernels of a module are kept, or None. `codecs`: the modules of all encodings of rows, which kernels
    compile in by the type of an array · `cpu`: what numba compiles for."""
    top = place().path
    if top is None:
        return None
    try:
        sources = source_digest(module, codecs)
    except NoDigestError as error:
        if module.partition(".")[0] == "tieredemb":
            _warn(f"CPU kernels are compiled for this process alone: {error}")
        return None
    settings = [f"{name}={getattr(CONFIG, name, None)}" for name in SETTINGS]
    ours = getattr(sys.modules["tieredemb"], "__version__", "")
    versions = (LAYOUT, ours, numba.__version__, llvmlite.__version__, np.__version__, sys.version, sys.flags.optimize)
    digest = hashlib.sha256(repr((sources, versions, settings, cpu)).encode()).hexdigest()
    path = os.path.join(top, f"{module}-{digest[:32]}")
    if os.path.lexists(path) and (fault := cache_directory.fault_of(path)):
        _warn(f"kernels of {module} are not cached: {fault}")
        return None
    return Folder(path)


class Folder:
    """Files of one directory, each with a kernel for arguments of some types."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._is_marked = False

    def holds(self, name: str) -> bool:
        return os.path.exists(os.path.join(self.path, name))

    def read(self, name: str, sig: Any) -> Any:
        """What was written under that name for these types, or None where it is not there, or not whole."""
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
        kept_sig, reduced = pickle.loads(data)
        return reduced if kept_sig == sig else None

    def write(self, name: str, sig: Any, reduced: Any) -> None:
        """Keeps it, or warns that it cannot be kept."""
        data = dumps((sig, reduced))
        try:
            if not os.path.isdir(self.path):
                if fault := cache_directory.make(self.path):
                    return _warn(f"kernels cannot be cached: {fault}")
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
            _warn(f"kernels cannot be cached in {os.path.dirname(self.path)}: {error.strerror}")

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
