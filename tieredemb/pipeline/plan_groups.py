"""Which forwards of a batch are planned as one, and what waits for them: those of tables that share a cache are, and of
related pools, which have tables of other widths.

A plan group is what one plan is of: several forwards, or a single one that has nobody to join.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from itertools import accumulate, chain, islice, repeat
from typing import TYPE_CHECKING, Any, cast

from tieredemb.errors import TieredEmbError
from tieredemb.kernels.streams import on_device
from tieredemb.modules.base import TieredModule
from tieredemb.modules.lookup_module import LookupModule
from tieredemb.pipeline.lookups import LookupSpec, ages_of
from tieredemb.step.planned_forwards import Made, PlanExecutor, Planned, PlannedForwards
from tieredemb.tables.group import DeviceGroup
from tieredemb.tables.pool import Member, Pool, Related

if TYPE_CHECKING:
    from concurrent.futures import Future

    from tieredemb.step.batch import Given
    from tieredemb.step.call import CallContext
    from tieredemb.step.call_memory import CallMemory
    from tieredemb.step.forwards import Forwards
    from tieredemb.tables.table_set import Place, Placed

PlanGroup = list[LookupSpec]
PlannedGroup = tuple[PlannedForwards, Planned]  # what was planned, and among what it waits
PlanAlone = Callable[..., Planned]  # one forward, by what it looks up, `ages` and `memory`


class PlanGroups:
    """The plan groups of batches, of which one is looked up in the modules in which the last one was."""

    def __init__(self) -> None:
        self._of: list[tuple[LookupModule, bool]] = []
        self._where: list[tuple[Placed, weakref.ref[Place]]] = []  # the tables were then
        self._fitting: list[Related] = []  # whose tables were planned as one across pools
        self._positions: list[list[int]] = []

    def of(self, lookups: Sequence[LookupSpec]) -> list[PlanGroup]:
        """The plan groups of one batch, in the order of their first forwards; in each that of the tables."""
        now = [(module, trains) for module, _, trains in lookups]
        is_other = now != self._of or False in [related.fits for related in self._fitting]
        if is_other or any(placed.now is not there() for placed, there in self._where):
            wholes = dict.fromkeys(module.tables.whole for module, _ in now)
            self._where = [(whole.placed, weakref.ref(whole.placed.now)) for whole in wholes]
            those = {whole.related for whole in wholes if whole.related is not None}
            self._fitting = [related for related in those if related.fits]
            self._positions = _grouped([(module, trains and module.is_trainable) for module, trains in now])
            self._of = now
        return [[lookups[position] for position in positions] for positions in self._positions]


def _grouped(forwards: Sequence[tuple[LookupModule, bool]]) -> list[list[int]]:
    """The forwards that are planned as one, by position."""
    groups: dict[Hashable, list[int]] = {}
    tables = set()
    for position, (module, trains) in enumerate(forwards):
        alike = _alike(module, trains)
        key: Hashable = position  # alone
        if alike is not None and module.tables not in tables:
            tables.add(module.tables)
            key = alike
        groups.setdefault(key, []).append(position)
    return [sorted(group, key=lambda position: _place(forwards[position][0])) for group in groups.values()]


def _place(module: LookupModule) -> tuple[int, int]:
    """That of its pool among those related, and of its table there, if it has one."""
    tables = module.tables
    return (tables.pool.order, tables.number) if isinstance(tables, Member) else (0, 0)


def _alike(module: LookupModule, trains: bool) -> Hashable:
    """What the forwards that a plan is of have alike; None for one that is planned by itself: where rows have to be
    scaled before they are looked up, a backward asks for winners, or the host takes part."""
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
    return id(related), kind, -1 if related.fits else tables.pool.order, module.options, trains


def plan_groups(
    groups: Sequence[PlanGroup],
    plan_alone: PlanAlone,
    made: list[PlannedGroup],
    memories: Sequence[Any] = (),
    executor_of: Callable[[LookupModule], PlanExecutor] | None = None,
    *,
    ahead: bool,
) -> None:
    """Plans the plan groups of one batch and puts them down in `made` one by one: an interrupt finds those that were.
    `plan_alone`: plans a single forward · `memories`: of each group in turn, where to plan · `executor_of`: where plans
    of several forwards are made, which is else here, on the stream that is current · `ahead`: see `Call.plan`."""
    ages = iter(ages_of([lookup for group in groups for lookup in group]))
    for group, memory in zip(groups, chain(memories, repeat(None)), strict=False):
        its = list(islice(ages, len(group)))
        if len(group) > 1:
            executor = None if executor_of is None else executor_of(group[0].module)
            if _plan_as_one(group, made, executor, ages=its, ahead=ahead, memory=memory):
                continue
        for lookup, is_later in zip(group, its, strict=True):
            planned = plan_alone(lookup, ages=is_later, memory=memory if len(group) == 1 else None)
            made.append((lookup.module.planned, planned))


def drop_all(planned: Sequence[PlannedGroup]) -> None:
    """Gives up what no forward has taken. Interrupted at one, it goes on with the others."""
    with ExitStack() as each:
        for among, waiting in planned:
            each.callback(among.drop, waiting)


def plan_at_once(groups: Sequence[PlanGroup], made: list[PlannedGroup]) -> None:
    """Plans those of several forwards, about to come, on the stream that is current, and puts them down in `made`."""
    for group in groups:
        if len(group) == 1:
            continue
        ages, begun = [False] * len(group), dict[Pool, Member]()
        for position, lookup in enumerate(group):
            tables = cast("Member", cast("TieredModule", lookup.module).engine.tables)
            pool = tables.pool
            if pool not in begun:
                ages[position], begun[pool] = pool.times.begins(tables), tables
                if ages[position] and pool.division is not None and pool.division.is_due_in(pool):
                    pool.division.divide()
        if _plan_as_one(group, made, None, ages=ages, ahead=False, memory=None):
            for pool, tables in begun.items():
                pool.times.looked_up(tables, made[-1][1].result())  # a step has begun with it


def _plan_as_one(
    group: PlanGroup,
    made: list[PlannedGroup],
    executor: PlanExecutor | None,
    *,
    ages: Sequence[bool],
    ahead: bool,
    memory: CallMemory | None,
) -> bool:
    """Plans several forwards as one, and puts that down in `made`; returns False where they do not fit together, or one
    of them is wrong: each then finds out by itself. `ages`: of each whether it is of a later time than the plan before
    it in its pool."""
    from tieredemb.step.batch_form import BatchForm, may_join, signature_of
    from tieredemb.step.engine import call_type
    from tieredemb.step.forwards import Forwards, context_of, known_context

    first = cast("TieredModule", group[0].module)
    inputs: list[Given] = []
    contexts: list[CallContext] = []
    of_pool: dict[Pool, list[int]] = {}
    for module, given, _ in group:
        module = cast("TieredModule", module)
        tables = cast("Member", module.engine.tables)
        of_pool.setdefault(tables.pool, []).append(tables.number)
        inputs.append(given)
        contexts.append(module.call_context)
    those = [(pool, tuple(numbers)) for pool, numbers in of_pool.items()]
    sizes = [len(numbers) for numbers in of_pool.values()]
    signature = signature_of(inputs)
    try:
        context = known_context(those, first.options)
        form = None if context is None else context.forms.get(signature, context.tables.placed.now)
        if context is None or form is None:
            batches = [cast("TieredModule", module).batch_of(given) for module, given, _ in group]
            context = context_of(those, first.options) if may_join(batches) else None
            if context is None:
                if len(sizes) > 1 and not may_join(batches):
                    ends = [*accumulate(sizes)]
                    within = [batches[end - size : end] for end, size in zip(ends, sizes, strict=True)]
                    first.tables.whole.related.fits = not any(len(its) > 1 and may_join(its) for its in within)
                return False
            form = BatchForm(batches, sizes)
            context.forms.put(signature, context.tables.placed.now, form)
        device = those[0][0].placed.now.config.device
        call = call_type(device.type)(context, form.size, form)
        forwards = Forwards(call, contexts)
        trains = group[0].trains and any(lookup.module.is_trainable for lookup in group)  # some may be frozen by now
        of_pools = tuple([ages[block.positions.start] for block in form.blocks])
        may_exceed = first.engine.may_exceed_bags

        def plan() -> Forwards:
            call.plan(
                call.join(inputs), trains=trains, scored=True, ages=of_pools, ahead=ahead, may_exceed_bags=may_exceed,
                memory=memory,
            )  # fmt: skip
            return forwards

        if executor is not None and executor.apart:
            for pool, _ in those:
                pool.groups[0].cache.let_go()
            future: Future[Any] = executor.submit(plan)
        else:
            with on_device(device):
                future = Made(plan())
    except (TieredEmbError, RuntimeError):
        return False
    among = first.planned
    planned = Planned([(each.tables, given) for each, given in zip(contexts, inputs, strict=True)], future)
    made.append((among, planned))
    among.add(planned)
    return True
