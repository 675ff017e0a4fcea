"""A group of one rank: nothing is exchanged, and each call does, and costs, what it does in one process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tieredemb.cache.base import PlanKind
from tieredemb.sharding.exchange import Exchange
from tieredemb.sharding.ranks import Ranks
from tieredemb.sharding.shard import Held
from tieredemb.step.batch import Batch, Given
from tieredemb.step.engine import Engine
from tieredemb.step.planned_forwards import PlanExecutor, Planned, PlannedForwards
from tieredemb.tables.checkpoint import load, save, saved_alone


class SingleRank(Ranks):
    """The rank that holds all tables."""

    def __init__(self, held: Held, exchange: Exchange) -> None:
        self._all = held
        self._exchange = exchange

    @property
    def held(self) -> Sequence[Held]:
        return [self._all]

    @property
    def exchange(self) -> Exchange:
        return self._exchange

    @property
    def engine(self) -> Engine:
        return self._all.engine

    @property
    def planned(self) -> PlannedForwards:
        return self._all.engine.planned

    def plan_ahead(
        self,
        executor: PlanExecutor,
        given: Given,
        make_batch: Callable[..., Batch],
        kind: PlanKind,
        memory: Any,
    ) -> Planned:
        engine, context = self._all.engine, self._all.context
        return engine.plan_ahead(executor, given, make_batch, context, kind, memory)

    def forward(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def look_up(self, batch: Batch, hook: torch.Tensor, *, recomputed: bool) -> torch.Tensor:
        return self._all.engine.lookup(batch, self._all.context, hook)

    def end_accumulate(self, error: Exception | None = None) -> None:
        if error is not None:
            raise error

    def follow(
        self, optimizer: torch.optim.Optimizer, *, group: int | dict[str, Any] | None, in_state_dict: bool
    ) -> None:
        self._all.engine.follow(optimizer, group=group, in_state_dict=in_state_dict)

    def total(self, totals: torch.Tensor, norm_type: float) -> torch.Tensor:
        return totals

    def weight(self, table: int) -> torch.Tensor | None:
        return self._all.engine.tables.weight(table)

    def set_weights(self, weights: Mapping[int, torch.Tensor], problems: Sequence[str]) -> tuple[set[int], list[str]]:
        if weights and not problems:
            self._all.engine.tables.set_weights(weights)
        return set(weights), []

    def save(self, directory: str | os.PathLike[str], extra: dict[str, Any]) -> None:
        save(saved_alone(self._all.engine.tables, self._all.engine.optimizer), directory, extra)

    def load(self, directory: str | os.PathLike[str], *, recover: bool) -> dict[str, Any]:
        engine = self._all.engine
        engine.check_no_gradient("load a checkpoint")
        engine.drop_planned()
        return load(saved_alone(engine.tables, engine.optimizer), directory, recover=recover)

    def close(self) -> None:
        self.planned.drop_all()
        self._exchange.close()
