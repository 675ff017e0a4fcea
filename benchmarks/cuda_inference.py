"""Latency of single lookups on a GPU: `python -m benchmarks.cuda_inference [--rows N] [--calls N]`.

26 tables behind a cache of 1 %, batches of 256 samples with one id a table, no gradient. A call's time is the host's,
from the call to the end of `torch.cuda.synchronize()`; then, of as many further calls, that between device events
around the call. No batch comes twice: ids are drawn from hot rows, which are in the cache and stay there; a share of
misses are cold rows, each named by one batch alone.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import nn

import tieredemb
from benchmarks.cuda_command import barred, keep, make_parser, parse
from benchmarks.cuda_providers import OURS
from benchmarks.cuda_step import release, say
from benchmarks.cuda_tables import cold_bytes, set_weights, tiered_tables
from benchmarks.cuda_workload import SEED
from benchmarks.record import Record, at_most, measured
from benchmarks.timing import Quantiles
from benchmarks.workload import EqualTables
from tieredemb.cache.stats import CacheStats

ROWS, CALLS, WARM_UP, SHARE, MISSES = 1_000_000, 2000, 50, 0.01, 0.05
ROUNDS = 8  # in which each hot row is looked up before anything is timed: its score then outlasts any cold row's
TORCH = "nn.EmbeddingBag × 26"
HITS, SOME_MISSES = "lookup, all hits", f"lookup, {100 * MISSES:g} % misses"
EAGER, GRAPH, BY_HAND = "eager", "CUDA graph", "CUDA graph, replayed by hand"
MOST_US = 40.0
STATISTIC = "Medians of the host's time of single calls, 20–80 % in brackets"

Call = Callable[[torch.Tensor], Any]


@dataclass(frozen=True, kw_only=True)
class Size(EqualTables):
    """`tables` tables of `rows` × `width`, batches of `batch` samples, `hot` rows of each table (a multiple of the
    batch) looked up again and again; `calls`, and `warm_up` calls before them."""

    tables: int = 26
    rows: int
    width: int = 128
    batch: int = 256
    hot: int = 19 * 256  # nearly half of the slots
    calls: int
    warm_up: int = WARM_UP


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the command line asked for."""

    size: Size
    quick: bool
    device: torch.device


