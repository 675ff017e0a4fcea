"""Training steps of a DLRM on a GPU: `python -m benchmarks.cuda_dlrm [--rows N] [--variants cached resident …]`.

What a cache costs in a whole step: forward, backward and update of all layers, bf16 autocast around fp32 tables. Every
variant has the same dense layers, optimizer of these (SGD, as CUDA graphs hold it) and batches; they run one after the
other, and each gives its memory back before the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import tieredemb
from benchmarks.cuda_command import add_steps, barred, keep, make_parser, parse
from benchmarks.cuda_providers import LR, OURS
from benchmarks.cuda_runs import a_batch, run_fetched, run_fresh
from benchmarks.cuda_step import (
    STATISTIC,
    TORCH_STEPS,
    TORCH_WARM_UP,
    cache_bytes,
    once,
    release,
    say,
)
from benchmarks.cuda_tables import cold_bytes, tiered_tables
from benchmarks.cuda_timing import StepTimes, allocated_bytes, synchronize
from benchmarks.cuda_workload import SEED, Cache, CudaWorkload, batches, every_row
from benchmarks.record import Record, at_least, at_most, measured
from benchmarks.timing import Quantiles
from examples.dlrm.config import ModelConfig
from examples.dlrm.model import DLRM, Batch
from examples.dlrm.text import CATEGORIES, INTEGERS
from tieredemb.cache.stats import CacheStats
from tieredemb.config import OptimizerConfig

ROWS, BATCH, ALPHA, SHARE = 2_000_000, 16_384, 1.2, 0.01
BOTTOM, TOP = (512, 256), (1024, 1024, 512, 256)  # hidden layers; a last one has the tables' width, or one output
DENSE_LR = 0.01
AGAIN = 20  # steps of warm-up for a further way of running warm tables: what is made at a first use
EAGER, AHEAD, GRAPH, GRAPH_AHEAD = "eager", "prefetch", "CUDA graph", "CUDA graph + prefetch"
MOST_AHEAD = 0.9  # of the time of eager steps, that those with prefetch may take
MOST_HOST = 1.03  # or of what their parts take the host: then there is nothing to hide
HOST_STEPS = 60  # that the host's time for a part is the median of


@dataclass(frozen=True, kw_only=True)
class Variant:
    """`capacity`: of the cache as a share of the rows, None for torch's tables · `optimizer`: of the tables."""

    config: str
    capacity: float | None
    optimizer: OptimizerConfig


VARIANTS = {
    "cached": Variant(config="1 % cache", capacity=SHARE, optimizer=tieredemb.RowWiseAdagrad(lr=LR)),
    "resident": Variant(config="all resident", capacity=1.0, optimizer=tieredemb.RowWiseAdagrad(lr=LR)),
    "adagrad": Variant(config="1 % cache, Adagrad", capacity=SHARE, optimizer=tieredemb.Adagrad(lr=LR)),
    "torch": Variant(config="all resident, Adagrad", capacity=None, optimizer=tieredemb.Adagrad(lr=LR)),
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the command line asked for."""

    work: CudaWorkload
    model: ModelConfig
    variants: tuple[str, ...]
    warm_up: int
    steps: int
    depth: int
    quick: bool
    device: torch.device

    @property
    def batches(self) -> int:
        """That a variant trains on at most."""
        return 2 * self.warm_up + 2 * min(AGAIN, self.warm_up) + 4 * self.steps + 2 * self.depth


@dataclass(frozen=True, kw_only=True)
class Run:
    """Steps of a variant in one way of running them; the loss of the last."""

    times: StepTimes
    done: CacheStats
    loss: float


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A variant's runs by their way, and bytes of its tables on the GPU. `host_ms`: what an eager step takes the host
    alone, by its parts."""

    runs: dict[str, Run]
    hbm_bytes: int
    host_ms: dict[str, Quantiles] = field(default_factory=dict)


# --- what is trained ------------------------------------------------------------------------------------------------


class Bags(nn.Module):
    """torch's tables: an `nn.EmbeddingBag` each, with sparse gradients. Bags have 1 id."""

    def __init__(self, work: CudaWorkload, device: torch.device) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(work.rows, work.width, mode="sum", sparse=True, device=device) for _ in range(work.tables)
        )
        bound = work.rows**-0.5
        for weight in self.tables.parameters():
            nn.init.uniform_(weight, -bound, bound)
        self.register_buffer("starts", torch.arange(work.batch, device=device), persistent=False)

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        per_table = ids.view(len(self.tables), -1)
        outputs = [table(own, self.starts) for table, own in zip(self.tables, per_table, strict=True)]
        return torch.cat(outputs, 1)


