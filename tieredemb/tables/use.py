"""How often rows behind a cache are looked up, as their scores tell: what `shares.by_use` divides a capacity by."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tieredemb.cache.policy import Scoring
from tieredemb.config import Array
from tieredemb.kernels.constants import COUNT

if TYPE_CHECKING:
    from tieredemb.tables.group import Group

MEMORY_SAMPLE, FILE_SAMPLE = 1 << 16, 1 << 14  # slots, or cold rows, whose scores are read; of a file each is a page
TABLE_SAMPLE = 1 << 10  # of a table in memory, at least, as far as it has so many
MOST_RANGES = 1 << 12  # of used rows of a file, that are looked at
# scores that are told apart: from a number of uses to twice as many, as far below the highest, where scores age; and of
# all, where they count
SCORES_AN_OCTAVE, OCTAVES, MOST_SCORES = 256, 64, 1 << 20


class Use(NamedTuple):
    """Of the rows behind one cache. `slot_bytes`: of one slot · `least`: slots that it has to have · `rows`: how many
    rows there are · `share`, `lookups`: float64 (K,), descending, of a row: the share of the batches that use it, and
    how often a batch looks it up · `stands_for`: float64 (K,), how many rows each is.

    A batch that misses rows brings them into slots, where they displace others. So a cache that holds some rows in
    every batch has slots for these, and for what a batch uses of the others.
    """

    slot_bytes: int
    least: int
    rows: int
    share: Array
    lookups: Array
    stands_for: Array

    @property
    def in_batch(self) -> float:
        """Rows that a batch uses."""
        return float(self.share @ self.stands_for)

    def hits(self, slots: int, passing: float) -> float:
        """Lookups in a batch that `slots` slots serve, of which the rows that come and go take `passing` of what a
        batch uses of them."""
        each = self.stands_for * (1.0 - passing * self.share)
        before = self.least + passing * self.in_batch + np.cumsum(each) - each
        held = np.clip((slots - before) / np.maximum(each, 1e-9), 0.0, 1.0)
        return float(self.lookups * self.stands_for @ held)


def lookups_of(share: Array, stands_for: Array, most: float, lookups: float) -> Array:
    """Lookups in a batch of rows that are used by a `share` of the batches, float64 (K,), each of which `stands_for`
    several, where the uses of all batches count as `most`. `lookups`: in a batch, of all rows.

    A batch uses a row once, however often it looks the row up. Of a row that half of the batches use it is known how
    often that is, if lookups come at random; of those that every batch uses only what they have together.
    """
    always = share > 1.0 - 0.5 / most
    found = np.zeros(len(share))
    found[~always] = -np.log1p(-share[~always])
    if always.any():
        rest = (lookups - found @ stands_for) / stands_for[always].sum()
        found[always] = max(rest, np.log(2.0 * most), 1.0)
    return found


def use_of(group: Group, batches: int) -> Use | None:
    """What is known of the use of a group's rows, but for those of resident tables, which never leave; None where
    scores are no counts of uses. `batches`: since the last look, where all were counted; those that look up in this
    group may be fewer. Changes nothing. Synchronises with a GPU."""
    cache, space = group.cache, group.space
    scoring, before = cache.scoring, cache.looked_at
    if not scoring.counts_uses:
        return None
    with cache.whole():  # no row moves meanwhile, and nobody closes the storage
        counted = cache.stats()
        time, scores, rows_each = _sampled(group)
    score, of_each = _distinct(scores, rows_each, scoring)
    own = counted.batches - before.batches
    most = scoring.most_uses(max(1, time))
    share = np.minimum(scoring.uses(score, time) / most, 1.0)
    # a GPU scores no rows of resident tables, whose lookups are counted: what the others have together is not known
    per_batch = 0.0 if group.resident else (counted.lookups - before.lookups) / max(1, own)
    lookups = lookups_of(share, of_each, most, per_batch)
    fixed, often = sum(rows for _, rows in group.resident_ranges), min(1.0, own / max(1, batches))
    least = fixed + (len(group.resident) < len(space))
    return Use(group.slot_bytes, least, space.rows, share * often, lookups * often, of_each)


def _sampled(group: Group) -> tuple[int, Array, Array]:
    """The time of the last plan; and of a sample of the rows that were ever used the scores, uint32 (K,), none of them
    zero, and for how many rows each stands. Rows in slots are sampled there, as their cold scores are old."""
    keys, rows_each = _cold_sample(group)
    time, hot, slots_each, has_slot = group.cache.sample_scores(MEMORY_SAMPLE, keys)
    cold = group.cache.cold.state[keys[~has_slot], -1]
    score = np.concatenate([hot, cold])
    of_each = np.concatenate([np.full(len(hot), slots_each), rows_each[~has_slot]])
    used = score != 0
    return time, score[used], of_each[used]


def _cold_sample(group: Group) -> tuple[Array, Array]:
    """Keys of a sample of the rows that may have been written, int64 (K,), without those of resident tables, and for
    how many rows each stands. Pages that nobody has written are not read, as a full disk may have none for them."""
    cold, space, resident = group.cache.cold, group.space, set(group.resident)
    used = list(cold.used_ranges())
    every = max(1, len(used) // MOST_RANGES)
    share = (MEMORY_SAMPLE if cold.in_memory else FILE_SAMPLE) / max(1, sum(stop - start for start, stop in used))
    keys, rows_each = [np.empty(0, np.int64)], [np.empty(0)]
    for first, last in used[::every]:
        tables = range(
            int(np.searchsorted(space.start, first, "right")) - 1, int(np.searchsorted(space.start, last, "left"))
        )
        for start, stop in (
            (max(first, int(space.start[j])), min(last, int(space.start[j + 1]))) for j in tables if j not in resident
        ):
            least = TABLE_SAMPLE if cold.in_memory else 1
            step = max(1, (stop - start) // max(least, int(share * every * (stop - start))))
            keys.append(np.arange(start, stop, step, dtype=np.int64))
            rows_each.append(np.full(len(keys[-1]), every * (stop - start) / max(1, len(keys[-1]))))
    return np.concatenate(keys), np.concatenate(rows_each)


def _distinct(score: Array, stands_for: Array, scoring: Scoring) -> tuple[Array, Array]:
    """Scores that differ, float64 (K,), descending, and for how many rows each of them stands: those that hardly
    differ are one, which is their mean."""
    score = score.astype(np.int64)
    if not len(score):
        return score.astype(np.float64), stands_for
    if scoring.kind != COUNT:  # rows that are hardly used any more
        score = np.maximum(score, score.max() - int(OCTAVES * scoring.unit))
    above = score - score.min()
    above //= max(1, int(scoring.unit) // SCORES_AN_OCTAVE, int(above.max()) // MOST_SCORES)
    rows, total = np.bincount(above, stands_for), np.bincount(above, stands_for * score)
    used = np.flatnonzero(rows)[::-1]
    return total[used] / rows[used], rows[used]
