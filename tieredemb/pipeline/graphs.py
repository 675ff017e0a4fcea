"""Whole steps as one CUDA graph: captured from a function that the user wrote for eager steps, and replayed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import torch

from tieredemb.errors import InvalidInputError, UnsupportedError
from tieredemb.modules.ahead import identity
from tieredemb.modules.base import TieredModule
from tieredemb.modules.forwards import Forward, heard
from tieredemb.pipeline.batches import Path, map_tensors, tensors_of

R = TypeVar("R")
EAGER_STEPS = 2  # on the buffers, before the capture: what is made at a first use must not be captured


class GraphStep(Generic[R]):
    """A step that runs as a CUDA graph; see `graph_step`."""

    def __init__(self, step: Callable[[Any], R], *, max_ids: int | None = None) -> None:
        if not callable(step):
            raise InvalidInputError(f"step must be a function of a batch, got {step!r}")
        if max_ids is not None and (isinstance(max_ids, bool) or not isinstance(max_ids, int) or max_ids < 0):
            raise InvalidInputError(f"max_ids must be a number of ids, 0 or more, got {max_ids!r}")
        self._step = step
        self._max_ids = max_ids
        self._buffers: _Buffers | None = None
        self._modules: list[TieredModule] = []
        self._left = EAGER_STEPS
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: R | None = None

    def __call__(self, batch: Any) -> R:
        """Runs the step on `batch`: the first times as the function it is, then by replay. Returns what the function
        does, its tensors detached."""
        if self._buffers is None:
            return self._first(batch)
        self._buffers.load(batch)
        if self._graph is None and self._left > 0:
            self._left -= 1
            with self._on_buffers(), _beside():
                return self._run(self._buffers.batch)
        if self._graph is None:
            self._graph = self._capture()
        for module in self._modules:
            module.tables.check_earlier()  # as a forward does, which a replay is none
            for group in module.tables.groups:
                group.cache.check_replay()
            if module.is_trainable:
                module.fused_optimizer.upload()
        self._graph.replay()
        return self._result  # type: ignore[return-value]

    def _first(self, batch: Any) -> R:
        """As the function, and heard: which modules look up which of the batch's tensors."""
        with heard() as forwards:
            result = self._run(batch)
        modules = list(dict.fromkeys(forward.module for forward in forwards))
        if any(module.tables.config.device.type == "cuda" for module in modules):
            for module in modules:
                _check_capturable(module)
            self._modules = modules
            self._buffers = _Buffers(batch, forwards, self._max_ids)
        return result

    def _capture(self) -> torch.cuda.CUDAGraph:
        assert self._buffers is not None
        graph = torch.cuda.CUDAGraph()
        with self._on_buffers(), torch.cuda.graph(graph):
            self._result = self._run(self._buffers.batch)
        return graph

    def _run(self, batch: Any) -> R:
        """The function; without autograd's graph, which would tie a capture to an earlier step if it lived on."""
        result: R = map_tensors(self._step(batch), torch.Tensor.detach)
        return result

    @contextlib.contextmanager
    def _on_buffers(self) -> Iterator[None]:
        """Ids beyond the last bag are what is left of longer batches, and no fault."""
        for module in self._modules:
            module.ids_may_exceed_bags = True
        try:
            yield
        finally:
            for module in self._modules:
                module.ids_may_exceed_bags = False


def graph_step(step: Callable[[Any], R], *, max_ids: int | None = None) -> GraphStep[R]:
    """Runs `step(batch)` as one CUDA graph: forward, backward and fused update of the tiered modules it uses, plan and
    movement of rows included, dense layers and their optimizer.

    The first calls are the function itself, step after step as without a graph; then one is captured and all are
    replays, which copy the batch into buffers and launch once. The numbers are those of the function. Batches keep
    their form and shapes, but ids (and per-sample weights), whose number may differ up to `max_ids` (default: that of
    the first batch) where offsets name the end of the last bag. What the function returns is detached, and overwritten
    by the next call. Python in it runs while it is captured, and never again: learning rates of fused optimizers are
    told to each replay, all else that changes has to live on the GPU (torch's `capturable=True`).

    On the CPU, where there is nothing to capture, each call is the function. Raises `UnsupportedError` for what no
    graph can hold: tiers that the host takes part in, `check_ids="always"`; and `InvalidInputError` for a batch that
    does not fit.

    >>> bag = tieredemb.TieredEmbeddingBag(1000, 4, optimizer=tieredemb.SGD(lr=0.1))
    >>> def step(ids):
    ...     loss = bag(ids).square().mean()
    ...     loss.backward()
    ...     return loss.detach()
    >>> train = tieredemb.graph_step(step)
    >>> for ids in torch.randint(1000, (6, 8, 3)):
    ...     loss = train(ids)
    """
    return GraphStep(step, max_ids=max_ids)


