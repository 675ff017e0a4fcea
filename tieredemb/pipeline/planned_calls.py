"""Plans the lookups of a model's call as one when the call begins, if its tables are in related pools, as `prefetch`
plans them ahead. Two calls with equal lookups show which of their arguments reach which tables; later calls are
planned.

The hooks are on the model, and on the innermost module that holds all tables. A forward takes its plan only for exactly
its input tensors, unchanged, so a model that computes ids or changes its lookups gets right results all the same. After
three calls with wasted plans, forwards are planned one by one; a call which shows that modules were removed from the
model is learned anew. Tensors of inference mode are not planned: they have no versions, so a later change would go
unnoticed. Plans that no forward has taken are dropped when the call ends, or after an interrupt by the next call. If a
loop or a captured step has planned, or nothing could be planned as one, the hooks do nothing.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from tieredemb.kernels.tracing import untraced
from tieredemb.modules.forwards import Forward
from tieredemb.modules.lookup_module import LookupModule
from tieredemb.pipeline.lookups import Learned, Listener, LookupSpec, learn
from tieredemb.pipeline.plan_groups import PlanGroups, PlannedGroup, drop_all, plan_at_once
from tieredemb.step.planned_forwards import PlannedForwards
from tieredemb.step.program import inside_backward

# calls with wasted plans, or with other lookups than the one before: then nothing more is planned
MOST_MISPREDICTIONS = 3
# where torch keeps options of hooks, by their numbers
_NOTES = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
MOST_OBSERVED = 1000  # lookups of one call that are learned from


def plan_calls(model: nn.Module) -> None:
    """Has the calls of `model` planned by hooks, from the third one on. Only lookups of tables in related pools are
    planned as one; if there are none, nothing is planned."""
    if not any(isinstance(getattr(hook, "__self__", None), PlannedCalls) for hook in model._forward_hooks.values()):
        calls = PlannedCalls()
        model.register_forward_pre_hook(calls.before, with_kwargs=True)
        model.register_forward_hook(calls.after, with_kwargs=True)
        model.register_forward_hook(calls.ended, always_call=True)


def plan_no_calls(model: nn.Module) -> None:
    """Undoes `plan_calls` for a model and all modules in it."""
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            ours = [n for n, hook in hooks.items() if isinstance(getattr(hook, "__self__", None), PlannedCalls)]
            for number in ours:
                for each in (hooks, *(vars(module)[name] for name in _NOTES)):
                    each.pop(number, None)


class Mode(NamedTuple):
    """The state that a model's lookups may depend on: whether it trains, whether gradients are wanted, its device."""

    training: bool
    differentiable: bool
    device: torch.device | None


@dataclass
class _Pattern:
    """What the calls of a model look up in one mode. `lookups`: learned from the last observed call, if any ·
    `is_sure`: whether the call before looked up the same · `groups`: how forwards are grouped · `planned`: where their
    plans wait · `mispredictions`: how many calls then did something else · `is_over`: whether nothing more is
    planned."""

    lookups: Learned | None = None
    is_sure: bool = False
    groups: PlanGroups = field(default_factory=PlanGroups)
    planned: set[PlannedForwards] = field(default_factory=set)
    mispredictions: int = 0
    is_over: bool = False

    def mispredicted(self) -> None:
        """Called when a call has not looked up what was planned for it, or the same as the one before."""
        self.mispredictions += 1
        if self.mispredictions == MOST_MISPREDICTIONS:
            self.end()

    def end(self) -> None:
        """Ends planning for this mode."""
        self.forget()
        self.is_over = True

    def forget(self) -> None:
        """Forgets what was learned, and so keeps no module alive."""
        self.lookups, self.is_sure, self.groups, self.planned = None, False, PlanGroups(), set()

    def is_of(self, model: nn.Module) -> bool:
        """Whether all of its modules are still in the model."""
        modules = set(model.modules())
        return self.lookups is None or all(module in modules for module, _, _ in self.lookups.forwards)


@dataclass(eq=False)
class _Call:
    """A call that is running. `planned`: its plans · `observed`: its lookups, if these are to be learned: those that
    its `thread` makes in `modules`."""

    pattern: _Pattern
    planned: list[PlannedGroup] = field(default_factory=list)
    observed: list[LookupSpec] | None = None
    listener: Listener | None = None
    thread: int = 0
    modules: Collection[LookupModule] = ()

    def listen(self, model: nn.Module) -> None:
        self.thread = threading.get_ident()
        self.modules = weakref.WeakSet(part for part in model.modules() if isinstance(part, LookupModule))
        self.observed, self.listener = [], Listener(self.observe)

    def observe(self, forward: Forward) -> None:
        """Called for each forward, of any module and thread."""
        if self.observed is None or self.listener is None:
            return
        if len(self.observed) == MOST_OBSERVED:
            self.listener.leave()
        elif threading.get_ident() == self.thread and forward.module in self.modules:
            self.observed.append(LookupSpec(forward.module, forward.given, forward.trains))

    def leave(self, model: nn.Module) -> None:
        """Called when the call has ended, in whatever way."""
        if self.listener is not None:
            self.listener.leave()
        left = any(each.left for _, each in self.planned)
        drop_all(self.planned)
        if left and not self.pattern.is_of(model):  # its modules have changed
            self.pattern.forget()
        elif left:
            self.pattern.mispredicted()


