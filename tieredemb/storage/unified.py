"""Cold rows in CUDA's managed memory, kept on the host and read and written there by kernels: the fast tier of a GPU.

Managed memory that stays on the host is mapped with large pages, so random rows cross PCIe at 46–51 GB/s where pinned
memory, bound by address translation, reaches 4–17 (NVIDIA H200, 8 GiB and more; `python -m tieredemb doctor` measures).
It is committed in blocks of 2 MiB when it is first touched: 0.27 ms a block for the GPU, 9 to 15 GiB/s for 16 CPU
threads, and 3 to 7 in memory that a virtual machine has not used before (`python -m benchmarks.cuda_opening`). So
threads commit it after an opening, while it is in use already.
"""

from __future__ import annotations

import os
import warnings
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tieredemb.errors import ConfigError
from tieredemb.kernels.streams import synchronize
from tieredemb.storage import cuda_driver as cuda
from tieredemb.storage.base import STATE_DTYPE, ColdRows, RowLayout, Storage
from tieredemb.storage.commit import Commit, zero_in_parallel
from tieredemb.storage.host import HostMemory, check_physical

BLOCK_BYTES = 2 << 20  # what the driver commits at a time
_ALIGN_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class UnifiedMemory(Storage):
    """Rows live in managed memory on the host and die with the process; a checkpoint keeps them.

    `pretouch`: commit the weights behind the opening, by threads that take most of the cores for that long. Without it
    only the states are (their zeros say that no row was ever written), and the weights of a block of rows when the
    first of them is: more of the first batches are slow, and a table that is used sparsely stays smaller.

    >>> storage = tieredemb.UnifiedMemory(pretouch=False)
    >>> bag = tieredemb.TieredEmbeddingBag(1000, 4, device="cuda", storage=storage)    # doctest: +SKIP
    """

    pretouch: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.pretouch, bool):
            raise ConfigError(f"pretouch of UnifiedMemory must be True or False, got {self.pretouch!r}")

    def open(self, layout: RowLayout, *, name: str, identity: dict[str, Any]) -> ColdRows:
        """Allocates the rows, readable by torch's current CUDA device. Synchronises.

        On a GPU without concurrent managed access it warns and returns pinned `HostMemory` rows; beyond the free
        memory of the GPU it warns too. Raises `MissingDependencyError` without a GPU, `StorageFullError` when the
        rows exceed physical memory, and `StorageError` with the driver's reason.
        """
        cuda.check_gpu("UnifiedMemory()")
        check_physical(layout)
        device = torch.device("cuda", torch.cuda.current_device())
        if not cuda.has_concurrent_managed_access(device):
            warnings.warn(
                f"{torch.cuda.get_device_name(device)} has no concurrent managed access, so UnifiedMemory() uses "
                "pinned host memory instead: equally right, slower in tables of GiBs; HostMemory() says the same",
                stacklevel=2,
            )
            pinned = HostMemory().open(layout, name=name, identity=identity)
            pinned.attach(device)
            return pinned
        _warn_beyond_gpu(layout, device)
        return UnifiedRows(layout, device, pretouch=self.pretouch)


def _warn_beyond_gpu(layout: RowLayout, device: torch.device) -> None:
    needed, (free, _) = layout.weight_bytes + layout.state_bytes, torch.cuda.mem_get_info(device)
    if needed > free:
        warnings.warn(
            f"a table of {needed / 2**30:.2f} GiB in UnifiedMemory() exceeds the {free / 2**30:.2f} GiB that the GPU "
            "has free; this is unproven. HostMemory() or File(path) hold it for certain, more slowly",
            stacklevel=3,
        )


class UnifiedRows(ColdRows):
    """Rows in two managed allocations. `weight` and `state` are aligned to a page (4096 bytes)."""

    kind = "unified"
    in_memory = True
    volatile = True
    device_readable = True

    def __init__(self, layout: RowLayout, device: torch.device, *, pretouch: bool) -> None:
        weight = _managed(layout.weight_bytes, device)
        state = _managed(layout.state_bytes, device)
        zero_in_parallel(state)
        self._commit = Commit(weight, BLOCK_BYTES) if pretouch else None
        self._devices = [device]
        super().__init__(
            layout,
            weight.view(layout.carrier).reshape(layout.rows, layout.columns),
            state.view(STATE_DTYPE).reshape(layout.rows, layout.state_width + 1),
        )

    def attach(self, device: torch.device) -> None:
        """Maps the rows for `device`, if it is another than the one they were opened on."""
        if device.type != "cuda":
            return
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        if device in self._devices:
            return
        with cuda.context_of(device):
            for array in (self.weight, self.state):
                if array.nbytes:
                    cuda.advise_accessed_by(array.ctypes.data, array.nbytes, device)
        self._devices.append(device)

    def reset(self) -> None:
        """Zeros the states, after all work on the devices; the arrays stay the same objects."""
        for device in self._devices:
            synchronize(device)
        zero_in_parallel(self.state)
        self.metadata = self.metadata.cleared()

    def wait_until_committed(self) -> None:
        if self._commit is not None:
            self._commit.wait()

    def close(self) -> None:
        self.released = True
        if self._commit is not None:
            self._commit.end()
        super().close()


class _Allocation:
    """Managed memory, kept alive by the arrays over it and freed with the last of them."""

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        whole = -(-(size_bytes + _ALIGN_BYTES) // BLOCK_BYTES) * BLOCK_BYTES  # small ones may start anywhere
        with cuda.context_of(device):
            address = cuda.alloc_managed(whole)
            # not at exit: the end of the process frees it
            weakref.finalize(self, _free, address, device, os.getpid()).atexit = False
            cuda.advise_host(address, whole)
            cuda.advise_accessed_by(address, whole, device)
        self.__array_interface__ = {
            "data": (-(-address // _ALIGN_BYTES) * _ALIGN_BYTES, False),
            "shape": (size_bytes,),
            "typestr": "|u1",
            "version": 3,
        }


def _free(address: int, device: torch.device, pid: int) -> None:
    if os.getpid() == pid:  # a forked child has no context, and nothing to free
        with cuda.context_of(device):
            cuda.free_managed(address)


def _managed(size_bytes: int, device: torch.device) -> np.ndarray[Any, Any]:
    """uint8 (size_bytes,), page-aligned, with any content."""
    return np.asarray(_Allocation(size_bytes, device)) if size_bytes else np.empty(0, np.uint8)
