"""Optimizers that a parameter carries itself: what `torch.distributed.optim._apply_optimizer_in_backward`, and
TorchRec's function of that name, leave on it. They take their step inside backward, as a fused optimizer does."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tieredemb.config import OptimizerConfig
from tieredemb.conversion.found import Found
from tieredemb.errors import ConfigError, UnsupportedError, naming, shown
from tieredemb.tables.torch_kinds import CLOSEST, as_numbers, config_of, kind_of

_HOOKS = "torch.distributed.optim.apply_optimizer_in_backward"  # torch never frees these, nor their weights
_LISTS = ("_in_backward_optimizers", "_overlapped_optimizers")
_ONE = "_overlapped_optimizer"  # of earlier versions


@dataclass(frozen=True)
class Carried:
    """An optimizer that a weight carries. `config`: the same optimizer for tables · `state`: its state of the weight,
    in torch's form · `remark`: what its users have to know of this kind, or ""."""

    config: OptimizerConfig
    state: Mapping[str, Any]
    remark: str


def carries(found: Found) -> bool:
    """Whether the weight of an embedding is trained in backward."""
    return bool(_of(found))


def _of(found: Found) -> list[Any]:
    weight = found.module.weight
    optimizers = [each for name in _LISTS for each in getattr(weight, name, ())]
    return optimizers or ([getattr(weight, _ONE)] if hasattr(weight, _ONE) else [])


def release(found: Found) -> None:
    """Drops the hooks by which the weight of an embedding was trained, which would keep it in memory."""
    weight, hooks = found.module.weight, sys.modules.get(_HOOKS)
    if hooks is None or not carries(found):
        return
    for handle in hooks.param_to_optim_hook_handle_map.pop(weight, ()):
        handle.remove()
    hooks.param_to_acc_grad_map.pop(weight, None)


def carried(found: Found) -> Carried | None:
    """What the weight of an embedding is trained by in backward; None where nothing does. Changes nothing. Raises
    `UnsupportedError` for a kind or an option that tables lack, `ConfigError` for several of them on one weight."""
    weight = found.module.weight
    optimizers = _of(found)
    if not optimizers:
        return None
    if len(optimizers) > 1:
        raise ConfigError(
            f"the weight of {found.shown} carries {len(optimizers)} optimizers that step in backward; tables take one: "
            f"apply one, or pass optimizer= to say which is meant. Nothing was changed"
        )
    (optimizer,) = optimizers
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UnsupportedError(
            f"the weight of {found.shown} carries {shown(optimizer)}, which is no torch.optim.Optimizer; pass "
            f"optimizer= to say what is to train it. Nothing was changed"
        )
    groups = [
        group
        for group in getattr(optimizer, "param_groups", ())  # what TorchRec only names for FBGEMM has none
        if any(param is weight for param in group["params"])
    ]
    if not groups:
        raise UnsupportedError(
            f"the weight of {found.shown} carries {type(optimizer).__module__}.{type(optimizer).__name__}, which has "
            f"no param group of it and only names an optimizer for others to run: pass the one of tieredemb that is "
            f"meant, as optimizer=tieredemb.SparseAdam(lr=…) for FBGEMM's Adam (others: {CLOSEST}). Nothing was changed"
        )
    with naming(f"the weight of {found.shown}"):
        config, kind = config_of(type(optimizer), as_numbers(groups[0])), kind_of(type(optimizer))
    return Carried(config, dict(optimizer.state.get(weight, {})), kind.remark)
