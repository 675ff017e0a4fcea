"""What callers pass to a forward, checked before anything changes: dtypes, shapes and devices.

Values are checked by the call, on the CPU at once and on a GPU there.
"""

from __future__ import annotations

import torch

from tieredemb.errors import InputTypeError, InvalidInputError, UnsupportedError
from tieredemb.kernels.tracing import RESTORE, no_export

INTEGER_DTYPES = (torch.int32, torch.int64)
NARROW_DTYPES = (torch.uint8, torch.int8, torch.int16)
MAX_IDS = 2**31 - 1  # of one batch: plans and gradients number its occurrences in int32


def as_ids(name: str, value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """An int32 or int64 tensor on the tables' `device`, flat. Raises `InvalidInputError`."""
    if not isinstance(value, torch.Tensor):
        if type(value).__module__.startswith("torch.fx."):
            raise no_export("torch.fx.symbolic_trace")
        raise InputTypeError(f"{name} must be a tensor, got {type(value).__name__}; use torch.as_tensor({name})")
    if torch._C._are_functorch_transforms_active():
        raise UnsupportedError(
            "a tiered table cannot run inside torch.func transforms (vmap, grad, jvp, …), which have no tensor of the "
            f"table to work on; look the rows up outside and pass them in. Or {RESTORE}"
        )
    if value.dtype not in INTEGER_DTYPES:
        raise InvalidInputError(f"{name} must be int32 or int64, got {value.dtype}; use {name}.long()")
    if value.device != device:
        raise InvalidInputError(f"{name} is on {value.device}, the tables are on {device}; move one of them")
    if value.numel() > MAX_IDS:
        raise InvalidInputError(f"{name} has {value.numel()} elements, at most {MAX_IDS} are allowed; split the batch")
    if value.dim() == 1 and value.is_contiguous():
        return value
    return value.contiguous().view(-1)


def as_offsets(offsets: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Offsets of the right shape and dtype. Raises `InvalidInputError`."""
    if isinstance(offsets, torch.Tensor) and offsets.dim() != 1:
        raise InvalidInputError(f"offsets must have one dimension, got shape {tuple(offsets.shape)}")
    return as_ids("offsets", offsets, device)


def widened(value: torch.Tensor, other: torch.Tensor | None) -> torch.Tensor:
    """Ids or offsets of 8 or 16 bits as the dtype of the `other` of the two, where that is int32 or int64: as torch
    takes them."""
    if not isinstance(value, torch.Tensor) or not isinstance(other, torch.Tensor) or value.dtype is other.dtype:
        return value
    return value.to(other.dtype) if value.dtype in NARROW_DTYPES and other.dtype in INTEGER_DTYPES else value


def check_weights(
    weights: torch.Tensor | None, ids: torch.Tensor, dtype: torch.dtype | None = None
) -> torch.Tensor | None:
    """Per-sample weights that fit `ids`, flat. `dtype`: the one that they must have, if not any float. Raises
    `InvalidInputError`."""
    if weights is None:
        return None
    if not isinstance(weights, torch.Tensor):
        raise InputTypeError(f"per_sample_weights must be a floating-point tensor, got {type(weights).__name__}")
    if dtype is not None and weights.dtype != dtype:
        raise InvalidInputError(
            f"per_sample_weights must have the same type as the rows, {dtype}, got {weights.dtype}; use "
            f"per_sample_weights.to({dtype})"
        )
    if not weights.is_floating_point():
        raise InvalidInputError(f"per_sample_weights must be a floating-point tensor, got {weights.dtype}")
    if weights.device != ids.device:
        raise InvalidInputError(
            f"per_sample_weights are on {weights.device}, the ids are on {ids.device}; move one of them"
        )
    if weights.shape != ids.shape:
        raise InvalidInputError(
            f"per_sample_weights must have the same shape as the input, {tuple(ids.shape)}, got {tuple(weights.shape)}"
        )
    return weights.reshape(-1)
