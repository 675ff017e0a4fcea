"""Where a step's time goes: each kernel of the 10 % workload, its bytes, and its share of the copy bandwidth.

A cache is warmed by training; `BATCHES` further steps are recorded, and every kernel is then replayed on what it saw
in them. Bytes are those that the work must move: arrays once, random accesses of less than a line as 64 bytes. A share
above 100 % means that rows came from the processor's caches, which a skewed batch allows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pytest
import torch

import tieredemb
from benchmarks.machine import cores
from benchmarks.record import Record, measured, save
from benchmarks.timing import COPY_BYTES, Quantiles, copier
from benchmarks.workload import Size, TieredTables, Workload
from tieredemb.cache.plan_cpu import number, resolve
from tieredemb.cache.policy import scoring
from tieredemb.cache.policy_cpu import choose_victims, raise_scores
from tieredemb.cache.tickets import Ticket
from tieredemb.hash.slot_map_cpu import SlotMap
from tieredemb.kernels.segments_cpu import Segments, segments_of
from tieredemb.lookup.bags_cpu import Bags, make_bags
from tieredemb.lookup.embedding_bag_cpu import NO_ARGMAX, NO_WEIGHTS, pool
from tieredemb.lookup.optimizer import hyperparameters
from tieredemb.lookup.optimizer_cpu import Gradient, update

BATCHES = 20
LINE = 64
SGD = tieredemb.SGD(lr=0.05)
CPU = torch.device("cpu")
Array = np.ndarray[Any, Any]


@dataclass
class Step:
    """What the kernels saw in one step: M missed rows, V victims that made room for them."""

    ids: Array
    bags: Bags
    found: Array
    ticket: Ticket
    segments: Segments
    missed_keys: Array
    missed_slots: Array
    victim_keys: Array
    victim_slots: Array
    victim_dirty: Array

    def __post_init__(self) -> None:
        self.n, self.u = len(self.ids), len(self.ticket.unique_keys)
        self.m, self.v = len(self.missed_keys), len(self.victim_keys)


class Recorder:
    """Trains a 10 % cache step by step, as a module does, and keeps what each kernel saw."""

    def __init__(self, size: Size) -> None:
        self.size = size
        self.work = work = Workload(size)
        self.tiered = TieredTables(work, SGD, capacity=0.1)
        for (ids,) in work.batches(size.warmup):
            self.tiered.step(ids)
        self.group = self.tiered.module.tables.groups[0]
        self.cache, self.hot, self.space = self.group.cache, self.group.cache.hot, self.group.space
        self.offsets, self.grad = work.offsets.numpy(), work.gradient.numpy()
        self.numbers = hyperparameters(SGD, asdict(SGD), np.ones(size.tables, np.int64), 1.0)
        self.map = SlotMap(self.hot.capacity)  # the cache's map as it was before the recorded steps
        slots = self.hot.occupied()
        self.map.insert(self.hot.key[slots], slots)
        self.row_bytes = size.width * 4
        self.plan_seconds: list[float] = []
        self.steps = [self._record(ids.numpy()) for (ids,) in work.batches(size.rounds)]
        self.batch = self.cache.cold.metadata.batch + 1000  # stamp of replayed plans, beyond those of real ones

    def make_bags(self, ids: Array) -> Bags:
        return make_bags(ids, self.offsets, self.space, self.size.batch, padding_is_dropped=True)

    def gradient(self, bags: Bags) -> Gradient:
        return Gradient(self.grad, bags.sample, bags.feature, NO_WEIGHTS, NO_ARGMAX)

    def _record(self, ids: Array) -> Step:
        bags, hot = self.make_bags(ids), self.hot
        key, dirty = hot.key.copy(), hot.dirty.copy()
        start = perf_counter()
        ticket = self.cache.plan(bags.keys)
        self.plan_seconds.append(perf_counter() - start)
        segments = segments_of(ticket.inverse, ticket.unique_slots)
        update(hot, segments, self.gradient(bags), self.space, self.numbers).run()
        ticket.release()
        missed = key[ticket.unique_slots] != ticket.unique_keys
        slots = ticket.unique_slots[missed]
        victims = slots[key[slots] >= 0]
        return Step(
            ids=ids,
            bags=bags,
            found=np.where(key[ticket.homes] == bags.keys, ticket.homes, np.int32(-1)),
            ticket=ticket,
            segments=segments,
            missed_keys=ticket.unique_keys[missed],
            missed_slots=slots,
            victim_keys=key[victims],
            victim_slots=victims,
            victim_dirty=dirty[victims],
        )


@dataclass(frozen=True)
class Kernel:
    """`run` on a recorded step, after an untimed `prepare`; `moved`: bytes of that step."""

    run: Callable[[Recorder, Step], object]
    moved: Callable[[Recorder, Step], float]
    prepare: Callable[[Recorder, Step], object] = lambda recorder, step: None


def _pool(recorder: Recorder, step: Step) -> None:
    out = np.empty(recorder.grad.shape, np.float32)  # its pages are part of what a forward costs
    pool(recorder.hot.weight, step.ticket.homes, step.bags, recorder.space, NO_WEIGHTS, out, NO_ARGMAX)


def _choose(recorder: Recorder, step: Step) -> None:
    hot, after_all = recorder.hot, np.int32(recorder.batch + 1)  # nothing is locked
    choose_victims(len(step.victim_keys), hot.key, hot.score, hot.last_batch, after_all, hot.capacity, True)


def _number(recorder: Recorder, step: Step) -> None:
    recorder.batch += 1
    hot = recorder.hot
    whole = np.array([0, len(step.bags.keys)])
    number(step.bags.keys, step.found, whole, hot.last_batch, hot.unique_of_slot, recorder.batch)


def _raise(recorder: Recorder, step: Step) -> None:
    terms = scoring(recorder.cache.policy)
    slots, score = step.ticket.unique_slots, recorder.hot.score
    raise_scores(slots, score, terms.now(recorder.batch), terms)


def _swap_keys(recorder: Recorder, step: Step) -> None:
    recorder.map.erase(step.victim_keys)
    recorder.map.insert(step.missed_keys, step.missed_slots)


def _dirty_as_then(recorder: Recorder, step: Step) -> None:
    recorder.hot.dirty[step.victim_slots] = step.victim_dirty


def _find(recorder: Recorder, step: Step) -> None:
    recorder.map.find(step.bags.keys)


def _update(recorder: Recorder, step: Step) -> None:
    gradient = recorder.gradient(step.bags)
    update(recorder.hot, step.segments, gradient, recorder.space, recorder.numbers).run()


KERNELS: dict[str, Kernel] = {
    "keys of ids": Kernel(lambda r, s: r.make_bags(s.ids), lambda r, s: 32 * s.n),
    "find": Kernel(_find, lambda r, s: (12 + LINE) * s.n),
    "number unique keys": Kernel(_number, lambda r, s: 16 * s.n + (12 + 2 * LINE) * s.u),
    "choose victims": Kernel(_choose, lambda r, s: 44 * r.hot.capacity),
    "write victims back": Kernel(
        lambda r, s: r.cache.cold.write(s.victim_keys, s.victim_slots, r.hot),
        lambda r, s: 2 * r.row_bytes * float(s.victim_dirty.sum()) + 2 * LINE * s.v,
        _dirty_as_then,
    ),
    "erase and insert keys": Kernel(_swap_keys, lambda r, s: (12 + LINE) * (s.m + s.v)),
    "fill missed rows": Kernel(
        lambda r, s: r.cache.cold.read(s.missed_keys, s.missed_slots, r.hot),
        lambda r, s: 2 * (r.row_bytes + LINE) * s.m,
    ),
    "raise scores": Kernel(_raise, lambda r, s: (4 + LINE) * s.u),
    "resolve homes": Kernel(lambda r, s: resolve(s.ticket.inverse, s.ticket.unique_slots), lambda r, s: 12 * s.n),
    "pool": Kernel(_pool, lambda r, s: r.row_bytes * (s.n + s.n / r.size.bag)),
    "segments": Kernel(
        lambda r, s: segments_of(s.ticket.inverse, s.ticket.unique_slots), lambda r, s: 16 * s.n + 24 * s.u
    ),
    "update": Kernel(_update, lambda r, s: r.row_bytes * (s.n + 2 * s.u) + 12 * s.n),
}
COPY, PLAN, STEP = "copy of 256 MiB", "plan, whole", "step, whole"


@dataclass
class Results:
    """Seconds and bytes by kernel."""

    seconds: dict[str, Quantiles]
    moved: dict[str, float]


@pytest.fixture(scope="module")
def recorder(quick: bool) -> Recorder:
    torch.set_num_threads(cores())
    size = Size(rounds=BATCHES) if not quick else Size(tables=3, rows=1000, batch=256, warmup=3, rounds=4)
    return Recorder(size)


@pytest.fixture(scope="module")
def measurements(recorder: Recorder, results: Path) -> Iterator[Results]:
    """Collects the kernels' figures; saves them once all were measured."""
    collected = Results({PLAN: Quantiles.of(recorder.plan_seconds)}, {})
    yield collected
    if {*KERNELS, COPY, STEP} <= collected.seconds.keys():  # a selection of kernels (-k) is no record
        save(results, "cpu-kernels", _workload(recorder), _records(collected))


