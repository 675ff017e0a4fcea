"""Plans a batch on the CPU: finds cached rows, missed rows and unique keys.

Two passes. The map finds every key; `number` then numbers the unique keys in order of first occurrence, locks the
resident ones (stamping `last_batch` before any victim can be chosen), and claims each missed key once in a table local
to the plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tieredemb.cache.policy_cpu import raised
from tieredemb.kernels.constants import DROPPED
from tieredemb.kernels.cpu import inline, item, jit, prefetch, put
from tieredemb.kernels.parallel_cpu import even_bounds, over_ranges, parallel_for

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

RESOLVE_GRAIN = 8192
UNIQUE, MISSED = 2, 3  # of `Numbering.counted`
AHEAD = 16  # iterations whose cache lines are requested early


@dataclass(frozen=True)
class Numbering:
    """`inverse`: int32 (N,), position of each occurrence's key among the unique ones, −1 for padding · `unique_keys`:
    int64 (U,) · `unique_slots`: int32 (U,), −1 for missed keys · `missed`: int32 (M,), positions of the missed keys
    among the unique ones · `counted`: int64 (K, 4), of each part of the batch the occurrences without padding, those
    whose row was resident, and how many unique and missed keys it has."""

    inverse: Array
    unique_keys: Array
    unique_slots: Array
    missed: Array
    counted: Array


def number(keys: Array, slots: Array, starts: Array, last_batch: Array, unique_of_slot: Array, batch: int) -> Numbering:
    """Numbers the unique keys of `keys` (int64 (N,), negative for padding), which the map has found in `slots` (int32
    (N,)), and locks the resident ones by the stamp of `batch`. `starts`: where each part of the batch begins, and where
    they end, int64 (K + 1,); a key is in one part alone."""
    inverse = np.empty(len(keys), np.int32)
    unique_keys = np.empty(len(keys), np.int64)
    unique_slots = np.empty(len(keys), np.int32)
    missed = np.empty(len(keys), np.int32)
    counted = np.empty((len(starts) - 1, MISSED + 1), np.int64)
    absent = int(np.count_nonzero(slots < 0))
    cells = 1 << max(1, (2 * absent - 1).bit_length())  # of the claim table, at most half of which are used
    claim_key, claim_unique = np.zeros(cells, np.int64), np.empty(cells, np.int32)  # key + 1; 0 is free
    keys_number(
        *(keys, slots, starts, last_batch, unique_of_slot, batch, claim_key, claim_unique),
        *(inverse, unique_keys, unique_slots, missed, counted),
    )
    unique, misses = counted[:, UNIQUE].sum(), counted[:, MISSED].sum()
    # copies, because a ticket may live long and the buffers are as long as the batch
    return Numbering(
        inverse,
        unique_keys[:unique].copy(),
        unique_slots[:unique].copy(),
        missed[:misses].copy(),
        counted,
    )


def resolve(inverse: Array, unique_slots: Array) -> Array:
    """Home of every occurrence, int32 (N,): its key's slot, or `DROPPED`."""
    homes = np.empty(len(inverse), np.int32)
    parallel_for(homes_resolve, even_bounds(len(inverse), RESOLVE_GRAIN), inverse, unique_slots, homes)
    return homes


def count_arrivals(
    slots: Array, untouched: Array, left: Array, dirty: Array, rows: Array, place: Array, capacity: int
) -> Array:
    """What the arrival of missed rows has made, int64 (K, 4), of each part of a batch: rows that were read and not
    generated; that took the place of others, and of dirty ones; and that found none below `capacity`. `slots`: int32
    (M,), that rows have arrived in, and `untouched`: bool (M,), which were generated · `left`, `dirty`: int32 and bool
    (V,), the slots that others have left, and which of these were dirty · `rows`: how many each part has, int64 (K,) ·
    `place`: int32 (C,), scratch."""
    counted = np.zeros((len(rows), 4), np.int64)
    arrivals_count(slots, untouched, left, dirty, rows, place, capacity, counted)
    return counted


@jit
def arrivals_count(slots, untouched, left, dirty, rows, place, capacity, counted):
    n = left.shape[0]
    for v in range(n):
        place[left[v]] = v
    i = 0
    for part in range(rows.shape[0]):
        for _ in range(rows[part]):
            s = slots[i]
            v = place[s]
            counted[part, 0] += not untouched[i]
            if v >= 0 and v < n and left[v] == s:
                counted[part, 1] += 1
                counted[part, 2] += dirty[v]
            counted[part, 3] += s >= capacity
            i += 1


@inline
def counts_note(counted, part, lookups, hits, unique, misses):
    """What was counted until the end of a part."""
    counted[part, 0] = lookups
    counted[part, 1] = hits
    counted[part, 2] = unique
    counted[part, 3] = misses


@inline
def claim_cell(key, cells):
    """Where a missed key is looked for first in the table of claims, whose size is a power of two."""
    return np.int64((np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)) & (cells - 1)


# what `uses_note` counts: how many occurrences are read, and how many of rows in slots; how many rows in slots are, and
# how many others, and how many of these were never written, which are left as they are
USED = LOOKUPS, HITS, HOT_ROWS, COLD_ROWS, UNWRITTEN = range(5)
NOTED = 256  # occurrences whose rows are searched before any of them is noted
SEARCHED = 48  # occurrences that are searched early: most wait for memory, as nothing has read the index before


