"""Arenas of a captured step: each is the memory of one batch. An arena is free; then its batch is planned, looked up
and updated; then it is free again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar, cast

import torch

from tieredemb.cache.device.cache import DeviceCache
from tieredemb.cache.device.effects import Effects
from tieredemb.cache.device.plan import Phase
from tieredemb.cache.device.planner import DeferredRows
from tieredemb.cache.device.ticket import DeviceTicket
from tieredemb.errors import InvalidInputError
from tieredemb.kernels.collectives import is_over
from tieredemb.pipeline.buffers import Buffers
from tieredemb.pipeline.captured import StepFunction
from tieredemb.pipeline.lookups import LookupSpec
from tieredemb.pipeline.plan_executors import StreamExecutor
from tieredemb.pipeline.plan_groups import PlanGroups, PlannedGroup, plan_at_once, plan_groups

if TYPE_CHECKING:
    from tieredemb.step.device_group_call import DeviceGroupCall
    from tieredemb.step.planned_forwards import Planned
    from tieredemb.step.program import Call

R = TypeVar("R")
Lookups = Callable[[Any], Sequence[LookupSpec]]  # of a batch


class PlannedCall(Protocol):
    """A forward that was planned ahead, or several as one. `parts`: for each cache its part of the plan · `memory`: of
    the plan, into which the forward of a later batch may be planned."""

    @property
    def parts(self) -> Sequence[DeviceGroupCall]: ...

    @property
    def memory(self) -> Any: ...

    def rebind(self, tickets: Sequence[DeviceTicket]) -> PlannedCall:
        """A call for the plan that a replay has made in the same memory, with the `tickets` of its parts."""

    def arrive(self) -> None:
        """Has the current stream wait for the plan made ahead."""

    def mark_arrived(self) -> None:
        """Nothing needs to wait for it any more."""


def _call_of(planned: Planned) -> PlannedCall:
    """The call that was planned on a GPU. Raises the error of the plan."""
    return cast("PlannedCall", planned.result())


class PlanState(NamedTuple):
    """A batch in flight in one cache. `uncached`: whether it may use rows without a slot · `deferred`: the phase after
    which its rows are deferred; None if they are not."""

    uncached: bool
    deferred: Phase | None


def states_of(calls: list[PlannedCall]) -> list[PlanState]:
    tickets = [part.ticket for call in calls for part in call.parts]
    return [
        PlanState(ticket.overflow.uncached, None if ticket.plan is None else ticket.plan.left_at) for ticket in tickets
    ]


@dataclass(frozen=True)
class StepGraph(Generic[R]):
    """A captured step: the `graph`, and the `result` that each replay overwrites. `form`: of what ranks exchange in it
    · `count_sent`: counts what a replay sends (`Agreement`). If it goes ahead, `effects`: in the ledger of each cache ·
    `states`: of the plans that it uses · `memories`: of these plans and of those that it makes, by arenas · `launched`:
    the latter, as they were captured."""

    graph: torch.cuda.CUDAGraph
    result: R
    effects: list[Effects]
    states: list[PlanState]
    memories: list[list[Any]]
    launched: tuple[list[PlannedCall], list[PlannedGroup]]
    form: object
    count_sent: Callable[[], object]

    def replay(self) -> None:
        """Launches it. Does not synchronise."""
        self.graph.replay()
        self.count_sent()

    def fits(self, arenas: Sequence[Arena[R]], caches: Sequence[DeviceCache]) -> bool:
        """Whether plans have the memory that it was captured with, and the tables of rows without a slot have not
        grown. Else it has to be captured anew."""
        if any(arena.memories != memories for arena, memories in zip(arenas, self.memories, strict=True)):
            return False
        return not any(cache.outgrew(each) for cache, each in zip(caches, self.effects, strict=True))

    def knows(self, calls: list[PlannedCall]) -> bool:
        """Whether the plans `calls` are of the kind that it was captured with."""
        states = states_of(calls)
        if len(states) != len(self.states):
            return False
        each = zip(states, self.states, strict=True)
        return not any(here.uncached > known.uncached or here.deferred != known.deferred for here, known in each)


class Arena(Generic[R]):
    """All memory of one batch: the `buffers` that it is copied to, its plans, and the `graph` that computes it.
    `batch`: the batch, until it was looked up."""

    def __init__(self, buffers: Buffers) -> None:
        self.buffers = buffers
        self.batch: Any = None
        self.graph: StepGraph[R] | None = None
        self._ran: torch.cuda.Event | None = None  # of several ranks, recorded after the last step that planned it
        self._deferred: dict[DeviceCache, DeferredRows] = {}
        self._planned: list[PlannedGroup] = []
        # the plans last made by launches; replays plan into their memory
        self._launched: list[PlannedGroup] = []
        self._calls: list[PlannedCall] = []
        self._groups = PlanGroups()

    @property
    def memories(self) -> list[Any]:
        """The memory of its plans."""
        return [call.memory for call in self._calls]

    @property
    def launched(self) -> tuple[list[PlannedCall], list[PlannedGroup]]:
        """The plans last made by launches."""
        return self._calls, self._launched

    @property
    def defers_rows(self) -> bool:
        """Whether plans into its present memory deferred rows before, so that there is memory for these rows."""
        return bool(self._deferred)

    def load(self, batch: Any) -> None:
        """Copies a batch to the buffers. Raises `InvalidInputError` if it does not fit."""
        self.drop()
        self.buffers.load(batch)
        self.batch = batch

    def load_if_it_fits(self, batch: Any) -> bool:
        """Copies a later batch to the buffers; if it does not fit, it raises at its own call."""
        try:
            self.load(batch)
        except InvalidInputError:
            return False
        return True

    def note_run(self) -> None:
        """With several ranks: the current stream has just run a step that has planned the batch."""
        if self._ran is None:
            self._ran = torch.cuda.Event()
        self._ran.record()

    def is_over(self, patience: float | None = None) -> bool:
        """With several ranks: waits for the last step that has planned it; see `collectives.is_over`."""
        return self._ran is None or is_over(self._ran, patience)

    def expected(self, step: StepFunction[R], named: Lookups | None = None) -> list[LookupSpec]:
        """The lookups that the step is expected to make in the batch, in its modules: as learned, or as `named`."""
        lookups = (named or step.lookups)(self.buffers.batch)
        return [each._replace(trains=each.trains and step.trains) for each in lookups if each.module in step.modules]

    def plan_at_once(self, step: StepFunction[R], done: list[PlannedGroup]) -> None:
        """Plans the forwards just before they start, groups of several as one, and appends these to `done`."""
        plan_at_once(self._groups.of(self.expected(step)), done)

    def plan(self, executor: StreamExecutor, expected: list[LookupSpec], deferring: Sequence[DeviceCache] = ()) -> None:
        """Plans the forwards of the batch ahead, in the memory of an earlier one, on the current stream, inside
        `executor.planning`. `deferring`: caches whose missed rows are filled with the next plan, or when they are
        needed."""
        before = self.memories
        with ExitStack() as entered:
            for cache in deferring:
                if cache not in self._deferred:
                    self._deferred[cache] = DeferredRows(executor.stream)
                entered.enter_context(cache.defer_rows(self._deferred[cache]))
            if any(lookup.module.agreement is None for lookup in expected):  # sharded modules exchange ids first
                executor.wait_to_plan()
            plan_groups(self._groups.of(expected), lambda _: executor, self._planned, before)
        if not any(each.failed for _, each in self._planned):
            self._calls, self._launched = self.calls(), [*self._planned]
            if not deferring and self.memories != before:
                self._deferred.clear()  # it was for plans of other sizes

    def check_planned(self) -> None:
        """Raises the error of a plan that failed."""
        for _, each in self._planned:
            each.result()

    def calls(self) -> list[PlannedCall]:
        """The planned forwards; none if not all are left and planned."""
        found: list[PlannedCall] = []
        for among, each in self._planned:
            if not among.is_whole(each):
                return []
            found.append(_call_of(each))
        return found

    def completed(self) -> list[PlannedCall]:
        """The forwards whose plans did not fail."""
        return [_call_of(each) for _, each in self._planned if each.left and not each.failed]

    def rebind_plans(self, graph: StepGraph[R], opened: dict[DeviceCache, list[DeviceTicket]]) -> None:
        """Called before a replay makes the plans: their batches are those `opened` in each cache."""
        self._planned = []
        calls, launched = self._calls, self._launched = graph.launched
        tickets = {cache: iter(each) for cache, each in opened.items()}
        for call, (among, each) in zip(calls, launched, strict=True):
            rebound = call.rebind([next(tickets[part.group.cache]) for part in call.parts])
            planned = each.rebind(cast("Call", rebound))
            among.add(planned)
            self._planned.append((among, planned))

    def over(self) -> None:
        """Called when a replay has computed the batch."""
        planned, self._planned, self.batch = self._planned, [], None
        for among, each in planned:
            among.drop(each)

    def drop(self) -> int:
        """Does as `unplan`, and forgets the batch."""
        self.batch = None
        return self.unplan()

    def unplan(self) -> int:
        """Drops the plans that no forward has taken; returns how many there were. The current stream waits for them, as
        it may overwrite their inputs next."""
        planned, self._planned = self._planned, []
        dropped = [each for among, each in planned if among.holds(each) and not each.failed]
        try:
            for each in dropped:
                _call_of(each).arrive()
        finally:
            for among, each in planned:
                among.drop(each)
        return len(dropped)
