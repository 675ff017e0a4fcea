"""A call on a GPU: it only launches. The host waits for the device over staged tiers alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from tieredemb.cache.base import PlanKind
from tieredemb.cache.device.planner import LARGE
from tieredemb.errors import ConfigError, InvalidInputError, UnsupportedError
from tieredemb.kernels.streams import current_stream, on_device, side_by_side, synchronize
from tieredemb.kernels.tracing import ranged
from tieredemb.lookup.bags import MAX_BAGS, EqualBags, Places
from tieredemb.lookup.device_bags import (
    Edges,
    find_device_bags,
    join_bags,
    number_samples,
    report_fault,
)
from tieredemb.shallow import shallow_copy
from tieredemb.step.batch import Batch
from tieredemb.step.call_memory import CallMemory
from tieredemb.step.device_group_call import DeviceGroupCall
from tieredemb.step.forwards import Forward
from tieredemb.step.program import NUMBERS, Call, CallContext, StackRows
from tieredemb.step.stack import Stack
from tieredemb.tables.group import DeviceGroup

if TYPE_CHECKING:
    from tieredemb.cache.device.ticket import DeviceTicket
    from tieredemb.kernels.recording import GraphPool
    from tieredemb.step.batch import Given
    from tieredemb.step.batch_form import BatchForm
    from tieredemb.tables.table_set import TableSet

MOST_OUTPUT = 1.125  # × its own rows: an output is copied out of a larger buffer


class PlanRecording(Protocol):
    """The recording that planned a call; see `RecordedPlan`."""

    number: int
    compute_pool: GraphPool

    def look_up(self, call: DeviceCall) -> list[torch.Tensor] | None: ...


class DeviceCall(Call):
    """One forward of a module on a GPU, or several. It can be planned into the `memory` of an earlier call of as many
    ids and bags, once that is over."""

    device_type = "cuda"
    parts: list[DeviceGroupCall]
    memory: CallMemory
    pooled: list[torch.Tensor] | None = None  # the outputs, if a recorded plan has looked them up
    recorded: PlanRecording | None = None  # the recording that planned it, if any
    source: PlanRecording | None = None  # the same, while it has yet to look the outputs up
    stack: Stack | None = None  # which rows its output has, if the batch has one
    layout: Hashable = None  # of several forwards: distinguishes forms of batches (`BatchForm`)
    blocks = 1  # groups with ids and outputs of their own; or one for all
    capacities: Sequence[int] = ()  # how many ids its memory can hold, for each block
    samples = -1  # how many samples it has, if `batch` is the capacity of its memory
    # of an `alone` call: tensors that it has beside the shared memory, and the stream that made them
    own: Sequence[torch.Tensor] = ()
    made_on = 0

    def __init__(self, context: CallContext, batch: int, form: BatchForm | None = None) -> None:
        super().__init__(context, batch, form)
        if form is not None:
            self.layout, self.blocks = form.layout, len(form.blocks)
            self.gpu = context.tables.groups[0].config.device.index

    def set_batch(self, batch: Batch, kind: PlanKind) -> None:
        """Called before the batch is planned, by launches or a replay."""
        # of several forwards with the first one: none may start
        self.ids, self.defers_report = batch.ids.shape[0], kind.ahead or self.form is not None
        self.capacities = self.counts()
        self.stack = batch.stack

    def plan(
        self,
        batch: Batch,
        kind: PlanKind,
        *,
        may_exceed_bags: bool = False,
        memory: CallMemory | None = None,
    ) -> None:
        self.set_batch(batch, kind)
        tables = self.context.tables
        features = tables.n_features
        if features * max(self.batch, self.rows) > MAX_BAGS:
            raise InvalidInputError(
                f"{features} features × {max(self.batch, self.rows)} rows of output are more than {MAX_BAGS} bags; "
                f"split the batch"
            )
        if kind.ahead and tables.config.check_ids == "always":
            raise UnsupportedError("check_ids='always' waits for the GPU in every forward: nothing is planned ahead")
        ids, edges = self.inputs(batch, may_exceed_bags=may_exceed_bags)
        groups = [group for group in tables.groups if isinstance(group, DeviceGroup)]
        with on_device(ids.device):
            fits = memory is not None and memory.fits(groups, self.ids_in(groups), self.batch, batch.places)
            self.memory = memory if fits and memory else self.allocate(groups, batch.places, trains=kind.trains)
            if self.memory.ids is not None:
                ids = self.memory.ids.copy_(ids)
            self.launch(groups, self.blocks_of(ids, edges), kind)

    @staticmethod
    def inputs(batch: Batch, *, may_exceed_bags: bool = False) -> tuple[torch.Tensor, Edges]:
        """The ids and edges to be planned, as kernels take them."""
        ids, offsets = batch.ids, batch.offsets
        if ids.dtype is not torch.int64:
            ids = ids.to(torch.int64)
        if not isinstance(offsets, EqualBags) and (offsets.dtype is not torch.int64 or not offsets.is_contiguous()):
            offsets = offsets.to(torch.int64).contiguous()
        return ids, Edges(offsets, batch.edges, batch.exact and not may_exceed_bags, ids.shape[0])

    def ids_in(self, groups: Sequence[DeviceGroup]) -> list[int]:
        """The capacity of each group for ids."""
        return [*self.capacities] if self.form is not None else [*self.capacities] * len(groups)

    def counts(self) -> list[int]:
        """How many ids each block has."""
        return [self.ids] if self.form is None else [block.starts[-1] for block in self.form.blocks]

    def blocks_of(self, ids: torch.Tensor, edges: Edges) -> list[tuple[torch.Tensor, Edges]]:
        """For each group its ids, int64 (N,), and the edges of their bags: those of the whole batch, or of several
        forwards those in its pool."""
        if self.form is None:
            return [(ids, edges)]
        found = []
        for block in self.form.blocks:
            bags: Any = edges.offsets[block.edges] if isinstance(edges.offsets, torch.Tensor) else block.bags
            edges_of_block = Edges(bags, len(block.positions) * self.form.size + 1, edges.exact, block.starts[-1])
            found.append((ids[block.ids], edges_of_block))
        return found

    def launch(
        self,
        groups: list[DeviceGroup],
        blocks: list[tuple[torch.Tensor, Edges]],
        kind: PlanKind,
    ) -> None:
        """Plans ids (`blocks_of`) into the call's memory, on their device, which is the current one."""
        tables, given = self.context.tables, None
        device = self.memory.words.device
        if len(blocks) < len(groups):
            blocks = blocks * len(groups)
        # beside the beginning of a plan, if that takes longer than a switch of streams; eagerly, events cost the host
        # more
        if self.ids >= LARGE and torch.cuda.is_current_stream_capturing():
            given = groups[0].cache.run_beside(functools.partial(self._find_bags, groups, blocks))
        elif self.form is None:
            self._find_bags(groups, blocks)
        else:  # each block's bags are found with its plan
            self.memory.words.zero_()
        if tables.config.check_ids == "always":
            _check_at_once(tables, device)
        try:
            for group in groups if kind.ahead else ():  # copy threads gather for one plan at a time
                group.cache.complete_last()
            ages = kind.ages
            kinds = [kind] * len(groups) if isinstance(ages, bool) else [kind._replace(ages=age) for age in ages]

            def plan(g: int) -> None:
                group, memory, (ids_of_block, edges) = groups[g], self.memory, blocks[g]
                if self.form is not None and given is None:
                    self._find_group_bags(g, group, ids_of_block, edges)
                samples = memory.bags[g].batch if memory.own_bag is None else self.rows
                part = DeviceGroupCall(
                    group, memory.bags[g], self.context.options, memory.segments[g], memory.trained[g], memory.own_bag,
                    samples,
                )  # fmt: skip
                part.plan(ids_of_block, kinds[g], given)
                self.parts.append(part)

            side_by_side(device, [functools.partial(plan, g) for g in range(len(groups))])
        except BaseException:
            self.release()
            if given is not None:
                given.wait(current_stream())  # else a capture would end with an error about a stream
            for part in self.parts:
                part.join()
            raise
        finally:
            self.memory.planned(part.ticket.side_done for part in self.parts)

    def allocate(self, groups: list[DeviceGroup], places: Places | None, *, trains: bool) -> CallMemory:
        """Allocates the memory of its plan."""
        planned = self.context.options.plans_padding
        has_padding = [planned and bool((group.space.padding >= 0).any()) for group in groups]
        # not if rows of padding are planned, whose occurrences are known only later; nor if the update sorts the
        # occurrences of all tables that share the cache
        deferred = [group.client is not None and group.past is None for group in groups]
        sorts = [
            trains and not padding and not deferred for padding, deferred in zip(has_padding, deferred, strict=True)
        ]
        with groups[0].cache.memory():
            return CallMemory(
                groups, self.ids_in(groups), self.batch, places, blocks=self.blocks, sorts=sorts, masks=has_padding
            )

    def addresses(self) -> Sequence[int]:
        """The addresses of the host where faults of each block are reported."""
        return [report.address for report in self.context.tables.placed.now.reports]

    def _find_bags(self, groups: list[DeviceGroup], blocks: Sequence[tuple[torch.Tensor, Edges]]) -> None:
        memory = self.memory
        memory.words.zero_()
        for g, (group, (ids, edges)) in enumerate(zip(groups, blocks, strict=True)):
            self._find_group_bags(g, group, ids, edges)
        if memory.own_bag is not None:
            (bags,) = memory.bags
            row, rows = (0, len(memory.own_bag)) if self.stack is None else (self.stack.row, self.stack.rows)
            number_samples(bags, memory.own_bag, row, rows)

    def _find_group_bags(self, g: int, group: DeviceGroup, ids: torch.Tensor, edges: Edges) -> None:
        """Finds the bags of one group, number `g`."""
        memory, dropped = self.memory, not self.context.options.plans_padding
        address = self.addresses()[g if self.blocks > 1 else 0]
        report = memory.reports[g].data_ptr() if self.defers_report else address
        find_device_bags(
            memory.bags[g], ids, edges, group.device_space, memory.faults[g], report, memory.places,
            padding_is_dropped=dropped,
        )  # fmt: skip

    @property
    def tickets(self) -> list[DeviceTicket]:
        """The tickets of all groups."""
        return [part.ticket for part in self.parts]

    def complete(self) -> bool:
        ended = True
        for part in self.parts:  # each group is completed, whatever happened to another
            ticket = part.ticket
            ended &= (not ticket.failed) if ticket.is_complete else part.complete()
        if not ended:
            self.release()
        return ended

    def release(self) -> None:
        # of a plan without a lookup: a capture must end with one stream, and one that failed has no events
        if any(part.ticket.side_done is not None for part in self.parts) and torch.cuda.is_current_stream_capturing():
            for part in self.parts:
                part.join()
        super().release()

    def drop_plan(self) -> None:
        """Its rows could not be filled: forgets the plan, so that it can be planned anew."""
        self.parts, self.pooled, self.recorded, self.source = [], None, None, None

    def arrive(self) -> None:
        """Has the current stream wait for the plan made ahead."""
        for part in self.parts:
            if part.ticket.ready is not None:
                part.ticket.ready.wait(current_stream())
        self.mark_arrived()

    def mark_arrived(self) -> None:
        """Nothing needs to wait for the plan any more."""
        for part in self.parts:
            part.ticket.ready = None
        self.memory.joined()

    def rebind(self, tickets: Sequence[DeviceTicket]) -> DeviceCall:
        """A call for the plan that a replay has made in this one's memory, with the `tickets` of its parts."""
        call = shallow_copy(self)
        call.number, call.consumed, call.within, call.keeps_rows = -1, False, None, False
        call.parts = [part.rebind(ticket) for part, ticket in zip(self.parts, tickets, strict=True)]
        call.defers_report = True
        return call

    def start(self, *, trains: bool) -> None:
        if self.pooled is not None or self.source is not None:  # nothing comes between plan and lookup
            self.number = next(NUMBERS)
            return
        self.record_stream()
        super().start(trains=trains)
        self._report()

    def _report(self) -> None:
        """Reports a fault to the host, unless the plan did."""
        if not self.defers_report:
            return
        self.record_stream()
        with self.parts[0].group.cache.using(*self.tickets):
            self.report_faults()
        self.defers_report = False
        self.memory.joined()

    def report_faults(self) -> None:
        """Reports the fault that the plan found to the host, if any."""
        for report, address in zip(self.memory.reports, self.addresses(), strict=False):
            report_fault(report, address)

    def catch_up(self) -> None:
        for part, fault in zip(self.parts, self.memory.faults, strict=True):
            part.catch_up(fault)

    def limit_norms(self, max_norm: float) -> None:
        for part, fault in zip(self.parts, self.memory.faults, strict=True):
            part.limit_norms(fault, max_norm)

    @property
    def rows(self) -> int:
        config = self.context.tables.config
        if self.stack is not None:
            return self.stack.rows
        return self.ids if not config.pooled else self.batch * len(config.tables) if config.separate else self.batch

    def output_shapes(self) -> list[tuple[int, int]]:
        """The shape of the output; of several forwards, for each block the shape of its outputs."""
        if self.form is None:
            return [(self.rows, self.context.tables.output_width)]
        return [
            (len(block.positions) * self.batch, group.space.width)
            for block, group in zip(self.form.blocks, self.context.tables.groups, strict=True)
        ]

    def look_up(
        self, outs: Sequence[torch.Tensor], weights: torch.Tensor | None, *, keep_argmax: bool, keep_rows: bool
    ) -> None:
        """Writes the outputs. `keep_argmax`, `keep_rows`: whether a backward needs the winners, or the rows."""
        lookups = [
            functools.partial(
                part.pool, outs[g if self.blocks > 1 else 0], weights, keep_argmax=keep_argmax, keep_rows=keep_rows
            )
            for g, part in enumerate(self.parts)
        ]
        side_by_side(outs[0].device, lookups)
        for part in self.parts:
            part.join()

    def pool(self, weights: torch.Tensor | None, *, differentiable: bool) -> torch.Tensor:
        (out,) = self.pool_all(weights, differentiable=differentiable)
        if self.samples < 0:
            return out
        found = out[: self.samples]
        # autograd must not see a view, and a small output must not keep a large buffer alive
        return found.data if len(out) <= self.samples * MOST_OUTPUT else found.clone()

    @ranged("lookup")
    def pool_all(self, weights: torch.Tensor | None, *, differentiable: bool) -> list[torch.Tensor]:
        """The outputs, of the shapes `output_shapes`."""
        if self.pooled is not None:
            outs, self.pooled = self.pooled, None
            return outs
        source, self.source = self.source, None
        if source is not None:
            if weights is None and not self.keeps_rows:
                found = source.look_up(self)
                if found is not None:
                    self.defers_report = False
                    return found
            self._report()
        config = self.context.tables.config
        outs = [torch.empty(shape, dtype=config.output_dtype, device=config.device) for shape in self.output_shapes()]
        if weights is not None:  # the backward reads them, and loaders reuse their buffers
            weights = weights.detach().to(torch.float32, copy=differentiable).contiguous()
        self.look_up(outs, weights, keep_argmax=differentiable, keep_rows=self.keeps_rows)
        self.memory.joined()
        self.record_stream()
        return outs

    def _picked(self, ids: torch.Tensor) -> torch.Tensor:
        """Empty memory for the rows of `ids` that are returned."""
        config, rows = self.context.tables.config, ids.shape[0] if self.rows_to is None else 0
        return torch.empty((rows, self.context.tables.output_width), dtype=config.output_dtype, device=config.device)

    @ranged("lookup")
    def pool_stack(
        self, weights: torch.Tensor | None, dtype: torch.dtype, *, differentiable: bool, all_rows: bool
    ) -> StackRows:
        (part,), stack, config = self.parts, self.stack, self.context.tables.config
        assert stack is not None
        part.stack = stack
        width, device = self.context.tables.output_width, config.device
        bags = torch.empty((stack.bags, width), dtype=dtype, device=device)
        rows = self._picked(stack.picked)
        every = torch.empty((self.ids, width), dtype=config.output_dtype, device=device) if all_rows else None
        part.pool_stack(stack, bags, self.rows_to or rows, every, weights, keep_argmax=differentiable)
        part.join()
        self.memory.joined()
        self.record_stream()
        return StackRows(bags, rows, every)

    def weigh(self, scale: torch.Tensor) -> None:
        (part,) = self.parts
        part.weights = scale

    def record_stream(self, *more: torch.Tensor) -> None:
        """As `Tensor.record_stream`: the current stream uses the call's memory, and `more`, made on another one."""
        stream = torch._C._cuda_getCurrentRawStream(self.memory.fault.get_device())
        if self.own and stream != self.made_on:
            for tensor in (*self.own, *self.parts[0].held()):
                tensor.record_stream(current_stream())
        if stream == self.memory.stream.cuda_stream:
            return
        held = [*more, *(value for part in self.parts for value in part.held())]
        if stream not in self.memory.recorded_streams:
            held += self.memory.tensors()
            self.memory.recorded_streams.add(stream)
        for tensor in held:
            tensor.record_stream(current_stream())

    # --- of several forwards ------------------------------------------------------------------------------------------

    def join(self, forwards: Sequence[Given]) -> Batch:
        """See `Call.join`. Offsets are checked by the plan."""
        form, ids, offsets = self.form, list[torch.Tensor](), list[torch.Tensor | None]()
        assert form is not None
        for given, inputs in zip(forwards, form.inputs, strict=True):
            ids_given, starts = given[0], given[1] if inputs.length < 0 else None
            assert isinstance(ids_given, torch.Tensor)
            assert starts is None or isinstance(starts, torch.Tensor)
            if inputs.is_copied:
                ids_given = ids_given.reshape(-1).to(torch.int64).contiguous()
                starts = None if starts is None else starts.to(torch.int64).contiguous()
            ids.append(ids_given)
            offsets.append(starts)
        # joined each time: a graph's replay changes the same memory without a new version
        return form.batch(*join_bags(ids, offsets, form.joined, 0 if form.is_equal else form.edges))

    def pool_blocks(self) -> list[torch.Tensor]:
        if self.source is None:
            self._report()
        return self.pool_all(None, differentiable=False)

    def begin_alone(self) -> None:
        self.source = None
        self._report()

    def alone(self, block: int, place: int, context: CallContext) -> DeviceCall:
        assert self.form is not None
        call, starts, whole = DeviceCall(context, self.batch), self.form.blocks[block].starts, self.parts[block]
        call.ids, call.memory, call.block = starts[place + 1] - starts[place], self.memory, block
        call.defers_report = False
        with whole.group.cache.using(whole.ticket):  # waits for the plan, which may be on another stream
            part = whole.of_client(place, slice(*starts[place : place + 2]), context)
        call.parts, call.own = [part], (part.bags.offsets, part.bags.bag)
        call.made_on = torch._C._cuda_getCurrentRawStream(self.memory.fault.get_device())
        return call

    def catch_up_slice(self, forward: Forward) -> None:
        self.record_stream()  # other forwards may never start: their rows stay behind
        self.parts[forward.block].catch_up(self.memory.faults[forward.block], forward.place)

    def catch_up_block(self, block: int, is_as_looked_up: Callable[[int], bool]) -> bool:
        self.record_stream()
        self.parts[block].catch_up(self.memory.faults[block])
        return True


def _check_at_once(tables: TableSet, device: torch.device) -> None:
    if torch.cuda.is_current_stream_capturing():
        raise ConfigError(
            "check_ids='always' waits for the GPU in every forward, which a CUDA graph cannot capture; build the "
            "module with check_ids='deferred'"
        )
    synchronize(device)
    tables.faults.check()
