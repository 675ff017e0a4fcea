"""The optimizer state of whole tables as torch keeps it: tensors by name, and the steps taken. Where tables are parts
of larger ones, entries that are loaded are those of the whole tables, and only the part is taken from them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sized
from typing import Any

import numpy as np
import torch

from tieredemb.config import OptimizerConfig, TablePart, is_number
from tieredemb.errors import InvalidInputError, shown
from tieredemb.lookup.histories import Histories, StoredBytes
from tieredemb.storage.host import advise_huge_pages
from tieredemb.tables.given_states import MAX_DENSE_STEPS, MAX_STEPS, loaded_steps
from tieredemb.tables.given_tensors import dense_numbers
from tieredemb.tables.table_set import LaggingRows, LoadedState, TableSet, check_memory

LAGGING = "lagging"  # key of an entry: what torch's optimizers do not have
ELSEWHERE = "tables_on_rank"  # of a state dict that another rank's is to be loaded with: whose has the tables' state


def check_is_here(state_dict: Mapping[str, Any], entries: Iterable[Sized]) -> None:
    """Raises `InvalidInputError` where the state of tables is in another rank's state dict, and their `entries` are
    empty: it would be lost silently."""
    if ELSEWHERE in state_dict and not any(entries):
        raise InvalidInputError(
            f"this state dict is of a rank that does not hold the tables' state; load that of rank "
            f"{state_dict[ELSEWHERE]}, which holds all of it"
        )


def steps_of(tables: TableSet, table: int) -> int:
    """Optimizer steps that a table has taken. Synchronises with a GPU."""
    group, position, _ = tables.locate(table)
    return group.steps[position]


def state_tensors(tables: TableSet, config: OptimizerConfig, table: int) -> dict[str, torch.Tensor]:
    """Copies of a table's state tensors by name. Raises `StorageFullError` where memory cannot hold them."""
    shapes = {
        name: (tables.config.tables[table].num_embeddings, width)
        for name, (_, width) in _shapes(tables, config, table).items()
    }
    if not shapes:
        return {}
    check_memory(tables.config.tables[table].name, sum(4 * rows * width for rows, width in shapes.values()))
    found = {name: torch.empty(shape, dtype=torch.float32, device="cpu") for name, shape in shapes.items()}
    for each in found.values():
        advise_huge_pages(each.data_ptr(), each.nbytes)
    for start, rows in tables.state_parts(table):
        parts = torch.split(rows, [width for _, width in shapes.values()], dim=1)
        for each, part in zip(found.values(), parts, strict=True):
            each[start : start + len(rows)] = part
    return found


def totals_of(config: OptimizerConfig, steps: int) -> dict[str, torch.Tensor]:
    """What torch keeps of a parameter after `steps` steps beside its tensors and the number of steps, in torch's
    form."""
    totals = config.totals(steps)
    return {name: torch.tensor(value, dtype=torch.float32, device="cpu") for name, value in totals.items()}


def _check_totals(config: OptimizerConfig, entry: Mapping[str, Any], step: int, table: str) -> None:
    """Raises `InvalidInputError` where an entry has other totals than its steps have with these options."""
    for name, wanted in config.totals(step).items():
        if name not in entry:
            continue
        given = entry[name]
        if isinstance(given, torch.Tensor):
            given = dense_numbers(f"{name!r} of table {table!r}", given)
            given = given.item() if given.numel() == 1 else given
        if not is_number(given) or not math.isclose(given, wanted, rel_tol=1e-3, abs_tol=1e-12):
            raise InvalidInputError(
                f"{name!r} of table {table!r} is {shown(given)}, and {step} steps of {config!r} make it "
                f"{wanted:g}: it is of other options, or of options that have changed; load the state of an optimizer "
                f"with these, or leave {name!r} out"
            )


def lagging_rows(tables: TableSet, table: int) -> dict[str, Any]:
    """What an entry of a state dict holds beside torch's tensors, so that a dense optimizer continues with the same
    bits: the rows that have not been used since an earlier step, as they are stored, and, once for all tables of a
    width, the history of steps. Empty for other optimizers."""
    _, position, _ = tables.locate(table)
    found = tables.lagging(table, with_history=position == 0)
    if found is None:
        return {}
    parts = {"rows": found.rows, "weight": found.weight.view(np.uint8), "state": found.state.view(np.int32)}
    parts["step"] = np.array(steps_of(tables, table), np.int64)  # torch's SGD counts none
    if found.history is not None:
        parts["history"] = np.frombuffer(bytearray(Histories([found.history]).to_bytes()), np.uint8)
    return {LAGGING: {name: torch.from_numpy(part) for name, part in parts.items()}}


