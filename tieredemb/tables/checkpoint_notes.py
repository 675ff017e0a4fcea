"""What a checkpoint notes beside the rows: the optimizer's param group, and what the user wants remembered.

Checked when it is noted as when it is read: a checkpoint that no load takes must not replace one that does.
"""

from __future__ import annotations

from typing import Any

from tieredemb.errors import CheckpointError, ConfigError, shown
from tieredemb.storage.stored_json import fields_of, object_of
from tieredemb.tables.row_optimizer import RowOptimizer


def note(optimizer: RowOptimizer | None, extra: Any) -> dict[str, Any]:
    """What a checkpoint keeps. Raises `ConfigError` for an `extra` that is no dict, and for a param group that holds
    what no optimizer works with."""
    if not isinstance(extra, dict):
        raise ConfigError(f"extra must be a dict of what JSON can store, got {shown(extra)}")
    options = None
    if optimizer is not None:
        options = optimizer.options()
        optimizer.check_options(options)
    return {"extra": extra, "param_group": options}


def check_noted(optimizer: RowOptimizer | None, noted: dict[str, Any]) -> None:
    """Raises `CheckpointError` unless `noted` is what `note` returned for an optimizer such as this one."""
    try:
        fields = fields_of(noted, "extra", ("extra", "param_group"))
        object_of(fields["extra"], "extra.extra")
        if optimizer is not None:
            optimizer.check_options(object_of(fields["param_group"], "extra.param_group"))
        elif fields["param_group"] is not None:
            raise ValueError("extra.param_group is given, and this model has no optimizer")
    except ValueError as error:
        raise CheckpointError(
            f"the checkpoint's manifest holds what no save writes: {error}; use another checkpoint. Nothing was changed"
        ) from error
