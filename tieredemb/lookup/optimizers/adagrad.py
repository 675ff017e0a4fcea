"""Adagrad (Duchi et al., JMLR 2011), as torch has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from tieredemb.config import Array, OptimizerConfig, StateTensor, check_finite


@dataclass(frozen=True, kw_only=True)
class Adagrad(OptimizerConfig):
    """`torch.optim.Adagrad`: state D words a row (sum of squared gradients)."""

    lr: float = 0.01
    lr_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10

    state: ClassVar[tuple[StateTensor, ...]] = (StateTensor("sum"),)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("lr_decay", "initial_accumulator_value", "eps"):
            check_finite(name, getattr(self, name), low=0.0)

    @property
    def state_start(self) -> float:
        return float(self.initial_accumulator_value)

    @staticmethod
    def rate(hyper: Mapping[str, float], step: Array) -> Array:
        return hyper["lr"] / (1 + (step - 1) * hyper["lr_decay"])

    @staticmethod
    def numbers(hyper: Mapping[str, float]) -> dict[str, float]:
        return {"eps": hyper["eps"]}
