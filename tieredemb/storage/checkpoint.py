"""Checkpoints: the rows that were ever used, written beside the last checkpoint and renamed over it when
verified.

A directory holds `manifest.json` and the row files that it names (`rows-<token>-<n>.bin`). A save writes row
files of new names, syncs them, reads them back, and then replaces the manifest: that rename is the moment at
which the new checkpoint exists. Killed before, the old one loads; killed after, the new one. What no manifest
names is deleted by the next save.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tieredemb.errors import CheckpointError, StorageError, StorageFullError, TieredEmbError
from tieredemb.storage.base import ColdRows
from tieredemb.storage.checkpoint_files import Chunk, read_chunks, verify_rows, write_rows
from tieredemb.storage.checkpoint_manifest import (
    MANIFEST,
    Manifest,
    Space,
    is_leftover,
    read_manifest,
    write_manifest,
)
from tieredemb.storage.file_header import difference, jsonable, layout_fields, plain_metadata
from tieredemb.storage.file_io import fsync_directory

Spaces = Mapping[str, ColdRows]
Identities = Mapping[str, Mapping[str, Any]]


def save(
    directory: str | os.PathLike[str],
    spaces: Spaces,
    *,
    identities: Identities | None = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Writes the used rows and the metadata of the key spaces `spaces` (by name) to `directory`, made if
    missing.

    `identities`: what the rows of each space mean, compared by `load`. `extra`: anything that JSON can hold.
    Flush hot caches first: only cold rows are read. Memory: about 100 MiB of buffers, whatever the size of
    the table.

    Raises `StorageFullError` or `CheckpointError`; the last checkpoint is then untouched and nothing partial
    is left. Returns when the checkpoint is durable.
    """
    path = os.path.abspath(os.fspath(directory))
    described = {name: jsonable(dict((identities or {}).get(name, {})), f"identity of {name!r}") for name in spaces}
    noted = jsonable(dict(extra or {}), "extra")
    with checkpoint_errors(path, "saving"):
        os.makedirs(path, exist_ok=True)
        with _locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB):
            manifest = _save_rows(path, spaces, described, noted)
            _remove(path, [name for name in os.listdir(path) if is_leftover(name, manifest)])


def _save_rows(path: str, spaces: Spaces, identities: Identities, extra: dict[str, Any]) -> Manifest:
    token = secrets.token_hex(8)
    written: list[str] = []
    try:
        entries = {}
        for number, (name, cold) in enumerate(spaces.items()):
            file = f"rows-{token}-{number}.bin"
            written.append(file)
            chunks = write_rows(os.path.join(path, file), cold)
            verify_rows(os.path.join(path, file), chunks, cold.layout)
            entries[name] = Space(
                file=file,
                layout=layout_fields(cold.layout),
                identity=dict(identities[name]),
                metadata=plain_metadata(cold.metadata),
                chunks=chunks,
            )
        manifest = Manifest(spaces=entries, extra=extra)
        pending = f"{MANIFEST}.{token}"
        written.append(pending)
        write_manifest(os.path.join(path, pending), manifest)
        fsync_directory(path)  # the row files' names, before a manifest that needs them
        os.replace(os.path.join(path, pending), os.path.join(path, MANIFEST))
    except BaseException:
        if not _names(path, token):  # an interrupt may arrive just after the rename
            _remove(path, written)
        raise
    fsync_directory(path)
    return manifest


