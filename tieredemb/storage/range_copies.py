"""Rows that lie next to each other, copied by all cores: one alone touches new memory, and moves old, slowly."""

from __future__ import annotations

from typing import Any

import numpy as np

_BYTES_PER_THREAD = 1 << 20  # fewer are copied sooner than a second thread has started


def copy_rows(source: np.ndarray[Any, Any], target: np.ndarray[Any, Any]) -> None:
    """`target[:] = source`, of arrays (K, ·) of one type."""
    from tieredemb.kernels.cpu import even_bounds, parallel_for

    row_bytes = target.nbytes // max(1, len(target))
    if row_bytes:
        parallel_for(_copy, even_bounds(len(target), -(-_BYTES_PER_THREAD // row_bytes)), source, target)


def _copy(lo: int, hi: int, source: np.ndarray[Any, Any], target: np.ndarray[Any, Any]) -> None:
    target[lo:hi] = source[lo:hi]


def begin_rows(state: np.ndarray[Any, Any], begun: np.ndarray[Any, Any], score: int) -> None:
    """Gives the rows of `state`, uint32 (K, S + 1), that were never written the words `begun`, uint32 (S,), and the
    `score`."""
    from tieredemb.kernels.cpu import even_bounds, parallel_for
    from tieredemb.storage.rows_cpu import rows_begin

    grain = -(-_BYTES_PER_THREAD // (state.shape[1] * state.itemsize))
    parallel_for(rows_begin, even_bounds(len(state), grain), state, begun, np.uint32(score))
