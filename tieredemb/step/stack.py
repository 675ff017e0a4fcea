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


class PooledBags(NamedTuple):
    """Bags of several features. `rows`: their first row in the output, and the end; they lie there sample by sample ·
    `samples`: how many bags each feature has · `modes`: of each feature, how it is pooled · `edges`: int64 (F · (B +
    1),), feature by feature, where bags begin among all ids, and the last one ends."""

    rows: tuple[int, int]
    samples: int
    modes: tuple[Mode, ...]
    edges: torch.Tensor


@dataclass(frozen=True, eq=False)
class Stack:
    """The rows of such an output. `pooled`: all bags, in order · `row`: int32 (N,), of each id · `bags`: how
    many rows are of bags · `rows`: how many rows in all · `picked`: int64 (K,), the ids whose single rows are looked
    up. Tensors are on the tables' device."""

    pooled: Sequence[PooledBags]
    row: torch.Tensor
    bags: int
    rows: int
    picked: torch.Tensor

    def tensors(self) -> list[torch.Tensor]:
        """All its tensors."""
        return [self.row, self.picked, *(bags.edges for bags in self.pooled)]
