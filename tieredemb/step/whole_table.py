"""Tables that a loss uses as a whole, with a gradient that reaches all rows; read in chunks where that is possible.

Products with all rows, sums over all elements and norms hold no more than a chunk of a table, or of its gradient,
in addition to what they return. All other operations read the rows into one tensor, whose gradient is one, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map_only

from tieredemb.errors import UnsupportedError
from tieredemb.kernels.tracing import untraced
from tieredemb.step.program import BACKWARDS
from tieredemb.step.whole_gradient import (
    DenseTerm,
    NormTerm,
    ProductTerm,
    ReducedTerm,
    Term,
    WholeUse,
    are_largest,
    spans,
)


class Rows(Protocol):
    """Who has the rows of tables, by number, and their gradients."""

    def use(self, table: int) -> WholeUse:
        """A use of a table as a whole, that begins now."""

    def chunk_rows(self, table: int) -> int:
        """How many rows of a table are read at a time."""

    def read_rows(self, table: int, start: int, stop: int) -> torch.Tensor:
        """The rows `start` … `stop` − 1 on the table's device, (K, D), a copy. Waits for a GPU over staged tiers.
        Raises `StorageFullError` or `DeviceMemoryError` where memory cannot hold them."""


class Span:
    """The rows `start` … `stop` − 1 of table number `table`, which `rows` have. Raises `UnsupportedError` in a captured
    step."""

    def __init__(self, rows: Rows, table: int, start: int, stop: int, device: torch.device) -> None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                "a loss that uses a table as a whole reads it chunk by chunk, which a captured step cannot do; run the "
                "step eagerly"
            )
        self.rows, self.table, self.start, self.stop = rows, table, start, stop
        self.chunks: list[tuple[int, int]] = list(spans(rows.chunk_rows(table), start, stop))
        self._kept: torch.Tensor | None = None

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Some of them. Where they are one chunk, they are read once, and kept for the gradient."""
        if self._kept is not None:
            return self._kept
        found = self.rows.read_rows(self.table, start, stop)
        if len(self.chunks) == 1:
            self._kept = found
        return found

    def whole(self) -> torch.Tensor:
        """All of them, (K, D), which others may change."""
        return self.rows.read_rows(self.table, self.start, self.stop)


def _leaf() -> torch.Tensor:
    """Autograd's input in place of a table: it requires a gradient, so that the backward is called."""
    return torch.zeros(0, device="cpu", requires_grad=True)


def _collect(ctx: Any, term: Callable[[], Term]) -> None:
    """Adds the term of a backward to the present backward pass, or to the `torch.autograd.grad` that requests it."""
    for listener in tuple(BACKWARDS):
        listener()
    use: WholeUse = ctx.call
    if use.requested is not None:
        use.requested.append((use, term()))
    elif torch._C._will_engine_execute_node(ctx.next_functions[0][0]):
        use.context.check_trainable()
        use.context.backward_pass.add((use, term()))


class _Used(torch.autograd.Function):
    """The result of `compute` on the rows of a span. `term`: what its gradient adds to that of the rows · `reads_rows`:
    whether the term is computed from the rows, which must not have changed then."""

    @staticmethod
    def forward(
        ctx: Any,
        leaf: torch.Tensor,
        span: Span,
        compute: Callable[[], torch.Tensor],
        term: Callable[[WholeUse, torch.Tensor], Term],
        reads_rows: bool,
    ) -> torch.Tensor:
        ctx.call, ctx.term, ctx.reads_rows = span.rows.use(span.table), term, reads_rows
        return compute()

    @staticmethod
    @untraced
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, None, None, None]:
        if ctx.reads_rows:
            ctx.call.check()
        _collect(ctx, lambda: ctx.term(ctx.call, grad))
        return None, None, None, None, None


def _used(
    span: Span,
    compute: Callable[[], torch.Tensor],
    term: Callable[[WholeUse, torch.Tensor], Term],
    *,
    reads_rows: bool = True,
) -> torch.Tensor:
    found: torch.Tensor = _Used.apply(_leaf(), span, compute, term, reads_rows)  # type: ignore[no-untyped-call]
    return found