def _loaded_lagging(tables: TableSet, table: int, entry: Mapping[str, Any], part: TablePart) -> LaggingRows | None:
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
    whose = f"{LAGGING!r} of table {of.name!r}"
    rows, weight, state = (
        dense_numbers(f"{name!r} in {whose}", given[name]).cpu().contiguous().numpy() for name in kinds
    )
    count = rows.size
    shapes = [(count,), (count, layout.columns * layout.carrier.itemsize), (count, layout.state_width)]
    fits = [each.shape for each in (rows, weight, state)] == shapes
    if not fits or (count and (rows[0] < 0 or rows[-1] >= part.rows or (rows[:-1] >= rows[1:]).any())):
        raise InvalidInputError(
            f"{whose} does not fit its rows; load a state dict of this very model, or leave the key out: rows then go "
            f"on from the current step"
        )
    history = None
    if isinstance(given.get("history"), torch.Tensor):
        try:
            stored = StoredBytes(dense_numbers(f"'history' in {whose}", given["history"]).cpu().numpy().tobytes())
            (history,) = Histories([group.history]).parsed(stored).of
        except ValueError as error:
            raise InvalidInputError(f"{whose} has no history of steps: {error}") from error
    own = (rows >= part.first) & ((rows - part.first) % part.step == 0)
    if not own.all():
        rows, weight, state = rows[own], weight[own], state[own]
    return LaggingRows((rows - part.first) // part.step, weight.view(layout.carrier), state.view(np.uint32), history)


def loaded_state(
    tables: TableSet, config: OptimizerConfig, table: int, entry: Mapping[str, Any], part: TablePart | None = None
) -> LoadedState:
    """The steps and the state (a tensor for the rows, or None) that an entry of a state dict holds for a table. If it
    holds none, those of a new table, as torch's optimizers keep no state before their first step. `part`: which rows
    of the whole table, by default those that `tables` have. Raises `InvalidInputError`."""
    part, name = part or tables.config.part(table), tables.config.tables[table].name
    shapes = _shapes(tables, config, table)
    held = any(entry.get(each) is not None for each in shapes)
    lagging = entry.get(LAGGING)
    counted = lagging.get("step", int(held)) if isinstance(lagging, Mapping) else int(held)
    most = MAX_DENSE_STEPS if config.is_dense else MAX_STEPS
    step = loaded_steps(entry.get("step", counted), name, most=most)
    if isinstance(lagging, Mapping) and "step" in lagging:
        exact = loaded_steps(lagging["step"], name, most=most)
        step = (
            exact if np.float32(exact) == np.float32(step) else step
        )  # torch keeps steps in float32, from 2²⁴ on rounded
    if not held and not shapes and not config.is_dense:
        return LoadedState(step, None)
    _check_totals(config, entry, step, name)
    new = torch.full((1, 1), config.state_start, dtype=torch.float32, device="cpu")
    width = sum(width for _, width in shapes.values())
    words: tuple[torch.Tensor, ...] = ()
    if held:
        given = [dense_numbers(f"{each!r} of table {name!r}", entry.get(each), shape) for each, shape in shapes.items()]
        words = tuple(whole[part.first :: part.step] for whole in given)
    if not held or part.own_rows == 0:  # a table has at least one row, even if nothing looks it up
        words = (new.expand((max(1, part.own_rows), width)),)
    return LoadedState(step, words, _loaded_lagging(tables, table, entry, part))


def check_equal_steps(config: OptimizerConfig, states: Mapping[int, LoadedState]) -> None:
    """Raises `InvalidInputError` where tables with one step count would have different ones."""
    steps = {state.step for state in states.values()}
    if config.is_dense and len(steps) > 1:
        raise InvalidInputError(
            f"the tables have taken different numbers of steps ({', '.join(map(str, sorted(steps)))}), and those "
            f"of one module take steps together; give each number a module of its own"
        )


def check_lagging(tables: TableSet, states: Mapping[int, LoadedState]) -> None:
    """Raises `InvalidInputError` where rows that lag behind are at a step that the history beside them does not
    contain."""
    for group in tables.groups:
        lagging = {t: states[t].lagging for t in map(int, group.space.tables) if t in states}
        history = next((each.history for each in lagging.values() if each and each.history), None)
        for table, rows in lagging.items():
            if history is None or rows is None or not len(rows.rows):
                continue
            steps = rows.state[:, -1]
            if steps.min() < history.base or steps.max() > history.steps:
                raise InvalidInputError(
                    f"{LAGGING!r} of table {tables.config.tables[table].name!r} has rows at steps {steps.min()} to "
                    f"{steps.max()}, and the history beside it knows those from {history.base} to {history.steps}; "
                    f"load a state dict of this very model, or leave the key out: rows then go on from the current step"
                )


def _shapes(tables: TableSet, config: OptimizerConfig, table: int) -> dict[str, tuple[int, int]]:
    """Shapes of a whole table's state tensors by name, in the order in which a row holds them."""
    rows, width = tables.config.part(table).rows, tables.config.tables[table].embedding_dim
    return {each.name: (rows, each.width(width)) for each in config.tensors}
