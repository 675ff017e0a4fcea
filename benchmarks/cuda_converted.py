"""A model of many tables as most people write it, converted in one line: `python -m benchmarks.cuda_converted`.

26 `nn.EmbeddingBag` and a sparse optimizer of torch's, against the same model whose tables were replaced, eager, with
`prefetch` and as `graph_step`, and against the same tables as one collection. Then the same with Adam, which moves
every row in every step; and tables of six widths against tables of one. On a GPU; `--device cpu` runs there too.
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
DENSE_SHARE = 0.1
TORCH_DENSE = "torch, nn.EmbeddingBag"
ADAM, FOLLOWING, FUSED = ", Adam", "tieredemb, converted, following Adam", "tieredemb, one collection, fused Adam"
MOST_DENSE = 0.22  # of torch's dense Adam, that a converted model which follows it may take
WIDTHS = (16, 32, 48, 64, 96, 128)  # of tables in turn, 61 on the average
ONE_WIDTH, SIX_WIDTHS = "tieredemb, converted, one width", "tieredemb, converted, six widths"
MOST_WIDTHS = 1.3  # of the time of tables of one width, that tables of several may take
MOST_DENSE_GRAPH = 1.15  # of a collection's time with fused Adam, that it may take as a graph with prefetch
Batch = Sequence[torch.Tensor]


class Model(nn.Module):
    """Tables that are looked up one after the other, as models that nobody here wrote do."""

    def __init__(
        self, work: CudaWorkload, device: torch.device, *, sparse: bool = True, widths: Sequence[int] = ()
    ) -> None:
        super().__init__()
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(work.rows, width, mode="sum", sparse=sparse, device=device)
            for width in widths or [work.width] * work.tables
        )
        self.register_buffer("offsets", torch.arange(work.batch, device=device), persistent=False)

    def forward(self, ids: Batch) -> list[torch.Tensor]:
        return [bag(each, self.offsets) for bag, each in zip(self.bags, ids, strict=True)]


class Collection(nn.Module):
    """The same tables as one collection, whose ids the model puts together."""

    def __init__(
        self, work: CudaWorkload, capacity: float, device: torch.device, optimizer: Any = torch.optim.Adagrad
    ) -> None:
        super().__init__()
        tables = [
            tieredemb.TableConfig(name=f"t{t}", num_embeddings=work.rows, embedding_dim=work.width)
            for t in range(work.tables)
        ]
        self.tables = tieredemb.TieredEmbeddingBagCollection(
            tables, capacity=capacity, optimizer=optimizer, device=device
        )
        self.register_buffer("offsets", torch.arange(work.lookups + 1, device=device), persistent=False)

    def forward(self, ids: torch.Tensor) -> list[torch.Tensor]:
        pooled: torch.Tensor = self.tables(ids, self.offsets)
        return [pooled]


@dataclass(frozen=True)
class Trained:
    """A model and its optimizer. `gradients`: of its outputs, in every step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None  # None where the backward updates the rows
    gradients: list[torch.Tensor]

    def step(self, batch: Any) -> None:
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        torch.autograd.backward(self.model(batch), self.gradients)
        if self.optimizer is not None:
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
    del model, plain, baseline
    release(device)
    return found + records_of_adam(plan, apart, ids, each, whole) + records_of_widths(plan, apart)


