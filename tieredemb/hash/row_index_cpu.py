"""An array of the slots of all rows of a key space, which a cache over rows in memory uses in place of a map.

A row takes 4 bytes, in a slot or not, in addition to the 8 bytes or more of the row itself. A find is one read, where a
map hashes and probes. A row without a slot may have a negative number instead of 0, by which lookups in place recognise
rows that they have seen already (`cache/plan_cpu.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tieredemb.kernels.constants import NOT_FOUND
from tieredemb.kernels.cpu import prefetch
from tieredemb.kernels.parallel_cpu import even_bounds, over_ranges, parallel_for

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

FIND_GRAIN = 8192  # finds a thread is worth
AHEAD = 16  # finds whose lines are prefetched


class RowIndex:
    """As a `SlotMap`, for keys in [0, rows). `slot_plus_one`: int32 (rows,), for each row its slot + 1, or a number
    that is not positive: memory that is zero and not committed until it is used."""

    def __init__(self, rows: int) -> None:
        self.slot_plus_one: Array = np.zeros(rows, np.int32)

    def find(self, keys: Array) -> Array:
        """The slot of each key, int32 (N,), or `NOT_FOUND`. Negative keys are never found."""
        slots = np.empty(len(keys), np.int32)
        parallel_for(row_index_find, even_bounds(len(keys), FIND_GRAIN), self.slot_plus_one, keys, slots)
        return slots

    def insert(self, keys: Array, slots: Array) -> None:
        """Adds absent, distinct `keys` (M,) with their `slots` (M,)."""
        self.slot_plus_one[keys] = slots + np.int32(1)

    def erase(self, keys: Array) -> None:
        """Removes present, distinct `keys` (M,)."""
        self.slot_plus_one[keys] = 0

    def grow(self, slots: int) -> None:
        """Does nothing: it holds any number of slots."""


@over_ranges
def row_index_find(lo, hi, slot_plus_one, keys, slots):
    """slots[i] = slot of keys[i] for lo ≤ i < hi. Moves 16 bytes a key, 4 of them at random."""
    for i in range(lo, hi):
        if i + AHEAD < hi and keys[i + AHEAD] >= 0:
            prefetch(slot_plus_one, keys[i + AHEAD])
        slots[i] = max(slot_plus_one[keys[i]], 0) - 1 if keys[i] >= 0 else NOT_FOUND