@inline
def uses_note(keys, first, stop, slot_plus_one, uses):
    """Notes the uses of rows keys[first:stop], negative for padding; behind them `SEARCHED` longs of any value must be
    readable, as the memory that is prefetched need not exist. Which rows have slots, and which were noted before, is
    random: the loop over occurrences does not branch on it. It writes nothing that it reads, as repeated rows would
    wait for that. `uses`: see `Readable`, and `missed`, int64 (N + 1,), which receives the keys without a slot, in
    order of first occurrence, with scratch behind these, and `counted`, int64 (5,), which receives `USED`.
    """
    last_batch, score, state, number, now, kind, unit, gains, remember, missed, counted = uses
    stamp, seen = np.int32(number), np.int32(-1 - (number & 0x7FFFFFFF))  # of rows in slots, and of others
    words, end = state.shape[1], missed.shape[0] - 1
    padded, hits, hot_rows, misses = np.int64(0), np.int64(0), np.int64(0), counted[COLD_ROWS]
    for block in range(first, stop, NOTED):
        hot, cold = end, misses  # where slots are put, one before the other, and keys, one behind the other
        for i in range(block, min(block + NOTED, stop)):
            prefetch(slot_plus_one, item(keys, i + SEARCHED))
            key = item(keys, i)
            if key < 0:
                padded += 1
                continue
            place = item(slot_plus_one, key)
            is_hit = np.int64(place > 0)
            slot = max(place - 1, 0)
            put(missed, hot, slot)
            hot -= is_hit & (item(last_batch, slot) != stamp)
            put(missed, cold, key)
            cold += np.int64(place != seen) & (1 - is_hit)
            hits += is_hit
        for u in range(hot + 1, end + 1):
            slot = item(missed, u)
            if item(last_batch, slot) != stamp:
                put(last_batch, slot, stamp)
                put(score, slot, raised(np.int64(item(score, slot)), now, kind, unit, gains))
                hot_rows += 1
        before = misses
        for m in range(before, cold):
            key = item(missed, m)
            if item(slot_plus_one, key) != seen:
                put(slot_plus_one, key, seen)
                prefetch(state, (key + 1) * words - 1)
                put(missed, misses, key)
                misses += 1
        for m in range(before, misses):
            word = (item(missed, m) + 1) * words - 1
            old = np.int64(item(state, word))
            if old == 0:
                counted[UNWRITTEN] += 1
            elif remember:
                put(state, word, raised(old, now, kind, unit, gains))
    counted[LOOKUPS] += stop - first - padded
    counted[HITS] += hits
    counted[HOT_ROWS] += hot_rows
    counted[COLD_ROWS] = misses


@jit
def keys_number(
    keys, slots, starts, last_batch, unique_of_slot, batch, claim_key, claim_unique,
    inverse, unique_keys, unique_slots, missed, counted,
):  # fmt: skip
    """Numbers unique keys by first occurrence; see `number`. Arrays that the kernel made itself took it a fifth of a
    second longer to compile."""
    n = keys.shape[0]
    stamp = np.int32(batch)  # which wraps
    cells = claim_key.shape[0]
    unique = 0
    misses = 0
    lookups = 0
    hits = 0
    part = 0
    for i in range(n):
        while i >= starts[part + 1]:  # it has ended, and the next one begins
            counts_note(counted, part, lookups, hits, unique, misses)
            part += 1
        if i + AHEAD < n:
            ahead = slots[i + AHEAD]
            if ahead >= 0:
                prefetch(last_batch, ahead)
                prefetch(unique_of_slot, ahead)
            else:
                cell = claim_cell(keys[i + AHEAD], cells)
                prefetch(claim_key, cell)
                prefetch(claim_unique, cell)
        key = keys[i]
        if key < 0:
            inverse[i] = -1
            continue
        lookups += 1
        s = slots[i]
        if s >= 0:
            hits += 1
            if last_batch[s] != stamp:
                last_batch[s] = stamp
                unique_of_slot[s] = unique
                unique_keys[unique] = key
                unique_slots[unique] = s
                unique += 1
            inverse[i] = unique_of_slot[s]
            continue
        cell = claim_cell(key, cells)
        while claim_key[cell] != 0 and claim_key[cell] != key + 1:
            cell = (cell + 1) & (cells - 1)
        if claim_key[cell] == 0:
            claim_key[cell] = key + 1
            claim_unique[cell] = unique
            unique_keys[unique] = key
            unique_slots[unique] = -1
            missed[misses] = unique
            misses += 1
            unique += 1
        inverse[i] = claim_unique[cell]
    for rest in range(part, counted.shape[0]):
        counts_note(counted, rest, lookups, hits, unique, misses)
    for rest in range(counted.shape[0] - 1, 0, -1):  # minus those of the parts before
        for kind in range(counted.shape[1]):
            counted[rest, kind] -= counted[rest - 1, kind]


@over_ranges
def homes_resolve(lo, hi, inverse, unique_slots, homes):
    for i in range(lo, hi):
        u = inverse[i]
        homes[i] = unique_slots[u] if u >= 0 else DROPPED
