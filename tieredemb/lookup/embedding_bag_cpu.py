"""CPU twin of the pooled lookup."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tieredemb.kernels.cpu import even_bounds, fma, inline, jit, load, parallel_for, prefetch, store
from tieredemb.lookup.bags import MAX, MEAN, Bags, KeySpace

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

POOL_GRAIN = 65536  # row elements a thread is worth
AHEAD = 8  # rows requested early; a core has 10–16 miss buffers
LINE_BYTES = 64


def _bounds(bags: Bags, width: int) -> list[int]:
    """Ranges of bags with about the same number of rows each."""
    rows = len(bags.keys)
    parts = len(even_bounds((rows + len(bags.offsets)) * width, POOL_GRAIN)) - 1
    work = bags.offsets[:-1] + np.arange(len(bags.offsets) - 1)
    total = rows + len(bags.offsets) - 1
    cuts = np.searchsorted(work, [total * part // parts for part in range(1, parts)])
    return [0, *(int(cut) for cut in cuts), len(bags.offsets) - 1]


def pool(weight: Array, homes: Array, bags: Bags, space: KeySpace, weights: Array, out: Array, argmax: Array) -> None:
    args = (weight, homes, bags.offsets, bags.batch, space.mode, space.column, weights, out, argmax)
    parallel_for(bags_pool, _bounds(bags, space.width), *args)


def mean_scale(bags: Bags, space: KeySpace, homes: Array) -> Array:
    scale = np.empty(len(homes), np.float32)
    bags_mean_scale(homes, bags.offsets, bags.batch, space.mode, scale)
    return scale


def weights_gradient(weight: Array, homes: Array, bags: Bags, space: KeySpace, grad: Array) -> Array:
    gradient = np.empty(len(homes), np.float32)
    args = (weight, homes, bags.offsets, bags.batch, space.column, grad, gradient)
    parallel_for(bags_weights_gradient, _bounds(bags, space.width), *args)
    return gradient


@inline
def row_prefetch(array, row):
    """Asks for all lines of `array[row]` unless the row is negative (padding)."""
    if row >= 0:
        width = array.shape[1]
        for column in range(0, width, LINE_BYTES // array.itemsize):
            prefetch(array, np.int64(row) * width + column)


@jit
def bags_pool(lo, hi, weight, homes, offsets, batch, mode, column, weights, out, argmax):
    """Bags lo … hi − 1. Moves D · itemsize bytes an occurrence, at random, and as many a bag, in order."""
    width = weight.shape[1]
    weighted = weights.shape[0] > 0
    acc = np.empty(width, np.float32)
    for bag in range(lo, hi):
        table = bag // batch
        b = bag - table * batch
        first = column[table]
        kind = mode[table]
        for d in range(width):
            acc[d] = np.float32(0.0)
        count = 0
        for i in range(offsets[bag], offsets[bag + 1]):
            if i + AHEAD < homes.shape[0]:
                row_prefetch(weight, homes[i + AHEAD])
            home = homes[i]
            if home < 0:
                continue
            if kind == MAX:
                for d in range(width):
                    value = load(weight, home, d)
                    if count == 0 or value > acc[d] or (value != value and acc[d] == acc[d]):
                        acc[d] = value
                        if argmax.shape[0] > 0:
                            argmax[b, first + d] = i
            elif weighted:
                for d in range(width):
                    acc[d] = fma(weights[i], load(weight, home, d), acc[d])
            else:
                for d in range(width):
                    acc[d] += load(weight, home, d)
            count += 1
        if kind == MEAN and count > 1:
            divisor = np.float32(count)
            for d in range(width):
                acc[d] /= divisor
        if kind == MAX and count == 0 and argmax.shape[0] > 0:
            for d in range(width):
                argmax[b, first + d] = -1
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


@jit
def bags_weights_gradient(lo, hi, weight, homes, offsets, batch, column, grad, gradient):
    width = weight.shape[1]
    for bag in range(lo, hi):
        table = bag // batch
        b = bag - table * batch
        first = column[table]
        for i in range(offsets[bag], offsets[bag + 1]):
            total = np.float32(0.0)
            if homes[i] >= 0:
                for d in range(width):
                    total = fma(load(weight, homes[i], d), grad[b, first + d], total)
            gradient[i] = total
