"""CPU twin of the fused backward and update. A recipe's kernel is this loop around its row update, compiled as one."""

from __future__ import annotations

import functools
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tieredemb.config import OptimizerConfig
from tieredemb.kernels import twin
from tieredemb.kernels.constants import CHUNK, DECAY_LOG, DRAW_CATCH_UP, DRAW_LIMIT, DRAW_UPDATE, MAX
from tieredemb.kernels.cpu import (
    borrowed,
    fma,
    inline,
    is_direct,
    is_float,
    keep,
    load,
    prefetch,
    row_load,
    row_width,
    store,
)
from tieredemb.kernels.parallel_cpu import Pass, even_bounds, over_ranges
from tieredemb.kernels.rounding_cpu import NEAREST, OF_TABLES, is_nearest, row_put
from tieredemb.kernels.segments_cpu import Segments
from tieredemb.lookup.bag_pool_cpu import row_prefetch
from tieredemb.lookup.embedding_bag_cpu import NO_ARGMAX, NO_WEIGHTS
from tieredemb.lookup.optimizer import Hyperparameters, hyperparameters

if TYPE_CHECKING:
    from tieredemb.lookup.bags import KeySpace
    from tieredemb.lookup.history import CopiedRows, History

    Array = np.ndarray[Any, Any]

UPDATE_GRAIN = 16384  # gradient elements a thread is worth
AHEAD = 4  # segments whose rows are requested early
CLOCK_AHEAD = 16  # rows whose last step is prefetched: it tells whether the rest of the row is needed
F = np.float32


@dataclass(frozen=True)
class Gradient:
    """The upstream gradient of a batch and how occurrences share in it.

    `grad`: float32 (B, ΣD) · `sample`, `feature`: int32 (N,), row of `grad` and feature of each occurrence · `scale`:
    float32 (N,) or empty for ones · `argmax`: int32 (B, ΣD), the winning occurrence of each maximum, or empty.
    """

    grad: Array
    sample: Array
    feature: Array
    scale: Array
    argmax: Array


@functools.cache
def _kernels(recipe: type[OptimizerConfig]) -> Any:
    return twin(recipe.__module__, torch.device("cpu"))


class CountedPass(Pass):
    """A pass of a dense optimizer, which counts the steps it has replayed."""

    def __init__(self, kernel: Any, bounds: list[int], *args: Any) -> None:
        self._replayed = np.zeros(max(1, bounds[-1]), np.int64)  # of each range, where it begins
        super().__init__(kernel, bounds, *args, self._replayed)

    @property
    def replayed(self) -> int:
        return int(self._replayed.sum())

    def replayed_by(self, starts: Array) -> list[int]:
        """The same of parts that begin at `starts`, int64 (T,), where ranges do, too."""
        sums = np.concatenate([[0], np.cumsum(self._replayed)])
        found: list[int] = np.diff(np.append(sums[starts], sums[-1])).tolist()
        return found


def walked(homes: Array, segments: Segments, gradient: Gradient, space: KeySpace) -> tuple[Any, ...]:
    """What `segments_walk` is given of a batch, whose segments have their rows at `homes`, int32 (U,)."""
    return (
        homes,
        segments.starts,
        segments.order,
        space.mode,
        space.column,
        space.is_shared,
        gradient.grad,
        gradient.sample,
        gradient.feature,
        gradient.scale,
        gradient.argmax,
    )


