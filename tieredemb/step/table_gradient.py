"""The gradient of a table, (rows, D), as code reads it from `.grad` of its parameter.

It is not stored. Until code needs its elements, it consists of two numbers, float32 (2,): its L2 norm, and a constant
so small (`TRACE`) that it adds nothing to a norm. Any factor applied to the gradient is read from the second, exactly,
even if the norm is zero or infinite; the update multiplies the gradients of outputs by that factor. So `GradScaler`
finds infinities, `clip_grad_norm_` the right norm of any order, and both may scale it. The numbers are computed when
they are first needed, so a step that does not read them pays nothing.

An operation that needs its elements finds it by row (`GradientRows`): pointwise operations that leave zeros zero are
computed there, and so are its reductions. Operations that would make it dense are refused.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.utils._foreach_utils import _foreach_supported_types
from torch.utils._pytree import tree_leaves, tree_map_only

from tieredemb.errors import InvalidInputError, TieredEmbError, UnsupportedError, shown
from tieredemb.kernels.tracing import untraced
from tieredemb.step.gradient_flags import GradientFlags
from tieredemb.step.gradient_rows import GradientRows, pointwise

# its square is beyond float32's precision beside a norm of 1e-10; and factors down to 1e-24, a scale's of 2^24 and a
# clipping's together, leave it a normal float32
TRACE = 2.0**-48


class Source(Protocol):
    """Has the gradients of tables, by number."""

    copies: list[weakref.ref[Known]]  # copies that are only numbers: they find their rows before the gradients change

    def values(self, table: int) -> torch.Tensor:
        """The two numbers of a table's gradient, float32 (2,), which may be changed in place. Raises `UnsupportedError`
        if there is none."""

    def rows(self, table: int, values: torch.Tensor | None = None) -> GradientRows:
        """A copy of a table's gradient by row, multiplied by the factor in its two numbers, or in `values`. Waits for a
        GPU. Raises `UnsupportedError` if there is none."""

    def take(self, table: int, known: Known, rows: GradientRows) -> None:
        """Replaces a table's gradient by `rows`, which `known` becomes."""

    def zero(self, table: int) -> None:
        """Sets a table's gradient to zeros."""

    def norms(self, norm_type: float) -> torch.Tensor:
        """The norms of all tables' gradients, float32 (T,)."""


