"""Checkpoints: the rows that were ever used, written beside the last checkpoint and renamed over it when
verified.

A directory has `manifest.json` and the files that it names: of rows (`rows-<token>-<n>.bin`), of an optimizer's steps,
and of the dense layers of a whole model. A save writes row files with new names, syncs them, reads them back from the
disk, and then replaces the manifest: with that rename the new checkpoint exists. After a kill before it, the old one
loads; after it, the new one. Files that no manifest names are deleted by the next save. A load opens all files before
it reads them, so a save may delete them meanwhile.

Files on tmpfs are not read back, as that would read the memory that was just written. A load reads all files twice:
first to verify them and then, if all are right, to load the rows. Checksums are computed both times, except on tmpfs,
as the disk may return other bytes the second time. Ranks compare the identity of the checkpoints that they have opened.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import secrets
import threading
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

from tieredemb.config import Array
from tieredemb.errors import CheckpointError, StorageError, StorageFullError, TieredEmbError, some_of
from tieredemb.storage.base import ColdRows, RowLayout
from tieredemb.storage.checkpoint.files import (
    CheckedFile,
    HeldRows,
    RowFiles,
    is_in_memory,
    place_of,
    write_rows,
)
from tieredemb.storage.checkpoint.manifest import (
    MANIFEST,
    DenseFile,
    Manifest,
    Space,
    is_leftover,
    read_manifest,
    write_manifest,
)
from tieredemb.storage.checkpoint.parts import KeyPart, part_name, space_of
from tieredemb.storage.file.header import difference, jsonable, layout_fields, plain_metadata
from tieredemb.storage.file.io import fsync_directory, pread_all, pwrite_all
from tieredemb.storage.refused import refused
from tieredemb.storage.system import system

Spaces = Mapping[str, ColdRows]
Parts = Mapping[str, KeyPart]
Identities = Mapping[str, Mapping[str, Any]]
MOST_FILES = 1_000_000  # of one process: what its names are numbered from


def save(
    directory: str | os.PathLike[str],
    spaces: Spaces,
    *,
    identities: Identities | None = None,
    extra: Mapping[str, Any] | None = None,
    broken: str = "",
    held: Mapping[str, HeldRows] | None = None,
    dense: bytes | None = None,
) -> None:
    """Writes the used rows and the metadata of the key spaces `spaces` (by name) to `directory`, made if
    missing.

    `identities`: the meaning of each space's rows, compared by `opened`. `extra`: anything that JSON can hold.
    `broken`: why rows are suspect, if they are: the checkpoint reports it when it is opened. `held`: rows of a space
    that its storage could not take. `dense`: of the dense layers of a whole model.
    Write hot caches back before: only cold rows are read. Memory: about 100 MiB of buffers, whatever the size of
    the table.

    Raises `StorageFullError` or `CheckpointError`; the last checkpoint is then untouched and nothing partial
    is left. Returns when the checkpoint is durable.
    """
    path = os.path.abspath(os.fspath(directory))
    described = {name: jsonable(dict((identities or {}).get(name, {})), f"identity of {name!r}") for name in spaces}
    noted = jsonable(dict(extra or {}), "extra")
    with checkpoint_errors(path, "saving"):
        system.makedirs(path)
        with locked(path):
            token = secrets.token_hex(8)
            with written_files(path, token) as written:
                entries = write_spaces(path, token, written, spaces, described, held or {})
                file = None if dense is None else write_dense(path, token, written, dense)
                manifest = Manifest(spaces=entries, extra=noted, broken=broken, dense=file)
                commit(path, token, written, manifest)
            fsync_directory(path)
            for cold in spaces.values():
                cold.kept()
            remove_leftovers(path, manifest)


@contextlib.contextmanager
def written_files(path: str, token: str) -> Iterator[list[str]]:
    """Names of files that a save writes, which are deleted again where it fails."""
    written: list[str] = []
    try:
        yield written
    except BaseException:
        if not _may_name(path, token):  # an interrupt may arrive just after the rename
            _remove(path, written)
        raise


def write_spaces(
    path: str,
    token: str,
    written: list[str],
    spaces: Spaces,
    identities: Identities,
    held: Mapping[str, HeldRows],
    parts: Parts | None = None,
    *,
    number: int = 0,
) -> dict[str, Space]:
    """Writes and verifies the row files of `spaces`, or of this process's `parts` of them, and returns their entries
    for a manifest. `number`: of the process."""
    entries = {}
    names = _new_names(token, written, number * MOST_FILES)
    for count, (name, cold) in enumerate(spaces.items()):
        part = None if parts is None else parts[name]
        layout = cold.layout if part is None else replace(cold.layout, rows=part.rows)
        files, chunks = write_rows(path, names, cold, held.get(name), part)
        if not is_in_memory(path):  # which would read back the memory that it has just written
            with RowFiles(path, files, chunks, layout) as rows:
                rows.verify()
        history, data = "", b""
        if cold.history is not None:
            history, data = f"history-{token}-{number * MOST_FILES + count}.bin", cold.history.to_bytes()
            written.append(history)
            _write_whole(os.path.join(path, history), data)
        entries[name if part is None else part_name(name, number)] = Space(
            history=history,
            history_bytes=len(data),
            history_crc32=zlib.crc32(data) if history else None,
            files=files,
            layout=layout_fields(layout),
            identity=dict(identities[name]),
            metadata=plain_metadata(cold.metadata),
            chunks=chunks,
        )
    return entries


def write_dense(path: str, token: str, written: list[str], dense: bytes) -> DenseFile:
    """Writes the saved dense layers of a model, and returns their entry for a manifest."""
    name = f"dense-{token}.pt"
    written.append(name)
    _write_whole(os.path.join(path, name), dense)
    return DenseFile(file=name, bytes=len(dense), crc32=zlib.crc32(dense))


def commit(path: str, token: str, written: list[str], manifest: Manifest) -> None:
    """Makes `manifest` the directory's, atomically: from then on its row files are the checkpoint."""
    pending = f"{MANIFEST}.{token}"
    written.append(pending)
    write_manifest(os.path.join(path, pending), manifest)
    fsync_directory(path)  # the row files' names, before a manifest that needs them
    system.rename(os.path.join(path, pending), os.path.join(path, MANIFEST))


