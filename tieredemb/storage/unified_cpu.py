"""CPU kernels that touch a tier's memory: all cores at once, as one alone commits it at a tenth of the speed."""

from __future__ import annotations

from typing import Any

import numpy as np

from tieredemb.kernels.parallel_cpu import over_ranges


@over_ranges
def bytes_zero(lo: int, hi: int, memory: Any) -> None:
    """Writes zeros to `memory[lo:hi]` (uint8); hi - lo bytes."""
    for i in range(lo, hi):
        memory[i] = np.uint8(0)


@over_ranges
def blocks_touch(lo: int, hi: int, memory: Any, block_bytes: int) -> None:
    """Writes a zero to the first byte of each block lo … hi - 1 of `memory` (uint8), which commits the block."""
    for block in range(lo, hi):
        memory[block * block_bytes] = np.uint8(0)
