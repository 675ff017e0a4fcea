# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, no-check-untyped-defs
"""CPU twin of what a history does with a step."""

from __future__ import annotations

import math

import numpy as np

from tieredemb.kernels.constants import (
    DECAY_LOG,
    DECAY_PRODUCT,
    EPS_AT,
    FIRST_LOG,
    FIRST_PRODUCT,
    MOMENTS_AT,
    ORDERS,
    SECOND_LOG,
    SECOND_PRODUCT,
    SERIES_ERROR,
    SUM_DECAY,
    SUM_ENDS_AT,
    SUM_EPS,
    SUM_FIRST,
    SUM_IS_SERIES,
    SUM_SECOND,
    TERM_COUPLED,
    TERM_DECAY,
    TERM_EPS,
    TERM_FIRST,
    TERM_POINT,
    TERM_ROOT_SECOND,
    TERM_WEIGHT,
    UNIT_AT,
    WINDOW,
)
from tieredemb.kernels.cpu import inline, jit

_BINOMIAL = np.array([[math.comb(n, k) for k in range(ORDERS)] for n in range(ORDERS)], np.float64)


@inline
def log_of(factor):
    return math.log(factor) if factor > 1e-300 else -690.0


@inline
def sums_write(entry, sums):
    """`sums`, float32 (SUMS,), from the moments of a window's entry; see `History`."""
    total = entry[MOMENTS_AT]
    unit = entry[UNIT_AT]
    if total == 0.0:
        sums[0] = 0.0
        sums[1] = np.float32(unit)
        for k in range(2, ORDERS - 1):
            sums[k] = 0.0
        sums[SUM_IS_SERIES] = 1.0
        return
    mean = entry[MOMENTS_AT + 1] / total
    sums[0] = np.float32(total)
    sums[1] = np.float32(unit * (1.0 + mean))
    central = 0.0
    scale = unit
    for k in range(2, ORDERS):
        scale *= unit
        power = 1.0
        central = 0.0
        for i in range(k, -1, -1):  # of the mean's power k − i
            central += _BINOMIAL[k, i] * entry[MOMENTS_AT + i] / total * power
            power *= -mean
        if k < ORDERS - 1:
            sums[k] = np.float32(scale * central)
    error = abs(central) / (1.0 + mean) ** (ORDERS - 1)
    sums[SUM_IS_SERIES] = np.float32(1.0 if error < SERIES_ERROR else 0.0)


@jit
def step_append(step, terms, first, before, after, sums, ends, logs, coupled):
    """What `History.append` does with its arrays; returns the first step whose entry still grows."""
    decay = terms[TERM_DECAY]
    is_coupled = terms[TERM_COUPLED] != 0.0 or not decay > 0.0
    logs[step, FIRST_LOG] = logs[step - 1, FIRST_LOG] + log_of(terms[TERM_FIRST])
    logs[step, SECOND_LOG] = logs[step - 1, SECOND_LOG] + 2.0 * log_of(terms[TERM_ROOT_SECOND])
    logs[step, DECAY_LOG] = logs[step - 1, DECAY_LOG] + log_of(decay)
    coupled[step] = coupled[step - 1] + (1 if is_coupled else 0)
    is_still = terms[TERM_WEIGHT] == 0.0 and terms[TERM_FIRST] == 1.0
    for s in range(first, step):
        old = before[s % WINDOW]
        new = after[s % WINDOW]
        fresh = s == step - 1  # its entry begins here
        one = terms[TERM_FIRST] if fresh else old[FIRST_PRODUCT] * terms[TERM_FIRST]
        two = terms[TERM_ROOT_SECOND] if fresh else old[SECOND_PRODUCT] * terms[TERM_ROOT_SECOND]
        point = two * terms[TERM_POINT]
        unit = point if fresh else old[UNIT_AT]
        new[FIRST_PRODUCT] = one
        new[SECOND_PRODUCT] = two
        new[DECAY_PRODUCT] = decay if fresh else old[DECAY_PRODUCT] * decay
        new[UNIT_AT] = unit
        new[EPS_AT] = terms[TERM_EPS]
        weight = terms[TERM_WEIGHT] * one
        off = point / unit - 1.0 if unit != 0.0 else 0.0  # 0: moves have no second moment in them
        for k in range(ORDERS):
            moment = 0.0 if fresh else old[MOMENTS_AT + k] * decay
            new[MOMENTS_AT + k] = moment + weight
            weight *= off
        sums_write(new, sums[s])
        sums[s, SUM_EPS] = np.float32(terms[TERM_EPS])
        sums[s, SUM_FIRST] = np.float32(one)
        sums[s, SUM_SECOND] = np.float32(two * two)
        sums[s, SUM_DECAY] = np.float32(new[DECAY_PRODUCT])
        ends[s] = 0
        if not fresh and old[EPS_AT] != terms[TERM_EPS]:
            sums[s, SUM_IS_SERIES] = 0.0
            new[EPS_AT] = math.nan  # another eps in between: replayed from now on
        if s == first:
            if is_still or one < (SUM_ENDS_AT * two if unit != 0.0 else SUM_ENDS_AT):
                ends[s] = step
                first += 1
            elif step - s >= WINDOW:
                ends[s] = -1
                first += 1
    ends[step] = 0
    return first
