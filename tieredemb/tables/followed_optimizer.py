"""Tables that follow a torch optimizer: its `step()` updates them, with the hyperparameters of its param group.

Each table is one of the optimizer's params (`TableParameter`). Hooks run around its `step()` (`Followers`): before it
they check what the tables will need, before anything changes; after it they apply what was collected since the last
step. While the optimizer itself runs, these parameters have no gradient, so an optimizer of any kind skips them. They
reference the tables weakly: an optimizer keeps none alive.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from operator import is_
from typing import Any, Protocol

import torch

from tieredemb.config import OptimizerConfig, check_flag, is_whole, plain
from tieredemb.errors import ConfigError, StorageError, UnsupportedError, shown
from tieredemb.lookup.optimizer import Hyperparameters, check_fixed, hyperparameters_after, named_numbers, rows_of
from tieredemb.lookup.spoilt import why_refused
from tieredemb.tables.device_options import DeviceOptions
from tieredemb.tables.fingerprint import Fingerprint, steps_fingerprint
from tieredemb.tables.followers import Followers, Meaning, followers_of, optimizer_with
from tieredemb.tables.given_states import MAX_STEPS, checked_entry, groups_of, loaded_steps, state_of
from tieredemb.tables.group import DeviceGroup
from tieredemb.tables.layout import lay_out
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
from tieredemb.tables.torch_kinds import as_numbers, config_of, kind_of

GroupChoice = int | dict[str, Any] | None


class Parameter(Protocol):
    """A table as one of an optimizer's params."""

    device: torch.device
    requires_grad: bool

    def move(self, device: torch.device) -> None:
        """Moves to `device`."""


class Pending(Protocol):
    """The gradients collected for one set of tables since the last step. `has_hooks`: whether any may have hooks of its
    gradient · `is_there`: whether the tables have a gradient, as parameters have one from a backward until it is set to
    None · `applied_calls`: how many calls the last step has applied · `applied`: what was `spoilt` of these · `whole`:
    gradients that reach all rows, by number of the table."""

    has_hooks: bool
    is_there: bool
    applied_calls: int
    applied: torch.Tensor | None
    whole: dict[int, Any]

    def read(self, table: int) -> torch.Tensor | None:
        """The `.grad` of a table's parameter; None without a gradient."""

    def write(self, table: int, value: torch.Tensor | None) -> None:
        """Sets the `.grad`; None drops the table's gradient."""

    def move(self) -> None:
        """Follows the tables to another device."""

    @property
    def waiting(self) -> bool:
        """Whether any gradient was collected."""

    @staticmethod
    def check(those: Sequence[Any]) -> Sequence[torch.Tensor | None]:
        """Raises `BackwardError` or `UnsupportedError`, before anything changes, if the gradients of some sets cannot
        be applied. Returns what is spoilt of each: float32 (T,), NaN for a table whose gradient was multiplied by a
        factor that is not finite, else 0; or None."""

    @staticmethod
    def apply(those: Sequence[Any]) -> None:
        """Applies the gradients of some sets as one update; without any, a step without a gradient."""


