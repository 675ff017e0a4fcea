"""What callers pass to a forward, checked before anything changes, and turned into a call.

On the CPU ids and offsets are checked here, whole; on a GPU their values are the device's to check.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tieredemb.errors import InvalidInputError, UnsupportedError
from tieredemb.lookup.bags import check_offsets, offsets_out_of_order

if TYPE_CHECKING:
    from tieredemb.modules.base import TieredModule
    from tieredemb.step.call import Call
    from tieredemb.step.call_memory import CallMemory

    Array = np.ndarray[Any, Any]

INTEGER_DTYPES = (torch.int32, torch.int64)
MAX_IDS = 2**31 - 1  # of one batch: plans and gradients number its occurrences in int32


@dataclass(frozen=True)
class Batch:
    """One batch as a module's forward took it. `ids`: int32 or int64 (N,) · `offsets`: int32 or int64, edges of the
    bags of all tables · `edges`: T·B + 1, how many there are; the last may be missing and is then N · `exact`: whether
    the last must be N · `size`: B · `weights`: floats (N,) or None · `given`: ids, and offsets where there are any, as
    the caller passed them. Dtypes and shapes are checked, values are not."""

    ids: torch.Tensor
    offsets: torch.Tensor
    edges: int
    exact: bool
    size: int
    weights: torch.Tensor | None
    given: tuple[torch.Tensor, ...]

    def call(
        self, module: TieredModule, *, trains: bool, ahead: bool = False, memory: CallMemory | None = None
    ) -> Call:
        """Checks the values and plans the batch on the module's device. `trains`: whether a backward is expected to
        update its rows · `ahead`: whether its forward has yet to come · `memory`: on a GPU, where to plan it."""
        if module.tables.config.device.type == "cuda":
            from tieredemb.lookup.device_bags import Edges
            from tieredemb.step.device_call import DeviceCall

            exact = self.exact and threading.get_ident() not in module.ids_may_exceed_bags
            edges = Edges(self.offsets.detach().to(torch.int64).contiguous(), self.edges, exact)
            return DeviceCall(module, self.ids, edges, self.size, trains=trains, ahead=ahead, memory=memory)
        from tieredemb.step.host_call import HostCall

        return HostCall(module, self.ids.numpy(), self._edges(), self.size)

    def _edges(self) -> Array:
        """Checked offsets with the end of the last bag, as an int64 array of our own: backward reads them again, and
        loaders reuse their buffers."""
        array, n = self.offsets.numpy().astype(np.int64), len(self.ids)
        if len(array):
            check_offsets(array, n)
        if len(array) < self.edges:
            array = np.append(array, n)
        if self.exact and array[-1] != n:
            before = int(array[-2]) if len(array) > 1 else 0
            raise InvalidInputError(offsets_out_of_order(len(array) - 1, int(array[-1]), before, n, len(array)))
        return array


def as_ids(name: str, value: torch.Tensor, module: TieredModule) -> torch.Tensor:
    """An int32 or int64 tensor on the module's device, flat. Raises `InvalidInputError`."""
    if not isinstance(value, torch.Tensor):
        raise InvalidInputError(f"{name} must be a tensor, got {type(value).__name__}")
    if torch._C._are_functorch_transforms_active():
        raise UnsupportedError(
            "a tiered table cannot run inside torch.func transforms (vmap, grad, jvp, …), which have no tensor of the "
            "table to work on; look the rows up outside and pass them in"
        )
    if value.dtype not in INTEGER_DTYPES:
        raise InvalidInputError(f"{name} must be int32 or int64, got {value.dtype}; use {name}.long()")
    if value.device != module.tables.config.device:
        raise InvalidInputError(
            f"{name} is on {value.device}, the tables are on {module.tables.config.device}; move one of them"
        )
    if value.numel() > MAX_IDS:
        raise InvalidInputError(f"{name} has {value.numel()} elements, at most {MAX_IDS} are allowed; split the batch")
    return value.detach().contiguous().reshape(-1)


def as_offsets(offsets: torch.Tensor, module: TieredModule) -> torch.Tensor:
    """Offsets of the right shape and dtype. Raises `InvalidInputError`."""
    if isinstance(offsets, torch.Tensor) and offsets.dim() != 1:
        raise InvalidInputError(f"offsets must have one dimension, got shape {tuple(offsets.shape)}")
    return as_ids("offsets", offsets, module)


def equal_bags(bags: int, length: int, device: torch.device) -> torch.Tensor:
    """Edges of `bags` bags of `length` ids each, int64 (bags + 1,)."""
    return torch.arange(bags + 1, dtype=torch.int64, device=device) * length


def check_weights(weights: torch.Tensor | None, ids: torch.Tensor) -> torch.Tensor | None:
    """Per-sample weights that fit `ids`, flat. Raises `InvalidInputError`."""
    if weights is None:
        return None
    if not isinstance(weights, torch.Tensor) or not weights.is_floating_point():
        raise InvalidInputError("per_sample_weights must be a floating-point tensor")
    if weights.device != ids.device:
        raise InvalidInputError(
            f"per_sample_weights are on {weights.device}, the ids are on {ids.device}; move one of them"
        )
    if weights.shape != ids.shape:
        raise InvalidInputError(
            f"per_sample_weights must have the ids' shape {tuple(ids.shape)}, got {tuple(weights.shape)}"
        )
    return weights.reshape(-1)
