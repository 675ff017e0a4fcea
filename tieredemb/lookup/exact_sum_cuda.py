"""GPU twin of exact sums: launches alone."""

from __future__ import annotations

import torch

from tieredemb.kernels.compiler import blocks_for, kernel

FILE = "lookup/exact_sum.cu"
THREADS = 256
MOST_BLOCKS = 1056  # each of which adds up many numbers before it writes to memory


def add(sums: torch.Tensor, values: torch.Tensor, of: torch.Tensor) -> None:
    """See `exact_sum.add_exactly`."""
    n = values.shape[0]
    if n:
        kernel(FILE, "values_add")(blocks_for(n, THREADS, MOST_BLOCKS), THREADS, values, of, n, sums)


def round_to(sums: torch.Tensor, found: torch.Tensor) -> None:
    """See `exact_sum.rounded`."""
    n = sums.shape[0]
    kernel(FILE, "sums_round")(max(1, blocks_for(n, THREADS, MOST_BLOCKS)), THREADS, sums, n, found)
