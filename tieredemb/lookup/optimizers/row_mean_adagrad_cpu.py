# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, no-check-untyped-defs
"""CPU twin of Adagrad by the means of rows' gradients."""

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
    total = F(0.0)
    for d in range(width):
        total += g[d]
    mean = total / F(width)
    squares = fma(mean, mean, state[home, 0])
    state[home, 0] = squares
    move = rate * (mean / (np.sqrt(squares) + eps))
    for d in range(width):
        store(weight, row, d, load(weight, row, d) - move)


@over_ranges
def segments_update(lo, hi, batch, rows, rate, numbers, scale):
    segments_walk(lo, hi, batch, rows, rate, numbers, scale, row_update, stays, 0, None, None)
