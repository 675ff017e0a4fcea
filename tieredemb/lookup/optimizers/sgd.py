"""Stochastic gradient descent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tieredemb.config import OptimizerConfig


@dataclass(frozen=True, kw_only=True)
class SGD(OptimizerConfig):
    """`torch.optim.SGD`: w ← w - lr · g. No state."""

    @staticmethod
    def numbers(hyper: Mapping[str, float]) -> dict[str, float]:
        return {}
