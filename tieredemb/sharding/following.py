"""Sharded tables that follow a torch optimizer, on each rank its own: on all ranks, or on none.

Each width follows by itself. One more follower saves and loads the optimizer state of all widths, as every rank takes
part in that.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch

from tieredemb.config import OptimizerConfig
from tieredemb.errors import InvalidInputError
from tieredemb.sharding.agreed import agreed
from tieredemb.sharding.header import Phase
from tieredemb.sharding.states import RowStates, refuse_names
from tieredemb.tables.followed_optimizer import FollowedOptimizer, GroupChoice
from tieredemb.tables.followers import followers_of
from tieredemb.tables.given_states import checked_entry, groups_of, state_of
from tieredemb.tables.row_state import totals_of
from tieredemb.tables.table_set import LoadedState
from tieredemb.tables.torch_kinds import as_numbers, config_of, kind_of


class Following:
    """Has the tables of all `states` follow an optimizer, and its state dict hold their state; see `Follower`."""

    def __init__(self, states: RowStates) -> None:
        self._states = states
        self._optimizer: torch.optim.Optimizer | None = None
        self.in_state_dict = True
        self.cache_key: Hashable = id(self)
        self._loading: dict[int, LoadedState] | None = None

    # --- following --------------------------------------------------------------------------------------------------

    def follow(self, optimizer: torch.optim.Optimizer, *, group: GroupChoice, in_state_dict: bool) -> None:
        """See `ShardedTieredEmbeddingBagCollection.follow`."""
        states = self._states
        announce = functools.partial(states.announce, Phase.FOLLOW)
        index, config = agreed(announce, lambda: self._check(optimizer, group))
        states.exchange.agree(
            None,
            {
                "what the tables are to follow": f"torch.optim.{type(optimizer).__name__}, {config!r}",
                "the param group": f"number {index}",
                "in_state_dict": repr(in_state_dict),
            },
        )
        before = _Snapshot(optimizer, [each.engine.optimizer for each in states.shards])
        try:
            agreed(announce, lambda: self._begin(optimizer, group))
        except BaseException:
            before.restore([each.engine.optimizer for each in states.shards])
            if self._optimizer is not optimizer:
                followers_of(optimizer).remove(self)
            raise
        if self._optimizer not in (None, optimizer):
            followers_of(self._optimizer).remove(self)
        self._optimizer, self.in_state_dict = optimizer, in_state_dict

    def _check(self, optimizer: torch.optim.Optimizer, group: GroupChoice) -> tuple[int, OptimizerConfig]:
        """The param group, and the config that it means; raises what can be known before anything changes."""
        found = [each.engine.check_follow(optimizer, group=group) for each in self._states.shards]
        return found[0]

    def _begin(self, optimizer: torch.optim.Optimizer, group: GroupChoice) -> None:
        followers_of(optimizer).add(self)  # before the followers of each width, which leave the tables' state out
        for each in self._states.shards:
            each.engine.follow(optimizer, group=group, in_state_dict=False)
        self._order(optimizer)

    def _order(self, optimizer: torch.optim.Optimizer) -> None:
        """Sorts the tables' parameters by table, as those of one process are."""
        by_table = dict(self._table_parameters())
        for group in optimizer.param_groups:
            params = group["params"]
            places = [at for at, param in enumerate(params) if any(param is each for each in by_table.values())]
            if not places:
                continue
            names = group.get("param_names")
            named = {id(params[at]): names[at] for at in places} if names else {}
            for at, table in zip(places, sorted(by_table), strict=True):
                params[at] = by_table[table]
                if names:
                    names[at] = named[id(by_table[table])]

    def _followed(self) -> Iterator[tuple[list[int], FollowedOptimizer]]:
        """The optimizer of each width, and its tables' numbers in the collection."""
        for shard in self._states.shards:
            if isinstance(shard.engine.optimizer, FollowedOptimizer):
                yield shard.tables, shard.engine.optimizer

    def _table_parameters(self) -> Iterator[tuple[int, torch.Tensor]]:
        for tables, followed in self._followed():
            yield from zip(tables, followed.table_parameters, strict=True)

    # --- steps: the followers of each width do these by themselves --------------------------------------------------

    def check_options_now(self) -> None:
        """See `Follower`."""

    @staticmethod
    def check_steps(those: Sequence[Any]) -> Sequence[Any]:
        """See `Follower`."""
        return ()

    def step(self, others: Sequence[Any]) -> None:
        """See `Follower`. It has nothing to do."""

    # --- saving -----------------------------------------------------------------------------------------------------

    def _places(self, groups: Sequence[Mapping[str, Any]]) -> dict[int, tuple[int, int]]:
        """Group and position of each table's parameter, by table."""
        found = {}
        for tables, followed in self._followed():
            for number, g, at in followed.numbered(groups):
                found[tables[number]] = g, at
        return dict(sorted(found.items()))

    def _config(self) -> OptimizerConfig:
        """The config for which the rows of all widths are laid out."""
        config = next(followed for _, followed in self._followed()).config
        assert config is not None
        return config

    def add_states(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """See `Follower`: adds the state of all ranks on rank 0, none on the others. A collective."""
        refuse_names()
        if not self.in_state_dict or self._optimizer is None:
            return state_dict
        kind, config, state = kind_of(type(self._optimizer)), self._config(), dict(state_dict["state"])
        self._states.announce(Phase.READ_STATE)
        is_there = False
        for table, (g, at) in self._places(self._optimizer.param_groups).items():
            if not self._states.steps(table) and not kind.at_once:
                continue
            steps, entry = self._states.gathered(config, table)
            is_there = is_there or bool(config.tensors) or config.is_dense
            if entry:
                counted = {} if kind.step is None else {"step": kind.step(steps), **totals_of(config, steps)}
                state[state_dict["param_groups"][g]["params"][at]] = {**counted, **entry}
        if all(isinstance(number, int) for number in state):
            state = dict(sorted(state.items()))
        return {**state_dict, "state": state, **(self._states.elsewhere() if is_there else {})}

    def take_states(self, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        """See `Follower`: checks on all ranks. A collective."""
        self._loading = None
        if not self.in_state_dict or self._optimizer is None:
            return None
        entries: dict[int, Any] = {}
        state: dict[Any, Any] = {}
        config = self._config()

        def given() -> dict[int, Any]:
            assert self._optimizer is not None
            groups, saved = self._optimizer.param_groups, groups_of(state_dict)
            state.update(state_of(state_dict))
            sizes, saved_sizes = ([len(each["params"]) for each in found] for found in (groups, saved))
            if sizes != saved_sizes:
                raise InvalidInputError(
                    f"the state dict is of param groups of {saved_sizes} params, and this optimizer has {sizes}: it "
                    f"doesn't match the size; load one of an optimizer that has the same params in the same order, "
                    f"tables behind those that it was built over"
                )
            for table, (g, at) in self._places(groups).items():
                for _, followed in self._followed():
                    followed.check_rows(config_of(type(self._optimizer), as_numbers(saved[g])))
                entry = state.pop(saved[g]["params"][at], {})
                entries[table] = checked_entry(entry, f"table {self._states.layout.tables[table].name!r}")
            return entries

        loaded = self._states.taken(config, state_dict, given)
        if config.tensors or config.is_dense:
            self._loading = loaded
        return {**state_dict, "state": state}

    def set_states(self) -> None:
        """See `Follower`. A collective."""
        loading, self._loading = self._loading, None
        if loading:
            self._states.set(loading, lambda: None)


class _Snapshot:
    """An optimizer before tables begin to follow it, and whether they did already."""

    def __init__(self, optimizer: torch.optim.Optimizer, optimizers: Sequence[Any]) -> None:
        self._optimizer = optimizer
        self._lists = [
            {name: list(group[name]) for name in ("params", "param_names") if name in group}
            for group in optimizer.param_groups
        ]
        self._was_followed = [getattr(each, "optimizer", None) is optimizer for each in optimizers]

    def restore(self, optimizers: Sequence[Any]) -> None:
        for was_followed, each in zip(self._was_followed, optimizers, strict=True):
            if not was_followed and getattr(each, "optimizer", None) is self._optimizer:
                each.unfollow()
        for group, lists in zip(self._optimizer.param_groups, self._lists, strict=True):
            for name, values in lists.items():
                group[name][:] = values
