"""Steps of several ranks as CUDA graphs: what ranks find out before each step, so that nothing inside has to wait.

A graph exchanges blocks of one size, and cannot refuse a batch: by the time a host reads that one is wrong, the dense
layers have taken their step. So the ids of a batch are checked before the replay, on a stream beside the one that
computes. A wrong id is raised on all ranks, and a batch that does not fit runs eagerly on all of them. The size is
`max_ids`, or somewhat more than such steps have requested so far. An eager step that requests more announces it to all
ranks, which then capture anew.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Sequence

import torch

from tieredemb.errors import PeerError, UnsupportedError
from tieredemb.sharding.bags import Bags, CountingFinder
from tieredemb.sharding.context import ShardedContext
from tieredemb.sharding.header import Bounds, LargestRequest, Phase, bounds_take
from tieredemb.sharding.peer_exchange import PeerExchange
from tieredemb.sharding.symmetric import BufferSpec, PartBuffers, SymmetricMemory, make_parts
from tieredemb.step.agreement import UNKNOWN_IDS, Agreement
from tieredemb.step.batch import Batch, Given
from tieredemb.step.planned_forwards import identity

WAY_BITS, STEP_BITS = 8, 8  # of a flag: what a rank could do, and which step; the other bits: the rows it requests


class FoundAhead:
    """A forward that a captured step plans ahead. `report`: words that a graph has written about its ids, where it was
    not known before whether they fit · `form`: the sizes of its exchanges."""

    report: torch.Tensor | None = None
    form: Bounds | None


class Captures(Agreement):
    """The `Agreement` of a collection. `make_batch`: makes a checked batch of the inputs of a forward."""

    def __init__(self, context: ShardedContext, finder: CountingFinder, make_batch: Callable[..., Batch]) -> None:
        self._context, self._finder, self._make_batch = context, finder, make_batch
        self._known: set[object] = set()  # the inputs of the step that is being captured
        self._failures_before = self._steps = 0
        self._behind_rows: Callable[[], object] | None = None
        self.symmetric = SymmetricMemory(context)
        self._buffers: Iterator[list[PartBuffers]] = iter(())  # of the forwards in that step
        self._goes_ahead = False  # whether that step plans forwards ahead

    def check(self) -> None:
        if not self._context.exchange.has_nccl:
            raise UnsupportedError(
                "a step of several ranks is a CUDA graph where GPUs send each other rows by NCCL, and in this process "
                "group hosts do: make it by init_process_group('cpu:gloo,cuda:nccl'), or call the function itself"
            )

    @property
    def plans_ahead(self) -> bool:
        return self._context.plans_ahead

    @property
    def timeout(self) -> float:
        return self._context.exchange.timeout.total_seconds()

    def offer(self, *, ahead: bool) -> None:
        self._context.offers_ahead = ahead

    def wait_for_stream(self) -> None:
        self._context.wait_for_stream()

    @property
    def form(self) -> object:
        return self._context.id_bounds

    def takes(self, given: Sequence[Given]) -> bool:
        bounds, most = self._context.bounds(None), [self._count(each) for each in given]
        return bounds is not None and all(bounds_take(bounds, each) for each in most)

    def _count(self, given: Given) -> list[LargestRequest]:
        device = self._context.device
        moved = [part.to(device, non_blocking=True) if isinstance(part, torch.Tensor) else part for part in given]
        return self._finder.count(self._make_batch(*moved), self._context.wait_for_stream)

    def report_buffer(self) -> torch.Tensor:
        """Memory on the CPU for the words that a graph reports."""
        return self._finder.report_buffer()

    def took(self, calls: Sequence[object]) -> bool:
        fits = True
        for call in calls:
            if isinstance(call, FoundAhead) and call.report is not None:
                most = self._finder.read_report(call.report)
                self._context.note_rows(most)
                fits &= call.form is not None and bounds_take(call.form, most)
        return fits

    def are_as_now(self, calls: Sequence[object]) -> bool:
        form = self._context.bounds(self._context.row_bound)
        return all(call.form == form for call in calls if isinstance(call, FoundAhead))

    def begin_step(self) -> int:
        self._steps += 1
        return self._steps

    def agree(self, mine: int, error: Exception | None = None, *, step: int = 0, updates: bool = False) -> int:
        context = self._context
        assert mine >> WAY_BITS == 0
        flag = mine | (step & ((1 << STEP_BITS) - 1)) << WAY_BITS | context.most_rows << (WAY_BITS + STEP_BITS)
        flags = context.announce(Phase.STEP, flag=flag, error=error, updates=updates).flags
        context.learn_rows(max(flags) >> (WAY_BITS + STEP_BITS))
        steps = [each >> WAY_BITS & ((1 << STEP_BITS) - 1) for each in flags]
        if len(set(steps)) > 1:
            numbers = ", ".join(f"rank {rank} number {number}" for rank, number in enumerate(steps))
            raise PeerError(
                f"the ranks run different ones of the steps that graph_step and graph_forward have made, in the order "
                f"in which each first ran: {numbers}. Each rank has to run as many of each in the same order; an "
                f"evaluation, too, takes as many batches on each"
            )
        return functools.reduce(operator.and_, flags) & ((1 << WAY_BITS) - 1)

    @contextlib.contextmanager
    def capturing(self, given: Sequence[Given], *, planned: Sequence[Given] = ()) -> Iterator[Callable[[], object]]:
        exchange = self._context.exchange
        self._failures_before = exchange.failures
        self._goes_ahead = bool(planned)
        self._buffers = self._make_buffers(len(given))
        self._known = {identity(each) for each in (*given, *planned)}
        try:
            with exchange.counting_replays() as count:
                yield count
        finally:
            self._known, self._buffers = set(), iter(())

    def _make_buffers(self, calls: int) -> Iterator[list[PartBuffers]]:
        """Where ranks can write into each other's memory, the buffers for rows and gradients of the forwards of a step,
        for each part; there are `calls` forwards. Likewise for ids."""
        context = self._context
        bounds = context.bounds(context.row_bound if self._goes_ahead else None)
        if bounds is None:
            return iter(())
        each = [(call, call) for call in range(calls)]
        made = make_parts(self.symmetric, context, bounds, context.most_samples, each)
        return iter(()) if made is None else self._behind_barrier(made)

    def _behind_barrier(self, buffers: Sequence[list[PartBuffers]]) -> Iterator[list[PartBuffers]]:
        """The buffers of each forward. Before the first, the current stream waits for all ranks, as some may still read
        what an earlier step has left. Hosts have not agreed to send rows by then: in a capture nothing runs."""
        self.symmetric.barrier()
        yield from buffers

    @contextlib.contextmanager
    def behind_rows(self, exchanges: Callable[[], object]) -> Iterator[None]:
        self._behind_rows = exchanges
        try:
            yield
        finally:
            self._behind_rows = None

    def not_captured(self, error: Exception) -> None:
        exchange = self._context.exchange
        if exchange.size > 1 and exchange.failures == self._failures_before:  # else all ranks have raised it
            self._context.announce(Phase.STEP, error=error)

    def rows_sent(self) -> None:
        """A lookup has sent its rows."""
        exchanges, self._behind_rows = self._behind_rows, None
        if exchanges is not None:
            exchanges()

    # --- for forwards inside ----------------------------------------------------------------------------------------

    def buffers(self) -> list[PartBuffers] | None:
        """Of each part the buffers for rows and gradients of the next captured forward; None where these are sent."""
        return next(self._buffers, None)

    def exchange_of_ids(self, bounds: Bounds, *, is_planned: bool) -> PeerExchange | None:
        """What exchanges the ids of a captured forward, if their exchange has these `bounds`; None where NCCL does.
        `is_planned`: whether the step plans it ahead. In such a step a recomputed forward exchanges on another branch
        of the graph, and so by NCCL, as one rank's exchanges through memory have to follow each other."""
        if is_planned != self._goes_ahead:
            return None
        return self.symmetric.exchange_of_ids(BufferSpec.for_ids(self._context, bounds, self._context.most_samples))

    @property
    def is_active(self) -> bool:
        """Whether the current stream belongs to a step that is being captured."""
        return bool(self._known) and torch.cuda.is_current_stream_capturing()

    def find(self, batch: Batch, *, finds_firsts: bool) -> tuple[Sequence[Bags], torch.Tensor]:
        """The bags of a captured forward, and words that will report on them. Raises `UnsupportedError` for inputs of
        which nobody checks whether they fit."""
        if identity(batch.given) not in self._known:
            raise UnsupportedError(UNKNOWN_IDS)
        return self._finder.find_unchecked(batch, finds_firsts=finds_firsts)
