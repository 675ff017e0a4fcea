"""The function that a captured step runs, and what is known of it before it is captured."""

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
EAGER_STEPS = 2  # on the buffers, before the capture: what is made at a first use must not be captured
DDP_STEPS = 11  # the same of what has DistributedDataParallel, by torch's notes on CUDA graphs


class StepFunction(Generic[R]):
    """A user's function of a batch, and what it has shown on a first one: the `modules` that it looks up in, on one
    `device`, of which tensors (`lookups`), and whether it `trains` any.
    `eager_steps`: how many run on buffers before a capture · `number`: among those that ranks do together ·
    `gains_ahead`: whether going ahead of its batch hides anything · `locks`: for replays, which plan, look up and
    update, and for captures · `divisions`: of capacities that its caches share; of several ranks none, as each would
    divide them at another step."""

    number = 0  # of one that no ranks agree on

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
        self._torch_optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # whose step it calls
        wholes = dict.fromkeys(engine.tables.whole.placed for engine in self._engines)
        self._wholes = [(placed, placed.now) for placed in wholes]  # which a move replaces
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
        """Whether rows come and go, or plans take the GPU longer than it takes the host to go ahead of a batch."""
        groups = [group for engine in self._engines for group in engine.tables.whole.groups]
        if any(len(group.resident) < len(group.space) for group in groups):
            return True
        ids = [forward.given[0] for forward in forwards]
        return sum(each.numel() for each in ids if isinstance(each, torch.Tensor)) >= LARGE

    def is_current(self) -> bool:
        """Whether tables are where they were, and train if they did: what was captured counts on it."""
        for placed, place in self._wholes:
            if placed.now is not place:
                return False
        if not self._trained_as.is_still_so():
            return False
        return self._alike == self._optimizers_alike()

    def _optimizers_alike(self) -> list[int]:
        """Of the fused optimizers of tables that share a cache, which are alike, whose updates are one launch: the
        number of the first one like each."""
        first: dict[Hashable, int] = {}
        return [first.setdefault(each.alike(), number) for number, each in enumerate(self._fused)]

    def accumulates(self) -> bool:
        """Whether gradients are being summed around the call, which a graph knows nothing of."""
        for engine in self._engines:  # noqa: SIM110 - asked of each replay, and a generator costs most of it
            if engine.accumulates:
                return True
        return False

    def __call__(self, batch: Any) -> R:
        """Runs the function, its backward on this thread: which alone passes the locks that a capture holds, and needs
        none of autograd's own, where another thread's backward may wait for them. Outside of captures too, as libraries
        keep for each thread what they make at a first use."""
        with torch.autograd.set_multithreading_enabled(False):
            return detached(self._function, batch)

    def run_observed(self, batch: Any) -> R:
        """As a call, before a capture or in it, which needs to know the leaves of the backward and the step's
        optimizers."""
        with self._leaves.observe(captured=torch.cuda.is_current_stream_capturing()), self._observe_optimizers():
            return self(batch)

    @contextlib.contextmanager
    def _observe_optimizers(self) -> Iterator[None]:
        """Those of the last eager run are known: a step may have others than once before."""
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
        """Ids beyond the last bag are what is left of longer batches, and no fault."""
        thread = threading.get_ident()
        for engine in self._engines:
            engine.ids_may_exceed_bags.add(thread)
        try:
            yield
        finally:
            for engine in self._engines:
                engine.ids_may_exceed_bags.discard(thread)

    def beside(self, run: Callable[[], R]) -> R:
        """What `run` returns, on a stream of its own, as torch requires for the steps before a capture. The caller uses
        the result on the current stream: `record_stream` keeps its memory until that stream has read it."""
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
        """Captures what is launched inside, into the memory of the step's other graphs, of which one runs at a time.
        Its caller holds `locks`, until a replay has done what the capture has put on the caches' books: another
        thread's call would become part of the graph, or end it. Threads that use none of the caches, such as a loader's
        that pins memory, may go on, but not wait for the whole device, as torch's `synchronize` does. What fails inside
        leaves all as it was. Raises `UnsupportedError`, before anything is captured, where an earlier graph of
        autograd's would end the capture, or a torch optimizer's step."""
        self.before_replay()  # what the host has to say is said outside
        self._leaves.check_free()
        check_optimizers(self._torch_optimizers)
        captured = Capture(graph, self._captures, next((each.pool() for each in self._graphs), None))
        with self._leaves.grads_kept(), capture_lock(self.device), no_collector(), captured:
            yield
        self._graphs.add(graph)

    def before_replay(self) -> None:
        """What the host does at a forward and at an update, which a replay is neither of."""
        for report in self._reports:
            report.check(NOT_BEGUN)
        for reports in self._other_reports:
            for report in reports:
                report.check(NOT_BEGUN)
        self._options.send()

    def after_capture(self) -> None:
        """The caches go on from the current stream, where replays run, and not from the one that was captured."""
        for cache in self.caches:
            with cache.entered(checked=True):  # what was left for later is to come behind the first replay
                pass


def check_capturable(module: LookupModule, device: torch.device) -> None:
    """Raises `UnsupportedError` for what no graph on `device` can hold."""
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