def remove_leftovers(path: str, manifest: Manifest) -> None:
    """Deletes what earlier saves have left, and `manifest` does not name."""
    _remove(path, [name for name in system.listdir(path) if is_leftover(name, manifest)])


def _new_names(token: str, written: list[str], first: int) -> Iterator[str]:
    """Names of row files, each noted in `written` before it is used."""
    for number in itertools.count(first):
        written.append(f"rows-{token}-{number}.bin")
        yield written[-1]


def _write_whole(path: str, data: bytes) -> None:
    """Writes a new file, durably, and reads it back."""
    fd = system.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        pwrite_all(fd, data, 0)
        system.fsync(fd)
        if pread_all(fd, len(data) + 1, 0) != data:
            raise CheckpointError(f"{path!r} reads back other than it was written; check the disk")
    finally:
        system.close(fd)


def _history_of(path: str, manifest: Manifest, name: str, files: Mapping[str, CheckedFile], cold: ColdRows) -> Any:
    """What the optimizer of the rows of a space remembers of its steps, or None. Raises `CheckpointError`."""
    if cold.history is None:
        return None
    first, *others = manifest.of(name)
    entry = manifest.spaces[first]
    if first not in files:
        raise CheckpointError(f"the checkpoint in {path!r} lacks the optimizer's steps; use another checkpoint")
    try:
        for other in others:
            if manifest.spaces[other].metadata.steps != entry.metadata.steps:
                raise ValueError(f"its entries {first!r} and {other!r} have taken different steps")
        return cold.history.parsed(files[first], entry.metadata.steps)
    except ValueError as error:
        raise CheckpointError(
            f"{entry.history!r} in {path!r} is damaged: {error}; use another checkpoint, nothing was changed"
        ) from error


class Taken(Protocol):
    """What a model takes of rows that are laid out otherwise than its own."""

    def taken(self, keys: Array, weight: Array, state: Array) -> tuple[Array, Array]:
        """Selects the model's rows among saved rows: keys int64 (K,), weight (K, D) and state uint32 (K, S + 1), with
        weights of the same dtype."""


