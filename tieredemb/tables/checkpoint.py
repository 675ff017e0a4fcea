"""Checkpoints of a module: rows of all its key spaces, and what its optimizer and its user want remembered."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Mapping
from typing import Any

from tieredemb.config import check_flag
from tieredemb.errors import CheckpointError, ConfigError, ConfigTypeError, StorageError, shown
from tieredemb.storage.base import ColdRows
from tieredemb.storage.checkpoint import directory as checkpoint
from tieredemb.storage.checkpoint.files import HeldRows
from tieredemb.storage.checkpoint.manifest import Space
from tieredemb.tables.checkpoint_notes import check_noted, note, set_noted
from tieredemb.tables.group import Group
from tieredemb.tables.row_optimizer import RowOptimizer
from tieredemb.tables.table_set import TableSet
from tieredemb.tables.weights_alone import OF_OPTIMIZER, WeightsAlone


def save(tables: TableSet, optimizer: RowOptimizer | None, directory: str | os.PathLike[str], extra: Any) -> None:
    """See `TieredModule.save_checkpoint`."""
    check_directory(directory)
    tables = tables.whole
    noted = note(optimizer, extra, _optimizers(tables))
    with tables.locked():  # another thread's step must not end up in half of it
        held, broken = write_back(tables)
        spaces, identities = spaces_of(tables), _identities(tables)
        checkpoint.save(directory, spaces, identities=identities, extra=noted, broken=broken, held=held)


def write_back(tables: TableSet) -> tuple[dict[str, HeldRows], str]:
    """Brings the cold rows up to date: returns those that a storage could not take, by key space, and why rows are not
    to be trusted, if so. The caller holds the caches."""
    held: dict[str, HeldRows] = {}
    for name, group in _named(tables):
        try:
            group.cache.write_back()
        except StorageError:  # a disk that takes no more: another may
            group.cache.check_loadable()
            held[name] = group.cache.dirty_rows()
    tables.check_faults()
    reasons = dict.fromkeys(group.cache.doubts.reason for group in tables.groups)
    return held, "; ".join(filter(None, reasons))


def load(tables: TableSet, optimizer: RowOptimizer | None, directory: str | os.PathLike[str], *, recover: bool) -> Any:
    """See `TieredModule.load_checkpoint`."""
    check_directory(directory)
    check_flag("recover", recover)
    tables = tables.whole
    with tables.changing("load_checkpoint") as change:
        check_replaceable(tables)
        opened = checkpoint.opened(
            directory,
            spaces_of(tables),
            identities=_identities(tables),
            check_extra=functools.partial(check_noted, optimizer, _optimizers(tables)),
            recover=recover,
            takes=takes_of(tables),
            ignored=OF_OPTIMIZER,
        )
        with opened as found:
            change.has_begun = True
            found.restore()
        tables.adopt()
        move_unused(found)
        set_noted(optimizer, found.extra, _optimizers(tables))
    warn_of_left(found, stacklevel=4)
    return found.extra["extra"]


def takes_of(tables: TableSet) -> checkpoint.Takes | None:
    """How tables without an optimizer take the rows of a checkpoint, see `WeightsAlone`; None of others."""
    if tables.config.optimizer is not None:
        return None
    groups = dict(_named(tables))

    def takes(name: str, extra: Mapping[str, Any], entry: Space, stored: Any) -> WeightsAlone | None:
        if not entry.row_layout.state_width and entry.identity.get("optimizer") is None:
            if extra["param_group"] is not None:
                raise CheckpointError(
                    "the checkpoint's manifest holds what no save writes: extra.param_group is given, and its rows "
                    "have no optimizer, as this model has no optimizer; use another checkpoint. Nothing was changed"
                )
            return None
        return WeightsAlone(groups[name], extra, entry, stored)

    return takes


def move_unused(found: checkpoint.Opened) -> None:
    """Writes rows that were never used, and that an optimizer has moved all the same."""
    for each in found.taken.values():
        assert isinstance(each, WeightsAlone)
        each.move_unused()


def warn_of_left(found: checkpoint.Opened, *, stacklevel: int) -> None:
    """Warns of the state that was left, where tables without an optimizer were loaded. `stacklevel`: of the caller's
    caller."""
    for each in list(found.taken.values())[:1]:
        assert isinstance(each, WeightsAlone)
        warnings.warn(
            f"loaded the weights and scores of a checkpoint that was saved with {type(each.optimizer).__name__} after "
            f"{max(each.steps)} steps; its optimizer state and steps were left, as these tables have no optimizer",
            stacklevel=stacklevel,
        )


def check_replaceable(tables: TableSet) -> None:
    """Raises `StorageError` while batches are in flight, but of a broken cache, which gives them up."""
    is_broken = any(group.cache.doubts.reason for group in tables.groups)
    for group in tables.groups:
        if is_broken:  # nothing can be done with batches in flight
            group.cache.give_up_batches()
        group.cache.check_idle("load a checkpoint")


def _optimizers(tables: TableSet) -> dict[str, RowOptimizer]:
    """Of tables that are looked up one by one, by their names; none of tables that have one together."""
    if not tables.config.apart:
        return {}
    return {each.tables.config.tables[0].name: each.optimizer for each in list(tables.engines) if each.optimizer}


def check_directory(directory: str | os.PathLike[str]) -> None:
    """Raises `ConfigError` for a name that is none."""
    name = os.fspath(directory) if isinstance(directory, (str, os.PathLike)) else None
    if not isinstance(name, str) or "\0" in name:
        raise ConfigTypeError(f"directory must be the path of a directory, got {shown(directory)}")
    if not name:
        raise ConfigError("the directory's name is empty, which would be the current one; give it a name, or '.'")


def _named(tables: TableSet) -> list[tuple[str, Group]]:
    return [(f"width{group.space.width}", group) for group in tables.groups]


def spaces_of(tables: TableSet) -> dict[str, ColdRows]:
    """The cold rows of each key space, by the name that checkpoints have for it."""
    return {name: group.cache.cold for name, group in _named(tables)}


def _identities(tables: TableSet) -> dict[str, dict[str, Any]]:
    return {name: group.identity for name, group in _named(tables)}
