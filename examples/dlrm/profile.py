"""Where a step's time goes: some steps under torch's profiler, as a chrome trace and as a table."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import torch
from torch.profiler import ProfilerActivity

WAIT, WARM_UP, STEPS = 10, 5, 20  # steps before it, steps that only warm the profiler up, steps that count
RANGES = {  # of the library, in the order of a step
    "plan": "tieredemb.plan",
    "of it moving rows": "tieredemb.swap",
    "lookup": "tieredemb.lookup",
    "update of the rows": "tieredemb.update",
}


class StepProfile:
    """Profiles `STEPS` steps of a run; a context manager around it. The trace is written when they are over."""

    def __init__(self, path: Path, device: str) -> None:
        self.path = path
        self._on_gpu = device != "cpu"
        self._steps = self._counted = 0
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]
        self._ranges: dict[str, tuple[float, float]] | None = None
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
        # a range is an event of the host, which knows what it launched, and one of the GPU
        events = profiler.key_averages()
        found = {event.key: event for event in events if event.device_type == torch.autograd.DeviceType.CPU}
        steps = self._counted = min(STEPS, max(1, self._steps - WAIT - WARM_UP))
        self._ranges = {"whole step": _times(found, "ProfilerStep*", steps)}
        self._ranges |= {name: _times(found, key, steps) for name, key in RANGES.items() if key in found}

    def summary(self) -> str:
        """Milliseconds a step of each part, on the host, and on a GPU there."""
        if self._ranges is None:
            return f"no profile: the run has fewer than {WAIT + WARM_UP + 1} steps"
        lines = [f"profile of {self._counted} steps, ms a step{' on the host, and on the GPU' if self._on_gpu else ''}"]
        for name, (host, gpu) in self._ranges.items():
            lines.append(f"{name:<24}{host:10.3f}" + (f"{gpu:10.3f}" if self._on_gpu else ""))
        if "plan" not in self._ranges:
            lines.append(f"{'plan':<24}  beside, in a thread of its own")
        return "\n".join([*lines, f"trace written to {self.path}"])


def _times(
    found: dict[str, torch.autograd.profiler_util.FunctionEventAvg], key: str, steps: int
) -> tuple[float, float]:
    """Milliseconds a step, on the host and on the GPU."""
    event = found.get(key)
    if event is None:
        return 0.0, 0.0
    return event.cpu_time_total / 1e3 / steps, event.device_time_total / 1e3 / steps