def load(
    directory: str | os.PathLike[str],
    spaces: Spaces,
    *,
    identities: Identities | None = None,
    check_extra: Callable[[dict[str, Any]], None] = lambda extra: None,
) -> dict[str, Any]:
    """Replaces all rows and metadata of `spaces` by those of the checkpoint in `directory`; returns its
    `extra`.

    Empty hot caches first: what they hold belongs to the rows that go. `identities` as in `save`; without
    them they are not compared. `check_extra` is given the `extra` first, and raises for one that it does not want.
    Everything is verified before a row is changed. Raises `CheckpointError`
    (nothing was changed), or `StorageError` (a space ran full, or what was verified could not be read again: all
    rows of all spaces are then untouched ones).
    """
    path = os.path.abspath(os.fspath(directory))
    with checkpoint_errors(path, "loading"), _locked(path, fcntl.LOCK_SH):
        manifest = read_manifest(path)
        _compare(path, manifest, spaces, identities)
        check_extra(manifest.extra)
        for name, cold in spaces.items():
            entry = manifest.spaces[name]
            verify_rows(os.path.join(path, entry.file), entry.chunks, cold.layout)
        for cold in spaces.values():
            cold.reset()
        try:
            for name, cold in spaces.items():
                entry = manifest.spaces[name]
                _load_rows(os.path.join(path, entry.file), entry.chunks, cold)
                cold.metadata = plain_metadata(entry.metadata)
        except BaseException as error:
            for cold in spaces.values():  # half of a checkpoint must not pass for a whole one
                cold.reset()
            if isinstance(error, OSError) and not isinstance(error, StorageError):
                raise StorageError(
                    f"loading the checkpoint in {path!r} failed after it was verified ({error}): all rows are as at "
                    "the start now; load again, or use another checkpoint"
                ) from error
            raise
    return manifest.extra


def _load_rows(path: str, chunks: list[Chunk], cold: ColdRows) -> None:
    for keys, weight, state in read_chunks(path, chunks, cold.layout):
        cold.reserve(keys)
        cold.weight[keys] = weight
        cold.state[keys] = state


def _compare(path: str, manifest: Manifest, spaces: Spaces, identities: Identities | None) -> None:
    """Raises `CheckpointError` that names the first thing in which the checkpoint is another model's."""
    if set(manifest.spaces) != set(spaces):
        raise CheckpointError(
            f"the checkpoint in {path!r} has the key spaces {sorted(manifest.spaces)}, this model has "
            f"{sorted(spaces)}; load it into a model of the same tables"
        )
    for name, cold in spaces.items():
        entry = manifest.spaces[name]
        found = difference(entry.layout, layout_fields(cold.layout), "layout", stored_in="the checkpoint")
        if not found and identities is not None:
            identity = jsonable(dict(identities.get(name, {})), f"identity of {name!r}")
            found = difference(entry.identity, identity, "identity", stored_in="the checkpoint")
        steps, tables = len(entry.metadata.steps), len(cold.metadata.steps)
        if not found and tables and steps != tables:
            found = f"metadata.steps has {steps} numbers in the checkpoint and this model {tables} tables"
        if found:
            raise CheckpointError(
                f"the checkpoint in {path!r} is of another model: {found} (key space {name!r}); nothing was changed"
            )


@contextlib.contextmanager
def checkpoint_errors(path: str, doing: str) -> Iterator[None]:
    """Turns an `OSError` of the block into `CheckpointError`, or `StorageFullError` where space ran out."""
    try:
        yield
    except TieredEmbError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFullError(
                f"no space left while {doing} the checkpoint in {path!r}: the last one is "
                "untouched; it needs space for two at a time"
            ) from error
        raise CheckpointError(f"{doing} the checkpoint in {path!r} failed: {error}") from error


@contextlib.contextmanager
def _locked(path: str, how: int) -> Iterator[None]:
    """Keeps a save from deleting what another save writes or a load reads. A load waits for a save."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no checkpoint in {path!r}: the directory does not exist") from error
    try:
        try:
            fcntl.flock(fd, how)
        except BlockingIOError as error:
            raise CheckpointError(
                f"{path!r} is in use by another save or load; wait for it, or save to another directory"
            ) from error
        yield
    finally:
        os.close(fd)


def _names(path: str, token: str) -> bool:
    """Whether the manifest in the directory is that of the save `token`."""
    try:
        with open(os.path.join(path, MANIFEST), "rb") as file:
            return token.encode() in file.read()
    except FileNotFoundError:
        return False


def _remove(path: str, names: list[str]) -> None:
    """Deletes files of a failed or replaced save. One that cannot be deleted now is found by the next
    save."""
    for name in names:
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(path, name))
