"""Where a run stands and what it measured so far: everything beside the weights that a checkpoint must hold."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from tieredemb.cache.stats import CacheStats


@dataclass(frozen=True)
class Point:
    """An interval of the training. samples: rows trained when it ended, all epochs; loss: its mean; hit_rate: its
    share of lookups that hit, NaN for the reference."""

    samples: int
    loss: float
    hit_rate: float


@dataclass
class Progress:
    """Where the run stands. `row`: next row of `epoch`; `loss_sum`: float64 scalar over the `pending` rows since the
    last point; `stats`: of the whole run, `seconds`: of training, both across resumes."""

    step: int = 0
    epoch: int = 0
    row: int = 0
    samples: int = 0
    pending: int = 0
    loss_sum: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    points: list[Point] = field(default_factory=list)
    stats: CacheStats = field(default_factory=CacheStats)
    stats_at_point: CacheStats = field(default_factory=CacheStats)
    seconds: float = 0.0

    def state(self) -> dict[str, Any]:
        """Plain values and tensors; `Progress.of` is the inverse."""
        return asdict(self)

    @classmethod
    def of(cls, state: dict[str, Any], device: str) -> Progress:
        state = dict(state)
        state["points"] = [Point(**point) for point in state["points"]]
        state["stats"] = CacheStats(**state["stats"])
        state["stats_at_point"] = CacheStats(**state["stats_at_point"])
        state["loss_sum"] = state["loss_sum"].to(device)
        return cls(**state)
