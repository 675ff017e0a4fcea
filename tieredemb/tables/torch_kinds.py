"""Which torch optimizers tables can follow, and what each one's param group means to them.

One entry a kind: the exact class (a subclass may do anything), how its param group becomes a config of ours, the
options that must keep one value, and the form in which torch keeps a parameter's state. A new kind is one more entry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch

from tieredemb.config import OptimizerConfig
from tieredemb.errors import ConfigError, UnsupportedError, in_documentation, shown
from tieredemb.lookup.optimizers.adagrad import Adagrad
from tieredemb.lookup.optimizers.adam import Adam, AdamW
from tieredemb.lookup.optimizers.adamax import Adamax
from tieredemb.lookup.optimizers.nadam import NAdam
from tieredemb.lookup.optimizers.rmsprop import RMSprop
from tieredemb.lookup.optimizers.row_mean_adagrad import RowMeanAdagrad
from tieredemb.lookup.optimizers.sgd import SGD
from tieredemb.lookup.optimizers.sparse_adam import SparseAdam


@dataclass(frozen=True)
class Kind:
    """How tables follow optimizers of one torch class.

    `config`: makes a config of this library from a param group, whose tensors are numbers already · `must_be`: options
    of the group that must have this value, the only one that tables support · `step`: a table's steps as torch keeps
    them beside a parameter's state, or None where it keeps none · `at_once`: whether torch creates its state before the
    first step · `takes_sparse`: whether the class accepts only sparse gradients, which hold the rows of a batch ·
    `remark`: a difference from torch's class that users have to know.
    """

    config: Callable[[Mapping[str, Any]], OptimizerConfig]
    must_be: Mapping[str, Any] = field(default_factory=dict)
    step: Callable[[int], Any] | None = None
    at_once: bool = False
    takes_sparse: bool = False
    remark: str = ""


def _of(ours: type[OptimizerConfig]) -> Callable[[Mapping[str, Any]], OptimizerConfig]:
    """A config of which every hyperparameter stands under its own name in the group."""
    return lambda group: ours(**{each.name: group[each.name] for each in fields(ours) if each.name in group})


def _tensor_step(step: int) -> torch.Tensor:
    return torch.tensor(float(step), dtype=torch.float32, device="cpu")


_NEITHER = {"maximize": False, "differentiable": False}
_NOR_MAXIMA = {"amsgrad": False, **_NEITHER}
CLOSEST = in_documentation("Optimizers", "If you have another optimizer")
_WRAPPERS = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning")

KINDS: dict[type[torch.optim.Optimizer], Kind] = {
    torch.optim.SGD: Kind(_of(SGD), _NEITHER),
    torch.optim.Adagrad: Kind(_of(Adagrad), _NEITHER, _tensor_step, at_once=True),
    torch.optim.SparseAdam: Kind(_of(SparseAdam), {"maximize": False}, int, takes_sparse=True),
    torch.optim.Adam: Kind(_of(Adam), {"decoupled_weight_decay": False, **_NOR_MAXIMA}, _tensor_step),
    torch.optim.AdamW: Kind(_of(AdamW), _NOR_MAXIMA, _tensor_step),
    torch.optim.Adamax: Kind(_of(Adamax), _NEITHER, _tensor_step),
    torch.optim.NAdam: Kind(_of(NAdam), _NEITHER, _tensor_step),
    torch.optim.RMSprop: Kind(_of(RMSprop), _NEITHER, _tensor_step),
}
ELSEWHERE = {  # of libraries that need not be there, by where a class is defined: its public name, and its kind
    "torchrec.optim.rowwise_adagrad.RowWiseAdagrad": (
        "torchrec.optim.RowWiseAdagrad",
        Kind(
            _of(RowMeanAdagrad),
            {"weight_decay": 0, "maximize": False},
            _tensor_step,
            at_once=True,
            remark="torchrec.optim.RowWiseAdagrad moves a row by the mean of its gradient, and tables that take it "
            "over do as well; for FBGEMM's rule, which TorchRec's sharded tables have in its place, pass "
            "optimizer=tieredemb.RowWiseAdagrad(lr=…)",
        ),
    ),
}


@dataclass(frozen=True)
class ToFollow:
    """A torch optimizer that tables will follow once they are built: their rows are laid out for `config`."""

    config: OptimizerConfig


# what modules take
Optimizer = OptimizerConfig | torch.optim.Optimizer | type[torch.optim.Optimizer] | ToFollow | None


def is_torch_optimizer(optimizer: object) -> bool:
    """Whether it is a torch optimizer, or the class of one that the tables will follow."""
    if isinstance(optimizer, ToFollow):
        return True
    if isinstance(optimizer, type):
        return issubclass(optimizer, torch.optim.Optimizer)
    return isinstance(optimizer, torch.optim.Optimizer)


def row_config(optimizer: object) -> OptimizerConfig | None:
    """The optimizer config that the row layout is made for, from a module's `optimizer`: a config of this library, a
    torch optimizer to follow, the class of one that will be followed, or None. Raises `ConfigError` and
    `UnsupportedError`."""
    if optimizer is None or isinstance(optimizer, OptimizerConfig):
        return optimizer
    if isinstance(optimizer, ToFollow):
        return optimizer.config
    if isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer):
        return default_config(optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer):
        instance = ""
        if isinstance(optimizer, type) and issubclass(optimizer, OptimizerConfig):
            instance = f": pass an instance, as {optimizer.__name__}(lr=0.01)"
        raise ConfigError(
            f"optimizer must be one of tieredemb's {', '.join(OptimizerConfig.known())}, applied in backward, or a "
            f"torch optimizer to follow ({known()}) or its class; got {shown(optimizer)}{instance}"
        )
    kind_of(type(optimizer))
    if len(optimizer.param_groups) > 1:
        raise ConfigError(
            f"this optimizer has {len(optimizer.param_groups)} param groups; build the module with "
            f"optimizer=torch.optim.{type(optimizer).__name__}, the class, and then call module.follow(optimizer, "
            f"group=…) with the one that its tables are to follow"
        )
    return config_of(type(optimizer), as_numbers(optimizer.param_groups[0]))


def known() -> str:
    """The classes that tables can follow, in words."""
    return ", ".join([*(f"torch.optim.{each.__name__}" for each in KINDS), *(name for name, _ in ELSEWHERE.values())])


def unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer inside of one that accelerate or Lightning has put around it, and that has it take each step."""
    while type(optimizer).__module__.partition(".")[0] in _WRAPPERS:
        inside = getattr(optimizer, "optimizer", None)
        if not isinstance(inside, torch.optim.Optimizer):
            break
        optimizer = inside
    return optimizer


