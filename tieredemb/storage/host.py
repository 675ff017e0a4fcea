"""Cold rows in host memory: anonymous pages, zero and uncommitted until they are touched, in huge pages if
granted.

A random row costs a TLB miss on each of its pages, so the mapping asks for 2 MiB pages (`MADV_HUGEPAGE`). The
kernel commits one when it is first touched: a table that is used sparsely stays small, but in steps of 2 MiB.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from tieredemb.errors import StorageError, StorageFullError
from tieredemb.storage.base import STATE_DTYPE, ColdRows, Metadata, RowLayout, Storage


@dataclass(frozen=True, kw_only=True)
class HostMemory(Storage):
    """Rows live in this process's memory and die with it; a checkpoint keeps them.

    >>> from tieredemb.storage.base import RowLayout
    >>> with_rows = HostMemory().open(RowLayout(rows=10, width=4), name="", identity={})
    >>> with_rows.weight.shape, with_rows.state.shape
    ((10, 4), (10, 1))
    """

    def open(self, layout: RowLayout, *, name: str, identity: dict[str, Any]) -> HostRows:
        """Maps the rows; touches none of them. Raises `StorageFullError` when they exceed physical memory."""
        needed, physical = layout.weight_bytes + layout.state_bytes, _physical_bytes()
        if needed > physical:
            raise StorageFullError(
                f"a table of {layout.rows} rows needs {needed / 2**30:.1f} GiB, this machine has "
                f"{physical / 2**30:.1f} GiB of memory; use File(path), which holds tables larger than memory"
            )
        return HostRows(layout)


def _physical_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class HostRows(ColdRows):
    """Rows in two anonymous mappings. `weight` is aligned to a page (4096 bytes or more)."""

    kind = "host"
    in_memory = True
    volatile = True

    def __init__(self, layout: RowLayout) -> None:
        self._maps: list[mmap.mmap] = []
        weight = self._map(layout.weight_bytes).view(layout.carrier).reshape(layout.rows, layout.width)
        state = self._map(layout.state_bytes).view(STATE_DTYPE).reshape(layout.rows, layout.state_width + 1)
        super().__init__(layout, weight, state)

    def _map(self, size_bytes: int) -> np.ndarray[Any, Any]:
        if size_bytes == 0:
            return np.empty(0, np.uint8)
        try:
            region = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise StorageFullError(
                f"the kernel refuses {size_bytes / 2**30:.1f} GiB of memory ({error}); use File(path), or "
                "allow it (vm.overcommit_memory, ulimit -v)"
            ) from error
        self._advise(region, mmap.MADV_HUGEPAGE)
        self._maps.append(region)
        return np.frombuffer(region, np.uint8)

    @staticmethod
    def _advise(region: mmap.mmap, advice: int) -> None:
        try:
            region.madvise(advice)
        except OSError:  # a kernel built without huge pages: slower, equally right
            if advice != mmap.MADV_HUGEPAGE:
                raise

    def reset(self) -> None:
        """Hands the pages back, so that the next touch finds zeros; the arrays stay the same objects."""
        try:
            for region in self._maps:
                self._advise(region, mmap.MADV_DONTNEED)
        except OSError as error:
            raise StorageError(f"the rows in host memory could not be cleared: {error}") from error
        self.metadata = Metadata()

    def close(self) -> None:
        """Releases the memory as soon as nobody else holds the arrays."""
        self._maps.clear()
        self.weight, self.state = self.weight[:0].copy(), self.state[:0].copy()

    def size_bytes(self) -> dict[str, int]:
        return {"weight": self.weight.nbytes, "state": self.state.nbytes}
