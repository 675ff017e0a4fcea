"""Plans of eager forwards on a GPU, each recorded once for a form as a CUDA graph, and replayed. A plan is a dozen
launches, which differ only in the ids; a replay is one launch. If rows are looked up directly after their plan, the
lookup is part of the graph; else it has a graph of its own. If rows pass through the host, a plan has two graphs: one
up to the report of missed rows, and one that fills the rows.

A form has capacities, not counts. Batches of bags of any length have different numbers of ids, so a graph can take
more ids (`capacities`), and drops the rest, as ids beyond the last bag. For a single table with bags of one length it
can take more samples, too, whose bags are empty. If rows are outputs of their own, as in a TieredEmbeddingCollection,
there is a graph for each number of ids. If samples have weights, only the plan is recorded; the lookup, which reads the
weights, is launched.

A recording plans into memory of its own, so a form that is in flight twice has two recordings. A plan on another thread
waits, on the device, only for batches that were released when its hold began: a recording is free for it only if its
last batch is one of those. The ledger counts a replay as it counts a plan; if a replay would lock other batches than
the recording did, it is of another form. If rows that pass through the host get no slot, the second half is launched,
and so are plans while there are such rows. What cannot be recorded is launched, with the same bits.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Hashable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import repeat
from typing import TYPE_CHECKING, NamedTuple

import torch

from tieredemb.cache.base import PlanKind
from tieredemb.cache.device.cache import NextPlan
from tieredemb.cache.device.effects import Effects, Opened
from tieredemb.cache.device.plan import BatchPlan
from tieredemb.cache.device.planner import MOST_IDS
from tieredemb.cache.locks import Locks
from tieredemb.kernels.copies import copy_on_device
from tieredemb.kernels.inference import no_inference
from tieredemb.kernels.recorder import Recorder, attempt
from tieredemb.kernels.recording import Recording, can_record
from tieredemb.kernels.streams import current_stream, on_device
from tieredemb.kernels.tracing import marked
from tieredemb.lookup.bags import EqualBags, Places
from tieredemb.lookup.device_bags import Edges
from tieredemb.step.capacities import Capacities, capacity_for
from tieredemb.step.device_call import DeviceCall
from tieredemb.tables.group import device_groups

if TYPE_CHECKING:
    from tieredemb.step.batch import Batch
    from tieredemb.step.call_memory import CallMemory
    from tieredemb.step.program import CallContext
    from tieredemb.step.stack import Stack
    from tieredemb.tables.table_set import Place

MOST_FORMS = 8  # recorded for one module: the last ones used
MOST_AT_ONCE = 4  # recordings of one form, each for a plan in flight


class Form(NamedTuple):
    """What the launches of a plan depend on; the number of ids is an argument of each replay. `layout`, `capacities`:
    see `DeviceCall` · `batch`: samples, or the capacity for them · `bags`: those of one length, or how many of the
    `edges` are given · `exact`, `places`: see `Batch` · `stacked`: rows of the output if it is a `Stack`, else −1 ·
    `weighted`: whether samples have weights, which a lookup in the graph would not read · `kind`: see `Call.plan` ·
    `following`: what the plan depends on in each group's cache."""

    layout: Hashable
    capacities: tuple[int, ...]
    batch: int
    edges: int
    bags: EqualBags | int
    exact: bool
    places: Places | None
    stacked: int
    weighted: bool
    kind: PlanKind
    following: tuple[NextPlan, ...]


_numbers = itertools.count()
Blocks = Sequence[tuple[torch.Tensor, Edges]]  # see `DeviceCall.blocks_of`


class ReplayedCall(DeviceCall):
    """A call whose plan is replayed, if it was recorded and nothing forbids it; else launched."""

    def plan(
        self,
        batch: Batch,
        kind: PlanKind,
        *,
        may_exceed_bags: bool = False,
        memory: CallMemory | None = None,
    ) -> None:
        # plans of captured steps have memory of their own
        if memory is None and kind.scored and not may_exceed_bags:
            self.set_batch(batch, kind)
            if plans_of(self.context).plan(self, batch, kind):
                return
            self.batch, self.samples = batch.size, -1  # a recording may have changed them
        super().plan(batch, kind, may_exceed_bags=may_exceed_bags, memory=memory)


def plans_of(context: CallContext) -> RecordedPlans:
    """The recorded plans of calls with this context, for the present place of its tables."""
    place = context.tables.placed.now
    found: RecordedPlans | None = place.recorded.get(context)
    if found is None:
        found = place.recorded[context] = RecordedPlans(context, place)
    return found


