"""A model of many tables as most people write it, converted in one line: `python -m benchmarks.cuda_converted`.

26 `nn.EmbeddingBag` and a sparse optimizer of torch's, against the same model whose tables were replaced, eager, with
`prefetch` and as `graph_step`, and against the same tables as one collection. On a GPU; `--device cpu` runs there too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn

import tieredemb
from benchmarks.cuda_command import keep, make_parser, parse
from benchmarks.cuda_modes import FETCHED, FETCHED_GRAPH, GRAPH, batches_of_modes, modes_of
from benchmarks.cuda_runs import Way, run_in_turns
from benchmarks.cuda_step import STATISTIC, once, release, say
from benchmarks.cuda_tables import set_weights
from benchmarks.cuda_workload import Cache, CudaWorkload, batches
from benchmarks.record import Record, at_most, measured
from tieredemb.cache.stats import CacheStats

TABLES, ROWS, WIDTH, BATCH, ALPHA = 26, 200_000, 64, 4096, 1.05
SHARES = (1.0, 0.1)
STEPS, WARM_UP = 100, 40
LR = 0.05
TORCH = "torch, nn.EmbeddingBag(sparse=True)"
CONVERTED, COLLECTION = "tieredemb, converted", "tieredemb, one collection"
MOST_EAGER = 0.35  # of torch's time, that a converted model may take
MOST_GRAPH = 1.2  # of the collection's time, that a converted model may take as a graph
MOST_FETCHED = 1.0  # of its time without prefetch, that a converted model may take with it
Batch = Sequence[torch.Tensor]


class Model(nn.Module):
    """Tables that are looked up one after the other, as models that nobody here wrote do."""

    def __init__(self, work: CudaWorkload, device: torch.device) -> None:
        super().__init__()
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(work.rows, work.width, mode="sum", sparse=True, device=device) for _ in range(work.tables)
        )
        self.register_buffer("offsets", torch.arange(work.batch, device=device), persistent=False)

    def forward(self, ids: Batch) -> list[torch.Tensor]:
        return [bag(each, self.offsets) for bag, each in zip(self.bags, ids, strict=True)]


class Collection(nn.Module):
    """The same tables as one collection, whose ids the model puts together."""

    def __init__(self, work: CudaWorkload, capacity: float, device: torch.device) -> None:
        super().__init__()
        tables = [
            tieredemb.TableConfig(name=f"t{t}", num_embeddings=work.rows, embedding_dim=work.width)
            for t in range(work.tables)
        ]
        self.tables = tieredemb.TieredEmbeddingBagCollection(
            tables, capacity=capacity, optimizer=torch.optim.Adagrad, device=device
        )
        self.register_buffer("offsets", torch.arange(work.lookups + 1, device=device), persistent=False)

    def forward(self, ids: torch.Tensor) -> list[torch.Tensor]:
        pooled: torch.Tensor = self.tables(ids, self.offsets)
        return [pooled]


@dataclass(frozen=True)
class Trained:
    """A model and its optimizer. `gradients`: of its outputs, in every step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    gradients: list[torch.Tensor]

    def step(self, batch: Any) -> None:
        self.optimizer.zero_grad()
        torch.autograd.backward(self.model(batch), self.gradients)
        self.optimizer.step()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the command line asked for."""

    work: CudaWorkload
    warm_up: int
    steps: int
    device: torch.device


def records(plan: Plan) -> list[Record]:
    work, device = plan.work, plan.device
    ids = batches(work, batches_of_modes(plan.warm_up, plan.steps), device)
    apart = [list(each.view(work.tables, -1).unbind()) for each in ids]
    random = torch.Generator(device).manual_seed(1)
    whole = torch.randn(work.batch, work.tables * work.width, generator=random, device=device).mul_(1e-2)
    each = [part.contiguous() for part in whole.chunk(work.tables, 1)]

    model = Model(work, device)
    plain = Trained(model, torch.optim.Adagrad(model.parameters(), lr=LR), each)
    baseline = Way(step=plain.step, batches=cycle(apart), warm_up=plan.warm_up)
    found = []
    for share in SHARES:
        start, capacity = perf_counter(), f"capacity {100 * share:g} %"
        ways, closers = {(TORCH, ""): baseline}, []
        for provider in (CONVERTED, COLLECTION):
            trained, given, stats, close = tiered(provider, plan, share, apart, ids, each, whole)
            of_provider = modes_of(
                trained.step, iter(given), trained.model, stats, warm_up=plan.warm_up, fetched=True, device=device
            )
            ways |= {(provider, mode): way for mode, way in of_provider.items()}
            closers.append(close)
        runs = run_in_turns(ways, steps=plan.steps, device=device)
        for close in closers:
            close()
        ms = {name: times.mean_ms for name, (times, _) in runs.items()}
        for (provider, mode), (times, done) in runs.items():
            if provider == TORCH:
                config = f"by turns with {capacity}"
                found.append(measured("step", TORCH, config, "ms", times.quantiles(), note=str(times)))
                continue
            ratio = times.mean_ms / ms[TORCH, ""]
            more: dict[str, Any] = {"ratio": ratio, "ratio_label": "× torch"}
            if provider == CONVERTED and mode in ("", FETCHED):
                more |= at_most(ratio, MOST_EAGER)
            note = f"hit rate {100 * done.hit_rate:.1f} %; {times}"
            found.append(measured("step", provider, capacity + mode, "ms", times.quantiles(), note=note, **more))
        found += modes(ms, capacity)
        del ways, closers, trained, stats, close, of_provider
        release(device)
        say(f"{capacity}: {perf_counter() - start:.1f} s")
    return found


def modes(ms: dict[tuple[str, str], float], config: str) -> list[Record]:
    """How a converted model's times with prefetch compare with those without, and as a graph with the collection's.
    `ms`: by provider and mode."""
    fetched = ms[CONVERTED, FETCHED] / ms[CONVERTED, ""]
    found = [measured("step, prefetch / eager", CONVERTED, config, "", once(fetched), **at_most(fetched, MOST_FETCHED))]
    for mode in (GRAPH, FETCHED_GRAPH):
        if (CONVERTED, mode) in ms:
            ratio = ms[CONVERTED, mode] / ms[COLLECTION, mode]
            name = f"step, converted / collection{mode}"
            found.append(measured(name, CONVERTED, config, "", once(ratio), **at_most(ratio, MOST_GRAPH)))
    return found


def tiered(
    provider: str,
    plan: Plan,
    share: float,
    apart: list[Any],
    ids: torch.Tensor,
    each: list[torch.Tensor],
    whole: torch.Tensor,
) -> tuple[Trained, list[Any], Callable[[], CacheStats], Callable[[], None]]:
    """What trains, its batches, the counters of its cache, and what closes it."""
    if provider == COLLECTION:
        together = Collection(plan.work, share, plan.device)
        set_weights(
            together.tables, plan.work, plan.device
        )  # rows that are there, as those of a model that has trained
        optimizer = torch.optim.Adagrad(together.tables.parameters(), lr=LR)
        together.tables.follow(optimizer)
        return Trained(together, optimizer, [whole]), list(ids), together.tables.stats, together.tables.close
    model = Model(plan.work, plan.device)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=LR)
    tieredemb.replace_embedding_bags(model, capacity=share, optimizer=optimizer)
    first: Any = model.bags[0]
    return Trained(model, optimizer, each), apart, first.tables.whole.stats, first.close


def title(plan: Plan) -> str:
    work = plan.work
    return (
        f"Forward, backward from a gradient of the outputs, and `step()` of torch.optim.Adagrad: {work.tables} × "
        f"{work.rows:,} × {work.width}, batch {work.batch:,}, bags of 1 id, Zipf {work.alpha:g}, fp32. The mean of "
        f"{plan.steps} steps on batches never seen before, after {plan.warm_up} of warm-up; all take turns."
    )


# --- command line ---------------------------------------------------------------------------------------------------


def plan_of(args: Sequence[str] | None = None) -> tuple[Plan, Path | None]:
    """The plan, and where its results go."""
    parser = make_parser("cuda_converted", __doc__, rows=ROWS)
    parser.add_argument("--steps", type=int, default=STEPS, help="timed steps of each mode (default: %(default)s)")
    parser.add_argument("--warm-up", type=int, default=WARM_UP, help="steps before the first (default: %(default)s)")
    chosen = parse(parser, args)
    rows, batch = (min(chosen.rows, 300), 32) if chosen.quick else (chosen.rows, BATCH)
    tables, width = (3, 8) if chosen.quick else (TABLES, WIDTH)
    steps, warm_up = (min(chosen.steps, 5), min(chosen.warm_up, 4)) if chosen.quick else (chosen.steps, chosen.warm_up)
    caches = tuple(Cache(capacity=share) for share in SHARES)
    work = CudaWorkload(
        name="converted", tables=tables, rows=rows, width=width, batch=batch, alpha=ALPHA, caches=caches
    )
    return Plan(work=work, warm_up=warm_up, steps=steps, device=chosen.device), chosen.results


def main(args: Sequence[str] | None = None) -> None:
    plan, results = plan_of(args)
    start = perf_counter()
    found = records(plan)
    keep(results, "cuda-converted", title(plan), found, statistic=STATISTIC)
    say(f"{perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
