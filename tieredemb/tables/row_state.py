"""The optimizer state of whole tables as torch keeps it: tensors by name, and the steps taken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tieredemb.config import OptimizerConfig
from tieredemb.errors import InvalidInputError
from tieredemb.tables.table_set import TableSet


def steps_of(tables: TableSet, table: int) -> int:
    """Optimizer steps that a table has taken. Synchronises with a GPU."""
    group, position, _ = tables.locate(table)
    return group.steps[position]


def state_tensors(tables: TableSet, config: OptimizerConfig, table: int) -> dict[str, torch.Tensor]:
    """Copies of a table's state tensors by name. Raises `StorageFullError` where memory cannot hold them."""
    shapes = _shapes(tables, config, table)
    if not shapes:
        return {}
    parts = torch.split(tables.state(table), [width for _, width in shapes.values()], dim=1)
    return {name: part.clone() for name, part in zip(shapes, parts, strict=True)}


def loaded_state(
    tables: TableSet, config: OptimizerConfig, table: int, entry: Mapping[str, Any]
) -> tuple[int, torch.Tensor | None]:
    """Steps and state, float32 (rows, S) or None without any, that an entry of a state dict holds for a table; what a
    new table has where it holds none, as torch's optimizers keep none before their first step. Raises
    `InvalidInputError`."""
    shapes = _shapes(tables, config, table)
    held = not shapes.keys().isdisjoint(entry)
    step = int(entry.get("step", held))  # torch's SGD counts none
    if not held:
        if not shapes and not config.is_dense:
            return step, None
        shape = (tables.config.tables[table].num_embeddings, sum(width for _, width in shapes.values()))
        return step, torch.full((1, 1), config.state_start, device="cpu").expand(shape)
    for name, wanted in shapes.items():
        value = entry.get(name)
        shape_given = tuple(value.shape) if isinstance(value, torch.Tensor) else None
        if shape_given != wanted:
            table_name = tables.config.tables[table].name
            raise InvalidInputError(f"{name!r} of table {table_name!r} must have shape {wanted}, got {shape_given}")
    return step, torch.cat([entry[name].to(torch.float32) for name in shapes], dim=1)


def check_together(config: OptimizerConfig, states: Mapping[int, tuple[int, torch.Tensor | None]]) -> None:
    """Raises `InvalidInputError` where tables that take their steps together would have taken different numbers."""
    steps = {step for step, _ in states.values()}
    if config.is_dense and len(steps) > 1:
        raise InvalidInputError(
            f"the tables have taken different numbers of steps ({', '.join(map(str, sorted(steps)))}), and those "
            f"of one module take steps together; give each number a module of its own"
        )


def _shapes(tables: TableSet, config: OptimizerConfig, table: int) -> dict[str, tuple[int, int]]:
    """Shapes of a table's state tensors by name, in the order in which a row holds them."""
    of = tables.config.tables[table]
    return {each.name: (of.num_embeddings, each.width(of.embedding_dim)) for each in config.tensors}
