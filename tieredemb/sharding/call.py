"""One forward of a sharded collection and its backward: what is exchanged, and in which order.

Forward: ids go to the ranks that own their rows, which look them up; the rows come back, and are pooled where the bags
are. Backward: the gradient of every occurrence goes to the owner of its row, which updates it as one process would that
has the batches of all ranks, one after the other.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from typing import Any

import torch

from tieredemb.errors import PeerError, TieredEmbError
from tieredemb.kernels.ranges import ranged
from tieredemb.sharding.bags import Bags
from tieredemb.sharding.context import ShardedContext
from tieredemb.sharding.exchange import Phase
from tieredemb.sharding.shard import Asked
from tieredemb.sharding.stream_use import StreamUse
from tieredemb.step.batch import Batch
from tieredemb.step.call import NUMBERS, Call
from tieredemb.step.planned_forwards import PlanExecutor, Planned, PlannedForwards

WEIGHTED = 1  # flag of a header of a forward: per-sample weights are given
PLANNED = 2  # ids were exchanged before
INFINITE = 1  # of a backward: a gradient is not finite, which is to keep all ranks from the update


class ShardedCall:
    """One forward. It tells the owners of its rows which it asks for, which may be long before the forward comes and
    the rows are fetched. Of each shard: the bags here, what was asked of this rank, and the call that answers.
    `number`: in the order of forwards, once it has come."""

    def __init__(self, context: ShardedContext, batch: Batch, *, ahead: bool = False) -> None:
        """Exchanges ids. Raises on all ranks what one has met. `ahead`: whether the forward has yet to come."""
        self.context = context
        self.consumed = self.keeps_rows = False
        self.within: Any = None
        self.number = -1
        self.batch = batch.size
        self._n_ids = len(batch.ids)
        self._use = StreamUse(context.device)
        self._bags = self._find(batch, Phase.PLAN if ahead else Phase.FORWARD)
        self._sent: list[list[int]] = [bags.counts.sum(1).tolist() for bags in self._bags]
        self._asked, self._ids = self._ask(ahead=ahead, flag=WEIGHTED * (batch.weights is not None))
        if ahead:
            self._use.made()
        self._planned: list[tuple[PlannedForwards, Planned]] = []
        self._calls: list[Call] = []
        self._rows: list[torch.Tensor] = []

    @classmethod
    def of(cls, context: ShardedContext, batch: Batch, planned: ShardedCall | None) -> ShardedCall:
        """The call of a forward that has come: the one that was `planned`, if all ranks have theirs, or another."""
        if planned is None:
            return cls(context, batch)
        flag = PLANNED | WEIGHTED * (batch.weights is not None)
        try:
            flags = context.announce(Phase.FORWARD, flag=flag).flags
            _check_weighted(flags)
        except BaseException:
            planned.release()
            raise
        if bool((flags & PLANNED).all()):
            return planned
        planned.release()
        return cls(context, batch)

    @ranged("plan")
    def _find(self, batch: Batch, phase: Phase) -> Sequence[Bags]:
        """The bags, which are found to be good; what is wrong with them all ranks raise."""
        try:
            return self.context.find(batch)
        except Exception as error:
            self.context.announce(phase, error=error)
            raise

    def _ask(self, *, ahead: bool, flag: int) -> tuple[list[Asked], list[torch.Tensor]]:
        """Of each shard what is asked of this rank, and which ids, feature by feature."""
        context, exchange = self.context, self.context.exchange
        counts = torch.cat([bags.counts for bags in self._bags], 1)
        is_asked = False
        while not is_asked:  # others may have had a plan, which they then give up
            context.number += 1
            header = exchange.header(
                Phase.PLAN if ahead else Phase.FORWARD, context.number, counts, flag=0 if ahead else flag
            )
            is_asked = not bool((header.flags & PLANNED).any())
            _check_weighted(header.flags)
        features = [bags.counts.shape[1] for bags in self._bags]
        counts_of = torch.split(header.counts, features, 1)  # type: ignore[no-untyped-call]
        asked = [Asked.of(each.contiguous(), context.device) for each in counts_of]
        came = [
            exchange.rows(bags.ids, sent, its.per_rank)
            for bags, sent, its in zip(self._bags, self._sent, asked, strict=True)
        ]
        return asked, [its.by_feature(ids) for its, ids in zip(asked, came, strict=True)]

    def plan_ahead(self, executor: PlanExecutor, *, trains: bool, ages: bool) -> None:
        """Has the rows that are asked of this rank planned and fetched by `executor`, before the forward comes. What
        cannot be planned now the forward plans, and finds out why."""
        for shard, ids, asked in zip(self.context.shards, self._ids, self._asked, strict=True):
            with contextlib.suppress(TieredEmbError):
                planned = shard.plan_ahead(executor, ids, asked, trains=trains, ages=ages)
                self._planned.append((shard.engine.planned, planned))

    def fetch(self, *, trains: bool, recomputed: bool) -> None:
        """The forward has come: answers what was asked of this rank, and has its own rows brought. Raises on all ranks
        what one has met."""
        exchange, context = self.context.exchange, self.context
        self.number = next(NUMBERS)
        failed: Exception | None = None
        rows = []
        try:
            self._follow()
            for shard, ids, asked in zip(context.shards, self._ids, self._asked, strict=True):
                call, found = shard.look_up(ids, asked, trains=trains, recomputed=recomputed, within=None)
                self._calls.append(call)
                rows.append(found)
            room = [exchange.room(found, sent) for found, sent in zip(rows, self._sent, strict=True)]
        except Exception as error:
            failed = error
        context.announce(Phase.ROWS, error=failed)
        self._rows = [
            exchange.rows(found, asked.per_rank, sent, out)
            for found, asked, sent, out in zip(rows, self._asked, self._sent, room, strict=True)
        ]

    def complete(self) -> bool:
        """See `Call.complete`."""
        return True

    @ranged("lookup")
    def pool(self, weights: torch.Tensor | None, *, differentiable: bool) -> torch.Tensor:
        """The pooled rows, (B, ΣD)."""
        context = self.context
        out = torch.empty((self.batch, context.columns), dtype=context.output_dtype, device=context.device)
        for bags, rows in zip(self._bags, self._rows, strict=True):
            bags.pool(rows, weights, out, keep=differentiable, keep_rows=self.keeps_rows)
        self._rows = []
        return out

    def weights_gradient(self, grad: torch.Tensor) -> torch.Tensor:
        """Gradient of the per-sample weights, float32 (N,), given that of the outputs, float32 (B, ΣD)."""
        self._follow(grad)
        out = torch.zeros(self._n_ids, dtype=torch.float32, device=grad.device)
        for bags in self._bags:
            bags.weights_gradient(grad, out)
        return out

    @ranged("update")
    def gradients(self, grad: torch.Tensor) -> list[tuple[Call, torch.Tensor]]:
        """Of each shard the call of the rows that this rank owns, and the gradients of all their occurrences, given
        that of the outputs here. Every rank takes part."""
        exchange, context = self.context.exchange, self.context
        failed: Exception | None = None
        is_infinite, mine = False, []
        try:
            self._follow(grad)
            is_infinite = context.is_scaled and not bool(torch.isfinite(grad).all())
            for bags, asked in zip(self._bags, self._asked, strict=True):
                given = [each for each in bags.gradient(grad, context.divisor) if each is not None]
                mine.append([(each, exchange.room(each, asked.per_rank)) for each in given])
        except Exception as error:
            failed = error
        flags = context.announce(Phase.BACKWARD, flag=INFINITE * is_infinite, error=failed).flags
        is_infinite = bool(flags.any())
        came = [
            [exchange.rows(each, sent, asked.per_rank, out) for each, out in its]
            for its, sent, asked in zip(mine, self._sent, self._asked, strict=True)
        ]
        found = []
        with context.telling(Phase.BACKWARD):
            for (rows, *scale), asked, call in zip(came, self._asked, self._calls, strict=True):
                for each in scale:
                    call.weigh(asked.by_feature(each))
                rows = asked.by_feature(rows)
                if is_infinite:  # a row behind those of occurrences, which the optimizer sees, and no row of a table
                    rows = torch.cat([rows, rows.new_full((1, rows.shape[1]), torch.inf)])
                found.append((call, rows))
        return found

    def _follow(self, *more: torch.Tensor) -> None:
        """The current stream uses what was made of the call, and `more`."""
        held = (tensor for bags in self._bags for tensor in bags.tensors())
        asked = (tensor for each in self._asked for tensor in (each.place, each.edges))
        self._use.follow(itertools.chain(held, asked, self._ids, more))

    def release(self) -> None:
        """No backward will come, or no forward: its rows may leave the caches."""
        for among, planned in self._planned:
            among.drop(planned)
        for call in self._calls:
            call.release()


def _check_weighted(flags: torch.Tensor) -> None:
    """Raises `PeerError`, on all ranks, where some have weights of their samples and others none."""
    weighted = (flags & WEIGHTED).tolist()
    if len(set(weighted)) > 1:
        with_weights = [rank for rank, flag in enumerate(weighted) if flag]
        raise PeerError(
            f"per_sample_weights are given on ranks {with_weights} alone; pass them on all ranks, or on none"
        )
