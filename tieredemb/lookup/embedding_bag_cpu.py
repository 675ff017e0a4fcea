"""Pooled lookup of all bags of all tables on the CPU: sum, mean, max, weighted.

Rows are read where they live (their homes); how a bag is pooled is in bag_pool_cpu.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tieredemb.kernels.constants import MEAN
from tieredemb.kernels.cpu import borrowed, fma, item, jit, keep, load, row_width
from tieredemb.kernels.parallel_cpu import even_bounds, over_ranges, parallel_for
from tieredemb.lookup.bag_pool_cpu import bag_pool, block_of, row_prefetch
from tieredemb.lookup.bags import KeySpace
from tieredemb.lookup.bags_cpu import Bags

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

POOL_GRAIN = 32768  # row elements a thread is worth
NO_WEIGHTS = np.empty(0, np.float32)
NO_ARGMAX = np.empty((0, 0), np.int32)


def _samples(bags: Bags, width: int) -> list[int]:
    """Ranges of samples, one a thread."""
    grain = POOL_GRAIN * bags.batch // max(1, len(bags.keys) * width)
    return even_bounds(bags.batch, grain)


def pool(weight: Array, homes: Array, bags: Bags, space: KeySpace, weights: Array, out: Array, argmax: Array) -> None:
    """Writes the pooled rows of `bags` to columns `space.column` of `out`, (B, ΣD) in its own dtype's carrier.

    `weight`: carrier (C, D), the hot rows · `homes`: int32 (N,) · `weights`: float32 (N,), for sums, or `NO_WEIGHTS` ·
    `argmax`: int32 (B, ΣD), filled with −1, receives the winning occurrence of each maximum, or `NO_ARGMAX`.
    """
    stride = bags.batch + bags.have_ends
    args = (weight, homes, bags.offsets, stride, bags.batch, space.mode, space.column, weights, out, argmax)
    parallel_for(bags_pool, _samples(bags, space.width), *args)


def mean_scale(bags: Bags, space: KeySpace, homes: Array, scale: Array | None = None) -> Array:
    """What each occurrence's share of the output's gradient is multiplied by, float32 (N,): one over the bag's size in
    a mean. Written to `scale`, where that is given, for the occurrences of `bags` alone."""
    if scale is None:
        scale = np.empty(len(homes), np.float32)
    bags_mean_scale(homes, bags.offsets, bags.batch + bags.have_ends, bags.batch, space.mode, scale)
    return scale


def weights_gradient(weight: Array, homes: Array, bags: Bags, space: KeySpace, grad: Array) -> Array:
    """Gradient of per-sample weights, float32 (N,): the inner product of each row (`weight`, at `homes`) with the
    gradient of its bag (`grad`, float32 (B, ΣD)). Zero for padding."""
    gradient = np.empty(len(homes), np.float32)
    args = (weight, homes, bags.offsets, bags.batch, space.column, grad, gradient)
    parallel_for(bags_weights_gradient, _samples(bags, space.width), *args)
    return gradient


@over_ranges
def bags_pool(lo, hi, weight, homes, offsets, stride, batch, mode, column, weights, out, argmax):
    """All bags of samples lo … hi − 1, sample by sample: the outputs of a sample are adjacent, those of a feature a
    page apart. Moves D · itemsize bytes an occurrence, at random, and as many a bag, in order. `argmax` is −1
    before."""
    sums = np.empty(row_width(weight), np.float32)
    acc = borrowed(sums)
    step = weight.shape[1]
    block = block_of(weight, homes.shape[0], batch)
    for ahead in range(lo, hi + block, block):
        for feature in range(mode.shape[0]):
            bag = feature * stride
            for i in range(item(offsets, bag + min(ahead, hi)), item(offsets, bag + min(ahead + block, hi))):
                row_prefetch(weight, item(homes, i))
        for b in range(max(ahead - block, lo), min(ahead, hi)):
            for feature in range(mode.shape[0]):
                bag, to = feature * stride + b, b * out.shape[1] + column[feature]
                edges = item(offsets, bag), item(offsets, bag + 1)
                bag_pool(out, to, weight, homes, step, edges[0], edges[1], weights, mode[feature], acc, argmax)
    keep(sums)


@jit
def bags_mean_scale(homes, offsets, stride, batch, mode, scale):
    for feature in range(mode.shape[0]):
        for bag in range(feature * stride, feature * stride + batch):
            count = 0
            if mode[feature] == MEAN:
                for i in range(offsets[bag], offsets[bag + 1]):
                    count += np.int64(homes[i] >= 0)
            value = np.float32(1.0) / np.float32(max(count, 1))
            for i in range(offsets[bag], offsets[bag + 1]):
                scale[i] = value


@over_ranges
def bags_weights_gradient(lo, hi, weight, homes, offsets, batch, column, grad, gradient):
    """Occurrences of samples lo … hi − 1."""
    width = row_width(weight)
    for b in range(lo, hi):
        for feature in range(column.shape[0]):
            bag = feature * batch + b
            first = column[feature]
            for i in range(offsets[bag], offsets[bag + 1]):
                total = np.float32(0.0)
                if homes[i] >= 0:
                    for d in range(width):
                        total = fma(load(weight, homes[i], d), load(grad, b, first + d), total)
                gradient[i] = total
