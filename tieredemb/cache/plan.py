"""Planning a batch: what is resident, what is missed, which unique keys there are.

Two passes. `find` looks every key up in the map; `number` then numbers the unique keys in order of first occurrence,
locks the resident ones (stamping `last_batch` before any victim can be chosen), and claims each missed key once in a
table local to the plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tieredemb.kernels import twin

if TYPE_CHECKING:
    from tieredemb.cache.host.hot_rows import HotRows
    from tieredemb.hash.slot_map import SlotMap

    Array = np.ndarray[Any, Any]

DROPPED = -(2**31)  # home of an occurrence that takes no part: padding


@dataclass(frozen=True)
class Numbering:
    """`inverse`: int32 (N,), position of each occurrence's key among the unique ones, −1 for padding · `unique_keys`:
    int64 (U,) · `unique_slots`: int32 (U,), −1 for missed keys · `missed`: int32 (M,), positions of the missed keys
    among the unique ones · `lookups`, `hits`: occurrences without padding, and those whose row was resident."""

    inverse: Array
    unique_keys: Array
    unique_slots: Array
    missed: Array
    lookups: int
    hits: int


def number(keys: Array, index: SlotMap, hot: HotRows, batch: np.int32, device: torch.device) -> Numbering:
    """Numbers the unique keys of `keys` (int64 (N,), negative for padding) and locks the resident ones by the stamp of
    `batch`."""
    slots = np.empty(len(keys), np.int32)
    index.find(keys, slots)
    numbering: Numbering = twin(__name__, device).number(keys, slots, hot.last_batch, hot.unique_of_slot, batch)
    return numbering


def resolve(inverse: Array, unique_slots: Array, device: torch.device) -> Array:
    """Home of every occurrence, int32 (N,): its key's slot, or `DROPPED`."""
    homes: Array = twin(__name__, device).resolve(inverse, unique_slots)
    return homes
