"""Models whose losses use tables as a whole, as RecBole and FuxiCTR have them: every row moves in every step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, logsigmoid

import tieredemb
from tieredemb.cache.stats import CacheStats

WIDTH, FIELD_WIDTH, LENGTH = 64, 16, 20
SCORES = "GRU4Rec, scores of all items"


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of the tables and batches of all models: by default tiny ones."""

    items: int = 60
    users: int = 40
    edges: int = 200
    fields: int = 3
    field_rows: int = 50
    batch: int = 8

    def __str__(self) -> str:
        return (
            f"{self.items:,} items and {self.users:,} users × {WIDTH}, {self.edges:,} edges; or {self.fields} fields × "
            f"{self.field_rows:,} rows × {FIELD_WIDTH}. Batch {self.batch}, histories of {LENGTH}"
        )


class Sequences(nn.Module):
    """As GRU4Rec: a history of items is read, and all items are scored."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.items, self.gru = nn.Embedding(sizes.items, WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.shape = sizes.items, sizes.batch

    def loss(self, random: torch.Generator) -> torch.Tensor:
        items, batch = self.shape
        ids = torch.randint(items, (batch, LENGTH + 1), generator=random, device=random.device)
        _, (last,) = self.gru(self.items(ids[:, :-1]))
        return cross_entropy(last @ self.items.weight.T, ids[:, -1])


class Propagated(nn.Module):
    """As LightGCN: the weights of all users and items are propagated over a graph."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(sizes.users, WIDTH), nn.Embedding(sizes.items, WIDTH)
        self.shape = sizes.users, sizes.items, sizes.batch
        random = torch.Generator("cpu").manual_seed(0)
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
        user, good, bad = (
            torch.randint(count, (batch,), generator=random, device=random.device) for count in (users, items, items)
        )
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
        of = self.users(torch.randint(users, (batch,), generator=random, device=random.device))
        history = self.items(torch.randint(items, (batch, LENGTH), generator=random, device=random.device))
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
        ids = torch.randint(rows, (len(self.fields), batch), generator=random, device=random.device)
        of = torch.stack([field(each) for field, each in zip(self.fields, ids, strict=True)], 1)
        pairs = 0.5 * (of.sum(1).square() - of.square().sum(1)).sum(1)
        wanted = (ids.sum(0) % 2).to(torch.float32)
        loss = binary_cross_entropy_with_logits(pairs + self.layers(of.flatten(1))[:, 0], wanted)
        return loss + sum(0.5e-6 * torch.norm(each.weight, 2) ** 2 for each in self.fields)


MODELS: dict[str, Callable[[Sizes], Any]] = {
    SCORES: Sequences,
    "LightGCN, two layers": Propagated,
    "ENMF, products and norms": Whole,
    "DeepFM, norms of all tables": Regularised,
}


class Trained:
    """A model and torch.optim.Adam, its tables as torch has them or, with a `capacity`, converted."""

    def __init__(self, name: str, sizes: Sizes, capacity: float | None, device: torch.device) -> None:
        torch.manual_seed(0)
        self.model: Any = MODELS[name](sizes).to(device)
        self._optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        if capacity is not None:
            tieredemb.replace_embedding_bags(self.model, capacity=capacity, optimizer=self._optimizer)
        self._random = torch.Generator(device).manual_seed(1)

    def step(self) -> None:
        self._optimizer.zero_grad()
        self.model.loss(self._random).backward()
        self._optimizer.step()

    def stats(self) -> CacheStats:
        """What the caches of its tables have done."""
        caches = {id(module.tables.whole): module.tables.whole for module in self.model.modules() if _is_tiered(module)}
        return sum((each.stats() for each in caches.values()), CacheStats())


def _is_tiered(module: nn.Module) -> bool:
    return isinstance(module, (tieredemb.TieredEmbedding, tieredemb.TieredEmbeddingBag))