class Trainer:
    """A DLRM over `embeddings` and the optimizers that it needs beside theirs."""

    def __init__(self, embeddings: nn.Module, plan: Plan, *optimizers: torch.optim.Optimizer) -> None:
        self.model = DLRM(embeddings, plan.model, seed=SEED).to(plan.device)
        dense = torch.optim.SGD(self.model.dense_layers().parameters(), lr=DENSE_LR, foreach=True)
        self._optimizers = (dense, *optimizers)
        self._device_type = plan.device.type

    def step(self, batch: Batch) -> torch.Tensor:
        """Trains on a batch; its loss, float32 ()."""
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
        # no cache of casted weights: it would outlive the capture of a step, and each weight is casted once anyway
        with torch.autocast(self._device_type, torch.bfloat16, cache_enabled=False):
            logits = self.model(batch)
        loss = binary_cross_entropy_with_logits(logits.float(), batch.labels)
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in self._optimizers:
            optimizer.step()
        return loss.detach()


class Given(nn.Module):
    """In the place of tables: the same outputs each time, which take a gradient."""

    def __init__(self, work: CudaWorkload, device: torch.device) -> None:
        super().__init__()
        self.outputs = nn.Parameter(torch.zeros(work.batch, work.tables * work.width, device=device))

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.outputs.view_as(self.outputs)


class Heard:
    """A step that remembers the last loss."""

    def __init__(self, step: Callable[[Batch], torch.Tensor]) -> None:
        self._step = step
        self._loss = torch.full((), float("nan"))

    def __call__(self, batch: Batch) -> None:
        self._loss = self._step(batch)

    @property
    def loss(self) -> float:
        """Synchronises."""
        return float(self._loss)


def training_batches(plan: Plan, count: int) -> list[Batch]:
    """Batches on the device, drawn before anything is timed; labels are a coin's."""
    ids, random = batches(plan.work, count, plan.device), torch.Generator(plan.device).manual_seed(SEED)
    samples = plan.work.batch
    dense = torch.randn((count, samples, INTEGERS), generator=random, device=plan.device)
    labels = torch.randint(2, (count, samples), generator=random, device=plan.device).float()
    offsets = torch.arange(plan.work.lookups + 1, device=plan.device)
    return [Batch(dense[i], ids[i], offsets, labels[i]) for i in range(count)]


# --- measuring ------------------------------------------------------------------------------------------------------


def measure(plan: Plan, variant: Variant, drawn: Sequence[Batch]) -> Measured:
    """Builds a variant, measures it, and gives its memory back."""
    start, before = perf_counter(), allocated_bytes(plan.device)
    say(f"{variant.config}: building")
    found = measure_torch(plan, drawn, before) if variant.capacity is None else measure_tiered(plan, variant, drawn)
    release(plan.device)
    say(f"{variant.config}: {perf_counter() - start:.1f} s")
    return found


def measure_tiered(plan: Plan, variant: Variant, drawn: Sequence[Batch]) -> Measured:
    """Runs the steps eagerly and as CUDA graph, without and with prefetch, each on batches of its own.

    Every row has been looked up once before, so that none is generated while it trains."""
    start, work, bound = perf_counter(), plan.work, plan.work.rows**-0.5
    assert variant.capacity is not None
    module = tiered_tables(
        work, variant.capacity, variant.optimizer, plan.device, init=tieredemb.Uniform(low=-bound, high=bound)
    )
    try:
        with torch.no_grad():
            for ids, offsets in every_row(work.sizes, work.lookups, plan.device):
                module(ids, offsets)
        module.stats()  # waits for it
        size_gib = cold_bytes(work, variant.optimizer) / 2**30
        say(f"  {size_gib:.1f} GiB built, and every row looked up, in {perf_counter() - start:.1f} s")
        runs = dict(measure_ways(plan, module, Trainer(module, plan), iter(drawn)))
        return Measured(
            runs=runs, hbm_bytes=cache_bytes(module.memory_report()), host_ms=host_parts(plan, module, drawn)
        )
    finally:
        module.close()


