"""Which elements of a table's gradient are finite, infinite or NaN: bool (rows, D). Known is only whether all or any
are, and how many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tieredemb.errors import UnsupportedError


class GradientFlags(torch.Tensor):
    """`flags`: for the known values of the gradient · `rest`: for the zeros elsewhere · `stands_for`: whether `flags`
    are of elements, and not of a norm of all of them."""

    flags: torch.Tensor
    rest: bool
    stands_for: bool

    @staticmethod
    def __new__(cls, shape: Sequence[int], flags: torch.Tensor, rest: bool, stands_for: bool) -> GradientFlags:
        made: GradientFlags = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=torch.bool, device=flags.device
        )
        made.flags, made.rest, made.stands_for = flags, rest, stands_for
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GradientFlags(any={bool(_any(self))}, size={tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        operation = _OPERATIONS.get(func)
        if operation is None or not isinstance(args[0], GradientFlags) or (not args[0].stands_for and func in _COUNTS):
            raise UnsupportedError(
                f"{func._schema.name.removeprefix('aten::')} of flags of a table's gradient, of which is known whether "
                f"all or any are set; to change such elements use torch.nan_to_num_(parameter.grad), or to_sparse()"
            )
        return operation(args[0])


def _all(given: GradientFlags) -> torch.Tensor:
    is_whole = not given.stands_for or given.flags.numel() == given.numel()
    return given.flags.all() if given.rest or is_whole else torch.zeros_like(given.flags.all())


def _any(given: GradientFlags) -> torch.Tensor:
    is_whole = not given.stands_for or given.flags.numel() == given.numel()
    return given.flags.any() if not given.rest or is_whole else torch.ones_like(given.flags.any())


def _sum(given: GradientFlags) -> torch.Tensor:
    return given.flags.sum() + (given.numel() - given.flags.numel()) * given.rest


def _not(given: GradientFlags) -> GradientFlags:
    return GradientFlags(given.shape, ~given.flags, not given.rest, given.stands_for)


_ATEN: Any = torch.ops.aten
_COUNTS = {_ATEN.sum.default, _ATEN.count_nonzero.default}
_OPERATIONS: dict[Any, Callable[[GradientFlags], torch.Tensor]] = {
    _ATEN.all.default: _all, _ATEN.any.default: _any, _ATEN.sum.default: _sum, _ATEN.count_nonzero.default: _sum,
    _ATEN.logical_not.default: _not, _ATEN.bitwise_not.default: _not,
}  # fmt: skip
