"""CPU twin of rounding.cuh: how float32 values are rounded into rows, by what kernels are given as `rounding`. That is
`NEAREST`, or keys of rows, first keys, numbers and ids of tables, seed and steps (`Draws.on_host` in
lookup/rounding.py)."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, no-check-untyped-defs

from __future__ import annotations

import numpy as np
from numba.core import types

from tieredemb.kernels.constants import DRAWS
from tieredemb.kernels.cpu import bits_float, calling, constant, float_bits, inline, intrinsic, row_store
from tieredemb.kernels.philox_cpu import philox

F = np.float32
U = np.uint32
NEAREST = 0  # what kernels are given to round to nearest
OF_TABLES = -1  # a step that is not given: the one of the row's table


@inline
def stochastic_half(value, bits):
    """The bits of a float16, given 16 random ones."""
    word = float_bits(value)
    size = word & U(0x7FFFFFFF)
    if size >= U(0x7F800000):
        rounded = U(0x7E00) if size > U(0x7F800000) else U(0x7C00)
    elif size < U(0x38800000):  # in steps of 2^-24
        scaled = bits_float(size) * F(16777216.0)
        down = np.floor(scaled)
        rounded = U(down) + ((bits + U((scaled - down) * F(65536.0))) >> U(16))
    else:
        rounded = min((size - U(0x38000000) + (bits >> U(3))) >> U(13), U(0x7BFF))
    return np.uint16(rounded | ((word >> U(16)) & U(0x8000)))


@inline
def stochastic_bfloat16(value, bits):
    """The bits of a bfloat16, given 16 random ones."""
    word = float_bits(value)
    size = word & U(0x7FFFFFFF)
    if size >= U(0x7F800000):
        rounded = (size >> U(16)) | (U(0x40) if size > U(0x7F800000) else U(0))
    else:
        rounded = min((size + bits) >> U(16), U(0x7F7F))
    return np.int16(np.uint16(rounded | ((word >> U(16)) & U(0x8000))))


@inline
def table_of(start, key):
    """The last table that starts at or before `key`."""
    low, high = 0, start.shape[0]
    while low < high:
        middle = (low + high) // 2
        if start[middle] <= key:
            low = middle + 1
        else:
            high = middle
    return low - 1


@inline
def row_store_half(array, row, values, rounding, home, purpose, step):
    _row_store_drawn(array, row, values, rounding, home, purpose, step, stochastic_half)


@inline
def row_store_bfloat16(array, row, values, rounding, home, purpose, step):
    _row_store_drawn(array, row, values, rounding, home, purpose, step, stochastic_bfloat16)


@inline
def _row_store_drawn(array, row, values, rounding, home, purpose, step, rounded):
    keys, start, number, ids, seed, steps = rounding
    key = keys[home]
    table = table_of(start, key)
    at = steps[table] if step == OF_TABLES else step
    local = np.uint64(ids[table, 0] + ids[table, 1] * (key - start[table]))
    low = np.uint32(local & np.uint64(0xFFFFFFFF))
    rest = (np.uint32(purpose) << U(16)) | (np.uint32(local >> np.uint64(32)) << U(18))
    clock = np.uint32(np.uint64(at) & np.uint64(0xFFFFFFFF))
    for first in range(0, values.shape[1], DRAWS):
        r0, r1, r2, r3 = philox(low, clock, number[table], np.uint32(first // DRAWS) | rest, seed[0], seed[1])
        for k in range(min(DRAWS, values.shape[1] - first)):
            word = np.uint32(r0 if k < 2 else r1 if k < 4 else r2 if k < 6 else r3)
            bits = np.uint32(word >> U(16)) if k % 2 else np.uint32(word & U(0xFFFF))
            array[row, first + k] = rounded(values[0, first + k], bits)


@inline
def _row_store_nearest(array, row, values, rounding, home, purpose, step):
    row_store(array, row, values)


@intrinsic
def row_put(typingctx, array, row, values, rounding, home, purpose, step):
    """Rounds float32 `values` (1, D) into a row as a whole. `home`: its place among the keys of `rounding` · `purpose`:
    what for, one of `DRAW_…` · `step`: when, or `OF_TABLES`."""
    drawn = row_store_half if array.dtype == types.uint16 else row_store_bfloat16
    function = _row_store_nearest if isinstance(rounding, types.Integer) else drawn
    return calling(typingctx, function, array, row, values, rounding, home, purpose, step)


@intrinsic
def is_nearest(typingctx, rounding):
    """Whether kernels are to round to nearest: a constant."""
    return constant(isinstance(rounding, types.Integer))(rounding)
