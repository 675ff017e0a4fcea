"""Several ranks, each of which holds some of the rows, and looks up batches of its own in all of them."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch

from tieredemb.cache.base import PlanKind
from tieredemb.config import TableConfig
from tieredemb.errors import PeerError, TieredEmbError
from tieredemb.sharding.agreed import Change, agreed, change_on_all_ranks
from tieredemb.sharding.call import ShardedCall, ShardedCallContext, forward_flag
from tieredemb.sharding.checkpoint import ShardedRows, load, save
from tieredemb.sharding.exchange_clock import ExchangeClock
from tieredemb.sharding.following import Following
from tieredemb.sharding.header import Phase
from tieredemb.sharding.layout import REPLICATED
from tieredemb.sharding.ranks import Ranks
from tieredemb.sharding.shard import Held
from tieredemb.sharding.states import RowStates
from tieredemb.sharding.stats import ShardedStats
from tieredemb.sharding.whole_rows import gather_rows, rows_from_rank_0
from tieredemb.step.backward_thread import disable_autograd_threads
from tieredemb.step.batch import Batch, Given
from tieredemb.step.planned_forwards import CompletedFuture, PlanExecutor, Planned, PlannedForwards
from tieredemb.step.program import look_up
from tieredemb.tables.config import TableSetConfig

if TYPE_CHECKING:
    from tieredemb.sharding.eager_buffers import EagerBuffers
    from tieredemb.sharding.persistent_call import PersistentMemory
    from tieredemb.sharding.symmetric import SymmetricMemory
    from tieredemb.step.agreement import Agreement


class DistributedRanks(Ranks):
    """The ranks of a group. `config`: of the whole tables · `states`: the optimizer state of their rows."""

    def __init__(self, context: ShardedCallContext, config: TableSetConfig) -> None:
        super().__init__(context.shards, context.exchange)
        self._context = context
        self._config = config
        self._planned = PlannedForwards()
        self.states = RowStates(context.layout, context.exchange, context.shards, self._announce)
        self._following = Following(self.states)
        self._reached = False
        self._restore_autograd: Callable[[], object] = lambda: None
        if context.device.type == "cuda" and context.exchange.has_nccl:
            context.exchange.clock = ExchangeClock(context.device)

    @property
    def tables(self) -> Sequence[TableConfig]:
        """The tables of the whole collection."""
        return self._config.tables

    @property
    def engine(self) -> None:
        return None

    @property
    def agreement(self) -> Agreement | None:
        return self._context.captures

    @property
    def planned(self) -> PlannedForwards:
        return self._planned

    def plan_ahead(
        self,
        executor: PlanExecutor,
        given: Given,
        make_batch: Callable[..., Batch],
        kind: PlanKind,
        memory: Any,
    ) -> Planned:
        """See `Ranks`: exchanges the ids, and has the rows that this rank owns fetched. The forward raises on all ranks
        what one raises here."""
        made: CompletedFuture[Any]
        try:
            made = CompletedFuture(self._planned_call(executor, given, make_batch, kind, memory))
        except PeerError:
            raise
        except (TieredEmbError, torch.OutOfMemoryError) as error:
            made = CompletedFuture(None, error)
        planned = Planned([(self.held[0].engine.tables, given)], made)
        self._planned.add(planned)
        return planned

    def _planned_call(
        self,
        executor: PlanExecutor,
        given: Given,
        make_batch: Callable[..., Batch],
        kind: PlanKind,
        memory: PersistentMemory | None,
    ) -> ShardedCall:
        try:
            executor.wait_for_inputs()
            batch = self._allow_more_ids(make_batch(*given))
        except Exception as error:
            self._context.announce(Phase.PLAN, error=error)
            raise
        call: ShardedCall
        if self._context.on_buffers:
            from tieredemb.sharding.persistent_call import PersistentCall

            call = PersistentCall(self._context, batch, memory)
        else:
            call = ShardedCall(self._context, batch, ahead=True)
        try:
            call.plan_ahead(executor, kind)
        except BaseException:
            call.release()
            raise
        return call

    def _allow_more_ids(self, batch: Batch) -> Batch:
        """The batch. In buffers its ids may be followed by those of longer batches before it."""
        return batch._replace(exact=False) if batch.exact and self._context.on_buffers else batch

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        self._reached = False
        try:
            yield
        except Exception as error:
            if not self._reached:  # the other ranks are about to exchange ids
                self._context.announce(Phase.FORWARD, error=error)
            raise

    def look_up(self, batch: Batch, hook: torch.Tensor, *, recomputed: bool) -> torch.Tensor:
        self._reached = True
        context, batch = self._context, self._allow_more_ids(batch)
        within = context.backward_pass.touch() if recomputed else None
        trains, weights = hook.requires_grad and torch.is_grad_enabled(), batch.weights
        flag = forward_flag(weights, trains=trains)

        def fetch(call: ShardedCall, *, is_announced: bool) -> bool:
            call.within = within
            try:
                has_rows = call.fetch(weights, trains=trains, recomputed=recomputed, is_announced=is_announced)
            except BaseException:
                call.release()
                raise
            if not has_rows:
                call.release()
            return has_rows

        def make() -> ShardedCall:
            tables = self.held[0].engine.tables
            found = None if recomputed else self._planned.take(tables, batch.given)
            planned = cast("ShardedCall | None", found)
            if planned is not None and planned.may_fetch_first(flag):
                if fetch(planned, is_announced=False):
                    return planned
                planned = None
            call = ShardedCall.of(context, batch, flag, planned)
            fetch(call, is_announced=True)
            return call

        if trains or (torch.is_grad_enabled() and weights is not None and weights.requires_grad):
            # The leaf lies on the CPU, so autograd reaches it on the thread that has called backward. That thread sends
            # the gradients and updates the rows: no other thread has to wake up
            leaf = torch.empty(0, dtype=torch.float32, device="cpu", requires_grad=True)
            return look_up(leaf if trains else hook, weights, make)
        call = make()
        try:
            return call.pool(weights, differentiable=False)
        finally:
            call.release()

    def end_accumulate(self, error: Exception | None = None) -> None:
        updates = error is None and self._context.optimizer is not None
        try:
            if updates:
                self._context.check_options_now()
        except Exception as failed:
            error, updates = failed, False
        self._context.announce(Phase.UPDATE, error=error, updates=updates)

    def _announce(self, phase: Phase, error: Exception | None = None) -> None:
        """Announces to all ranks what this one is about to do, or an `error`, which all then raise."""
        self._context.announce(phase, error=error)

    def follow(
        self, optimizer: torch.optim.Optimizer, *, group: int | dict[str, Any] | None, in_state_dict: bool
    ) -> None:
        self._following.follow(optimizer, group=group, in_state_dict=in_state_dict)

    def total(self, totals: torch.Tensor, norm_type: float) -> torch.Tensor:
        self._announce(Phase.NORM)
        found = self._context.exchange.all_gather(totals)
        return found.amax(0) if math.isinf(norm_type) else found.sum(0)

    def weight(self, table: int) -> torch.Tensor | None:
        exchange, layout = self._context.exchange, self._context.layout
        failed: Exception | None = None
        try:
            self._context.wait_for_stream()
            shard = next(each for each in self.held if table in each.tables)
            saved = layout.saved_part(table, exchange.rank).own_rows
            mine = shard.engine.tables.weight(shard.tables.index(table))[:saved]
            weight = None
            if exchange.rank == 0:
                rows = layout.tables[table].num_embeddings
                weight = torch.empty((rows, mine.shape[1]), dtype=mine.dtype, device="cpu")
        except Exception as error:
            failed = error
        self._announce(Phase.READ, failed)

        def place(rank: int, start: int, rows: torch.Tensor) -> None:
            assert weight is not None
            weight[layout.saved_part(table, rank).span(start, len(rows))] = rows

        gather_rows(exchange, mine, place)
        return weight

    def set_weights(self, weights: Mapping[int, torch.Tensor], problems: Sequence[str]) -> tuple[set[int], list[str]]:
        exchange, layout = self._context.exchange, self._context.layout
        self._announce(Phase.WRITE)
        offers = exchange.all_gather_object((list(weights), list(problems)))
        given = {t: [rank for rank, (its, _) in enumerate(offers) if t in its] for t in range(len(layout.tables))}
        given = {t: ranks for t, ranks in given.items() if ranks}
        problems_of_others = [
            f"rank {rank}: {each}" for rank, (_, its) in enumerate(offers) if rank != exchange.rank for each in its
        ]
        if not (problems_of_others or problems):
            problems_of_others = [
                f"the weights of table {layout.tables[t].name!r} are given on ranks {ranks}; give them on all ranks, "
                f"or on rank 0 alone, as state_dict() does"
                for t, ranks in given.items()
                if ranks != [0] and len(ranks) < exchange.size
            ]
        if not (problems_of_others or problems):
            own = {}
            for t, ranks in given.items():
                if len(ranks) < exchange.size or layout.owner[t] == REPLICATED:  # all copies are those of rank 0
                    own[t] = self._own_from_rank_0(t, weights[t] if exchange.rank == 0 else None)
                else:
                    own[t] = self._own(t, weights[t])
            self._set_own(own)
        return set(given), problems_of_others

    def _own(self, table: int, weight: torch.Tensor) -> torch.Tensor:
        """The rows of a table that this rank holds."""
        part = self._context.layout.part(table, self._context.exchange.rank)
        return weight[part.first :: part.step]

    def _own_from_rank_0(self, table: int, weight: torch.Tensor | None) -> torch.Tensor:
        """The same of the `weight` that rank 0 has."""
        exchange, announce = self._context.exchange, functools.partial(self._announce, Phase.WRITE)
        own: dict[str, torch.Tensor] = {}
        for rank in range(exchange.size):
            part = self._context.layout.part(table, rank)
            rows = agreed(announce, lambda: None if weight is None else weight.detach()[part.first :: part.step].cpu())  # noqa: B023
            own |= rows_from_rank_0(exchange, rank, None if rows is None else {"weight": rows})
        return own["weight"]

    def _set_own(self, own: Mapping[int, torch.Tensor]) -> None:
        """Sets the rows of tables that this rank holds, once all ranks have space for theirs; else none is set. Raises
        on all ranks the error of one."""
        changes: list[Change] = []
        for held in self.held:
            weights = {n: own[t] for n, t in enumerate(held.tables) if t in own and len(own[t])}
            if weights:
                changes.append(_change(held, weights))
        change_on_all_ranks(functools.partial(self._announce, Phase.WRITE), changes)

    def save(self, directory: str | os.PathLike[str], extra: dict[str, Any]) -> None:
        save([self.rows(Phase.SAVE)], directory, extra)

    def load(self, directory: str | os.PathLike[str], *, recover: bool) -> dict[str, Any]:
        self.ready_to_load()
        return load([self.rows(Phase.LOAD)], directory, recover=recover)

    def ready_to_load(self) -> None:
        """Drops what was planned, before rows are replaced."""
        self._context.wait_for_stream()
        self._planned.drop_all()

    def rows(self, phase: Phase, prefix: str = "", names: tuple[str, ...] = ()) -> ShardedRows:
        """What this rank has to save and to load; `prefix`, `names`: see `NotedTables`."""
        exchange, layout = self._context.exchange, self._context.layout
        announce = functools.partial(self._announce, phase)
        return ShardedRows(
            config=self._config, layout=layout, exchange=exchange, shards=self._context.shards, announce=announce,
            prefix=prefix, names=names,
        )  # fmt: skip

    def disable_autograd_threads(self) -> None:
        if self._context.device.type == "cuda":
            self._restore_autograd = weakref.finalize(self, disable_autograd_threads())

    def close(self) -> None:
        self._restore_autograd()
        self._planned.drop_all()
        is_intact = not self._context.exchange.is_broken
        self._context.exchange.close()
        for memory in self._peer_memory:
            memory.close(frees=is_intact)

    @property
    def _peer_memory(self) -> list[SymmetricMemory | EagerBuffers]:
        """Memory that other ranks write to."""
        return [self._context.captures.symmetric, self._context.eager_buffers]

    def stats(self) -> ShardedStats:
        waited = sum(memory.wait_seconds for memory in self._peer_memory)
        return replace(super().stats(), gpu_wait_seconds=waited)

    def memory_report(self) -> dict[str, Any]:
        size = sum(memory.bytes for memory in self._peer_memory)
        return {"peers": {"rows": size}} if size else {}


def _change(held: Held, weights: Mapping[int, torch.Tensor]) -> Change:
    return lambda once_ready: held.engine.tables.set_weights(weights, once_ready=once_ready)
