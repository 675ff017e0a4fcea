"""Cold rows in host memory: anonymous pages, zero and uncommitted until they are touched, in huge pages if
granted.

A random row costs a TLB miss on each of its pages, so the mapping requests 2 MiB pages (`MADV_HUGEPAGE`). The
kernel commits one when it is first touched: a table that is used sparsely stays small, but in steps of 2 MiB. A
cache on a GPU pins the rows, and its kernels use them in place.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tieredemb.errors import StorageError, StorageFullError
from tieredemb.kernels.streams import synchronize
from tieredemb.storage import cuda_driver
from tieredemb.storage.base import STATE_DTYPE, ColdRows, RowLayout, Storage
from tieredemb.storage.commit import zero_in_parallel

_MAPPED_BYTES = 32 << 20  # malloc's M_MMAP_THRESHOLD grows no further


@dataclass(frozen=True, kw_only=True)
class HostMemory(Storage):
    """Rows live in this process's memory and die with it; a checkpoint keeps them.

    >>> bag = tieredemb.TieredEmbeddingBag(1000, 4, capacity=100, storage=tieredemb.HostMemory())
    """

    def open(self, layout: RowLayout, *, name: str, identity: dict[str, Any]) -> HostRows:
        """Maps the rows; touches none of them. Raises `StorageFullError` when they exceed physical memory."""
        check_physical(layout)
        return HostRows(layout)


def check_physical(layout: RowLayout) -> None:
    """Raises `StorageFullError` for rows that exceed physical memory."""
    needed, physical = layout.weight_bytes + layout.state_bytes, _physical_bytes()
    if needed > physical:
        raise StorageFullError(
            f"a table of {layout.rows} rows needs {needed / 2**30:.1f} GiB, this machine has "
            f"{physical / 2**30:.1f} GiB of memory; use File(path), which holds tables larger than memory"
        )


def _physical_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def advise_huge_pages(address: int, size_bytes: int) -> None:
    """Requests huge pages for memory before it is touched, as touching it takes a fault for each page. Does nothing for
    sizes that malloc does not map separately, as pages would be shared with other objects."""
    if size_bytes < _MAPPED_BYTES:
        return
    first, end = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, (address + size_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    # refused by a kernel built without them: slower, equally right
    ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_HUGEPAGE)


class _Mapping:
    """Anonymous memory, kept alive by the arrays over it. What was pinned is unpinned before it is unmapped."""

    def __init__(self, size_bytes: int) -> None:
        try:
            self.region = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise StorageFullError(
                f"the kernel refuses {size_bytes / 2**30:.1f} GiB of memory ({error}); use File(path), or "
                "allow it (vm.overcommit_memory, ulimit -v)"
            ) from error
        self.size_bytes = size_bytes
        self.pinned = False
        self.__array_interface__ = np.frombuffer(self.region, np.uint8).__array_interface__

    def pin(self, device: torch.device) -> None:
        if self.pinned:
            return
        address = self.__array_interface__["data"][0]
        cuda_driver.register_host(address, self.size_bytes)
        # not at exit: the end of the process unpins it
        weakref.finalize(self, _unpin, address, device, os.getpid()).atexit = False
        self.pinned = True

    def advise(self, advice: int) -> None:
        try:
            self.region.madvise(advice)
        except OSError:  # a kernel built without huge pages: slower, equally right
            if advice != mmap.MADV_HUGEPAGE:
                raise


def _unpin(address: int, device: torch.device, pid: int) -> None:
    if os.getpid() == pid:  # a forked child inherits the memory unpinned
        with cuda_driver.context_of(device):
            cuda_driver.unregister_host(address)


class HostRows(ColdRows):
    """Rows in two anonymous mappings. `weight` is aligned to a page (4096 bytes or more)."""

    kind = "host"
    in_memory = True
    volatile = True
    as_fast_as_slots = True

    def __init__(self, layout: RowLayout) -> None:
        self._maps: list[_Mapping] = []
        self._device: torch.device | None = None
        weight = self._map(layout.weight_bytes).view(layout.carrier).reshape(layout.rows, layout.columns)
        state = self._map(layout.state_bytes).view(STATE_DTYPE).reshape(layout.rows, layout.state_width + 1)
        super().__init__(layout, weight, state)

    def _map(self, size_bytes: int) -> np.ndarray[Any, Any]:
        if size_bytes == 0:
            return np.empty(0, np.uint8)
        mapping = _Mapping(size_bytes)
        mapping.advise(mmap.MADV_HUGEPAGE)
        self._maps.append(mapping)
        return np.asarray(mapping)

    def attach(self, device: torch.device) -> None:
        """Pins the rows, all of which are committed then: kernels of every GPU reach them. Raises `StorageError`."""
        if device.type != "cuda" or self.device_readable:
            return
        cuda_driver.check_gpu("HostMemory() on a CUDA device")
        if not cuda_driver.reaches_pinned_memory(device):
            raise StorageError(f"kernels on {device} do not reach pinned host memory in place; use UnifiedMemory()")
        self._device = device  # now already: one mapping may be pinned and the other not
        with cuda_driver.context_of(device):
            for mapping in self._maps:
                mapping.pin(device)
        self.device_readable = True

    def reset(self) -> None:
        """Hands the pages back, so that the next touch finds zeros; the arrays stay the same objects. Pinned pages
        cannot be: there the states are zeroed, after all work on the device."""
        if self._device is not None:
            synchronize(self._device)
            zero_in_parallel(self.state)
        else:
            self._discard()
        self.metadata = self.metadata.cleared()

    def _discard(self) -> None:
        try:
            for mapping in self._maps:
                mapping.advise(mmap.MADV_DONTNEED)
        except OSError as error:
            raise StorageError(f"the rows in host memory could not be cleared: {error}") from error

    def close(self) -> None:
        super().close()
        self._maps.clear()
