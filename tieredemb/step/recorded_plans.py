"""Plans of eager forwards on a GPU, each recorded once for a form as a CUDA graph, and replayed: a plan is a dozen
launches, which are the same each time but for the ids, and a replay is one. Where rows are looked up right behind their
plan, the lookup is part of the graph. Where rows pass through the host there are two: one up to the report of what is
missed, and one that brings the rows in.

Batches of bags of any length have different numbers of ids, so a graph has room for as many or a sixteenth more
(`room_for`), and what lies beyond is dropped, as ids beyond the last bag are. Of one table's bags of one length there
is room for more samples, too, whose bags are empty. Rows that are outputs of their own, as those of a
TieredEmbeddingCollection, have graphs for each number of ids. Of forwards whose samples have weights the plan alone is
recorded, and the lookup, which reads them, is launched.

A recording plans into memory of its own, so a form that is in flight twice has two. A plan on a thread of its own
comes, on the device, behind no more than what was released when it was asked for: a recording is not free for it until
its last batch is one of those. The ledger counts a replay as it counts a plan; where it would lock otherwise than at
the recording, it is another form. Where rows that pass through the host are left without a slot, the second half is
launched, and so are plans while there are such rows. What cannot be recorded is launched, with the same bits.
"""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import repeat
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

import torch

from tieredemb.cache.base import PlanKind
from tieredemb.cache.device.cache import NextPlan
from tieredemb.cache.device.effects import Effects, Opened
from tieredemb.cache.device.plan import BatchPlan
from tieredemb.cache.device.planner import MOST_IDS
from tieredemb.cache.locks import Locks
from tieredemb.kernels import recording
from tieredemb.kernels.compiler import copy_on_device
from tieredemb.kernels.inference import no_inference
from tieredemb.kernels.recording import Recording, Repeats, can_record
from tieredemb.kernels.streams import current_stream, on_device
from tieredemb.kernels.tracing import marked
from tieredemb.lookup.bags import EqualBags, Places
from tieredemb.lookup.device_bags import Edges
from tieredemb.tables.group import DeviceGroup

if TYPE_CHECKING:
    from tieredemb.step.batch import Batch
    from tieredemb.step.batch_form import BatchForm
    from tieredemb.step.call import CallContext
    from tieredemb.step.call_memory import CallMemory
    from tieredemb.step.device_group_call import DeviceGroupCall
    from tieredemb.step.stack import Stack
    from tieredemb.tables.table_set import Place

MOST_FORMS = 8  # that one module's plans are recorded of, those used last
MOST_AT_ONCE = 4  # plans of one form that are in flight, each with a recording of its own
ROOMS_AN_OCTAVE = 16  # different rooms for ids, from a number of them to twice as many
LEAST_ROOM = 256  # ids: that many take no longer than fewer


