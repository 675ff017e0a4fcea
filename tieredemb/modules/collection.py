"""`TieredEmbeddingBagCollection`: many tables behind one cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, overload

import torch

from tieredemb.config import Capacity, CheckIds, Policy, TableConfig, check_flag, features_of
from tieredemb.errors import ConfigError, ConfigTypeError, InvalidInputError, shown
from tieredemb.kernels.tracing import untraced
from tieredemb.lookup.bags import Places
from tieredemb.lookup.options import LookupOptions
from tieredemb.lookup.rounding import Rounding
from tieredemb.modules.inputs import as_ids, as_offsets, check_weights
from tieredemb.modules.keyed import (
    KeyedInputs,
    KeyedJagged,
    KeyedModule,
    KeyedTensor,
    blocks_once,
    is_keyed,
    output_names,
    sibling,
)
from tieredemb.step.batch import Batch
from tieredemb.step.engine import Engine
from tieredemb.storage.base import Storage
from tieredemb.tables.config import table_set_config
from tieredemb.tables.table_set import TableSet
from tieredemb.tables.torch_kinds import Optimizer


def given_tables(tables: object) -> tuple[TableConfig, ...]:
    """The tables of a collection, as they were given. Raises `ConfigError` for what holds none."""
    if not isinstance(tables, Iterable) or isinstance(tables, str | type):
        raise ConfigTypeError(f"tables must be a list of TableConfig instances, got {shown(tables)}")
    try:
        found = tuple(tables)
    except TypeError as error:  # a tensor of no dimension
        raise ConfigTypeError(f"tables must be a list of TableConfig instances, got {shown(tables)}") from error
    if odd := [table for table in found if not isinstance(table, TableConfig)]:
        raise ConfigError(f"tables must hold TableConfig instances, got {shown(odd[0])}")
    return found


def check_collection(tables: Sequence[TableConfig], *, scale_grad_by_freq: bool, is_weighted: bool) -> None:
    """Raises `ConfigError` for options that are none, and for `tables` that cannot be pooled so."""
    check_flag("scale_grad_by_freq", scale_grad_by_freq)
    check_flag("is_weighted", is_weighted)
    for table in tables:
        if scale_grad_by_freq and table.mode == "max":
            raise ConfigError(f"scale_grad_by_freq is not supported with mode='max' of table {table.name!r}")


class PooledInputs(KeyedInputs):
    """The forward of a module that pools the bags of several tables, whose `_hook` is on the device of its inputs, and
    which has `_lookup(batch)`."""

    _hook: torch.Tensor
    _lookup: Any  # a method of the other base; declared alone, so that it stays that one
    is_weighted: bool

    @overload
    def forward(
        self, indices: torch.Tensor, offsets: torch.Tensor, per_sample_weights: torch.Tensor | None = None
    ) -> torch.Tensor: ...
    @overload
    def forward(self, indices: KeyedJagged) -> KeyedTensor: ...
    @untraced
    def forward(
        self,
        indices: torch.Tensor | KeyedJagged,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor | KeyedTensor:
        """Pools the bags of all features: (B, ΣD), the features' outputs side by side.

        Features come in the order of the tables and of their `feature_names`; a table that names none has one. ·
        `indices`: int32 or int64 (N,), feature-major: all bags of the first feature, then all of the second, … ·
        `offsets`: (F·B + 1,), the last element N · `per_sample_weights`: floats (N,), for mode "sum". As FBGEMM lays
        them out.

        Or, alone, a TorchRec `KeyedJaggedTensor`: its keys may come in any order, and those of no feature are left out.
        Then it returns what `torchrec.EmbeddingBagCollection` does, a float32 `KeyedTensor`. Its weights count if the
        collection `is_weighted`.

        Raises `InvalidInputError` or `IdOutOfRangeError` and changes nothing.
        """
        if offsets is None and is_keyed(indices):
            return self._by_keys(indices)
        if not isinstance(indices, torch.Tensor) or offsets is None:
            raise InvalidInputError("pass ids and offsets as tensors, or a KeyedJaggedTensor alone")
        out: torch.Tensor = self._lookup(self._batch(indices, offsets, None, per_sample_weights))
        return out

    def _by_keys(self, keyed: KeyedJagged) -> KeyedTensor:
        weights = keyed.weights_or_none() if self.is_weighted else None
        if self.is_weighted and weights is None:
            raise InvalidInputError("the collection is_weighted, and the KeyedJaggedTensor has no weights")
        batch = self._batch(*self.by_feature(keyed), weights)
        tables = self.table_configs
        widths = [tables[feature.table].embedding_dim for feature in features_of(tables)]
        kind = sibling(keyed, "KeyedTensor", KeyedTensor)
        made: KeyedTensor = kind(
            keys=output_names(tables), length_per_key=widths, values=self._lookup(batch).to(torch.float32)
        )
        return made

    def _batch(
        self,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        places: Places | None = None,
        weights: torch.Tensor | None = None,
    ) -> Batch:
        ids = as_ids("indices", indices, self._hook.device)
        if indices.dim() != 1:
            raise InvalidInputError(f"indices must have one dimension, got shape {tuple(indices.shape)}")
        configs = self.table_configs
        if weights is not None and any(table.mode != "sum" for table in configs):
            other = next(table for table in configs if table.mode != "sum")
            raise InvalidInputError(f"per_sample_weights needs mode='sum'; table {other.name!r} has {other.mode!r}")
        weights = None if weights is None else check_weights(weights, indices)
        edges = as_offsets(offsets, self._hook.device)
        features = self._n_features if places is None else places.count
        batch, rest = divmod(len(edges) - 1, features)
        if len(edges) == 0 or rest:
            raise InvalidInputError(
                f"offsets has {len(edges)} elements; {features} features need {features} · B + 1 of them"
            )
        if places is None:
            return Batch(ids, edges, len(edges), True, batch, weights, (indices, offsets))
        given = indices, offsets, places
        ids, edges, weights, places = blocks_once(ids, edges, weights, places)
        return Batch(ids, edges, len(edges), True, batch, weights, given, places)


class TieredEmbeddingBagCollection(PooledInputs, KeyedModule):
    """Tables that are looked up together, in one cache for each width: pooling the capacity beats splitting it.

    `tables`: one `TableConfig` each, with distinct names. `max_norm`, `norm_type`, `scale_grad_by_freq` as in
    `torch.nn.EmbeddingBag`, for all tables; the other keywords are those of `TieredEmbeddingBag`. With several widths
    each gets the same share of its rows, and at least one. `is_weighted`: whether the weights of a `KeyedJaggedTensor`
    count, as in `torchrec.EmbeddingBagCollection`.

    >>> tables = [tieredemb.TableConfig(name=n, num_embeddings=100, embedding_dim=4) for n in ("user", "item")]
    >>> collection = tieredemb.TieredEmbeddingBagCollection(tables, capacity=0.5)
    >>> ids = torch.tensor([7, 8, 9, 50])          # user bags [7], [8, 9]; item bags [50], []
    >>> collection(ids, torch.tensor([0, 1, 3, 4, 4])).shape
    torch.Size([2, 8])
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        *,
        capacity: Capacity = 0.01,
        policy: Policy | None = None,
        storage: Storage | None = None,
        optimizer: Optimizer = None,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        check_ids: CheckIds = "deferred",
        rounding: Rounding = "nearest",
        output_dtype: torch.dtype | None = None,
        is_weighted: bool = False,
    ) -> None:
        tables = given_tables(tables)
        check_collection(tables, scale_grad_by_freq=scale_grad_by_freq, is_weighted=is_weighted)
        config = table_set_config(
            tables, capacity=capacity, policy=policy, storage=storage, optimizer=optimizer, seed=seed, dtype=dtype,
            device=device, check_ids=check_ids, rounding=rounding, output_dtype=output_dtype,
        )  # fmt: skip
        options = LookupOptions(max_norm=max_norm, norm_type=norm_type, scale_grad_by_freq=scale_grad_by_freq)
        super().__init__(Engine(TableSet(config), optimizer), options)
        self.is_weighted = is_weighted

    def extra_repr(self) -> str:
        config = self.tables.config
        lines = [
            f"({table.name}): {table.num_embeddings}, {table.embedding_dim}, mode={table.mode!r}"
            for table in config.tables
        ]
        return "\n".join([*lines, f"capacity={config.capacity!r}, policy={config.policy}, storage={config.storage}"])
