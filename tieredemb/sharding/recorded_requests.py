"""The ids that an eager forward of ranks on a GPU requests, and those that are requested of it, found and exchanged by
CUDA graphs, where batches of one form occur repeatedly: two replays stand for a hundred launches, of torch and of ours.

Between the graphs is what no eager graph can hold: the header by which ranks agree to an exchange of one size, and the
exchange. The size is `max_ids`. Where the user names none, it is somewhat more than any rank has requested from another
in batches of as many samples, by the rank that has most, as all of them know by the headers. The number of different
rows that come back is learned likewise. The host does not wait to learn whether a batch fits: it launches what follows
as if it did, and checks before rows are sent. A batch that does not fit is requested again, in blocks of just the size
that it needs; a wrong batch requests nothing.

A batch that needs more than the bound, or far less, changes the bound, and goes in blocks of just its size, or of
`max_ids`. After a batch that did not fit, its rank checks first for a while. Where a lookup by itself changes rows, as
with dense optimizers and with `max_norm`, the host always checks first. Graphs have memory of their own, which belongs
to one forward until its gradients are exchanged. What a deferred update reads is copied. Other forwards in flight have
other graphs.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import torch

from tieredemb.kernels.copies import copy_on_device
from tieredemb.kernels.inference import no_inference
from tieredemb.kernels.recorder import Recorder
from tieredemb.kernels.recording import GraphPool, Recording, can_record
from tieredemb.kernels.streams import current_stream, on_device
from tieredemb.lookup.bags import EqualBags, Places
from tieredemb.sharding.context import ShardedContext, with_margin
from tieredemb.sharding.header import Bound, Bounds, LargestRequest
from tieredemb.sharding.stats import IDS
from tieredemb.tables.group import device_groups

if TYPE_CHECKING:
    from tieredemb.cache.device.cache import DeviceCache
    from tieredemb.sharding.gpu_bags import GpuBags, GpuFinder
    from tieredemb.sharding.peer_exchange import PeerExchange
    from tieredemb.sharding.request import Request
    from tieredemb.step.batch import Batch

K = TypeVar("K")
V = TypeVar("V")
MOST_FORMS = 4  # recorded at most: those used last
MOST_AT_ONCE = 4  # forwards of one form in flight, each with graphs of its own
MOST_BOUNDS = 64  # kept at most, one for each number of samples: those used last
LOOSE = 2  # × what a batch needs with a margin: the rest of a larger bound would be wasted
SMALLEST_BOUND = 64  # ids or rows: a bound up to twice that is never too large, as small parts vary a lot
CHECKED_FIRST = 16  # forwards that check first, after one that did not fit


class Form(NamedTuple):
    """What the launches depend on. `bags`: their length, if it is equal, or how many of the `edges` are given ·
    `samples`: of the rank that has most, as far as is known before the headers · `bounds`: of ids that fit. The rest:
    see `Batch`."""

    ids: int
    batch: int
    edges: int
    bags: EqualBags | int
    exact: bool
    places: Places | None
    samples: int
    bounds: Bounds


class RecordedRequests:
    """The recorded requests of one module's forwards. `_bounds`: by the samples of the rank that has most, the bounds
    of an exchange of one size, equal on all ranks · `_samples`: those, by the samples of this rank · `_last_requested`:
    what this rank has requested from another, by the same as `_bounds`."""

    def __init__(self, context: ShardedContext, finder: GpuFinder) -> None:
        self._context, self._finder = context, finder
        self._bounds: OrderedDict[int, Bounds] = OrderedDict()
        self._last_requested: OrderedDict[int, Sequence[LargestRequest]] = OrderedDict()
        self._samples: OrderedDict[int, int] = OrderedDict()
        self._recorder: Recorder[Form, RecordedRequest] = Recorder(MOST_FORMS, MOST_AT_ONCE)
        self._checked_first = 0  # forwards that have yet to check first

    def of(self, batch: Batch) -> RecordedRequest | None:
        """A free one for a batch whose form has occurred often enough; None where the batch has to be found by
        launches."""
        samples = self._samples.get(batch.size)
        bounds = None if samples is None else self._bounds.get(samples)
        if samples is None or bounds is None or not self._takes(batch):
            return None
        bags = batch.offsets if isinstance(batch.offsets, EqualBags) else batch.offsets.shape[0]
        form = Form(len(batch.ids), batch.size, batch.edges, bags, batch.exact, batch.places, samples, bounds)
        found = self._recorder.find(form)
        if found is not None:
            return found
        cache = device_groups(self._context.shards[0].engine.tables.groups)[0].cache
        make = functools.partial(RecordedRequest, self._context, cache, self._finder, batch, samples, bounds)
        return self._recorder.record(form, make, cache.recorded)

    def agreed_bounds(self, size: int, samples: int, most: Sequence[LargestRequest]) -> Bounds | None:
        """By the header of a forward no rank has more `samples`, this one has `size`, and none requests more than
        `most` from another in each part. Returns the bounds of an exchange of one size, if they take that and are not
        far too large. All ranks compute the same."""
        max_ids = self._context.max_ids
        _put(self._samples, size, samples)
        if max_ids is not None and max(each.ids for each in most) > max_ids:
            return None
        known = self._bounds.get(samples, ())
        of_parts = itertools.zip_longest(most, self._context.largest, known)
        wanted = tuple(self._wanted(*each) for each in of_parts)
        _put(self._bounds, samples, wanted)
        if wanted == known:
            return known
        self._recorder.drop(
            lambda form: form.samples == samples and form.bounds != wanted
        )  # forwards keep those that they use
        return None if max_ids is None else (Bound(max_ids, None),) * len(most)

    def _wanted(self, most: LargestRequest, largest: int, known: Bound | None) -> Bound:
        """The bound of one part, `largest` at most: the `known` one, if it takes `most` and is not far too large."""
        report_buffer = self._context.max_ids or min(with_margin(most.ids), largest)
        rows = min(with_margin(most.rows), report_buffer)
        if known is not None and known.takes(most):
            limits = (LOOSE * max(each, SMALLEST_BOUND) for each in (report_buffer, rows))
            if all(of_bound is None or of_bound <= limit for of_bound, limit in zip(known, limits, strict=True)):
                return known
        return Bound(report_buffer, rows)

    def last_requested(self, samples: int) -> Sequence[LargestRequest]:
        """What this rank last requested from another in each part, where the rank that has most had as many
        `samples`."""
        return self._last_requested.get(samples) or self._context.no_counts.most

    def note(self, samples: int, most: Sequence[LargestRequest]) -> None:
        """Notes that it requests `most` now."""
        _put(self._last_requested, samples, most)

    def may_defer_check(self) -> bool:
        """Whether a forward may assume that its ids fit and are valid, and check that after their exchange. Not where a
        lookup by itself changes rows, even if it is dropped."""
        if self._checked_first:
            self._checked_first -= 1
            return False
        return not self._context.lookups_change_rows

    def check_at_once(self) -> None:
        """A deferred check was wasted. The next batch may not fit either, or another rank may not record, and wasted
        launches take longer than a check: so the next forwards check first."""
        self._checked_first = CHECKED_FIRST

    def _takes(self, batch: Batch) -> bool:
        """Whether forwards of such a batch can be recorded. Not where the gradient of weights reads a forward for
        longer than it lasts, nor in captured steps, which have buffers of their own."""
        context = self._context
        if batch.weights is not None or not len(batch.ids) or context.on_buffers:
            return False
        if torch.cuda.is_current_stream_capturing() or not can_record():
            return False
        # plans are made on the forward's stream, unless rows pass through the host
        return not context.stages_rows


def _put(into: OrderedDict[K, V], key: K, value: V) -> None:
    """Inserts a value as the one used last; drops the oldest beyond `MOST_BOUNDS`."""
    into[key] = value
    into.move_to_end(key)
    if len(into) > MOST_BOUNDS:
        into.popitem(last=False)


class RequestUser(Protocol):
    """A forward that uses a recorded request. `is_over`: whether it needs that no more."""

    is_over: bool


class RecordedRequest:
    """The graphs of one form, used by one forward after the other. `samples`: of the rank that has most."""

    def __init__(
        self,
        context: ShardedContext,
        cache: DeviceCache,
        finder: GpuFinder,
        batch: Batch,
        samples: int,
        bounds: Bounds,
    ) -> None:
        """Launches all of it once, as what is allocated and compiled at a first use must not be captured, and then
        records it. Raises what that does. `cache`: accounts for its memory."""
        device, exchange = context.device, context.exchange
        self.samples, self.bounds = samples, bounds
        self._device, self._finder, self._exchange, self._wait_for = device, finder, exchange, context.wait_for
        self._user: weakref.ref[RequestUser] | None = None
        self._used_on: torch.cuda.Stream | None = None  # the stream of the last use
        self._used, self._is_marked = torch.cuda.Event(), False  # whether the event was recorded behind that
        # the words that the host reads, once the event is over
        self._words, self._has_words = finder.report_buffer(), torch.cuda.Event()
        pool = GraphPool()  # of its own: no other forward's graphs write to what these leave there
        with no_inference(), on_device(device):
            offsets, self._offsets = batch.offsets, None
            sizes = context.message_sizes(bounds, samples)
            with cache.memory():
                self._given = torch.empty((exchange.size, sum(sizes)), dtype=torch.int64, device=device)
                self._received = torch.empty_like(self._given)
                self._ids = torch.empty(len(batch.ids), dtype=torch.int64, device=device)
                if isinstance(offsets, torch.Tensor):
                    offsets = self._offsets = torch.empty(offsets.shape, dtype=torch.int64, device=device)
            batch_of_graph = batch._replace(ids=self._ids, offsets=offsets)
            self._fill(batch)
            self._requests: list[Request] = context.requests(self.samples, bounds)
            self._find, self._take = (Recording(device, pool) for _ in range(2))

            def find() -> None:
                found, words = finder.find_unchecked(batch_of_graph, finds_firsts=True)
                self._words.copy_(words, non_blocking=True)
                finder.drop_faulty(words)
                for bags, bound, into in zip(found, bounds, self._given.split(sizes, 1), strict=True):
                    bags.pad(bound, samples, into)
                self._bags: list[GpuBags] = found

            def take() -> None:
                parts = iter(self._received.split(sizes, 1))
                for request, shard in zip(self._requests, context.shards, strict=True):
                    request.take([next(parts) for _ in shard.parts])

            find()
            self._received.zero_()  # until an exchange writes there
            take()
            for graph, launch in ((self._find, find), (self._take, take)):
                with graph.recorded([]):
                    launch()

    def _fill(self, batch: Batch) -> None:
        """Copies the inputs to where the graphs read them."""
        into, given = [self._ids], [batch.ids]
        if self._offsets is not None and isinstance(batch.offsets, torch.Tensor):
            into.append(self._offsets)
            given.append(batch.offsets)
        copy_on_device(into, [each.long().contiguous() for each in given])

    def is_free(self) -> bool:
        """Whether no forward uses it, or may yet use it."""
        call = None if self._user is None else self._user()
        return call is None or call.is_over

    def find(self, call: RequestUser, batch: Batch) -> None:
        """Finds the bags of `call`, which owns this request until it is over, and writes messages of one size. Does not
        synchronise."""
        self._user = weakref.ref(call)
        with on_device(self._device), torch.no_grad():
            self._behind_use()
            self._fill(batch)
            self._find.replay([])
            self._has_words.record(current_stream())

    def unpadded(self, batch: Batch) -> list[GpuBags]:
        """What `find` finds, by launches, for an exchange of another size. Does not synchronise."""
        with torch.no_grad():
            found, words = self._finder.find_unchecked(batch, finds_firsts=True)
            self._finder.drop_faulty(words)
        return found

    def check(self) -> list[LargestRequest]:
        """The most that the bags request in each part. Raises what is wrong with them. Waits until they were found."""
        self._wait_for(self._has_words)
        return self._finder.read_report(self._words)

    def exchange(self, peers: PeerExchange | None) -> tuple[list[GpuBags], list[Request]]:
        """Behind `find`, once all ranks have agreed to exchange what fits: returns the bags as they are sent, and what
        is requested of this rank. `peers`: see `Exchange.send`. Does not synchronise."""
        with on_device(self._device):
            self._exchange.send(self._exchange.sending_blocks(self._given, self._received), IDS, peers)
            self._take.replay([])
            requests = [request.separated() for request in self._requests]
        return [bags.rebind() for bags in self._bags], requests

    def mark_used(self) -> None:
        """The current stream's launches by now use it: another stream that uses it next waits for them. Does nothing in
        a capture."""
        if not torch.cuda.is_current_stream_capturing():
            self._used.record(self._behind_use())
            self._is_marked = True

    def _behind_use(self) -> torch.cuda.Stream:
        """The current stream, which is about to use it, ordered after the last use, if that was on another stream."""
        stream, last = current_stream(self._device.index), self._used_on
        if last is not None and stream.cuda_stream != last.cuda_stream:
            if self._is_marked:
                self._used.wait(stream)
            else:  # a forward has failed before it marked its use
                stream.wait_stream(last)
        self._used_on, self._is_marked = stream, False
        return stream

    def size_bytes(self) -> int:
        """Bytes that it keeps, besides what its graphs need while they run."""
        held = [self._ids, self._offsets, self._given, self._received]
        held += [each for bags in self._bags for each in bags.tensors()]
        held += [each for request in self._requests for each in request.tensors()]
        return sum({each.data_ptr(): each.nbytes for each in held if each is not None}.values())
