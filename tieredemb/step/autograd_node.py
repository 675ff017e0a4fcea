"""The autograd node of lookups: tables are no inputs of it, and what its backward collects is applied at the end of the
pass (`backward_pass`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from tieredemb.errors import BackwardError
from tieredemb.kernels.tracing import callback, is_compiling, untraced
from tieredemb.step.program import Call, release_all

BACKWARDS: list[Callable[[], object]] = []  # called from inside each backward that reaches a module


class Calls(dict[int, Any]):
    """Those of a node, by the numbers of their outputs. The node alone keeps them."""


class LookupFunction(torch.autograd.Function):
    """Autograd node of calls that are looked up as one, with an output of each: one call of Python for all of them,
    forward and backward. Tables are no inputs; `hook` (float32 (0,)) asks for the gradient in their place. `weights`:
    of the samples, of one call alone · `calls`: by the numbers of their outputs; they may come while `outputs` makes
    these, or later, but before a backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hook: torch.Tensor,
        weights: torch.Tensor | None,
        calls: Calls,
        outputs: Callable[[], Sequence[torch.Tensor]],
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)  # no gradient for outputs that nobody has used
        ctx.calls = calls
        found = tuple(outputs())
        ctx.weights_like = None if weights is None else (weights.shape, weights.dtype)
        if not ctx.needs_input_grad[0]:
            release_all([*calls.values()])  # the gradient of weights needs the rows of the forward, which calls keep
        return found

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, torch.Tensor | None, None, None]:
        if is_compiling() or callback() is not None:
            return _backward_untraced(ctx, *grads)
        # a backward that builds no graph of itself is spared what refuses to differentiate it
        return _backward_once(ctx, *grads) if torch.is_grad_enabled() else _backward(ctx, *grads)


def look_up(hook: torch.Tensor, weights: torch.Tensor | None, make: Callable[[], Call]) -> torch.Tensor:
    """The output of a call that is made inside of its node."""
    calls = Calls()

    def outputs() -> list[torch.Tensor]:
        call = calls[0] = make()
        call.keeps_rows = weights is not None and weights.requires_grad
        return [call.pool(weights, differentiable=True)]

    return LOOKUP(hook, weights, calls, outputs)[0]


def check_backward(call: Call) -> None:
    """Raises `BackwardError` where a gradient of the call's output cannot be applied any more, or by nobody."""
    if call.consumed:
        raise BackwardError(
            "this forward has been backpropagated already, and its update applied to the rows in place; "
            "run the forward again, or sum the losses and call backward once (retain_graph is not supported)"
        )
    call.context.check_trainable()


def _backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, torch.Tensor | None, None, None]:
    """Collects the gradients of calls' outputs for the update, and computes that of weights."""
    for listener in tuple(BACKWARDS):
        listener()
    calls, (of_rows, of_weights, *_) = ctx.calls, ctx.needs_input_grad
    # not in autograd.grad(…, inputs) or backward(inputs=…), which ask for other gradients than the tables'
    requested = next(iter(calls.values())).requested if calls else None
    trains = requested is None and of_rows and torch._C._will_engine_execute_node(ctx.next_functions[0][0])
    collected = [(calls[at], grad.detach().to(torch.float32)) for at, grad in enumerate(grads) if grad is not None]
    if len(grads) == 1 and collected:  # an update puts several together
        collected = [(collected[0][0], collected[0][1].contiguous())]
    if trains or requested is not None:
        for call, _ in collected:
            optimizer = call.context.updater.optimizer
            if call.consumed or optimizer is None or not optimizer.is_there:
                check_backward(call)
    weights_grad = None
    if of_weights and collected:
        ((call, grad),), (shape, dtype) = collected, ctx.weights_like
        weights_grad = call.weights_gradient(grad).to(dtype).reshape(shape)
    if requested is not None:
        requested += collected
    elif trains and collected:
        collected[0][0].context.backward_pass.add(*collected)
        for call, _ in collected:
            call.consumed = True
    return None, weights_grad, None, None


_backward_once = once_differentiable(_backward)
_backward_untraced = untraced(_backward_once)


# `LookupFunction.apply`, but for what that does for functorch's transforms, inside of which modules refuse to run
LOOKUP: Callable[..., tuple[torch.Tensor, ...]] = super(torch.autograd.Function, LookupFunction).apply  # type: ignore[misc]
