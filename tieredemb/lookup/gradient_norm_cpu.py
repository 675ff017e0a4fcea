# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, no-check-untyped-defs
"""CPU twin of the norms of gradients: the update's own walk over segments, which keeps a number a row and no row."""

from __future__ import annotations

import math

import numpy as np

from tieredemb.kernels.cpu import inline
from tieredemb.kernels.parallel_cpu import even_bounds, over_ranges, parallel_for
from tieredemb.kernels.rounding_cpu import NEAREST
from tieredemb.lookup.optimizer_cpu import UPDATE_GRAIN, segments_walk, stays, walked

F = np.float32


def row_powers(segments, gradient, space, norm_type):
    """Σ |g|^p over the summed gradient g of each row of `segments` (max |g| for an infinite p): float64 (U,), zero for
    a segment without occurrences. `gradient`: see `optimizer_cpu.Gradient` · `norm_type`: p, above 0."""
    rows = len(segments.homes)
    powers = np.zeros((rows, 1), np.float64)
    # no row is read or written: of the weights only the width counts
    out = (np.empty((0, space.width), np.float32), powers, np.empty(rows, np.uint8), NEAREST)
    batch = walked(np.arange(rows, dtype=np.int32), segments, gradient, space)
    bounds = even_bounds(rows, max(1, UPDATE_GRAIN // space.width))
    rate = np.zeros(len(space.features), np.float32)
    parallel_for(segments_norm, bounds, batch, out, rate, (F(norm_type),), F(1.0))
    return powers[:, 0]


@inline
def row_power(weight, row, state, home, g, rate, numbers):
    (p,) = numbers
    total = 0.0
    for d in range(g.shape[0]):
        size = abs(np.float64(g[d]))
        if p == F(2.0):
            total += size * size
        elif p == F(1.0):
            total += size
        elif math.isinf(p):
            if size > total or size != size:
                total = size
        else:
            total += size ** np.float64(p)
    state[home, 0] = total


@over_ranges
def segments_norm(lo, hi, batch, rows, rate, numbers, scale):
    segments_walk(lo, hi, batch, rows, rate, numbers, scale, row_power, stays, 0, None, None)
