"""Buffers that a captured step reads; each batch is copied there."""

from __future__ import annotations

import copy
from collections.abc import Hashable
from typing import Any

import torch

from tieredemb.errors import InvalidInputError
from tieredemb.kernels.copies import copy_on_device
from tieredemb.modules.forwards import Forward
from tieredemb.pipeline.batches import Path, map_tensors, tensors_of
from tieredemb.step.capacities import capacity_for
from tieredemb.step.planned_forwards import identity

SMALL = 1 << 16  # bytes of pageable memory that CUDA copies to a GPU without waiting


class OtherShapesError(InvalidInputError):
    """A batch has other shapes than the buffers, or more ids; it is right otherwise, and other buffers would take
    it."""


class Buffers:
    """A batch of the form of `batch`, which every step reads and to which each batch is copied. `forwards`: of `batch`
    · `max_ids`: in any of them · `example`: a batch with as many ids as any may have."""

    def __init__(self, batch: Any, forwards: list[Forward], max_ids: int | None = None, example: Any = None) -> None:
        self._paths = [path for path, _ in tensors_of(batch)]
        longest = {} if example is None else dict(tensors_of(example))
        if longest and list(longest) != self._paths:
            raise InvalidInputError(
                f"the example batch has tensors at {_names(list(longest))}, the first one had {_names(self._paths)}"
            )
        lengths = _lengths(forwards)
        self._buffer: dict[Path, torch.Tensor] = {}
        self._any_length: set[Path] = set()
        device = forwards[0].module.tables.config.device
        self._gpu = device if device.type == "cuda" else None  # the GPU of all buffers
        new: dict[int, torch.Tensor] = {}
        for path, tensor in tensors_of(batch):
            buffer = new.get(id(tensor))
            if buffer is None:
                shape = tensor.shape
                if identity((tensor,)) in lengths:
                    shape = torch.Size([max(len(tensor), max_ids or 0, len(longest.get(path, ())))])
                buffer = new[id(tensor)] = torch.zeros(shape, dtype=tensor.dtype, device=device)
            if identity((tensor,)) in lengths:
                self._any_length.add(path)
            self._buffer[path] = buffer
        self.batch = map_tensors(batch, lambda tensor: new[id(tensor)])
        self._check_copied()

    def another(self) -> Buffers:
        """Buffers of the same shapes, of their own memory."""
        new = {id(tensor): torch.zeros_like(tensor) for tensor in self._buffer.values()}
        return self._of(new, map_tensors(self.batch, lambda tensor: new[id(tensor)]))

    def has_other_shapes(self, batch: Any) -> bool:
        """Whether `load` raises `OtherShapesError`."""
        try:
            self._targets(batch)
        except InvalidInputError as error:
            return isinstance(error, OtherShapesError)
        return False

    @property
    def form(self) -> Hashable:
        """The form of the batches that `load` takes."""
        return self.form_of(self.batch)

    def form_of(self, batch: Any) -> Hashable:
        """The shapes of a batch's tensors, without the lengths that may differ."""
        return tuple(None if self._has_any_length(*each) else each[1].shape for each in tensors_of(batch))

    def of_form_of(self, batch: Any) -> Buffers:
        """Buffers of the form of `batch`, which has tensors of the same dtypes at the same places. They hold its ids;
        if the present buffers do not, they hold some more, for later batches."""
        detached = map_tensors(batch, torch.Tensor.detach)  # a separate object for each place, even of the same tensor
        new, at, is_same = dict[int, torch.Tensor](), dict[int, torch.Tensor](), self.form_of(batch) == self.form
        for path, tensor in tensors_of(detached):
            buffer, shape = self._buffer[path], tensor.shape
            if self._has_any_length(path, tensor):
                capacity, length = len(buffer) if is_same else 0, len(tensor)
                shape = torch.Size([capacity if length <= capacity else capacity_for(length + length // 8)])
            if id(buffer) not in new:
                new[id(buffer)] = buffer.new_zeros(shape)
            at[id(tensor)] = new[id(buffer)]
        return self._of(new, map_tensors(detached, lambda tensor: at[id(tensor)]))

    def _has_any_length(self, path: Path, tensor: torch.Tensor) -> bool:
        return path in self._any_length and tensor.dim() == 1

    def _of(self, new: dict[int, torch.Tensor], batch: Any) -> Buffers:
        """The same with other memory. `new`: for each buffer, by its identity · `batch`: made of these."""
        other = copy.copy(self)
        other._buffer = {path: new[id(tensor)] for path, tensor in self._buffer.items()}
        other.batch = batch
        other._check_copied()
        return other

    def _check_copied(self) -> None:
        """Raises `InvalidInputError` if tensors of the batch are still the user's."""
        if any(tensor is not self._buffer.get(path) for path, tensor in tensors_of(self.batch)):
            raise InvalidInputError(
                "the batch has tensors inside of objects that cannot be copied; a captured step takes batches of "
                "mappings, sequences and dataclasses"
            )

    def load(self, batch: Any) -> None:
        """Copies a batch to the buffers. Raises, before anything changes, `OtherShapesError` if other buffers would
        take it, and `InvalidInputError` if none would."""
        into, given = list[torch.Tensor](), list[torch.Tensor]()
        for target, tensor in self._targets(batch):
            if self._is_here(tensor):
                into.append(target)
                given.append(tensor)
            else:
                target.copy_(tensor.detach(), non_blocking=True)
        copy_on_device(into, given)

    def _targets(self, batch: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The tensors of a batch, each with the part of a buffer that it fills. Raises `InvalidInputError` for a batch
        that does not fit."""
        tensors = [*tensors_of(batch)]
        paths, buffers = [path for path, _ in tensors], self._buffer.values()  # at the places `self._paths`
        if paths != self._paths:
            raise InvalidInputError(
                f"the batch has tensors at {_names(paths)}, the captured one had {_names(self._paths)}"
            )
        shared: dict[int, torch.Tensor] = {}
        for (path, tensor), buffer in zip(tensors, buffers, strict=True):
            if tensor.dtype is not buffer.dtype:
                raise InvalidInputError(f"{_names([path])} is {tensor.dtype}, the captured one was {buffer.dtype}")
            if shared.setdefault(id(buffer), tensor) is not tensor:
                raise InvalidInputError(f"{_names([path])} was one tensor with another place of the captured batch")
        each = zip(tensors, buffers, strict=True)
        return [(self._target(buffer, path, tensor), tensor) for (path, tensor), buffer in each]

    def _target(self, buffer: torch.Tensor, path: Path, tensor: torch.Tensor) -> torch.Tensor:
        """The part of a buffer that `tensor` fills, which has its dtype. Raises `OtherShapesError` if it does not
        fit."""
        if tensor.shape == buffer.shape:
            return buffer
        if self._has_any_length(path, tensor) and buffer.dim() == 1 and len(tensor) <= len(buffer):
            return buffer[: len(tensor)]
        raise OtherShapesError(
            f"{_names([path])} has shape {tuple(tensor.shape)}, the captured one had {tuple(buffer.shape)}"
        )

    def _is_here(self, tensor: torch.Tensor) -> bool:
        """Whether copying its bytes, on this GPU, fills its buffer."""
        gpu = self._gpu
        here = gpu is not None and tensor.get_device() == gpu.index and tensor.is_contiguous()
        return here and not tensor.is_conj() and not tensor.is_neg()


def waits_to_load(batch: Any) -> bool:
    """Whether the host may wait for the current stream when it copies a batch to a GPU, as from pageable memory of more
    than 64 KiB (CUDA C++ Programming Guide, "Concurrent Execution between Host and Device")."""
    return any(
        tensor.device.type == "cpu" and tensor.nbytes > SMALL and not tensor.is_pinned()
        for _, tensor in tensors_of(batch)
    )


def _lengths(forwards: list[Forward]) -> set[tuple[Any, ...]]:
    """The tensors whose length may differ: ids, and weights beside them, of forwards whose offsets end the last bag."""
    found: set[tuple[Any, ...]] = set()
    for forward in forwards:
        if forward.ends_bags:
            found |= {identity((part,)) for part in (forward.given[0], forward.weights) if part is not None}
    return found


def _names(paths: list[Path]) -> str:
    def name(path: Path) -> str:
        parts = (f"[{step!r}]" if kind == "item" else f".{step}" for kind, step in path)
        return "the batch" + "".join(parts)

    return ", ".join(map(name, paths)) or "no place"
