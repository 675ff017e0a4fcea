"""One forward of a sharded collection and its backward: what is exchanged, and in which order.

Forward: ids go to the ranks that own their rows, which look them up. Of tables that are dealt out unique rows come
back, and are pooled where the bags are; of tables that a rank holds whole it pools the bags, whose lengths it is
sent, and whose weights come with the forward. Backward: the gradient of every occurrence, and of every
pooled bag, goes to the owner, which updates its rows as one process would that has the batches of all ranks, one after
the other. Tables that all ranks hold have all ranks for owners: ids and gradients go to each, and bags stay where they
are pooled.

Gradients travel uncombined, of a row one for each occurrence: an owner adds up those of all ranks in one order, and
sums of a rank's own would change their bits. Of single rows a scale of an occurrence (a weight, or a mean's share)
goes beside its gradient. The gradient of weights is computed where the bags are, of all rows, which come beside the
pooled bags to the ranks that ask for it.

A forward has two headers, before its ids and before its rows, and one more where its ids were exchanged ahead, or
weights of whole tables are. A backward pass has one before gradients are sent, in which ranks also tell which forwards
it has reached; and one more before the update where a rank has yet to put together what comes, so that none updates
where one of them could not. Ids are exchanged by the thread of the loop or the forward, gradients by that of the
backward, in one order on all ranks; with prefetch the owners plan while a batch computes.
"""

from __future__ import annotations

import contextlib
import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import numpy as np
import torch

from tieredemb.cache.base import PlanKind
from tieredemb.errors import PeerError, TieredEmbError
from tieredemb.kernels.tracing import ranged
from tieredemb.sharding.bags import Bags
from tieredemb.sharding.captures import Captures
from tieredemb.sharding.context import ShardedContext
from tieredemb.sharding.eager_buffers import EagerBuffers
from tieredemb.sharding.exchange import Exchange, Sending
from tieredemb.sharding.finder import recorded_requests
from tieredemb.sharding.header import Bound, Bounds, Counts, Header, Most, Phase, take
from tieredemb.sharding.request import Request, RequestPart
from tieredemb.sharding.stats import GRADIENTS, IDS, ROWS
from tieredemb.sharding.stream_use import StreamUse
from tieredemb.step.batch import Batch
from tieredemb.step.planned_forwards import PlanExecutor, Planned, PlannedForwards
from tieredemb.step.program import NUMBERS, Call, in_forward_order

if TYPE_CHECKING:
    from tieredemb.sharding.gpu_bags import GpuBags
    from tieredemb.sharding.recorded_requests import RecordedRequest
    from tieredemb.sharding.symmetric import PartBuffers, SymmetricMemory

T = TypeVar("T")
WEIGHTED = 1  # flag of a header of a forward: per-sample weights are given
PLANNED = 2  # ids were exchanged before
GRADIENT = 4  # that of the weights is asked for, which takes the rows of all ids
ALONE = 8  # this rank would not plan the next batch ahead
LATER = 16  # this rank has not looked yet how much it asks for: it expects as much as of the batch before
FETCHED = 32  # of a header of a forward that announces its rows as well, which have been looked up
TRAINS = 64  # of a header of a forward: it is to update rows
INFINITE = 1  # flag of the header of a backward: a gradient is not finite, which is to keep all ranks from the update
SETTLED = 2  # what is exchanged is the gradient as an update takes it
PASSED_BITS = 2  # behind which stands which forwards the backward has reached
MOST_TOLD = 0xFFFF  # forwards that one tells of by how many they are


class ReadyGradients(NamedTuple):
    """What a backward of one forward is about to exchange. `sending`: of each part, until it is sent; where it is
    written to the owner's memory, the buffer for those of all ranks · `kept`: of each part, a tensor that this is
    copied to, if a later step applies it · `is_infinite`: whether a gradient here is not finite · `is_settled`: whether
    what is received is the gradient as an update takes it, so that this rank cannot fail any more before that."""

    sending: list[list[Sending | torch.Tensor]]
    kept: list[torch.Tensor | None]
    is_infinite: bool
    is_settled: bool


