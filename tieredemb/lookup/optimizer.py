"""Backward and optimizer in one pass: a row's gradients are summed along its segment, then row and state are read and
written once.

Sums run in chunks counted from the segment's first occurrence, and a row is updated with explicit fused multiply-adds,
so a result depends on neither slots nor threads. Formulas are those of the torch optimizers of the same names on
sparse gradients; row-wise Adagrad follows FBGEMM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tieredemb import config
from tieredemb.errors import ConfigError
from tieredemb.kernels import twin

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tieredemb.kernels.cpu import Pass
    from tieredemb.kernels.segments_cpu import Segments
    from tieredemb.lookup.bags import KeySpace

    Array = np.ndarray[Any, Any]

KINDS: dict[type, int] = {config.SGD: 0, config.Adagrad: 1, config.RowWiseAdagrad: 2, config.Adam: 3}
SGD, ADAGRAD, ROW_WISE_ADAGRAD, ADAM = KINDS.values()


def state_names(optimizer: config.OptimizerConfig | None) -> tuple[str, ...]:
    """The optimizer's state tensors, named as torch names them."""
    names = {SGD: (), ADAGRAD: ("sum",), ROW_WISE_ADAGRAD: ("sum",), ADAM: ("exp_avg", "exp_avg_sq")}
    return () if optimizer is None else names[KINDS[type(optimizer)]]


def state_width(optimizer: config.OptimizerConfig | None, width: int) -> int:
    """32-bit words of state that a row of `width` weights needs."""
    if isinstance(optimizer, config.RowWiseAdagrad):
        return 1
    return len(state_names(optimizer)) * width


def state_start(optimizer: config.OptimizerConfig | None) -> float:
    """What every word of state starts as."""
    return float(getattr(optimizer, "initial_accumulator_value", 0.0))


@dataclass(frozen=True)
class Hyperparameters:
    """One update's numbers. `kind`: of `KINDS` · `rate`: float32 (T,), the step size of each table, decays and bias
    corrections included · `eps`, `beta1`, `beta2`: floats · `scale`: what gradients are multiplied by."""

    kind: int
    rate: Array
    eps: float = 0.0
    beta1: float = 0.0
    beta2: float = 0.0
    scale: float = 1.0


def check_rate(lr: float | torch.Tensor) -> float:
    """The learning rate as a number. Raises `ConfigError` if it is negative or none."""
    rate = float(lr)
    if not np.isfinite(rate) or rate < 0:
        raise ConfigError(
            f"the learning rate is {rate!r}; it must be a finite number of 0 or more: check the scheduler. "
            f"Nothing was updated"
        )
    return rate


def hyperparameters(
    optimizer: config.OptimizerConfig, group: Mapping[str, Any], steps: Array, scale: float
) -> Hyperparameters:
    """The numbers of an update whose tables take their `steps`-th step (int64 (T,), from 1). `group` holds lr, eps, …
    as a torch param group does. Raises `ConfigError` for a learning rate that is negative or no number."""
    lr = check_rate(group["lr"])
    kind = KINDS[type(optimizer)]
    eps = float(group.get("eps", 0.0))
    step = steps.astype(np.float64)
    if kind == ADAGRAD:
        return Hyperparameters(kind, _f32(lr / (1 + (step - 1) * group["lr_decay"])), eps, scale=scale)
    if kind == ADAM:
        beta1, beta2 = group["betas"]
        rate = lr * np.sqrt(1 - beta2**step) / (1 - beta1**step)
        return Hyperparameters(kind, _f32(rate), eps, beta1, beta2, scale)
    return Hyperparameters(kind, _f32(np.full(len(steps), lr)), eps, scale=scale)


def _f32(values: Array) -> Array:
    return values.astype(np.float32)


@dataclass(frozen=True)
class Gradient:
    """The upstream gradient of a batch and how occurrences share in it.

    `grad`: float32 (B, ΣD) · `sample`, `table`: int32 (N,), row of `grad` and table of each occurrence · `scale`:
    float32 (N,) or empty for ones · `argmax`: int32 (B, ΣD), the winning occurrence of each maximum, or empty.
    """

    grad: Array
    sample: Array
    table: Array
    scale: Array
    argmax: Array


def update(hot: Any, segments: Segments, gradient: Gradient, space: KeySpace, numbers: Hyperparameters) -> Pass:
    """One optimizer step of the rows of `segments` in `hot` (`weight`, `state`, `dirty`), which its `run` applies and
    marks dirty. A segment without occurrences changes nothing."""
    kernels: Any = twin(__name__, torch.device("cpu"))
    step: Pass = kernels.update(hot, segments, gradient, space, numbers)
    return step


def limit_norms(hot: Any, slots: Array, max_norm: float, norm_type: float) -> Pass:
    """Its `run` scales every row in `slots` (int32 (U,), distinct) whose norm exceeds `max_norm` down to it, as
    `torch.embedding_renorm_` does, and marks it dirty."""
    kernels: Any = twin(__name__, torch.device("cpu"))
    scaling: Pass = kernels.limit_norms(hot, slots, max_norm, norm_type)
    return scaling