def read(span: Span) -> torch.Tensor:
    """All rows of a span, (K, D), with a gradient for them."""
    return _used(span, span.whole, lambda _, grad: DenseTerm(span.start, grad), reads_rows=False)


# --- products ---------------------------------------------------------------------------------------------------------


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, x: torch.Tensor, span: Span) -> torch.Tensor:
        ctx.call, ctx.span = span.rows.use(span.table), span
        ctx.save_for_backward(x)
        out = x.new_empty((len(x), span.stop - span.start), dtype=_product_dtype(x))
        x = x.to(out.dtype)
        for start, stop in span.chunks:
            rows = span.read(start, stop).to(out.dtype)
            torch.mm(x, rows.T, out=out[:, start - span.start : stop - span.start])  # autocast leaves out= alone
        return out

    @staticmethod
    @untraced
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor | None, None]:
        (x,), span, of_x = ctx.saved_tensors, ctx.span, None
        if ctx.needs_input_grad[1]:
            ctx.call.check()
            total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
            for start, stop in span.chunks:
                some = grad[:, start - span.start : stop - span.start]
                total += some @ span.read(start, stop).to(grad.dtype)
            of_x = total.to(x.dtype)
        _collect(ctx, lambda: ProductTerm(span.start, grad, x.detach()))
        return None, of_x, None


def _product_dtype(x: torch.Tensor) -> torch.dtype:
    """Of a product with x: its own, unless autocast has chosen another."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def product(x: torch.Tensor, span: Span) -> torch.Tensor:
    """`x @ rows.T`: x is (…, D), in the dtype of the rows or as autocast has it; (…, K)."""
    flat = x.reshape(-1, x.shape[-1])
    found: torch.Tensor = _Product.apply(_leaf(), flat, span)  # type: ignore[no-untyped-call]
    return found.reshape(*x.shape[:-1], found.shape[-1])


# --- numbers of all elements ------------------------------------------------------------------------------------------


def total(span: Span, function: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The sum of a pointwise `function` of all elements: () of a dtype."""

    def compute() -> torch.Tensor:
        made = (function(span.read(start, stop)) for start, stop in span.chunks)
        return torch.stack([each.sum(dtype=torch.float32) for each in made])

    def term(use: WholeUse, grad: torch.Tensor) -> Term:
        return ReducedTerm(use, span.chunks, span.read, function, grad)

    return _used(span, compute, term).sum().to(dtype)


