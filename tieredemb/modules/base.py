"""What all tiered modules share: their tables, the forward, saving, copying, and what they refuse."""

from __future__ import annotations

import abc
import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tieredemb.errors import BackwardError, ConfigError, UnsupportedError
from tieredemb.kernels.ranges import marked
from tieredemb.modules.options import LookupOptions
from tieredemb.stats import CacheStats
from tieredemb.step.call import BackwardPass, Call, Lookup, inside_backward
from tieredemb.step.forwards import LISTENERS, tell
from tieredemb.step.inputs import Batch
from tieredemb.step.planned_forwards import Ahead, Lane, Planned
from tieredemb.storage.base import CARRIERS
from tieredemb.tables.fused_optimizer import FusedOptimizer
from tieredemb.tables.group import TableSetConfig
from tieredemb.tables.table_set import TableSet

if TYPE_CHECKING:
    from tieredemb.step.call_memory import CallMemory


class _Accumulated:
    """What `accumulate()` keeps for the update at its end. The context alone holds it: one that was left in whatever
    way keeps no later backward from its update."""

    def __init__(self) -> None:
        self.calls: list[tuple[Call, torch.Tensor]] = []


class TieredModule(nn.Module, abc.ABC):
    """Base of the public modules. Its tables are no parameters: `parameters()` holds nothing of them."""

    def __init__(self, config: TableSetConfig, options: LookupOptions) -> None:
        super().__init__()
        self.tables = TableSet(config)
        self.options = options
        self._frozen = False
        self._fused = None if config.optimizer is None else FusedOptimizer(self.tables, config.optimizer)
        self._connect()

    def _connect(self) -> None:
        self.backward_pass = BackwardPass(self._apply_updates)
        self.ahead = Ahead()
        # threads whose captured step gives it buffers, in which ids of longer batches are left
        self.ids_may_exceed_bags: set[int] = set()
        self._accumulates: weakref.ref[_Accumulated] | None = None
        # a plain tensor, no Parameter: it only makes autograd ask for a gradient
        self._hook = self._make_hook()

    def _make_hook(self) -> torch.Tensor:
        with torch.inference_mode(False):  # a module built in inference mode may be trained later
            return torch.zeros(0, device=self.tables.config.device, requires_grad=not self._frozen)

    @property
    def fused_optimizer(self) -> FusedOptimizer:
        """The optimizer that backward applies. Raises `ConfigError` where the module was built without one."""
        if self._fused is None:
            raise ConfigError(
                "this module has no optimizer; pass optimizer=tieredemb.Adagrad(lr=…) (or SGD, RowWiseAdagrad, Adam) "
                "to its constructor to train it"
            )
        return self._fused

    @property
    def is_trainable(self) -> bool:
        """Whether a backward updates the rows."""
        return self._fused is not None and not self._frozen

    # --- forward and backward ---------------------------------------------------------------------------------------

    def _lookup(self, batch: Batch) -> torch.Tensor:
        """Pools a batch: (B, ΣD)."""
        within = self.backward_pass.touch() if inside_backward() else None
        grad, weights = torch.is_grad_enabled(), batch.weights
        if grad and not self._frozen:
            self._check_world_size()
        if grad and (not self._frozen or (weights is not None and weights.requires_grad)):
            make = functools.partial(self._begin, batch, trains=not self._frozen)
            # a leaf of its own: autograd remembers a leaf's stream for as long as a graph is alive, which would tie a
            # captured step to an earlier one
            hook = self._hook if self._frozen else self._hook.detach().requires_grad_()
            return Lookup.apply(hook, weights, make, within)  # type: ignore[no-any-return, no-untyped-call]
        call = self._begin(batch, trains=False)
        try:
            with marked("lookup"):
                return call.pool(weights, differentiable=False)
        finally:
            call.release()

    def _begin(self, batch: Batch, *, trains: bool) -> Call:
        """The call of a forward: planned ahead for its very tensors, or now."""
        recomputed = inside_backward()
        if LISTENERS and not recomputed:
            tell(self, batch, trains=trains)
        self.tables.check_earlier()
        call = None if recomputed else self.ahead.take(batch.given)
        if call is None:
            call = batch.call(self, trains=trains)
        try:
            call.start()
        except BaseException:
            call.release()
            raise
        return call

    def plan_ahead(
        self, lane: Lane, *inputs: torch.Tensor, trains: bool = True, memory: CallMemory | None = None
    ) -> Planned:
        """Plans a forward before it comes, on `lane`, from the ids and offsets that it will be given. A forward of
        other tensors, or of these once they were changed, plans by itself, and so does one whose plan failed; plans
        never taken are to be dropped. `trains`: whether a backward is expected · `memory`: on a GPU, where to plan."""
        trains = trains and not self._frozen
        if lane.apart:
            for group in self.tables.groups:
                group.cache.let_go()
        holds = [group.cache.hold() if lane.apart else None for group in self.tables.groups]
        # before the lane's stream is used: a capture on another thread may have forked into it
        with contextlib.nullcontext() if lane.apart else self.tables.planning():
            planned = Planned(inputs, lane.submit(self._plan, inputs, holds, trains=trains, memory=memory))
        self.ahead.add(planned)
        return planned

    def _plan(
        self, inputs: tuple[torch.Tensor, ...], holds: list[Any], *, trains: bool, memory: CallMemory | None
    ) -> Call:
        with contextlib.ExitStack() as ahead:
            for group, hold in zip(self.tables.groups, holds, strict=True):
                ahead.enter_context(group.cache.ahead(inputs, hold))
            return self._batch(*inputs).call(self, trains=trains, ahead=True, memory=memory)

    @abc.abstractmethod
    def _batch(self, *inputs: Any) -> Batch:
        """The batch that a forward of `inputs` looks up. Raises `InvalidInputError`."""

    def _apply_updates(self, collected: list[tuple[Call, torch.Tensor]]) -> None:
        """Applies the calls of one backward pass in forward order, or keeps them for the end of `accumulate()`."""
        kept = self._accumulated
        if kept is not None:
            kept.calls += collected
            return
        try:
            with marked("update"):
                type(collected[0][0]).apply(self, collected)
        finally:
            for call, _ in collected:
                call.release()

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Sums the gradients of all backward passes inside the context and applies one optimizer step at its end: the
        bits of one backward through the micro-batches as one batch, given equal gradients of the outputs.

        The rows of all of them stay locked until then, and their gradients are kept. After an exception nothing is
        applied. Raises `BackwardError` inside itself.

        >>> bag = TieredEmbeddingBag(1000, 4, optimizer=tieredemb.SGD(lr=0.1))
        >>> with bag.accumulate():
        ...     for micro_batch in torch.randint(1000, (4, 8, 3)):
        ...         (bag(micro_batch).sum() / 4).backward()
        """
        if self._accumulated is not None:
            raise BackwardError("accumulate() is active already; one context holds all micro-batches of a step")
        kept = _Accumulated()
        with self.tables.locked():  # not amid another thread's capture
            self._accumulates = weakref.ref(kept)
        try:
            yield
        except BaseException:
            for call, _ in kept.calls:
                call.release()
            raise
        finally:
            self._accumulates = None
        if kept.calls:
            self._apply_updates(sorted(kept.calls, key=lambda pair: pair[0].number))

    @property
    def _accumulated(self) -> _Accumulated | None:
        """What `accumulate()` has kept so far, while it is active."""
        return None if self._accumulates is None else self._accumulates()

    @property
    def accumulates(self) -> bool:
        """Whether `accumulate()` is active."""
        return self._accumulated is not None

    def check_trainable(self) -> FusedOptimizer:
        """The optimizer; raises `BackwardError` without one (never a silent default learning rate)."""
        if self._fused is None:
            raise BackwardError(
                "backward reached a module that was built without an optimizer, so it cannot update its rows; pass "
                "optimizer=tieredemb.Adagrad(lr=…), or call requires_grad_(False) on the module to keep it as it is"
            )
        return self._fused

    def _check_world_size(self) -> None:
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
            raise UnsupportedError(
                f"training in a world of {distributed.get_world_size()} processes is not supported: each would update "
                f"its own copy of the rows and they would drift apart; train in one process, or serve under no_grad()"
            )

    def requires_grad_(self, requires_grad: bool = True) -> TieredModule:
        """Freezes the tables (False): outputs need no gradient and rows stay; or thaws them. Call it on this module:
        that of a model around it reaches parameters alone, and the tables are none."""
        super().requires_grad_(requires_grad)
        self._frozen = not requires_grad
        self._hook = self._make_hook()
        return self

    # --- reports and saving -----------------------------------------------------------------------------------------

    def stats(self) -> CacheStats:
        """Counters since the module was built (`CacheStats`); subtract two snapshots to measure a stretch of work."""
        return self.tables.stats()

    def memory_report(self) -> dict[str, Any]:
        """Bytes of every allocation, by width and purpose."""
        return self.tables.memory_report()

    def flush(self) -> None:
        """Writes all hot rows back: afterwards cold storage alone holds the truth."""
        self.tables.flush()

    def close(self) -> None:
        """Flushes and closes the cold storage; the module is unusable afterwards. Runs by itself at exit."""
        self.tables.close()

    def save_checkpoint(self, directory: str | os.PathLike[str], *, extra: dict[str, Any] | None = None) -> None:
        """Saves rows, optimizer state, scores and counters to `directory`, replacing its last checkpoint atomically.

        Written in chunks, so tables may exceed memory; verified and fsynced before the old one is replaced: killed at
        any moment, the last complete checkpoint loads. `extra`: JSON-able, returned by `load_checkpoint`. Raises
        `ConfigError`, before anything is written, for an `extra` or a param group that could not be loaded.
        """
        from tieredemb.tables.checkpoint import save

        save(self.tables, self._fused, directory, {} if extra is None else extra)

    def load_checkpoint(self, directory: str | os.PathLike[str], *, recover: bool = False) -> dict[str, Any]:
        """Replaces all rows by those of a checkpoint, at any capacity, tier and policy; returns its `extra`.

        Raises `CheckpointError` before anything changes where it is incomplete, damaged or of other tables, and
        `StorageError` while batches are in flight. One that was saved by a broken cache (`BrokenCacheError`) is
        refused, unless `recover` takes its rows as they are. Interrupted half-way, it leaves the cache broken, which
        another load mends.
        """
        from tieredemb.tables.checkpoint import load

        self.ahead.drop_all()
        extra: dict[str, Any] = load(self.tables, self._fused, directory, recover=recover)
        return extra

    def _weight_key(self, table: int) -> str:
        """Name of a table's weights in `state_dict()`."""
        return f"tables.{self.tables.config.tables[table].name}.weight"

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for table in range(len(self.tables.config.tables)):
            destination[prefix + self._weight_key(table)] = self.tables.weight(table)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        # hooks run first, as they may rename keys; a subclass's own parameters are loaded there too
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        weights: dict[int, torch.Tensor] = {}
        for table, config in enumerate(self.tables.config.tables):
            key = prefix + self._weight_key(table)
            if key in unexpected_keys:
                unexpected_keys.remove(key)
            weight = state_dict.get(key)
            if weight is None:
                missing_keys.append(key)
            elif not isinstance(weight, torch.Tensor) or weight.layout is not torch.strided or weight.is_meta:
                error_msgs.append(f"{key} must be a dense tensor with content, got {type(weight).__name__}")
            elif tuple(weight.shape) != (config.num_embeddings, config.embedding_dim):
                error_msgs.append(
                    f"{key} has shape {tuple(weight.shape)}, the table has "
                    f"{(config.num_embeddings, config.embedding_dim)}"
                )
            else:
                weights[table] = weight
        if weights:
            self.tables.set_weights(weights)

    # --- what nn.Module would do to parameters ------------------------------------------------------------------------

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> TieredModule:
        probe = fn(torch.zeros(1, dtype=torch.float32, device=self.tables.config.device))
        if probe.dtype != torch.float32:
            allowed = ", ".join(map(str, CARRIERS))
            raise UnsupportedError(
                f"rows cannot be converted to {probe.dtype} in place; build the module with dtype= one of {allowed}, "
                f"convert the dense part alone, or use autocast for it"
            )
        shared = fn(torch.zeros(1, device="cpu"))  # tensors on a GPU count as shared whatever fn does
        if shared.device.type == "cpu" and shared.is_shared():  # type: ignore[no-untyped-call]
            raise UnsupportedError("rows cannot be shared between processes; train in one process")
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if probe.device != self.tables.config.device:
            self.ahead.drop_all()
            self.tables.move(probe.device)
        if probe.device != self._hook.device:  # of an interrupted move, too
            self._hook = self._make_hook()
        if self._fused is not None:
            self._fused.move()
        return self

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise AttributeError(
                "a tiered table has no weight tensor: its rows live in several places; use state_dict() for a copy of "
                "the whole table, load_state_dict() to set it, or call the module to look rows up"
            )
        return super().__getattr__(name)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        self.ahead.drop_all()  # the copy plans for itself, and tables are copied while no batch is in flight
        del state["backward_pass"], state["_hook"], state["_accumulates"], state["ahead"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._connect()
