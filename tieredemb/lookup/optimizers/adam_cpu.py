# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, no-check-untyped-defs
"""CPU twin of Adam and AdamW over all rows."""

from __future__ import annotations

import math

import numpy as np

from tieredemb.kernels.constants import (
    DECAY_LOG,
    FIRST_LOG,
    SECOND_LOG,
    SUM_DECAY,
    SUM_EPS,
    SUM_FIRST,
    SUM_IS_SERIES,
    SUM_SECOND,
)
from tieredemb.kernels.cpu import as_tuple, fma, inline, load, store
from tieredemb.kernels.parallel_cpu import over_ranges
from tieredemb.lookup.optimizer_cpu import factor_between, faded, row_bring, rows_walk, segments_walk

F = np.float32
NUMBERS = 5


@inline
def square_mean(v, gradient, share):
    """The running mean of squares `v` with `share` of the square of `gradient` in it. It ends where torch's does: that
    multiplies the gradient by its share first, and an infinite mean stays infinite."""
    found = fma(fma(gradient, gradient, -v), share, v)
    return found if found < F(math.inf) else (F(1.0) - share) * v + share * gradient * gradient


@inline
def row_update(weight, row, state, home, g, rate, numbers):
    one_less_beta1, one_less_beta2, weight_decay, step_eps, decay = numbers
    width = g.shape[0]
    for d in range(width):
        w = load(weight, row, d)
        gradient = fma(weight_decay, w, g[d]) if weight_decay != F(0.0) else g[d]
        m = load(state, home, d)
        v = load(state, home, width + d)
        m = fma(gradient - m, one_less_beta1, m)
        v = square_mean(v, gradient, one_less_beta2)
        store(state, home, d, m)
        store(state, home, width + d, v)
        store(weight, row, d, fma(-rate, m / (np.sqrt(v) + step_eps), w * decay))


@inline
def replay(weight, row, state, home, none, past, start, stop):
    """Takes the steps after `start` until `stop`, as steps without a gradient: `none`, float32 (D,), zeros."""
    _, _, rates, numbers, _, _, _, _ = past
    for at in range(start + 1, stop + 1):
        row_update(weight, row, state, home, none, rates[at], as_tuple(numbers[at], NUMBERS))


@inline
def row_catch_up(weight, row, state, home, none, past, start, stop):
    """Brings a row from step `start` to step `stop`; returns how many steps it has replayed."""
    _, _, _, _, sums, ends, logs, coupled = past
    width = none.shape[0]
    of = sums[start]
    has_no_end = coupled[stop] != coupled[start] or ends[start] < 0
    if has_no_end or of[SUM_IS_SERIES] == F(0.0):
        end = stop if has_no_end or ends[start] == 0 else np.int64(ends[start])
        replay(weight, row, state, home, none, past, start, end)
        if end < stop:
            first = factor_between(logs, FIRST_LOG, end, stop)
            second = factor_between(logs, SECOND_LOG, end, stop)
            later = factor_between(logs, DECAY_LOG, end, stop)
            for d in range(width):
                store(state, home, d, load(state, home, d) * first)
                store(state, home, width + d, faded(load(state, home, width + d), second))
                store(weight, row, d, faded(load(weight, row, d), later))
        return end - start
    if ends[start] == 0:  # the sum grows: its own products are those until now
        first, second, decay, later = of[SUM_FIRST], of[SUM_SECOND], of[SUM_DECAY], F(1.0)
    else:
        first = factor_between(logs, FIRST_LOG, start, stop)
        second = factor_between(logs, SECOND_LOG, start, stop)
        decay = factor_between(logs, DECAY_LOG, start, ends[start])
        later = factor_between(logs, DECAY_LOG, ends[start], stop)
    eps = of[SUM_EPS]
    total, point, two, three, four, five, six, seven = of[0], of[1], of[2], of[3], of[4], of[5], of[6], of[7]
    for d in range(width):
        m = load(state, home, d)
        v = load(state, home, width + d)
        x = np.sqrt(v)
        below = fma(x, point, eps)
        share = F(1.0) / below
        q = x * share if x < F(math.inf) else F(0.0)  # nothing moves by an infinite mean of squares
        series = fma(-q, seven, six)
        series = fma(-q, series, five)
        series = fma(-q, series, four)
        series = fma(-q, series, three)
        series = fma(-q, series, two)
        series = fma(q * q, series, F(1.0))
        moved = fma(-(total * series * share), m, faded(load(weight, row, d), decay))
        store(weight, row, d, faded(moved, later))
        store(state, home, d, m * first if abs(m) < F(math.inf) else F(math.nan))  # as the first of the steps has it
        store(state, home, width + d, faded(v, second))
    return 0


@inline
def bring(weight, row, state, home, none, dense):
    return row_bring(weight, row, state, home, none, dense, row_catch_up, faded)


@over_ranges
def dense_update(lo, hi, batch, rows, rate, numbers, scale, dense, replayed):
    replayed[lo] = segments_walk(lo, hi, batch, rows, rate, numbers, scale, row_update, bring, dense)


@over_ranges
def rows_catch_up(lo, hi, slots, weight, state, dirty, dense, replayed):
    replayed[lo] = rows_walk(lo, hi, slots, weight, state, dirty, dense, bring)
