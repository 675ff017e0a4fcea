"""Forwards and backwards over one set of tables, for every module on them.

Several modules may share an engine, and so the tables: all that one backward pass reaches through any of them is one
update. A module says how its lookups treat rows (`CallContext.options`) and whether they train (`hook`).
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from tieredemb.cache.base import USE, USE_IN_STEP, PlanKind
from tieredemb.config import OptimizerConfig
from tieredemb.errors import BackwardError, ConfigError, StorageError, UnsupportedError
from tieredemb.kernels.tracing import ranged
from tieredemb.lookup.options import LookupOptions
from tieredemb.step.batch import Batch, Given
from tieredemb.step.forwards import LAGGING, Forward, catch_up_lagging
from tieredemb.step.gradient_norms import OverRanks
from tieredemb.step.gradient_rows import TableRows
from tieredemb.step.pending_gradients import PendingGradients
from tieredemb.step.planned_forwards import PlanExecutor, Planned, PlannedForwards
from tieredemb.step.program import (
    BackwardPass,
    Call,
    CallContext,
    Collected,
    in_forward_order,
    look_up,
    release_all,
)
from tieredemb.step.table_parameter import TableParameter, bind_all
from tieredemb.step.whole_gradient import WholeUse, chunk_rows, spans
from tieredemb.tables.division import share_capacity
from tieredemb.tables.followed_optimizer import FollowedOptimizer
from tieredemb.tables.fused_optimizer import FusedOptimizer
from tieredemb.tables.table_set import Place, TableSet
from tieredemb.tables.torch_kinds import Optimizer, is_torch_optimizer

if TYPE_CHECKING:
    from tieredemb.step.call_memory import CallMemory


_MAY_BE_DISTRIBUTED = torch.distributed.is_available()


class _Accumulated:
    """The calls that `accumulate()` keeps for the update at its end. The context alone holds it: once that is left, in
    whatever way, later backwards update as usual."""

    def __init__(self) -> None:
        self.calls: Collected = []


class Engine:
    """Looks up in `tables`, and updates their rows by the optimizer of their config, if it has one.

    `follows`: a torch optimizer, or its class, whose step does the update, in place of the backward · `over_ranks`: see
    `gradient_norms` · `planned`: forwards that were planned ahead, in these tables and in others that are planned with
    them · `ids_may_exceed_bags`: threads whose captured step passes buffers in which ids of longer batches remain.
    """

    _over_ranks: OverRanks | None = None  # if it was pickled before there were ranks
    _pending: PendingGradients | None = None  # if a torch optimizer is followed

    def __init__(self, tables: TableSet, follows: Optimizer = None, *, over_ranks: OverRanks | None = None) -> None:
        self.tables = tables
        self._over_ranks = over_ranks
        config = tables.config
        self.optimizer: FusedOptimizer | FollowedOptimizer | None = None
        if is_torch_optimizer(follows):
            self.optimizer = self._to_follow(config.optimizer)
        elif config.optimizer is not None:
            self.optimizer = FusedOptimizer(self.tables, config.optimizer)
        self._connect()
        if isinstance(follows, torch.optim.Optimizer):
            self.follow(follows)

    def _connect(self) -> None:
        others, related = self.tables.whole.engines, self.tables.whole.related
        known = next((each.planned for each in list(others)), None) if related is None else related.planned
        self.planned: PlannedForwards = known or PlannedForwards()
        if related is not None:
            related.planned = self.planned
        others.add(self)
        self.ids_may_exceed_bags: set[int] = set()
        self._backward_pass = _PASSES.setdefault(related or self.tables.whole, BackwardPass())
        self._accumulates: weakref.ref[_Accumulated] | None = None
        if self._over_ranks is None and len(self.tables.groups) > 1:
            share_capacity([self.tables])
        self._wait_for_steps()

    def _wait_for_steps(self) -> None:
        """If a torch optimizer is followed, has gradients wait for its step."""
        self._pending = None
        if isinstance(self.optimizer, FollowedOptimizer):
            self._pending = self.optimizer.pending = PendingGradients(
                self.tables, self.optimizer.table_parameters, _Rows(self), self._over_ranks
            )

    def follow(self, optimizer: torch.optim.Optimizer, **keywords: Any) -> None:
        """See `TieredModule.follow`."""
        followed = self._following()
        followed.follow(optimizer, **keywords)
        if self.optimizer is None:
            self.optimizer = followed
            self._wait_for_steps()

    def check_follow(self, optimizer: torch.optim.Optimizer, **keywords: Any) -> tuple[int, OptimizerConfig]:
        """The param group that `follow` would take, and its config; see `FollowedOptimizer.check_follow`."""
        _, index, config = self._following().check_follow(optimizer, **keywords)
        return index, config

    def _following(self) -> FollowedOptimizer:
        """The object that follows a torch optimizer, or would."""
        if isinstance(self.optimizer, FusedOptimizer):
            raise ConfigError(
                f"this module's rows are updated in backward, by {type(self.tables.config.optimizer).__name__}; build "
                f"it with the torch optimizer, its class or no optimizer at all for it to follow one"
            )
        return self.optimizer or self._to_follow(None)

    def _to_follow(self, config: OptimizerConfig | None) -> FollowedOptimizer:
        """The object that is to follow a torch optimizer, with rows for `config`."""
        is_sharded, tables = self._over_ranks is not None, self.tables
        made = [TableParameter.of(tables, t, is_sharded=is_sharded) for t in range(len(tables.config.tables))]
        followed = FollowedOptimizer(tables, config, made)
        bind_all(followed, made)
        return followed

    @property
    def table_parameters(self) -> list[TableParameter]:
        """The tables as params of a torch optimizer, if they follow one or are to."""
        return self.optimizer.table_parameters if isinstance(self.optimizer, FollowedOptimizer) else []

    def check_no_gradient(self, call: str) -> None:
        """Raises `StorageError` while gradients of these tables, or of others that share their caches, wait for a step:
        their rows have to stay where they are."""
        if any(each._pending is not None and each._pending.waiting for each in list(self.tables.whole.engines)):
            raise StorageError(
                f"cannot {call} while gradients wait for the optimizer's step(), as their rows must stay; call step() "
                f"or zero_grad() before"
            )

    def drop_planned(self) -> None:
        """Drops the plans made ahead for these tables, and for others that are planned with them."""
        self.planned.drop_all()

    def drop_gradient(self) -> None:
        """Drops the gradients that wait for a step, with a warning."""
        if self._pending is not None:
            if self._pending.waiting:
                warnings.warn(
                    f"close() drops the gradients of {self.tables.named} that wait for the optimizer's step(): call "
                    f"step() before, or zero_grad() if they are not to count",
                    stacklevel=3,
                )
            self._pending.drop()

    def context(self, options: LookupOptions) -> CallContext:
        """The context of a module's calls. `options`: how its lookups treat rows."""
        return CallContext(self.tables, options, self, self._backward_pass, _apply)

    # --- forward ----------------------------------------------------------------------------------------------------

    def lookup(self, batch: Batch, context: CallContext, hook: torch.Tensor) -> torch.Tensor:
        """Pools a batch: (B, ΣD). `hook`: float32 (0,), which requires a gradient if a backward is to update rows."""
        recomputed = torch._C._current_graph_task_id() != -1  # inside a backward pass
        within = context.backward_pass.touch() if recomputed else None
        trains, weights = hook.requires_grad, batch.weights
        if torch.is_grad_enabled() and (trains or (weights is not None and weights.requires_grad)):
            if trains and _MAY_BE_DISTRIBUTED and self._over_ranks is None and torch.distributed.is_initialized():
                _check_world_size()
            make = functools.partial(self.begin, batch, context, trains=trains, recomputed=recomputed, within=within)
            # a new leaf: autograd remembers a leaf's stream as long as a graph is alive, which would tie a captured
            # step to an earlier one
            return look_up(hook.detach().requires_grad_() if trains else hook, weights, make)
        place = self.tables.placed.now
        if place.are_read_in_place and not recomputed and not self.planned.waiting:
            output = self._read(batch, context, place)
            if output is not None:
                return output
        call = self.begin(batch, context, trains=False, recomputed=recomputed, within=within)
        try:
            return call.pool(weights, differentiable=False)
        finally:
            call.release()

    def _read(self, batch: Batch, context: CallContext, place: Place) -> torch.Tensor | None:
        """The output of a forward without gradient; None if it needs a plan. `place`: of its tables now."""
        tables, time = self.tables, self.tables.step_time
        ages = time is None or time.begins(tables)
        if ages and tables.division is not None and tables.division.is_due_in(tables):
            return None  # a plan divides the capacity anew
        kind = USE if ages else USE_IN_STEP
        output = call_type(place.device_type).read(batch, context, place, kind)
        if output is not None and time is not None:
            time.looked_up(tables, None)
        return output

    def lookup_planned(self, given: tuple[Any, ...], hook: torch.Tensor, *, trains: bool) -> torch.Tensor | None:
        """The output of a forward that was planned, and checked, ahead for exactly these tensors; None if there is
        none, or if the forward is to be refused. A forward inside a backward recomputes an earlier one, which was not
        planned. `trains`: whether a backward is to update rows."""
        if torch._C._current_graph_task_id() != -1 or torch._C._are_functorch_transforms_active():
            return None
        if hook.is_cuda:
            self.tables.placed.now.check_earlier()
        trains = trains and torch.is_grad_enabled()
        if trains and _MAY_BE_DISTRIBUTED and self._over_ranks is None and torch.distributed.is_initialized():
            _check_world_size()
        call = self.planned.take(self.tables, given)
        if call is None:
            return None
        if self.tables.step_time is not None:
            self.tables.step_time.looked_up(self.tables, call)
        if not trains:
            try:
                call.start(trains=False)
                return call.pool(None, differentiable=False)
            finally:
                call.release()
        try:
            if isinstance(call, Forward):
                output = call.forwards.output_of(call, hook)
                if output is not None:
                    return output
            else:
                call.start(trains=True)
        except BaseException:
            call.release()
            raise
        return look_up(hook.detach().requires_grad_(), None, lambda: call)

    def begin(
        self, batch: Batch, context: CallContext, *, trains: bool, recomputed: bool, within: Any
    ) -> Call | Forward:
        """The call of a forward, planned ahead for exactly its tensors, or now."""
        call, time = None, self.tables.step_time
        place = self.tables.placed.now
        if place.faults is not None:
            place.check_earlier()
        if self.planned.waiting and not recomputed:
            call = self.planned.take(self.tables, batch.given)
        if call is None:
            ages = not recomputed and (time is None or time.begins(self.tables))
            division = self.tables.division
            if division is not None and ages and division.is_due_in(self.tables):
                division.divide()
            call = self._call(batch, context, PlanKind(scored=not recomputed, ages=ages, trains=trains))
        if time is not None and not recomputed:
            time.looked_up(self.tables, call)
        call.within = within
        try:
            call.start(trains=trains)
        except BaseException:
            call.release()
            raise
        return call

    def _call(
        self,
        batch: Batch,
        context: CallContext,
        kind: PlanKind,
        memory: CallMemory | None = None,
    ) -> Call:
        """A new call, planned, on the tables' device; see `Call.plan`."""
        may_exceed = bool(self.ids_may_exceed_bags) and self.may_exceed_bags
        while True:
            place = self.tables.placed.now
            call = call_type(place.device_type)(context, batch.size)
            try:
                call.plan(batch, kind, may_exceed_bags=may_exceed, memory=memory)
                return call
            except StorageError:
                if self.tables.placed.now is place:
                    raise
                # meanwhile another thread has replaced the caches

    @property
    def may_exceed_bags(self) -> bool:
        """Whether ids beyond the last bag remain of longer batches, in the lookups of this thread now."""
        return bool(self.ids_may_exceed_bags) and threading.get_ident() in self.ids_may_exceed_bags

    def plan_ahead(
        self,
        executor: PlanExecutor,
        given: Given,
        make_batch: Callable[..., Batch],
        context: CallContext,
        kind: PlanKind,
        memory: CallMemory | None = None,
    ) -> Planned:
        """Plans the forward with the inputs `given` ahead, by `executor`; `make_batch` checks them and makes the batch.
        See `Call.plan` and `TieredModule.plan_ahead`."""

        def plan() -> Call:
            with contextlib.ExitStack() as ahead:
                for cache, hold in holds:
                    ahead.enter_context(cache.ahead(given, hold))
                return self._call(make_batch(*given), context, kind, memory)

        # else the executor was entered with these caches
        caches = [group.cache for group in self.tables.groups] if executor.on_thread else []
        for cache in caches:
            cache.release_locks()
        holds = [(cache, cache.hold()) for cache in caches]
        planned = Planned([(self.tables, given)], executor.submit(plan))
        self.planned.add(planned)
        return planned

    # --- backward ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """See `TieredModule.accumulate`."""
        if self.accumulates:
            raise BackwardError("accumulate() is active already; one context holds all micro-batches of a step")
        kept = _Accumulated()
        with self.tables.locked():  # not during another thread's capture
            self._accumulates = weakref.ref(kept)
        try:
            yield
        except BaseException:
            release_all([call for call, _ in kept.calls])
            raise
        finally:
            self._accumulates = None
        if kept.calls:
            _apply(in_forward_order(kept.calls))

    @property
    def accumulates(self) -> bool:
        """Whether `accumulate()` is active."""
        return self._accumulates is not None and self._accumulates() is not None

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients outlast their backward pass, and a later step applies them."""
        return self._pending is not None or self.accumulates

    # --- life -------------------------------------------------------------------------------------------------------

    def move(self, device: torch.device) -> None:
        """Moves the tables and the optimizer to `device`. Raises `StorageError` while batches are in flight. If a call
        was interrupted, a second one continues it."""
        if device != self.tables.config.device:
            self.check_no_gradient("move the tables")
            self.drop_planned()
            self.tables.move(device)
        if self.optimizer is not None:
            self.optimizer.move()

    def __getstate__(self) -> dict[str, Any]:
        self.check_no_gradient("copy or pickle the tables")
        self.drop_planned()  # the copy makes its own plans, and tables are copied while no batch is in flight
        state = {"tables": self.tables, "optimizer": self.optimizer, "_over_ranks": self._over_ranks}
        return state | {"division": self.tables.division if len(self.tables.groups) == 1 else None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        division = state.pop("division", None)
        self.__dict__.update(state)
        if division is not None and self.tables.whole.division is None:
            division.join(self.tables.whole)
        if isinstance(self.optimizer, FollowedOptimizer):
            bind_all(self.optimizer, self.optimizer.table_parameters)
        self._connect()


class _Rows:
    """The rows of an engine, for gradients that wait for a step (`pending_gradients.Owner`). It references the engine
    weakly, so the tables are freed with it, without garbage collection."""

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)

    @property
    def _here(self) -> Engine:
        engine = self._engine()
        if engine is None:
            raise StorageError("the tables of this gradient are gone, with the module that has had them")
        return engine

    def use(self, table: int) -> WholeUse:
        return WholeUse(self._here.context(LookupOptions()), table)

    def read_rows(self, table: int, start: int, stop: int) -> torch.Tensor:
        tables = self._here.tables
        device = tables.config.device
        if device.type == "cpu":
            return tables.weight(table, start=start, stop=stop)
        from tieredemb.step.device_row_update import read_rows

        chunks = list(spans(chunk_rows(tables, table), start, stop))
        if len(chunks) == 1:
            return read_rows(tables, table, start, stop)
        found = tables.empty_weight(table, device, stop - start)
        for first, last in chunks:
            read_rows(tables, table, first, last, found[first - start : last - start])
        return found

    def chunk_rows(self, table: int) -> int:
        return chunk_rows(self._here.tables, table)

    @ranged("update")
    def update(self, collected: Collected) -> None:
        """Applies calls, given in forward order, as one update."""
        _update(collected)

    @ranged("update")
    def step_alone(self) -> None:
        engine = self._engine()
        if engine is None or engine.optimizer is None:
            return
        if engine.tables.config.device.type == "cpu":
            self.update_rows(iter(()), (), reaches_all=False)
            return
        from tieredemb.step.device_update import step_alone

        if LAGGING:
            catch_up_lagging(engine.tables)
        step_alone(engine.tables, engine.optimizer)

    @ranged("update")
    def update_rows(self, rounds: Iterator[list[TableRows]], calls: Sequence[Call], *, reaches_all: bool) -> None:
        tables, optimizer = self._here.tables, self._here.optimizer
        assert optimizer is not None
        if LAGGING:
            catch_up_lagging(tables)
        on_cpu, faults = tables.config.device.type == "cpu", None
        if calls and not on_cpu:
            from tieredemb.step.device_update import faults_of

            faults = faults_of(calls)
        release_all(calls)
        if on_cpu:
            from tieredemb.step import host_row_update

            host_row_update.update_rows(tables, optimizer, rounds, reaches_all=reaches_all)
        else:
            from tieredemb.step import device_row_update

            device_row_update.update_rows(tables, optimizer, rounds, faults)


# one for tables that share caches, or for related pools: all that one backward reaches in them is one update
_PASSES: weakref.WeakKeyDictionary[Any, BackwardPass] = weakref.WeakKeyDictionary()


@ranged("update")
def _apply(collected: Collected) -> None:
    """Applies the calls of one backward pass in forward order, as one update over all engines. Calls inside
    `accumulate()` are kept until its end, and calls of tables that follow an optimizer until its step."""
    for time in {call.context.tables.step_time for call, _ in collected}:
        if time is not None:
            time.backward()
    now: Collected = []
    waits: dict[PendingGradients, Collected] = {}
    for pair in collected:
        engine: Engine = pair[0].context.updater
        kept = None if engine._accumulates is None else engine._accumulates()
        if kept is not None:
            kept.calls.append(pair)
        elif engine._pending is not None:
            waits.setdefault(engine._pending, []).append(pair)
        else:
            now.append(pair)
    if waits:
        PendingGradients.add_all(waits)
    if now:
        _update(now)


def _update(collected: Collected) -> None:
    try:
        if LAGGING:
            catch_up_lagging(*[call.context.tables for call, _ in collected])
        on_type: dict[str, Collected] = {}
        for pair in collected:  # tables of one conversion may be on several devices
            on_type.setdefault(pair[0].device_type, []).append(pair)
        for device_type, calls in on_type.items():
            apply_on(device_type)(calls)
    finally:
        release_all([call for call, _ in collected])


@functools.cache
def call_type(device_type: str) -> type[Call]:
    """The kind of calls for a device."""
    if device_type == "cuda":
        from tieredemb.step.recorded_plans import ReplayedCall

        return ReplayedCall
    from tieredemb.step.host_call import HostCall

    return HostCall


@functools.cache
def apply_on(device_type: str) -> Callable[[Collected], None]:
    """The function that takes one optimizer step on a device, for the calls of one backward pass in forward order."""
    if device_type == "cuda":
        from tieredemb.step.device_update import apply

        return apply
    from tieredemb.step import host_call

    return host_call.apply


def _check_world_size() -> None:
    processes = torch.distributed.get_world_size()
    if processes > 1:
        raise UnsupportedError(
            f"training in a world of {processes} processes is not supported: each would update its own copy "
            f"of the rows and they would drift apart; build a tieredemb.ShardedTieredEmbeddingBagCollection, whose "
            f"rows the processes share, train in one process, or serve under no_grad()"
        )
