"""Products with a whole table, which is read in parts: scores of all items, as retrieval models take them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from tieredemb.errors import BackwardError, ConfigError, InputTypeError, InvalidInputError, UnsupportedError, shown
from tieredemb.kernels.tracing import untraced
from tieredemb.modules.base import TieredModule
from tieredemb.step.whole_table import product
from tieredemb.tables.table_set import TableSet


@untraced
def scores(module: TieredModule, x: torch.Tensor, *, table: str | None = None) -> torch.Tensor:
    """`x @ weight.T`: the products of x with every row of a table, which no memory has to hold.

    `module`: of one table, or a collection with the name of its `table` · `x`: (…, D) in the rows' dtype, on any
    device. Returns (…, N) there. The table is read once a call, in parts of 64 MiB, as `state_dict()` reads it: rows of
    dense optimizers as they are at the steps that were taken, padding too. Reading counts as no use and stores nothing.
    Synchronises with a GPU.

    A table that follows a torch optimizer gets its gradient, which moves every row in the next step as that of `weight`
    would, chunk by chunk. No gradient reaches a table that is updated in backward, or frozen: it is as detached.
    x gets its own, for which backward reads the table a second time. Raises `BackwardError` there if the rows were
    updated or replaced in between, `UnsupportedError` for an x that requires a gradient where lookups scale rows
    (`max_norm`) or inside the capture of a CUDA graph, `InvalidInputError` for an x that does not fit, and
    `ConfigError` for a table that is not there.

    >>> items = tieredemb.TieredEmbedding(1000, 4, capacity=0.05)
    >>> users = torch.randn(8, 4)
    >>> best = tieredemb.scores(items, users).topk(10).indices
    >>> best.shape
    torch.Size([8, 10])
    """
    if not isinstance(module, TieredModule):
        raise ConfigError(f"scores needs a module with tiered tables, got {type(module).__name__}")
    number = _number(module, table)
    rows = module.tables.weight_dtype(number)
    width = module.table_configs[number].embedding_dim
    if not isinstance(x, torch.Tensor):
        raise InputTypeError(f"x must be a tensor, got {type(x).__name__}")
    if x.dim() == 0 or x.shape[-1] != width:
        raise InvalidInputError(f"x must have the table's {width} columns as its last dimension, got {tuple(x.shape)}")
    if x.dtype != rows:
        raise InvalidInputError(f"x must have the dtype of the rows, {rows}, got {x.dtype}; use x.to({rows})")
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError("scores read a table through the host, which no CUDA graph can hold; call it outside")
    if torch.is_grad_enabled() and module.engine.table_parameters:
        span = module.engine.table_parameters[number].span
        if span is not None and x.device == module.tables.config.device:
            return product(x, span)
    if not (torch.is_grad_enabled() and x.requires_grad):
        return _products(module.tables, number, x)
    if module.options.max_norm is not None:
        raise UnsupportedError(
            "scores have no gradient for x where max_norm scales rows when they are looked up, which may come before "
            "backward reads them; call scores under torch.no_grad(), or build the module without max_norm"
        )
    return _Scores.apply(x, module.tables, number)  # type: ignore[no-any-return, no-untyped-call]


def _number(module: TieredModule, table: str | None) -> int:
    """Of the table that is named, or the only one."""
    names = [config.name for config in module.table_configs]
    if table is None and len(names) == 1:
        return 0
    if not isinstance(table, str) or table not in names:
        given = "which is missing" if table is None else f"got {shown(table)}"
        raise ConfigError(f"table must be one of {', '.join(map(repr, names))}, {given}")
    return names.index(table)


def _products(tables: TableSet, number: int, x: torch.Tensor) -> torch.Tensor:
    flat = x.detach().reshape(-1, x.shape[-1])
    out = x.new_empty(len(flat), tables.config.tables[number].num_embeddings)
    for part, rows in _parts(tables, number, x):
        out[:, part] = flat @ rows.T
    return out.reshape(*x.shape[:-1], out.shape[1])


def _parts(tables: TableSet, number: int, x: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """A table in parts on the device of x."""
    for start, rows in tables.weight_parts(number):
        yield slice(start, start + len(rows)), rows.to(x.device)
    tables.check_faults()


class _Scores(torch.autograd.Function):
    """Scores with a gradient for x."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tables: TableSet, number: int) -> torch.Tensor:
        ctx.tables, ctx.number, ctx.shape = tables, number, x.shape
        ctx.version = tables.version(number)
        return _products(tables, number, x)

    @staticmethod
    @untraced
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if ctx.tables.version(ctx.number) != ctx.version:
            raise BackwardError(
                "the rows that scores were taken of have been updated or replaced since, so their gradient is lost; "
                "call backward before the next step, or take the scores again"
            )
        flat = grad.reshape(-1, grad.shape[-1])
        total = torch.zeros(len(flat), ctx.shape[-1], dtype=torch.float32, device=grad.device)
        for part, rows in _parts(ctx.tables, ctx.number, grad):
            total += flat[:, part] @ rows
        return total.to(grad.dtype).reshape(ctx.shape), None, None
