"""Stochastic gradient descent, with momentum and weight decay as torch has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from tieredemb.config import OptimizerConfig, StateTensor, StepTerms, by_name, check_finite, check_flag, used_decay
from tieredemb.errors import ConfigError, shown

_BUFFER = (StateTensor("momentum_buffer"),)


@by_name
@dataclass(frozen=True, kw_only=True)
class SGD(OptimizerConfig):
    """`torch.optim.SGD`. With `momentum` or `weight_decay` every row moves in every step, those outside the batch when
    they are next used; with both, the steps that a row missed are replayed one by one. `weight_decay_on_use` is added
    to the gradients of the rows of a batch alone, which is FBGEMM's L2 and not torch's: no other row moves for it, and
    no step is replayed.

    State: none; with `momentum` D + 1 words a row, with `weight_decay` alone one.

    >>> bag = tieredemb.TieredEmbeddingBag(1000, 4, mode="sum", optimizer=tieredemb.SGD(lr=0.1, momentum=0.9))
    >>> bag(torch.tensor([[1, 2]])).sum().backward()    # moves every row, unused ones when they are next used
    """

    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    weight_decay_on_use: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("momentum", "dampening", "weight_decay", "weight_decay_on_use"):
            check_finite(name, getattr(self, name), low=0.0)
        check_flag("nesterov", self.nesterov)
        used_decay(asdict(self))
        if self.nesterov and (self.momentum <= 0 or self.dampening != 0):
            raise ConfigError(
                f"nesterov needs a momentum above 0 and a dampening of 0, got {shown(self.momentum)} and "
                f"{shown(self.dampening)}"
            )

    @property
    def is_dense(self) -> bool:
        return self.momentum != 0 or self.weight_decay != 0

    @property
    def tensors(self) -> tuple[StateTensor, ...]:
        return _BUFFER if self.momentum != 0 else ()

    def numbers(self, hyper: Mapping[str, float]) -> dict[str, float]:
        for name, is_held in (("momentum", bool(self.tensors)), ("weight_decay", self.is_dense)):
            if hyper[name] != 0 and not is_held:
                raise ConfigError(
                    f"{name} of the param group is {hyper[name]:g}, but the rows were built without room for it; build "
                    f"the tables with SGD({name}=…) above 0, which may become 0 later. Nothing was updated"
                )
        names = ("momentum", "nesterov") if self.is_dense else ()
        added = used_decay(hyper) if hyper["weight_decay_on_use"] != 0 else hyper["weight_decay"]
        return {"weight_decay": added} | {name: float(hyper[name]) for name in names}

    def step_numbers(self, hyper: Mapping[str, float], step: float) -> dict[str, float]:
        return {"share": 1.0 if step == 1 else 1.0 - hyper["dampening"]}  # the first gradient is the first momentum

    def missed_numbers(self, hyper: Mapping[str, float]) -> dict[str, float]:
        return {"weight_decay": hyper["weight_decay"]}

    def step_terms(self, hyper: Mapping[str, float], step: float) -> StepTerms:
        lr, momentum, weight_decay = hyper["lr"], hyper["momentum"], hyper["weight_decay"]
        decay = 1.0 - lr * weight_decay
        if not self.tensors:
            return StepTerms(weight=0.0, decay=decay)
        weight = lr * (momentum if hyper["nesterov"] else 1.0)
        return StepTerms(weight=weight, first=momentum, decay=decay, coupled=float(weight_decay != 0 or momentum == 0))
