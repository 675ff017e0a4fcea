"""A table as a tensor: operations on it read and write its rows, on any tier.

A `TableTensor` has no storage. It is a table, (rows, D), or a view of one: `geometry`, a tensor on the meta device,
says which elements of the whole table it has, by sizes, strides and an offset. An operation reads the rows in which
these are into a plain tensor, runs on that, and writes the rows back if it has changed them. So a view shows later
changes of the table, as a view of a plain tensor does. Pointwise operations in place change large tables in parts; all
others need memory for all rows that they read. Each operation waits for a GPU.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map_only

from tieredemb.cache.locks import Locks
from tieredemb.errors import InvalidInputError, TieredEmbError, UnsupportedError, shown
from tieredemb.kernels.inference import no_inference
from tieredemb.kernels.row_format import CARRIERS
from tieredemb.kernels.tracing import RESTORE, untraced
from tieredemb.step.gradient_rows import GradientRows
from tieredemb.step.table_gradient import SquaredGradient, TableGradient, empty_of, one_by_one
from tieredemb.step.whole_table import Span, elements, product, read
from tieredemb.tables.table_set import PART_BYTES, TableSet

SPAN_BYTES = 65536  # rows less than this apart are read and written as one span, which costs less than two
_SHOWN = 3  # rows, where a table is printed
# they change each element by itself
_POINTWISE = {
    "abs_", "add_", "addcdiv_", "addcmul_", "ceil_", "clamp_", "clamp_max_", "clamp_min_", "copy_", "div_", "exp_",
    "fill_", "floor_", "lerp_", "masked_fill_", "mul_", "nan_to_num_", "neg_", "pow_", "reciprocal_", "relu_", "round_",
    "rsqrt_", "sigmoid_", "sign_", "sqrt_", "sub_", "tanh_", "zero_",
}  # fmt: skip
_OVERWRITE = {"copy_", "fill_", "zero_", "uniform_", "normal_"}  # all elements of their first argument, whatever it was
_RESHAPE = {
    "as_strided_", "resize_", "resize_as_", "resize_as_sparse_", "set_", "squeeze_", "swapaxes_", "swapdims_", "t_",
    "transpose_", "unsqueeze_", "rename_",
}  # fmt: skip


class Module(Protocol):
    """The module that a table belongs to, as its tensor uses it."""

    @property
    def tables(self) -> TableSet:
        """The tables of the module."""

    @property
    def trains(self) -> bool:
        """Whether gradients reach the table."""

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Sets whether gradients reach the table."""


