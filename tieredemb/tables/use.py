"""How often rows behind a cache are looked up, estimated from their scores; `shares.by_use` divides a capacity by
it."""

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
    """The use of the rows behind one cache. `slot_bytes`: of one slot · `least`: the fewest slots that it needs ·
    `rows`: how many rows there are · `share`, `lookups`: float64 (K,), descending, for each sampled row: the share of
    the batches that use it, and how often a batch looks it up · `stands_for`: float64 (K,), how many rows each sampled
    row represents.

    Missed rows of a batch are filled into slots, where they evict others. So a cache that keeps some rows over all
    batches needs slots for these, and for what a batch uses of the others.
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
        """Lookups in a batch that hit if there are `slots` slots. Rows that do not stay use slots, too: `passing` times
        the number of them that a batch uses."""
        each = self.stands_for * (1.0 - passing * self.share)
        before = self.least + passing * self.in_batch + np.cumsum(each) - each
        held = np.clip((slots - before) / np.maximum(each, 1e-9), 0.0, 1.0)
        return float(self.lookups * self.stands_for @ held)


def lookups_of(share: Array, stands_for: Array, most: float, lookups: float) -> Array:
    """Lookups in a batch of each of the rows that are used by a `share` of the batches, float64 (K,), and represent
    `stands_for` rows each; a row that all batches use has the score `most`. `lookups`: in a batch, of all rows.

    A batch counts as one use of a row, however often it looks the row up. If lookups are random, the share of batches
    that use a row tells how often it is looked up, unless all batches use it: of such rows only the sum is known.
    """
    always = share > 1.0 - 0.5 / most
    found = np.zeros(len(share))
    found[~always] = -np.log1p(-share[~always])
    if always.any():
        rest = (lookups - found @ stands_for) / stands_for[always].sum()
        found[always] = max(rest, np.log(2.0 * most), 1.0)
    return found


def use_of(group: Group, batches: int) -> Use | None:
    """The use of a group's rows, without those of resident tables, which are never evicted; None if scores are not
    counts of uses. `batches`: since the last estimate, those of all groups; fewer of them may look up in this
    group. Changes nothing. Synchronises with a GPU."""
    cache, space = group.cache, group.space
    scoring, before = cache.scoring, cache.looked_at
    if not scoring.counts_uses:
        return None
    with cache.whole():  # until then no row moves, and the storage stays open
        counted = cache.stats()
        time, scores, rows_each = _sampled(group)
    score, of_each = _distinct(scores, rows_each, scoring)
    own = counted.batches - before.batches
    most = scoring.most_uses(max(1, time))
    share = np.minimum(scoring.uses(score, time) / most, 1.0)
    # a GPU counts lookups of resident tables, but does not score their rows: the sum for the others is not known
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
    """Keys of a sample of the rows that may have been written, int64 (K,), without those of resident tables, and how
    many rows each represents. Pages that were never written are not read, as a full disk may have no blocks for
    them."""
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
    """Distinct scores, float64 (K,), descending, and how many rows each represents. Scores that are nearly equal are
    replaced by their mean."""
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
