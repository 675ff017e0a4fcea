# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, no-check-untyped-defs
"""CPU twin of what steps without a gradient do to a row with a running mean of gradients and one of their squares, in
closed form: see history.py."""

from __future__ import annotations

import math

import numpy as np

from tieredemb.kernels.constants import (
    DECAY_LOG,
    FIRST_LOG,
    SECOND_LOG,
    SUM_DECAY,
    SUM_EPS,
    SUM_FIRST,
    SUM_IS_SERIES,
    SUM_SECOND,
)
from tieredemb.kernels.cpu import fma, inline, load, store
from tieredemb.lookup.optimizer_cpu import factor_between, faded

F = np.float32


@inline
def at_once(w, m, v, of, factors):
    """Weight and means after all steps of the sum `of`, and further steps that only decay them."""
    first, second, decay, rest_decay = factors
    x = np.sqrt(v)
    share = F(1.0) / fma(x, of[1], of[SUM_EPS])
    q = x * share if x < F(math.inf) else F(0.0)  # nothing moves by an infinite mean of squares
    series = fma(-q, of[7], of[6])
    series = fma(-q, series, of[5])
    series = fma(-q, series, of[4])
    series = fma(-q, series, of[3])
    series = fma(-q, series, of[2])
    series = fma(q * q, series, F(1.0))
    moved = fma(-(of[0] * series * share), m, faded(w, decay))
    # an infinite mean is none after the first of the steps
    return faded(moved, rest_decay), m * first if abs(m) < F(math.inf) else F(math.nan), faded(v, second)


@inline
def means_catch_up(weight, row, state, home, none, past, start, stop, replay, element_replay, most):
    """Brings a row whose state is a running mean of gradients and one of their squares from step `start` to step
    `stop`; returns how many steps it has replayed, those of single elements not counted. `replay(weight, row, state,
    home, none, past, start, stop)`: of the recipe, takes the steps after `start` until `stop` one by one.
    `element_replay(w, m, v, past, start, stop)`, or None: takes them for one element whose mean of squares is above
    `most`."""
    _, _, _, _, sums, ends, logs, coupled = past
    width = none.shape[0]
    of = sums[start]
    has_no_end = coupled[stop] != coupled[start] or ends[start] < 0
    end = stop if has_no_end or ends[start] == 0 else np.int64(ends[start])
    first = factor_between(logs, FIRST_LOG, end, stop)
    second = factor_between(logs, SECOND_LOG, end, stop)
    rest_decay = factor_between(logs, DECAY_LOG, end, stop)
    if has_no_end or of[SUM_IS_SERIES] == F(0.0):
        replay(weight, row, state, home, none, past, start, end)
        if end < stop:
            for d in range(width):
                store(state, home, d, load(state, home, d) * first)
                store(state, home, width + d, faded(load(state, home, width + d), second))
                store(weight, row, d, faded(load(weight, row, d), rest_decay))
        return end - start
    if ends[start] == 0:  # the sum grows: its own products are those until now
        factors = of[SUM_FIRST], of[SUM_SECOND], of[SUM_DECAY], F(1.0)
    else:
        factors = (
            factor_between(logs, FIRST_LOG, start, stop),
            factor_between(logs, SECOND_LOG, start, stop),
            factor_between(logs, DECAY_LOG, start, end),
            rest_decay,
        )
    for d in range(width):
        w, m, v = load(weight, row, d), load(state, home, d), load(state, home, width + d)
        if element_replay is not None and most < v < F(math.inf):
            w, m, v = element_replay(w, m, v, past, start, end)
            w, m, v = faded(w, rest_decay), m * first if abs(m) < F(math.inf) else F(math.nan), faded(v, second)
        else:
            w, m, v = at_once(w, m, v, of, factors)
        store(weight, row, d, w)
        store(state, home, d, m)
        store(state, home, width + d, v)
    return 0
