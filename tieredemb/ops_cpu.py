"""The operators of `ops` on the CPU, by the kernels of the modules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tieredemb.errors import InvalidInputError
from tieredemb.kernels.row_format import carrier_view
from tieredemb.kernels.segments_cpu import segments_of_homes
from tieredemb.lookup.bags import rows_space
from tieredemb.lookup.bags_cpu import Bags, check_offsets
from tieredemb.lookup.embedding_bag_cpu import NO_ARGMAX, NO_WEIGHTS, mean_scale, pool, weights_gradient
from tieredemb.lookup.optimizer import Hyperparameters
from tieredemb.lookup.optimizer_cpu import Gradient, update
from tieredemb.lookup.optimizers.sgd import SGD

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]


@dataclass
class _Rows:
    """Rows that an SGD step of rate −1 adds a gradient to: it is summed along the segments in float32 and rounded
    once."""

    weight: Array
    state: Array
    dirty: Array


def pooled(weight: Tensor, homes: Tensor, offsets: Tensor, factors: Tensor | None, mode: str) -> Tensor:
    """See `ops.pooled_lookup`; `factors`: float32 per-sample weights."""
    bags, space = _bags(homes, offsets, len(weight)), rows_space(weight.shape[1], mode)
    out = weight.new_empty((bags.batch, weight.shape[1]))
    weights = NO_WEIGHTS if factors is None else factors.numpy()
    pool(carrier_view(weight.detach()), bags.keys, bags, space, weights, carrier_view(out), NO_ARGMAX)
    return out


def add_gradient(
    out: Tensor, grad: Tensor, weight: Tensor | None, homes: Tensor, offsets: Tensor, factors: Tensor | None, mode: str
) -> None:
    """Adds the gradient of the rows to `out`, (C, D) in the dtype of `grad`, (B, D). `weight`: that of the forward, for
    maxima alone."""
    bags, space, argmax = _bags(homes, offsets, len(out)), rows_space(grad.shape[1], mode), NO_ARGMAX
    if weight is not None and space.has_max:
        argmax, recomputed = np.full(grad.shape, -1, np.int32), carrier_view(weight.new_empty(grad.shape))
        pool(carrier_view(weight.detach()), bags.keys, bags, space, NO_WEIGHTS, recomputed, argmax)
    scale = NO_WEIGHTS if factors is None else factors.numpy()
    if factors is None and space.has_mean:
        scale = mean_scale(bags, space, bags.keys)
    shares = Gradient(_float32(grad), bags.sample, bags.feature, scale, argmax)
    rows = _Rows(carrier_view(out), np.empty((len(out), 0), np.float32), np.empty(len(out), np.uint8))
    segments = segments_of_homes(bags.keys, len(out))
    numbers = Hyperparameters(SGD, np.array([-1], np.float32), (0.0,))  # no weight decay
    update(rows, segments, shares, space, numbers).run()


def weights_gradient_of(grad: Tensor, weight: Tensor, homes: Tensor, offsets: Tensor) -> Tensor:
    """Gradient of per-sample weights, float32 (N,)."""
    bags, space = _bags(homes, offsets, len(weight)), rows_space(weight.shape[1], "sum")
    return torch.from_numpy(weights_gradient(carrier_view(weight.detach()), bags.keys, bags, space, _float32(grad)))


def _float32(values: Tensor) -> Array:
    return values.detach().to(torch.float32).contiguous().numpy()


def _bags(homes: Tensor, offsets: Tensor, rows: int) -> Bags:
    """The bags, with homes for keys. Raises `InvalidInputError` for values out of range."""
    array, edges = homes.contiguous().numpy(), offsets.contiguous().numpy()
    check_offsets(edges, len(array))
    if edges[-1] != len(array):
        raise InvalidInputError(f"the last offset is {edges[-1]}, and must be the number of homes, {len(array)}")
    if len(array) and array.max() >= rows:
        position = int(np.argmax(array >= rows))
        raise InvalidInputError(
            f"homes[{position}] = {array[position]} is out of range: the rows are 0 … {rows - 1}, and negative homes "
            f"are padding"
        )
    sample = np.repeat(np.arange(len(edges) - 1, dtype=np.int32), np.diff(edges))
    return Bags(array, edges, sample, np.zeros(len(array), np.int32), None, len(edges) - 1)
