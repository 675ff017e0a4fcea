"""Models of shapes that nobody chose, converted in one line, against torch's: steps, and lookups without gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import tieredemb
from benchmarks.conftest import Save
from benchmarks.record import Record, measured
from benchmarks.shapes import ALPHA, Jagged, Limits, Shape, batches, draw
from benchmarks.timing import Interleaved, interleave

LIMITS = Limits(
    tables=(2, 5, 12, 30),
    widths=((8,), (16,), (64,), (16, 32), (8, 64)),
    largest=5.0,
    bags=(1, 1, 5, 20),
    batches=(64, 512, 2048),
    shares=(0.1,),
    most_ids=100_000,
    most_bytes=2 << 30,
)
SHAPES, WARM_UP, ROUNDS = 10, 6, 15
LR = 0.01
SPARSE, DENSE, OURS = "torch, sparse gradients", "torch, dense gradients", "tieredemb, converted"
CPU = torch.device("cpu")


class Model(nn.Module):
    """Tables that are looked up one after the other, and a layer."""

    def __init__(self, shape: Shape, *, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(shape.seed)
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(rows, width, mode="sum", sparse=sparse, include_last_offset=True)
            for rows, width in zip(shape.sizes, shape.widths, strict=True)
        )
        self.top = nn.Linear(sum(shape.widths), 1)

    def forward(self, batch: list[Jagged]) -> torch.Tensor:
        pooled = [bag(ids, offsets) for bag, (ids, offsets) in zip(self.bags, batch, strict=True)]
        out: torch.Tensor = self.top(torch.cat(pooled, 1))
        return out


@dataclass(frozen=True)
class Trained:
    """A model and its optimizer."""

    model: Model
    optimizer: torch.optim.Optimizer

    @classmethod
    def of(cls, shape: Shape, provider: str) -> Trained:
        model = Model(shape, sparse=provider != DENSE)
        optimizer = torch.optim.Adagrad(model.parameters(), lr=LR)
        if provider == OURS:
            tieredemb.replace_embedding_bags(model, capacity=shape.share, optimizer=optimizer)
        return cls(model, optimizer)

    def step(self, batch: list[Jagged]) -> None:
        self.optimizer.zero_grad()
        torch.autograd.backward(self.model(batch).mean())
        self.optimizer.step()

    def lookup(self, batch: list[Jagged]) -> None:
        with torch.no_grad():
            self.model(batch)


def bench_cpu_shapes(keep: Save, quick: bool) -> None:
    shapes, warm_up, rounds = (2, 2, 3) if quick else (SHAPES, WARM_UP, ROUNDS)
    records: list[Record] = []
    for seed in range(shapes):
        records += _compare(draw(seed, LIMITS), warm_up, rounds)
    keep(
        "cpu-shapes",
        f"{shapes} shapes drawn by the seeds 0 … {shapes - 1} (`benchmarks/shapes.py`): jagged bags of the given mean "
        f"of ids, Zipf {ALPHA:g}, fp32. Step: forward of `nn.EmbeddingBag` after `nn.EmbeddingBag` and a linear layer, "
        f"backward of the mean, `step()` of torch.optim.Adagrad; converted with a capacity of "
        f"{100 * LIMITS.shares[0]:g} %. Lookup: the forward alone, without gradient. Every batch new; after {warm_up} "
        f"of warm-up, {rounds} rounds in which all take turns. Ratio: to torch with sparse gradients, median "
        "over the rounds.",
        records,
    )


def _compare(shape: Shape, warm_up: int, rounds: int) -> list[Record]:
    each = {provider: Trained.of(shape, provider) for provider in (SPARSE, DENSE, OURS)}
    given = [(batch,) for batch in batches(shape, warm_up + 2 * rounds, CPU)]
    steps: dict[str, Callable[..., object]] = {provider: trained.step for provider, trained in each.items()}
    lookups: dict[str, Callable[..., object]] = {provider: each[provider].lookup for provider in (SPARSE, OURS)}
    interleave(steps, given[:warm_up])
    times = interleave(steps, given[warm_up : warm_up + rounds])
    found = _records("step", times, shape)
    interleave(lookups, given[:1])
    return found + _records("lookup", interleave(lookups, given[warm_up + rounds :]), shape)


def _records(op: str, times: Interleaved, shape: Shape) -> list[Record]:
    found = []
    for provider in times.seconds:
        more: dict[str, Any] = {}
        if provider != SPARSE:
            more = {"ratio": times.ratio(provider, SPARSE), "ratio_label": "× torch"}
        found.append(measured(op, provider, str(shape), "ms", times.quantiles(provider), scale=1e3, **more))
    return found
