"""Finds rows of consecutive keys in place: in slots, or in cold storage that kernels reach. No row moves.

Their reads and updates are not batches: one launch finds the rows, no slot changes hands, and no use is counted. Over
staged tiers such rows are planned instead.
"""

from __future__ import annotations

import torch

from tieredemb.cache.device.hot_rows import DeviceHotRows
from tieredemb.cache.device.moves import RowMoves
from tieredemb.cache.device.plan import OverflowRows
from tieredemb.kernels.compiler import OPTIONS, blocks_for, kernel
from tieredemb.storage.base import ColdRows

FILE = "cache/device/key_ranges.cu"
THREADS, MOST_BLOCKS = 256, 1024
MOST_RANGES = 4096  # that are known to have been written; of others it is found out again


class KeyRanges:
    """Of one cache, whose `cold` rows kernels reach."""

    def __init__(self, cold: ColdRows, hot: DeviceHotRows, moves: RowMoves) -> None:
        self._hot = hot
        self._moves = moves
        self._weight, self._state = cold.weight.ctypes.data, cold.state.ctypes.data
        self._written: set[tuple[int, int]] = set()  # ranges whose rows were all written: first key, and rows

    def restart(self) -> None:
        """The cold rows were replaced, and the new ones may never have been written."""
        self._written = set()

    def find(self, first: int, rows: int) -> tuple[torch.Tensor, OverflowRows]:
        """Homes of the rows of the keys from `first` on, int32 (`rows`,), and where rows without a slot are. Rows that
        were never written are generated first."""
        hot, device = self._hot, self._hot.weight.device
        homes = torch.empty(rows, dtype=torch.int32, device=device)
        records = torch.empty((rows, 2), dtype=torch.int64, device=device)
        overflow = OverflowRows(True, self._weight, self._state, records, records)
        stride, blocks = hot.layout.state_width + 1, blocks_for(rows, THREADS, MOST_BLOCKS)
        cells = hot.cells, len(hot.cells)
        find = kernel(FILE, "range_find", *OPTIONS)
        if (first, rows) in self._written:
            find(blocks, THREADS, *cells, first, rows, homes, records, self._state, stride, 0, 0)
            return homes, overflow
        untouched = torch.empty(rows, dtype=torch.uint8, device=device)
        some = torch.zeros(1, dtype=torch.int32, device=device)
        find(blocks, THREADS, *cells, first, rows, homes, records, self._state, stride, untouched, some)
        count = torch.full((1,), rows, dtype=torch.int32, device=device)
        keys = torch.arange(first, first + rows, device=device)
        self._moves.generate(count, rows, keys, homes, untouched, overflow, some=some.data_ptr())
        # after an interrupt before this line the same rows are generated again
        kernel(FILE, "range_begin", *OPTIONS)(blocks, THREADS, first, rows, untouched, self._state, stride)
        if len(self._written) == MOST_RANGES:
            self._written.clear()
        self._written.add((first, rows))
        return homes, overflow
