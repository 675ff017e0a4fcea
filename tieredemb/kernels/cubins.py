"""Machine code of CUDA files for a GPU: compiled by NVRTC through CuPy, and cached on disk.

CuPy's own modules are compiled with `-ftz=true`, which overrides the given options. Numbers below 1.2e-38 would then
become zeros, unlike on the CPU and in torch. So NVRTC is called here, through CuPy's interface. Its output is cached
beside the CPU's kernels (cache_files.py), by the text of the file including its headers, the options, the GPU's
architecture, and the versions of NVRTC and CuPy.
"""

from __future__ import annotations

import functools
import hashlib
import os
from typing import Any

from tieredemb.kernels import cache_directory, source
from tieredemb.kernels.cache_files import Folder, folder_at, warn_once

LAYOUT = 1  # of what is kept


def load(cupy: Any, file: str, flags: tuple[str, ...], architecture: str) -> Any:
    """A module of the current GPU with the kernels of `file`, compiled for its `architecture` ("90") unless that is
    kept. `cupy`: the package. Raises `cupy.cuda.compiler.CompileException`."""
    text = source.text(file)
    folder, name = _folder(file, text, _versions(cupy), architecture), f"{_digest(flags)}.cubin"
    code = None if folder is None else folder.read(name)
    if code is None:
        code, _ = cupy.cuda.compiler.compile_using_nvrtc(text, flags, architecture, os.path.basename(file))
        if folder is not None:
            folder.write(name, code)
    module = cupy.cuda.function.Module()
    module.load(code)
    return module


def _folder(file: str, text: str, versions: tuple[Any, ...], architecture: str) -> Folder | None:
    found = _place()
    if found.path is None:
        warn_once(f"CUDA kernels are compiled for this process alone: {found.reasons}")
        return None
    name = file.removesuffix(".cu").replace("/", ".")
    return folder_at(os.path.join(found.path, f"cuda.{name}-{_digest((LAYOUT, text, versions, architecture))}"))


@functools.cache
def _place() -> cache_directory.Place:
    """Where CUDA kernels are cached: in `CUPY_CACHE_DIR` where that is set and safe."""
    return cache_directory.find_place(os.environ.get("CUPY_CACHE_DIR", ""))


@functools.cache
def _versions(cupy: Any) -> tuple[Any, ...]:
    return cupy.__version__, cupy.cuda.nvrtc.getVersion()


def _digest(parts: tuple[Any, ...]) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
