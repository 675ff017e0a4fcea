# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, no-check-untyped-defs
"""CPU twin of SGD. A row has a momentum if its state has words for one."""

from __future__ import annotations

import math

import numpy as np

from tieredemb.kernels.constants import DECAY_LOG, FIRST_LOG, SUM_DECAY, SUM_FIRST
from tieredemb.kernels.cpu import as_tuple, fma, inline, load, store
from tieredemb.kernels.parallel_cpu import over_ranges
from tieredemb.lookup.optimizer_cpu import dense_walk, factor_between, faded, rows_walk, segments_walk, stays

F = np.float32
NUMBERS = 4


@inline
def row_update(weight, row, state, home, g, rate, numbers):
    (weight_decay,) = numbers
    for d in range(g.shape[0]):
        w = load(weight, row, d)
        gradient = fma(weight_decay, w, g[d]) if weight_decay != F(0.0) else g[d]
        store(weight, row, d, fma(-rate, gradient, w))


@over_ranges
def segments_update(lo, hi, batch, rows, rate, numbers, scale):
    segments_walk(lo, hi, batch, rows, rate, numbers, scale, row_update, stays, 0, None, None)


# --- with momentum or weight decay of every row -----------------------------------------------------------------------


@inline
def has_momentum(state, none):
    return state.shape[1] > none.shape[0]


@inline
def dense_row_update(weight, row, state, home, g, rate, numbers):
    weight_decay, momentum, nesterov, share = numbers
    has_buffer = has_momentum(state, g) and momentum != F(0.0)
    for d in range(g.shape[0]):
        w = load(weight, row, d)
        gradient = fma(weight_decay, w, g[d]) if weight_decay != F(0.0) else g[d]
        if has_buffer:
            buffer = fma(share, gradient, momentum * load(state, home, d))
            store(state, home, d, buffer)
            gradient = fma(momentum, buffer, gradient) if nesterov != F(0.0) else buffer
        store(weight, row, d, fma(-rate, gradient, w))


@inline
def row_catch_up(weight, row, state, home, none, past, start, stop):
    """Brings a row from step `start` to step `stop`; returns how many steps it has replayed."""
    _, _, rates, numbers, sums, ends, logs, coupled = past
    if coupled[stop] != coupled[start] or ends[start] < 0:
        for at in range(start + 1, stop + 1):
            dense_row_update(weight, row, state, home, none, rates[at], as_tuple(numbers[at], NUMBERS))
        return stop - start
    total = sums[start, 0]
    if ends[start] == 0:  # the sum grows: its own products are those until now
        first, decay, rest_decay = sums[start, SUM_FIRST], sums[start, SUM_DECAY], F(1.0)
    else:
        first = factor_between(logs, FIRST_LOG, start, stop)
        decay = factor_between(logs, DECAY_LOG, start, ends[start])
        rest_decay = factor_between(logs, DECAY_LOG, ends[start], stop)
    moves = has_momentum(state, none)
    for d in range(none.shape[0]):
        w = load(weight, row, d) * decay
        if moves:
            buffer = load(state, home, d)
            w = fma(-total, buffer, w)
            store(state, home, d, faded(buffer, first))
        store(weight, row, d, w * rest_decay)
    return 0


@inline
def decayed(weight, factor):
    """A weight that has decayed by its own part of the gradient, which of an infinity is one, and leaves no number."""
    return weight * factor if abs(weight) < F(math.inf) else F(math.nan)


@over_ranges
def dense_update(lo, hi, batch, rows, rate, numbers, scale, dense, replayed):
    replayed[lo] = dense_walk(lo, hi, batch, rows, rate, numbers, scale, dense, dense_row_update, row_catch_up, decayed)


@over_ranges
def rows_catch_up(lo, hi, slots, weight, state, dirty, dense, replayed):
    replayed[lo] = rows_walk(lo, hi, slots, weight, state, dirty, dense, row_catch_up, decayed)