@dataclass(eq=False, kw_only=True)
class ShardedCallContext(ShardedContext):
    """What the calls of one module share. `make_batch`: makes a checked batch of what a forward is given · `captures`:
    what lets a step be captured · `recorded`: what eager forwards record on a GPU, and `eager_buffers`: where they
    write what they would send."""

    make_batch: Callable[..., Batch]

    def __post_init__(self) -> None:
        self.captures = Captures(self, self.find, self.make_batch)
        self.recorded = recorded_requests(self, self.find)
        self.eager_buffers = EagerBuffers(self)

    def apply(self, reached: Sequence[tuple[ShardedCall, torch.Tensor]]) -> None:
        """Applies what one backward pass has reached, in forward order, as one update. Every rank takes part, and none
        updates where one of them could not. Who is interrupted amid the exchange itself leaves the group, and others
        learn of it by their next header."""
        try:
            ready, header = self._ready(reached)
            is_infinite = bool(header.set_by_any & INFINITE)
            # nothing of a rank's own can fail any more, so they need not agree again
            is_settled = not is_infinite and bool(header.set_by_all & SETTLED)
            with self.exchange.agreed():
                if not self.eager_buffers.is_off:
                    self.eager_buffers.reached([call.announced for call, _ in reached])
                received = [call.exchanged(its) for (call, _), its in zip(reached, ready, strict=True)]
            pairs: list[tuple[Call, torch.Tensor]] = []
            with self.exchange.agreed() if is_settled else self.telling(Phase.BACKWARD):
                for (call, _), its in zip(reached, received, strict=True):
                    pairs += call.gradients(its, is_infinite=is_infinite)
            if not is_settled:
                self.announce(Phase.BACKWARD)
        except BaseException:
            for call, _ in reached:
                call.release()
            raise
        try:
            self.shards[0].context.apply(in_forward_order(pairs))
        finally:
            for call, _ in reached:
                call.over()

    def _ready(self, reached: Sequence[tuple[ShardedCall, torch.Tensor]]) -> tuple[list[ReadyGradients], Header]:
        """What each forward is about to exchange, and the ranks' header. Raises on all ranks what one has met, or that
        they have reached different forwards."""
        failed: Exception | None = None
        ready: list[ReadyGradients] = []
        try:
            ready += [call.ready(grad) for call, grad in reached]
        except Exception as error:
            failed = error
        passed = self._passed([call.announced for call, _ in reached])
        flag = INFINITE * any(each.is_infinite for each in ready) | SETTLED * all(each.is_settled for each in ready)
        updates = failed is None and self.optimizer is not None  # a torch optimizer's step comes later
        header = self.announce(Phase.BACKWARD, flag=passed << PASSED_BITS | flag, error=failed, updates=updates)
        _check_passed([each >> PASSED_BITS for each in header.flags])
        return ready, header

    @staticmethod
    def _passed(announced: Sequence[int]) -> int:
        """What a flag says of the forwards that a backward pass has reached, by the numbers of their exchanges."""
        return zlib.crc32(np.array(sorted(announced), np.int64).tobytes()) << 16 | min(len(announced), MOST_TOLD)


