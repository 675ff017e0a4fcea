"""Planning a batch on the CPU: what is resident, what is missed, which unique keys there are.

Two passes. The map finds every key; `number` then numbers the unique keys in order of first occurrence, locks the
resident ones (stamping `last_batch` before any victim can be chosen), and claims each missed key once in a table local
to the plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tieredemb.kernels.constants import DROPPED
from tieredemb.kernels.cpu import inline, jit, prefetch
from tieredemb.kernels.parallel_cpu import even_bounds, over_ranges, parallel_for

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

RESOLVE_GRAIN = 8192
COUNTED = ("lookups", "hits", "unique")  # of `Numbering.counted`, in this order, and the missed keys after them
UNIQUE, MISSED = 2, 3
# where a row lies that is looked up without a plan: in a slot, or at `COLD` − its key; or it is not read, as padding
NOT_READ, COLD = -1, -2
AHEAD = 16  # iterations whose cache lines are requested early


@dataclass(frozen=True)
class Numbering:
    """`inverse`: int32 (N,), position of each occurrence's key among the unique ones, −1 for padding · `unique_keys`:
    int64 (U,) · `unique_slots`: int32 (U,), −1 for missed keys · `missed`: int32 (M,), positions of the missed keys
    among the unique ones · `counted`: int64 (K, 4), of each part of the batch the occurrences without padding, those
    whose row was resident (`COUNTED`), and how many unique and missed keys it has."""

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
    counted = np.empty((len(starts) - 1, len(COUNTED) + 1), np.int64)
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


class Uses(NamedTuple):
    """Rows that were looked up where they lie. `slots`: int32 (U,), of those in slots · `keys`: int64 (M,), of the
    others, in order of first occurrence · `lookups`, `hits`: how many occurrences are read, and how many of rows in
    slots."""

    slots: Array
    keys: Array
    lookups: int
    hits: int


def note_uses(homes: Array, missed: int, last_batch: Array, stamp: np.int32) -> Uses:
    """What was looked up at `homes`, int64 (N,) (`NOT_READ`, `COLD`), of which so many occurrences `missed`; stamps
    the rows in slots."""
    slots, keys = np.empty(len(homes), np.int32), np.empty(missed + 1, np.int64)
    claims = np.zeros(1 << (2 * missed).bit_length(), np.int64)  # key + 1; at most half are used
    counted = np.empty(4, np.int64)
    uses_note(homes, last_batch, stamp, claims, slots, keys, counted)
    used, unique, lookups, hits = counted.tolist()
    return Uses(slots[:used], keys[:unique], lookups, hits)


@jit
def uses_note(homes, last_batch, stamp, claims, slots, keys, counted):
    """See `note_uses`. Which rows are where, and which came before, is chance: no branch of the first loop asks."""
    used = 0
    missed = 0
    lookups = 0
    hits = 0
    for i in range(homes.shape[0]):
        if i + AHEAD < homes.shape[0]:
            prefetch(last_batch, max(homes[i + AHEAD], 0))
        home = homes[i]
        is_hit = home >= 0
        slot = max(home, 0)
        before = last_batch[slot]
        slots[used] = slot
        used += is_hit & (before != stamp)
        last_batch[slot] = stamp if is_hit else before
        keys[missed] = COLD - home
        missed += home <= COLD
        lookups += home != NOT_READ
        hits += is_hit
    cells = claims.shape[0]
    unique = 0
    for i in range(missed):
        key = keys[i]
        cell = claim_cell(key, cells)
        while claims[cell] != 0 and claims[cell] != key + 1:
            cell = (cell + 1) & (cells - 1)
        keys[unique] = key
        unique += claims[cell] == 0
        claims[cell] = key + 1
    counted[0] = used
    counted[1] = unique
    counted[2] = lookups
    counted[3] = hits


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
    for rest in range(counted.shape[0] - 1, 0, -1):  # less those of the parts before
        for kind in range(counted.shape[1]):
            counted[rest, kind] -= counted[rest - 1, kind]


@over_ranges
def homes_resolve(lo, hi, inverse, unique_slots, homes):
    for i in range(lo, hi):
        u = inverse[i]
        homes[i] = unique_slots[u] if u >= 0 else DROPPED
