"""What a checkpoint notes beside the rows: the optimizer's param group, and what the user wants remembered.

Checked when it is noted as when it is read: a checkpoint that no load takes must not replace one that does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tieredemb.errors import CheckpointError, ConfigError, shown
from tieredemb.storage.stored_json import fields_of, object_of
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
    """Gives optimizers what `note` has noted of them; one that it knows nothing of, what it has of `optimizer`."""
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
