"""References that know the future, in units of batches: the best static set and Belady's optimum with bypass.

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

    `rows`: int64 (P,), those of a batch by first occurrence. `occurrences`: int64 (P,), accesses of the use.
    `next_use`: int64 (P,), index of the row's next use, P for none. `bounds`: int64 (batches + 1,), batch b holds the
    uses bounds[b] … bounds[b + 1] - 1.
    """

    rows: NDArray[np.int64]
    occurrences: NDArray[np.int64]
    next_use: NDArray[np.int64]
    bounds: NDArray[np.int64]


def uses_of(trace: Trace, batch_size: int) -> Uses:
    """Cuts `trace` into batches of `batch_size` accesses, the last one possibly shorter."""
    from tieredemb.cache_hit.references_cpu import next_uses, uses_number

    bounds = np.zeros(-(-trace.ids.size // batch_size) + 1, np.int64)
    rows, occurrences = np.empty(trace.ids.size, np.int64), np.zeros(trace.ids.size, np.int64)
    uses_number(trace.ids, batch_size, bounds, rows, occurrences)
    rows, occurrences = rows[: bounds[-1]].copy(), occurrences[: bounds[-1]].copy()
    next_use = np.empty_like(rows)
    next_uses(rows, np.full(trace.rows, rows.size), next_use)
    return Uses(rows=rows, occurrences=occurrences, next_use=next_use, bounds=bounds)


def belady(uses: Uses, capacity: int, first_batch: int) -> tuple[int, int]:
    """Hits (occurrences) and misses (uses, each a fetched row) of Belady with bypass, from `first_batch` on,
    with `capacity` rows held between batches; the cache is empty before batch 0."""
    from tieredemb.cache_hit.references_cpu import belady_held

    measured = slice(int(uses.bounds[first_batch]), None)
    held = belady_held(uses.next_use, uses.bounds, capacity)[measured]
    return int(uses.occurrences[measured][held].sum()), int(held.size - np.count_nonzero(held))


def best_static(trace: Trace, capacity: int, first_access: int) -> int:
    """Hits (occurrences) from `first_access` on of the `capacity` rows with most accesses there."""
    accesses = np.bincount(trace.ids[first_access:])
    kept = min(capacity, accesses.size)
    return int(np.partition(accesses, accesses.size - kept)[accesses.size - kept :].sum()) if kept else 0
