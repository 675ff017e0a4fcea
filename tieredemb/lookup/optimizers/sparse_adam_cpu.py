# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, no-check-untyped-defs
"""CPU twin of Adam over the rows of the batch."""

from __future__ import annotations

import math

import numpy as np

from tieredemb.kernels.cpu import fma, inline, load, store
from tieredemb.kernels.parallel_cpu import over_ranges
from tieredemb.lookup.optimizer_cpu import segments_walk, stays

F = np.float32


@inline
def row_update(weight, row, state, home, g, rate, numbers):
    eps, one_less_beta1, one_less_beta2 = numbers
    width = g.shape[0]
    for d in range(width):
        m = load(state, home, d)
        v = load(state, home, width + d)
        m = fma(g[d] - m, one_less_beta1, m)
        square = g[d] * g[d]  # where it is infinite torch's difference is one
        v = fma(fma(g[d], g[d], -v) if square < F(math.inf) else square - v, one_less_beta2, v)
        store(state, home, d, m)
        store(state, home, width + d, v)
        store(weight, row, d, fma(-rate, m / (np.sqrt(v) + eps), load(weight, row, d)))


@over_ranges
def segments_update(lo, hi, batch, rows, rate, numbers, scale):
    segments_walk(lo, hi, batch, rows, rate, numbers, scale, row_update, stays, 0, None, None)
