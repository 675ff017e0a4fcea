"""The twins of embeddings, and which of them share a cache."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from tieredemb.config import Capacity, CheckIds, Init, Mode, Placement, Policy, TableConfig, Written, is_whole
from tieredemb.conversion.assignment import Assigned
from tieredemb.conversion.found import Found, initial_values
from tieredemb.errors import ConfigTypeError, naming, shown
from tieredemb.kernels.row_format import Encoding
from tieredemb.lookup.optimizer import rows_of
from tieredemb.lookup.options import LookupOptions
from tieredemb.lookup.rounding import Rounding
from tieredemb.modules.embedding import TieredEmbedding
from tieredemb.modules.embedding_bag import TieredEmbeddingBag, check_scaling
from tieredemb.modules.one_table import OneTable
from tieredemb.storage.base import Storage
from tieredemb.tables.config import TableSetConfig, as_device, table_set_config
from tieredemb.tables.division import share_capacity
from tieredemb.tables.group import row_layout, slot_bytes
from tieredemb.tables.pool import Member, Pool, Related
from tieredemb.tables.shares import Sharer, shares
from tieredemb.tables.table_set import TableSet


class Place(NamedTuple):
    """The device and dtype of rows. `output_dtype`: that of the lookups' results."""

    device: torch.device
    dtype: torch.dtype | Encoding
    output_dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What all tables of one conversion have alike; see `TieredEmbeddingBag`."""

    policy: Policy | None = None
    storage: Storage | None = None
    seed: int = 0
    init: Init | Mapping[str, Init] | None = None
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None
    placement: Placement = "auto"
    check_ids: CheckIds = "deferred"
    rounding: Rounding = "nearest"
    output_dtype: torch.dtype | None = None

    def place(self, weight: torch.Tensor) -> Place:
        """Where the rows of a weight are put. Raises `ConfigError`."""
        dtype, outputs = (weight.dtype if each is None else each for each in (self.dtype, self.output_dtype))
        for name, each in (("dtype", dtype), ("output_dtype", outputs)):
            if not isinstance(each, torch.dtype | Encoding):
                raise ConfigTypeError(f"{name} must be a torch.dtype, as torch.float32, got {shown(each)}")
        return Place(_device_of(weight) if self.device is None else as_device(self.device), dtype, outputs)


def _device_of(weight: torch.Tensor) -> torch.device:
    """The device of a weight; torch's default device if it is on the meta device."""
    device = torch.get_default_device() if weight.is_meta else weight.device
    return torch.device("cpu") if device.type == "meta" else device


def make_twins(
    found: Sequence[Found], assigned: Mapping[str, Assigned], capacity: Capacity, settings: Settings
) -> dict[str, OneTable]:
    """A twin of each embedding, by name, without rows yet; all of them or none. Tables of one width, device,
    dtype and kind of state share a cache; the caches share the capacity. Raises `ConfigError` before any is opened, if
    possible."""
    sets = _sets(found, assigned, settings)
    parts = shares(capacity, [_sharer(config) for config, _ in sets]) if sets else []
    twins: dict[str, OneTable] = {}
    opened: list[TableSet] = []
    try:
        with contextlib.ExitStack() as opening:
            rows = None
            if settings.storage is not None and sets:
                names = [config.label for config, _ in sets]
                given = "what the rows of the model begin as"
                if not all(each.is_meta for each in found):
                    given = "the weights of the model"
                rows = opening.enter_context(settings.storage.opening(names, given=given, fills=True))
            related = Related()
            for (config, members), part in zip(sets, parts, strict=True):
                config = replace(config, capacity=part)
                shared = Pool(config, rows=rows, related=related) if config.separate else TableSet(config, rows=rows)
                opened.append(shared)
                for number, each in enumerate(members):
                    way = assigned[each.name]
                    tables = Member(shared, number, way.config) if isinstance(shared, Pool) else shared
                    twins[each.name] = _twin(each, tables, way)
            share_capacity(opened)
    except BaseException:
        for shared in opened:
            shared.undo_opening()
        raise
    return {each.name: twins[each.name] for each in found}


