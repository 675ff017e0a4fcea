"""The hot cache over a trace, without moving rows: the cache's plan and policy, in one compiled loop.

A batch is planned as `cache.host` plans it: its rows are numbered, victims of the lowest score are evicted for the
missed ones, none of them a row that is locked, rows that get no slot are used beyond the capacity, and all scores are
raised by one use. Numbers, scores and candidates come from the cache's own kernels (`cache.plan_cpu`,
`cache.policy_cpu`). A plan of `HostCache` takes a third of a millisecond, ten times as long. Both count the same hits
where no two rows are equal in score and last batch; of equal rows they may evict different ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tieredemb.cache.policy import scoring
from tieredemb.cache_hit.workload import Workload
from tieredemb.config import Policy
from tieredemb.progress import Advance

USES_PER_CALL = 1 << 20  # an interrupt waits for a call to end: some tenths of a second
NO_SLOT, NO_ROW, NEVER = -1, -1, -(2**31)


def simulate(workload: Workload, capacity: int, policy: Policy, advance: Advance) -> tuple[int, int, int]:
    """Hits, fetched rows and evictions of the measured batches, in a cache of `capacity` rows that is empty at the
    first batch."""
    from tieredemb.cache.policy_cpu import gains_of
    from tieredemb.cache_hit.simulation_cpu import EVICTED, FETCHED, HITS, batches_plan

    uses, size = workload.uses, workload.batch_size
    trace = (uses.rows, uses.occurrences, uses.bounds)
    state, counts = _empty_cache(capacity, workload.trace.rows, size)
    terms = scoring(policy)
    gains = gains_of(terms.kind, terms.unit)
    rule = (terms.kind, terms.unit, gains, terms.units_per_batch, terms.remember, terms.ties_by_age)
    batches = len(uses.bounds) - 1
    step = max(1, USES_PER_CALL // size)
    for begin, end in ((0, workload.first_batch), (workload.first_batch, batches)):
        counts[[HITS, FETCHED, EVICTED]] = 0
        for first in range(begin, end, step):
            stop = min(first + step, end)
            batches_plan(trace, first, stop, workload.lock_window, rule, *state, counts)
            advance(min(stop * size, workload.trace.ids.size) - first * size)
    return int(counts[HITS]), int(counts[FETCHED]), int(counts[EVICTED])


def _empty_cache(capacity: int, rows: int, batch_size: int) -> tuple[tuple[Any, ...], np.ndarray[Any, Any]]:
    """The arrays of `batches_plan` between its uses and its counts, and these. Slots beyond the capacity are for the
    rows of a batch that get no other."""
    size = capacity + batch_size
    heap = 2 * size
    slots = (
        np.full(size, NO_ROW, np.int64),
        np.zeros(size, np.uint32),
        np.full(size, NEVER, np.int32),
    )
    state = (
        slots,
        (np.full(rows, NO_SLOT, np.int32), np.zeros(rows, np.uint32)),
        (np.empty(capacity, np.uint64), np.empty(capacity, np.int32)),
        (np.empty(heap, np.uint64), np.empty(heap, np.int32)),
        np.zeros(1, np.uint64),
        (np.empty(batch_size, np.int64), np.empty(batch_size, np.int32)),
    )
    return state, np.zeros(6, np.int64)
