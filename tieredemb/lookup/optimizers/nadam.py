"""NAdam (Dozat, ICLR 2016 workshop) over all rows, as torch has it."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from tieredemb.config import (
    OptimizerConfig,
    StateTensor,
    StepTerms,
    by_name,
    check_betas,
    check_finite,
    check_flag,
)

_NOTHING = 1e-46  # below what float32 holds


def _momentum(hyper: Mapping[str, float], step: float) -> float:
    """µ of a step: β1 · (1 − 0.96^(step · momentum_decay) / 2)."""
    return float(hyper["beta1"] * (1 - 0.5 * 0.96 ** (step * hyper["momentum_decay"])))


@functools.lru_cache(maxsize=16)
def _product(beta1: float, momentum_decay: float, steps: float) -> float:
    """The product of µ over the first `steps` steps."""
    product, power, fall = 1.0, 1.0, 0.96**momentum_decay
    step = 0
    while step < steps and product > _NOTHING:
        if power < 1e-17:  # µ is β1 from here on
            return float(product * beta1 ** (steps - step))
        power *= fall
        product *= beta1 * (1 - 0.5 * power)
        step += 1
    return product


@by_name
@dataclass(frozen=True, kw_only=True)
class NAdam(OptimizerConfig):
    """`torch.optim.NAdam`: Adam with Nesterov's momentum, which grows over the steps by `momentum_decay`. Every row
    moves in every step, those outside the batch when they are next used.

    `weight_decay` is added to the gradient (L2): the steps that a row missed are then replayed one by one; with
    `decoupled_weight_decay` it is taken off the weights, as `AdamW` does. `betas[0]` and `momentum_decay` cannot change
    later, as the product of all momenta is that of one schedule. State 2 D + 1 words a row.

    >>> bag = tieredemb.TieredEmbeddingBag(1000, 4, mode="sum", optimizer=tieredemb.NAdam(lr=2e-3))
    >>> bag(torch.tensor([[1, 2]])).sum().backward()    # moves every row, unused ones when they are next used
    """

    lr: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum_decay: float = 4e-3
    decoupled_weight_decay: bool = False

    state: ClassVar[tuple[StateTensor, ...]] = (StateTensor("exp_avg"), StateTensor("exp_avg_sq"))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_finite("eps", self.eps, low=0.0, open_low=True)
        check_betas(self.betas)
        for name in ("weight_decay", "momentum_decay"):
            check_finite(name, getattr(self, name), low=0.0)
        check_flag("decoupled_weight_decay", self.decoupled_weight_decay)

    @property
    def is_dense(self) -> bool:
        return True

    @property
    def fixed(self) -> dict[str, float]:
        return {"beta1": self.betas[0], "momentum_decay": self.momentum_decay}

    def totals(self, steps: int) -> dict[str, float]:
        return {"mu_product": _product(**self.fixed, steps=steps)}

    def numbers(self, hyper: Mapping[str, float]) -> dict[str, float]:
        means = {"eps": hyper["eps"], "one_less_beta1": 1 - hyper["beta1"], "one_less_beta2": 1 - hyper["beta2"]}
        return means | {"weight_decay": 0.0 if hyper["decoupled_weight_decay"] else hyper["weight_decay"]}

    def step_numbers(self, hyper: Mapping[str, float], step: float) -> dict[str, float]:
        product = _product(hyper["beta1"], hyper["momentum_decay"], step)
        now, after = _momentum(hyper, step), _momentum(hyper, step + 1)
        return {
            "correction2": 1 - hyper["beta2"] ** step,
            "of_gradient": hyper["lr"] * (1 - now) / (1 - product),
            "of_mean": hyper["lr"] * after / (1 - product * after),
            "decay": self._decay(hyper),
        }

    def _decay(self, hyper: Mapping[str, float]) -> float:
        return 1.0 - hyper["lr"] * hyper["weight_decay"] if hyper["decoupled_weight_decay"] else 1.0

    def step_terms(self, hyper: Mapping[str, float], step: float) -> StepTerms:
        after = _momentum(hyper, step + 1)
        product = _product(hyper["beta1"], hyper["momentum_decay"], step)
        return StepTerms(
            weight=hyper["lr"] * after / (1 - product * after),
            point=1 / math.sqrt(1 - hyper["beta2"] ** step),
            first=hyper["beta1"],
            root_second=math.sqrt(hyper["beta2"]),
            decay=self._decay(hyper),
            coupled=float(hyper["weight_decay"] != 0 and not hyper["decoupled_weight_decay"]),
            eps=hyper["eps"],
        )