Takes = Callable[[str, Mapping[str, Any], Space, CheckedFile | None], Taken | None]
"""What a model takes of a key space, given its name, the checkpoint's `extra`, the manifest's entry of the space, and
the history of steps; None: all of it, unchanged."""


class Opened:
    """A verified checkpoint with open files, which a save that replaces it does not affect. `extra`: saved in addition
    to the rows · `dense`: the saved dense layers of a whole model · `identity`: unique · `histories`: of optimizers'
    steps, by space · `taken`: for spaces of which only a part is loaded, that part."""

    def __init__(
        self,
        path: str,
        manifest: Manifest,
        files: Mapping[str, RowFiles],
        spaces: Spaces,
        histories: Mapping[str, Any],
        taken: Mapping[str, Taken],
        parts: Parts | None,
        dense: bytes | None,
    ) -> None:
        self._parts = parts
        self.dense = dense
        self._histories = histories
        self.taken = taken
        self.extra, self.identity = manifest.extra, manifest.identity
        self._path, self._manifest, self._files, self._spaces = path, manifest, files, spaces

    def restore(self) -> None:
        """Replaces all rows and metadata of the spaces; hot caches must be emptied, as their rows are outdated. Raises
        `StorageError` if a space is full, or verified files cannot be read again: then some rows are as never
        written."""
        try:
            for cold in self._spaces.values():
                cold.reset()
            for name, cold in self._spaces.items():
                part = None if self._parts is None else self._parts[name]
                entries = {each: self._manifest.spaces[each] for each in self._manifest.of(name)}
                for each, entry in entries.items():
                    _put_rows(self._files[each], entry.row_layout, cold, part, self.taken.get(name))
                latest = max(entries.values(), key=lambda entry: entry.metadata.batch)
                cold.metadata = plain_metadata(latest.metadata)
                if name in self.taken:
                    cold.metadata.steps = []  # of an optimizer that the model does not have
                if self._histories[name] is not None:
                    cold.history.take(self._histories[name])
        except CheckpointError as error:
            raise StorageError(f"loading failed after the checkpoint was verified ({error})") from error
        except TieredEmbError:
            raise
        except OSError as error:
            raise StorageError(
                f"loading the checkpoint in {self._path!r} failed after it was verified ({error}); load it again, or "
                "use another checkpoint"
            ) from error


def _put_rows(files: RowFiles, layout: RowLayout, cold: ColdRows, part: KeyPart | None, takes: Taken | None) -> None:
    """Writes all rows of `files`, of `layout`, to their places in `cold`; only those of a `part`, if given, and what
    the model takes of them."""
    from tieredemb.kernels.row_encoding_cpu import in_encoding  # not before it is needed, as it imports numba

    reserving = threading.Lock()
    is_same = layout.format.encoding == cold.layout.format.encoding

    def put(number: int, keys: Array, weight: Array, state: Array) -> None:
        if part is not None:
            chosen, keys = part.own(keys)
            weight, state = weight[chosen], state[chosen]
            if len(keys) == 0:
                return
        if takes is not None:
            weight, state = takes.taken(keys, weight, state)
        with reserving:
            cold.reserve(keys)
        place = place_of(keys)
        cold.weight[place] = weight if is_same else in_encoding(weight, layout.format, cold.layout.format)
        cold.state[place] = state

    is_one_threaded = is_same and takes is None  # the others take all threads themselves
    files.read("loading rows", put, threads=None if is_one_threaded else 1)


