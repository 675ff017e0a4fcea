"""A captured step of several ranks that goes ahead: while it computes a batch, the rows of the next one come, and the
ids of the one after that go to the ranks that own their rows, which plan them.

Each rank tells the others before every step what it has planned, and what it could do; all do what all can. Whether
the ids of a batch are good, and fit what a graph exchanges, the graph finds out that plans it, and tells the host,
which reads it two steps later. A batch that did not fit, of which a part was planned, runs eagerly.

Exchanges of a communicator follow one another as they are launched. So the ids of the batch that is planned go behind
the rows of the one that is computed, which would wait for them otherwise. What is found out about ids, and their
exchange, goes on beside what the last plan has left to settle, which the plan alone waits for. As it is made amid the
step, forwards of tables of this rank alone may be over on the books by then, while their update is yet to run: the
plan comes behind it (`StreamOrder.whole`).

The host is never further ahead than two steps, and counts nothing of a batch before it has read this. One that
finds a replay not over for ten seconds goes on to where the ranks tell each other what they can do, as one may have
gone, for which the GPU would wait. What did not fit was cut off inside its block, and planned in vain; what not all
ranks have planned all give up. Rows come back once for each different row, in blocks of as many as the ranks have
seen, with some room; a batch with more runs eagerly, and all capture anew. Gradients come where the rows of the output
lie, so that no owner puts them into the order of the ids: an update finds them by number.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch

from tieredemb.errors import UnsupportedError
from tieredemb.kernels.collectives import hold, is_over
from tieredemb.kernels.streams import on_stream, own_stream
from tieredemb.pipeline.captured import StepFunction
from tieredemb.pipeline.graph_ahead import StepAhead, forked
from tieredemb.pipeline.turns import Lookups, PlannedCall, Turn
from tieredemb.step.agreement import Agreement

R = TypeVar("R")
# what a rank has planned, of which batches it has the ids, and what it could do: beside the bits of `graph_together`,
# as one rank may go ahead and another not
NOW, NEXT, COMING, THEN, REPLAYS, CAPTURES = (1 << bit for bit in range(2, 8))


class StepAheadTogether(StepAhead[R]):
    """The step of this rank. Every call is a collective."""

    def __init__(self, step: StepFunction[R], agreement: Agreement) -> None:
        super().__init__(step)
        self._agreement = agreement
        # ids go to the ranks that own their rows before the last plan has settled, behind which the next one is made
        self._settles = self._executor.behind = own_stream(self, step.device, -1)

    def ends_in_time(self) -> bool:
        """See `Holder`."""
        return all(turn.ran is None or is_over(turn.ran, self._agreement.timeout) for turn in self._turns)

    def free(self) -> None:
        """Gives the graphs up, before the process group whose collectives they hold; the step is captured anew if it is
        called again."""
        for turn in self._turns:
            graph, turn.graph = turn.graph, None
            if graph is not None:
                graph.graph.reset()

    def _run(self, batch: Any, following: Sequence[Any], lookups: Lookups) -> R:
        turns, mine = self._turns, 0
        calls, next_calls = list[PlannedCall](), list[PlannedCall]()
        failed: Exception | None = None
        with self._step.locked:
            try:
                calls, next_calls = self._known(batch, following)
                mine = self._prepare(batch, following, calls, next_calls)
            except Exception as error:
                failed = error
            updates = self._step.trains and bool(mine & REPLAYS)
            way = self._agreement.agree(mine, failed, step=self._step.number, updates=updates)
            if not all(self._agreement.are_as_now(turn.made_last[0]) for turn in turns):
                way &= ~CAPTURES  # no graph is to find other memory than it knows: a step plans to such eagerly
            unplanned = self._align(way, lookups)
            if way & COMING:
                now, coming, then = turns
                self._turns = [coming, then, now]
            if way & (REPLAYS | CAPTURES):
                known = [*calls, *next_calls]
                result = self._replay(turns, known) if way & REPLAYS else self._capture(turns, known, lookups)
                turns[-1].ran = torch.cuda.Event()  # type: ignore[no-untyped-call]
                turns[-1].ran.record()
                return result
        return self._eagerly(turns, unplanned, lookups)

    def _prepare(
        self, batch: Any, following: Sequence[Any], calls: list[PlannedCall], next_calls: list[PlannedCall]
    ) -> int:
        """What this rank has, and could do. Its batches are in their buffers then, as far as they fit. Raises what is
        wrong with the one that is to be computed."""
        now, coming, then = self._turns
        has_now = bool(calls) and (now.ran is None or is_over(now.ran)) and self._agreement.took(calls)
        known = [*calls, *next_calls] if has_now else []
        # which puts the buffers behind the last call, too
        may_replay = self._may_replay(now, known) and bool(next_calls)
        if not has_now:
            self.give_up()
            now.load(batch)
        unplanned = self._load(following)
        mine = NOW * has_now | NEXT * (has_now and bool(next_calls))
        mine |= COMING * (coming.batch is not None) | THEN * (then.batch is not None)
        if may_replay and unplanned == [then] and then.defers_rows:
            knows = self._knows(now, known)
            if knows:  # what it may raise all ranks are to hear of
                self._step.before_replay()
            mine |= REPLAYS * knows | CAPTURES * ((knows or now.graph is None) and self._may_capture())
        return mine

    def _align(self, way: int, lookups: Lookups) -> list[Turn[R]]:
        """Gives up what not all ranks have planned. Returns the turns whose batches are yet to be planned."""
        now, coming, then = self._turns
        if not way & COMING:
            coming.drop()
            then.drop()
        if not way & NOW:
            now.unplan()
            # one more than of one process: the first steps find out how much the ranks send each other
            self._left, self._last = self._step.eager_steps + 1, None
            if way & COMING:
                with self._step.on_buffers():
                    now.plan(self._executor, self._step, lookups)
        if way & NOW and way & NEXT:
            return [then] if way & THEN else []
        coming.unplan()
        return [turn for turn, has in ((coming, COMING), (then, THEN)) if way & has]

    def _go_ahead_and_compute(self, now: Turn[R], then: Turn[R], lookups: Lookups) -> R:
        """As of one process, but that the ids of the batch which is planned go to other ranks behind the rows of the
        one that is computed, and so do not keep these waiting."""
        executor, plans, wanted = self._executor, self._plans, then.wanted(self._step, lookups)
        is_planned = False

        def plan() -> None:
            nonlocal is_planned
            is_planned = True
            with executor.together(wanted):
                with on_stream(plans):
                    then.plan_deferred(executor, wanted, caches)
                executor.stream.wait_stream(plans)

        with forked(plans), forked(self._settles):
            with executor.together(wanted) as given:
                caches = self._bring(given)
            with self._agreement.behind_rows(plan):
                result = self._compute(now)
            if not is_planned:
                plan()
        return result

    def _before_replay(self) -> None:
        """It is done."""

    def _capturing(self, now: Turn[R], then: Turn[R], lookups: Lookups) -> AbstractContextManager[None]:
        hold(self)
        planned, given = ([each.given for each in turn.wanted(self._step, lookups)] for turn in (now, then))
        return self._agreement.capturing(given, planned=planned)

    def _captured(self) -> None:
        self._agreement.agree(CAPTURES, step=self._step.number)  # raises where another has failed

    def _tell(self, error: BaseException) -> None:
        try:
            super()._tell(error)
        except UnsupportedError as told:
            self._agreement.not_captured(told)
            raise
        if isinstance(error, Exception):
            self._agreement.not_captured(error)
