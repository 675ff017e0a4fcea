"""The kernels of a lookup without gradient on the CPU: rows are found and pooled in one pass, and scored."""

from __future__ import annotations

import functools

import numpy as np

from tieredemb.cache.plan_cpu import SEARCHED, USED, uses_note
from tieredemb.kernels.cpu import borrowed, inline, item, jit, keep, prefetch, put, row_at, row_width
from tieredemb.kernels.native import longs_at
from tieredemb.kernels.parallel_cpu import over_ranges
from tieredemb.lookup.bag_pool_cpu import bag_pool, block_of, row_lines_prefetch
from tieredemb.lookup.bags import BLOCK, COLUMN, FIRST, MODE, PADDING, SIZE
from tieredemb.lookup.embedding_bag_cpu import NO_ARGMAX

AHEAD = 16  # ids that are searched early, at most `SEARCHED`
NOT_READ = -1  # the begin of a row that is not read, as of padding
COUNTED = len(USED)


@inline
def scratch_longs(count, given):
    """The length of `scratch`, with the keys that `uses_note` may read beyond the end."""
    return COUNTED + 1 + 3 * count + given + 1 + SEARCHED


@inline
def parts_of(scratch, count, given):
    """The parts of `scratch`: counters, int64 (5,), and missed keys, int64 (N + 1,), see `uses_note`; the key of each
    id, int64 (N,), −1 for padding; where its row begins, int64 (N,); and the edges of the bags, int64 (given + 1,): the
    given ones, and the number of ids."""
    counted = scratch.ctypes.data
    missed = counted + 8 * COUNTED
    keys = missed + 8 * (count + 1)
    homes = keys + 8 * count
    edges = homes + 8 * count
    return (
        longs_at(counted, COUNTED),
        longs_at(missed, count + 1),
        longs_at(keys, count),
        longs_at(homes, count),
        longs_at(edges, given + 1),
    )


@inline
def bags_are_right(ids_at, count, offsets_at, given, length, exact, features, batch, skips, scratch):
    """Whether offsets rise from 0 to at most the number of ids, or if `exact` to just that, and whether the ids in the
    bags of features are rows of their tables. Each id and offset is read once, and keys and edges are written to
    `scratch`: another thread may be writing to the tensors. `ids_at`: the address of ids, int64 (N,) · `offsets_at`:
    that of offsets, int64 (given,), of bags that have not all the same `length` · `features`: see `KeySpace.packed` ·
    `skips`: whether padding is dropped."""
    ids, offsets = longs_at(ids_at, count), longs_at(offsets_at, given)
    _, _, keys, _, edges = parts_of(scratch, count, given)
    if length < 0:
        for k in range(given):
            put(edges, k, item(offsets, k))
    else:
        for k in range(given):
            put(edges, k, k * length)
    put(edges, given, count)
    right = given == 0 or (item(edges, 0) == 0 and item(edges, given - 1) <= count)
    for k in range(1, given):
        right &= item(edges, k - 1) <= item(edges, k)
    if exact:
        right &= item(edges, given - 1) == count
    if right:
        outside, number = 0, features.shape[1]
        for f in range(number):
            rows, first_key = np.uint64(item(features, SIZE * number + f)), item(features, FIRST * number + f)
            skipped = item(features, PADDING * number + f) if skips else np.int64(-1)
            bag = item(features, BLOCK * number + f) * batch
            for i in range(item(edges, bag), item(edges, bag + batch)):
                row = item(ids, i)
                outside += np.uint64(row) >= rows
                put(keys, i, np.int64(-1) if row == skipped else row + first_key)
        right = outside == 0
    return right


@jit
def all_are_right(ids_at, count, offsets_at, given, length, exact, features, batch, skips, scratch):
    """See `bags_are_right`."""
    return bags_are_right(ids_at, count, offsets_at, given, length, exact, features, batch, skips, scratch)


@inline
def reading_is_wrong(
    ids_at, count, offsets_at, given, length, exact, features, batch, skips, weights,
    slot_plus_one, hot, cold, last_batch, score, state, number, now, kind, unit, gains, remember,
    scratch, out,
):  # fmt: skip
    wrong = not bags_are_right(ids_at, count, offsets_at, given, length, exact, features, batch, skips, scratch)
    counted = parts_of(scratch, count, given)[0]
    for k in range(COUNTED):
        put(counted, k, -1 if wrong else 0)
    return wrong


@inline
def rows_find(keys, first, stop, slot_plus_one, rows, hot_at, cold_at, homes):
    """Finds where rows keys[first:stop] begin, in elements from the first of `rows`, and prefetches them. Rows are in
    two arrays, which one is random, and a mispredicted branch would cost more than a row of 32 bytes."""
    columns = rows.shape[1]
    for i in range(first, stop):
        prefetch(slot_plus_one, item(keys, i + AHEAD))
        key = item(keys, i)
        slot = np.int64(item(slot_plus_one, max(key, 0))) - 1
        is_cold = slot >> 63  # all bits, or none
        home = ((slot & ~is_cold) | (key & is_cold)) * columns + ((hot_at & ~is_cold) | (cold_at & is_cold))
        if key < 0:
            home = np.int64(NOT_READ)
        else:
            row_lines_prefetch(rows, home)
        put(homes, i, home)


@functools.partial(over_ranges, unless=reading_is_wrong)
def bags_read(
    lo, hi, ids_at, count, offsets_at, given, length, exact, features, batch, skips, weights,
    slot_plus_one, hot, cold, last_batch, score, state, number, now, kind, unit, gains, remember,
    scratch, out,
):  # fmt: skip
    """All bags of samples lo … hi − 1; a range that begins at −1 notes the uses of all rows before. Moves
    D · itemsize + 20 bytes an occurrence, most of them at random, and as many a bag in order. Nothing is done, and the
    first number of `scratch` is −1, where the bags are not right. `scratch`: int64 (`scratch_longs`,) · for the others
    see `bags_are_right` and `Readable`."""
    sums = np.empty(row_width(hot), np.float32)
    acc = borrowed(sums)
    counted, missed, keys, homes, edges = parts_of(scratch, count, given)
    every = features.shape[1]
    if lo < 0:
        uses = last_batch, score, state, number, now, kind, unit, gains, remember, missed, counted
        for f in range(every):
            bag = item(features, BLOCK * every + f) * batch
            uses_note(keys, item(edges, bag), item(edges, bag + batch), slot_plus_one, uses)
        lo = 0
    distance = (cold.ctypes.data - hot.ctypes.data) // hot.itemsize
    rows, hot_at, cold_at = row_at(hot, min(distance, 0)), max(-distance, 0), max(distance, 0)
    block = block_of(hot, count, batch)
    for ahead in range(lo, hi + block, block):
        for f in range(every):
            bag = item(features, BLOCK * every + f) * batch
            first, stop = item(edges, bag + min(ahead, hi)), item(edges, bag + min(ahead + block, hi))
            rows_find(keys, first, stop, slot_plus_one, rows, hot_at, cold_at, homes)
        for b in range(max(ahead - block, lo), min(ahead, hi)):
            for f in range(every):
                bag, mode = item(features, BLOCK * every + f) * batch + b, item(features, MODE * every + f)
                first, stop = item(edges, bag), item(edges, bag + 1)
                to = b * out.shape[1] + item(features, COLUMN * every + f)
                bag_pool(out, to, rows, homes, 1, first, stop, weights, mode, acc, NO_ARGMAX)
    keep(sums)
