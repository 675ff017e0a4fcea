"""One forward of a module on a GPU, and its update: launches alone, nothing waits for the device but over staged
tiers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from tieredemb.cache.changes import HalfWritten
from tieredemb.cache.device.planner import LARGE
from tieredemb.errors import ConfigError, InvalidInputError, UnsupportedError
from tieredemb.kernels.ranges import ranged
from tieredemb.kernels.streams import on_device, synchronize
from tieredemb.lookup.bags import Places
from tieredemb.lookup.device_bags import MAX_BAGS, Edges, find_device_bags, number_one_by_one, tell_fault
from tieredemb.lookup.device_lookup import Segments
from tieredemb.step.batch import Batch
from tieredemb.step.call import Call, Collected
from tieredemb.step.call_memory import CallMemory
from tieredemb.step.device_group_call import DeviceGroupCall, shallow_copy
from tieredemb.tables.group import DeviceGroup
from tieredemb.tables.row_optimizer import RowOptimizer

if TYPE_CHECKING:
    from tieredemb.cache.device.cache import DeviceCache
    from tieredemb.cache.device.ticket import DeviceTicket
    from tieredemb.tables.table_set import TableSet


class DeviceCall(Call):
    """One forward of a module on a GPU. Planned into the `memory` of a call of as many ids and bags that is over, it
    uses that again."""

    parts: list[DeviceGroupCall]

    def plan(
        self,
        batch: Batch,
        *,
        trains: bool,
        scored: bool,
        ages: bool = True,
        ahead: bool = False,
        may_exceed_bags: bool = False,
        memory: CallMemory | None = None,
    ) -> None:
        tables = self.context.tables
        features, self.ids = tables.n_features, batch.ids.shape[0]
        if features * max(self.batch, self.rows) > MAX_BAGS:
            raise InvalidInputError(
                f"{features} features × {max(self.batch, self.rows)} rows of output are more than {MAX_BAGS} bags; "
                f"split the batch"
            )
        if ahead and tables.config.check_ids == "always":
            raise UnsupportedError("check_ids='always' waits for the GPU in every forward: nothing is planned ahead")
        exact = batch.exact and not may_exceed_bags
        edges = Edges(batch.offsets.detach().to(torch.int64).contiguous(), batch.edges, exact)
        ids = batch.ids.to(torch.int64)
        self._tells_later = ahead
        self._told_stream: int | None = None  # the last one that the allocator was told of, see `follow`
        groups = [group for group in tables.groups if isinstance(group, DeviceGroup)]
        with on_device(ids.device):
            fits = memory is not None and memory.fits(groups, self.ids, self.batch, batch.places)
            self.memory = memory if fits and memory else self._allocate(groups, batch.places, trains=trains)
            given = None
            # beside the beginning of a plan, where that takes longer than to go there; events cost an eager host more
            if self.ids >= LARGE and torch.cuda.is_current_stream_capturing():
                given = groups[0].cache.aside(functools.partial(self._find_bags, groups, ids, edges))
            else:
                self._find_bags(groups, ids, edges)
        if tables.config.check_ids == "always":
            _check_at_once(tables, ids.device)
        try:
            for group in groups if ahead else ():  # threads gather for one at a time
                group.cache.complete_last()
            parts = zip(groups, self.memory.bags, self.memory.segments, self.memory.trained, strict=True)
            for group, bags, segments, trained in parts:
                part = DeviceGroupCall(group, bags, self.context.options, segments, trained, self.memory.own_bag)
                part.plan(ids, scored=scored, ages=ages, given=given, ahead=ahead)
                self.parts.append(part)
        except BaseException:
            self.release()
            if given is not None:
                given.wait()  # a capture ends with the error that has come, not with one about a stream
            for part in self.parts:
                part.join()
            raise
        finally:
            self.memory.planned(part.ticket.aside for part in self.parts)

    def _allocate(self, groups: list[DeviceGroup], places: Places | None, *, trains: bool) -> CallMemory:
        dropped = self.context.options.padding_is_dropped
        reads_padding = [not dropped and bool((group.space.padding >= 0).any()) for group in groups]
        sorts = [trains and not reads for reads in reads_padding]  # the padding's occurrences are known afterwards
        with groups[0].cache.memory():
            return CallMemory(groups, self.ids, self.batch, places, sorts=sorts, masks=reads_padding)

    def _find_bags(self, groups: list[DeviceGroup], ids: torch.Tensor, edges: Edges) -> None:
        memory, faults = self.memory, self.context.tables.faults
        memory.words.zero_()
        report = memory.report.data_ptr() if self._tells_later else faults.address
        dropped = self.context.options.padding_is_dropped
        for group, bags in zip(groups, memory.bags, strict=True):
            space = group.device_space
            find_device_bags(bags, ids, edges, space, memory.fault, report, memory.places, padding_is_dropped=dropped)
        if memory.own_bag is not None:
            (bags,) = memory.bags
            number_one_by_one(bags, memory.own_bag)

    @property
    def tickets(self) -> list[DeviceTicket]:
        """Those of all groups."""
        return [part.ticket for part in self.parts]

    def complete(self) -> bool:
        ended = all([part.complete() for part in self.parts])  # noqa: C419 - each is to be brought there
        if not ended:
            self.release()
        return ended

    def arrive(self) -> None:
        """The current stream waits for what was planned ahead."""
        for part in self.parts:
            if part.ticket.ready is not None:
                part.ticket.ready.wait()
        self.has_arrived()

    def has_arrived(self) -> None:
        """Nothing need wait for what was planned ahead any more."""
        for part in self.parts:
            part.ticket.ready = None
        self.memory.joined()

    def again(self, batches: Sequence[int]) -> DeviceCall:
        """The call that a replay has planned to where this one was, as `batches` of its groups' caches."""
        call = shallow_copy(self)
        call.number, call.consumed, call.within, call.keeps_rows = -1, False, None, False
        call.parts = [part.again(batch) for part, batch in zip(self.parts, batches, strict=True)]
        call._tells_later, call._told_stream = True, None
        return call

    def start(self, *, trains: bool) -> None:
        self.follow()
        super().start(trains=trains)
        if self._tells_later:
            with self.parts[0].group.cache.using(*self.tickets):
                tell_fault(self.memory.report, self.context.tables.faults.address)
            self._tells_later = False
            self.memory.joined()

    def catch_up(self) -> None:
        for part in self.parts:
            part.catch_up(self.memory.fault)

    def limit_norms(self, max_norm: float) -> None:
        for part in self.parts:
            part.limit_norms(self.memory.fault, max_norm)

    @property
    def rows(self) -> int:
        return self.batch if self.context.tables.config.pooled else self.ids

    def tables_of_rows(self) -> torch.Tensor:
        (part,) = self.parts
        return part.tables_of_rows()

    @ranged("lookup")
    def pool(self, weights: torch.Tensor | None, *, differentiable: bool) -> torch.Tensor:
        width, config = self.context.tables.output_width, self.context.tables.config
        out = torch.empty((self.rows, width), dtype=config.output_dtype, device=config.device)
        if weights is not None:  # backward reads them again, and loaders reuse their buffers
            weights = weights.detach().to(torch.float32, copy=differentiable).contiguous()
        for part in self.parts:
            part.pool(out, weights, keep_argmax=differentiable, keep_rows=self.keeps_rows)
        for part in self.parts:
            part.join()
        self.memory.joined()
        self.follow()
        return out

    def weights_gradient(self, grad: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(self.ids, dtype=torch.float32, device=grad.device)
        for part in self.parts:
            part.weights_gradient(grad, out)
        return out

    def follow(self, *more: torch.Tensor) -> None:
        """Tells torch's allocator where another stream uses the memory of the one that computed before, and `more`."""
        stream = torch._C._cuda_getCurrentRawStream(self.memory.fault.get_device())
        if stream == self.memory.stream.cuda_stream:
            return
        held = [*more, *(value for part in self.parts for value in part.held())]
        if stream != self._told_stream:
            held += self.memory.tensors()
            self._told_stream = stream
        for tensor in held:
            tensor.record_stream(torch.cuda.current_stream())

    @staticmethod
    def apply(sets: Sequence[Collected]) -> None:
        for calls in sets:
            DeviceCall._apply(calls)

    @staticmethod
    def _apply(collected: Collected) -> None:
        tables, optimizer = collected[0][0].context.tables, collected[0][0].context.check_trainable()
        calls = [(call, grad) for call, grad in collected if isinstance(call, DeviceCall)]
        device = tables.config.device
        check_bags(tables, [call for call, _ in calls])
        with tables.placed.now.rows.again(), on_device(device), contextlib.ExitStack() as used:
            for call, grad in calls:
                call.follow(grad)
            faults = (
                calls[0][0].memory.fault if len(calls) == 1 else torch.cat([call.memory.fault for call, _ in calls])
            )
            grads = [grad for _, grad in calls]
            found_inf, grad_scale = optimizer.scaling(grads)
            todo = []
            for g, group in enumerate(tables.groups):
                assert isinstance(group, DeviceGroup)
                parts = [call.parts[g] for call, _ in calls]
                batch = _Combined(parts, grads)
                todo.append((group, batch, batch.segments(), optimizer.options_on(group), [p.ticket for p in parts]))
            for group, *_, tickets in todo:
                used.enter_context(group.cache.using(*tickets))
            with _half_done(group.cache for group, *_ in todo):
                for group, batch, segments, options, tickets in todo:
                    rate, numbers = group.lookup.begin(
                        options, group.device_steps, faults, found_inf, grad_scale,
                        segments.work, group.past,
                    )  # fmt: skip
                    group.lookup.update(
                        group.cache.hot, group.cache.overflow(tickets), segments, batch.grad, batch.scale,
                        batch.argmax, rate, numbers, group.past, group.device_steps,
                    )  # fmt: skip
                    if group.past is not None:
                        group.lookup.end(options, group.device_steps, rate, numbers, group.past)

    @staticmethod
    def step_alone(tables: TableSet, optimizer: RowOptimizer) -> None:
        device = tables.config.device
        with tables.placed.now.rows.again(), on_device(device), contextlib.ExitStack() as used:
            found_inf, grad_scale = optimizer.scaling([])
            groups = [group for group in tables.groups if isinstance(group, DeviceGroup)]
            todo = [(group, optimizer.options_on(group)) for group in groups]
            for group in groups:
                used.enter_context(group.cache.using())
            no_faults = torch.empty(0, dtype=torch.int64, device=device)
            with _half_done(group.cache for group in groups):
                for group, options in todo:
                    work = group.lookup.new_segments(0, device).work
                    rate, numbers = group.lookup.begin(
                        options, group.device_steps, no_faults, found_inf, grad_scale, work, group.past
                    )
                    if group.past is not None:
                        group.lookup.end(options, group.device_steps, rate, numbers, group.past)


@contextlib.contextmanager
def _half_done(caches: Iterable[DeviceCache]) -> Iterator[None]:
    """An update that is launched inside is one: interrupted, it leaves rows in doubt. Of a capture nothing has run."""
    if torch.cuda.is_current_stream_capturing():
        yield
        return
    books, change = [cache.changes for cache in caches], HalfWritten("an update")
    entries = []
    for book in books:
        entries.append(book.begin(change, up=3))
    change.has_begun = True
    try:
        yield
    except BaseException as error:
        for book in books:
            book.note(error)
        raise
    for book, entry in zip(books, entries, strict=True):
        book.end(entry)


class _Combined:
    """The calls of one backward pass in one group, as one batch: samples and winning occurrences count on. `homes`,
    `bag`: int32 (N,), of the trained occurrences · `samples`: bags a feature."""

    def __init__(self, parts: list[DeviceGroupCall], grads: list[torch.Tensor]) -> None:
        self._lookup = parts[0].group.lookup
        scales = [part.scale() for part in parts]
        if len(parts) == 1:
            part = parts[0]
            self.grad, self.scale, self.argmax = grads[0], scales[0], part.argmax
            self.homes, self.bag, self.samples = part.trained, part.bag, part.samples
            self._part: DeviceGroupCall | None = part
            return
        samples = sum(len(grad) for grad in grads)
        bags, argmax, first_sample, first = [], [], 0, 0
        for part in parts:
            feature = torch.div(part.bag, max(1, part.samples), rounding_mode="floor")
            bags.append(part.bag + feature * (samples - part.samples) + first_sample)
            if part.argmax is not None:
                argmax.append(torch.where(part.argmax < 0, part.argmax, part.argmax + first))
            first_sample += part.samples
            first += part.trained.shape[0]
        self.grad = torch.cat(grads)
        self.argmax = torch.cat(argmax) if argmax else None
        ones = [torch.ones(p.trained.shape[0], device=p.trained.device, dtype=torch.float32) for p in parts]
        filled = [one if scale is None else scale for one, scale in zip(ones, scales, strict=True)]
        self.scale = torch.cat(filled) if any(scale is not None for scale in scales) else None
        self.homes, self.bag, self.samples = torch.cat([part.trained for part in parts]), torch.cat(bags), samples
        self._part = None

    def segments(self) -> Segments:
        """The occurrences by row."""
        return (
            self._lookup.segments(self.homes, self.bag, self.samples) if self._part is None else self._part.segments()
        )


def check_bags(tables: TableSet, calls: Sequence[Call]) -> None:
    """Raises `InvalidInputError` for calls that are too large for one update."""
    samples, features = sum(call.rows for call in calls), tables.n_features
    if features * samples > MAX_BAGS:
        raise InvalidInputError(
            f"one update is of {len(calls)} forwards of {samples} samples in all; with {features} features these are "
            f"more than {MAX_BAGS} bags: call backward for each, and step() where a torch optimizer is followed"
        )


def combined(group: DeviceGroup, collected: Collected, g: int) -> tuple[_Combined, list[DeviceTicket]]:
    """The calls as one batch in their group number `g`, and its tickets. The caller holds the locks of the rows."""
    parts = [call.parts[g] for call, _ in collected]
    for call, grad in collected:
        assert isinstance(call, DeviceCall)
        call.follow(grad)
    return _Combined(parts, [grad for _, grad in collected]), [part.ticket for part in parts]


def _check_at_once(tables: TableSet, device: torch.device) -> None:
    if torch.cuda.is_current_stream_capturing():
        raise ConfigError(
            "check_ids='always' waits for the GPU in every forward, which a CUDA graph cannot capture; build the "
            "module with check_ids='deferred'"
        )
    synchronize(device)
    tables.faults.check()
