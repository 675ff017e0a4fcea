"""A parameter that stands for a table in a torch optimizer.

A table has no gradient tensor, so its stand-in has one of two numbers: the L2 norm of the table's gradient, and a
constant so small (`TRACE`) that it adds nothing to a norm. GradScaler finds infinities in the first, and
`clip_grad_norm_` the right norm. Whatever all of them multiply it by is read from the second, exactly, and also where
the norm is zero or infinite. That factor is what the update multiplies the table's gradient by.

torch's consumers read `.grad` in Python (GradScaler, `clip_grad_norm_`, `Optimizer`, `zero_grad`), and so it is a
property: a norm that nobody reads is never computed.
"""

from __future__ import annotations

import sys
import weakref
from types import CodeType, FrameType
from typing import Any, Protocol

import torch

from tieredemb.errors import UnsupportedError

# its square is beyond float32's precision beside a norm of 1e-10; and factors down to 1e-24, a scale's of 2^24 and a
# clipping's together, leave it a normal float32
TRACE = 2.0**-48
_ZEROING, _CLIPPING, _OTHER = object(), object(), object()  # who asks for a gradient
_CLIPS = torch.nn.utils.clip_grad.__file__
_ZEROES = ("torch.optim.optimizer", "torch.nn.modules.module")
_KNOWN: dict[CodeType, object] = {}  # code of torch's, and which of them it is: each step asks for each table


class Gradients(Protocol):
    """The gradients of tables, by number, as their stand-ins show them."""

    def read(self, table: int) -> torch.Tensor | None:
        """The `.grad` of a table's stand-in: float32 (2,), or None where the table has no gradient."""

    def write(self, table: int, value: torch.Tensor | None) -> None:
        """Replaces that; None drops the table's gradient."""

    def zeroed(self, table: int) -> torch.Tensor | None:
        """As `read`, of a `zero_grad()` that is about to zero or to drop the gradient: those of all tables are zeros
        from here on."""


class StandIn(torch.nn.Parameter):
    """Stands for table number `table` of a module. Its own value, float32 (2,), means nothing and never changes."""

    table: int
    gradients: weakref.ref[Gradients] | None = None

    def __new__(cls, data: torch.Tensor | None = None, requires_grad: bool = True, table: int = 0) -> StandIn:
        values = torch.zeros(2, dtype=torch.float32) if data is None else data
        made: StandIn = super().__new__(cls, values, requires_grad)
        made.table, made.gradients = table, None
        return made

    @property
    def grad(self) -> torch.Tensor | None:  # type: ignore[override]
        """The norm of the table's gradient and `TRACE`, float32 (2,); zeros from a step on until the next backward;
        None without a gradient. Computed when it is read first; does not synchronise with a GPU."""
        gradients = None if self.gradients is None else self.gradients()
        if gradients is None:
            return None
        frame = sys._getframe(1)
        asks = _KNOWN.get(frame.f_code)
        if asks is None:
            asks = _who_asks(frame)
        if asks is _ZEROING:
            return gradients.zeroed(self.table)
        if asks is _CLIPPING:
            _refuse_what_norms_cannot_tell(frame)
        return gradients.read(self.table)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        gradients = None if self.gradients is None else self.gradients()
        if gradients is not None:
            gradients.write(self.table, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def __deepcopy__(self, memo: dict[int, Any]) -> StandIn:
        """A copy has no gradient: it belongs to a copy of the tables, which follows nobody yet."""
        if id(self) not in memo:
            memo[id(self)] = StandIn(self.data.clone(), self.requires_grad, self.table)
        copied: StandIn = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return StandIn, (self.data, self.requires_grad, self.table)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"StandIn(table {self.table})"


def _who_asks(frame: FrameType) -> object:
    """Torch's `zero_grad()`, of an optimizer or of a module, which looks at each gradient first; its clipping; or any
    other code."""
    code, module = frame.f_code, str(frame.f_globals.get("__name__"))
    asks = _OTHER
    if code.co_name == "zero_grad" and module in _ZEROES:
        asks = _ZEROING
    elif code.co_filename == _CLIPS:
        asks = _CLIPPING
    if module.startswith("torch."):  # of which there is no more than there was
        _KNOWN[code] = asks
    return asks


def _refuse_what_norms_cannot_tell(asks: FrameType) -> None:
    """Raises `UnsupportedError` inside of torch's clipping by what a gradient's L2 norm does not tell."""
    frame: Any = asks
    for _ in range(2):  # before Python 3.12 a comprehension has a frame of its own
        if frame is None or frame.f_code.co_filename != _CLIPS:
            return
        name = frame.f_code.co_name
        if name == "clip_grad_value_":
            raise UnsupportedError(
                "clip_grad_value_ needs each element of a table's gradient, which is nowhere held whole; clip by a "
                "norm with torch's clip_grad_norm_ or tieredemb.clip_grad_norm_, or leave the tables' stand-ins out"
            )
        if name == "clip_grad_norm_" and float(frame.f_locals.get("norm_type", 2.0)) != 2.0:
            raise UnsupportedError(
                f"torch's clip_grad_norm_ knows a table's gradient by its L2 norm, got "
                f"norm_type={frame.f_locals['norm_type']!r}; call tieredemb.clip_grad_norm_(parameters, max_norm, "
                f"norm_type), which takes any"
            )
        frame = frame.f_back
