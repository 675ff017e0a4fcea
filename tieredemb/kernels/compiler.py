"""The only place that compiles and launches CUDA: `.cu` files by NVRTC at run time, cached on disk (cubins.py).

A file is compiled for one row format and width (`common.cuh`), so that kernels know their sizes. Kernels take numbers,
torch tensors and structs (`arguments.py`). dtype, device and contiguity are checked against the kernel's parameters
if TIEREDEMB_CHECK_LAUNCHES=1, as in all tests: users' arguments were checked before.

From compute capability 9.0 on a launch may begin as the kernel before it on its stream ends, and each kernel waits for
that first of all (`wait_for_prior_kernel`): 0.5 to 0.7 µs less a kernel on an H200. See "programmatic dependent launch"
in CUDA's programming guide.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from tieredemb.errors import InvalidInputError, MissingDependencyError
from tieredemb.kernels.arguments import Signature, signature
from tieredemb.kernels.cubins import load
from tieredemb.kernels.modules import Modules
from tieredemb.kernels.row_format import RowFormat

OPTIONS = ("--std=c++17", "--fmad=false", "--ftz=false")  # no contraction except where the source requests it
CHECKED = os.environ.get("TIEREDEMB_CHECK_LAUNCHES", "0") not in ("", "0")  # some microseconds a launch

NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
CONFIG = struct.Struct("@7I2PI4x")  # CUlaunchConfig: blocks, threads, shared bytes; stream; attributes, how many
ATTRIBUTE = struct.Struct("@i4xi60x")  # CUlaunchAttribute: which, and its value


def options(dtype: torch.dtype | None = None, width: int | None = None) -> tuple[str, ...]:
    """Compiler options for rows of `width` elements of `dtype`, whatever their state."""
    if dtype is None:
        return OPTIONS
    flag, width_flag, _ = RowFormat(width=width or 0, dtype=dtype).flags
    return (*OPTIONS, flag) if width is None else (*OPTIONS, flag, width_flag)


@functools.cache
def cupy() -> Any:
    """CuPy, or `MissingDependencyError` with the command that installs it."""
    try:
        import cupy as module
    except ImportError as error:
        cuda = (torch.version.cuda or "13").split(".")[0]
        raise MissingDependencyError(
            f"the GPU path needs CuPy, which is not installed; run: pip install 'tieredemb[cuda{cuda}]'"
        ) from error
    return module


def _compiled(file: str, flags: tuple[str, ...], device: int, name: str) -> Any:
    with cupy().cuda.Device(device) as there:
        module = load(cupy(), file, flags, there.compute_capability)
        module.get_function(name)  # which it is loaded for first
        return module


MODULES = Modules(_compiled)


@functools.cache
def driver() -> Any:
    """The driver's library. With packed arguments its launch costs half of one through CuPy. For a launch the
    interpreter is not given away: another thread that wants it would be woken up at every one. Where a stream is full a
    launch waits for the GPU, and other threads of Python with it."""
    library = ctypes.PyDLL("libcuda.so.1")
    pointer = ctypes.c_void_p
    library.cuDriverGetVersion.argtypes = [pointer]
    library.cuLaunchKernelEx.argtypes = [pointer] * 4
    return library


def _code(call: Callable[..., int], device: int, *arguments: Any) -> int:
    """Error code of a call of the driver. A thread's first call of CUDA, which unlike the runtime's makes no context
    current, is made once more in the device's."""
    code = call(*arguments)
    if code == NO_CONTEXT:
        cupy().cuda.Device(device).use()
        code = call(*arguments)
    return code


def _attribute(number: int) -> Any:
    """A launch's attribute, set, as the driver reads it."""
    return ctypes.create_string_buffer(ATTRIBUTE.pack(number, 1), ATTRIBUTE.size)


COOPERATIVE = _attribute(2)  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE
EARLY = _attribute(6)  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


def begins_early(device: int) -> bool:
    """Whether kernels on a device may begin as those before them end. Graphs know of it from CUDA 12.3 on."""
    version = ctypes.c_int()
    driver().cuDriverGetVersion(ctypes.byref(version))
    return torch.cuda.get_device_capability(device) >= (9, 0) and version.value >= 12030


class _Loaded(NamedTuple):
    """A kernel on a device, and the attributes of its launches there."""

    function: Any  # CuPy's, and not its address alone: CuPy forgets its modules at exit, before a flush of ours
    address: int
    attributes: int  # where they are
    n_attributes: int


class _Arguments:
    """A launch's size and packed arguments, which the driver takes in place of pointers to each; it copies them before
    it returns."""

    def __init__(self) -> None:
        self.config = ctypes.create_string_buffer(CONFIG.size)
        self.buffer = ctypes.create_string_buffer(4096)
        self.size = ctypes.c_size_t()
        # 1: here is the buffer, 2: and here its size, 0: the end
        self.extra = (ctypes.c_void_p * 5)(1, ctypes.addressof(self.buffer), 2, ctypes.addressof(self.size), 0)
        self._pointers: dict[Signature, Any] = {}

    def pointers(self, signature: Signature) -> Any:
        """Addresses of the arguments, packed as `signature` says, one by one."""
        found = self._pointers.get(signature)
        if found is None:
            base = ctypes.addressof(self.buffer)
            starts = [base + start for start in signature.starts]
            found = self._pointers[signature] = (ctypes.c_void_p * len(starts))(*starts)
        return found


