"""Adamax (Kingma and Ba, ICLR 2015) over all rows, as torch has it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from tieredemb.config import Array, OptimizerConfig, StateTensor, StepTerms, by_name, check_betas, check_finite


@by_name
@dataclass(frozen=True, kw_only=True)
class Adamax(OptimizerConfig):
    """`torch.optim.Adamax`: Adam with a decayed maximum of the gradients' sizes in place of the root of the mean of
    their squares. Every row moves in every step, those outside the batch when they are next used. `weight_decay` is
    added to the gradient (L2): the steps that a row missed are then replayed one by one. State 2 D + 1 words a row.

    >>> bag = tieredemb.TieredEmbeddingBag(1000, 4, mode="sum", optimizer=tieredemb.Adamax(lr=2e-3))
    >>> bag(torch.tensor([[1, 2]])).sum().backward()    # moves every row, unused ones when they are next used
    """

    lr: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    state: ClassVar[tuple[StateTensor, ...]] = (StateTensor("exp_avg"), StateTensor("exp_inf"))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_finite("eps", self.eps, low=0.0, open_low=True)
        check_betas(self.betas)
        check_finite("weight_decay", self.weight_decay, low=0.0)

    @property
    def is_dense(self) -> bool:
        return True

    @staticmethod
    def rate(hyper: Mapping[str, float], step: Array) -> Array:
        rate: Array = hyper["lr"] / (1 - hyper["beta1"] ** step)
        return rate

    def numbers(self, hyper: Mapping[str, float]) -> dict[str, float]:
        means = {"one_less_beta1": 1 - hyper["beta1"], "maximum_decay": hyper["beta2"]}
        return means | {"largest_eps": hyper["eps"], "weight_decay": hyper["weight_decay"]}

    def step_terms(self, hyper: Mapping[str, float], step: float) -> StepTerms:
        """While the decayed maximum is above eps, a step moves by m / u times a number that falls by β1/β2 a step."""
        beta1, beta2 = hyper["beta1"], hyper["beta2"]
        falls = beta1 < beta2
        return StepTerms(
            weight=hyper["lr"] / (1 - beta1**step),
            point=0.0,
            first=beta1 / beta2 if falls else 1.0,
            root_second=math.sqrt(beta2),
            coupled=float(hyper["weight_decay"] != 0 or not falls),
        )