class RecordedPlans:
    """The recorded plans of one module's lookups, of tables in one place. `pools`: whether lookups can directly follow
    their plan · `waits`: whether plans wait for the host."""

    def __init__(self, context: CallContext, place: Place) -> None:
        self.device, self.output_dtype = place.config.device, place.config.output_dtype
        self.groups = device_groups(place.groups)
        caches = [group.cache for group in self.groups]
        self.waits = not all(cache.cold.device_readable for cache in caches)
        plain = all(group.past is None and not group.lookup.has_max for group in self.groups)
        self.pools = plain and context.options.max_norm is None
        self._locks, self._plan_locks = Locks(caches), Locks(caches, rows=False)
        self._only = caches[0] if len(caches) == 1 and not self.waits else None
        self._is_pooled = place.config.pooled
        self._has_one_feature = context.tables.n_features == 1  # so that bags are numbered by their samples
        self._is_recordable = place.config.check_ids != "always" and can_record()
        self._capacities = Capacities()
        self._recorder: Recorder[Form, RecordedPlan] = Recorder(MOST_FORMS, MOST_AT_ONCE)

    def plan(self, call: DeviceCall, batch: Batch, kind: PlanKind) -> bool:
        """Plans `call` by a replay, after recording it if that is worth it; returns False if the plan is to be
        launched."""
        if 0 in call.capacities or not self._is_recordable or torch.cuda.is_current_stream_capturing():
            return False
        if torch._C._cuda_getDevice() == self.device.index and not torch._C._autograd._profiler_enabled():
            return self._plan(call, batch, kind)
        with on_device(self.device), marked("plan"):
            return self._plan(call, batch, kind)

    def _plan(self, call: DeviceCall, batch: Batch, kind: PlanKind) -> bool:
        if self._only is not None:
            with self._only.plan_lock, self._only.lock:
                return self._plan_locked(call, batch, kind)
        if not self.waits:
            with self._locks.held():
                return self._plan_locked(call, batch, kind)
        with self._plan_locks.held():  # other threads may use rows while it waits for the host
            for group in self.groups:
                group.cache.complete_last()
            with self._locks.held():
                is_planned = self._plan_locked(call, batch, kind)
            if not is_planned or kind.ahead or call.complete():
                return is_planned
        call.drop_plan()
        return False

    def _plan_locked(self, call: DeviceCall, batch: Batch, kind: PlanKind) -> bool:
        batch = self._with_capacity(call, batch)
        of_all = zip(self.groups, call.ids_in(self.groups), strict=True)
        following = [plan for group, n in of_all if (plan := group.cache.next_plan(n)) is not None]
        if len(following) < len(self.groups):
            return False
        offsets, stack = batch.offsets, batch.stack
        form = Form(
            call.layout, tuple(call.capacities), batch.size, batch.edges,
            offsets if isinstance(offsets, EqualBags) else offsets.shape[0], batch.exact, batch.places,
            -1 if stack is None else stack.rows, batch.weights is not None, kind,
            tuple(following),
        )  # fmt: skip
        recorded = self._recorder.find(form)
        if recorded is not None:
            recorded.replay(call, batch)
            return True

        def make() -> RecordedPlan:
            try:
                return RecordedPlan(self, call, form, batch)
            except BaseException:
                call.release()
                call.drop_plan()
                raise

        return self._recorder.record(form, make, self.groups[0].cache.recorded) is not None

    def _with_capacity(self, call: DeviceCall, batch: Batch) -> Batch:
        """Gives `call` a capacity for more ids than it has, unless each id is a row of the output. If bags are of one
        length and numbered by their samples, it gets a capacity for more samples, too: returns the batch with that many
        samples, of which the last ones have empty bags. The caller holds the locks of plans and rows."""
        counts, offsets = call.capacities, batch.offsets
        if batch.stack is not None or (call.form is None and not self._is_pooled):
            return batch
        if not isinstance(offsets, EqualBags):
            call.capacities = self._with_slots(self._capacities.of(counts), counts)
            return batch
        if call.form is not None or not self._has_one_feature:
            return batch
        (capacity,), length = self._with_slots([capacity_for(counts[0])], counts), offsets.length
        bags = capacity // length
        call.capacities, call.batch, call.samples = [bags * length], bags, batch.size
        return batch._replace(offsets=EqualBags(bags, length), edges=bags + 1, size=bags)

    def _with_slots(self, capacities: Sequence[int], counts: Sequence[int]) -> list[int]:
        """These capacities of each block, or of all groups, but at most what a plan can number. They are smaller where
        so many ids might not get slots, but the present ones do: else the plan would have to allow for rows without a
        slot."""
        found = [max(count, min(capacity, MOST_IDS)) for capacity, count in zip(capacities, counts, strict=True)]
        for number, group in enumerate(self.groups):
            at = number if len(counts) > 1 else 0
            left, count = group.cache.slots_left(), counts[at]
            if found[at] > left >= count:
                found[at] = min(found[at], capacity_for(count))
                if found[at] > left:
                    found[at] = count
        return found


