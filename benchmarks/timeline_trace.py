"""Training steps in a chrome trace of `torch.profiler`: what each ran on the GPU, and when.

What a step has launched belongs to it, by the correlation that a launch and its kernels share; all kernels of a
replayed graph have that of the graph's launch. A step lasts until the next one begins on the GPU: the host is ahead, so
that its own clock says nothing of it.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tieredemb.kernels.tracing import part_of

GROUPS = ("plan", "swap", "sort", "lookup", "update", "dense", "copy", "other")
ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}  # categories of a trace's events
LAUNCHES = {"cuda_runtime", "cuda_driver"}
FILL = re.compile(r"FillFunctor|[mM]emset")
DENSE = re.compile(  # torch's kernels, and those of cuBLAS and cuDNN
    r"at::native|at_cuda_detail|multi_tensor|cutlass|cublas|nvjet|xmma|gemm|gemv|gemmk|split[kK]|^(ampere|sm\d+)_|cudnn"
)
NAME_LENGTH = 60


@dataclass(frozen=True)
class Activity:
    """A kernel, copy or fill. `start_us`: since the step's first one · `stream`: as CUPTI numbers them; a branch of a
    graph has one of its own."""

    name: str
    group: str
    stream: int
    start_us: float
    us: float


@dataclass(frozen=True)
class Step:
    """`us`: from its first activity to the next step's."""

    us: float
    activities: tuple[Activity, ...]

    @cached_property
    def group_us(self) -> dict[str, float]:
        """Time of each group's activities, one after the other; groups run beside each other."""
        times: defaultdict[str, float] = defaultdict(float)
        for activity in self.activities:
            times[activity.group] += activity.us
        return {group: times[group] for group in GROUPS if group in times}


def steps_of(trace: Mapping[str, Any]) -> list[Step]:
    """The steps of a trace (`export_chrome_trace`, with `profiler.step()` after each), without the first and the last.
    Raises `ValueError` for a trace with fewer than 3 steps that ran something on a GPU."""
    begun = [events for events in _launched_by_step(trace["traceEvents"]) if events]
    if len(begun) < 3:
        raise ValueError(
            f"{len(begun)} steps of the trace have run something on a GPU, a timeline needs 3 or more; profile more "
            "steps, with CPU and CUDA activities, and call profiler.step() after each"
        )
    begins = [min(event["ts"] for event in events) for events in begun]
    return [
        Step(begins[i + 1] - begins[i], tuple(_activity(event, begins[i]) for event in begun[i]))
        for i in range(1, len(begun) - 1)
    ]


def median_step(steps: Sequence[Step]) -> Step:
    """The one of median length."""
    return sorted(steps, key=lambda step: step.us)[len(steps) // 2]


def group_of(name: str, category: str = "kernel") -> str:
    """One of `GROUPS`."""
    if category == "gpu_memcpy":
        return "copy"
    if category == "gpu_memset" or FILL.search(name):
        return "other"
    return part_of(name) or ("dense" if DENSE.search(name) else "other")


def short_name(name: str) -> str:
    """A kernel's name without result, namespaces, arguments and parameters of templates."""
    plain, depth = [], 0
    for letter in name.replace("(anonymous namespace)", "").removeprefix("void "):
        depth += (letter in "<(") - (letter in ">)")
        if depth == 0 and letter not in ">)":
            plain.append(letter)
    return "".join(plain).rpartition("::")[2].strip()[:NAME_LENGTH] or name[:NAME_LENGTH]


def _launched_by_step(events: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """What ran on a GPU, in its order, of each step."""
    timed = [event for event in events if event.get("ph") == "X"]
    ranges = sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in timed
        if event.get("cat") == "user_annotation" and event["name"].startswith("ProfilerStep#")
    )
    starts = [start for start, _ in ranges]
    # calls are numbered in their order: one that the trace leaves out (a cooperative launch) is near the one before
    launches = sorted((event["args"]["correlation"], event["ts"]) for event in timed if _is(event, LAUNCHES))
    numbers = [number for number, _ in launches]
    found: list[list[Mapping[str, Any]]] = [[] for _ in ranges]
    for event in sorted((event for event in timed if _is(event, ON_GPU)), key=lambda event: float(event["ts"])):
        call = bisect_right(numbers, event["args"]["correlation"]) - 1
        step = bisect_right(starts, launches[call][1]) - 1 if call >= 0 else -1
        if step >= 0 and launches[call][1] <= ranges[step][1]:
            found[step].append(event)
    return found


def _is(event: Mapping[str, Any], categories: set[str]) -> bool:
    return event.get("cat") in categories and "correlation" in event.get("args", {})


def _activity(event: Mapping[str, Any], begin: float) -> Activity:
    name = event["name"]
    short = short_name(name) if event["cat"] == "kernel" else name[:NAME_LENGTH]
    start_us, us = round(event["ts"] - begin, 2), round(event["dur"], 2)
    return Activity(short, group_of(name, event["cat"]), int(event["args"]["stream"]), start_us, us)
