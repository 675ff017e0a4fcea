"""Adam (Kingma and Ba, ICLR 2015) and AdamW (Loshchilov and Hutter, ICLR 2019) over all rows, as torch has them."""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import ClassVar

import numpy as np

from tieredemb.config import (
    Array,
    OptimizerConfig,
    StateTensor,
    StepTerms,
    by_name,
    check_betas,
    check_finite,
    used_decay,
)


@dataclass(frozen=True, kw_only=True)
class _OfMoments(OptimizerConfig):
    """What both have: running means of the gradient and of its square, corrected for their bias, and steps that move
    every row. Their weight decay differs."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float

    state: ClassVar[tuple[StateTensor, ...]] = (StateTensor("exp_avg"), StateTensor("exp_avg_sq"))

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
        """lr / (1 - β1^t) · √(1 - β2^t): the rate of a row whose √v is not corrected for its bias; eps is corrected
        instead."""
        rate: Array = hyper["lr"] * np.sqrt(1 - hyper["beta2"] ** step) / (1 - hyper["beta1"] ** step)
        return rate

    @staticmethod
    @abc.abstractmethod
    def decays(hyper: Mapping[str, float]) -> tuple[float, float]:
        """What of the weights is added to the gradient, and what they are multiplied by."""

    def numbers(self, hyper: Mapping[str, float]) -> dict[str, float]:
        means = {"one_less_beta1": 1 - hyper["beta1"], "one_less_beta2": 1 - hyper["beta2"]}
        return means | {"weight_decay": self.decays(hyper)[0]}

    def step_numbers(self, hyper: Mapping[str, float], step: float) -> dict[str, float]:
        return {"step_eps": hyper["eps"] * math.sqrt(1 - hyper["beta2"] ** step), "decay": self.decays(hyper)[1]}

    def step_terms(self, hyper: Mapping[str, float], step: float) -> StepTerms:
        added, decay = self.decays(hyper)
        return StepTerms(
            weight=hyper["lr"] / (1 - hyper["beta1"] ** step),
            point=1 / math.sqrt(1 - hyper["beta2"] ** step),
            first=hyper["beta1"],
            root_second=math.sqrt(hyper["beta2"]),
            decay=decay,
            coupled=float(added != 0),
            eps=hyper["eps"],
        )


@by_name
@dataclass(frozen=True, kw_only=True)
class Adam(_OfMoments):
    """`torch.optim.Adam`: every row moves in every step, those outside the batch when they are next used.

    `weight_decay` is added to the gradient (L2): the steps that a row missed are then replayed one by one.
    `weight_decay_on_use` is added to the gradients of the rows of a batch alone, which is FBGEMM's L2 and not torch's:
    no step is replayed for it. State 2 D + 1 words a row.

    >>> bag = tieredemb.TieredEmbeddingBag(1000, 4, mode="sum", optimizer=tieredemb.Adam(lr=1e-3))
    >>> bag(torch.tensor([[1, 2]])).sum().backward()    # moves every row, unused ones when they are next used
    """

    weight_decay: float = 0.0
    weight_decay_on_use: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_finite("weight_decay_on_use", self.weight_decay_on_use, low=0.0)
        used_decay(asdict(self))

    def numbers(self, hyper: Mapping[str, float]) -> dict[str, float]:
        if hyper["weight_decay_on_use"] == 0:
            return super().numbers(hyper)
        return super().numbers(hyper) | {"weight_decay": used_decay(hyper)}

    def missed_numbers(self, hyper: Mapping[str, float]) -> dict[str, float]:
        return {"weight_decay": hyper["weight_decay"]}

    @staticmethod
    def decays(hyper: Mapping[str, float]) -> tuple[float, float]:
        return hyper["weight_decay"], 1.0


@by_name
@dataclass(frozen=True, kw_only=True)
class AdamW(_OfMoments):
    """`torch.optim.AdamW`: `Adam` whose `weight_decay` is taken off the weights, w ← (1 - lr · weight_decay) · w, and
    is in no gradient. State 2 D + 1 words a row.

    >>> bag = tieredemb.TieredEmbeddingBag(1000, 4, mode="sum", optimizer=tieredemb.AdamW(lr=1e-3, weight_decay=0.01))
    >>> bag(torch.tensor([[1, 2]])).sum().backward()    # moves every row, unused ones when they are next used
    """

    weight_decay: float = 1e-2

    @property
    def flags(self) -> tuple[str, ...]:
        return ("-DDECOUPLED",)

    @staticmethod
    def decays(hyper: Mapping[str, float]) -> tuple[float, float]:
        return 0.0, 1.0 - hyper["lr"] * hyper["weight_decay"]
