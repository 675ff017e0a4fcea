"""RMSprop (Hinton, 2012) over all rows, as torch has it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tieredemb.config import OptimizerConfig, StateTensor, StepTerms, by_name, check_finite, check_flag
from tieredemb.errors import ConfigError, shown

_SQUARE, _MEAN, _BUFFER = StateTensor("square_avg"), StateTensor("grad_avg"), StateTensor("momentum_buffer")


@by_name
@dataclass(frozen=True, kw_only=True)
class RMSprop(OptimizerConfig):
    """`torch.optim.RMSprop`: every row's running mean of squares falls in every step, and with `momentum` every row
    moves, those outside the batch when they are next used. With `centered` squares are taken about a running mean of
    the gradients. `weight_decay` is added to the gradient (L2): the steps that a row missed are then replayed one by
    one.

    State D + 1 words a row; with `momentum` D more, and with `centered` D more.

    >>> bag = tieredemb.TieredEmbeddingBag(1000, 4, mode="sum", optimizer=tieredemb.RMSprop(lr=0.01, momentum=0.9))
    >>> bag(torch.tensor([[1, 2]])).sum().backward()    # moves every row, unused ones when they are next used
    """

    lr: float = 0.01
    alpha: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    centered: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_finite("alpha", self.alpha, low=0.0)
        if self.alpha > 1:
            raise ConfigError(f"alpha must lie in [0, 1], got {shown(self.alpha)}")
        check_finite("eps", self.eps, low=0.0, open_low=True)
        for name in ("weight_decay", "momentum"):
            check_finite(name, getattr(self, name), low=0.0)
        check_flag("centered", self.centered)

    @property
    def is_dense(self) -> bool:
        return True

    @property
    def tensors(self) -> tuple[StateTensor, ...]:
        return (_SQUARE, *((_MEAN,) if self.centered else ()), *((_BUFFER,) if self.momentum != 0 else ()))

    def numbers(self, hyper: Mapping[str, float]) -> dict[str, float]:
        for name, tensor, value in (("momentum", _BUFFER, "…"), ("centered", _MEAN, "True")):
            if hyper[name] != 0 and tensor not in self.tensors:
                raise ConfigError(
                    f"{name} of the param group is {hyper[name]:g}, but the rows were built without room for it; build "
                    f"the tables with RMSprop({name}={value}), which may become 0 later. Nothing was updated"
                )
        used = {name: float(hyper[name]) for name in ("eps", "alpha", "weight_decay", "momentum", "centered")}
        return used | {"one_less_alpha": 1 - hyper["alpha"]}

    def step_terms(self, hyper: Mapping[str, float], step: float) -> StepTerms:
        # state that a step does not use stays unchanged in the rows: no factor stands for that
        uses_all = (hyper["momentum"] != 0) == (_BUFFER in self.tensors) and bool(hyper["centered"]) == self.centered
        moves = hyper["momentum"] != 0
        return StepTerms(
            weight=hyper["lr"] if moves else 0.0,
            point=0.0 if moves else 1.0,
            first=hyper["momentum"] if moves else 1.0,
            root_second=math.sqrt(hyper["alpha"]),
            coupled=float(hyper["weight_decay"] != 0 or not uses_all),
        )