@contextlib.contextmanager
def opened(
    directory: str | os.PathLike[str],
    spaces: Spaces,
    *,
    identities: Identities | None = None,
    check_kind: Callable[[str, dict[str, Any]], None] = lambda path, extra: None,
    check_extra: Callable[[dict[str, Any]], None] = lambda extra: None,
    recover: bool = False,
    parts: Parts | None = None,
    takes: Takes | None = None,
    ignored: Mapping[str, Collection[str]] | None = None,
    seedless: Collection[str] = (),
) -> Iterator[Opened]:
    """The checkpoint in `directory`, verified, to be restored into `spaces` inside the context. Weights of another
    dtype are rounded to nearest; optimizer state has one dtype.

    `identities` as in `save`; without them they are not compared. `check_kind` gets the directory and the `extra`
    before anything else is compared, and `check_extra` the `extra` after the rows: each may raise. `recover`: loads
    rows that were suspect when they were saved. `parts`: this process's part of each space. `takes`: what the model
    takes of spaces that may have other state, and so differ in the fields `ignored` of their identities. `seedless`:
    spaces in which the seed matters only for rows that were never used: a checkpoint of all rows need not have the
    same. Changes nothing, and does not communicate. Raises `CheckpointError`.
    """
    path = os.path.abspath(os.fspath(directory))
    with contextlib.ExitStack() as stack:
        with checkpoint_errors(path, "loading"):
            manifest, files, of_histories, of_dense = _open_files(path, stack)
            check_kind(path, manifest.extra)
            _compare(path, manifest, spaces, identities, parts, ignored or {}, seedless)
            check_extra(manifest.extra)
            if manifest.broken and not recover:
                raise CheckpointError(
                    f"the checkpoint in {path!r} was saved by a cache whose rows were not to be trusted: "
                    f"{manifest.broken}. Use an earlier checkpoint, or take the rows as they are with "
                    "load_checkpoint(directory, recover=True); nothing was changed"
                )
            histories = {name: _history_of(path, manifest, name, of_histories, cold) for name, cold in spaces.items()}
            taken = {} if takes is None else _taken(takes, manifest, spaces, of_histories)
            for each in files.values():
                each.verify()
            dense = None if of_dense is None else _dense_of(path, of_dense)
        yield Opened(path, manifest, files, spaces, histories, taken, parts, dense)


def _dense_of(path: str, file: CheckedFile) -> bytes:
    """What the dense layers were saved as, verified."""
    try:
        file.verify()
    except ValueError as error:
        raise CheckpointError(
            f"the file of dense layers in {path!r} is damaged: {error}; use another checkpoint. Nothing was changed"
        ) from error
    return file.read(0, file.size_bytes)


def _taken(takes: Takes, manifest: Manifest, spaces: Spaces, histories: Mapping[str, CheckedFile]) -> dict[str, Taken]:
    """What a model takes of the spaces of which it does not take all."""
    taken = {}
    for name in spaces:
        first = manifest.of(name)[0]
        found = takes(name, manifest.extra, manifest.spaces[first], histories.get(first))
        if found is not None:
            taken[name] = found
    return taken


def _open_files(
    path: str, stack: contextlib.ExitStack
) -> tuple[Manifest, dict[str, RowFiles], dict[str, CheckedFile], CheckedFile | None]:
    """The manifest, its files of rows and histories, by entries, and the file of dense layers. If a save replaces all
    of them meanwhile, the new ones are opened."""
    try:
        system.stat(path)
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no checkpoint in {path!r}: the directory does not exist") from error
    manifest = read_manifest(path)
    while True:
        try:
            rows, histories, dense = {}, {}, None
            for name, entry in manifest.spaces.items():
                rows[name] = stack.enter_context(RowFiles(path, entry.files, entry.chunks, entry.row_layout))
                if entry.history:
                    file = CheckedFile(os.path.join(path, entry.history), entry.history_bytes, entry.history_crc32)
                    histories[name] = stack.enter_context(file)
            if manifest.dense is not None:
                file = CheckedFile(os.path.join(path, manifest.dense.file), manifest.dense.bytes, manifest.dense.crc32)
                dense = stack.enter_context(file)
            return manifest, rows, histories, dense
        except FileNotFoundError as error:
            stack.close()
            reread = read_manifest(path)
            if reread == manifest:
                raise CheckpointError(
                    f"{error.filename!r} is missing from the checkpoint; use another checkpoint"
                ) from error
            manifest = reread


_NAME_LETTERS = 64  # of a table's name, which a manifest may say anything about


