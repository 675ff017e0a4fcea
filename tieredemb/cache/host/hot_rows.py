"""The slots: weights, optimizer state, and per slot the key, the score, the lock and the dirty bit.

Slots below `capacity` are the cache. Slots beyond it are transient: they serve the rows of batches larger than the
cache and are emptied as soon as no ticket uses them. They count as batch buffers, not as capacity.
"""

from __future__ import annotations

import numpy as np

from tieredemb.config import Array
from tieredemb.hash.slot_map import map_bytes_per_slot
from tieredemb.storage.base import RowLayout

NO_KEY = -1
NEVER = -(2**31)  # last batch of a slot that was never used
PER_SLOT: dict[str, tuple[type[np.generic], int]] = {
    "key": (np.int64, NO_KEY),
    "score": (np.uint32, 0),
    "last_batch": (np.int32, NEVER),
    "dirty": (np.uint8, 0),
    "unique_of_slot": (np.int32, 0),  # scratch of the plan: position among the batch's unique keys
}


def stamp(batch: int) -> np.int32:
    """A batch number as `last_batch` holds it: it wraps, and comparisons are signed differences."""
    return np.int32((batch + 2**31) % 2**32 - 2**31)


def cache_bytes_per_slot(layout: RowLayout) -> int:
    """Bytes that one slot costs, map included: what a capacity in bytes is divided by."""
    return slot_bytes(layout) + map_bytes_per_slot()


def slot_bytes(layout: RowLayout) -> int:
    """Bytes of hot rows that one slot costs."""
    per_slot = sum(np.dtype(dtype).itemsize for dtype, _ in PER_SLOT.values())
    return layout.hot_bytes + per_slot


class HotRows:
    """`weight` carrier (C, D), `state` uint32 (C, S), `key` int64 (C,) or `NO_KEY`, `score` uint32 (C,),
    `last_batch` int32 (C,), `dirty` uint8 (C,)."""

    weight: Array
    state: Array
    key: Array
    score: Array
    last_batch: Array
    dirty: Array
    unique_of_slot: Array

    def __init__(self, layout: RowLayout, capacity: int) -> None:
        self.layout = layout
        self.capacity = capacity
        self.weight = np.zeros((capacity, layout.columns), layout.carrier)
        self.state = np.zeros((capacity, layout.state_width), np.uint32)
        for name, (dtype, fill) in PER_SLOT.items():
            setattr(self, name, np.full(capacity, fill, dtype))
        self._free = np.empty(0, np.int32)  # slots below `_used` that hold no row
        self._used = 0  # slots below the capacity that ever held a row

    def __len__(self) -> int:
        """Slots, transient ones included."""
        return len(self.key)

    @property
    def used(self) -> int:
        """All slots that may have a row are below this."""
        return len(self) if len(self) > self.capacity else self._used

    @property
    def free(self) -> int:
        """Free slots below the capacity."""
        return self.capacity - self._used + len(self._free)

    def transients(self) -> Array:
        """Transient slots that hold a row, int32."""
        return (np.flatnonzero(self.key[self.capacity :] >= 0) + self.capacity).astype(np.int32)

    def occupied(self) -> Array:
        """All slots that hold a row, int32."""
        return np.flatnonzero(self.key[: self.used] >= 0).astype(np.int32)

    def take(self, count: int) -> Array:
        """`count` empty slots, int32: freed ones, then ones never used, then transient ones, growing as needed.

        Raises `MemoryError` before anything changes.
        """
        from_free = min(count, len(self._free))
        fresh = min(count - from_free, self.capacity - self._used)
        beyond = count - from_free - fresh
        transient = self._transient_slots(beyond)
        slots = np.concatenate(
            [
                self._free[len(self._free) - from_free :],
                np.arange(self._used, self._used + fresh, dtype=np.int32),
                transient,
            ]
        )
        self._free = self._free[: len(self._free) - from_free]
        self._used += fresh
        return slots

    def vacate(self, slots: Array) -> None:
        """Empties `slots`; their content is forgotten."""
        self.key[slots] = NO_KEY
        self.last_batch[slots] = NEVER
        self.dirty[slots] = 0
        self.score[slots] = 0
        self._free = np.concatenate([self._free, slots[slots < self.capacity]])

    def reset(self) -> None:
        """Empties all slots, and takes them from the first one on again."""
        self.key[:] = NO_KEY
        self.derive()

    def derive(self) -> None:
        """Makes what follows from the keys anew: the state of empty slots, and which are free."""
        empty = self.key < 0
        self.last_batch[empty] = NEVER
        self.dirty[empty] = 0
        self.score[empty] = 0
        below = self.key[: self.capacity] >= 0
        used = int(np.flatnonzero(below)[-1]) + 1 if below.any() else 0
        self._free = np.flatnonzero(~below[:used]).astype(np.int32)
        self._used = used

    def ensure_transient(self, count: int) -> None:
        """Makes sure that `count` transient slots are empty. Raises `MemoryError` before anything changes."""
        self._transient_slots(count)

    def _transient_slots(self, count: int) -> Array:
        if count <= 0:
            return np.empty(0, np.int32)
        empty = np.flatnonzero(self.key[self.capacity :] < 0)
        if len(empty) < count:
            self._grow(len(self) + max(count - len(empty), (len(self) - self.capacity) // 2))
            empty = np.flatnonzero(self.key[self.capacity :] < 0)
        return (empty[:count] + self.capacity).astype(np.int32)

    def _grow(self, slots: int) -> None:
        old = len(self)
        grown: dict[str, Array] = {}
        for name in ("weight", "state", *PER_SLOT):
            array = getattr(self, name)
            grown[name] = np.empty((slots, *array.shape[1:]), array.dtype)
            grown[name][:old] = array
            grown[name][old:] = PER_SLOT[name][1] if name in PER_SLOT else 0
        self.__dict__.update(grown)  # all at once, whatever interrupts

    def size_bytes(self) -> dict[str, int]:
        """Bytes by purpose: the cache's own arrays and, separately, the transient rows."""
        own = {
            name: getattr(self, name)[: self.capacity].nbytes
            for name in ("weight", "state", "key", "score", "last_batch", "dirty")
        }
        scratch = self.unique_of_slot[: self.capacity].nbytes
        return own | {
            "plan_scratch": scratch,
            "transient": (len(self) - self.capacity) * slot_bytes(self.layout),
        }