class ShardedCall:
    """One forward. It tells the owners of its rows which it asks for, which may be long before the forward comes and
    the rows are fetched. Of each part of each shard: the bags here; of each shard what was asked of this rank, and the
    call that answers. `number`: in the order of forwards, once it has come · `announced`: the number of the exchange of
    its ids · `row_bound`: in a captured step, how many rows come back from each rank, if not one for each id ·
    `is_over`: whether nothing reads what it knows of its ids any more; an update that is put off reads what it has of
    its own."""

    row_bound: int | None = None
    is_over = False
    forwards = None  # see `Call`
    requested: Any = None  # see `Call`: never here, where a gradient lies on several ranks
    # the most that it asks another rank for in each part; until the host has looked (`_is_later`) it is taken for what
    # it was before
    _asks_for: Sequence[Most]
    _is_later = False
    _bounds: Bounds  # of the exchange
    _recorded: RecordedRequest | None = None  # by what it is found and sent, if that is recorded
    # of each part, where rows and gradients are written to each other's memory and not sent; and by whose barrier
    _buffers: Sequence[PartBuffers | None] = ()
    _memory: SymmetricMemory | EagerBuffers | None = None

    def __init__(self, context: ShardedCallContext, batch: Batch, *, flag: int = 0, ahead: bool = False) -> None:
        """Exchanges ids. Raises on all ranks what one has met. `flag`: of the forward (`forward_flag`) · `ahead`:
        whether that has yet to come."""
        self.context = context
        self.consumed = self.keeps_rows = False
        self.within: Any = None
        self.number = self.announced = -1
        self.batch = batch.size
        self._n_ids = len(batch.ids)
        self._words: torch.Tensor | None = None  # in a capture, what tells of the bags later
        self._use = StreamUse(context.device)
        self._given = batch if self._learns else None  # until all that ranks ask for is known to fit
        self._bags: Sequence[Bags] = self._find(batch, Phase.PLAN if ahead else Phase.FORWARD)
        self._requests = self._ask(ahead=ahead, flag=flag)
        if ahead:
            self._use.made()
        self._planned: list[tuple[PlannedForwards, Planned]] = []
        self._calls: list[Call] = []
        self._rows: list[torch.Tensor] = []

    @classmethod
    def of(cls, context: ShardedCallContext, batch: Batch, flag: int, planned: ShardedCall | None) -> ShardedCall:
        """The call of a forward that has come: the one that was `planned`, if all ranks have theirs, or another."""
        if planned is None:
            return cls(context, batch, flag=flag)
        try:
            header = context.announce(Phase.FORWARD, flag=PLANNED | flag | ALONE * (not context.offers_ahead))
            _check_alike(header, context.exchange)
        except BaseException:
            planned.release()
            raise
        if header.set_by_all & PLANNED:
            planned._told(header.flags)
            return planned
        planned.release()
        return cls(context, batch, flag=flag)

    @ranged("plan")
    def _find(self, batch: Batch, phase: Phase) -> Sequence[Bags]:
        """The bags, which are found to be good; what is wrong with them all ranks raise."""
        captures = self.context.captures
        try:
            if captures.is_active:
                self._asks_for = self.context.no_counts.most
                found, self._words = captures.find(batch, finds_firsts=self.row_bound is not None)
                return found
            recorded = self.context.recorded
            if recorded is not None and self._learns:
                self._recorded = recorded.of(batch)
            if recorded is not None and self._recorded is not None:
                self._is_later = recorded.may_look_later()
                self._asks_for = recorded.before(self._recorded.samples)
                return () if self._is_later else self._looked_at()
            return self._of_launches(batch)
        except Exception as error:
            self.context.announce(phase, error=error)
            raise

    def _of_launches(self, batch: Batch) -> Sequence[Bags]:
        """The bags, found by launches that the host waits for."""
        found, most = self.context.bags_of(batch)
        self._note_asked(most)
        return found

    def _look(self) -> None:
        """Waits until the host can know what the bags ask for, and looks. Raises what is wrong with them."""
        assert self._recorded is not None
        self._is_later = False
        self._note_asked(self._recorded.look())

    @property
    def _counts(self) -> Counts:
        """What it tells all ranks, as far as that is known."""
        return Counts(self.batch, [*self._asks_for])

    def _note_asked(self, most: Sequence[Most]) -> None:
        """Notes how much it asks for, and warns where that is more than `max_ids`."""
        self._asks_for = most
        self.context.warn_if_longer(most)

    def _looked_at(self) -> Sequence[Bags]:
        """The bags as they are found, before anything is sent. As `_look`."""
        found = self._found()
        self._look()
        return found

    def _found(self) -> list[GpuBags]:
        """The bags as recorded launches find them. Does not synchronise."""
        assert self._recorded is not None
        assert self._given is not None
        return self._recorded.find(self, self._given)

    def _find_and_pad(self) -> None:
        """Finds the bags, and pads them to one size, while the header is on its way. The recorded launches are this
        call's from here on."""
        assert self._recorded is not None
        self._bags = self._found()
        self._recorded.pad()

    @property
    def _is_captured(self) -> bool:
        """Whether it is of a step that is captured, or is to be: of all ranks alike."""
        return self.row_bound is not None or self._words is not None or self.context.on_buffers

    @property
    def _learns(self) -> bool:
        """Whether sizes of exchanges are learned from what is asked for where the ranks have as many samples."""
        return self.context.recorded is not None and not self._is_captured

    def _ask(self, *, ahead: bool, flag: int) -> list[Request]:
        """What is asked of each shard here."""
        context, phase = self.context, Phase.PLAN if ahead else Phase.FORWARD
        flag = (0 if ahead else flag) | ALONE * (not context.offers_ahead)
        meanwhile = self._find_and_pad if self._is_later else None
        while True:
            header, meanwhile = self._announce(phase, flag, meanwhile), None
            if header.set_by_any & PLANNED:  # others had a plan, which they now give up
                continue
            with context.exchange.agreed():
                bounds = self._agreed_bounds(header)
            if bounds is not None:
                break
            if self._is_later:  # all need to know how much is asked for
                try:
                    self._look_at_once()
                    self._bags = self._looked_at()
                except Exception as error:
                    context.announce(phase, error=error)
                    raise
        context.check_room(bounds)
        if not context.eager_buffers.is_off and self._learns:
            with context.exchange.agreed():
                context.eager_buffers.prepare(bounds)
        self._told(header.flags)
        self.announced, self._bounds = context.number, bounds
        with context.exchange.agreed():
            return self._exchanged(header.samples)

    def _announce(self, phase: Phase, flag: int, meanwhile: Callable[[], object] | None) -> Header:
        """Tells all ranks how much each is asked for, as far as that is known."""
        flag |= LATER * self._is_later
        header = self.context.announce(phase, counts=self._counts, flag=flag, meanwhile=meanwhile)
        _check_alike(header, self.context.exchange)
        return header

    def _agreed_bounds(self, header: Header) -> Bounds | None:
        """Of the exchange: those that were used before, if they take all that any rank asks for, else of as much as
        that. None where that is not known yet."""
        context, most, bounds = self.context, header.most, None
        if self._is_captured:
            context.know_ids(most)
        if self._is_captured or context.max_ids is not None:
            bounds = context.bounds(self.row_bound)
        if context.recorded is not None and self._learns:
            bounds = context.recorded.agreed(self.batch, header.samples, most)
            if not self._is_later:
                context.recorded.note(header.samples, self._asks_for)
        if bounds is not None and take(bounds, most):
            return bounds
        return None if header.set_by_any & LATER else tuple(map(Bound.just, most))

    def _exchanged(self, samples: list[int]) -> list[Request]:
        """What is asked of each shard, once the ids have come. `samples`: how many each rank has."""
        exchange, bounds = self.context.exchange, self._bounds
        if self._recorded is not None:
            if (self._recorded.samples, self._recorded.bounds) == (samples, bounds):
                if not self._is_later:
                    self._recorded.pad()
                self._bags, asked = self._recorded.exchange()
                return [*asked]
            if self._is_later:  # they are padded for another one
                self._bags = self._found()
        requests = self.context.requests(samples, bounds)
        for bags, bound in zip(self._bags, bounds, strict=True):
            bags.pad(bound)
        messages = [part.message for request in requests for part in request.parts]
        came = exchange.joined([bags.asked for bags in self._bags], [bags.sent for bags in self._bags], messages)
        for request, messages_of in zip(requests, self._by_shard(came), strict=True):
            request.take(messages_of)
        return requests

    def _told(self, flags: Sequence[int]) -> None:
        """All ranks have announced the forward, or that they plan it."""
        self._flags = flags
        self.context.plans_ahead = not flags[0] & ALONE

    def _by_shard(self, of_parts: Sequence[T]) -> Iterator[Sequence[T]]:
        """What there is of each part, shard by shard."""
        begin = 0
        for shard in self.context.shards:
            yield of_parts[begin : begin + len(shard.parts)]
            begin += len(shard.parts)

    @property
    def _parts(self) -> list[RequestPart]:
        """What is asked of this rank, of the parts of all shards."""
        return [part for request in self._requests for part in request.parts]

    def may_fetch_first(self, flag: int) -> bool:
        """Whether the forward of a call that was planned may look its rows up first, and then announce itself and them
        by one header: where nothing is lost if another rank has no plan, or has failed. `flag`: of the forward."""
        return not flag & WEIGHTED and not self.context.lookups_change_rows

    def plan_ahead(self, executor: PlanExecutor, kind: PlanKind) -> None:
        """Has the rows that are asked of this rank planned and fetched by `executor`, before the forward comes. What
        cannot be planned now the forward plans, and finds out why."""
        for shard, request in zip(self.context.shards, self._requests, strict=True):
            with contextlib.suppress(TieredEmbError):
                planned = shard.plan_ahead(executor, request, kind)
                self._planned.append((shard.engine.planned, planned))
        self._used()

    def fetch(self, weights: torch.Tensor | None, *, trains: bool, recomputed: bool, is_announced: bool = True) -> bool:
        """The forward has come: answers what was asked of this rank, and has its own rows brought. Raises on all ranks
        what one has met. `weights`: floats (N,), of the samples here · `is_announced`: whether the others know that it
        has come; else they learn it here, and it returns false, having sent nothing, where not all have planned theirs.
        What of any rank does not fit, which is known here at the latest, all ask for again, in larger blocks."""
        exchange, context = self.context.exchange, self.context
        self.number = next(NUMBERS)
        of_ids = self._weights(weights)
        failed: Exception | None = None
        answers: list[torch.Tensor] = []
        every: list[torch.Tensor | None] = []
        try:
            self._follow()
            self._buffers = self._find_buffers()
            if context.stages_rows:
                context.wait_for_stream(self._use.event)
            of_shards = zip(
                context.shards, self._requests, self._by_shard(of_ids), self._by_shard(self._buffers), strict=True
            )
            for shard, request, its, buffers in of_shards:
                call = shard.begin(request, trains=trains, recomputed=recomputed, within=None)
                self._calls.append(call)
                call.rows_to = next((buffer.rows.to for buffer in buffers if buffer is not None), None)
                found = request.look_up(call, its, context.output_dtype, trains=trains, every=any(self._asks))
                answers += found[0]
                every += found[1]
            sending = [
                exchange.sending(answer, part.answer, bags.back) if buffer is None else buffer.rows.received
                for answer, part, bags, buffer in zip(answers, self._parts, self._bags, self._buffers, strict=True)
            ]
            kept = self._rows_for_weights(every)
            if self._is_later:
                self._look_behind()
        except Exception as error:
            failed = error
        if is_announced:
            header = context.announce(Phase.ROWS, counts=self._counts, error=failed)
        else:
            flag = PLANNED | FETCHED | TRAINS * trains | ALONE * (not context.offers_ahead)
            header = context.announce(Phase.FORWARD, counts=self._counts, flag=flag, error=failed)
            _check_alike(header, exchange)
            if not header.set_by_all & FETCHED:
                return False
            self._told(header.flags)
        if not take(self._bounds, header.most):
            self._ask_again()
            return self.fetch(weights, trains=trains, recomputed=recomputed)
        self._given = None
        with exchange.agreed():
            self._rows = self._came(sending, ROWS)
            if self._memory is context.eager_buffers:
                context.eager_buffers.rows_exchanged(self.announced, trains=trains)
            elif self._learns:
                context.eager_buffers.rows_sent()
            for bags, each in kept:
                came = exchange.send(each, ROWS)
                if self._asks[exchange.rank]:
                    bags.keep(came)
        context.captures.rows_sent()
        return True

    def _find_buffers(self) -> Sequence[PartBuffers | None]:
        """Of each part, where its rows and gradients are written to, if they are not sent."""
        captures, eager = self.context.captures, self.context.eager_buffers
        buffers: Sequence[PartBuffers | None] | None = None
        self._memory = None
        if captures.is_active:
            buffers, self._memory = captures.buffers(), captures.symmetric
        elif not eager.is_off and self._learns:
            buffers, self._memory = eager.of(self._bounds), eager
        if buffers is not None and all(
            buffer is None or (buffer.rows.to.each, buffer.grads.to.each) == (part.answer[0], part.grads[0])
            for part, buffer in zip(self._parts, buffers, strict=True)
        ):
            return buffers
        self._memory = None  # also of a forward that is captured among such as were planned ahead
        return [None] * len(self._bags)

    def _came(self, sending: Sequence[Sending | torch.Tensor], kind: str) -> list[torch.Tensor]:
        """What comes of several of a `kind` that all ranks send, or write to where it is."""
        exchange, written = self.context.exchange, [each for each in sending if isinstance(each, torch.Tensor)]
        if written:
            assert self._memory is not None
            self._memory.barrier()
        for each in written:  # as much as comes
            exchange.count(kind, each, len(each) - len(each) // exchange.size)
        return [each if isinstance(each, torch.Tensor) else exchange.send(each, kind) for each in sending]

    def _look_behind(self) -> None:
        """Looks what was asked for, which may not fit the exchange that it was sent in: waits until its ids were found,
        which was long before what the GPU does now. Raises what is wrong with them."""
        recorded = self.context.recorded
        assert self._recorded is not None
        assert recorded is not None
        self._look()
        recorded.note(self._recorded.samples, self._asks_for)
        if not take(self._bounds, self._asks_for):
            self._look_at_once()

    def _look_at_once(self) -> None:
        """From now on, for a while."""
        assert self.context.recorded is not None
        self.context.recorded.look_at_once()

    def _ask_again(self) -> None:
        """Of some rank the exchange has not taken all: gives up what came of it, and exchanges ids in larger blocks."""
        self._give_up()
        self._planned, self._calls = [], []
        assert self._given is not None
        try:
            self._bags = self._of_launches(self._given)
        except Exception as error:
            self.context.announce(Phase.FORWARD, error=error)
            raise
        flag = self._flags[self.context.exchange.rank] & (WEIGHTED | GRADIENT | TRAINS)
        self._requests = self._ask(ahead=False, flag=flag)

    def _weights(self, weights: torch.Tensor | None) -> list[torch.Tensor | None]:
        """Of each part the weights of the ids that are asked of this rank, where it pools them."""
        found: list[torch.Tensor | None] = [None] * len(self._bags)
        if weights is None or not any(part.is_whole for part in self._parts):
            return found
        exchange, failed = self.context.exchange, None
        sending: dict[int, Sending] = {}
        try:
            self._follow(weights)
            for number, (bags, part) in enumerate(zip(self._bags, self._parts, strict=True)):
                mine = bags.sent_weights(weights)
                if mine is not None:
                    sending[number] = exchange.sending(mine, bags.ids, part.order)
        except Exception as error:
            failed = error
        self.context.announce(Phase.FORWARD, error=failed)
        with exchange.agreed():
            for number, each in sending.items():
                found[number] = exchange.send(each, IDS)
        return found

    @property
    def _asks(self) -> list[bool]:
        """Which ranks ask for the gradient of weights."""
        return [bool(flag & GRADIENT) for flag in self._flags]

    def _rows_for_weights(self, every: Sequence[torch.Tensor | None]) -> list[tuple[Bags, Sending]]:
        """The rows of ids that are pooled where they are, for those ranks that ask for the gradient of weights."""
        exchange, kept, asks = self.context.exchange, [], self._asks
        mine = asks[exchange.rank]
        for bags, part, rows in zip(self._bags, self._parts, every, strict=True):
            if rows is not None and not part.answer:
                kept.append((bags, exchange.sending(rows, [], [])))
            elif rows is not None:
                pieces = rows.split(part.order)
                rows = torch.cat([its for its, is_asked in zip(pieces, asks, strict=True) if is_asked])
                sent = [n * is_asked for n, is_asked in zip(part.order, asks, strict=True)]
                kept.append((bags, exchange.sending(rows, sent, [n * mine for n in bags.ids])))
        return kept

    def complete(self) -> bool:
        """See `Call.complete`."""
        return True

    @ranged("lookup")
    def pool(self, weights: torch.Tensor | None, *, differentiable: bool) -> torch.Tensor:
        """The pooled rows, (B, ΣD)."""
        context = self.context
        with context.telling(Phase.ROWS):
            out = torch.empty((self.batch, context.columns), dtype=context.output_dtype, device=context.device)
            for bags, rows in zip(self._bags, self._rows, strict=True):
                bags.pool(rows, weights, out, keep=differentiable, keep_rows=self.keeps_rows)
        self._rows = []
        self._used()
        return out

    def weights_gradient(self, grad: torch.Tensor) -> torch.Tensor:
        """Gradient of the per-sample weights, float32 (N,), given that of the outputs, float32 (B, ΣD)."""
        self._follow(grad)
        out = torch.zeros(self._n_ids, dtype=torch.float32, device=grad.device)
        for bags in self._bags:
            bags.weights_gradient(grad, out)
        self._used()
        return out

    @ranged("update")
    def ready(self, grad: torch.Tensor) -> ReadyGradients:
        """What the owners are to be sent, given the gradient of the outputs here; nothing is yet. Raises what an update
        of the rows here would."""
        exchange, context = self.context.exchange, self.context
        self._use.join()  # at its end autograd has the current stream wait for those of leaves on a GPU alone
        self._follow(grad)
        is_infinite = context.is_scaled and self._is_infinite(grad)
        buffers, sending, kept = (
            self._gradient_buffers(),
            list[list[Sending | torch.Tensor]](),
            list[torch.Tensor | None](),
        )
        # others write to eager buffers again in their next forward
        is_kept = self._memory is context.eager_buffers and context.updater.keeps_gradients
        for bags, part, buffer in zip(self._bags, self._parts, buffers, strict=True):
            rows: torch.Tensor | None = None
            if buffer is None:
                rows, scale = bags.gradient(grad, context.divisor)
            else:
                scale = cast("GpuBags", bags).send_gradient(grad, context.divisor, buffer.grads.to)
            given = [each for each in (rows, scale) if each is not None]
            its = [exchange.sending(each, bags.grads, part.grads) for each in given]
            sending.append([*its] if buffer is None else [buffer.grads.received, *its])
            kept.append(torch.empty_like(buffer.grads.received) if buffer is not None and is_kept else None)
        for call in self._calls:
            check_update(call)
        is_settled = all(request.keeps_gradients for request in self._requests)
        return ReadyGradients(sending, kept, is_infinite, is_settled and all(len(its) == 1 for its in sending))

    def _gradient_buffers(self) -> Sequence[PartBuffers | None]:
        """Of each part where its gradients are written to, which may begin now; None where they are sent."""
        eager = self.context.eager_buffers
        if self._memory is not eager:
            return self._buffers
        if not eager.owns_gradients(self.announced):
            return [None] * len(self._buffers)
        eager.follow()
        return self._buffers

    def _is_infinite(self, grad: torch.Tensor) -> bool:
        is_finite = torch.isfinite(grad).all()
        self.context.wait_for_stream()
        return not bool(is_finite)

    def exchanged(self, ready: ReadyGradients) -> list[list[torch.Tensor]]:
        """Of each part what this rank receives of what all ranks have had `ready`. Every rank takes part, and has
        agreed to."""
        each = iter(self._came([each for its in ready.sending for each in its], GRADIENTS))
        received = [[next(each) for _ in its] for its in ready.sending]
        ready.sending.clear()
        for its, kept in zip(received, ready.kept, strict=True):
            if kept is not None:
                its[0] = kept.copy_(its[0])
        return received

    def gradients(
        self, received: Sequence[Sequence[torch.Tensor]], *, is_infinite: bool
    ) -> list[tuple[Call, torch.Tensor]]:
        """Of each shard the call of the rows that this rank owns, and the gradient of its output, of what was
        `received`. `is_infinite`: whether a gradient of any rank is."""
        found = []
        for request, call, its in zip(self._requests, self._calls, self._by_shard(received), strict=True):
            rows = request.gradient(call, its)
            if is_infinite:  # a row behind those of occurrences, which the optimizer sees, and no row of a table
                rows = torch.cat([rows, rows.new_full((1, rows.shape[1]), torch.inf)])
            found.append((call, rows))
        return found

    def _follow(self, *more: torch.Tensor) -> None:
        """The current stream uses what was made of the call, and `more`."""
        held = (tensor for bags in self._bags for tensor in bags.tensors())
        asked = (tensor for request in self._requests for tensor in request.tensors())
        self._use.follow(itertools.chain(held, asked), more)

    def release(self) -> None:
        """No backward will come, or no forward: its rows may leave the caches."""
        self._give_up()
        self.over()

    def _give_up(self) -> None:
        """What was planned of it, and looked up, may leave the caches."""
        for among, planned in self._planned:
            among.drop(planned)
        for call in self._calls:
            call.release()
        self._buffers = ()

    def over(self) -> None:
        """It is over, also on the device, with what the current stream has launched; unless the gradient of weights may
        be asked for yet."""
        self._used()
        self._buffers = ()
        self.is_over = not self.keeps_rows

    def _used(self) -> None:
        """The current stream uses what is known of the ids, so far."""
        if self._recorded is not None:
            self._recorded.used()


def forward_flag(weights: torch.Tensor | None, *, trains: bool) -> int:
    """What the header of a forward says of it, and of its per-sample weights."""
    if weights is None:
        return TRAINS * trains
    return TRAINS * trains | WEIGHTED | GRADIENT * (torch.is_grad_enabled() and weights.requires_grad)


def _check_alike(header: Header, exchange: Exchange) -> None:
    """Raises `PeerError`, on all ranks, where some have weights of their samples and others none, or some are to train
    and others not."""
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


def _check_passed(passed: Sequence[int]) -> None:
    """Raises `PeerError`, on all ranks, where their backward passes have reached different forwards."""
    if passed.count(passed[0]) < len(passed):
        reached = ", ".join(f"{each & MOST_TOLD} on rank {rank}" for rank, each in enumerate(passed))
        raise PeerError(
            f"the backward passes of the ranks have reached different lookups ({reached}); each rank has to run "
            f"backward through the same ones"
        )


def check_update(call: Call) -> None:
    """Raises what an update of the rows of a call would, before it changes any."""
    tables = call.context.tables.placed.now
    with tables.rows.held():
        for group, part in zip(tables.groups, call.parts, strict=True):
            group.cache.check_rows(part.ticket)
    call.context.check_trainable().check_options_now()
