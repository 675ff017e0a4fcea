"""A captured step that plans the next batch while it computes one.

Two buffers take turns, and there is a graph for each: it forks a stream that plans the batch in the other buffer and
brings its rows, and computes the one in its own, whose rows the replay before has brought. Each plan is made to where
the plan of the batch before last was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from itertools import zip_longest
from typing import Any, Generic, TypeVar, cast

import torch

from tieredemb.cache.device_cache import DeviceCache, DeviceTicket, Replays
from tieredemb.errors import InvalidInputError
from tieredemb.modules.ahead import Given, Planned
from tieredemb.modules.base import TieredModule
from tieredemb.modules.call import Call
from tieredemb.modules.device_call import DeviceCall
from tieredemb.pipeline.buffers import Buffers
from tieredemb.pipeline.captured import EAGER_STEPS, StepFunction, capture
from tieredemb.pipeline.lanes import StreamLane
from tieredemb.pipeline.lookups import Lookup

R = TypeVar("R")
Lookups = Callable[[Any], Sequence[Lookup]]


class StepAhead(Generic[R]):
    """A step that computes a batch and plans the `following` one."""

    def __init__(self, step: StepFunction[R]) -> None:
        self._step = step
        self._lane = StreamLane(step.device)
        self._now, self._then = (_Turn[R](step.buffers.again()) for _ in range(2))
        self._left = EAGER_STEPS
        self._last: list[int] | None = None  # batches planned when the last step was over, which has planned this one's

    def __call__(self, batch: Any, following: Any | None, lookups: Lookups | None) -> R:
        """Computes `batch`. `lookups`: what a batch's forwards will look up, where the user has told it."""
        now, then, step = self._now, self._then, self._step
        lookups = lookups or step.lookups
        calls = now.calls(batch)
        if not calls:
            self._last = None
            now.load(batch)
            with step.on_buffers():
                now.plan(self._lane, step, lookups)
        if following is None or not then.load_if_it_fits(following):
            self._last = None
            with step.on_buffers():
                return now.compute(step)
        self._now, self._then = then, now
        if now.graph is not None and self._outgrew(now, calls):
            now.graph = None
        if self._left > 0 or not self._may_replay(calls):
            self._left -= 1
            result = self._overlap(now, then, lookups)
        elif now.graph is None:
            result = self._capture(now, then, calls, lookups)
        else:
            result = self._replay(now, then, calls)
        self._last = [cache.last for cache in self._step.caches()]
        return result

    def give_up(self) -> None:
        """Gives up the batch that was planned for the next call."""
        self._last = None
        for turn in (self._now, self._then):
            turn.drop()

    def _may_replay(self, calls: list[DeviceCall]) -> bool:
        """Whether nothing was planned since the last step, and nothing is in flight but what it has planned."""
        if self._last is None:
            return False
        pairs = zip(self._step.caches(), self._last, strict=True)
        return all(cache.may_replay(_tickets(calls, cache), last) for cache, last in pairs)

    def _outgrew(self, now: _Turn[R], calls: list[DeviceCall]) -> bool:
        """Whether more rows without a slot are in flight than its graph knows of, which has to be captured anew."""
        if _slotless(calls) and not now.slotless:
            return True
        return any(cache.outgrew(each) for cache, each in zip(self._step.caches(), now.replays, strict=True))

    def _overlap(self, now: _Turn[R], then: _Turn[R], lookups: Lookups) -> R:
        """The step as the function it is, in the order of a captured one."""
        with self._step.on_buffers(), self._step.beside():
            then.plan(self._lane, self._step, lookups)
            return now.compute(self._step)

    def _capture(self, now: _Turn[R], then: _Turn[R], calls: list[DeviceCall], lookups: Lookups) -> R:
        """Captures the step, and replays it a first time. What the capture has done to the caches' books is what that
        replay does to the caches."""
        for call in calls:
            call.arrive()  # nothing inside may wait for what is outside
        caches, graph = self._step.caches(), torch.cuda.CUDAGraph()
        first = {cache: cache.last for cache in caches}
        pool = None if then.graph is None else then.graph.pool()
        try:
            with ExitStack() as captured:
                replays = [captured.enter_context(cache.capturing(_tickets(calls, cache))) for cache in caches]
                captured.enter_context(self._step.on_buffers())
                captured.enter_context(capture(graph, pool))
                then.plan(self._lane, self._step, lookups)
                then.check_planned()
                result = now.compute(self._step)
                torch.cuda.current_stream().wait_stream(self._lane.stream)
        except BaseException:
            self.give_up()
            raise
        planned = then.calls()
        for call in planned:
            call.has_arrived()
        offsets = [[part.ticket.batch - first[part.group.cache] for part in call.parts] for call in planned]
        now.graph, now.result, now.replays, now.offsets = graph, result, replays, offsets
        now.slotless = _slotless(calls)
        self._step.before_replay()
        graph.replay()
        for cache in caches:
            cache.replayed(Replays())
        return result

    def _replay(self, now: _Turn[R], then: _Turn[R], calls: list[DeviceCall]) -> R:
        assert now.graph is not None
        for call in calls:
            call.arrive()
        self._step.before_replay()
        now.graph.replay()
        now.drop()
        first = {cache: cache.replayed(each) for cache, each in zip(self._step.caches(), now.replays, strict=True)}
        then.planned_again(now.offsets, first)
        return now.result  # type: ignore[return-value]


