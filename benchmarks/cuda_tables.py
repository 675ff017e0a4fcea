"""Tiered tables of the GPU benchmarks, on any tier."""

from __future__ import annotations

from collections.abc import Sequence
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
    """Tables of `sizes` (rows) × `widths`."""

    @property
    def sizes(self) -> Sequence[int]: ...
    @property
    def widths(self) -> Sequence[int]: ...


def table_configs(shape: Shape, init: Init | None = None) -> list[tieredemb.TableConfig]:
    """The tables t0, t1, …"""
    return [
        tieredemb.TableConfig(name=f"t{t}", num_embeddings=rows, embedding_dim=width, init=init or tieredemb.Normal())
        for t, (rows, width) in enumerate(zip(shape.sizes, shape.widths, strict=True))
    ]


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
    return tieredemb.TieredEmbeddingBagCollection(
        table_configs(shape, init), capacity=capacity, optimizer=optimizer, storage=storage, device=device
    )


def cold_bytes(shape: Shape, optimizer: OptimizerConfig | None) -> int:
    """Bytes of all rows in cold storage: fp32 weights, words of optimizer state, one of score."""
    each = zip(shape.sizes, shape.widths, strict=True)
    return sum(rows * 4 * (width + state_width(optimizer, width) + 1) for rows, width in each)


def set_weights(
    module: tieredemb.TieredEmbeddingBagCollection, shape: Shape, device: torch.device
) -> dict[int, torch.Tensor]:
    """Sets all weights, so that a missed row is one that cold storage holds. Returns the values on `device`, by width:
    row r of every table is row r mod K of them, (K, D). All random would take seconds."""
    some, weights, each = {}, {}, list(zip(shape.sizes, shape.widths, strict=True))
    for width in set(shape.widths):
        some[width] = torch.randn(1 << 16, width, generator=torch.Generator().manual_seed(SEED))
        weights[width] = some[width].repeat(-(-max(rows for rows, its in each if its == width) // (1 << 16)), 1)
    module.load_state_dict({f"tables.t{t}.weight": weights[width][:rows] for t, (rows, width) in enumerate(each)})
    synchronize(device)
    return {width: values.to(device) for width, values in some.items()}


def discard(module: tieredemb.TieredEmbeddingBagCollection) -> None:
    """Gives the cache up without writing it back: its file is about to be removed, and a sync of it would take long."""
    for group in module.tables.groups:
        group.cache.abandon()