def graph_forward(forward: Callable[[Any], R], *, max_ids: int | None = None) -> GraphStep[R]:
    """As `graph_step`, for a function that only looks up: it runs under `torch.no_grad()`."""
    return GraphStep(torch.no_grad()(forward), max_ids=max_ids)


def _check_capturable(module: TieredModule) -> None:
    config = module.tables.config
    if config.device.type != "cuda":
        raise UnsupportedError(
            f"one of the step's tiered modules is on {config.device}: a CUDA graph holds a step whose tables are all "
            f"on the GPU; move it there"
        )
    if config.check_ids == "always":
        raise UnsupportedError(
            "check_ids='always' waits for the GPU in every forward, which a CUDA graph cannot hold; build the module "
            "with check_ids='deferred'"
        )
    for group in module.tables.groups:
        if not group.cache.cold.device_readable and len(group.resident) < len(group.space):
            raise UnsupportedError(
                f"rows of the {group.cache.cold.kind} tier pass through the host, which a CUDA graph cannot hold; use "
                f"UnifiedMemory() or HostMemory()"
            )


class _Buffers:
    """A batch of the first one's form that every step reads: each is copied there."""

    def __init__(self, batch: Any, forwards: list[Forward], max_ids: int | None) -> None:
        self._max_ids = max_ids
        self._paths = [path for path, _ in tensors_of(batch)]
        lengths = _lengths(forwards)
        self._buffer: dict[Path, torch.Tensor] = {}
        self._any_length: set[Path] = set()
        device = forwards[0].module.tables.config.device
        made: dict[int, torch.Tensor] = {}
        for path, tensor in tensors_of(batch):
            buffer = made.get(id(tensor))
            if buffer is None:
                shape = tensor.shape
                if identity((tensor,)) in lengths:
                    shape = torch.Size([max(len(tensor), max_ids or 0)])
                buffer = made[id(tensor)] = torch.zeros(shape, dtype=tensor.dtype, device=device)
            if identity((tensor,)) in lengths:
                self._any_length.add(path)
            self._buffer[path] = buffer
        self.batch = map_tensors(batch, lambda tensor: made[id(tensor)])
        if any(tensor is not self._buffer.get(path) for path, tensor in tensors_of(self.batch)):
            raise InvalidInputError(
                "the batch has tensors inside of objects that cannot be copied; a captured step takes batches of "
                "mappings, sequences and dataclasses"
            )

    def load(self, batch: Any) -> None:
        """Copies a batch in. Raises `InvalidInputError`, before anything changes, for one that does not fit."""
        tensors = dict(tensors_of(batch))
        if list(tensors) != self._paths:
            raise InvalidInputError(
                f"the batch has tensors at {_names(list(tensors))}, the captured one had {_names(self._paths)}"
            )
        for path, tensor in tensors.items():
            self._check(path, tensor)
        for path, tensor in tensors.items():
            buffer = self._buffer[path]
            (buffer[: len(tensor)] if path in self._any_length else buffer).copy_(tensor, non_blocking=True)

    def _check(self, path: Path, tensor: torch.Tensor) -> None:
        buffer = self._buffer[path]
        if tensor.dtype != buffer.dtype:
            raise InvalidInputError(f"{_names([path])} is {tensor.dtype}, the captured one was {buffer.dtype}")
        if path in self._any_length and tensor.dim() == 1:
            if len(tensor) > len(buffer):
                raise InvalidInputError(
                    f"{_names([path])} has {len(tensor)} elements, the captured step takes at most {len(buffer)}; pass "
                    f"max_ids={len(tensor)} or more to graph_step"
                )
        elif tensor.shape != buffer.shape:
            raise InvalidInputError(
                f"{_names([path])} has shape {tuple(tensor.shape)}, the captured one had {tuple(buffer.shape)}; a "
                f"graph replays with the same shapes"
            )


def _lengths(forwards: list[Forward]) -> set[tuple[Any, ...]]:
    """The tensors whose length may differ: ids, and weights beside them, of forwards whose offsets end the last bag."""
    found: set[tuple[Any, ...]] = set()
    for forward in forwards:
        if forward.ends_bags:
            found |= {identity((tensor,)) for tensor in (forward.given[0], forward.weights) if tensor is not None}
    return found


def _names(paths: list[Path]) -> str:
    def name(path: Path) -> str:
        parts = (f"[{step!r}]" if kind == "item" else f".{step}" for kind, step in path)
        return "the batch" + "".join(parts)

    return ", ".join(map(name, paths)) or "no place"


@contextlib.contextmanager
def _beside() -> Iterator[None]:
    """On a stream of its own, as torch asks for the steps before a capture."""
    current = torch.cuda.current_stream()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)
