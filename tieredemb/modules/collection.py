"""`TieredEmbeddingBagCollection`: many tables behind one cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tieredemb.config import Capacity, CheckIds, Policy, TableConfig
from tieredemb.errors import ConfigError, InvalidInputError
from tieredemb.lookup.options import LookupOptions
from tieredemb.modules.base import TieredModule
from tieredemb.modules.inputs import as_ids, as_offsets, check_weights
from tieredemb.step.batch import Batch
from tieredemb.step.call import untraced
from tieredemb.step.engine import Engine
from tieredemb.storage.base import Storage
from tieredemb.tables.config import table_set_config
from tieredemb.tables.torch_kinds import Optimizer


class TieredEmbeddingBagCollection(TieredModule):
    """Tables that are looked up together, in one cache for each width: pooling the capacity beats splitting it.

    `tables`: one `TableConfig` each, with distinct names. `max_norm`, `norm_type`, `scale_grad_by_freq` as in
    `torch.nn.EmbeddingBag`, for all tables; the other keywords are those of `TieredEmbeddingBag`. With several widths
    each gets the same share of its rows, and at least one.

    >>> tables = [TableConfig(name=n, num_embeddings=100, embedding_dim=4) for n in ("user", "item")]
    >>> collection = TieredEmbeddingBagCollection(tables, capacity=0.5)
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
    ) -> None:
        tables = tuple(tables)
        for table in tables:
            if not isinstance(table, TableConfig):
                raise ConfigError(f"tables must hold TableConfig instances, got {table!r}")
            if scale_grad_by_freq and table.mode == "max":
                raise ConfigError(f"scale_grad_by_freq is not supported with mode='max' of table {table.name!r}")
        config = table_set_config(
            tables, capacity=capacity, policy=policy, storage=storage, optimizer=optimizer, seed=seed, dtype=dtype,
            device=device, check_ids=check_ids,
        )  # fmt: skip
        options = LookupOptions(max_norm=max_norm, norm_type=norm_type, scale_grad_by_freq=scale_grad_by_freq)
        super().__init__(Engine(config, optimizer), options)

    @untraced
    def forward(
        self,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Pools the bags of all features: (B, ΣD), the features' outputs side by side.

        Features come in the order of the tables and of their `feature_names`; a table that names none has one. ·
        `indices`: int32 or int64 (N,), feature-major: all bags of the first feature, then all of the second, … ·
        `offsets`: (F·B + 1,), the last element N · `per_sample_weights`: floats (N,), for mode "sum". As FBGEMM and
        TorchRec's `KeyedJaggedTensor.values()` and `.offsets()` lay them out. Raises `InvalidInputError` or
        `IdOutOfRangeError` and changes nothing.
        """
        return self._lookup(self._batch(indices, offsets, per_sample_weights))

    def _batch(
        self, indices: torch.Tensor, offsets: torch.Tensor, per_sample_weights: torch.Tensor | None = None
    ) -> Batch:
        ids = as_ids("indices", indices, self._hook.device)
        if indices.dim() != 1:
            raise InvalidInputError(f"indices must have one dimension, got shape {tuple(indices.shape)}")
        configs = self.table_configs
        if per_sample_weights is not None and any(table.mode != "sum" for table in configs):
            other = next(table for table in configs if table.mode != "sum")
            raise InvalidInputError(f"per_sample_weights needs mode='sum'; table {other.name!r} has {other.mode!r}")
        weights = check_weights(per_sample_weights, indices)
        edges = as_offsets(offsets, self._hook.device)
        features = self.tables.n_features
        batch, rest = divmod(len(edges) - 1, features)
        if len(edges) == 0 or rest:
            raise InvalidInputError(
                f"offsets has {len(edges)} elements; {features} features need {features} · B + 1 of them"
            )
        return Batch(ids, edges, len(edges), True, batch, weights, (indices, offsets))

    def extra_repr(self) -> str:
        config = self.tables.config
        lines = [
            f"({table.name}): {table.num_embeddings}, {table.embedding_dim}, mode={table.mode!r}"
            for table in config.tables
        ]
        return "\n".join([*lines, f"capacity={config.capacity!r}, policy={config.policy}, storage={config.storage}"])
