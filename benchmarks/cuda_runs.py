"""Runs of steps: of one way, whose next batches may be fetched ahead, and of several ways by turns."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import nn

import tieredemb
from benchmarks.cuda_timing import StepTimes, run_steps
from tieredemb.cache.stats import CacheStats

TURNS = 5  # that each way of several takes
BEFORE, AFTER = 6, 2  # steps that are not timed of each turn with prefetch: nothing is planned for them, or behind them
Name = TypeVar("Name", bound=Hashable)
Counters = TypeVar("Counters", bound="Differing")


class Differing(Protocol):
    """Counters, as of a cache: what was done between two snapshots is their difference."""

    def __sub__(self, earlier: Self, /) -> Self: ...


def a_batch(count: float, done: CacheStats) -> float:
    """`count` of what was `done`, a batch: of few steps a thread may have planned the batches of none meanwhile."""
    return count / max(1, done.batches)


class _Next:
    """The next `count` batches of an iterator."""

    def __init__(self, batches: Iterator[Any], count: int) -> None:
        self._batches, self._count = batches, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        return islice(self._batches, self._count)


def run_fetched(
    step: Callable[[Any], object],
    batches: Sequence[Any],
    model: nn.Module,
    stats: Callable[[], Counters],
    *,
    warm_up: int,
    depth: int,
    device: torch.device,
    wait: Callable[[], object] = lambda: None,
) -> tuple[StepTimes, Counters]:
    """Runs `step` on batches fetched `depth` ahead; times, and what was done, of all but the first `warm_up` and the
    last `depth + 1`: a captured step goes one further. Each timed step has its share of fetching: the loop is in
    progress before, and goes on afterwards. `wait`: for others whose steps these wait for, right before the first that
    is timed."""
    fetched = iter(tieredemb.prefetch(batches, model, depth))
    for batch in islice(fetched, warm_up):
        step(batch)
    before = stats()
    gc.collect()
    wait()
    times = run_steps(step, _Next(fetched, len(batches) - warm_up - depth - 1), device)
    done = stats() - before
    for batch in fetched:
        step(batch)
    return times, done


def run_fresh(
    step: Callable[[Any], object],
    batches: Sequence[Any],
    stats: Callable[[], Counters],
    *,
    warm_up: int,
    device: torch.device,
    wait: Callable[[], object] = lambda: None,
) -> tuple[StepTimes, Counters]:
    """Runs `step` on batches; times, and what was done, of all but the first `warm_up`. `wait`: as of `run_fetched`."""
    run_steps(step, batches[:warm_up], device)
    before = stats()
    gc.collect()
    wait()
    times = run_steps(step, batches[warm_up:], device)
    return times, stats() - before


class _Following:
    """A loader whose loops go on where the one before has ended, each for `count` batches."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches, self.count = batches, 0

    def __iter__(self) -> Iterator[Any]:
        return islice(self._batches, self.count)


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way of training: `step` on the next of its `batches`, which are fetched ahead for `model` if one is given.
    `stats`: of what it has done · `warm_up`: steps before any is timed."""

    step: Callable[[Any], object]
    batches: Iterator[Any]
    warm_up: int
    stats: Callable[[], CacheStats] = CacheStats
    model: nn.Module | None = None


class _Turns:
    """The turns of one way on a device."""

    def __init__(self, way: Way, device: torch.device) -> None:
        self._way, self._device, self._loader = way, device, _Following(way.batches)
        self._ahead = None if way.model is None else tieredemb.prefetch(self._loader, way.model)

    def warm_up(self) -> None:
        for batch in self._loop(self._way.warm_up):
            self._way.step(batch)

    def take(self, steps: int) -> tuple[StepTimes, CacheStats]:
        """Times of that many steps, and what they did."""
        step, stats = self._way.step, self._way.stats
        before, after = (0, 0) if self._ahead is None else (BEFORE, AFTER)
        loop = self._loop(before + steps + after)
        for batch in islice(loop, before):
            step(batch)
        done = stats()
        times = run_steps(step, _Next(loop, steps), self._device)
        done = stats() - done
        for batch in loop:
            step(batch)
        return times, done

    def _loop(self, count: int) -> Iterator[Any]:
        self._loader.count = count
        return iter(self._loader if self._ahead is None else self._ahead)

    @property
    def pace(self) -> str | None:
        """How batches were planned in the end, where prefetch has a choice."""
        autotuner = None if self._ahead is None else self._ahead.autotuner
        return None if autotuner is None else "ahead" if autotuner.ahead else "when a step begins"


def run_in_turns(
    ways: Mapping[Name, Way], *, steps: int, device: torch.device
) -> dict[Name, tuple[StepTimes, CacheStats]]:
    """Runs `steps` steps of each way, by turns after the warm-up of all: what a host does beside for a while tells on
    all of them. Times, and what was done, of each."""
    share, turns = -(-steps // TURNS), {name: _Turns(way, device) for name, way in ways.items()}
    for of_way in turns.values():
        of_way.warm_up()
    found: dict[Name, list[tuple[StepTimes, CacheStats]]] = {name: [] for name in ways}
    gc.collect()
    for _ in range(TURNS):
        for name, of_way in turns.items():
            found[name].append(of_way.take(share))
    for name, of_way in turns.items():
        if of_way.pace is not None:
            print(f"  {name}: planned {of_way.pace} in the end", file=sys.stderr, flush=True)
    return {
        name: (StepTimes.of_all([times for times, _ in runs]), sum((done for _, done in runs), CacheStats()))
        for name, runs in found.items()
    }


def batches_in_turns(warm_ups: Sequence[int], steps: int) -> int:
    """How many batches ways of such a warm-up take at most, all together."""
    return sum(warm_ups) + len(warm_ups) * TURNS * (-(-steps // TURNS) + BEFORE + AFTER)