class Known:
    """The value of a table's gradient: bound to the present gradient of `table` in its `source`; or a copy, with
    numbers of its `own` while the gradient is unchanged, or `by_row`. It keeps no source alive."""

    def __init__(
        self,
        source: Source | None = None,
        table: int = 0,
        own: torch.Tensor | None = None,
        by_row: GradientRows | None = None,
    ) -> None:
        self._source = None if source is None else weakref.ref(source)
        self.table, self.own = table, own
        self._parts = [] if by_row is None else [by_row]  # by row, it is their sum

    @property
    def by_row(self) -> GradientRows | None:
        """Its rows, if it is known by row."""
        while len(self._parts) > 1:  # in pairs, as a chain of many sums would take long
            pairs = zip(self._parts[::2], self._parts[1::2], strict=False)
            rest = self._parts[-1:] if len(self._parts) % 2 else []
            self._parts = [one.plus(other) for one, other in pairs] + rest
        return self._parts[0] if self._parts else None

    @property
    def is_bound(self) -> bool:
        """Whether it is bound to its source."""
        return self.own is None and not self._parts

    def is_of(self, source: Source, table: int) -> bool:
        """Whether it is that source's gradient of the table, or a multiple."""
        mine = None if self._source is None else self._source()
        return mine is source and self.table == table and not self._parts

    @property
    def source(self) -> Source:
        """Its source. Raises `UnsupportedError` if that is freed."""
        found = None if self._source is None else self._source()
        if found is None:
            raise UnsupportedError("the table that this gradient is of is gone, or this is a copy whose rows it had")
        return found

    @property
    def values(self) -> torch.Tensor:
        """What a multiplication by a number changes: its two numbers, float32 (2,), or by row its elements, (U, D)."""
        rows = self.by_row
        if rows is not None:
            return rows.values
        return self.source.values(self.table) if self.own is None else self.own

    def copied(self, values: torch.Tensor) -> Known:
        """A copy with these `values`."""
        rows = self.by_row
        if rows is not None:
            return Known(by_row=rows.with_values(values))
        made = Known(self.source, self.table, values)
        self.source.copies.append(weakref.ref(made))
        return made

    def rows(self) -> GradientRows:
        """A copy by row. Waits for a GPU."""
        rows = self.by_row
        if rows is not None:
            return rows.with_values(rows.values.clone())
        return self.source.rows(self.table, self.own)

    def become(self, rows: GradientRows) -> None:
        """Becomes these rows, unbound from its source."""
        self._parts, self.own, self._source = [rows], None, None

    def materialise(self) -> None:
        """Finds its rows before the source's gradient changes; keeps only numbers if that is impossible."""
        try:
            self.become(self.rows())
        except TieredEmbError:
            self._source = None

    def set_rows(self, rows: GradientRows) -> None:
        """Becomes `rows`."""
        if self.is_bound:
            self.source.take(self.table, self, rows)
        self.become(rows)

    def add(self, rows: GradientRows) -> None:
        """Adds to the rows."""
        self._parts.append(rows)

    def overwrite(self, other: Known) -> None:
        """Becomes equal to the other."""
        if self is other:
            return
        is_one = not self._parts and not other._parts and (self._source, self.table) == (other._source, other.table)
        if not is_one:
            self.set_rows(other.rows())
        elif other.own is not None or self.own is not None:
            self.values.copy_(other.values)

    def zero(self) -> None:
        """Becomes zeros."""
        if self.is_bound:
            self.source.zero(self.table)
        else:
            self.values.zero_()

    def norm(self, order: float) -> torch.Tensor:
        """Its norm of that order, float32 ()."""
        rows = self.by_row
        if rows is not None:
            return norm_by_row(rows, order)
        if order == 2.0:
            return self.values[0].abs()
        if self.own is None and order > 0:
            return self.source.norms(order)[self.table].clone()
        return norm_by_row(self.rows(), order)


def norm_by_row(rows: GradientRows, order: float) -> torch.Tensor:
    """The norm of a gradient by row, float32 (). Raises `UnsupportedError` for orders of 0 and below, for which zeros
    count."""
    if not order > 0:
        _refuse(f"a norm of order {order}")
    if rows.values.numel() == 0:
        return rows.values.new_zeros(())
    found: torch.Tensor = torch.linalg.vector_norm(rows.values, order)
    return found


