"""The training workload of the step benchmarks: many tables, skewed ids, one upstream gradient.

Ids follow a bounded Zipf over the rows, p(r) ∝ r^-1.05 for r = 1 … rows, ranks mapped to ids by a random permutation
for each table. No batch is used twice: a pool that comes round again would teach a cache its period.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn

import tieredemb
from tieredemb.config import Capacity, OptimizerConfig
from tieredemb.storage.base import Storage

ALPHA = 1.05
SEED = 7


class EqualTables:
    """`tables` tables of `rows` × `width`, as a `Shape` of `cuda_tables`."""

    tables: int
    rows: int
    width: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each table."""
        return (self.rows,) * self.tables

    @property
    def widths(self) -> tuple[int, ...]:
        """Of each table."""
        return (self.width,) * self.tables


@dataclass(frozen=True, kw_only=True)
class Size(EqualTables):
    """`tables` tables of `rows` × `width`, batches of `batch` samples, bags of `bag` ids; `warmup`, `rounds` steps."""

    tables: int = 26
    rows: int = 100_000
    width: int = 64
    batch: int = 4096
    bag: int = 1
    warmup: int = 60
    rounds: int = 40

    def __str__(self) -> str:
        ids = "1 id" if self.bag == 1 else f"{self.bag} ids"
        return f"{self.tables} tables × {self.rows:,} × {self.width}, batch {self.batch:,}, bags of {ids}"


class Workload:
    """Batches and initial weights of one size, the same for every provider."""

    def __init__(self, size: Size) -> None:
        self.size = size
        self._random = np.random.default_rng(SEED)
        mass = np.cumsum(np.arange(1, size.rows + 1, dtype=np.float64) ** -ALPHA)
        self._cumulative = mass / mass[-1]
        self._id_of_rank = [self._random.permutation(size.rows) for _ in range(size.tables)]
        self.offsets = torch.arange(0, size.tables * size.batch * size.bag + 1, size.bag)
        generator = torch.Generator().manual_seed(SEED)
        self.gradient = torch.randn(size.batch, size.tables * size.width, generator=generator) * 1e-2

    @cached_property
    def weights(self) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(SEED + 1)
        shape = (self.size.rows, self.size.width)
        return [torch.randn(shape, generator=generator) for _ in range(self.size.tables)]

    def batches(self, count: int) -> list[tuple[torch.Tensor]]:
        """The next `count` batches: ids int64 (T·B·bag,), table-major. Generated before anything is timed."""
        per_table = self.size.batch * self.size.bag
        return [
            (torch.from_numpy(np.concatenate([self._draw(t, per_table) for t in range(self.size.tables)])),)
            for _ in range(count)
        ]

    def _draw(self, table: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        ranks = np.searchsorted(self._cumulative, self._random.random(count))
        ids: np.ndarray[tuple[int], np.dtype[np.int64]] = self._id_of_rank[table][ranks]
        return ids

    def every_row(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Ids and offsets of batches that name every row of every table once."""
        for start in range(0, self.size.rows, self.size.batch):
            ids = torch.arange(start, min(start + self.size.batch, self.size.rows))
            yield ids.repeat(self.size.tables), torch.arange(len(ids) * self.size.tables + 1)


class TorchTables:
    """The baseline: one `nn.EmbeddingBag(sparse=True)` a table and the torch optimizer.

    Its outputs stay apart, and so do the gradients that it is given; with `concatenated` they are one tensor (B, ΣD)
    each, as tieredemb's are.
    """

    def __init__(
        self, work: Workload, make_optimizer: Callable[..., torch.optim.Optimizer], *, concatenated: bool = False
    ) -> None:
        size = work.size
        self.bags = [
            nn.EmbeddingBag(size.rows, size.width, mode="sum", sparse=True, _weight=weight.clone())
            for weight in work.weights
        ]
        self.offsets = torch.arange(0, size.batch * size.bag, size.bag)
        self.concatenated = concatenated
        apart = [part.contiguous() for part in work.gradient.chunk(size.tables, 1)]
        self.gradients = [work.gradient] if concatenated else apart
        self.optimizer = make_optimizer([bag.weight for bag in self.bags])

    def forward(self, ids: torch.Tensor) -> list[torch.Tensor]:
        per_table = ids.view(len(self.bags), -1)
        outputs = [bag(table_ids, self.offsets) for bag, table_ids in zip(self.bags, per_table, strict=True)]
        return [torch.cat(outputs, 1)] if self.concatenated else outputs

    def step(self, ids: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        torch.autograd.backward(self.forward(ids), self.gradients)
        self.optimizer.step()


class TieredTables:
    """The same tables in a collection that `make` makes; `resident`: with all rows in the cache from the start."""

    def __init__(
        self,
        work: Workload,
        optimizer: OptimizerConfig,
        *,
        capacity: Capacity,
        storage: Storage | None = None,
        resident: bool = False,
        make: Callable[..., Any] = tieredemb.TieredEmbeddingBagCollection,
    ) -> None:
        size = work.size
        tables = [
            tieredemb.TableConfig(name=f"t{t}", num_embeddings=size.rows, embedding_dim=size.width)
            for t in range(size.tables)
        ]
        self.module = make(tables, capacity=capacity, optimizer=optimizer, storage=storage)
        self.module.load_state_dict({f"tables.t{t}.weight": weight for t, weight in enumerate(work.weights)})
        self.module.flush()
        self.offsets, self.gradient = work.offsets, work.gradient
        if resident:
            with torch.no_grad():
                for ids, offsets in work.every_row():
                    self.module(ids, offsets)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.module(ids, self.offsets)
        return out

    def step(self, ids: torch.Tensor) -> None:
        torch.autograd.backward(self.forward(ids), self.gradient)
