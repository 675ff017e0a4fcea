"""Tiered tables of the GPU benchmarks, on any tier."""

from __future__ import annotations

from typing import Protocol

import torch

import tieredemb
from benchmarks.cuda_providers import check_room
from benchmarks.cuda_timing import synchronize
from benchmarks.cuda_workload import SEED
from tieredemb.config import Capacity, Init, OptimizerConfig
from tieredemb.lookup.optimizer import state_width
from tieredemb.storage.base import Storage


class Shape(Protocol):
    """`tables` tables of `rows` × `width`."""

    @property
    def tables(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def width(self) -> int: ...


def tiered_tables(
    shape: Shape,
    capacity: Capacity,
    optimizer: OptimizerConfig | None,
    device: torch.device,
    *,
    storage: Storage | None = None,
    init: Init | None = None,
) -> tieredemb.TieredEmbeddingBagCollection:
    """A collection, over unified memory (host memory on the CPU) unless `storage` says otherwise."""
    if storage is None:
        storage = tieredemb.UnifiedMemory() if device.type == "cuda" else tieredemb.HostMemory()
    if isinstance(storage, tieredemb.UnifiedMemory):
        check_room(cold_bytes(shape, optimizer))
    tables = [
        tieredemb.TableConfig(
            name=f"t{t}", num_embeddings=shape.rows, embedding_dim=shape.width, init=init or tieredemb.Normal()
        )
        for t in range(shape.tables)
    ]
    return tieredemb.TieredEmbeddingBagCollection(
        tables, capacity=capacity, optimizer=optimizer, storage=storage, device=device
    )


def cold_bytes(shape: Shape, optimizer: OptimizerConfig | None) -> int:
    """Bytes of all rows in cold storage: fp32 weights, words of optimizer state, one of score."""
    return shape.tables * shape.rows * 4 * (shape.width + state_width(optimizer, shape.width) + 1)


def set_weights(module: tieredemb.TieredEmbeddingBagCollection, shape: Shape, device: torch.device) -> torch.Tensor:
    """Sets all weights, so that a missed row is one that cold storage holds. Returns the values on `device`: row r of
    every table is row r mod K of it, (K, D). All random would take seconds."""
    some = torch.randn(1 << 16, shape.width, generator=torch.Generator().manual_seed(SEED))
    weight = some.repeat(-(-shape.rows // len(some)), 1)[: shape.rows]
    module.load_state_dict({f"tables.t{t}.weight": weight for t in range(shape.tables)})
    synchronize(device)
    return some.to(device)


def discard(module: tieredemb.TieredEmbeddingBagCollection) -> None:
    """Gives the cache up without writing it back: its file is about to be removed, and a sync of it would take long."""
    for group in module.tables.groups:
        group.cache.abandon()
