"""Checkpoints of a sharded collection: each rank writes its rows, under the keys of the whole tables, and rank 0 writes
the manifest. A checkpoint of one world loads into any other, and into a collection in one process, and vice versa.

All ranks must see the directory. They agree on every step before the next one: where one rank fails all raise, and the
last checkpoint stays as it is.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from tieredemb.config import TablePart, check_flag
from tieredemb.errors import CheckpointError, shown
from tieredemb.lookup.bags import KeySpace
from tieredemb.sharding.agreed import Announce, agreed
from tieredemb.sharding.exchange import Exchange
from tieredemb.sharding.layout import REPLICATED, Layout
from tieredemb.sharding.shard import Shard
from tieredemb.storage.base import ColdRows
from tieredemb.storage.checkpoint import directory as checkpoint
from tieredemb.storage.checkpoint.manifest import Manifest, Space
from tieredemb.storage.file.header import jsonable
from tieredemb.storage.file.io import fsync_directory
from tieredemb.storage.system import system
from tieredemb.tables.checkpoint import (
    Beside,
    check_directory,
    check_replaceable,
    ignored_of,
    joined_reasons,
    move_unused,
    seedless_of,
    spaces_of,
    takes_of,
    warn_of_left,
    write_back,
)
from tieredemb.tables.checkpoint_notes import NotedTables, check_all_noted, check_kind, note_all, set_all_noted
from tieredemb.tables.config import TableSetConfig
from tieredemb.tables.group import identity_of

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

T = TypeVar("T")


@dataclass(frozen=True)
class OwnKeys:
    """What a rank holds of the key space of one width: see `KeyPart`. `space`: of all rows · `start`: int64 (T + 1,),
    the first key here of each table."""

    layout: Layout
    rank: int
    space: KeySpace
    start: Array

    @property
    def rows(self) -> int:
        """Rows of the whole key space."""
        return self.space.rows

    def _parts(self) -> list[TablePart]:
        return [self.layout.saved_part(int(t), self.rank) for t in self.space.tables]

    def holds(self, keys: Array) -> Array:
        """See `KeyPart`: whether keys are saved here."""
        table = np.searchsorted(self.start, keys, side="right") - 1
        rows = np.array([part.own_rows for part in self._parts()])
        found: Array = keys - self.start[table] < rows[table]
        return found

    def whole(self, keys: Array) -> Array:
        """See `KeyPart`."""
        table = np.searchsorted(self.start, keys, side="right") - 1
        parts = self._parts()
        first, step = np.array([part.first for part in parts]), np.array([part.step for part in parts])
        rows: Array = self.space.start[table] + first[table] + step[table] * (keys - self.start[table])
        return rows

    def own(self, keys: Array) -> tuple[Array, Array]:
        """See `KeyPart`."""
        table = np.searchsorted(self.space.start, keys, side="right") - 1
        rows, number = keys - self.space.start[table], self.space.tables[table]
        mine = np.isin(self.layout.owners(number, rows), (self.rank, REPLICATED))
        return mine, self.start[table[mine]] + self.layout.local(number[mine], rows[mine])


@dataclass(frozen=True, kw_only=True)
class ShardedRows:
    """What this rank has to save and to load of a collection. `config`: of the whole tables · `announce`: called before
    anything that all ranks do, with the error of this rank or None; raises the error of one on all · `prefix`, `names`:
    see `NotedTables`."""

    config: TableSetConfig
    layout: Layout
    exchange: Exchange
    shards: Sequence[Shard]
    announce: Announce
    prefix: str = ""
    names: tuple[str, ...] = ()

    @property
    def noted(self) -> NotedTables:
        """What the manifest notes of it beside the rows."""
        return NotedTables(self.prefix, self.names, self.shards[0].engine.optimizer, {})

    def write(self, path: str, token: str, written: list[str], first: int) -> tuple[dict[str, Space], list[str]]:
        """Writes what this rank holds, as processes numbered from `first` on; returns the records of the manifest, and
        why rows are not to be trusted."""
        entries: dict[str, Space] = {}
        reasons = []
        for number, shard in enumerate(self.shards):
            tables = shard.engine.tables
            with tables.locked():
                rows, broken = write_back(tables)
                reasons.append(broken)
                entries |= checkpoint.write_spaces(
                    path, token, written, self._named(spaces_of(tables)), self._identities(shard), self._named(rows),
                    self._parts(shard), number=first + number,
                )  # fmt: skip
        return entries, reasons

    def spaces(self) -> dict[str, ColdRows]:
        """The cold rows of each key space here."""
        return self._named(
            {name: cold for shard in self.shards for name, cold in spaces_of(shard.engine.tables).items()}
        )

    def identities(self) -> dict[str, Any]:
        """What the rows of each key space mean."""
        return {name: identity for shard in self.shards for name, identity in self._identities(shard).items()}

    def parts(self) -> dict[str, OwnKeys]:
        """What this rank holds of each key space."""
        return {name: part for shard in self.shards for name, part in self._parts(shard).items()}

    def _parts(self, shard: Shard) -> dict[str, OwnKeys]:
        (group,) = shard.engine.tables.groups
        keys = OwnKeys(self.layout, self.exchange.rank, shard.space, group.space.start)
        return self._named(dict.fromkeys(spaces_of(shard.engine.tables), keys))

    def _identities(self, shard: Shard) -> dict[str, Any]:
        identity = identity_of(self.config, [self.config.tables[t] for t in shard.tables])
        return self._named(dict.fromkeys(spaces_of(shard.engine.tables), identity))

    def _named(self, values: Mapping[str, T]) -> dict[str, T]:
        return {f"{self.prefix}{name}": value for name, value in values.items()}


def save(
    rows: Sequence[ShardedRows],
    directory: str | os.PathLike[str],
    extra: Any,
    *,
    dense: Callable[[], bytes] | None = None,
) -> None:
    """See `ShardedTieredEmbeddingBagCollection.save_checkpoint`. `rows`: of collections on the same ranks · `dense`:
    returns the dense layers of a whole model, on rank 0."""
    exchange, announce = rows[0].exchange, rows[0].announce
    with contextlib.ExitStack() as held:

        def begin() -> tuple[Any, str, str, bytes | None]:
            check_directory(directory)
            noted = jsonable(note_all([each.noted for each in rows], extra), "extra")
            path, token = os.path.abspath(os.fspath(directory)), secrets.token_hex(8)
            layers = None
            if exchange.rank == 0:
                layers = None if dense is None else dense()
                with checkpoint.checkpoint_errors(path, "saving"):
                    system.makedirs(path)
                    held.enter_context(checkpoint.locked(path))
            return noted, path, token, layers

        noted, path, token, layers = agreed(announce, begin)
        token = exchange.broadcast_object(token)
        written = held.enter_context(checkpoint.written_files(path, token))
        entries, broken = agreed(announce, lambda: _write(rows, path, token, written))
        found = exchange.gather((entries, broken))

        def commit() -> None:
            if found is not None:
                _commit(path, token, written, found, noted, layers)

        agreed(announce, commit)
        for each in rows:
            for cold in each.spaces().values():
                cold.kept()


def _write(rows: Sequence[ShardedRows], path: str, token: str, written: list[str]) -> tuple[dict[str, Space], str]:
    """Writes what this rank holds; returns the records of the manifest, and why rows are not to be trusted."""
    entries: dict[str, Space] = {}
    reasons: list[str] = []
    number = rows[0].exchange.rank * sum(len(each.shards) for each in rows)
    with checkpoint.checkpoint_errors(path, "saving"):
        for each in rows:
            written_entries, reasons_of_rows = each.write(path, token, written, number)
            entries |= written_entries
            reasons += reasons_of_rows
            number += len(each.shards)
        fsync_directory(path)
    return entries, joined_reasons(reasons)


def _commit(
    path: str,
    token: str,
    written: list[str],
    found: list[tuple[dict[str, Space], str]],
    noted: Any,
    dense: bytes | None,
) -> None:
    """On rank 0: makes the files of all ranks the checkpoint."""
    with checkpoint.checkpoint_errors(path, "saving"):
        for rank, (entries, _) in enumerate(found):
            for name in (file for entry in entries.values() for file in entry.files):
                if not os.path.exists(os.path.join(path, name)):
                    raise CheckpointError(
                        f"rank 0 does not see {name!r}, which rank {rank} has written to {path!r}; give a directory "
                        f"that all ranks share"
                    )
        entries = {name: entry for each, _ in found for name, entry in each.items()}
        file = None if dense is None else checkpoint.write_dense(path, token, written, dense)
        manifest = Manifest(spaces=entries, extra=noted, broken=joined_reasons(why for _, why in found), dense=file)
        checkpoint.commit(path, token, written, manifest)
        fsync_directory(path)
        checkpoint.remove_leftovers(path, manifest)


def load(
    rows: Sequence[ShardedRows],
    directory: str | os.PathLike[str],
    *,
    recover: bool,
    beside: Beside | None = None,
    stacklevel: int = 5,
) -> dict[str, Any]:
    """See `ShardedTieredEmbeddingBagCollection.load_checkpoint`. `rows`: as for `save` · the others: as for
    `tables.checkpoint.load`."""
    announce, shards = rows[0].announce, [shard for each in rows for shard in each.shards]
    noted = [each.noted for each in rows]
    with contextlib.ExitStack() as held:

        def open() -> tuple[list[Any], checkpoint.Opened, Callable[[], None] | None]:
            check_directory(directory)
            check_flag("recover", recover)
            changes = []
            for shard in shards:
                shard.engine.check_no_gradient("load a checkpoint")
                shard.engine.drop_planned()
                changes.append(held.enter_context(shard.engine.tables.changing("load_checkpoint")))
                check_replaceable(shard.engine.tables)
            opened = held.enter_context(_opened(rows, noted, directory, recover))
            return changes, opened, None if beside is None else beside(opened.dense)

        changes, found, take_over = agreed(announce, open)
        agreed(announce, lambda: _check_same(rows[0].exchange, directory, found))

        def restore() -> None:
            for change in changes:
                change.has_begun = True
            found.restore()
            for shard in shards:
                shard.engine.tables.adopt()
            move_unused(found)
            set_all_noted(noted, found.extra)
            if take_over is not None:
                take_over()

        agreed(announce, restore)
    warn_of_left(found, stacklevel=stacklevel)
    extra: dict[str, Any] = found.extra["extra"]
    return extra


def _opened(
    rows: Sequence[ShardedRows], noted: Sequence[NotedTables], directory: str | os.PathLike[str], recover: bool
) -> contextlib.AbstractContextManager[checkpoint.Opened]:
    by_shard = [(each.prefix, shard.engine.tables) for each in rows for shard in each.shards]
    takes = takes_of(by_shard)
    return checkpoint.opened(
        directory,
        {name: cold for each in rows for name, cold in each.spaces().items()},
        identities={name: identity for each in rows for name, identity in each.identities().items()},
        check_kind=functools.partial(check_kind, noted),
        check_extra=functools.partial(check_all_noted, noted),
        recover=recover,
        parts={name: part for each in rows for name, part in each.parts().items()},
        takes=takes,
        seedless=[name for prefix, tables in by_shard for name in seedless_of(tables, prefix)],
        ignored={name: fields for prefix, tables in by_shard for name, fields in ignored_of(tables, prefix).items()},
    )


def _check_same(exchange: Exchange, directory: str | os.PathLike[str], found: checkpoint.Opened) -> None:
    """Raises `CheckpointError` on all ranks where they are about to load different checkpoints."""
    all_found = exchange.all_gather_object(
        (found.identity, os.path.abspath(os.fspath(directory)), shown(found.extra["extra"]))
    )
    if len({identity for identity, _, _ in all_found}) > 1:
        which = "; ".join(
            f"rank {rank} loads {identity} in {path!r}, whose extra is {extra}"
            for rank, (identity, path, extra) in enumerate(all_found)
        )
        raise CheckpointError(
            f"the ranks load different checkpoints: {which}. Nothing was changed; give all ranks the same one"
        )
