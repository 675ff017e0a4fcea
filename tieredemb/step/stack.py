"""Stacked outputs of one width: the outputs of bags, and below them the rows of single ids.

So one lookup, with one plan and one update, serves tables of both kinds. Each single id has a row of the output,
through which it gets its gradient; a lookup reads only the requested ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tieredemb.config import Mode


class Run(NamedTuple):
    """Neighbouring features whose bags are pooled alike. `rows`: first row and end, in the output, of the block of bags
    that they are part of, sample by sample · `of`: how many features the block has · `features`: the first of these in
    the block, and the end · `mode`: how they are pooled · `edges`: int64 (K + 1,), edges of the bags among all ids,
    feature by feature."""

    rows: tuple[int, int]
    of: int
    features: tuple[int, int]
    mode: Mode
    edges: torch.Tensor

    @property
    def samples(self) -> int:
        """How many bags each feature has."""
        low, high = self.rows
        return (high - low) // self.of


@dataclass(frozen=True, eq=False)
class Stack:
    """The rows of such an output. `runs`: of features with bags, in order · `row`: int32 (N,), of each id · `bags`: how
    many rows are of bags · `rows`: how many rows in all · `picked`: int64 (K,), the ids whose single rows are looked
    up. Tensors are on the tables' device."""

    runs: Sequence[Run]
    row: torch.Tensor
    bags: int
    rows: int
    picked: torch.Tensor

    def tensors(self) -> list[torch.Tensor]:
        """All its tensors."""
        return [self.row, self.picked, *(run.edges for run in self.runs)]
