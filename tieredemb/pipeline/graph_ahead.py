"""A captured step that plans the next batch while it computes one.

Two buffers take turns, and there is a graph for each: it forks a stream that plans the batch in the other buffer and
brings its rows, and computes the one in its own, whose rows the replay before has brought. Each plan is made to where
the plan of the batch before last was.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import torch

from tieredemb.cache.device.cache import DeviceCache
from tieredemb.cache.device.ledger import NOTHING_PLANNED, Replays
from tieredemb.cache.device.ticket import DeviceTicket
from tieredemb.errors import InvalidInputError
from tieredemb.kernels.streams import on_device
from tieredemb.pipeline.buffers import Buffers
from tieredemb.pipeline.captured import EAGER_STEPS, StepFunction
from tieredemb.pipeline.joint_plans import PlannedUnit, Units, plan_units
from tieredemb.pipeline.lookups import LookupSpec
from tieredemb.pipeline.plan_executors import StreamExecutor
from tieredemb.pipeline.uncapturable import explain
from tieredemb.step.call_memory import CallMemory
from tieredemb.step.device_call import DeviceCall
from tieredemb.step.planned_forwards import Planned

R = TypeVar("R")
Lookups = Callable[[Any], Sequence[LookupSpec]]


class StepAhead(Generic[R]):
    """A step that computes a batch and plans the `following` one."""

    def __init__(self, step: StepFunction[R]) -> None:
        self._step = step
        # no other executor's stream: captures fork into it, and what other threads launch there would be captured, too
        self._executor = StreamExecutor(step.device, torch.cuda.Stream(step.device, priority=-1))  # type: ignore[no-untyped-call]
        self._now, self._then = (_Turn[R](step.buffers.again()) for _ in range(2))
        self._left = EAGER_STEPS
        self._last: list[int] | None = None  # batches planned when the last step was over, which has planned this one's
        self._warned = False

    def __call__(self, batch: Any, following: Any | None, told: Lookups | None) -> R:
        """Computes `batch`. `told`: what a batch's forwards will look up, where the user has said it."""
        with on_device(self._step.device):
            return self._run(batch, following, self._lookups(told))

    def give_up(self) -> None:
        """Gives up the batch that was planned for the next call."""
        self._last = None
        for turn in (self._now, self._then):
            turn.drop()

    def _lookups(self, told: Lookups | None) -> Lookups:
        """Those of the modules that the step uses."""
        lookups, modules = told or self._step.lookups, self._step.modules
        return lambda batch: [lookup for lookup in lookups(batch) if any(lookup.module is each for each in modules)]

    def _run(self, batch: Any, following: Any | None, lookups: Lookups) -> R:
        now, then, step = self._now, self._then, self._step
        with step.locked:
            calls = now.calls() if now.batch is batch else []
            may_replay = self._may_replay(now, calls)  # which puts the buffers behind the last call, too
            if not calls:
                self._last, self._left = None, EAGER_STEPS
                now.load(batch)
                with step.on_buffers():
                    now.plan(self._executor, step, lookups)
            has_following = following is not None and then.load_if_it_fits(following)
            if has_following:
                self._now, self._then = then, now
            if has_following and may_replay and now.graph is not None:
                return self._replay(now, now.graph, then, calls)
            if has_following and may_replay and self._left <= 0 and not step.accumulates():
                return self._capture(now, then, calls, lookups)
        if not has_following:
            self._last = None
            with step.on_buffers():
                return self._compute(now)
        self._left -= 1
        result = self._overlap(now, then, lookups)
        self._last = [cache.last for cache in step.caches]
        return result

    def _may_replay(self, now: _Turn[R], calls: list[DeviceCall]) -> bool:
        """Whether nothing was planned since the last step, and nothing is in flight but what it has planned: as far
        back as the graph knows of, if there is one."""
        if now.graph is not None and not now.graph.fits(calls, self._then.memories, self._step.caches):
            now.graph = None
        replays = [NOTHING_PLANNED] * len(self._step.caches) if now.graph is None else now.graph.replays
        last: list[int] | list[None] = [None] * len(replays) if self._last is None else self._last
        each = zip(self._step.caches, last, replays, strict=True)
        fresh = [cache.may_replay(_tickets(calls, cache), number, does) for cache, number, does in each]
        return self._last is not None and bool(calls) and all(fresh)

    def _overlap(self, now: _Turn[R], then: _Turn[R], lookups: Lookups) -> R:
        """The step as the function it is, in the order of a captured one."""

        def run() -> R:
            then.plan(self._executor, self._step, lookups)
            return self._compute(now)

        with self._step.on_buffers():
            return self._step.beside(run)

    def _compute(self, now: _Turn[R]) -> R:
        """The function of the batch; its forwards find their plans."""
        result = self._step.heard(now.buffers.batch)
        if now.drop() and not self._warned:
            self._warned = True
            warnings.warn(
                "a captured step planned a batch that no forward looked up: its function gives the model other tensors "
                "than those planned (copies, other shapes, ids computed from them); name the ones it gives with ids_of",
                stacklevel=6,
            )
        return result

    def _capture(self, now: _Turn[R], then: _Turn[R], calls: list[DeviceCall], lookups: Lookups) -> R:
        """Captures the step, and replays it a first time. What the capture has done to the caches' books is what that
        replay does to the caches: no other thread's call comes between."""
        step, graph = self._step, torch.cuda.CUDAGraph()
        for call in calls:
            call.arrive()  # nothing inside may wait for what is outside
        first = {cache: cache.last for cache in step.caches}
        reads = [call.memory for call in calls]
        try:
            with ExitStack() as caches:
                replays = [caches.enter_context(cache.capturing(_tickets(calls, cache))) for cache in step.caches]
                pool = None if then.graph is None else then.graph.graph.pool()
                with step.on_buffers(), step.capture(graph, pool), self._joined():
                    then.plan(self._executor, step, lookups)
                    then.check_planned()
                    result = self._compute(now)
            planned = then.calls()
            for call in planned:
                call.has_arrived()
            offsets = [[part.ticket.batch - first[part.group.cache] for part in call.parts] for call in planned]
            step.after_capture()
            graph.replay()
        except BaseException as error:
            for call in then.made():
                call.has_arrived()  # nothing of it has run
            step.after_capture()
            self.give_up()
            explain(error)
            raise
        for cache in step.caches:
            cache.replayed(NOTHING_PLANNED)
        if planned:  # else another thread has given them up
            now.graph = _Graph(graph, result, replays, offsets, _slotless(calls), reads, then.memories)
        self._last = [cache.last for cache in step.caches]
        return result

    @contextmanager
    def _joined(self) -> Iterator[None]:
        """The executor's stream forks off a capture inside, and joins it at the end."""
        self._executor.stream.wait_stream(torch.cuda.current_stream())
        try:
            yield
        except BaseException:
            with suppress(RuntimeError):  # of a capture that is none any more: what comes is why
                torch.cuda.current_stream().wait_stream(self._executor.stream)
            raise
        torch.cuda.current_stream().wait_stream(self._executor.stream)

    def _replay(self, now: _Turn[R], graph: _Graph[R], then: _Turn[R], calls: list[DeviceCall]) -> R:
        for call in calls:
            call.arrive()
        self._step.before_replay()
        graph.graph.replay()
        now.over()
        first = {cache: cache.replayed(does) for cache, does in zip(self._step.caches, graph.replays, strict=True)}
        then.planned_again(graph.offsets, first)
        self._last = [cache.last for cache in self._step.caches]
        return graph.result


