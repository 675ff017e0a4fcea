"""The function of a captured step, and what is known of it before the capture."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tieredemb.cache.device.cache import DeviceCache
from tieredemb.cache.device.planner import LARGE
from tieredemb.cache.locks import Locks
from tieredemb.errors import UnsupportedError
from tieredemb.kernels.captures import Capture, no_collector
from tieredemb.kernels.streams import capture_lock, on_device, own_stream, side_stream
from tieredemb.modules.forwards import Forward
from tieredemb.modules.lookup_module import LookupModule
from tieredemb.pipeline.batches import detached, tensors_of
from tieredemb.pipeline.leaves import Leaves
from tieredemb.pipeline.lookups import Learned, LookupSpec, divisions_of, learn
from tieredemb.pipeline.trained_as import TrainedAs
from tieredemb.pipeline.uncapturable import check_optimizers
from tieredemb.tables.fused_optimizer import FusedOptimizer
from tieredemb.tables.group import DeviceGroup
from tieredemb.tables.sent_options import SentOptions
from tieredemb.tables.table_set import NOT_BEGUN

R = TypeVar("R")
EAGER_STEPS = 2  # on the buffers, before the capture: first uses, which allocate or compile, must not be captured
DDP_STEPS = 11  # the same with DistributedDataParallel, by torch's notes on CUDA graphs


class StepFunction(Generic[R]):
    """A user's function of a batch, and what a first batch has shown: the `modules` that it looks up in, on one
    `device`, with which tensors (`lookups`), and whether it `trains` any. `eager_steps`: how many run on buffers before
    a capture · `number`: of the step, on several ranks · `gains_ahead`: whether going ahead hides anything · `locks`:
    for replays, which plan, look up and update, and for captures · `divisions`: of capacities that its caches share;
    none on several ranks, as each would divide at another step."""

    number = 0  # without an agreement of ranks

    def __init__(
        self,
        function: Callable[[Any], R],
        batch: Any,
        forwards: Sequence[Forward],
        eager_steps: int = EAGER_STEPS,
    ) -> None:
        self.eager_steps = eager_steps
        self.modules = list(dict.fromkeys(forward.module for forward in forwards))
        self._engines = [engine for module in self.modules for engine in module.engines]
        self.device = self.modules[0].tables.config.device
        self.trains = any(each.trains for each in forwards)
        self.lookups: Learned = learn(batch, [LookupSpec(each.module, each.given, each.trains) for each in forwards])[0]
        self.caches = self._caches()
        of_ranks = any(module.agreement is not None for module in self.modules)
        self.divisions = [] if of_ranks else divisions_of(self.modules)
        self.gains_ahead = self._gains_ahead(forwards)
        self.locks = Locks(self.caches)
        self._function = function
        self._leaves = Leaves(self.device)
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self._torch_optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # whose step() it calls
        wholes = dict.fromkeys(engine.tables.whole.placed for engine in self._engines)
        self._wholes = [(placed, placed.now) for placed in wholes]  # a move replaces these
        self._trained_as = TrainedAs(self.modules)
        places = [engine.tables.placed.now for engine in self._engines]
        self._reports = [place.faults for place in places if place.faults is not None]
        self._other_reports = list({id(each): each for each in (place.other_faults for place in places)}.values())
        trained = [
            engine.optimizer
            for module in self.modules
            if self.trains and module.is_trainable
            for engine in module.engines
        ]
        self._options = SentOptions([optimizer for optimizer in trained if optimizer is not None])
        optimizers = [engine.optimizer for engine in self._engines if engine.tables.step_time is not None]
        self._fused = [each for each in optimizers if isinstance(each, FusedOptimizer)]
        self._alike = self._optimizers_alike()
        with on_device(self.device):
            self._beside = own_stream(self, self.device)
            self._captures = side_stream(self.device, 0, "capture")

    def _caches(self) -> list[DeviceCache]:
        groups = (group for engine in self._engines for group in engine.tables.groups)
        return list(dict.fromkeys(group.cache for group in groups if isinstance(group, DeviceGroup)))

    def _gains_ahead(self, forwards: Sequence[Forward]) -> bool:
        """Whether rows move, or plans take the GPU longer than going ahead costs the host."""
        groups = [group for engine in self._engines for group in engine.tables.whole.groups]
        if any(len(group.resident) < len(group.space) for group in groups):
            return True
        ids = [forward.given[0] for forward in forwards]
        return sum(each.numel() for each in ids if isinstance(each, torch.Tensor)) >= LARGE

    def is_current(self) -> bool:
        """Whether tables have not moved, and train as before, as a capture relies on."""
        for placed, place in self._wholes:
            if placed.now is not place:
                return False
        if not self._trained_as.is_still_so():
            return False
        return self._alike == self._optimizers_alike()

    def _optimizers_alike(self) -> list[int]:
        """For each fused optimizer of tables that share a cache, the number of the first one with equal
        hyperparameters: their updates are one launch."""
        first: dict[Hashable, int] = {}
        return [first.setdefault(each.alike(), number) for number, each in enumerate(self._fused)]

    def accumulates(self) -> bool:
        """Whether the call is inside `accumulate()`, which a graph cannot take part in."""
        for engine in self._engines:  # noqa: SIM110 - asked of each replay, and a generator costs most of it
            if engine.accumulates:
                return True
        return False

    def __call__(self, batch: Any) -> R:
        """Calls the function, with its backward on this thread: only this thread passes the locks that a capture holds,
        and autograd's own threads may be busy with another backward that waits for these locks. The same outside of
        captures, as libraries have state for each thread, made at its first use."""
        with torch.autograd.set_multithreading_enabled(False):
            return detached(self._function, batch)

    def run_observed(self, batch: Any) -> R:
        """As a call, before or in a capture: observes the leaves of the backward and the optimizers of the step."""
        with self._leaves.observe(captured=torch.cuda.is_current_stream_capturing()), self._observe_optimizers():
            return self(batch)

    @contextlib.contextmanager
    def _observe_optimizers(self) -> Iterator[None]:
        """Notes the optimizers of the last eager run, as a step may change them."""
        thread = threading.get_ident()
        if not torch.cuda.is_current_stream_capturing():
            self._torch_optimizers.clear()

        def observe(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if threading.get_ident() == thread:
                self._torch_optimizers.add(optimizer)

        hook = register_optimizer_step_pre_hook(observe)
        try:
            yield
        finally:
            hook.remove()

    @contextlib.contextmanager
    def on_buffers(self) -> Iterator[None]:
        """Inside, ids beyond the last bag are remains of longer batches, and no fault."""
        thread = threading.get_ident()
        for engine in self._engines:
            engine.ids_may_exceed_bags.add(thread)
        try:
            yield
        finally:
            for engine in self._engines:
                engine.ids_may_exceed_bags.discard(thread)

    def beside(self, run: Callable[[], R]) -> R:
        """Calls `run` on a side stream, as torch requires for the steps before a capture; returns its result. The
        caller uses that on the current stream: `record_stream` keeps its memory until that stream has read it."""
        current = torch.cuda.current_stream(self.device)
        self._beside.wait_stream(current)
        try:
            with torch.cuda.stream(self._beside):
                result = run()
        finally:
            current.wait_stream(self._beside)
        for _, tensor in tensors_of(result):
            if tensor.is_cuda:
                tensor.record_stream(current)
        return result

    @contextlib.contextmanager
    def capture(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Captures the launches made inside, in the memory of the step's other graphs, of which one runs at a time. The
        caller holds `locks` until a replay has done what the capture entered in the ledgers: another thread's call
        would become part of the graph, or end it. Threads that use none of the caches, such as a loader's that pins
        memory, may go on, but not wait for the whole device, as torch's `synchronize` does. A failure inside changes
        nothing. Raises `UnsupportedError`, before anything is captured, if an earlier graph of autograd or a torch
        optimizer's step would end the capture."""
        self.before_replay()  # the host's part is done outside of the capture
        self._leaves.check_free()
        check_optimizers(self._torch_optimizers)
        captured = Capture(graph, self._captures, next((each.pool() for each in self._graphs), None))
        with self._leaves.grads_kept(), capture_lock(self.device), no_collector(), captured:
            yield
        self._graphs.add(graph)

    def free(self, graph: torch.cuda.CUDAGraph) -> None:
        """Frees what a captured graph holds, whoever refers to it; it is not replayed again."""
        self._graphs.discard(graph)
        graph.reset()

    def before_replay(self) -> None:
        """Does the host's part of forward and update, which a replay does not do: raises reported errors, sends
        options."""
        for report in self._reports:
            report.check(NOT_BEGUN)
        for reports in self._other_reports:
            for report in reports:
                report.check(NOT_BEGUN)
        self._options.send()

    def after_capture(self) -> None:
        """Has the caches follow the current stream, where replays run, and not the captured one."""
        for cache in self.caches:
            with cache.entered(checked=True):  # deferred rows are filled after the first replay
                pass


def check_capturable(module: LookupModule, device: torch.device) -> None:
    """Raises `UnsupportedError` for a module that no graph on `device` can contain."""
    if module.agreement is not None:
        module.agreement.check()
    config = module.tables.config
    if config.device != device:
        raise UnsupportedError(
            f"one of the step's tiered modules is on {config.device}, another on {device}: a CUDA graph holds a step "
            f"whose tables are all on one GPU; move them there"
        )
    if config.check_ids == "always":
        raise UnsupportedError(
            "check_ids='always' waits for the GPU in every forward, which a CUDA graph cannot hold; build the module "
            "with check_ids='deferred'"
        )
    for group in (group for engine in module.engines for group in engine.tables.groups):
        if not group.cache.cold.device_readable and len(group.resident) < len(group.space):
            raise UnsupportedError(
                f"rows of the {group.cache.cold.kind} tier pass through the host, which a CUDA graph cannot hold; use "
                f"UnifiedMemory() or HostMemory()"
            )
