"""The summed gradient of each row of a batch on a GPU: the update's own walk, over rows that are zeros before."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any, cast

import torch

from tieredemb.kernels.row_format import RowFormat
from tieredemb.lookup.device_lookup import DeviceLookup
from tieredemb.lookup.optimizers.sgd import SGD

_NOWHERE: Any = SimpleNamespace(weight=0, state=0, records=None, names=None, flags=())
_KERNELS: weakref.WeakKeyDictionary[DeviceLookup, DeviceLookup] = weakref.WeakKeyDictionary()


def _kernels(lookup: DeviceLookup) -> DeviceLookup:
    """Those of SGD for the key space of `lookup`."""
    if lookup not in _KERNELS:
        _KERNELS[lookup] = DeviceLookup(lookup.space, RowFormat(width=lookup.space.space.width), SGD(lr=0.0))
    return _KERNELS[lookup]


def occurrence_sums(
    lookup: DeviceLookup,
    first: torch.Tensor,
    bag: torch.Tensor,
    samples: int,
    grad: torch.Tensor,
    scale: torch.Tensor | None,
    argmax: torch.Tensor | None,
) -> torch.Tensor:
    """Float32 (N, D): the gradient of each row at its first occurrence, zeros elsewhere. `first`: int32 (N,), see
    `gradient_norm.first_occurrences` · `bag`: int32 (N,), as of the update · `samples`: bags a feature · `grad`:
    float32 (B, ΣD) · `scale`, `argmax`: see `DeviceLookup.update`. Does not synchronise."""
    n, device, width = first.shape[0], first.device, lookup.space.space.width
    sums = torch.zeros((n, width), dtype=torch.float32, device=device)
    if n == 0:
        return sums
    kernels = _kernels(lookup)
    segments = kernels.segments(first, bag, samples)
    rows = SimpleNamespace(
        weight=sums,
        state=torch.empty((n, 0), dtype=torch.float32, device=device),
        dirty=torch.empty(n, dtype=torch.uint8, device=device),
    )
    # a step of rate −1 adds the gradient to a row
    rate = torch.full((len(lookup.space.space.features),), -1.0, dtype=torch.float32, device=device)
    numbers = torch.zeros(2, dtype=torch.float32, device=device)  # no decay, and the scale
    numbers[1:].fill_(1.0)  # an assignment to an element would copy it from the host, and wait
    kernels.update(cast("Any", rows), _NOWHERE, segments, grad, scale, argmax, rate, numbers)
    return sums
