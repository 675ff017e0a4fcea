"""Tables sharded over the GPUs of one host, beside one of them alone: `python -m benchmarks.cuda_sharding`.

Each rank is a process with a GPU of its own, which trains its own batches: first a plain collection, all ranks at the
same time, each on tables of its own; then one collection that they share, with as many slots a rank; and beside it what
a step is made of, each part alone. A DLRM likewise, its dense layers in DistributedDataParallel; and shapes drawn by
seeds, beside their parts alone. Bars are those of two GPUs; the results of more are kept beside, by their number.
`--quick --device cpu` tries the harness out.
"""

from __future__ import annotations

import abc
import contextlib
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import islice
from math import log10
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import tieredemb
from benchmarks import shapes
from benchmarks.cuda_command import barred, keep, make_parser, parse
from benchmarks.cuda_dlrm import Plan as DlrmPlan
from benchmarks.cuda_dlrm import Trainer, training_batches
from benchmarks.cuda_dlrm import plan_of as dlrm_plan_of
from benchmarks.cuda_modes import FETCHED, FETCHED_GRAPH, GRAPH, MODE_STEPS, ONE_THREAD, on_one_thread
from benchmarks.cuda_providers import LR, OURS, Upstream, check_room
from benchmarks.cuda_runs import a_batch, run_fetched, run_fresh
from benchmarks.cuda_shapes import LIMITS as ONE_GPU_LIMITS
from benchmarks.cuda_shapes import QUICK as QUICK_LIMITS
from benchmarks.cuda_step import STATISTIC, floor_ms, once, release, say
from benchmarks.cuda_tables import Shape, cold_bytes, set_weights, table_configs, tiered_tables
from benchmarks.cuda_timing import ROUNDS, StepTimes, timed
from benchmarks.cuda_workload import SEED, CudaWorkload, batches, every_row, quick_workloads, workloads
from benchmarks.record import Record, at_most, measured
from benchmarks.shapes import Jagged
from benchmarks.timing import Quantiles
from tieredemb.cache.stats import CacheStats
from tieredemb.config import Capacity
from tieredemb.sharding.layout import Layout, Sharding

