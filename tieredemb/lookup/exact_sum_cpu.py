# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, no-check-untyped-defs
"""CPU twin of exact sums."""

from __future__ import annotations

import math

import numpy as np

from tieredemb.kernels.constants import EXACT_DIGITS, EXACT_INFINITIES, EXACT_NANS
from tieredemb.kernels.cpu import jit

LOW = np.int64(0xFFFFFFFF)


def add(sums, values, of):
    """See `exact_sum.add_exactly`."""
    values_add(values.numpy(), values.numpy().view(np.int64), of.numpy(), sums.numpy())


def round_to(sums, found):
    """See `exact_sum.rounded`."""
    sums_round(sums.numpy(), found.numpy())


@jit
def values_add(values, bits, of, sums):
    """Moves 16 bytes a number. `bits`: of the values, int64 (N,)."""
    for i in range(values.shape[0]):
        if values[i] == 0.0:
            continue
        digits = sums[of[i]]
        exponent = bits[i] >> 52
        if exponent == 0x7FF:
            digits[EXACT_NANS if values[i] != values[i] else EXACT_INFINITIES] += 1
            continue
        fraction = bits[i] & ((np.int64(1) << 52) - 1)
        if exponent > 0:
            fraction |= np.int64(1) << 52
            exponent -= 1
        first, shift = exponent >> 5, exponent & 31  # in units of 2^-1074
        low, high = (fraction & LOW) << shift, (fraction >> 32) << shift
        digits[first] += low & LOW
        digits[first + 1] += (low >> 32) + (high & LOW)
        digits[first + 2] += high >> 32


@jit
def sums_round(sums, found):
    for s in range(sums.shape[0]):
        digits = sums[s]
        total = 0.0
        carry = np.int64(0)
        for k in range(EXACT_DIGITS):
            digit = digits[k] + carry
            carry = digit >> 32
            if digit & LOW != 0:
                total += math.ldexp(np.float64(digit & LOW), 32 * k - 1074)
        if digits[EXACT_INFINITIES] > 0 or carry > 0:
            total = math.inf
        found[s] = math.nan if digits[EXACT_NANS] > 0 else total
