"""A step on the CPU that is given the gradients of rows, and no calls: of many rows some at a time."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from tieredemb.cache.tickets import Ticket
from tieredemb.kernels.constants import SUM
from tieredemb.kernels.parallel_cpu import Pass
from tieredemb.kernels.segments_cpu import Segments
from tieredemb.lookup.embedding_bag_cpu import NO_ARGMAX, NO_WEIGHTS
from tieredemb.lookup.optimizer import Hyperparameters
from tieredemb.lookup.optimizer_cpu import CountedPass, Gradient, update
from tieredemb.step.gradient_rows import TableRows
from tieredemb.step.host_call import Todo, carry_out, no_rows, rounding_of
from tieredemb.tables.group import HostGroup
from tieredemb.tables.row_optimizer import RowOptimizer
from tieredemb.tables.table_set import TableSet

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]


def update_rows(tables: TableSet, optimizer: RowOptimizer, rounds: Iterator[list[TableRows]]) -> None:
    """One step of the optimizer, in which each row has its gradient in one of the `rounds`, which are at most as many
    rows as may be planned at once. One alone is applied or not, whatever interrupts; a step of several that was
    interrupted leaves the cache broken (`BrokenCacheError`)."""
    first, second = next(rounds, []), next(rounds, None)
    groups = [cast("HostGroup", group) for group in tables.groups]
    numbers = [optimizer.numbers(group, []) for group in groups]
    taken = [each for each in numbers if each is not None]
    if len(taken) < len(groups):
        return
    if second is None:
        with tables.locked():
            todo: list[Todo] = []
            tickets = []
            for group, its in zip(groups, taken, strict=True):
                ticket, rows = _prepared(group, first, its)
                tickets.append(ticket)
                todo.append((group, rows, its))
            carry_out(todo)
        return
    kinds = ("weight", "state")
    parts = [(tables.part(table, kind)) for table in range(len(tables.config.tables)) for kind in kinds]
    with tables.changing("a step over whole tables", parts, calls_inside=True) as change:
        for some in _chained(first, second, rounds):
            for group, its in zip(groups, taken, strict=True):
                ticket, rows = _prepared(group, some, its)
                change.has_begun = True
                group.cache.rows_version += 1
                rows.run()
                if isinstance(rows, CountedPass) and group.kept is not None:
                    group.kept.replayed += rows.replayed
                if ticket is not None:
                    ticket.release()
        for group, its in zip(groups, taken, strict=True):
            if its.terms is not None and group.kept is not None:
                group.kept.append(its.step, its.rate[0], its.missed, its.terms)
            group.steps = [step + 1 for step in group.steps]


def _chained(
    first: list[TableRows], second: list[TableRows], rest: Iterator[list[TableRows]]
) -> Iterator[list[TableRows]]:
    yield first
    yield second
    yield from rest


def _prepared(group: HostGroup, some: Sequence[TableRows], numbers: Hyperparameters) -> tuple[Ticket | None, Pass]:
    """The update of those rows that are the group's, which were brought into slots. The caller holds the locks."""
    space = group.space
    position = {int(table): j for j, table in enumerate(space.tables)}
    mine = [(position[each.table], each) for each in some if each.table in position and len(each.ids)]
    if not mine:
        return None, no_rows()
    features = [int(np.flatnonzero(space.table == j)[0]) for j, _ in mine]
    keys = np.concatenate([each.ids.numpy() + space.start[j] for j, each in mine])
    values = [each.values.numpy() for _, each in mine]
    grad = values[0] if len(values) == 1 else np.concatenate(values)
    count = len(keys)
    ticket = group.cache.plan(keys, score=False, ages=False, client=group.client)
    own = np.arange(count, dtype=np.int32)
    segments = Segments(ticket.homes, np.arange(count + 1, dtype=np.int64), own)
    feature = np.repeat(np.array(features, np.int32), [len(each.ids) for _, each in mine])
    its = copy.copy(space)  # each row has a gradient of its own, whatever features make of theirs
    its.column, its.mode = np.zeros_like(space.column), np.full_like(space.mode, SUM)
    gradient = Gradient(np.ascontiguousarray(grad), own, feature, NO_WEIGHTS, NO_ARGMAX)
    hot = group.cache.hot
    return ticket, update(hot, segments, gradient, its, numbers, group.kept, rounding_of(group, hot.key, ahead=1))
