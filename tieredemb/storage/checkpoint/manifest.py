"""The manifest of a checkpoint: JSON with its own checksum, which names every row file and its properties.

All of it is checked when it is read, before it is used: a right checksum proves that it did not change, not that this
library wrote it.

A checkpoint has the lowest version whose readers know all of its content: 1 with one row file a key space, 2 with
several, 3 with those of several ranks, 4 with histories of optimizers, 5 of a whole model.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import stat
import zlib
from dataclasses import dataclass
from typing import Any

from tieredemb.errors import CheckpointError, shown
from tieredemb.storage.base import Metadata, RowLayout
from tieredemb.storage.checkpoint.files import Chunk, bytes_of
from tieredemb.storage.checkpoint.parts import is_parted, space_of
from tieredemb.storage.file.header import layout_of
from tieredemb.storage.file.io import pread_all, pwrite_all
from tieredemb.storage.stored_json import fields_of, integer_of, list_of, object_of, parse, text_of
from tieredemb.storage.system import system

MANIFEST = "manifest.json"
FORMAT = "tieredemb checkpoint"
VERSION = 5  # of a whole model; 4 with histories of fixed fields; 3, which older libraries read, without; 2 without
# parts; 1 where every key space has one row file, too
# 64 times the usual size, and little memory: a file of holes may have any size
_MOST_CHUNK_BYTES = 1 << 30
_MOST_HISTORY_BYTES = 1 << 40
_ROW_FILE = re.compile(r"rows-[0-9a-f]{16}-[0-9]+\.bin")
_DENSE_FILE = re.compile(r"dense-[0-9a-f]{16}\.pt")
_HISTORY_FILE = re.compile(r"history-[0-9a-f]{16}-[0-9]+\.(?:bin|npz)")
_PENDING = re.compile(re.escape(MANIFEST) + r"\.[0-9a-f]{16}")


@dataclass(frozen=True, kw_only=True)
class Space:
    """One key space: its row files, what `load` compares with the model, and where its optimizer remembers steps the
    file of those, of `history_bytes` bytes with the checksum `history_crc32`; that is None in files of 0.1.0, which
    check themselves."""

    files: tuple[str, ...]
    layout: dict[str, Any]
    identity: dict[str, Any]
    metadata: Metadata
    chunks: list[Chunk]
    history: str = ""
    history_bytes: int = 0
    history_crc32: int | None = None

    @property
    def row_layout(self) -> RowLayout:
        """The layout of rows in the file."""
        return layout_of(self.layout, "layout")


@dataclass(frozen=True, kw_only=True)
class DenseFile:
    """The file of a model's dense layers, its bytes and their checksum."""

    file: str
    bytes: int
    crc32: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """`broken`: why the cache that was saved was not to be trusted, "" where it was · `dense`: of a whole model."""

    spaces: dict[str, Space]
    extra: dict[str, Any]
    broken: str = ""
    dense: DenseFile | None = None

    @property
    def identity(self) -> str:
        """Unique: no other save makes the same manifest, as it names its own files."""
        return hashlib.sha256(_text(_fields(self)).encode()).hexdigest()[:16]

    def of(self, space: str) -> list[str]:
        """The entries of a key space: one, or one for each process with a part of it."""
        return [name for name in self.spaces if space_of(name) == space]


def is_leftover(name: str, manifest: Manifest) -> bool:
    """Whether a file in the directory was made by a save and is not part of `manifest`."""
    named = {name for entry in manifest.spaces.values() for name in (*entry.files, entry.history)}
    if manifest.dense is not None:
        named.add(manifest.dense.file)
    is_ours = any(each.fullmatch(name) for each in (_ROW_FILE, _HISTORY_FILE, _DENSE_FILE))
    return bool(_PENDING.fullmatch(name) or (is_ours and name not in named))


def write_manifest(path: str, manifest: Manifest) -> None:
    """Writes a new file, durably, and reads it back. Raises `CheckpointError` where a load would refuse it."""
    body = _text(_fields(manifest))
    version = 1 if all(len(entry.files) == 1 for entry in manifest.spaces.values()) else 2
    version = 3 if is_parted(manifest.spaces) else version
    version = 4 if any(entry.history for entry in manifest.spaces.values()) else version
    version = VERSION if manifest.dense is not None or "parts" in manifest.extra else version
    head = {"format": FORMAT, "version": version, "crc32": zlib.crc32(body.encode())}
    data = f'{_text(head)[:-1]},"body":{body}}}\n'.encode()
    fd = system.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        pwrite_all(fd, data, 0)
        system.fsync(fd)
    finally:
        system.close(fd)
    if _content(path) != data:
        raise CheckpointError(f"{path!r} reads back other than it was written; check the disk")
    _parsed(path, data)


def _fields(manifest: Manifest) -> dict[str, Any]:
    """What a manifest's JSON holds. A library that knows nothing of a field reads what does not need it."""
    fields = dataclasses.asdict(manifest)
    for space, entry in manifest.spaces.items():
        written = fields["spaces"][space]
        written["metadata"] = entry.metadata.to_json()
        for name in ("history", "history_bytes", "history_crc32"):
            if not entry.history:
                del written[name]
        if len(entry.files) == 1:
            del written["files"]
            written["file"] = entry.files[0]
    if not manifest.broken:
        del fields["broken"]
    if manifest.dense is None:
        del fields["dense"]
    return fields


def read_manifest(directory: str) -> Manifest:
    """Raises `CheckpointError`: none there, foreign, newer, damaged, or of a content that no save writes."""
    path = os.path.join(directory, MANIFEST)
    try:
        data = _content(path)
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no checkpoint in {directory!r}: it has no {MANIFEST}") from error
    return _parsed(path, data)


