"""What all tiered modules share: their tables, the forward, saving, copying, and what they refuse."""

from __future__ import annotations

import abc
import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tieredemb.cache.base import AHEAD, PlanKind
from tieredemb.cache.stats import CacheStats
from tieredemb.config import OptimizerConfig, check_flag
from tieredemb.errors import ConfigError, UnsupportedError
from tieredemb.kernels import check_device
from tieredemb.kernels.inference import no_inference
from tieredemb.kernels.tracing import RESTORE
from tieredemb.lookup.bags import Places
from tieredemb.lookup.options import LookupOptions
from tieredemb.modules.forwards import LISTENERS, notify_listeners
from tieredemb.modules.given_weights import given_weights
from tieredemb.modules.lookup_module import LookupModule
from tieredemb.step import data_parallel as data_parallel  # listens for it
from tieredemb.step.batch import Batch, Given
from tieredemb.step.engine import Engine
from tieredemb.step.planned_forwards import PlanExecutor, Planned, PlannedForwards
from tieredemb.step.program import inside_backward
from tieredemb.step.table_parameter import PLAIN, REQUIRES_GRAD, TableParameter
from tieredemb.storage.base import CARRIERS
from tieredemb.tables.followed_optimizer import FollowedOptimizer
from tieredemb.tables.fused_optimizer import FusedOptimizer
from tieredemb.tables.table_set import TableSet
from tieredemb.tables.torch_kinds import unwrapped

if TYPE_CHECKING:
    from tieredemb.step.call_memory import CallMemory


