"""Timers of the GPU benchmarks: device events around one kernel, and a run of steps that nothing interrupts."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import torch

from benchmarks.timing import Quantiles

ROUNDS, WARM_UP = 30, 3
QUEUED = 40  # steps that `run_queued` times: the driver holds some 1,000 launches back
SLEEP = 60_000_000  # cycles of the GPU, some 30 ms, in which Python enqueues these


def timed(
    run: Callable[[], object], *, graph: bool = True, prepare: Callable[[int], object] | None = None
) -> Quantiles:
    """Milliseconds of `run`, captured in a CUDA graph: a launch from Python would cost as much as a short kernel.

    `prepare`: called with 0, 1, … (`ROUNDS` + `WARM_UP` + 1 times) before each run, outside its time.
    """
    prepare = prepare or (lambda _: None)
    for i in range(WARM_UP):
        prepare(i)
        run()
    torch.cuda.synchronize()
    repeat = run
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            run()
        repeat = captured.replay
        prepare(WARM_UP)
        repeat()  # the first replay uploads the graph
    samples = []
    for i in range(ROUNDS):
        prepare(WARM_UP + 1 + i)
        start, stop = _event(), _event()
        start.record()
        repeat()
        stop.record()
        stop.synchronize()
        samples.append(start.elapsed_time(stop))
    return Quantiles.of(samples)


def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, device="cuda")


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """A run of steps, or several. `mean_ms`: wall time a step, of several runs the median · `host_ms`: of it, time
    until Python had enqueued everything (close to the mean: the GPU waits for Python) · `step_ms`: each step by device
    events, float64 (steps,)."""

    mean_ms: float
    host_ms: float
    step_ms: np.ndarray[Any, Any]

    @classmethod
    def of_all(cls, runs: Sequence[StepTimes]) -> StepTimes:
        """Of equally long runs of one kind of step, as one."""
        mean, host = (float(np.median([getattr(run, name) for run in runs])) for name in ("mean_ms", "host_ms"))
        return cls(mean_ms=mean, host_ms=host, step_ms=np.concatenate([run.step_ms for run in runs]))

    def quantiles(self) -> Quantiles:
        """The mean wall time in the place of the median, with the 20/80 percentiles of the events."""
        p20, p80 = (float(value) for value in np.percentile(self.step_ms, (20, 80)))
        return Quantiles(self.mean_ms, p20, p80, len(self.step_ms))

    def __str__(self) -> str:
        p50, p99 = np.percentile(self.step_ms, (50, 99))
        return f"p50 {p50:.3f} ms, p99 {p99:.3f} ms, host {self.host_ms:.3f} ms"


class Batches(Protocol):
    """A sequence of batches, or what prefetches one."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[torch.Tensor]: ...


def run_steps(step: Callable[[torch.Tensor], object], batches: Batches, device: torch.device) -> StepTimes:
    """Runs `step` on every batch, one after the other; synchronises before the first and after the last only.
    Collects no garbage: `cuda_runs` does before what it reports, as that would take longer than many steps."""
    marks = _Marks(device, len(batches) + 1)
    synchronize(device)
    start = perf_counter()
    marks.mark(0)
    for i, batch in enumerate(batches, start=1):
        step(batch)
        marks.mark(i)
    enqueued = perf_counter() - start
    synchronize(device)
    wall = perf_counter() - start
    return StepTimes(
        mean_ms=1e3 * wall / len(batches), host_ms=1e3 * enqueued / len(batches), step_ms=marks.differences_ms()
    )


def run_queued(step: Callable[[torch.Tensor], object], batches: Iterable[torch.Tensor]) -> StepTimes:
    """What `QUEUED` steps take the GPU alone, which sleeps until Python has enqueued all of them."""
    marks = _Marks(torch.device("cuda"), QUEUED + 1)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP)  # type: ignore[no-untyped-call]
    start = perf_counter()
    marks.mark(0)
    for i, batch in enumerate(islice(batches, QUEUED), start=1):
        step(batch)
        marks.mark(i)
    enqueued = perf_counter() - start
    if marks.events[0].query():
        raise RuntimeError(f"Python needed {enqueued * 1e3:.1f} ms for {QUEUED} steps, and the GPU slept for less")
    torch.cuda.synchronize()
    times = marks.differences_ms()
    return StepTimes(mean_ms=float(times.mean()), host_ms=1e3 * enqueued / QUEUED, step_ms=times)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def allocated_bytes(device: torch.device) -> int:
    """Bytes that torch has handed out on the card; 0 on the CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


class _Marks:
    """Points in the work of a device: events on a GPU, the host's clock on the CPU."""

    def __init__(self, device: torch.device, count: int) -> None:
        self.events = [_event() for _ in range(count)] if device.type == "cuda" else []
        self.seconds = np.zeros(count)

    def mark(self, i: int) -> None:
        if self.events:
            self.events[i].record()
        else:
            self.seconds[i] = perf_counter()

    def differences_ms(self) -> np.ndarray[Any, Any]:
        if not self.events:
            return np.diff(self.seconds) * 1e3
        pairs = zip(self.events, self.events[1:], strict=False)
        return np.array([earlier.elapsed_time(later) for earlier, later in pairs])


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
