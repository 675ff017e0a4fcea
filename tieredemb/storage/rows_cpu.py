"""CPU kernels that move rows between a cold storage and the slots of a hot cache.

A row is about 300 random bytes on either side, so most time is spent in cache misses: each kernel prefetches
rows a few iterations ahead. Weights move as their carrier's bits, so moving never rounds. A kernel moves 2
· (D · itemsize + 4 · (S + 1)) bytes a row.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tieredemb.kernels.cpu import inline, prefetch
from tieredemb.kernels.parallel_cpu import over_ranges

_AHEAD = 6  # rows in flight: 4–8 measured best (20 % over none where the hot side is random), 16 and more lose
_LINE_BYTES = 64


@inline
def _prefetch_row(array, row):
    """Asks for every cache line of `array[row]`; `array` is C-contiguous."""
    width = array.shape[1]
    step = max(1, _LINE_BYTES // array.itemsize)
    first = row * width
    for column in range(0, width, step):
        prefetch(array, first + column)


@inline
def _copy_row(source, target, width):
    for column in range(width):
        target[column] = source[column]


@over_ranges
def rows_read(
    lo: int,
    hi: int,
    keys: Any,
    slots: Any,
    cold_weight: Any,
    cold_state: Any,
    hot_weight: Any,
    hot_state: Any,
    hot_score: Any,
    untouched: Any,
) -> None:
    """Fills slot `slots[i]` with cold row `keys[i]` for i in lo … hi - 1; the slots are distinct.

    `keys`: int64 (M,); `slots`: integers (M,); `cold_state`: uint32 (rows, S + 1), its last word the score;
    `untouched`: bool (M,), set where the score is zero: such a row has no content yet and its weights stay
    unread.
    """
    width = cold_weight.shape[1]
    state_width = cold_state.shape[1] - 1
    for i in range(lo, hi):
        ahead = i + _AHEAD
        if ahead < hi:
            _prefetch_row(cold_weight, keys[ahead])
            _prefetch_row(cold_state, keys[ahead])
            _prefetch_row(hot_weight, slots[ahead])
        key = keys[i]
        slot = slots[i]
        score = cold_state[key, state_width]
        hot_score[slot] = score
        untouched[i] = score == 0
        if score != 0:
            _copy_row(cold_weight[key], hot_weight[slot], width)
            _copy_row(cold_state[key], hot_state[slot], state_width)


@over_ranges
def rows_copy(
    lo: int,
    hi: int,
    slots: Any,
    hot_weight: Any,
    hot_state: Any,
    hot_score: Any,
    weight: Any,
    state: Any,
    score: Any,
    last: Any,
) -> None:
    """Copies slot `slots[i]` to row i of `weight`, `state` and `score` for i in lo … hi - 1, unless it is negative.
    `weight` and `state` may have fewer columns than the slots · `last`: uint32 (K,), takes the last word of the state,
    or is empty."""
    width, state_width = weight.shape[1], state.shape[1]
    end = hot_state.shape[1] - 1
    for i in range(lo, hi):
        ahead = i + _AHEAD
        if ahead < hi and slots[ahead] >= 0:
            if width > 0:
                _prefetch_row(hot_weight, slots[ahead])
            if state_width > 0:
                _prefetch_row(hot_state, slots[ahead])
        slot = slots[i]
        if slot >= 0:
            _copy_row(hot_weight[slot], weight[i], width)
            _copy_row(hot_state[slot], state[i], state_width)
            score[i] = hot_score[slot]
            if last.shape[0] > 0:
                last[i] = hot_state[slot, end]


@over_ranges
def rows_write(
    lo: int,
    hi: int,
    keys: Any,
    slots: Any,
    dirty: Any,
    cold_weight: Any,
    cold_state: Any,
    hot_weight: Any,
    hot_state: Any,
    hot_score: Any,
) -> None:
    """Writes slot `slots[i]` back to cold row `keys[i]` for i in lo … hi - 1; the keys are distinct.

    Of a slot that is not dirty only the score is written. The score is written last: a row whose first write is
    interrupted stays untouched.
    """
    width = cold_weight.shape[1]
    state_width = cold_state.shape[1] - 1
    for i in range(lo, hi):
        ahead = i + _AHEAD
        if ahead < hi:
            _prefetch_row(cold_state, keys[ahead])
            if dirty[slots[ahead]]:
                _prefetch_row(cold_weight, keys[ahead])
                _prefetch_row(hot_weight, slots[ahead])
        key = keys[i]
        slot = slots[i]
        if dirty[slot]:
            _copy_row(hot_weight[slot], cold_weight[key], width)
            _copy_row(hot_state[slot], cold_state[key], state_width)
        cold_state[key, state_width] = hot_score[slot]


@over_ranges
def rows_begin(lo: int, hi: int, state: Any, begun: Any, score: Any) -> None:
    """Gives each of the rows lo … hi - 1 whose score is zero the words `begun` (uint32 (S,)) and the `score`.

    The words of a new row mostly are what they should be: reading them first spares writing them.
    """
    width = state.shape[1] - 1
    for row in range(lo, hi):
        if state[row, width] == 0:
            state[row, width] = score
            differ = np.uint32(0)
            for column in range(width):
                differ |= state[row, column] ^ begun[column]
            if differ != 0:
                _copy_row(begun, state[row], width)
