"""The gradient of a table, as code finds it in `.grad` of its parameter, (rows, D).

Nowhere is it held whole. Known of it are two numbers, float32 (2,): its L2 norm, and a constant so small (`TRACE`) that
it adds nothing to a norm. Whatever the gradient is multiplied by is read from the second, exactly, and also where the
norm is zero or infinite: that factor is what the update multiplies the gradients of outputs by. So `GradScaler` finds
infinities, `clip_grad_norm_` the right norm of any order, and both may scale it. What needs its elements is refused.

The numbers are computed when they are first needed: a step in which nobody reads them pays nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.utils._foreach_utils import _foreach_supported_types
from torch.utils._pytree import tree_leaves, tree_map_only

from tieredemb.errors import UnsupportedError
from tieredemb.step.call import untraced

# its square is beyond float32's precision beside a norm of 1e-10; and factors down to 1e-24, a scale's of 2^24 and a
# clipping's together, leave it a normal float32
TRACE = 2.0**-48


class Source(Protocol):
    """Who has the gradients of tables, by number."""

    epoch: int  # how often they have become others, so that numbers of before are no longer theirs

    def values(self, table: int) -> torch.Tensor:
        """The two numbers of one, float32 (2,), which may be changed in place. Raises `UnsupportedError` for one that
        is not there."""

    def zero(self, table: int) -> None:
        """Makes it zeros."""

    def norms(self, norm_type: float) -> torch.Tensor:
        """The norms of all, float32 (T,)."""


class Known:
    """What is known of the gradient of a `table`: what its `source` says now, or numbers of its `own`, of a copy that
    was made in the `epoch` of then. It keeps no source alive."""

    def __init__(self, source: Source, table: int, own: torch.Tensor | None = None) -> None:
        self._source, self.table, self.own = weakref.ref(source), table, own
        self._epoch = source.epoch

    @property
    def source(self) -> Source:
        """Raises `UnsupportedError` where it is gone."""
        found = self._source()
        if found is None:
            raise UnsupportedError("the table that this gradient is of is gone")
        return found

    @property
    def epoch(self) -> int:
        """That of its numbers."""
        return self.source.epoch if self.own is None else self._epoch

    @property
    def values(self) -> torch.Tensor:
        """Float32 (2,)."""
        return self.source.values(self.table) if self.own is None else self.own

    def copied(self, values: torch.Tensor) -> Known:
        """Of a copy, with numbers of its own."""
        made = Known(self.source, self.table, values)
        made._epoch = self.epoch
        return made

    def is_of(self, other: Known) -> bool:
        """Whether both are of one gradient as it is now."""
        return (self._source, self.table, self.epoch) == (other._source, other.table, other.epoch)

    def overwrite(self, other: Known) -> None:
        """Becomes what the other is: a copy of the same gradient, or zeros. Raises `UnsupportedError` for another."""
        if self.is_of(other):
            if other.own is not None or self.own is not None:
                self.values.copy_(other.values)
        elif other.own is None or bool(other.own.any()):
            raise UnsupportedError(
                "a table's gradient can be replaced by a copy of itself, multiplied by a number, and by zeros; got one "
                "of another table, or of before its last backward or step"
            )
        else:
            self.zero()

    def zero(self) -> None:
        if self.own is None:
            self.source.zero(self.table)
        else:
            self.own.zero_()

    def norm(self, order: float) -> torch.Tensor:
        """Its norm of that order, float32 ()."""
        if order == 2.0:
            return self.values[0].abs()
        if not order > 0:
            _refuse(f"a norm of order {order}")
        if self.own is not None:
            raise UnsupportedError(
                f"of a copy of a table's gradient its L2 norm alone is known, and not that of order {order}"
            )
        return self.source.norms(order)[self.table].clone()


class TableGradient(torch.Tensor):
    """The gradient of a table, float32 (rows, D). `known`: what it is; views share it."""

    known: Known

    @staticmethod
    def __new__(cls, shape: Sequence[int], device: torch.device, known: Known) -> TableGradient:
        made: TableGradient = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, torch.Size(shape), dtype=torch.float32, device=device
        )
        made.known = known
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Its norm, size and device. Waits for a GPU."""
        try:
            norm = f"{self.known.values[0].item():.4g}"
        except UnsupportedError:
            norm = "dropped"
        return f"TableGradient(norm={norm}, size={tuple(self.shape)}, device={str(self.device)!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> TableGradient:
        if id(self) not in memo:
            memo[id(self)] = self.clone()
        copied: TableGradient = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError("the gradient of a table cannot be pickled: nowhere is it held whole")

    @classmethod
    @untraced
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if func == _DATA.__set__ and _is(args[0]):
            return _overwritten(func, args, {})
        if name in _FLAGS and args and _is(args[0]):
            args = (args[0].known.values,)
        elif name in _OF_MEMORY:
            _refuse(name)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs, name = kwargs or {}, func._schema.name.removeprefix("aten::")
        operation = _OPERATIONS.get(name)
        if operation is not None:
            return operation(func, args, kwargs)
        if name.endswith("_like") or name.startswith("new_"):
            return func(*tree_map_only(TableGradient, empty_of, args), **kwargs)
        return _refuse(name)