@dataclass(frozen=True)
class _Graph(Generic[R]):
    """A captured step. `replays`: what it does to each cache's book · `offsets`: of the batches that it plans, for each
    forward and group, from the last one before · `slotless`: whether it looks for rows without a slot · `reads`,
    `writes`: where the plans are that it uses and makes."""

    graph: torch.cuda.CUDAGraph
    result: R
    replays: list[Replays]
    offsets: list[list[int]]
    slotless: bool
    reads: list[CallMemory]
    writes: list[CallMemory]

    def fits(self, calls: list[DeviceCall], writes: list[CallMemory], caches: Sequence[DeviceCache]) -> bool:
        """Whether plans are where it uses and makes them, and no more rows without a slot are in flight than it knows
        of. Else it has to be captured anew."""
        if calls and ([call.memory for call in calls] != self.reads or (_slotless(calls) and not self.slotless)):
            return False
        if writes != self.writes:
            return False
        return not any(cache.outgrew(each) for cache, each in zip(caches, self.replays, strict=True))


def _slotless(calls: list[DeviceCall]) -> bool:
    return any(part.ticket.overflow.slotless for call in calls for part in call.parts)


def _tickets(calls: list[DeviceCall], cache: DeviceCache) -> list[DeviceTicket]:
    return [part.ticket for call in calls for part in call.parts if part.group.cache is cache]


