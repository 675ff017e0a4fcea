"""One forward of a module, and the backward pass that applies all of them together.

Every call plans its ids, pools, and keeps its tickets until its backward was applied or its autograd node died. All
calls that one backward pass reaches are collected, and applied once at its end in forward order, as a dense gradient
would be. A forward that runs inside a backward pass is a recomputation (activation checkpointing): it scores nothing.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable

from tieredemb.cache.tickets import Ticket
from tieredemb.errors import BackwardError
from tieredemb.kernels.segments import segments_of_homes
from tieredemb.lookup.bags import Bags, make_bags
from tieredemb.lookup.embedding_bag import (
    NO_ARGMAX,
    NO_WEIGHTS,
    gradient_scale,
    has_max,
    pool,
    weights_gradient,
)
from tieredemb.lookup.optimizer import Gradient, Hyperparameters, limit_norms, update
from tieredemb.modules.group import Group
from tieredemb.modules.table_set import carrier_view
from tieredemb.storage.base import CARRIERS

if TYPE_CHECKING:
    from tieredemb.modules.base import TieredModule

    Array = np.ndarray[Any, Any]

P = ParamSpec("P")
R = TypeVar("R")
_numbers = itertools.count()  # forward order of calls


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Keeps `torch.compile` out of `function`, whose numpy and numba it would trace wrongly: a graph breaks there.
    A process that does not compile is spared the import of the compiler, which takes seconds."""
    disabled = _disable_dynamo(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return disabled(*args, **kwargs) if "torch._dynamo" in sys.modules else function(*args, **kwargs)

    return call


def inside_backward() -> bool:
    """Whether an autograd backward pass runs on this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


class GroupCall:
    """One forward in one group: its bags, its ticket, and what its gradient needs."""

    def __init__(self, group: Group, bags: Bags) -> None:
        self.group = group
        self.bags = bags
        self.ticket: Ticket = group.cache.plan(bags.keys, score=not inside_backward())
        self.weights: Array = NO_WEIGHTS
        self.argmax: Array = NO_ARGMAX
        self.forward_rows: Array | None = None

    def limit_norms(self, max_norm: float, norm_type: float) -> None:
        """Scales the rows of this forward down to `max_norm`, where they are longer."""
        with self.group.cache.lock:
            limit_norms(self.group.cache.hot, self.ticket.unique_slots, max_norm, norm_type)

    def pool(self, out: Array, weights: Array | None, *, keep_argmax: bool, keep_rows: bool) -> None:
        """Pools into `out` (carrier (B, ΣD)); keeps what a backward will want to know of the forward."""
        homes, space = self.ticket.homes, self.group.space
        if weights is not None:
            self.weights = weights if self.bags.position is None else weights[self.bags.position]
        if keep_argmax and has_max(space):
            self.argmax = np.full(out.shape, -1, np.int32)
        argmax = self.argmax if len(self.argmax) else None
        with self.group.cache.lock:  # an update on another thread would be seen half
            weight = self.group.cache.hot.weight
            pool(weight, homes, self.bags, space, None if weights is None else self.weights, out, argmax)
            if keep_rows:
                self.forward_rows = weight[np.maximum(homes, 0)]

    def weights_gradient(self, grad: Array, out: Array) -> None:
        """Writes the gradient of the per-sample weights to their positions in `out`, float32 (N,)."""
        assert self.forward_rows is not None
        homes = np.where(self.ticket.homes < 0, self.ticket.homes, np.arange(len(self.ticket.homes), dtype=np.int32))
        gradient = weights_gradient(self.forward_rows, homes, self.bags, self.group.space, grad)
        position: Any = slice(len(gradient)) if self.bags.position is None else self.bags.position
        out[position] = gradient

    def gradient(self, grad: Array, *, scale_by_freq: bool) -> Gradient:
        weights = self.weights if len(self.weights) else None
        scale = gradient_scale(self.bags, self.group.space, self.ticket.homes, weights)
        if scale_by_freq:
            inverse = self.ticket.inverse
            counts = np.maximum(np.bincount(inverse[inverse >= 0], minlength=1), 1)  # padding alone has no count
            share = np.where(inverse >= 0, 1 / counts[inverse].astype(np.float32), 0).astype(np.float32)
            scale = share if scale is None else scale * share
        return Gradient(grad, self.bags.sample, self.bags.table, NO_WEIGHTS if scale is None else scale, self.argmax)

    def untrained_key(self, padding_is_dropped: bool) -> int | None:
        """Key of the padding row where lookups read it but gradients must not reach it."""
        padding = int(self.group.space.padding[0])
        return None if padding_is_dropped or padding < 0 else padding


class Call:
    """One forward of a module."""

    def __init__(self, module: TieredModule, ids: Array, offsets: Array, batch: int) -> None:
        self.number = next(_numbers)
        self.module = module
        self.batch = batch
        self.ids = len(ids)
        self.consumed = False
        self.parts: list[GroupCall] = []
        options, groups = module.options, module.tables.groups
        # every id is checked before any group plans, and every group has planned before a row is written
        bags = [
            make_bags(ids, offsets, group.space, batch, padding_is_dropped=options.padding_is_dropped)
            for group in groups
        ]
        try:
            for group, its_bags in zip(groups, bags, strict=True):
                self.parts.append(GroupCall(group, its_bags))
            if options.max_norm is not None:
                for part in self.parts:
                    part.limit_norms(options.max_norm, options.norm_type)
        except BaseException:
            self.release()
            raise

    def pool(self, weights: torch.Tensor | None, *, differentiable: bool) -> torch.Tensor:
        """The pooled rows, (B, ΣD) in the rows' dtype."""
        tables = self.module.tables
        # numpy's memory comes in huge pages: faulting 27 MB in by 4 KiB pages costs as much as the lookup
        carrier = CARRIERS[tables.config.dtype]
        out = torch.from_numpy(np.empty((self.batch, tables.output_width), carrier)).view(tables.config.dtype)
        array = None
        if weights is not None:  # backward reads them again, and loaders reuse their buffers
            array = weights.detach().to(torch.float32, copy=differentiable).contiguous().numpy()
        keep_rows = differentiable and weights is not None and weights.requires_grad
        for part in self.parts:
            part.pool(carrier_view(out), array, keep_argmax=differentiable, keep_rows=keep_rows)
        return out

    def release(self) -> None:
        for part in self.parts:
            part.ticket.release()


class Lookup(torch.autograd.Function):
    """Autograd node of one call. The table is no input; `hook` (float32 (0,)) asks for the gradient in its place."""

    @staticmethod
    def forward(ctx: Any, hook: torch.Tensor, weights: torch.Tensor | None, make: Callable[[], Call]) -> torch.Tensor:
        call = make()
        out = call.pool(weights, differentiable=True)
        ctx.call = call
        ctx.weights_like = None if weights is None else (weights.shape, weights.dtype)
        ctx.trains = torch.autograd.graph.get_gradient_edge(hook).node if hook.requires_grad else None
        if ctx.trains is None:
            call.release()  # the gradient of the weights needs the rows of the forward alone, which the call keeps
        return out

    @staticmethod
    @untraced
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor | None, None]:
        call: Call = ctx.call
        # not in autograd.grad(…, inputs) or backward(inputs=…), which ask for other gradients than the table's
        trains = ctx.trains is not None and torch._C._will_engine_execute_node(ctx.trains)
        if trains and call.consumed:
            raise BackwardError(
                "this forward has been backpropagated already, and its update applied to the rows in place; "
                "run the forward again, or sum the losses and call backward once (retain_graph is not supported)"
            )
        if trains:
            call.module.check_trainable()
        grad = grad.detach().to(torch.float32).contiguous()
        weights_grad = None
        if ctx.needs_input_grad[1]:
            shape, dtype = ctx.weights_like
            array = np.zeros(call.ids, np.float32)
            for part in call.parts:
                part.weights_gradient(grad.numpy(), array)
            weights_grad = torch.from_numpy(array).to(dtype).reshape(shape)
        if trains:
            call.module.backward_pass.add(call, grad)
            call.consumed = True
        return None, weights_grad, None