def bench_copy(measurements: Results, benchmark: Any, threads: int) -> None:
    benchmark.pedantic(copier(threads), rounds=15, warmup_rounds=2)
    measurements.seconds[COPY] = _quantiles(benchmark)
    measurements.moved[COPY] = 2 * COPY_BYTES


def bench_step(recorder: Recorder, measurements: Results, benchmark: Any) -> None:
    # before the replays, which leave the cache's stamps and rows to no plan
    batches = iter(recorder.work.batches(recorder.size.rounds))
    benchmark.pedantic(recorder.tiered.step, setup=lambda: (next(batches), {}), rounds=recorder.size.rounds)
    measurements.seconds[STEP] = _quantiles(benchmark)


@pytest.mark.parametrize("name", KERNELS)
def bench_kernel(name: str, recorder: Recorder, measurements: Results, benchmark: Any) -> None:
    kernel, steps = KERNELS[name], iter(recorder.steps)  # in order, each once: the map's content goes on changing

    def setup() -> tuple[tuple[Any, ...], dict[str, Any]]:
        step = next(steps)
        kernel.prepare(recorder, step)
        return (recorder, step), {}

    benchmark.pedantic(kernel.run, setup=setup, rounds=len(recorder.steps) - 1, warmup_rounds=1)
    measurements.seconds[name] = _quantiles(benchmark)
    measurements.moved[name] = float(np.median([kernel.moved(recorder, step) for step in recorder.steps]))


