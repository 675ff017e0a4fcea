"""The leaves of a step's backward: the parameters of dense layers, and what autograd remembers of them.

Autograd adds to a parameter's `.grad` on the stream on which it first used the parameter, and remembers that as long as
any graph through the parameter is alive (torch's AccumulateGrad, which the parameter references weakly). So a loss that
is kept from an eager step ties a capture to the default stream, which CUDA cannot capture. Only an assignment to the
parameter's `.data` makes autograd forget, and other threads may be computing with that: so the user has to drop the
graph.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from tieredemb.errors import UnsupportedError
from tieredemb.step.autograd_grad import nodes_behind
from tieredemb.step.program import BACKWARDS

_STREAM = "tieredemb.stream"  # key of a node's metadata, which live as long as it, for the stream it runs on
DEFAULT_STREAM = 0  # its handle, on every device


class Leaves:
    """The tensors on `device` to whose `.grad` the backward of a step adds, as observed in two eager runs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._met: dict[int, weakref.ref[torch.Tensor]] = {}
        # seen before the last run: others may be of that run alone, as a lookup's own leaf
        self._known: list[weakref.ref[torch.Tensor]] = []

    def __iter__(self) -> Iterator[torch.Tensor]:
        leaves = (reference() for reference in self._known)
        return (leaf for leaf in leaves if leaf is not None and leaf.requires_grad)

    @contextlib.contextmanager
    def observe(self, *, captured: bool = False) -> Iterator[None]:
        """Inside, the step runs, with its backward on this thread: observes the leaves that this reaches, and the
        streams of leaves known before. `captured`: it is captured, and only streams are observed."""
        self._met = {number: leaf for number, leaf in self._met.items() if leaf() is not None}
        self._known = list(self._met.values())
        thread, passes = threading.get_ident(), set()
        nodes: list[Any] = [get_gradient_edge(leaf).node for leaf in self]  # held, so that the step uses these nodes
        unknown = [node for node in nodes if _STREAM not in node.metadata]
        hooks = [node.register_prehook(_NotesStream(node.metadata, self._device)) for node in unknown]

        def note() -> None:
            backward_pass = torch._C._current_graph_task_id()
            if captured or threading.get_ident() != thread or backward_pass in passes:
                return
            passes.add(backward_pass)
            self._met |= {id(leaf): weakref.ref(leaf) for leaf in _leaves_of(_roots(), self._device)}

        BACKWARDS.append(note)
        try:
            yield
        finally:
            BACKWARDS.remove(note)
            for hook in hooks:
                hook.remove()

    def check_free(self) -> None:
        """Raises `UnsupportedError` if a graph that is still alive ties leaves to the default stream."""
        held = [leaf for leaf in self if _runs_on(leaf) == DEFAULT_STREAM]
        if held:
            raise UnsupportedError(
                f"{len(held)} parameter(s) of the step, the first of shape {tuple(held[0].shape)}, are still part of "
                f"the autograd graph of an earlier step on the default stream, where autograd would go on to add to "
                f"their gradients, and which no CUDA graph can hold. Something keeps that graph alive: a loss or an "
                f"output of an eager step, one that the step itself stores, or an error with its traceback. del it, or "
                f"keep loss.detach(), and call again; or let graph_step run the first steps, too. "
                f"DistributedDataParallel keeps its part of such a graph for good: build it inside "
                f"torch.cuda.stream(torch.cuda.Stream())"
            )

    @contextlib.contextmanager
    def grads_kept(self) -> Iterator[None]:
        """If a capture fails inside, of which nothing has run, restores the gradients."""
        grads = [(leaf, leaf.grad) for leaf in self]
        try:
            yield
        except BaseException:
            for leaf, grad in grads:
                leaf.grad = grad
            raise


class _NotesStream:
    """Notes the stream on which a node runs, in its `metadata`."""

    def __init__(self, metadata: dict[str, Any], device: torch.device) -> None:
        self._metadata = metadata  # not the node, which references this
        self._device = device

    def __call__(self, _: object) -> None:
        self._metadata[_STREAM] = torch.cuda.current_stream(self._device).cuda_stream


def _runs_on(leaf: torch.Tensor) -> int | None:
    """The stream on which autograd adds to the leaf's gradient, while a graph is alive; None if none is. If it was not
    observed in a step, the graph is of an eager step outside, and assumed to be on the default stream."""
    _metadata(leaf).setdefault(_STREAM, DEFAULT_STREAM)  # freed with the node if nothing else references it
    return _metadata(leaf).get(_STREAM)


def _metadata(leaf: torch.Tensor) -> dict[str, Any]:
    return get_gradient_edge(leaf).node.metadata  # type: ignore[return-value]  # a property, by torch's stubs a method


def _roots() -> list[Any]:
    """The nodes at which the backward passes begin that run on this thread."""
    frame: FrameType | None = sys._getframe()
    roots = list[Any]()
    while frame is not None:
        if frame.f_code.co_name == "_engine_run_backward":  # torch/autograd/graph.py
            given = frame.f_locals.get("t_outputs", ())
            roots += [part.grad_fn if isinstance(part, torch.Tensor) else part.node for part in given]
        frame = frame.f_back
    return roots


def _leaves_of(roots: list[Any], device: torch.device) -> Iterator[torch.Tensor]:
    """The leaves on `device` that these nodes reach."""
    for node in nodes_behind(roots):
        if type(node).__name__ != "AccumulateGrad" or node.variable.device != device:
            continue
        if node.variable.numel():  # an empty one is a lookup's own leaf, new in each call
            yield node.variable
