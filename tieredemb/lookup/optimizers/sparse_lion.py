"""Lion (Chen et al., "Symbolic discovery of optimization algorithms", NeurIPS 2023) over the rows of the batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from tieredemb.config import OptimizerConfig, StateTensor, by_name, check_betas, check_finite


@by_name
@dataclass(frozen=True, kw_only=True)
class SparseLion(OptimizerConfig):
    """Lion: w moves by lr against the sign of an interpolated momentum, and by lr · weight_decay · w. Only rows in the
    batch move, as in `torch.optim.SparseAdam`, and only their momentum decays; state D words a row. torch has none.

    >>> bag = tieredemb.TieredEmbeddingBag(1000, 4, mode="sum", optimizer=tieredemb.SparseLion(lr=1e-4))
    >>> bag(torch.tensor([[1, 2]])).sum().backward()    # moves rows 1 and 2
    """

    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0

    state: ClassVar[tuple[StateTensor, ...]] = (StateTensor("exp_avg"),)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_betas(self.betas)
        check_finite("weight_decay", self.weight_decay, low=0.0)

    def numbers(self, hyper: Mapping[str, float]) -> dict[str, float]:
        beta1, beta2 = hyper["beta1"], hyper["beta2"]
        return {
            "beta1": beta1,
            "one_less_beta1": 1 - beta1,
            "beta2": beta2,
            "one_less_beta2": 1 - beta2,
            "weight_decay": hyper["weight_decay"],
        }
