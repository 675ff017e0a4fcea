"""Segments on the CPU: the occurrences of a batch grouped by row, each row's in the order of the batch.

The backward sums a row's gradients along its segment, so this order is what makes results independent of slots,
threads and timing. One pass of a counting sort, since the plan has numbered the unique keys already.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tieredemb.kernels.cpu import jit

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Segments:
    """`homes`: int32 (U,), one a segment · `starts`: int64 (U + 1,) into `order` · `order`: int32 (occurrences,)."""

    homes: Array
    starts: Array
    order: Array


def segments_of(inverse: Array, homes: Array) -> Segments:
    """Groups occurrences by `inverse` (int32 (N,), −1 left out) into the U segments of `homes`; a segment may be
    empty."""
    starts = np.zeros(len(homes) + 1, np.int64)
    order = np.empty(len(inverse), np.int32)
    kept = occurrences_sort(inverse, starts, order)
    return Segments(homes, starts, order[:kept])


def segments_of_homes(homes: Array, slots: int) -> Segments:
    """Groups occurrences by their home (int32 (N,), negative left out, below `slots`): for several batches at once."""
    inverse = np.empty(len(homes), np.int32)
    unique = np.empty(len(homes), np.int32)
    count = homes_number(homes, np.full(slots, -1, np.int32), inverse, unique)
    return segments_of(inverse, unique[:count].copy())


@jit
def homes_number(homes, unique_of_slot, inverse, unique):
    """Numbers the distinct homes in order of first occurrence; returns how many. `unique_of_slot` is −1 before."""
    count = 0
    for i in range(homes.shape[0]):
        home = homes[i]
        inverse[i] = -1
        if home >= 0:
            if unique_of_slot[home] < 0:
                unique_of_slot[home] = count
                unique[count] = home
                count += 1
            inverse[i] = unique_of_slot[home]
    return count


@jit
def occurrences_sort(inverse, starts, order):
    """Stable counting sort of the occurrences by `inverse`; returns how many are kept. `starts` is zeroed before."""
    segments = starts.shape[0] - 1
    for i in range(inverse.shape[0]):
        if inverse[i] >= 0:
            starts[inverse[i] + 1] += 1
    for u in range(segments):
        starts[u + 1] += starts[u]
    place = starts[:segments].copy()
    for i in range(inverse.shape[0]):
        u = inverse[i]
        if u >= 0:
            order[place[u]] = i
            place[u] += 1
    return starts[segments]