class BackwardPass:
    """Collects the calls that each backward pass reaches, and applies them once when its outermost task ends.

    Autograd runs a callback queued inside a nested (checkpointed) backward at that backward's end, so the first touch
    queues it: a nested backward is always preceded by a forward in its parent, on the same thread. Backward passes on
    several threads are kept apart.
    """

    def __init__(self, apply: Callable[[list[tuple[Call, torch.Tensor]]], None]) -> None:
        self._apply = weakref.WeakMethod(apply)  # a cycle would keep a dropped module, and its file, open
        self._of_task: weakref.WeakValueDictionary[int, _Collected] = weakref.WeakValueDictionary()
        self._of_thread: weakref.WeakValueDictionary[int, _Collected] = weakref.WeakValueDictionary()

    def touch(self) -> _Collected:
        """To be called by everything that happens inside a backward pass; returns what that pass has collected."""
        task, thread = torch._C._current_graph_task_id(), threading.get_ident()
        collected = self._of_task.get(task) or self._of_thread.get(thread)
        if collected is None or collected.finished:
            collected = _Collected(self._apply)
            torch.autograd.Variable._execution_engine.queue_callback(collected)  # type: ignore[attr-defined]
        self._of_task[task] = self._of_thread[thread] = collected
        return collected

    def add(self, call: Call, grad: torch.Tensor) -> None:
        self.touch().calls.append((call, grad))


