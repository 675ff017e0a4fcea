"""Views of a batch's tensors that a model looks up: columns, slices, other shapes. They are found by their addresses
and strides, and taken again from another batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tieredemb.step.planned_forwards import identity


@dataclass(frozen=True)
class View:
    """`takes`: for each dimension an index, or the start and length of a slice; None: all of it · `sizes`: the required
    size of dimensions of which not all is taken, 0 for any · `shape`: a new shape of the whole, with -1 for the
    samples; empty if it stays."""

    takes: tuple[int | tuple[int, int] | None, ...]
    sizes: tuple[int, ...]
    shape: tuple[int, ...] = ()

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The same view of another tensor. Raises `ValueError` if that has another form."""
        if whole.dim() != len(self.takes) or any(
            size not in (0, measured) for size, measured in zip(self.sizes, whole.shape, strict=True)
        ):
            raise ValueError(f"not a tensor as that which {self} was found in: {tuple(whole.shape)}")
        if self.shape:
            return whole.view(self.shape)
        at = 0  # the dimension of what is left
        for take in self.takes:
            if isinstance(take, int):
                whole = whole.select(at, take)
                continue
            if take is not None:
                whole = whole.narrow(at, *take)
            at += 1
        return whole


def find_view(whole: torch.Tensor, part: torch.Tensor) -> View | None:
    """How to take `part` from `whole`, if it is such a view; else None."""
    if part.dtype != whole.dtype or not part.numel():
        return None
    if part.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr():
        return None
    found = _in_other_shape(whole, part) or _taken(whole, part)
    return found if found is not None and identity((found.of(whole),)) == identity((part,)) else None


def _in_other_shape(whole: torch.Tensor, part: torch.Tensor) -> View | None:
    if whole.numel() != part.numel() or not (whole.dim() and part.dim() and whole.is_contiguous()):
        return None
    if part.dim() > 1 and part.shape[0] != whole.shape[0]:
        return None
    return View((None,) * whole.dim(), (0, *whole.shape[1:]), (-1, *part.shape[1:]))


def _taken(whole: torch.Tensor, part: torch.Tensor) -> View | None:
    starts = _position(whole, int(part.storage_offset()) - int(whole.storage_offset()))
    if starts is None:
        return None
    takes: list[int | tuple[int, int] | None] = []
    dimension = 0  # of the part
    for size, stride, start in zip(whole.shape, whole.stride(), starts, strict=True):
        if dimension == part.dim() or part.stride(dimension) != stride or start + part.shape[dimension] > size:
            takes.append(start)
            continue
        length = part.shape[dimension]
        takes.append(None if length == size else (start, length))
        dimension += 1
    if dimension < part.dim():
        return None
    sizes = tuple(0 if take is None else size for take, size in zip(takes, whole.shape, strict=True))
    return View(tuple(takes), sizes)


def _position(whole: torch.Tensor, offset: int) -> Sequence[int] | None:
    """The indices of the element `offset` elements behind the first one."""
    if offset < 0:
        return None
    position = [0] * whole.dim()
    for dimension in sorted(range(whole.dim()), key=whole.stride, reverse=True):
        size, stride = whole.shape[dimension], whole.stride(dimension)
        if size > 1 and stride > 0:
            position[dimension] = min(offset // stride, size - 1)
            offset -= position[dimension] * stride
    return position if offset == 0 else None
