"""Which optimizer trains each table that is replaced: the one that its weight carries, or that has its weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tieredemb.config import OptimizerConfig
from tieredemb.conversion.carried import Carried, carried
from tieredemb.conversion.found import Found
from tieredemb.errors import ConfigError, naming, shown
from tieredemb.tables.torch_kinds import Optimizer, ToFollow, as_numbers, config_of, row_config, unwrapped

Optimizers = Optimizer | Sequence[torch.optim.Optimizer]


@dataclass(frozen=True)
class Assigned:
    """How one table is trained. `given`: its module's `optimizer` · `config`: the optimizer that its row layout is for
    · `follows`: the torch optimizer that has its weight, which the table replaces there · `trains`: whether a backward
    may reach it · `carried`: of an optimizer that the weight carries and that steps in backward."""

    given: Optimizer
    config: OptimizerConfig | None
    follows: torch.optim.Optimizer | None
    trains: bool
    carried: Carried | None = None


def assign(found: Sequence[Found], optimizer: Optimizers) -> dict[str, Assigned]:
    """How each table is trained, by name. Changes nothing. Raises `UnsupportedError` for an optimizer or an option that
    tables lack, `ConfigError` for torch optimizers that have none of the weights, and for a weight that is in two of
    them."""
    if optimizer is None:
        return {each.name: _in_backward(each) or _by_none(each) for each in found}
    optimizers = _torch_optimizers(optimizer)
    if optimizers is None:
        config = row_config(optimizer)
        assert not isinstance(optimizer, Sequence)
        trains, frozen = Assigned(optimizer, config, None, True), Assigned(None, None, None, False)
        return {each.name: trains if each.module.weight.requires_grad else frozen for each in found}
    assigned = {each.name: _in_backward(each) or _by_weight(each, optimizers) for each in found}
    trained = [each for each in found if each.module.weight.requires_grad]  # frozen ones need no optimizer
    if trained and all(each.config is None for each in assigned.values()):
        raise ConfigError(
            f"none of the {len(trained)} embeddings' weights that require a gradient is among the params of the "
            f"optimizer, so it trains none of them; build it over model.parameters() before the model is converted, or "
            f"pass a class such as torch.optim.Adam and call tieredemb.follow(model, optimizer) later; to serve them "
            f"as they are, freeze them by requires_grad_(False) before"
        )
    return assigned


def _torch_optimizers(optimizer: Optimizers) -> list[torch.optim.Optimizer] | None:
    """The torch optimizers that were given; None if `optimizer` is something else."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return [unwrapped(optimizer)]
    if not isinstance(optimizer, Sequence) or isinstance(optimizer, str):
        return None
    if not optimizer:
        raise ConfigError("optimizer=[] holds no optimizer; pass those that train the model, or leave optimizer out")
    for each in optimizer:
        if not isinstance(each, torch.optim.Optimizer):
            raise ConfigError(f"several optimizers must all be torch.optim.Optimizer instances, got {shown(each)}")
    return [unwrapped(each) for each in optimizer]


def _by_none(found: Found) -> Assigned:
    return Assigned(None, None, None, found.module.weight.requires_grad)


def _in_backward(found: Found) -> Assigned | None:
    """How a weight is trained that carries its optimizer, which steps in backward and drops the gradient, even if
    another optimizer has the weight, too. None of other weights."""
    of = carried(found)
    if of is None:
        return None
    return Assigned(of.config, of.config, None, found.module.weight.requires_grad, of)


def _by_weight(found: Found, optimizers: list[torch.optim.Optimizer]) -> Assigned:
    places = [
        (optimizer, group)
        for optimizer in optimizers
        for group in optimizer.param_groups
        if any(param is found.module.weight for param in group["params"])
    ]
    if not places:
        return Assigned(None, None, None, False)
    if len(places) > 1:
        raise ConfigError(
            f"the weight of {found.shown} is in {len(places)} param groups, which would update it as often; leave it "
            f"in one"
        )
    ((optimizer, group),) = places
    with naming(f"the weight of {found.shown}"):
        config = config_of(type(optimizer), as_numbers(group))
    return Assigned(ToFollow(config), config, optimizer, found.module.weight.requires_grad)
