# mypy: allow-untyped-defs, allow-untyped-calls
"""Rows as a whole from one encoding to another, on several threads."""

from __future__ import annotations

from typing import Any

import numpy as np

from tieredemb.kernels.cpu import load, row_store
from tieredemb.kernels.parallel_cpu import even_bounds, over_ranges, parallel_for
from tieredemb.kernels.row_format import RowFormat


@over_ranges
def _rows_decode(lo, hi, rows, values):
    for row in range(lo, hi):
        for d in range(values.shape[1]):
            values[row, d] = load(rows, row, d)


@over_ranges
def _rows_encode(lo, hi, values, rows):
    for row in range(lo, hi):
        row_store(rows, row, values[row : row + 1])


def rows_decode(rows: Any, values: Any) -> None:
    """Writes `rows`, as they are carried, to `values`, float32 (K, D)."""
    parallel_for(_rows_decode, even_bounds(len(rows), 1024), rows, values)


def rows_encode(values: Any, rows: Any) -> None:
    """Writes `values`, float32 (K, D), to `rows`, as they are carried."""
    parallel_for(_rows_encode, even_bounds(len(rows), 1024), values, rows)


def in_encoding(rows: Any, now: RowFormat, wanted: RowFormat) -> Any:
    """Rows (K, ·) as they are carried `now`, as `wanted` carries them: rounded to nearest where that is coarser."""
    if now.encoding == wanted.encoding:
        return rows
    values = np.empty((len(rows), now.width), np.float32)
    rows_decode(rows, values)
    found = np.empty((len(rows), wanted.columns), wanted.carrier)
    rows_encode(values, found)
    return found
