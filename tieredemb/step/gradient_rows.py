"""The gradient of a table by row: the rows that it reaches, and its values there. Everywhere else it is zero."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from tieredemb.errors import InvalidInputError, UnsupportedError, shown
from tieredemb.kernels.streams import on_device
from tieredemb.step.program import Collected, in_forward_order
from tieredemb.tables.group import DeviceGroup, HostGroup
from tieredemb.tables.table_set import TableSet


@dataclass(frozen=True, eq=False)
class RowSums:
    """A summand of a table's gradient: `values`, float32 (N, D), of the rows `ids`, int64 (N,), distinct, or −1 where
    there is nothing to add. On a CPU they ascend."""

    ids: torch.Tensor
    values: torch.Tensor

    def add_to(self, found: torch.Tensor, start: int) -> None:
        """Adds the values of rows from `start` on to `found`, float32 (K, D). Does not synchronise."""
        if self.ids.device.type == "cpu":
            low, high = np.searchsorted(self.ids.numpy(), (start, start + len(found))).tolist()
            found[self.ids[low:high] - start] += self.values[low:high]
            return
        place = self.ids - start
        is_inside = (place >= 0) & (place < len(found))
        # the others add nothing, if possible each to another row, as additions to one row wait for each other
        values = torch.where(is_inside[:, None], self.values, -0.0)
        others = torch.arange(len(place), device=place.device) % len(found)
        found.index_add_(0, torch.where(is_inside, place, others), values)


@dataclass(frozen=True, eq=False)
class GradientRows(RowSums):
    """`ids`: int64 (U,), ascending · `values`: float32 (U, D), the gradient of each of these rows · `count`: the rows
    of the table."""

    count: int

    @classmethod
    def of(cls, given: torch.Tensor, shape: Sequence[int], device: torch.device) -> GradientRows:
        """From a plain tensor of `shape`, (rows, D), dense or sparse COO. Waits for a GPU. Raises
        `InvalidInputError` for another shape."""
        if tuple(given.shape) != tuple(shape):
            raise InvalidInputError(
                f"the gradient of a table of shape {tuple(shape)} has that shape, got {shown(given)}"
            )
        given = given.detach().to(device, torch.float32)
        if given.layout is torch.sparse_coo and given.sparse_dim() == 1:
            given = given.coalesce()
            return cls(given.indices()[0], given.values(), shape[0])
        whole = given.to_dense()
        ids = torch.nonzero(whole.ne(0).any(1)).reshape(-1)  # a NaN is not equal to 0
        return cls(ids, whole[ids], shape[0])

    @classmethod
    def empty(cls, shape: Sequence[int], device: torch.device) -> GradientRows:
        """A gradient that reaches no row."""
        rows, width = shape
        ids = torch.empty(0, dtype=torch.int64, device=device)
        return cls(ids, torch.empty((0, width), dtype=torch.float32, device=device), rows)

    def with_values(self, values: torch.Tensor) -> GradientRows:
        """A gradient of the same rows with other values."""
        return GradientRows(self.ids, values, self.count)

    def at(self, ids: torch.Tensor) -> torch.Tensor:
        """The gradient of rows `ids`, int64 (K,): float32 (K, D), zeros for rows that it does not reach."""
        found: torch.Tensor = self.values.new_zeros((len(ids), self.values.shape[1]))
        if len(self.ids):
            place = torch.searchsorted(self.ids, ids).clamp_(max=len(self.ids) - 1)
            is_here = self.ids[place] == ids
            found[is_here] = self.values[place[is_here]]
        return found

    def plus(self, other: GradientRows) -> GradientRows:
        """The sum of both."""
        ids = union([self, other])
        return GradientRows(ids, self.at(ids) + other.at(ids), self.count)

    def dense(self) -> torch.Tensor:
        """As a tensor, float32 (rows, D)."""
        found: torch.Tensor = self.values.new_zeros((self.count, self.values.shape[1]))
        found[self.ids] = self.values
        return found

    def sparse(self) -> torch.Tensor:
        """As a coalesced sparse COO tensor, float32 (rows, D), of one sparse dimension."""
        shape = (self.count, self.values.shape[1])
        found: torch.Tensor = torch.sparse_coo_tensor(
            self.ids[None], self.values.clone(), shape, is_coalesced=True, check_invariants=False
        )
        return found


class TableRows(NamedTuple):
    """The gradient of some rows of table number `table`: `ids` int64 (K,), ascending, `values` float32 (K, D). `start`:
    the first of them, if they are consecutive."""

    table: int
    ids: torch.Tensor
    values: torch.Tensor
    start: int | None = None

    def split(self, size: int) -> Iterator[TableRows]:
        """The same rows, at most `size` at a time."""
        for first in range(0, len(self.ids), size):
            some, start = slice(first, first + size), None if self.start is None else self.start + first
            yield TableRows(self.table, self.ids[some], self.values[some], start)


def union(those: Sequence[GradientRows]) -> torch.Tensor:
    """All rows that any of these gradients reaches, int64 (U,), ascending."""
    first, *others = those
    if all(each.ids is first.ids for each in others):
        return first.ids
    ids: torch.Tensor = torch.unique(torch.cat([each.ids for each in those]))
    return ids


# --- of calls ---------------------------------------------------------------------------------------------------------


def rows_of_calls(tables: TableSet, collected: Collected) -> list[GradientRows]:
    """The gradient of each table, summed over all occurrences in these calls as their update sums them. Waits for a
    GPU. Raises `IdOutOfRangeError` or `InvalidInputError` if the calls' inputs were wrong."""
    found = list[GradientRows]()
    with torch.no_grad():
        for sums, table in zip(sums_of_calls(tables, collected), tables.config.tables, strict=True):
            at = torch.nonzero(sums.ids >= 0).reshape(-1)
            ids, order = sums.ids[at].sort()
            found.append(GradientRows(ids, sums.values[at[order]], table.num_embeddings))
    return found