class TableGradient(torch.Tensor):
    """The gradient of a table, float32 (rows, D). `known`: its value, shared by views."""

    known: Known

    @staticmethod
    def __new__(cls, shape: Sequence[int], device: torch.device, known: Known) -> TableGradient:
        made: TableGradient = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=torch.float32, device=device
        )
        made.known = known
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Its norm, size and device. Waits for a GPU."""
        try:
            norm = f"{self.known.norm(2.0).item():.4g}"
        except UnsupportedError:
            norm = "dropped"
        return f"TableGradient(norm={norm}, size={tuple(self.shape)}, device={str(self.device)!r})"

    def __deepcopy__(self, memo: dict[int, torch.Tensor]) -> torch.Tensor:
        if id(self) not in memo:
            memo[id(self)] = self.clone()
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return of_rows, (self.known.rows(),)

    @classmethod
    @untraced
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if func == _DATA.__set__ and _is(args[0]):
            return _overwritten(func, args, {})
        if func == _T.__setitem__ and _is(args[0]):
            return _set_rows(*args)
        if func == _T.__getitem__ and _is(args[0]):
            return _rows_at(*args)
        if name in _FLAGS and args and _is(args[0]):
            known = args[0].known
            flags = getattr(torch, name)(known.values)
            return GradientFlags(args[0].shape, flags, name == "isfinite", stands_for=known.by_row is not None)
        if name in _OF_MEMORY:
            _refuse(name)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs, name = kwargs or {}, func._schema.name.removeprefix("aten::")
        if not all(issubclass(each, TableGradient) or each in _PLAIN for each in types):
            return NotImplemented  # left to the table's
        operation = _OPERATIONS.get(name)
        if operation is not None:
            found = operation(func, args, kwargs)
            if found is not NotImplemented:
                return found
        if name.endswith("_like") or name.startswith("new_"):
            return func(*tree_map_only(TableGradient, empty_of, args), **kwargs)
        if name.startswith("_foreach_"):
            return one_by_one(func, name, args, kwargs)
        if name in _SAME_SHAPE and _given_shape(args) == tuple(args[0].shape):
            return _view(func, args, kwargs)
        if _is_pointwise(name):
            return _by_row(func, name, args, kwargs)
        return _refuse(name)


class SquaredGradient(TableGradient):
    """The square of a table's gradient, float32 (rows, D). Its sum is computed from the gradient's norm; all else by
    row."""

    _root: Known | None  # the gradient that it is the square of, until its rows are found
    _squares: Known

    @staticmethod
    def __new__(cls, gradient: TableGradient) -> SquaredGradient:
        made: SquaredGradient = torch.Tensor._make_wrapper_subclass(
            cls, gradient.shape, dtype=torch.float32, device=gradient.device
        )
        made._root = gradient.known.copied(gradient.known.values.clone())
        return made

    @property
    def known(self) -> Known:  # type: ignore[override]
        """The value of the square, by row."""
        if self._root is not None:
            rows = self._root.rows()
            self._squares, self._root = Known(by_row=rows.with_values(rows.values.square_())), None
        return self._squares

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.sum.default and args[0]._root is not None:
            return args[0]._root.values.square().sum()
        return super().__torch_dispatch__(func, types, args, kwargs)


_foreach_supported_types.append(TableGradient)  # so that torch clips lists with one like lists of plain tensors


def _refuse(name: str) -> Any:
    raise UnsupportedError(
        f"{name.removeprefix('_foreach_')} of a table's gradient would make a gradient of every row, or needs it as "
        f"one tensor, which it is nowhere. Known are the rows that it reaches: operations on each element that leave "
        f"zeros zero, sums of gradients, norms and to_sparse() work on these. Leave tables out of other changes, or "
        f"leave the embedding out of the conversion by exclude="
    )


def _is(each: Any) -> bool:
    return isinstance(each, TableGradient)


@functools.cache
def _is_pointwise(name: str) -> bool:
    """Whether an operation treats each element by itself, in place or not."""
    packets = [getattr(torch.ops.aten, each, None) for each in (name, name.rstrip("_"))]
    overloads = [getattr(packet, each) for packet in packets if packet is not None for each in packet.overloads()]
    return name in _POINTWISE or any(torch.Tag.pointwise in each.tags for each in overloads)


def _given_shape(args: Any) -> tuple[int, ...]:
    """The requested shape of a view, in which −1 stands for the gradient's own size."""
    given = args[1] if len(args) > 1 else ()
    if len(given) != 2:
        return tuple(given)
    return tuple(own if size == -1 else size for own, size in zip(args[0].shape, given, strict=True))


def _like(one: TableGradient, values: torch.Tensor) -> TableGradient:
    """A copy of a gradient with these `values`."""
    return TableGradient(one.shape, values.device, one.known.copied(values))


def of_rows(rows: GradientRows) -> TableGradient:
    """A gradient with these rows."""
    shape = (rows.count, rows.values.shape[1])
    return TableGradient(shape, rows.values.device, Known(by_row=rows))


# --- operations for which its two numbers are enough, or its values by row --------------------------------------------
# each returns NotImplemented if they are not


