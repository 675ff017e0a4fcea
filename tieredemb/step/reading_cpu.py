"""The kernels of a lookup without gradient on the CPU: rows are found and pooled in one pass, and noted as used."""

from __future__ import annotations

import functools

import numpy as np

from tieredemb.cache.plan_cpu import uses_note
from tieredemb.kernels.cpu import borrowed, inline, item, jit, keep, prefetch, put, row_at, row_width
from tieredemb.kernels.parallel_cpu import over_ranges
from tieredemb.lookup.bag_pool_cpu import bag_pool, block_of, row_ask
from tieredemb.lookup.embedding_bag_cpu import NO_ARGMAX

AHEAD = 16  # ids that are searched early
NOT_READ = -1  # where a row begins that is not read, as padding


@inline
def edge(offsets, bag, count):
    """Where a bag begins, of `count` ids: an end of the last one that is missing is that of the ids."""
    return item(offsets, bag) if bag < offsets.shape[0] else count


@inline
def bags_are_right(ids, offsets, exact, blocks, batch, start, size, padding, keys):
    """Whether offsets rise from 0 to at most the number of ids, or to that where `exact`, and whether the ids in the
    bags of features are rows of their tables, of `size` int64 (F,). Each id is read once, and its key written to
    `keys`, int64 (N,), −1 for padding: another thread may be writing to the ids."""
    given, count = offsets.shape[0], ids.shape[0]
    right = given == 0 or (item(offsets, 0) == 0 and item(offsets, given - 1) <= count)
    for k in range(1, given):
        right &= item(offsets, k - 1) <= item(offsets, k)
    if exact:
        right &= item(offsets, given - 1) == count
    if right:
        outside = 0
        for f in range(blocks.shape[0]):
            rows, first_key, skipped = np.uint64(item(size, f)), item(start, f), item(padding, f)
            first, stop = edge(offsets, blocks[f] * batch, count), edge(offsets, (blocks[f] + 1) * batch, count)
            for i in range(first, stop):
                row = item(ids, i)
                outside += np.uint64(row) >= rows
                put(keys, i, np.int64(-1) if row == skipped else row + first_key)
        right = outside == 0
    return right


@jit
def all_are_right(ids, offsets, exact, blocks, batch, start, size, padding, keys):
    """See `bags_are_right`."""
    return bags_are_right(ids, offsets, exact, blocks, batch, start, size, padding, keys)


@inline
def reading_is_wrong(
    ids, offsets, exact, blocks, batch, start, size, padding, mode, column, weights,
    slot_plus_one, hot, cold,
    last_batch, score, state, number, now, kind, unit, gains, remember, missed, counted,
    keys, homes, out,
):  # fmt: skip
    wrong = not bags_are_right(ids, offsets, exact, blocks, batch, start, size, padding, keys)
    counted[:] = -1 if wrong else 0
    return wrong


@inline
def rows_find(keys, first, stop, slot_plus_one, rows, hot_at, cold_at, homes):
    """Finds where rows keys[first:stop] begin, in elements from the first of `rows`, and asks for them. Rows lie in two
    arrays. Which one is chance, and a branch that nobody foresees costs more than a row of 32 bytes."""
    columns = rows.shape[1]
    for i in range(first, stop):
        prefetch(slot_plus_one, item(keys, min(i + AHEAD, keys.shape[0] - 1)))
        key = item(keys, i)
        slot = np.int64(item(slot_plus_one, max(key, 0))) - 1
        is_cold = slot >> 63  # all bits, or none
        home = ((slot & ~is_cold) | (key & is_cold)) * columns + ((hot_at & ~is_cold) | (cold_at & is_cold))
        if key < 0:
            home = np.int64(NOT_READ)
        else:
            row_ask(rows, home)
        put(homes, i, home)


@functools.partial(over_ranges, unless=reading_is_wrong)
def bags_read(
    lo, hi, ids, offsets, exact, blocks, batch, start, size, padding, mode, column, weights,
    slot_plus_one, hot, cold,
    last_batch, score, state, number, now, kind, unit, gains, remember, missed, counted,
    keys, homes, out,
):  # fmt: skip
    """All bags of samples lo … hi − 1; a range that begins at −1 notes the uses of all rows before. Moves
    D · itemsize + 20 bytes an occurrence, most of them at random, and as many a bag in order. Nothing is done, and
    `counted[0]` is −1, where the bags are not right. `keys`, `homes`: int64 (N,), scratch · for the others see
    `KeySpace`, `Readable` and `Uses`."""
    sums = np.empty(row_width(hot), np.float32)
    acc = borrowed(sums)
    count = ids.shape[0]
    if lo < 0:
        uses = last_batch, score, state, number, now, kind, unit, gains, remember, missed, counted
        for f in range(mode.shape[0]):
            first, stop = edge(offsets, blocks[f] * batch, count), edge(offsets, (blocks[f] + 1) * batch, count)
            uses_note(keys, first, stop, slot_plus_one, uses)
        lo = 0
    distance = (cold.ctypes.data - hot.ctypes.data) // hot.itemsize
    rows, hot_at, cold_at = row_at(hot, min(distance, 0)), max(-distance, 0), max(distance, 0)
    block = block_of(hot, count, batch)
    for ahead in range(lo, hi + block, block):
        for f in range(mode.shape[0]):
            bag = blocks[f] * batch
            first, stop = edge(offsets, bag + min(ahead, hi), count), edge(offsets, bag + min(ahead + block, hi), count)
            rows_find(keys, first, stop, slot_plus_one, rows, hot_at, cold_at, homes)
        for b in range(max(ahead - block, lo), min(ahead, hi)):
            for f in range(mode.shape[0]):
                bag, to = blocks[f] * batch + b, b * out.shape[1] + column[f]
                first, stop = edge(offsets, bag, count), edge(offsets, bag + 1, count)
                bag_pool(out, to, rows, homes, 1, first, stop, weights, mode[f], acc, NO_ARGMAX)
    keep(sums)
