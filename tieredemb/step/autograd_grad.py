"""`torch.autograd.grad` with tables among its inputs: their gradients are returned by row.

Tables are not inputs of the nodes that look up in them, which would slow down each backward over many tables. So the
graph is searched for these nodes, and their calls pass on their gradients instead of training (`Call.requested`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from tieredemb.errors import UnsupportedError
from tieredemb.step.gradient_rows import GradientRows
from tieredemb.step.program import Call, Calls, Collected
from tieredemb.step.table_gradient import TableGradient, of_rows
from tieredemb.step.table_tensor import TableTensor
from tieredemb.step.whole_gradient import WholeUse, rows_of

_UNUSED = (
    "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True if this is "
    "the desired behavior."
)


def gradients(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    """See `torch.autograd.grad`. Waits for a GPU. Raises `UnsupportedError` for tables of several ranks, and if the
    gradients are to have gradients, or are batched."""
    if create_graph or is_grads_batched:
        raise UnsupportedError(
            f"the gradient of a table has none itself, and comes for one output gradient at a time, got "
            f"{create_graph=}, {is_grads_batched=}; leave tables out of the inputs of torch.autograd.grad"
        )
    given = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    tables: list[Any] = [each for each in given if isinstance(each, TableTensor)]
    others = [each for each in given if not isinstance(each, TableTensor)]
    if any(not each._is_param for each in tables):
        raise UnsupportedError(
            "torch.autograd.grad has a gradient of the parameter of a table alone: not of a view of it, nor of the "
            "weight of a module that updates its rows in backward; build the module with a torch optimizer"
        )
    for each in tables:
        each.check_held()
        if not each.wants_gradient:
            raise RuntimeError("One of the differentiated Tensors does not require grad")
    heads = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    with _requested(heads) as (leaves, collected):
        found: Sequence[Any] = ()
        if others or leaves:
            found = torch.autograd.grad(
                heads, [*others, *leaves], grad_outputs, retain_graph, allow_unused=True,
            )[: len(others)]  # fmt: skip
    by_row = _by_row(tables, collected)
    rest = iter(found)
    result = [by_row[id(each)] if isinstance(each, TableTensor) else next(rest) for each in given]
    if materialize_grads:
        result = [_zeros(each) if grad is None else grad for each, grad in zip(given, result, strict=True)]
    if not allow_unused and any(each is None for each in result):
        raise RuntimeError(_UNUSED)
    return tuple(result)


def _zeros(of: torch.Tensor) -> torch.Tensor:
    if isinstance(of, TableTensor):
        return of_rows(GradientRows.empty(of.shape, of.device))
    return torch.zeros_like(of)


def _by_row(tables: Sequence[Any], collected: Collected) -> dict[int, TableGradient | None]:
    """The gradient of each table, by the identity of its parameter; None if no call has reached its module."""
    rows: dict[int, list[GradientRows]] = {}
    found: dict[int, TableGradient | None] = {}
    for each in tables:
        owner = each.module
        mine = [pair for pair in collected if pair[0].context.optimizer is owner]
        if not mine:
            found[id(each)] = None
            continue
        if id(owner) not in rows:
            rows[id(owner)] = rows_of(owner.tables, mine)
        found[id(each)] = of_rows(each.through_hooks(rows[id(owner)][each.table]))
    return found


@contextlib.contextmanager
def _requested(heads: Sequence[torch.Tensor]) -> Iterator[tuple[list[torch.Tensor], Collected]]:
    """Yields the leaves of the lookups that `heads` were computed from, and a list: inside, lookups whose leaves
    autograd reaches append their gradients to it."""
    leaves, calls, collected = [], list[Call](), Collected()
    for node in filter(_is_lookup, nodes_behind(each.grad_fn for each in heads)):
        node_calls = [node.call] if hasattr(node, "call") else list(node.calls.values())
        if node.needs_input_grad[0]:
            leaves.append(node.next_functions[0][0].variable)
            calls += node_calls
    try:
        for call in calls:
            call.requested = collected
        yield leaves, collected
    finally:
        for call in calls:
            call.requested = None


def nodes_behind(roots: Iterable[Any]) -> Iterator[Any]:
    """The nodes of an autograd graph reachable from `roots`, and these, each once; a root may be None."""
    todo = [node for node in roots if node is not None]
    seen = set(todo)
    while todo:
        node = todo.pop()
        yield node
        for after, _ in node.next_functions:
            if after is not None and after not in seen:
                seen.add(after)
                todo.append(after)


def _is_lookup(node: Any) -> bool:
    return isinstance(getattr(node, "call", None), WholeUse) or isinstance(getattr(node, "calls", None), Calls)
