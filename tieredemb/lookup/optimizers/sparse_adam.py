"""Adam (Kingma and Ba, ICLR 2015) over the rows of the batch alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tieredemb.config import Array, OptimizerConfig, StateTensor, by_name, check_betas, check_finite


@by_name
@dataclass(frozen=True, kw_only=True)
class SparseAdam(OptimizerConfig):
    """`torch.optim.SparseAdam`: only rows in the batch move; one step counter a table; state 2 D words a row.

    >>> bag = tieredemb.TieredEmbeddingBag(1000, 4, mode="sum", optimizer=tieredemb.SparseAdam(lr=1e-3))
    >>> bag(torch.tensor([[1, 2]])).sum().backward()    # moves rows 1 and 2
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    state: ClassVar[tuple[StateTensor, ...]] = (StateTensor("exp_avg"), StateTensor("exp_avg_sq"))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_finite("eps", self.eps, low=0.0, open_low=True)
        check_betas(self.betas)

    @staticmethod
    def rate(hyper: Mapping[str, float], step: Array) -> Array:
        rate: Array = hyper["lr"] * np.sqrt(1 - hyper["beta2"] ** step) / (1 - hyper["beta1"] ** step)
        return rate

    def numbers(self, hyper: Mapping[str, float]) -> dict[str, float]:
        return {"eps": hyper["eps"], "one_less_beta1": 1 - hyper["beta1"], "one_less_beta2": 1 - hyper["beta2"]}
