"""A table as a parameter, which is in the params of the torch optimizer that the table follows.

It is an `nn.Parameter` of shape (rows, D) without storage. Operations on it read and write the table's rows, see
`TableTensor`. Its `.grad` is a `TableGradient`. It references its tables weakly, so an optimizer keeps no table
alive.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from operator import attrgetter
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from tieredemb.errors import InputTypeError, StorageError, UnsupportedError, shown
from tieredemb.kernels.inference import no_inference
from tieredemb.kernels.tracing import untraced
from tieredemb.step.autograd_grad import gradients
from tieredemb.step.gradient_rows import GradientRows
from tieredemb.step.table_gradient import TableGradient, of_rows
from tieredemb.step.table_tensor import TableTensor
from tieredemb.tables.table_set import TableSet
from tieredemb.tables.torch_kinds import is_known

if TYPE_CHECKING:
    from tieredemb.tables.followed_optimizer import FollowedOptimizer

Hook = Callable[[torch.Tensor], "torch.Tensor | None"]


class TableParameter(TableTensor):
    """Table number `table` of the tables that it is bound to. `is_sharded`: whether other processes hold rows of it,
    too."""

    _is_param = True  # which makes it an instance of nn.Parameter
    _followed: weakref.ref[FollowedOptimizer] | None
    _beside: weakref.ref[Any] | None  # see `Beside`
    is_sharded: bool
    hooks: OrderedDict[int, Hook] | None  # called with each gradient
    post_hooks: OrderedDict[int, Callable[[torch.Tensor], None]] | None  # called after each backward that reaches it

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        table: int,
        requires_grad: bool = True,
        is_sharded: bool = False,
    ) -> TableParameter:
        with no_inference():  # a module built in inference mode may be trained later
            made: TableParameter = torch.Tensor._make_wrapper_subclass(
                cls, torch.Size(shape), dtype=dtype, device=device, requires_grad=requires_grad
            )
            made.geometry = torch.empty(torch.Size(shape), dtype=dtype, device="meta")
        made.table, made.is_detached, made.is_sharded = table, False, is_sharded
        made._followed = made._beside = None
        made.hooks = made.post_hooks = None
        return made

    @classmethod
    def of(cls, tables: TableSet, table: int, *, is_sharded: bool = False) -> TableParameter:
        """The parameter of one of `tables`."""
        config = tables.config.tables[table]
        shape = config.num_embeddings, config.embedding_dim
        return cls(shape, tables.weight_dtype(table), tables.config.device, table, is_sharded=is_sharded)

    def bind(self, followed: FollowedOptimizer) -> None:
        """Binds it to these tables."""
        self._followed = weakref.ref(followed)

    def move(self, device: torch.device) -> None:
        """Moves it to `device`."""
        shape, dtype, _, *rest = self._made_as
        made = TableParameter(shape, dtype, device, *rest)
        made._followed = self._followed
        made.hooks, made.post_hooks = self.hooks, self.post_hooks
        torch.utils.swap_tensors(self, made)

    @property
    def module(self) -> FollowedOptimizer:  # type: ignore[override]
        """Its tables. Raises `StorageError` if they were freed, or it was copied or pickled without them."""
        followed = None if self._followed is None else self._followed()
        if followed is None:
            raise StorageError(
                "the tables of this parameter are gone: it lives as long as the module that it is a parameter of"
            )
        return followed

    @property
    def wants_gradient(self) -> bool:
        with PLAIN():
            return self.requires_grad

    def check_held(self) -> None:
        if self.is_sharded:
            raise UnsupportedError(
                "the rows of a sharded table lie on several ranks, and one of them alone can neither read nor write "
                "them; state_dict() of the collection, a call of all ranks, has copies of its tables"
            )

    @property
    def grad(self) -> torch.Tensor | None:
        """The table's gradient, float32 (rows, D); zeros between a step and the next backward; None without a
        gradient. Does not synchronise with a GPU."""
        followed = None if self._followed is None else self._followed()
        if followed is None or followed.pending is None:
            return None
        followers = followed.followers
        step = None if followers is None else followers.begun
        if step is not None and step[1] == get_ident() and not torch.is_grad_enabled() and step[0]() is not None:
            return None  # so that the optimizer leaves the table to us
        return followed.pending.read(self.table)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        followed = None if self._followed is None else self._followed()
        if followed is not None and followed.pending is not None:
            followed.pending.write(self.table, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    __hash__ = torch.Tensor.__hash__  # as before and after a swap with a plain parameter

    # --- hooks ------------------------------------------------------------------------------------------------------

    def register_hook(self, hook: Hook) -> RemovableHandle:
        """See `torch.Tensor.register_hook`. It is called with the gradient of each backward pass by row, at the end of
        the pass, and of `torch.autograd.grad`; what it returns replaces the gradient. Waits for a GPU.
        Raises `UnsupportedError` for a table of several ranks, and in a captured step."""
        return self._register("hooks", hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
        """See `torch.Tensor.register_post_accumulate_grad_hook`. It is called at the end of each backward pass."""
        return self._register("post_hooks", hook)

    def _register(self, kind: str, hook: Callable[..., Any]) -> RemovableHandle:
        self.check_held()
        if not self.wants_gradient:
            raise RuntimeError("cannot register a hook on a tensor that doesn't require gradient")
        hooks = getattr(self, kind)
        if hooks is None:
            setattr(self, kind, hooks := OrderedDict())
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        followed = None if self._followed is None else self._followed()
        if followed is not None and followed.pending is not None:
            followed.pending.has_hooks = True
        return handle

    def through_hooks(self, rows: GradientRows) -> GradientRows:
        """The gradient after its hooks, which may change or replace it. Raises `InvalidInputError` if a hook returns
        something else than a gradient of this table."""
        for hook in tuple((self.hooks or {}).values()):
            grad = of_rows(rows)
            result = hook(grad)
            if result is None:
                result = grad
            if not isinstance(result, torch.Tensor):
                raise InputTypeError(f"a hook of a gradient returns a tensor or None, got {shown(result)}")
            if isinstance(result, TableGradient):
                rows = result.known.rows()
            else:
                rows = GradientRows.of(result, self.shape, self.device)
        return rows

    def call_post_hooks(self) -> None:
        """Called after a backward has reached it."""
        for hook in tuple((self.post_hooks or {}).values()):
            hook(self)

    @classmethod
    def _gradients(cls, *args: Any, **kwargs: Any) -> Any:
        return gradients(*args, **kwargs)

    # --- copies -----------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, torch.Tensor]) -> torch.Tensor:
        """Copied with its tables: the parameter of their copy. Copied alone: a parameter with memory of its own."""
        if id(self) not in memo:
            memo[id(self)] = _unbound(*self._made_as) if self._is_beside else self._alone()
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._is_beside:
            return _unbound, self._made_as
        return self._alone().__reduce_ex__(protocol)

    @property
    def _made_as(self) -> tuple[Any, ...]:
        return tuple(self.shape), self.dtype, self.device, self.table, self.wants_gradient, self.is_sharded

    @property
    def _is_beside(self) -> bool:
        """Whether it is copied or pickled as a part of its tables."""
        return self._beside is not None and self._beside() is not None

    def _alone(self) -> torch.nn.Parameter:
        with torch.no_grad():
            return torch.nn.Parameter(self.detached().clone(), self.wants_gradient)


# inside, torch does not look for what a subclass may do otherwise: an attribute takes a tenth of the time
PLAIN = torch._C.DisableTorchFunctionSubclass
REQUIRES_GRAD = attrgetter("requires_grad")


def bind_all(followed: FollowedOptimizer, parameters: Sequence[torch.Tensor]) -> None:
    """Binds parameters to these tables. A parameter that was copied before its tables, and so has memory of its own, is
    made a `TableParameter`."""
    for table, each in enumerate(parameters):
        if not isinstance(each, TableParameter) or each.device != followed.tables.config.device:
            made = TableParameter.of(followed.tables, table)
            made.requires_grad = each.requires_grad
            torch.utils.swap_tensors(each, made)
        assert isinstance(each, TableParameter)
        each.bind(followed)


@untraced
def _refuse_others(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Before a step of an optimizer: raises `UnsupportedError` if a table has a gradient and follows another optimizer
    or none, so that the step would not update its rows."""
    for group in optimizer.param_groups:
        for each in group["params"]:
            if type(each) is not TableParameter or each._followed is None:
                continue
            followed = each._followed()
            if followed is None or followed.optimizer is optimizer or followed.pending is None:
                continue
            if followed.optimizer is None and is_known(type(optimizer)):
                followed.follow_found(optimizer)
                continue
            if followed.pending.read(each.table) is None:
                continue
            theirs = followed.optimizer
            other = "no optimizer" if theirs is None else f"another one, a {type(theirs).__name__}"
            raise UnsupportedError(
                f"this {type(optimizer).__name__} has a table among its params that follows {other}: only that updates "
                f"its rows. Let all tables follow this one, before it is used: tieredemb.follow(model, optimizer)"
            )


register_optimizer_step_pre_hook(_refuse_others)


def _unbound(*made_as: Any) -> TableParameter:
    return TableParameter(*made_as)
