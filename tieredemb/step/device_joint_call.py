"""Joint calls on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from tieredemb.cache.tickets import TicketShare
from tieredemb.kernels.streams import current_stream
from tieredemb.lookup.device_bags import DeviceBags, Edges, join_edges
from tieredemb.step.device_call import DeviceCall
from tieredemb.step.device_group_call import DeviceGroupCall
from tieredemb.step.joint_call import JointCall, PartCall

if TYPE_CHECKING:
    from tieredemb.cache.device.ticket import DeviceTicket
    from tieredemb.step.batch import Batch, Given
    from tieredemb.step.call_memory import CallMemory
    from tieredemb.tables.group import DeviceGroup
    from tieredemb.tables.pool import Together


class DeviceJointCall(JointCall, DeviceCall):
    """See `JointCall`. Offsets are checked where they are planned."""

    tells_at_once = False  # but with the first forward: there may be none

    def join(self, forwards: Sequence[Given]) -> Batch:
        group = cast("DeviceGroup", self.context.tables.groups[0])

        def edges(given: list[torch.Tensor]) -> torch.Tensor:
            parts = group.words.get(self.form.parts).view(5, -1)
            offsets = torch.cat(given).to(torch.int64) if given else parts[0, :0]
            return join_edges(offsets, parts, self.form.size, self.form.edges)

        self.layout, self.blocks = self.form.layout, len(self.form.blocks)
        return self.form.join(forwards, edges)

    def ids_in(self, groups: Sequence[DeviceGroup]) -> list[int]:
        return [block.starts[-1] for block in self.form.blocks]

    def blocks_of(self, ids: torch.Tensor, edges: Edges) -> list[tuple[torch.Tensor, Edges]]:
        found = []
        for block in self.form.blocks:
            bags: Any = block.bags if self.form.is_equal else cast("torch.Tensor", edges.offsets)[block.edges]
            its = Edges(bags, len(block.positions) * self.form.size + 1, edges.exact)
            found.append((ids[block.ids], its))
        return found

    def addresses(self) -> list[int]:
        return [faults.address for faults in cast("Together", self.context.tables).block_faults]

    def output_shapes(self) -> list[tuple[int, int]]:
        return [
            (len(block.positions) * self.batch, group.space.width)
            for block, group in zip(self.form.blocks, self.context.tables.groups, strict=True)
        ]

    def pool_blocks(self) -> list[torch.Tensor]:
        return self.pool_all(None, differentiable=False)

    def share(self, number: int, given: Given) -> DevicePartCall:
        return DevicePartCall(self, number)

    def begin_alone(self) -> None:
        self.source = None
        self._tell()

    def _tell(self) -> None:
        """Tells the host of a fault, unless that was done."""
        if self.tells_later:
            self.follow()
            self._tell_now()

    @property
    def gpu(self) -> int:  # type: ignore[override]
        return self.memory.fault.get_device()

    def _catch_up_all(self, block: int) -> bool:
        self.follow()
        self.parts[block].catch_up(self.memory.faults[block])
        return True

    def _looked_up(self) -> Sequence[torch.Tensor]:
        if not self._rows and self.source is None:
            self._tell()
        return super()._looked_up()

    def again(self, batches: Sequence[int]) -> DeviceJointCall:
        call = super().again(batches)
        assert isinstance(call, DeviceJointCall)
        call._forget_parts()
        return call


class DevicePartCall(PartCall, DeviceCall):
    """See `PartCall`."""

    joint: DeviceJointCall
    tells_later = False
    _parts: list[DeviceGroupCall]
    _made_on = 0  # the stream that it got a part of its own on

    @property
    def memory(self) -> CallMemory:  # type: ignore[override]
        return self.joint.memory

    def _part(self) -> DeviceGroupCall:
        whole = self.joint.parts[self.block]
        with whole.group.cache.using(whole.ticket):  # behind the plan, whatever stream it was made on
            return self._part_of(whole)

    def _part_of(self, whole: DeviceGroupCall) -> DeviceGroupCall:
        whole.join()
        self._made_on = torch._C._cuda_getCurrentRawStream(self.memory.fault.get_device())
        group: DeviceGroup = self.context.tables.placed.now.groups[0]  # type: ignore[assignment]
        batch, place, bags = self.batch, self.place, whole.bags
        mine = slice(*self.joint.form.blocks[self.block].starts[place : place + 2])
        edges = bags.offsets[place * batch : (place + 1) * batch + 1]
        trained = None if whole.trained is bags.homes else whole.trained[mine]
        own = DeviceBags(
            keys=bags.keys[mine],
            homes=bags.homes[mine],
            offsets=edges - edges[0],
            bag=bags.bag[mine] - place * batch,
            position=None,
            batch=batch,
        )
        part = DeviceGroupCall(group, own, self.context.options, None, trained, None, own.batch)
        part.ticket = cast("DeviceTicket", TicketShare(whole.ticket, homes=own.homes))
        return part

    def complete(self) -> bool:
        return self.joint.complete()

    def arrive(self) -> None:
        self.joint.arrive()

    def catch_up(self) -> None:
        self.joint.follow()  # rows of other forwards, which may never come, stay behind
        whole = self.joint.parts[self.block]
        whole.catch_up(self.memory.faults[self.block], self.place)

    def pool(self, weights: torch.Tensor | None, *, differentiable: bool) -> torch.Tensor:
        if self.keeps_rows:
            self.joint.keeps_rows = True
        return super().pool(weights, differentiable=differentiable)

    def follow(self, *more: torch.Tensor) -> None:
        held = [value for part in self._parts for value in (*part.held(), part.bags.offsets, part.bag)]
        if held and torch._C._cuda_getCurrentRawStream(self.memory.fault.get_device()) != self._made_on:
            for tensor in held:
                tensor.record_stream(current_stream())
        self.joint.follow(*more)
