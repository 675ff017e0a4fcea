# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, no-check-untyped-defs
"""CPU twin of row-wise Adagrad."""

from __future__ import annotations

import numpy as np

from tieredemb.kernels.cpu import fma, inline, load, store
from tieredemb.kernels.parallel_cpu import over_ranges
from tieredemb.lookup.optimizer_cpu import segments_walk, stays

F = np.float32


@inline
def row_update(weight, row, state, home, g, rate, numbers):
    (eps,) = numbers
    width = g.shape[0]
    squares = F(0.0)
    for d in range(width):
        squares = fma(g[d], g[d], squares)
    total = state[home, 0] + squares / F(width)
    state[home, 0] = total
    step = rate / (np.sqrt(total) + eps)
    for d in range(width):
        store(weight, row, d, fma(-step, g[d], load(weight, row, d)))


@over_ranges
def segments_update(lo, hi, batch, rows, rate, numbers, scale):
    segments_walk(lo, hi, batch, rows, rate, numbers, scale, row_update, stays, 0, None, None)
