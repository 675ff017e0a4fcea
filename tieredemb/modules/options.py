"""What users pass to the modules' constructors: how lookups treat rows, and the defaults of everything else."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tieredemb.config import (
    FLOAT32_MAX,
    LFU,
    LRU,
    SGD,
    Adagrad,
    Adam,
    Capacity,
    CheckIds,
    OptimizerConfig,
    Policy,
    RowWiseAdagrad,
    TableConfig,
    check_finite,
    is_number,
)
from tieredemb.errors import ConfigError, shown
from tieredemb.storage.base import Storage
from tieredemb.storage.host import HostMemory
from tieredemb.storage.unified import UnifiedMemory
from tieredemb.tables.group import TableSetConfig


@dataclass(frozen=True, kw_only=True)
class LookupOptions:
    """How lookups treat rows. `max_norm`: rows are scaled down to it when looked up · `scale_grad_by_freq`: a row's
    gradient is divided by its occurrences in the call · `padding_is_dropped`: padding adds nothing to its bag (bags),
    rather than being read without gradient (`TieredEmbedding`)."""

    max_norm: float | None = None
    norm_type: float = 2.0
    scale_grad_by_freq: bool = False
    padding_is_dropped: bool = True

    def __post_init__(self) -> None:
        if self.max_norm is not None:
            check_finite("max_norm, where it is not None,", self.max_norm, low=0.0)
        if not (is_number(self.norm_type) and (self.norm_type == math.inf or 0 < self.norm_type <= FLOAT32_MAX)):
            raise ConfigError(
                f"norm_type must be a number above 0 that float32 holds (2 is Euclid's norm), or math.inf, "
                f"got {shown(self.norm_type)}"
            )


def table_set_config(
    tables: tuple[TableConfig, ...],
    *,
    capacity: Capacity,
    policy: Policy | None,
    storage: Storage | None,
    optimizer: OptimizerConfig | None,
    seed: int,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    check_ids: CheckIds,
) -> TableSetConfig:
    """Fills in the defaults: `LFU()`, torch's default dtype and device, `HostMemory()`, on a GPU `UnifiedMemory()`."""
    if policy is not None and not isinstance(policy, (LFU, LRU)):
        raise ConfigError(f"policy must be LFU(…) or LRU(), got {shown(policy)}")
    if optimizer is not None and not isinstance(optimizer, (SGD, Adagrad, RowWiseAdagrad, Adam)):
        raise ConfigError(
            f"optimizer must be one of tieredemb.SGD, Adagrad, RowWiseAdagrad, Adam (it is fused into backward; "
            f"torch.optim instances cannot reach the rows), got {shown(optimizer)}"
        )
    place = torch.get_default_device() if device is None else torch.device(device)
    if place.type == "cuda" and place.index is None:
        place = torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)
    if storage is None:
        storage = UnifiedMemory() if place.type == "cuda" else HostMemory()
    return TableSetConfig(
        tables=tables,
        capacity=capacity,
        policy=LFU() if policy is None else policy,
        storage=storage,
        optimizer=optimizer,
        seed=seed,
        dtype=dtype or torch.get_default_dtype(),
        device=place,
        check_ids=check_ids,
    )
