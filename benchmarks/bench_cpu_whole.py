"""Losses that use a table as a whole, so that every row moves in every step: beside torch, converted in one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, logsigmoid

import tieredemb
from benchmarks.conftest import Save
from benchmarks.record import Record, at_most, measured
from benchmarks.timing import interleave

ITEMS, USERS, WIDTH, BATCH, LENGTH, EDGES = 100_000, 20_000, 64, 256, 20, 1_000_000
FIELDS, FIELD_ROWS, FIELD_WIDTH = 26, 20_000, 16
CAPACITIES, BAR, WARM_UP, ROUNDS = (1.0, 0.1), 1.3, 3, 9
TORCH = "torch"


class Sizes:
    """Those of a run, or of a quick one."""

    def __init__(self, quick: bool) -> None:
        self.items, self.users, self.edges = (60, 40, 200) if quick else (ITEMS, USERS, EDGES)
        self.fields, self.field_rows, self.batch = (3, 50, 8) if quick else (FIELDS, FIELD_ROWS, BATCH)


class Sequences(nn.Module):
    """As GRU4Rec: a history of items is read, and all items are scored."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.items, self.gru = nn.Embedding(sizes.items, WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.shape = sizes.items, sizes.batch

    def loss(self, random: torch.Generator) -> torch.Tensor:
        items, batch = self.shape
        ids = torch.randint(items, (batch, LENGTH + 1), generator=random)
        _, (last,) = self.gru(self.items(ids[:, :-1]))
        return cross_entropy(last @ self.items.weight.T, ids[:, -1])


class Propagated(nn.Module):
    """As LightGCN: the weights of all users and items are propagated over a graph."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(sizes.users, WIDTH), nn.Embedding(sizes.items, WIDTH)
        self.shape = sizes.users, sizes.items, sizes.batch
        random = torch.Generator().manual_seed(0)
        ends = [torch.randint(count, (sizes.edges,), generator=random) for count in (sizes.users, sizes.items)]
        both = torch.stack([torch.cat([ends[0], ends[1] + sizes.users]), torch.cat([ends[1] + sizes.users, ends[0]])])
        nodes = sizes.users + sizes.items
        weights = torch.full((both.shape[1],), nodes / both.shape[1])
        self.register_buffer("graph", torch.sparse_coo_tensor(both, weights, (nodes, nodes)).coalesce().to_sparse_csr())

    def loss(self, random: torch.Generator) -> torch.Tensor:
        users, items, batch = self.shape
        layers = [torch.cat([self.users.weight, self.items.weight])]
        for _ in range(2):
            layers.append(self.graph @ layers[-1])
        of = torch.stack(layers).mean(0)
        user, good, bad = (torch.randint(count, (batch,), generator=random) for count in (users, items, items))
        scores = (of[user] * (of[users + good] - of[users + bad])).sum(1)
        return -logsigmoid(scores).mean()


class Whole(nn.Module):
    """As ENMF: the products of all items' columns, and norms of both weights."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(sizes.users, WIDTH), nn.Embedding(sizes.items, WIDTH)
        self.shape = sizes.users, sizes.items, sizes.batch

    def loss(self, random: torch.Generator) -> torch.Tensor:
        users, items, batch = self.shape
        of = self.users(torch.randint(users, (batch,), generator=random))
        history = self.items(torch.randint(items, (batch, LENGTH), generator=random))
        weight = self.items.weight
        every = (of.T @ of) * (weight.T @ weight)
        score = (of[:, None] * history).sum(2)
        return (
            0.1 * every.sum() + (score.square() - 2 * score).sum() + 1e-3 * (self.users.weight.norm() + weight.norm())
        )


class Regularised(nn.Module):
    """As FuxiCTR's DeepFM: fields and layers, and the squares of all weights."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.fields = nn.ModuleList(nn.Embedding(sizes.field_rows, FIELD_WIDTH) for _ in range(sizes.fields))
        self.layers = nn.Sequential(nn.Linear(sizes.fields * FIELD_WIDTH, 256), nn.ReLU(), nn.Linear(256, 1))
        self.shape = sizes.field_rows, sizes.batch

    def loss(self, random: torch.Generator) -> torch.Tensor:
        rows, batch = self.shape
        ids = torch.randint(rows, (len(self.fields), batch), generator=random)
        of = torch.stack([field(each) for field, each in zip(self.fields, ids, strict=True)], 1)
        pairs = 0.5 * (of.sum(1).square() - of.square().sum(1)).sum(1)
        wanted = (ids.sum(0) % 2).to(torch.float32)
        loss = binary_cross_entropy_with_logits(pairs + self.layers(of.flatten(1))[:, 0], wanted)
        return loss + sum(0.5e-6 * torch.norm(each.weight, 2) ** 2 for each in self.fields)


MODELS: dict[str, Callable[[Sizes], Any]] = {
    "GRU4Rec, scores of all items": Sequences,
    "LightGCN, two layers": Propagated,
    "ENMF, products and norms": Whole,
    "DeepFM, norms of all tables": Regularised,
}


def bench_cpu_whole(keep: Save, quick: bool) -> None:
    sizes, warm_up, rounds = Sizes(quick), 1 if quick else WARM_UP, 2 if quick else ROUNDS
    found: list[Record] = []
    for name in MODELS:
        found += _compare(name, sizes, warm_up, rounds, quick=quick)
    keep(
        "cpu-whole",
        f"Models whose losses use whole tables, as RecBole and FuxiCTR have them: {sizes.items:,} items and "
        f"{sizes.users:,} users × {WIDTH}, {sizes.edges:,} edges; or {sizes.fields} fields × {sizes.field_rows:,} rows "
        f"× {FIELD_WIDTH}. Batch {sizes.batch}, histories of {LENGTH}; forward, backward and `step()` of "
        f"torch.optim.Adam, all taking turns; {rounds} rounds after {warm_up} of warm-up. Ratio: median over rounds.",
        found,
    )


def _compare(name: str, sizes: Sizes, warm_up: int, rounds: int, *, quick: bool) -> list[Record]:
    steps = {TORCH: _stepper(name, sizes, None)}
    steps |= {f"tieredemb, capacity {capacity:.0%}": _stepper(name, sizes, capacity) for capacity in CAPACITIES}
    interleave(steps, [()] * warm_up)
    times = interleave(steps, [()] * rounds)
    found = []
    for provider in steps:
        more: dict[str, Any] = {}
        if provider != TORCH:
            ratio = times.ratio(provider, TORCH)
            more = {"ratio": ratio, "ratio_label": "× torch"}
            if provider.endswith(" 100%") and not quick:
                more |= at_most(ratio, BAR)
        found.append(measured("step", provider, name, "ms", times.quantiles(provider), scale=1e3, **more))
    return found


def _stepper(name: str, sizes: Sizes, capacity: float | None) -> Callable[[], None]:
    torch.manual_seed(0)
    model = MODELS[name](sizes)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    if capacity is not None:
        tieredemb.replace_embedding_bags(model, capacity=capacity, optimizer=optimizer)
    random = torch.Generator().manual_seed(1)

    def step() -> None:
        optimizer.zero_grad()
        model.loss(random).backward()
        optimizer.step()

    return step
