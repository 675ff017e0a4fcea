"""Adagrad (Duchi et al., JMLR 2011), as torch has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import ClassVar

from tieredemb.config import Array, OptimizerConfig, StateTensor, StepTerms, by_name, check_finite, used_decay
from tieredemb.errors import ConfigError


@by_name
@dataclass(frozen=True, kw_only=True)
class Adagrad(OptimizerConfig):
    """`torch.optim.Adagrad`: state D words a row (sum of squared gradients).

    With `weight_decay`, which is added to the gradient (L2), every row moves in every step: the steps that a row missed
    are replayed one by one when it is next used. State D + 1 words a row then. `weight_decay_on_use` is added to the
    gradients of the rows of a batch alone, which is FBGEMM's L2 and not torch's: other rows stay as they are.

    >>> bag = tieredemb.TieredEmbeddingBag(1000, 4, mode="sum", optimizer=tieredemb.Adagrad(lr=0.02))
    >>> bag(torch.tensor([[1, 2]])).sum().backward()    # moves rows 1 and 2
    """

    lr: float = 0.01
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10
    weight_decay_on_use: float = 0.0

    state: ClassVar[tuple[StateTensor, ...]] = (StateTensor("sum"),)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("lr_decay", "weight_decay", "initial_accumulator_value", "eps", "weight_decay_on_use"):
            check_finite(name, getattr(self, name), low=0.0)
        used_decay(asdict(self))

    @property
    def is_dense(self) -> bool:
        return self.weight_decay != 0

    @property
    def state_start(self) -> float:
        return float(self.initial_accumulator_value)

    @staticmethod
    def rate(hyper: Mapping[str, float], step: Array) -> Array:
        return hyper["lr"] / (1 + (step - 1) * hyper["lr_decay"])

    def numbers(self, hyper: Mapping[str, float]) -> dict[str, float]:
        if hyper["weight_decay"] != 0 and not self.is_dense:
            raise ConfigError(
                f"weight_decay of the param group is {hyper['weight_decay']:g}, but the rows were built without room "
                f"for it; build the tables with Adagrad(weight_decay=…) above 0, which may become 0 later. Nothing was "
                f"updated"
            )
        added = used_decay(hyper) if hyper["weight_decay_on_use"] != 0 else hyper["weight_decay"]
        return {"eps": hyper["eps"], "weight_decay": added}

    def missed_numbers(self, hyper: Mapping[str, float]) -> dict[str, float]:
        return {"weight_decay": hyper["weight_decay"]}

    def step_terms(self, hyper: Mapping[str, float], step: float) -> StepTerms:
        return StepTerms(weight=0.0, coupled=float(hyper["weight_decay"] != 0))