# Buffers that no launch uses now. A launch takes one out, as other threads launch at the same time, and so may a
# finaliser that the garbage collector runs in the middle of it.
_SPARE: deque[_Arguments] = deque()


# Called for each launch of a thread, by its number, with the signature, the packed arguments and the stream.
LISTENERS: dict[int, Callable[[Signature, bytes, int], None]] = {}


class Kernel:
    """One kernel of a `.cu` file, which declares its arguments. A `cooperative` kernel's blocks are all resident at
    once, and may wait for each other.

    Any other kernel may begin before the last one on its stream has ended: it relies on its own first statement, and
    that of all kernels here, `wait_for_prior_kernel()`. Kernels of other libraries, before or after it, need none.
    """

    def __init__(self, file: str, name: str, flags: Sequence[str] = OPTIONS, *, cooperative: bool = False) -> None:
        if isinstance(flags, str) or any(not flag.startswith("-") for flag in flags):
            raise InvalidInputError(f"flags of the compiler begin with a dash; {name} was given {flags!r}")
        self.file = file
        self.cooperative = cooperative
        self.name = name
        self.flags = tuple(flags)
        self.signature = signature(file, name)
        self._n_arguments, self._packing = len(self.signature), self.signature.packing
        self._loaded: dict[int, _Loaded] = {}

    def __call__(self, blocks: int, threads: int, *args: Any) -> None:
        """Launches on torch's current stream. Does not synchronise. No blocks, no launch."""
        if blocks == 0:
            return
        if len(args) != self._n_arguments:
            raise InvalidInputError(f"{self.name} takes {self._n_arguments} arguments, got {len(args)}")
        device = torch._C._cuda_getDevice()
        if CHECKED:
            self.signature.check(args, device)
        values = [arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in args]
        _, function, attributes, n_attributes = self.load(device)
        stream = torch._C._cuda_getCurrentRawStream(device)
        try:
            packed = _SPARE.pop()
        except IndexError:
            packed = _Arguments()
        self._packing.pack_into(packed.buffer, 0, *values)
        packed.size.value = self._packing.size
        CONFIG.pack_into(packed.config, 0, blocks, 1, 1, threads, 1, 1, 0, stream, attributes, n_attributes)
        launch = driver().cuLaunchKernelEx
        if self.cooperative:  # a capture refuses its arguments in a buffer
            code = _code(launch, device, packed.config, function, packed.pointers(self.signature), None)
        else:
            code = _code(launch, device, packed.config, function, None, packed.extra)
        _SPARE.append(packed)
        if code:
            raise RuntimeError(f"the CUDA driver refused to launch {self.name} ({blocks} x {threads}): error {code}")
        if LISTENERS and threading.get_ident() in LISTENERS:
            LISTENERS[threading.get_ident()](self.signature, self._packing.pack(*values), stream)

    def prepare(self, device: int) -> None:
        """Begins to compile it for a device on another thread, unless it was: for launches that are certain."""
        MODULES.prepare(self.file, self.flags, device, self.name)

    def load(self, device: int) -> _Loaded:
        """What launches need on a device, compiled unless it was."""
        loaded = self._loaded.get(device)
        if loaded is None:
            function = MODULES.get(self.file, self.flags, device, self.name).get_function(self.name)
            given = COOPERATIVE if self.cooperative else EARLY if begins_early(device) else None
            attributes = (0, 0) if given is None else (ctypes.addressof(given), 1)
            loaded = self._loaded[device] = _Loaded(function, function.ptr, *attributes)
        return loaded


@functools.cache
def kernel(file: str, name: str, *flags: str) -> Kernel:
    """The kernel of that name, made once: its compiled code is shared by all that use it."""
    return Kernel(file, name, flags or OPTIONS)


@functools.cache
def cooperative_kernel(file: str, name: str, *flags: str) -> Kernel:
    """The cooperative kernel of that name, made once."""
    return Kernel(file, name, flags or OPTIONS, cooperative=True)


@functools.cache
def meeting_blocks(device: int) -> int:
    """Blocks of 1,024 threads that may wait for each other on a device: one on each of three quarters of its
    multiprocessors, so that a cooperative launch need not wait for kernels of other streams to end."""
    return max(1, int(torch.cuda.get_device_properties(device).multi_processor_count) * 3 // 4)


def blocks_for(n: int, threads: int, most: int = 2**31 - 1) -> int:
    """Blocks of `threads` threads that cover `n` elements, one each."""
    return min(most, (n + threads - 1) // threads)
