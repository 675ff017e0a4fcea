"""A forward of ranks that a captured step plans ahead: its results lie in the memory of an earlier such forward.

A replay that computes a batch finds the results of its exchange and plan at one place, whichever graph has written
them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from tieredemb.cache.base import PlanKind
from tieredemb.errors import UnsupportedError
from tieredemb.kernels.copies import copy_on_device
from tieredemb.kernels.streams import side_by_side
from tieredemb.shallow import shallow_copy
from tieredemb.sharding.call import ShardedCall, ShardedCallContext
from tieredemb.sharding.captures import FoundAhead
from tieredemb.sharding.header import LargestRequest
from tieredemb.sharding.request import Request
from tieredemb.step.batch import Batch
from tieredemb.step.device_call import DeviceCall
from tieredemb.step.planned_forwards import PlanExecutor, Planned, PlannedForwards
from tieredemb.tables.group import device_groups

if TYPE_CHECKING:
    from tieredemb.cache.device.ticket import DeviceTicket
    from tieredemb.sharding.gpu_bags import GpuBags
    from tieredemb.sharding.shard import Shard
    from tieredemb.step.call_memory import CallMemory
    from tieredemb.step.device_group_call import DeviceGroupCall


class PersistentMemory:
    """The memory of one forward planned ahead: `tensors` like those `found`, and the `report` that a graph writes for
    the host. `plans`: the memory of each shard's plan, once there are any."""

    def __init__(self, found: Sequence[torch.Tensor], report: torch.Tensor) -> None:
        self.report = report
        self.tensors = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in found]
        self.plans: list[CallMemory] = []

    def fits(self, found: Sequence[torch.Tensor]) -> bool:
        """Whether tensors have the shapes and dtypes of its own."""
        return [(each.shape, each.dtype) for each in found] == [(each.shape, each.dtype) for each in self.tensors]

    def fill(self, found: Sequence[torch.Tensor]) -> None:
        """Copies tensors there. Does not synchronise."""
        copy_on_device(self.tensors, [tensor.contiguous() for tensor in found])


class PersistentCall(ShardedCall, FoundAhead):
    """A forward that is planned into the `memory` of one that is over, or into new memory."""

    _bags: Sequence[GpuBags]

    def __init__(self, context: ShardedCallContext, batch: Batch, memory: PersistentMemory | None = None) -> None:
        """Exchanges ids as a `ShardedCall` that goes ahead, with each different row coming back once. Raises
        `UnsupportedError` on all ranks where a batch is known to have more than fits."""
        self.row_bound = context.row_bound
        super().__init__(context, batch, ahead=True)
        self.form = context.bounds(self.row_bound)
        if self._bounds != self.form:
            raise UnsupportedError("a batch of more ids than captured steps exchange waits for its forward")
        found = list[torch.Tensor]()

        def note(tensor: torch.Tensor) -> torch.Tensor:
            found.append(tensor)
            return tensor

        for each in self._known:
            each.relocate(note)
        if memory is None or not memory.fits(found):
            cache = device_groups(context.shards[0].engine.tables.groups)[0].cache
            with cache.memory():
                memory = PersistentMemory(found, context.captures.report_buffer())
        memory.fill(found)
        if self._report is not None:
            self.report = memory.report.copy_(self._report, non_blocking=True)
        tensors = iter(memory.tensors)
        for each in self._known:
            each.relocate(lambda _: next(tensors))
        self.memory = memory
        self._stream_use.record_made()
        self._plans: list[DeviceCall] = []
        # of a call that a replay has planned: the plans as they were launched, until its forward runs
        self._replayed: list[tuple[PlannedForwards, Planned]] = []

    def _note_requested(self, most: Sequence[LargestRequest]) -> None:
        super()._note_requested(most)
        self.context.note_rows(most)

    @property
    def _known(self) -> list[GpuBags | Request]:
        return [*self._bags, *self._requests]

    def plan_ahead(self, executor: PlanExecutor, kind: PlanKind) -> None:
        """See `ShardedCall`; raises what planning does."""
        memories: Sequence[CallMemory | None] = self.memory.plans or [None] * len(self._requests)

        def plan(shard: Shard, request: Request, memory: CallMemory | None) -> None:
            planned = shard.plan_ahead(executor, request, kind, memory)
            self._planned.append((shard.engine.planned, planned))
            call = planned.result()
            assert isinstance(call, DeviceCall)
            self._plans.append(call)

        each = zip(self.context.shards, self._requests, memories, strict=True)
        side_by_side(self.context.device, [functools.partial(plan, *its) for its in each], "shards")
        made = [plan.memory for plan in self._plans]
        if made != self.memory.plans:  # another object, so that a graph with other plans notices
            self.memory = shallow_copy(self.memory)
            self.memory.plans = made

    @property
    def parts(self) -> list[DeviceGroupCall]:
        """What each cache has planned of it."""
        return [part for plan in self._plans for part in plan.parts]

    def rebind(self, tickets: Sequence[DeviceTicket]) -> PersistentCall:
        """The call that a replay has planned into the memory of this one, with the `tickets` of its parts."""
        call, tickets_of_parts = shallow_copy(self), iter(tickets)
        call.number, call.consumed, call.within, call.keeps_rows = -1, False, None, False
        call._planned, call._replayed, call._calls, call._rows = [], self._planned, [], []
        call._plans = [plan.rebind([next(tickets_of_parts) for _ in plan.parts]) for plan in self._plans]
        return call

    def fetch(self, weights: torch.Tensor | None, *, trains: bool, recomputed: bool, is_announced: bool = True) -> bool:
        """See `ShardedCall`. It changes bags and requests, which all calls in this memory share: so it has copies."""
        replayed, self._replayed = self._replayed, []
        if replayed:
            plans = zip(replayed, self._plans, strict=True)
            self._planned = [(among, launched.rebind(plan)) for (among, launched), plan in plans]
            for among, planned in self._planned:
                among.add(planned)
        self._bags, self._requests = [each.rebind() for each in self._bags], [each.rebind() for each in self._requests]
        return super().fetch(weights, trains=trains, recomputed=recomputed, is_announced=is_announced)

    def _release_plans(self) -> None:
        replayed, self._replayed = self._replayed, []
        if replayed:
            for plan in self._plans:
                plan.release()
        super()._release_plans()

    def arrive(self) -> None:
        """The current stream waits for what was exchanged and planned ahead."""
        self._stream_use.arrive()
        for plan in self._plans:
            plan.arrive()

    def mark_arrived(self) -> None:
        """Nothing need wait for it any more."""
        self._stream_use.mark_arrived()
        for plan in self._plans:
            plan.mark_arrived()
