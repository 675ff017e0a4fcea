"""The manifest of a checkpoint: JSON with its own checksum, which names every row file and all that they must
be."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import zlib
from dataclasses import dataclass
from typing import Any

from tieredemb.errors import CheckpointError
from tieredemb.storage.base import Metadata
from tieredemb.storage.checkpoint_files import Chunk
from tieredemb.storage.file_io import pwrite_all

MANIFEST = "manifest.json"
FORMAT = "tieredemb checkpoint"
VERSION = 1
_ROW_FILE = re.compile(r"rows-[0-9a-f]{16}-\d+\.bin")
_PENDING = re.compile(re.escape(MANIFEST) + r"\.[0-9a-f]{16}")


@dataclass(frozen=True, kw_only=True)
class Space:
    """One key space: its row file, and what `load` compares with the model."""

    file: str
    layout: dict[str, Any]
    identity: dict[str, Any]
    metadata: Metadata
    chunks: list[Chunk]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    spaces: dict[str, Space]
    extra: dict[str, Any]
    broken: str = ""


def is_leftover(name: str, manifest: Manifest) -> bool:
    """Whether a file in the directory was made by a save and is not part of `manifest`."""
    named = {entry.file for entry in manifest.spaces.values()}
    return bool(_PENDING.fullmatch(name) or (_ROW_FILE.fullmatch(name) and name not in named))


def write_manifest(path: str, manifest: Manifest) -> None:
    """Writes a new file, durably, and reads it back."""
    body = _text(dataclasses.asdict(manifest))
    head = {"format": FORMAT, "version": VERSION, "crc32": zlib.crc32(body.encode())}
    data = f'{_text(head)[:-1]},"body":{body}}}\n'.encode()
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        pwrite_all(fd, data, 0)
        os.fsync(fd)
    finally:
        os.close(fd)
    with open(path, "rb") as file:
        if file.read() != data:
            raise CheckpointError(f"{path!r} reads back other than it was written; check the disk")


def read_manifest(directory: str) -> Manifest:
    """Raises `CheckpointError`: none there, foreign, newer, damaged."""
    path = os.path.join(directory, MANIFEST)
    try:
        with open(path, "rb") as file:
            outer = json.loads(file.read())
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no checkpoint in {directory!r}: it has no {MANIFEST}") from error
    except ValueError as error:
        raise CheckpointError(f"{path!r} is damaged: {error}; use another checkpoint") from error
    if not isinstance(outer, dict) or outer.get("format") != FORMAT:
        raise CheckpointError(f"{path!r} is no manifest of a tieredemb checkpoint; give another directory")
    if outer.get("version") != VERSION:
        raise CheckpointError(
            f"{path!r} has format version {outer.get('version')}, this library reads version {VERSION}; "
            "upgrade tieredemb"
        )
    body: Any = outer.get("body")
    if zlib.crc32(_text(body).encode()) != outer.get("crc32"):
        raise CheckpointError(f"{path!r} is damaged: its checksum differs; use another checkpoint")
    return Manifest(spaces={name: _space(fields) for name, fields in body["spaces"].items()}, extra=body["extra"])


def _space(fields: dict[str, Any]) -> Space:
    chunks = [Chunk(*chunk) for chunk in fields["chunks"]]
    return Space(**fields | {"metadata": Metadata(**fields["metadata"]), "chunks": chunks})


def _text(value: Any) -> str:
    """One spelling for one value, so that a checksum of it means something."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
