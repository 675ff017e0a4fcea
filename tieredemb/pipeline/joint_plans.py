"""Which forwards of a batch are planned as one, and what waits for them: those of tables that share a cache are.

A unit is what one plan is of: several forwards, or a single one that has nobody to join.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, cast

from tieredemb.errors import TieredEmbError
from tieredemb.modules.base import TieredModule
from tieredemb.pipeline.lookups import LookupSpec, ages_of
from tieredemb.step.planned_forwards import Made, Planned, PlannedForwards
from tieredemb.tables.group import DeviceGroup
from tieredemb.tables.pool import Member

if TYPE_CHECKING:
    from tieredemb.step.batch import Given
    from tieredemb.step.call import CallContext
    from tieredemb.step.call_memory import CallMemory
    from tieredemb.step.device_call import DeviceCall
    from tieredemb.step.joint_call import JointCall
    from tieredemb.tables.table_set import Place

Unit = list[LookupSpec]
PlanAlone = Callable[..., Planned]  # one forward, by what it looks up, `ages` and `memory`


class Units:
    """The units of batches, of which one is looked up in the modules in which the last one was."""

    def __init__(self) -> None:
        self._of: list[tuple[TieredModule, bool, weakref.ref[Place]]] = []
        self._positions: list[list[int]] = []

    def of(self, lookups: Sequence[LookupSpec]) -> list[Unit]:
        """The units of one batch, in the order of their first forwards; in each that of the tables."""
        now = [
            (module, trains and module.is_trainable, weakref.ref(module.tables.placed.now))
            for module, _, trains in lookups
        ]
        if now != self._of:
            self._positions, self._of = _units([(module, trains) for module, trains, _ in now]), now
        return [[lookups[position] for position in positions] for positions in self._positions]


def _units(forwards: Sequence[tuple[TieredModule, bool]]) -> list[list[int]]:
    """The forwards that are planned as one, by position."""
    units: dict[Hashable, list[int]] = {}
    tables = set()
    for position, (module, trains) in enumerate(forwards):
        alike = _alike(module, trains)
        key: Hashable = position  # alone
        if alike is not None and module.tables not in tables:
            tables.add(module.tables)
            key = alike
        units.setdefault(key, []).append(position)
    number = [cast("Member", module.tables).number if _is_member(module) else 0 for module, _ in forwards]
    return [sorted(unit, key=lambda position: number[position]) for unit in units.values()]


def _is_member(module: TieredModule) -> bool:
    return isinstance(module.tables, Member)


def _alike(module: TieredModule, trains: bool) -> Hashable:
    """What the forwards that a plan is of have alike; None for one that is planned by itself: where rows have to be
    caught up or scaled before they are looked up, a backward asks for winners, or the host takes part."""
    tables = module.tables
    if not isinstance(tables, Member):
        return None
    (group,) = tables.groups
    if not isinstance(group, DeviceGroup) or group.past is not None or group.lookup.has_max:
        return None
    if not group.cache.cold.device_readable or tables.config.check_ids == "always":
        return None
    if module.options.max_norm is not None:
        return None
    return id(tables.pool), module.options, trains


class PlannedUnit:
    """A unit that was planned. `forwards`: of each forward among which it waits, and what it is given · `call`: what
    all have in common, where they are several."""

    def __init__(
        self,
        forwards: Sequence[tuple[PlannedForwards, Given, CallContext | None]],
        planned: Sequence[Planned],
        call: JointCall | None,
    ) -> None:
        self._forwards = forwards
        self.planned = planned
        self._joint = call

    @property
    def waiting(self) -> list[tuple[PlannedForwards, Planned]]:
        """The forwards, and among which others each waits."""
        return [(among, each) for (among, _, _), each in zip(self._forwards, self.planned, strict=True)]

    @property
    def failed(self) -> bool:
        """Whether planning has ended in an error, which one of those planned has."""
        return any(each.failed for each in self.planned)

    @property
    def is_whole(self) -> bool:
        """Whether all forwards are planned, and none has come."""
        return not self.failed and all(among.holds(each) for among, each in self.waiting)

    def call(self) -> DeviceCall:
        """What was planned, of forwards that have not come. Raises what planning has ended in."""
        return self._joint or cast("DeviceCall", self.planned[0].future.result())

    def made(self) -> DeviceCall | None:
        """The same, of forwards some of which may have come; None where planning has failed, or the only one has."""
        future = self.planned[0].future
        if self._joint is None and (not future.done() or future.cancelled() or future.exception() is not None):
            return None
        return self.call()

    def drop(self) -> None:
        """Gives up what no forward has taken."""
        for among, each in self.waiting:
            among.drop(each)

    def again(self, call: DeviceCall) -> PlannedUnit:
        """The unit of `call`, which a replay has planned anew; its forwards wait."""
        if self._joint is None:
            planned, joint = [Planned(self._forwards[0][1], Made(call))], None
        else:
            joint = cast("JointCall", call)
            planned = _shares(joint, [(given, context) for _, given, context in self._forwards])
        for (among, _, _), each in zip(self._forwards, planned, strict=True):
            among.add(each)
        return PlannedUnit(self._forwards, planned, joint)


def _shares(call: JointCall, forwards: Sequence[tuple[Given, Any]]) -> list[Planned]:
    return [Planned(given, Made(call.share(number, context))) for number, (given, context) in enumerate(forwards)]


def plan_units(
    units: Sequence[Unit],
    plan_alone: PlanAlone,
    made: list[PlannedUnit],
    memories: Sequence[CallMemory] = (),
    *,
    ahead: bool,
) -> None:
    """Plans the units of one batch, on the stream that is current, and puts them down in `made` one by one: an
    interrupt finds those that were. `plan_alone`: plans a single forward · `memories`: of each unit in turn, where to
    plan · `ahead`: see `Call.plan`."""
    ages = ages_of([unit[0] for unit in units])
    for unit, is_later, memory in zip_longest(units, ages, memories):
        if unit is None:
            break
        joint = _plan_joint(unit, ages=is_later, ahead=ahead, memory=memory) if len(unit) > 1 else None
        if joint is not None:
            made.append(joint)
            continue
        for lookup in unit:
            planned = plan_alone(lookup, ages=is_later, memory=memory if len(unit) == 1 else None)
            made.append(PlannedUnit([(lookup.module.engine.planned, lookup.given, None)], [planned], None))
            is_later = False


def plan_at_once(units: Sequence[Unit], made: list[PlannedUnit]) -> None:
    """Plans those of several forwards, about to come, on the stream that is current, and puts them down in `made`."""
    for unit in units:
        if len(unit) == 1:
            continue
        tables = unit[0].module.tables
        ages = tables.step_time is None or tables.step_time.begins(tables)
        joint = _plan_joint(unit, ages=ages, ahead=False, memory=None)
        if joint is None:
            continue
        made.append(joint)
        for lookup, planned in zip(unit, joint.planned, strict=True):
            if tables.step_time is not None:
                tables.step_time.looked_up(lookup.module.tables, planned.future.result())


def _plan_joint(unit: Unit, *, ages: bool, ahead: bool, memory: CallMemory | None) -> PlannedUnit | None:
    """Plans several forwards as one; None where they do not fit together, or one of them is wrong: each then finds out
    by itself."""
    from tieredemb.step.joint_call import JointCall, may_join

    try:
        found = [lookup.module.batch_of(lookup.given) for lookup in unit]
        batches = [batch for batch, _ in found]
        tables = [cast("Member", lookup.module.tables) for lookup in unit]
        together = tables[0].pool.together(tuple(each.number for each in tables)) if may_join(batches) else None
        if together is None:
            return None
        call = JointCall(together, unit[0].module.options, batches)
        trains = unit[0].trains and unit[0].module.is_trainable
        may_exceed = unit[0].module.engine.may_exceed_bags
        call.plan(
            call.join(batches), trains=trains, scored=True, ages=ages, ahead=ahead, may_exceed_bags=may_exceed,
            memory=memory,
        )  # fmt: skip
    except (TieredEmbError, RuntimeError):
        return None
    planned = _shares(call, [(lookup.given, context) for lookup, (_, context) in zip(unit, found, strict=True)])
    forwards = [
        (lookup.module.engine.planned, lookup.given, context) for lookup, (_, context) in zip(unit, found, strict=True)
    ]
    for (among, _, _), each in zip(forwards, planned, strict=True):
        among.add(each)
    return PlannedUnit(forwards, planned, call)
