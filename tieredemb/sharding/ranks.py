"""What a sharded collection needs of the ranks that hold it: several (`distributed_ranks`) or one (`single_rank`)."""

from __future__ import annotations

import abc
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
from tieredemb.step.planned_forwards import PlanExecutor, Planned, PlannedForwards

if TYPE_CHECKING:
    from tieredemb.step.agreement import Agreement
    from tieredemb.step.engine import Engine


class Ranks(abc.ABC):
    """This rank and the others. If there are several, every call is a collective."""

    @property
    @abc.abstractmethod
    def held(self) -> Sequence[Held]:
        """What this rank holds."""

    @property
    def engine(self) -> Engine | None:
        """The engine of a single rank, which looks up and updates by itself; None for several."""
        return None

    @property
    def agreement(self) -> Agreement | None:
        """See `LookupModule.agreement`."""
        return None

    @property
    @abc.abstractmethod
    def exchange(self) -> Exchange:
        """The collectives of the ranks."""

    @property
    @abc.abstractmethod
    def planned(self) -> PlannedForwards:
        """The forwards that were planned and have not run yet."""

    @abc.abstractmethod
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

    @abc.abstractmethod
    def forward(self) -> contextlib.AbstractContextManager[None]:
        """The context of a forward, which may fail before it looks anything up."""

    @abc.abstractmethod
    def look_up(self, batch: Batch, hook: torch.Tensor, *, recomputed: bool) -> torch.Tensor:
        """Pools a batch: (B, ΣD). `hook`: see `Engine.lookup` · `recomputed`: whether a backward computes the forward
        again."""

    @abc.abstractmethod
    def end_accumulate(self, error: Exception | None = None) -> None:
        """All ranks are about to apply their accumulated update, or this rank has met an `error`, which all then
        raise."""

    @abc.abstractmethod
    def follow(
        self, optimizer: torch.optim.Optimizer, *, group: int | dict[str, Any] | None, in_state_dict: bool
    ) -> None:
        """See `ShardedTieredEmbeddingBagCollection.follow`."""

    @abc.abstractmethod
    def total(self, totals: torch.Tensor, norm_type: float) -> torch.Tensor:
        """Sums over all ranks the exact sums, int64 (T, ·), of the tables of a width, in their order; or takes the
        maxima, float64 (T,)."""

    @abc.abstractmethod
    def weight(self, table: int) -> torch.Tensor | None:
        """A table's weights (rows, D) on rank 0, None on the others."""

    @abc.abstractmethod
    def set_weights(self, weights: Mapping[int, torch.Tensor], problems: Sequence[str]) -> tuple[set[int], list[str]]:
        """Sets whole tables to `weights` (rows, D), which all ranks have, or rank 0 alone. `problems`: of this rank.
        Returns the tables that any rank was given, and the problems of other ranks. Where one of several ranks has a
        problem, none sets anything."""

    @abc.abstractmethod
    def save(self, directory: str | os.PathLike[str], extra: dict[str, Any]) -> None:
        """See `ShardedTieredEmbeddingBagCollection.save_checkpoint`."""

    @abc.abstractmethod
    def load(self, directory: str | os.PathLike[str], *, recover: bool) -> dict[str, Any]:
        """See `ShardedTieredEmbeddingBagCollection.load_checkpoint`."""

    def stats(self) -> ShardedStats:
        """What was sent, and waited for, so far."""
        return self.exchange.stats()

    def memory_report(self) -> dict[str, Any]:
        """Bytes of what they exchange by, beside those of the tables."""
        return {}

    @abc.abstractmethod
    def close(self) -> None:
        """Ends the exchanges of the ranks."""
