# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, no-check-untyped-defs
"""CPU twin of Adagrad."""

from __future__ import annotations

import numpy as np

from tieredemb.kernels.cpu import as_tuple, fma, inline, load, store
from tieredemb.kernels.parallel_cpu import over_ranges
from tieredemb.lookup.optimizer_cpu import dense_walk, faded, rows_walk, segments_walk, stays

F = np.float32
NUMBERS = 2


@inline
def row_update(weight, row, state, home, g, rate, numbers):
    eps, weight_decay = numbers
    for d in range(g.shape[0]):
        w = load(weight, row, d)
        gradient = fma(weight_decay, w, g[d]) if weight_decay != F(0.0) else g[d]
        total = fma(gradient, gradient, load(state, home, d))
        store(state, home, d, total)
        store(weight, row, d, fma(-rate, gradient / (np.sqrt(total) + eps), w))


@over_ranges
def segments_update(lo, hi, batch, rows, rate, numbers, scale):
    segments_walk(lo, hi, batch, rows, rate, numbers, scale, row_update, stays, 0, None, None)


# --- with weight decay ------------------------------------------------------------------------------------------------


@inline
def row_catch_up(weight, row, state, home, none, past, start, stop):
    """Brings a row from step `start` to step `stop`; returns how many steps it has replayed."""
    _, _, rates, numbers, _, _, _, coupled = past
    if coupled[stop] == coupled[start]:
        return 0
    for at in range(start + 1, stop + 1):
        row_update(weight, row, state, home, none, rates[at], as_tuple(numbers[at], NUMBERS))
    return stop - start


@over_ranges
def dense_update(lo, hi, batch, rows, rate, numbers, scale, dense, replayed):
    replayed[lo] = dense_walk(lo, hi, batch, rows, rate, numbers, scale, dense, row_update, row_catch_up, faded)


@over_ranges
def rows_catch_up(lo, hi, slots, weight, state, dirty, dense, replayed):
    replayed[lo] = rows_walk(lo, hi, slots, weight, state, dirty, dense, row_catch_up, faded)
