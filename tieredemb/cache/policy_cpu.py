"""The policy on the CPU: raises scores of unique slots, and chooses victims by a radix select."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from tieredemb.cache.policy import Scoring
from tieredemb.kernels.constants import AGED, CLOCK, MAX_SCORE, MIN_SCORE
from tieredemb.kernels.cpu import inline, item, jit, prefetch
from tieredemb.kernels.parallel_cpu import even_bounds, over_ranges, parallel_for

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

RAISE_GRAIN = 2048
BINS = 1024
GAINS = 1 << 14  # table entries: all gains that are not 0, if the half-life is at most 500 batches


# over slots: `score` uint32 (C,), `last_batch` int32 (C,), `key` int64 (C,)


def raise_scores(slots: Array, score: Array, now: int, scoring: Scoring) -> None:
    """One use of each slot in `slots` (int32 (U,), distinct) at clock `now`."""
    bounds, terms = even_bounds(len(slots), RAISE_GRAIN), (scoring.kind, scoring.unit)
    parallel_for(score_raise, bounds, slots, score, now, *terms, gains_of(*terms))


@functools.cache
def gains_of(kind: int, unit: float) -> Array:
    """What a use adds to a score, by the distance between score and clock: int32 (K,), the entries of a table."""
    gains = np.empty(GAINS if kind == AGED else 0, np.int32)
    gains_fill(gains, unit)
    return gains


def choose_victims(
    count: int, key: Array, score: Array, last_batch: Array, oldest: np.int32, used: int, ties_by_age: bool
) -> Array:
    """Up to `count` slots below `used` (int32): those of the lowest scores among the occupied ones (key ≥ 0) whose last
    batch is before `oldest`, by signed 32-bit difference. Of equal scores, the older last batch is chosen with
    `ties_by_age`, any without."""
    ranks = np.empty(used, np.uint64)
    slots = np.empty(used, np.int32)
    found = candidates_collect(key, score, last_batch, oldest, used, ranks, slots)
    if found <= count:
        return slots[:found]
    if not ties_by_age:
        return slots[np.argpartition(ranks[:found] >> np.uint64(32), count)[:count]]
    chosen: Array = lowest_select(count, ranks[:found], slots[:found])
    return chosen


LEAST_PART, PART_SHARE = 16384, 32


def part_of(count: int, used: int, batch: int) -> slice:
    """Where one of many plans of a step looks for `count` victims, instead of among all `used` slots: in a part that
    holds many times as many, and is another one for each batch."""
    size = max(LEAST_PART, PART_SHARE * count)
    if used <= size:
        return slice(used)
    first = min(batch % -(-used // size) * size, used - size)
    return slice(first, first + size)


@inline
def gained(gap, unit):
    """What a use adds to the higher of score and clock, given their distance."""
    distance = gap / unit
    return np.int64(unit * math.log2(1.0 + np.exp2(-distance)) + 0.5)


@jit
def gains_fill(gains, unit):
    for gap in range(gains.shape[0]):
        gains[gap] = gained(gap, unit)


@inline
def raised(old, now, kind, unit, gains):
    """A score after one more use at clock `now`. `gains`: see `gains_of`, as two transcendental functions took most of
    the time of a use."""
    if kind == AGED:
        new = high = max(old, now)
        if old > MIN_SCORE:
            gap = high - min(old, now)
            new = high + (np.int64(item(gains, gap)) if gap < gains.shape[0] else gained(gap, unit))
    elif kind == CLOCK:
        new = now
    else:
        new = max(old, MIN_SCORE) + 1
    return np.uint32(min(new, MAX_SCORE))


@over_ranges
def score_raise(lo, hi, slots, score, now, kind, unit, gains):
    """One use at clock `now` of each slot in slots[lo:hi]."""
    for i in range(lo, hi):
        if i + 16 < hi:
            prefetch(score, slots[i + 16])
        s = slots[i]
        score[s] = raised(np.int64(score[s]), now, kind, unit, gains)


@jit
def candidates_collect(key, score, last_batch, oldest, used, ranks, slots):
    """Ranks (score, age) and slots of the occupied, unlocked slots; returns how many. Moves 28 bytes a slot."""
    n = 0
    for s in range(used):
        behind = np.int32(last_batch[s] - oldest)
        ranks[n] = (np.uint64(score[s]) << np.uint64(32)) | np.uint64(np.int64(behind) + np.int64(2147483648))
        slots[n] = s
        n += np.int64(key[s] >= 0) & np.int64(behind < 0)
    return n


@jit
def lowest_select(count, ranks, slots):
    """The `count` slots of lowest rank, equal ranks by slot: makes a histogram over the remaining range, keeps the
    slots below the bin of the threshold, and continues inside that bin. Needs count < len(ranks); overwrites both."""
    chosen = np.empty(count, np.int32)
    bins = np.empty(BINS, np.int64)
    done = 0
    left = ranks.shape[0]
    while done < count:
        low = ranks[0]
        high = ranks[0]
        for i in range(left):
            low = min(low, ranks[i])
            high = max(high, ranks[i])
        shift = np.uint64(0)
        while ((high - low) >> shift) >= np.uint64(BINS):
            shift += np.uint64(1)
        bins[:] = 0
        for i in range(left):
            bins[np.int64((ranks[i] - low) >> shift)] += 1
        threshold = 0
        below = 0
        while below + bins[threshold] <= count - done:
            below += bins[threshold]
            threshold += 1
        kept = 0
        for i in range(left):
            bin_of = np.int64((ranks[i] - low) >> shift)
            if bin_of < threshold or (low == high and done < count):
                chosen[done] = slots[i]
                done += 1
            elif bin_of == threshold:
                ranks[kept] = ranks[i]
                slots[kept] = slots[i]
                kept += 1
        left = kept
    return chosen
