"""Adagrad with one accumulator a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from tieredemb.config import OptimizerConfig, StateTensor, by_name, check_finite


@by_name
@dataclass(frozen=True, kw_only=True)
class RowWiseAdagrad(OptimizerConfig):
    """Adagrad with one accumulator a row, the mean of the squared gradients over the row (as FBGEMM's): 1 word.

    >>> bag = tieredemb.TieredEmbeddingBag(1000, 4, mode="sum", optimizer=tieredemb.RowWiseAdagrad(lr=0.02))
    >>> bag(torch.tensor([[1, 2]])).sum().backward()    # moves rows 1 and 2
    """

    lr: float = 0.01
    initial_accumulator_value: float = 0.0
    eps: float = 1e-8

    state: ClassVar[tuple[StateTensor, ...]] = (StateTensor("sum", row_wise=True),)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("initial_accumulator_value", "eps"):
            check_finite(name, getattr(self, name), low=0.0)

    @property
    def state_start(self) -> float:
        return float(self.initial_accumulator_value)

    def numbers(self, hyper: Mapping[str, float]) -> dict[str, float]:
        return {"eps": hyper["eps"]}
