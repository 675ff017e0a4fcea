"""A parameter that stands for a table in a torch optimizer.

A table has no gradient tensor, so its stand-in has one of two numbers: the L2 norm of the table's gradient, and a
constant so small (`TRACE`) that it adds nothing to a norm. GradScaler finds infinities in the first, and
`clip_grad_norm_` the right norm. Whatever all of them multiply it by is read from the second, exactly, and also where
the norm is zero or infinite. That factor is what the update multiplies the table's gradient by.

torch's consumers read `.grad` in Python (GradScaler, `clip_grad_norm_`, `Optimizer`, `zero_grad`), and so it is a
property: a norm that nobody reads is never computed.

Its value is two tiny numbers (`VALUE`), and no zeros: a term of the loss that code computes over `parameters()`, an L2
regulariser for one, then has a gradient by which it is noticed.
"""

from __future__ import annotations

import functools
import sys
import warnings
import weakref
from collections.abc import Mapping
from operator import attrgetter, is_
from types import CodeType, FrameType
from typing import Any, Protocol

import torch

from tieredemb.errors import UnsupportedError
from tieredemb.kernels.inference import no_inference

# its square is beyond float32's precision beside a norm of 1e-10; and factors down to 1e-24, a scale's of 2^24 and a
# clipping's together, leave it a normal float32
TRACE = 2.0**-48
VALUE = 2.0**-20  # its square adds nothing to a loss
COPIED = 2 * VALUE  # that of a copy that follows nobody, so that an average over it and who trains is neither
_ZEROING, _CLIPPING, _STEPPING, _OTHER = object(), object(), object(), object()  # who asks for a gradient
_CLIPS = torch.nn.utils.clip_grad.__file__
_ZEROES = ("torch.optim.optimizer", "torch.nn.modules.module")
_DATA: Any = torch.Tensor.data
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


class Asked(Protocol):
    """All that follow an optimizer. `asks`: the frame of its own code, inside a step, that has asked one of them
    last."""

    asks: FrameType | None


class OfFollowed(Gradients, Protocol):
    """Those of tables that follow an `optimizer`, or will."""

    optimizer: torch.optim.Optimizer | None

    @property
    def followers(self) -> Asked | None:
        """All that follow it."""

    @property
    def is_gradient_there(self) -> bool:
        """Whether the tables have a gradient, if of zeros."""

    def is_hidden_from(self, asks: FrameType) -> bool:
        """Whether it is the optimizer's own code that asks, inside a step."""

    def drop_all(self) -> None:
        """Drops the gradients of all tables that follow the optimizer."""


class StandIn(torch.nn.Parameter):
    """Stands for table number `table` of a module. Its own value, float32 (2,), means nothing and never changes: a loss
    that depends on it is warned of, and a write to it is refused at the next forward."""

    table: int
    gradients: weakref.ref[OfFollowed] | None = None
    was_looked_at = False  # a gradient of its own, of a loss that depends on its value
    unwritten: int  # its `_version`, as long as nobody has written to its value
    made_as: float  # the numbers of its value: `VALUE`, or `COPIED`

    def __new__(
        cls,
        data: torch.Tensor | None = None,
        requires_grad: bool = True,
        table: int = 0,
        made_as: float = VALUE,
    ) -> StandIn:
        with no_inference():  # it may be trained later
            values = torch.full((2,), made_as, dtype=torch.float32) if data is None else data
            made: StandIn = super().__new__(cls, values.clone() if values.is_inference() else values)
            made.register_hook(functools.partial(_warn_of_terms, weakref.ref(made)))  # type: ignore[no-untyped-call]
        made.requires_grad = requires_grad
        made.table, made.gradients, made.unwritten, made.made_as = table, None, made._version, made_as
        return made

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """Its value, which code takes to write to a parameter, or to keep what it is: a warning says that this is none
        of the table's rows."""
        warnings.warn(
            f"the .data of {self!r} is two numbers, and none of the table's rows: an average over parameters(), a "
            f"perturbation or an initialisation does not reach those. state_dict() copies rows, and load_state_dict() "
            f"sets them; exclude= leaves an embedding out of the conversion",
            stacklevel=2,
        )
        return self.value

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        _DATA.__set__(self, value)

    @property
    def value(self) -> torch.Tensor:
        """Its value, as `.data` of a parameter is it."""
        value: torch.Tensor = _DATA.__get__(self)
        return value

    @property
    def is_copy(self) -> bool:
        """Whether its tables are copies, and have followed nobody yet."""
        return self.made_as != VALUE

    def follows(self) -> None:
        """Its tables follow an optimizer from here on. The next forward finds out whether it was written to before."""
        if self.is_copy:
            with no_inference():
                self.data, self.made_as = self._as(VALUE), VALUE
            self.unwritten = -1

    def _as(self, made_as: float) -> torch.Tensor:
        """Its value, as one made as other numbers would have it: what was written to it is in there."""
        return self.value * (made_as / self.made_as)  # powers of two: exact

    def move(self, device: torch.device) -> None:
        """Lies on `device` from here on."""
        self.data = self.value.to(device)
        self.unwritten = self._version

    @property
    def grad(self) -> torch.Tensor | None:  # type: ignore[override]
        """The norm of the table's gradient and `TRACE`, float32 (2,); zeros from a step on until the next backward;
        None without a gradient. Computed when it is read first; does not synchronise with a GPU."""
        gradients = None if self.gradients is None else self.gradients()
        if gradients is None:
            return None
        followers = gradients.followers
        hidden_from = None if followers is None else followers.asks
        if hidden_from is not None and hidden_from is sys._getframe(1):  # in a step each of many tables is asked
            return None
        if not gradients.is_gradient_there:
            return None
        frame = sys._getframe(1)
        if gradients.is_hidden_from(frame):
            return None
        asks = _KNOWN.get(frame.f_code)
        if asks is None:
            asks = _who_asks(frame)
        if asks is _ZEROING:
            if not _drops_all(frame, gradients.optimizer):
                return gradients.zeroed(self.table)
            gradients.drop_all()
            return None
        if asks is _CLIPPING:
            _refuse_what_norms_cannot_tell(frame)
        found = gradients.read(self.table)
        if asks is _STEPPING and found is not None:
            _refuse_another(gradients.optimizer, frame)
        return found

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
            memo[id(self)] = StandIn(self._as(COPIED), self.requires_grad, self.table, COPIED)
        copied: StandIn = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return StandIn, (self.value, self.requires_grad, self.table, self.made_as)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"StandIn(table {self.table})"


