"""Tables take over rows, optimizer state and the place in the model from their embeddings, one after another.

As soon as a table has its rows, nothing here references the weight any more, so it is freed unless other code holds
it: a conversion needs memory for one table in addition to its result. After each step the model is valid. A failure is
undone; a weight that was freed is read back from its table.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tieredemb.conversion.assignment import Assigned
from tieredemb.conversion.found import Found
from tieredemb.conversion.torch_modules import followed_by, torch_state
from tieredemb.modules.one_table import OneTable
from tieredemb.tables.followed_optimizer import FollowedOptimizer

Place = tuple[nn.Module, str]  # a module, and the name of one inside of it


def take_over(
    model: nn.Module, found: list[Found], twins: Mapping[str, OneTable], assigned: Mapping[str, Assigned]
) -> None:
    """Gives each twin the rows of its embedding, and puts it in the optimizer and the model in place of that. If one
    fails, all are undone. `found` is emptied."""
    sets = {id(twin.tables.whole): twin.tables.whole for twin in twins.values()}.values()
    done: list[_Taken] = []
    try:
        places = _places(model, found)
        while found:
            done.append(_Taken(found[0], twins[found[0].name], places[found[0].name]))
            done[-1].take(assigned[found.pop(0).name])
        for tables in sets:
            tables.filled()
    except BaseException:
        for each in reversed(done):
            each.undo()  # if that fails, too, tables stay open, as they have the rows
        for tables in sets:
            tables.undo_opening()
        raise


def _places(model: nn.Module, found: Sequence[Found]) -> dict[str, tuple[Place, ...]]:
    """Where each embedding is in the model."""
    names = {each.module: each.name for each in found}
    places: dict[str, list[Place]] = {each.name: [] for each in found}
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child in names:
                places[names[child]].append((parent, name))
    return {name: tuple(where) for name, where in places.items()}


class _Taken:
    """A table that takes over from an embedding, and what is needed to undo that."""

    def __init__(self, found: Found, twin: OneTable, places: Sequence[Place]) -> None:
        self._module: Any = found.module  # or a weak reference
        self._weight: Any = found.module.weight  # likewise
        self._twin = twin
        self._places = places
        self._optimizer: torch.optim.Optimizer | None = None
        self._state: Any = None  # the optimizer's state of the weight, until the table has all of it
        weight = found.module.weight
        self._made_as = weight.device, weight.dtype, weight.requires_grad
        self._shell = copy.copy(found.module)  # the module without its weight
        self._shell._parameters = {"weight": None}

    def take(self, way: Assigned) -> None:
        twin, weight = self._twin, self._weight
        is_new, is_meta = twin.tables.is_new(0), weight.is_meta
        if is_new and not is_meta:
            twin.tables.set_weights({0: weight.detach()})
        if way.follows is not None:
            self._state, self._optimizer = way.follows.state.get(weight), way.follows
            twin.follow(way.follows, instead_of=[weight])
            if weight.grad is not None and not is_meta:
                (parameter,) = twin.engine.table_parameters
                parameter.grad = weight.grad.to(parameter.device)
        if way.carried is not None and way.carried.state and is_new:
            fused = twin.fused_optimizer
            fused.load_state_dict(
                {"state": {0: way.carried.state}, "param_groups": [fused.options() | {"params": [0]}]}
            )
        twin.requires_grad_(way.trains)
        for parent, name in self._places:
            setattr(parent, name, twin)
        # if a table rounds, or uses the rows of a file, the weight cannot be read back from it
        rounds = torch.promote_types(weight.dtype, twin.tables.weight_dtype(0)) != twin.tables.weight_dtype(0)
        if self._places and is_new and not is_meta and not rounds and weight.grad is None:
            self._module, self._weight = weakref.ref(self._module), weakref.ref(weight)
            self._state = None

    def undo(self) -> None:
        """Puts the embedding back where the table has replaced it."""
        twin = self._twin
        weight = self._weight() if isinstance(self._weight, weakref.ref) else self._weight
        module = self._module() if isinstance(self._module, weakref.ref) else self._module
        device, dtype, requires_grad = self._made_as
        if weight is None:
            weight = nn.Parameter(twin.tables.weight(0, device, dtype), requires_grad)
        if module is None:
            module = self._shell
            module._parameters["weight"] = weight
        if self._optimizer is not None:
            self._put_back(self._optimizer, weight)
        for parent, name in self._places:
            if parent._modules.get(name) is twin:
                setattr(parent, name, module)

    def _put_back(self, optimizer: torch.optim.Optimizer, weight: nn.Parameter) -> None:
        followed = self._twin.engine.optimizer
        assert isinstance(followed, FollowedOptimizer)
        state = self._state
        if state is None and followed_by(self._twin) is not None:
            state = torch_state(self._twin, weight)
        for group in optimizer.param_groups:
            for at, param in enumerate(group["params"]):
                if param is followed.table_parameters[0]:
                    group["params"][at] = weight
        if state:
            optimizer.state[weight] = state
        followed.unfollow()
