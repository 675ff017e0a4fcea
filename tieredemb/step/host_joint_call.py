"""Joint calls on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from tieredemb.cache.host.clients import Planners
from tieredemb.cache.tickets import TicketShare
from tieredemb.errors import InvalidInputError
from tieredemb.kernels.row_format import CARRIERS
from tieredemb.kernels.tracing import ranged
from tieredemb.lookup.bags import EqualBags
from tieredemb.lookup.bags_cpu import Bags, offsets_rise
from tieredemb.step.host_call import HostCall, HostGroupCall
from tieredemb.step.joint_call import JointCall, PartCall

if TYPE_CHECKING:
    from tieredemb.cache.tickets import Ticket
    from tieredemb.step.batch import Batch, Given
    from tieredemb.tables.group import Group, HostGroup

    Array = np.ndarray[Any, Any]


class HostJointCall(JointCall, HostCall):
    """See `JointCall`."""

    _ids: tuple[torch.Tensor, ...]  # of each forward, as they were planned, int64 (N,)
    _offsets: dict[int, torch.Tensor]  # of those that gave any, int32 or int64 (B,)

    def join(self, forwards: Sequence[Given]) -> Batch:
        self._offsets = {}
        batch = self.form.join(forwards, self._join_edges)
        self._ids = torch.split(batch.ids, self.form.counts)
        return batch

    def _join_edges(self, given: list[torch.Tensor]) -> torch.Tensor:
        """The edges of all bags, int64 (F·B + pools,), of the offsets that were given, each int32 or int64 (B,)."""
        size, copies = self.form.size, {id(offsets): offsets.clone() for offsets in given}
        self._offsets = {
            number: copies[id(offsets)] for number, offsets in zip(self.form.with_offsets, given, strict=True)
        }
        edges, checked = np.empty(self.form.edges, np.int64), set()
        for number, (length, count) in enumerate(zip(self.form.lengths, self.form.counts, strict=True)):
            which, place = self.form.where[number]
            block = self.form.blocks[which]
            of_block = edges[block.edges]
            of_block[-1] = block.starts[-1]
            its = of_block[place * size : (place + 1) * size]
            if length >= 0:
                its[:] = np.arange(size) * length
            else:
                offsets = self._offsets[number]
                its[:] = offsets.numpy()
                if (id(offsets), count) not in checked and not offsets_rise(its, size, count):
                    raise InvalidInputError("offsets of one of the tables, which says itself what is wrong with them")
                checked.add((id(offsets), count))
            its += block.starts[place]
        return torch.from_numpy(edges)

    def share(self, number: int, given: Given) -> HostPartCall | None:
        """A numpy array over the memory of a tensor can change it, and torch does not know."""
        ids, *offsets = cast("tuple[torch.Tensor, ...]", given)
        if not torch.equal(ids.reshape(-1).to(torch.int64), self._ids[number]):
            return None
        if offsets and not torch.equal(offsets[0], self._offsets[number]):
            return None
        return HostPartCall(self, number)

    def _catch_up_all(self, block: int) -> bool:
        with self.context.tables.placed.now.rows.again():
            return self._is_as_looked_up(block) and self.parts[block].keep_caught_up()

    def blocks_of(self, batch: Batch, groups: Sequence[Group]) -> list[tuple[Array, Array, int | Planners | None]]:
        ids, joined = batch.ids.numpy(), batch.offsets  # edges, which were checked as they were joined
        found: list[tuple[Array, Array, int | Planners | None]] = []
        for block, group in zip(self.form.blocks, groups, strict=True):
            if isinstance(joined, EqualBags):
                assert block.bags is not None
                edges = block.bags.edges()
            else:
                edges = joined.numpy()[block.edges]
            found.append((ids[block.ids], edges, Planners(group.clients, np.array(block.starts))))
        return found

    @ranged("lookup")
    def pool_blocks(self) -> list[torch.Tensor]:
        dtype, found = self.context.tables.placed.now.config.output_dtype, []
        for part, block in zip(self.parts, self.form.blocks, strict=True):
            out = np.empty((len(block.positions) * self.batch, part.group.space.width), CARRIERS[dtype])
            part.pool_below(out)
            found.append(torch.from_numpy(out).view(dtype))
        return found


class HostPartCall(PartCall, HostCall):
    """See `PartCall`."""

    def _part(self) -> HostGroupCall:
        whole, place, batch = self.joint.parts[self.block], self.place, self.batch
        bags, ticket = cast("Bags", whole.bags), cast("Ticket", whole.ticket)
        mine = slice(*self.joint.form.blocks[self.block].starts[place : place + 2])
        first, end = int(ticket.uniques[:place].sum()), int(ticket.uniques[: place + 1].sum())
        edges = bags.offsets[place * batch : (place + 1) * batch + 1]
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