class SquaredGradient(torch.Tensor):
    """The square of a table's gradient, float32 (rows, D), of which nothing but the sum is known."""

    _sum: torch.Tensor

    @staticmethod
    def __new__(cls, gradient: TableGradient) -> SquaredGradient:
        made: SquaredGradient = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, gradient.shape, dtype=torch.float32, device=gradient.device
        )
        made._sum = gradient.known.values.square().sum()
        return made

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"SquaredGradient(size={tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.sum.default:
            return args[0]._sum
        return _refuse(func._schema.name.removeprefix("aten::"))


_foreach_supported_types.append(TableGradient)  # torch clips lists that have one as it clips those of plain tensors


def _refuse(name: str) -> Any:
    raise UnsupportedError(
        f"{name.removeprefix('_foreach_')} needs each element of a table's gradient, which is nowhere held whole: its "
        f"norms are known, and it can be multiplied by a number. step() of the optimizer that the table follows "
        f"applies it to the rows. Clip by a norm, with torch's clip_grad_norm_ or tieredemb.clip_grad_norm_; leave "
        f"tables out of other changes of gradients, or leave the embedding out of the conversion by exclude="
    )


def _is(each: Any) -> bool:
    return isinstance(each, TableGradient)


def _like(one: TableGradient, values: torch.Tensor) -> TableGradient:
    """A copy of a gradient, of which `values` are known."""
    return TableGradient(one.shape, values.device, one.known.copied(values))


def _view(func: Any, args: Any, kwargs: Any) -> TableGradient:
    """The same gradient once more."""
    return TableGradient(args[0].shape, args[0].device, args[0].known)


def _copied(func: Any, args: Any, kwargs: Any) -> TableGradient:
    if kwargs.get("dtype", torch.float32) not in (None, torch.float32):
        _refuse(f"a gradient of {kwargs['dtype']}")
    return _like(args[0], func(args[0].known.values, *args[1:], **kwargs))


def _zeroed(func: Any, args: Any, kwargs: Any) -> Any:
    """Zeros, in place; `fill_` of another number is refused."""
    if args[1:] not in ((), (0,)):
        _refuse("fill_")
    args[0].known.zero()
    return args[0]


def _multiplied(func: Any, args: Any, kwargs: Any) -> Any:
    """By a number or a tensor of one, or by itself; divided by a number."""
    place = 0 if _is(args[0]) else 1
    one, others = args[place], [each for at, each in enumerate(args) if at != place]
    is_mutable, name = func._schema.is_mutable, func._schema.name.removeprefix("aten::")
    if name == "mul" and _is(others[0]) and others[0].known is one.known:
        return SquaredGradient(one)
    are_numbers = all(not isinstance(each, torch.Tensor) or (each.numel() == 1 and not _is(each)) for each in others)
    if not are_numbers or (place == 1 and name != "mul") or kwargs.get("rounding_mode") is not None:
        _refuse(name)
    numbers = [each.known.values if each is one else _number(each) for each in args]
    values = func(*numbers, **kwargs)
    return one if is_mutable else _like(one, values)


