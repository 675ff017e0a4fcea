# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, no-check-untyped-defs
"""CPU twin of RMSprop. A row's state is its running mean of squares, then the mean of gradients and the momentum, if it
has words for them."""

from __future__ import annotations

import math

import numpy as np

from tieredemb.kernels.constants import FIRST_LOG, SECOND_LOG, SUM_FIRST, SUM_SECOND
from tieredemb.kernels.cpu import as_tuple, fma, inline, load, store
from tieredemb.kernels.parallel_cpu import over_ranges
from tieredemb.lookup.optimizer_cpu import dense_walk, factor_between, faded, rows_walk

F = np.float32
NUMBERS = 6


@inline
def row_update(weight, row, state, home, g, rate, numbers):
    eps, alpha, weight_decay, momentum, centered, one_less_alpha = numbers
    width = g.shape[0]
    last = state.shape[1] - 1 - width  # where the last of the state's tensors begins
    is_centered = last > 0 and centered != F(0.0)
    has_buffer = last > 0 and momentum != F(0.0)
    for d in range(width):
        w = load(weight, row, d)
        gradient = fma(weight_decay, w, g[d]) if weight_decay != F(0.0) else g[d]
        v = fma(one_less_alpha * gradient, gradient, alpha * load(state, home, d))
        store(state, home, d, v)
        if is_centered:
            mean = load(state, home, width + d)
            mean = fma(gradient - mean, one_less_alpha, mean)
            store(state, home, width + d, mean)
            v = fma(-mean, mean, v)  # all of it rounded as torch's: of equal gradients hardly anything is left
        move = gradient / (np.sqrt(v) + eps)
        if has_buffer:
            move = fma(momentum, load(state, home, last + d), move)
            store(state, home, last + d, move)
        store(weight, row, d, fma(-rate, move, w))


@inline
def row_catch_up(weight, row, state, home, none, past, start, stop):
    """Brings a row from step `start` to step `stop`; returns how many steps it has replayed."""
    _, _, rates, numbers, sums, ends, logs, coupled = past
    if coupled[stop] != coupled[start] or ends[start] < 0:
        for at in range(start + 1, stop + 1):
            row_update(weight, row, state, home, none, rates[at], as_tuple(numbers[at], NUMBERS))
        return stop - start
    if ends[start] == 0:  # the sum grows: its own products are those until now
        first, second = sums[start, SUM_FIRST], sums[start, SUM_SECOND]
    else:
        first = factor_between(logs, FIRST_LOG, start, stop)
        second = factor_between(logs, SECOND_LOG, start, stop)
    total = sums[start, 0]
    width = none.shape[0]
    last = state.shape[1] - 1 - width
    _, _, _, momentum, centered, _ = as_tuple(numbers[start + 1], NUMBERS)  # each of the steps uses all that there is
    for d in range(width):
        store(state, home, d, faded(load(state, home, d), second))
        if centered != F(0.0):
            mean = load(state, home, width + d)
            store(state, home, width + d, mean * second if abs(mean) < F(math.inf) else F(math.nan))
        if momentum != F(0.0):
            buffer = load(state, home, last + d)
            store(weight, row, d, fma(-total, buffer, load(weight, row, d)))
            store(state, home, last + d, faded(buffer, first))
    return 0


@over_ranges
def dense_update(lo, hi, batch, rows, rate, numbers, scale, dense, replayed):
    replayed[lo] = dense_walk(lo, hi, batch, rows, rate, numbers, scale, dense, row_update, row_catch_up, faded)


@over_ranges
def rows_catch_up(lo, hi, slots, weight, state, dirty, dense, replayed):
    replayed[lo] = rows_walk(lo, hi, slots, weight, state, dirty, dense, row_catch_up, faded)
