"""Pooled lookup of all bags of all tables in one launch: sum, mean, max, weighted.

Rows are read where they live (their homes); sums run in float32 in the order of the ids and are rounded once, into the
output's dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tieredemb.kernels import twin
from tieredemb.lookup.bags import MAX, MEAN, Bags, KeySpace

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

NO_WEIGHTS = np.empty(0, np.float32)
NO_ARGMAX = np.empty((0, 0), np.int32)


def pool(
    weight: Array,
    homes: Array,
    bags: Bags,
    space: KeySpace,
    weights: Array | None,
    out: Array,
    argmax: Array | None,
) -> None:
    """Writes the pooled rows of `bags` to columns `space.column` of `out` (carrier (B, ΣD)).

    `weight`: carrier (C, D), the hot rows · `homes`: int32 (N,) · `weights`: float32 (N,), for sums · `argmax`: int32
    (B, ΣD), takes the winning occurrence of each maximum, −1 for an empty bag.
    """
    kernels: Any = twin(__name__, torch.device("cpu"))
    kernels.pool(
        weight,
        homes,
        bags,
        space,
        NO_WEIGHTS if weights is None else weights,
        out,
        NO_ARGMAX if argmax is None else argmax,
    )


def has_max(space: KeySpace) -> bool:
    return bool((space.mode == MAX).any())


def has_mean(space: KeySpace) -> bool:
    return bool((space.mode == MEAN).any())


def gradient_scale(bags: Bags, space: KeySpace, homes: Array, weights: Array | None) -> Array | None:
    """What each occurrence's share of the output's gradient is multiplied by, float32 (N,), or None for ones: its
    weight in a sum, one over the bag's size in a mean."""
    if weights is not None or not has_mean(space):
        return weights
    kernels: Any = twin(__name__, torch.device("cpu"))
    scale: Array = kernels.mean_scale(bags, space, homes)
    return scale


def weights_gradient(weight: Array, homes: Array, bags: Bags, space: KeySpace, grad: Array) -> Array:
    """Gradient of per-sample weights, float32 (N,): the inner product of each row (`weight`, at `homes`) with the
    gradient of its bag (`grad`, float32 (B, ΣD)). Zero for padding."""
    kernels: Any = twin(__name__, torch.device("cpu"))
    gradient: Array = kernels.weights_gradient(weight, homes, bags, space, grad)
    return gradient
