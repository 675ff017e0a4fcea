"""Plans of eager forwards on a GPU, each recorded once for a form as a CUDA graph, and replayed: a plan is a dozen
launches, which are the same each time but for the ids, and cost the host more than all else in a forward."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

import torch

from tieredemb.cache.device.cache import NextPlan
from tieredemb.cache.locks import Locks
from tieredemb.kernels.captures import Capture, no_collector
from tieredemb.kernels.compiler import copy_on_device
from tieredemb.kernels.ranges import marked
from tieredemb.kernels.streams import capture_lock, current_stream, side_stream
from tieredemb.lookup.bags import Places
from tieredemb.lookup.device_bags import Edges
from tieredemb.tables.group import DeviceGroup
from tieredemb.tables.table_set import TableSet

if TYPE_CHECKING:
    from tieredemb.cache.device.ticket import DeviceTicket
    from tieredemb.step.device_call import DeviceCall
    from tieredemb.tables.table_set import Place

TIMES = 2  # that plans of a form are launched: what is made at a first use must not be captured
MOST_FORMS = 8  # that one module's plans are recorded of, those used last
MOST_AT_ONCE = 4  # plans of one form that are in flight, each with a recording of its own
MOST_COUNTED = 64  # forms


class Form(NamedTuple):
    """What the launches of a plan depend on. `given`: how many of the `edges` are given, or the length of all bags
    where they are `equal` · `exact`, `places`: see `Batch` · `trains`, `ages`, `ahead`: see `Call.plan`."""

    ids: int
    batch: int
    edges: int
    given: int
    equal: bool
    exact: bool
    places: Places | None
    trains: bool
    ages: bool
    ahead: bool


Key = tuple[Form, tuple[NextPlan, ...]]  # and on what of each group's cache


def is_recordable(tables: TableSet, groups: list[DeviceGroup]) -> bool:
    """Whether plans of these tables are launches alone, which are not being captured for another graph."""
    if tables.config.check_ids == "always" or torch.cuda.is_current_stream_capturing():
        return False
    for group in groups:  # noqa: SIM110 - in each forward, and a generator costs most of it
        if not group.cache.cold.device_readable:
            return False
    return True


class RecordedPlans:
    """Those of one module's lookups. Where rows are locked otherwise than when a plan was recorded, as other batches
    are in flight, it is launched anew."""

    def __init__(self) -> None:
        self._place: Place | None = None
        self._locks = Locks(())
        self._times: OrderedDict[Key, int] = OrderedDict()
        self._recorded: OrderedDict[Key, list[_Recorded]] = OrderedDict()
        self._is_full = False  # the device has no memory for more

    def plan(self, call: DeviceCall, groups: list[DeviceGroup], form: Form, ids: torch.Tensor, edges: Edges) -> bool:
        """Plans `call` by a replay, and records what is replayed where that is worth it; returns whether it did: else
        it is to be launched. The tables' device is the current one."""
        place = call.context.tables.placed.now
        if place is not self._place:
            self._locks = Locks(group.cache for group in groups)
            self._times, self._recorded, self._place = OrderedDict(), OrderedDict(), place
        with self._locks.again(), marked("plan"):
            key = form, tuple([group.cache.next_plan(form.ids) for group in groups])
            known = self._recorded.get(key)
            for recorded in known or ():
                if recorded.is_free:
                    recorded.replay(call, groups, ids, edges)
                    return True
            if self._is_full or (known is not None and len(known) == MOST_AT_ONCE):
                return False
            if known is None and not self._comes_again(key):
                return False
            try:
                made = _Recorded(call, groups, key, ids, edges)
            except torch.OutOfMemoryError:
                self._is_full = True
                return False
            self._recorded.setdefault(key, []).append(made)
            if len(self._recorded) > MOST_FORMS:
                self._recorded.popitem(last=False)
            return True

    def _comes_again(self, key: Key) -> bool:
        """Counts a form; whether it has come often enough to be recorded."""
        times = self._times[key] = self._times.pop(key, 0) + 1
        if len(self._times) > MOST_COUNTED:
            self._times.popitem(last=False)
        return times > TIMES


class _Recorded:
    """A plan of a form, as a graph: recorded for `call`, and replayed for it."""

    def __init__(self, call: DeviceCall, groups: list[DeviceGroup], key: Key, ids: torch.Tensor, edges: Edges) -> None:
        form, following = key
        with torch.inference_mode(False), groups[0].cache.memory():
            self._memory = call.allocate(groups, form.places, trains=form.trains)
            self._ids = torch.empty_like(ids)
            self._offsets = None
            if isinstance(edges.offsets, torch.Tensor):
                self._offsets = torch.empty_like(edges.offsets)
        self._slotless = [each.slotless for each in following]
        self._graph = torch.cuda.CUDAGraph()
        self._call: weakref.ref[DeviceCall] = weakref.ref(call)
        call.memory = self._memory
        try:
            self._record(call, groups, form, self._ids, edges if self._offsets is None else edges.of(self._offsets))
            self._load(ids, edges)
            self._graph.replay()
        except BaseException:
            call.release()
            call.parts = []
            raise
        self._parts = [part.without_ticket() for part in call.parts]
        self._homes = [part.ticket.homes for part in call.parts]
        for group, part in zip(groups, call.parts, strict=True):
            group.cache.has_come(part.ticket)
            group.cache.recorded.add(self)
        self._taken(call)

    def _record(self, call: DeviceCall, groups: list[DeviceGroup], form: Form, ids: torch.Tensor, edges: Edges) -> None:
        device = ids.device
        stream = side_stream(device, 0, "capture")  # streams are few: another's would be captured
        with ExitStack() as inside:
            for group in groups:
                inside.enter_context(group.cache.recording())
            inside.enter_context(capture_lock(device))
            inside.enter_context(no_collector())
            inside.enter_context(Capture(self._graph, stream, groups[0].cache.graph_pool, at_once=True))
            call.launch(groups, ids, edges, scored=True, ages=form.ages, ahead=form.ahead)
            for part in call.parts:
                part.join()

    @property
    def is_free(self) -> bool:
        """Whether nobody uses what it has planned last."""
        call = self._call()
        if call is not None and call.keeps_rows:  # the gradient of the weights reads more of it than rows
            return False
        for reference in self._tickets:
            ticket = reference()
            if ticket is not None and ticket.lasts:
                return False
        return True

    def replay(self, call: DeviceCall, groups: list[DeviceGroup], ids: torch.Tensor, edges: Edges) -> None:
        """Plans `call`."""
        self._load(ids, edges)
        batches = [group.cache.count_next() for group in groups]
        self._graph.replay()
        for part, batch, homes, slotless in zip(self._parts, batches, self._homes, self._slotless, strict=True):
            call.parts.append(part.again(part.group.cache.replanned(batch, homes, slotless=slotless)))
        call.memory = self._memory
        self._taken(call)

    def _load(self, ids: torch.Tensor, edges: Edges) -> None:
        copy_on_device(self._ids, ids)
        if self._offsets is not None:
            assert isinstance(edges.offsets, torch.Tensor)
            copy_on_device(self._offsets, edges.offsets)

    def _taken(self, call: DeviceCall) -> None:
        self._call = weakref.ref(call)
        self._tickets: list[weakref.ref[DeviceTicket]] = [weakref.ref(part.ticket) for part in call.parts]
        self._memory.planner = current_stream()

    def size_bytes(self) -> int:
        """Of what it reads and plans into."""
        tensors = [*self._memory.tensors(), self._ids, *([] if self._offsets is None else [self._offsets])]
        return sum(tensor.nbytes for tensor in tensors)