class Ids:
    """Batches of ids, int64 (T · B,), table-major. Ids of ranks below `hot` are the hot ones."""

    def __init__(self, size: Size, device: torch.device) -> None:
        self._size = size
        self._random = torch.Generator(device).manual_seed(SEED)
        self._id_of_rank = torch.stack(
            [torch.randperm(size.rows, generator=self._random, device=device) for _ in range(size.tables)]
        )
        self._unseen = size.hot

    def every_hot(self) -> Iterator[torch.Tensor]:
        """Batches that together name every hot row once."""
        for part in self._id_of_rank[:, : self._size.hot].chunk(self._size.hot // self._size.batch, dim=1):
            yield part.reshape(-1)

    def draw(self, count: int, misses: float = 0.0) -> list[torch.Tensor]:
        """Batches of hot ids, each of which is a cold row's that was never named before with probability `misses`."""
        size, device = self._size, self._id_of_rank.device
        shape = (size.tables, count, size.batch)
        rank = torch.randint(size.hot, shape, generator=self._random, device=device)
        if misses:
            cold = torch.rand(shape, generator=self._random, device=device) < misses
            number = cold.view(size.tables, -1).cumsum(1).view(shape)
            rank = torch.where(cold, self._unseen + number - 1, rank)
            self._unseen += int(number.max())
            if self._unseen > size.rows:
                raise SystemExit(
                    f"{size.rows:,} rows a table are too few for {count} batches of new ones; less --calls"
                )
        ids = self._id_of_rank.gather(1, rank.view(size.tables, -1)).view(shape)
        return list(ids.transpose(0, 1).reshape(count, -1))


@dataclass(frozen=True, kw_only=True)
class Latencies:
    """Microseconds of single calls. `device`: between device events, of as many others; empty on the CPU."""

    host: np.ndarray[Any, Any]
    device: np.ndarray[Any, Any]

    def __str__(self) -> str:
        p99 = f"p99 {np.percentile(self.host, 99):.1f} µs"
        if not len(self.device):
            return p99
        low, high = np.percentile(self.device, (50, 99))
        return f"{p99}; between device events p50 {low:.1f} µs, p99 {high:.1f} µs"


def time_calls(plan: Plan, call: Call, ids: Sequence[torch.Tensor]) -> tuple[Latencies, Any]:
    """The first calls warm up; half of the others are timed by the host, half by the device. And the last one's
    result."""
    warm_up = plan.size.warm_up
    half = warm_up + (len(ids) - warm_up) // 2
    wait = torch.cuda.synchronize if plan.device.type == "cuda" else _nothing
    for batch in ids[:warm_up]:
        call(batch)
    gc.collect()
    gc.disable()  # a collection of Python's would be the p99
    try:
        host = [_host_us(call, batch, wait) for batch in ids[warm_up:half]]
        device = [_device_us(call, batch) for batch in ids[half:] if plan.device.type == "cuda"]
        result = call(ids[-1])
        wait()
    finally:
        gc.enable()
    return Latencies(host=np.array(host), device=np.array(device)), result


def _host_us(call: Call, batch: torch.Tensor, wait: Callable[[], object]) -> float:
    wait()
    start = perf_counter()
    call(batch)
    wait()
    return 1e6 * (perf_counter() - start)


def _nothing() -> None:
    """The CPU is done when a call returns."""


def _device_us(call: Call, batch: torch.Tensor) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    call(batch)
    stop.record()
    stop.synchronize()
    return 1e3 * float(start.elapsed_time(stop))


def captured(call: Call, example: torch.Tensor) -> Call:
    """A call as a CUDA graph: ids copied in, and one launch."""
    own, graph = example.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call(own)

    def replay(ids: torch.Tensor) -> Any:
        own.copy_(ids)
        graph.replay()
        return result

    return replay


# --- providers ------------------------------------------------------------------------------------------------------


def measure_torch(plan: Plan, ids: Ids) -> dict[str, Latencies]:
    """An `nn.EmbeddingBag` a table, outputs a tensor each."""
    size, found = plan.size, {}
    tables = [nn.EmbeddingBag(size.rows, size.width, mode="sum", device=plan.device) for _ in range(size.tables)]
    starts = torch.arange(size.batch, device=plan.device)

    @torch.no_grad()
    def look_up(batch: torch.Tensor) -> list[torch.Tensor]:
        return [table(own, starts) for table, own in zip(tables, batch.view(size.tables, -1), strict=True)]

    count = size.warm_up + 2 * size.calls
    found[EAGER], _ = time_calls(plan, look_up, ids.draw(count))
    if plan.device.type == "cuda":
        found[GRAPH], _ = time_calls(plan, captured(look_up, ids.draw(1)[0]), ids.draw(count))
    for way, latencies in found.items():
        say(f"{TORCH}, {way}: p50 {np.median(latencies.host):.1f} µs, {latencies}")
    return found


class Served:
    """Our tables with the hot rows in the cache, without an optimizer: what a service looks up in."""

    def __init__(self, plan: Plan, ids: Ids) -> None:
        size, start = plan.size, perf_counter()
        self._plan, self._ids = plan, ids
        self.module = tiered_tables(size, SHARE, None, plan.device)
        self._some = set_weights(self.module, size, plan.device)[size.width]
        self._offsets = torch.arange(size.tables * size.batch + 1, device=plan.device)
        for _ in range(ROUNDS):
            for batch in ids.every_hot():
                self.look_up(batch)
        slots = self.module.tables.groups[0].slots
        say(
            f"{OURS}: {cold_bytes(size, None) / 2**30:.1f} GiB, {slots:,} slots, {size.tables * size.hot:,} hot rows; "
            f"built, set and warmed in {perf_counter() - start:.1f} s"
        )

    @torch.no_grad()
    def look_up(self, batch: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.module(batch, self._offsets)
        return out

    def measure(self, name: str, call: Call, misses: float = 0.0) -> tuple[Latencies, CacheStats]:
        """Times calls, and checks the last one's rows."""
        size = self._plan.size
        ids, before = self._ids.draw(size.warm_up + 2 * size.calls, misses), self.module.stats()
        latencies, out = time_calls(self._plan, call, ids)
        done = self.module.stats() - before
        rows = self._some[ids[-1].view(size.tables, size.batch) % len(self._some)]
        if not torch.equal(out, rows.transpose(0, 1).reshape(size.batch, -1)):
            raise RuntimeError(f"{name} looks up other rows than were set")
        say(f"{OURS}, {name}: p50 {np.median(latencies.host):.1f} µs, {latencies}; hit rate {done.hit_rate:.2%}")
        return latencies, done


def measure_tiered(plan: Plan, ids: Ids) -> dict[tuple[str, str], tuple[Latencies, CacheStats]]:
    """By what is looked up, and how."""
    served, found = Served(plan, ids), {}
    try:
        graph = tieredemb.graph_forward(served.look_up)
        found[HITS, EAGER] = served.measure(EAGER, served.look_up)
        found[HITS, GRAPH] = served.measure(GRAPH, graph)
        if plan.device.type == "cuda":
            found[HITS, BY_HAND] = served.measure(BY_HAND, captured(served.look_up, ids.draw(1)[0]))
        found[SOME_MISSES, EAGER] = served.measure(f"{EAGER}, misses", served.look_up, MISSES)
        found[SOME_MISSES, GRAPH] = served.measure(f"{GRAPH}, misses", graph, MISSES)
    finally:
        served.module.close()
    return found


# --- records --------------------------------------------------------------------------------------------------------


def records_of(
    plan: Plan, theirs: dict[str, Latencies], ours: dict[tuple[str, str], tuple[Latencies, CacheStats]]
) -> list[Record]:
    records = [
        measured(HITS, TORCH, f"all resident, {way}", "µs", Quantiles.of(latencies.host), note=str(latencies))
        for way, latencies in theirs.items()
    ]
    peer = float(np.median(theirs[EAGER].host))
    for (op, way), (latencies, done) in ours.items():
        samples = Quantiles.of(latencies.host)
        more: dict[str, Any] = {"ratio": samples.median / peer, "ratio_label": "× nn.EmbeddingBag, eager"}
        if (op, way) == (HITS, GRAPH):
            more |= barred(at_most(samples.median, MOST_US, " µs"), quick=plan.quick)
        filled = done.rows_filled / done.batches
        note = f"{latencies}; hit rate {done.hit_rate:.2%}, {filled:,.1f} missed rows a batch"
        records.append(measured(op, OURS, f"1 % cache, {way}", "µs", samples, note=note, **more))
    return records


def title(plan: Plan) -> str:
    size = plan.size
    return (
        f"Single lookups without gradient: {size.tables} tables × {size.rows:,} × {size.width}, fp32, batch "
        f"{size.batch}, bags of 1 id, unified memory, LFU with half-life 300; the host waits after each "
        f"call. All hits: new batches of ids from {size.hot:,} rows of each table that are in the cache, in "
        f"{size.hot / (SHARE * size.rows):.0%} of its slots; misses: rows never looked up before, that cold storage "
        f"holds. {size.calls:,} calls after {size.warm_up} of warm-up."
    )


# --- command line ---------------------------------------------------------------------------------------------------


def plan_of(args: Sequence[str] | None = None) -> tuple[Plan, Path | None]:
    """The plan, and where its results go."""
    parser = make_parser("cuda_inference", __doc__, rows=ROWS)
    parser.add_argument("--calls", type=int, default=CALLS, help="that are timed (default: %(default)s)")
    chosen = parse(parser, args)
    size = Size(rows=chosen.rows, calls=chosen.calls)
    if chosen.quick:
        size = Size(tables=3, rows=20_000, batch=16, hot=64, calls=min(chosen.calls, 10), warm_up=5)
    if 2 * size.hot > SHARE * size.rows:
        parser.error(
            f"a cache of {SHARE:.0%} of {size.rows:,} rows lacks room beside {size.hot:,} hot ones: more --rows"
        )
    return Plan(size=size, quick=chosen.quick, device=chosen.device), chosen.results


def main(args: Sequence[str] | None = None) -> None:
    plan, results = plan_of(args)
    start, ids = perf_counter(), Ids(plan.size, plan.device)
    theirs = measure_torch(plan, ids)
    release(plan.device)
    ours = measure_tiered(plan, ids)
    keep(results, "cuda-inference", title(plan), records_of(plan, theirs, ours), statistic=STATISTIC)
    say(f"{perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
