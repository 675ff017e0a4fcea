"""What a cache on the CPU counts for each of several who plan by it, beside its totals.

While one plans, all that is counted is counted for it, also where its rows take the place of others'. What several plan
as one is counted row by row, for whose row comes; and of any other call, for whose row it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tieredemb.config import Array


class Planners(NamedTuple):
    """Clients whose keys are planned as one, those of each after those of the one before. `numbers`: in ascending
    order · `starts`: where the keys of each begin, and where they end, int64 (K + 1,)."""

    numbers: tuple[int, ...]
    starts: Array


class Clients:
    """`edges`: the first key of each client in ascending order, and that after the last; empty where nobody shares the
    cache. `counts`: of each · `planner`: who plans now, alone."""

    def __init__(self, edges: Sequence[int]) -> None:
        self.counts: list[Counter[str]] = [Counter() for _ in edges[:-1]]
        self.planner: int | None = None
        self._first = np.array(edges[:-1], np.int64)
        self._times = [0] * len(self.counts)  # of the last plan of each

    def __len__(self) -> int:
        return len(self.counts)

    def planned(self, numbers: Sequence[int], time: int, uses: Sequence[Sequence[int]]) -> None:
        """Clients have planned; several plans of one time are one batch. `uses`: of each of them occurrences, those
        whose row was resident, and unique rows."""
        for number, (lookups, hits, unique) in zip(numbers, uses, strict=True):
            counts = self.counts[number]
            counts["lookups"] += lookups
            counts["hits"] += hits
            counts["unique"] += unique
            if time != self._times[number]:
                counts["batches"] += 1
                self._times[number] = time

    def add(self, counted: Mapping[str, int]) -> None:
        """The `planner` has counted."""
        assert self.planner is not None
        self.counts[self.planner].update(counted)

    def add_rows(self, keys: Array, counted: Mapping[str, Array]) -> None:
        """Of rows `keys`, int64 (K,), each counts for the client that has it. `counted`: how much, (K,) each."""
        if len(self) and len(keys):
            of = np.searchsorted(self._first, keys, side="right") - 1
            for name, each in counted.items():
                sums = np.bincount(of, weights=each, minlength=len(self))
                for number in np.flatnonzero(sums):
                    self.counts[number][name] += int(sums[number])
