"""One batch as a forward took it: ids, bags and weights, of which dtypes and shapes are checked, and values are not."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tieredemb.lookup.bags import EqualBags, Places
from tieredemb.step.stack import Stack

Given = tuple[torch.Tensor | Places, ...]  # what a forward is known by before it comes; the ids come first


class Batch(NamedTuple):
    """`ids`: int32 or int64 (N,) · `offsets`: int32 or int64, edges of the bags of all features, or bags of one length
    · `edges`: F·B + 1, how many there are; the last may be missing and is then N · `exact`: whether the last must be N
    · `size`: B · `weights`: floats (N,) or None · `given`: ids, offsets where there are any, and `places` where there
    are, as the caller passed them · `places`: where features have their bags, if not in their order; there may be more
    bags then · `names_ends`: whether offsets were given, as the second of those · `stack`: of tables whose rows are not
    pooled, what the rows of the output are where they are not those of the ids; `size` is 1 then."""

    ids: torch.Tensor
    offsets: torch.Tensor | EqualBags
    edges: int
    exact: bool
    size: int
    weights: torch.Tensor | None
    given: Given
    places: Places | None = None
    names_ends: bool = True
    stack: Stack | None = None
