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
    """This rank, and the others. Where they are several every call is a collective."""

    @property
    @abc.abstractmethod
    def held(self) -> Sequence[Held]:
        """What this rank holds."""

    @property
    def engine(self) -> Engine | None:
        """That of a rank which looks up and updates alone."""
        return None

    @property
    def agreement(self) -> Agreement | None:
        """See `LookupModule.agreement`."""
        return None

    @property
    @abc.abstractmethod
    def exchange(self) -> Exchange:
        """What the ranks exchange by."""

    @property
    @abc.abstractmethod
    def planned(self) -> PlannedForwards:
        """The forwards that were planned, and have yet to come."""

    @abc.abstractmethod
    def plan_ahead(
        self,
        executor: PlanExecutor,
        given: Given,
        make_batch: Callable[..., Batch],
        kind: PlanKind,
        memory: Any,
    ) -> Planned:
        """Plans the forward of `given` before it comes, by `executor`; `make_batch` checks it and makes its batch."""

    @abc.abstractmethod
    def forward(self) -> contextlib.AbstractContextManager[None]:
        """A forward comes inside, which may fail before it looks anything up."""

    @abc.abstractmethod
    def look_up(self, batch: Batch, hook: torch.Tensor, *, recomputed: bool) -> torch.Tensor:
        """Pools a batch: (B, ΣD). `hook`: see `Engine.lookup` · `recomputed`: whether a backward asks for it again."""

    @abc.abstractmethod
    def end_accumulate(self, error: Exception | None = None) -> None:
        """All are about to update what they have accumulated, or this rank has met an `error`, which all then raise."""

    @abc.abstractmethod
    def follow(
        self, optimizer: torch.optim.Optimizer, *, group: int | dict[str, Any] | None, in_state_dict: bool
    ) -> None:
        """See `ShardedTieredEmbeddingBagCollection.follow`."""

    @abc.abstractmethod
    def total(self, totals: torch.Tensor, norm_type: float) -> torch.Tensor:
        """What all have of the exact sums, int64 (T, ·), or the maxima, float64 (T,), of the tables of a width, in
        their order."""

    @abc.abstractmethod
    def weight(self, table: int) -> torch.Tensor | None:
        """A table's weights (rows, D) on rank 0, None on the others."""

    @abc.abstractmethod
    def set_weights(self, weights: Mapping[int, torch.Tensor], problems: Sequence[str]) -> tuple[set[int], list[str]]:
        """Sets whole tables, of `weights` (rows, D) that all ranks have, or rank 0 alone. `problems`: of this rank.
        Returns the tables that are known to any rank, and the problems of other ranks: of several ranks none sets
        anything where one has a problem."""

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
        """Ends what is under way between the ranks."""
