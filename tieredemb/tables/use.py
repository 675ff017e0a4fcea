"""How often rows behind a cache are looked up, as their scores tell: what `shares.by_use` divides a capacity by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from tieredemb.tables.group import Group

    Array = np.ndarray[Any, Any]

MEMORY_SAMPLE, FILE_SAMPLE = 1 << 18, 1 << 14  # rows of a key space whose scores are read; of a file each is a page
TABLE_SAMPLE = 1 << 10  # of a table, at least, as far as it has so many


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


def use_of(group: Group) -> Use | None:
    """What is known of the use of a group's rows, which was flushed, but for those of resident tables, which never
    leave; None where nothing is: scores are no counts of uses, or there are none yet. Synchronises with a GPU."""
    cache, space = group.cache, group.space
    scoring, time, counted = cache.scoring, cache.cold.metadata.batch, cache.stats()
    if not scoring.counts_uses or time == 0 or counted.batches == 0:
        return None
    state, resident = cache.cold.state, set(group.resident)
    sampled = (MEMORY_SAMPLE if cache.cold.in_memory else FILE_SAMPLE) / space.rows
    ranges = [(int(space.start[j]), int(space.start[j + 1])) for j in range(len(space)) if j not in resident]
    scores, stands_for = [np.empty(0, np.uint32)], [np.empty(0)]
    for start, stop in ranges:
        step = max(1, (stop - start) // max(TABLE_SAMPLE, int(sampled * (stop - start))))
        scores.append(state[start:stop:step, -1])
        stands_for.append(np.full(len(scores[-1]), (stop - start) / len(scores[-1])))
    score, of_each = np.concatenate(scores), np.concatenate(stands_for)
    share = np.minimum(scoring.uses(score[score != 0], time) / scoring.most_uses(time), 1.0)
    order = np.argsort(-share, kind="stable")
    share, of_each = share[order], of_each[score != 0][order]
    fixed = sum(rows for _, rows in group.resident_ranges)
    # a GPU scores no rows of resident tables, whose lookups are counted: what the others have together is not known
    per_batch = 0.0 if resident else counted.lookups / counted.batches
    lookups = lookups_of(share, of_each, scoring.most_uses(time), per_batch)
    return Use(group.slot_bytes, fixed + bool(ranges), space.rows, share, lookups, of_each)
