"""The autograd node of forwards that are looked up as one: one call of Python for all of them, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from tieredemb.kernels.tracing import callback, is_compiling, untraced
from tieredemb.step.call import BACKWARDS, Call, check_backward


class Came(dict[int, Call]):
    """The forwards that have come, by position. The node alone keeps them."""


class JointLookupFunction(torch.autograd.Function):
    """Has an output for each forward, and takes no gradient for those that nobody has used. The tables are no inputs;
    `hook` (float32 (0,)) asks for the gradient in their place."""

    @staticmethod
    def forward(
        ctx: Any, hook: torch.Tensor, outputs: Callable[[], Sequence[torch.Tensor]], came: Came
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.came = came
        return tuple(outputs())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, None, None]:
        if is_compiling() or callback() is not None:
            return _backward_untraced(ctx, *grads)
        return _backward_once(ctx, *grads) if torch.is_grad_enabled() else _backward(ctx, *grads)


def _backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, None, None]:
    """Collects the gradients of the outputs for the update."""
    for listener in tuple(BACKWARDS):
        listener()
    # not in autograd.grad(…, inputs) or backward(inputs=…), which ask for other gradients than the tables'
    requested = next(iter(ctx.came.values())).requested if ctx.came else None
    if requested is not None or (
        ctx.needs_input_grad[0] and torch._C._will_engine_execute_node(ctx.next_functions[0][0])
    ):
        # which need not be contiguous: an update puts them together
        collected = [
            (ctx.came[at], grad.detach().to(torch.float32)) for at, grad in enumerate(grads) if grad is not None
        ]
        for call, _ in collected:
            optimizer = call.context.updater.optimizer
            if call.consumed or optimizer is None or not optimizer.is_there:
                check_backward(call)
        if requested is not None:
            requested += collected
            return None, None, None
        if collected:
            collected[0][0].context.backward_pass.add(*collected)
        for call, _ in collected:
            call.consumed = True
    return None, None, None


_backward_once = once_differentiable(_backward)
_backward_untraced = untraced(_backward_once)

# `JointLookupFunction.apply`, but for what that does for functorch's transforms, inside of which modules refuse to run
JOINT_LOOKUP: Callable[..., tuple[torch.Tensor, ...]] = super(torch.autograd.Function, JointLookupFunction).apply  # type: ignore[misc]
