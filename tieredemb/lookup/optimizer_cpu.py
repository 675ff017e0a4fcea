"""CPU twin of the fused backward and update. A recipe's kernel is this loop around its row update, compiled as one."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tieredemb.config import OptimizerConfig
from tieredemb.kernels import twin
from tieredemb.kernels.constants import CHUNK, MAX
from tieredemb.kernels.cpu import (
    Pass,
    even_bounds,
    fma,
    inline,
    is_direct,
    jit,
    load,
    prefetch,
    row_load,
    row_store,
    row_width,
    store,
)
from tieredemb.lookup.embedding_bag_cpu import row_prefetch
from tieredemb.lookup.optimizer import Hyperparameters

if TYPE_CHECKING:
    from tieredemb.kernels.segments_cpu import Segments
    from tieredemb.lookup.bags import KeySpace

    Array = np.ndarray[Any, Any]

UPDATE_GRAIN = 32768  # gradient elements a thread is worth
AHEAD = 4  # segments whose rows are requested early
F = np.float32


@dataclass(frozen=True)
class Gradient:
    """The upstream gradient of a batch and how occurrences share in it.

    `grad`: float32 (B, ΣD) · `sample`, `table`: int32 (N,), row of `grad` and table of each occurrence · `scale`:
    float32 (N,) or empty for ones · `argmax`: int32 (B, ΣD), the winning occurrence of each maximum, or empty.
    """

    grad: Array
    sample: Array
    table: Array
    scale: Array
    argmax: Array


@functools.cache
def _kernel(recipe: type[OptimizerConfig]) -> Any:
    return twin(recipe.__module__, torch.device("cpu")).segments_update


def update(hot: Any, segments: Segments, gradient: Gradient, space: KeySpace, hyper: Hyperparameters) -> Pass:
    """One optimizer step of the rows of `segments` in `hot` (`weight`, `state`, `dirty`), which its `run` applies and
    marks dirty. A segment without occurrences changes nothing."""
    batch = (
        segments.homes,
        segments.starts,
        segments.order,
        space.mode,
        space.column,
        gradient.grad,
        gradient.sample,
        gradient.table,
        gradient.scale,
        gradient.argmax,
    )
    rows = (hot.weight, hot.state.view(F), hot.dirty)
    args = (batch, rows, hyper.rate, tuple(map(F, hyper.numbers)), F(hyper.scale))
    occurrences = len(segments.order)
    parts = len(even_bounds(occurrences * space.width, UPDATE_GRAIN)) - 1
    cuts = np.searchsorted(segments.starts, occurrences * np.arange(1, parts) // parts)
    return Pass(_kernel(hyper.recipe), [0, *cuts.tolist(), len(segments.homes)], *args)


def limit_norms(hot: Any, slots: Array, max_norm: float, norm_type: float) -> Pass:
    """Its `run` scales every row in `slots` (int32 (U,), distinct) whose norm exceeds `max_norm` down to it, as
    `torch.embedding_renorm_` does, and marks it dirty."""
    return Pass(rows_limit_norm, even_bounds(len(slots), 512), slots, hot.weight, hot.dirty, max_norm, norm_type)


@inline
def occurrences_add(acc, order, lo, hi, grad, sample, scale, argmax, first, is_max):
    """acc += the gradients of occurrences order[lo:hi], in that order."""
    width = acc.shape[0]
    for k in range(lo, hi):
        i = order[k]
        row = sample[i]
        if k + 8 < order.shape[0]:
            ahead = np.int64(sample[order[k + 8]]) * grad.shape[1] + first
            for column in range(0, width, 16):
                prefetch(grad, ahead + column)
        if is_max:
            for d in range(width):
                if argmax[row, first + d] == i:
                    acc[d] += load(grad, row, first + d)
        elif scale.shape[0] > 0:
            factor = scale[i]
            for d in range(width):
                acc[d] = fma(load(grad, row, first + d), factor, acc[d])
        else:
            for d in range(width):
                acc[d] += load(grad, row, first + d)


@inline
def segments_walk(lo, hi, batch, rows, rate, numbers, grad_scale, row_update, done):
    """Segments lo … hi − 1 of a batch: what a recipe's kernel does. Moves 4 D bytes an occurrence, and row and state of
    a segment once each way.

    `row_update(weight, row, state, home, g, rate, numbers)` is the recipe's: one optimizer step of the weights in row
    `row` and the state in row `home`, given the summed gradient `g`, float32 (D,). `rate`: float32, of its table ·
    `numbers`: tuple of float32, as the config derives them. It rounds weights once.
    """
    homes, starts, order, mode, column, grad, sample, tables, scale, argmax = batch
    weight, state, dirty = rows
    width = row_width(weight)
    values = np.empty((1, 0 if is_direct(weight) else width), np.float32)
    acc = np.empty(width, np.float32)
    part = np.empty(width, np.float32)
    for u in range(lo, hi):
        if u + AHEAD < hi:
            row_prefetch(weight, homes[u + AHEAD])
            if state.shape[1] > 0:
                row_prefetch(state, homes[u + AHEAD])
        start = starts[u]
        stop = starts[u + 1]
        if start == stop:
            continue
        table = tables[order[start]]
        first = column[table]
        is_max = mode[table] == MAX
        for chunk in range(start, stop, CHUNK):
            for d in range(width):
                part[d] = F(0.0)
            end = min(chunk + CHUNK, stop)
            occurrences_add(part, order, chunk, end, grad, sample, scale, argmax, first, is_max)
            for d in range(width):
                acc[d] = part[d] if chunk == start else acc[d] + part[d]
        if grad_scale != F(1.0):
            for d in range(width):
                acc[d] *= grad_scale
        if is_direct(weight):
            row_update(weight, homes[u], state, homes[u], acc, rate[table], numbers)
        else:
            row_load(weight, homes[u], values)
            row_update(values, np.int32(0), state, homes[u], acc, rate[table], numbers)
            row_store(weight, homes[u], values)
        dirty[homes[u]] = 1
    done[lo] = 1


@inline
def row_scale(weight, row, width, factor):
    for d in range(width):
        store(weight, row, d, load(weight, row, d) * factor)


@jit
def rows_limit_norm(lo, hi, slots, weight, dirty, max_norm, norm_type, done):
    width = row_width(weight)
    values = np.empty((1, 0 if is_direct(weight) else width), np.float32)
    for i in range(lo, hi):
        s = slots[i]
        norm = 0.0
        for d in range(width):
            size = abs(np.float64(load(weight, s, d)))
            if norm_type == 2.0:
                norm += size * size
            elif norm_type == math.inf:
                norm = max(norm, size)
            else:
                norm += size**norm_type
        if norm_type == 2.0:
            norm = math.sqrt(norm)
        elif norm_type != math.inf:
            norm = norm ** (1.0 / norm_type)
        if norm > max_norm:
            factor = F(max_norm / (norm + 1e-7))
            if is_direct(weight):
                row_scale(weight, s, width, factor)
            else:
                row_load(weight, s, values)
                row_scale(values, np.int32(0), width, factor)
                row_store(weight, s, values)
            dirty[s] = 1
    done[lo] = 1