def norm(span: Span, order: float, dtype: torch.dtype) -> torch.Tensor:
    """The norm of all elements, of an order above 0 or infinite: () of a dtype."""
    norms = list[torch.Tensor]()

    def of_chunk(rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.linalg.vector_norm(rows, order, dtype=torch.float32)
        return found

    def compute() -> torch.Tensor:
        norms.append(of_chunk(torch.stack([of_chunk(span.read(start, stop)) for start, stop in span.chunks])))
        return norms[0].clone()  # the gradient is made of the norm, and users may change what they get

    def term(use: WholeUse, grad: torch.Tensor) -> Term:
        (found,), ties = norms, None
        if math.isinf(order):
            ties = torch.zeros_like(found)
            for start, stop in span.chunks:
                ties += are_largest(span.read(start, stop), found).sum()
        return NormTerm(use, (span.start, span.stop), span.read, order, found, ties, grad)

    return _used(span, compute, term).to(dtype)


class Elements(torch.Tensor):
    """A `function` of each element of the rows of a `span`, (K, D), computed when they are read: their sum needs no
    more than a chunk."""

    span: Span | None  # None once all of them are computed
    _use: WholeUse
    _found: torch.Tensor | None
    function: Callable[[torch.Tensor], torch.Tensor]

    @staticmethod
    def __new__(
        cls,
        span: Span,
        function: Callable[[torch.Tensor], torch.Tensor],
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Elements:
        made: Elements = torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype, device=device)
        made.span, made.function = span, function
        made._use, made._found = span.rows.use(span.table), None
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Elements(size={tuple(self.shape)}, dtype={self.dtype})"

    def check(self) -> None:
        """Raises `BackwardError` where the rows are others by now."""
        self._use.check()

    def whole(self) -> torch.Tensor:
        """All of them, as one tensor, which stands for them from here on, so that it may be changed in place. Raises
        `BackwardError` where the rows are others by now."""
        if self._found is None:
            assert self.span is not None
            self._use.check()
            self._found, self.span = self.function(read(self.span)), None
        return self._found

    @classmethod
    @untraced
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, Elements):
            if func == _T.requires_grad.__get__:
                return True
            if func == _T.is_leaf.__get__:
                return False
            if func in _GETTERS or getattr(func, "__name__", "") in _LOOKS:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            found = elements(func, first, args, kwargs)
            if found is not NotImplemented:
                return found
        args, kwargs = tree_map_only(Elements, Elements.whole, (tuple(args), kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if torch.is_grad_enabled():  # the gradient would be missing silently
            raise UnsupportedError(f"{func} of elements of a table; take a copy of the table by weight.clone() first")
        args, kwargs = tree_map_only(Elements, Elements.whole, (args, kwargs or {}))
        return func(*args, **kwargs)


def elements(func: Callable[..., Any], of: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What a function of torch makes of `of`, its first argument, the elements of a table or `Elements`, where that
    takes no more than a chunk at a time; else NotImplemented. `of.span` is None where it is not of whole rows."""
    name, span = getattr(func, "__name__", ""), of.span
    if "out" in kwargs and kwargs["out"] is None:  # as torch.norm passes it
        kwargs = {key: value for key, value in kwargs.items() if key != "out"}
    if span is None or not span.chunks or "out" in kwargs or (name.endswith("_") and not name.endswith("__")):
        return NotImplemented
    name = name.strip("_")
    if isinstance(of, Elements):
        of.check()
    inner = of.function if isinstance(of, Elements) else _itself
    if name in ("sum", "mean") and args[1:] in ((), ([],), (None,)) and not kwargs:
        found = total(span, inner, of.dtype)
        return found / of.numel() if name == "mean" else found
    if name in _NORMS and type(of) is not Elements:
        order = _order_of(func, args, kwargs)
        return NotImplemented if order is None else norm(span, order, of.dtype)
    others = [*args[1:], *kwargs.values()]
    is_of_itself = name == "mul" and len(others) == 1 and others[0] is of
    if name not in _POINTWISE or not (is_of_itself or all(_is_number(each) for each in others)):
        return NotImplemented

    given = [each.clone() if isinstance(each, torch.Tensor) else each for each in args[1:]]

    def function(rows: torch.Tensor) -> torch.Tensor:
        values = inner(rows)
        found: torch.Tensor = values * values if is_of_itself else func(values, *given, **kwargs)
        return found

    return Elements(span, function, of.shape, of.dtype, of.device)


def _itself(rows: torch.Tensor) -> torch.Tensor:
    return rows


def _is_number(given: Any) -> bool:
    """Whether it is a number that has no gradient."""
    if isinstance(given, torch.Tensor):
        return type(given) is torch.Tensor and given.dim() == 0 and not given.requires_grad
    return isinstance(given, (int, float))


def _order_of(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> float | None:
    """The order of a norm over all elements, above 0; None for others."""
    given = dict(zip(("p", "dim", "keepdim", "dtype"), args[1:], strict=False)) | kwargs
    order = given.pop("p", given.pop("ord", 2))
    if any(value not in (None, False, [0, 1], (0, 1)) for value in given.values()):
        return None
    if getattr(func, "__name__", "") == "linalg_norm" and order not in (None, "fro"):
        return None  # of a matrix
    order = 2.0 if order in (None, "fro") else order
    is_order = isinstance(order, (int, float)) and not isinstance(order, bool)
    return float(order) if is_order and order > 0 else None


_T: Any = torch.Tensor
_NORMS = {"norm", "linalg_vector_norm", "linalg_norm", "frobenius_norm"}
_POINTWISE = {
    "abs", "absolute", "div", "divide", "mul", "multiply", "neg", "negative", "pow", "rmul", "square", "truediv",
}  # fmt: skip
_GETTERS = {each.__get__ for each in (_T.shape, _T.dtype, _T.device, _T.ndim, _T.layout, _T.is_cuda)}
_LOOKS = {"size", "dim", "numel", "nelement", "is_floating_point", "__len__", "__repr__"}
