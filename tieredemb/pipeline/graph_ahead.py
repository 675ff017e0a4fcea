"""A captured step that goes two batches ahead of the one that it computes.

Three buffers take turns, and there is a graph for each, of three branches: one computes the batch in its own buffer,
whose rows the replay before has brought; one brings the rows of the next batch, which was planned by then, so that the
way to cold storage never rests; and one plans the batch after that. Each plan is made to where the plan of three
batches before was.

Where the cache has room for the rows of three batches, a plan gives away slots at once. Where it may have not, it finds
what is missed, and slots are given away when the rows come, at the beginning of the next replay: the batch that was
computed by then locks nothing any more, and no hit is lost for going ahead.

So the way to cold storage rests between two replays alone, and where slots are given away late. Slots are given away
side by side for several widths, but rows come group by group: one swap alone saturates PCIe with few multiprocessors,
and five at once left none to what computes.

A plan has a memory of its own for what is to come (`Moving` in cache/plan.cuh), as the next plan counts in others.
What was left for later is on the books until the replay that brings it was launched. To end it again changes nothing,
as the device knows what has come (`over`, `published`): so a replay that was interrupted, or rows that another call
has brought in meanwhile, need no undoing.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from tieredemb.cache.base import Cache
from tieredemb.cache.device.cache import DeviceCache
from tieredemb.cache.device.effects import NOTHING_PLANNED
from tieredemb.cache.device.ticket import DeviceTicket
from tieredemb.kernels.streams import on_device, on_stream, own_stream, side_by_side
from tieredemb.pipeline.captured import StepFunction
from tieredemb.pipeline.plan_executors import StreamExecutor
from tieredemb.pipeline.turns import Lookups, PlannedCall, Turn, TurnGraph, states_of
from tieredemb.pipeline.uncapturable import explain

if TYPE_CHECKING:
    from tieredemb.pipeline.prefetch import Run

R = TypeVar("R")
TURNS = 3  # of this batch, and of the two that it goes ahead


class StepAhead(Generic[R]):
    """A step that computes a batch, brings in the rows of the next one and plans the one after."""

    reach = 2  # batches that it asks for: the rows of one come, while the other is planned

    def __init__(self, step: StepFunction[R]) -> None:
        self._step = step
        # no other executor's streams: captures fork into them, and what other threads launch there would be captured
        brings, plans = (own_stream(self, step.device, -1) for _ in range(2))
        self._executor, self._plans = StreamExecutor(step.device, brings), plans
        self._settles = plans  # where is done what has to come before the next plan
        # of this batch, and of the next ones
        self._turns = [Turn[R](step.buffers.another(), brings) for _ in range(TURNS)]
        self._left = step.eager_steps
        self._last: list[int] | None = None  # batches planned when the last step was over, which has planned this one's
        self._pending: list[int] = []  # transfers that it has left for later
        self._unknown = 0  # steps in a row whose plans were not as those that a graph was captured with
        self._warned = False

    def __call__(self, batch: Any, run: Run[Any]) -> R:
        """Computes `batch`, which the loop `run` has handed out, and goes ahead to its next ones, as far as they are
        known."""
        with on_device(self._step.device):
            return self._run(batch, run.following(self.reach), self._lookups(run.told))

    def give_up(self) -> None:
        """Gives up the batches that were planned for the next calls."""
        self._last = None
        for turn in self._turns:
            turn.drop()

    def _lookups(self, told: Lookups | None) -> Lookups:
        """Those of the modules that the step uses."""
        lookups, modules = told or self._step.lookups, self._step.modules
        return lambda batch: [lookup for lookup in lookups(batch) if any(lookup.module is each for each in modules)]

    def _run(self, batch: Any, following: Sequence[Any], lookups: Lookups) -> R:
        step, turns = self._step, self._turns
        now, coming, then = turns
        with step.locked:
            calls, next_calls = self._known(batch, following)
            known = [*calls, *next_calls]
            # which puts the buffers behind the last call, too
            may_replay = self._may_replay(now, known) and bool(next_calls)
            if not calls:
                self.give_up()
                self._left = step.eager_steps
                now.load(batch)
                with step.on_buffers():
                    now.plan(self._executor, step, lookups)
            unplanned = self._load(following)
            if coming.batch is not None:
                self._turns = [coming, then, now]
            if may_replay and unplanned == [then] and then.defers_rows:
                if self._knows(now, known):
                    return self._replay(turns, known)
                if now.graph is None and self._may_capture():
                    return self._capture(turns, known, lookups)
        return self._eagerly(turns, unplanned, lookups)

    def _known(self, batch: Any, following: Sequence[Any]) -> tuple[list[PlannedCall], list[PlannedCall]]:
        """What is planned for this batch, and for the next one."""
        now, coming, _ = self._turns
        calls = now.calls() if now.batch is batch else []
        return calls, coming.calls() if calls and following and coming.batch is following[0] else []

    def _knows(self, now: Turn[R], known: list[PlannedCall]) -> bool:
        """Whether there is a graph that computes what is planned now. One that for long does not is given up."""
        if now.graph is None:
            return False
        if now.graph.knows(known):
            self._unknown = 0
            return True
        self._unknown += 1
        if self._unknown > len(self._turns):  # it was no passing state
            now.graph = None
        return False

    def _may_capture(self) -> bool:
        """Whether all that a step leaves for the next one is there, which it is to bring in."""
        return self._left <= 0 and self._pending == self._transfers() and not self._step.accumulates()

    def _eagerly(self, turns: Sequence[Turn[R]], unplanned: Sequence[Turn[R]], lookups: Lookups) -> R:
        """The step as the function it is, which plans the batches that are `unplanned`."""
        now, _, then = turns
        if not unplanned:
            self._last = None
            with self._step.on_buffers():
                return self._compute(now)
        self._left -= unplanned == [then]  # a step of the form that is captured
        result = self._overlap(now, unplanned, lookups)
        self._last, self._pending = [cache.last for cache in self._step.caches], self._transfers()
        return result

    def _transfers(self) -> list[int]:
        """How many transfers are pending in each cache."""
        return [cache.unfinished for cache in self._step.caches]

    def _load(self, following: Sequence[Any]) -> list[Turn[R]]:
        """Copies the batches in that have yet to be planned; returns their turns."""
        unplanned: list[Turn[R]] = []
        left = deque(following)
        for turn in self._turns[1:]:
            if left and not unplanned and turn.batch is left[0] and turn.calls():
                left.popleft()
                continue
            turn.drop()
            if left and turn.load_if_it_fits(left.popleft()):
                unplanned.append(turn)
            else:
                left.clear()  # what comes behind a batch is planned behind it
        return unplanned

    def _may_replay(self, now: Turn[R], calls: list[PlannedCall]) -> bool:
        """Whether nothing was planned since the last step, and nothing is in flight but what it has planned: as far
        back as the graph knows of, if there is one."""
        caches = self._step.caches
        if now.graph is not None and not now.graph.fits(self._turns, caches):
            now.graph = None
        effects = [NOTHING_PLANNED] * len(caches) if now.graph is None else now.graph.effects
        last: list[int] | list[None] = [None] * len(caches) if self._last is None else self._last
        each = zip(caches, last, effects, strict=True)
        fresh = [cache.may_replay(_tickets(calls, cache), number, its) for cache, number, its in each]
        return self._last is not None and bool(calls) and all(fresh)

    def _overlap(self, now: Turn[R], unplanned: Sequence[Turn[R]], lookups: Lookups) -> R:
        """The step as the function it is, in the order of a captured one."""

        def run() -> R:
            self._go_ahead(unplanned, lookups)
            return self._compute(now)

        with self._step.on_buffers():
            return self._step.beside(run)

    def _go_ahead(self, unplanned: Sequence[Turn[R]], lookups: Lookups) -> None:
        """Brings the rows in of what was planned last, and plans the next batches beside that."""
        executor, plans = self._executor, self._plans
        wanted = [turn.wanted(self._step, lookups) for turn in unplanned]
        with executor.together([lookup for each in wanted for lookup in each]) as given, forked(plans):
            caches = self._bring(given)
            with on_stream(plans):
                for turn, each in zip(unplanned, wanted, strict=True):
                    turn.plan_deferred(executor, each, caches)
            plans.wait_stream(self._settles)

    def _bring(self, given: Collection[Cache]) -> list[DeviceCache]:
        """Begins to bring in what the last plan has missed, on the stream that is current; what has to come before the
        next plan comes on one of its own, or on the one for plans. Returns the caches."""
        caches = [cache for cache in given if isinstance(cache, DeviceCache)]
        device = self._step.device
        side_by_side(device, [cache.place_last for cache in caches], "bringing")
        self._settles.wait_stream(torch.cuda.current_stream())
        with on_stream(self._settles):
            side_by_side(device, [cache.publish_last for cache in caches], "settling")
        for cache in caches:  # each takes all that the way to cold storage has, and leaves the rest to what computes
            cache.complete_last()
        return caches

    def _go_ahead_and_compute(self, now: Turn[R], then: Turn[R], lookups: Lookups) -> R:
        """The captured step, of which one branch brings rows in, one plans, and one computes."""
        self._go_ahead([then], lookups)
        return self._compute(now)

    def _compute(self, now: Turn[R]) -> R:
        """The function of the batch; its forwards find their plans."""
        result = self._step.heard(now.buffers.batch)
        if now.drop() and not self._warned:
            self._warned = True
            warnings.warn(
                "a captured step planned a batch that no forward looked up: its function gives the model other tensors "
                "than those planned (copies, other shapes, ids computed from them); name the ones it gives with ids_of",
                stacklevel=9,
            )
        return result

    def _capture(self, turns: Sequence[Turn[R]], known: list[PlannedCall], lookups: Lookups) -> R:
        """Captures the step, and replays it a first time. What the capture has done to the caches' books is what that
        replay does to the caches: no other thread's call comes between. `known`: what is planned for this batch and the
        next one."""
        step, graph = self._step, torch.cuda.CUDAGraph()
        now, _, then = turns
        for call in known:
            call.arrive()  # nothing inside may wait for what is outside
        try:
            with ExitStack() as caches:
                for cache in step.caches:
                    caches.enter_context(cache.capturing(_tickets(known, cache)))
                pools = (turn.graph.graph.pool() for turn in turns if turn.graph is not None)
                with (
                    step.on_buffers(),
                    self._capturing(now, then, lookups),
                    step.capture(graph, next(pools, None)),
                    forked(self._executor.stream),
                ):
                    result = self._go_ahead_and_compute(now, then, lookups)
                    then.check_planned()
            planned = then.calls()
            for call in (*planned, *known):
                call.has_arrived()
            step.after_capture()
            self._captured()
            graph.replay()
            effects = [cache.end_capture(_tickets(planned, cache)) for cache in step.caches]
        except BaseException as error:
            for cache in step.caches:
                cache.give_up_capture()
            for call in (*then.made(), *known):
                call.has_arrived()  # nothing of it has run
            step.after_capture()
            self.give_up()
            self._tell(error)
            raise
        if planned:  # else another thread has given them up
            now.graph = TurnGraph(
                graph=graph,
                result=result,
                effects=effects,
                states=states_of(known),
                memories=[turn.memories for turn in turns],
                made=then.made_last,
            )
        self._last, self._pending = [cache.last for cache in step.caches], self._transfers()
        return result

    def _before_replay(self) -> None:
        """What the host does at a forward and an update, and what it may raise."""
        self._step.before_replay()

    def _capturing(self, now: Turn[R], then: Turn[R], lookups: Lookups) -> AbstractContextManager[None]:
        """A step is captured inside, which computes the batch of `now` and plans that of `then`."""
        return nullcontext()

    def _captured(self) -> None:
        """A step is captured, and about to be replayed."""

    def _tell(self, error: BaseException) -> None:
        """A capture is given up, of which nothing has happened. Raises what tells why, where that is not `error`."""
        explain(error)

    def _replay(self, turns: Sequence[Turn[R]], known: list[PlannedCall]) -> R:
        caches, (now, _, then) = self._step.caches, turns
        graph = now.graph
        assert graph is not None
        for cache, effects in zip(caches, graph.effects, strict=True):
            if not effects.brings:
                cache.complete_last()
        for call in known:
            call.arrive()
        self._before_replay()
        try:
            opened = {cache: cache.apply(effects) for cache, effects in zip(caches, graph.effects, strict=True)}
            then.rebind_plans(graph, opened)
            came = [part.ticket for call in known for part in call.parts]
            for cache, effects in zip(caches, graph.effects, strict=True):
                came += [ticket for ticket, its in zip(opened[cache], effects.opens, strict=True) if its.arrives]
            graph.graph.replay()
            for cache in caches:
                cache.rows_arrived(came)
            now.over()
        except BaseException:
            self.give_up()
            raise
        self._last, self._pending = [cache.last for cache in caches], self._transfers()
        return graph.result


@contextmanager
def forked(stream: torch.cuda.Stream) -> Iterator[None]:
    """`stream` forks off the current one, and joins it at the end."""
    stream.wait_stream(torch.cuda.current_stream())
    try:
        yield
    except BaseException:
        with suppress(RuntimeError):  # of a capture that is none any more: what comes is why
            torch.cuda.current_stream().wait_stream(stream)
        raise
    torch.cuda.current_stream().wait_stream(stream)


def _tickets(calls: list[PlannedCall], cache: DeviceCache) -> list[DeviceTicket]:
    return [part.ticket for call in calls for part in call.parts if part.group.cache is cache]
