"""Tables of one width with modules of their own, looked up separately, which share one cold storage and one cache.

The slots go to the rows with most lookups, of any table, so one cache for all has more hits than one for each. Each
table has its own lookups, steps, state, counters and copies. Moving to a device, flush, close and checkpoints apply to
all tables.

A width with a single table is a pool of one. A model with a single table has no pool.
"""

from __future__ import annotations

import copy
import functools
import itertools
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
from tieredemb.tables.table_set import Derived, Kept, Place, Rows, TableSet, make_fault_report

if TYPE_CHECKING:
    from tieredemb.tables.division import Division


class Related:
    """The pools of a model, whose tables have several widths. `planned`: forwards in any of them that were planned
    ahead, once an engine exists · `contexts`: of lookups in several tables as one · `group_of`: if batches of some
    tables did not fit those of others, the plan group of each table, by its pool and number there, else 0 · `splits`:
    how many such groups were made · `orders`: counts the pools, to number them. Pools that are copied in
    one go share a new object."""

    def __init__(self) -> None:
        self.planned: Any = None
        self.contexts: dict[object, Any] = {}
        self.group_of: dict[tuple[int, int], int] = {}
        self.splits = 0
        self.orders = itertools.count()

    def __reduce__(self) -> tuple[Any, ...]:
        return Related, ()


class Pool(TableSet):
    """The tables of `config`, which is `separate`, all of one width. `members`: the tables in use, one module each ·
    `related`: what it shares with related pools · `order`: its number among them."""

    def __init__(
        self, config: TableSetConfig, *, rows: RowOpener | None = None, related: Related | None = None
    ) -> None:
        assert config.separate
        super().__init__(config, rows=rows)
        self.members: weakref.WeakSet[Member] = weakref.WeakSet()
        self.times = StepTime()
        self.related = Related() if related is None else related
        self.order = next(self.related.orders)

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
            _ = member.placed.now  # several that plan as one read the history of each there

    def _history_bytes(self, group: Group) -> int:
        theirs = (member.groups[0] for member in list(self.members))
        return group.history_bytes + sum(each.device_history_bytes for each in theirs if isinstance(each, DeviceGroup))

    def check_faults(self) -> None:
        for member in list(self.members):  # a GPU reports to each
            member.check_faults()

    def check_moves(self, moved: Sequence[TableSet]) -> None:
        """Raises `UnsupportedError` if not all tables that share the cache are to move."""
        left = [member.name for member in self.members if not any(member is each for each in moved)]
        if left:
            raise UnsupportedError(
                f"this table shares its cache with {', '.join(map(repr, sorted(left)))}, and they move together: move "
                f"the module that holds them all, or convert each by a call of its own"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy has no rows: its members add theirs."""
        config, metadata = self.config, self.groups[0].cache.cold.metadata
        if isinstance(config.storage, UnifiedMemory):  # of which some members may never be copied
            config = replace(config, storage=replace(config.storage, pretouch=False))
        return _rebuild_pool, (config, metadata.batch, metadata.policy, self.related)

    def __deepcopy__(self, memo: dict[int, Any]) -> TableSet:
        rebuild, (*args, related) = self.__reduce__()
        copied: TableSet = rebuild(*args, copy.deepcopy(related, memo))
        memo[id(self)] = copied
        return copied


class Selection(TableSet):
    """Some of the tables of related pools, to be planned and looked up as one; the outputs of the tables of one pool
    are stacked. `of_pools`: the pools, and ascending numbers of tables there. Its config is that of the tables of the
    first pool, as names are unique only in one pool."""

    def __init__(self, of_pools: Sequence[tuple[Pool, tuple[int, ...]]]) -> None:
        self.of_pools = [(weakref.ref(pool), numbers) for pool, numbers in of_pools]  # the pools keep it
        pools, numbers = zip(*of_pools, strict=True)
        self.placed = Derived([pool.placed for pool in pools], _PlaceOfSeveral(numbers))
        count, width = sum(map(len, numbers)), self.config.tables[0].embedding_dim
        self.columns = np.array([0] * count + [width], np.int64)


class Member(TableSet):
    """One table of a `pool`, with its `number` there, as a set of one. `optimizer`: its own, with the row layout of the
    pool's."""

    def __init__(self, pool: Pool, number: int, optimizer: OptimizerConfig | None) -> None:
        self.pool, self.number, self._optimizer = pool, number, optimizer
        self.placed = Derived([pool.placed], functools.partial(_place_of_one, number, optimizer))
        self.columns = np.array([0, self.config.tables[0].embedding_dim], np.int64)
        self._replaced = 0
        self.step_time = pool.times
        pool.members.add(self)

    @property
    def name(self) -> str:
        """The name of the table."""
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
        """The report of the pool."""
        return self.pool.memory_report()

    def _copied(self) -> tuple[Any, ...]:
        parts, kept = self._copies()
        return _rebuild_member, (self.pool, self.number, _own(self._optimizer, self.pool.config), parts, kept)

    def __deepcopy__(self, memo: dict[int, Any]) -> Member:
        with self.locked():
            parts, kept = self._copies()
        pool, optimizer = copy.deepcopy(self.pool, memo), _own(self._optimizer, self.pool.config)
        copied = memo[id(self)] = _rebuild_member(pool, self.number, optimizer, parts, kept)
        return copied


def _own(optimizer: OptimizerConfig | None, pool: TableSetConfig) -> OptimizerConfig | None:
    """The optimizer of one table: its own, or the one that its pool was laid out for since."""
    return optimizer if rows_of(optimizer) == rows_of(pool.optimizer) else pool.optimizer


def _place_of_one(
    number: int, optimizer: OptimizerConfig | None, there: Sequence[Place], before: Place | None
) -> Place:
    """The place of one table of a pool, with its counters in the cache of the place before. Replayed steps are counted
    anew."""
    (pool,), counted = there, CacheStats()
    if before is not None:
        (group,) = before.groups
        counted = before.earlier + group.counted + CacheStats(steps_replayed=group.steps_replayed)
        group.restart_counts()
    own = _own(optimizer, pool.config)
    config = replace(pool.config, tables=(pool.config.tables[number],), separate=False, optimizer=own)
    place = Place(config, [pool.groups[0].of_table(number, config)], counted)
    place.other_faults = pool.other_faults
    return place


class _PlaceOfSeveral:
    """Makes the place of tables of several pools, with the `numbers` there. A GPU reports bad ids and offsets for each
    pool separately. What it has made for a pool is reused until that moves."""

    def __init__(self, numbers: Sequence[tuple[int, ...]]) -> None:
        self._numbers = numbers
        self._known: list[tuple[Place, Group, Any] | None] = [None] * len(numbers)

    def __call__(self, there: Sequence[Place], before: Place | None) -> Place:
        for at, (pool, numbers) in enumerate(zip(there, self._numbers, strict=True)):
            known = self._known[at]
            if known is None or known[0] is not pool:
                config = replace(pool.config, tables=tuple(pool.config.tables[number] for number in numbers))
                report = make_fault_report(config)
                if report is not None:
                    pool.other_faults.append(report)
                self._known[at] = pool, pool.groups[0].of_tables(numbers, config), report
        found = [known for known in self._known if known is not None]
        groups, reports = [group for _, group, _ in found], [report for _, _, report in found if report is not None]
        return Place(groups[0].config, groups, CacheStats(), reports)


def _rebuild_pool(config: TableSetConfig, batch: int, policy: str, related: Related | None = None) -> Pool:
    pool = Pool(config, related=related)
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
