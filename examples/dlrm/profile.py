"""Where a step's time goes: some steps under torch's profiler, as a chrome trace and as a table."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

import torch
from torch.autograd.profiler_util import FunctionEventAvg
from torch.profiler import ProfilerActivity

from tieredemb.kernels.tracing import part_of

WAIT, WARM_UP, STEPS = 10, 5, 20  # steps before it, steps that only warm the profiler up, steps that count
RANGES = {  # of the library, in the order of a step
    "plan": "tieredemb.plan",
    "of it moving rows": "tieredemb.swap",
    "lookup": "tieredemb.lookup",
    "update of the rows": "tieredemb.update",
}
PARTS = {  # what kernels of a replayed graph are told apart into, as it has no ranges; None: all that is torch's
    "plan": "plan",
    "moving rows": "swap",
    "sort of occurrences": "sort",
    "lookup": "lookup",
    "update of the rows": "update",
    "dense layers, the rest": None,
}
Times = tuple[float | None, float]  # milliseconds a step, on the host and on the GPU


class StepProfile:
    """Profiles `STEPS` steps of a run; a context manager around it. The trace is written when they are over.
    `replays`: the steps are replays of a CUDA graph."""

    def __init__(self, path: Path, device: str, *, replays: bool = False) -> None:
        self.path = path
        self._on_gpu = device != "cpu"
        self._replays = replays
        self._steps = self._counted = 0
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]
        self._times: dict[str, Times] | None = None
        if replays:
            prepare_for_graphs()
        self._profiler = torch.profiler.profile(
            activities=activities,
            schedule=torch.profiler.schedule(wait=WAIT, warmup=WARM_UP, active=STEPS, repeat=1),
            on_trace_ready=self._finish,
        )

    def __enter__(self) -> StepProfile:
        self._profiler.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._profiler.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    def step(self) -> None:
        self._steps += 1
        self._profiler.step()  # type: ignore[no-untyped-call]

    def _finish(self, profiler: torch.profiler.profile) -> None:
        profiler.export_chrome_trace(str(self.path))
        events = profiler.key_averages()
        steps = self._counted = min(STEPS, max(1, self._steps - WAIT - WARM_UP))
        self._times = kernel_times(events, steps) if self._replays else range_times(events, steps)

    def summary(self) -> str:
        """Milliseconds a step of each part, on the host, and on a GPU there."""
        if self._times is None:
            return f"no profile: the run has fewer than {WAIT + WARM_UP + 1} steps"
        lines = [f"profile of {self._counted} steps, ms a step{' on the host, and on the GPU' if self._on_gpu else ''}"]
        for name, (host, gpu) in self._times.items():
            launched = " " * 10 if host is None else f"{host:10.3f}"
            lines.append(f"{name:<24}{launched}" + (f"{gpu:10.3f}" if self._on_gpu else ""))
        if "plan" not in self._times:
            lines.append(f"{'plan':<24}  beside, in a thread of its own")
        return "\n".join([*lines, f"trace written to {self.path}"])


def prepare_for_graphs() -> None:
    """What torch's profiler sees to for torch's own CUDA graphs (torch/profiler/profiler.py): CUPTI, once it was torn
    down and starts again, has crashed under them."""
    os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
    os.environ.setdefault("TEARDOWN_CUPTI", "0")


def range_times(events: Iterable[FunctionEventAvg], steps: int) -> dict[str, Times]:
    """Of steps that run one by one: by the ranges of the library. A range is an event of the host, which knows what it
    launched, and one of the GPU."""
    found = {str(event.key): event for event in events if event.device_type == torch.autograd.DeviceType.CPU}
    return {"whole step": _of_range(found, "ProfilerStep*", steps)} | {
        name: _of_range(found, key, steps) for name, key in RANGES.items() if key in found
    }


def kernel_times(events: Iterable[FunctionEventAvg], steps: int) -> dict[str, Times]:
    """Of replayed steps: by the names of the kernels. Those of a plan made ahead run beside others, so that a step may
    take less than their sum."""
    events = list(events)
    parts: defaultdict[str | None, float] = defaultdict(float)
    for event in events:
        if event.device_type != torch.autograd.DeviceType.CPU and not event.is_user_annotation:
            parts[part_of(str(event.key))] += event.self_device_time_total / 1e3 / steps
    host, _ = range_times(events, steps)["whole step"]
    return {"whole step": (host, sum(parts.values()))} | {name: (None, parts[part]) for name, part in PARTS.items()}


def _of_range(found: dict[str, FunctionEventAvg], key: str, steps: int) -> Times:
    event = found.get(key)
    if event is None:
        return 0.0, 0.0
    return event.cpu_time_total / 1e3 / steps, event.device_time_total / 1e3 / steps
