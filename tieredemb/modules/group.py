"""One width of a module's tables: their key space, their cache, and what their rows mean."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from tieredemb.cache.tiered_cache import TieredCache, cache_bytes_per_slot
from tieredemb.config import Capacity, OptimizerConfig, Policy, TableConfig, slots_for
from tieredemb.errors import ConfigError
from tieredemb.kernels import check_device
from tieredemb.lookup.bags import KeySpace
from tieredemb.lookup.optimizer import state_start, state_width
from tieredemb.storage.base import RowLayout, Storage
from tieredemb.storage.initial import InitialRows, InitialTable


@dataclass(frozen=True, kw_only=True)
class TableSetConfig:
    """All that a set of tables is built from; see the modules for the meaning of each field."""

    tables: tuple[TableConfig, ...]
    capacity: Capacity
    policy: Policy
    storage: Storage
    optimizer: OptimizerConfig | None
    seed: int
    dtype: torch.dtype
    device: torch.device

    def __post_init__(self) -> None:
        check_device(self.device)
        if not self.tables:
            raise ConfigError("tables is empty; give at least one TableConfig")
        names = [table.name for table in self.tables]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"table names must differ, but {', '.join(map(repr, twice))} occur more than once")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**64:
            raise ConfigError(f"seed must be an integer in [0, 2^64), got {self.seed!r}")
        if not isinstance(self.storage, Storage):
            raise ConfigError(
                f"storage must be HostMemory(), File(path) or Pmem(directory), got {self.storage!r}; pass an instance"
            )


class Group:
    """The tables of one width: their key space and cache."""

    def __init__(self, config: TableSetConfig, space: KeySpace, capacity: Capacity, name: str) -> None:
        self.space = space
        tables = [config.tables[t] for t in space.tables]
        layout = row_layout(config, space.rows, space.width)
        slots = slots_for(capacity, rows=layout.rows, slot_bytes=cache_bytes_per_slot(layout))
        initial = InitialRows(
            [
                InitialTable(start=int(start), number=int(number), init=table.init, padding_idx=table.padding_idx)
                for start, number, table in zip(space.start[:-1], space.tables, tables, strict=True)
            ],
            seed=config.seed,
            state_value=state_start(config.optimizer),
            device=config.device,
        )
        self.identity = _identity(config, tables)
        cold = config.storage.open(layout, name=name, identity=self.identity)
        if not cold.metadata.steps:
            cold.metadata.steps = [0] * len(tables)
        try:
            self.cache = TieredCache(cold, slots=slots, policy=config.policy, initial=initial, device=config.device)
        except BaseException:
            cold.close()
            raise

    @property
    def steps(self) -> list[int]:
        """Optimizer steps that each table has taken."""
        return self.cache.cold.metadata.steps


def _identity(config: TableSetConfig, tables: Sequence[TableConfig]) -> dict[str, Any]:
    """What the rows of a key space mean, as JSON: another meaning must not open the same file."""
    optimizer = None if config.optimizer is None else type(config.optimizer).__name__
    described = [asdict(table) | {"init": repr(table.init), "mode": None} for table in tables]
    identity: dict[str, Any] = {"tables": described, "seed": config.seed, "optimizer": optimizer}
    identity["state_start"] = state_start(config.optimizer)
    result: dict[str, Any] = json.loads(json.dumps(identity))
    return result


def row_layout(config: TableSetConfig, rows: int, width: int) -> RowLayout:
    return RowLayout(rows=rows, width=width, dtype=config.dtype, state_width=state_width(config.optimizer, width))
