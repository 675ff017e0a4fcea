"""What caches are compared on: a trace, cut into batches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from tieredemb.cache_hit.references import Uses, uses_of
from tieredemb.cache_hit.traces import Trace
from tieredemb.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A trace cut into batches of `batch_size` accesses. The first `warm_up` of the batches (a share in [0,
    1), rounded down) are not measured. `lock_window`: rows of this many previous batches are never evicted.
    Raises `ConfigError`."""

    trace: Trace
    batch_size: int
    warm_up: float = 0.5
    lock_window: int = 0

    def __post_init__(self) -> None:
        accesses = self.trace.ids.size
        if not 1 <= self.batch_size <= accesses:
            raise ConfigError(
                f"batch size {self.batch_size} is not possible on trace {self.trace.name!r}, which has "
                f"{accesses} accesses; pass 1 … {accesses}"
            )
        if not 0 <= self.warm_up < 1:
            raise ConfigError(f"warm-up is a share of the batches and must lie in [0, 1), got {self.warm_up!r}")
        if self.lock_window < 0:
            raise ConfigError(f"lock window must be at least 0 batches, got {self.lock_window}")

    @property
    def first_batch(self) -> int:
        """The first measured batch."""
        return int(self.warm_up * -(-self.trace.ids.size // self.batch_size))

    @property
    def lookups(self) -> int:
        """Measured accesses."""
        return self.trace.ids.size - self.first_batch * self.batch_size

    @cached_property
    def uses(self) -> Uses:
        """The uses (row, batch)."""
        return uses_of(self.trace, self.batch_size)

    def check_capacity(self, capacity: int) -> None:
        """Raises `ConfigError` unless 1 ≤ `capacity` ≤ rows."""
        if not 1 <= capacity <= self.trace.rows:
            raise ConfigError(
                f"a capacity of {capacity} rows is not possible on trace {self.trace.name!r}, which has "
                f"{self.trace.rows} rows; pass 1 … {self.trace.rows}, or a share such as 1%"
            )
