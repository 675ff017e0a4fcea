"""The capacities for ids of recorded plans. A plan is recorded for a capacity; batches of bags of any length have a
different number of ids each time. A batch takes the capacity of earlier ones, unless that is far too large."""

from __future__ import annotations

from collections.abc import Sequence
from operator import le

STEPS_AN_OCTAVE = 16  # capacities between a number of ids and twice as many
LEAST_CAPACITY = 256  # ids: fewer take as long
LOOSE = 1.5  # × the ids of a batch: in a larger capacity too much work would be wasted
MOST_CAPACITIES = 8  # that are kept: the last ones used


def capacity_for(ids: int) -> int:
    """A capacity for as many ids, or up to a sixteenth more."""
    step = max(LEAST_CAPACITY, (1 << ids.bit_length()) // (2 * STEPS_AN_OCTAVE))
    return -(-ids // step) * step


class Capacities:
    """The capacities of one module's plans, each of equally many blocks of ids."""

    def __init__(self) -> None:
        self._known: list[list[int]] = []  # the last one used is first

    def of(self, counts: Sequence[int]) -> list[int]:
        """The capacity for so many ids of each block. If no known one is large enough, one of them grows, by a
        sixteenth more than necessary, so that it seldom does."""
        known, most = self._known, LOOSE * sum(counts) + LEAST_CAPACITY * len(counts)
        for at, capacities in enumerate(known):
            if sum(capacities) <= most and all(map(le, counts, capacities)):
                if at:
                    known.insert(0, known.pop(at))
                return capacities
        known.insert(0, self._grown(counts, most))
        del known[MOST_CAPACITIES:]
        return known[0]

    def _grown(self, counts: Sequence[int], most: float) -> list[int]:
        for at, capacities in enumerate(self._known):
            grown = [
                capacity if count <= capacity else capacity_for(count + count // STEPS_AN_OCTAVE)
                for count, capacity in zip(counts, capacities, strict=True)
            ]
            if sum(counts) <= LOOSE * sum(capacities) and sum(grown) <= most:  # far smaller ones do not grow
                del self._known[at]
                return grown
        return [*map(capacity_for, counts)]
