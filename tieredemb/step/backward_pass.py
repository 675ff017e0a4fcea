"""Backward passes: each collects the calls that it reaches, and applies them once at its end, in forward order, as a
dense gradient would be.

A forward that runs inside a backward pass is a recomputation (activation checkpointing): it scores nothing.
"""

from __future__ import annotations

import sys
import threading
import weakref
from typing import Any

import torch

from tieredemb.kernels.tracing import callback, is_compiling, untraced

# calls, and the gradients of their outputs, float32 (B, ΣD); beside them uses of whole tables, and their terms
Collected = list[tuple[Any, Any]]


def in_forward_order(collected: Collected) -> Collected:
    """Calls, and uses of whole tables, in the order of their forwards."""
    if len(collected) < 2:
        return collected
    numbers = [call.number for call, _ in collected]
    if numbers == sorted(numbers):
        return collected
    return [collected[at] for at in sorted(range(len(numbers)), key=numbers.__getitem__)]


def inside_backward() -> bool:
    """Whether an autograd backward pass runs on this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def _backward_depth() -> int:
    """Backward passes that this thread's Python frames are inside of."""
    frame, depth = sys._getframe(), 0
    while frame is not None:
        depth += frame.f_code.co_name == "_engine_run_backward"
        frame = frame.f_back  # type: ignore[assignment]
    return depth


class BackwardPass:
    """Collects the calls that each backward pass reaches, and applies them once when its outermost task ends.

    Autograd runs a callback queued inside a nested (checkpointed) backward at that backward's end, so it is queued
    before that begins: by the forward that is recomputed first, on the same thread, whose call then belongs to the
    outer pass. Backward passes of several threads are kept apart, also where one thread of autograd's serves the GPU
    nodes of all: there a forward is recomputed inside another pass only if Python is still inside that one.
    """

    def __init__(self) -> None:
        self._of_task: weakref.WeakValueDictionary[int, CollectedCalls] = weakref.WeakValueDictionary()
        self._of_thread: weakref.WeakValueDictionary[int, CollectedCalls] = weakref.WeakValueDictionary()

    def touch(self) -> weakref.ref[CollectedCalls]:
        """To be called by every forward inside a backward pass; returns what the pass that recomputes it collects."""
        task, thread = torch._C._current_graph_task_id(), threading.get_ident()
        collected = self._of_task.get(task)
        if collected is None or collected.finished:
            depth, around = _backward_depth(), self._of_thread.get(thread)
            if around is not None and not around.finished and depth > around.depth:
                collected = around
                self._of_task[task] = around
            else:
                collected = self._begin(task, depth)
        self._of_thread[thread] = collected
        return weakref.ref(collected)

    def add(self, *gradients: tuple[Any, Any]) -> None:
        """Calls and the gradients of their outputs, or uses of whole tables and their terms, as they are reached.
        Several are of one forward pass."""
        within = gradients[0][0].within
        collected = None if within is None else within()
        if collected is None or collected.finished:
            task = torch._C._current_graph_task_id()
            collected = self._of_task.get(task)
            if collected is None or collected.finished:
                collected = self._begin(task, _backward_depth())
        collected.calls.extend(gradients)

    def _begin(self, task: int, depth: int) -> CollectedCalls:
        collected = CollectedCalls(depth)
        torch.autograd.Variable._execution_engine.queue_callback(collected)  # type: ignore[attr-defined]
        self._of_task[task] = collected
        return collected


class CollectedCalls:
    """The calls of one backward pass, and the callback that hands them over to be applied and released. Autograd alone
    holds it, and drops it with a backward that failed: its calls then update nothing, and their tickets are
    released."""

    def __init__(self, depth: int) -> None:
        self.depth = depth  # of backward passes around it on its thread
        self.calls: Collected = []
        self.finished = False

    def __call__(self) -> None:
        if is_compiling() or callback() is not None:
            _apply_untraced(self)
        else:
            _apply(self)


def _apply(collected: CollectedCalls) -> None:
    collected.finished = True
    calls, collected.calls = collected.calls, []
    if calls:
        calls[0][0].context.apply(calls if len(calls) == 1 else in_forward_order(calls))


_apply_untraced = untraced(_apply)
