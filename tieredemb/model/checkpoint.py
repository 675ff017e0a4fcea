"""Checkpoints of a whole model: all its tables and its dense layers, replaced as one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from tieredemb.config import check_flag
from tieredemb.model.dense import DenseLayers
from tieredemb.model.found import FoundSharded, FoundTables, found_sharded, found_tables
from tieredemb.tables import checkpoint as of_process
from tieredemb.tables.checkpoint import SavedTables

F = TypeVar("F", FoundTables, FoundSharded)


def save_checkpoint(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    extra: dict[str, Any] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    dense: bool = True,
) -> None:
    """Saves all tables of a model (rows, optimizer state, scores, counters) and its dense layers to `directory`, and
    replaces the checkpoint that is there atomically: killed at any moment, the last complete one loads.

    `extra`: a dict of what JSON can store, returned by `load_checkpoint` · `optimizer`: the torch optimizer, whose
    state of the dense parameters is saved, too; that of tables which follow it always is · `dense`: False leaves the
    dense layers out.

    Rows are written in chunks, so tables may exceed memory. Of tables that lie on several ranks it is a collective: all
    ranks see the directory, dense layers and `extra` are those of rank 0, and what one rank raises all do. Synchronises
    with a GPU.

    Raises `ConfigError`, before anything is written, for a model without tiered tables, or with tables that share their
    cache with others which it does not have, and for what could not be loaded; `StorageFullError` or `CheckpointError`
    where the save fails, which leaves the last checkpoint as it was.

    >>> model = nn.Sequential(tieredemb.TieredEmbeddingBag(1000, 4), nn.Linear(4, 1))
    >>> tieredemb.save_checkpoint(model, "model.ckpt", extra={"epoch": 1})
    >>> tieredemb.load_checkpoint(model, "model.ckpt")
    {'epoch': 1}
    """
    check_flag("dense", dense)
    sharded = found_sharded(model)
    layers, noted = DenseLayers(model, optimizer), {} if extra is None else extra
    if sharded:
        from tieredemb.sharding.whole_model import save

        save(_in_order(sharded), directory, noted, dense=layers.to_bytes if dense else None)
        return
    of_process.save(_saved(found_tables(model)), directory, noted, dense=layers.to_bytes() if dense else None)


def load_checkpoint(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    dense: bool = True,
    recover: bool = False,
) -> dict[str, Any]:
    """Replaces all tables of a model and its dense layers by those that `save_checkpoint` has saved, at any capacity,
    tier, policy, device and number of ranks. Returns the `extra`.

    `optimizer`: the torch optimizer, whose state of the dense parameters is loaded, too, where it was saved · `dense`:
    False leaves the dense layers as they are · `recover`: takes rows that a broken cache has saved, see
    `BrokenCacheError`. Of tables that lie on several ranks it is a collective. Synchronises with a GPU.

    Raises `CheckpointError`, before anything changes, where the checkpoint is incomplete, damaged or of another model,
    and `StorageError` while batches are in flight or gradients wait for a step. Tables without an optimizer take the
    weights and scores of any.

    >>> trained = nn.Sequential(tieredemb.TieredEmbeddingBag(1000, 4, capacity=50), nn.Linear(4, 1))
    >>> tieredemb.save_checkpoint(trained, "model.ckpt", extra={"epoch": 1})
    >>> model = nn.Sequential(tieredemb.TieredEmbeddingBag(1000, 4, capacity=200), nn.Linear(4, 1))
    >>> tieredemb.load_checkpoint(model, "model.ckpt")
    {'epoch': 1}
    """
    check_flag("dense", dense)
    sharded = found_sharded(model)
    layers = DenseLayers(model, optimizer)
    beside = layers.taking if dense else None
    if sharded:
        from tieredemb.sharding.whole_model import load

        return load(_in_order(sharded), directory, recover=recover, beside=beside)
    found = found_tables(model)
    for each in found:
        for engine in each.engines:
            engine.check_no_gradient("load a checkpoint")
            engine.drop_planned()
    return of_process.load(_saved(found), directory, recover=recover, beside=beside)


def _saved(found: Sequence[FoundTables]) -> list[SavedTables]:
    return [
        SavedTables(tables=each.tables, optimizer=each.engines[0].optimizer, prefix=prefix, names=each.names)
        for prefix, each in _in_order(found)
    ]


def _in_order(found: Sequence[F]) -> list[tuple[str, F]]:
    """Sets of tables, and what the names of their key spaces begin with: the same for the same tables, in whichever
    order a model has them, and wherever they lie."""
    return [(f"{number}/", each) for number, each in enumerate(sorted(found, key=lambda each: sorted(each.names)))]
