"""One forward of a sharded collection and its backward: what ranks exchange, and in which order.

Forward: each rank sends its ids to the owners, which are the ranks that hold their rows. Owners look the rows up. Of
row-wise tables an owner sends each different row back once, and the rank that requested it pools its bags. Bags of
table-wise tables are pooled by the owner, which is sent their lengths, too, and per-sample weights with the forward.
Backward: the gradient of every occurrence, or of every pooled bag, goes to the owner. This updates its rows as one
process would that has the batches of all ranks, one after the other. Every rank owns a replicated table: ids and
gradients go to all ranks, and each pools its own bags.

Gradients are sent one for each occurrence, and not summed before: an owner sums those of all ranks in one order, and
sums made elsewhere would change the bits. Beside the gradient of a single row goes its factor (a per-sample weight, or
the share of a mean). A rank computes the gradient of its weights itself. For that it requests the rows of all ids,
which owners send beside the pooled bags.

A forward has two headers, before its ids and before its rows. It has one more if its ids were exchanged ahead, or if
table-wise tables have weights. A backward pass has one header before gradients are sent, in which ranks also compare
which forwards it has reached. It has one more before the update if a rank may still fail, so that all ranks update or
none does. The thread of the loop or of the forward exchanges ids, and that of the backward gradients, in one order on
all ranks. With prefetch owners plan the next batch while one computes.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from tieredemb.cache.base import PlanKind
from tieredemb.errors import PeerError, TieredEmbError
from tieredemb.kernels.streams import side_by_side
from tieredemb.kernels.tracing import ranged
from tieredemb.sharding.backward import ReadyGradients, apply
from tieredemb.sharding.bags import Bags, Part
from tieredemb.sharding.captures import Captures
from tieredemb.sharding.context import ShardedContext
from tieredemb.sharding.eager_buffers import EagerBuffers
from tieredemb.sharding.exchange import Exchange, LeavingOnError, Sending
from tieredemb.sharding.finder import recorded_requests
from tieredemb.sharding.header import Bound, Bounds, Counts, Header, LargestRequest, Phase, bounds_take
from tieredemb.sharding.request import Request
from tieredemb.sharding.stats import GRADIENTS, IDS, ROWS
from tieredemb.sharding.stream_use import StreamUse
from tieredemb.sharding.symmetric import SymmetricRows
from tieredemb.step.batch import Batch
from tieredemb.step.planned_forwards import PlanExecutor, Planned, PlannedForwards
from tieredemb.step.program import NUMBERS, Call

if TYPE_CHECKING:
    from tieredemb.sharding.gpu_bags import GpuBags
    from tieredemb.sharding.peer_exchange import PeerExchange
    from tieredemb.sharding.recorded_requests import RecordedRequest
    from tieredemb.sharding.symmetric import PartBuffers, SymmetricMemory

T = TypeVar("T")
# flags in the header of a forward
WEIGHTED = 1  # per-sample weights are given
PLANNED = 2  # this rank has exchanged its ids ahead; and looked its rows up, where it may before the header
GRADIENT = 4  # the gradient of the weights is requested, which takes the rows of all ids
NO_PLANS_AHEAD = 8  # this rank would not plan the next batch ahead
CHECK_DEFERRED = 16  # this rank has not read yet how much it requests, and expects as much as for the batch before
TRAINS = 32  # its backward will update rows


@dataclass(eq=False, kw_only=True)
class ShardedCallContext(ShardedContext):
    """What the calls of one module share. `make_batch`: makes a checked batch of the inputs of a forward · `captures`:
    agrees on captured steps · `recorded`: what eager forwards record on a GPU · `eager_buffers`: other ranks' memory,
    which they write to."""

    make_batch: Callable[..., Batch]

    def __post_init__(self) -> None:
        self.captures = Captures(self, self.find, self.make_batch)
        self.recorded = recorded_requests(self, self.find)
        self.eager_buffers = EagerBuffers(self)

    def apply(self, reached: Sequence[tuple[ShardedCall, torch.Tensor]]) -> None:
        """Applies the gradients that one backward pass has `reached`, in forward order, as one update. A collective."""
        apply(self, self.eager_buffers, reached)


class ShardedCall:
    """One forward. It requests rows from their owners, maybe long before the forward runs and fetches them. It has the
    bags here of each part of each shard, and, of each shard, what all ranks request of this one, with the call that
    answers. `number`: in the order of forwards, once it runs · `exchange_number`: the number of the exchange of its ids
    · `row_bound`: in a captured step, how many rows come back from each rank, if not one for each id · `is_over`:
    whether nothing reads its ids any more; a deferred update has its own copies."""

    row_bound: int | None = None
    is_over = False
    forwards = None  # see `Call`
    requested: Any = None  # see `Call`: never here, where a gradient lies on several ranks
    # the most that it requests from another rank in each part; until the host has read it (`_is_check_deferred`), what
    # the batch before requested
    _most_requested: Sequence[LargestRequest]
    _is_check_deferred = False
    _bounds: Bounds  # of the exchange
    _samples: int  # of the rank that has most
    _recorded: RecordedRequest | None = None  # the graphs that find and send its ids, if there are any
    # of each part, the buffers where ranks write into each other's memory and send nothing; and whose barrier they use
    _buffers: Sequence[PartBuffers | None] = ()
    _memory: SymmetricMemory | EagerBuffers | None = None

    def __init__(self, context: ShardedCallContext, batch: Batch, *, flag: int = 0, ahead: bool = False) -> None:
        """Exchanges ids. Raises on all ranks the error of one. `flag`: of the forward (`forward_flag`) · `ahead`:
        whether the forward runs later."""
        self.context = context
        self.consumed = self.keeps_rows = False
        self.within: Any = None
        self.number = self.exchange_number = -1
        self.batch = batch.size
        self._n_ids = len(batch.ids)
        self._report: torch.Tensor | None = None  # in a capture: the host reads later how much is requested
        self._stream_use = StreamUse(context.device)
        self._kept_batch = batch if self._learns_bounds else None  # until the requests of all ranks are known to fit
        self._bags: Sequence[Bags] = self._find(batch, Phase.PLAN if ahead else Phase.FORWARD)
        eager = context.eager_buffers  # the memory that such a forward may write to, or None; the same on all ranks
        self._eager_buffers = None if eager.is_off or not self._learns_bounds else eager
        self._requests = self._request_rows(ahead=ahead, flag=flag)
        if ahead:
            self._stream_use.record_made()
        self._planned: list[tuple[PlannedForwards, Planned]] = []
        self._calls: list[Call] = []
        self._rows: list[torch.Tensor] = []

    @classmethod
    def of(cls, context: ShardedCallContext, batch: Batch, flag: int, planned: ShardedCall | None) -> ShardedCall:
        """The call of a forward that runs now: the `planned` one, if all ranks have planned theirs, else a new one."""
        if planned is None:
            return cls(context, batch, flag=flag)
        try:
            header = context.announce(Phase.FORWARD, flag=PLANNED | flag | NO_PLANS_AHEAD * (not context.offers_ahead))
            _check_alike(header, context.exchange)
        except BaseException:
            planned.release()
            raise
        if header.set_by_all & PLANNED:
            planned._note_announced(header.flags)
            return planned
        planned.release()
        return cls(context, batch, flag=flag)

    @ranged("plan")
    def _find(self, batch: Batch, phase: Phase) -> Sequence[Bags]:
        """The bags, checked. All ranks raise what is wrong with them."""
        captures = self.context.captures
        try:
            if captures.is_active:
                self._most_requested = self.context.no_counts.most
                found, self._report = captures.find(batch, finds_firsts=self.row_bound is not None)
                return found
            recorded = self.context.recorded
            if recorded is not None and self._learns_bounds:
                self._recorded = recorded.of(batch)
            if recorded is not None and self._recorded is not None:
                self._is_check_deferred = recorded.may_defer_check()
                self._most_requested = recorded.last_requested(self._recorded.samples)
                if not self._is_check_deferred:
                    self._find_and_check()
                return ()
            return self._find_by_launches(batch)
        except Exception as error:
            self.context.announce(phase, error=error)
            raise

    def _find_by_launches(self, batch: Batch) -> Sequence[Bags]:
        """The bags, found by launches that the host waits for."""
        found, most = self.context.bags_of(batch)
        self._note_requested(most)
        return found

    def _check_request(self) -> None:
        """Waits until the host can read how much the bags request, and notes it. Raises what is wrong with them."""
        assert self._recorded is not None
        self._is_check_deferred = False
        self._note_requested(self._recorded.check())

    @property
    def _counts(self) -> Counts:
        """What it announces to all ranks, as far as that is known."""
        return Counts(self.batch, [*self._most_requested])

    def _note_requested(self, most: Sequence[LargestRequest]) -> None:
        """Notes the most that it requests from a rank, and warns where that is more than `max_ids`."""
        self._most_requested = most
        self.context.warn_if_longer(most)

    def _find_and_check(self) -> None:
        """Finds the bags and checks them before anything is sent, as `_check_request` does."""
        self._find_recorded()
        self._check_request()

    def _find_recorded(self) -> None:
        """Finds the bags by recorded launches, which belong to this call from here on. Does not synchronise."""
        assert self._recorded is not None
        assert self._kept_batch is not None
        self._recorded.find(self, self._kept_batch)

    @property
    def _is_captured(self) -> bool:
        """Whether it belongs to a step that is captured, or will be. The same on all ranks."""
        return self.row_bound is not None or self._report is not None or self.context.on_buffers

    @property
    def _learns_bounds(self) -> bool:
        """Whether the size of its exchange is learned from earlier batches of as many samples."""
        return self.context.recorded is not None and not self._is_captured

    def _request_rows(self, *, ahead: bool, flag: int) -> list[Request]:
        """Agrees with all ranks on the size of the exchange, and exchanges ids. Returns what is requested of each shard
        here."""
        context, phase = self.context, Phase.PLAN if ahead else Phase.FORWARD
        flag = (0 if ahead else flag) | NO_PLANS_AHEAD * (not context.offers_ahead)
        meanwhile = self._find_recorded if self._is_check_deferred else None
        while True:
            header, meanwhile = self._announce(phase, flag, meanwhile), None
            if header.set_by_any & PLANNED:  # other ranks had a plan, which they drop now
                continue
            with LeavingOnError(context.exchange):
                bounds = self._agreed_bounds(header)
            if bounds is not None:
                break
            if self._is_check_deferred:  # all ranks need to know how much is requested
                try:
                    self._check_at_once()
                    self._find_and_check()
                except Exception as error:
                    context.announce(phase, error=error)
                    raise
        context.check_capacity(bounds)
        if self._eager_buffers is not None:
            with LeavingOnError(context.exchange):
                self._eager_buffers.prepare(bounds, header.samples)
        self._note_announced(header.flags)
        self.exchange_number, self._bounds, self._samples = context.number, bounds, header.samples
        with LeavingOnError(context.exchange):
            return self._exchange_ids()

    def _announce(self, phase: Phase, flag: int, meanwhile: Callable[[], object] | None) -> Header:
        """Announces how much it requests, as far as that is known; returns the header of all ranks."""
        flag |= CHECK_DEFERRED * self._is_check_deferred
        header = self.context.announce(phase, counts=self._counts, flag=flag, meanwhile=meanwhile)
        _check_alike(header, self.context.exchange)
        return header

    def _agreed_bounds(self, header: Header) -> Bounds | None:
        """The bounds of the exchange: those used before, if they take all that any rank requests, else just as much as
        that. None where a rank does not know that yet."""
        context, most, bounds = self.context, header.most, None
        if self._is_captured:
            context.learn_ids(most)
            context.most_samples = max(context.most_samples, header.samples)
        if self._is_captured or context.max_ids is not None:
            bounds = context.bounds(self.row_bound)
        if context.recorded is not None and self._learns_bounds:
            bounds = context.recorded.agreed_bounds(self.batch, header.samples, most)
            if not self._is_check_deferred:
                context.recorded.note(header.samples, self._most_requested)
        if bounds is not None and bounds_take(bounds, most):
            return bounds
        return None if header.set_by_any & CHECK_DEFERRED else tuple(map(Bound.just, most))

    def _exchange_ids(self) -> list[Request]:
        """Exchanges ids; returns what is requested of each shard here."""
        exchange, bounds, samples = self.context.exchange, self._bounds, self._samples
        peers: PeerExchange | None = None  # the same on all ranks
        if self._report is not None:
            peers = self.context.captures.exchange_of_ids(bounds, is_planned=self.row_bound is not None)
        elif self._eager_buffers is not None:
            peers = self._eager_buffers.exchange_of_ids(bounds, samples)
        if self._recorded is not None:
            if (self._recorded.samples, self._recorded.bounds) == (samples, bounds):
                self._bags, requested = self._recorded.exchange(peers)
                return [*requested]
            assert self._kept_batch is not None
            self._bags = self._recorded.unpadded(self._kept_batch)
        requests = self.context.requests(samples, bounds)
        beside = "requests" if self.row_bound is None else "requests ahead"  # on different branches of a step's graph
        sizes = self.context.message_sizes(bounds, samples)
        given = torch.empty((exchange.size, sum(sizes)), dtype=torch.int64, device=self.context.device)
        padded = zip(self._bags, bounds, given.split(sizes, 1), strict=True)
        pads = [functools.partial(bags.pad, bound, samples, into) for bags, bound, into in padded]
        side_by_side(self.context.device, pads, beside)
        received = exchange.send(exchange.sending_blocks(given), IDS, peers).split(sizes, 1)
        taken = zip(requests, self._by_shard(received), strict=True)
        side_by_side(self.context.device, [functools.partial(request.take, its) for request, its in taken], beside)
        return requests

    def _note_announced(self, flags: Sequence[int]) -> None:
        """All ranks have announced the forward, or its plan, with these `flags`."""
        self._flags = flags
        self.context.plans_ahead = not flags[0] & NO_PLANS_AHEAD

    def _by_shard(self, of_parts: Sequence[T]) -> Iterator[Sequence[T]]:
        """The values of all parts, shard by shard."""
        begin = 0
        for shard in self.context.shards:
            yield of_parts[begin : begin + len(shard.parts)]
            begin += len(shard.parts)

    @property
    def _gpu_bags(self) -> Sequence[GpuBags]:
        """The bags of each part; those of parts with buffers are on a GPU."""
        return cast("Sequence[GpuBags]", self._bags)

    def may_fetch_first(self, flag: int) -> bool:
        """Whether the forward of a planned call may look its rows up before it announces itself, and announce both by
        one header: where nothing is lost if another rank has no plan, or has failed. The same on all ranks. `flag`: of
        the forward."""
        return not flag & WEIGHTED and not self.context.lookups_change_rows

    def plan_ahead(self, executor: PlanExecutor, kind: PlanKind) -> None:
        """Has `executor` plan and fetch the rows that are requested of this rank, before the forward runs. What cannot
        be planned now the forward plans, and raises why."""
        for shard, request in zip(self.context.shards, self._requests, strict=True):
            with contextlib.suppress(TieredEmbError):
                planned = shard.plan_ahead(executor, request, kind)
                self._planned.append((shard.engine.planned, planned))
        self._mark_used()

    def fetch(self, weights: torch.Tensor | None, *, trains: bool, recomputed: bool, is_announced: bool = True) -> bool:
        """The forward runs: looks up what is requested of this rank, and exchanges rows. Raises on all ranks the error
        of one. `weights`: floats (N,), of the samples here · `is_announced`: whether the other ranks know that the
        forward runs. Else this call announces it, and returns False, with nothing sent, unless all ranks have planned
        theirs. Where the requests of a rank turn out not to fit, all ranks request again, in larger blocks."""
        exchange, context = self.context.exchange, self.context
        self.number = next(NUMBERS)
        weights_of_parts = self._exchange_weights(weights)
        failed: Exception | None = None
        try:
            sending, kept = self._look_up(weights_of_parts, trains=trains, recomputed=recomputed)
            if self._is_check_deferred:
                self._check_after_exchange()
        except Exception as error:
            failed = error
        if is_announced:
            header = context.announce(Phase.ROWS, counts=self._counts, error=failed)
        else:
            flag = PLANNED | TRAINS * trains | NO_PLANS_AHEAD * (not context.offers_ahead)
            header = context.announce(Phase.FORWARD, counts=self._counts, flag=flag, error=failed)
            _check_alike(header, exchange)
            if not header.set_by_all & PLANNED:
                return False
            self._note_announced(header.flags)
        if not bounds_take(self._bounds, header.most):
            self._request_again()
            return self.fetch(weights, trains=trains, recomputed=recomputed)
        self._kept_batch = None
        with LeavingOnError(exchange):
            self._rows = self._receive(sending, ROWS)
            if self._memory is context.eager_buffers:
                context.eager_buffers.rows_exchanged(self.exchange_number, trains=trains)
            elif self._eager_buffers is not None:
                self._eager_buffers.rows_sent()
            for bags, rows_to_send in kept:
                rows_of_ids = exchange.send(rows_to_send, ROWS)
                if self._requests_weight_gradient[exchange.rank]:
                    bags.keep(rows_of_ids.view(-1, rows_of_ids.shape[-1]))
        context.captures.rows_sent()
        return True

    def _look_up(
        self, weights: Sequence[torch.Tensor | None], *, trains: bool, recomputed: bool
    ) -> tuple[list[Sending | SymmetricRows], list[tuple[Bags, Sending]]]:
        """Looks up what is requested of this rank. Returns, of each part, what is to be sent, or the buffer that ranks
        write to; and the rows of all ids, for gradients of weights. `weights`: see `_exchange_weights`."""
        context, rows_of_parts, rows_of_all_ids = self.context, list[torch.Tensor](), list[torch.Tensor | None]()
        self._record_stream()
        self._buffers = self._find_buffers()
        if context.stages_rows:
            context.wait_for_stream(self._stream_use.event)
        every = any(self._requests_weight_gradient)
        of_weights, of_buffers = self._by_shard(weights), self._by_shard(self._buffers)
        for shard, request, weights_of_shard, buffers in zip(
            context.shards, self._requests, of_weights, of_buffers, strict=True
        ):
            call = shard.engine.begin(request.batch, shard.context, trains=trains, recomputed=recomputed, within=None)
            assert isinstance(call, Call)  # a request is planned by itself
            self._calls.append(call)
            buffer = None if request.row_wise is None else buffers[request.row_wise]
            call.rows_to = None if buffer is None or buffer.rows is None else buffer.rows.to
            found = request.look_up(call, weights_of_shard, context.output_dtype, trains=trains, every=every)
            rows_of_parts += found[0]
            rows_of_all_ids += found[1]
        sending = list[Sending | SymmetricRows]()
        each = zip(rows_of_parts, context.parts, self._bounds, self._gpu_bags, self._buffers, strict=True)
        for answer, (part, _), bound, bags, buffer in each:
            if buffer is None or buffer.rows is None:
                sizes = part.row_sizes(bound, self._samples, context.exchange.rank)
                sending.append(context.exchange.sending(answer, *sizes))
                continue
            if part.is_table_wise:
                bags.spread(answer, buffer.rows.to)
            sending.append(buffer.rows)
        return sending, self._rows_for_weights(rows_of_all_ids)

    def _find_buffers(self) -> Sequence[PartBuffers | None]:
        """Of each part, the buffers in other ranks' memory for its rows and gradients; None where these are sent."""
        captures, eager = self.context.captures, self._eager_buffers
        whole: Sequence[PartBuffers] | None = None
        self._memory = None
        if captures.is_active:
            whole, self._memory = captures.buffers(), captures.symmetric
        elif eager is not None:
            whole, self._memory = eager.of(self._bounds, self._samples), eager
        if whole is not None:
            rank = self.context.exchange.rank
            buffers = [
                its.of_bags(part, self._samples, rank) if part.is_table_wise else its
                for (part, _), its in zip(self.context.parts, whole, strict=True)
            ]
            if all(
                part.is_table_wise or its.is_for(bound)
                for (part, _), its, bound in zip(self.context.parts, whole, self._bounds, strict=True)
            ):
                return buffers
        self._memory = None  # also where a captured forward was not planned ahead, as others of its step were
        return [None] * len(self._bags)

    def _receive(self, sending: Sequence[Sending | SymmetricRows], kind: str) -> list[torch.Tensor]:
        """Receives several tensors of one `kind`, which all ranks send; or, for a buffer that ranks write to, waits at
        the barrier. Behind rows there is one even where none were written, as gradients may be."""
        exchange, written = self.context.exchange, [each for each in sending if isinstance(each, SymmetricRows)]
        if self._memory is not None and (written or kind == ROWS):
            self._memory.barrier()
        for each in written:
            exchange.count(kind, each.received, each.sent)
        return [each.received if isinstance(each, SymmetricRows) else exchange.send(each, kind) for each in sending]

    def _check_after_exchange(self) -> None:
        """Checks behind the exchange whether the request fitted it. Waits until its ids were found, which was long
        before the GPU's present work. Raises what is wrong with them."""
        recorded = self.context.recorded
        assert self._recorded is not None
        assert recorded is not None
        self._check_request()
        recorded.note(self._samples, self._most_requested)
        if not bounds_take(self._bounds, self._most_requested):
            self._check_at_once()

    def _check_at_once(self) -> None:
        """The next forwards check before they exchange, for a while."""
        assert self.context.recorded is not None
        self.context.recorded.check_at_once()

    def _request_again(self) -> None:
        """The request of some rank did not fit the exchange: drops its results, and exchanges ids again, in larger
        blocks."""
        self._release_plans()
        self._planned, self._calls = [], []
        assert self._kept_batch is not None
        try:
            self._bags = self._find_by_launches(self._kept_batch)
        except Exception as error:
            self.context.announce(Phase.FORWARD, error=error)
            raise
        flag = self._flags[self.context.exchange.rank] & (WEIGHTED | GRADIENT | TRAINS)
        self._requests = self._request_rows(ahead=False, flag=flag)

    def _exchange_weights(self, weights: torch.Tensor | None) -> list[torch.Tensor | None]:
        """Of each part whose bags this rank pools for others, the weights of the ids that are requested of it."""
        found: list[torch.Tensor | None] = [None] * len(self._bags)
        if weights is None or not any(part.is_table_wise for part, _ in self.context.parts):
            return found
        exchange, failed = self.context.exchange, None
        sending: dict[int, Sending] = {}
        try:
            self._record_stream(weights)
            for number, bags in enumerate(self._bags):
                own_weights = bags.sent_weights(weights)
                if own_weights is not None:
                    sending[number] = exchange.sending_blocks(own_weights.view(exchange.size, -1))
        except Exception as error:
            failed = error
        self.context.announce(Phase.FORWARD, error=failed)
        with LeavingOnError(exchange):
            for number, each in sending.items():
                found[number] = exchange.send(each, IDS).view(-1)
        return found

    @property
    def _requests_weight_gradient(self) -> list[bool]:
        """Of each rank, whether it requests the gradient of its weights."""
        return [bool(flag & GRADIENT) for flag in self._flags]

    def _rows_for_weights(self, every: Sequence[torch.Tensor | None]) -> list[tuple[Bags, Sending]]:
        """The rows of ids that owners pool, to be sent to the ranks that request the gradient of weights."""
        exchange, kept, requests_gradient = self.context.exchange, [], self._requests_weight_gradient
        received = [int(requests_gradient[exchange.rank])] * exchange.size  # blocks
        for bags, (part, _), bound, rows in zip(self._bags, self.context.parts, self._bounds, every, strict=True):
            if rows is not None and part.copies > 1:
                kept.append((bags, exchange.sending(rows, [], [])))
            elif rows is not None:
                blocks = rows.unflatten(0, (exchange.size, bound.ids))
                given = torch.stack([its for its, is_sent in zip(blocks, requests_gradient, strict=True) if is_sent])
                kept.append((bags, exchange.sending(given, [*map(int, requests_gradient)], received)))
        return kept

    def complete(self) -> bool:
        """See `Call.complete`."""
        return True

    @ranged("lookup")
    def pool(self, weights: torch.Tensor | None, *, differentiable: bool) -> torch.Tensor:
        """The pooled rows, (B, ΣD)."""
        context = self.context
        with context.announcing_errors(Phase.ROWS):
            out = torch.empty((self.batch, context.columns), dtype=context.output_dtype, device=context.device)
            how: dict[str, Any] = {"keep": differentiable, "keep_rows": self.keeps_rows}
            each = zip(self._bags, self._rows, strict=True)
            of_parts = [functools.partial(bags.pool, rows, weights, out, **how) for bags, rows in each]
            side_by_side(context.device, of_parts, "pooling")
        self._rows = []
        self._mark_used()
        return out

    def weights_gradient(self, grad: torch.Tensor) -> torch.Tensor:
        """Gradient of the per-sample weights, float32 (N,), given that of the outputs, float32 (B, ΣD)."""
        self._record_stream(grad)
        out = torch.zeros(self._n_ids, dtype=torch.float32, device=grad.device)
        for bags in self._bags:
            bags.weights_gradient(grad, out)
        self._mark_used()
        return out

    @ranged("update")
    def ready(self, grad: torch.Tensor) -> ReadyGradients:
        """What the owners are to be sent, given the gradient of the outputs here; sends nothing yet. Raises what an
        update of the rows here would."""
        exchange, context = self.context.exchange, self.context
        self._stream_use.join()  # autograd does this at its end, but only for streams of leaves on a GPU
        self._record_stream(grad)
        is_infinite = context.is_scaled and self._is_infinite(grad)
        sending, kept = list[list[Sending | SymmetricRows]](), list[torch.Tensor | None]()
        # other ranks write to eager buffers again in their next forward
        is_kept = self._memory is context.eager_buffers and context.updater.keeps_gradients

        def make_ready(bags: GpuBags, part: Part, bound: Bound, buffer: PartBuffers | None) -> None:
            rows: torch.Tensor | None = None
            if buffer is None:
                rows, scale = bags.gradient(grad, context.divisor)
            else:
                scale = bags.send_gradient(grad, context.divisor, buffer.grads.to, exchange.rank)
            given = [values for values in (rows, scale) if values is not None]
            sizes = part.gradient_sizes(bound, self._samples, exchange.rank)
            of_part = [exchange.sending(values, *sizes) for values in given]
            sending.append([*of_part] if buffer is None else [buffer.grads, *of_part])
            kept.append(torch.empty_like(buffer.grads.received) if buffer is not None and is_kept else None)

        parts = [part for part, _ in context.parts]
        each = zip(self._gpu_bags, parts, self._bounds, self._buffers_of_gradients(), strict=True)
        side_by_side(context.device, [functools.partial(make_ready, *its) for its in each], "gradients")
        for call in self._calls:
            check_update(call)
        is_final = all(request.keeps_gradients for request in self._requests)
        return ReadyGradients(sending, kept, is_infinite, is_final and all(len(of_part) == 1 for of_part in sending))

    def _buffers_of_gradients(self) -> Sequence[PartBuffers | None]:
        """Of each part the buffer for its gradients, to which this rank may write from now on; None where they are
        sent."""
        eager = self.context.eager_buffers
        if self._memory is not eager:
            return self._buffers
        if not eager.owns_gradients(self.exchange_number):
            return [None] * len(self._buffers)
        eager.wait_stream()
        return self._buffers

    def _is_infinite(self, grad: torch.Tensor) -> bool:
        is_finite = torch.isfinite(grad).all()
        self.context.wait_for_stream()
        return not bool(is_finite)

    def exchange_gradients(self, ready: ReadyGradients) -> list[list[torch.Tensor]]:
        """Exchanges what all ranks have `ready`; returns, of each part, what this rank receives. A collective to which
        all ranks have agreed."""
        each = iter(self._receive([each for its in ready.sending for each in its], GRADIENTS))
        received = [[next(each) for _ in its] for its in ready.sending]
        ready.sending.clear()
        for its, kept in zip(received, ready.kept, strict=True):
            if kept is not None:
                its[0] = kept.copy_(its[0])
        return received

    def gradients(
        self, received: Sequence[Sequence[torch.Tensor]], *, is_infinite: bool
    ) -> list[tuple[Call, torch.Tensor]]:
        """Of each shard the call that looked up the rows here, and the gradient of its output, made of what was
        `received`. `is_infinite`: whether a gradient of any rank is not finite."""
        found = []
        for request, call, received_of_shard in zip(self._requests, self._calls, self._by_shard(received), strict=True):
            rows = request.gradient(call, received_of_shard)
            if is_infinite:  # a row behind the gradients: the optimizer sees it, and no table row gets it
                rows = torch.cat([rows, rows.new_full((1, rows.shape[1]), torch.inf)])
            found.append((call, rows))
        return found

    def _record_stream(self, *more: torch.Tensor) -> None:
        """The current stream uses the tensors of this call, and `more`."""
        held = (tensor for bags in self._bags for tensor in bags.tensors())
        requested = (tensor for request in self._requests for tensor in request.tensors())
        self._stream_use.record_stream(itertools.chain(held, requested), more)

    def release(self) -> None:
        """No backward will run, or no forward: its rows may leave the caches."""
        self._release_plans()
        self.over()

    def _release_plans(self) -> None:
        """Releases its plans and lookups: their rows may leave the caches."""
        for among, planned in self._planned:
            among.drop(planned)
        for call in self._calls:
            call.release()
        self._buffers = ()

    def over(self) -> None:
        """It is over, on the device with what the current stream has launched by now; unless the gradient of weights
        may yet be requested."""
        self._mark_used()
        self._buffers = ()
        self.is_over = not self.keeps_rows

    def _mark_used(self) -> None:
        """The current stream's launches by now use its recorded tensors."""
        if self._recorded is not None:
            self._recorded.mark_used()