def sums_of_calls(tables: TableSet, collected: Collected) -> list[RowSums]:
    """The same, to be added to the gradients of whole tables. Does not wait for a GPU, which may not have reported
    wrong ids yet; the step checks that on the device. Else raises as `rows_of_calls`."""
    device = tables.placed.now.config.device
    _check_capture(device)
    found: list[RowSums] = [
        GradientRows.empty((table.num_embeddings, table.embedding_dim), device) for table in tables.config.tables
    ]
    collected = in_forward_order(collected)
    if not collected:
        return found
    tables.check_faults()
    with torch.no_grad(), tables.placed.now.rows.held():
        for g, group in enumerate(tables.groups):
            if isinstance(group, DeviceGroup):
                sums = _sums_on_device(group, g, collected)
            else:
                assert isinstance(group, HostGroup)
                sums = _sums_on_host(group, g, collected)
            for number, total in zip(group.space.tables.tolist(), sums, strict=True):
                found[number] = total
    return found


def _check_capture(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            "the gradient of a table by row, which a hook, torch.autograd.grad or an operation on its elements needs, "
            "is found by waiting for the GPU, which a captured step cannot do; capture a step without it"
        )


def _sums_on_host(group: HostGroup, g: int, collected: Collected) -> list[RowSums]:
    """The sums for each table of a group."""
    from tieredemb.lookup.gradient_rows_cpu import row_sums
    from tieredemb.step.host_call import gather

    parts, space = [call.parts[g] for call, _ in collected], group.space
    for part in parts:
        group.cache.check_rows(part.ticket)
    segments, gradient = gather(group, parts, [grad for _, grad in collected])
    filled = np.flatnonzero(np.diff(segments.starts))
    first = segments.order[segments.starts[filled]]
    feature = gradient.feature[first]
    table, ids = space.table[feature], np.concatenate([part.bags.keys for part in parts])[first] - space.first[feature]
    values, found = row_sums(segments, gradient, space)[filled], list[RowSums]()
    for position in range(len(space.tables)):
        mine = np.flatnonzero(table == position)
        mine = mine[np.argsort(ids[mine])]
        found.append(RowSums(torch.from_numpy(ids[mine]), torch.from_numpy(values[mine])))
    return found


def _sums_on_device(group: DeviceGroup, g: int, collected: Collected) -> list[RowSums]:
    """The same, at the first occurrence of each row. Does not synchronise."""
    from tieredemb.lookup.gradient_norm import first_occurrences
    from tieredemb.lookup.gradient_rows import occurrence_sums
    from tieredemb.step.device_update import combined

    batch, tickets = combined(collected, g)
    with on_device(group.config.device), group.cache.using(*tickets):
        first = first_occurrences(batch.homes)
        sums = occurrence_sums(group.lookup, first, batch.bag, batch.samples, batch.grad, batch.scale, batch.argmax)
        feature = torch.div(batch.bag, max(1, batch.samples), rounding_mode="floor").to(torch.int64)
        keys = torch.cat([call.parts[g].bags.keys for call, _ in collected])
        ids = group.device_space.ids(keys, batch.homes, feature)
        table = feature if group.device_space.table is None else group.device_space.table[feature]
        is_sum = first == torch.arange(len(first), device=first.device)
        return [
            RowSums(torch.where(is_sum & (table == position), ids, -1), sums)
            for position in range(len(group.space.tables))
        ]


# --- operations -------------------------------------------------------------------------------------------------------


def pointwise(func: Callable[..., Any], args: Any, kwargs: Any, shape: Sequence[int]) -> GradientRows | None:
    """The result of a pointwise operation on gradients by row, of a table of `shape`, on numbers, and on tensors that
    can be expanded to it. None if the result is not zero outside of the rows that these reach, or no gradient. Waits
    for a GPU."""
    given: list[GradientRows] = []
    tree_map_only(GradientRows, given.append, (args, kwargs))
    ids = union(given)

    def inside(each: Any) -> Any:
        if isinstance(each, GradientRows):
            # an operation in place changes its argument
            return each.values.clone() if each.ids is ids else each.at(ids)
        return each[ids] if each.dim() == 2 and len(each) == shape[0] else each

    others = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    # an operation in place keeps its shape
    sizes = [(1, 1), *((1,) * (2 - each.dim()) + tuple(each.shape) for each in others)]
    around = tuple(map(max, zip(*sizes, strict=True)))

    def outside(each: GradientRows) -> torch.Tensor:
        return each.values.new_zeros(around)

    with torch.no_grad():
        some_args, some_kwargs = tree_map_only((GradientRows, torch.Tensor), inside, (args, kwargs))
        result = func(*some_args, **some_kwargs)
        if not isinstance(result, torch.Tensor) or result.shape != (len(ids), shape[1]):
            return None
        if result.dtype is not torch.float32:
            return None
        if len(ids) < shape[0]:
            other_args, other_kwargs = tree_map_only(GradientRows, outside, (args, kwargs))
            rest = func(*other_args, **other_kwargs)
            if not bool((rest == 0).all()):
                return None
    return GradientRows(ids, result, shape[0])
