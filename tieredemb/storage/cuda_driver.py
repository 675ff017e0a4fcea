"""The few calls that the tiers make to NVIDIA's driver, by ctypes: managed memory, its advice, pinning.

The driver's own interface and not the runtime's: torch offers no managed memory, CuPy's advice takes a location that
CUDA 13 refuses, and a refused call leaves no error behind for torch to find at its next launch.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator

import torch

from tieredemb.errors import MissingDependencyError, StorageError, StorageFullError
from tieredemb.kernels.streams import synchronize

_LIBRARY = "libcuda.so.1"
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_CONCURRENT_MANAGED_ACCESS = 89  # CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS
_HOST_POINTER_FOR_REGISTERED = 91  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
_ATTACH_GLOBAL = 1  # CU_MEM_ATTACH_GLOBAL: every stream may use the memory
_PREFERRED_LOCATION, _ACCESSED_BY = 3, 5  # CU_MEM_ADVISE_SET_…
_DEVICE, _HOST = 1, 2  # CU_MEM_LOCATION_TYPE_…
_CPU = -1  # CU_DEVICE_CPU, the host in the advice of drivers before CUDA 12.2
_PORTABLE_MAPPED = 1 | 2  # CU_MEMHOSTREGISTER_PORTABLE, _DEVICEMAP: for every context, at the host's address


class _Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


@functools.cache
def _driver() -> ctypes.CDLL:
    """The driver's library, with the signatures of the calls made here."""
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise MissingDependencyError(
            f"{_LIBRARY} does not load, so there is no NVIDIA driver; install one, or use HostMemory()"
        ) from error
    pointer, size, number = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int
    library.cuGetErrorString.argtypes = [number, ctypes.POINTER(ctypes.c_char_p)]
    library.cuDeviceGetAttribute.argtypes = [ctypes.POINTER(number), number, number]
    library.cuMemAllocManaged.argtypes = [ctypes.POINTER(pointer), size, ctypes.c_uint]
    library.cuMemFree_v2.argtypes = [pointer]
    library.cuMemHostRegister_v2.argtypes = [pointer, size, ctypes.c_uint]
    library.cuMemHostUnregister.argtypes = [pointer]
    library.cuMemAdvise.argtypes = [pointer, size, number, number]
    if hasattr(library, "cuMemAdvise_v2"):
        library.cuMemAdvise_v2.argtypes = [pointer, size, number, _Location]
    return library


def check_gpu(what: str) -> None:
    """Raises `MissingDependencyError` where `what` has no GPU to work with."""
    if not torch.cuda.is_available():
        raise MissingDependencyError(
            f"{what} needs an NVIDIA GPU, and torch {torch.__version__} sees none; use HostMemory(), or run "
            "`python -m tieredemb doctor`, which says what is missing"
        )
    _driver()


@contextlib.contextmanager
def context_of(device: torch.device) -> Iterator[None]:
    """Makes torch's context of `device` the calling thread's, and waits for all work in it."""
    with torch.cuda.device(device):
        synchronize(device)
        yield


def _message(code: int) -> str:
    text = ctypes.c_char_p()
    _driver().cuGetErrorString(code, ctypes.byref(text))
    return f"{(text.value or b'unknown error').decode()} (CUDA error {code})"


def _check(code: int, what: str, remedy: str) -> None:
    if code:
        kind = StorageFullError if code == _OUT_OF_MEMORY else StorageError
        raise kind(f"{what}: {_message(code)}; {remedy}")


def has_concurrent_managed_access(device: torch.device) -> bool:
    """Whether host and GPU may use managed memory at the same time: on Linux, since Pascal."""
    return _has(device, _CONCURRENT_MANAGED_ACCESS)


def reaches_pinned_memory(device: torch.device) -> bool:
    """Whether kernels find pinned memory at the host's addresses: everywhere but on some integrated GPUs."""
    return _has(device, _HOST_POINTER_FOR_REGISTERED)


def _has(device: torch.device, attribute: int) -> bool:
    value = ctypes.c_int()
    _check(
        _driver().cuDeviceGetAttribute(ctypes.byref(value), attribute, _index(device)),
        f"the driver does not know attribute {attribute} of {device}",
        "update it",
    )
    return value.value == 1


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


# Those below need the context of a device: call them inside `context_of`.


def alloc_managed(size_bytes: int) -> int:
    """Address of `size_bytes` of managed memory, untouched."""
    address = ctypes.c_uint64()
    code = _driver().cuMemAllocManaged(ctypes.byref(address), size_bytes, _ATTACH_GLOBAL)
    _check(code, f"no {size_bytes / 2**30:.2f} GiB of managed memory", "use File(path), or a smaller table")
    return address.value


def free_managed(address: int) -> None:
    _check(_driver().cuMemFree_v2(address), "managed memory was not freed", "an earlier kernel may have failed")


def advise_host(address: int, size_bytes: int) -> None:
    """Keeps the pages of the range in the host's memory, even if a GPU uses them."""
    _advise(address, size_bytes, _PREFERRED_LOCATION, _Location(_HOST, 0), _CPU)


def advise_accessed_by(address: int, size_bytes: int, device: torch.device) -> None:
    """Maps the range into the page tables of `device`, so that its accesses do not fault."""
    _advise(address, size_bytes, _ACCESSED_BY, _Location(_DEVICE, _index(device)), _index(device))


def _advise(address: int, size_bytes: int, advice: int, location: _Location, device: int) -> None:
    driver = _driver()
    if hasattr(driver, "cuMemAdvise_v2"):
        code = driver.cuMemAdvise_v2(address, size_bytes, advice, location)
    else:
        code = driver.cuMemAdvise(address, size_bytes, advice, device)
    _check(code, f"the driver refuses advice {advice} on managed memory", "use HostMemory()")


def register_host(address: int, size_bytes: int) -> None:
    """Pins host memory and maps it for every GPU, at the same address."""
    code = _driver().cuMemHostRegister_v2(address, size_bytes, _PORTABLE_MAPPED)
    what = f"{size_bytes / 2**30:.2f} GiB of host memory could not be pinned"
    _check(code, what, "use UnifiedMemory() or File(path), or let this process lock more memory (ulimit -l)")


def unregister_host(address: int) -> None:
    _check(_driver().cuMemHostUnregister(address), "host memory was not unpinned", "an earlier kernel may have failed")
