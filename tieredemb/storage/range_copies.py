"""Copies neighbouring rows on all cores: a single core is slow to touch new memory, and to move old."""

from __future__ import annotations

from typing import Any

import numpy as np

from tieredemb.kernels.chunks import each

_CHUNK_BYTES = 4 << 20  # a thread takes about a millisecond for them, and some tenths of one to start


def copy_rows(source: np.ndarray[Any, Any], target: np.ndarray[Any, Any]) -> None:
    """`target[:] = source`, of arrays (K, ·) of one type."""
    if target.nbytes < 2 * _CHUNK_BYTES:
        target[:] = source
        return
    rows = max(1, _CHUNK_BYTES * len(target) // target.nbytes)

    def copy(first: int, _: int) -> int:
        target[first : first + rows] = source[first : first + rows]
        return 0

    each(copy, range(0, len(target), rows))


def begin_rows(state: np.ndarray[Any, Any], begun: np.ndarray[Any, Any], score: int) -> None:
    """Gives the rows of `state`, uint32 (K, S + 1), that were never written the words `begun`, uint32 (S,), and the
    `score`."""
    from tieredemb.kernels.parallel_cpu import even_bounds, parallel_for  # not before it is needed: numba's import
    from tieredemb.storage.rows_cpu import rows_begin

    grain = max(1, _CHUNK_BYTES // (state.shape[1] * state.itemsize))
    parallel_for(rows_begin, even_bounds(len(state), grain), state, begun, np.uint32(score))
