# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, no-check-untyped-defs
"""CPU twin of Lion over the rows of the batch."""

from __future__ import annotations

import numpy as np

from tieredemb.kernels.cpu import fma, inline, load, store
from tieredemb.kernels.parallel_cpu import over_ranges
from tieredemb.lookup.optimizer_cpu import segments_walk, stays

F = np.float32


@inline
def row_update(weight, row, state, home, g, rate, numbers):
    beta1, one_less_beta1, beta2, one_less_beta2, weight_decay = numbers
    for d in range(g.shape[0]):
        m = load(state, home, d)
        c = fma(one_less_beta1, g[d], beta1 * m)
        sign = F(1.0) if c > F(0.0) else F(-1.0) if c < F(0.0) else c  # a NaN stays one
        store(state, home, d, fma(one_less_beta2, g[d], beta2 * m))
        w = load(weight, row, d)
        move = fma(weight_decay, w, sign) if weight_decay != F(0.0) else sign  # 0 · ∞ is no number
        store(weight, row, d, fma(-rate, move, w))


@over_ranges
def segments_update(lo, hi, batch, rows, rate, numbers, scale):
    segments_walk(lo, hi, batch, rows, rate, numbers, scale, row_update, stays, 0, None, None)
