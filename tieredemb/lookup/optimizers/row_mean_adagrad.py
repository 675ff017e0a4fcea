"""Adagrad that moves a row as a whole, by the mean of its gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from tieredemb.config import Array, OptimizerConfig, StateTensor, by_name, check_finite


@by_name
@dataclass(frozen=True, kw_only=True)
class RowMeanAdagrad(OptimizerConfig):
    """What `torchrec.optim.RowWiseAdagrad` does in its own `step()`: every element of a row moves alike, by the mean of
    the row's gradient, and the row's accumulator adds up squares of that mean. It is here for models that are trained
    so already. TorchRec's sharded tables take FBGEMM's rule in its place, which is `RowWiseAdagrad`, and the one to
    begin with. State 1 word a row.

    >>> bag = tieredemb.TieredEmbeddingBag(1000, 4, mode="sum", optimizer=tieredemb.RowMeanAdagrad(lr=0.02))
    >>> bag(torch.tensor([[1, 2]])).sum().backward()    # moves rows 1 and 2
    """

    lr: float = 0.01
    lr_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10

    state: ClassVar[tuple[StateTensor, ...]] = (StateTensor("sum", row_wise=True),)

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

    def numbers(self, hyper: Mapping[str, float]) -> dict[str, float]:
        return {"eps": hyper["eps"]}
