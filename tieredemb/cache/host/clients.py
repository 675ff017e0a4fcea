"""Counters of a CPU cache for each of several clients, in addition to its totals.

While one client plans, all is counted for it, also the eviction of others' rows. A plan of several clients is counted
row by row, for the client whose row is filled; any other call for the client whose row it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tieredemb.config import Array


class Planners(NamedTuple):
    """Clients whose keys are planned as one, client by client. `numbers`: in ascending order · `starts`: where the keys
    of each begin, and the end, int64 (K + 1,)."""

    numbers: tuple[int, ...]
    starts: Array


class Clients:
    """`edges`: the first key of each client in ascending order, and the key after the last; empty without clients.
    `counts`: of each · `planner`: the client that plans now, alone."""

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
