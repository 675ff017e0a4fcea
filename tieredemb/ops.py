"""Operators of torch's dispatcher over tensors of your own: the lookup of the modules, without their tables.

Rows of any tensor are pooled by the same kernels that the modules use, on the CPU and on a GPU, as `tieredemb::
pooled_lookup`. It has fake implementations and gradients, so `torch.compile(fullgraph=True)` keeps it in one graph,
where a module breaks it. `import tieredemb` does not register it, `import tieredemb.ops`
does; call it as `tieredemb.ops.pooled_lookup` or `torch.ops.tieredemb.pooled_lookup`. A process's first call loads
torch's compiler, as that of any operator written in Python does: some seconds.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from tieredemb.config import MODES, Mode
from tieredemb.errors import InputTypeError, InvalidInputError
from tieredemb.kernels import check_device
from tieredemb.kernels.constants import DROPPED
from tieredemb.kernels.row_format import CARRIERS, RowFormat
from tieredemb.lookup.bags import rows_space

if TYPE_CHECKING:
    from tieredemb.cache.device.plan import OverflowRows
    from tieredemb.lookup.device_bags import DeviceBags
    from tieredemb.lookup.device_lookup import DeviceLookup

DEVICES = ("cpu", "cuda")


def pooled_lookup(
    weight: Tensor, homes: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None, mode: Mode = "sum"
) -> Tensor:
    """Pools rows of `weight` over bags: (B, D) in the rows' dtype.

    `weight`: float32, float16 or bfloat16 (C, D), contiguous, CPU or CUDA; the others are on its device · `homes`:
    int32 (N,), the row of each occurrence; negative ones are padding, which adds nothing and counts in no mean ·
    `offsets`: int64 (B + 1,), from 0 to N, bag b being `homes[offsets[b]:offsets[b + 1]]` · `per_sample_weights`:
    floats (N,), with mode "sum" · `mode`: "sum", "mean" or "max". Sums run in float32 in the order of the occurrences
    and are rounded once; an empty bag is zero.

    Differentiable once by `weight`, whose gradient is dense and the same bits in every run, and by
    `per_sample_weights`. Backward finds the winners of a maximum again, so it needs the rows of the forward.

    Raises `InvalidInputError` for a wrong dtype, shape or device. On the CPU it is raised for values out of range too.
    On a GPU nothing synchronises, so they raise nothing: a home of C or more counts as padding, offsets are cut to 0 …
    N.

    >>> from tieredemb.ops import pooled_lookup
    >>> weight = torch.arange(8.0).reshape(4, 2).requires_grad_()
    >>> homes, offsets = torch.tensor([0, 3, -1, 3], dtype=torch.int32), torch.tensor([0, 2, 4])
    >>> out = pooled_lookup(weight, homes, offsets)
    >>> out.tolist()
    [[6.0, 8.0], [6.0, 7.0]]
    >>> out.sum().backward()
    >>> weight.grad[:, 0].tolist()
    [1.0, 0.0, 0.0, 2.0]
    """
    for name, value in (("weight", weight), ("homes", homes), ("offsets", offsets)):
        if not isinstance(value, Tensor):
            raise InputTypeError(f"{name} must be a tensor, got {type(value).__name__}")
    if per_sample_weights is not None and not isinstance(per_sample_weights, Tensor):
        raise InputTypeError(f"per_sample_weights must be a tensor, got {type(per_sample_weights).__name__}")
    if not isinstance(mode, str):
        raise InvalidInputError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    out: Tensor = torch.ops.tieredemb.pooled_lookup(weight, homes, offsets, per_sample_weights, mode)
    return out


# --- operators --------------------------------------------------------------------------------------------------------


@torch.library.custom_op("tieredemb::pooled_lookup", mutates_args=(), device_types=DEVICES)
def _pooled_lookup(
    weight: Tensor, homes: Tensor, offsets: Tensor, per_sample_weights: Tensor | None, mode: str
) -> Tensor:
    _check(weight, homes, offsets, per_sample_weights, mode)
    factors = _float32(per_sample_weights)
    if weight.is_cuda:
        _check_alignment(weight)
        with torch.cuda.device(weight.device):
            return _pool_on_device(weight, _device_bags(homes, offsets, len(weight), whole=False), factors, mode)
    from tieredemb import ops_cpu

    return ops_cpu.pooled(weight, homes, offsets, factors, mode)


@torch.library.custom_op("tieredemb::pooled_lookup_rows_gradient", mutates_args=(), device_types=DEVICES)
def _rows_gradient(
    grad: Tensor,
    weight: Tensor | None,
    homes: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    rows: int,
    mode: str,
) -> Tensor:
    """Gradient of the rows, (C, D) in the dtype of `grad`, (B, D). `weight`: that of the forward, for maxima alone."""
    out, factors = grad.new_zeros((rows, grad.shape[1])), _float32(per_sample_weights)
    if grad.is_cuda:
        with torch.cuda.device(grad.device):
            _add_on_device(_Rows.around(out), grad, weight, _device_bags(homes, offsets, rows), factors, mode)
        return out
    from tieredemb import ops_cpu

    ops_cpu.add_gradient(out, grad, weight, homes, offsets, factors, mode)
    return out


@torch.library.custom_op("tieredemb::pooled_lookup_weights_gradient", mutates_args=(), device_types=DEVICES)
def _weights_gradient(grad: Tensor, weight: Tensor, homes: Tensor, offsets: Tensor) -> Tensor:
    """Gradient of per-sample weights, float32 (N,): the inner products of the rows with the gradients of their bags."""
    if grad.is_cuda:
        with torch.cuda.device(grad.device):
            lookup, there = _device_lookup(weight, "sum"), _device_bags(homes, offsets, len(weight))
            rows = lookup.gather(_Rows(weight.detach()), _nowhere(), there.homes)
            return lookup.weights_gradient(rows, there.homes, there, _float32(grad))
    from tieredemb import ops_cpu

    return ops_cpu.weights_gradient_of(grad, weight, homes, offsets)


@_pooled_lookup.register_fake
def _(weight: Tensor, homes: Tensor, offsets: Tensor, per_sample_weights: Tensor | None, mode: str) -> Tensor:
    _check(weight, homes, offsets, per_sample_weights, mode)
    return output_of(weight, offsets)


_rows_gradient.register_fake(
    lambda grad, weight, homes, offsets, weights, rows, mode: grad.new_empty((rows, grad.shape[1]))
)
_weights_gradient.register_fake(lambda grad, weight, homes, offsets: homes.new_empty(homes.shape, dtype=torch.float32))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weight, homes, offsets, weights, mode = inputs
    needs_rows = mode == "max" or ctx.needs_input_grad[3]  # else they may be written before the backward
    ctx.save_for_backward(weight if needs_rows else None, homes, offsets, weights)
    ctx.rows, ctx.mode = weight.shape[0], mode


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, Tensor | None, None]:
    weight, homes, offsets, weights = ctx.saved_tensors
    rows_grad = weights_grad = None
    if ctx.needs_input_grad[0]:
        kept = weight if ctx.mode == "max" else None
        rows_grad = _rows_gradient(grad, kept, homes, offsets, weights, ctx.rows, ctx.mode)
    if ctx.needs_input_grad[3]:
        weights_grad = _weights_gradient(grad, weight, homes, offsets).to(weights.dtype)
    return rows_grad, None, None, weights_grad, None


_pooled_lookup.register_autograd(_backward, setup_context=_keep)


# --- inputs -----------------------------------------------------------------------------------------------------------


@dataclass
class _Rows:
    """Rows that kernels read, or add to: a gradient is an SGD step of rate −1 from zeros, so that it is summed along
    the segments in float32 and rounded once."""

    weight: Any
    state: Any = None
    dirty: Any = None

    @staticmethod
    def around(weight: Tensor) -> _Rows:
        """With the state and history that an SGD step needs."""
        state = weight.new_empty((len(weight), 0), dtype=torch.float32)
        return _Rows(weight, state, weight.new_empty(len(weight), dtype=torch.uint8))


def output_of(weight: Tensor, offsets: Tensor) -> Tensor:
    return weight.new_empty((offsets.shape[0] - 1, weight.shape[1]))


@overload
def _float32(values: Tensor) -> Tensor: ...
@overload
def _float32(values: None) -> None: ...
def _float32(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.detach().to(torch.float32).contiguous()


def _check(weight: Tensor, homes: Tensor, offsets: Tensor, weights: Tensor | None, mode: str) -> None:
    """Raises `InvalidInputError` for dtypes, shapes and devices that do not fit. Looks at no value."""
    if mode not in MODES:
        raise InvalidInputError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    if weight.dtype not in CARRIERS or weight.dim() != 2 or weight.shape[0] < 1 or weight.shape[1] < 1:
        raise InvalidInputError(
            f"weight must be float32, float16 or bfloat16 of shape (C, D) with at least one row and column, got "
            f"{weight.dtype} of shape {tuple(weight.shape)}"
        )
    if not weight.is_contiguous():
        raise InvalidInputError("weight must be contiguous, as copying it would cost more than the lookup does")
    for name, value, dtype in (("homes", homes, torch.int32), ("offsets", offsets, torch.int64)):
        if value.dtype != dtype or value.dim() != 1:
            raise InvalidInputError(
                f"{name} must be {dtype} with one dimension, got {value.dtype} of shape {tuple(value.shape)}"
            )
    if offsets.shape[0] < 1:
        raise InvalidInputError("offsets has B + 1 elements, so at least one, got none")
    if weights is not None and mode != "sum":
        raise InvalidInputError(f"per_sample_weights needs mode='sum', got mode={mode!r}")
    if weights is not None and (not weights.is_floating_point() or weights.shape != homes.shape):
        raise InvalidInputError(
            f"per_sample_weights must be floats of the homes' shape {tuple(homes.shape)}, got {weights.dtype} of shape "
            f"{tuple(weights.shape)}"
        )
    for name, tensor in (("homes", homes), ("offsets", offsets), ("per_sample_weights", weights)):
        if tensor is not None and tensor.device != weight.device:
            raise InvalidInputError(f"{name} is on {tensor.device}, weight is on {weight.device}; move one of them")


# --- on a GPU ---------------------------------------------------------------------------------------------------------


def _pool_on_device(
    weight: Tensor, bags: DeviceBags, factors: Tensor | None, mode: str, argmax: Tensor | None = None
) -> Tensor:
    out = output_of(weight, bags.offsets)
    _device_lookup(weight, mode).pool(_Rows(weight.detach()), _nowhere(), bags.homes, bags, factors, out, argmax)
    return out


def _add_on_device(
    hot: _Rows, grad: Tensor, weight: Tensor | None, bags: DeviceBags, factors: Tensor | None, mode: str
) -> None:
    lookup, scale, argmax = _device_lookup(grad, mode), factors, None
    if weight is not None and lookup.has_max:
        argmax = torch.full(grad.shape, -1, dtype=torch.int32, device=grad.device)
        _pool_on_device(weight, bags, None, mode, argmax)
    if lookup.has_mean:
        scale = lookup.mean_scale(bags.homes, bags)
    segments = lookup.segments(bags.homes, bags.bag, bags.batch)
    rate = torch.full((1,), -1.0, dtype=torch.float32, device=grad.device)
    numbers = torch.arange(2, dtype=torch.float32, device=grad.device)  # to SGD: no weight decay, and a scale of 1
    lookup.update(hot, _nowhere(), segments, _float32(grad), scale, argmax, rate, numbers)


def _device_lookup(rows: Tensor, mode: str) -> DeviceLookup:
    return _kernels(rows.device, rows.dtype, rows.shape[1], mode)


@functools.cache  # making one uploads a few words, which waits for the GPU
def _kernels(device: torch.device, dtype: torch.dtype, width: int, mode: str) -> DeviceLookup:
    from tieredemb.lookup.device_bags import DeviceKeySpace
    from tieredemb.lookup.device_lookup import DeviceLookup

    check_device(device)
    space = DeviceKeySpace(rows_space(width, mode), [-1], device)
    return DeviceLookup(space, RowFormat(width=width, dtype=dtype), None)


def _nowhere() -> OverflowRows:
    """Where the rows without a slot are: there are none."""
    from tieredemb.cache.device.plan import OverflowRows

    return OverflowRows(uncached=False, weight=0, state=0, records=None)


def _device_bags(homes: Tensor, offsets: Tensor, rows: int, *, whole: bool = True) -> DeviceBags:
    """The bags, with homes and offsets that lead nowhere else. `whole`: with each occurrence's bag, for gradients."""
    from tieredemb.lookup.device_bags import DeviceBags

    n, batch = len(homes), len(offsets) - 1
    homes, offsets = torch.where((homes < 0) | (homes >= rows), DROPPED, homes), offsets.clamp(0, n)
    bag = homes
    if whole:
        bag = torch.searchsorted(offsets, torch.arange(n, device=homes.device), right=True, out_int32=True) - 1
        outside = (bag < 0) | (bag >= batch)
        homes, bag = homes.masked_fill(outside, DROPPED), bag.masked_fill(outside, 0)
    return DeviceBags(keys=homes, homes=homes, offsets=offsets, bag=bag, position=None, batch=batch)


def _check_alignment(weight: Tensor) -> None:
    """Raises `InvalidInputError` for rows that do not start where the vectors of their width may."""
    vector_bytes = math.gcd(16, weight.shape[1] * weight.itemsize)
    if weight.data_ptr() % vector_bytes:
        raise InvalidInputError(
            f"weight must start at a multiple of {vector_bytes} bytes, as kernels read rows of {weight.shape[1]} "
            f"{weight.dtype} in such pieces; pass weight.clone()"
        )
