"""A captured step, over a ring of arenas.

A step that plans its own batch has one arena, and one graph that plans, looks up and updates.

A step that goes two batches ahead has three arenas, and for each a graph of three branches: one computes the batch of
its arena, whose rows the last replay has filled; one fills the rows of the next batch, already planned, so that the
transfer from cold storage never pauses; and one plans the batch after that. Each plan reuses the memory of the plan
three batches before.

If the cache surely holds the rows of three batches, a plan assigns slots at once. If not, it only finds the missed
rows, and slots are assigned when the rows are filled, at the beginning of the next replay: by then the computed batch
locks nothing any more, and no hit is lost for going ahead.

So the transfer pauses only between two replays, and while slots are assigned late. A few multiprocessors saturate it.
Several widths share these, and fill their rows at the same time: a width that was filled after another would find all
multiprocessors occupied by the computation.

A plan has memory of its own for the rows it has to move (`Moving` in cache/plan.cuh), as the next plan has other
counters. Deferred rows stay in the ledger until the replay that fills them is launched. To fill them twice changes
nothing, as the device knows which have arrived (`over`, `published`): so an interrupted replay, or rows that another
call has filled meanwhile, need no undoing.

Several ranks agree before each step, between hosts, while their GPUs run the step before: each announces what it has
planned, and what it could do; all do what all can, and drop what not all have planned. Before the replay that plans a
batch, the ranks check that its ids are valid and fit the blocks that a graph exchanges. If a step goes ahead, the graph
that plans a batch checks this, and reports it to the host, which reads it two steps later: a batch that did not fit,
and so was planned in part, runs eagerly. So the host is at most two steps ahead, and counts a batch only after reading
its report. If a replay is not over after ten seconds, the host goes on to the agreement: a rank may have left, for
which the GPU would wait.

The exchanges of a communicator run in the order in which they are launched. So the ids of the batch that is planned
are sent after the rows of the batch that is computed, which would have to wait otherwise. Ids are checked and exchanged
beside the publishing of the last plan, which only the plan itself waits for. As the plan is made in the middle of the
step, the ledger may have released forwards of tables of this rank alone whose update has yet to run: the plan waits for
it (`StreamOrder.whole`).

Ids travel in blocks of `max_ids`, or of the most that such steps have requested so far, with a margin. Rows come back
once for each unique row, in blocks of as many as the ranks have seen. A batch with more runs eagerly, and then all
ranks capture anew. Gradients lie in the order of the output's rows, so owners need not reorder them by id: an update
finds them by number.
"""

from __future__ import annotations

import functools
import warnings
from collections import defaultdict
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
# what a rank could do with a batch: all ranks do the first that all can
REPLAYS, CAPTURES = 1, 2
# and what it has, if a step goes ahead: plans of this batch and the next one, and the next two in their buffers
PLANNED, NEXT_PLANNED, NEXT_LOADED, LAST_LOADED = 4, 8, 16, 32