def room_for(ids: int) -> int:
    """How many ids a recorded plan has room for, of a batch that has so many: as many or up to a sixteenth more."""
    step = max(LEAST_ROOM, (1 << ids.bit_length()) // (2 * ROOMS_AN_OCTAVE))
    return -(-ids // step) * step


def _rooms(counts: list[int], groups: Sequence[DeviceGroup]) -> list[int]:
    """The room for so many ids of each block, or of all groups; for no more where that many would find slots, and with
    more a plan would count on rows without one; nor for more than a plan can number. The caller holds the locks of
    plans and rows."""
    rooms = [max(count, min(room_for(count), MOST_IDS)) for count in counts]
    one = len(counts) < len(groups)
    for number, group in enumerate(groups):
        at = 0 if one else number
        if not group.cache.has_slots_for(rooms[at]) and group.cache.has_slots_for(counts[at]):
            rooms[at] = counts[at]
    return rooms


def _with_room_for_bags(call: Recordable, batch: Batch, length: int, groups: Sequence[DeviceGroup]) -> Batch:
    """The batch of one table's bags of one length, as one of as many bags as a plan has room for: the last ones are
    empty. `call` is told so. The caller holds the locks of plans and rows."""
    (room,) = _rooms(call.counts(), groups)
    bags = room // length
    call.rooms, call.batch, call.samples = [bags * length], bags, batch.size
    return batch._replace(offsets=EqualBags(bags, length), edges=bags + 1, size=bags)


class Form(NamedTuple):
    """What the launches of a plan depend on; how many ids there are is told each time. `layout`, `rooms`: see
    `Recordable` · `given`: how many of the `edges` are given, or the length of all bags where they are `equal` ·
    `exact`, `places`: see `Batch` · `stacked`: how many rows an output has that is a `Stack`, and not a plain one,
    else −1 · `weighted`: whether samples have weights, which a lookup in the graph would not read · `kind`: see
    `Call.plan`."""

    layout: Hashable
    rooms: tuple[int, ...]
    batch: int
    edges: int
    given: int
    equal: bool
    exact: bool
    places: Places | None
    stacked: int
    weighted: bool
    kind: PlanKind


_numbers = itertools.count()
Key = tuple[Form, tuple[NextPlan, ...]]  # and on what of each group's cache
Blocks = Sequence[tuple[torch.Tensor, Edges]]  # see `Recordable.blocks_of`


class Recordable(Protocol):
    """A call on a GPU whose plan can be recorded, or replayed. `context`, `form`, `parts`, `keeps_rows`: see `Call` ·
    `memory`: what it is planned into · `stack`: what the rows of its output are, if that has one · `layout`: of several
    forwards, what tells their batches apart · `rooms`: for how many ids the memory has room, of each block · `batch`:
    its samples, or for how many there is room, of which it has `samples` then, else −1 · `pooled`: its outputs, where
    the replay has looked them up · `recorded`: what has planned it · `source`: the same, where it is to look the
    outputs up yet."""

    context: CallContext
    form: BatchForm | None
    parts: list[DeviceGroupCall]
    keeps_rows: bool
    memory: CallMemory
    stack: Stack | None
    layout: Hashable
    rooms: Sequence[int]
    batch: int
    samples: int
    pooled: list[torch.Tensor] | None
    recorded: Recorded | None
    source: Recorded | None

    @staticmethod
    def inputs(batch: Batch) -> tuple[torch.Tensor, Edges]:
        """What is to be planned, as kernels take it."""

    def counts(self) -> list[int]:
        """How many ids there are, of each block."""

    def ids_in(self, groups: Sequence[DeviceGroup]) -> list[int]:
        """For how many ids each group has room."""

    def blocks_of(self, ids: torch.Tensor, edges: Edges) -> list[tuple[torch.Tensor, Edges]]:
        """The ids that each group looks among, int64 (N,), and the edges of their bags."""

    def output_shapes(self) -> list[tuple[int, int]]:
        """Of the output; of several forwards that of those in each block."""

    def allocate(self, groups: list[DeviceGroup], places: Places | None, *, trains: bool) -> CallMemory:
        """Memory for its plan."""

    def launch(
        self,
        groups: list[DeviceGroup],
        blocks: list[tuple[torch.Tensor, Edges]],
        kind: PlanKind,
    ) -> None:
        """Launches its plan, into the memory that it has."""

    def look_up(
        self, outs: Sequence[torch.Tensor], weights: torch.Tensor | None, *, keep_argmax: bool, keep_rows: bool
    ) -> None:
        """Launches its lookup, which writes the outputs."""

    def tell(self) -> None:
        """Launches what tells the host of a fault that the plan has found."""

    def follow(self, *more: torch.Tensor) -> None:
        """Tells torch's allocator that the current stream uses its memory, and `more`."""

    def complete(self) -> bool:
        """See `Call`."""

    def release(self) -> None:
        """See `Call`."""

    def give_up_plan(self) -> None:
        """What it was planned to did not come: it is to be planned anew."""


class Forgets(Protocol):
    """What was recorded of tables in one place."""

    def forget(self) -> None: ...


def when_left(place: Place, recorded: Forgets) -> weakref.ref[Place]:
    """The place, weakly; what is recorded of it is forgotten when the tables are elsewhere, or nobody has them."""
    mine = weakref.ref(recorded)

    def left(_: object) -> None:
        found = mine()
        if found is not None:
            found.forget()

    return weakref.ref(place, left)


class _Site:
    """Where the tables are while plans are recorded, which are forgotten with that. `is_recordable`: whether their
    plans can be · `is_pooled`: whether outputs have as many rows for any number of ids · `has_one_feature`: whether
    bags are numbered by their samples · `waits`: whether plans wait for the host · `pools`: whether lookups need
    nothing that lies between a plan and them."""

    def __init__(self, call: Recordable, plans: RecordedPlans) -> None:
        context = call.context
        place = context.tables.placed.now
        self.place = when_left(place, plans)
        self.device = place.config.device
        self.groups = [cast("DeviceGroup", group) for group in place.groups]
        caches = [group.cache for group in self.groups]
        self.locks, self.plan_locks = Locks(caches), Locks(caches, rows=False)
        self.waits = not all(group.cache.cold.device_readable for group in self.groups)
        self.only = self.groups[0].cache if len(self.groups) == 1 and not self.waits else None
        self.is_pooled = place.config.pooled
        self.has_one_feature = call.form is None and context.tables.n_features == 1
        self.is_recordable = place.config.check_ids != "always" and can_record()
        plain = all(group.past is None and not group.lookup.has_max for group in self.groups)
        self.pools = plain and context.options.max_norm is None


class RecordedPlans:
    """Those of one module's lookups. Where rows are locked otherwise than when a plan was recorded, as other batches
    are in flight, it is launched anew."""

    def __init__(self) -> None:
        self._site: _Site | None = None
        self._forms: Repeats[Key] = Repeats()
        self._recorded: OrderedDict[Key, list[Recorded]] = OrderedDict()
        self._disturbed = 0  # recordings that have failed

    def forget(self) -> None:
        """The tables are elsewhere: nothing keeps what was there."""
        self._site = None
        self._forms = Repeats()
        self._recorded.clear()

    def plan(self, call: Recordable, batch: Batch, kind: PlanKind) -> bool:
        """Plans `call` by a replay, and records what is replayed where that is worth it; returns whether it did: else
        it is to be launched."""
        site = self._site
        if site is None or site.place() is not call.context.tables.placed.now:
            self.forget()
            site = self._site = _Site(call, self)
        ids, offsets = batch.ids, batch.offsets
        n = ids.shape[0]
        if n == 0 or not site.is_recordable or torch.cuda.is_current_stream_capturing():
            return False
        equal = isinstance(offsets, EqualBags)
        given = offsets.length if isinstance(offsets, EqualBags) else offsets.shape[0]
        stacked = -1 if batch.stack is None or batch.stack.is_plain else batch.stack.rows
        form = Form(
            call.layout, (), batch.size, batch.edges, given, equal, batch.exact, batch.places, stacked,
            batch.weights is not None, kind,
        )  # fmt: skip
        if torch._C._cuda_getDevice() != site.device.index or torch._C._autograd._profiler_enabled():
            with on_device(site.device), marked("plan"):
                is_planned = self._plan(call, site, form, batch)
        else:
            is_planned = self._plan(call, site, form, batch)
        if not is_planned:
            call.rooms, call.batch, call.samples = call.counts(), batch.size, -1
        return is_planned

    def _plan(self, call: Recordable, site: _Site, form: Form, batch: Batch) -> bool:
        if site.only is not None:
            with site.only.plan_lock, site.only.lock:
                return self._plan_locked(call, site, form, batch)
        if not site.waits:
            with site.locks.held():
                return self._plan_locked(call, site, form, batch)
        with site.plan_locks.held():  # others may use rows while it waits for the host
            for group in site.groups:
                group.cache.complete_last()
            with site.locks.held():
                is_planned = self._plan_locked(call, site, form, batch)
            if not is_planned or form.kind.ahead or call.complete():
                return is_planned
        call.give_up_plan()
        return False

    def _plan_locked(self, call: Recordable, site: _Site, form: Form, batch: Batch) -> bool:
        if batch.stack is None and (call.form is not None or site.is_pooled):
            if isinstance(batch.offsets, EqualBags):
                if site.has_one_feature:
                    batch = _with_room_for_bags(call, batch, batch.offsets.length, site.groups)
            else:
                call.rooms = _rooms(call.counts(), site.groups)
        form = form._replace(rooms=tuple(call.rooms), batch=batch.size, edges=batch.edges)
        ids = call.ids_in(site.groups)
        following = [group.cache.next_plan(n) for group, n in zip(site.groups, ids, strict=True)]
        if None in following or 0 in ids:
            return False
        key = form, tuple(cast("list[NextPlan]", following))
        known = self._recorded.get(key)
        if known is not None:
            for recorded in known:
                if recorded.is_free():
                    recorded.replay(call, batch)
                    with suppress(KeyError):  # another thread may have found the tables elsewhere, and forgotten it
                        self._recorded.move_to_end(key)
                    return True
            if len(known) == MOST_AT_ONCE:
                return False
        elif self._forms.count(key) <= recording.TIMES:
            return False
        if self._disturbed == recording.MOST_DISTURBED:
            return False
        try:
            made = Recorded(call, site, key, batch)
        except BaseException as error:
            call.release()
            call.give_up_plan()
            if not isinstance(error, Exception):
                raise
            recording.note_failure(error)
            self._disturbed += 1
            return False
        self._recorded.setdefault(key, []).append(made)
        if len(self._recorded) > MOST_FORMS:
            self._forms.put_off(self._recorded.popitem(last=False)[0])
        return True


def plans_of(context: CallContext) -> RecordedPlans:
    """Those of the calls of who has this context."""
    found = context.kept.get(RecordedPlans)
    if found is None:
        found = context.kept[RecordedPlans] = RecordedPlans()
    return cast("RecordedPlans", found)


class Recorded:
    """A plan of a form, as a graph: recorded for `call`, and replayed for it. `number`: its own, which no other has ·
    `compute_pool`: of what graphs of lookups and updates use while they run."""

    def __init__(self, call: Recordable, site: _Site, key: Key, batch: Batch) -> None:
        form, following = key
        self.number = next(_numbers)
        blocks = call.blocks_of(*call.inputs(batch))
        groups = self._groups = site.groups
        self._ids_in = call.ids_in(groups)
        self._output = call.output_shapes(), call.context.tables.config.output_dtype, site.device
        pools = site.pools and form.stacked < 0 and not form.weighted and min(map(min, self._output[0])) > 0
        later = form.kind.ahead or site.waits
        self._ahead, self._pools, self._pools_later = form.kind.ahead, pools and not later, pools and later
        with no_inference(), groups[0].cache.memory():
            self._memory: CallMemory = call.allocate(groups, form.places, trains=form.kind.trains)
            # torch's kernels, which are told nothing, read them where padding is left out of the gradient
            copies = self._memory.ids
            self._ids = None if copies is None else copies.zero_().split_with_sizes([*call.rooms])
            # words that stand for the number of ids of each block
            self._counts = torch.empty(len(blocks), dtype=torch.int64, device=site.device).unbind()
            self._row = None  # of each id, read by torch's kernels, too
            if form.stacked >= 0 and call.stack is not None:
                self._row = torch.empty_like(call.stack.row)
                call.stack = replace(call.stack, row=self._row)
        self._overflow = [
            group.cache.transfer.overflow(plan.uncached) for plan, group in zip(following, groups, strict=True)
        ]
        self.compute_pool = groups[0].cache.compute_pool
        self._graph = self._new_graph()
        self._lookup: Recording | None = None  # where that is no part of the plan's graph
        outs = self._new_outputs() if self._pools else None
        call.memory = self._memory
        self._plans = self._record(call, key, blocks, outs)
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
        groups[0].cache.recorded.add(self)
        self._taken(call, outs)

    def _new_graph(self) -> Recording:
        """For a part of the plan: its few blocks go before those of the step that it runs beside."""
        return Recording(self._output[2], self._groups[0].cache.plan_pool, priority=-1 if self._ahead else 0)

    def _new_outputs(self) -> list[torch.Tensor]:
        shapes, dtype, device = self._output
        return [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]

    def _record(
        self, call: Recordable, key: Key, blocks: Blocks, outs: list[torch.Tensor] | None
    ) -> list[BatchPlan | None]:
        """Returns the plan of each group whose rows pass through the host."""
        form, following = key
        given = []
        for (ids, edges), count, read in zip(blocks, self._counts, self._ids or repeat(None), strict=False):
            offsets = edges.offsets
            if isinstance(offsets, torch.Tensor) and offsets.data_ptr() == ids.data_ptr():
                offsets = offsets.clone()  # the graph could not tell them apart
            given.append((ids if read is None else read, replace(edges, offsets=offsets, ids=count.data_ptr())))
        changing = self._changing(given, outs)
        with ExitStack() as inside:
            for group, next_plan, n in zip(self._groups, following, self._ids_in, strict=True):
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
        """What the graph is told each time: how many ids there are, where inputs are that it has no copies of, and
        where outputs are."""
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
        """Whether nobody uses what it has planned last, on the device either."""
        for group, batch in zip(self._groups, self._batches, strict=True):
            if not group.cache.is_behind(batch):
                return False
        call = self._call()
        if call is None:
            return True
        if call.keeps_rows:  # the gradient of the weights reads more of it than rows
            return False
        for part in call.parts:  # noqa: SIM110 - in each forward, and a generator costs most of it
            if part.ticket.lasts:
                return False
        return True

    def replay(self, call: Recordable, batch: Batch) -> None:
        """Plans `call`, and looks up for it where that is part of the graph."""
        ids, offsets = batch.ids, batch.offsets
        if ids.dtype is not torch.int64:
            ids = ids.to(torch.int64)
        if not isinstance(offsets, EqualBags) and (offsets.dtype is not torch.int64 or not offsets.is_contiguous()):
            offsets = offsets.to(torch.int64).contiguous()
        outs = self._new_outputs() if self._pools else None
        counts = call.counts()
        if len(counts) < len(self._groups):  # all look among the same ids
            counts *= len(self._groups)
        tickets = [
            ticket
            for group, effects, n in zip(self._groups, self._effects, counts, strict=True)
            for ticket in group.cache.apply(effects, n)
        ]
        edges = Edges(offsets, batch.edges, batch.exact, ids.shape[0])
        self._run(call.blocks_of(ids, edges), outs, batch.stack)
        call.parts = [part.rebind(ticket) for part, ticket in zip(self._parts, tickets, strict=True)]
        call.memory = self._memory
        for group, part, plan in zip(self._groups, call.parts, self._plans, strict=True):
            if plan is not None:
                group.cache.begun(part.ticket, plan)
        self._taken(call, outs)

    def look_up(self, call: Recordable) -> list[torch.Tensor] | None:
        """The outputs of `call`, whose rows came behind its plan's graph: tells the host of a fault, and pools. None
        where that cannot be recorded, and is to be launched."""
        with ExitStack() as used:
            for part in call.parts:
                used.enter_context(part.group.cache.using(part.ticket))
            if self._has_moved(call):
                return None
            outs = self._new_outputs()
            if self._lookup is None and not self._record_lookup(call, outs):
                return None
            assert self._lookup is not None
            self._lookup.replay([out.data_ptr() for out in outs])
        if torch._C._cuda_getCurrentRawStream(self._output[2].index) != self._memory.stream.cuda_stream:
            call.follow()
        return outs

    def _has_moved(self, call: Recordable) -> bool:
        """Whether rows without a slot, which pass through the host, are elsewhere than where the plan began."""
        return any(
            part.group.cache.overflow([part.ticket]).weight != before.weight
            for part, plan, before in zip(call.parts, self._plans, self._overflow, strict=True)
            if plan is not None and before.uncached
        )

    def _record_lookup(self, call: Recordable, outs: list[torch.Tensor]) -> bool:
        lookup = Recording(self._output[2], self.compute_pool)
        try:
            with ExitStack() as inside:
                for group in self._groups:
                    inside.enter_context(group.cache.captured())
                inside.enter_context(lookup.recorded([out.data_ptr() for out in outs]))
                call.tell()
                call.look_up(outs, None, keep_argmax=False, keep_rows=False)
        except Exception as error:
            recording.note_failure(error)
            self._pools_later = False
            return False
        self._lookup = lookup
        return True

    def _run(self, blocks: Blocks, outs: list[torch.Tensor] | None, stack: Stack | None) -> None:
        if self._row is not None and stack is not None:
            copy_on_device(self._row, stack.row)
        for copy, (ids, _) in zip(self._ids or (), blocks, strict=False):
            copy_on_device(copy[: ids.shape[0]], ids)
        now = self._changing(blocks, outs)
        for group, plan in zip(self._groups, self._plans, strict=True):
            if plan is not None:
                now += group.cache.transfer.expect(plan)
        self._graph.replay(now)

    def _taken(self, call: Recordable, outs: list[torch.Tensor] | None) -> None:
        call.pooled, call.recorded = outs, self
        self._batches = [part.ticket.batch for part in call.parts]
        call.source = self if self._pools_later else None
        self._call: weakref.ref[Recordable] = weakref.ref(call)
        if torch._C._cuda_getCurrentRawStream(self._output[2].index) != self._memory.stream.cuda_stream:
            self._memory.planner = current_stream()

    def size_bytes(self) -> int:
        """Of what it plans into, and copies."""
        kept = sum(plan.size_bytes() for plan in self._plans if plan is not None)
        held = *self._memory.tensors(), self._row
        return kept + sum(each.nbytes for each in held if each is not None)