def _view(func: Any, args: Any, kwargs: Any) -> TableGradient:
    """A view of the whole gradient: the same gradient."""
    return TableGradient(args[0].shape, args[0].device, args[0].known)


def _copied(func: Any, args: Any, kwargs: Any) -> TableGradient:
    if kwargs.get("dtype", torch.float32) not in (None, torch.float32):
        _refuse(f"a gradient of {kwargs['dtype']}")
    if kwargs.get("device") not in (None, args[0].device):
        _refuse("a copy to another device")
    kwargs = {name: each for name, each in kwargs.items() if name not in ("device", "layout", "memory_format")}
    return _like(args[0], func(args[0].known.values, *args[1:], **kwargs))


def _zeroed(func: Any, args: Any, kwargs: Any) -> Any:
    """Zeros, in place; `fill_` of another number is refused."""
    if args[1:] not in ((), (0,)):
        _refuse("fill_")
    args[0].known.zero()
    return args[0]


def _multiplied(func: Any, args: Any, kwargs: Any) -> Any:
    """Multiplied by a number, a tensor of one element, or itself; or divided by a number."""
    place = 0 if _is(args[0]) else 1
    one, others = args[place], [each for at, each in enumerate(args) if at != place]
    if one.known.by_row is not None:
        return NotImplemented  # zeros times such a factor are NaN
    is_mutable, name = func._schema.is_mutable, func._schema.name.removeprefix("aten::")
    if name == "mul" and _is(others[0]) and others[0].known is one.known:
        return SquaredGradient(one)
    are_numbers = all(not isinstance(each, torch.Tensor) or (each.numel() == 1 and not _is(each)) for each in others)
    if not are_numbers or (place == 1 and name != "mul") or kwargs.get("rounding_mode") is not None:
        return NotImplemented
    numbers = [each.known.values if each is one else _number(each) for each in args]
    values = func(*numbers, **kwargs)
    return one if is_mutable else _like(one, values)


def _number(each: Any) -> Any:
    return each.reshape(()) if isinstance(each, torch.Tensor) else each


def _power(func: Any, args: Any, kwargs: Any) -> Any:
    is_square = _is(args[0]) and args[1:] == (2,) and args[0].known.by_row is None
    return SquaredGradient(args[0]) if is_square else NotImplemented