class TableTensor(torch.Tensor):
    """Table number `table` of a `module`, or a view of it. `is_detached`: whether it may be read where gradients are
    recorded, although no gradient reaches the table through it."""

    module: Module
    table: int
    geometry: torch.Tensor
    is_detached: bool
    _is_param = False

    @staticmethod
    def __new__(
        cls, module: Module, table: int, geometry: torch.Tensor | None = None, is_detached: bool = False
    ) -> TableTensor:
        tables = module.tables
        with no_inference():  # views may be used after it
            if geometry is None:
                config = tables.config.tables[table]
                shape = (config.num_embeddings, config.embedding_dim)
                geometry = torch.empty(shape, dtype=tables.weight_dtype(table), device="meta")
            made: TableTensor = torch.Tensor._make_wrapper_subclass(
                cls,
                geometry.size(),
                strides=geometry.stride(),
                storage_offset=geometry.storage_offset(),
                dtype=geometry.dtype,
                device=tables.config.device,
            )
        made.module, made.table, made.geometry, made.is_detached = module, table, geometry, is_detached
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    @property
    def rows(self) -> tuple[int, int]:
        """The rows of the table in which its elements are: the first, and the one after the last."""
        if self.numel() == 0:
            return 0, 0
        first = self.geometry.storage_offset()
        steps = zip(self.geometry.size(), self.geometry.stride(), strict=True)
        stop = first + sum((size - 1) * stride for size, stride in steps) + 1
        size, row = self.element_size(), self._row_bytes
        start = first * size // row
        while start * row % size:  # elements of a view may be larger than those of the table, as complex numbers are
            start -= 1
        return start, -(-stop * size // row)

    @property
    def _row_bytes(self) -> int:
        tables = self.module.tables
        return tables.config.tables[self.table].embedding_dim * tables.weight_dtype(self.table).itemsize

    @property
    def wants_gradient(self) -> bool:
        """Whether results computed from it require a gradient."""
        return self.module.trains and not self.is_detached

    def freeze(self, requires_grad: bool = True) -> TableTensor:
        """Freezes the table (False), or unfreezes it. Raises `UnsupportedError` for a view of it."""
        rows = self.module.tables.config.tables[self.table].num_embeddings
        if not self.is_detached and self.is_whole and len(self) == rows:
            self.module.requires_grad_(requires_grad)
        elif requires_grad or not self.is_detached:
            raise UnsupportedError(_NO_LEAF)
        return self

    def check_held(self) -> None:
        """Raises `UnsupportedError` where its rows can be neither read nor written here."""

    @property
    def span(self) -> Span | None:
        """Its rows, if it has all of their elements, in their order, and a gradient can reach them; else None."""
        pending = getattr(self.module, "pending", None)
        if pending is None or not self.is_whole or not self.wants_gradient:
            return None
        self.check_held()
        return Span(pending.owner, self.table, *self.rows, self.device)

    @property
    def is_whole(self) -> bool:
        """Whether it has all elements of its rows, in their order, as (K, D)."""
        tables, shape = self.module.tables, self.geometry.size()
        is_row = len(shape) == 2 and shape[1] == tables.config.tables[self.table].embedding_dim
        return is_row and self.dtype == tables.weight_dtype(self.table) and self.geometry.is_contiguous()

    def transposed(self) -> TableTensor | None:
        """The view with both dimensions exchanged, if it has two; else None."""
        if self.dim() != 2:
            return None
        with no_inference():
            return TableTensor(self.module, self.table, self.geometry.t(), self.is_detached)

    def rows_below(self) -> TableTensor | None:
        """All elements of the rows in which its own are; None if it has another dtype than the rows."""
        if self.is_whole:
            return self
        if self.dtype != self.module.tables.weight_dtype(self.table):
            return None
        width, (start, stop) = self.module.tables.config.tables[self.table].embedding_dim, self.rows
        with no_inference():
            geometry = torch.empty((stop, width), dtype=self.dtype, device="meta")[start:]
        return TableTensor(self.module, self.table, geometry, self.is_detached)

    def detached(self) -> TableTensor:
        """The same elements, to be read where gradients are recorded."""
        return TableTensor(self.module, self.table, self.geometry, is_detached=True)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Its first rows, size, dtype, device and tier. Reads those rows, if they are contiguous."""
        try:
            start, stop = self.rows
        except TieredEmbError as error:  # its module was freed
            return f"TableTensor(<{type(error).__name__}>, size={tuple(self.shape)}, dtype={self.dtype})"
        values, head = "…", torch.Tensor.detach(self)
        if self.dim() and len(self) > _SHOWN and self.is_whole:
            head, (start, stop) = head[:_SHOWN], (0, _SHOWN)
        if stop - start <= _SHOWN:
            try:
                text = str(head.clone().reshape(head.shape or 1)).removeprefix("tensor(")
                values = text[: text.rfind("]") + 1]
                values = values if self.dim() else values[1:-1]
            except TieredEmbError as error:  # closed, or broken
                values = f"<{type(error).__name__}>"
        more = ", …" if self.numel() > head.numel() and values != "…" else ""
        group, _, _ = self.module.tables.locate(self.table)
        return (
            f"TableTensor({values}{more}, size={tuple(self.shape)}, dtype={self.dtype}, device={str(self.device)!r}, "
            f"tier={group.cache.cold.kind!r})"
        )

    def __copy__(self) -> TableTensor:
        """A second tensor of the same elements, as of a plain tensor."""
        return self.detached()

    def __deepcopy__(self, memo: dict[int, torch.Tensor]) -> torch.Tensor:
        """A plain tensor with a copy of the elements."""
        if id(self) not in memo:
            memo[id(self)] = self.detached().clone()
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detached().clone().__reduce_ex__(protocol)

    @classmethod
    @untraced
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.autograd.grad:
            return cls._gradients(*args, **kwargs)
        first = args[0] if args else next(iter(kwargs.values()), None)
        if isinstance(first, TableTensor):
            if first._is_param:
                if func == _T.backward:
                    raise UnsupportedError(_NO_GRADIENT)
            elif func == _T.requires_grad.__get__:
                return first.wants_gradient
            elif func in (_T.requires_grad_, _T.requires_grad.__set__):
                return first.freeze(*args[1:], **kwargs)
            elif first.is_detached and func in (_T.is_leaf.__get__, _T.grad.__get__):
                return True if func == _T.is_leaf.__get__ else None
            elif func in _OF_A_PARAMETER:
                raise UnsupportedError(_NO_PARAMETER)
            if func == _T.data.__get__:
                return _data_of(first)
            if func == _T.data.__set__:
                return _replace(first, *args[1:], **kwargs)
            if func in _LISTS:
                return func(first.detached().clone(), *args[1:], **kwargs)
            if func in _ARRAYS:
                array = func(first.detached().clone(), *args[1:], **kwargs)
                array.flags.writeable = False  # a write to the copy would not reach the table
                return array
            if func in _OF_MEMORY:
                raise UnsupportedError(_NO_MEMORY)
        if torch.is_grad_enabled() and not _only_looks(func, first, args):
            found = _product(getattr(func, "__name__", "").strip("_"), args, kwargs)
            if found is NotImplemented and args and isinstance(first, TableTensor):
                found = elements(func, first, args, kwargs)
            if found is not NotImplemented:
                return found
            args, kwargs = _renormed(func, args, kwargs)
            args, kwargs = tree_map_only(TableTensor, functools.partial(_read, {}), (tuple(args), kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def _gradients(cls, *args: Any, **kwargs: Any) -> Any:
        """`torch.autograd.grad` with tables among its inputs."""
        raise UnsupportedError(_NO_AUTOGRAD_GRAD)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if name == "detach":
            return args[0].detached()
        if name == "is_same_size":
            return args[0].shape == args[1].shape
        if name == "full_like":  # of Adagrad, for a state that it never uses
            kind = {name: kwargs.get(name) or getattr(args[0], name) for name in ("dtype", "device")}
            return torch.full((), args[1], **kind).expand(args[0].shape)
        if name.endswith("_like") or name.startswith("new_"):
            args, kwargs = tree_map_only(TableTensor, empty_of, (args, kwargs))
            return func(*args, **kwargs)
        if TableGradient in types or SquaredGradient in types:
            return _with_gradients(func, name, args, kwargs)
        written = [each for each in _written(func, args, kwargs) if isinstance(each, TableTensor)]
        if written and name in _RESHAPE:
            raise UnsupportedError(_NO_SHAPE.format(name))
        if not written and _is_view(func):
            return _view(func, args, kwargs)
        _check_gradients(tree_leaves((args, kwargs)), written)
        if written and name in _POINTWISE and _in_parts(written, args, kwargs):
            return _change_in_parts(func, args, kwargs)
        return _run(func, name, args, kwargs, written)


def _replace(table: TableTensor, value: Any) -> None:
    """`table.data = value`. Raises `InvalidInputError` for what has another shape."""
    if not isinstance(value, torch.Tensor) or value.shape != table.shape:
        raise InvalidInputError(
            f"the data of a table of shape {tuple(table.shape)} can be replaced by a tensor of that shape, got "
            f"{shown(value)}"
        )
    with torch.no_grad():
        _materialise_data(table, value)
        table.detached().copy_(value)


# tensors that code has read from `.data` of whole tables
_DATA: weakref.WeakKeyDictionary[TableSet, list[weakref.ref[TableTensor]]] = weakref.WeakKeyDictionary()


def _data_of(table: TableTensor) -> TableTensor:
    """`table.data`: the same elements, until `table.data` is assigned."""
    found = table.detached()
    if found.is_whole:
        known = _DATA.setdefault(table.module.tables, [])
        known[:] = [each for each in known if each() is not None]
        known.append(weakref.ref(found))
    return found


def _materialise_data(table: TableTensor, value: torch.Tensor) -> None:
    """Before `table.data = value`: tensors read from `table.data` before get copies of the old elements."""
    known = _DATA.get(table.module.tables, [])
    those = [each for ref in known if (each := ref()) is not None and each is not value and each.table == table.table]
    if not those:
        return
    copy = table.detached().clone()
    known[:] = [ref for ref in known if not any(ref() is each for each in those)]  # a swap wants no weak references
    for each in those:
        start, stop = each.rows
        torch.utils.swap_tensors(each, copy[start:stop].view(each.shape))


def _with_gradients(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """A sum of tables and gradients: in each table, or its copy, only the rows change that its gradient reaches."""
    plain = name.removeprefix("_foreach_")
    if plain.rstrip("_") not in ("add", "sub") or not args or (name == "sub" and not isinstance(args[0], TableTensor)):
        raise UnsupportedError(_BY_HAND.format(plain))
    if plain != name:
        return one_by_one(func, name, args, kwargs)
    table, gradient = args
    if not isinstance(table, TableTensor):
        table, gradient = gradient, table
    if not isinstance(gradient, TableGradient) or not table.is_whole or table.shape != gradient.shape:
        raise UnsupportedError(_BY_HAND.format(plain))
    table.check_held()
    written = [table] if name.endswith("_") else []
    _check_gradients([table], written)
    rows, alpha = gradient.known.rows(), kwargs.get("alpha", 1)
    return _add_rows(table, rows, -alpha if plain.startswith("sub") else alpha, in_place=bool(written))


def _add_rows(table: TableTensor, rows: GradientRows, alpha: Any, *, in_place: bool) -> torch.Tensor:
    """A table plus `alpha` times `rows`, `in_place` or as a copy, (rows, D)."""
    if not in_place:
        copy = table.detached().clone()
        copy[rows.ids] = copy[rows.ids].add(rows.values, alpha=alpha).to(copy.dtype)
        return copy
    ids, values = rows.ids.cpu(), rows.values.cpu()
    row_bytes = table.size(1) * table.element_size()
    ends = np.flatnonzero(np.diff(ids.numpy()) > max(1, SPAN_BYTES // row_bytes)) + 1
    spans = [(int(some[0]), int(some[-1]) + 1) for some in np.split(ids.numpy(), ends) if len(some)]

    def change(start: int, part: torch.Tensor) -> torch.Tensor:
        low, high = np.searchsorted(ids.numpy(), [start, start + len(part)]).tolist()
        at = ids[low:high] - start
        part[at] = part[at].add(values[low:high], alpha=alpha).to(part.dtype)
        return part

    if spans:
        table.module.tables.change_spans(table.table, spans, change)
    return table


def _view(func: Any, args: Any, kwargs: Any) -> Any:
    """A view, or several, of the first argument."""
    base = args[0]
    with no_inference():
        geometry = func(base.geometry, *args[1:], **kwargs)

    def view(each: torch.Tensor) -> TableTensor:
        return TableTensor(base.module, base.table, each, base.is_detached)

    return tree_map_only(torch.Tensor, view, geometry)


def _run(func: Any, name: str, args: Any, kwargs: Any, written: Sequence[TableTensor]) -> Any:
    """Runs an operation on copies of the rows that it needs, and writes back those that it has changed."""
    used = [each for each in tree_leaves((args, kwargs)) if isinstance(each, TableTensor)]
    for each in used:
        each.check_held()
    changed = dict.fromkeys(_source(each) for each in written)
    copies: dict[tuple[int, int], _Copy] = {}
    with Locks(group.cache for tables in {each.module.tables for each in written} for group in tables.groups):
        for source in dict.fromkeys(map(_source, used)):
            those = [each for each in used if _source(each) == source]
            is_read = not (name in _OVERWRITE and len(those) == 1 and source in changed and those[0].is_whole)
            copies[source] = _Copy(those, is_read=is_read)
        given: list[tuple[torch.Tensor, TableTensor]] = []

        def copy(each: TableTensor) -> torch.Tensor:
            given.append((copies[_source(each)].of(each), each))
            return given[-1][0]

        plain_args, plain_kwargs = tree_map_only(TableTensor, copy, (args, kwargs))
        try:
            result = func(*plain_args, **plain_kwargs)
        except RuntimeError as error:
            if written and "resize" in str(error):  # an operation in place whose result is larger
                raise UnsupportedError(_NO_SHAPE.format(name)) from error
            raise
        for source in changed:
            copies[source].write()
    tables = {id(plain): each for plain, each in given}
    return tree_map_only(torch.Tensor, lambda each: tables.get(id(each), each), result)


class _Copy:
    """Rows of a table in a plain tensor: all rows that several views need."""

    def __init__(self, views: Sequence[TableTensor], *, is_read: bool) -> None:
        self._module, self._table = views[0].module, views[0].table
        filled = [each.rows for each in views if each.numel()]
        self._start = min((start for start, _ in filled), default=0)
        stop = max((stop for _, stop in filled), default=0)
        tables, device = self._module.tables, views[0].device
        if is_read:
            self._rows = tables.weight(self._table, device, start=self._start, stop=stop)
        else:
            self._rows = tables.empty_weight(self._table, device, stop - self._start)

    def of(self, view: TableTensor) -> torch.Tensor:
        """The elements of a view."""
        flat, first = self._rows.view(-1), view.geometry.storage_offset()
        if view.dtype != flat.dtype:
            ratio = max(1, view.element_size() // flat.element_size())
            flat = flat[: len(flat) // ratio * ratio].view(view.dtype)
        offset = first - self._start * self._rows.size(1) * self._rows.element_size() // view.element_size()
        return flat.as_strided(view.geometry.size(), view.geometry.stride(), offset if view.numel() else 0)

    def write(self) -> None:
        if len(self._rows):
            self._module.tables.set_rows(self._table, self._start, self._rows)


def _change_in_parts(func: Any, args: Any, kwargs: Any) -> Any:
    """Runs an operation in place, one part of the rows after another."""
    base = args[0]
    start, stop = base.rows

    def change(first: int, rows: torch.Tensor) -> torch.Tensor:
        some = slice(first - start, first - start + len(rows))

        def part(each: torch.Tensor) -> torch.Tensor:
            if each is base:
                return on_device
            return each[some] if each.dim() == 2 and len(each) == len(base) else each

        on_device = rows.to(base.device)
        part_args, part_kwargs = tree_map_only(torch.Tensor, part, (args, kwargs))
        func(*part_args, **part_kwargs)
        return on_device

    base.module.tables.change_rows(base.table, start, stop, change)
    return base


def _in_parts(written: Sequence[TableTensor], args: Any, kwargs: Any) -> bool:
    """Whether many rows are written, and each part of them depends only on the same rows of the other arguments."""
    base = args[0]
    if len(written) != 1 or written[0] is not base or not base.is_whole:
        return False
    if base.numel() * base.element_size() <= PART_BYTES:
        return False
    others = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor) and each is not base]
    if any(isinstance(each, TableTensor) and _source(each) == _source(base) for each in others):
        return False
    return all(each.dim() < 2 or (each.dim() == 2 and len(each) in (1, len(base))) for each in others)


class _Refused(torch.autograd.Function):
    """Reads a table where gradients are recorded that cannot reach it. `leaf`, float32 (0,), requires a gradient, so
    that autograd calls the backward, which is refused."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, table: Sequence[TableTensor]) -> torch.Tensor:
        return table[0].detached().clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if (grad.is_cuda and torch.cuda.is_current_stream_capturing()) or bool((grad != 0).any()):
            raise UnsupportedError(_NO_GRADIENT)
        return None, None  # of a term whose factor is 0


def _read(known: dict[tuple[int, int, tuple[int, int]], torch.Tensor], each: TableTensor) -> torch.Tensor:
    """A copy to compute with; its gradient reaches the rows, or is refused. `known`: rows that were read already for
    the same operation, which may have several views of them."""
    if not each.wants_gradient:
        return each
    base = each.rows_below()
    span = None if base is None else base.span
    if base is None or span is None or not span.chunks:
        found: torch.Tensor = _Refused.apply(torch.zeros(0, requires_grad=True), [each])  # type: ignore[no-untyped-call]
        return found
    key, view = (*_source(each), base.rows), each.geometry
    if key not in known:
        known[key] = read(span)
    rows = known[key]
    # torch's gradient of as_strided takes long
    if view.size() == rows.size() and view.is_contiguous():
        return rows
    if view.numel() == rows.numel() and view.is_contiguous():
        return rows.view(view.size())
    if view.dim() == 2 and view.t().size() == rows.size() and view.t().is_contiguous():
        return rows.t()
    return rows.as_strided(view.size(), view.stride(), view.storage_offset() - base.geometry.storage_offset())


def _renormed(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Scales rows down as torch's lookup with a `max_norm` does; returns the lookup's arguments without `max_norm`."""
    if func not in (functional.embedding, functional.embedding_bag):
        return args, kwargs
    names = [*inspect.signature(func).parameters]
    given = dict(zip(names, args, strict=False)) | kwargs
    weight, most = given["weight"], given.get("max_norm")
    if most is None or not isinstance(weight, TableTensor):
        return args, kwargs
    with torch.no_grad():
        torch.embedding_renorm_(weight.detached(), given["input"].reshape(-1), most, given.get("norm_type", 2.0))
    return (), given | {"max_norm": None}


def _product(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Of x, (…, D), and all rows of a table, x @ rows.T; or rows @ x of an x of one or two dimensions: with a gradient
    for all rows, chunk by chunk. NotImplemented for everything else."""
    if name not in _PRODUCTS or kwargs or len(args) < 2:
        return NotImplemented
    if not all(isinstance(each, torch.Tensor) for each in args[:2]):
        return NotImplemented
    if name == "linear":
        x, table = args[:2]
        bias = args[2] if len(args) > 2 else None
    else:
        (x, table), bias = args[:2], None
        if name == "rmatmul":
            x, table = table, x
        if isinstance(x, TableTensor):  # rows @ x
            if isinstance(table, TableTensor) or table.dim() > 2:
                return NotImplemented
            span = x.span
            if span is None or table.dim() == 0:
                return NotImplemented
            is_matrix = table.dim() == 2
            found = _of_span(table.T if is_matrix else table, x, span)
            return NotImplemented if found is None else found.T if is_matrix else found
        table = table.transposed() if isinstance(table, TableTensor) else table
    if not isinstance(table, TableTensor) or isinstance(x, TableTensor) or x.dim() == 0:
        return NotImplemented
    span = table.span
    found = None if span is None else _of_span(x, table, span)
    if found is None:
        return NotImplemented
    return found if bias is None else found + bias


def _of_span(x: torch.Tensor, table: TableTensor, span: Span) -> torch.Tensor | None:
    """The product, if torch has one of such shapes, dtypes and devices; else None, for torch to raise its error."""
    if x.shape[-1] != table.shape[-1] or x.device != table.device or not span.chunks:
        return None
    is_cast = x.dtype in CARRIERS and torch.is_autocast_enabled(x.device.type)
    if x.dtype != table.dtype and not is_cast:
        return None
    return product(x, span)


def _only_looks(func: Callable[..., Any], first: Any, args: Sequence[Any]) -> bool:
    """Whether a function reads no rows, or writes to `first`: it makes views, or returns properties such as the
    size."""
    name = getattr(func, "__name__", "")
    if name == "__getitem__":
        index = args[1] if isinstance(args[1], tuple) else args[1:]
        return not any(isinstance(each, torch.Tensor | list) or hasattr(each, "__array__") for each in index)
    if name in ("to", "reshape_as") and not isinstance(first, TableTensor):  # as it
        return True
    if name in _CONTIGUOUS:
        return isinstance(first, TableTensor) and first.geometry.is_contiguous()
    if name in _LOOKS or name.endswith("_like") or name.startswith("new_"):
        return True
    in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    in_place |= name.startswith("__i") and name.endswith("__") and hasattr(_T, f"__{name[3:]}")
    return in_place and isinstance(first, TableTensor)


def _check_gradients(leaves: Sequence[Any], written: Sequence[TableTensor]) -> None:
    """Raises `UnsupportedError` where torch would record a gradient of a table that is read or written as a whole."""
    if not torch.is_grad_enabled():
        return
    for each in leaves:
        if isinstance(each, TableTensor) and each.wants_gradient:
            raise UnsupportedError(_NO_WRITE if any(each is one for one in written) else _NO_GRADIENT)


_PRODUCTS = {"matmul", "rmatmul", "mm", "linear"}
_CONTIGUOUS = {"contiguous", "flatten", "ravel", "reshape"}  # views of what is
_LOOKS = {
    "__get__", "__hash__", "__iter__", "__len__", "__repr__", "__set__", "adjoint", "alias", "as_strided", "chunk",
    "detach", "diagonal", "dim", "dsplit", "element_size", "expand", "expand_as", "get_device", "hsplit",
    "is_complex", "is_contiguous", "is_floating_point", "is_same_size", "is_tensor", "moveaxis", "movedim", "narrow",
    "ndimension", "nelement", "new", "numel", "permute", "select", "size", "split", "split_with_sizes", "squeeze",
    "storage_offset", "stride", "swapaxes", "swapdims", "t", "tensor_split", "transpose", "type", "type_as", "unbind",
    "unflatten", "unfold", "unsqueeze", "view", "view_as", "vsplit",
}  # fmt: skip
_T: Any = torch.Tensor  # whose descriptors and dunder methods are not all typed
_LISTS = {_T.tolist}
_ARRAYS = {_T.numpy, _T.__array__}
_OF_A_PARAMETER = {
    _T.grad.__get__, _T.grad.__set__, _T.is_leaf.__get__, _T.retain_grad, _T.register_hook,
    _T.register_post_accumulate_grad_hook, _T.backward,
}  # fmt: skip
_OF_MEMORY = {_T.data_ptr, _T.untyped_storage, _T.storage, _T.share_memory_, _T.pin_memory, _T.__dlpack__}

_NO_PARAMETER = (
    "the weight of a tiered table is no parameter, and its gradient no tensor: backward applies it to the rows; pass "
    "an optimizer to the module, or let it follow(optimizer) a torch optimizer, and clip by tieredemb.clip_grad_norm_"
)
_NO_LEAF = (
    "a view of a table, or its detached weight, records no gradients of its own; take a copy of it, by "
    "weight.detach().clone(), or call requires_grad_() of the module"
)
_NO_AUTOGRAD_GRAD = (
    "torch.autograd.grad cannot return the gradient of a table that is updated in backward; build the module with a "
    "torch optimizer, or leave the table out of the inputs"
)
_BY_HAND = (
    "{} of a table and a gradient of one: a table and its gradient can be added, or subtracted, as an update by hand "
    "does; else let the table follow the optimizer, by tieredemb.follow(model, optimizer) and optimizer.step(). "
    "Nothing was changed"
)
_NO_MEMORY = (
    f"the weight of a tiered table has no memory of its own; take a copy of it, by weight.detach().clone(). For "
    f"torch.export, and other tools that take a model as tensors in memory: {RESTORE}"
)
_NO_WRITE = (
    "a table is written to where gradients are recorded, which torch refuses for parameters, too; write under "
    "torch.no_grad(), or to weight.data"
)
_NO_SHAPE = (
    "a table cannot be changed by {}: it has no memory of its own, and its shape stays; copy_() and load_state_dict() "
    "set its rows"
)
_NO_GRADIENT = (
    "no gradient reaches this tiered table through its weight as a whole, which the loss depends on: its rows are "
    "updated in backward, or lie on several ranks. Read it under torch.no_grad(), or as weight.detach(), or take "
    "tieredemb.scores(module, x), which has a gradient for x. To train rows, call the module; or build it with a torch "
    "optimizer, for whose step() gradients of whole tables wait"
)


def _source(each: TableTensor) -> tuple[int, int]:
    return id(each.module.tables), each.table


@functools.cache
def _is_view(func: Any) -> bool:
    infos = [each.alias_info for each in func._schema.returns]
    return any(info is not None and not info.is_write for info in infos)


@functools.cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of the arguments that an operation writes to."""
    arguments = enumerate(func._schema.arguments)
    return tuple((i, each.name) for i, each in arguments if each.alias_info is not None and each.alias_info.is_write)


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """What an operation writes to."""
    given = [args[i] if i < len(args) else kwargs.get(name) for i, name in _written_arguments(func)]
    return tree_leaves(given)