def _quantiles(benchmark: Any) -> Quantiles:
    return Quantiles.of(benchmark.stats.stats.data)


def _workload(recorder: Recorder) -> str:
    columns = zip(*((s.n, s.u, s.m, s.v) for s in recorder.steps), strict=True)
    n, u, m, v = (int(np.median(column)) for column in columns)
    return (
        f"Kernels of one step of {recorder.size}, capacity 10 % over HostMemory, SGD, {cores()} threads, replayed on "
        f"recorded steps: {n:,} ids, {u:,} unique rows, {m:,} missed, {v:,} evicted. Moved: bytes the work must "
        f"move, random accesses as lines of 64; above 100 % of the copy's rate, rows came from the processor's caches."
    )


def _records(found: Results) -> list[Record]:
    bandwidth = found.moved[COPY] / found.seconds[COPY].median
    step = found.seconds[STEP].median
    records = []
    for name in (STEP, PLAN, *KERNELS, COPY):
        moved = found.moved.get(name)
        more: dict[str, Any] = {"ratio": found.seconds[name].median / step, "ratio_label": " of the step"}
        if name == COPY:
            more = {"note": f"{bandwidth / 1e9:.1f} GB/s, read and written"}
        if moved is not None:
            more |= {"moved_mb": moved / 1e6, "share": moved / found.seconds[name].median / bandwidth}
        provider = "numpy" if name == COPY else "tieredemb"
        records.append(measured(name, provider, "", "ms", found.seconds[name], scale=1e3, **more))
    return records
