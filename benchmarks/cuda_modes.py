"""Steps of one collection in each mode: eager, with the next batch fetched ahead, as a CUDA graph, and as one that
goes ahead of its batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Protocol

import torch

import tieredemb
from benchmarks.cuda_tables import batches_in_turns, run_fetched, run_fresh, run_in_turns
from benchmarks.cuda_timing import QUEUED, StepTimes, run_queued
from tieredemb.stats import CacheStats

MODE_STEPS = 220  # before a mode is timed: it may compile kernels, capture, or find out whether planning ahead pays
FETCHED, GRAPH, FETCHED_GRAPH = ", prefetch", ", CUDA graph", ", CUDA graph, prefetch"
OF_DEVICE = ", device alone"  # behind a mode: what the GPU needs where Python is what steps wait for


def mode_steps(warm_up: int) -> int:
    """Steps before a further mode is timed, where there are `warm_up` before the first: fewer of a tiny run."""
    return min(MODE_STEPS, 8 * warm_up)


class Trained(Protocol):
    """A collection on a `device`, and a step of it."""

    @property
    def module(self) -> tieredemb.TieredEmbeddingBagCollection: ...
    @property
    def device(self) -> torch.device: ...
    def step(self, ids: torch.Tensor) -> None: ...


def measure_modes(
    tiered: Trained, ids: Iterator[torch.Tensor], *, warm_up: int, steps: int, fetched: bool, of_device: bool = False
) -> dict[str, tuple[StepTimes, CacheStats]]:
    """Times of the steps in each mode, by its name, and what they did; eager with prefetch if `fetched`, and what
    graphs take the GPU alone if `of_device`."""
    device, stats, again = tiered.device, tiered.module.stats, mode_steps(warm_up)

    def alone(step: Callable[[torch.Tensor], object], warm_up: int) -> tuple[StepTimes, CacheStats]:
        batches = list(islice(ids, warm_up + steps))
        return run_fresh(step, batches, stats, warm_up=warm_up, device=device)

    def ahead(step: Callable[[torch.Tensor], object]) -> tuple[StepTimes, CacheStats]:
        batches = list(islice(ids, again + steps + 1))
        return run_fetched(step, batches, tiered.module, stats, warm_up=again, depth=1, device=device)

    runs = {}
    if fetched:
        runs[""], runs[FETCHED] = run_in_turns(
            tiered.step, ids, tiered.module, stats,
            warm_up=warm_up, warm_up_ahead=again, steps=steps, device=device,
        )  # fmt: skip
    else:
        runs[""] = alone(tiered.step, warm_up)
    if device.type == "cuda":
        captured = tieredemb.graph_step(tiered.step)
        runs[GRAPH] = alone(captured, again)
        runs[FETCHED_GRAPH] = ahead(captured)
    if of_device and device.type == "cuda":
        queued = list(islice(ids, 3 * QUEUED))
        runs[GRAPH + OF_DEVICE] = run_queued(captured, queued), runs[GRAPH][1]
        loop = iter(tieredemb.prefetch(queued, tiered.module))  # whose first and last steps are no replays
        for batch in islice(loop, QUEUED):
            captured(batch)
        runs[FETCHED_GRAPH + OF_DEVICE] = run_queued(captured, loop), runs[FETCHED_GRAPH][1]
        for batch in loop:
            captured(batch)
    return runs


def batches_of_modes(warm_up: int, steps: int) -> int:
    """How many batches `measure_modes` takes at most."""
    again = mode_steps(warm_up)
    return batches_in_turns(warm_up, again, steps) + 2 * (again + steps + 1) + 3 * QUEUED