def forward_flag(weights: torch.Tensor | None, *, trains: bool) -> int:
    """The flag in the header of a forward: whether it trains, and whether it has per-sample weights."""
    if weights is None:
        return TRAINS * trains
    return TRAINS * trains | WEIGHTED | GRADIENT * (torch.is_grad_enabled() and weights.requires_grad)


def _check_alike(header: Header, exchange: Exchange) -> None:
    """Raises `PeerError`, on all ranks, where some ranks have per-sample weights and others none, or some train and
    others do not."""
    flags = header.flags
    if not (header.set_by_any ^ header.set_by_all) & (WEIGHTED | TRAINS):
        return
    exchange.failures += 1
    with_weights, training = ([rank for rank, flag in enumerate(flags) if flag & kind] for kind in (WEIGHTED, TRAINS))
    if 0 < len(with_weights) < len(flags):
        raise PeerError(
            f"per_sample_weights are given on ranks {with_weights} alone; pass them on all ranks, or on none"
        )
    if 0 < len(training) < len(flags):
        raise PeerError(
            f"ranks {training} look up a batch that they train on, and the others one without gradients, as in an "
            f"evaluation; each rank has to make as many lookups of each kind, in the same order. One whose evaluation "
            f"has fewer batches takes some without samples: no ids, and offsets of a single 0. Nothing was changed"
        )


def check_update(call: Call) -> None:
    """Raises what an update of the rows of a call would raise, before it changes any."""
    tables = call.context.tables.placed.now
    with tables.rows.held():
        for group, part in zip(tables.groups, call.parts, strict=True):
            group.cache.check_rows(part.ticket)
    call.context.check_trainable().check_options_now()