class _Collected:
    """The calls of one backward pass, and the callback that applies them. Autograd alone holds it, and drops it with a
    backward that failed: its calls then update nothing, and their tickets are released."""

    def __init__(self, apply: weakref.WeakMethod[Callable[[list[tuple[Call, torch.Tensor]]], None]]) -> None:
        self._apply = apply
        self.calls: list[tuple[Call, torch.Tensor]] = []
        self.finished = False

    @untraced
    def __call__(self) -> None:
        self.finished = True
        calls, self.calls = self.calls, []
        try:
            apply = self._apply()
            if calls and apply is not None:  # calls hold their module
                apply(sorted(calls, key=lambda pair: pair[0].number))
        finally:
            for call, _ in calls:
                call.release()


def apply_update(
    group: Group, parts: list[tuple[GroupCall, torch.Tensor]], numbers: Hyperparameters, module: TieredModule
) -> None:
    """One optimizer step of a group for the calls of one backward pass, in forward order. The caller holds the lock."""
    options = module.options
    gradients = [part.gradient(grad.numpy(), scale_by_freq=options.scale_grad_by_freq) for part, grad in parts]
    if len(parts) == 1:
        part = parts[0][0]
        segments = part.ticket.segments(part.untrained_key(options.padding_is_dropped))
        gradient = gradients[0]
    else:
        homes = [_trained_homes(part, options.padding_is_dropped) for part, _ in parts]
        segments = segments_of_homes(np.concatenate(homes), len(group.cache.hot))
        gradient = _concatenate(gradients)
    update(group.cache.hot, segments, gradient, group.space, numbers)


def _trained_homes(part: GroupCall, padding_is_dropped: bool) -> Array:
    key = part.untrained_key(padding_is_dropped)
    return part.ticket.homes if key is None else np.where(part.bags.keys == key, np.int32(-1), part.ticket.homes)


def _concatenate(gradients: list[Gradient]) -> Gradient:
    """Several batches as one: samples and winning occurrences count on."""
    samples = np.cumsum([0] + [len(g.grad) for g in gradients])
    occurrences = np.cumsum([0] + [len(g.sample) for g in gradients])
    scaled = any(len(g.scale) for g in gradients)
    scales = [g.scale if len(g.scale) else np.ones(len(g.sample), np.float32) for g in gradients]
    argmax = [np.where(g.argmax < 0, -1, g.argmax + first) for g, first in zip(gradients, occurrences, strict=False)]
    return Gradient(
        grad=np.concatenate([g.grad for g in gradients]),
        sample=np.concatenate([g.sample + first for g, first in zip(gradients, samples, strict=False)]).astype(
            np.int32
        ),
        table=np.concatenate([g.table for g in gradients]),
        scale=np.concatenate(scales) if scaled else NO_WEIGHTS,
        argmax=np.concatenate(argmax).astype(np.int32),
    )
