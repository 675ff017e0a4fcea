# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, no-check-untyped-defs
"""CPU twin of Adagrad."""

from __future__ import annotations

import numpy as np

from tieredemb.kernels.cpu import fma, inline, jit, load, store
from tieredemb.lookup.optimizer_cpu import segments_walk


@inline
def row_update(weight, row, state, home, g, rate, numbers):
    (eps,) = numbers
    for d in range(g.shape[0]):
        total = fma(g[d], g[d], load(state, home, d))
        store(state, home, d, total)
        store(weight, row, d, fma(-rate, g[d] / (np.sqrt(total) + eps), load(weight, row, d)))


@jit
def segments_update(lo, hi, batch, rows, rate, numbers, scale, done):
    segments_walk(lo, hi, batch, rows, rate, numbers, scale, row_update, done)
