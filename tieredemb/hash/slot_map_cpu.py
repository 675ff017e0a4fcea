"""The slot map on the CPU. Erasing shifts the cells behind back instead of leaving tombstones: updates come from one
thread here, so the map never needs a rebuild."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tieredemb.hash.slot_map import LOAD
from tieredemb.kernels.constants import EMPTY_CELL, NOT_FOUND
from tieredemb.kernels.cpu import inline, jit, prefetch
from tieredemb.kernels.parallel_cpu import even_bounds, over_ranges, parallel_for

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

FIND_BLOCK = 16  # finds whose first cells are requested before any is read: as many misses as a core keeps in flight
FIND_GRAIN = 1024  # finds a thread is worth


class SlotMap:
    """A map for up to `slots` keys. Keys are int64 in [0, 2^48), slots int32 in [0, slots); no call keeps its
    arrays."""

    def __init__(self, slots: int) -> None:
        self.cells: Array = np.zeros((max(2, int(slots / LOAD)), 2), np.int64)

    def find(self, keys: Array) -> Array:
        """The slot of each key, int32 (N,), or `NOT_FOUND`. Negative keys are never found."""
        slots = np.empty(len(keys), np.int32)
        parallel_for(slot_map_find, even_bounds(len(keys), FIND_GRAIN), self.cells, keys, slots)
        return slots

    def insert(self, keys: Array, slots: Array) -> None:
        """Adds absent, distinct `keys` (M,) with their `slots` (M,)."""
        slot_map_insert(self.cells, keys, slots)

    def erase(self, keys: Array) -> None:
        """Removes present, distinct `keys` (M,)."""
        slot_map_erase(self.cells, keys)

    def grow(self, slots: int) -> None:
        """Enlarges the map for `slots` keys, keeping the content."""
        old = self.cells
        if int(slots / LOAD) > len(old):
            used = old[:, 0] != EMPTY_CELL
            grown = np.zeros((int(slots / LOAD), 2), np.int64)
            slot_map_insert(grown, old[used, 0] - 1, old[used, 1].astype(np.int32))
            self.cells = grown


@inline
def first_cell(key, cells):
    """Home cell of `key` among `cells`: murmur3's finaliser, its high half scaled to the range."""
    h = np.uint64(key)
    h = (h ^ (h >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    h = (h ^ (h >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return np.int64(((h >> np.uint64(32)) * np.uint64(cells)) >> np.uint64(32))


@over_ranges
def slot_map_find(lo, hi, cells, keys, slots):
    """slots[i] = slot of keys[i] for lo ≤ i < hi. Moves 16 + 12 bytes a key, one of them a random cache line."""
    n = cells.shape[0]
    first = np.empty(FIND_BLOCK, np.int64)
    for start in range(lo, hi, FIND_BLOCK):
        stop = min(start + FIND_BLOCK, hi)
        for i in range(start, stop):
            cell = first_cell(keys[i], n)
            first[i - start] = cell
            prefetch(cells, 2 * cell)
        for i in range(start, stop):
            wanted = keys[i] + 1
            cell = first[i - start]
            slot = NOT_FOUND
            while wanted > 0:
                found = cells[cell, 0]
                if found == wanted:
                    slot = cells[cell, 1]
                    break
                if found == EMPTY_CELL:
                    break
                cell += 1
                if cell == n:
                    cell = 0
            slots[i] = slot


@jit
def slot_map_insert(cells, keys, slots):
    """Adds absent keys at the first empty cell in probe order."""
    n = cells.shape[0]
    for i in range(keys.shape[0]):
        if i + 8 < keys.shape[0]:
            prefetch(cells, 2 * first_cell(keys[i + 8], n))
        cell = first_cell(keys[i], n)
        while cells[cell, 0] != EMPTY_CELL:
            cell += 1
            if cell == n:
                cell = 0
        cells[cell, 0] = keys[i] + 1
        cells[cell, 1] = slots[i]


@jit
def slot_map_erase(cells, keys):
    """Removes keys; the cells behind each move back over the hole unless that would put them before their home."""
    n = cells.shape[0]
    for i in range(keys.shape[0]):
        if i + 8 < keys.shape[0]:
            prefetch(cells, 2 * first_cell(keys[i + 8], n))
        hole = first_cell(keys[i], n)
        while cells[hole, 0] != keys[i] + 1:
            if cells[hole, 0] == EMPTY_CELL:
                raise KeyError("the key to erase is absent")
            hole = hole + 1 if hole + 1 < n else 0
        cell = hole
        while True:
            cell = cell + 1 if cell + 1 < n else 0
            if cells[cell, 0] == EMPTY_CELL:
                break
            home = first_cell(cells[cell, 0] - 1, n)
            stays = hole < home <= cell if hole <= cell else (hole < home or home <= cell)
            if not stays:
                cells[hole, 0] = cells[cell, 0]
                cells[hole, 1] = cells[cell, 1]
                hole = cell
        cells[hole, 0] = EMPTY_CELL
        cells[hole, 1] = 0
