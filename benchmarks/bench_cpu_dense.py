"""A model under torch's dense Adam, the optimizer that most people take, which moves every row in every step: as it
was, and converted in one line, by the size of its tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import tieredemb
from benchmarks.conftest import Save
from benchmarks.cuda_converted import ALPHA, Trained
from benchmarks.cuda_workload import CudaWorkload, batches
from benchmarks.dense_optimizers import of_mean_loss
from benchmarks.record import Record, measured
from benchmarks.timing import interleave

TABLES, WIDTH, BATCH, SHARE = 26, 16, 2048, 0.1
ROWS = (10_000, 30_000, 100_000, 300_000)
WARM_UP, ROUNDS = 12, 11
LR = 1e-3
TORCH, CONVERTED = "torch, nn.EmbeddingBag", "tieredemb, converted"


class Model(nn.Module):
    """Tables that are looked up one after the other, with dense gradients as `nn.EmbeddingBag` has by default."""

    def __init__(self, work: CudaWorkload) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(work.rows, work.width, mode="sum") for _ in range(work.tables))
        self.register_buffer("offsets", torch.arange(work.batch), persistent=False)

    def forward(self, ids: torch.Tensor) -> list[torch.Tensor]:
        return [bag(each, self.offsets) for bag, each in zip(self.bags, ids.view(len(self.bags), -1), strict=True)]


def bench_cpu_dense(keep: Save, quick: bool) -> None:
    tables, sizes, width, batch = (3, (300, 600), 8, 32) if quick else (TABLES, ROWS, WIDTH, BATCH)
    warm_up, rounds = (2, 3) if quick else (WARM_UP, ROUNDS)
    found: list[Record] = []
    for rows in sizes:
        work = CudaWorkload(name="dense", tables=tables, rows=rows, width=width, batch=batch, alpha=ALPHA, caches=())
        found += _compare(work, warm_up, rounds)
    keep(
        "cpu-dense",
        f"Forward, backward from the gradient of a mean loss, and `step()` of torch.optim.Adam: {tables} tables × "
        f"{width}, batch {batch:,}, bags of 1 id, Zipf {ALPHA:g}, fp32, dense gradients; converted with a capacity of "
        f"{100 * SHARE:g} %. Every batch new, both taking turns; {rounds} rounds after {warm_up} of warm-up. Ratio: "
        "median over the rounds.",
        found,
    )


def _compare(work: CudaWorkload, warm_up: int, rounds: int) -> list[Record]:
    gradient = torch.randn(work.batch, work.tables * work.width, generator=torch.Generator().manual_seed(1))
    parts = [part.contiguous() for part in of_mean_loss(gradient).chunk(work.tables, 1)]
    steps: dict[str, Callable[..., object]] = {
        provider: _trained(work, parts, convert=provider == CONVERTED).step for provider in (TORCH, CONVERTED)
    }
    given = [(ids,) for ids in batches(work, warm_up + rounds, torch.device("cpu"))]
    interleave(steps, given[:warm_up])
    times = interleave(steps, given[warm_up:])
    found = []
    for provider in steps:
        more: dict[str, Any] = {}
        if provider == CONVERTED:
            more = {"ratio": times.ratio(provider, TORCH), "ratio_label": "× torch"}
        config = f"{work.rows:,} rows a table"
        found.append(measured("step, Adam", provider, config, "ms", times.quantiles(provider), scale=1e3, **more))
    return found


def _trained(work: CudaWorkload, gradients: list[torch.Tensor], *, convert: bool) -> Trained:
    torch.manual_seed(0)
    model = Model(work)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    if convert:
        tieredemb.replace_embedding_bags(model, capacity=SHARE, optimizer=optimizer)
    return Trained(model, optimizer, gradients)
