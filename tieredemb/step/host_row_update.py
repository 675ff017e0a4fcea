"""A step on the CPU from gradients of rows, without calls; many rows are given in rounds.

A step that reaches all rows is one change in the caches' intent logs, inside which the caches are called as usual.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tieredemb.cache.base import NO_USE
from tieredemb.cache.tickets import Ticket
from tieredemb.kernels.constants import SUM
from tieredemb.kernels.parallel_cpu import Pass
from tieredemb.kernels.segments_cpu import Segments
from tieredemb.lookup.bags import KeySpace
from tieredemb.lookup.embedding_bag_cpu import NO_ARGMAX, NO_WEIGHTS
from tieredemb.lookup.optimizer import Hyperparameters
from tieredemb.lookup.optimizer_cpu import CountedPass, Gradient, update
from tieredemb.step.gradient_rows import TableRows
from tieredemb.step.host_call import RowPass, carry_out, no_rows, rounding_of
from tieredemb.storage.base import HotArrays
from tieredemb.tables.group import HostGroup
from tieredemb.tables.row_optimizer import RowOptimizer
from tieredemb.tables.table_set import TableSet

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]


def update_rows(
    tables: TableSet, optimizer: RowOptimizer, rounds: Iterator[list[TableRows]], *, reaches_all: bool
) -> None:
    """One step of the optimizer; each row has its gradient in one of the `rounds`. If it `reaches_all` rows of a table,
    rows are updated in place; if that is interrupted, the cache is broken (`BrokenCacheError`). Else they are planned
    as one batch, if there are any, and after an interrupt the step is taken or not. Raises `StorageFullError` before
    anything changes."""
    groups = [group for group in tables.groups if isinstance(group, HostGroup)]
    numbers = [optimizer.numbers(tuple(group.steps), []) for group in groups]
    taken = [each for each in numbers if each is not None]
    if len(taken) < len(groups):
        return
    if not reaches_all:
        every = [each for some in rounds for each in some]
        with tables.locked() if every else tables.placed.now.rows.held():
            planned = [
                (group, *_planned(group, every, given), given) for group, given in zip(groups, taken, strict=True)
            ]
            carry_out([RowPass(group, rows, given) for group, _, rows, given in planned])
        for _, ticket, _, _ in planned:
            if ticket is not None:
                ticket.release()
        return
    with tables.changing("a step over whole tables", tables.parts, calls_inside=True) as change:
        for table in range(len(tables.config.tables)):
            tables.reserve(table)
        for some in rounds:
            for group, given in zip(groups, taken, strict=True):
                change.has_begun = True
                _update(group, some, given)
        for group, given in zip(groups, taken, strict=True):
            if given.dense_step is not None:
                group.cache.cold.history.append(group.stepping, given.dense_step)
            group.steps = [step + 1 for step in group.steps]


class _Given(NamedTuple):
    """Rows of a group in a step: their `keys`, int64 (K,), and `gradient`, in which each row is an occurrence in a bag
    of its own, in a `space` whose features have no columns of their own."""

    keys: Array
    gradient: Gradient
    space: KeySpace


def _given(group: HostGroup, some: Sequence[TableRows]) -> _Given | None:
    """The rows that belong to the group; None without any."""
    space = group.space
    position = {int(table): j for j, table in enumerate(space.tables)}
    mine = [(position[each.table], each) for each in some if each.table in position and len(each.ids)]
    if not mine:
        return None
    features = [int(np.flatnonzero(space.table == j)[0]) for j, _ in mine]
    keys = np.concatenate([each.ids.numpy() + space.start[j] for j, each in mine])
    values = [each.values.numpy() for _, each in mine]
    grad = np.ascontiguousarray(values[0] if len(values) == 1 else np.concatenate(values))
    feature = np.repeat(np.array(features, np.int32), [len(each.ids) for _, each in mine])
    own_space = copy.copy(space)
    own_space.column, own_space.mode = np.zeros_like(space.column), np.full_like(space.mode, SUM)
    own = np.arange(len(keys), dtype=np.int32)
    return _Given(keys, Gradient(grad, own, feature, NO_WEIGHTS, NO_ARGMAX), own_space)


def _segments(places: Array, which: Array) -> Segments:
    """Segments of one occurrence each: rows at `places`, int32 (U,), and the occurrences `which`, int (U,)."""
    return Segments(places, np.arange(len(places) + 1, dtype=np.int64), which.astype(np.int32))


def _planned(group: HostGroup, some: Sequence[TableRows], numbers: Hyperparameters) -> tuple[Ticket | None, Pass]:
    """The update of the rows that belong to the group, after filling them into slots. The caller holds the locks."""
    given = _given(group, some)
    if given is None:
        return None, no_rows()
    ticket = group.cache.plan(given.keys, NO_USE, client=group.client)
    hot, segments = group.cache.hot, _segments(ticket.homes, given.gradient.sample)
    rounding = rounding_of(group, hot.key, ahead=1)
    return ticket, update(hot, segments, given.gradient, given.space, numbers, group.kept, rounding)


def _update(group: HostGroup, some: Sequence[TableRows], numbers: Hyperparameters) -> None:
    """Updates the rows that belong to the group in place."""
    given = _given(group, some)
    if given is None:
        return

    def change(rows: HotArrays, places: Array, which: Array) -> None:
        keys = group.cache.hot.key if rows is group.cache.hot else given.keys[which]
        rounding, segments = rounding_of(group, keys, ahead=1), _segments(places, which)
        updated = update(rows, segments, given.gradient, given.space, numbers, group.kept, rounding)
        updated.run()
        if isinstance(updated, CountedPass) and group.kept is not None:
            group.kept.replayed += updated.replayed

    group.cache.change_rows(given.keys, change)
