"""For how many ids a recorded plan has room. A plan is recorded for a capacity, and batches of bags of any length have
another number of ids each time: a batch takes the capacity of batches before it, unless that is far too large."""

from __future__ import annotations

from collections.abc import Sequence
from operator import le

STEPS_AN_OCTAVE = 16  # different capacities, from a number of them to twice as many
LEAST_CAPACITY = 256  # ids: that many take no longer than fewer
LOOSE = 1.5  # × the ids of a batch: of a larger capacity the rest would be planned in vain
MOST_CAPACITIES = 8  # that are known, those used last


def capacity_for(ids: int) -> int:
    """Room for as many ids or up to a sixteenth more."""
    step = max(LEAST_CAPACITY, (1 << ids.bit_length()) // (2 * STEPS_AN_OCTAVE))
    return -(-ids // step) * step


class Capacities:
    """Those of one module's plans, of as many blocks of ids each."""

    def __init__(self) -> None:
        self._known: list[list[int]] = []  # the one used last comes first

    def of(self, counts: Sequence[int]) -> list[int]:
        """The capacity for so many ids of each block. If none that is known takes them, one of these grows, by a
        sixteenth more than it has to, so that it seldom does."""
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
            if sum(counts) <= LOOSE * sum(capacities) and sum(grown) <= most:  # far smaller ones stay as they are
                del self._known[at]
                return grown
        return [*map(capacity_for, counts)]