def _slotless(calls: list[DeviceCall]) -> bool:
    return any(part.ticket.away.slotless for call in calls for part in call.parts)


def _tickets(calls: list[DeviceCall], cache: DeviceCache) -> list[DeviceTicket]:
    return [part.ticket for call in calls for part in call.parts if part.group.cache is cache]


class _Turn(Generic[R]):
    """One of the two buffers, the forwards that are planned for the batch in it, and the step that computes it."""

    def __init__(self, buffers: Buffers) -> None:
        self.buffers = buffers
        self.graph: torch.cuda.CUDAGraph | None = None
        self.result: R | None = None
        self.slotless = False  # whether the graph looks for rows without a slot
        self.replays: list[Replays] = []  # of each cache
        self.offsets: list[list[int]] = []  # batches that a replay plans into the other turn, from the last before it
        self._batch: Any = None  # what was loaded
        self._planned: list[tuple[TieredModule, Planned]] = []
        # as they were planned last by launches, and of what; replays plan to where these are
        self._calls: list[DeviceCall] = []
        self._given: list[Given] = []

    def load(self, batch: Any) -> None:
        """Copies a batch in. Raises `InvalidInputError` for one that does not fit."""
        self.drop()
        self.buffers.load(batch)
        self._batch = batch

    def load_if_it_fits(self, batch: Any) -> bool:
        """Copies a batch in that has yet to be asked for; it will be told then that it does not fit."""
        try:
            self.load(batch)
        except InvalidInputError:
            return False
        return True

    def plan(self, lane: StreamLane, step: StepFunction[R], lookups: Lookups) -> None:
        """Plans the forwards of the batch, to where those of the one before were."""
        memories = [call.memory for call in self._calls]
        for lookup, memory in zip_longest(lookups(self.buffers.batch), memories):
            if lookup is not None:
                trains = lookup.trains and step.trains
                planned = lookup.module.plan_ahead(lane, *lookup.given, trains=trains, memory=memory)
                self._planned.append((lookup.module, planned))
        if not any(planned.failed for _, planned in self._planned):
            self._calls, self._given = self.calls(), [planned.given for _, planned in self._planned]

    def check_planned(self) -> None:
        """Raises what planning has ended in."""
        for _, planned in self._planned:
            planned.future.result()

    def calls(self, batch: Any = None) -> list[DeviceCall]:
        """The planned forwards; none if they are not all there, or not of `batch`."""
        if batch is not None and batch is not self._batch:
            return []
        if any(planned.failed or not module.ahead.holds(planned) for module, planned in self._planned):
            return []
        return [cast("DeviceCall", planned.future.result()) for _, planned in self._planned]

    def planned_again(self, offsets: list[list[int]], first: dict[DeviceCache, int]) -> None:
        """A replay has planned them, as batches at `offsets` from the `first` of each cache."""
        self._planned = []
        for call, given, ahead in zip(self._calls, self._given, offsets, strict=True):
            batches = [first[part.group.cache] + number for part, number in zip(call.parts, ahead, strict=True)]
            planned = Planned(given, _done(call.again(batches)))
            call.module.ahead.add(planned)
            self._planned.append((call.module, planned))

    def compute(self, step: StepFunction[R]) -> R:
        """The function of the batch; its forwards find their plans."""
        result = step(self.buffers.batch)
        self.drop()
        return result

    def drop(self) -> None:
        """Gives up the plans that no forward has taken, and forgets the batch."""
        planned, self._planned, self._batch = self._planned, [], None
        for module, each in planned:
            module.ahead.drop(each)


def _done(call: Call) -> Future[Call]:
    future: Future[Call] = Future()
    future.set_result(call)
    return future
