"""Outputs of one width that lie below each other: those of bags, and behind them the rows of single ids.

So one lookup, with one plan and one update, serves tables of both kinds. Each single id has a row of the output, which
is what its gradient comes by; a lookup reads those of them that it is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tieredemb.config import Mode


class Run(NamedTuple):
    """Neighbouring features whose bags are pooled alike. `rows`: where theirs begin and end in the output · `mode`: how
    they are pooled · `edges`: int64 (K + 1,), where the bags begin and end among all ids."""

    rows: tuple[int, int]
    mode: Mode
    edges: torch.Tensor


@dataclass(frozen=True, eq=False)
class Stack:
    """What the rows of such an output are. `runs`: of features that have bags, in their order · `row`: int32 (N,), that
    of each id · `bags`: how many are of bags · `rows`: how many there are · `picked`: int64 (K,), of which ids single
    rows are looked up. Tensors lie on the tables' device."""

    runs: Sequence[Run]
    row: torch.Tensor
    bags: int
    rows: int
    picked: torch.Tensor

    def tensors(self) -> list[torch.Tensor]:
        """All of them."""
        return [self.row, self.picked, *(run.edges for run in self.runs)]
