"""CPU kernel of a cache over a trace, see `simulation`.

A plan scans all slots for its victims, which would be nine tenths of a run here. So a scan sets aside several times the
victims that it is made for, in a heap by rank, and notes the threshold below which it has set aside all rows. A row's
rank only rises while the row stays: what falls below the threshold after the scan has been filled or used since, and
joins the heap then. An entry whose slot has another rank by now is void.
"""

from __future__ import annotations

import numpy as np

from tieredemb.cache.policy_cpu import candidates_collect, lowest_select, raised
from tieredemb.kernels.constants import MAX_SCORE, MIN_SCORE
from tieredemb.kernels.cpu import inline, jit, prefetch

USED, BEYOND, ASIDE, HITS, FETCHED, EVICTED = range(6)  # of `counts`
AHEAD = 16  # uses whose cache lines are requested early
SCAN_SHARE = 8  # a scan sets aside an eighth of the slots,
SCAN_TIMES = 4  # or so many times the victims that are missing
# Of rows of equal score in a cache that forgets any may leave. Here they leave in an order of the slots that is drawn
# anew every so many batches: with 7 hit rates are those of the cache's own choice within 0.001 (2 million accesses,
# Zipf 1.05, 0.5 % to 20 % of the rows); an order for each batch lies 0.01 higher, a single one 0.02 lower.
ORDER_BATCHES = 7


