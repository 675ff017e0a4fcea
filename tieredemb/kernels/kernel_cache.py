# mypy: allow-untyped-calls, allow-subclassing-any
"""Compiled CPU kernels on the disk, for other processes.

numba's own cache checks only the file of the kernel, so it runs device functions and constants that have changed in
other files; it accepts any directory that it can write to; and two processes that compile one kernel for different
types may use one file for both. Here the name of a file determines its content, so it is written once, and a read is
always right:

    <directory>/<module>-<digest>/<kernel>-<digest>.nbc

The first digest is of the sources that the module reaches (source_digest.py), of the versions of the compilers,
of the settings of numba that change code, and of the CPU; the second of the kernel and the types of its arguments.

This is the interface of a cache that numba's dispatchers have (`numba.core.caching._Cache`).
"""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
import re
import sys
from collections.abc import Callable
from typing import Any

import llvmlite
import numba
import numpy as np
from numba.core.caching import NullCache
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

from tieredemb.kernels import cache_directory
from tieredemb.kernels.cache_files import Folder, folder_at, warn_once
from tieredemb.kernels.row_format import encodings
from tieredemb.kernels.source_digest import NoDigestError, source_digest

CONFIG: Any = numba.config  # has no types
LAYOUT = 1  # of the files
SETTINGS = (
    "OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "ENABLE_AVX", "USING_SVML", "BOUNDSCHECK", "DEBUGINFO_DEFAULT",
    "EXTEND_VARIABLE_LIFETIMES", "LLVM_REFPRUNE_PASS", "LLVM_REFPRUNE_FLAGS", "NRT_STATS", "DEBUG_NRT",
)  # fmt: skip
UNUSABLE = re.compile(r"[^\w.]")  # in the name of a file


@functools.cache
def place() -> cache_directory.Place:
    """Where this process caches kernels. Warns where that is not in `NUMBA_CACHE_DIR`, though there is one."""
    chosen: str = CONFIG.CACHE_DIR
    found = cache_directory.find_place(chosen)
    if chosen and (fault := found.refused.get(os.path.abspath(chosen))):
        instead = f"kernels are cached in {found.path}" if found.path else "kernels are not cached"
        warn_once(
            f"NUMBA_CACHE_DIR={chosen} is not used: {fault}. Processes run the compiled kernels that lie there, so it "
            f"must be a directory that only you can write to; {instead}. Set it to one of your own "
            f"(mkdir -m 700 DIRECTORY), or unset it"
        )
    return found


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
        data = None if folder is None else folder.read(self._name(sig))
        if data is None:
            return None
        kept_sig, reduced = pickle.loads(data)
        return CompileResult._rebuild(target_context, *reduced) if kept_sig == sig else None

    def save_overload(self, sig: Any, cres: Any) -> None:
        """Keeps it for others."""
        folder = self._folder(cres.target_context)
        if folder is None:
            return
        if cres.lifted or cres.library.has_dynamic_globals:
            warn_once(f"kernel {self._function.__qualname__} cannot be cached: it holds addresses of this process")
            return
        folder.write(self._name(sig), dumps((sig, cres._reduce())))

    def lacks(self, sig: Any, target_context: Any) -> bool:
        """Whether the kernel is not compiled for these types yet, and could be kept."""
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
            warn_once(f"CPU kernels are compiled for this process alone: {error}")
        return None
    settings = [f"{name}={getattr(CONFIG, name, None)}" for name in SETTINGS]
    ours = getattr(sys.modules["tieredemb"], "__version__", "")
    versions = (LAYOUT, ours, numba.__version__, llvmlite.__version__, np.__version__, sys.version, sys.flags.optimize)
    digest = hashlib.sha256(repr((sources, versions, settings, cpu)).encode()).hexdigest()
    return folder_at(os.path.join(top, f"{module}-{digest[:32]}"))
