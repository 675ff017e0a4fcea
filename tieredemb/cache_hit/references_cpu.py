"""CPU kernels of a trace's uses and of Belady's optimum with bypass, see `references`."""

from __future__ import annotations

import heapq

import numpy as np

from tieredemb.cache.plan_cpu import UNIQUE, keys_number
from tieredemb.kernels.cpu import jit


@jit
def uses_number(ids, size, bounds, rows, occurrences):
    """The distinct rows of each batch, numbered as a plan numbers them where none is resident; see `Uses`."""
    starts = np.array([0, size])
    nowhere = np.full(size, -1, np.int32)
    cells = 2
    while cells < 2 * size:
        cells *= 2
    claim_key, claim_unique = np.zeros(cells, np.int64), np.empty(cells, np.int32)
    inverse, slots, missed = np.empty(size, np.int32), np.empty(size, np.int32), np.empty(size, np.int32)
    counted = np.empty((1, 4), np.int64)
    done = 0
    for batch in range(bounds.size - 1):
        keys = ids[batch * size : (batch + 1) * size]
        starts[1] = keys.size
        claim_key[:] = 0
        keys_number(
            keys, nowhere[: keys.size], starts, nowhere, nowhere, 0, claim_key, claim_unique,
            inverse, rows[done:], slots, missed, counted,
        )  # fmt: skip
        bounds[batch] = done
        for i in range(keys.size):
            occurrences[done + inverse[i]] += 1
        done += counted[0, UNIQUE]
    bounds[bounds.size - 1] = done


@jit
def next_uses(rows, of_row, next_use):
    """The index of each use's next one; `of_row`: by row, len(rows) for none."""
    for use in range(rows.size - 1, -1, -1):
        next_use[use] = of_row[rows[use]]
        of_row[rows[use]] = use


@jit
def belady_held(next_use, bounds, capacity):
    """Which uses find their row held: bool (P,).

    A held row is represented by its next use, an index that grows with the batch, so that the largest index
    is the row needed last. Uses of the past sink below all others in the heap and need no removal.
    """
    uses = next_use.size
    held = np.zeros(uses, np.bool_)
    heap = [np.int64(1)]
    heap.pop()
    count = 0
    for batch in range(bounds.size - 1):
        for use in range(bounds[batch], bounds[batch + 1]):
            count -= held[use]
            if next_use[use] < uses:  # a row never used again is not kept
                held[next_use[use]] = True
                heapq.heappush(heap, -next_use[use])
                count += 1
        while count > capacity:
            held[-heapq.heappop(heap)] = False
            count -= 1
    return held