def measure_ways(
    plan: Plan, module: tieredemb.TieredEmbeddingBagCollection, trainer: Trainer, fresh: Iterator[Batch]
) -> Iterator[tuple[str, Run]]:
    for way in (EAGER, AHEAD, GRAPH, GRAPH_AHEAD):
        is_eager = way in (EAGER, AHEAD)
        start, warm_up = perf_counter(), plan.warm_up if is_eager else min(AGAIN, plan.warm_up)
        step = Heard(trainer.step if is_eager else tieredemb.graph_step(trainer.step))
        if way in (EAGER, GRAPH):
            own = list(islice(fresh, warm_up + plan.steps))
            times, done = run_fresh(step, own, module.stats, warm_up=warm_up, device=plan.device)
        else:
            own = list(islice(fresh, warm_up + plan.steps + plan.depth))
            times, done = run_fetched(
                step, own, trainer.model, module.stats, warm_up=warm_up, depth=plan.depth, device=plan.device
            )
        run = Run(times=times, done=done, loss=step.loss)
        say(f"  {way}: {times.mean_ms:.3f} ms a step ({times}), loss {run.loss:.7g}; {perf_counter() - start:.1f} s")
        yield way, run


def host_parts(plan: Plan, module: nn.Module, drawn: Sequence[Batch]) -> dict[str, Quantiles]:
    """What an eager step of the dense layers takes the host, and one of the tables: milliseconds until Python has
    enqueued it, the GPU at rest before."""
    dense = Trainer(Given(plan.work, plan.device), plan)
    gradient = torch.zeros(plan.work.batch, plan.work.tables * plan.work.width, device=plan.device)

    def look_up(batch: Batch) -> None:
        torch.autograd.backward(module(batch.ids, batch.offsets), gradient)

    found = {}
    steps: dict[str, Callable[[Batch], object]] = {"dense layers": dense.step, "tables": look_up}
    for part, step in steps.items():
        samples = []
        for number, batch in enumerate(drawn[: AGAIN + HOST_STEPS]):
            synchronize(plan.device)
            start = perf_counter()
            step(batch)
            if number >= AGAIN:
                samples.append(1e3 * (perf_counter() - start))
        synchronize(plan.device)
        found[part] = Quantiles.of(samples)
        say(f"  host, {part}: {found[part].median:.3f} ms a step")
    return found


def measure_torch(plan: Plan, drawn: Sequence[Batch], before: int) -> Measured:
    """torch's own tables, eager: their optimizer and their gradients cannot be captured."""
    tables = Bags(plan.work, plan.device)
    sparse = torch.optim.Adagrad(tables.parameters(), lr=LR)
    step = Heard(Trainer(tables, plan, sparse).step)
    allocated = allocated_bytes(plan.device) - before
    warm_up, steps = min(TORCH_WARM_UP, plan.warm_up), min(TORCH_STEPS, plan.steps)
    times, done = run_fresh(step, drawn[: warm_up + steps], CacheStats, warm_up=warm_up, device=plan.device)
    say(f"  {times.mean_ms:.3f} ms a step ({times}), loss {step.loss:.7g}")
    return Measured(runs={"eager": Run(times=times, done=done, loss=step.loss)}, hbm_bytes=allocated)


# --- records --------------------------------------------------------------------------------------------------------


def records_of(plan: Plan, found: dict[str, Measured]) -> list[Record]:
    records = []
    for name, measurement in found.items():
        for way, run in measurement.runs.items():
            records.append(step_record(plan, name, way, run, found))
        if AHEAD in measurement.runs:
            records += records_of_prefetch(plan, VARIANTS[name].config, measurement, has_bar=name == "cached")
        config, provider = VARIANTS[name].config, "nn.EmbeddingBag" if name == "torch" else OURS
        records.append(measured("HBM of the tables", provider, config, "MiB", once(measurement.hbm_bytes / 2**20)))
    return records


def records_of_prefetch(plan: Plan, config: str, measurement: Measured, *, has_bar: bool) -> list[Record]:
    """What the host takes for the parts of a step, and how steps with prefetch compare with it, and with those
    without."""
    eager, ahead = (measurement.runs[way].times.mean_ms for way in (EAGER, AHEAD))
    host = sum(part.median for part in measurement.host_ms.values())
    records = [
        measured(f"host time of the {part}", OURS, config, "ms", samples)
        for part, samples in measurement.host_ms.items()
    ]
    bars: tuple[dict[str, Any], dict[str, Any]] = {}, {}
    if has_bar:  # one of the two is to be met: bound by the host, prefetch has nothing to hide
        is_met = ahead / eager <= MOST_AHEAD or ahead / host <= MOST_HOST
        texts = f"≤ {MOST_AHEAD:g}×, or", f"≤ {MOST_HOST:g}×"
        bars = tuple(barred({"bar": text, "met": is_met}, quick=plan.quick) for text in texts)  # type: ignore[assignment]
    ratios = {
        "DLRM step, prefetch / eager": ahead / eager,
        "DLRM step, prefetch / host time of its parts": ahead / host,
    }
    for (op, ratio), bar in zip(ratios.items(), bars, strict=True):
        records.append(measured(op, OURS, config, "", once(ratio), **bar))
    return records


