"""The optimizer state of whole tables as torch keeps it: tensors by name, and the steps taken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from tieredemb.config import OptimizerConfig
from tieredemb.errors import InvalidInputError
from tieredemb.tables.table_set import LaggingRows, LoadedState, TableSet

LAGGING = "lagging"  # of an entry: what torch's optimizers have not


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


def lagging_rows(tables: TableSet, table: int) -> dict[str, Any]:
    """What an entry of a state dict has beside torch's tensors for a dense optimizer to go on with the same bits: the
    rows that have not been used since an earlier step, as they lie, and once for the tables of a width what is kept of
    the steps. Empty for other optimizers."""
    _, position, _ = tables.locate(table)
    found = tables.lagging(table, with_history=position == 0)
    if found is None:
        return {}
    parts = {"rows": found.rows, "weight": found.weight.view(np.uint8), "state": found.state.view(np.int32)}
    parts["step"] = np.array(steps_of(tables, table), np.int64)  # torch's SGD counts none
    if found.history is not None:
        parts["history"] = np.frombuffer(bytearray(found.history.to_bytes()), np.uint8)
    return {LAGGING: {name: torch.from_numpy(part) for name, part in parts.items()}}


def _loaded_lagging(tables: TableSet, table: int, entry: Mapping[str, Any]) -> LaggingRows | None:
    """What `lagging_rows` has saved; None where it is not there, or torch has made other numbers of it: rows are then
    at the current step. Raises `InvalidInputError` for what would be none of this table."""
    group, _, _ = tables.locate(table)
    given = entry.get(LAGGING)
    if group.history is None or not isinstance(given, Mapping):
        return None
    kinds = {"rows": torch.int64, "weight": torch.uint8, "state": torch.int32}
    if any(not isinstance(given.get(name), torch.Tensor) or given[name].dtype != kind for name, kind in kinds.items()):
        return None
    layout, of = group.cache.cold.layout, tables.config.tables[table]
    rows, weight, state = (given[name].detach().cpu().contiguous().numpy() for name in kinds)
    shapes = [(len(rows),), (len(rows), layout.columns * layout.carrier.itemsize), (len(rows), layout.state_width)]
    is_ordered = len(rows) == 0 or (rows[0] >= 0 and rows[-1] < of.num_embeddings and (np.diff(rows) > 0).all())
    if [part.shape for part in (rows, weight, state)] != shapes or not is_ordered:
        raise InvalidInputError(
            f"{LAGGING!r} of table {of.name!r} does not fit its rows; load a state dict of this very model, or leave "
            f"the key out: rows then go on from the current step"
        )
    history = None
    if isinstance(given.get("history"), torch.Tensor):
        try:
            history = group.history.parsed(given["history"].cpu().numpy().tobytes())
        except ValueError as error:
            raise InvalidInputError(f"{LAGGING!r} of table {of.name!r} has no history of steps: {error}") from error
    return LaggingRows(rows, weight.view(layout.carrier), state.view(np.uint32), history)


def loaded_state(tables: TableSet, config: OptimizerConfig, table: int, entry: Mapping[str, Any]) -> LoadedState:
    """Steps and state, float32 (rows, S) or None without any, that an entry of a state dict holds for a table; what a
    new table has where it holds none, as torch's optimizers keep none before their first step. Raises
    `InvalidInputError`."""
    shapes = _shapes(tables, config, table)
    held = not shapes.keys().isdisjoint(entry)
    lagging = entry.get(LAGGING)
    counted = lagging.get("step", held) if isinstance(lagging, Mapping) else held
    step = int(entry.get("step", counted))
    if not held:
        if not shapes and not config.is_dense:
            return LoadedState(step, None)
        shape = (tables.config.tables[table].num_embeddings, sum(width for _, width in shapes.values()))
        words = torch.full((1, 1), config.state_start, device="cpu").expand(shape)
        return LoadedState(step, words, _loaded_lagging(tables, table, entry))
    for name, wanted in shapes.items():
        value = entry.get(name)
        shape_given = tuple(value.shape) if isinstance(value, torch.Tensor) else None
        if shape_given != wanted:
            table_name = tables.config.tables[table].name
            raise InvalidInputError(f"{name!r} of table {table_name!r} must have shape {wanted}, got {shape_given}")
    words = torch.cat([entry[name].to(torch.float32) for name in shapes], dim=1)
    return LoadedState(step, words, _loaded_lagging(tables, table, entry))


def check_together(config: OptimizerConfig, states: Mapping[int, LoadedState]) -> None:
    """Raises `InvalidInputError` where tables that take their steps together would have taken different numbers."""
    steps = {state.step for state in states.values()}
    if config.is_dense and len(steps) > 1:
        raise InvalidInputError(
            f"the tables have taken different numbers of steps ({', '.join(map(str, sorted(steps)))}), and those "
            f"of one module take steps together; give each number a module of its own"
        )


def _shapes(tables: TableSet, config: OptimizerConfig, table: int) -> dict[str, tuple[int, int]]:
    """Shapes of a table's state tensors by name, in the order in which a row holds them."""
    of = tables.config.tables[table]
    return {each.name: (of.num_embeddings, each.width(of.embedding_dim)) for each in config.tensors}
