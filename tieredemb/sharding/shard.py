"""The side of a lookup where the rows are: what a rank owns of the tables of one width, and what others ask of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from tieredemb.config import Normal, TableConfig
from tieredemb.lookup.bags import KeySpace
from tieredemb.lookup.options import LookupOptions
from tieredemb.sharding.layout import Layout
from tieredemb.step.batch import Batch
from tieredemb.step.call import Call
from tieredemb.step.engine import Engine
from tieredemb.step.gradient_norms import OverRanks
from tieredemb.step.planned_forwards import PlanExecutor, Planned
from tieredemb.tables.config import TableSetConfig
from tieredemb.tables.table_set import TableSet
from tieredemb.tables.torch_kinds import Optimizer


def own_tables(layout: Layout, tables: Sequence[int], rank: int) -> tuple[TableConfig, ...]:
    """What a rank holds of `tables`: rows that are looked up one by one. A table needs a row, so of one that others
    hold there is one that nobody asks for."""
    made = []
    for t in tables:
        table, part = layout.tables[t], layout.part(t, rank)
        padding = None
        if table.padding_idx is not None:
            position, rest = divmod(table.padding_idx - part.first, part.step)
            padding = position if rest == 0 and 0 <= position < part.own_rows else None
        own = replace(table, num_embeddings=max(1, part.own_rows), mode="sum", padding_idx=padding)
        made.append(own if part.own_rows else replace(own, init=Normal(), placement="cached"))
    return tuple(made)


@dataclass(frozen=True)
class Asked:
    """What all ranks ask of this one. `counts`: int64 (W, F) on the CPU, ids of each rank and feature · on the tables'
    device, `place`: int64 (N,), where what comes feature by feature, and in these rank by rank, lies among what comes
    rank by rank, and `edges`: int64 (F + 1,), of the features."""

    counts: torch.Tensor
    place: torch.Tensor
    edges: torch.Tensor

    @classmethod
    def of(cls, counts: torch.Tensor, device: torch.device) -> Asked:
        """What `counts` announce. Does not synchronise."""
        lengths = counts.numpy()
        starts = (np.cumsum(lengths) - lengths.ravel()).reshape(lengths.shape)  # rank by rank, features in their order
        by_feature, first = lengths.T.ravel(), starts.T.ravel()
        before = np.cumsum(by_feature) - by_feature
        told = torch.from_numpy(np.concatenate([first - before, by_feature, [0], np.cumsum(lengths.sum(0))]))
        if device.type == "cuda":
            told = told.pin_memory().to(device, non_blocking=True)
        parts = [counts.numel(), counts.numel(), counts.shape[1] + 1]
        shift, length, edges = torch.split(told, parts)  # type: ignore[no-untyped-call]
        total = int(by_feature.sum())
        place = torch.repeat_interleave(shift, length, output_size=total)
        return cls(counts, place.add_(torch.arange(total, device=device)), edges)

    def by_feature(self, values: torch.Tensor) -> torch.Tensor:
        """What came rank by rank, feature by feature: as one batch of all ranks has it."""
        return values[self.place]

    def by_rank(self, values: torch.Tensor) -> torch.Tensor:
        """The other way round."""
        out = torch.empty_like(values)
        out[self.place] = values
        return out

    @property
    def per_rank(self) -> list[int]:
        counts: list[int] = self.counts.sum(1).tolist()
        return counts


class Held:
    """What a rank holds of `tables`, by their numbers in the collection. `engine`: that of the rows here."""

    def __init__(
        self,
        tables: Sequence[int],
        config: TableSetConfig,
        options: LookupOptions,
        optimizer: Optimizer,
        over_ranks: OverRanks,
    ) -> None:
        self.tables = list(tables)
        self.engine = Engine(TableSet(config), optimizer, over_ranks=over_ranks)
        self.context = self.engine.context(options)


class Shard(Held):
    """Of the tables of one width those rows that others ask for, too. `space`: the key space of all rows, as batches
    name them."""

    def __init__(
        self,
        layout: Layout,
        tables: Sequence[int],
        columns: Sequence[int],
        config: TableSetConfig,
        options: LookupOptions,
        optimizer: Optimizer,
        over_ranks: OverRanks,
    ) -> None:
        super().__init__(tables, config, options, optimizer, over_ranks)
        self.space = KeySpace(layout.tables, self.tables, list(columns))

    def plan_ahead(self, executor: PlanExecutor, ids: torch.Tensor, asked: Asked, **how: Any) -> Planned:
        """Plans what `look_up` will be asked for, by `executor`; `how`: see `Engine.plan_ahead`."""
        batch = _batch(ids, asked)
        return self.engine.plan_ahead(executor, batch.given, lambda *_: batch, self.context, **how)

    def look_up(self, ids: torch.Tensor, asked: Asked, **how: Any) -> tuple[Call, torch.Tensor]:
        """The call of a batch of all ranks, `ids` feature by feature, and the rows, (N, D), as they go back. `how`: see
        `Engine.begin`. May raise what a cache does."""
        call = self.engine.begin(_batch(ids, asked), self.context, **how)
        try:
            return call, asked.by_rank(call.pool(None, differentiable=False))
        except BaseException:
            call.release()
            raise


def _batch(ids: torch.Tensor, asked: Asked) -> Batch:
    """A bag of each feature, whose rows are not pooled."""
    return Batch(ids, asked.edges, len(asked.edges), True, 1, None, (ids, asked.edges))