def _compare(
    path: str,
    manifest: Manifest,
    spaces: Spaces,
    identities: Identities | None,
    parts: Parts | None,
    ignored: Mapping[str, Collection[str]],
    seedless: Collection[str],
) -> None:
    """Raises `CheckpointError` that names the first thing in which the checkpoint is another model's. `ignored`: of
    spaces that may have other state, the fields of identities that are not compared · `seedless`: see `opened`."""
    found_spaces = {space_of(name) for name in manifest.spaces}
    stored_tables = {space_of(each): _table_names(entry.identity) for each, entry in manifest.spaces.items()}
    own_tables = {name: _table_names((identities or {}).get(name, {})) for name in spaces}
    if found_spaces != set(spaces):
        raise CheckpointError(
            f"the checkpoint in {path!r} has the key spaces {_spaces_text(stored_tables)}, this model has "
            f"{_spaces_text(own_tables)}; load it into a model of the same tables"
        )
    for each, entry in manifest.spaces.items():
        name = space_of(each)
        cold = spaces[name]
        layout = cold.layout if parts is None else replace(cold.layout, rows=parts[name].rows)
        wanted = layout_fields(layout) | {"dtype": entry.layout["dtype"]}  # rows of another one are rounded
        if name in ignored:
            wanted["state_width"] = entry.layout["state_width"]
        found: str | None = None
        if identities is not None:  # its message says more than one about the layout that follows from it
            identity = jsonable(dict(identities.get(name, {})), f"identity of {name!r}")
            unlike = set(ignored.get(name, ()))
            if name in seedless and sum(chunk.rows for chunk in entry.chunks) == entry.row_layout.rows:
                unlike.add("seed")
            stored, identity = (
                {key: value for key, value in given.items() if key not in unlike}
                for given in (entry.identity, identity)
            )
            found = difference(stored, identity, "identity", stored_in="the checkpoint")
        found = found or difference(entry.layout, wanted, "layout", stored_in="the checkpoint")
        steps, tables = len(entry.metadata.steps), len(cold.metadata.steps)
        if not found and tables and steps != tables:
            found = f"metadata.steps has {steps} numbers in the checkpoint and this model {tables} tables"
        if found:
            of_both = (_spaces_text({name: tables[name]}) for tables in (stored_tables, own_tables))
            raise CheckpointError(
                f"the checkpoint in {path!r} is of another model: {found} (there {next(of_both)}, here "
                f"{next(of_both)}); nothing was changed"
            )


def _table_names(identity: Mapping[str, Any]) -> list[str]:
    """The tables of a key space, as far as its identity names them: another program's may be anything."""
    tables = identity.get("tables")
    names = (
        [each.get("name") for each in tables if isinstance(each, Mapping)] if isinstance(tables, list | tuple) else []
    )
    return [name for name in names if isinstance(name, str)]


def _spaces_text(tables: Mapping[str, list[str]]) -> str:
    """Key spaces by name with their tables: "width8 (tables 'user', 'tags')"."""
    return ", ".join(
        f"{space} (tables {some_of([name[:_NAME_LETTERS] for name in names])})" if names else space
        for space, names in sorted(tables.items())
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
        reason = refused(error, path, writes=doing == "saving")
        raise CheckpointError(f"{doing} the checkpoint in {path!r} failed: {reason}") from error


@contextlib.contextmanager
def locked(path: str) -> Iterator[None]:
    """Keeps a save from deleting what another save writes."""
    fd = system.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            system.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(
                f"{path!r} is in use by another save, or somebody else has locked it; wait for it, or save to another "
                "directory"
            ) from error
        yield
    finally:
        system.close(fd)


def _may_name(path: str, token: str) -> bool:
    """Whether the manifest in the directory is that of the save `token`, as far as it can be read."""
    try:
        fd = system.open(os.path.join(path, MANIFEST), os.O_RDONLY)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # the next save deletes what no manifest names
    try:
        return token.encode() in pread_all(fd, system.fstat(fd).st_size, 0)
    except OSError:
        return True
    finally:
        system.close(fd)


def _remove(path: str, names: list[str]) -> None:
    """Deletes files of a failed or replaced save. One that cannot be deleted now is found by the next
    save."""
    for name in names:
        with contextlib.suppress(OSError):
            system.unlink(os.path.join(path, name))
