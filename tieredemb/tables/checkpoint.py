"""Checkpoints of a module, or of all tables of a model: rows of all their key spaces, and what optimizers and users
want remembered.

One manifest holds all sets of tables that are saved as one: the names of their key spaces begin with a number of the
set. A whole model numbers its sets by the names of their tables, which the manifest lists.
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tieredemb.cache.locks import Locks
from tieredemb.config import check_flag
from tieredemb.errors import CheckpointError, ConfigError, ConfigTypeError, StorageError, shown
from tieredemb.storage.base import ColdRows
from tieredemb.storage.checkpoint import directory as checkpoint
from tieredemb.storage.checkpoint.files import HeldRows
from tieredemb.storage.checkpoint.manifest import Space
from tieredemb.tables.checkpoint_notes import (
    NotedTables,
    check_all_noted,
    check_kind,
    note_all,
    part_of,
    set_all_noted,
)
from tieredemb.tables.group import Group
from tieredemb.tables.row_optimizer import RowOptimizer
from tieredemb.tables.table_set import TableSet
from tieredemb.tables.weights_alone import OF_OPTIMIZER, WeightsAlone

T = TypeVar("T")
Beside = Callable[[bytes | None], Callable[[], None]]


@dataclass(frozen=True, kw_only=True)
class SavedTables:
    """A set of tables to save or to load. `tables`: all that share its caches · `optimizer`: of the module that saves
    · `prefix`, `names`: see `NotedTables`."""

    tables: TableSet
    optimizer: RowOptimizer | None
    prefix: str = ""
    names: tuple[str, ...] = ()

    @property
    def noted(self) -> NotedTables:
        """What a checkpoint notes of these tables beside their rows."""
        return NotedTables(self.prefix, self.names, self.optimizer, _optimizers(self.tables))

    def spaces(self) -> dict[str, ColdRows]:
        """See `spaces_of`."""
        return _prefixed(self.prefix, spaces_of(self.tables))

    def identities(self) -> dict[str, dict[str, Any]]:
        """What the rows of each key space mean."""
        return _prefixed(self.prefix, {name: group.identity for name, group in _named(self.tables)})


def saved_alone(tables: TableSet, optimizer: RowOptimizer | None) -> list[SavedTables]:
    """All tables that share caches with these, for a checkpoint of them alone."""
    return [SavedTables(tables=tables.whole, optimizer=optimizer)]


def save(
    sets: Sequence[SavedTables], directory: str | os.PathLike[str], extra: Any, *, dense: bytes | None = None
) -> None:
    """See `TieredModule.save_checkpoint`. `dense`: the dense layers of a whole model."""
    check_directory(directory)
    noted = note_all([each.noted for each in sets], extra)
    with _locks(sets):  # another thread's step must not end up in half of it
        held: dict[str, HeldRows] = {}
        reasons = []
        for each in sets:
            rows_held, broken = write_back(each.tables)
            held |= _prefixed(each.prefix, rows_held)
            reasons.append(broken)
        checkpoint.save(
            directory,
            _joined(each.spaces() for each in sets),
            identities=_joined(each.identities() for each in sets),
            extra=noted,
            broken=joined_reasons(reasons),
            held=held,
            dense=dense,
        )


def write_back(tables: TableSet) -> tuple[dict[str, HeldRows], str]:
    """Brings the cold rows up to date: returns the rows that a storage could not take, by key space, and why rows
    may be wrong, or "". The caller holds the caches."""
    held: dict[str, HeldRows] = {}
    for name, group in _named(tables):
        try:
            group.cache.write_back()
        except StorageError:  # a disk that takes no more: another may
            group.cache.check_loadable()
            held[name] = group.cache.dirty_rows()
    tables.check_faults()
    return held, joined_reasons(group.cache.suspects.reason for group in tables.groups)


def joined_reasons(reasons: Iterable[str]) -> str:
    """Why rows are not to be trusted, each reason once; "" without any."""
    return "; ".join(filter(None, dict.fromkeys(reasons)))


def load(
    sets: Sequence[SavedTables],
    directory: str | os.PathLike[str],
    *,
    recover: bool,
    beside: Beside | None = None,
    stacklevel: int = 4,
) -> dict[str, Any]:
    """See `TieredModule.load_checkpoint`. `beside`: called with the dense layers before anything changes; what it
    returns is called once all rows are loaded, to load them · `stacklevel`: of the user's call, for a warning."""
    check_directory(directory)
    check_flag("recover", recover)
    noted = [each.noted for each in sets]
    with contextlib.ExitStack() as stack:
        stack.enter_context(_locks(sets))
        changes = [stack.enter_context(each.tables.changing("load_checkpoint")) for each in sets]
        for each in sets:
            check_replaceable(each.tables)
        opened = checkpoint.opened(
            directory,
            _joined(each.spaces() for each in sets),
            identities=_joined(each.identities() for each in sets),
            check_kind=functools.partial(check_kind, noted),
            check_extra=functools.partial(check_all_noted, noted),
            recover=recover,
            takes=takes_of((each.prefix, each.tables) for each in sets),
            ignored=_joined(ignored_of(each.tables, each.prefix) for each in sets),
            seedless=[name for each in sets for name in seedless_of(each.tables, each.prefix)],
        )
        with opened as found:
            take_over = None if beside is None else beside(found.dense)
            for change in changes:
                change.has_begun = True
            found.restore()
        for each in sets:
            each.tables.adopt()
        move_unused(found)
        set_all_noted(noted, found.extra)
        if take_over is not None:
            take_over()
    warn_of_left(found, stacklevel=stacklevel)
    extra: dict[str, Any] = found.extra["extra"]
    return extra