class Ring(Generic[R]):
    """A captured step of batches of one form. `buffers`: a template for those that batches are copied to · `reach`: how
    many batches it goes ahead, 0 or 2 · `agreement`: of the ranks, if several run it: then each call is a collective ·
    `summary`: counts how calls were run."""

    def __init__(
        self, step: StepFunction[R], buffers: Buffers, reach: int, agreement: Agreement | None, summary: StepSummary
    ) -> None:
        self.reach = reach
        self._summary = summary
        self._step, self._agreement = step, agreement
        # for the batch that is computed, and the next ones
        self._arenas = [Arena[R](buffers.another()) for _ in range(reach + 1)]
        # eager steps before a capture: one more if several ranks go ahead, as the first ones measure what they send
        self._left = step.eager_steps + (agreement is not None and reach > 0)
        self._plans_as_one = True  # whether a step plans its lookups as one, until its function looks up others
        self._tracked = step.caches if reach else []  # caches that count replays, as these leave batches in flight
        self._last: list[int] | None = None  # batches that each cache had planned when the last step ended
        self._pending: list[int] = []  # transfers that the last step has deferred, for each cache
        self.has_failed_to_capture = False  # in the last call
        self._unknown = 0  # successive steps whose plans were not of the kind that a graph was captured with
        self._warned = False
        self._was_fresh = self._could = False  # of the last call: nothing else was in flight; it could use a graph
        # streams of its own: captures fork into them, and would capture what other threads launch there
        if reach:
            fills, self._plans = (own_stream(self, step.device, -1) for _ in range(2))
            self._executor = StreamExecutor(step.device, fills)
            self._publishing = self._plans  # publishes the last plan, before the next one
        if agreement is not None:
            self._publishing = own_stream(self, step.device, -1)  # also checks ids before a step
            if reach:
                # ids are sent to their owners before the last plan is published; the next plan waits for that
                self._executor.behind = self._publishing

    def run(self, batch: Any, following: Sequence[Any] = (), named: Lookups | None = None) -> R:
        """Computes `batch`, and goes ahead to the batches `following`, as far as known. `named`: what batches look up,
        if the user has named it."""
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
                        arenas[-1].note_run()
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
        """Frees the graphs before the process group whose collectives they contain; a later call captures the step
        anew."""
        for arena in self._arenas:
            graph, arena.graph = arena.graph, None
            if graph is not None:
                self._step.free(graph.graph)

    # --- before a step ----------------------------------------------------------------------------------------------

    def _prepare(self, batch: Any, following: Sequence[Any]) -> tuple[int, list[PlannedCall]]:
        """Copies batches to their buffers, as far as they fit. Returns what this rank has and could do, and its plans
        of the batch and the next one. Raises if the batch to be computed is wrong."""
        step, agreement, computing = self._step, self._agreement, self._arenas[0]
        has, known, is_fresh = 0, list[PlannedCall](), True
        if computing.graph is not None and computing.graph.form != self._form:
            computing.graph = None
        if self.reach:
            has, known, is_fresh = self._load_ahead(batch, following)
        else:
            for cache in step.caches:  # called for each, as it also orders the buffers behind the last call
                is_fresh &= cache.may_replay()
            if agreement is not None and waits_to_load(batch):
                agreement.wait_for_stream()
            computing.buffers.load(batch)
        could, self._was_fresh = 0, is_fresh
        if is_fresh:
            knows = computing.graph is not None and (not self.reach or self._knows(computing, computing.graph, known))
            if knows:
                could = REPLAYS
                if agreement is not None:  # all ranks are to raise its errors
                    step.before_replay()
            if (
                self._left <= 0
                and (computing.graph is None or (knows and agreement is not None))  # if another rank has no graph
                # all that the last step deferred is still there for this one to fill
                and self._pending == [cache.unfinished for cache in self._tracked]
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
        """Loads a batch and those `following`, unless they are planned. Returns what this rank has, the plans of the
        batch and the next one, and whether plans and ledgers are as a captured step needs them."""
        agreement, (computing, filling, planning) = self._agreement, self._arenas
        calls = computing.calls() if computing.batch is batch else []
        if calls and agreement is not None and not (computing.is_over() and agreement.took(calls)):
            calls = []
        next_calls = filling.calls() if calls and following and filling.batch is following[0] else []
        known = [*calls, *next_calls]
        is_fresh = self._is_fresh(computing, known)  # it also orders the buffers behind the last call
        if not calls:
            self.drop_plans()
            computing.load(batch)
        has_next = bool(next_calls) or (bool(following) and filling.load_if_it_fits(following[0]))
        # batches are planned in order
        has_last = has_next and len(following) > 1 and planning.load_if_it_fits(following[1])
        if not has_next:
            filling.drop()
        if not has_last:
            planning.drop()
        has = PLANNED * bool(calls) | NEXT_PLANNED * bool(next_calls) | NEXT_LOADED * has_next | LAST_LOADED * has_last
        return has, known, is_fresh and bool(next_calls) and has_last and planning.defers_rows

    def _is_fresh(self, computing: Arena[R], known: list[PlannedCall]) -> bool:
        """Whether nothing was planned since the last step, and only its plans are in flight: as far back as the graph
        allows for, if there is one."""
        caches = self._step.caches
        if computing.graph is not None and not computing.graph.fits(self._arenas, caches):
            computing.graph = None
        effects = [NOTHING_PLANNED] * len(caches) if computing.graph is None else computing.graph.effects
        last: list[int] | list[None] = [None] * len(caches) if self._last is None else self._last
        tickets, each = _tickets_of(known), zip(caches, last, effects, strict=True)
        fresh = [cache.may_replay(tickets[cache], number, effect) for cache, number, effect in each]
        return self._last is not None and bool(known) and all(fresh)

    def _knows(self, computing: Arena[R], graph: StepGraph[R], known: list[PlannedCall]) -> bool:
        """Whether the graph can compute the present plans. A graph that cannot for long is dropped."""
        if graph.knows(known):
            self._unknown = 0
            return True
        self._unknown += 1
        if self._unknown > len(self._arenas):  # it was not a passing state
            computing.graph = None
        return False

    # --- what ranks agree on ----------------------------------------------------------------------------------------

    def _agree(self, agreement: Agreement, batch: Any, following: Sequence[Any]) -> tuple[int, list[PlannedCall]]:
        """As `_prepare`, for all ranks: what all have and could do."""
        mine, known = 0, list[PlannedCall]()
        failed: Exception | None = None
        try:
            mine, known = self._prepare(batch, following)
        except Exception as error:
            failed = error
        number, updates = self._step.number, self._step.trains and bool(mine & REPLAYS)
        # shifted, so that a rank that goes ahead and one that does not have nothing in common
        way = agreement.agree(mine << self.reach, failed, step=number, updates=updates) >> self.reach
        if not way & REPLAYS and not all(agreement.are_as_now(arena.launched[0]) for arena in self._arenas):
            way &= ~CAPTURES  # a graph needs the memory that it was captured with: plans in other memory run eagerly
        return way, known

    def _fits(self, agreement: Agreement, batch: Any) -> bool:
        """Whether a graph takes as many ids; if they are on the host, they are checked beside the step before."""
        given = [each.given for each in self._step.lookups(batch) if each.module.agreement is agreement]
        if any(tensor.is_cuda for _, tensor in tensors_of(batch)):  # made by the current stream
            return self._arenas[0].is_over() and agreement.takes(given)
        with on_stream(self._publishing):
            return agreement.takes(given)

    def _exchanging(
        self, computing: Arena[R], planning: Arena[R], named: Lookups | None
    ) -> AbstractContextManager[Callable[[], object]]:
        """Prepares exchanges for a step that is captured inside, which plans the batch of one arena and computes that
        of another, or of the same. Yields a function that is to be called once for each replay."""
        if self._agreement is None:
            return nullcontext(do_nothing)
        hold(self)
        given = [each.given for each in planning.expected(self._step, named)]
        planned = [each.given for each in computing.expected(self._step, named)] if self.reach else []
        return self._agreement.capturing(given, planned=planned)

    # --- a step -----------------------------------------------------------------------------------------------------

    def _advance(self, way: int, named: Lookups | None) -> list[Arena[R]]:
        """Drops what not all ranks have, plans the batch to be computed unless it is planned, and rotates the ring.
        Returns the arenas whose batches have yet to be planned."""
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
        """Runs the step eagerly, in the order of a captured one; plans the batches that are `unplanned`."""
        step, computing = self._step, arenas[0]
        if not unplanned:
            self._last = None
            with step.on_buffers():
                return self._compute(computing)
        with step.on_buffers():
            result = step.beside(lambda: self._plan_and_compute(computing, unplanned, named))
        self._left -= unplanned == [arenas[-1]]  # it had the form that is captured
        self._leave()
        return result

    def _plan_and_compute(
        self, computing: Arena[R], unplanned: Sequence[Arena[R]], named: Lookups | None, *, captured: bool = False
    ) -> R:
        """The step: plans its own batch first; or, if it goes ahead, later batches beside the computation."""
        if not self.reach:
            return self._plan_at_once(computing)
        if captured and self._agreement is not None:
            return self._go_ahead_behind_rows(self._agreement, computing, unplanned[0], named)
        self._go_ahead(unplanned, named)
        return self._compute(computing)

    def _plan_at_once(self, computing: Arena[R]) -> R:
        """Plans the batch and calls the function. Tables that share a cache are planned as one beforehand, unless an
        earlier step looked up others than those planned."""
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
        """Calls the function of the batch; its forwards take their plans."""
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
        """Fills the rows of the last plan, and plans the next batches beside that."""
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
        """The same in a graph of several ranks, and the function: the ids of the batch that is planned are sent after
        the rows of the batch that is computed, so that these need not wait."""
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
        """Begins to fill the missed rows of the last plan, on the current stream; publishes it, as the next plan needs,
        on the stream for that. Returns the caches."""
        caches = [cache for cache in given if isinstance(cache, DeviceCache)]
        device, moving = self._step.device, 1
        if torch.cuda.is_current_stream_capturing():  # eagerly they move rows one after another
            moving = max(1, sum(cache.unfinished > 0 for cache in caches))
        side_by_side(device, [cache.place_last for cache in caches], "placing")
        self._publishing.wait_stream(torch.cuda.current_stream())
        with on_stream(self._publishing):
            side_by_side(device, [cache.publish_last for cache in caches], "publishing")
        side_by_side(device, [functools.partial(cache.complete_last, moving) for cache in caches], "moving")
        return caches

    def _capture(self, arenas: Sequence[Arena[R]], known: list[PlannedCall], named: Lookups | None) -> R:
        """Captures the step, and replays it a first time. The capture has entered in the ledgers what that replay does:
        no other thread's call comes between. `known`: the plans of this batch and the next one."""
        step, tracked, graph = self._step, self._tracked, torch.cuda.CUDAGraph()
        computing, planning = arenas[0], arenas[-1]
        computing.graph = None  # with several ranks, if another has no graph
        for call in known:
            call.arrive()  # nothing inside the capture may wait for an event outside
        tickets = _tickets_of(known)
        try:
            with ExitStack() as caches:
                for cache in tracked:
                    caches.enter_context(cache.capturing(tickets[cache]))
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
            if self._agreement is not None:  # raises if another rank has failed
                self._agreement.agree(CAPTURES << self.reach, step=step.number)
            graph.replay()
            count_sent()
            opened = _tickets_of(planned)
            effects = [cache.end_capture(opened[cache]) for cache in tracked]
        except BaseException as error:
            for cache in tracked:
                cache.abort_capture()
            for call in (*planning.completed(), *known):
                call.mark_arrived()  # nothing of it was run
            step.after_capture()
            self.drop_plans()
            self.has_failed_to_capture = True
            if isinstance(error, NotCapturableError):  # the next call shows whether the cause is gone
                self._left = 1
            self._explain(error)
            raise
        step.eager_steps = EAGER_STEPS  # DistributedDataParallel needs more only once
        if planned or not self.reach:  # else another thread has dropped the plans
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
        """After an aborted capture, which had no effect: raises the explanation of `error`, if there is one, and
        announces it to the other ranks."""
        try:
            explain(error)
        except UnsupportedError as explained:
            if self._agreement is not None:
                self._agreement.not_captured(explained)
            raise
        if self._agreement is not None and isinstance(error, Exception):
            self._agreement.not_captured(error)

    def _replay(self, arenas: Sequence[Arena[R]], known: list[PlannedCall]) -> R:
        step, tracked, computing, planning = self._step, self._tracked, arenas[0], arenas[-1]
        graph = computing.graph
        assert graph is not None
        for cache, effects in zip(tracked, graph.effects, strict=True):
            if not effects.fills:
                cache.complete_last()
        for call in known:
            call.arrive()
        if self._agreement is None:
            step.before_replay()
        if not self.reach:  # no batch stays in flight
            for division in step.divisions:
                division.note_replay()
            graph.replay()
            return graph.result
        try:
            opened = {cache: cache.apply(effects) for cache, effects in zip(tracked, graph.effects, strict=True)}
            planning.rebind_plans(graph, opened)
            arrived = [part.ticket for call in known for part in call.parts]
            for cache, effects in zip(tracked, graph.effects, strict=True):
                arrived += [ticket for ticket, begun in zip(opened[cache], effects.opens, strict=True) if begun.arrives]
            graph.replay()
            for cache in tracked:
                cache.rows_arrived(arrived)
            computing.over()
        except BaseException:
            self.drop_plans()
            raise
        self._leave()
        return graph.result

    def _leave(self) -> None:
        """Notes what the step has left in flight."""
        self._last = [cache.plans for cache in self._tracked]
        self._pending = [cache.unfinished for cache in self._tracked]


@contextmanager
def forked(stream: torch.cuda.Stream) -> Iterator[None]:
    """Forks `stream` off the current one, and joins it at the end."""
    stream.wait_stream(torch.cuda.current_stream())
    try:
        yield
    except BaseException:
        with suppress(RuntimeError):  # the capture is invalid already: the exception raised below is why
            torch.cuda.current_stream().wait_stream(stream)
        raise
    torch.cuda.current_stream().wait_stream(stream)


def _tickets_of(calls: list[PlannedCall]) -> defaultdict[DeviceCache, list[DeviceTicket]]:
    """The tickets of the calls in each cache."""
    found: defaultdict[DeviceCache, list[DeviceTicket]] = defaultdict(list)
    for call in calls:
        for part in call.parts:
            found[part.group.cache].append(part.ticket)
    return found