class TieredModule(LookupModule):
    """Base of the public modules: a face of an `engine`, which may have others. Its tables are parameters where they
    follow a torch optimizer, or are to, and else `parameters()` holds nothing of them."""

    engine: Engine

    def __init__(self, engine: Engine, options: LookupOptions) -> None:
        super().__init__()
        self.engine = engine
        self.options = options
        self.table_configs = engine.tables.config.tables
        self._frozen = False
        self._connect()

    def _connect(self) -> None:
        self.call_context = self.engine.context(self.options)
        # a plain tensor, no Parameter: it only makes autograd call the backward, and is on the device of the tables
        self._hook = self._make_hook()
        self._table_parameters = {self._weight_key(each.table): each for each in self.engine.table_parameters}
        self._parameters.update(self._table_parameters)  # type: ignore[arg-type]

    def _make_hook(self) -> torch.Tensor:
        with no_inference():  # a module built in inference mode may be trained later
            return torch.zeros(0, device=self.tables.config.device, requires_grad=not self._frozen)

    @property
    def tables(self) -> TableSet:
        """The tables, wherever their rows are."""
        return self.engine.tables

    @property
    def table_parameters(self) -> Mapping[str, TableParameter]:
        """Its tables as parameters, by their names; none where they follow no torch optimizer."""
        return self._table_parameters

    @property
    def engines(self) -> Sequence[Engine]:
        """That of its tables."""
        return (self.engine,)

    @property
    def planned(self) -> PlannedForwards:
        """The forwards that were planned ahead and have not started."""
        return self.engine.planned

    @property
    def fused_optimizer(self) -> FusedOptimizer:
        """The optimizer that backward applies. Raises `ConfigError` where the module was built without one, and where
        it follows a torch optimizer."""
        optimizer = self.engine.optimizer
        if optimizer is None:
            raise ConfigError(
                "this module has no optimizer; pass optimizer=tieredemb.Adagrad(lr=…), or another one "
                f"({', '.join(OptimizerConfig.known())}), to its constructor to train it"
            )
        if isinstance(optimizer, FollowedOptimizer):
            followed = "is to follow a torch optimizer, by follow(optimizer)"
            if optimizer.optimizer is not None:
                followed = f"follows a torch.optim.{type(optimizer.optimizer).__name__}"
            raise ConfigError(
                f"this module {followed}, and has no fused optimizer: options, state_dict() and schedulers are the "
                f"torch optimizer's"
            )
        return optimizer

    def follow(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        group: int | dict[str, Any] | None = None,
        instead_of: Sequence[torch.Tensor] | None = None,
        in_state_dict: bool = True,
    ) -> None:
        """From now on the rows are updated by `optimizer.step()`, as the optimizer would update whole tables.

        All backward passes since the last step are one update; `zero_grad()` drops what they have brought. The options
        are read from the param group at each step. Each table is one of its params: as one of `parameters()` that it
        has already, or at the end of the `group` (an index, or one of its `param_groups`; the only one by default), or
        in the places of the params `instead_of`, one a table, whose state becomes the tables'.
        `in_state_dict`: whether `optimizer.state_dict()` holds the tables' state, and loading it sets that; False for
        tables larger than memory, whose state `save_checkpoint` saves.

        Tables that followed another optimizer leave it; state and steps start again, as those of a new torch
        optimizer do. A module that was built without an optimizer is laid out anew for the state that this one needs,
        with all tables that share its cache, which takes memory for the rows a second time. Raises `UnsupportedError`
        for an optimizer or an option that tables lack, `ConfigError` for what does not fit, and `StorageError` while
        batches are in flight. Does not synchronise, but where rows are laid out anew.

        >>> model = nn.Sequential(tieredemb.TieredEmbeddingBag(1000, 4, mode="sum"), nn.Linear(4, 1))
        >>> optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        >>> model[0].follow(optimizer)
        >>> model(torch.tensor([[1, 2]])).sum().backward()
        >>> optimizer.step()
        """
        self.engine.follow(unwrapped(optimizer), group=group, instead_of=instead_of, in_state_dict=in_state_dict)
        was_frozen, self._frozen = self._frozen, False
        self._connect()
        if was_frozen:
            self.requires_grad_(False)

    @property
    def is_trainable(self) -> bool:
        """Whether a backward updates the rows."""
        return self.engine.optimizer is not None and self.trains

    @property
    def trains(self) -> bool:
        """Whether gradients are wanted: not of a frozen module, nor of frozen tables. Raises `UnsupportedError` where a
        table's parameter was replaced, or some tables are frozen and others not."""
        if self._frozen:
            return False
        found, those = self._parameters, self._table_parameters
        if not those:
            return True
        if len(those) == 1:  # of a converted model each module, in each forward
            ((name, only),) = those.items()
            if is_(found.get(name), only) and type(only) is TableParameter:
                with PLAIN():
                    return bool(REQUIRES_GRAD(only))
        are_there = all(map(is_, map(found.get, those, those.values()), those.values()))
        if not are_there or {*map(type, those.values())} != {TableParameter}:
            name = next(n for n, each in those.items() if type(found.get(n, each)) is not TableParameter)
            raise UnsupportedError(
                f"parameter {name!r} of a tiered module was replaced by another tensor, as torch.func."
                f"functional_call() does it: its rows stay as they are; leave it out of what is replaced. {RESTORE}"
            )
        with PLAIN():  # in compiled code, as each forward looks at many tables
            wanted: set[bool] = {*map(REQUIRES_GRAD, those.values())}
        if len(wanted) > 1:
            frozen = [name for name, each in those.items() if not each.wants_gradient]
            raise UnsupportedError(
                f"{len(frozen)} of the {len(those)} tables of one module are frozen ({', '.join(frozen)}), and the "
                f"others not; tables of one module train together: freeze all of them, or give them modules of their "
                f"own"
            )
        return wanted.pop()

    # --- forward and backward ---------------------------------------------------------------------------------------

    def _lookup(self, batch: Batch) -> torch.Tensor:
        """Pools a batch: (B, ΣD)."""
        if LISTENERS and not inside_backward():
            notify_listeners(self, batch, trains=torch.is_grad_enabled() and self.trains)
        return self.engine.lookup(batch, self.call_context, self._hook if self.trains else self._hook.detach())

    @abc.abstractmethod
    def _batch(self, *inputs: Any) -> Batch:
        """The batch that a forward of `inputs` looks up. Raises `InvalidInputError`."""

    def plan_ahead(
        self,
        executor: PlanExecutor,
        *inputs: torch.Tensor | Places,
        kind: PlanKind = AHEAD,
        memory: CallMemory | None = None,
    ) -> Planned:
        """See `LookupModule`."""
        if not self.trains:
            kind = kind._replace(trains=False)
        return self.engine.plan_ahead(executor, inputs, self._batch, self.call_context, kind, memory)

    def batch_of(self, given: Given) -> Batch:
        """The batch of a forward, from its arguments. Raises `InvalidInputError`."""
        return self._batch(*given)

    def accumulate(self) -> contextlib.AbstractContextManager[None]:
        """Sums the gradients of all backward passes inside the context and applies one optimizer step at its end: the
        bits of one backward through the micro-batches as one batch, given equal gradients of the outputs.

        The rows of all of them stay locked until then, and their gradients are kept. After an exception nothing is
        applied. Raises `BackwardError` inside itself.

        >>> bag = tieredemb.TieredEmbeddingBag(1000, 4, optimizer=tieredemb.SGD(lr=0.1))
        >>> with bag.accumulate():
        ...     for micro_batch in torch.randint(1000, (4, 8, 3)):
        ...         (bag(micro_batch).sum() / 4).backward()
        """
        return self.engine.accumulate()

    def requires_grad_(self, requires_grad: bool = True) -> TieredModule:
        """Freezes the tables (False): outputs require no gradient and rows do not change; or unfreezes them. Call it on
        this module: the method of a model around it reaches only parameters, and tables are parameters only if they
        follow a torch optimizer."""
        check_flag("requires_grad", requires_grad)
        super().requires_grad_(bool(requires_grad))
        self._frozen = not requires_grad and not self._table_parameters  # which say it themselves
        self._hook = self._make_hook()
        return self

    # --- reports and saving -----------------------------------------------------------------------------------------

    def stats(self) -> CacheStats:
        """Counters since the module was built (`CacheStats`); subtract two snapshots to measure a stretch of work."""
        return self.tables.stats()

    def memory_report(self) -> dict[str, Any]:
        """Bytes of every allocation, by width and purpose."""
        return self.tables.memory_report()

    def row_files(self) -> dict[str, Any] | None:
        """The files of `File(path)` that hold the rows: `identity` (str) and `generation` (int) of their set, and
        `files`, the paths. None where rows end with the process. Does not synchronise.

        The generation grows by one with each session that uses rows, however many steps it takes. What is saved beside
        the tables, as the dense layers are, notes both, and is compared with them when the files are opened again: they
        belong together where identity and generation are equal.

        >>> tieredemb.TieredEmbeddingBag(1000, 4).row_files() is None
        True
        """
        found = self.tables.row_set
        return None if found is None else found._asdict()

    def flush(self) -> None:
        """Writes all hot rows back: afterwards cold storage alone holds the truth. As all calls below, of all tables
        that share a cache with these."""
        self.tables.flush()

    def close(self) -> None:
        """Flushes and closes the cold storage; the module is unusable afterwards, and so are others whose tables share
        its cache. Gradients that wait for a step are dropped, with a warning. Runs by itself at exit."""
        self.engine.drop_gradient()
        self.tables.close()

    def save_checkpoint(self, directory: str | os.PathLike[str], *, extra: dict[str, Any] | None = None) -> None:
        """Saves rows, optimizer state, scores and counters to `directory`, replacing its last checkpoint atomically;
        those of all tables that share a cache with these.

        Written in chunks, so tables may exceed memory; verified and fsynced before the old one is replaced: killed at
        any moment, the last complete checkpoint loads. `extra`: JSON-able, returned by `load_checkpoint`. Raises
        `ConfigError`, before anything is written, for an `extra` or a param group that could not be loaded.
        """
        from tieredemb.tables.checkpoint import save, saved_alone

        save(saved_alone(self.tables, self.engine.optimizer), directory, {} if extra is None else extra)

    def load_checkpoint(self, directory: str | os.PathLike[str], *, recover: bool = False) -> dict[str, Any]:
        """Replaces all rows by those of a checkpoint, at any capacity, tier and policy; returns its `extra`. As a save,
        it is of all tables that share a cache with these.

        Raises `CheckpointError` before anything changes where it is incomplete, damaged or of other tables, and
        `StorageError` while batches are in flight. One that was saved by a broken cache (`BrokenCacheError`) is
        refused, unless `recover` takes its rows as they are. Interrupted half-way, it leaves the cache broken, which
        another load mends.
        """
        from tieredemb.tables.checkpoint import load, saved_alone

        self.engine.check_no_gradient("load a checkpoint")
        self.engine.drop_planned()
        return load(saved_alone(self.tables, self.engine.optimizer), directory, recover=recover)

    def _weight_key(self, table: int) -> str:
        """Name of a table's weights in `state_dict()`."""
        return f"tables.{self.tables.config.tables[table].name}.weight"

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        with self._without_tables():
            super()._save_to_state_dict(destination, prefix, keep_vars)
        for table in range(len(self.tables.config.tables)):
            destination[prefix + self._weight_key(table)] = self.tables.weight(table)

    @contextlib.contextmanager
    def _without_tables(self) -> Iterator[None]:
        """These are no parameters inside, where others are replaced, loaded and saved."""
        every: dict[str, Any] = self._parameters | self._table_parameters
        for name in self._table_parameters:
            self._parameters.pop(name, None)
        try:
            yield
        finally:
            others: dict[str, Any] = dict(self._parameters)
            self._parameters.clear()
            self._parameters.update({name: others.get(name, each) for name, each in every.items()})  # in their order

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
        with self._without_tables():
            super()._load_from_state_dict(
                state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
            )
        tables = self.tables.config.tables
        keys = [prefix + self._weight_key(table) for table in range(len(tables))]
        weights, problems = given_weights(state_dict, keys, tables, unexpected_keys)
        error_msgs += problems
        missing_keys += [key for key in keys if state_dict.get(key) is None]
        if weights and not problems:  # all tables of a module, or none
            self.tables.set_weights(weights)

    # --- what nn.Module would do to parameters ------------------------------------------------------------------------

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> TieredModule:
        probe = moved(fn, torch.zeros(1, dtype=torch.float32, device=self.tables.config.device))
        if probe.dtype != torch.float32:
            allowed = ", ".join(map(str, CARRIERS))
            raise UnsupportedError(
                f"rows cannot be converted to {probe.dtype} in place; build the module with dtype= one of {allowed}, "
                f"convert the dense part alone, or use autocast for it"
            )
        shared = fn(torch.zeros(1, device="cpu"))  # tensors on a GPU count as shared whatever fn does
        if shared.device.type == "cpu" and shared.is_shared():
            raise UnsupportedError("rows cannot be shared between processes; train in one process")
        if probe.device != self._hook.device:
            self.tables.check_moves([each.tables for each in _moved_with(self)])
            self.engine.check_no_gradient("move the tables")
        with self._without_tables():  # which move with the tables
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.engine.move(probe.device)
        if probe.device != self._hook.device:  # of an interrupted move, too, or one of another module on the tables
            self._hook = self._make_hook()
        return self

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As `nn.Module.register_parameter`. Raises `UnsupportedError` for a table under another name."""
        if isinstance(param, TableParameter):
            raise UnsupportedError(
                f"a table cannot become parameter {name!r} of a module, as torch.nn.utils.prune does it: its rows are "
                f"looked up by the module that has it. {RESTORE}"
            )
        super().register_parameter(name, param)

    def apply(self, fn: Callable[[nn.Module], None]) -> TieredModule:
        """As `nn.Module.apply`; warns where `fn` names `Embedding`, as code does that looks for `nn.Embedding` to begin
        its weights: it finds none."""
        names = getattr(getattr(fn, "__code__", None), "co_names", ())
        if "Embedding" in names or "EmbeddingBag" in names:
            warnings.warn(
                f"apply({getattr(fn, '__name__', 'fn')}) looks for embeddings, and tiered tables are none: their rows "
                f"stay as they are; call it before the model is converted, or set rows by load_state_dict()",
                stacklevel=3,
            )
        super().apply(fn)
        return self

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise AttributeError(
                "tables of a collection have no weight tensor: their rows live in several places; use state_dict() for "
                "copies of the tables, load_state_dict() to set them, or tieredemb.scores(collection, x, table=name)"
            )
        return super().__getattr__(name)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        del state["call_context"], state["_hook"], state["_table_parameters"]
        return {"engine": state.pop("engine"), **state}  # with its parameters, before those of the module

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for name in [name for name, each in self._parameters.items() if isinstance(each, TableParameter)]:
            del self._parameters[name]  # the tables have others now, which may have other names
        self._connect()


def moved(fn: Callable[[torch.Tensor], torch.Tensor], probe: torch.Tensor) -> torch.Tensor:
    """What `fn`, which is to be applied to a module, makes of a tensor. Raises `UnsupportedError` where it moves that
    to a GPU and torch has none."""
    try:
        return fn(probe)
    except (AssertionError, RuntimeError) as error:
        if not torch.cuda.is_available() and ("CUDA" in str(error) or "NVIDIA" in str(error)):
            try:
                check_device(torch.device("cuda"))
            except UnsupportedError as known:
                raise known from error
        raise


def _moved_with(module: TieredModule) -> list[TieredModule]:
    """The tiered modules of the outermost module whose `_apply` has led to that of `module`, on this thread."""
    frame: Any = sys._getframe(1)
    outermost: nn.Module = module
    while frame is not None:
        if frame.f_code.co_name == "_apply" and isinstance(frame.f_locals.get("self"), nn.Module):
            outermost = frame.f_locals["self"]
        frame = frame.f_back
    return [each for each in outermost.modules() if isinstance(each, TieredModule)]