def _sets(
    found: Sequence[Found], assigned: Mapping[str, Assigned], settings: Settings
) -> list[tuple[TableSetConfig, list[Found]]]:
    """Which tables share a cache, and what that is built from, but for its capacity."""
    init = initial_values(list(found), settings.init)
    by_kind: dict[object, list[Found]] = {}
    for each in found:
        weight, rows = each.module.weight, rows_of(assigned[each.name].config)
        kind = (weight.shape[1], settings.place(weight), rows)
        by_kind.setdefault(kind, []).append(each)
    sets: list[tuple[TableSetConfig, list[Found]]] = []
    for members in by_kind.values():
        weight = members[0].module.weight
        config = table_set_config(
            tuple(_table(each, init[each.name], settings, is_alone=len(members) == 1) for each in members),
            capacity=1.0,
            policy=settings.policy,
            storage=settings.storage,
            label=_label(members, is_only=len(by_kind) == 1),
            optimizer=None,
            seed=_seed(settings.seed, members, is_first=not sets),
            dtype=settings.place(weight).dtype,
            device=settings.place(weight).device,
            check_ids=settings.check_ids,
            rounding=settings.rounding,
            output_dtype=settings.place(weight).output_dtype,
        )
        config = replace(config, optimizer=assigned[members[0].name].config, separate=len(found) > 1)
        sets.append((config, members))
    return sets


def _label(members: list[Found], *, is_only: bool) -> str:
    """What a file of these tables is called behind the path of all: nothing where there is one for several tables, else
    the name of the first."""
    return "" if is_only and len(members) > 1 else members[0].name


def _seed(seed: int, members: list[Found], *, is_first: bool) -> int:
    """That of tables which share a cache. Rows are generated from the seed, the number of the table there and the id:
    tables of other caches must not begin with the same numbers."""
    if is_first or not any(each.is_meta for each in members) or not is_whole(seed):
        return seed
    named = f"{seed} {members[0].name}".encode()
    return int.from_bytes(hashlib.blake2b(named, digest_size=8).digest(), "little") >> 1


def _table(found: Found, init: Init, settings: Settings, *, is_alone: bool) -> TableConfig:
    module = found.module
    rows, width = module.weight.shape
    mode = cast("Mode", module.mode if isinstance(module, nn.EmbeddingBag) else "sum")
    with naming(found.shown):
        check_scaling(mode, module.scale_grad_by_freq)
    table = TableConfig(
        name=found.name or "weight",  # by which it is refused, whatever it is called
        num_embeddings=rows,
        embedding_dim=width,
        mode=mode,
        padding_idx=module.padding_idx,
        init=init if found.is_meta or not callable(init) else Written(),  # a function would fill rows in vain
        placement=settings.placement,
    )
    return replace(table, name="weight") if is_alone else table


def _sharer(config: TableSetConfig) -> Sharer:
    width = config.tables[0].embedding_dim
    return Sharer(
        sum(table.num_embeddings for table in config.tables), slot_bytes(row_layout(config, 1, width), config.device)
    )


def _twin(found: Found, tables: TableSet, assigned: Assigned) -> OneTable:
    module = found.module
    is_bag = isinstance(module, nn.EmbeddingBag)
    options = LookupOptions(
        max_norm=module.max_norm,
        norm_type=module.norm_type,
        scale_grad_by_freq=module.scale_grad_by_freq,
        padding_is_dropped=is_bag,
    )
    kept: dict[str, Any] = {"sparse": module.sparse}
    twin: OneTable
    if isinstance(module, nn.EmbeddingBag):
        kept["include_last_offset"] = module.include_last_offset
        twin = TieredEmbeddingBag.over(tables, assigned.given, options, **kept)
    else:
        twin = TieredEmbedding.over(tables, assigned.given, options, **kept)
    twin.train(module.training)
    return twin