def are_as_made(stand_ins: Mapping[str, StandIn], parameters: Mapping[str, Any]) -> bool:
    """Whether none of them needs a closer look: each is the one among `parameters`, and nobody has written to it. In
    compiled code, as each forward asks of many tables."""
    all_ = stand_ins.values()
    if not all(map(is_, map(parameters.get, stand_ins, all_), all_)):
        return False
    if not all(map(VALUE.__eq__, map(_MADE_AS, all_))):
        return False
    with _PLAIN():
        return [*map(_VERSION, all_)] == [*map(_UNWRITTEN, all_)]


def are_trained(stand_ins: Mapping[str, StandIn]) -> bool:
    """Whether a gradient is wanted of each."""
    with _PLAIN():
        return all(map(_REQUIRES_GRAD, stand_ins.values()))


_VERSION, _UNWRITTEN = attrgetter("_version"), attrgetter("unwritten")
_MADE_AS, _REQUIRES_GRAD = attrgetter("made_as"), attrgetter("requires_grad")
_PLAIN = torch._C.DisableTorchFunctionSubclass  # inside, torch does not look for what a subclass may do otherwise


def _warn_of_terms(ref: weakref.ref[StandIn], grad: torch.Tensor) -> None:
    """Warns, once, where a loss depends on a stand-in's value. Waits for a GPU at the first backward of such a loss
    alone, and never in a capture."""
    stand_in = ref()
    if stand_in is None or stand_in.was_looked_at or (grad.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    counts = bool((grad != 0).any())  # not that of a term whose factor is 0
    stand_in.was_looked_at = counts or grad.is_cuda
    if counts:
        warnings.warn(
            "the loss has a term over parameters(), where a table has a stand-in of two numbers: the term does not "
            "reach the table's rows. For an L2 regulariser leave the tables out of it, and give their param group "
            "weight_decay=2 * l2: the same gradient, unless the optimizer decouples it as AdamW does. For another term "
            "over a whole table leave that embedding out of the conversion by exclude=",
            stacklevel=2,
        )


def _who_asks(frame: FrameType) -> object:
    """Torch's `zero_grad()`, of an optimizer or of a module, which looks at each gradient first; its clipping; the step
    of one of its optimizers; or any other code."""
    code, module = frame.f_code, str(frame.f_globals.get("__name__"))
    asks = _OTHER
    if code.co_name == "zero_grad" and module in _ZEROES:
        asks = _ZEROING
    elif code.co_filename == _CLIPS:
        asks = _CLIPPING
    elif module.startswith("torch.optim."):
        asks = _STEPPING
    if module.startswith("torch."):  # of which there is no more than there was
        _KNOWN[code] = asks
    return asks


def _drops_all(zeroing: FrameType, followed: torch.optim.Optimizer | None) -> bool:
    """Whether this `zero_grad()` is to set the gradients of all tables that follow the optimizer to None, as its own
    does by default."""
    names = zeroing.f_locals
    return followed is not None and names.get("self") is followed and names.get("set_to_none") is True


def _refuse_another(followed: torch.optim.Optimizer | None, asks: FrameType) -> None:
    """Raises `UnsupportedError` in the step of an optimizer that finds the gradient of a table: those that tables
    follow find none."""
    other = asks.f_locals.get("self")
    raise UnsupportedError(
        f"this {type(other).__name__} has the stand-in of a table among its params, and the table follows "
        f"{'no optimizer' if followed is None else f'another one, a {type(followed).__name__}'}: only that updates its "
        f"rows. Let all tables follow this one, before it is used: tieredemb.follow(model, optimizer)"
    )


def check_written(stand_in: StandIn) -> None:
    """For a stand-in that was written to, or that may have been: torch's foreach functions, by which averages are made,
    count as no write on a GPU, and show in the value of a copy alone. The value that it has may be written to it again,
    as DistributedDataParallel does where it begins. Raises `UnsupportedError` for another one. Waits for the GPU, if it
    lies on one; a capture, which cannot wait, looks at no copy."""
    is_unwritten = stand_in._version == stand_in.unwritten
    if is_unwritten and stand_in.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    if bool((stand_in.value == stand_in.made_as).all()):
        stand_in.unwritten = stand_in._version
        return
    raise UnsupportedError(
        f"{stand_in!r} was written to, as a parameter is by an average over parameters() (EMA, SWA), by an "
        f"initialisation or by an update by hand, and what was written has not reached the table's rows. Leave it out "
        f"there, or leave the embedding out of the conversion by exclude=; load_state_dict() sets rows, and step() of "
        f"the optimizer that they follow updates them"
    )


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
