"""A step on a GPU from gradients of rows, without calls; many rows are given in rounds. And how a loss reads a whole
table there.

The step of several chunks is one change in the caches' intent logs, inside which the caches are called as usual. A GPU
counts the step first and keeps its history last, so rows that a chunk's gradient is computed from are read at the step
before (`DeviceGroup.reading_before`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from tieredemb.kernels.constants import MAX
from tieredemb.kernels.streams import on_device
from tieredemb.lookup.device_lookup import WORK_WORDS
from tieredemb.lookup.spoilt import Scaling
from tieredemb.step.device_update import scaling_of
from tieredemb.step.gradient_rows import TableRows
from tieredemb.step.whole_gradient import chunk_rows
from tieredemb.tables.group import DeviceGroup
from tieredemb.tables.row_optimizer import RowOptimizer
from tieredemb.tables.table_set import TableSet


class _Begun(NamedTuple):
    """A step of a group: its options, rates and other numbers, and `taken`, int32 (`WORK_WORDS`,), ones if the step is
    taken, zeros if it is skipped."""

    group: DeviceGroup
    options: torch.Tensor
    rate: torch.Tensor
    numbers: torch.Tensor
    taken: torch.Tensor


def update_rows(
    tables: TableSet, optimizer: RowOptimizer, rounds: Iterator[list[TableRows]], faults: torch.Tensor | None
) -> None:
    """One step of the optimizer; each row has its gradient in one of the `rounds`. The device takes no step if
    `faults`, int64 (3 K,), contain one of a batch that the gradients are of. If it is interrupted, the cache is broken
    (`BrokenCacheError`). Waits for a GPU over staged tiers alone."""
    device = tables.config.device
    groups = [group for group in tables.groups if isinstance(group, DeviceGroup)]
    with (
        tables.changing("a step over whole tables", tables.parts, calls_inside=True) as change,
        on_device(device),
    ):
        scaling, _ = scaling_of([optimizer], tables, [])
        options = [optimizer.options_on(group) for group in groups]
        if faults is None:
            faults = torch.empty(0, dtype=torch.int64, device=device)
        change.has_begun = True
        # gradients are computed from rows before the step, even after it is counted and has updated others
        with contextlib.ExitStack() as reading:
            for group in groups:
                reading.enter_context(group.reading_before())
            begun = [_begin(group, option, faults, scaling) for group, option in zip(groups, options, strict=True)]
            for some in rounds:
                for each in some:
                    step = next(step for step in begun if each.table in step.group.space.tables)
                    for chunk in each.split(chunk_rows(tables, each.table)):
                        _update(step, chunk)
        for group, given, rate, numbers, _ in begun:
            if group.past is not None:
                with group.cache.using():
                    group.lookup.end(given, group.device_steps, rate, numbers, group.past)


def _begin(group: DeviceGroup, options: torch.Tensor, faults: torch.Tensor, scaling: Scaling) -> _Begun:
    taken = torch.ones(WORK_WORDS, dtype=torch.int32, device=faults.device)
    with group.cache.using():
        rate, numbers = group.lookup.begin(options, group.device_steps, faults, scaling, taken, group.past)
    return _Begun(group, options, rate, numbers, taken)


def _update(step: _Begun, rows: TableRows) -> None:
    """Takes the step that was begun for some rows of a table."""
    group, count = step.group, len(rows.ids)
    position = _position(group, rows.table)
    # consecutive rows are updated in place, others are planned
    found = (
        group.rows(position, rows.ids) if rows.start is None else group.range(position, rows.start, rows.start + count)
    )
    with found as there:
        segments = there.segments()
        segments.work.mul_(step.taken)
        first = int(group.space.column[there.feature])
        grad, argmax = _behind(first, rows.values), None
        if group.space.mode[there.feature] == MAX:  # each row is the winner of all its elements
            own = torch.arange(count, dtype=torch.int32, device=rows.ids.device)
            argmax = _behind(first, own[:, None].expand(rows.values.shape))
        group.cache.rows_version += 1
        group.lookup.update(
            there.hot, there.overflow, segments, grad, None, argmax, step.rate, step.numbers, group.past,
            group.device_steps,
        )  # fmt: skip


def _position(group: DeviceGroup, table: int) -> int:
    """The position of a table in its group."""
    return int(np.flatnonzero(group.space.tables == table)[0])


def _behind(first: int, values: torch.Tensor) -> torch.Tensor:
    """A tensor of the shape of `values` (K, D) whose memory has them `first` elements behind its beginning, where
    kernels expect the columns of a feature."""
    if first == 0:
        return values.contiguous()
    buffer = torch.empty(first + values.numel(), dtype=values.dtype, device=values.device)
    buffer[first:].view(values.shape).copy_(values)
    return buffer[: values.numel()].view(values.shape)


def read_rows(tables: TableSet, table: int, start: int, stop: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """Copies the rows `start` … `stop` − 1 of a table at the current step, (K, D), on the GPU, to `out` if given."""
    with tables.locked():
        group, _, _ = tables.locate(table)
        assert isinstance(group, DeviceGroup)
        with group.range(_position(group, table), start, stop) as found:
            return found.weights(out)
