"""Which forwards of a batch are planned as one: those of tables that share a cache, and of related pools, which have
tables of other widths.

On a CPU, ids and offsets are checked with the plan. If those of one table are wrong, the plan fails; each forward then
plans by itself, and raises. Forwards with per-sample weights, `max_norm`, maxima, or ends of bags by name are planned
separately. Once batches do not fit each other, as sequences and single ids, only tables whose batches did fit are
planned as one, whatever their pools.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from itertools import chain, islice, repeat
from typing import TYPE_CHECKING, Any

from tieredemb.cache.base import AHEAD, USE, PlanKind
from tieredemb.errors import TieredEmbError
from tieredemb.kernels.streams import on_device
from tieredemb.modules.base import TieredModule
from tieredemb.modules.lookup_module import LookupModule
from tieredemb.pipeline.lookups import LookupSpec, ages_of
from tieredemb.step.planned_forwards import CompletedFuture, PlanExecutor, Planned, PlannedForwards, guards_of
from tieredemb.tables.group import DeviceGroup
from tieredemb.tables.pool import Member, Pool, Related

if TYPE_CHECKING:
    from concurrent.futures import Future

    from tieredemb.step.batch import Batch, Given
    from tieredemb.step.call_memory import CallMemory
    from tieredemb.step.program import Call, CallContext
    from tieredemb.tables.table_set import Place, Placed, TableSet

PlannedGroup = tuple[PlannedForwards, Planned]  # a plan, and the plans among which it waits


class PlanGroup:
    """The forwards of one plan: several, or a single one. `positions`: of the forwards in a batch · `modules`: of the
    forwards, in the order of the tables · `pools`: of several forwards, the tables by pool · `starts`: for each pool
    the position of its first table, and that table."""

    def __init__(self, positions: Sequence[int], modules: Sequence[LookupModule]) -> None:
        self.positions = positions
        self.modules = modules
        self.several: list[TieredModule] = []  # the modules, if there are several
        self.pools: list[tuple[Pool, tuple[int, ...]]] = []
        self.starts: list[tuple[int, Member]] = []
        if len(modules) > 1:
            of: dict[Pool, list[int]] = {}
            for at, module in enumerate(modules):
                tables = module.tables
                assert isinstance(module, TieredModule)
                assert isinstance(tables, Member)
                self.several.append(module)
                if tables.pool not in of:
                    self.starts.append((at, tables))
                of.setdefault(tables.pool, []).append(tables.number)
            self.pools = [(pool, tuple(numbers)) for pool, numbers in of.items()]


GroupLookups = tuple[PlanGroup, list[LookupSpec]]  # a group, and its forwards of one batch


class PlanGroups:
    """The plan groups of batches, kept while each batch is looked up in the same modules as the last one."""

    def __init__(self) -> None:
        self._of: list[tuple[LookupModule, bool]] = []
        self._where: list[tuple[Placed, weakref.ref[Place]]] = []  # the places of the tables then,
        self._related: list[tuple[Related, int]] = []  # and how often their related pools had been split
        self._groups: list[PlanGroup] = []

    def of(self, lookups: Sequence[LookupSpec]) -> list[GroupLookups]:
        """The plan groups of one batch, in the order of their first forwards."""
        now = [(module, trains) for module, _, trains in lookups]
        is_other = now != self._of or False in [related.splits == splits for related, splits in self._related]
        if is_other or any(placed.now is not there() for placed, there in self._where):
            wholes = dict.fromkeys(module.tables.whole for module, _ in now)
            self._where = [(whole.placed, weakref.ref(whole.placed.now)) for whole in wholes]
            those = {whole.related for whole in wholes if whole.related is not None}
            self._related = [(related, related.splits) for related in those]
            self._groups = _grouped([(module, trains and module.is_trainable) for module, trains in now])
            self._of = now
        return [(group, [lookups[position] for position in group.positions]) for group in self._groups]


def _grouped(forwards: Sequence[tuple[LookupModule, bool]]) -> list[PlanGroup]:
    """Groups the forwards that can be planned as one."""
    groups: dict[Hashable, list[int]] = {}
    tables = set()
    for position, (module, trains) in enumerate(forwards):
        alike = _alike(module, trains)
        key: Hashable = position  # alone
        if alike is not None and module.tables not in tables:
            tables.add(module.tables)
            key = alike
        groups.setdefault(key, []).append(position)
    found = [sorted(each, key=lambda position: _place(forwards[position][0])) for each in groups.values()]
    return [PlanGroup(positions, [forwards[position][0] for position in positions]) for positions in found]


def _place(module: LookupModule) -> tuple[int, int]:
    """The number of its pool among related pools, and of its table there, if it has one."""
    tables = module.tables
    return (tables.pool.order, tables.number) if isinstance(tables, Member) else (0, 0)


def _alike(module: LookupModule, trains: bool) -> Hashable:
    """A key that is equal for forwards that can be planned as one; None if this one cannot: rows are to be scaled
    before the lookup, a backward needs winners of maxima, or the host takes part in the plan."""
    tables = module.tables
    if not isinstance(module, TieredModule) or not isinstance(tables, Member):
        return None
    (group,) = tables.groups
    if group.space.has_max:
        return None
    if isinstance(group, DeviceGroup) and (not group.cache.cold.device_readable or tables.config.check_ids == "always"):
        return None
    if module.options.max_norm is not None:
        return None
    config, related = tables.config, tables.pool.related
    kind = config.device, config.dtype, config.output_dtype, config.check_ids, group.is_dense
    return id(related), kind, related.group_of.get(_place(module), 0), module.options, trains


def plan_groups(
    groups: Sequence[GroupLookups],
    executor_of: Callable[[LookupModule], PlanExecutor],
    done: list[PlannedGroup],
    memories: Sequence[Any] = (),
) -> None:
    """Plans the plan groups of one batch ahead, and appends each to `done`, so that after an interrupt these are known.
    `memories`: for each group in turn, the memory to plan into."""
    ages = iter(ages_of([lookup for _, lookups in groups for lookup in lookups]))
    for (group, lookups), memory in zip(groups, chain(memories, repeat(None)), strict=False):
        ages_of_group = list(islice(ages, len(lookups)))
        if len(lookups) > 1:
            kind = AHEAD._replace(ages=tuple([ages_of_group[at] for at, _ in group.starts]))
            if _plan_as_one(group, lookups, done, executor_of(group.modules[0]), kind, memory):
                continue
        for (module, given, trains), advances in zip(lookups, ages_of_group, strict=True):
            kind, own_memory = AHEAD._replace(ages=advances, trains=trains), memory if len(lookups) == 1 else None
            planned = module.plan_ahead(executor_of(module), *given, kind=kind, memory=own_memory)
            done.append((module.planned, planned))


def drop_all(planned: Sequence[PlannedGroup]) -> None:
    """Drops plans that no forward has taken. If it is interrupted at one, the others are dropped all the same."""
    with ExitStack() as each:
        for among, waiting in planned:
            each.callback(among.drop, waiting)


def plan_at_once(groups: Sequence[GroupLookups], done: list[PlannedGroup]) -> None:
    """Plans groups of several forwards, just before these, on the current stream, and appends them to `done`."""
    for group, lookups in groups:
        if len(lookups) == 1:
            continue
        ages = []
        for _, tables in group.starts:
            pool = tables.pool
            begins = pool.times.begins(tables)
            ages.append(begins)
            if begins and pool.division is not None and pool.division.is_due_in(pool):
                pool.division.divide()
        if _plan_as_one(group, lookups, done, None, USE._replace(ages=tuple(ages)), None):
            call = done[-1][1].result()
            for _, tables in group.starts:
                tables.pool.times.looked_up(tables, call)  # a step has begun with it


def _plan_as_one(
    group: PlanGroup,
    lookups: Sequence[LookupSpec],
    done: list[PlannedGroup],
    executor: PlanExecutor | None,
    kind: PlanKind,
    memory: CallMemory | None,
) -> bool:
    """Plans several forwards as one, and appends the plan to `done`; returns False if they do not fit together, or one
    has wrong inputs: each then plans by itself. `kind`: how; whether a backward is expected comes from `lookups`."""
    from tieredemb.step.batch_form import BatchForm, may_join
    from tieredemb.step.engine import call_type
    from tieredemb.step.forwards import Forwards, context_of

    modules, pools = group.several, group.pools
    first = modules[0]
    inputs: list[Given] = []
    contexts: list[CallContext] = []
    given_to: list[tuple[TableSet, Given]] = []
    for module, (_, given, _) in zip(modules, lookups, strict=True):
        inputs.append(given)
        contexts.append(module.call_context)
        given_to.append((module.call_context.tables, given))
    guards, signature = guards_of(inputs)
    try:
        context = context_of(pools, first.options, make=False)
        form = None
        ids = [guard[0] for guard in guards]
        if context is not None and {*map(type, ids)} == {tuple}:  # tensors, all of them
            counts = [each[2].numel() for each in ids]
            form = context.forms.get(signature, counts, context.tables.placed.now)
        if context is None or form is None:
            batches = [module.batch_of(given) for module, given in zip(modules, inputs, strict=True)]
            context = context_of(pools, first.options) if may_join(batches) else None
            if context is None:
                _split(group, batches)
                return False
            form = BatchForm.of(batches, [len(numbers) for _, numbers in pools])
            context.forms.put(signature, context.tables.placed.now, form)
        device = pools[0][0].placed.now.config.device
        call = call_type(device.type)(context, form.size, form)
        shared = Forwards(call, contexts)
        trains = lookups[0].trains and any(
            module.is_trainable for module in modules
        )  # some modules may be frozen by now
        kind, may_exceed = kind._replace(trains=trains), first.engine.may_exceed_bags

        def plan() -> Call:
            call.plan(call.join(inputs), kind, may_exceed_bags=may_exceed, memory=memory)
            return call

        if executor is not None and executor.on_thread:
            for pool, _ in pools:
                pool.groups[0].cache.release_locks()
            future: Future[Any] = executor.submit(plan)
        else:
            with on_device(device):
                future = CompletedFuture(plan())
    except (TieredEmbError, RuntimeError):
        return False
    among = first.planned
    planned = Planned(given_to, future, guards, shared)
    done.append((among, planned))
    among.add(planned)
    return True


def _split(group: PlanGroup, batches: Sequence[Batch]) -> None:
    """The tables' `batches` do not fit each other, as sequences and single ids: from now on only tables whose batches
    do are planned as one."""
    from tieredemb.step.batch_form import is_joinable

    if any(batch.size == 0 for batch in batches):
        return
    keys: list[Hashable] = [batch.size if is_joinable(batch) else -1 - at for at, batch in enumerate(batches)]
    if len({*keys}) > 1:
        of_key, related = dict[Hashable, int](), group.pools[0][0].related
        for module, key in zip(group.modules, keys, strict=True):
            related.group_of[_place(module)] = of_key.setdefault(key, related.splits + 1 + len(of_key))
        related.splits += len(of_key)
