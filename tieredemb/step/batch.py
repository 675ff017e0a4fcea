"""One batch as a forward took it: ids, bags and weights, of which dtypes and shapes are checked, and values are not."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Batch:
    """`ids`: int32 or int64 (N,) · `offsets`: int32 or int64, edges of the bags of all features · `edges`: F·B + 1, how
    many there are; the last may be missing and is then N · `exact`: whether the last must be N · `size`: B · `weights`:
    floats (N,) or None · `given`: ids, and offsets where there are any, as the caller passed them."""

    ids: torch.Tensor
    offsets: torch.Tensor
    edges: int
    exact: bool
    size: int
    weights: torch.Tensor | None
    given: tuple[torch.Tensor, ...]
