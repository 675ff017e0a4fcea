"""CPU twin of the bags."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tieredemb.kernels.cpu import even_bounds, jit, parallel_for

if TYPE_CHECKING:
    from tieredemb.lookup.bags import Bags, KeySpace

    Array = np.ndarray[Any, Any]

BAG_GRAIN = 16384
ALL_VALID = -1


def fill(ids: Array, offsets: Array, space: KeySpace, padding: Array, bags: Bags) -> int:
    """Fills the arrays of `bags` but its offsets; returns the first position of an id out of range, or −1."""
    position = np.empty(0, np.int64) if bags.position is None else bags.position
    outputs = (bags.keys, bags.sample, bags.table, position)
    bad = [
        first
        for first in parallel_for(
            bags_fill,
            even_bounds(len(space) * bags.batch, BAG_GRAIN),
            *(ids, offsets, bags.offsets, space.tables, space.start, padding, bags.batch, *outputs),
        )
        if first != ALL_VALID
    ]
    return min(bad, default=ALL_VALID)


@jit
def bags_fill(lo, hi, ids, offsets, local, tables, start, padding, batch, keys, sample, table, position):
    """Bags lo … hi − 1 of the key space. Moves 8 + 16 bytes an occurrence."""
    bad = ALL_VALID
    for bag in range(lo, hi):
        j = bag // batch
        b = bag - j * batch
        first = offsets[tables[j] * batch + b]
        rows = start[j + 1] - start[j]
        for k in range(local[bag], local[bag + 1]):
            i = first + k - local[bag]
            row = np.int64(ids[i])
            if (row < 0 or row >= rows) and bad == ALL_VALID:
                bad = i
            keys[k] = -1 if row == padding[j] else row + start[j]
            sample[k] = b
            table[k] = j
            if position.shape[0] > 0:
                position[k] = i
    return bad
