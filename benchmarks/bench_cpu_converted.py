"""A model of many tables as most people write it, converted in one line: against torch's, and against the same tables
as one collection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.conftest import Save
from benchmarks.cuda_converted import (
    ALPHA,
    BATCH,
    COLLECTION,
    CONVERTED,
    LR,
    ROWS,
    SHARES,
    TABLES,
    TORCH,
    WIDTH,
    Model,
    Plan,
    Trained,
    tiered,
)
from benchmarks.cuda_workload import CudaWorkload, batches
from benchmarks.record import Record, at_most, measured
from benchmarks.timing import Interleaved, Quantiles, interleave

MOST = 1.2  # of the collection's time
WARM_UP, ROUNDS = 20, 40


def bench_cpu_converted(keep: Save, quick: bool) -> None:
    tables, rows, width, batch = (3, 300, 8, 32) if quick else (TABLES, ROWS, WIDTH, BATCH)
    work = CudaWorkload(name="converted", tables=tables, rows=rows, width=width, batch=batch, alpha=ALPHA, caches=())
    warm_up, rounds = (2, 5) if quick else (WARM_UP, ROUNDS)
    plan = Plan(work=work, warm_up=warm_up, steps=rounds, device=torch.device("cpu"))
    records: list[Record] = []
    for share in SHARES:
        records += _compare(plan, share)
    keep(
        "cpu-converted",
        f"Forward, backward from a gradient of the outputs, and `step()` of torch.optim.Adagrad: {tables} × {rows:,} × "
        f"{width}, batch {batch:,}, bags of 1 id, Zipf {ALPHA:g}, fp32, every batch new, providers taking turns. "
        "Ratios: medians over the rounds.",
        records,
    )


def _compare(plan: Plan, share: float) -> list[Record]:
    work, device = plan.work, plan.device
    ids = batches(work, plan.warm_up + plan.steps, device)
    whole = torch.randn(work.batch, work.tables * work.width, generator=torch.Generator().manual_seed(1)).mul_(1e-2)
    each = [part.contiguous() for part in whole.chunk(work.tables, 1)]
    model = Model(work, device)
    torchs = Trained(model, torch.optim.Adagrad(model.parameters(), lr=LR), each)
    steps: dict[str, Callable[[torch.Tensor], object]] = {TORCH: lambda some: torchs.step(_apart(work, some))}
    closing = []
    for provider in (CONVERTED, COLLECTION):
        trained, *_, close = tiered(provider, plan, share, [], ids, each, whole)
        steps[provider] = _step(work, provider, trained)
        closing.append(close)
    interleave(steps, [(some,) for some in ids[: plan.warm_up]])
    times = interleave(steps, [(some,) for some in ids[plan.warm_up :]])
    for close in closing:
        close()
    return _records(times, f"capacity {100 * share:g} %")


def _apart(work: CudaWorkload, ids: torch.Tensor) -> list[torch.Tensor]:
    return list(ids.view(work.tables, -1).unbind())


def _step(work: CudaWorkload, provider: str, trained: Trained) -> Callable[[torch.Tensor], object]:
    if provider == COLLECTION:
        return trained.step
    return lambda ids: trained.step(_apart(work, ids))


def _records(times: Interleaved, config: str) -> list[Record]:
    found = []
    for provider in (TORCH, CONVERTED, COLLECTION):
        more: dict[str, Any] = {}
        if provider != TORCH:
            more = {"ratio": times.ratio(provider, TORCH), "ratio_label": "× torch"}
        found.append(measured("step", provider, config, "ms", times.quantiles(provider), scale=1e3, **more))
    ratio = times.ratio(CONVERTED, COLLECTION)
    once = Quantiles(ratio, ratio, ratio, 1)
    return [*found, measured("step, converted / collection", CONVERTED, config, "", once, **at_most(ratio, MOST))]
