# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, no-check-untyped-defs
"""CPU twin of Adamax."""

from __future__ import annotations

import math

import numpy as np

from tieredemb.kernels.constants import FIRST_LOG, SECOND_LOG, SUM_FIRST, SUM_SECOND
from tieredemb.kernels.cpu import as_tuple, fma, inline, load, store
from tieredemb.kernels.parallel_cpu import over_ranges
from tieredemb.lookup.optimizer_cpu import dense_walk, factor_between, faded, rows_walk

F = np.float32
NUMBERS = 4


@inline
def larger(value, other):
    """The larger one; none where either is no number."""
    return other if other > value or math.isnan(other) else value


@inline
def element(w, g, m, u, rate, numbers):
    """Weight, mean and maximum after a step."""
    one_less_beta1, maximum_decay, eps, weight_decay = numbers
    gradient = fma(weight_decay, w, g) if weight_decay != F(0.0) else g
    m = fma(gradient - m, one_less_beta1, m)
    u = larger(u * maximum_decay, abs(gradient) + eps)
    return fma(-rate, m / u, w), m, u


@inline
def row_update(weight, row, state, home, g, rate, numbers):
    width = g.shape[0]
    for d in range(width):
        w, m, u = element(load(weight, row, d), g[d], load(state, home, d), load(state, home, width + d), rate, numbers)
        store(weight, row, d, w)
        store(state, home, d, m)
        store(state, home, width + d, u)


@inline
def row_catch_up(weight, row, state, home, none, past, start, stop):
    """Brings a row from step `start` to step `stop`; returns how many steps it has replayed, not counting those of
    single elements."""
    _, _, rates, numbers, sums, ends, logs, coupled = past
    if coupled[stop] != coupled[start] or ends[start] < 0:
        for at in range(start + 1, stop + 1):
            row_update(weight, row, state, home, none, rates[at], as_tuple(numbers[at], NUMBERS))
        return stop - start
    if ends[start] == 0:  # the sum grows: its own products are those until now
        end = stop
        first, second, counted = sums[start, SUM_FIRST], sums[start, SUM_SECOND], sums[start, SUM_SECOND]
    else:
        end = np.int64(ends[start])
        first = factor_between(logs, FIRST_LOG, start, stop)
        second = factor_between(logs, SECOND_LOG, start, stop)
        counted = factor_between(logs, SECOND_LOG, start, end)
    total = sums[start, 0]
    _, _, eps, _ = as_tuple(numbers[stop], NUMBERS)
    _, _, first_eps, _ = as_tuple(numbers[start + 1], NUMBERS)
    width = none.shape[0]
    for d in range(width):
        w, m, u = load(weight, row, d), load(state, home, d), load(state, home, width + d)
        if eps == first_eps and (m == F(0.0) or u * counted >= eps):
            if m != F(0.0):
                w = fma(-total, m / u, w)
                m = m * (first * second) if abs(m) < F(math.inf) else F(math.nan)
            u = larger(faded(u, second), eps)
        else:  # the maximum has fallen to eps while the moves still count
            for at in range(start + 1, end + 1):
                w, m, u = element(w, F(0.0), m, u, rates[at], as_tuple(numbers[at], NUMBERS))
            if end < stop:
                fallen = factor_between(logs, SECOND_LOG, end, stop)
                m *= factor_between(logs, FIRST_LOG, end, stop) * fallen
                u = larger(faded(u, fallen), eps)
        store(weight, row, d, w)
        store(state, home, d, m)
        store(state, home, width + d, u)
    return 0


@over_ranges
def dense_update(lo, hi, batch, rows, rate, numbers, scale, dense, replayed):
    replayed[lo] = dense_walk(lo, hi, batch, rows, rate, numbers, scale, dense, row_update, row_catch_up, None)


@over_ranges
def rows_catch_up(lo, hi, slots, weight, state, dirty, dense, replayed):
    replayed[lo] = rows_walk(lo, hi, slots, weight, state, dirty, dense, row_catch_up, None)
