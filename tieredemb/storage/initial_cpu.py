"""CPU twin of the initial values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tieredemb.kernels.constants import NORMAL
from tieredemb.kernels.cpu import bits_float, float_bits, fma, inline, is_direct, row_store, row_width, store
from tieredemb.kernels.parallel_cpu import even_bounds, over_ranges, parallel_for
from tieredemb.kernels.philox_cpu import philox
from tieredemb.kernels.rounding_cpu import table_of

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

VALUES_GRAIN = 4096  # generated values a thread is worth
F = np.float32


def generate(
    keys: Array,
    rows: Array,
    weight: Array,
    state: Array,
    state_width: int,
    state_word: np.uint32,
    seed: Array,
    ids: Array,
    tables: tuple[Array, Array, Array, Array, Array],
) -> None:
    bounds = even_bounds(len(keys), max(1, VALUES_GRAIN // max(1, weight.shape[1])))
    parallel_for(rows_generate, bounds, keys, rows, weight, state, state_width, state_word, seed, ids, *tables)


@inline
def log_of(x):
    """Natural logarithm of a normal positive float32 to 2 ulp (Cephes logf), the same bits on every device."""
    bits = float_bits(x)
    exponent = np.int32(bits >> np.uint32(23)) - np.int32(126)
    m = bits_float((bits & np.uint32(0x007FFFFF)) | np.uint32(0x3F000000))
    if m < F(0.70710677):
        exponent -= np.int32(1)
        m = m + m
    m = m - F(1.0)
    z = m * m
    y = F(7.0376836292e-2)
    y = fma(y, m, F(-1.1514610310e-1))
    y = fma(y, m, F(1.1676998740e-1))
    y = fma(y, m, F(-1.2420140846e-1))
    y = fma(y, m, F(1.4249322787e-1))
    y = fma(y, m, F(-1.6668057665e-1))
    y = fma(y, m, F(2.0000714765e-1))
    y = fma(y, m, F(-2.4999993993e-1))
    y = fma(y, m, F(3.3333331174e-1))
    y = (y * m) * z
    e = F(exponent)
    y = fma(e, F(-2.12194440e-4), y)
    y = fma(F(-0.5), z, y)
    return fma(e, F(0.693359375), m + y)


@inline
def normal_of(bits):
    """Standard normal value of 32 random bits: the sign from the highest, a tail probability from the others."""
    tail = fma(F(bits & np.uint32(0x7FFFFFFF)), F(2.0**-32), F(2.0**-33))  # (0, 0.5]
    q = F(0.5) - tail
    if q <= F(0.425):
        r = fma(-q, q, F(0.180625))
        n = fma(fma(fma(F(5.9109374720e1), r, F(1.5929113202e2)), r, F(5.0434271938e1)), r, F(3.3871327179))
        d = fma(fma(fma(F(6.7187563600e1), r, F(7.8757757664e1)), r, F(1.7895169469e1)), r, F(1.0))
        value = (q * n) / d
    else:
        r = np.sqrt(-log_of(tail))
        if r <= F(5.0):
            r = r - F(1.6)
            n = fma(fma(fma(F(1.7023821103e-1), r, F(1.3067284816)), r, F(2.7568153900)), r, F(1.4234372777))
            d = fma(fma(F(1.2021132975e-1), r, F(7.3700164250e-1)), r, F(1.0))
        else:
            r = r - F(5.0)
            n = fma(fma(fma(F(1.7337203997e-2), r, F(4.2868294337e-1)), r, F(3.0812263860)), r, F(6.6579051150))
            d = fma(fma(F(1.2258202635e-2), r, F(2.4197894225e-1)), r, F(1.0))
        value = n / d
    return -value if bits >> np.uint32(31) else value


@inline
def value_of(bits, kind, a, b):
    """The initial value that 32 random bits stand for: normal (mean a, deviation b), or uniform in [a, b)."""
    if kind == NORMAL:
        return fma(normal_of(bits), b, a)
    return fma(F(bits >> np.uint32(8)) * F(2.0**-24), b - a, a)


@inline
def row_generate(weight, row, width, local, number, seed, kind, a, b):
    """The values of id `local` (uint64) of a table, four of a Philox block at a time."""
    low = np.uint32(local & np.uint64(0xFFFFFFFF))
    high = np.uint32(local >> np.uint64(32))
    for j in range(0, width, 4):
        r0, r1, r2, r3 = philox(low, high, np.uint32(j // 4), number, seed[0], seed[1])
        store(weight, row, j, value_of(r0, kind, a, b))
        if j + 1 < width:
            store(weight, row, j + 1, value_of(r1, kind, a, b))
        if j + 2 < width:
            store(weight, row, j + 2, value_of(r2, kind, a, b))
        if j + 3 < width:
            store(weight, row, j + 3, value_of(r3, kind, a, b))


@over_ranges
def rows_generate(
    lo, hi, keys, rows, weight, state, state_width, state_word, seed, ids, start, number, kind, params, padding_key
):
    """`ids`: int64 (T, 2), the id of each table's first row, and the step from row to row."""
    width = row_width(weight)
    values = np.zeros((1, 0 if is_direct(weight) else width), np.float32)
    for i in range(lo, hi):
        key = keys[i]
        row = np.int64(rows[i])
        for j in range(state_width):
            state[row, j] = state_word
        if width == 0:
            continue
        table = table_of(start, key)
        if key == padding_key[table]:
            if is_direct(weight):
                for j in range(width):
                    store(weight, row, j, F(0.0))
            else:
                values[:] = F(0.0)
                row_store(weight, row, values)
            continue
        local = np.uint64(ids[table, 0] + ids[table, 1] * (key - start[table]))
        a = params[table, 0]
        b = params[table, 1]
        if is_direct(weight):
            row_generate(weight, row, width, local, number[table], seed, kind[table], a, b)
        else:
            row_generate(values, np.int64(0), width, local, number[table], seed, kind[table], a, b)
            row_store(weight, row, values)
