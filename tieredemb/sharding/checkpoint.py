"""Checkpoints of a sharded collection: each rank writes its rows, under the keys of the whole tables, and rank 0 the
manifest. What was saved by one world is loaded by any other, and by a collection in one process, and the other way
round.

All ranks have to see the directory. Every step is agreed on before the next one: where one rank fails all raise, and
the last checkpoint stays as it is.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from tieredemb.config import TablePart, check_flag
from tieredemb.errors import CheckpointError, shown
from tieredemb.lookup.bags import KeySpace
from tieredemb.sharding.agreed import Announce, agreed
from tieredemb.sharding.exchange import Exchange
from tieredemb.sharding.layout import Layout
from tieredemb.sharding.shard import Shard
from tieredemb.storage.checkpoint import directory as checkpoint
from tieredemb.storage.checkpoint.manifest import Manifest, Space
from tieredemb.storage.file.header import jsonable
from tieredemb.storage.file.io import fsync_directory
from tieredemb.storage.system import system
from tieredemb.tables.checkpoint import (
    check_directory,
    check_replaceable,
    move_unused,
    spaces_of,
    takes_of,
    warn_of_left,
    write_back,
)
from tieredemb.tables.checkpoint_notes import check_noted, note, set_noted
from tieredemb.tables.config import TableSetConfig
from tieredemb.tables.group import identity_of
from tieredemb.tables.weights_alone import OF_OPTIMIZER

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

R = TypeVar("R")


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
        """Of the whole key space."""
        return self.space.rows

    def _parts(self) -> list[TablePart]:
        return [self.layout.part(int(t), self.rank) for t in self.space.tables]

    def holds(self, keys: Array) -> Array:
        """See `KeyPart`."""
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
        mine = self.layout.owners(number, rows) == self.rank
        return mine, self.start[table[mine]] + self.layout.local(number[mine], rows[mine])


@dataclass(frozen=True)
class ShardedRows:
    """What there is to save and to load. `config`: of the whole tables · `announce`: to be called before anything that
    all ranks do, with the error that this one has met, if any: raises it on all of them."""

    config: TableSetConfig
    layout: Layout
    exchange: Exchange
    shards: Sequence[Shard]
    announce: Announce

    def save(self, directory: str | os.PathLike[str], extra: Any) -> None:
        """See `ShardedTieredEmbeddingBagCollection.save_checkpoint`."""
        optimizer = self.shards[0].engine.optimizer
        with contextlib.ExitStack() as held:

            def begin() -> tuple[Any, str, str]:
                check_directory(directory)
                noted = jsonable(note(optimizer, extra, {}), "extra")
                path, token = os.path.abspath(os.fspath(directory)), secrets.token_hex(8)
                if self.exchange.rank == 0:
                    with checkpoint.checkpoint_errors(path, "saving"):
                        system.makedirs(path)
                        held.enter_context(checkpoint.locked(path))
                return noted, path, token

            noted, path, token = self._agreed(begin)
            token = self.exchange.told(token)
            written = held.enter_context(checkpoint.written_files(path, token))
            entries, broken = self._agreed(lambda: self._write(path, token, written))
            found = self.exchange.gather((entries, broken))

            def commit() -> None:
                if found is not None:
                    self._commit(path, token, written, found, noted)

            self._agreed(commit)
            for shard in self.shards:
                for cold in spaces_of(shard.engine.tables).values():
                    cold.kept()

    def _write(self, path: str, token: str, written: list[str]) -> tuple[dict[str, Space], str]:
        """Writes what this rank holds; returns the entries of the manifest, and why rows are not to be trusted."""
        entries: dict[str, Space] = {}
        reasons = []
        with checkpoint.checkpoint_errors(path, "saving"):
            for number, shard in enumerate(self.shards):
                tables = shard.engine.tables
                with tables.locked():
                    rows, broken = write_back(tables)
                    reasons.append(broken)
                    entries |= checkpoint.write_spaces(
                        path, token, written, spaces_of(tables), self._identities(shard), rows, self._parts(shard),
                        number=self.exchange.rank * len(self.shards) + number,
                    )  # fmt: skip
            fsync_directory(path)
        return entries, "; ".join(filter(None, dict.fromkeys(reasons)))

    def _commit(
        self, path: str, token: str, written: list[str], found: list[tuple[dict[str, Space], str]], noted: Any
    ) -> None:
        """On rank 0: makes all ranks' files the checkpoint."""
        with checkpoint.checkpoint_errors(path, "saving"):
            for rank, (entries, _) in enumerate(found):
                for name in (file for entry in entries.values() for file in entry.files):
                    if not os.path.exists(os.path.join(path, name)):
                        raise CheckpointError(
                            f"rank 0 does not see {name!r}, which rank {rank} has written to {path!r}; give a "
                            f"directory that all ranks share"
                        )
            entries = {name: entry for each, _ in found for name, entry in each.items()}
            broken = "; ".join(filter(None, dict.fromkeys(reason for _, reason in found)))
            manifest = Manifest(spaces=entries, extra=noted, broken=broken)
            checkpoint.commit(path, token, written, manifest)
            fsync_directory(path)
            checkpoint.remove_leftovers(path, manifest)

    def load(self, directory: str | os.PathLike[str], *, recover: bool) -> Any:
        """See `ShardedTieredEmbeddingBagCollection.load_checkpoint`."""
        optimizer = self.shards[0].engine.optimizer
        with contextlib.ExitStack() as held:

            def open() -> tuple[list[Any], checkpoint.Opened]:
                check_directory(directory)
                check_flag("recover", recover)
                changes = []
                for shard in self.shards:
                    shard.engine.check_no_gradient("load a checkpoint")
                    shard.engine.drop_planned()
                    changes.append(held.enter_context(shard.engine.tables.changing("load_checkpoint")))
                    check_replaceable(shard.engine.tables)
                opened = checkpoint.opened(
                    directory,
                    {name: cold for shard in self.shards for name, cold in spaces_of(shard.engine.tables).items()},
                    identities={k: v for shard in self.shards for k, v in self._identities(shard).items()},
                    check_extra=functools.partial(check_noted, optimizer, {}),
                    recover=recover,
                    parts={name: part for shard in self.shards for name, part in self._parts(shard).items()},
                    takes=self._takes(),
                    ignored=OF_OPTIMIZER,
                )
                return changes, held.enter_context(opened)

            changes, found = self._agreed(open)
            self._agreed(lambda: self._check_same(directory, found))

            def restore() -> None:
                for change in changes:
                    change.has_begun = True
                found.restore()
                for shard in self.shards:
                    shard.engine.tables.adopt()
                move_unused(found)
                set_noted(optimizer, found.extra, {})

            self._agreed(restore)
        warn_of_left(found, stacklevel=5)
        return found.extra["extra"]

    def _takes(self) -> checkpoint.Takes | None:
        """See `takes_of`."""
        by_space = {name: takes_of(each.engine.tables) for each in self.shards for name in self._parts(each)}
        if None in by_space.values():
            return None
        return lambda name, *of_space: by_space[name](name, *of_space)  # type: ignore[misc]

    def _check_same(self, directory: str | os.PathLike[str], found: checkpoint.Opened) -> None:
        """Raises `CheckpointError` on all ranks where they are about to load different checkpoints."""
        all_found = self.exchange.every(
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

    def _agreed(self, action: Callable[[], R]) -> R:
        return agreed(self.announce, action)

    def _parts(self, shard: Shard) -> dict[str, OwnKeys]:
        (group,) = shard.engine.tables.groups
        keys = OwnKeys(self.layout, self.exchange.rank, shard.space, group.space.start)
        return dict.fromkeys(spaces_of(shard.engine.tables), keys)

    def _identities(self, shard: Shard) -> dict[str, Any]:
        identity = identity_of(self.config, [self.config.tables[t] for t in shard.tables])
        return dict.fromkeys(spaces_of(shard.engine.tables), identity)
