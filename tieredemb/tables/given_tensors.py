"""Tensors that are loaded from outside, checked before anything changes: is their content there, and is it numbers.

torch lets many kinds of tensor into a state dict. What it copies into a float parameter without losing a part of it is
taken: floats and integers of all sizes, and what requires a gradient. The rest has no content (meta tensors), no rows
(sparse and nested ones), or another meaning than its numbers (complex and quantized ones).
"""

from __future__ import annotations

import torch

from tieredemb.errors import InvalidInputError, shown

_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64)


def dense_numbers(name: str, value: object, shape: tuple[int, ...] | None = None) -> torch.Tensor:
    """The tensor that was given as `name`, without its gradient, on the device where it is. Raises `InvalidInputError`
    for what cannot be read as real numbers, and for another shape than `shape`. Waits for a GPU that has it."""
    if not isinstance(value, torch.Tensor):
        raise InvalidInputError(f"{name} must be a dense tensor with content, got {shown(value)}")
    kind = _unreadable(value)
    try:
        value = value.detach()
        kind = kind or _unreadable(value)  # a subclass may be another tensor once it is detached
        if kind is None:
            value = value.resolve_neg()
            value[(slice(0, 1),) * value.dim()].to("cpu", torch.float32).numpy()
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        kind = kind or f"a {type(value).__name__} that cannot be read ({error})"
        raise InvalidInputError(f"{name} must be a dense tensor with content, got {kind}") from error
    if kind is not None:
        raise InvalidInputError(f"{name} must be a dense tensor with content, got {kind}")
    if shape is not None and tuple(value.shape) != shape:
        raise InvalidInputError(f"{name} must have shape {shape}, got {tuple(value.shape)}")
    return value


def _unreadable(value: torch.Tensor) -> str | None:
    """Why a tensor cannot be read as rows of real numbers, with what to pass instead; None if it can."""
    with torch._C.DisableTorchFunctionSubclass():
        if value.is_nested:
            return "a nested tensor; pass to_padded_tensor(…) of it"
        if value.layout is not torch.strided:
            return f"a tensor of layout {value.layout}; pass to_dense() of it"
        if value.is_meta:
            return "a tensor on the meta device, which has no content; load the file with map_location='cpu'"
        if value.is_quantized:
            return f"a quantized tensor of {value.dtype}; pass dequantize() of it"
        if value.is_complex():
            return f"a tensor of {value.dtype}; pass its real part"
        if not value.is_floating_point() and value.dtype not in (*_WHOLE, torch.bool):
            return f"a tensor of {value.dtype}; pass floats"
    if hasattr(value, "full_tensor"):
        return "a DTensor, of which this rank has a part; pass full_tensor() of it"
    return None
