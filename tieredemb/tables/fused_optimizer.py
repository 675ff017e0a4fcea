"""The fused optimizer as a `torch.optim.Optimizer`: it holds the learning rate; the backward applies the step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from operator import is_
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from tieredemb.config import OptimizerConfig, check_finite, is_number
from tieredemb.errors import ConfigError, shown
from tieredemb.lookup.optimizer import Hyperparameters, check_fixed, check_rate, hyperparameters, named_numbers
from tieredemb.tables.device_options import DeviceOptions
from tieredemb.tables.fingerprint import Fingerprint
from tieredemb.tables.given_states import only_group
from tieredemb.tables.group import DeviceGroup
from tieredemb.tables.param_groups import is_plain, options_in
from tieredemb.tables.row_state import (
    check_equal_steps,
    check_is_here,
    check_lagging,
    lagging_rows,
    loaded_state,
    state_tensors,
    steps_of,
    totals_of,
)
from tieredemb.tables.table_set import LoadedState, TableSet
from tieredemb.tables.torch_kinds import as_numbers

_ADDED_LATER = frozenset({"weight_decay_on_use"})  # older checkpoints lack these, and do not change them


class FusedOptimizer(torch.optim.Optimizer):
    """Settings and state of the update that a module's backward applies.

    Schedulers change `param_groups[0]["lr"]` as usual. `step()` does nothing, because the rows are up to date when
    `backward()` returns. The params are one empty parameter a table: no dense optimizer can reach a row.
    `state_dict()` holds the row states as torch's optimizer of the same name would: `{"state": {table: {"step", "sum",
    …}}, "param_groups": […]}`.

    >>> bag = tieredemb.TieredEmbeddingBag(1000, 4, optimizer=tieredemb.SGD(lr=0.1))
    >>> scheduler = torch.optim.lr_scheduler.StepLR(bag.fused_optimizer, step_size=10)
    >>> bag.fused_optimizer.param_groups[0]["lr"]
    0.1
    """

    is_there, stepping = True, None  # see `RowOptimizer`
    _good: Mapping[str, Any] = MappingProxyType({})  # its own options at their last check,
    _seen: Sequence[object] = ()  # and their values in the param group
    steps_fingerprint = 0  # see `RowOptimizer`

    def look_for(self) -> bool:
        """See `RowOptimizer`: there is none to follow."""
        return False

    def __init__(self, tables: TableSet, config: OptimizerConfig) -> None:
        device = tables.config.device
        params = [torch.nn.Parameter(torch.zeros((), device=device)) for _ in tables.config.tables]
        super().__init__(params, asdict(config))
        self._tables = tables
        self._config = config
        self._scaler: torch.amp.GradScaler | None = None
        self.found_inf: bool | torch.Tensor = False
        self.on_device = DeviceOptions(tables)
        self._fingerprint = Fingerprint()

    @property
    def config(self) -> OptimizerConfig:
        """The optimizer that the rows are laid out for."""
        return self._config

    @property
    def source(self) -> torch.optim.Optimizer:
        """See `RowOptimizer`."""
        return self

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Does nothing but call `closure`: backward has applied the step."""
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()

    def attach_grad_scaler(self, scaler: torch.amp.GradScaler) -> None:
        """Makes the backward divide by the scale of `scaler`.

        A backward whose gradient is not finite then updates nothing and sets `found_inf`; pass this optimizer to
        `scaler.step()` beside the dense one, so that `scaler.update()` lowers the scale. Infinities found only in the
        dense part cannot hold back rows that backward has updated already. A copy of the module has no scaler: attach
        one to it.
        """
        if not isinstance(scaler, torch.amp.GradScaler):
            raise ConfigError(f"attach_grad_scaler needs a torch.amp.GradScaler, got {scaler!r}")
        self._scaler = scaler

    @property
    def is_scaled(self) -> bool:
        """Whether an enabled scaler is attached."""
        return self._scaler is not None and self._scaler.is_enabled()

    def numbers(self, steps: tuple[int, ...], grads: Sequence[torch.Tensor]) -> Hyperparameters | None:
        """The hyperparameters of the next step of tables that have taken `steps`, or None if a scaler is attached and
        `grads` are not finite."""
        scale = 1.0
        if self._scaler is not None and self._scaler.is_enabled():
            scale = 1.0 / self._scaler.get_scale()
            self.found_inf = not all(bool(torch.isfinite(grad).all()) for grad in grads)
            for param in self.param_groups[0]["params"]:  # where scaler.step() looks for infinities
                param.grad = torch.full_like(param, float("inf") if self.found_inf else 0.0)
            if self.found_inf:
                return None
        return hyperparameters(self._config, self._checked_options(), np.array(steps, np.int64) + 1, scale)

    def scaling(self, grads: list[torch.Tensor]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """On a GPU: whether `grads` are not finite, and what they were scaled by, both float32 (); None without an
        attached scaler. Does not synchronise; `found_inf` is a tensor there."""
        scaler = self._scaler
        if scaler is None or not scaler.is_enabled():
            return None, None
        finite = torch.stack([torch.isfinite(grad).all() for grad in grads]).all()
        self.found_inf = found = torch.where(finite, 0.0, 1.0)
        for param in self.param_groups[0]["params"]:
            param.grad = torch.where(finite, 0.0, float("inf"))
        return found, scaler._get_scale_async()

    def spoilt(self) -> torch.Tensor | None:
        """None: its gradients are applied in backward, so no code can multiply them before."""
        return None

    def alike(self) -> Hashable:
        """See `RowOptimizer.alike`. Each optimizer reports infinities to its own scaler."""
        values = tuple(options_in(self.param_groups[0]).values())
        try:
            hash(values)
        except TypeError:  # of a list, say
            return id(self)
        return id(self) if self._scaler is not None else (type(self._config), values)

    def upload(self) -> None:
        """Sends the param group, as it is now, to the GPU. Every eager step does; after a scheduler has changed `lr`,
        call it before replaying a captured step. Does not synchronise; on the CPU nothing is sent. Raises
        `ConfigError` for a learning rate that is negative or no number, and for other options that are not allowed."""
        self.on_device.send(self._checked_options())

    def options_fingerprint(self, *, waits: bool) -> int:
        """See `RowOptimizer`."""
        return self._fingerprint.of({**self._checked_options(), **self._scaled(waits=waits)})

    def fingerprint_values(self) -> dict[str, object]:
        """See `RowOptimizer`."""
        kind, own = type(self._config).__name__, self._own(self.options())
        return {f"{name} of the {kind} that updates the rows": value for name, value in own.items()} | self._scaled()

    def _scaled(self, *, waits: bool = True) -> dict[str, object]:
        """The scale of an attached, enabled scaler, by name. `waits`: for the GPU that has it."""
        if self._scaler is None or not self._scaler.is_enabled():
            return {"the scale of the attached GradScaler": "none"}
        return {"the scale of the attached GradScaler": self._scaler.get_scale() if waits else "some"}

    def _own(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options of a param group that an update reads, without those of schedulers and users."""
        return {each.name: options[each.name] for each in fields(self._config) if each.name in options}

    def options_on(self, group: DeviceGroup) -> torch.Tensor:
        """The param group on the GPU of `group`, float64 (`MOST_NUMBERS`,); see `device_numbers`."""
        self.upload()
        return self.on_device.numbers

    def move(self) -> None:
        """Follows the tables to another device, if they are on one."""
        device, params = self._tables.config.device, self.param_groups[0]["params"]
        if params[-1].device == device:
            return
        self.on_device = DeviceOptions(self._tables)
        self.found_inf = False
        for param in params:
            param.grad = None
            param.data = param.data.to(device)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused after construction: the tables are the parameters."""
        if getattr(self, "_tables", None) is not None:
            raise ConfigError("a fused optimizer has one param group, its module's tables; make another module instead")
        add = torch.optim.Optimizer.add_param_group
        if not torch.compiler.is_compiling():  # torch's own method imports its compiler, which takes seconds
            add = getattr(add, "__wrapped__", add)
        add(self, param_group)

    # --- saving -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Copies of all row states, and the param group. Raises `StorageFullError` where memory cannot hold them."""
        state: dict[int, dict[str, torch.Tensor]] = {}
        for table in range(len(self._tables.config.tables)):
            steps = steps_of(self._tables, table)
            counted = {"step": torch.tensor(float(steps), dtype=torch.float32, device="cpu")}
            counted |= totals_of(self._config, steps)
            tensors = state_tensors(self._tables, self._config, table)
            state[table] = {**counted, **tensors, **lagging_rows(self._tables, table)}
        return {"state": state, "param_groups": [self.options() | {"params": list(state)}]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what `state_dict` returned, or what torch's optimizer of the same name did for these tables.

        Raises `InvalidInputError`, and `ConfigError` for options that are not allowed, before anything changes.
        """
        entries, group = only_group(state_dict, len(self._tables.config.tables))
        options = self.loadable_options(group)
        check_is_here(state_dict, entries)
        loaded: dict[int, LoadedState] = {}
        for table, entry in enumerate(entries):
            loaded[table] = loaded_state(self._tables, self._config, table, entry)
        check_equal_steps(self._config, loaded)
        check_lagging(self._tables, loaded)
        self._tables.set_states(loaded, lambda: self.set_options(options))

    def loadable_options(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of what is to be loaded from a param group in a state dict; what is missing stays unchanged. Raises
        `ConfigError` for values that are not allowed. Changes nothing."""
        known = {*self.options(), "initial_lr"}
        given = {name: value for name, value in options_in(group).items() if name in known}
        self.check_options(self.options() | given | as_numbers(self._own(given)))
        return copy.deepcopy(given)

    def options(self) -> dict[str, Any]:
        """lr, eps, … as the param group holds them, without its params; tensors as numbers, where they are one."""
        options = options_in(self.param_groups[0])
        for name, value in options.items():
            if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_meta:
                options[name] = value.item()
        return options | as_numbers(self._own(options))

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raises `ConfigError` unless `options` holds what this optimizer works with, in values that its config
        takes. Options of schedulers and users may be there, too, as a number if it is one here: their names are
        unknown. Changes nothing."""
        kind = type(self._config).__name__
        needed = [each.name for each in fields(self._config) if each.name not in _ADDED_LATER]
        if missing := [name for name in needed if name not in options]:
            raise ConfigError(f"the param group of {kind} lacks {', '.join(missing)}; it needs {', '.join(needed)}")
        own = self._own(options)
        # as JSON keeps a pair
        own |= {name: tuple(value) for name, value in own.items() if isinstance(value, list)}
        named = named_numbers(type(self._config), asdict(replace(self._config, **own)))
        self._config.numbers(named)
        check_fixed(self._config, named)
        if "initial_lr" in options:
            check_finite("initial_lr of the param group", options["initial_lr"], low=0.0)
        for name, value in self.options().items():
            if is_number(value) and not is_number(options.get(name, value)):
                raise ConfigError(f"{name} of the param group must be a number, got {shown(options[name])}")

    def check_options_now(self) -> None:
        """See `RowOptimizer`."""
        self._checked_options()

    def _checked_options(self) -> Mapping[str, Any]:
        """The present options of an update, checked; unchanged ones are not checked again at each step."""
        group = self.param_groups[0]
        if self._good and all(map(is_, map(group.get, self._good), self._seen)):
            return self._good
        own = as_numbers(self._own(group))
        check_rate(own.get("lr"))
        self.check_options(own)
        self._seen = [*self._own(group).values()]
        self._good = own if is_plain(self._seen) else {}  # a tensor or a list may change in place
        return own

    def set_options(self, options: Mapping[str, Any]) -> None:
        """Loads the options of this optimizer, and those of schedulers."""
        known = {*self.options(), "initial_lr"}
        for name, value in options.items():
            if name in known:
                self.param_groups[0][name] = tuple(value) if isinstance(value, list) else value

    def __getstate__(self) -> dict[str, Any]:
        own = {"_tables": self._tables, "_config": self._config, "_scaler": None, "found_inf": self.found_inf}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.on_device, self._fingerprint = DeviceOptions(self._tables), Fingerprint()
