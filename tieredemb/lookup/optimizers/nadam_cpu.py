# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, no-check-untyped-defs
"""CPU twin of NAdam."""

from __future__ import annotations

import numpy as np

from tieredemb.kernels.constants import OVERFLOWING_SQUARES
from tieredemb.kernels.cpu import as_tuple, fma, inline, load, store
from tieredemb.kernels.parallel_cpu import over_ranges
from tieredemb.lookup.moments_cpu import means_catch_up
from tieredemb.lookup.optimizer_cpu import dense_walk, faded, rows_walk, square_mean

F = np.float32
NUMBERS = 8


@inline
def element(w, g, m, v, numbers):
    """Weight and means after a step."""
    eps, one_less_beta1, one_less_beta2, weight_decay, correction2, of_gradient, of_mean, decay = numbers
    gradient = fma(weight_decay, w, g) if weight_decay != F(0.0) else g
    m = fma(gradient - m, one_less_beta1, m)
    v = square_mean(v, gradient, one_less_beta2)
    move = fma(of_mean, m, of_gradient * gradient) / (np.sqrt(v / correction2) + eps)
    return fma(w, decay, -move), m, v


@inline
def row_update(weight, row, state, home, g, rate, numbers):
    width = g.shape[0]
    for d in range(width):
        w, m, v = element(load(weight, row, d), g[d], load(state, home, d), load(state, home, width + d), numbers)
        store(weight, row, d, w)
        store(state, home, d, m)
        store(state, home, width + d, v)


@inline
def replay(weight, row, state, home, none, past, start, stop):
    """Takes the steps after `start` until `stop`, as steps without a gradient: `none`, float32 (D,), zeros."""
    _, _, rates, numbers, _, _, _, _ = past
    for at in range(start + 1, stop + 1):
        row_update(weight, row, state, home, none, rates[at], as_tuple(numbers[at], NUMBERS))


@inline
def element_replay(w, m, v, past, start, stop):
    """The same of one element."""
    _, _, _, numbers, _, _, _, _ = past
    for at in range(start + 1, stop + 1):
        w, m, v = element(w, F(0.0), m, v, as_tuple(numbers[at], NUMBERS))
    return w, m, v


@inline
def row_catch_up(weight, row, state, home, none, past, start, stop):
    """Brings a row from step `start` to step `stop`; returns how many steps it has replayed."""
    most = F(OVERFLOWING_SQUARES)
    return means_catch_up(weight, row, state, home, none, past, start, stop, replay, element_replay, most)


@over_ranges
def dense_update(lo, hi, batch, rows, rate, numbers, scale, dense, replayed):
    replayed[lo] = dense_walk(lo, hi, batch, rows, rate, numbers, scale, dense, row_update, row_catch_up, faded)


@over_ranges
def rows_catch_up(lo, hi, slots, weight, state, dirty, dense, replayed):
    replayed[lo] = rows_walk(lo, hi, slots, weight, state, dirty, dense, row_catch_up, faded)
