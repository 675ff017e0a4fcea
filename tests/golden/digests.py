"""Hashes of what a program has left: of bits alone, and of no identity, file name or layout over ranks."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

LENGTH = 16  # hexadecimal digits that are kept
# of a manifest: names, and what a save draws
NOT_BITS = {"crc32", "chunks", "file", "files", "history", "history_crc32", "identity", "row_sets", "dense"}


def digest(values: Iterable[bytes]) -> str:
    found = hashlib.sha256()
    for each in values:
        found.update(len(each).to_bytes(8, "little"))
        found.update(each)
    return found.hexdigest()[:LENGTH]


def bytes_of(value: Any) -> bytes:
    """Of a tensor with its shape and dtype, or of anything that JSON knows."""
    if isinstance(value, torch.Tensor):
        array = value.detach().cpu().contiguous()
        head = f"{array.dtype} {tuple(array.shape)} ".encode()
        return head + (array.reshape(-1).view(torch.uint8).numpy().tobytes() if array.numel() else b"")
    if isinstance(value, Mapping):
        return b"".join(str(key).encode() + b"=" + bytes_of(value[key]) + b";" for key in sorted(value, key=str))
    if isinstance(value, list | tuple):
        return b"".join(bytes_of(each) + b"," for each in value)
    if isinstance(value, float):
        return value.hex().encode()
    return json.dumps(value, sort_keys=True).encode()


def loss_of(out: torch.Tensor, upstream: torch.Tensor) -> float:
    """The sum of the products, rounded once: the same in any order, and on any processor."""
    products = out.detach().cpu().double().numpy().ravel() * upstream.cpu().double().numpy().ravel()
    return math.fsum(products) if np.isfinite(products).all() else math.nan


class Saved:
    """A checkpoint as it is read without the library. `manifest`: what it says · `scores`: of each stored row, by its
    key space and key."""

    def __init__(self, directory: Path) -> None:
        whole = json.loads((directory / "manifest.json").read_text())
        self.manifest = without(whole, *NOT_BITS)
        spaces = whole["body"]["spaces"]
        self.scores = {name: _scores(directory, space) for name, space in sorted(spaces.items())}


def without(value: Any, *names: str) -> Any:
    """A JSON value without the members of these names."""
    if isinstance(value, dict):
        return {name: without(each, *names) for name, each in value.items() if name not in names}
    return [without(each, *names) for each in value] if isinstance(value, list) else value


def _scores(directory: Path, space: dict[str, Any]) -> list[tuple[int, int]]:
    """(key, score) of the stored rows of a key space, by key: each chunk has its keys, its weights and its states,
    whose last word is the score."""
    layout, found = space["layout"], []
    names = [space["file"]] if "file" in space else space["files"]
    row = layout["width"] * (4 if layout["dtype"] == "float32" else 2)
    words = layout["state_width"] + 1
    data = {name: (directory / name).read_bytes() for name in names}
    places = dict.fromkeys(names, 0)
    for number, (_, rows, _) in enumerate(space["chunks"]):
        name = names[number % len(names)]
        begin = places[name]
        keys = np.frombuffer(data[name], np.int64, rows, begin)
        states = np.frombuffer(data[name], np.uint32, rows * words, begin + rows * (8 + row))
        found += zip(keys.tolist(), states.reshape(rows, words)[:, -1].tolist(), strict=True)
        places[name] = begin + rows * (8 + row + 4 * words)
    return sorted(found)