class FollowedOptimizer:
    """The torch optimizer that one set of tables follows, or will.

    `config`: the optimizer that the tables' rows are laid out for · `optimizer`: the torch optimizer, None before
    `follow` · `table_parameters`: the tables as its params · `pending`: gradients that wait for its next step.
    """

    def __init__(self, tables: TableSet, config: OptimizerConfig | None, table_parameters: list[Any]) -> None:
        self._tables = tables
        self.config = config
        self.table_parameters = table_parameters
        self._connect()

    def _connect(self) -> None:
        self.optimizer: torch.optim.Optimizer | None = None
        self.is_there = False  # see `RowOptimizer`
        self.cache_key = self._cache_key()  # see `Follower`
        self.pending: Pending | None = None
        self.in_state_dict = True
        self.followers: Followers | None = None  # of the optimizer, including these tables
        self._entries: frozenset[Any] | None = None  # the tables' entries in its state, once they have taken a step
        self._place: tuple[int, list[int]] | None = None  # group and positions of its parameters, at the last look
        self._checked: Meaning | None = None  # the meaning of the param group when it was last checked
        self.stepping: Meaning | None = None  # the same while the optimizer's step is applied
        self._loading: dict[int, LoadedState] | None = None
        self._steps = self._calls = 0  # steps taken, and calls applied by them; the meaning at the last step:
        self._last: Meaning | None = None
        self._is_spoilt = False  # whether the gradients to be applied are `spoilt`
        self._fingerprint = Fingerprint()
        self.on_device = DeviceOptions(self._tables)
        self._is_on_cpu = self._tables.config.device.type == "cpu"

    def _cache_key(self) -> Hashable:
        whole = self._tables.whole
        return id(whole.related or whole), self._tables.config.device

    # --- following --------------------------------------------------------------------------------------------------

    def follow(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        group: GroupChoice = None,
        instead_of: Sequence[torch.Tensor] | None = None,
        in_state_dict: bool = True,
    ) -> None:
        """See `TieredModule.follow`."""
        check_flag("in_state_dict", in_state_dict)
        old, index, config = self.check_follow(optimizer, group=group, instead_of=instead_of)
        states = self._states_of(optimizer, old, config)
        if self.optimizer is not None and self.optimizer is not optimizer:
            self._leave()
        if rows_of(self._tables.whole.config.optimizer) != rows_of(config):
            lay_out(self._tables, config)
            self.on_device = DeviceOptions(self._tables)
        self.config = config
        if any(state.step for state in states.values()):  # else they are those of new tables, without a need to write
            self._tables.set_states(states, lambda: None)
        self._put(optimizer, index, old)
        self.in_state_dict = in_state_dict
        self.listen(optimizer)

    def listen(self, optimizer: torch.optim.Optimizer) -> None:
        """Adds hooks to the steps of an optimizer that has its parameters among its params."""
        self.followers = followers_of(optimizer)  # each time, as an interrupt may have prevented it
        self.followers.add(self)
        self.optimizer, self.is_there = optimizer, True

    def check_follow(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        group: GroupChoice = None,
        instead_of: Sequence[torch.Tensor] | None = None,
    ) -> tuple[list[torch.Tensor] | None, int, OptimizerConfig]:
        """What `follow` will do: the params that its own replace, the index of the param group, and its config. Raises
        what `follow` would, before it changes anything, except if rows cannot be laid out anew."""
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(f"follow needs a torch.optim.Optimizer, got {shown(optimizer)}")
        kind_of(type(optimizer))
        old = self._check_replaced(instead_of)
        index = self._chosen_group(optimizer, group, old)
        config = config_of(type(optimizer), as_numbers(optimizer.param_groups[index]))
        if self.optimizer is not None and self.optimizer is not optimizer:
            self._check_leaving(config)
        if rows_of(self._tables.whole.config.optimizer) != rows_of(config):
            self._check_alone(config)
        if old is not None:
            self._check_kept(optimizer, old)
        return old, index, config

    def _check_kept(self, optimizer: torch.optim.Optimizer, old: list[torch.Tensor]) -> None:
        """Raises `ConfigError` if the optimizer's state of the params `old` has other steps than tables whose rows and
        state a file has kept."""
        for table, param in enumerate(old):
            name = self._tables.config.tables[table].name
            entry = _entry_of(optimizer, param, f"table {name!r}")
            if self._tables.is_new(table) or not entry:
                continue
            taken, given = steps_of(self._tables, table), None
            if "step" in entry:
                given = loaded_steps(entry["step"], name, most=MAX_STEPS)
            if taken if given is None else given in (0, taken):  # torch's Adagrad makes state of step 0
                continue
            raise ConfigError(
                f"the file of table {name!r} has kept its rows after {taken} steps, and the optimizer has state of "
                f"{'its first steps' if given is None else f'{given} steps'}: load the optimizer that was saved "
                f"with the file, pass one without state, or discard the file with File(path, fresh=True)"
            )

    def _check_alone(self, config: OptimizerConfig) -> None:
        """Raises `ConfigError` if rows are to be laid out for `config`, and tables that share their cache follow an
        optimizer with another layout."""
        for each in self._beside():
            if each.optimizer is not None:
                raise ConfigError(
                    f"this table shares its cache with others, which follow a torch.optim."
                    f"{type(each.optimizer).__name__} whose rows {type(config).__name__} cannot use; convert the "
                    f"tables of each optimizer by a call of its own (include=)"
                )

    def _check_leaving(self, config: OptimizerConfig) -> None:
        """Raises if the tables cannot leave their optimizer for another with rows for `config`."""
        assert self.config is not None
        old = type(self.optimizer).__name__
        if self.pending is not None and self.pending.waiting:
            raise StorageError(
                f"gradients wait for the step() of a {old}; take it, or call zero_grad(), before the tables follow "
                f"another optimizer"
            )
        if rows_of(self.config) != rows_of(config):
            raise ConfigError(
                f"the tables' rows hold the state of a {old}, and {type(config).__name__} needs other rows; build new "
                f"tables, and load the weights"
            )

    def _leave(self) -> None:
        """Leaves its optimizer for one of the same kind; state and steps start anew, as in torch."""
        assert self.optimizer is not None
        assert self.config is not None
        tables = range(len(self.table_parameters))
        self._begin_anew(tables)
        for each in self.table_parameters:
            self.optimizer.state.pop(each, None)
        for group in self.optimizer.param_groups:
            kept = [
                at for at, each in enumerate(group["params"]) if not any(each is mine for mine in self.table_parameters)
            ]
            for name in ("params", "param_names"):
                if name in group:
                    group[name] = [group[name][at] for at in kept]
        self.unfollow()

    def _begin_anew(self, tables: Iterable[int]) -> None:
        """Resets state and steps of some tables to those of new ones."""
        assert self.config is not None
        trained = [table for table in tables if steps_of(self._tables, table)]
        fresh = {table: loaded_state(self._tables, self.config, table, {}) for table in trained}
        if fresh:
            self._tables.set_states(fresh, lambda: None)

    def _note_state(self) -> None:
        """Adds an empty entry for each table to the optimizer's state. If code clears that state, to train anew, the
        entries are gone, too."""
        assert self.optimizer is not None
        assert self.config is not None
        has_state = bool(self.config.tensors or self.config.is_dense)
        self._entries = frozenset(self.table_parameters if has_state else ())
        for each in self._entries:
            self.optimizer.state.setdefault(each, {})

    def _follow_state(self) -> None:
        """Called before a step: resets tables whose entries are gone."""
        assert self.optimizer is not None
        state, tables = self.optimizer.state, self._tables.config.tables
        gone = [table for table, each in enumerate(self.table_parameters) if each not in state]
        names = ", ".join(repr(tables[table].name) for table in gone)
        warnings.warn(
            f"the state of the {type(self.optimizer).__name__} was emptied; that of tables that follow it begins anew, "
            f"too: {names}",
            stacklevel=8,  # where step() is called
        )
        self._begin_anew(gone)
        self._entries = None

    def unfollow(self) -> None:
        """Removes its hooks from the optimizer, whose params stay."""
        if self.followers is not None:
            self.followers.remove(self)
        self.optimizer = self.followers = self._checked = None
        self.is_there = False
        self._place = self._entries = None

    def _check_replaced(self, instead_of: Sequence[torch.Tensor] | None) -> list[torch.Tensor] | None:
        """The params that the tables' parameters replace, checked."""
        if instead_of is None:
            return None
        if not isinstance(instead_of, Iterable) or isinstance(instead_of, str | type | torch.Tensor):
            raise ConfigError(f"instead_of must be a list of params, one a table, got {shown(instead_of)}")
        old, tables = list(instead_of), self._tables.config.tables
        if odd := [each for each in old if not isinstance(each, torch.Tensor)]:
            raise ConfigError(f"instead_of must hold params of the optimizer, got {shown(odd[0])}")
        if len(old) != len(tables):
            raise ConfigError(f"instead_of has {len(old)} params for {len(tables)} tables; give one a table, in order")
        for param, table in zip(old, tables, strict=True):
            if tuple(param.shape) != (table.num_embeddings, table.embedding_dim):
                raise ConfigError(
                    f"instead_of has a param of shape {tuple(param.shape)} for table {table.name!r} of shape "
                    f"{(table.num_embeddings, table.embedding_dim)}"
                )
        return old

    def _chosen_group(
        self, optimizer: torch.optim.Optimizer, group: GroupChoice, old: list[torch.Tensor] | None
    ) -> int:
        """Index of the param group for the tables: of them, or of the params that they replace, or the requested
        one."""
        groups = optimizer.param_groups
        asked: int | None = None
        if isinstance(group, dict):
            asked = next((i for i, each in enumerate(groups) if each is group), None)
            if asked is None:
                raise ConfigError(
                    "group is no param group of this optimizer; pass one of its param_groups, or an index"
                )
        elif group is not None:
            index: Any = plain(group)
            if not is_whole(index) or not 0 <= index < len(groups):
                raise ConfigError(f"group must be an index from 0 to {len(groups) - 1} or a dict, got {shown(group)}")
            asked = index
        params: Sequence[torch.Tensor] = self.table_parameters
        found = [_find(optimizer, each) for each in self.table_parameters]
        if any(found) and old is not None:
            raise ConfigError("the tables are among this optimizer's params already; leave instead_of out")
        if old is not None:
            params, found = old, [_find(optimizer, each) for each in old]
            if not all(found):
                raise ConfigError("instead_of has a param that this optimizer does not have; give the old params")
        if any(found):
            at = {place[0] if place else None for place in found}
            if len(at) > 1 or None in at:
                raise ConfigError(
                    f"the {len(params)} tables of one module follow one param group, but theirs are in several, or "
                    f"some in none; put them into one"
                )
            (there,) = at
            assert there is not None
            if asked is not None and asked != there:
                raise ConfigError(f"the tables are in param group {there} already, not in {asked}; leave group out")
            return there
        if asked is None and len(groups) > 1:
            raise ConfigError(
                f"this optimizer has {len(groups)} param groups; say which the tables are to follow, by "
                f"tables.follow(optimizer, group=…) with an index or a dict of its param_groups. A module that follows "
                f"later is built with optimizer={type(optimizer).__module__}.{type(optimizer).__name__}, the class"
            )
        return asked or 0

    def _states_of(
        self, optimizer: torch.optim.Optimizer, old: list[torch.Tensor] | None, config: OptimizerConfig
    ) -> dict[int, LoadedState]:
        """The optimizer's state of the params `old`, or its loaded state of the tables, for tables with rows for
        `config`; not if a file has kept the tables' state. Raises `InvalidInputError`."""
        states: dict[int, LoadedState] = {}
        for table, param in enumerate(self.table_parameters if old is None else old):
            if old is not None and not self._tables.is_new(table):
                continue
            whose = f"table {self._tables.config.tables[table].name!r}"
            entry = _entry_of(optimizer, param, whose)
            if old is None and not entry:
                continue
            states[table] = loaded_state(self._tables, config, table, entry)
        check_equal_steps(config, states)
        return states

    def _put(self, optimizer: torch.optim.Optimizer, index: int, old: list[torch.Tensor] | None) -> None:
        group = optimizer.param_groups[index]
        params = group["params"]
        for table, parameter in enumerate(self.table_parameters):
            if old is not None:
                at = next(i for i, each in enumerate(params) if each is old[table])
                params[at] = parameter
                optimizer.state.pop(old[table], None)
            elif _find(optimizer, parameter) is not None:
                if entry := optimizer.state.get(parameter):  # loaded or initial state, which the tables have now
                    optimizer.state[parameter] = _emptied(entry) if kind_of(type(optimizer)).at_once else {}
            else:
                params.append(parameter)
                if "param_names" in group:
                    group["param_names"].append(self._added_name(table))

    def _added_name(self, table: int) -> str:
        """The name of a table's parameter that was added to a group with named params."""
        return f"tables.{self._tables.config.tables[table].name}.weight"

    def put_param(self, param: torch.nn.Parameter, state: dict[str, Any], name: str) -> None:
        """Replaces the parameter of its single table by `param`, with its `state` in the optimizer. `name`: for a group
        with named params, if the table's parameter was added to it."""
        (parameter,) = self.table_parameters
        group = self._found()[1]
        at = next(i for i, each in enumerate(group["params"]) if each is parameter)
        group["params"][at] = param
        if "param_names" in group and group["param_names"][at] == self._added_name(0):
            group["param_names"][at] = name
        assert self.optimizer is not None
        self.optimizer.state.pop(parameter, None)
        if state:
            self.optimizer.state[param] = state

    def look_for(self) -> bool:
        """See `RowOptimizer`. If a library builds its optimizer in its own `fit()`, users cannot call `follow`; that
        optimizer has the tables among `parameters()`. Raises as `follow` does."""
        found = optimizer_with(self.table_parameters[0])
        if found is not None:
            self.follow_found(found)
        return found is not None

    def follow_found(self, optimizer: torch.optim.Optimizer) -> None:
        """Follows an optimizer that has the tables among its params. Raises as `follow` does, and `ConfigError` if the
        rows would have to be laid out anew, which is impossible with batches in flight."""
        _, _, config = self.check_follow(optimizer)
        if rows_of(self._tables.whole.config.optimizer) != rows_of(config):
            raise ConfigError(
                f"the rows of {self._tables.named} have no room for what the {type(optimizer).__name__} that has them "
                f"among its params keeps of a row, with its options (such as momentum); call "
                f"tieredemb.follow(model, optimizer) once it is built, before the first forward"
            )
        self.follow(optimizer)

    # --- the param group --------------------------------------------------------------------------------------------

    @property
    def source(self) -> torch.optim.Optimizer | None:
        """See `RowOptimizer`."""
        return self.optimizer

    @property
    def group(self) -> int:
        """Index of the param group that is followed."""
        return self._found()[0]

    def _found(self) -> tuple[int, dict[str, Any]]:
        """The index of the param group, and the present group, which `load_state_dict` and other code replace."""
        assert self.optimizer is not None
        groups = self.optimizer.param_groups
        if self._place is None or not _are_at(groups, *self._place, self.table_parameters):
            found = [_find(self.optimizer, each) for each in self.table_parameters]
            if not all(found) or len({place[0] for place in found if place}) > 1:
                raise ConfigError(
                    f"the parameters of the tables are no longer in one param group of the "
                    f"{type(self.optimizer).__name__} that they follow; leave them where follow() has put them. "
                    f"Nothing was changed"
                )
            places = [place for place in found if place]
            self._place = places[0][0], [at for _, at in places]
        return self._place[0], groups[self._place[0]]

    def now(self) -> OptimizerConfig:
        """The present options, checked. A learning rate on a GPU is 0 here, and read there."""
        if self.followers is None or self.optimizer is None:
            assert self.config is not None
            return self.config
        return self._meaning(self.followers).config

    def _meaning(self, followers: Followers) -> Meaning:
        """The present meaning of the param group, checked."""
        index, group = self._found()
        found = followers.meaning(index, group, waits=self._tables.config.device.type == "cpu")
        if found is not self._checked:
            self.check_rows(found.config)
            self._checked = found
            followers.recheck()
        return found

    def check_rows(self, config: OptimizerConfig) -> None:
        """Raises `ConfigError` if a param group with the meaning `config` cannot train the rows."""
        assert self.config is not None
        if type(config) is not type(self.config):
            raise ConfigError(
                f"the param group now means {type(config).__name__}, and the tables' rows hold the state of "
                f"{type(self.config).__name__}; options that need another state cannot change. Nothing was changed"
            )
        named = named_numbers(type(config), asdict(config))
        self.config.numbers(named)
        check_fixed(self.config, named)

    @property
    def _rate_there(self) -> torch.Tensor | None:
        """The learning rate, if it is a tensor on a GPU."""
        lr = None if self.optimizer is None else self._found()[1]["lr"]
        if not isinstance(lr, torch.Tensor) or "cpu" in (lr.device.type, self._tables.config.device.type):
            return None
        return lr

    # --- for a step --------------------------------------------------------------------------------------------------

    def numbers(self, steps: tuple[int, ...], grads: Sequence[torch.Tensor]) -> Hyperparameters | None:
        """See `RowOptimizer.numbers`."""
        scale = getattr(self.optimizer, "grad_scale", None)  # of a GradScaler, if the optimizer is a fused one
        assert self.config is not None  # the rows hold its state, whatever the present options
        if self.stepping is not None:
            options = self.stepping.items
        elif self.followers is not None and self.optimizer is not None:
            options = self._meaning(self.followers).items
        else:
            options = tuple(asdict(self.config).items())
        spoilt, factor = self.spoilt(), 1.0 if scale is None else 1.0 / float(scale)
        if spoilt is not None and bool(spoilt.isnan().any()):  # then of all tables, as the step was not refused
            factor = math.nan
        return hyperparameters_after(self.config, options, steps, factor)

    def scaling(self, grads: list[torch.Tensor]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """See `RowOptimizer.scaling`: the values that a GradScaler sets on a fused optimizer."""
        device = self._tables.config.device
        found, scale = (getattr(self.optimizer, name, None) for name in ("found_inf", "grad_scale"))
        as_float = (
            None if each is None else each.to(device=device, dtype=torch.float32, non_blocking=True).reshape(())
            for each in (found, scale)
        )
        found, scale = as_float
        return found, scale

    def spoilt(self) -> torch.Tensor | None:
        """See `RowOptimizer.spoilt`."""
        applied = None if self.pending is None else self.pending.applied
        if applied is None or self.optimizer is None or kind_of(type(self.optimizer)).takes_sparse:
            return None
        return applied

    def alike(self) -> Hashable:
        """See `RowOptimizer.alike`."""
        return id(self.optimizer), self.group

    def upload(self) -> None:
        """See `RowOptimizer.upload`. A learning rate that is a tensor on the GPU is read there, at each replay."""
        config, there = self.now(), self.on_device
        if there.made_from is config:  # fast, as each of many tables does this in a step
            there.note_step()
            return
        there.send(asdict(config))
        there.made_from = config

    def options_fingerprint(self, *, waits: bool) -> int:
        """See `RowOptimizer`. It excludes a learning rate on a GPU."""
        return self._fingerprint.of(asdict(self.now()))

    @property
    def steps_fingerprint(self) -> int:
        """See `RowOptimizer`."""
        if self._last is None:
            return 0
        return steps_fingerprint(self._steps, self._calls, self._fingerprint.of(dict(self._last.items)))

    def fingerprint_values(self) -> dict[str, object]:
        """See `RowOptimizer`."""
        it = f"the {type(self.optimizer).__name__} that the tables follow"
        found: dict[str, object] = {
            f"the number of steps of {it}": self._steps,
            f"the number of lookups whose gradients the steps of {it} have applied": self._calls,
        }
        for meaning, when in ((self._last, "at its last step"), (self._checked, "now")):
            found |= {f"{name} of {it} {when}": value for name, value in (() if meaning is None else meaning.items)}
        return found

    def options_on(self, group: DeviceGroup) -> torch.Tensor:
        """See `RowOptimizer.options_on`."""
        self.upload()
        numbers, rate = self.on_device.numbers, self._rate_there
        if rate is not None:
            with group.cache.using():
                numbers[:1].copy_(rate.detach().reshape(1))
        return numbers

    def move(self) -> None:
        """Follows the tables to another device, if they are on one."""
        device = self._tables.config.device
        if self.table_parameters[-1].device == device:
            return
        self.on_device = DeviceOptions(self._tables)
        self._is_on_cpu, self.cache_key = device.type == "cpu", self._cache_key()
        if self.pending is not None:
            self.pending.move()
        for parameter in self.table_parameters:
            parameter.move(device)

    # --- the optimizer's step ---------------------------------------------------------------------------------------

    def check_options_now(self) -> None:
        """See `Follower` and `RowOptimizer`. Does not wait for a GPU."""
        self.now()

    @staticmethod
    def check_steps(those: Sequence[FollowedOptimizer]) -> list[FollowedOptimizer]:
        """See `Follower`: those whose tables have a gradient, unless a GradScaler has a fused optimizer skip the step,
        which a GPU reads by itself."""
        due = list[FollowedOptimizer]()
        for each in those:
            if each._entries and each.optimizer is not None and not each._entries <= each.optimizer.state.keys():
                each._follow_state()
            if each.pending is not None and each.pending.is_there:
                due.append(each)
        if not due:
            return due
        pending = [each.pending for each in due if each.pending is not None]
        spoilt = pending[0].check(pending)
        for each, collected in zip(due, pending, strict=True):
            if collected.whole:
                each._check_takes_whole()
        skips = getattr(due[0].optimizer, "found_inf", None)
        skipped = skips is not None and any(each._is_on_cpu for each in due) and bool(skips)
        for each, own_spoilt in zip(due, spoilt, strict=True):
            each._is_spoilt = own_spoilt is not None
            if own_spoilt is not None and each._is_on_cpu and not skipped:
                each._check_spoilt(own_spoilt)
        return [each for each in due if not each._is_on_cpu] if skipped else due

    def _check_takes_whole(self) -> None:
        if self.optimizer and kind_of(type(self.optimizer)).takes_sparse:
            raise UnsupportedError(
                f"{type(self.optimizer).__name__} takes sparse gradients alone, and a loss has used a table as a "
                f"whole, whose gradient is dense; use Adam, or leave the whole table out of the loss. Nothing was "
                f"updated"
            )

    def _check_spoilt(self, spoilt: torch.Tensor) -> None:
        """Raises `UnsupportedError` if the gradient of a table was multiplied by a factor that is not finite (`spoilt`,
        see `Pending`), and rows that the step does not reach cannot become NaN, as all rows would in torch."""
        if not bool(spoilt.isnan().any()):
            return
        assert self.config is not None
        assert self.optimizer is not None
        if kind_of(type(self.optimizer)).takes_sparse:
            return
        bad = spoilt.isnan().nonzero().flatten().tolist()
        if self.config.is_dense and len(bad) == len(self.table_parameters):
            return
        why = why_refused(self._tables.config.tables[bad[0]].name, is_dense=self.config.is_dense)
        raise UnsupportedError(f"{why}. Nothing was updated")

    @property
    def steps_taken(self) -> int:
        """Steps of the optimizer in which the tables took part."""
        return self._steps

    def step(self, others: Sequence[FollowedOptimizer]) -> None:
        """See `Follower`."""
        assert self.pending is not None
        those = (self, *others)
        try:
            for each in those:
                each.stepping = each._checked
                if each._is_spoilt and each._checked is not None:  # its gradients have separate factors
                    each.stepping = Meaning(each._checked.config)
            self.pending.apply([each.pending for each in those])
        finally:
            for each in those:
                each.stepping = None
        if not _is_captured(self._tables.config.device):  # in a capture nothing is run
            for each in those:
                count = 0 if each.pending is None else each.pending.applied_calls
                each._steps, each._calls, each._last = each._steps + 1, each._calls + count, each._checked
                if each._entries is None:
                    each._note_state()

    def _beside(self) -> list[FollowedOptimizer]:
        """The followed optimizers of other tables that share the cache."""
        found = (engine.optimizer for engine in list(self._tables.whole.engines))
        return [each for each in found if isinstance(each, FollowedOptimizer) and each is not self]

    @property
    def tables(self) -> TableSet:
        """The tables that follow."""
        return self._tables

    @property
    def trains(self) -> bool:
        """Whether gradients of all tables are wanted."""
        return all(each.requires_grad for each in self.table_parameters)

    def requires_grad_(self, requires_grad: bool = True) -> None:
        """Sets whether gradients are wanted."""
        for each in self.table_parameters:
            each.requires_grad = requires_grad

    # --- saving -----------------------------------------------------------------------------------------------------

    def numbered(self, groups: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, int, int]]:
        """Table, group and position of each table's parameter; `groups` are the optimizer's own."""
        for table, parameter in enumerate(self.table_parameters):
            for g, group in enumerate(groups):
                for at, param in enumerate(group["params"]):
                    if param is parameter:
                        yield table, g, at

    def has_state(self, table: int) -> bool:
        """Whether the torch optimizer would have a state of a table's weight by now."""
        assert self.optimizer is not None
        return bool(steps_of(self._tables, table)) or kind_of(type(self.optimizer)).at_once

    def torch_state(self, table: int) -> dict[str, Any]:
        """The optimizer's state of a table's weight in torch's form, with float32 tensors on the CPU. Raises
        `StorageFullError` if memory cannot hold them."""
        assert self.optimizer is not None
        assert self.config is not None
        kind, steps = kind_of(type(self.optimizer)), steps_of(self._tables, table)
        counted = {} if kind.step is None else {"step": kind.step(steps), **totals_of(self.config, steps)}
        return {**counted, **state_tensors(self._tables, self.config, table)}

    def add_states(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Puts the tables' state, in torch's form, in the optimizer's `state_dict()`."""
        assert self.optimizer is not None
        state = dict(state_dict["state"])
        for table, g, at in self.numbered(self.optimizer.param_groups):
            number = state_dict["param_groups"][g]["params"][at]
            state.pop(number, None)
            if not self.in_state_dict or not self.has_state(table):
                continue
            if entry := {**self.torch_state(table), **lagging_rows(self._tables, table)}:
                state[number] = entry
        if all(isinstance(number, int) for number in state):
            state = dict(sorted(state.items()))
        return {**state_dict, "state": state}

    def take_states(self, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        """Removes the tables' entries, checked, from a state dict that the optimizer will load."""
        self._loading = None
        assert self.optimizer is not None
        assert self.config is not None
        groups, saved = self.optimizer.param_groups, groups_of(state_dict)
        if [len(each["params"]) for each in groups] != [len(each["params"]) for each in saved]:
            return None  # torch will raise
        state, loading, entries, begins = dict(state_of(state_dict)), {}, [], list[str]()
        for table, g, at in self.numbered(groups):
            self.check_rows(config_of(type(self.optimizer), as_numbers(saved[g])))
            name = self._tables.config.tables[table].name
            entries.append(entry := checked_entry(state.pop(saved[g]["params"][at], {}), f"table {name!r}"))
            if self.in_state_dict and (self.config.tensors or self.config.is_dense):
                loading[table] = loaded_state(self._tables, self.config, table, entry)
                if not entry and state_of(state_dict) and steps_of(self._tables, table):
                    begins.append(name)
        if self.in_state_dict:
            check_is_here(state_dict, entries)
        check_equal_steps(self.config, loading)
        check_lagging(self._tables, loading)
        if begins:
            warnings.warn(
                f"the state dict has state of other parameters and none of {', '.join(map(repr, begins))}, whose state "
                f"begins anew: a copy of an optimizer has none of the tables that follow it, only its own state_dict() "
                f"has it",
                stacklevel=4,
            )
        self._loading = loading
        return {**state_dict, "state": state}

    def set_states(self) -> None:
        """See `Follower`."""
        loading, self._loading = self._loading, None
        if loading:
            self._tables.set_states(loading, lambda: None)
        if any(steps_of(self._tables, table) for table in range(len(self.table_parameters))):
            self._note_state()  # in the new state
        else:
            self._entries = None

    def options(self) -> dict[str, Any]:
        """The present lr, eps, …, for a checkpoint. Waits for the GPU if lr is there."""
        options, rate = asdict(self.now()), self._rate_there
        return options if rate is None else {**options, "lr": rate.item()}

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Accepts any, as the torch optimizer saves and loads its param group itself."""

    def set_options(self, options: Mapping[str, Any]) -> None:
        """Does nothing, see `check_options`."""

    def __getstate__(self) -> dict[str, Any]:
        """A copy follows no optimizer: the torch optimizer is not copied."""
        return {"_tables": self._tables, "config": self.config, "table_parameters": Beside(self.table_parameters)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._connect()


class Beside(list[Any]):
    """The parameters of tables that are being copied or pickled: while this lives, they are copied with the tables."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        super().__init__(parameters)
        for each in self:
            each._beside = weakref.ref(self)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return list, (), None, iter(self)


def _is_captured(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _are_at(groups: list[dict[str, Any]], index: int, positions: Sequence[int], those: Sequence[torch.Tensor]) -> bool:
    """Whether these are the params at these positions of a group. Fast, as a step checks many tables."""
    try:
        return len(positions) == len(those) and all(
            map(is_, map(groups[index]["params"].__getitem__, positions), those)
        )
    except IndexError:
        return False


def _entry_of(optimizer: torch.optim.Optimizer, param: torch.Tensor, whose: str) -> Mapping[str, Any]:
    """An optimizer's state of a param; empty for a param without content, of which it has no number. Raises
    `InvalidInputError`."""
    return {} if param.is_meta else checked_entry(optimizer.state.get(param, {}), whose)


def _emptied(entry: Mapping[str, Any]) -> dict[str, Any]:
    """An entry without content, for an optimizer that expects its names when it is copied or loaded."""
    return {
        name: each.new_zeros(()).expand(each.shape) if isinstance(each, torch.Tensor) and each.dim() else each
        for name, each in entry.items()
    }


def _find(optimizer: torch.optim.Optimizer, param: torch.Tensor) -> tuple[int, int] | None:
    """Group and position of a param among the optimizer's."""
    for g, group in enumerate(optimizer.param_groups):
        for at, each in enumerate(group["params"]):
            if each is param:
                return g, at
    return None
