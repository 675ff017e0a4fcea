"""Executors of plans that are made while a batch computes: on the CPU a thread; on a GPU a stream, and a thread if rows
pass through the host and that takes long."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter
from types import TracebackType
from typing import Any

import torch

from tieredemb.cache.base import AHEAD, Cache
from tieredemb.cache.locks import Locks
from tieredemb.kernels.streams import current_stream, on_device, on_stream, side_stream
from tieredemb.modules.lookup_module import LookupModule
from tieredemb.pipeline.batches import are_on_gpu, do_nothing, map_tensors, tensors_of
from tieredemb.pipeline.lookups import LookupSpec
from tieredemb.pipeline.plan_groups import PlanGroups, PlannedGroup, plan_groups
from tieredemb.step.planned_forwards import CompletedFuture, PlanExecutor
from tieredemb.step.program import Call
from tieredemb.tables.table_set import Place


class PlanExecutors:
    """One executor for the modules of each device and kind, which makes plans in the order of the batches. A context
    manager."""

    def __init__(self, modules: Mapping[str, LookupModule]) -> None:
        self._modules = list(modules.values())
        kinds = dict.fromkeys(map(kind_of, modules.values()))
        self._executors: dict[tuple[torch.device, bool], PlanExecutor] = {kind: _executor(*kind) for kind in kinds}
        self._found: dict[LookupModule, tuple[weakref.ref[Place], PlanExecutor]] = {}
        devices = {device for device, _ in kinds}
        self._groups = PlanGroups()
        self._streams = [each for each in self._executors.values() if isinstance(each, StreamExecutor)]
        self._copies = _Copies(devices.pop()) if len(devices) == 1 and next(iter(kinds))[0].type == "cuda" else None

    def plan(self, lookups: Sequence[LookupSpec], planned: list[PlannedGroup]) -> None:
        """Begins to plan the forwards of a batch, `lookups`, and appends the plans to `planned`, so that after an
        interrupt these are known. All plans on a stream are made in one go."""
        if not lookups:
            return
        with contextlib.ExitStack() as entered:
            for stream in self._streams:
                on_it = [lookup for lookup in lookups if self._executor_of(lookup.module) is stream]
                entered.enter_context(stream.planning(on_it))
            if len(lookups) == 1:
                ((module, given, trains),) = lookups
                kind = AHEAD._replace(trains=trains)
                planned.append((module.planned, module.plan_ahead(self._executor_of(module), *given, kind=kind)))
            else:
                plan_groups(self._groups.of(lookups), self._executor_of, planned)

    def _executor_of(self, module: LookupModule) -> PlanExecutor:
        place = module.tables.placed.now
        found = self._found.get(module)
        if found is None or found[0]() is not place:
            found = self._found[module] = weakref.ref(place), self._executors[kind_of(module)]
        return found[1]

    def fetch(self, batch: Any) -> tuple[Any, Callable[[], None]]:
        """The batch, and a function to be called before it is used. If all tables of the model are on one GPU, tensors
        in host memory are being copied there."""
        if self._copies is None:
            return batch, do_nothing
        batch, receive = self._copies.fetch(batch)
        for executor in self._executors.values():
            if isinstance(executor, StreamExecutor | WorkerExecutor):
                executor.arrived = self._copies.arrived
        return batch, receive

    def __enter__(self) -> PlanExecutors:
        return self

    def __exit__(self, *_: tuple[type[BaseException] | None, BaseException | None, TracebackType | None]) -> None:
        """Waits for plans that are being made; but not while this thread holds a lock that they may wait for, as after
        Ctrl-C just before a lock was released, which frames of the traceback still hold. Such plans are dropped once
        they are made."""
        caches = {group.cache for module in self._modules for group in module.tables.groups}
        waits = not any(cache.is_held() for cache in caches)
        for executor in self._executors.values():
            executor.shutdown(wait=waits)


def kind_of(module: LookupModule) -> tuple[torch.device, bool]:
    """The device of a module, and whether its plans wait for the host there."""
    waits = any(not group.cache.cold.device_readable for group in module.tables.groups)
    return module.tables.config.device, waits


def _executor(device: torch.device, waits: bool) -> PlanExecutor:
    if device.type != "cuda":
        return ThreadExecutor()
    return WorkerExecutor(device) if waits else StreamExecutor(device)


class ThreadExecutor(ThreadPoolExecutor, PlanExecutor):
    """One thread, which waits for storage and copies rows while other threads compute."""

    on_thread = True

    def __init__(self) -> None:
        super().__init__(1, thread_name_prefix="tieredemb-prefetch")


class StreamExecutor(PlanExecutor):
    """A stream of a GPU: the device's one for all of these, or the given one. Plans are launched there at once, inside
    of `planning`, and run when the device gets to them."""

    on_thread = False

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self.device = device
        # a step waits for rows that move: their few blocks go before those of kernels that fill the GPU
        self.stream = stream or side_stream(device, -1)
        self.arrived: torch.cuda.Event | None = None  # after the batches copied so far
        self.behind: torch.cuda.Stream | None = None  # a stream that plans wait for, if any
        self._caches: dict[Cache, None] = {}
        self._locks = Locks(())

    def submit(self, function: Callable[..., Any], /, *args: Any, **keywords: Any) -> Future[Any]:
        self.wait_to_plan()
        return _called(lambda: function(*args, **keywords))

    def wait_to_plan(self) -> None:
        """Has the current stream wait for the stream `behind`."""
        if self.behind is not None:
            current_stream(self.device.index).wait_stream(self.behind)

    @contextlib.contextmanager
    def planning(self, lookups: Sequence[LookupSpec]) -> Iterator[Collection[Cache]]:
        """Inside, this thread plans the forwards `lookups` in one go, on this stream; yields their caches."""
        if not lookups:
            yield ()
            return
        engines = [engine for lookup in lookups for engine in lookup.module.engines]
        caches = {group.cache: None for engine in engines for group in engine.tables.groups}
        if caches != self._caches:
            self._caches, self._locks = caches, Locks(caches, rows=False)
        inputs = [part for lookup in lookups for part in lookup.given]
        # before the stream is used: a capture on another thread may have forked into it
        with self._locks.held():
            self.stream.wait_stream(current_stream(self.device.index))  # it may be writing the ids
            if self.arrived is not None:
                self.arrived.wait(self.stream)
            with on_stream(self.stream), contextlib.ExitStack() as ahead:
                for cache in caches:
                    ahead.enter_context(cache.ahead(inputs, None))
                    inputs = []
                yield caches


class WorkerExecutor(ThreadExecutor):
    """A thread that plans on a stream of a GPU, for plans that wait for storage.

    Short plans run on the submitting thread, and are completed with the next plan, or by their forward: two threads
    that launch at the same time compete for the interpreter, and a plan of 1.5 ms takes 2.5 beside a step, more than
    the thread saves.
    """

    QUICK = 0.004  # seconds, to end a plan and begin the next

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.stream = side_stream(device, -1, "worker")  # no capture may fork into it
        self.arrived: torch.cuda.Event | None = None
        self._is_quick = True
        self._begun: weakref.WeakSet[Call] = weakref.WeakSet()  # planned on the submitting thread, perhaps incomplete
        self._under_way: set[Future[Any]] = set()

    def wait_for_inputs(self) -> None:
        if self.arrived is not None:
            self.arrived.wait(current_stream(self.device.index))

    def submit(self, function: Callable[..., Any], /, *args: Any, **keywords: Any) -> Future[Any]:
        arrived, written = self.arrived, torch.cuda.Event()
        written.record(current_stream(self.device.index))

        def run(*, whole: bool) -> Any:
            start = perf_counter()
            try:
                with on_device(self.device), on_stream(self.stream):
                    written.wait(self.stream)
                    if arrived is not None:
                        arrived.wait(self.stream)
                    call = function(*args, **keywords)
                    if whole:
                        call.complete()  # if that fails, the forward plans anew
                    return call
            finally:
                self._is_quick = perf_counter() - start < self.QUICK

        if self._is_quick and not self._under_way:  # plans stay in order
            future = _called(lambda: run(whole=False))
            if future.exception() is None:
                self._begun.add(future.result())
            return future
        for call in list(self._begun):  # else their forwards would wait for the thread's plans
            call.complete()
        self._begun.clear()
        future = super().submit(lambda: run(whole=True))
        self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)
        return future


def _called(function: Callable[[], Any]) -> Future[Any]:
    """Calls the function; returns its result or error."""
    try:
        return CompletedFuture(function())
    except Exception as error:
        return CompletedFuture(None, error)


class _Copies:
    """Copies batches to a GPU, on a side stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.arrived: torch.cuda.Event | None = None  # after the last batch was copied

    def fetch(self, batch: Any) -> tuple[Any, Callable[[], None]]:
        """The batch on the device, perhaps still being copied, and a function to be called before it is used."""
        if are_on_gpu(batch):
            return batch, do_nothing
        with torch.cuda.stream(side_stream(self._device)):
            moved = map_tensors(batch, self._to_device, lambda value: _moved(value, self._device))
            self.arrived = arrived = torch.cuda.Event()
            arrived.record(current_stream())

        def receive() -> None:
            stream = current_stream(self._device.index)
            arrived.wait(stream)
            for _, tensor in tensors_of(moved):
                if tensor.is_cuda:
                    tensor.record_stream(stream)

        return moved, receive

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "cpu":
            return tensor
        pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
        return pinned.to(self._device, non_blocking=True)


def _moved(value: Any, device: torch.device) -> Any:
    """An object moved by its own `to`; without that, unchanged."""
    to = getattr(value, "to", None)
    if not callable(to):
        return value
    try:
        return to(device, non_blocking=True)
    except TypeError:  # it has no `non_blocking`
        return to(device)
