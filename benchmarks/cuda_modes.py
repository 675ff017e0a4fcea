"""Steps of one collection in each mode: eager, with the next batch fetched ahead, as a CUDA graph, and as one that
goes ahead of its batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, Protocol

import torch
from torch import nn

import tieredemb
from benchmarks.cuda_runs import Way, batches_in_turns, run_in_turns
from benchmarks.cuda_timing import QUEUED, StepTimes, run_queued
from tieredemb.cache.stats import CacheStats

MODE_STEPS = 220  # before a mode is timed: it may compile kernels, capture, or find out whether planning ahead pays
FETCHED, GRAPH, FETCHED_GRAPH = ", prefetch", ", CUDA graph", ", CUDA graph, prefetch"
ONE_THREAD = ", one thread"  # see `on_one_thread`
OF_DEVICE = ", device alone"  # behind a mode: what the GPU needs where Python is what steps wait for


def on_one_thread() -> Any:
    """Inside, backward runs on the calling thread; else another one runs it, and each waits for the other."""
    return torch.autograd.set_multithreading_enabled(False)


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


def modes_of(
    step: Callable[[Any], object],
    batches: Iterator[Any],
    model: nn.Module,
    stats: Callable[[], CacheStats],
    *,
    warm_up: int,
    fetched: bool,
    device: torch.device,
    max_ids: int | None = None,
) -> dict[str, Way]:
    """The modes of one model's steps, by name; eager with prefetch if `fetched`. `warm_up`: steps before eager ones ·
    `max_ids`: of a batch, where batches differ in their numbers of ids."""
    more: dict[str, Any] = {"batches": batches, "stats": stats}
    again = {**more, "warm_up": mode_steps(warm_up)}
    ways = {"": Way(step=step, warm_up=warm_up, **more)}
    if fetched:
        ways[FETCHED] = Way(step=step, model=model, **again)
    if device.type == "cuda":
        captured = tieredemb.graph_step(step, max_ids=max_ids)
        ways |= {GRAPH: Way(step=captured, **again), FETCHED_GRAPH: Way(step=captured, model=model, **again)}
    return ways


def measure_modes(
    tiered: Trained,
    ids: Iterator[torch.Tensor],
    *,
    warm_up: int,
    steps: int,
    fetched: bool,
    of_device: bool = False,
    beside: Mapping[str, Way] | None = None,
) -> dict[str, tuple[StepTimes, CacheStats]]:
    """Times of the steps in each mode, by its name, and what they did; eager with prefetch if `fetched`, and what
    graphs take the GPU alone if `of_device`. All take turns, with the ways that are to be measured `beside`."""
    device, module = tiered.device, tiered.module
    ways = modes_of(tiered.step, ids, module, module.stats, warm_up=warm_up, fetched=fetched, device=device)
    runs = run_in_turns({**(beside or {}), **ways}, steps=steps, device=device)
    if of_device and device.type == "cuda":
        captured = ways[GRAPH].step
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
    """How many batches the modes of one model take at most."""
    return batches_in_turns([warm_up, *3 * [mode_steps(warm_up)]], steps) + 3 * QUEUED
