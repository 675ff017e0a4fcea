"""The kernels of a lookup without gradient on the CPU: rows are found and pooled in one pass."""

from __future__ import annotations

import numpy as np

from tieredemb.cache.plan_cpu import COLD, NOT_READ
from tieredemb.kernels.constants import MAX, MEAN
from tieredemb.kernels.cpu import (
    added,
    borrowed,
    fma,
    inline,
    is_direct,
    is_float,
    jit,
    keep,
    load,
    prefetch,
    row_width,
    store,
    weight_copy,
)
from tieredemb.kernels.lanes_cpu import lanes_add, lanes_put, zeros
from tieredemb.kernels.parallel_cpu import over_ranges
from tieredemb.lookup.embedding_bag_cpu import LINE_BYTES

SAMPLES = 32  # whose ids are searched before their rows are pooled: what was found is in the core's cache then
AHEAD = 16  # ids that are searched early


@jit
def ids_are_inside(ids, edges, blocks, batch, size):
    """Whether all ids in the bags of features are rows of their tables. `size`: int64 (F,)."""
    outside = 0
    for f in range(blocks.shape[0]):
        rows = np.uint64(size[f])
        for i in range(edges[blocks[f] * batch], edges[(blocks[f] + 1) * batch]):
            outside += np.uint64(ids[i]) >= rows
    return outside == 0


# Rows lie in two arrays. Which one is chance, and a branch that nobody foresees costs more than a row of 32 bytes: so
# weights that are direct are read at an offset from the first array, wherever that leads.


@inline
def offset_of(home, apart, columns):
    """The first weight of a row, counted from that of slot 0. `apart`: that of cold row 0."""
    cold = home >> 63  # all bits of a row in cold storage, whose number is COLD − home
    return ((home ^ cold) + cold) * columns + (apart & cold)


@inline
def weight_at(hot, cold, home, offset, d):
    """Weight `d` of a row."""
    if is_direct(hot):
        return load(hot, 0, offset + d)
    return load(hot, home, d) if home >= 0 else load(cold, COLD - home, d)


@inline
def row_copy(out, b, to, hot, cold, home, offset, width):
    """Copies a row, bit by bit where the output has its dtype."""
    for d in range(width):
        if is_direct(hot):
            weight_copy(out, b, to + d, hot, 0, offset + d)
        elif home >= 0:
            weight_copy(out, b, to + d, hot, home, d)
        else:
            weight_copy(out, b, to + d, cold, COLD - home, d)


@inline
def row_ask(hot, offset, columns, line):
    """Asks for all lines of a row."""
    for d in range(0, columns, line):
        prefetch(hot, offset + d)


def _part_sum(count):
    """The device function that sums `count` columns of a bag's rows, from column `d` on."""
    zero = zeros(count)

    def part_sum(acc, d, homes, first, stop, hot, apart, columns):
        total = zero()
        for i in range(first, stop):
            if homes[i] != NOT_READ:
                total = lanes_add(total, hot, offset_of(homes[i], apart, columns) + d)
        lanes_put(acc, d, total)

    return inline(part_sum)


sum_64, sum_16, sum_8 = _part_sum(64), _part_sum(16), _part_sum(8)


@inline
def bag_sum(acc, homes, first, stop, hot, cold, apart, columns):
    """acc = the sum of a bag's rows."""
    d = 0
    if is_float(hot):
        while columns - d >= 64:
            sum_64(acc, d, homes, first, stop, hot, apart, columns)
            d += 64
        while columns - d >= 16:
            sum_16(acc, d, homes, first, stop, hot, apart, columns)
            d += 16
        if columns - d >= 8:
            sum_8(acc, d, homes, first, stop, hot, apart, columns)
            d += 8
    if d < acc.shape[0]:
        for rest in range(d, acc.shape[0]):
            acc[rest] = np.float32(0.0)
        for i in range(first, stop):
            if homes[i] != NOT_READ:
                offset = offset_of(homes[i], apart, columns)
                for rest in range(d, acc.shape[0]):
                    acc[rest] += weight_at(hot, cold, homes[i], offset, rest)