@inline
def rank_of(slot, slots, by_age, batch):
    """The lowest leaves first: by score, and of equal scores by last batch, or in the order that is drawn."""
    _, score, last_batch = slots
    low = np.uint64(np.uint32(last_batch[slot]))
    if not by_age:
        low = (np.uint64(slot) << np.uint64(32) | np.uint64(batch // ORDER_BATCHES)) * np.uint64(0x9E3779B97F4A7C15)
        low = ((low ^ (low >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)) >> np.uint64(32)
    return np.uint64(score[slot]) << np.uint64(32) | low


@inline
def leaves_before(ranks, slots, one, rank, slot):
    """Of equal ranks the lowest slot leaves first, as in `lowest_select`."""
    return (ranks[one] < rank) | ((ranks[one] == rank) & (slots[one] < slot))


@inline
def heap_push(ranks, slots, n, rank, slot):
    """Adds an entry to the heap of the first `n`."""
    at = n
    while at > 0 and not leaves_before(ranks, slots, (at - 1) >> 1, rank, slot):
        ranks[at] = ranks[(at - 1) >> 1]
        slots[at] = slots[(at - 1) >> 1]
        at = (at - 1) >> 1
    ranks[at] = rank
    slots[at] = slot


@inline
def heap_drop(ranks, slots, n):
    """Removes the lowest entry of the heap of the first `n`: fills its place from below, to the end, where the last
    entry then rises from, which mostly belongs there."""
    last = n - 1
    at = 0
    while 2 * at + 2 < last:
        below = 2 * at + 1
        below += leaves_before(ranks, slots, below + 1, ranks[below], slots[below])
        ranks[at] = ranks[below]
        slots[at] = slots[below]
        at = below
    if 2 * at + 1 < last:
        ranks[at] = ranks[2 * at + 1]
        slots[at] = slots[2 * at + 1]
        at = 2 * at + 1
    heap_push(ranks, slots, at, ranks[last], slots[last])


@inline
def of_least_score(take, ranks, slots, n):
    """Drops all but the slots of the lowest score from the first `n`, where these are more than `take`: in a cache that
    forgets they are a third, and the rest need not be ranked. Returns how many are left."""
    least = ranks[0]
    for i in range(n):
        least = min(least, ranks[i])
    least = least >> np.uint64(32)
    count = 0
    for i in range(n):
        count += ranks[i] >> np.uint64(32) == least
    if count <= take:
        return n
    kept = 0
    for i in range(n):
        slots[kept] = slots[i]
        kept += ranks[i] >> np.uint64(32) == least
    return kept


@jit
def scan(slots, used, batch, window, short, by_age, scanned, heap, threshold):
    """Sets rows aside in the empty heap; returns how many. Those that the batch itself uses join it with their new
    scores, and of the rows that the window locks those below the threshold are set aside too."""
    row, score, last_batch = slots
    ranks, found_slots = scanned
    oldest = np.int32(batch - window)
    found = candidates_collect(row, score, last_batch, oldest, used, ranks, found_slots)
    threshold[0] = 0
    if found == 0:
        return 0
    take = max(SCAN_TIMES * short, used // SCAN_SHARE) if by_age else 2 * ORDER_BATCHES * short
    threshold[0] = np.uint64(0xFFFFFFFFFFFFFFFF)
    if not by_age and take < found:
        found = of_least_score(take, ranks, found_slots, found)
    chosen = found_slots[:found]
    if take < found:
        for i in range(found):
            ranks[i] = rank_of(chosen[i], slots, by_age, batch)
        chosen = lowest_select(take, ranks[:found], chosen)
        threshold[0] = 0
        for slot in chosen:
            threshold[0] = max(threshold[0], rank_of(slot, slots, by_age, batch))
    n = 0
    for slot in chosen:
        heap_push(heap[0], heap[1], n, rank_of(slot, slots, by_age, batch), slot)
        n += 1
    if window > 0:
        for slot in range(used):
            is_locked = np.int32(last_batch[slot] - oldest) >= 0 and last_batch[slot] != np.int32(batch)
            rank = rank_of(slot, slots, by_age, batch)
            if row[slot] >= 0 and is_locked and rank <= threshold[0]:
                heap_push(heap[0], heap[1], n, rank, np.int32(slot))
                n += 1
    return n


@inline
def leave(slot, row, score, slot_of, stored):
    """A row leaves its slot, and its score is kept."""
    slot_of[row[slot]] = -1
    stored[row[slot]] = score[slot]
    row[slot] = -1


@jit
def evict(slots, rows, counts, batch, window, short, by_age, scanned, heap, threshold, victims):
    """Evicts up to `short` rows; returns how many, whose slots are in `victims` then."""
    row, score, last_batch = slots
    ranks, entries = heap
    n = counts[ASIDE]
    oldest = np.int32(batch - window)
    done = 0
    locked = 0
    while done < short:
        if n == 0:
            n = scan(slots, counts[USED], batch, window, short - done, by_age, scanned, heap, threshold)
            locked = 0  # which it has set aside, too
            if n == 0:
                break
        rank = ranks[0]
        slot = entries[0]
        heap_drop(ranks, entries, n)
        n -= 1
        if row[slot] < 0 or rank != rank_of(slot, slots, by_age, batch) or last_batch[slot] == np.int32(batch):
            continue
        if np.int32(last_batch[slot] - oldest) >= 0:
            scanned[1][locked] = slot
            locked += 1
            continue
        leave(slot, row, score, rows[0], rows[1])
        victims[done] = slot
        done += 1
    for i in range(locked):
        heap_push(ranks, entries, n, rank_of(scanned[1][i], slots, by_age, batch), scanned[1][i])
        n += 1
    counts[ASIDE] = n
    return done


@jit
def batches_plan(uses, first, stop, window, policy, slots, rows, scanned, heap, threshold, scratch, counts):
    """Plans the batches first … stop - 1 of a trace: counts hits, evicts rows for missed ones, fills these into
    slots, and raises the score of all."""
    use_row, occurrences, bounds = uses
    kind, unit, gains, units_per_batch, remember, by_age = policy
    row, score, last_batch = slots
    slot_of, stored = rows
    missed, victims = scratch
    capacity = scanned[0].shape[0]
    for number in range(first, stop):
        batch = number + 1  # a cache counts from 1
        for slot in range(capacity, capacity + counts[BEYOND]):  # no slots between batches
            leave(slot, row, score, slot_of, stored)
        counts[EVICTED] += counts[BEYOND]
        counts[BEYOND] = 0
        if not by_age and batch % ORDER_BATCHES == 0:
            counts[ASIDE] = 0
            threshold[0] = 0
        begin, end = bounds[number], bounds[number + 1]
        misses = 0
        for use in range(begin, end):
            if use + AHEAD < end:
                prefetch(slot_of, use_row[use + AHEAD])
            slot = slot_of[use_row[use]]
            if slot < 0:
                missed[misses] = use_row[use]
                misses += 1
            else:
                last_batch[slot] = np.int32(batch)
                counts[HITS] += occurrences[use]
        short = misses - (capacity - counts[USED])
        evicted = 0
        if short > 0:
            evicted = evict(slots, rows, counts, batch, window, short, by_age, scanned, heap, threshold, victims)
        for i in range(misses):
            if i < evicted:
                slot = np.int64(victims[i])
            elif counts[USED] < capacity:
                slot = counts[USED]
                counts[USED] += 1
            else:
                slot = capacity + counts[BEYOND]
                counts[BEYOND] += 1
            row[slot] = missed[i]
            slot_of[missed[i]] = slot
            score[slot] = max(stored[missed[i]], np.uint32(MIN_SCORE)) if remember else np.uint32(MIN_SCORE)
            last_batch[slot] = np.int32(batch)
        counts[FETCHED] += misses
        counts[EVICTED] += evicted
        now = min(np.int64(MAX_SCORE), MIN_SCORE + np.int64(batch * units_per_batch))
        for use in range(begin, end):
            slot = slot_of[use_row[use]]
            score[slot] = raised(np.int64(score[slot]), now, kind, unit, gains)
            rank = rank_of(slot, slots, by_age, batch)
            if rank <= threshold[0] and slot < capacity:
                if counts[ASIDE] == heap[0].shape[0]:  # of void entries: the next victims take a new scan
                    counts[ASIDE] = 0
                    threshold[0] = 0
                else:
                    heap_push(heap[0], heap[1], counts[ASIDE], rank, np.int32(slot))
                    counts[ASIDE] += 1
