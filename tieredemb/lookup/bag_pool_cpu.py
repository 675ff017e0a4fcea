"""Pools one bag on the CPU: shared by the kernels of lookups, for rows in any home.

A row is found by its home: negative for padding, else where it begins, in units of `step` elements of `rows`.
Sums run in float32 in the order of the ids, in registers, and are rounded once, into the output's dtype.
"""

from __future__ import annotations

import numpy as np

from tieredemb.kernels.constants import MAX, MEAN
from tieredemb.kernels.cpu import (
    fma,
    inline,
    is_direct,
    item,
    line_elements,
    load,
    prefetch,
    put,
    row_at,
    store,
    weight_copy,
)
from tieredemb.kernels.rows_sum_cpu import rows_sum

BLOCK_BYTES = 16384  # of rows that are prefetched before the last block is pooled: two blocks fit a core's cache


@inline
def block_of(rows, ids, batch):
    """How many samples make a block, of a `batch` of so many ids."""
    return max(1, min(batch, BLOCK_BYTES * batch // max(1, ids * rows.shape[1] * rows.itemsize)))


@inline
def row_lines_prefetch(rows, first):
    """Prefetches all lines of the row that begins at `rows.ravel()[first]`."""
    for d in range(0, rows.shape[1], line_elements(rows)):
        prefetch(rows, first + d)


@inline
def row_prefetch(array, row):
    """Prefetches all lines of `array[row]` unless the row is negative (padding)."""
    if row >= 0:
        row_lines_prefetch(array, np.int64(row) * array.shape[1])


@inline
def bag_sum_decoded(acc, rows, homes, step, first, stop, weights, divisor):
    """acc = the sum of a bag's rows, as `rows_sum` has it, of rows that are not direct: each is decoded once."""
    for d in range(acc.shape[0]):
        acc[d] = np.float32(0.0)
    for i in range(first, stop):
        home = np.int64(item(homes, i))
        if home >= 0:
            row = row_at(rows, home * step)
            for d in range(acc.shape[0]):
                value = load(row, 0, d)
                acc[d] = fma(item(weights, i), value, acc[d]) if weights.shape[0] > 0 else acc[d] + value
    if divisor > 1:
        for d in range(acc.shape[0]):
            acc[d] /= np.float32(divisor)


@inline
def bag_maximum(acc, to, rows, homes, step, first, stop, winners):
    """acc = the maximum of a bag's rows: the first of equal values wins, a NaN wins over numbers."""
    for d in range(acc.shape[0]):
        acc[d] = np.float32(0.0)
    is_first = True
    for i in range(first, stop):
        home = np.int64(item(homes, i))
        if home >= 0:
            row = row_at(rows, home * step)
            for d in range(acc.shape[0]):
                value = load(row, 0, d)
                if is_first or value > acc[d] or (value != value and acc[d] == acc[d]):
                    acc[d] = value
                    if winners.shape[0] > 0:
                        put(winners, to + d, i)
            is_first = False


@inline
def bag_pool(out, to, rows, homes, step, first, stop, weights, mode, acc, winners):
    """Pools the occurrences first … stop − 1 to `out.ravel()[to]` and after it. `acc`: float32 (D,), scratch ·
    `winners`: see `embedding_bag_cpu.pool`."""
    if stop - first == 1 and weights.shape[0] == 0 and mode != MAX and item(homes, first) >= 0:
        row = row_at(rows, np.int64(item(homes, first)) * step)
        for d in range(acc.shape[0]):
            weight_copy(out, 0, to + d, row, 0, d)
        return
    divisor = np.int64(mode != MEAN)
    if mode == MEAN:
        for i in range(first, stop):
            divisor += np.int64(item(homes, i) >= 0)
    if mode != MAX and is_direct(rows):
        weighted = weights.shape[0] > 0
        rows_sum(out, to, rows, homes, step, first, stop, weights, weighted, divisor, acc.shape[0])
        return
    if mode == MAX:
        bag_maximum(acc, to, rows, homes, step, first, stop, winners)
    else:
        bag_sum_decoded(acc, rows, homes, step, first, stop, weights, divisor)
    for d in range(acc.shape[0]):
        store(out, 0, to + d, acc[d])
