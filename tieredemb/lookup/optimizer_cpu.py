"""CPU twin of the fused backward and update."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from tieredemb.kernels.constants import CHUNK, MAX
from tieredemb.kernels.cpu import Pass, even_bounds, fma, inline, jit, load, prefetch, store
from tieredemb.lookup.embedding_bag_cpu import row_prefetch
from tieredemb.lookup.optimizer import ADAGRAD, ADAM, ROW_WISE_ADAGRAD, SGD, Gradient, Hyperparameters

if TYPE_CHECKING:
    from tieredemb.kernels.segments_cpu import Segments
    from tieredemb.lookup.bags import KeySpace

    Array = np.ndarray[Any, Any]

UPDATE_GRAIN = 32768  # gradient elements a thread is worth
AHEAD = 4  # segments whose rows are requested early
F = np.float32


def update(hot: Any, segments: Segments, gradient: Gradient, space: KeySpace, numbers: Hyperparameters) -> Pass:
    parts = len(even_bounds(len(segments.order) * space.width, UPDATE_GRAIN)) - 1
    cuts = np.searchsorted(segments.starts, [len(segments.order) * part // parts for part in range(1, parts)])
    bounds = [0, *(int(cut) for cut in cuts), len(segments.homes)]
    hyper = np.array([numbers.eps, 1 - numbers.beta1, 1 - numbers.beta2, numbers.scale], np.float64).astype(F)
    return Pass(
        segments_update,
        bounds,
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
        hot.weight,
        hot.state.view(F),
        hot.dirty,
        numbers.kind,
        numbers.rate,
        hyper,
    )


def limit_norms(hot: Any, slots: Array, max_norm: float, norm_type: float) -> Pass:
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
def row_update(weight, state, home, g, kind, rate, hyper):
    """One optimizer step of the row at `home` with gradient `g` (float32 (D,)); weights are rounded once."""
    width = g.shape[0]
    eps = hyper[0]
    if kind == SGD:
        for d in range(width):
            store(weight, home, d, fma(-rate, g[d], load(weight, home, d)))
    elif kind == ADAGRAD:
        for d in range(width):
            total = fma(g[d], g[d], load(state, home, d))
            store(state, home, d, total)
            store(weight, home, d, fma(-rate, g[d] / (np.sqrt(total) + eps), load(weight, home, d)))
    elif kind == ROW_WISE_ADAGRAD:
        squares = F(0.0)
        for d in range(width):
            squares = fma(g[d], g[d], squares)
        total = state[home, 0] + squares / F(width)
        state[home, 0] = total
        step = rate / (np.sqrt(total) + eps)
        for d in range(width):
            store(weight, home, d, fma(-step, g[d], load(weight, home, d)))
    elif kind == ADAM:
        for d in range(width):
            m = load(state, home, d)
            v = load(state, home, width + d)
            m = fma(g[d] - m, hyper[1], m)
            v = fma(fma(g[d], g[d], -v), hyper[2], v)
            store(state, home, d, m)
            store(state, home, width + d, v)
            store(weight, home, d, fma(-rate, m / (np.sqrt(v) + eps), load(weight, home, d)))


@jit
def segments_update(
    lo, hi, homes, starts, order, mode, column, grad, sample, tables, scale, argmax, weight, state, dirty, kind, rate,
    hyper, done,
):  # fmt: skip
    """Segments lo … hi − 1. Moves 4 D bytes an occurrence, and row and state of a segment once each way."""
    width = weight.shape[1]
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
        if hyper[3] != F(1.0):
            for d in range(width):
                acc[d] *= hyper[3]
        row_update(weight, state, homes[u], acc, kind, rate[table], hyper)
        dirty[homes[u]] = 1
    done[lo] = 1


@jit
def rows_limit_norm(lo, hi, slots, weight, dirty, max_norm, norm_type, done):
    for i in range(lo, hi):
        s = slots[i]
        norm = 0.0
        for d in range(weight.shape[1]):
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
            for d in range(weight.shape[1]):
                store(weight, s, d, load(weight, s, d) * factor)
            dirty[s] = 1
    done[lo] = 1