def kind_of(optimizer: type[torch.optim.Optimizer]) -> Kind:
    """The kind of a torch class. Raises `UnsupportedError` for one that tables cannot follow."""
    kind = KINDS.get(optimizer)
    if kind is None and _place(optimizer) in ELSEWHERE:
        _, kind = ELSEWHERE[_place(optimizer)]
    if kind is None:
        base = next((each for each in KINDS if issubclass(optimizer, each)), None)
        which = f", a subclass of torch.optim.{base.__name__} that may do anything" if base else ""
        raise UnsupportedError(
            f"tables cannot follow {optimizer.__name__}{which}; they can follow {known()}, or be updated in backward "
            f"by one of tieredemb's {', '.join(OptimizerConfig.known())}. Give the tables one of these, and leave the "
            f"dense layers the optimizer that they have. Which of them is closest to which optimizer: {CLOSEST}"
        )
    return kind


def is_known(optimizer: type[torch.optim.Optimizer]) -> bool:
    """Whether tables can follow a torch class."""
    return optimizer in KINDS or _place(optimizer) in ELSEWHERE


def _place(optimizer: type) -> str:
    return f"{optimizer.__module__}.{optimizer.__qualname__}"


def as_numbers(group: Mapping[str, Any], *, waits: bool = True) -> dict[str, Any]:
    """A param group without its params; tensors are numbers. Unless it `waits` for the device a learning rate on a GPU
    is not read: it is 0 here, and other options must not be tensors there."""
    options = {}
    for name, value in group.items():
        if isinstance(value, (tuple, list)) and name != "params":
            options[name] = tuple(_number(name, each, waits) for each in value)
        elif name != "params":
            options[name] = _number(name, value, waits)
    return options


def _number(name: str, value: Any, waits: bool) -> Any:
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value) if value.dtype.kind in "biufc" else None
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_meta or value.layout is not torch.strided or value.is_nested or value.numel() != 1:
        what = "nested" if value.is_nested else f"{value.layout} on {value.device} of shape {tuple(value.shape)}"
        raise ConfigError(f"{name} of the param group must be one number, got a tensor ({what})")
    if waits or value.device.type == "cpu":
        return value.item()
    if name == "lr":
        return 0.0
    raise ConfigError(
        f"{name} of the param group is a tensor on {value.device}, which the host cannot read without waiting; on a "
        f"GPU lr alone may be one: pass {name} as a number"
    )


def config_of(optimizer: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> OptimizerConfig:
    """The config of ours that a param group of a torch optimizer stands for, `as_numbers`. Changes nothing. Raises
    `UnsupportedError` for a kind or an option that tables lack, `ConfigError` for a value that is not allowed."""
    kind = kind_of(optimizer)
    name, _ = ELSEWHERE.get(_place(optimizer), (f"torch.optim.{optimizer.__name__}", kind))
    for option, wanted in kind.must_be.items():
        value = options.get(option, wanted)
        if bool(value) if wanted is False else value != wanted:
            raise UnsupportedError(
                f"{name} has {option}={shown(value)}, which tables lack; they can follow it with {option}={wanted!r}. "
                f"Nothing was changed"
            )
    return kind.config(options)


def default_config(optimizer: type[torch.optim.Optimizer]) -> OptimizerConfig:
    """The config of ours for tables that will follow an optimizer of a torch class with its usual options."""
    kind_of(optimizer)
    make: Callable[..., torch.optim.Optimizer] = optimizer
    probe = make([torch.nn.Parameter(torch.zeros((1, 1), device="cpu"))])
    return config_of(optimizer, as_numbers(probe.param_groups[0]))