def records_of_adam(
    plan: Plan, apart: list[Any], ids: torch.Tensor, each: list[torch.Tensor], whole: torch.Tensor
) -> list[Record]:
    """Adam of torch over whole tables, tables that follow it, and fused Adam over one collection."""
    work, device, start = plan.work, plan.device, perf_counter()
    model = Model(work, device, sparse=False)
    plain = Trained(model, torch.optim.Adam(model.parameters(), lr=LR), each)
    converted = Model(work, device, sparse=False)
    followed = torch.optim.Adam(converted.parameters(), lr=LR, capturable=device.type == "cuda")
    tieredemb.replace_embedding_bags(converted, capacity=DENSE_SHARE, optimizer=followed)
    first: Any = converted.bags[0]
    together = Collection(work, DENSE_SHARE, device, tieredemb.Adam(lr=LR))
    set_weights(together.tables, work, device)
    ways: dict[tuple[str, str], Way] = {
        (TORCH_DENSE, ""): Way(step=plain.step, batches=cycle(apart), warm_up=plan.warm_up)
    }
    of_providers: list[tuple[str, Trained, Any, Callable[[], CacheStats]]] = [
        (FOLLOWING, Trained(converted, followed, each), apart, first.tables.whole.stats),
        (FUSED, Trained(together, None, [whole]), list(ids), together.tables.stats),
    ]
    for provider, trained, given, stats in of_providers:
        of_provider = modes_of(
            trained.step, iter(given), trained.model, stats, warm_up=plan.warm_up, fetched=False, device=device
        )
        ways |= {(provider, mode): way for mode, way in of_provider.items()}
    runs = run_in_turns(ways, steps=plan.steps, device=device)
    first.close()
    together.tables.close()
    ms, found = {name: times.mean_ms for name, (times, _) in runs.items()}, []
    for (provider, mode), (times, done) in runs.items():
        config, more, note = f"capacity {100 * DENSE_SHARE:g} %{ADAM}{mode}", dict[str, Any](), str(times)
        if provider != TORCH_DENSE:
            ratio = times.mean_ms / ms[TORCH_DENSE, ""]
            more, note = {"ratio": ratio, "ratio_label": "× torch"}, f"hit rate {100 * done.hit_rate:.1f} %; {times}"
            if (provider, mode) == (FOLLOWING, ""):
                more |= at_most(ratio, MOST_DENSE)
        found.append(measured("step", provider, config, "ms", times.quantiles(), note=note, **more))
    if (FUSED, FETCHED_GRAPH) in ms:
        ratio = ms[FOLLOWING, FETCHED_GRAPH] / ms[FUSED, FETCHED_GRAPH]
        name, config = f"step, converted / collection{FETCHED_GRAPH}", f"capacity {100 * DENSE_SHARE:g} %{ADAM}"
        found.append(measured(name, FOLLOWING, config, "", once(ratio), **at_most(ratio, MOST_DENSE_GRAPH)))
    say(f"Adam: {perf_counter() - start:.1f} s")
    return found


def records_of_widths(plan: Plan, apart: list[Any]) -> list[Record]:
    """Converted tables of six widths, and of one."""
    work, device, start = plan.work, plan.device, perf_counter()
    ways, closers = dict[tuple[str, str], Way](), []
    for provider, widths in ((ONE_WIDTH, [work.width] * work.tables), (SIX_WIDTHS, _widths(work.tables))):
        model = Model(work, device, widths=widths)
        optimizer = torch.optim.Adagrad(model.parameters(), lr=LR)
        tieredemb.replace_embedding_bags(model, capacity=DENSE_SHARE, optimizer=optimizer)
        gradients = [torch.full((work.batch, width), 1e-2, device=device) for width in widths]
        trained, bags = Trained(model, optimizer, gradients), list[Any](model.bags)
        sets = list({id(bag.tables.whole): bag.tables.whole for bag in bags}.values())

        def stats(sets: list[Any] = sets) -> CacheStats:
            return sum((each.stats() for each in sets), CacheStats())

        of_provider = modes_of(
            trained.step, iter(apart), model, stats, warm_up=plan.warm_up, fetched=False, device=device
        )
        ways |= {(provider, mode): way for mode, way in of_provider.items()}
        closers += [each.close for each in sets]
    runs = run_in_turns(ways, steps=plan.steps, device=device)
    for close in closers:
        close()
    found, config = [], f"capacity {100 * DENSE_SHARE:g} %"
    for (provider, mode), (times, done) in runs.items():
        note, more = f"hit rate {100 * done.hit_rate:.1f} %; {times}", dict[str, Any]()
        if provider == SIX_WIDTHS:
            ratio = times.mean_ms / runs[ONE_WIDTH, mode][0].mean_ms
            more = {"ratio": ratio, "ratio_label": "× one width", **at_most(ratio, MOST_WIDTHS)}
        found.append(measured("step", provider, config + mode, "ms", times.quantiles(), note=note, **more))
    say(f"widths: {perf_counter() - start:.1f} s")
    return found


def _widths(tables: int) -> list[int]:
    return [WIDTHS[table % len(WIDTHS)] for table in range(tables)]


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
