"""A training step with every row resident against `nn.EmbeddingBag(sparse=True)` with torch's optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import tieredemb
from benchmarks.conftest import Save
from benchmarks.record import Record, at_most, measured
from benchmarks.timing import interleave
from benchmarks.workload import Size, TieredTables, TorchTables, Workload
from tieredemb.config import OptimizerConfig

LR = 0.05
BAR = 1.0  # at most the time of torch
TORCH, CAT, OURS = "nn.EmbeddingBag, sparse", "the same, outputs concatenated", "tieredemb, all resident"
OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], OptimizerConfig]] = {
    "SGD": (torch.optim.SGD, tieredemb.SGD(lr=LR)),
    "Adagrad": (torch.optim.Adagrad, tieredemb.Adagrad(lr=LR)),
}


def bench_cpu_step(keep: Save, quick: bool) -> None:
    one = Size(warmup=8) if not quick else Size(tables=3, rows=1000, batch=256, warmup=2, rounds=5)
    ten = replace(one, bag=10, warmup=3, rounds=8 if not quick else 5)
    records = []
    for size in (one, ten):
        for name in OPTIMIZERS:
            records += _compare(size, name, barred=size is one)
    keep(
        "cpu-step",
        f"Forward, backward and update of {one} (and of 10), ids Zipf 1.05, fp32, every batch new, providers taking "
        f"turns. The baseline's outputs and gradients are {one.tables} tensors, tieredemb's are one. "
        "Ratio: median over the rounds.",
        records,
    )


def _compare(size: Size, name: str, *, barred: bool) -> list[Record]:
    make_torch, ours = OPTIMIZERS[name]
    work = Workload(size)

    def torch_tables(*, concatenated: bool) -> TorchTables:
        return TorchTables(work, lambda parameters: make_torch(parameters, lr=LR), concatenated=concatenated)

    baseline = torch_tables(concatenated=False)
    tiered = TieredTables(work, ours, capacity=1.0, resident=True)
    steps = {TORCH: baseline.step, OURS: tiered.step}
    if barred:  # beside the bar: a model that reads one tensor pays for the copy there and back
        steps[CAT] = torch_tables(concatenated=True).step
    interleave(steps, work.batches(size.warmup))
    times = interleave(steps, work.batches(size.rounds))
    _check_same(work, baseline, tiered)
    records = []
    for provider in sorted(steps, key=[TORCH, CAT, OURS].index):
        ratio = times.ratio(provider, TORCH)
        more: dict[str, Any] = {"ratio": ratio, "ratio_label": "× torch"} if provider != TORCH else {}
        if provider == OURS and barred:
            more |= at_most(ratio, BAR)
        quantiles = times.quantiles(provider)
        records.append(measured(name, provider, f"bags of {size.bag}", "ms", quantiles, scale=1e3, **more))
    return records


def _check_same(work: Workload, torch_tables: TorchTables, tiered: TieredTables) -> None:
    """Both have trained the same tables: another result would be another benchmark."""
    [(ids,)] = work.batches(1)
    with torch.no_grad():
        expected, found = torch.cat(torch_tables.forward(ids), 1), tiered.forward(ids)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
