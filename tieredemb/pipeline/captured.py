"""What captured steps have in common, whether they plan their own batch or the next one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch

from tieredemb.cache.device_cache import DeviceCache
from tieredemb.errors import UnsupportedError
from tieredemb.modules.base import TieredModule
from tieredemb.modules.forwards import Forward
from tieredemb.modules.group import DeviceGroup
from tieredemb.pipeline.batches import map_tensors
from tieredemb.pipeline.buffers import Buffers
from tieredemb.pipeline.lookups import Lookup, learn

R = TypeVar("R")
EAGER_STEPS = 2  # on the buffers, before the capture: what is made at a first use must not be captured


class StepFunction(Generic[R]):
    """A user's function of a batch, and what it has shown on a first one: the `modules` that it looks up in, and of
    which tensors. Raises `UnsupportedError` for modules that no graph can hold."""

    def __init__(self, function: Callable[[Any], R], batch: Any, forwards: Sequence[Forward], buffers: Buffers) -> None:
        self.modules = list(dict.fromkeys(forward.module for forward in forwards))
        self.device = self.modules[0].tables.config.device
        self.buffers = buffers
        self.lookups, _ = learn(batch, [Lookup(each.module, each.given, each.trains) for each in forwards])
        self.trains = any(each.trains for each in forwards)
        self._function = function
        self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def caches(self) -> list[DeviceCache]:
        groups = (group for module in self.modules for group in module.tables.groups)
        return [group.cache for group in groups if isinstance(group, DeviceGroup)]

    def __call__(self, batch: Any) -> R:
        return detached(self._function, batch)

    @contextlib.contextmanager
    def on_buffers(self) -> Iterator[None]:
        """Ids beyond the last bag are what is left of longer batches, and no fault."""
        for module in self.modules:
            module.ids_may_exceed_bags = True
        try:
            yield
        finally:
            for module in self.modules:
                module.ids_may_exceed_bags = False

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """On a stream of its own, as torch asks for the steps before a capture."""
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    def before_replay(self) -> None:
        """What the host does at a forward and at an update, which a replay is neither of."""
        for module in self.modules:
            module.tables.check_earlier()
            if module.is_trainable:
                module.fused_optimizer.upload()


def detached(function: Callable[[Any], R], batch: Any) -> R:
    """What the function returns, without autograd's graph: it would tie a capture to an earlier step if it lived on."""
    result: R = map_tensors(function(batch), torch.Tensor.detach)
    return result


def check_capturable(module: TieredModule) -> None:
    """Raises `UnsupportedError` for what no graph can hold."""
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


def capture(graph: torch.cuda.CUDAGraph, pool: Any = None) -> contextlib.AbstractContextManager[None]:
    """Captures what is launched inside. Other threads, such as a loader's that pins memory, may go on."""
    return torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local")
