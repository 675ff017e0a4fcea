"""Calls of a model whose tables share caches: what they will look up is planned as one when they begin, as `prefetch`
plans it before they come. A call shows which of its arguments reach which tables; those after it are planned."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from tieredemb.errors import TieredEmbError
from tieredemb.modules.forwards import LISTENERS, Forward
from tieredemb.modules.lookup_module import LookupModule
from tieredemb.pipeline.joint_plans import PlannedUnit, Units, drop_all, plan_at_once
from tieredemb.pipeline.lookups import Learned, LookupSpec, learn
from tieredemb.step.call import inside_backward, untraced
from tieredemb.step.planned_forwards import PlannedForwards

MOST_IN_VAIN = 3  # calls that did not look up what was planned for them: then no more is
MOST_SEEN = 10_000  # lookups that one call is learned from


def plan_calls(model: nn.Module) -> None:
    """Has the calls of `model` planned, from its second one on, by hooks. Only lookups of tables that share a cache on
    a GPU are planned as one; where there are none, nothing is planned."""
    if not any(isinstance(getattr(hook, "__self__", None), PlannedCalls) for hook in model._forward_hooks.values()):
        calls = PlannedCalls()
        model.register_forward_pre_hook(calls.before, with_kwargs=True)
        model.register_forward_hook(calls.after, with_kwargs=True, always_call=True)


class Mode(NamedTuple):
    """What a model may do something else in: whether it trains, whether gradients are wanted, and where it is."""

    training: bool
    differentiable: bool
    device: torch.device | None


@dataclass
class _Habit:
    """What calls look up. `planned`: among what their forwards wait · `in_vain`: how many calls were planned that then
    did something else."""

    lookups: Learned
    units: Units
    planned: set[PlannedForwards]
    in_vain: int = 0


@dataclass(eq=False)
class _Call:
    """A call that is under way. `planned`: for it, by its `habit`; one without is learned from: `seen` are its
    lookups."""

    mode: Mode
    habit: _Habit | None
    planned: list[PlannedUnit] = field(default_factory=list)
    seen: list[LookupSpec] = field(default_factory=list)
    listener: _Listener | None = None

    def listen(self) -> None:
        self.listener = _Listener(self)
        LISTENERS.append(self.listener)

    def leave(self) -> None:
        """It has ended, in whatever way."""
        if self.listener is not None and self.listener in LISTENERS:
            LISTENERS.remove(self.listener)
        drop_all(self.planned)


class _Listener:
    """Hears of the lookups of a call, which its thread makes; no more once nobody has the call, as one that was
    interrupted."""

    def __init__(self, call: _Call) -> None:
        self._call = weakref.ref(call)
        self._thread = threading.get_ident()

    def __call__(self, forward: Forward) -> None:
        call = self._call()
        if call is None or len(call.seen) == MOST_SEEN:
            LISTENERS.remove(self)
        elif threading.get_ident() == self._thread:
            call.seen.append(LookupSpec(forward.module, forward.given, forward.trains))


class PlannedCalls:
    """The hooks of one model. `_habits`: of its calls in each mode; None where nothing can be planned as one."""

    def __init__(self) -> None:
        self._habits: dict[Mode, _Habit | None] = {}
        self._now = threading.local()
        self._table: weakref.ref[LookupModule] | None = None

    def before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A call begins."""
        if not torch.compiler.is_compiling():
            self._begin(model, (args, kwargs))

    def after(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        """It has ended; with an error, where the `output` is None."""
        if not torch.compiler.is_compiling():
            self._end((args, kwargs), has_ended_well=output is not None)

    @untraced
    def _begin(self, model: nn.Module, given: Any) -> None:
        self._leave()  # a call that was interrupted
        mode = Mode(model.training, torch.is_grad_enabled(), self._device(model))
        known = mode in self._habits
        habit = self._habits[mode] if known else None
        if mode.device is None or mode.device.type != "cuda" or (known and habit is None) or inside_backward():
            return
        if habit is None:
            self._now.call = _Call(mode, None)
            self._now.call.listen()
            return
        if torch.cuda.is_current_stream_capturing() or torch._C._are_functorch_transforms_active():
            return
        for planned in habit.planned:
            if planned.waiting:  # by a loop that fetches ahead, or a captured step
                return
        call = self._now.call = _Call(mode, habit)
        try:
            units = habit.units.of(habit.lookups(given))
        except (TieredEmbError, LookupError, TypeError, AttributeError, ValueError, RuntimeError):
            return  # of another form, or what its forwards will refuse
        plan_at_once(units, call.planned)

    @untraced
    def _end(self, given: Any, *, has_ended_well: bool) -> None:
        call: _Call | None = getattr(self._now, "call", None)
        if call is None:
            return
        is_left = any(each.left for _, each in call.planned)
        self._leave()
        if not has_ended_well:
            return
        if call.habit is None:
            self._learn(call.mode, given, call.seen)
        elif is_left:
            call.habit.in_vain += 1
            if call.habit.in_vain == MOST_IN_VAIN:
                self._habits[call.mode] = None

    def _leave(self) -> None:
        call: _Call | None = getattr(self._now, "call", None)
        if call is not None:
            self._now.call = None
            call.leave()

    def _device(self, model: nn.Module) -> torch.device | None:
        """Of its tables."""
        table = None if self._table is None else self._table()
        if table is None:
            table = next((part for part in model.modules() if isinstance(part, LookupModule)), None)
            self._table = None if table is None else weakref.ref(table)
        return None if table is None else table.tables.placed.now.config.device

    def _learn(self, mode: Mode, given: Any, seen: list[LookupSpec]) -> None:
        tensors = [part for lookup in seen for part in lookup.given if isinstance(part, torch.Tensor)]
        if not tensors or any(part.numel() == 0 for part in tensors):
            return  # one empty tensor is like another
        lookups, units = learn(given, seen)[0], Units()
        is_shared = any(len(unit) > 1 for unit in units.of(lookups(given)))
        planned = {lookup.module.planned for lookup in seen}
        self._habits[mode] = _Habit(lookups, units, planned) if is_shared else None

    def __getstate__(self) -> dict[str, Any]:
        return {}  # a copy learns by itself, of its own tables

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