class _Turn(Generic[R]):
    """One of the two buffers, the `batch` in it, the forwards that are planned for that, and the `graph` that computes
    it."""

    def __init__(self, buffers: Buffers) -> None:
        self.buffers = buffers
        self.batch: Any = None
        self.graph: _Graph[R] | None = None
        self._planned: list[PlannedUnit] = []
        # as they were planned last by launches; replays plan to where these are
        self._launched: list[PlannedUnit] = []
        self._calls: list[DeviceCall] = []
        self._units = Units()

    @property
    def memories(self) -> list[CallMemory]:
        """Where its forwards are planned."""
        return [call.memory for call in self._calls]

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

    def plan(self, executor: StreamExecutor, step: StepFunction[R], lookups: Lookups) -> None:
        """Plans the forwards of the batch, to where those of the one before were."""
        wanted = [lookup._replace(trains=lookup.trains and step.trains) for lookup in lookups(self.buffers.batch)]

        def plan_alone(lookup: LookupSpec, **how: Any) -> Planned:
            return lookup.module.plan_ahead(executor, *lookup.given, trains=lookup.trains, **how)

        with executor.together(wanted):
            plan_units(self._units.of(wanted), plan_alone, self._planned, self.memories, ahead=True)
        if not any(each.failed for _, each in self._planned):
            self._calls, self._launched = self.calls(), [*self._planned]

    def check_planned(self) -> None:
        """Raises what planning has ended in."""
        for _, each in self._planned:
            each.result()

    def calls(self) -> list[DeviceCall]:
        """The planned forwards; none if they are not all there."""
        if not all(among.is_whole(each) for among, each in self._planned):
            return []
        return [cast("DeviceCall", each.result()) for _, each in self._planned]

    def made(self) -> list[DeviceCall]:
        """Those forwards that could be planned."""
        return [cast("DeviceCall", each.result()) for _, each in self._planned if each.left and not each.failed]

    def planned_again(self, offsets: list[list[int]], first: dict[DeviceCache, int]) -> None:
        """A replay has planned them, as batches at `offsets` from the `first` of each cache."""
        self._planned = []
        for call, (among, each), ahead in zip(self._calls, self._launched, offsets, strict=True):
            batches = [first[part.group.cache] + number for part, number in zip(call.parts, ahead, strict=True)]
            planned = each.again(call.again(batches))
            among.add(planned)
            self._planned.append((among, planned))

    def over(self) -> None:
        """A replay has computed the batch."""
        planned, self._planned, self.batch = self._planned, [], None
        for among, each in planned:
            among.drop(each)

    def drop(self) -> int:
        """Gives up the plans that no forward has taken, and forgets the batch; returns how many there were. The current
        stream waits for them, as it may be about to overwrite what they read."""
        planned, self._planned, self.batch = self._planned, [], None
        dropped = [each for among, each in planned if among.holds(each) and not each.failed]
        try:
            for each in dropped:
                cast("DeviceCall", each.result()).arrive()
        finally:
            for among, each in planned:
                among.drop(each)
        return len(dropped)
