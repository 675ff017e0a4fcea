"""What a torch optimizer keeps of the dense parameters of a model, without the tables that follow it.

It goes by the names of the parameters: their order in the optimizer is another one where tables lie on several ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tieredemb.errors import CheckpointError, ConfigError, ConfigTypeError, shown
from tieredemb.step.table_parameter import TableParameter
from tieredemb.tables.followers import followers_of
from tieredemb.tables.torch_kinds import unwrapped


class DenseOptimizer:
    """An `optimizer`, and the `names` of the dense parameters, by their identity. Raises `ConfigError` for what is no
    optimizer, or has a parameter that is neither a dense one of the model nor a table."""

    def __init__(self, optimizer: Any, names: Mapping[int, str]) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigTypeError(f"optimizer must be a torch.optim.Optimizer, got {shown(optimizer)}")
        self._optimizer = unwrapped(optimizer)
        self._names = names
        for g, group in enumerate(self._optimizer.param_groups):
            for at, param in enumerate(group["params"]):
                if id(param) not in names and not isinstance(param, TableParameter):
                    raise ConfigError(
                        f"the optimizer has a parameter of shape {tuple(param.shape)} (group {g}, number {at}) that is "
                        f"not of this model; pass the model that it was built for"
                    )

    def state(self) -> dict[str, Any]:
        """What is saved: `state`, by the parameters' names, and of each of the `groups` its `options` and the names of
        its `params`."""
        found = self._state_dict()
        state, groups = {}, []
        for names, group in zip(self._by_group(), found["param_groups"], strict=True):
            for name, number in zip(names, group["params"], strict=True):
                if name and number in found["state"]:
                    state[name] = found["state"][number]
            options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            groups.append({"options": options, "params": [name for name in names if name]})
        return {"state": state, "groups": groups}

    def state_dict_of(self, saved: Any) -> dict[str, Any]:
        """A state dict of the optimizer with what `state` has returned. Raises `CheckpointError` where that is of an
        optimizer of other parameters."""
        if saved is None:
            raise CheckpointError(
                "the checkpoint was saved without optimizer=, and so has no state of one; leave optimizer out. Nothing "
                "was changed"
            )
        own, by_group = self._state_dict(), self._by_group()
        wanted = [sorted(name for name in names if name) for names in by_group]
        found = [sorted(group["params"]) for group in saved["groups"]]
        if wanted != found:
            raise CheckpointError(
                f"the checkpoint's optimizer has the parameters {found} in its groups, and this one {wanted}; build it "
                f"as the one that was saved. Nothing was changed"
            )
        state, groups = {}, []
        for names, group, saved_group in zip(by_group, own["param_groups"], saved["groups"], strict=True):
            for name, number in zip(names, group["params"], strict=True):
                if name and name in saved["state"]:
                    state[number] = saved["state"][name]
            groups.append({**group, **saved_group["options"]})
        return {**own, "state": state, "param_groups": groups}

    def load(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict_of` has returned; the tables' state stays."""
        with followers_of(self._optimizer).states_left_out():
            self._optimizer.load_state_dict(state_dict)

    def _state_dict(self) -> dict[str, Any]:
        with followers_of(self._optimizer).states_left_out():
            return self._optimizer.state_dict()

    def _by_group(self) -> list[list[str]]:
        """The names of the params of each group, "" of a table."""
        return [[self._names.get(id(param), "") for param in group["params"]] for group in self._optimizer.param_groups]
