"""Joint calls on the CPU."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from tieredemb.cache.host.clients import Planners
from tieredemb.cache.tickets import TicketShare
from tieredemb.errors import InvalidInputError
from tieredemb.kernels.ranges import ranged
from tieredemb.kernels.row_format import CARRIERS
from tieredemb.lookup.bags_cpu import Bags, offsets_rise
from tieredemb.step.call import NUMBERS, CallContext
from tieredemb.step.host_call import HostCall, HostGroupCall
from tieredemb.step.joint_call import JointCall, PartCall

if TYPE_CHECKING:
    from tieredemb.cache.tickets import Ticket
    from tieredemb.step.batch import Batch, Given
    from tieredemb.tables.group import HostGroup

    Array = np.ndarray[Any, Any]


class HostJointCall(JointCall, HostCall):
    """See `JointCall`."""

    _ids: Array  # of all forwards, as they were planned, int64 (N,)
    _edges: Array | None = None  # of the bags of all forwards, int64 (F·B + 1,), where offsets were given

    def join(self, forwards: Sequence[Given]) -> Batch:
        def edges(given: list[torch.Tensor]) -> torch.Tensor:
            self._edges = self._join_edges(given)
            return torch.from_numpy(self._edges)

        batch = self.form.join(forwards, edges)
        self._ids = batch.ids.numpy()
        return batch

    def _join_edges(self, given: list[torch.Tensor]) -> Array:
        """The edges of all bags, int64 (F·B + 1,), of the offsets that were given, each int32 or int64 (B,)."""
        size, offsets = self.form.size, iter(given)
        edges = np.empty(self.count * size + 1, np.int64)
        edges[-1] = self.starts[-1]
        for number, length in enumerate(self.form.lengths):
            first, its = self.starts[number], edges[number * size : (number + 1) * size]
            if length >= 0:
                its[:] = np.arange(size) * length
            else:
                its[:] = next(offsets).numpy()
                if not offsets_rise(its, size, self.starts[number + 1] - first):
                    raise InvalidInputError("offsets of one of the tables, which says itself what is wrong with them")
            its += first
        return edges

    def share(self, position: int, context: CallContext, given: Given) -> HostPartCall | None:
        """A numpy array over the memory of a tensor can change it, and torch does not know."""
        ids, *offsets = cast("tuple[torch.Tensor, ...]", given)
        if not np.array_equal(ids.numpy().reshape(-1), self._ids[self.starts[position] : self.starts[position + 1]]):
            return None
        if offsets and self._edges is not None:
            edges = self._edges[position * self.batch : (position + 1) * self.batch]
            if not np.array_equal(offsets[0].numpy(), edges - edges[0]):
                return None
        return HostPartCall(self, position, context)

    def _planners(self, group: HostGroup) -> Planners:
        return Planners(group.clients, np.array(self.starts))

    def _lookup_now(self) -> Hashable:
        if self.context.is_dense:  # tables that have steps of their own to catch up with
            return None
        return self.parts[0].group.cache.rows_version, torch.is_inference_mode_enabled()

    @ranged("lookup")
    def pool(self, weights: torch.Tensor | None, *, differentiable: bool) -> torch.Tensor:
        (whole,), config = self.parts, self.context.tables.placed.now.config
        rows = self.count * self.batch if config.pooled else self.ids
        out = np.empty((rows, whole.group.space.width), CARRIERS[config.output_dtype])
        whole.pool_below(out)
        return torch.from_numpy(out).view(config.output_dtype)


class HostPartCall(PartCall, HostCall):
    """See `PartCall`."""

    def _part(self) -> HostGroupCall:
        (whole,), position, batch = self.joint.parts, self.position, self.batch
        bags, ticket = cast("Bags", whole.bags), cast("Ticket", whole.ticket)
        mine = slice(self.joint.starts[position], self.joint.starts[position + 1])
        first, end = int(ticket.uniques[:position].sum()), int(ticket.uniques[: position + 1].sum())
        edges = bags.offsets[position * batch : (position + 1) * batch + 1]
        own = Bags(
            keys=bags.keys[mine],
            offsets=edges - edges[0],
            sample=bags.sample[mine],
            feature=np.zeros(self.ids, np.int32),
            position=None,
            batch=batch,
        )
        share = TicketShare(
            ticket,
            homes=ticket.homes[mine],
            inverse=np.maximum(ticket.inverse[mine] - np.int32(first), np.int32(-1)),  # which padding stays
            unique_keys=ticket.unique_keys[first:end],
            unique_slots=ticket.unique_slots[first:end],
        )
        group = cast("HostGroup", self.context.tables.placed.now.groups[0])
        return HostGroupCall(group, own, self.context.options, cast("Ticket", share))

    def start(self, *, trains: bool) -> None:
        self.number = next(NUMBERS)
        self.joint.begin()
        if trains and self.context.is_dense:
            self.catch_up()
