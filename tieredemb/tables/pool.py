"""Tables of one width that are looked up one by one, by modules of their own, and share one cold storage and one cache.

Capacity goes where the lookups are, whichever table's they are: one cache for all beats one for each. What concerns a
table is the table's: its lookups, steps, state, counters, copies. What concerns the cache is that of all: its device,
flushing and closing it, checkpoints.
"""

from __future__ import annotations

import abc
import copy
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tieredemb.cache.changes import Part
from tieredemb.cache.stats import CacheStats
from tieredemb.config import Capacity, OptimizerConfig
from tieredemb.errors import UnsupportedError
from tieredemb.lookup.optimizer import rows_of
from tieredemb.storage.base import RowOpener
from tieredemb.storage.unified import UnifiedMemory
from tieredemb.tables.config import TableSetConfig
from tieredemb.tables.group import DeviceGroup, Group
from tieredemb.tables.step_time import StepTime
from tieredemb.tables.table_set import Kept, Place, Placed, Rows, TableSet

if TYPE_CHECKING:
    from tieredemb.tables.division import Division

    Array = np.ndarray[Any, Any]


class Pool(TableSet):
    """The tables of `config`, which is `apart`, all of one width. `members`: the tables that somebody has."""

    def __init__(self, config: TableSetConfig, *, rows: RowOpener | None = None) -> None:
        assert config.apart
        super().__init__(config, rows=rows)
        self.members: weakref.WeakSet[Member] = weakref.WeakSet()
        self.times = StepTime()
        self.contexts: dict[object, Any] = {}  # what lookups in several tables as one keep

    def adopt(self) -> None:
        super().adopt()
        for member in list(self.members):
            member.groups[0].take_over()

    def flush(self) -> None:
        super().flush()
        for member in list(self.members):
            member.groups[0].check_steps()

    def _renew(self, config: TableSetConfig, capacities: Sequence[Capacity], call: str) -> None:
        super()._renew(config, capacities, call)
        for member in list(self.members):
            _ = member.placed.now  # several that plan as one find there what the steps of each have left

    def _history_bytes(self, group: Group) -> int:
        theirs = (member.groups[0] for member in list(self.members))
        return group.history_bytes + sum(each.device_history_bytes for each in theirs if isinstance(each, DeviceGroup))

    def check_faults(self) -> None:
        for member in list(self.members):  # to whom a GPU reports
            member.check_faults()

    def check_moves(self, moved: Sequence[TableSet]) -> None:
        """Raises `UnsupportedError` where tables are to move that are not all of those that share the cache."""
        left = [member.name for member in self.members if not any(member is each for each in moved)]
        if left:
            raise UnsupportedError(
                f"this table shares its cache with {', '.join(map(repr, sorted(left)))}, and they move together: move "
                f"the module that holds them all, or convert each by a call of its own"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy has no rows: its members bring theirs."""
        config, metadata = self.config, self.groups[0].cache.cold.metadata
        if isinstance(config.storage, UnifiedMemory):  # of which some may never come
            config = replace(config, storage=replace(config.storage, pretouch=False))
        return _rebuild_pool, (config, metadata.batch, metadata.policy)


class Member(TableSet):
    """One table of a `pool`, number `number` of its tables, as a set of one. `optimizer`: of its own, whose rows are
    laid out as those of the pool's."""

    def __init__(self, pool: Pool, number: int, optimizer: OptimizerConfig | None) -> None:
        self.pool = pool
        self.number, self.numbers = number, (number,)
        self.placed = self._placed = _PlacedMember(pool, number, optimizer)
        self.columns = np.array([0, self.config.tables[0].embedding_dim], np.int64)
        self._replaced = 0
        self.step_time = pool.times
        pool.members.add(self)

    @property
    def name(self) -> str:
        """Of the table."""
        return self.config.tables[0].name

    @property
    def whole(self) -> TableSet:
        return self.pool

    @property
    def division(self) -> Division | None:  # type: ignore[override]
        return self.pool.division

    @property
    def writes(self) -> int:
        return self.pool._replaced + self._replaced

    def version(self, table: int) -> tuple[int, int]:
        _, steps = super().version(table)
        return self.writes, steps

    def part(self, table: int, kind: str) -> Part:
        return self.number, kind

    def flush(self) -> None:
        self.pool.flush()

    def check_moves(self, moved: Sequence[TableSet]) -> None:
        self.pool.check_moves(moved)

    def move(self, device: torch.device) -> None:
        """Moves all tables of the pool."""
        self.pool.move(device)

    def resize(self, slots: Sequence[int]) -> None:
        """Resizes the cache of all tables of the pool."""
        self.pool.resize(slots)

    def close(self) -> None:
        self.pool.close()

    def memory_report(self) -> dict[str, Any]:
        """That of the pool."""
        return self.pool.memory_report()

    def _copied(self) -> tuple[Any, ...]:
        parts, kept = self._copies()
        return _rebuild_member, (self.pool, self.number, self._placed.optimizer, parts, kept)

    def __deepcopy__(self, memo: dict[int, Any]) -> Member:
        with self.locked():
            parts, kept = self._copies()
        pool = copy.deepcopy(self.pool, memo)
        copied = memo[id(self)] = _rebuild_member(pool, self.number, self._placed.optimizer, parts, kept)
        return copied


class Together(TableSet):
    """Some of the tables of a `pool`, those of `numbers`, which ascend, to be planned and looked up as one: the rows of
    their outputs lie below each other."""

    def __init__(self, pool: Pool, numbers: tuple[int, ...]) -> None:
        self.pool, self.numbers = weakref.ref(pool), numbers  # who keeps it
        self.placed = _PlacedTogether(pool, numbers)
        self.columns = np.array([0] * len(numbers) + [self.config.tables[0].embedding_dim], np.int64)


class _PlacedInPool(Placed):
    """Where tables of a pool are: where that is now, whatever has moved it."""

    def __init__(self, pool: Pool) -> None:
        self._whole = pool.placed
        self._of: Place | None = None
        self._now: Place | None = None

    @property
    def now(self) -> Place:  # type: ignore[override]
        there = self._whole.now
        if self._of is not there or self._now is None:
            self._now, self._of = self._place(there), there
        return self._now

    @abc.abstractmethod
    def _place(self, there: Place) -> Place:
        """The place of the tables, where all of the pool are `there`."""


class _PlacedTogether(_PlacedInPool):
    def __init__(self, pool: Pool, numbers: tuple[int, ...]) -> None:
        super().__init__(pool)
        self._numbers = numbers

    def _place(self, there: Place) -> Place:
        config = replace(there.config, tables=tuple(there.config.tables[number] for number in self._numbers))
        place = Place(config, [there.groups[0].of_tables(self._numbers, config)], CacheStats())
        there.other_faults.append(place.faults)
        return place


class _PlacedMember(_PlacedInPool):
    def __init__(self, pool: Pool, number: int, optimizer: OptimizerConfig | None) -> None:
        super().__init__(pool)
        self._number = number
        self._optimizer = optimizer

    @property
    def optimizer(self) -> OptimizerConfig | None:
        """Of the table: its own, or the one that the pool was laid out for since."""
        laid_out = self._whole.now.config.optimizer
        return self._optimizer if rows_of(self._optimizer) == rows_of(laid_out) else laid_out

    def _place(self, there: Place) -> Place:
        tables = (there.config.tables[self._number],)
        config = replace(there.config, tables=tables, apart=False, optimizer=self.optimizer)
        place = Place(config, [there.groups[0].of_table(self._number, config)], self._counted())
        place.other_faults = there.other_faults
        return place

    def _counted(self) -> CacheStats:
        """By the cache of the place before; steps that rows were made to take are counted anew from here on."""
        if self._now is None:
            return CacheStats()
        (group,) = self._now.groups
        counted = self._now.earlier + group.counted + CacheStats(steps_replayed=group.steps_replayed)
        group.restart_counts()
        return counted


def _rebuild_pool(config: TableSetConfig, batch: int, policy: str) -> Pool:
    pool = Pool(config)
    cold = pool.groups[0].cache.cold
    cold.metadata.batch, cold.metadata.policy = batch, policy
    pool.adopt()
    return pool


def _rebuild_member(
    pool: Pool,
    number: int,
    optimizer: OptimizerConfig | None,
    parts: Sequence[Sequence[Rows]],
    kept: Sequence[Kept],
) -> Member:
    member = Member(pool, number, optimizer)
    member.put_copies(parts, kept)
    return member
