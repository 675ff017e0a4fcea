"""CPU kernel of Belady's optimum with bypass, see `references`."""

from __future__ import annotations

import heapq

import numpy as np

from tieredemb.kernels.cpu import jit


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
