"""Commits memory by all threads, as one alone does it at a tenth of the speed. Without a compiled kernel, for which
the first process of a user would wait longer than for the memory."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np

from tieredemb.kernels.chunks import each

_ZEROED = 16 << 20  # bytes that a thread takes at a time
_TOUCHED = 16  # blocks, likewise: some milliseconds

Array = np.ndarray[Any, Any]


def zero_in_parallel(array: Array) -> None:
    """Zeros a C-contiguous array."""
    memory = array.reshape(-1).view(np.uint8)
    address = memory.ctypes.data

    def zero(part: tuple[int, int], thread: int) -> int:
        ctypes.memset(address + part[0], 0, part[1] - part[0])
        return 0

    each(zero, _parts(memory.nbytes, _ZEROED))


def touch_in_parallel(memory: Array, block_bytes: int) -> None:
    """Writes a zero to the first byte of each block of `memory` (uint8), which commits the block."""
    address = memory.ctypes.data

    def touch(part: tuple[int, int], thread: int) -> int:
        for block in range(*part):
            ctypes.memset(address + block * block_bytes, 0, 1)
        return 0

    each(touch, _parts(-(-memory.nbytes // block_bytes), _TOUCHED))


def _parts(count: int, size: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + size, count)) for start in range(0, count, size))