def update(
    hot: Any,
    segments: Segments,
    gradient: Gradient,
    space: KeySpace,
    hyper: Hyperparameters,
    history: History | None = None,
    rounding: Any = NEAREST,
) -> Pass:
    """A pass whose `run` takes one optimizer step of the rows of `segments` in `hot` (`weight`, `state`, `dirty`), and
    marks them dirty. A segment without occurrences changes nothing. `history`: of a dense optimizer · `rounding`: see
    rounding_cpu.py, with the steps that are taken now."""
    batch = walked(segments.homes, segments, gradient, space)
    rows = (hot.weight, hot.state.view(F), hot.dirty, rounding)
    rate = hyper.rate[space.table] if space.is_shared else hyper.rate
    args = (batch, rows, rate, tuple(map(F, hyper.numbers)), F(hyper.scale))
    occurrences = len(segments.order)
    parts = len(even_bounds(occurrences * space.width, UPDATE_GRAIN)) - 1
    cuts = np.searchsorted(segments.starts, occurrences * np.arange(1, parts) // parts)
    bounds = [0, *cuts.tolist(), len(segments.homes)]
    if history is None:
        return Pass(_kernels(hyper.recipe).segments_update, bounds, *args)
    dense = (hot.state, history.past(), hyper.step, rounding)
    return CountedPass(_kernels(hyper.recipe).dense_update, bounds, *args, dense)


def catch_up(
    hot: Any,
    slots: Array,
    history: History,
    rounding: Any = NEAREST,
    *,
    until: int | None = None,
    starts: Array | None = None,
) -> CountedPass:
    """A pass whose `run` brings the rows in `slots` (int32 (U,), distinct) of `hot` to the last step of `history`, or
    to the step `until`, and marks changed rows dirty. `starts`: where parts begin that are counted separately."""
    until = history.steps if until is None else until
    dense = (hot.state, history.past(until), until, rounding)
    kernel, bounds = _kernels(history.recipe).rows_catch_up, even_bounds(len(slots), 512)
    is_small = len(bounds) == 2
    if starts is not None:
        bounds = sorted({*bounds, *starts.tolist()})
    made = CountedPass(kernel, bounds, slots, hot.weight, hot.state.view(F), hot.dirty, dense)
    made.is_small = is_small
    return made


def put_back(hot: Any, slots: Array, rows: CopiedRows) -> Pass:
    """A pass whose `run` writes marked copies of the rows in `slots` (int32 (U,), distinct) of `hot` back to these
    slots, and marks them dirty."""
    weights, states = (array.view(np.uint8) for array in (hot.weight, hot.state))
    copies = rows.weight.view(np.uint8), rows.state.view(np.uint8), rows.dirty
    return Pass(rows_put_back, even_bounds(len(slots), 4096), slots, copies, weights, states, hot.dirty)


def update_calls(
    hot: Any, space: KeySpace, optimizer: OptimizerConfig, history: History | None, rounding: Any
) -> list[tuple[Any, tuple[Any, ...]]]:
    """The kernels by which rows of `hot` will be updated, in the order of their use, each with arguments of the types
    of its calls, to be compiled."""
    none = np.empty(0, np.int32)
    segments = Segments(none, np.zeros(1, np.int64), none)
    gradient = Gradient(np.empty((0, space.width), F), none, none, NO_WEIGHTS, NO_ARGMAX)
    hyper = hyperparameters(optimizer, asdict(optimizer), np.ones(len(space), np.int64), 1.0)
    updated = update(hot, segments, gradient, space, hyper, history, rounding)
    if history is None or hyper.terms is None:
        return [updated.call]
    return [catch_up(hot, none, history, rounding).call, updated.call, history.append_call(hyper.terms)]


def limit_norms(hot: Any, slots: Array, max_norm: float, norm_type: float, rounding: Any = NEAREST) -> Pass:
    """Its `run` scales every row in `slots` (int32 (U,), distinct) whose norm exceeds `max_norm` down to it, as
    `torch.embedding_renorm_` does, and marks it dirty."""
    args = slots, hot.weight, hot.dirty, max_norm, norm_type, rounding
    return Pass(rows_limit_norm, even_bounds(len(slots), 512), *args)


@inline
def occurrences_add(acc, order, lo, hi, grad, sample, features, column, is_shared, scale, argmax, first, is_max):
    """acc += the gradients of occurrences order[lo:hi], in that order. `first`: the column where they begin, unless the
    table `is_shared` by features: then each occurrence has its own."""
    width = acc.shape[0]
    for k in range(lo, hi):
        i = order[k]
        row = sample[i]
        if is_shared:
            first = column[features[i]]
        if k + 8 < order.shape[0]:
            ahead = np.int64(sample[order[k + 8]]) * grad.shape[1]
            ahead += column[features[order[k + 8]]] if is_shared else first
            for d in range(0, width, 16):
                prefetch(grad, ahead + d)
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
def stays(weight, row, state, home, none, values, dense, row_catch_up, decayed):
    """`row_make_current` of an optimizer that is not dense."""
    return 0


@inline
def factor_between(logs, which, start, stop):
    """The product of a step's factors over the steps after `start` until `stop`, float32."""
    return F(math.exp(logs[stop, which] - logs[start, which]))


@inline
def faded(value, factor):
    """`value`, of a row that missed steps, times the factors of all of them. Each step leaves an infinity infinite,
    and a product of many factors may have become a zero."""
    return value * factor if abs(value) < F(math.inf) else value


@inline
def square_mean(v, gradient, share):
    """The running mean of squares `v` with `share` of the square of `gradient` in it. It ends where torch's does: that
    multiplies the gradient by its share first, and an infinite mean stays infinite."""
    found = fma(fma(gradient, gradient, -v), share, v)
    return found if found < F(math.inf) else (F(1.0) - share) * v + share * gradient * gradient


@inline
def is_still(state, home, words):
    """Whether the first `words` of a row's state are zeros."""
    d = 0
    while d < words and load(state, home, d) == F(0.0):
        d += 1
    return d == words


@inline
def row_miss(weight, row, state, home, none, past, start, stop, row_catch_up, decayed):
    """Takes the steps that a row missed: one by one until the last of them whose decay is part of the gradient, and
    then the rest in closed form, so that a row that was kept at that last step gets the same bits. If the state is
    zeros, which a step without a gradient does not change, the rest only decays the weights."""
    logs, coupled = past[6], past[7]
    replayed = 0
    if coupled[stop] != coupled[start]:
        until = stop
        while coupled[until - 1] == coupled[stop]:
            until -= 1
        replayed = row_catch_up(weight, row, state, home, none, past, start, until)
        start = until
        if start == stop:
            return replayed
    if decayed is None:
        return replayed + row_catch_up(weight, row, state, home, none, past, start, stop)
    if not is_still(state, home, state.shape[1] - 1):
        return replayed + row_catch_up(weight, row, state, home, none, past, start, stop)
    decay = factor_between(logs, DECAY_LOG, start, stop)
    if decay != F(1.0):
        for d in range(none.shape[0]):
            store(weight, row, d, decayed(load(weight, row, d), decay))
    return replayed


@inline
def row_make_current(weight, row, state, home, none, values, dense, row_catch_up, decayed):
    """Brings a row of a dense recipe to the current step of its table, and writes the step that it is at then.
    `dense`: the states as uint32, whose last word is that step · what kernels are given of a
    history (`History.past`) · the step to note · how weights are rounded. `row_catch_up(weight, row, state, home, none,
    past, start, stop)` is the recipe's: it takes the steps after `start` until `stop`, counted from the history's base,
    without a gradient (`none`, float32 (D,), zeros), and returns how many of them it has replayed. `decayed(weight,
    factor)` is a weight after steps that do nothing but decay it, by `factor` in all, which is not 1: `faded`, or what
    the recipe's formula makes of an infinity; None where a step changes a state of zeros. `values`: float32 (1, D),
    overwritten."""
    clock, past, noted, rounding = dense
    now, base = past[0], past[1]
    place = clock.shape[1] - 1
    last = max(np.int64(clock[home, place]), base)
    clock[home, place] = np.uint32(noted)
    if last >= now:
        return 0
    if is_float(weight):
        return row_miss(weight, row, state, home, none, past, last - base, now - base, row_catch_up, decayed)
    row_load(weight, row, values)  # and rounded once, whatever the number of steps
    replayed = row_miss(values, np.int32(0), state, home, none, past, last - base, now - base, row_catch_up, decayed)
    row_put(weight, row, values, rounding, home, DRAW_CATCH_UP, now)
    return replayed


@inline
def rows_walk(lo, hi, slots, weight, state, dirty, dense, row_catch_up, decayed):
    """Brings the rows in `slots` to the current step: what a dense recipe's kernel does in a forward; see
    `row_make_current`. Returns how many steps it has replayed."""
    clock, past, _, _ = dense
    now, place = np.int64(past[0]), clock.shape[1] - 1
    scratch = np.zeros((2, row_width(weight)), np.float32)
    values, none = borrowed((scratch[:1], scratch[1]))
    replayed = 0
    for i in range(lo, hi):
        s = slots[i]
        if i + CLOCK_AHEAD < hi:
            prefetch(clock, np.int64(slots[i + CLOCK_AHEAD]) * clock.shape[1] + place)
        if i + AHEAD < hi and clock[slots[i + AHEAD], place] < now:
            row_prefetch(weight, slots[i + AHEAD])
            row_prefetch(state, slots[i + AHEAD])
        if clock[s, place] >= now:
            continue
        replayed += row_make_current(weight, s, state, s, none, values, dense, row_catch_up, decayed)
        dirty[s] = 1
    keep(scratch)
    return replayed


@inline
def segments_walk(
    lo, hi, batch, rows, rate, numbers, grad_scale, row_update, make_current, dense, row_catch_up, decayed
):
    """Segments lo … hi − 1 of a batch: what a recipe's kernel does. Moves 4 D bytes an occurrence, and row and state of
    a segment once each way. Returns how many steps were replayed.

    `row_update(weight, row, state, home, g, rate, numbers)` is the recipe's: one optimizer step of the weights in row
    `row` and the state in row `home`, given the summed gradient `g`, float32 (D,). `rate`: float32, of its feature ·
    `numbers`: tuple of float32, as the config derives them. It rounds weights once. `make_current` is `stays`, or of a
    dense recipe `row_make_current`, which is given `dense`, `row_catch_up` and `decayed`.
    """
    homes, starts, order, mode, column, is_shared, grad, sample, features, scale, argmax = batch
    weight, state, dirty, rounding = rows
    width = row_width(weight)
    scratch = np.zeros((4, width), np.float32)
    values, acc, part, none = borrowed((scratch[:1], scratch[1], scratch[2], scratch[3]))
    replayed = 0
    for u in range(lo, hi):
        if u + AHEAD < hi:
            row_prefetch(weight, homes[u + AHEAD])
            if state.shape[1] > 0:
                row_prefetch(state, homes[u + AHEAD])
        start = starts[u]
        stop = starts[u + 1]
        if start == stop:
            continue
        feature = features[order[start]]  # any feature of the row's table, which has one mode and one rate
        first = column[feature]
        is_max = mode[feature] == MAX
        for chunk in range(start, stop, CHUNK):
            for d in range(width):
                part[d] = F(0.0)
            end = min(chunk + CHUNK, stop)
            occurrences_add(
                part, order, chunk, end, grad, sample, features, column, is_shared, scale, argmax, first, is_max
            )
            for d in range(width):
                acc[d] = part[d] if chunk == start else acc[d] + part[d]
        if grad_scale != F(1.0):
            for d in range(width):
                acc[d] *= grad_scale
        replayed += make_current(weight, homes[u], state, homes[u], none, values, dense, row_catch_up, decayed)
        if is_direct(weight) and is_nearest(rounding):
            row_update(weight, homes[u], state, homes[u], acc, rate[feature], numbers)
        else:
            row_load(weight, homes[u], values)
            row_update(values, np.int32(0), state, homes[u], acc, rate[feature], numbers)
            row_put(weight, homes[u], values, rounding, homes[u], DRAW_UPDATE, OF_TABLES)
        dirty[homes[u]] = 1
    keep(scratch)
    return replayed


@inline
def dense_walk(lo, hi, batch, rows, rate, numbers, scale, dense, row_update, row_catch_up, decayed):
    """The same of a dense recipe."""
    return segments_walk(
        lo, hi, batch, rows, rate, numbers, scale, row_update, row_make_current, dense, row_catch_up, decayed
    )


@over_ranges
def rows_put_back(lo, hi, slots, copies, weight, state, dirty):
    """Marked rows lo … hi − 1. Moves their bytes once each way."""
    from_weight, from_state, marked = copies
    for i in range(lo, hi):
        if marked[i]:
            s = slots[i]
            for d in range(weight.shape[1]):
                weight[s, d] = from_weight[i, d]
            for d in range(state.shape[1]):
                state[s, d] = from_state[i, d]
            dirty[s] = 1


@inline
def row_scale(weight, row, width, factor):
    for d in range(width):
        store(weight, row, d, load(weight, row, d) * factor)


@over_ranges
def rows_limit_norm(lo, hi, slots, weight, dirty, max_norm, norm_type, rounding):
    width = row_width(weight)
    is_each = is_direct(weight) and is_nearest(rounding)
    values = np.empty((1, 0 if is_each else width), np.float32)
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
            if is_direct(weight) and is_nearest(rounding):
                row_scale(weight, s, width, factor)
            else:
                row_load(weight, s, values)
                row_scale(values, np.int32(0), width, factor)
                row_put(weight, s, values, rounding, s, DRAW_LIMIT, OF_TABLES)
            dirty[s] = 1
