"""Where plans are made while a batch computes: a thread on the CPU; on a GPU a stream, on which batches come too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

import torch

from tieredemb.kernels.streams import side_stream
from tieredemb.modules.ahead import Planned
from tieredemb.modules.base import TieredModule
from tieredemb.pipeline.batches import map_tensors, tensors_of
from tieredemb.pipeline.lookups import Lookup


class Lanes:
    """One lane a device, on which plans follow one another in the order of the batches. To be closed."""

    def __init__(self, modules: Mapping[str, TieredModule]) -> None:
        devices = dict.fromkeys(module.tables.config.device for module in modules.values())
        self._lanes = {device: StreamLane(device) if device.type == "cuda" else ThreadLane() for device in devices}
        self._copies = next(iter(devices)) if len(devices) == 1 and next(iter(devices)).type == "cuda" else None

    def plan(self, lookup: Lookup) -> Planned:
        """Begins to plan a forward."""
        return lookup.module.plan_ahead(
            self._lanes[lookup.module.tables.config.device], *lookup.given, trains=lookup.trains
        )

    def fetch(self, batch: Any) -> tuple[Any, Callable[[], None]]:
        """The batch where the model is, if all of its tables are on one GPU: what lies in host memory is being copied
        there. And what is to be called before the batch is used."""
        if self._copies is None:
            return batch, _nothing
        lane = self._lanes[self._copies]
        assert isinstance(lane, StreamLane)
        return lane.copied(batch)

    def __enter__(self) -> Lanes:
        return self

    def __exit__(self, *_: tuple[type[BaseException] | None, BaseException | None, TracebackType | None]) -> None:
        for lane in self._lanes.values():
            lane.shutdown()


class ThreadLane(ThreadPoolExecutor):
    """One thread: it waits for storage and copies rows while others compute."""

    def __init__(self) -> None:
        from tieredemb.kernels.cpu import use_own_threads  # not before it is needed: numba takes a second to import

        super().__init__(1, thread_name_prefix="tieredemb-prefetch", initializer=use_own_threads)


class StreamLane(Executor):
    """A stream of a GPU: plans are launched there at once, and run when the device gets to them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # what moves rows is what a step waits for: its few blocks go before those of kernels that fill the GPU
        self.stream = side_stream(device, -1)

    def submit(self, function: Callable[..., Any], /, *args: Any, **keywords: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        self.stream.wait_stream(torch.cuda.current_stream(self.device))  # which may be writing the ids
        try:
            with torch.cuda.stream(self.stream):
                result = function(*args, **keywords)
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(result)
        return future

    def copied(self, batch: Any) -> tuple[Any, Callable[[], None]]:
        def to_device(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device.type != "cpu":
                return tensor
            pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
            return pinned.to(self.device, non_blocking=True)

        if all(tensor.is_cuda for _, tensor in tensors_of(batch)):
            return batch, _nothing
        with torch.cuda.stream(self.stream):
            moved = map_tensors(batch, to_device, lambda value: _moved(value, self.device))
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()

        def receive() -> None:
            stream = torch.cuda.current_stream(self.device)
            arrived.wait(stream)
            for _, tensor in tensors_of(moved):
                if tensor.is_cuda:
                    tensor.record_stream(stream)

        return moved, receive


def _nothing() -> None:
    pass


def _moved(value: Any, device: torch.device) -> Any:
    """An object where its own `to` brings it; one without stays."""
    to = getattr(value, "to", None)
    if not callable(to):
        return value
    try:
        return to(device, non_blocking=True)
    except TypeError:  # knows nothing of waiting
        return to(device)
