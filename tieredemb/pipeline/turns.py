"""The turns of a captured step that goes ahead: a buffer, the batch in it, its plans, the graph that computes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar, cast

import torch

from tieredemb.cache.base import PlanKind
from tieredemb.cache.device.cache import DeviceCache
from tieredemb.cache.device.effects import Effects
from tieredemb.cache.device.plan import Phase
from tieredemb.cache.device.planner import DeferredRows
from tieredemb.cache.device.ticket import DeviceTicket
from tieredemb.errors import InvalidInputError
from tieredemb.pipeline.buffers import Buffers
from tieredemb.pipeline.captured import StepFunction
from tieredemb.pipeline.lookups import LookupSpec
from tieredemb.pipeline.plan_executors import StreamExecutor
from tieredemb.pipeline.plan_groups import PlanGroups, PlannedGroup, plan_groups
from tieredemb.step.planned_forwards import Planned

if TYPE_CHECKING:
    from tieredemb.step.call import Call
    from tieredemb.step.device_group_call import DeviceGroupCall

R = TypeVar("R")
Lookups = Callable[[Any], Sequence[LookupSpec]]


class PlannedCall(Protocol):
    """A forward that was planned ahead, or several as one. `parts`: what each cache has planned of it · `memory`: where
    that lies, into which the forward of a later batch may be planned."""

    @property
    def parts(self) -> Sequence[DeviceGroupCall]: ...

    @property
    def memory(self) -> Any: ...

    def rebind(self, tickets: Sequence[DeviceTicket]) -> PlannedCall:
        """What a replay has planned to the same memory, with the `tickets` of its parts."""

    def arrive(self) -> None:
        """The current stream waits for what was planned ahead."""

    def has_arrived(self) -> None:
        """Nothing need wait for it any more."""


class PlanState(NamedTuple):
    """Of a batch that is in flight in one cache: whether it looks for rows without a slot, and at which phase its rows
    are left for later; None where none are."""

    uncached: bool
    deferred: Phase | None


def states_of(calls: list[PlannedCall]) -> list[PlanState]:
    tickets = [part.ticket for call in calls for part in call.parts]
    return [
        PlanState(ticket.overflow.uncached, None if ticket.plan is None else ticket.plan.left_at) for ticket in tickets
    ]


@dataclass(frozen=True)
class TurnGraph(Generic[R]):
    """A captured step. `effects`: on the books of each cache · `states`: of the plans that it uses · `memories`: where
    those and the ones that it makes are, by turns · `made`: these, as they were captured."""

    graph: torch.cuda.CUDAGraph
    result: R
    effects: list[Effects]
    states: list[PlanState]
    memories: list[list[Any]]
    made: tuple[list[PlannedCall], list[PlannedGroup]]

    def fits(self, turns: Sequence[Turn[R]], caches: Sequence[DeviceCache]) -> bool:
        """Whether plans are where it uses and makes them, and there is no more room for rows without a slot than it
        knows of. Else it has to be captured anew."""
        if any(turn.memories != memories for turn, memories in zip(turns, self.memories, strict=True)):
            return False
        return not any(cache.outgrew(each) for cache, each in zip(caches, self.effects, strict=True))

    def knows(self, calls: list[PlannedCall]) -> bool:
        """Whether the plans that it would use, `calls`, are as those were that it was captured with."""
        states = states_of(calls)
        if len(states) != len(self.states):
            return False
        each = zip(states, self.states, strict=True)
        return not any(here.uncached > known.uncached or here.deferred != known.deferred for here, known in each)


class Turn(Generic[R]):
    """One of the buffers, the `batch` in it, the forwards that are planned for that, and the `graph` that computes
    it."""

    def __init__(self, buffers: Buffers, behind: torch.cuda.Stream) -> None:
        """`behind`: the stream on which the rows of the batch before come."""
        self.buffers = buffers
        self._behind = behind
        self._deferred: dict[DeviceCache, DeferredRows] = {}
        self.batch: Any = None
        self.graph: TurnGraph[R] | None = None
        self.ran: torch.cuda.Event | None = None  # of several ranks: comes once the last replay is over that planned it
        self._planned: list[PlannedGroup] = []
        # as they were planned last by launches; replays plan to where these are
        self._launched: list[PlannedGroup] = []
        self._calls: list[PlannedCall] = []
        self._groups = PlanGroups()

    @property
    def memories(self) -> list[Any]:
        """Where its forwards are planned."""
        return [call.memory for call in self._calls]

    @property
    def made_last(self) -> tuple[list[PlannedCall], list[PlannedGroup]]:
        """Its plans, as they were made last by launches."""
        return self._calls, self._launched

    @property
    def defers_rows(self) -> bool:
        """Whether it was planned so that its rows are deferred: all that this needs is there."""
        return bool(self._deferred)

    def load(self, batch: Any) -> None:
        """Copies a batch in. Raises `InvalidInputError` for one that does not fit."""
        self.drop()
        self.buffers.load(batch)
        self.batch = batch

    def load_if_it_fits(self, batch: Any) -> bool:
        """Copies a batch in that has yet to be asked for; it will be told then that it does not fit."""
        try:
            self.load(batch)
        except InvalidInputError:
            return False
        return True

    def wanted(self, step: StepFunction[R], lookups: Lookups) -> list[LookupSpec]:
        """The forwards that the batch will come to."""
        return [lookup._replace(trains=lookup.trains and step.trains) for lookup in lookups(self.buffers.batch)]

    def plan(self, executor: StreamExecutor, step: StepFunction[R], lookups: Lookups) -> None:
        """Plans the forwards of the batch, to where those of one before were."""
        wanted = self.wanted(step, lookups)
        with executor.together(wanted):
            self._plan(executor, wanted)

    def plan_deferred(self, executor: StreamExecutor, wanted: list[LookupSpec], caches: Sequence[DeviceCache]) -> None:
        """The same, on the stream that is current, among others that `executor` plans together. What is missed comes
        with the next plan, or when it is asked for."""
        with ExitStack() as deferring:
            for cache in caches:
                if cache not in self._deferred:
                    self._deferred[cache] = DeferredRows(self._behind)
                deferring.enter_context(cache.defer_rows(self._deferred[cache]))
            self._plan(executor, wanted)

    def _plan(self, executor: StreamExecutor, wanted: list[LookupSpec]) -> None:
        if any(lookup.module.agreement is None for lookup in wanted):  # else ids are exchanged first
            executor.wait_to_plan()

        def plan_alone(lookup: LookupSpec, kind: PlanKind, memory: Any) -> Planned:
            return lookup.module.plan_ahead(executor, *lookup.given, kind=kind, memory=memory)

        plan_groups(self._groups.of(wanted), plan_alone, self._planned, self.memories)
        if not any(each.failed for _, each in self._planned):
            self._calls, self._launched = self.calls(), [*self._planned]

    def check_planned(self) -> None:
        """Raises what planning has ended in."""
        for _, each in self._planned:
            each.result()

    def calls(self) -> list[PlannedCall]:
        """The planned forwards; none if they are not all there."""
        if not all(among.is_whole(each) for among, each in self._planned):
            return []
        return [cast("PlannedCall", each.result()) for _, each in self._planned]

    def made(self) -> list[PlannedCall]:
        """Those forwards that could be planned."""
        return [cast("PlannedCall", each.result()) for _, each in self._planned if each.left and not each.failed]

    def rebind_plans(self, graph: TurnGraph[R], opened: dict[DeviceCache, list[DeviceTicket]]) -> None:
        """A replay is about to plan them, as the batches that it has `opened` in each cache."""
        self._planned = []
        calls, launched = self._calls, self._launched = graph.made
        tickets = {cache: iter(each) for cache, each in opened.items()}
        for call, (among, each) in zip(calls, launched, strict=True):
            rebound = call.rebind([next(tickets[part.group.cache]) for part in call.parts])
            planned = each.rebind(cast("Call", rebound))
            among.add(planned)
            self._planned.append((among, planned))

    def over(self) -> None:
        """A replay has computed the batch."""
        planned, self._planned, self.batch = self._planned, [], None
        for among, each in planned:
            among.drop(each)

    def unplan(self) -> None:
        """Gives up the plans as `drop` does, and keeps the batch."""
        batch = self.batch
        self.drop()
        self.batch = batch

    def drop(self) -> int:
        """Gives up the plans that no forward has taken, and forgets the batch; returns how many there were. The current
        stream waits for them, as it may be about to overwrite what they read."""
        planned, self._planned, self.batch = self._planned, [], None
        dropped = [each for among, each in planned if among.holds(each) and not each.failed]
        try:
            for each in dropped:
                cast("PlannedCall", each.result()).arrive()
        finally:
            for among, each in planned:
                among.drop(each)
        return len(dropped)
