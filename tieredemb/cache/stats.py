"""Counters of a cache. One snapshot; differences of snapshots measure a stretch of work."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Self


@dataclass(frozen=True, kw_only=True)
class CacheStats:
    """Totals since the cache was built.

    `lookups`: occurrences of ids, padding excluded · `hits`: those whose row was resident when their batch was planned
    · `unique`: rows used, summed over batches · `rows_filled`, `bytes_filled`: cold → slot · `evictions`: rows that
    left the cache · `rows_written_back`, `bytes_written_back`: slot → cold, of evictions and flushes · `rows_overflow`:
    rows of batches larger than the cache, served beyond its capacity · `batches`: batches planned, where several plans
    of one time are one · `steps_replayed`: optimizer steps that rows missed and were made to take one by one, summed
    over rows.

    >>> bag = tieredemb.TieredEmbeddingBag(1000, 4, capacity=100)
    >>> for _ in range(2):
    ...     rows = bag(torch.tensor([[1, 2, 2]]))
    >>> stats = bag.stats()
    >>> stats.lookups, stats.misses, stats.rows_filled
    (6, 3, 2)
    >>> stats.hit_rate
    0.5
    """

    batches: int = 0
    lookups: int = 0
    hits: int = 0
    unique: int = 0
    rows_filled: int = 0
    bytes_filled: int = 0
    evictions: int = 0
    rows_written_back: int = 0
    bytes_written_back: int = 0
    rows_overflow: int = 0
    steps_replayed: int = 0

    @property
    def misses(self) -> int:
        """Lookups whose row was not resident."""
        return self.lookups - self.hits

    @property
    def hit_rate(self) -> float:
        """Share of the lookups that hit; NaN without lookups."""
        return self.hits / self.lookups if self.lookups else float("nan")

    def __sub__(self, earlier: CacheStats) -> Self:
        return self._combine(earlier, -1)

    def __add__(self, other: CacheStats) -> Self:
        return self._combine(other, 1)

    def _combine(self, other: CacheStats, sign: int) -> Self:
        kind = type(other) if isinstance(other, type(self)) else type(self)  # the type with the counters of both
        names = [each.name for each in fields(kind)]
        return kind(**{name: getattr(self, name, 0) + sign * getattr(other, name, 0) for name in names})
