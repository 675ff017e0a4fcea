# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, no-check-untyped-defs
"""CPU twin of Adam and AdamW over all rows."""

from __future__ import annotations

import numpy as np

from tieredemb.kernels.cpu import as_tuple, fma, inline, load, store
from tieredemb.kernels.parallel_cpu import over_ranges
from tieredemb.lookup.moments_cpu import means_catch_up
from tieredemb.lookup.optimizer_cpu import dense_walk, faded, rows_walk, square_mean

F = np.float32
NUMBERS = 5


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
    return means_catch_up(weight, row, state, home, none, past, start, stop, replay, None, F(0.0))


@over_ranges
def dense_update(lo, hi, batch, rows, rate, numbers, scale, dense, replayed):
    replayed[lo] = dense_walk(lo, hi, batch, rows, rate, numbers, scale, dense, row_update, row_catch_up, faded)


@over_ranges
def rows_catch_up(lo, hi, slots, weight, state, dirty, dense, replayed):
    replayed[lo] = rows_walk(lo, hi, slots, weight, state, dirty, dense, row_catch_up, faded)