SLOTS, DLRM, SHAPES = 520_000, "DLRM", "shapes"
PLAIN, SHARDED = "one GPU", "sharded"
MIXED, COPIED = "sharded, small tables whole", "sharded, small tables replicated"
WHOLE_BYTES = 1 << 20  # of weights: tables that are smaller are small ones
RESIDENT, EXCHANGES = "resident", "exchanges"
EAGER, CAPTURED = ("", FETCHED, ONE_THREAD), (GRAPH, FETCHED_GRAPH)
FILLED_AT_ONCE = 1 << 20  # ids
BARRED_RANKS = 2
OPTIMIZER = tieredemb.RowWiseAdagrad(lr=LR)
TIMEOUT = timedelta(seconds=120)
LIMITS = replace(
    ONE_GPU_LIMITS, tables=tuple(range(3, 61)), largest=log10(20e6), bags=(*9 * (1,), 5, 20, 100), most_ids=1_000_000,
    most_bytes=8 << 30,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Bars:
    """What a sharded step may take at most: `eager`, `captured` with prefetch, by one GPU's time; captured with
    prefetch, by the sum of its `parts`; and by default sharding, by the time with the small tables whole: `mixed`."""

    eager: float | None = None
    captured: float | None = None
    parts: float | None = None
    mixed: float | None = None


BARS = {
    "W-1.05": Bars(eager=1.35, captured=1.0),
    "W-1.2": Bars(eager=2.0, captured=1.25),
    "W-kaggle": Bars(eager=5.0, captured=2.0, parts=1.25, mixed=1.05),
    DLRM: Bars(eager=1.4, captured=1.2),
    SHAPES: Bars(parts=1.35),
}


# --- what is trained ------------------------------------------------------------------------------------------------


class Trained(NamedTuple):
    """A model, which batches are fetched for, and a step of it."""

    model: nn.Module
    step: Callable[[Any], object]


@dataclass(frozen=True, kw_only=True)
class Work(abc.ABC):
    """Tables, and what trains them. `name`: in records · `shape`: of the tables · `capacity`: of one GPU's cache, and
    of each rank's · `ways`: on one GPU, and sharded, by their names · `has_parts`: whether what a step is made of is
    measured."""

    name: str
    shape: CudaWorkload | shapes.Shape
    capacity: Capacity
    ways: tuple[str, ...]
    modes: tuple[str, ...]
    bars: Bars
    has_parts: bool = True

    @abc.abstractmethod
    def draw(self, count: int, own: slice, device: torch.device) -> list[Any]:
        """Those of `count` batches of all ranks that are a rank's `own`."""

    @abc.abstractmethod
    def jagged(self, batch: Any) -> Jagged:
        """What a batch looks up."""

    @abc.abstractmethod
    def trained(self, module: Any, device: torch.device, *, is_sharded: bool) -> Trained:
        """What trains the tables of `module`."""


class SingleIds(Work):
    """Bags of one id; a batch is its ids."""

    shape: CudaWorkload

    def draw(self, count: int, own: slice, device: torch.device) -> list[Any]:
        return list(batches(self.shape, count, device)[own].clone())  # the others' give their memory back

    def jagged(self, batch: Any) -> Jagged:
        return batch, torch.arange(len(batch) + 1, device=batch.device)

    def trained(self, module: Any, device: torch.device, *, is_sharded: bool) -> Trained:
        upstream = Upstream(self.shape, device)

        def step(ids: torch.Tensor) -> None:
            module(ids, upstream.offsets).backward(upstream.gradient)

        return Trained(module, step)


class Drawn(Work):
    """A shape drawn by a seed; a batch is ids and offsets."""

    shape: shapes.Shape

    def draw(self, count: int, own: slice, device: torch.device) -> list[Any]:
        return [shapes.as_one(batch) for batch in shapes.batches(self.shape, count, device)[own]]

    def jagged(self, batch: Any) -> Jagged:
        return batch  # type: ignore[no-any-return]

    def trained(self, module: Any, device: torch.device, *, is_sharded: bool) -> Trained:
        random = torch.Generator(device).manual_seed(SEED)
        gradient = torch.randn(self.shape.batch, sum(self.shape.widths), generator=random, device=device).mul_(1e-2)

        def step(batch: Jagged) -> None:
            module(*batch).backward(gradient)

        return Trained(module, step)


@dataclass(frozen=True, kw_only=True)
class Dlrm(Work):
    """A DLRM."""

    plan: DlrmPlan

    def draw(self, count: int, own: slice, device: torch.device) -> list[Any]:
        return training_batches(replace(self.plan, device=device), count)[own]

    def jagged(self, batch: Any) -> Jagged:
        return batch.ids, batch.offsets

    def trained(self, module: Any, device: torch.device, *, is_sharded: bool) -> Trained:
        on_gpu = device.type == "cuda"
        with torch.cuda.stream(torch.cuda.Stream(device)) if on_gpu else contextlib.nullcontext():
            trainer = Trainer(module, replace(self.plan, device=device))
            if is_sharded:
                trainer.model = nn.parallel.DistributedDataParallel(trainer.model)  # type: ignore[assignment]
        return Trained(trainer.model, trainer.step)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the command line requests."""

    works: tuple[Work, ...]
    ranks: int
    warm_up: int
    steps: int
    quick: bool
    device: str

    def barred(self, value: float, most: float | None) -> dict[str, Any]:
        """The fields of a bar, which is one of two GPUs."""
        if most is None or self.ranks != BARRED_RANKS:
            return {}
        return barred(at_most(value, most), quick=self.quick)


class Done(NamedTuple):
    """Steps of one kind on one rank. `floor_ms`: what PCIe alone needs for what moved · `misses`: rows, a step."""

    times: StepTimes
    floor_ms: float
    misses: float


class Exchange(NamedTuple):
    """A bare all-to-all, in equal parts, of as many bytes as a rank exchanges with others in a step: milliseconds,
    MiB."""

    samples: Quantiles
    mib: float


# --- who requests what from whom ------------------------------------------------------------------------------------


class Requests:
    """What a rank requests from all, in tables of a `shape` that are laid out so."""

    def __init__(self, layout: Layout, shape: Shape, jagged: Jagged) -> None:
        ids, offsets = jagged
        device, tables = ids.device, len(shape.sizes)
        self._ids, self._samples = ids, (len(offsets) - 1) // tables
        self._table = torch.arange(tables, device=device).repeat_interleave(offsets[:: self._samples].diff())
        self._holder = torch.from_numpy(layout.owner).to(device)  # of each table, or −1 where it is row-wise
        self._is_row_wise = self._holder[self._table] < 0
        self._owner = torch.where(self._is_row_wise, (ids + self._table) % layout.size, self._holder[self._table])
        self._width = torch.tensor(shape.widths, device=device)
        self._first = torch.tensor([0, *shape.sizes], device=device).cumsum(0)

    def bytes_with_others(self, rank: int) -> dict[str, int]:
        """Bytes of what `rank` sends to others, and what they send it: of ids, of rows and pooled bags, and of
        gradients."""
        is_sent = self._owner != rank
        row_wise = is_sent & self._is_row_wise
        keys: torch.Tensor = (self._first[self._table] + self._ids)[row_wise].unique()  # type: ignore[no-untyped-call]
        rows = 4 * int(self._width[torch.searchsorted(self._first, keys, right=True) - 1].sum())
        occurrences = 4 * int(self._width[self._table[row_wise]].sum())
        is_away = (self._holder >= 0) & (self._holder != rank)
        bags = 4 * self._samples * int(self._width[is_away].sum())
        return {"ids": 8 * int(is_sent.sum()), "rows": rows + bags, "gradients": occurrences + bags}


def sharding_of(shape: Shape, way: str) -> dict[str, Sharding] | None:
    """By the names of tables; None: what the library chooses."""
    if way == SHARDED:
        return None
    is_small = [4 * rows * width < WHOLE_BYTES for rows, width in zip(shape.sizes, shape.widths, strict=True)]
    kind = tieredemb.TableWise() if way == MIXED else tieredemb.Replicated()
    return {f"t{t}": kind if small else tieredemb.RowWise() for t, small in enumerate(is_small)}


def layout_of(work: Work, way: str, ranks: int) -> Layout:
    return Layout(table_configs(work.shape), ranks, sharding_of(work.shape, way))


def most_of_all(mine: int) -> int:
    """The largest of the ranks' numbers. A collective."""
    every = torch.tensor([mine])
    dist.all_reduce(every, op=dist.ReduceOp.MAX)
    return int(every)


# --- a rank ---------------------------------------------------------------------------------------------------------


class OfWidths(dict[int, CacheStats]):
    """Counters of rows of each width."""

    def __sub__(self, earlier: OfWidths) -> OfWidths:
        return OfWidths({width: its - earlier[width] for width, its in self.items()})

    @classmethod
    def of(cls, module: Any) -> OfWidths:
        module.stats()  # raises what a GPU has found wrong
        found = cls()
        for engine in module.engines:
            with engine.tables.locked():
                found |= {group.space.width: group.stats() for group in engine.tables.groups}
        return found

    @property
    def floor_ms(self) -> float:
        """That PCIe alone needs, a batch."""
        return sum(floor_ms(4 * width, done) for width, done in self.items())

    @property
    def misses(self) -> float:
        """Rows, a batch."""
        return sum(a_batch(done.rows_filled + done.rows_overflow, done) for done in self.values())


class Rank:
    """One of the processes. `wait`: for the others."""

    def __init__(self, plan: Plan, number: int, wait: Callable[[], object]) -> None:
        self.plan, self.number, self.wait = plan, number, wait
        self.device = torch.device("cpu") if plan.device == "cpu" else torch.device("cuda", number)

    @contextlib.contextmanager
    def seconds(self, what: str) -> Iterator[None]:
        """Says how long the inside takes."""
        start = perf_counter()
        yield
        if self.number == 0:
            say(f"{what}: {perf_counter() - start:.1f} s")

    def draw(self, work: Work, count: int) -> list[Any]:
        """Batches that no other rank has."""
        ranks = self.plan.ranks
        drawn = work.draw(ranks * count, slice(self.number, None, ranks), self.device)
        release(self.device)
        return drawn

    def steps(self, work: Work, way: str) -> dict[tuple[str, str, str], Done]:
        """Of each mode, by the work's name, the way and the mode."""
        plan, found, name = self.plan, {}, f"{work.name}, {way}"
        with self.seconds(f"{name}, drawing batches"):
            drawn = self.draw(work, len(work.modes) * (plan.warm_up + plan.steps + 2))
        left = iter(drawn)
        with self.seconds(f"{name}, building tables and setting weights"):
            module = self.tables(work, way)
            eager = work.trained(module, self.device, is_sharded=way != PLAIN)
        lengths = {len(work.jagged(batch)[0]) for batch in drawn}
        step = tieredemb.graph_step(eager.step, max_ids=max(lengths) if len(lengths) > 1 else None)
        for mode in work.modes:
            trained = eager._replace(step=step) if mode in CAPTURED else eager
            with self.seconds(name + mode):
                found[work.name, way, mode] = self.run_mode(mode, trained, module, left)
        module.close()
        del module, eager, step, trained
        release(self.device)
        return found

    def run_mode(self, mode: str, trained: Trained, module: Any, left: Iterator[Any]) -> Done:
        plan, device, step = self.plan, self.device, trained.step
        is_fetched = mode in (FETCHED, FETCHED_GRAPH)
        some = list(islice(left, plan.warm_up + plan.steps + 2 * is_fetched))

        def counters() -> OfWidths:
            return OfWidths.of(module)

        self.wait()
        if is_fetched:
            times, done = run_fetched(
                step, some, trained.model, counters, warm_up=plan.warm_up, depth=1, device=device, wait=self.wait
            )
        else:
            with on_one_thread() if mode == ONE_THREAD else contextlib.nullcontext():
                times, done = run_fresh(step, some, counters, warm_up=plan.warm_up, device=device, wait=self.wait)
        return Done(times, done.floor_ms, done.misses)

    def tables(self, work: Work, way: str) -> Any:
        """A collection, all of whose rows were written."""
        if way == PLAIN:
            module: Any = tiered_tables(work.shape, work.capacity, OPTIMIZER, self.device)
        else:
            layout = layout_of(work, way, self.plan.ranks)
            if self.device.type == "cuda":
                check_room(cold_bytes(work.shape, OPTIMIZER))
            module = tieredemb.ShardedTieredEmbeddingBagCollection(
                layout.tables, sharding=sharding_of(work.shape, way), capacity=work.capacity, optimizer=OPTIMIZER,
                device=self.device, timeout=TIMEOUT,
            )  # fmt: skip
        set_weights(module, work.shape, self.device)
        return module

    def resident(self, work: Work) -> Quantiles:
        """Captured steps of a plain collection that holds all rows."""
        with self.seconds(f"{work.name}, all resident"):
            batch = self.draw(work, 1)[0]
            module = tiered_tables(work.shape, 1.0, OPTIMIZER, self.device)
            with torch.no_grad():
                for some in every_row(work.shape.sizes, FILLED_AT_ONCE, self.device):
                    module(*some)
            step = tieredemb.graph_step(work.trained(module, self.device, is_sharded=False).step)
            given = [batch] * (MODE_STEPS + ROUNDS)
            times, _ = run_fresh(step, given, module.stats, warm_up=MODE_STEPS, device=self.device)
            module.close()
            del module, step
            release(self.device)
        return times.quantiles()

    def exchanges(self, work: Work) -> dict[str, Exchange]:
        """Those of one batch, tables sharded by default. Between GPUs alone."""
        layout, batch = layout_of(work, SHARDED, self.plan.ranks), self.draw(work, 1)[0]
        requests = Requests(layout, work.shape, work.jagged(batch))
        found = {}
        for what, mine in requests.bytes_with_others(self.number).items():
            size = most_of_all(mine)
            words = max(1, -(-size // (4 * (self.plan.ranks - 1))))  # for each other rank
            given = torch.zeros(self.plan.ranks * words, device=self.device)
            out = torch.empty_like(given)
            self.wait()

            def exchange(out: torch.Tensor = out, given: torch.Tensor = given) -> None:
                dist.all_to_all_single(out, given)

            found[what] = Exchange(timed(exchange), size / 2**20)
        return found

    def run(self, tell: Callable[[Any], object], meeting: str) -> None:
        """Tells all that it measures: first alone, as a plain collection trains in no world of several processes."""
        plan, on_gpu = self.plan, self.device.type == "cuda"
        for work in plan.works:
            if PLAIN in work.ways:
                tell(self.steps(work, PLAIN))
            if on_gpu and work.has_parts:
                tell({(work.name, RESIDENT): self.resident(work)})
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        dist.init_process_group(backend, f"file://{meeting}", rank=self.number, world_size=plan.ranks, timeout=TIMEOUT)
        for work in plan.works:
            if on_gpu and work.has_parts:
                with self.seconds(f"{work.name}, exchanges alone"):
                    found = self.exchanges(work)
                tell({(work.name, EXCHANGES): found})
            for way in work.ways:
                if way != PLAIN:
                    tell(self.steps(work, way))
        dist.destroy_process_group()


def serve(plan: Plan, number: int, meeting: str, barrier: Any, pipe: Any) -> None:
    """What the process of a rank does."""
    try:
        if plan.device == "cuda":
            torch.cuda.set_device(number)
        else:
            torch.set_num_threads(1)
        Rank(plan, number, lambda: barrier.wait(TIMEOUT.total_seconds())).run(pipe.send, meeting)
    except BaseException:
        say(traceback.format_exc())
        pipe.close()
        os._exit(1)  # the others may wait for this one, and it for graphs


# --- records --------------------------------------------------------------------------------------------------------


def records_of(plan: Plan, work: Work, found: Sequence[dict[Any, Any]]) -> list[Record]:
    """Of one workload. `found`: by rank; a step takes as long as on the rank that is slowest."""
    records, ms, name, bars = [], {}, work.name, work.bars
    for _, way, mode in (key for key in found[0] if key[0] == name and len(key) == 3):
        done = max((its[name, way, mode] for its in found), key=lambda each: each.times.mean_ms)
        ms[way, mode] = done.times.mean_ms
        note = f"{done.misses:,.0f} missed rows a rank, for which PCIe needs {done.floor_ms:.2f} ms; {done.times}"
        more: dict[str, Any] = {}
        if way != PLAIN and (PLAIN, mode) in ms:
            ratio = ms[way, mode] / ms[PLAIN, mode]
            more = {"ratio": ratio, "ratio_label": "× one GPU"}
            if way == SHARDED:
                most = {"": bars.eager, FETCHED_GRAPH: bars.captured}.get(mode)
                more |= plan.barred(ratio, most)
        records.append(measured("step", OURS, f"{name}, {way}{mode}", "ms", done.times.quantiles(), note=note, **more))
    for mode in work.modes:
        if (SHARDED, mode) in ms and (MIXED, mode) in ms:
            ratio = ms[SHARDED, mode] / ms[MIXED, mode]
            bar = plan.barred(ratio, bars.mixed)
            op = "sharded by default / small tables whole"
            records.append(measured(op, OURS, name + mode, "", once(ratio), **bar))
    if (SHARDED, "") in ms and (PLAIN, "") in ms:
        misses = [max(its[name, way, ""].misses for its in found) for way in (SHARDED, PLAIN)]
        ratio = misses[0] / max(1.0, misses[1])
        records.append(measured("misses of a rank / one GPU's", OURS, name, "", once(ratio)))
    if (name, EXCHANGES) in found[0]:
        records += records_of_parts(plan, work, found)
    return records


def records_of_parts(plan: Plan, work: Work, found: Sequence[dict[Any, Any]]) -> list[Record]:
    """What a captured step is made of, each part by itself, and the step by their sum."""

    def slowest(samples: Sequence[Quantiles]) -> Quantiles:
        return max(samples, key=lambda each: each.median)

    name, records = work.name, []
    resident, together = slowest([its[name, RESIDENT] for its in found]), 0.0
    for what, (_, mib) in found[0][name, EXCHANGES].items():
        samples = slowest([its[name, EXCHANGES][what].samples for its in found])
        together += samples.median
        config, note = f"{name}, all-to-all of as many bytes as {what}", f"{mib:.1f} MiB leave a rank"
        records.append(measured("alone", "NCCL", config, "ms", samples, note=note))
    config, note = f"{name}, captured step of one GPU", "of as many lookups, all rows resident"
    records.append(measured("alone", OURS, config, "ms", resident, note=note))
    for mode in CAPTURED:
        if (name, SHARDED, mode) in found[0]:
            step, floor = (
                max(get(its[name, SHARDED, mode]) for its in found)
                for get in (lambda done: done.times.mean_ms, lambda done: done.floor_ms)
            )
            ratio = step / (floor + together + resident.median)
            bar = plan.barred(ratio, work.bars.parts if mode == FETCHED_GRAPH else None)
            note = (
                f"PCIe's {floor:.2f} ms, {together:.2f} of exchanges and {resident.median:.2f} of one GPU's step, one "
                f"after the other"
            )
            op = "captured step / the sum of its parts"
            records.append(measured(op, OURS, name + mode, "", once(ratio), note=note, **bar))
    return records


def run(plan: Plan) -> tuple[list[Record], list[int]]:
    """Starts the ranks, and joins what they find: what all of them have reported before one fails is returned,
    and which have failed."""
    context = multiprocessing.get_context("spawn")
    found: list[dict[Any, Any]] = [{} for _ in range(plan.ranks)]
    with tempfile.TemporaryDirectory() as directory:
        pipes, processes, barrier = [], [], context.Barrier(plan.ranks)
        for number in range(plan.ranks):
            ours, theirs = context.Pipe(duplex=False)
            args = plan, number, str(Path(directory) / "store"), barrier, theirs
            processes.append(context.Process(target=serve, args=args, daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        with contextlib.suppress(EOFError):
            while True:
                for its, reported in zip(found, [pipe.recv() for pipe in pipes], strict=True):
                    its |= reported
        for process in processes:
            process.join(60)
            process.kill()
    failed = [number for number, process in enumerate(processes) if process.exitcode != 0]
    return [record for work in plan.works for record in records_of(plan, work, found)], failed


# --- command line ---------------------------------------------------------------------------------------------------


def title(plan: Plan) -> str:
    names = [f"{work.shape}, {work.capacity:,} slots a rank" for work in plan.works if isinstance(work, SingleIds)]
    names += ["DLRM: that of cuda-dlrm" for work in plan.works if isinstance(work, Dlrm)]
    seeds = sum(isinstance(work, Drawn) for work in plan.works)
    if seeds:
        names.append(
            f"seeds 0 … {seeds - 1}: shapes drawn at random (`benchmarks/shapes.py`), with jagged bags of the given "
            f"mean of ids, summed, or of 1 id, Zipf {shapes.ALPHA:g}, the given share of its rows cached on each rank"
        )
    return (
        f"Forward, backward and update over {plan.ranks} ranks, one GPU each, NCCL. {'; '.join(names)}. Bags of 1 id "
        f"where nothing else is said, fp32, row-wise Adagrad, unified memory, all rows written before; the batch is "
        f"a rank's. Sharded: as it is by default, row by row; with small tables whole, those of less than 1 MiB are "
        f"held by one rank each; with small tables replicated, by every rank. The mean of {plan.steps} steps on "
        f"batches never seen before, on the rank that is slowest, after {plan.warm_up} of warm-up in each mode: eager, "
        f"then with prefetch, then without it under "
        f"`torch.autograd.set_multithreading_enabled(False)`; then as CUDA graphs, without and with prefetch. The "
        f"parts of a step: all-to-alls in equal parts, of as many bytes as a rank exchanges with others (8 an id; of "
        f"a row-wise table a row for each different id, and a gradient for each occurrence; of one that "
        f"another rank holds a vector for each bag, both ways); a captured step of one GPU that holds all rows; "
        f"PCIe's time for the rows that move."
    )


def works_of(chosen: Any, known: dict[str, CudaWorkload], modes: tuple[str, ...]) -> Iterator[Work]:
    """What the command line has chosen."""
    of_dlrm = ["--quick", "--device", chosen.device.type] if chosen.quick else []
    slots, rows = 600 if chosen.quick else SLOTS, min(chosen.rows, known["W-1.05"].rows)
    for name in dict.fromkeys(chosen.workloads):
        more: dict[str, Any] = {"bars": BARS[name], "ways": (PLAIN, SHARDED), "modes": modes}
        if name == DLRM:
            dlrm, _ = dlrm_plan_of([*of_dlrm, "--rows", str(rows)])
            yield Dlrm(name=name, shape=dlrm.work, capacity=slots, has_parts=False, plan=dlrm, **more)
        elif name == SHAPES:
            its_modes = CAPTURED if chosen.device.type == "cuda" else EAGER
            more |= {"ways": (SHARDED,), "modes": tuple(mode for mode in modes if mode in its_modes)}
            for seed in range(min(chosen.shapes, 2) if chosen.quick else chosen.shapes):
                drawn = shapes.draw(seed, QUICK_LIMITS if chosen.quick else LIMITS)
                its_name = f"seed {seed}: {drawn}, {100 * drawn.share:g} % cached"
                yield Drawn(name=its_name, shape=drawn, capacity=drawn.share, **more)
        elif known[name].unequal:
            more |= {"ways": (PLAIN, SHARDED, MIXED, COPIED)}
            yield SingleIds(name=name, shape=known[name], capacity=known[name].caches[0].capacity, **more)
        else:
            yield SingleIds(name=name, shape=replace(known[name], rows=rows), capacity=slots, **more)


def plan_of(args: Sequence[str] | None = None) -> tuple[Plan, Path | None]:
    """The plan, and where its results go."""
    parser = make_parser("cuda_sharding", __doc__, rows=workloads()["W-1.05"].rows)
    names = {mode.removeprefix(", ") or "eager": mode for mode in (*EAGER, *CAPTURED)}
    parser.add_argument("--workloads", nargs="+", choices=list(BARS), default=list(BARS), help="default: all")
    parser.add_argument("--modes", nargs="+", choices=list(names), default=list(names), help="default: all")
    parser.add_argument("--shapes", type=int, default=10, help="drawn by the seeds 0, 1, … (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=BARRED_RANKS, help="processes, one a GPU (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=100, help="timed steps of each mode (default: %(default)s)")
    parser.add_argument("--warm-up", type=int, default=120, help="steps before them (default: %(default)s)")
    chosen = parse(parser, args)
    if chosen.device.type == "cuda" and torch.cuda.device_count() < chosen.ranks:
        raise SystemExit(f"{chosen.ranks} ranks need as many GPUs, here are {torch.cuda.device_count()}")
    here = (*EAGER, *CAPTURED) if chosen.device.type == "cuda" else EAGER[:2]
    modes = tuple(mode for name, mode in names.items() if name in chosen.modes and mode in here)
    known = quick_workloads() if chosen.quick else workloads()
    return Plan(
        works=tuple(works_of(chosen, known, modes)), ranks=chosen.ranks,
        warm_up=min(chosen.warm_up, 4) if chosen.quick else chosen.warm_up,
        steps=min(chosen.steps, 5) if chosen.quick else chosen.steps, quick=chosen.quick, device=chosen.device.type,
    ), chosen.results  # fmt: skip


def main(args: Sequence[str] | None = None) -> None:
    plan, results = plan_of(args)
    start = perf_counter()
    records, failed = run(plan)
    name = "cuda-sharding" if plan.ranks == BARRED_RANKS else f"cuda-sharding-{plan.ranks}"
    keep(None if failed else results, name, title(plan), records, statistic=STATISTIC)
    say(f"{perf_counter() - start:.0f} s in all")
    if failed:
        raise SystemExit(f"ranks {failed} have failed, as told above: what is said of the others is not kept")


if __name__ == "__main__":
    main()
