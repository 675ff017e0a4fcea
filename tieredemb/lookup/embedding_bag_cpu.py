"""Pooled lookup of all bags of all tables on the CPU: sum, mean, max, weighted.

Rows are read where they live (their homes); sums run in float32 in the order of the ids and are rounded once, into the
output's dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tieredemb.kernels.constants import MAX, MEAN
from tieredemb.kernels.cpu import fma, inline, jit, load, prefetch, row_width, store, weight_copy
from tieredemb.kernels.parallel_cpu import even_bounds, over_ranges, parallel_for
from tieredemb.lookup.bags import KeySpace
from tieredemb.lookup.bags_cpu import Bags

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

POOL_GRAIN = 32768  # row elements a thread is worth
LINE_BYTES = 64
IDS_AHEAD = 12  # ids whose rows are prefetched, where bags have several: rows of 256 bytes took half as long as with 2
BAGS_AHEAD = 8  # bags whose first row is asked for early: single ids of one feature came a quarter sooner than by 1
NO_WEIGHTS = np.empty(0, np.float32)
NO_ARGMAX = np.empty((0, 0), np.int32)


def _samples(bags: Bags, width: int) -> list[int]:
    """Ranges of samples, one a thread."""
    grain = POOL_GRAIN * bags.batch // max(1, len(bags.keys) * width)
    return even_bounds(bags.batch, grain)


def pool(weight: Array, homes: Array, bags: Bags, space: KeySpace, weights: Array, out: Array, argmax: Array) -> None:
    """Writes the pooled rows of `bags` to columns `space.column` of `out`, (B, ΣD) in its own dtype's carrier.

    `weight`: carrier (C, D), the hot rows · `homes`: int32 (N,) · `weights`: float32 (N,), for sums, or `NO_WEIGHTS` ·
    `argmax`: int32 (B, ΣD), comes as −1 and takes the winning occurrence of each maximum, or `NO_ARGMAX`.
    """
    args = (weight, homes, bags.offsets, bags.batch, space.mode, space.column, weights, out, argmax)
    parallel_for(bags_pool, _samples(bags, space.width), *args)


def mean_scale(bags: Bags, space: KeySpace, homes: Array, scale: Array | None = None) -> Array:
    """What each occurrence's share of the output's gradient is multiplied by, float32 (N,): one over the bag's size in
    a mean. Written to `scale`, where that is given, for the occurrences of `bags` alone."""
    if scale is None:
        scale = np.empty(len(homes), np.float32)
    bags_mean_scale(homes, bags.offsets, bags.batch, space.mode, scale)
    return scale


def weights_gradient(weight: Array, homes: Array, bags: Bags, space: KeySpace, grad: Array) -> Array:
    """Gradient of per-sample weights, float32 (N,): the inner product of each row (`weight`, at `homes`) with the
    gradient of its bag (`grad`, float32 (B, ΣD)). Zero for padding."""
    gradient = np.empty(len(homes), np.float32)
    args = (weight, homes, bags.offsets, bags.batch, space.column, grad, gradient)
    parallel_for(bags_weights_gradient, _samples(bags, space.width), *args)
    return gradient


@inline
def row_prefetch(array, row):
    """Asks for all lines of `array[row]` unless the row is negative (padding)."""
    if row >= 0:
        width = array.shape[1]
        for column in range(0, width, LINE_BYTES // array.itemsize):
            prefetch(array, np.int64(row) * width + column)


@inline
def row_pool(acc, weight, home, factor, weighted):
    """acc += factor · row, in float32."""
    for d in range(acc.shape[0]):
        value = load(weight, home, d)
        acc[d] = fma(factor, value, acc[d]) if weighted else acc[d] + value


@inline
def row_maximum(acc, weight, home, occurrence, is_first, winners, row, first):
    """acc = maximum of acc and the row; the first of equal values wins, a NaN wins over numbers."""
    for d in range(acc.shape[0]):
        value = load(weight, home, d)
        if is_first or value > acc[d] or (value != value and acc[d] == acc[d]):
            acc[d] = value
            if winners.shape[0] > 0:
                winners[row, first + d] = occurrence


@over_ranges
def bags_pool(lo, hi, weight, homes, offsets, batch, mode, column, weights, out, argmax):
    """All bags of samples lo … hi − 1, sample by sample: the outputs of one lie together, those of a feature a
    page apart. Moves D · itemsize bytes an occurrence, at random, and as many a bag, in order. `argmax` comes as −1."""
    width = row_width(weight)
    weighted = weights.shape[0] > 0
    acc = np.empty(width, np.float32)
    ahead = max(1, BAGS_AHEAD // mode.shape[0])
    for b in range(lo, hi):
        for feature in range(mode.shape[0]):
            bag = feature * batch + b
            start = offsets[bag]
            stop = offsets[bag + 1]
            first = column[feature]
            kind = mode[feature]
            if b + ahead < batch:  # a later bag of the same feature: some bags' worth of work ahead
                later = offsets[bag + ahead]
                if later < homes.shape[0]:
                    row_prefetch(weight, homes[later])
            if stop - start == 1 and not weighted and kind != MAX and homes[start] >= 0:
                home = homes[start]
                for d in range(width):
                    weight_copy(out, b, first + d, weight, home, d)
                continue
            for d in range(width):
                acc[d] = np.float32(0.0)
            count = 0
            for i in range(start, stop):
                if i + IDS_AHEAD < homes.shape[0]:  # also those of the next bags
                    row_prefetch(weight, homes[i + IDS_AHEAD])
                home = homes[i]
                if home < 0:
                    continue
                if kind == MAX:
                    row_maximum(acc, weight, home, i, count == 0, argmax, b, first)
                elif weighted:
                    row_pool(acc, weight, home, weights[i], True)
                else:
                    row_pool(acc, weight, home, np.float32(1.0), False)
                count += 1
            if kind == MEAN and count > 1:
                divisor = np.float32(count)
                for d in range(width):
                    acc[d] /= divisor
            for d in range(width):
                store(out, b, first + d, acc[d])


@jit
def bags_mean_scale(homes, offsets, batch, mode, scale):
    for bag in range(offsets.shape[0] - 1):
        count = 0
        if mode[bag // batch] == MEAN:
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
