"""The ranks that hold a sharded collection: one here, which exchanges nothing; several in `distributed_ranks`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from tieredemb.cache.base import PlanKind
from tieredemb.sharding.exchange import Exchange
from tieredemb.sharding.shard import Held
from tieredemb.sharding.stats import ShardedStats
from tieredemb.step.batch import Batch, Given
from tieredemb.step.engine import Engine
from tieredemb.step.planned_forwards import PlanExecutor, Planned, PlannedForwards
from tieredemb.tables.checkpoint import load, save, saved_alone

if TYPE_CHECKING:
    from tieredemb.step.agreement import Agreement


class Ranks:
    """This rank and the others: here there are none, and each call does, and costs, what it does in one process. With
    several ranks every call is a collective.

    `held`: what this rank holds · `exchange`: the collectives of the ranks."""

    def __init__(self, held: Sequence[Held], exchange: Exchange) -> None:
        self.held, self.exchange = held, exchange

    @property
    def _all(self) -> Held:
        """What a single rank holds: all tables."""
        return self.held[0]

    @property
    def engine(self) -> Engine | None:
        """The engine of a single rank, which looks up and updates by itself; None with several."""
        return self._all.engine

    @property
    def agreement(self) -> Agreement | None:
        """See `LookupModule.agreement`."""
        return None

    @property
    def planned(self) -> PlannedForwards:
        """The forwards that were planned and have not run yet."""
        return self._all.engine.planned

    def plan_ahead(
        self,
        executor: PlanExecutor,
        given: Given,
        make_batch: Callable[..., Batch],
        kind: PlanKind,
        memory: Any,
    ) -> Planned:
        """Plans the forward of `given` before it runs, by `executor`; `make_batch` checks the inputs and makes its
        batch."""
        return self._all.engine.plan_ahead(executor, given, make_batch, self._all.context, kind, memory)

    def forward(self) -> contextlib.AbstractContextManager[None]:
        """The context of a forward, which may fail before it looks anything up."""
        return contextlib.nullcontext()

    def look_up(self, batch: Batch, hook: torch.Tensor, *, recomputed: bool) -> torch.Tensor:
        """Pools a batch: (B, ΣD). `hook`: see `Engine.lookup` · `recomputed`: whether a backward computes the forward
        again."""
        return self._all.engine.lookup(batch, self._all.context, hook)

    def end_accumulate(self, error: Exception | None = None) -> None:
        """All ranks are about to apply their accumulated update, or this rank has met an `error`, which all then
        raise."""
        if error is not None:
            raise error

    def follow(
        self, optimizer: torch.optim.Optimizer, *, group: int | dict[str, Any] | None, in_state_dict: bool
    ) -> None:
        """See `ShardedTieredEmbeddingBagCollection.follow`."""
        self._all.engine.follow(optimizer, group=group, in_state_dict=in_state_dict)

    def total(self, totals: torch.Tensor, norm_type: float) -> torch.Tensor:
        """Sums over all ranks the exact sums, int64 (T, ·), of the tables of a width, in their order; or takes the
        maxima, float64 (T,)."""
        return totals

    def weight(self, table: int) -> torch.Tensor | None:
        """A table's weights (rows, D) on rank 0, None on the others."""
        return self._all.engine.tables.weight(table)

    def set_weights(self, weights: Mapping[int, torch.Tensor], problems: Sequence[str]) -> tuple[set[int], list[str]]:
        """Sets whole tables to `weights` (rows, D), which all ranks have, or rank 0 alone. `problems`: of this rank.
        Returns the tables that any rank was given, and the problems of other ranks. Where one of several ranks has a
        problem, none sets anything."""
        if weights and not problems:
            self._all.engine.tables.set_weights(weights)
        return set(weights), []

    def save(self, directory: str | os.PathLike[str], extra: dict[str, Any]) -> None:
        """See `ShardedTieredEmbeddingBagCollection.save_checkpoint`."""
        save(saved_alone(self._all.engine.tables, self._all.engine.optimizer), directory, extra)

    def load(self, directory: str | os.PathLike[str], *, recover: bool) -> dict[str, Any]:
        """See `ShardedTieredEmbeddingBagCollection.load_checkpoint`."""
        engine = self._all.engine
        engine.check_no_gradient("load a checkpoint")
        engine.drop_planned()
        return load(saved_alone(engine.tables, engine.optimizer), directory, recover=recover)

    def stats(self) -> ShardedStats:
        """What was sent, and waited for, so far."""
        return self.exchange.stats()

    def memory_report(self) -> dict[str, Any]:
        """Bytes of what they exchange by, beside those of the tables."""
        return {}

    def disable_autograd_threads(self) -> None:
        """On GPUs, of which a process of several has one, backward passes that this thread begins run on it until
        `close`: it updates the rows, and else would sleep until autograd's thread wakes it up."""

    def close(self) -> None:
        """Ends the exchanges of the ranks."""
        self.planned.drop_all()
        self.exchange.close()