class PlannedCalls:
    """The hooks of one model. `_patterns`: for each mode, of its calls."""

    def __init__(self) -> None:
        self._patterns: dict[Mode, _Pattern] = {}
        self._now = threading.local()
        self._table: weakref.ref[LookupModule] | None = None

    def before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Hook before a call."""
        if not torch.compiler.is_compiling():
            self._begin(model, (args, kwargs))

    def after(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        """Hook after a call without an exception."""
        call = getattr(self._now, "call", None)
        if call is not None and call.observed is not None and not torch.compiler.is_compiling():
            self._learn((args, kwargs))

    def ended(self, model: nn.Module, *_: object) -> None:
        """Hook after any call."""
        if not torch.compiler.is_compiling():
            self._leave(model)

    @untraced
    def _begin(self, model: nn.Module, given: Any) -> None:
        self._leave(model)  # one that was interrupted, or that has called its model again
        device = self._device(model)
        if device is None or inside_backward() or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            return
        if not torch.is_grad_enabled() and self._reads_in_place():
            return
        mode = Mode(model.training, torch.is_grad_enabled(), device)
        pattern = self._patterns.get(mode) or self._patterns.setdefault(mode, _Pattern())
        if pattern.is_over or torch._C._are_functorch_transforms_active():
            return
        if not pattern.is_sure:
            self._now.call = _Call(pattern)
            self._now.call.listen(model)
            return
        for planned in pattern.planned:
            if planned.waiting:  # plans of a loop that fetches ahead, or of a captured step
                return
        lookups = _looked_up(pattern, given)
        if lookups:
            call = self._now.call = _Call(pattern)
            plan_at_once(pattern.groups.of(lookups), call.planned)

    @untraced
    def _learn(self, given: Any) -> None:
        call: _Call = self._now.call
        assert call.observed is not None
        if len(call.observed) == MOST_OBSERVED:
            return
        tensors = [part for lookup in call.observed for part in lookup.given if isinstance(part, torch.Tensor)]
        if not tensors or any(part.numel() == 0 for part in tensors):
            return  # empty tensors cannot be distinguished
        pattern = call.pattern
        try:
            lookups = learn(given, call.observed)[0]
            is_shared = any(len(members) > 1 for _, members in PlanGroups().of(lookups(given)))
        except Exception:  # the call is right even if nothing can be learned from its arguments
            pattern.end()
            return
        if not is_shared:
            pattern.end()
            return
        before, pattern.lookups = pattern.lookups, lookups
        pattern.planned = {lookup.module.planned for lookup in call.observed}
        pattern.is_sure = before is not None and before.identity == lookups.identity
        if before is not None and not pattern.is_sure:
            pattern.mispredicted()

    def _leave(self, model: nn.Module) -> None:
        call: _Call | None = getattr(self._now, "call", None)
        if call is not None:
            self._now.call = None
            call.leave(model)

    def _reads_in_place(self) -> bool:
        """Whether lookups without gradient need no plan, by the first table; tables that need one plan one by one."""
        table = None if self._table is None else self._table()
        return table is not None and table.tables.placed.now.are_read_in_place

    def _device(self, model: nn.Module) -> torch.device | None:
        """The device of its tables."""
        table = None if self._table is None else self._table()
        if table is None:
            table = next((part for part in model.modules() if isinstance(part, LookupModule)), None)
            self._table = None if table is None else weakref.ref(table)
        return None if table is None else table.tables.placed.now.config.device

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()  # a copy learns by itself, from its own tables


def _looked_up(pattern: _Pattern, given: Any) -> list[LookupSpec]:
    """What a call with the arguments `given` will look up; empty if they have another form, or contain tensors of
    inference mode, whose changes before the lookup would go unnoticed."""
    if pattern.lookups is None:  # another thread forgot them just now
        return []
    try:
        lookups = pattern.lookups(given)
    except Exception:  # arguments may be any objects
        return []
    tensors = {id(part): part for lookup in lookups for part in lookup.given if isinstance(part, torch.Tensor)}
    for tensor in tensors.values():
        if tensor.is_inference():
            return []
    return lookups