@inline
def bag_weighted(acc, homes, first, stop, weights, hot, cold, apart, columns):
    """acc = the sum of a bag's rows times their weights."""
    for d in range(acc.shape[0]):
        acc[d] = np.float32(0.0)
    for i in range(first, stop):
        if homes[i] != NOT_READ:
            offset = offset_of(homes[i], apart, columns)
            for d in range(acc.shape[0]):
                acc[d] = fma(weights[i], weight_at(hot, cold, homes[i], offset, d), acc[d])


@inline
def bag_maximum(acc, homes, first, stop, hot, cold, apart, columns):
    """acc = the maximum of a bag's rows, where a NaN wins over numbers."""
    for d in range(acc.shape[0]):
        acc[d] = np.float32(0.0)
    count = 0
    for i in range(first, stop):
        if homes[i] != NOT_READ:
            offset = offset_of(homes[i], apart, columns)
            for d in range(acc.shape[0]):
                value = weight_at(hot, cold, homes[i], offset, d)
                if count == 0 or value > acc[d] or (value != value and acc[d] == acc[d]):
                    acc[d] = value
            count += 1


@over_ranges
def bags_read(
    lo, hi, ids, edges, blocks, batch, start, size, padding, mode, column, weights,
    slot_plus_one, hot, cold, homes, out, counted,
):  # fmt: skip
    """All bags of samples lo … hi − 1. Moves D · itemsize + 12 bytes an occurrence, most of them at random, and as many
    a bag in order. `homes`: int64 (N,), takes where each row lies: comes as `NOT_READ` · `counted`: int64 (2,), to
    which the occurrences are added whose rows are in no slot, and those that are no rows of their table."""
    width = row_width(hot)
    columns = hot.shape[1]
    apart = (cold.ctypes.data - hot.ctypes.data) // hot.itemsize
    line = LINE_BYTES // hot.itemsize
    weighted = weights.shape[0] > 0
    sums = np.empty(width, np.float32)
    acc = borrowed(sums)
    count = 0
    bad = 0
    for block in range(lo, hi, SAMPLES):
        end = min(block + SAMPLES, hi)
        for f in range(mode.shape[0]):
            stop = edges[blocks[f] * batch + end]
            rows = np.uint64(size[f])
            for i in range(edges[blocks[f] * batch + block], stop):
                if i + AHEAD < stop:
                    prefetch(slot_plus_one, ids[i + AHEAD] + start[f])
                if np.uint64(ids[i]) >= rows:
                    bad += 1
                    continue
                if ids[i] == padding[f]:
                    homes[i] = NOT_READ
                    continue
                key = ids[i] + start[f]
                slot = np.int64(slot_plus_one[key]) - 1
                is_cold = slot >> 63  # all bits, or none
                home = (slot & ~is_cold) | ((COLD - key) & is_cold)
                row_ask(hot, offset_of(home, apart, columns), columns, line)
                homes[i] = home
                count -= is_cold
        for b in range(block, end):
            for f in range(mode.shape[0]):
                bag = blocks[f] * batch + b
                first, stop, to = edges[bag], edges[bag + 1], column[f]
                if stop - first == 1 and not weighted and mode[f] != MAX and homes[first] != NOT_READ:
                    row_copy(out, b, to, hot, cold, homes[first], offset_of(homes[first], apart, columns), width)
                    continue
                if mode[f] == MAX:
                    bag_maximum(acc, homes, first, stop, hot, cold, apart, columns)
                elif weighted:
                    bag_weighted(acc, homes, first, stop, weights, hot, cold, apart, columns)
                else:
                    bag_sum(acc, homes, first, stop, hot, cold, apart, columns)
                if mode[f] == MEAN and stop - first > 1:
                    read = 0
                    for i in range(first, stop):
                        read += homes[i] != NOT_READ
                    divisor = np.float32(max(read, 1))
                    for d in range(width):
                        acc[d] /= divisor
                for d in range(width):
                    store(out, b, to + d, acc[d])
    added(counted, 0, count)
    added(counted, 1, bad)
    keep(sums)
