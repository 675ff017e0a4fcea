"""Adam (Kingma and Ba, ICLR 2015) and AdamW (Loshchilov and Hutter, ICLR 2019) over all rows, as torch has them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tieredemb.config import Array, OptimizerConfig, StateTensor, StepTerms, check_betas, check_finite

_STATE = (StateTensor("exp_avg"), StateTensor("exp_avg_sq"))


@dataclass(frozen=True, kw_only=True)
class Adam(OptimizerConfig):
    """`torch.optim.Adam`: every row moves in every step, those outside the batch when they are next used.

    `weight_decay` is added to the gradient (L2): the steps that a row missed are then replayed one by one. State
    2 D + 1 words a row.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    state: ClassVar[tuple[StateTensor, ...]] = _STATE

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self)

    @property
    def is_dense(self) -> bool:
        return True

    @staticmethod
    def rate(hyper: Mapping[str, float], step: Array) -> Array:
        return _rate(hyper, step)

    def numbers(self, hyper: Mapping[str, float]) -> dict[str, float]:
        return _means(hyper) | {"weight_decay": hyper["weight_decay"]}

    def step_numbers(self, hyper: Mapping[str, float], step: float) -> dict[str, float]:
        return {"step_eps": _step_eps(hyper, step), "decay": 1.0}

    def step_terms(self, hyper: Mapping[str, float], step: float) -> StepTerms:
        return _terms(hyper, step)._replace(coupled=float(hyper["weight_decay"] != 0))


@dataclass(frozen=True, kw_only=True)
class AdamW(OptimizerConfig):
    """`torch.optim.AdamW`: `Adam` whose `weight_decay` is taken off the weights, w ← (1 - lr · weight_decay) · w, and
    is in no gradient. State 2 D + 1 words a row."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2

    state: ClassVar[tuple[StateTensor, ...]] = _STATE

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self)

    @property
    def is_dense(self) -> bool:
        return True

    @staticmethod
    def rate(hyper: Mapping[str, float], step: Array) -> Array:
        return _rate(hyper, step)

    @property
    def flags(self) -> tuple[str, ...]:
        return ("-DDECOUPLED",)

    def numbers(self, hyper: Mapping[str, float]) -> dict[str, float]:
        return _means(hyper) | {"weight_decay": 0.0}

    def step_numbers(self, hyper: Mapping[str, float], step: float) -> dict[str, float]:
        return {"step_eps": _step_eps(hyper, step), "decay": 1.0 - hyper["lr"] * hyper["weight_decay"]}

    def step_terms(self, hyper: Mapping[str, float], step: float) -> StepTerms:
        return _terms(hyper, step)._replace(decay=1.0 - hyper["lr"] * hyper["weight_decay"])


def _check(config: Adam | AdamW) -> None:
    check_finite("eps", config.eps, low=0.0, open_low=True)
    check_betas(config.betas)
    check_finite("weight_decay", config.weight_decay, low=0.0)


def _rate(hyper: Mapping[str, float], step: Array) -> Array:
    """lr / (1 - β1^t) · √(1 - β2^t): that of a row whose √v is not corrected for its bias, but eps is in its place."""
    rate: Array = hyper["lr"] * np.sqrt(1 - hyper["beta2"] ** step) / (1 - hyper["beta1"] ** step)
    return rate


def _means(hyper: Mapping[str, float]) -> dict[str, float]:
    return {"one_less_beta1": 1 - hyper["beta1"], "one_less_beta2": 1 - hyper["beta2"]}


def _step_eps(hyper: Mapping[str, float], step: float) -> float:
    return hyper["eps"] * math.sqrt(1 - hyper["beta2"] ** step)


def _terms(hyper: Mapping[str, float], step: float) -> StepTerms:
    return StepTerms(
        weight=hyper["lr"] / (1 - hyper["beta1"] ** step),
        point=1 / math.sqrt(1 - hyper["beta2"] ** step),
        first=hyper["beta1"],
        root_second=math.sqrt(hyper["beta2"]),
        eps=hyper["eps"],
    )
