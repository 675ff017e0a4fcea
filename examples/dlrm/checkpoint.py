"""Checkpoints of tables and dense state that a kill at any moment cannot pair wrongly.

    DIR/dense-<step>-<checksum>.pt    dense weights, optimizer, position, random state, metrics; written first
    DIR/tables/                       the collection's own checkpoint; naming the dense file in it is the commit

The tables' checkpoint is replaced atomically and carries the dense file's name and checksum. Killed before that, the
old checkpoint still names the old dense file; killed after it, the new one is whole. Dense files that no checkpoint
names are deleted last.
"""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path
from typing import Any

import torch

from examples.dlrm.embeddings import Collection
from tieredemb.errors import CheckpointError
from tieredemb.storage.checkpoint.manifest import MANIFEST

_TABLES = "tables"


def exists(directory: Path) -> bool:
    """Whether `directory` holds a checkpoint."""
    return (directory / _TABLES / MANIFEST).exists()


def save(
    directory: Path, collection: Collection, state: dict[str, Any], identity: dict[str, Any], *, is_first: bool
) -> None:
    """Writes a checkpoint. `state`: tensors, numbers, strings, lists and dicts of them, with "step" among them;
    `identity`: JSON-able, what a run must have in common with this one to resume it · `is_first`: whether this is the
    process, of those that save together, which writes the dense file. Raises `OSError`."""
    directory.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    content = buffer.getvalue()
    checksum = hashlib.sha256(content).hexdigest()
    name = f"dense-{state['step']:09d}-{checksum[:16]}.pt"
    if is_first:
        _write_durably(directory / name, content)
    collection.save_checkpoint(
        str(directory / _TABLES), extra={"dense": name, "sha256": checksum, "identity": identity}
    )
    for path in directory.glob("dense-*") if is_first else ():
        if path.name != name:
            path.unlink()


def load(directory: Path, collection: Collection, identity: dict[str, Any]) -> dict[str, Any]:
    """Loads the tables and returns the `state` saved with them. Raises `CheckpointError` when there is no checkpoint,
    when it is damaged, or when it belongs to another run."""
    if not exists(directory):
        raise CheckpointError(f"there is no checkpoint in {directory}; start the run without --resume")
    extra = collection.load_checkpoint(str(directory / _TABLES))
    _check_identity(directory, saved=extra["identity"], given=identity)
    path = directory / extra["dense"]
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{path}, which the checkpoint names, cannot be read ({error}); restore the whole directory"
        ) from error
    if hashlib.sha256(content).hexdigest() != extra["sha256"]:
        raise CheckpointError(f"{path} is damaged (its checksum differs); restore the whole directory")
    state: dict[str, Any] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return state


def _check_identity(directory: Path, *, saved: dict[str, Any], given: dict[str, Any]) -> None:
    different = [
        f"{key}: {saved.get(key)} there, {given.get(key)} now"
        for key in sorted(saved.keys() | given.keys())
        if saved.get(key) != given.get(key)
    ]
    if different:
        raise CheckpointError(
            f"the checkpoint in {directory} belongs to another run ({'; '.join(different)}); "
            "give the same settings, or start without --resume in another directory"
        )


def _write_durably(path: Path, content: bytes) -> None:
    """The file is complete under its name or not there, and survives a power cut."""
    unfinished = path.with_name(path.name + ".tmp")
    with unfinished.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
