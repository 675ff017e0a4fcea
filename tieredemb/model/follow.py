"""All tables of a model follow one torch optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tieredemb.errors import TieredEmbError
from tieredemb.model.found import tiered_modules
from tieredemb.tables.torch_kinds import unwrapped


def follow(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    group: int | dict[str, Any] | None = None,
    in_state_dict: bool = True,
) -> None:
    """From now on `optimizer.step()` updates all tables of a model, as it would update whole tables.

    Each table follows the param group in which `model.parameters()` has put what stands for it, or else `group`: an
    index, or one of the optimizer's `param_groups`; the only one by default. `in_state_dict`: whether
    `optimizer.state_dict()` holds the tables' state; False for tables larger than memory, whose state
    `tieredemb.save_checkpoint` saves. See `TieredEmbeddingBag.follow` for what happens to tables that followed another
    one.

    Raises what `TieredEmbeddingBag.follow` raises for any module, before a table follows, and names that module; and
    `ConfigError` for a model without tiered tables. Of sharded tables it is a collective.

    >>> model = nn.Sequential(tieredemb.TieredEmbeddingBag(1000, 4, optimizer=torch.optim.Adam), nn.Linear(4, 1))
    >>> optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    >>> tieredemb.follow(model, optimizer)
    >>> model(torch.tensor([[1, 2]])).sum().backward()
    >>> optimizer.step()
    """
    modules = tiered_modules(model)
    for name, module in modules.items():
        for engine in module.engines:
            try:
                engine.check_follow(unwrapped(optimizer), group=group)
            except TieredEmbError as error:
                raise type(error)(f"{name or type(module).__name__}: {error}") from error
    for module in modules.values():
        module.follow(optimizer, group=group, in_state_dict=in_state_dict)
