"""Where modules are in a model, and params in an optimizer: others are put in their places, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tieredemb.conversion.left_over import put_in_place

_LISTED = 5  # texts in a warning


def swap(model: nn.Module, others: Mapping[nn.Module, nn.Module]) -> None:
    """Replaces modules of `model` by others, also where plain attributes reference them."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is not None and child in others:
                setattr(parent, name, others[child])
    put_in_place(model, others)


def params_of(optimizer: torch.optim.Optimizer) -> tuple[list[dict[str, list[Any]]], dict[Any, Any]]:
    """The params of each group, with their names where it has these, and the state, for `put_back`."""
    names: list[str] = ["params", "param_names"]
    groups = [{name: list(group[name]) for name in names if name in group} for group in optimizer.param_groups]
    return groups, {**optimizer.state}


def put_back(
    optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, list[Any]]], state: Mapping[Any, Any]
) -> None:
    """Gives an optimizer the params and the state that it had."""
    for group, values_of in zip(optimizer.param_groups, groups, strict=True):
        for name, values in values_of.items():
            group[name][:] = values
    optimizer.state.clear()
    optimizer.state.update(state)


def listed(texts: Sequence[str]) -> str:
    """Texts as a warning lists them: the first few, and how many more there are."""
    rest = len(texts) - _LISTED
    return "; ".join(texts[:_LISTED]) + (f"; and {rest} more" if rest > 0 else "")
