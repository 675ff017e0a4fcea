"""A captured step, over a ring of arenas.

A step that plans its own batch has one arena, and a graph that plans, looks up and updates.

A step that goes two batches ahead has three arenas, and a graph for each, of three branches: one computes the batch of
its own arena, whose rows the replay before has filled; one fills the rows of the next batch, which was planned by
then, so that the way to cold storage never rests; and one plans the batch after that. Each plan is made to where the
plan of three batches before was.

Where the cache has room for the rows of three batches, a plan gives away slots at once. Where it may have not, it finds
what is missed, and slots are given away when the rows come, at the beginning of the next replay: the batch that was
computed by then locks nothing any more, and no hit is lost for going ahead.

So the way to cold storage rests between two replays alone, and where slots are given away late. A few multiprocessors
are enough to saturate it. Several widths share these, and their rows come side by side: one that came behind another
would find all multiprocessors busy with what computes.

A plan has a memory of its own for what is to come (`Moving` in cache/plan.cuh), as the next plan counts in others.
Rows that are left for later stay on the books until the replay that fills them was launched. To fill them again
changes nothing, as the device knows which have arrived (`over`, `published`): so a replay that was interrupted, or rows
that another call has filled meanwhile, need no undoing.

Several ranks agree before each step, between hosts, while their GPUs are busy with the step before: each tells the
others what it has planned, and what it could do; all do what all can, and drop what not all have planned. Whether
the ids of a batch are good, and fit what a graph exchanges, is looked at before the replay that plans it. Where a step
goes ahead the graph that plans a batch finds that out, and tells the host, which reads it two steps later: a batch that
did not fit, of which a part was planned, runs eagerly. So the host is never further ahead than two steps, and counts
nothing of a batch before it has read this. One that finds a replay not over for ten seconds goes on to where the ranks
agree, as one may have gone, for which the GPU would wait.

Exchanges of a communicator follow one another as they are launched. So the ids of the batch that is planned go behind
the rows of the one that is computed, which would wait for them otherwise. What is found out about ids, and their
exchange, goes on beside the publishing of the last plan, which the plan alone waits for. As it is made amid the
step, forwards of tables of this rank alone may be over on the books by then, while their update is yet to run: the
plan comes behind it (`StreamOrder.whole`).

Ids go in blocks of `max_ids`, or of as many as such steps have requested so far, with some room. Rows come back once
for each different row, in blocks of as many as the ranks have seen. A batch with more runs eagerly, and all capture
anew. Gradients come where the rows of the output lie, so that no owner puts them into the order of the ids: an update
finds them by number.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any, Generic, TypeVar

import torch

from tieredemb.cache.base import Cache
from tieredemb.cache.device.cache import DeviceCache
from tieredemb.cache.device.effects import NOTHING_PLANNED
from tieredemb.cache.device.ticket import DeviceTicket
from tieredemb.errors import UnsupportedError
from tieredemb.kernels.collectives import hold
from tieredemb.kernels.streams import on_device, on_stream, own_stream, side_by_side
from tieredemb.pipeline.arenas import Arena, Lookups, PlannedCall, StepGraph, states_of
from tieredemb.pipeline.batches import do_nothing, tensors_of
from tieredemb.pipeline.buffers import Buffers, waits_to_load
from tieredemb.pipeline.captured import EAGER_STEPS, StepFunction
from tieredemb.pipeline.plan_executors import StreamExecutor
from tieredemb.pipeline.plan_groups import PlannedGroup, drop_all
from tieredemb.pipeline.summary import IN_FLIGHT, NOTHING_AHEAD, OTHER_PLANS, OTHER_RANK, WARM_UP, StepSummary
from tieredemb.pipeline.uncapturable import NotCapturableError, explain
from tieredemb.step.agreement import Agreement

R = TypeVar("R")
# what a rank could do with a batch: all ranks do the first of these that all can
REPLAYS, CAPTURES = 1, 2
# and what it has, of a step that goes ahead: a plan of this batch, one of the next, and the next two in their buffers
PLANNED, NEXT_PLANNED, NEXT_LOADED, LAST_LOADED = 4, 8, 16, 32


class Ring(Generic[R]):
    """A captured step of batches of one form. `buffers`: a template of those that batches are copied to · `reach`: how
    many it goes ahead, 0 or 2 · `agreement`: that of the ranks which do it together, if several do: each call is a
    collective then · `summary`: where it counts how calls are run."""

    def __init__(
        self, step: StepFunction[R], buffers: Buffers, reach: int, agreement: Agreement | None, summary: StepSummary
    ) -> None:
        self.reach = reach
        self._summary = summary
        self._step, self._agreement = step, agreement
        # of the batch that is computed, and of the next ones
        self._arenas = [Arena[R](buffers.another()) for _ in range(reach + 1)]
        # steps before a capture: one more of several ranks that go ahead, as the first find out how much they send
        self._left = step.eager_steps + (agreement is not None and reach > 0)
        self._plans_as_one = True  # what a step plans at once, until its function looks up something else
        self._books = step.caches if reach else []  # caches that learn of replays: these leave batches in flight
        self._last: list[int] | None = None  # batches planned when the last step was over, which has planned this one's
        self._pending: list[int] = []  # transfers that it has left for later
        self.has_failed_to_capture = False  # in the last call
        self._unknown = 0  # steps in a row whose plans were not as those that a graph was captured with
        self._warned = False
        self._was_fresh = self._could = False  # of the last call: nothing in its way was in flight; it could be a graph
        # no other executor's streams: captures fork into them, and what other threads launch there would be captured
        if reach:
            fills, self._plans = (own_stream(self, step.device, -1) for _ in range(2))
            self._executor = StreamExecutor(step.device, fills)
            self._publishing = self._plans  # where the last plan is published, before the next one
        if agreement is not None:
            self._publishing = own_stream(self, step.device, -1)  # where ids are checked before a step, too
            if reach:
                # ids go to the ranks that own their rows before the last plan is published, for which the next waits
                self._executor.behind = self._publishing

    def run(self, batch: Any, following: Sequence[Any] = (), named: Lookups | None = None) -> R:
        """Computes `batch`, and goes ahead to those `following`, as far as they are known. `named`: what batches look
        up, where the user has named it."""
        step, agreement, self.has_failed_to_capture = self._step, self._agreement, False
        with on_device(step.device):
            with step.locks.held():
                if agreement is None:
                    way, known = self._prepare(batch, following)
                else:
                    way, known = self._agree(agreement, batch, following)
                arenas = self._arenas
                unplanned = self._advance(way, named) if self.reach else arenas
                if way & (REPLAYS | CAPTURES):
                    result = self._replay(arenas, known) if way & REPLAYS else self._capture(arenas, known, named)
                    if agreement is not None:
                        arenas[-1].ran = torch.cuda.Event()
                        arenas[-1].ran.record()
                    self._summary.replayed += bool(way & REPLAYS)
                    self._summary.captured += not way & REPLAYS
                    return result
            why = self._why_eager(way)
            result = self._eagerly(arenas, unplanned, named)
            self._summary.eager[why] += 1
            return result

    def planned_from(self, batch: Any) -> int:
        """How many batches are planned, if `batch` is the first of them; else 0."""
        arenas, count = self._arenas, 0
        if arenas[0].batch is batch:
            while count < len(arenas) and arenas[count].calls():
                count += 1
        return count

    def drop_plans(self) -> None:
        """Drops the plans of the batches of the next calls."""
        self._last = None
        for arena in self._arenas:
            arena.drop()

    def ends_in_time(self) -> bool:
        """See `Holder`."""
        return self._agreement is None or all(arena.is_over(self._agreement.timeout) for arena in self._arenas)

    def free(self) -> None:
        """Frees the graphs before the process group whose collectives they hold; the step is captured anew if it is
        called again."""
        for arena in self._arenas:
            graph, arena.graph = arena.graph, None
            if graph is not None:
                graph.graph.reset()

    # --- what a step finds ------------------------------------------------------------------------------------------

    def _prepare(self, batch: Any, following: Sequence[Any]) -> tuple[int, list[PlannedCall]]:
        """What this rank has and could do, and the plans that it has of the batch and the next one. Batches are in
        their buffers then, as far as they fit. Raises what is wrong with the one that is to be computed."""
        step, agreement, computing = self._step, self._agreement, self._arenas[0]
        has, known, is_fresh = 0, list[PlannedCall](), True
        if computing.graph is not None and computing.graph.form != self._form:
            computing.graph = None
        if self.reach:
            has, known, is_fresh = self._load_ahead(batch, following)
        else:
            for cache in step.caches:  # each is to be asked, which puts the buffers behind the last call, too
                is_fresh &= cache.may_replay()
            if agreement is not None and waits_to_load(batch):
                agreement.wait_for_stream()
            computing.buffers.load(batch)
        could, self._was_fresh = 0, is_fresh
        if is_fresh:
            knows = computing.graph is not None and (not self.reach or self._knows(computing, computing.graph, known))
            if knows:
                could = REPLAYS
                if agreement is not None:  # all ranks are to raise what it may raise
                    step.before_replay()
            if (
                self._left <= 0
                and (computing.graph is None or (knows and agreement is not None))  # with ranks that have no graph
                # all is there that the step before has left, which this one is to fill
                and self._pending == [cache.unfinished for cache in self._books]
                and not step.accumulates()
            ):
                could |= CAPTURES
            if could and agreement is not None and not self.reach:
                could *= self._fits(agreement, batch)
        self._could = bool(could)
        return has | could, known

    @property
    def _form(self) -> object:
        return None if self._agreement is None else self._agreement.form

    def _why_eager(self, way: int) -> str:
        """Why a step is neither replayed nor captured."""
        if self._could:
            return OTHER_RANK
        if self.reach and not (way & PLANNED and way & NEXT_PLANNED and way & LAST_LOADED):
            return NOTHING_AHEAD
        if self._left > 0:
            return WARM_UP
        return OTHER_PLANS if self._was_fresh else IN_FLIGHT

    def _load_ahead(self, batch: Any, following: Sequence[Any]) -> tuple[int, list[PlannedCall], bool]:
        """Loads a batch and those `following`, but what is planned. Returns what there is, the plans of the batch and
        the next one, and whether these and the books are as a captured step needs them."""
        agreement, (computing, filling, planning) = self._agreement, self._arenas
        calls = computing.calls() if computing.batch is batch else []
        if calls and agreement is not None and not (computing.is_over() and agreement.took(calls)):
            calls = []
        next_calls = filling.calls() if calls and following and filling.batch is following[0] else []
        known = [*calls, *next_calls]
        is_fresh = self._is_fresh(computing, known)  # which puts the buffers behind the last call, too
        if not calls:
            self.drop_plans()
            computing.load(batch)
        has_next = bool(next_calls) or (bool(following) and filling.load_if_it_fits(following[0]))
        # what comes behind a batch is planned behind it
        has_last = has_next and len(following) > 1 and planning.load_if_it_fits(following[1])
        if not has_next:
            filling.drop()
        if not has_last:
            planning.drop()
        has = PLANNED * bool(calls) | NEXT_PLANNED * bool(next_calls) | NEXT_LOADED * has_next | LAST_LOADED * has_last
        return has, known, is_fresh and bool(next_calls) and has_last and planning.defers_rows

    def _is_fresh(self, computing: Arena[R], known: list[PlannedCall]) -> bool:
        """Whether nothing was planned since the last step, and nothing is in flight but what it has planned: as far
        back as the graph knows of, if there is one."""
        caches = self._step.caches
        if computing.graph is not None and not computing.graph.fits(self._arenas, caches):
            computing.graph = None
        effects = [NOTHING_PLANNED] * len(caches) if computing.graph is None else computing.graph.effects
        last: list[int] | list[None] = [None] * len(caches) if self._last is None else self._last
        each = zip(caches, last, effects, strict=True)
        fresh = [cache.may_replay(_tickets(known, cache), number, effect) for cache, number, effect in each]
        return self._last is not None and bool(known) and all(fresh)

    def _knows(self, computing: Arena[R], graph: StepGraph[R], known: list[PlannedCall]) -> bool:
        """Whether the graph computes what is planned now. One that for long does not is dropped."""
        if graph.knows(known):
            self._unknown = 0
            return True
        self._unknown += 1
        if self._unknown > len(self._arenas):  # it was no passing state
            computing.graph = None
        return False

    # --- what ranks agree on ----------------------------------------------------------------------------------------

    def _agree(self, agreement: Agreement, batch: Any, following: Sequence[Any]) -> tuple[int, list[PlannedCall]]:
        """As `_prepare`: what all ranks have and could do."""
        mine, known = 0, list[PlannedCall]()
        failed: Exception | None = None
        try:
            mine, known = self._prepare(batch, following)
        except Exception as error:
            failed = error
        number, updates = self._step.number, self._step.trains and bool(mine & REPLAYS)
        # one rank may go ahead and another not, which have nothing in common then
        way = agreement.agree(mine << self.reach, failed, step=number, updates=updates) >> self.reach
        if not way & REPLAYS and not all(agreement.are_as_now(arena.launched[0]) for arena in self._arenas):
            way &= ~CAPTURES  # no graph is to find other memory than it knows: a step plans to such eagerly
        return way, known

    def _fits(self, agreement: Agreement, batch: Any) -> bool:
        """Whether a graph takes as many ids, which are looked at beside the step before where hosts have them."""
        given = [each.given for each in self._step.lookups(batch) if each.module.agreement is agreement]
        if any(tensor.is_cuda for _, tensor in tensors_of(batch)):  # which the current stream has made
            return self._arenas[0].is_over() and agreement.takes(given)
        with on_stream(self._publishing):
            return agreement.takes(given)

    def _exchanging(
        self, computing: Arena[R], planning: Arena[R], named: Lookups | None
    ) -> AbstractContextManager[Callable[[], object]]:
        """A step is captured inside, which plans the batch of one arena and computes that of another, or the same. What
        this yields is called once for each replay."""
        if self._agreement is None:
            return nullcontext(do_nothing)
        hold(self)
        given = [each.given for each in planning.expected(self._step, named)]
        planned = [each.given for each in computing.expected(self._step, named)] if self.reach else []
        return self._agreement.capturing(given, planned=planned)

    # --- a step -----------------------------------------------------------------------------------------------------

    def _advance(self, way: int, named: Lookups | None) -> list[Arena[R]]:
        """Gives up what not all ranks have, plans the batch that is computed where it is not, and turns the ring.
        Returns the arenas whose batches are yet to be planned."""
        step, (computing, filling, planning) = self._step, self._arenas
        loaded = [arena for arena, has in ((filling, NEXT_LOADED), (planning, LAST_LOADED)) if way & has]
        if not way & NEXT_PLANNED:
            filling.unplan()
        if not way & NEXT_LOADED:
            filling.drop()
            planning.drop()
        if not way & PLANNED:
            computing.unplan()
            self._last = None
            if loaded:
                expected = computing.expected(step, named)
                with step.on_buffers(), self._executor.planning(expected):
                    computing.plan(self._executor, expected)
        if loaded:
            self._arenas = [filling, planning, computing]
        return loaded[1:] if way & NEXT_PLANNED else loaded

    def _eagerly(self, arenas: Sequence[Arena[R]], unplanned: Sequence[Arena[R]], named: Lookups | None) -> R:
        """The step as the function it is, in the order of a captured one: batches that are `unplanned` are planned."""
        step, computing = self._step, arenas[0]
        if not unplanned:
            self._last = None
            with step.on_buffers():
                return self._compute(computing)
        with step.on_buffers():
            result = step.beside(lambda: self._plan_and_compute(computing, unplanned, named))
        self._left -= unplanned == [arenas[-1]]  # a step of the form that is captured
        self._leave()
        return result

    def _plan_and_compute(
        self, computing: Arena[R], unplanned: Sequence[Arena[R]], named: Lookups | None, *, captured: bool = False
    ) -> R:
        """The step: a batch that it goes ahead to is planned beside the one that it computes, its own before."""
        if not self.reach:
            return self._plan_at_once(computing)
        if captured and self._agreement is not None:
            return self._go_ahead_behind_rows(self._agreement, computing, unplanned[0], named)
        self._go_ahead(unplanned, named)
        return self._compute(computing)

    def _plan_at_once(self, computing: Arena[R]) -> R:
        """The function of the batch, which it plans. Tables that share a cache are planned as one before, unless a step
        before has looked up others than those."""
        step, planned = self._step, list[PlannedGroup]()
        if not self._plans_as_one:
            return step.run_observed(computing.buffers.batch)
        try:
            computing.plan_at_once(step, planned)
            result = step.run_observed(computing.buffers.batch)
            self._plans_as_one = not any(each.left for _, each in planned)
            return result
        finally:
            drop_all(planned)

    def _compute(self, computing: Arena[R]) -> R:
        """The function of the batch; its forwards find their plans."""
        result = self._step.run_observed(computing.buffers.batch)
        if computing.drop() and not self._warned:
            self._warned = True
            warnings.warn(
                "a captured step planned a batch that no forward looked up: its function gives the model other tensors "
                "than those planned (copies, other shapes, ids computed from them); name the ones it gives with ids_of",
                stacklevel=8,
            )
        return result

    def _go_ahead(self, unplanned: Sequence[Arena[R]], named: Lookups | None) -> None:
        """Brings the rows in of what was planned last, and plans the next batches beside that."""
        executor, plans = self._executor, self._plans
        expected = [arena.expected(self._step, named) for arena in unplanned]
        with executor.planning([lookup for each in expected for lookup in each]) as given, forked(plans):
            caches = self._fill(given)
            with on_stream(plans):
                for arena, each in zip(unplanned, expected, strict=True):
                    arena.plan(executor, each, caches)
            plans.wait_stream(self._publishing)

    def _go_ahead_behind_rows(
        self, agreement: Agreement, computing: Arena[R], planning: Arena[R], named: Lookups | None
    ) -> R:
        """The same in a graph of several ranks, and the function: the ids of the batch that is planned go to other
        ranks behind the rows of the one that is computed, and so do not keep these waiting."""
        executor, plans, expected = self._executor, self._plans, planning.expected(self._step, named)
        is_planned = False

        def plan() -> None:
            nonlocal is_planned
            is_planned = True
            with executor.planning(expected):
                with on_stream(plans):
                    planning.plan(executor, expected, caches)
                executor.stream.wait_stream(plans)

        with forked(plans), forked(self._publishing):
            with executor.planning(expected) as given:
                caches = self._fill(given)
            with agreement.behind_rows(plan):
                result = self._compute(computing)
            if not is_planned:
                plan()
        return result

    def _fill(self, given: Collection[Cache]) -> list[DeviceCache]:
        """Begins to fill what the last plan has missed, on the stream that is current; what has to come before the
        next plan comes on one of its own, or on the one for plans. Returns the caches."""
        caches = [cache for cache in given if isinstance(cache, DeviceCache)]
        device, moving = self._step.device, 1
        if torch.cuda.is_current_stream_capturing():  # else they move their rows one after the other
            moving = max(1, sum(cache.unfinished > 0 for cache in caches))
        side_by_side(device, [cache.place_last for cache in caches], "placing")
        self._publishing.wait_stream(torch.cuda.current_stream())
        with on_stream(self._publishing):
            side_by_side(device, [cache.publish_last for cache in caches], "publishing")
        side_by_side(device, [functools.partial(cache.complete_last, moving) for cache in caches], "moving")
        return caches

    def _capture(self, arenas: Sequence[Arena[R]], known: list[PlannedCall], named: Lookups | None) -> R:
        """Captures the step, and replays it a first time. What the capture has done to the caches' books is what that
        replay does to the caches: no other thread's call comes between. `known`: what is planned for this batch and the
        next one."""
        step, books, graph = self._step, self._books, torch.cuda.CUDAGraph()
        computing, planning = arenas[0], arenas[-1]
        computing.graph = None  # of several ranks, of which another has none
        for call in known:
            call.arrive()  # nothing inside may wait for what is outside
        try:
            with ExitStack() as caches:
                for cache in books:
                    caches.enter_context(cache.capturing(_tickets(known, cache)))
                with (
                    step.on_buffers(),
                    self._exchanging(computing, planning, named) as count_sent,
                    step.capture(graph),
                    forked(self._executor.stream) if self.reach else nullcontext(),
                ):
                    result = self._plan_and_compute(computing, [planning], named, captured=True)
                    planning.check_planned()
            planned = planning.calls()
            for call in (*planned, *known):
                call.mark_arrived()
            step.after_capture()
            if self._agreement is not None:  # raises where another has failed
                self._agreement.agree(CAPTURES << self.reach, step=step.number)
            graph.replay()
            count_sent()
            effects = [cache.end_capture(_tickets(planned, cache)) for cache in books]
        except BaseException as error:
            for cache in books:
                cache.abort_capture()
            for call in (*planning.completed(), *known):
                call.mark_arrived()  # nothing of it has run
            step.after_capture()
            self.drop_plans()
            self.has_failed_to_capture = True
            if isinstance(error, NotCapturableError):  # the next call shows whether others have taken its place
                self._left = 1
            self._explain(error)
            raise
        step.eager_steps = EAGER_STEPS  # DistributedDataParallel needs its own once
        if planned or not self.reach:  # else another thread has dropped them
            computing.graph = StepGraph(
                graph=graph,
                result=result,
                effects=effects,
                states=states_of(known),
                memories=[arena.memories for arena in arenas],
                launched=planning.launched,
                form=self._form,
                count_sent=count_sent,
            )
        self._leave()
        return result

    def _explain(self, error: BaseException) -> None:
        """A capture is aborted, of which nothing has happened. Raises the explanation of `error`, if there is one; the
        other ranks learn of it."""
        try:
            explain(error)
        except UnsupportedError as explained:
            if self._agreement is not None:
                self._agreement.not_captured(explained)
            raise
        if self._agreement is not None and isinstance(error, Exception):
            self._agreement.not_captured(error)

    def _replay(self, arenas: Sequence[Arena[R]], known: list[PlannedCall]) -> R:
        step, books, computing, planning = self._step, self._books, arenas[0], arenas[-1]
        graph = computing.graph
        assert graph is not None
        for cache, effects in zip(books, graph.effects, strict=True):
            if not effects.fills:
                cache.complete_last()
        for call in known:
            call.arrive()
        if self._agreement is None:
            step.before_replay()
        if not self.reach:  # it leaves no batch in flight
            for division in step.divisions:
                division.note_replay()
            graph.replay()
            return graph.result
        try:
            opened = {cache: cache.apply(effects) for cache, effects in zip(books, graph.effects, strict=True)}
            planning.rebind_plans(graph, opened)
            arrived = [part.ticket for call in known for part in call.parts]
            for cache, effects in zip(books, graph.effects, strict=True):
                arrived += [ticket for ticket, begun in zip(opened[cache], effects.opens, strict=True) if begun.arrives]
            graph.replay()
            for cache in books:
                cache.rows_arrived(arrived)
            computing.over()
        except BaseException:
            self.drop_plans()
            raise
        self._leave()
        return graph.result

    def _leave(self) -> None:
        """A step is over, and has left batches in flight."""
        self._last = [cache.plans for cache in self._books]
        self._pending = [cache.unfinished for cache in self._books]


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
