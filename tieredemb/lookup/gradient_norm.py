"""Norms of gradients on a GPU: the update's own walk over segments, which keeps a number a row and no row.

Rows are named by the position of their first occurrence in the batch, and not by their homes, which need not be slots.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch

from tieredemb.kernels.constants import DROPPED
from tieredemb.kernels.row_format import RowFormat
from tieredemb.lookup.device_lookup import DeviceLookup

if TYPE_CHECKING:
    from tieredemb.config import OptimizerConfig

_NOWHERE = SimpleNamespace(weight=0, state=0, records=None, names=None, flags=())


@dataclass(frozen=True, kw_only=True)
class GradientNorm:
    """A recipe by which the kernels of an update sum norms; it is no optimizer for users. `norm_type`: p."""

    norm_type: float = 2.0

    is_dense: ClassVar[bool] = False
    flags: ClassVar[tuple[str, ...]] = ()

    def numbers(self, hyper: Mapping[str, float]) -> dict[str, float]:
        return {"p": hyper["norm_type"]}


_KERNELS: weakref.WeakKeyDictionary[DeviceLookup, DeviceLookup] = weakref.WeakKeyDictionary()


def _kernels(lookup: DeviceLookup) -> DeviceLookup:
    """Those for the key space of `lookup`. A row is a float64: two words of state."""
    if lookup not in _KERNELS:
        row = RowFormat(width=lookup.space.space.width, state_width=2)
        _KERNELS[lookup] = DeviceLookup(lookup.space, row, cast("OptimizerConfig", GradientNorm()))
    return _KERNELS[lookup]


def occurrence_powers(
    lookup: DeviceLookup,
    homes: torch.Tensor,
    bag: torch.Tensor,
    samples: int,
    grad: torch.Tensor,
    scale: torch.Tensor | None,
    argmax: torch.Tensor | None,
    norm_type: float,
) -> torch.Tensor:
    """Σ |g|^p over the summed gradient g of each row (max |g| for an infinite p), float64 (N,), at its first
    occurrence; zero elsewhere. `homes`, `bag`: int32 (N,), as of the update · `samples`: bags a feature · `grad`:
    float32 (B, ΣD) · `scale`, `argmax`: see `DeviceLookup.update`. Does not synchronise."""
    n, device = homes.shape[0], homes.device
    powers = torch.zeros(n, dtype=torch.float64, device=device)
    if n == 0:
        return powers
    norms = _kernels(lookup)
    segments = norms.segments(first_occurrences(homes), bag, samples)
    hot: Any = SimpleNamespace(
        weight=torch.empty((1, lookup.space.space.width), dtype=torch.float32, device=device),
        state=powers.view(torch.float32).reshape(n, 2),
        dirty=torch.empty(n, dtype=torch.uint8, device=device),
    )
    rate = torch.zeros(len(lookup.space.space.features), dtype=torch.float32, device=device)
    numbers = torch.full((2,), 1.0, dtype=torch.float32, device=device)  # p, and the scale
    numbers[:1].fill_(norm_type)  # an assignment to an element would copy it from the host, and wait
    norms.update(hot, cast("Any", _NOWHERE), segments, grad, scale, argmax, rate, numbers)
    return powers


def first_occurrences(homes: torch.Tensor) -> torch.Tensor:
    """The position of the first occurrence of each one's home, int32 (N,); `DROPPED` stays. Does not synchronise."""
    n = homes.shape[0]
    ordered, order = torch.sort(homes, stable=True)
    begins = torch.ones(n, dtype=torch.bool, device=homes.device)
    begins[1:] = ordered[1:] != ordered[:-1]
    at = torch.where(begins, torch.arange(n, device=homes.device), 0).cummax(0).values
    first = torch.empty(n, dtype=torch.int32, device=homes.device)
    first[order] = order[at].to(torch.int32)
    return first.masked_fill_(homes == DROPPED, DROPPED)
