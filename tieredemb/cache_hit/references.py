"""What no policy can know, at the granularity of batches: the best static set and Belady's optimum with bypass.

- Best static set: the rows of most accesses in the measured part, held from its start to its end. It misses no row for
  the first time, so that a large one lies above Belady.
- Belady (1966) with bypass: after each batch the cache keeps, of the rows that it held and those of the batch, the
  ones whose next use comes first; a missed row need not enter. Nothing is locked, as the batch itself is served
  beside the cache. This fetches the fewest rows that any cache can that has to fetch a row before it hits. A use is a
  row in a batch, however often it occurs there; the hit rate counts occurrences, like every other, and of occurrences
  this is not strictly the maximum.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tieredemb.cache_hit.traces import Trace


@dataclass(frozen=True, kw_only=True, eq=False)
class Uses:
    """The P uses (row, batch) of a trace cut into batches, in batch order.

    `occurrences`: int64 (P,), accesses of the use. `next_use`: int64 (P,), index of the row's next use, P for
    none. `bounds`: int64 (batches + 1,), batch b holds the uses bounds[b] … bounds[b + 1] - 1.
    """

    occurrences: NDArray[np.int64]
    next_use: NDArray[np.int64]
    bounds: NDArray[np.int64]


def uses_of(trace: Trace, batch_size: int) -> Uses:
    """Cuts `trace` into batches of `batch_size` accesses, the last one possibly shorter."""
    batches = -(-trace.ids.size // batch_size)
    batch_and_row = np.arange(trace.ids.size) // batch_size * trace.rows + trace.ids
    distinct, occurrences = np.unique(batch_and_row, return_counts=True)
    row = distinct % trace.rows
    by_row = np.argsort(row, kind="stable")  # stable: within a row the batches stay in order
    again = row[by_row[1:]] == row[by_row[:-1]]
    next_use = np.full(distinct.size, distinct.size, np.int64)
    next_use[by_row[:-1][again]] = by_row[1:][again]
    bounds = np.searchsorted(distinct, np.arange(batches + 1) * trace.rows)
    return Uses(occurrences=occurrences, next_use=next_use, bounds=bounds)


def belady(uses: Uses, capacity: int, first_batch: int) -> tuple[int, int]:
    """Hits (occurrences) and misses (uses, each a fetched row) of Belady with bypass, from `first_batch` on,
    with `capacity` rows held between batches; the cache is empty before batch 0."""
    from tieredemb.cache_hit.references_cpu import belady_held

    measured = slice(int(uses.bounds[first_batch]), None)
    held = belady_held(uses.next_use, uses.bounds, capacity)[measured]  # type: ignore[no-untyped-call]
    return int(uses.occurrences[measured][held].sum()), int(held.size - np.count_nonzero(held))


def best_static(trace: Trace, capacity: int, first_access: int) -> int:
    """Hits (occurrences) from `first_access` on of the `capacity` rows with most accesses there."""
    accesses = np.bincount(trace.ids[first_access:])
    kept = min(capacity, accesses.size)
    return int(np.partition(accesses, accesses.size - kept)[accesses.size - kept :].sum()) if kept else 0
