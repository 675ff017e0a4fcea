"""Sums of float64 numbers whose bits depend on no order: of rows, of threads, or of the ranks that own the rows.

A sum is kept exactly, as a fixed-point number of all the bits that float64 spans, in digits of 32 bits. A digit is an
int64, so that carries may wait for 2^30 numbers, and sums of several ranks are added as integers. It is rounded once,
at the end. See Kulisch, "Computer Arithmetic and Validity" (2008).
"""

from __future__ import annotations

import torch

from tieredemb.kernels import twin
from tieredemb.kernels.constants import EXACT_WORDS


def new_sums(count: int, device: torch.device) -> torch.Tensor:
    """`count` sums of nothing, int64 (count, ·). Those of several ranks are added like any integers."""
    return torch.zeros((count, EXACT_WORDS), dtype=torch.int64, device=device)


def add_exactly(sums: torch.Tensor, values: torch.Tensor, of: torch.Tensor) -> None:
    """Adds `values`, float64 (N,), none negative, to the sums that `of` names, int64 (N,). Does not synchronise."""
    twin(__name__, sums.device).add(sums, values, of)


def rounded(sums: torch.Tensor) -> torch.Tensor:
    """The sums as float64 (count,). Does not synchronise."""
    found = torch.empty(sums.shape[0], dtype=torch.float64, device=sums.device)
    twin(__name__, sums.device).round_to(sums, found)
    return found
