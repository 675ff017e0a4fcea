"""The only place that compiles and launches CUDA: `.cu` files by NVRTC at run time, through CuPy, cached on disk.

A file is compiled for one row format and width (`common.cuh`), so that kernels know their sizes. Kernels take torch
tensors, whose dtype, device and contiguity are checked against the kernel's signature here, and numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from tieredemb.errors import InvalidInputError, MissingDependencyError

PACKAGE = Path(__file__).resolve().parents[1]
OPTIONS = ("--std=c++17", "--fmad=false")  # no contraction but where the source says so
NUMBERS = {"n": np.int64, "p": np.int64, "i": np.int32, "x": np.float32, "d": np.float64}
ROW_FLAGS = {torch.float32: "-DROW_FLOAT", torch.float16: "-DROW_HALF", torch.bfloat16: "-DROW_BFLOAT16"}


HEADERS = {"common.cuh": "kernels/common.cuh", "plan.cuh": "cache/plan.cuh"}


def source(file: str) -> str:
    """Text of a `.cu` file, given its path inside the package, with its headers put in: CuPy's cache of compiled code
    looks at the text alone, and would not notice a changed include."""
    text = (PACKAGE / file).read_text()
    for name, header in HEADERS.items():
        text = text.replace(f'#include "{name}"', (PACKAGE / header).read_text().replace("#pragma once", ""))
    return text


def options(dtype: torch.dtype | None = None, width: int | None = None) -> tuple[str, ...]:
    """Compiler options for rows of `width` elements of `dtype`."""
    flags = () if dtype is None else (ROW_FLAGS[dtype],)
    return (*OPTIONS, *flags, *(() if width is None else (f"-DWIDTH={width}",)))


@functools.cache
def cupy() -> Any:
    """CuPy, or `MissingDependencyError` with the command that installs it."""
    try:
        import cupy as module
    except ImportError as error:
        cuda = (torch.version.cuda or "13").split(".")[0]
        raise MissingDependencyError(
            f"the GPU path needs CuPy, which is not installed; pip install tieredemb[cuda{cuda}]"
        ) from error
    return module


@functools.cache
def _module(file: str, flags: tuple[str, ...], device: int) -> Any:
    with cupy().cuda.Device(device):
        return cupy().RawModule(code=source(file), options=flags, backend="nvrtc")


@functools.cache
def _stream(handle: int) -> Any:
    """CuPy's view of a stream, by its address: handing it over costs half of what entering it for each launch does."""
    return cupy().cuda.ExternalStream(handle)


class Kernel:
    """One kernel of a `.cu` file.

    `signature`: a word for each argument: a dtype for a tensor (`i64`, `i32`, `f32`, `u8`; `any` for rows), `n` for an
    int64, `i` for an int32, `x` for a float32, `d` for a float64, `p` for an address (an int, 0 for none, or a tensor
    of any dtype).
    """

    DTYPES: ClassVar = {
        "i64": torch.int64,
        "i32": torch.int32,
        "f32": torch.float32,
        "u8": torch.uint8,
        "any": None,
    }

    def __init__(self, file: str, name: str, signature: str, flags: Sequence[str] = OPTIONS) -> None:
        self.file = file
        self.name = name
        self.flags = tuple(flags)
        words = signature.split()
        self._words = [(word, NUMBERS.get(word), self.DTYPES.get(word)) for word in words]
        self._functions: dict[int, Any] = {}

    def __call__(self, blocks: int, threads: int, *args: Any, shared_bytes: int = 0) -> None:
        """Launches on torch's current stream. Does not synchronise. No blocks, no launch."""
        if blocks == 0:
            return
        if len(args) != len(self._words):
            raise InvalidInputError(f"{self.name} takes {len(self._words)} arguments, got {len(args)}")
        device = torch.cuda.current_device()
        values: list[Any] = []
        for (word, number, dtype), arg in zip(self._words, args, strict=True):
            if isinstance(arg, torch.Tensor):
                fits = arg.dtype == dtype or (dtype is None and word in ("any", "p"))
                if not fits or arg.get_device() != device or not arg.is_contiguous():
                    self._refuse(len(values), word, arg, device)
                values.append(np.int64(arg.data_ptr()))
            elif number is not None:
                values.append(number(arg))
            else:
                self._refuse(len(values), word, arg, device)
        stream = _stream(torch._C._cuda_getCurrentRawStream(device))
        self._function(device)((blocks,), (threads,), values, shared_bytes, stream)

    def _function(self, device: int) -> Any:
        function = self._functions.get(device)
        if function is None:
            function = self._functions[device] = _module(self.file, self.flags, device).get_function(self.name).kernel
        return function

    def _refuse(self, position: int, word: str, arg: Any, device: int) -> None:
        raise InvalidInputError(
            f"argument {position} of {self.name} must be a contiguous {word} tensor on cuda:{device}, got "
            f"{arg.dtype if isinstance(arg, torch.Tensor) else type(arg).__name__}"
        )


@functools.cache
def kernel(file: str, name: str, signature: str, *flags: str) -> Kernel:
    """The kernel of that name, made once: its compiled code is shared by all that use it."""
    return Kernel(file, name, signature, flags or OPTIONS)


def blocks_for(n: int, threads: int, most: int = 1 << 20) -> int:
    """Blocks of `threads` threads that cover `n` elements, one each."""
    return min(most, (n + threads - 1) // threads)
