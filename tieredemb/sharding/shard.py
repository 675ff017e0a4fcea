"""The rows of one width that a rank owns, and the lookups in them that all ranks request.

They are a table set like any other. Its tables are parts of larger ones (`TablePart`), and initial values, random bits
of rounding and checkpoints go by the ids of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from tieredemb.cache.base import PlanKind
from tieredemb.config import Normal, TableConfig
from tieredemb.lookup.bags import KeySpace
from tieredemb.lookup.options import LookupOptions
from tieredemb.sharding.bags import parts_of
from tieredemb.sharding.layout import REPLICATED, Layout
from tieredemb.sharding.request import Request, RequestLayout
from tieredemb.step.engine import Engine
from tieredemb.step.gradient_norms import OverRanks
from tieredemb.step.planned_forwards import PlanExecutor, Planned
from tieredemb.storage.base import RowOpener
from tieredemb.tables.config import TableSetConfig
from tieredemb.tables.table_set import TableSet
from tieredemb.tables.torch_kinds import Optimizer

if TYPE_CHECKING:
    from tieredemb.step.call_memory import CallMemory


def own_tables(layout: Layout, tables: Sequence[int], rank: int) -> tuple[TableConfig, ...]:
    """The parts of `tables` that a rank holds; rows of row-wise ones are looked up one by one. A table needs a row, so
    where a rank holds none there is one that nobody requests, and that need not be resident."""
    made = []
    for t in tables:
        table, part = layout.tables[t], layout.part(t, rank)
        padding = None
        if table.padding_idx is not None:
            position, rest = divmod(table.padding_idx - part.first, part.step)
            padding = position if rest == 0 and 0 <= position < part.own_rows else None
        mode = table.mode if layout.owner[t] in (rank, REPLICATED) else "sum"
        own = replace(table, num_embeddings=max(1, part.own_rows), mode=mode, padding_idx=padding)
        if not part.own_rows:
            own = replace(own, init=Normal(), placement="cached" if table.placement == "cached" else "auto")
        made.append(own)
    return tuple(made)


class Held:
    """The `tables` that a rank holds, by their numbers in the collection. `engine`: looks up and updates the rows
    here."""

    def __init__(
        self,
        tables: Sequence[int],
        config: TableSetConfig,
        options: LookupOptions,
        optimizer: Optimizer,
        over_ranks: OverRanks,
        rows: RowOpener | None = None,
    ) -> None:
        self.tables = list(tables)
        self.engine = Engine(TableSet(config, rows=rows), optimizer, over_ranks=over_ranks)
        self.context = self.engine.context(options)


class Shard(Held):
    """The rows of the tables of one width that a rank holds, and that others request, too. `space`: the key space of
    all rows, as batches name them · `parts`: see `parts_of` · `request_layout`: what all requests of them have in
    common."""

    def __init__(
        self,
        layout: Layout,
        rank: int,
        tables: Sequence[int],
        columns: Sequence[int],
        config: TableSetConfig,
        options: LookupOptions,
        optimizer: Optimizer,
        over_ranks: OverRanks,
        *,
        rows: RowOpener,
    ) -> None:
        super().__init__(tables, config, options, optimizer, self._counted_once, rows)
        self._over_ranks = over_ranks
        self._elsewhere = [n for n, t in enumerate(self.tables) if not layout.saved_part(t, rank).own_rows]
        self.space = KeySpace(layout.tables, self.tables, list(columns))
        self.parts = parts_of(layout, self.tables, list(columns), sends_padding=options.plans_padding)
        self.request_layout = RequestLayout(self.parts, rank, layout.size, config.device)

    def _counted_once(self, totals: torch.Tensor, norm_type: float) -> torch.Tensor:
        """See `OverRanks`: replicated rows count on one rank alone."""
        for table in self._elsewhere:
            totals[table] = 0
        return self._over_ranks(totals, norm_type)

    def plan_ahead(
        self,
        executor: PlanExecutor,
        request: Request,
        kind: PlanKind,
        memory: CallMemory | None = None,
    ) -> Planned:
        """Plans what `look_up` will look up, by `executor`; see `Engine.plan_ahead`."""
        batch = request.batch
        return self.engine.plan_ahead(executor, batch.given, lambda *_: batch, self.context, kind, memory)