def _number(each: Any) -> Any:
    return each.reshape(()) if isinstance(each, torch.Tensor) else each


def _power(func: Any, args: Any, kwargs: Any) -> SquaredGradient:
    if args[1] != 2:
        _refuse("pow")
    return SquaredGradient(args[0])


def _normed(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """Over all of its elements."""
    names = [each.name for each in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    order, dims = given.get("ord", given.get("p", 2)), given.get("dim")
    if dims not in (None, [], [0, 1], [-2, -1]) or given.get("keepdim"):
        _refuse("a norm over some of its dimensions")
    found: torch.Tensor = args[0].known.norm(2.0 if order is None else float(order))
    return found.to(given.get("dtype") or found.dtype)


def _checked(func: Any, args: Any, kwargs: Any) -> Any:
    """`nan_to_num_`, which leaves what is finite as it is. Waits for a GPU."""
    if not bool(torch.isfinite(args[0].known.values).all()):
        _refuse("nan_to_num_ of what is not finite")
    return args[0]


def _overwritten(func: Any, args: Any, kwargs: Any) -> Any:
    if not _is(args[1]):
        _refuse("copy_ of a tensor")
    args[0].known.overwrite(args[1].known)
    return args[0]


def _of_lists(func: Any, args: Any, kwargs: Any) -> Any:
    """A `_foreach_` operation by numbers on gradients of tables and of other parameters."""
    those, *others = args
    if any(
        isinstance(each, torch.Tensor) and (_is(each) or each.numel() != 1) for each in tree_leaves((others, kwargs))
    ):
        _refuse(func._schema.name.removeprefix("aten::"))
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
    """Of gradients of tables the norms that are known, among those of the others."""
    others = [each for each in args[0] if not _is(each)]
    plain = iter(func(others, *args[1:], **kwargs) if others else ())
    order = float(args[1] if len(args) > 1 else kwargs.get("ord", 2))
    return [each.known.norm(order) if _is(each) else next(plain) for each in args[0]]


def _unscaled_lists(func: Any, args: Any, kwargs: Any) -> None:
    """GradScaler's; it takes lists of one dtype."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for each in args[0]:
        plain = each.known.values if _is(each) else each
        by_dtype.setdefault(plain.dtype, []).append(plain)
    for those in by_dtype.values():
        func(those, *args[1:], **kwargs)


_DATA: Any = torch.Tensor.data
_FLAGS = {"isfinite", "isinf", "isnan"}  # of its two numbers: whether all of it is, or any
_OF_MEMORY = {"tolist", "numpy", "__array__", "data_ptr", "untyped_storage", "storage", "__dlpack__", "share_memory_"}
_OPERATIONS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "alias": _view, "detach": _view, "lift_fresh": _view,
    "clone": _copied, "_to_copy": _copied, "zeros_like": _copied,
    "zero_": _zeroed, "fill_": _zeroed, "copy_": _overwritten,
    "mul": _multiplied, "mul_": _multiplied, "div": _multiplied, "div_": _multiplied,
    "neg": _multiplied, "neg_": _multiplied, "pow": _power,
    "norm": _normed, "linalg_vector_norm": _normed, "nan_to_num_": _checked,
    "_foreach_mul": _of_lists, "_foreach_mul_": _of_lists, "_foreach_div": _of_lists, "_foreach_div_": _of_lists,
    "_foreach_zero_": _zeroed_lists, "_foreach_norm": _normed_lists,
    "_amp_foreach_non_finite_check_and_unscale_": _unscaled_lists,
}  # fmt: skip


def empty_of(each: torch.Tensor) -> torch.Tensor:
    """A tensor of its shape, dtype and device, without elements of its own."""
    return torch.empty((), dtype=each.dtype, device=each.device).expand(each.shape)
