"""Tiered tables of the GPU benchmarks on any tier, and runs of steps whose next batches are fetched ahead."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

import torch
from torch import nn

import tieredemb
from benchmarks.cuda_providers import check_room
from benchmarks.cuda_timing import StepTimes, run_steps, synchronize
from benchmarks.cuda_workload import SEED
from tieredemb.config import Capacity, Init, OptimizerConfig
from tieredemb.lookup.optimizer import state_width
from tieredemb.stats import CacheStats
from tieredemb.storage.base import Storage

TURNS = 5  # that steps with prefetch and those without take
AGAIN = 6  # steps at the beginning of each with it, whose batches nobody has planned


class Shape(Protocol):
    """`tables` tables of `rows` × `width`."""

    @property
    def tables(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def width(self) -> int: ...


def tiered_tables(
    shape: Shape,
    capacity: Capacity,
    optimizer: OptimizerConfig | None,
    device: torch.device,
    *,
    storage: Storage | None = None,
    init: Init | None = None,
) -> tieredemb.TieredEmbeddingBagCollection:
    """A collection, over unified memory (host memory on the CPU) unless `storage` says otherwise."""
    if storage is None:
        storage = tieredemb.UnifiedMemory() if device.type == "cuda" else tieredemb.HostMemory()
    if isinstance(storage, tieredemb.UnifiedMemory):
        check_room(cold_bytes(shape, optimizer))
    tables = [
        tieredemb.TableConfig(
            name=f"t{t}", num_embeddings=shape.rows, embedding_dim=shape.width, init=init or tieredemb.Normal()
        )
        for t in range(shape.tables)
    ]
    return tieredemb.TieredEmbeddingBagCollection(
        tables, capacity=capacity, optimizer=optimizer, storage=storage, device=device
    )


def cold_bytes(shape: Shape, optimizer: OptimizerConfig | None) -> int:
    """Bytes of all rows in cold storage: fp32 weights, words of optimizer state, one of score."""
    return shape.tables * shape.rows * 4 * (shape.width + state_width(optimizer, shape.width) + 1)


def set_weights(module: tieredemb.TieredEmbeddingBagCollection, shape: Shape, device: torch.device) -> torch.Tensor:
    """Sets all weights, so that a missed row is one that cold storage holds. Returns the values on `device`: row r of
    every table is row r mod K of it, (K, D). All random would take seconds."""
    some = torch.randn(1 << 16, shape.width, generator=torch.Generator().manual_seed(SEED))
    weight = some.repeat(-(-shape.rows // len(some)), 1)[: shape.rows]
    module.load_state_dict({f"tables.t{t}.weight": weight for t in range(shape.tables)})
    synchronize(device)
    return some.to(device)


def discard(module: tieredemb.TieredEmbeddingBagCollection) -> None:
    """Gives the cache up without writing it back: its file is about to be removed, and a sync of it would take long."""
    for group in module.tables.groups:
        group.cache.abandon()


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
    stats: Callable[[], CacheStats],
    *,
    warm_up: int,
    depth: int,
    device: torch.device,
) -> tuple[StepTimes, CacheStats]:
    """Runs `step` on batches fetched `depth` ahead; times, and what was done, of all but the first `warm_up` and the
    last `depth + 1`: a captured step goes one further. Each timed step has its share of fetching: the loop is in
    progress before, and goes on afterwards."""
    fetched = iter(tieredemb.prefetch(batches, model, depth))
    for batch in islice(fetched, warm_up):
        step(batch)
    before = stats()
    times = run_steps(step, _Next(fetched, len(batches) - warm_up - depth - 1), device)
    done = stats() - before
    for batch in fetched:
        step(batch)
    return times, done


def run_fresh(
    step: Callable[[Any], object],
    batches: Sequence[Any],
    stats: Callable[[], CacheStats],
    *,
    warm_up: int,
    device: torch.device,
) -> tuple[StepTimes, CacheStats]:
    """Runs `step` on batches; times, and what was done, of all but the first `warm_up`."""
    run_steps(step, batches[:warm_up], device)
    before = stats()
    times = run_steps(step, batches[warm_up:], device)
    return times, stats() - before


class _Following:
    """A loader whose loops go on where the one before has ended, each for `count` batches."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches, self.count = batches, 0

    def __iter__(self) -> Iterator[Any]:
        return islice(self._batches, self.count)


def run_in_turns(
    step: Callable[[Any], object],
    batches: Iterator[Any],
    model: nn.Module,
    stats: Callable[[], CacheStats],
    *,
    warm_up: int,
    warm_up_ahead: int,
    steps: int,
    device: torch.device,
) -> tuple[tuple[StepTimes, CacheStats], tuple[StepTimes, CacheStats]]:
    """Runs `step` without prefetch and with it, `steps` each, by turns: what a host does beside for a while tells on
    both. Times, and what was done, of each. `warm_up`: steps before, without · `warm_up_ahead`: with prefetch, which
    finds out meanwhile whether planning ahead pays."""
    share = -(-steps // TURNS)
    run_steps(step, list(islice(batches, warm_up)), device)
    loader = _Following(batches)
    fetched = tieredemb.prefetch(loader, model)
    loader.count = warm_up_ahead
    for batch in fetched:
        step(batch)
    found: dict[bool, list[tuple[StepTimes, CacheStats]]] = {False: [], True: []}
    for _ in range(TURNS):
        before = stats()
        times = run_steps(step, list(islice(batches, share)), device)
        found[False].append((times, stats() - before))
        loader.count = AGAIN + share + 1
        loop = iter(fetched)
        for batch in islice(loop, AGAIN):
            step(batch)
        before = stats()
        times = run_steps(step, _Next(loop, share), device)
        found[True].append((times, stats() - before))
        for batch in loop:
            step(batch)
    if fetched.pace is not None:
        way = "ahead" if fetched.pace.ahead else "when a step begins"
        print(f"  with prefetch, in the end, planned {way}", file=sys.stderr, flush=True)
    plain, ahead = (
        (StepTimes.of_all([times for times, _ in runs]), sum((done for _, done in runs), CacheStats()))
        for runs in found.values()
    )
    return plain, ahead


def batches_in_turns(warm_up: int, warm_up_ahead: int, steps: int) -> int:
    """How many batches `run_in_turns` takes."""
    return warm_up + warm_up_ahead + TURNS * (2 * -(-steps // TURNS) + AGAIN + 1)