def _normed(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """A norm over all of its elements."""
    names = [each.name for each in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    order, dims = given.get("ord", given.get("p", 2)), given.get("dim")
    if dims not in (None, [], [0, 1], [-2, -1]) or given.get("keepdim"):
        _refuse("a norm over some of its dimensions")
    found: torch.Tensor = args[0].known.norm(2.0 if order is None else float(order))
    return found.to(given.get("dtype") or found.dtype)


def _checked(func: Any, args: Any, kwargs: Any) -> Any:
    """`nan_to_num_`, which does not change finite gradients. Waits for a GPU."""
    return args[0] if bool(torch.isfinite(args[0].known.values).all()) else NotImplemented


def _overwritten(func: Any, args: Any, kwargs: Any) -> Any:
    one, other = args[0], args[1]
    if not _is(one):
        return one.copy_(other.known.rows().dense())
    if _is(other):
        one.known.overwrite(other.known)
    else:
        one.known.set_rows(GradientRows.of(other, one.shape, one.device))
    return one


def _of_lists(func: Any, args: Any, kwargs: Any) -> Any:
    """A `_foreach_` operation by numbers on gradients of tables and of other parameters."""
    those, *others = args
    numbers = tree_leaves((others, kwargs))
    if any(isinstance(each, torch.Tensor) and (_is(each) or each.numel() != 1) for each in numbers) or any(
        _is(each) and each.known.by_row is not None for each in those
    ):
        return NotImplemented
    plain = [each.known.values if _is(each) else each for each in those]
    results = func(plain, *others, **kwargs)
    if results is None:
        return None
    return [_like(one, each) if _is(one) else each for one, each in zip(those, results, strict=True)]


def _zeroed_lists(func: Any, args: Any, kwargs: Any) -> None:
    for each in filter(_is, args[0]):
        each.known.zero()
    if plain := [each for each in args[0] if not _is(each)]:
        func(plain)


def _normed_lists(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """`_foreach_norm` on lists with gradients of tables."""
    others = [each for each in args[0] if not _is(each)]
    plain = iter(func(others, *args[1:], **kwargs) if others else ())
    order = float(args[1] if len(args) > 1 else kwargs.get("ord", 2))
    return [each.known.norm(order) if _is(each) else next(plain) for each in args[0]]


def _unscaled_lists(func: Any, args: Any, kwargs: Any) -> None:
    """GradScaler's operation on lists of one dtype."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for each in args[0]:
        plain = each.known.values if _is(each) else each
        by_dtype.setdefault(plain.dtype, []).append(plain)
    for those in by_dtype.values():
        func(those, *args[1:], **kwargs)


# --- operations on its elements ---------------------------------------------------------------------------------------


def _by_row(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """A pointwise operation. With a plain tensor of all elements it is computed over all elements, as in torch."""
    leaves = tree_leaves((args, kwargs))
    shape = next(each.shape for each in leaves if _is(each))
    others = [each for each in leaves if isinstance(each, torch.Tensor) and not _is(each)]
    is_mutable, first = func._schema.is_mutable, args[0]
    for each in others:
        if len(each.shape) > 2 or any(
            size not in (1, own) for size, own in zip(each.shape[::-1], shape[::-1], strict=False)
        ):
            raise InvalidInputError(
                f"the gradient of a table of shape {tuple(shape)} has that shape, and {name} is given {shown(each)}"
            )

    def by_row(each: TableGradient) -> GradientRows:
        return each.known.rows()

    if not any(each.shape == shape for each in others):
        if is_mutable and not _is(first):
            _refuse(f"{name} of a plain tensor")
        args, kwargs = tree_map_only(TableGradient, by_row, (args, kwargs))
        rows = pointwise(func, args, kwargs, shape)
        if rows is None:
            return _refuse(name)
        if not is_mutable:
            return of_rows(rows)
        first.known.set_rows(rows)
        return first
    dense = tree_map_only(TableGradient, lambda each: each.known.rows().dense(), (args, kwargs))
    result = func(*dense[0], **dense[1])
    if is_mutable and _is(first):
        first.known.set_rows(GradientRows.of(result, shape, first.device))
        return first
    return result


def one_by_one(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """A `_foreach_` operation on lists, one after the other."""
    of_one, count = getattr(torch.Tensor, name.removeprefix("_foreach_"), None), len(args[0])
    if of_one is None:
        return _refuse(name)

    def of(at: int) -> Any:
        return [each[at] if isinstance(each, list | tuple) and len(each) == count else each for each in args]

    results = [of_one(*of(at), **kwargs) for at in range(count)]
    return None if func._schema.is_mutable else results


def _summed(func: Any, args: Any, kwargs: Any) -> Any:
    """Sum or mean of all elements."""
    names = [each.name for each in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if given.get("dim") not in (None, [], [0, 1], [-2, -1]) or given.get("keepdim"):
        return NotImplemented
    total = args[0].known.rows().values.sum(dtype=given.get("dtype"))
    return total / args[0].numel() if func._schema.name == "aten::mean" else total


def _counted(func: Any, args: Any, kwargs: Any) -> Any:
    """Reductions to which zeros add nothing: `count_nonzero`, `any`."""
    if len(args) > 1 or kwargs:
        return NotImplemented
    return func(args[0].known.rows().values)


def _extreme(func: Any, args: Any, kwargs: Any) -> Any:
    """The largest or smallest element, including zeros of rows that it does not reach."""
    if args[1:] not in ((), ([],), ([0, 1],)) or kwargs:
        return NotImplemented
    rows = args[0].known.rows()
    values = rows.values.reshape(-1)
    return func(values if len(rows.ids) == rows.count else torch.cat([values, values.new_zeros(1)]))


def _as_sparse(func: Any, args: Any, kwargs: Any) -> Any:
    if any(each is not None for each in (*args[1:], *kwargs.values())):
        return NotImplemented
    return args[0].known.rows().sparse()


def _rows_of(index: Any, rows: int, device: torch.device) -> torch.Tensor:
    """The row numbers, int64 (K,), that an index selects."""
    if isinstance(index, tuple):
        if len(index) != 1 and not all(each == slice(None) for each in index[1:]):
            _refuse("a choice of columns")
        index = index[0]
    if isinstance(index, torch.Tensor) and index.dim() != 1:
        _refuse("a choice of elements")
    return torch.arange(rows, device=device)[index].reshape(-1)


def _set_rows(one: TableGradient, index: Any, value: Any) -> None:
    """`gradient[index] = value`, of rows."""
    rows, device = one.known.rows(), one.device
    at = torch.unique(_rows_of(index, rows.count, device))
    ids = torch.unique(torch.cat([rows.ids, at]))
    values = rows.at(ids)
    if isinstance(value, torch.Tensor) and value.dim() > 1:
        _refuse("an assignment of rows")
    values[torch.isin(ids, at)] = value if not isinstance(value, torch.Tensor) else value.to(device, torch.float32)
    one.known.set_rows(GradientRows(ids, values, rows.count))


def _rows_at(one: TableGradient, index: Any) -> torch.Tensor:
    """`gradient[ids]`: a copy of rows, float32 (K, D). An index that would make a view is refused."""
    if not isinstance(index, torch.Tensor | list):
        _refuse("a view")
    rows = one.known.rows()
    index = index if isinstance(index, torch.Tensor) else torch.tensor(index, device="cpu")
    return rows.at(_rows_of(index, rows.count, one.device))


_PLAIN = (torch.Tensor, torch.nn.Parameter)
_T: Any = torch.Tensor  # whose dunder methods are not all typed
_DATA: Any = torch.Tensor.data
_FLAGS = {"isfinite", "isinf", "isnan"}
_OF_MEMORY = {"tolist", "numpy", "__array__", "data_ptr", "untyped_storage", "storage", "__dlpack__", "share_memory_"}
_SAME_SHAPE = {"view", "_unsafe_view", "reshape", "expand", "_reshape_alias"}
_POINTWISE = {
    "masked_fill",
    "masked_fill_",
    "where",
    "nan_to_num",
    "nan_to_num_",
}  # without torch's tag in old versions
_OPERATIONS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "alias": _view, "detach": _view, "lift_fresh": _view,
    "clone": _copied, "_to_copy": _copied, "zeros_like": _copied,
    "zero_": _zeroed, "fill_": _zeroed, "copy_": _overwritten,
    "mul": _multiplied, "mul_": _multiplied, "div": _multiplied, "div_": _multiplied,
    "neg": _multiplied, "neg_": _multiplied, "pow": _power,
    "norm": _normed, "linalg_vector_norm": _normed, "nan_to_num_": _checked,
    "sum": _summed, "mean": _summed, "max": _extreme, "min": _extreme, "amax": _extreme, "amin": _extreme,
    "count_nonzero": _counted, "any": _counted, "to_sparse": _as_sparse,
    "_to_sparse": _as_sparse, "record_stream": lambda func, args, kwargs: None,
    "_foreach_mul": _of_lists, "_foreach_mul_": _of_lists, "_foreach_div": _of_lists, "_foreach_div_": _of_lists,
    "_foreach_zero_": _zeroed_lists, "_foreach_norm": _normed_lists,
    "_amp_foreach_non_finite_check_and_unscale_": _unscaled_lists,
}  # fmt: skip


def empty_of(each: torch.Tensor) -> torch.Tensor:
    """A tensor of its shape, dtype and device, without elements of its own."""
    return torch.empty((), dtype=each.dtype, device=each.device).expand(each.shape)
