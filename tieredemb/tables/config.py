"""The configuration of a set of tables: checked, and with defaults where users give no value."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tieredemb.config import (
    CHECKS,
    LFU,
    LRU,
    MAX_ROWS,
    Capacity,
    CheckIds,
    OptimizerConfig,
    Policy,
    TableConfig,
    TablePart,
    as_capacity,
    check_one_of,
    is_whole,
    keep_plain,
)
from tieredemb.errors import ConfigError, shown, some_of
from tieredemb.kernels import check_device
from tieredemb.kernels.row_format import CARRIERS, Encoding, encoding_of
from tieredemb.lookup.rounding import ROUNDINGS, Rounding
from tieredemb.storage.base import Storage
from tieredemb.storage.host import HostMemory
from tieredemb.storage.unified import UnifiedMemory
from tieredemb.tables.torch_kinds import Optimizer, row_config


@dataclass(frozen=True, kw_only=True)
class TableSetConfig:
    """All that a set of tables is built from; see the modules for the meaning of each field. `pooled`: whether lookups
    sum rows up over bags; else they return the row of each id, feature after feature · `separate`: whether each table
    counts its own steps and is looked up by itself · `parts`: for each table which part of a larger one it is, if they
    are not whole · `label`: part of the storages' names, where several sets of tables use one storage."""

    tables: tuple[TableConfig, ...]
    capacity: Capacity
    policy: Policy
    storage: Storage
    optimizer: OptimizerConfig | None
    seed: int
    dtype: torch.dtype | Encoding
    device: torch.device
    check_ids: CheckIds = "deferred"
    outputs: torch.dtype | None = None
    rounding: Rounding = "nearest"
    pooled: bool = True
    separate: bool = False
    parts: tuple[TablePart, ...] = ()
    label: str = ""

    def part(self, table: int) -> TablePart:
        """What of a larger table one is: by default all of one of its number."""
        return self.parts[table] if self.parts else TablePart(table, 0, 1, self.tables[table].num_embeddings)

    @functools.cached_property
    def output_dtype(self) -> torch.dtype:
        """The dtype of pooled rows: `outputs`, or that of the rows."""
        return self.outputs or encoding_of(self.dtype).dtype

    def __post_init__(self) -> None:
        check_device(self.device)
        keep_plain(self)
        object.__setattr__(self, "capacity", as_capacity(self.capacity))
        of = shown_tables([table.name for table in self.tables], self.label)
        _check_rounding(self.rounding, encoding_of(self.dtype, of), of)
        if self.outputs is not None and not (isinstance(self.outputs, torch.dtype) and self.outputs in CARRIERS):
            allowed = ", ".join(map(str, CARRIERS))
            raise ConfigError(f"output_dtype must be one of {allowed}, got {shown(self.outputs)}")
        check_one_of("check_ids", self.check_ids, CHECKS)
        if not self.tables:
            raise ConfigError("tables is empty; give at least one TableConfig")
        names = [table.name for table in self.tables]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"table names must differ, but {', '.join(map(repr, twice))} occur more than once")
        _check_keys(self.tables)
        if not is_whole(self.seed) or not 0 <= self.seed < 2**64:
            raise ConfigError(f"seed must be an integer in [0, 2^64), got {shown(self.seed)}")
        if not isinstance(self.storage, Storage):
            is_path = isinstance(self.storage, str | os.PathLike)
            raise ConfigError(
                f"storage must be UnifiedMemory(), HostMemory(), File(path) or Pmem(directory), got "
                f"{shown(self.storage)}; pass an instance{', as File of that path' if is_path else ''}"
            )


def as_device(device: torch.device | str) -> torch.device:
    """A device as it was given. Raises `ConfigError` for what torch knows no device by."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"device must be 'cpu', 'cuda', 'cuda:N' or a torch.device, got {shown(device)}") from error


def shown_tables(names: list[str], label: str) -> str:
    """These tables, as a message names them; a single table, whose name is "weight", by its label."""
    names = [label] if names == ["weight"] and label else names
    return f"table{'s' * (len(names) > 1)} {some_of(names)}"


def _check_rounding(rounding: Rounding, encoding: Encoding, of: str) -> None:
    """Raises `ConfigError`, which names their owner (`of`), unless rows of `encoding` can be rounded so."""
    check_one_of("rounding", rounding, ROUNDINGS)
    if rounding == "stochastic" and (not encoding.is_direct or encoding.dtype.itemsize != 2):
        raise ConfigError(
            f"rounding='stochastic' is for rows of 16 bits, those of {of} are of {encoding.name}; pass "
            f"dtype=torch.bfloat16 or torch.float16, or leave rounding out"
        )


def _check_keys(tables: Sequence[TableConfig]) -> None:
    """Raises `ConfigError` where the tables of one width have more rows together than there are keys."""
    rows: Counter[int] = Counter()
    for table in tables:
        rows[table.embedding_dim] += table.num_embeddings
    for width, number in rows.items():
        names = [table.name for table in tables if table.embedding_dim == width]
        if number > MAX_ROWS:
            raise ConfigError(
                f"the tables of width {width} ({some_of(names)}) have {number} rows together; at most {MAX_ROWS} "
                f"share a cache: lower num_embeddings, or give some of them to another module"
            )


def table_set_config(
    tables: tuple[TableConfig, ...],
    *,
    capacity: Capacity,
    policy: Policy | None,
    storage: Storage | None,
    optimizer: Optimizer,
    seed: int,
    dtype: torch.dtype | Encoding | None,
    device: torch.device | str | None,
    check_ids: CheckIds,
    rounding: Rounding = "nearest",
    output_dtype: torch.dtype | None = None,
    pooled: bool = True,
    parts: tuple[TablePart, ...] = (),
    label: str = "",
) -> TableSetConfig:
    """Fills in the defaults: `LFU()`, torch's default dtype and device, `HostMemory()`, on a GPU `UnifiedMemory()`."""
    if policy is not None and not isinstance(policy, (LFU, LRU)):
        raise ConfigError(f"policy must be LFU(…) or LRU(), got {shown(policy)}; pass an instance")
    place = torch.get_default_device() if device is None else as_device(device)
    if place.type == "cuda" and place.index is None:
        place = torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)
    if storage is None:
        storage = UnifiedMemory() if place.type == "cuda" else HostMemory()
    return TableSetConfig(
        tables=tables,
        capacity=capacity,
        policy=LFU() if policy is None else policy,
        storage=storage,
        optimizer=row_config(optimizer),
        seed=seed,
        dtype=torch.get_default_dtype() if dtype is None else dtype,
        device=place,
        check_ids=check_ids,
        rounding=rounding,
        outputs=output_dtype,
        pooled=pooled,
        parts=parts,
        label=label,
    )
