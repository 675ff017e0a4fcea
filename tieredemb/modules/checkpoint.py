"""Checkpoints of a module: rows of all its key spaces, and what its optimizer and its user want remembered."""

from __future__ import annotations

import functools
import os
from typing import Any

from tieredemb.errors import CheckpointError, ConfigError
from tieredemb.modules.checkpoint_notes import check_noted, note
from tieredemb.modules.group import Group
from tieredemb.modules.optimizer import FusedOptimizer
from tieredemb.modules.table_set import TableSet
from tieredemb.storage import checkpoint
from tieredemb.storage.base import ColdRows


def save(tables: TableSet, optimizer: FusedOptimizer | None, directory: str | os.PathLike[str], extra: Any) -> None:
    """See `TieredModule.save_checkpoint`."""
    _check_directory(directory)
    noted = note(optimizer, extra)
    with tables.locked():  # another thread's step must not end up in half of it
        tables.flush()
        checkpoint.save(directory, _spaces(tables), identities=_identities(tables), extra=noted)


def load(tables: TableSet, optimizer: FusedOptimizer | None, directory: str | os.PathLike[str]) -> Any:
    """See `TieredModule.load_checkpoint`."""
    _check_directory(directory)
    with tables.locked():
        for group in tables.groups:
            group.cache.check_idle("load a checkpoint")
        try:
            check = functools.partial(check_noted, optimizer)
            noted = checkpoint.load(directory, _spaces(tables), identities=_identities(tables), check_extra=check)
        except CheckpointError:
            raise  # nothing was changed, so the hot rows are still the newest
        except BaseException:
            _forget(tables.groups)  # cold storage was reset under them
            raise
        _forget(tables.groups)
    if optimizer is not None and noted["param_group"] is not None:
        optimizer.set_options(noted["param_group"])
    return noted["extra"]


def _check_directory(directory: str | os.PathLike[str]) -> None:
    if not os.fspath(directory):
        raise ConfigError("the directory's name is empty, which would be the current one; give it a name, or '.'")


def _forget(groups: list[Group]) -> None:
    for group in groups:
        group.adopt()


def _spaces(tables: TableSet) -> dict[str, ColdRows]:
    return {f"width{group.space.width}": group.cache.cold for group in tables.groups}


def _identities(tables: TableSet) -> dict[str, dict[str, Any]]:
    return {f"width{group.space.width}": group.identity for group in tables.groups}
