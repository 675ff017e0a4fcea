"""What a checkpoint notes beside the rows: the optimizer's param group, and what the user wants remembered.

It is checked both when it is noted and when it is read: a checkpoint that cannot be loaded must not replace one that
can.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tieredemb.errors import CheckpointError, ConfigError, shown
from tieredemb.storage.stored_json import fields_of, list_of, object_of, text_of
from tieredemb.tables.row_optimizer import RowOptimizer


def note(optimizer: RowOptimizer | None, extra: Any, others: Mapping[str, RowOptimizer]) -> dict[str, Any]:
    """What a checkpoint keeps. `others`: the optimizers of tables that share a cache, by the tables' names. Raises
    `ConfigError` for an `extra` that is no dict, and for a param group that holds what no optimizer works with."""
    if not isinstance(extra, dict):
        raise ConfigError(f"extra must be a dict of what JSON can store, got {shown(extra)}")
    options = None
    if optimizer is not None:
        options = optimizer.options()
        optimizer.check_options(options)
    noted = {"extra": extra, "param_group": options}
    groups = {}
    for name, other in others.items():
        groups[name] = other.options()
        other.check_options(groups[name])
    return noted | ({"param_groups": groups} if groups else {})


def set_noted(optimizer: RowOptimizer | None, noted: Mapping[str, Any], others: Mapping[str, RowOptimizer]) -> None:
    """Sets the options that `note` has noted of each optimizer; if it has none of one, those of `optimizer`."""
    if optimizer is None or noted["param_group"] is None:
        return
    optimizer.set_options(noted["param_group"])
    groups = noted.get("param_groups", {})
    for name, other in others.items():
        other.set_options(groups.get(name, noted["param_group"]))


def check_noted(optimizer: RowOptimizer | None, others: Mapping[str, RowOptimizer], noted: dict[str, Any]) -> None:
    """Raises `CheckpointError` unless `noted` is what `note` returned for optimizers such as these."""
    try:
        fields = fields_of(noted, "extra", ("extra", "param_group"), ("param_groups",))
        groups = object_of(fields.get("param_groups", {}), "extra.param_groups")
        for name, other in others.items():
            if name in groups:
                other.check_options(object_of(groups[name], f"extra.param_groups.{name}"))
        object_of(fields["extra"], "extra.extra")
        if optimizer is not None:
            optimizer.check_options(object_of(fields["param_group"], "extra.param_group"))
        elif fields["param_group"] is not None:
            object_of(fields["param_group"], "extra.param_group")
    except ValueError as error:
        raise CheckpointError(
            f"the checkpoint's manifest holds what no save writes: {error}; use another checkpoint. Nothing was changed"
        ) from error


class NotedTables(NamedTuple):
    """One set of tables of a checkpoint. `prefix`: of the names of its key spaces, "" where the checkpoint is of these
    tables alone · `names`: of the tables in their model, where it is of a whole one · `optimizer`, `others`: see
    `note`."""

    prefix: str
    names: tuple[str, ...]
    optimizer: RowOptimizer | None
    others: Mapping[str, RowOptimizer]


def note_all(sets: Sequence[NotedTables], extra: Any) -> dict[str, Any]:
    """What a checkpoint of these tables keeps. Raises as `note`."""
    if not _is_model(sets):
        (alone,) = sets
        return note(alone.optimizer, extra, alone.others)
    noted: dict[str, Any] = {"extra": note(None, extra, {})["extra"], "parts": {}}
    for each in sets:
        part = note(each.optimizer, {}, each.others)
        del part["extra"]
        noted["parts"][each.prefix] = part | {"tables": list(each.names)}
    return noted


def set_all_noted(sets: Sequence[NotedTables], noted: Mapping[str, Any]) -> None:
    """See `set_noted`."""
    for each in sets:
        set_noted(each.optimizer, part_of(noted, each.prefix), each.others)


def check_all_noted(sets: Sequence[NotedTables], noted: dict[str, Any]) -> None:
    """See `check_noted`."""
    for each in sets:
        check_noted(each.optimizer, each.others, part_of(noted, each.prefix))


def part_of(noted: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """What `note` has noted of the tables whose key spaces have that prefix."""
    if not prefix:
        return dict(noted)
    part = dict(noted["parts"][prefix])
    del part["tables"]
    return part | {"extra": {}}


def check_kind(sets: Sequence[NotedTables], path: str, noted: dict[str, Any]) -> None:
    """Raises `CheckpointError` unless the checkpoint in `path` is of a whole model where these tables are one, or of
    the tables of one module where they are that; and unless it has the tables of the model."""
    if not _is_model(sets):
        if "parts" in noted:
            raise CheckpointError(
                f"{path!r} holds the checkpoint of a whole model; load it by tieredemb.load_checkpoint(model, "
                f"directory). Nothing was changed"
            )
        return
    if "parts" not in noted:
        raise CheckpointError(
            f"{path!r} holds the checkpoint of one module; load it by the load_checkpoint(directory) of that module. "
            f"Nothing was changed"
        )
    wanted = {each.prefix: sorted(each.names) for each in sets}
    try:
        found = {prefix: _tables_of(part, prefix) for prefix, part in object_of(noted["parts"], "extra.parts").items()}
    except ValueError as error:
        raise CheckpointError(
            f"the checkpoint's manifest holds what no save writes: {error}; use another checkpoint. Nothing was changed"
        ) from error
    if wanted != found:
        raise CheckpointError(f"the checkpoint in {path!r} is of another model: {_other(found, wanted)}")


def _is_model(sets: Sequence[NotedTables]) -> bool:
    return any(each.prefix for each in sets)


def _tables_of(part: Any, prefix: str) -> list[str]:
    fields = fields_of(part, f"extra.parts[{shown(prefix)}]", ("param_group", "tables"), ("param_groups",))
    return sorted(text_of(each, "a table's name") for each in list_of(fields["tables"], "extra.parts.tables"))


def _other(found: Mapping[str, list[str]], wanted: Mapping[str, list[str]]) -> str:
    """In what two choices of tables differ."""
    there, here = ({name for names in each.values() for name in names} for each in (found, wanted))
    if there == here:
        return (
            f"its tables share caches otherwise, {list(found.values())} instead of {list(wanted.values())}: tables of "
            f"one width, dtype and kind of optimizer share one. Convert the model as it was converted for the save. "
            f"Nothing was changed"
        )
    differences = [f"the checkpoint lacks {sorted(here - there)}"] * bool(here - there)
    differences += [f"this model lacks {sorted(there - here)}"] * bool(there - here)
    return f"{', and '.join(differences)}. Nothing was changed"
