"""`.weight` of a module of one table: a tensor to read, which is copied from the tiers when something is computed with
it. What it is (shape, dtype, device) costs nothing.

It is one NaN in the shape of the table. torch hands every function that meets it to `__torch_function__`, where a copy
of the table takes its place; what goes around that raises, or finds the NaN, rather than wrong rows. Writing to it, or
to a view of a copy, would be lost, and is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from tieredemb.errors import UnsupportedError
from tieredemb.tables.export import untraced

if TYPE_CHECKING:
    from tieredemb.modules.one_table import OneTable

_NO_WRITE = (
    "the weight of a tiered table is a copy to read, so writing to it ({}) would change no row; load_state_dict("
    "{{'weight': rows}}) sets the table, init=tieredemb.Normal(…) or Uniform(…) says what its rows start as, and "
    "from_pretrained(rows) makes a table of a tensor. To change a copy of your own, clone() it"
)
_NO_GRADIENT = (
    "no gradient reaches a tiered table through its weight, which is a copy; read it under torch.no_grad(), or as "
    "weight.detach(), or take tieredemb.scores(module, x), which has a gradient for x. To train rows, call the module. "
    "Where a model computes with whole weights in training (scores of all items, a graph's propagation), every row "
    "moves in every step and no cache helps: leave that embedding out of the conversion by exclude="
)
_NO_PARAMETER = (
    "the weight of a tiered table is no parameter, and its gradient no tensor: backward applies it to the rows; pass "
    "an optimizer to the module, or let it follow(optimizer) a torch optimizer, and clip by tieredemb.clip_grad_norm_"
)
_NO_MEMORY = "the weight of a tiered table has no memory of its own; read it, as by weight.detach(), and keep that"

_T: Any = torch.Tensor  # whose descriptors and dunder methods are not all typed
# answered without the rows
_ASKED = {
    _T.shape.__get__, _T.dtype.__get__, _T.device.__get__, _T.layout.__get__, _T.ndim.__get__,
    _T.is_cuda.__get__, _T.is_cpu.__get__, _T.is_meta.__get__, _T.is_sparse.__get__, _T.is_quantized.__get__,
    _T.itemsize.__get__, _T.nbytes.__get__, _T.size, _T.dim, _T.ndimension, _T.numel, _T.nelement, _T.element_size,
    _T.__len__, _T.is_floating_point, _T.is_complex, _T.get_device, _T.__hash__, torch.numel, torch.is_floating_point,
}  # fmt: skip
# answered by any tensor like it
_LIKE = {
    _T.new, _T.new_empty, _T.new_zeros, _T.new_ones, _T.new_full, _T.new_tensor, torch.empty_like, torch.zeros_like,
    torch.ones_like, torch.full_like, torch.rand_like, torch.randn_like,
}  # fmt: skip
# asked of another tensor, which becomes like it
_AS_IT = {_T.view_as, _T.expand_as, _T.reshape_as, _T.type_as, _T.is_same_size, _T.to}
_DETACHED = {_T.detach, torch.detach, _T.data.__get__}
_OF_A_PARAMETER = {
    _T.grad.__get__, _T.grad.__set__, _T.is_leaf.__get__, _T.backward, _T.register_hook, _T.retain_grad,
    _T.register_post_accumulate_grad_hook,
}  # fmt: skip
_OF_MEMORY = {_T.data_ptr, _T.untyped_storage, _T.storage, _T.share_memory_, _T.pin_memory, _T.__dlpack__}


class TableWeight(torch.Tensor):
    """The weight (num_embeddings, embedding_dim) of a module of one table, to be read; see `TieredEmbedding.weight`."""

    _module: OneTable

    @staticmethod
    def __new__(cls, module: OneTable) -> TableWeight:
        shape, tables = (module.num_embeddings, module.embedding_dim), module.tables
        nan = torch.full((), torch.nan, dtype=tables.weight_dtype(0), device=tables.config.device)
        made: TableWeight = torch.Tensor._make_subclass(cls, nan.expand(shape))
        made._module = module
        return made

    def __init__(self, module: OneTable) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"TableWeight({tuple(self.shape)}, dtype={self.dtype}, device={str(self.device)!r})"

    @classmethod
    @untraced
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else next(iter(kwargs.values()), None)
        if isinstance(first, TableWeight):
            module = first._module
            if func in _ASKED:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if func == _T.requires_grad.__get__:
                return module._trains
            if func in (_T.requires_grad_, _T.requires_grad.__set__):
                module.requires_grad_(*args[1:], **kwargs)
                return first
            if func in _LIKE or (func == _T.type and len(args) == 1 and not kwargs):
                args, kwargs = tree_map_only(TableWeight, _like, (tuple(args), kwargs))
                return func(*args, **kwargs)
            if func in _DETACHED:
                return _rows(module)
            if func in _OF_A_PARAMETER:
                raise UnsupportedError(_NO_PARAMETER)
            if func in _OF_MEMORY:
                raise UnsupportedError(_NO_MEMORY)
        elif func in _AS_IT:
            args, kwargs = tree_map_only(TableWeight, _like, (tuple(args), kwargs))
            return func(*args, **kwargs)
        _refuse_writing(func, first, kwargs)
        copies: dict[int, torch.Tensor] = {}

        def copy(weight: TableWeight) -> torch.Tensor:
            module = weight._module
            if torch.is_grad_enabled() and module._trains:
                raise UnsupportedError(_NO_GRADIENT)
            if id(module) not in copies:
                copies[id(module)] = _rows(module)
            return copies[id(module)]

        args, kwargs = tree_map_only(TableWeight, copy, (tuple(args), kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise UnsupportedError(_NO_MEMORY)


class ReadOnlyRows(torch.Tensor):
    """A copy of a table's rows, or a view of one. It is a tensor in all but that writing to it is refused."""

    @classmethod
    @untraced
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, TableWeight) for kind in types):
            return NotImplemented  # which reads the table first
        if func in _ASKED or func == _T._base.__get__:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        _refuse_writing(func, args[0] if args else next(iter(kwargs.values()), None), kwargs)
        memory: set[int] = set()

        def bare(rows: ReadOnlyRows) -> torch.Tensor:
            with torch._C.DisableTorchFunctionSubclass():
                memory.add(rows.untyped_storage().data_ptr())
                return rows.as_subclass(torch.Tensor)  # type: ignore[arg-type]

        args, kwargs = tree_map_only(ReadOnlyRows, bare, (tuple(args), kwargs))
        result = func(*args, **kwargs)
        if isinstance(result, np.ndarray):
            result.flags.writeable = False
            return result

        def like(each: torch.Tensor) -> torch.Tensor:
            strided = each.layout is torch.strided and each.device.type != "meta"
            return _read_only(each) if strided and each.untyped_storage().data_ptr() in memory else each

        return tree_map_only(torch.Tensor, like, result)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.as_subclass(torch.Tensor))  # type: ignore[arg-type]


def _like(weight: TableWeight) -> torch.Tensor:
    """A tensor of its shape, dtype and device, without its rows."""
    return torch.empty((), dtype=weight.dtype, device=weight.device).expand(weight.shape)


def _rows(module: OneTable) -> torch.Tensor:
    """A copy of the table of a module, where the module is."""
    return _read_only(module.tables.weight(0, module.tables.config.device))


def _read_only(rows: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return rows.as_subclass(ReadOnlyRows)  # type: ignore[arg-type]


def _refuse_writing(func: Callable[..., Any], first: Any, kwargs: dict[str, Any]) -> None:
    """Raises `UnsupportedError` where `func`, whose first argument is `first`, would write to a table's weight."""
    name = getattr(func, "__name__", "")
    in_place = name in ("__set__", "__setitem__") or (name.endswith("_") and not name.endswith("__"))
    in_place |= name.startswith("__i") and name.endswith("__") and hasattr(_T, f"__{name[3:]}")
    out = kwargs.get("out")
    written = [first] if in_place else []
    written += [*out] if isinstance(out, (tuple, list)) else [out]
    if any(isinstance(each, (TableWeight, ReadOnlyRows)) for each in written):
        raise UnsupportedError(_NO_WRITE.format(name))
