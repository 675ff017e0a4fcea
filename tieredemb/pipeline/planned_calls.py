"""Calls of a model whose tables are in related pools: what they will look up is planned as one when they begin, as
`prefetch` plans it before they come. Two calls that look up alike show which of their arguments reach which tables;
those after them are planned.

The hooks are on the model, and on the innermost module that holds all tables. A forward takes its plan by the very
tensors that it is given, as they are then, so a model that computes ids or changes its mind is right all the same. It
is planned forward by forward once three calls did not look up what was planned for them; a call that shows that
modules were taken out of the model is learned anew. Tensors of inference mode are left alone: they count no versions,
so a change would go unnoticed, and what was there before be planned. What no forward has taken is dropped when the
call ends, or by the next call where an interrupt has ended it. Where a loop or a captured step has planned, and where
nothing could be planned as one, the hooks do nothing.
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

# calls that did not look up what was planned for them, or as the one before: then nothing is planned any more
MOST_MISPREDICTIONS = 3
# what torch notes of hooks, by their numbers
_NOTES = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
MOST_OBSERVED = 1000  # lookups that one call is learned from


def plan_calls(model: nn.Module) -> None:
    """Has the calls of `model` planned, from its third one on, by hooks. Only lookups of tables in related pools are
    planned as one; where there are none, nothing is planned."""
    if not any(isinstance(getattr(hook, "__self__", None), PlannedCalls) for hook in model._forward_hooks.values()):
        calls = PlannedCalls()
        model.register_forward_pre_hook(calls.before, with_kwargs=True)
        model.register_forward_hook(calls.after, with_kwargs=True)
        model.register_forward_hook(calls.ended, always_call=True)


def plan_no_calls(model: nn.Module) -> None:
    """Undoes `plan_calls` of a model and of all modules in it."""
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            ours = [n for n, hook in hooks.items() if isinstance(getattr(hook, "__self__", None), PlannedCalls)]
            for number in ours:
                for each in (hooks, *(vars(module)[name] for name in _NOTES)):
                    each.pop(number, None)


class Mode(NamedTuple):
    """What a model may do something else in: whether it trains, whether gradients are wanted, and where it is."""

    training: bool
    differentiable: bool
    device: torch.device | None


@dataclass
class _Pattern:
    """What the calls of a model look up in one mode. `lookups`: as the last one that was learned from has shown, if any
    · `is_sure`: whether the one before has shown the same · `groups`, `planned`: of what is planned, and among what its
    forwards wait · `mispredictions`: how many calls then did something else · `is_over`: whether nothing more is
    planned."""

    lookups: Learned | None = None
    is_sure: bool = False
    groups: PlanGroups = field(default_factory=PlanGroups)
    planned: set[PlannedForwards] = field(default_factory=set)
    mispredictions: int = 0
    is_over: bool = False

    def mispredicted(self) -> None:
        """A call has not looked up what was planned for it, or as the one before."""
        self.mispredictions += 1
        if self.mispredictions == MOST_MISPREDICTIONS:
            self.end()

    def end(self) -> None:
        """Nothing more is planned."""
        self.forget()
        self.is_over = True

    def forget(self) -> None:
        """It is learned anew, and keeps no module alive meanwhile."""
        self.lookups, self.is_sure, self.groups, self.planned = None, False, PlanGroups(), set()

    def is_of(self, model: nn.Module) -> bool:
        """Whether all of its modules are yet in the model."""
        modules = set(model.modules())
        return self.lookups is None or all(module in modules for module, _, _ in self.lookups.forwards)


@dataclass(eq=False)
class _Call:
    """A call that is under way. `planned`: for it · `observed`: its lookups, if it is learned from: those that its
    `thread` makes in `modules`."""

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
        """A forward has come, of any module and thread."""
        if self.observed is None or self.listener is None:
            return
        if len(self.observed) == MOST_OBSERVED:
            self.listener.leave()
        elif threading.get_ident() == self.thread and forward.module in self.modules:
            self.observed.append(LookupSpec(forward.module, forward.given, forward.trains))

    def leave(self, model: nn.Module) -> None:
        """It has ended, in whatever way."""
        if self.listener is not None:
            self.listener.leave()
        left = any(each.left for _, each in self.planned)
        drop_all(self.planned)
        if left and not self.pattern.is_of(model):  # which was built otherwise since
            self.pattern.forget()
        elif left:
            self.pattern.mispredicted()


class PlannedCalls:
    """The hooks of one model. `_patterns`: of its calls in each mode."""

    def __init__(self) -> None:
        self._patterns: dict[Mode, _Pattern] = {}
        self._now = threading.local()
        self._table: weakref.ref[LookupModule] | None = None

    def before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A call begins."""
        if not torch.compiler.is_compiling():
            self._begin(model, (args, kwargs))

    def after(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        """It has ended well."""
        call = getattr(self._now, "call", None)
        if call is not None and call.observed is not None and not torch.compiler.is_compiling():
            self._learn((args, kwargs))

    def ended(self, model: nn.Module, *_: object) -> None:
        """It has ended, if with an exception."""
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
            if planned.waiting:  # by a loop that fetches ahead, or a captured step
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
            return  # one empty tensor is like another
        pattern = call.pattern
        try:
            lookups = learn(given, call.observed)[0]
            is_shared = any(len(members) > 1 for _, members in PlanGroups().of(lookups(given)))
        except Exception:  # arguments that nothing can be learned of are no fault of the call
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
        """Whether lookups without gradient need no plan, as the first table tells; those that do plan one by one."""
        table = None if self._table is None else self._table()
        return table is not None and table.tables.placed.now.are_read_in_place

    def _device(self, model: nn.Module) -> torch.device | None:
        """Of its tables."""
        table = None if self._table is None else self._table()
        if table is None:
            table = next((part for part in model.modules() if isinstance(part, LookupModule)), None)
            self._table = None if table is None else weakref.ref(table)
        return None if table is None else table.tables.placed.now.config.device

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()  # a copy learns by itself, of its own tables


def _looked_up(pattern: _Pattern, given: Any) -> list[LookupSpec]:
    """What a call of arguments `given` will look up; nothing of such as are of another form, or of tensors that do not
    tell when they are changed before they are looked up, as those do not that were made in inference mode."""
    if pattern.lookups is None:  # another thread has just forgotten them
        return []
    try:
        lookups = pattern.lookups(given)
    except Exception:  # whatever objects are among them
        return []
    tensors = {id(part): part for lookup in lookups for part in lookup.given if isinstance(part, torch.Tensor)}
    for tensor in tensors.values():
        if tensor.is_inference():
            return []
    return lookups
