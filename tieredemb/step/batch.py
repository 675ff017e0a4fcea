"""One batch of a forward: ids, bags and weights. Dtypes and shapes are checked, values are not."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tieredemb.lookup.bags import EqualBags, Places
from tieredemb.step.stack import Stack

Given = tuple[torch.Tensor | Places, ...]  # the inputs by which a forward is known; the ids are first


class Batch(NamedTuple):
    """`ids`: int32 or int64 (N,) · `offsets`: int32 or int64, edges of the bags of all features, or bags of one length
    · `edges`: F·B + 1, how many there are; the last may be missing and is then N · `exact`: whether the last must be N
    · `size`: B · `weights`: floats (N,) or None · `given`: ids, and offsets and `places` if there are
    any, as the caller passed them · `places`: where features have their bags, if not in order; there may be more bags
    then · `names_ends`: whether offsets were given, second in `given` · `stack`: of tables whose rows are not pooled,
    which rows the output has, if not one for each id; `size` is 1 then."""

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
