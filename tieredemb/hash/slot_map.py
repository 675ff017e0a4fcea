"""Map from key to slot: open addressing with linear probing, one thread a key, cells of 16 bytes, load 0.5.

It holds resident keys only, so that the capacity bounds it; the slots' key array is the truth and this an index over
it. Linear probing beats bucketed tiles two to one at this load on a GPU, and one cache line a find is the floor on a
CPU. See cuCollections `static_map` for the verbs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from tieredemb.kernels import twin

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

LOAD = 0.5  # cells = slots / LOAD; at 0.8 finds take twice as long
CELL_BYTES = 16
EMPTY_CELL = 0  # a cell stores key + 1, so that a map of untouched zero pages is empty
NOT_FOUND = -1


class SlotMap(Protocol):
    """Keys are int64 in [0, 2^48), slots int32 in [0, slots). On the CPU arrays are numpy's; no call keeps them."""

    cells: Array

    def find(self, keys: Array, slots: Array) -> None:
        """Writes the slot of each key to `slots` (int32 (N,)), or `NOT_FOUND`. Negative keys are never found."""

    def insert(self, keys: Array, slots: Array) -> None:
        """Adds absent, distinct `keys` (M,) with their `slots` (M,)."""

    def erase(self, keys: Array) -> None:
        """Removes present, distinct `keys` (M,)."""

    def grow(self, slots: int) -> None:
        """Makes room for `slots` keys, keeping the content."""


def slot_map(slots: int, device: torch.device) -> SlotMap:
    """An empty map for up to `slots` keys."""
    made: SlotMap = twin(__name__, device).SlotMap(slots)
    return made


def map_bytes_per_slot() -> int:
    """Bytes of map that each slot costs."""
    return int(CELL_BYTES / LOAD)