def step_record(plan: Plan, name: str, way: str, run: Run, found: dict[str, Measured]) -> Record:
    config = f"{VARIANTS[name].config}, {way}"
    if name == "torch":
        provider = "nn.EmbeddingBag × 26, sparse, torch.optim.Adagrad"
        return measured("DLRM step", provider, config, "ms", run.times.quantiles(), note=str(run.times))
    note, mean = f"{moved(run.done)}; {run.times}", run.times.mean_ms
    more: dict[str, Any] = {}
    if name == "cached" and "resident" in found:
        whole = found["resident"].runs[way]
        more = {"ratio": mean / whole.times.mean_ms, "ratio_label": "× all resident"}
        if way == GRAPH_AHEAD:
            more |= barred(at_most(more["ratio"], 1.05), quick=plan.quick)
        note += f"; last loss {run.loss:.7g}, {'the bits of' if run.loss == whole.loss else 'not that of'} all resident"
    if name == "adagrad" and "torch" in found:
        times_faster = found["torch"].runs["eager"].times.mean_ms / mean
        more = {"ratio": times_faster, "ratio_label": "× as fast as nn.EmbeddingBag"}
        if way == GRAPH_AHEAD:
            more |= barred(at_least(times_faster, 2.0), quick=plan.quick)
    return measured("DLRM step", OURS, config, "ms", run.times.quantiles(), note=note, **more)


def moved(done: CacheStats) -> str:
    filled, written = (a_batch(count, done) for count in (done.rows_filled, done.rows_written_back))
    return f"hit rate {done.hit_rate:.1%}, {filled:,.0f} missed rows and {written:,.0f} written back a batch"


def title(plan: Plan) -> str:
    work = plan.work
    return (
        f"Training steps of a DLRM, 13 dense features, bottom MLP {layers(*plan.model.bottom, work.width)}, top MLP "
        f"{layers(*plan.model.top, 1)}, bf16 autocast, SGD; {work}, bags of 1 id, fp32, unified memory, every row "
        f"looked up once before; row-wise Adagrad for the tables where nothing else is said. The mean of {plan.steps} "
        f"steps on batches never seen before: first eager, without and with {plan.depth} fetched ahead, after "
        f"{plan.warm_up} of warm-up, then as CUDA graph without and with prefetch, after "
        f"{min(AGAIN, plan.warm_up)} more each. torch: {min(TORCH_STEPS, plan.steps)} steps after "
        f"{min(TORCH_WARM_UP, plan.warm_up)}."
    )


def layers(*widths: int) -> str:
    return "-".join(map(str, widths))


# --- command line ---------------------------------------------------------------------------------------------------


def plan_of(args: Sequence[str] | None = None) -> tuple[Plan, Path | None]:
    """The plan, and where its results go."""
    parser = make_parser("cuda_dlrm", __doc__, rows=ROWS)
    add_steps(parser)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    chosen = parse(parser, args)
    rows, batch = (min(chosen.rows, 2000), 16) if chosen.quick else (chosen.rows, BATCH)
    bottom, top = ((16,), (16,)) if chosen.quick else (BOTTOM, TOP)
    cache = Cache(capacity=SHARE)
    work = CudaWorkload(name="DLRM", tables=CATEGORIES, rows=rows, batch=batch, alpha=ALPHA, caches=(cache,))
    plan = Plan(
        work=work,
        model=ModelConfig(rows_per_table=rows, embedding_dim=work.width, bottom=bottom, top=top),
        variants=tuple(dict.fromkeys(chosen.variants)),
        warm_up=min(chosen.warm_up, 4) if chosen.quick else chosen.warm_up,
        steps=min(chosen.steps, 5) if chosen.quick else chosen.steps,
        depth=chosen.depth,
        quick=chosen.quick,
        device=chosen.device,
    )
    return plan, chosen.results


def main(args: Sequence[str] | None = None) -> None:
    plan, results = plan_of(args)
    start = perf_counter()
    drawn = training_batches(plan, plan.batches)
    say(f"{plan.work}: {len(drawn)} batches drawn in {perf_counter() - start:.1f} s")
    found = {}
    for name in plan.variants:
        found[name] = measure(plan, VARIANTS[name], drawn)
    keep(results, "cuda-dlrm", title(plan), records_of(plan, found), statistic=STATISTIC)
    say(f"{perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