def _content(path: str) -> bytes:
    fd = system.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would wait for its writer
    try:
        if not stat.S_ISREG(system.fstat(fd).st_mode):
            raise CheckpointError(f"{path!r} is no regular file; give another directory")
        return pread_all(fd, system.fstat(fd).st_size, 0)
    finally:
        system.close(fd)


def _parsed(path: str, data: bytes) -> Manifest:
    try:
        outer = parse(data)
        if not isinstance(outer, dict) or outer.get("format") != FORMAT:
            raise CheckpointError(f"{path!r} is no manifest of a tieredemb checkpoint; give another directory")
        version = integer_of(outer.get("version"), "version", low=1)
        if version > VERSION:
            raise CheckpointError(
                f"{path!r} has format version {version}, this library reads versions up to {VERSION}; upgrade tieredemb"
            )
        body = fields_of(outer, "it", ("format", "version", "crc32", "body"))["body"]
        if zlib.crc32(_text(body).encode()) != integer_of(outer["crc32"], "crc32"):
            raise CheckpointError(f"{path!r} is damaged: its checksum differs; use another checkpoint")
        return _manifest(body)
    except ValueError as error:
        raise CheckpointError(f"{path!r} is damaged: {error}; use another checkpoint") from error


def _manifest(body: Any) -> Manifest:
    """Raises `ValueError`, as all that follow."""
    fields = fields_of(body, "body", ("spaces", "extra"), optional=("broken", "dense"))
    spaces = {
        name: _space(entry, f"spaces[{shown(name)}]") for name, entry in object_of(fields["spaces"], "spaces").items()
    }
    named = [file for space in spaces.values() for file in space.files]
    if len(set(named)) < len(named):
        raise ValueError("two key spaces name one row file, or one names it twice")
    return Manifest(
        spaces=spaces,
        extra=object_of(fields["extra"], "extra"),
        broken=text_of(fields.get("broken", ""), "broken"),
        dense=_dense(fields["dense"]) if "dense" in fields else None,
    )


def _dense(value: Any) -> DenseFile:
    fields = fields_of(value, "dense", ("file", "bytes", "crc32"))
    file = text_of(fields["file"], "dense.file")
    if not _DENSE_FILE.fullmatch(file):
        raise ValueError(f"dense.file is {shown(file)} and must be the name of a file of dense layers")
    return DenseFile(
        file=file,
        bytes=integer_of(fields["bytes"], "dense.bytes", high=_MOST_HISTORY_BYTES),
        crc32=integer_of(fields["crc32"], "dense.crc32", high=2**32 - 1),
    )


def _space(value: Any, name: str) -> Space:
    several = isinstance(value, dict) and "files" in value
    required = ("files" if several else "file", "layout", "identity", "metadata", "chunks")
    fields = fields_of(value, name, required, optional=("history", "history_bytes", "history_crc32"))
    files = _files(list_of(fields["files"], f"{name}.files") if several else [fields["file"]], f"{name}.file")
    history = text_of(fields.get("history", ""), f"{name}.history")
    if history and not _HISTORY_FILE.fullmatch(history):
        raise ValueError(f"{name}.history is {shown(history)} and must be the name of a file of steps")
    crc32 = fields.get("history_crc32")
    if history.endswith(".bin") or crc32 is not None:
        crc32 = integer_of(crc32, f"{name}.history_crc32", high=2**32 - 1)
    return Space(
        history=history,
        history_crc32=crc32,
        history_bytes=integer_of(fields.get("history_bytes", 0), f"{name}.history_bytes", high=_MOST_HISTORY_BYTES),
        files=files,
        layout=fields["layout"],
        identity=object_of(fields["identity"], f"{name}.identity"),
        metadata=Metadata.from_json(fields["metadata"], f"{name}.metadata"),
        chunks=_chunks(fields["chunks"], layout_of(fields["layout"], f"{name}.layout"), len(files), f"{name}.chunks"),
    )


def _files(value: list[Any], name: str) -> tuple[str, ...]:
    files = tuple(text_of(file, name) for file in value)
    for file in files:
        if not _ROW_FILE.fullmatch(file):  # it is opened: a path would lead out of the directory
            raise ValueError(f"{name} is {shown(file)} and must be the name of a row file")
    if not files:
        raise ValueError(f"{name}s names none and must name one or more")
    return files


def _chunks(value: Any, layout: RowLayout, files: int, name: str) -> list[Chunk]:
    """Chunks that follow one another in their files without gaps, of no more rows than there are."""
    chunks: list[Chunk] = []
    ends, rows = [0] * files, 0
    for number, entry in enumerate(list_of(value, name)):
        end = ends[number % files]
        if len(list_of(entry, name)) != 3:
            raise ValueError(f"{name} has {shown(entry)}, which must be offset, rows and crc32")
        chunk = Chunk(
            integer_of(entry[0], f"an offset of {name}", low=end, high=end),
            integer_of(entry[1], f"a number of rows of {name}", low=1, high=layout.rows - rows),
            integer_of(entry[2], f"a checksum of {name}", high=2**32 - 1),
        )
        size = bytes_of(chunk.rows, layout)
        if chunk.rows > 1 and size > _MOST_CHUNK_BYTES:
            raise ValueError(f"{name} has a chunk of {size} bytes and must have at most {_MOST_CHUNK_BYTES} in each")
        chunks.append(chunk)
        ends[number % files], rows = end + size, rows + chunk.rows
    return chunks


def _text(value: Any) -> str:
    """One spelling for one value, so that a checksum of it means something."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