class RecordedPlan:
    """A plan of a form, as a graph: recorded for `call`, and replayed for it and others. `number`: unique ·
    `compute_pool`: memory that graphs of lookups and updates use while they run."""

    def __init__(self, plans: RecordedPlans, call: DeviceCall, form: Form, batch: Batch) -> None:
        self.number = next(_numbers)
        blocks = call.blocks_of(*call.inputs(batch))
        groups, device = plans.groups, plans.device
        self._groups, self._device, self._output_dtype = groups, device, plans.output_dtype
        self._shapes = call.output_shapes()
        pools = plans.pools and form.stacked < 0 and not form.weighted and min(map(min, self._shapes)) > 0
        deferred = form.kind.ahead or plans.waits
        self._ahead, self._pools, self._pools_separately = form.kind.ahead, pools and not deferred, pools and deferred
        with no_inference(), groups[0].cache.memory():
            self._memory: CallMemory = call.allocate(groups, form.places, trains=form.kind.trains)
            # torch's kernels, whose arguments are fixed, read them if padding gets no gradient
            copies = self._memory.ids
            self._ids = None if copies is None else copies.zero_().split_with_sizes([*call.capacities])
            # placeholders for the number of ids of each block
            self._counts = torch.empty(len(blocks), dtype=torch.int64, device=device).unbind()
            self._row = None  # the output row of each id, read by torch's kernels, too
            if form.stacked >= 0 and call.stack is not None:
                self._row = torch.empty_like(call.stack.row)
                call.stack = replace(call.stack, row=self._row)
        self._overflow = [
            group.cache.transfer.overflow(plan.uncached) for plan, group in zip(form.following, groups, strict=True)
        ]
        self.compute_pool = groups[0].cache.compute_pool
        self._graph = self._new_graph()
        self._lookup: Recording | None = None  # if it is not part of the plan's graph
        outs = self._new_outputs() if self._pools else None
        call.memory = self._memory
        self._plans = self._record(call, form, blocks, outs)
        for group, plan in zip(groups, self._plans, strict=True):
            if plan is not None:
                group.cache.transfer.record_move(plan, self._new_graph())
        self._run(blocks, outs, batch.stack)
        self._parts = [part.without_ticket() for part in call.parts]
        self._effects = [
            Effects(plans=1, opens=(Opened(1, part.ticket.homes, overflow),))
            for part, overflow in zip(call.parts, self._overflow, strict=True)
        ]
        for group, part, plan in zip(groups, call.parts, self._plans, strict=True):
            group.cache.begun(part.ticket, plan)
        self._hand_over(call, outs)

    def _new_graph(self) -> Recording:
        """A graph for a part of the plan. Made ahead, its few blocks go before those of the step beside it."""
        return Recording(self._device, self._groups[0].cache.plan_pool, priority=-1 if self._ahead else 0)

    def _new_outputs(self) -> list[torch.Tensor]:
        return [torch.empty(shape, dtype=self._output_dtype, device=self._device) for shape in self._shapes]

    def _record(
        self, call: DeviceCall, form: Form, blocks: Blocks, outs: list[torch.Tensor] | None
    ) -> list[BatchPlan | None]:
        """Records the graph; returns the plan of each group whose rows pass through the host."""
        given = []
        for (ids, edges), count, read in zip(blocks, self._counts, self._ids or repeat(None), strict=False):
            offsets = edges.offsets
            if isinstance(offsets, torch.Tensor) and offsets.data_ptr() == ids.data_ptr():
                offsets = offsets.clone()  # the graph could not distinguish them
            given.append((ids if read is None else read, replace(edges, offsets=offsets, ids=count.data_ptr())))
        changing = self._changing(given, outs)
        with ExitStack() as inside:
            for group, next_plan, n in zip(self._groups, form.following, call.ids_in(self._groups), strict=True):
                inside.enter_context(group.cache.recording(next_plan, n))
            inside.enter_context(self._graph.recorded(changing))
            call.launch(self._groups, given, form.kind)
            if outs is not None:
                call.look_up(outs, None, keep_argmax=False, keep_rows=False)
            for part in call.parts:
                part.join()
            plans = [part.ticket.plan for part in call.parts]
            changing += [word.data_ptr() for plan in plans if plan is not None for word in plan.changing]
        return plans

    def _changing(self, blocks: Blocks, outs: Sequence[torch.Tensor] | None) -> list[int]:
        """The graph's arguments that change: the numbers of ids, and the addresses of outputs and of inputs that it
        does not copy."""
        found = []
        for ids, edges in blocks:
            found.append(edges.ids)
            if self._ids is None:
                found.append(ids.data_ptr())
            if isinstance(edges.offsets, torch.Tensor) and edges.offsets.shape[0]:
                found.append(edges.offsets.data_ptr())
        found += [out.data_ptr() for out in outs or ()]
        return found

    def is_free(self) -> bool:
        """Whether its last plan is no longer used, by the host or on the device."""
        for group, batch in zip(self._groups, self._batches, strict=True):
            if not group.cache.is_behind(batch):
                return False
        call = self._call()
        if call is None:
            return True
        if call.keeps_rows:  # the gradient of weights reads more of the plan than rows
            return False
        for part in call.parts:  # noqa: SIM110 - in each forward, and a generator costs most of it
            if part.ticket.lasts:
                return False
        return True

    def replay(self, call: DeviceCall, batch: Batch) -> None:
        """Plans `call`, and looks up for it if that is part of the graph."""
        ids, edges = call.inputs(batch)
        outs = self._new_outputs() if self._pools else None
        counts = call.counts()
        if len(counts) < len(self._groups):  # all groups have the same ids
            counts *= len(self._groups)
        tickets = [
            ticket
            for group, effects, n in zip(self._groups, self._effects, counts, strict=True)
            for ticket in group.cache.apply(effects, n)
        ]
        self._run(call.blocks_of(ids, edges), outs, batch.stack)
        call.parts = [part.rebind(ticket) for part, ticket in zip(self._parts, tickets, strict=True)]
        call.memory = self._memory
        for group, part, plan in zip(self._groups, call.parts, self._plans, strict=True):
            if plan is not None:
                group.cache.begun(part.ticket, plan)
        self._hand_over(call, outs)

    def look_up(self, call: DeviceCall) -> list[torch.Tensor] | None:
        """The outputs of `call`, if its lookup has a graph of its own: reports a fault to the host, and pools. Returns
        None if that cannot be recorded, and is to be launched."""
        with ExitStack() as used:
            for part in call.parts:
                used.enter_context(part.group.cache.using(part.ticket))
            if self._has_moved(call):
                return None
            outs = self._new_outputs()
            if self._lookup is None:
                self._lookup = attempt(functools.partial(self._record_lookup, call, outs))
            if self._lookup is None:
                self._pools_separately = False
                return None
            self._lookup.replay([out.data_ptr() for out in outs])
        if torch._C._cuda_getCurrentRawStream(self._device.index) != self._memory.stream.cuda_stream:
            call.record_stream()
        return outs

    def _has_moved(self, call: DeviceCall) -> bool:
        """Whether rows without a slot, which pass through the host, have moved since the plan was recorded."""
        return any(
            part.group.cache.overflow([part.ticket]).weight != before.weight
            for part, plan, before in zip(call.parts, self._plans, self._overflow, strict=True)
            if plan is not None and before.uncached
        )

    def _record_lookup(self, call: DeviceCall, outs: list[torch.Tensor]) -> Recording:
        lookup = Recording(self._device, self.compute_pool)
        with ExitStack() as inside:
            for group in self._groups:
                inside.enter_context(group.cache.captured())
            inside.enter_context(lookup.recorded([out.data_ptr() for out in outs]))
            call.report_faults()
            call.look_up(outs, None, keep_argmax=False, keep_rows=False)
        return lookup

    def _run(self, blocks: Blocks, outs: list[torch.Tensor] | None, stack: Stack | None) -> None:
        into, given = list[torch.Tensor](), list[torch.Tensor]()
        if self._row is not None and stack is not None:
            into.append(self._row)
            given.append(stack.row)
        for copy, (ids, _) in zip(self._ids or (), blocks, strict=False):
            into.append(copy[: ids.shape[0]])
            given.append(ids)
        copy_on_device(into, given)
        now = self._changing(blocks, outs)
        for group, plan in zip(self._groups, self._plans, strict=True):
            if plan is not None:
                now += group.cache.transfer.expect(plan)
        self._graph.replay(now)

    def _hand_over(self, call: DeviceCall, outs: list[torch.Tensor] | None) -> None:
        """After a replay: gives `call` its results."""
        call.pooled, call.recorded = outs, self
        call.source = self if self._pools_separately else None
        self._batches = [part.ticket.batch for part in call.parts]
        self._call: weakref.ref[DeviceCall] = weakref.ref(call)
        if torch._C._cuda_getCurrentRawStream(self._device.index) != self._memory.stream.cuda_stream:
            self._memory.planner = current_stream()

    def size_bytes(self) -> int:
        """Of its memory for plans and copies."""
        kept = sum(plan.size_bytes() for plan in self._plans if plan is not None)
        held = *self._memory.tensors(), self._row
        return kept + sum(each.nbytes for each in held if each is not None)