def ignored_of(tables: TableSet, prefix: str = "") -> dict[str, frozenset[str]]:
    """What is not compared of each key space: of those without an optimizer, which load rows of any optimizer."""
    return (
        {}
        if tables.config.optimizer is not None
        else dict.fromkeys(_prefixed(prefix, dict(_named(tables))), OF_OPTIMIZER)
    )


def seedless_of(tables: TableSet, prefix: str = "") -> list[str]:
    """The key spaces that draw no random bits to round by, for which their seed would count."""
    return [f"{prefix}{name}" for name, group in _named(tables) if group.draws is None]


def takes_of(sets: Iterable[tuple[str, TableSet]]) -> checkpoint.Takes | None:
    """How tables without an optimizer take the rows of a checkpoint, see `WeightsAlone`; None of others. `sets`: with
    the prefix of their key spaces' names."""
    groups = {
        f"{prefix}{name}": (group, prefix)
        for prefix, tables in sets
        if tables.config.optimizer is None
        for name, group in _named(tables)
    }

    def takes(name: str, extra: Mapping[str, Any], entry: Space, stored: Any) -> WeightsAlone | None:
        if name not in groups:
            return None
        group, prefix = groups[name]
        noted = part_of(extra, prefix)
        if not entry.row_layout.state_width and entry.identity.get("optimizer") is None:
            if noted["param_group"] is not None:
                raise CheckpointError(
                    "the checkpoint's manifest holds what no save writes: extra.param_group is given, and its rows "
                    "have no optimizer, as this model has no optimizer; use another checkpoint. Nothing was changed"
                )
            return None
        return WeightsAlone(group, noted, entry, stored)

    return takes if groups else None


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
    is_broken = any(group.cache.suspects.reason for group in tables.groups)
    for group in tables.groups:
        if is_broken:  # nothing can be done with batches in flight
            group.cache.abort_batches()
        group.cache.check_idle("load a checkpoint")


def _optimizers(tables: TableSet) -> dict[str, RowOptimizer]:
    """The optimizers of tables that are looked up separately, by table name; empty if tables share one."""
    if not tables.config.separate:
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


def _prefixed(prefix: str, values: Mapping[str, T]) -> dict[str, T]:
    return {f"{prefix}{name}": value for name, value in values.items()}


def _joined(each: Iterable[Mapping[str, T]]) -> dict[str, T]:
    return {name: value for values in each for name, value in values.items()}


def _locks(sets: Sequence[SavedTables]) -> Locks:
    """Keeps other threads from the caches of all."""
    return Locks(group.cache for each in sets for group in each.tables.groups)
