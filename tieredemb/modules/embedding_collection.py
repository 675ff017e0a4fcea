"""`TieredEmbeddingCollection`: the rows of many tables, unpooled, behind one cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, overload

import torch

from tieredemb.config import Capacity, CheckIds, Policy, TableConfig, check_flag, features_of
from tieredemb.errors import ConfigError, InvalidInputError
from tieredemb.kernels.tracing import untraced
from tieredemb.lookup.bags import Places
from tieredemb.lookup.options import LookupOptions
from tieredemb.lookup.rounding import Rounding
from tieredemb.modules.collection import given_tables
from tieredemb.modules.inputs import as_ids, as_offsets
from tieredemb.modules.keyed import (
    JaggedTensor,
    KeyedJagged,
    KeyedModule,
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


class TieredEmbeddingCollection(KeyedModule):
    """Tables whose rows are looked up together and not pooled, in one cache: what `TieredEmbedding` is to one table.

    `tables`: one `TableConfig` each, with distinct names, of one `embedding_dim`, as `torchrec.EmbeddingCollection`
    asks. A padding row is looked up and never trained. The keywords are those of `TieredEmbeddingBagCollection`;
    `need_indices`: what is returned by key has the ids as weights, as TorchRec's.

    >>> tables = [tieredemb.TableConfig(name=n, num_embeddings=100, embedding_dim=4) for n in ("item", "word")]
    >>> collection = tieredemb.TieredEmbeddingCollection(tables, capacity=0.5)
    >>> rows = collection({"item": torch.tensor([7]), "word": torch.tensor([[8, 9], [50, 8]])})
    >>> rows["item"].shape, rows["word"].shape
    (torch.Size([1, 4]), torch.Size([2, 2, 4]))
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
        need_indices: bool = False,
    ) -> None:
        tables = given_tables(tables)
        check_flag("need_indices", need_indices)
        for table in tables:
            if table.mode != "sum":
                raise ConfigError(
                    f"table {table.name!r} has mode={table.mode!r}, and this collection pools nothing; leave mode out, "
                    f"or build a TieredEmbeddingBagCollection"
                )
            if table.embedding_dim != tables[0].embedding_dim:
                raise ConfigError(
                    f"tables {tables[0].name!r} and {table.name!r} have rows of {tables[0].embedding_dim} and "
                    f"{table.embedding_dim} weights; build a collection for each width"
                )
        config = table_set_config(
            tables, capacity=capacity, policy=policy, storage=storage, optimizer=optimizer, seed=seed, dtype=dtype,
            device=device, check_ids=check_ids, rounding=rounding, output_dtype=output_dtype, pooled=False,
        )  # fmt: skip
        options = LookupOptions(
            max_norm=max_norm,
            norm_type=norm_type,
            scale_grad_by_freq=scale_grad_by_freq,
            padding_is_dropped=False,
        )
        super().__init__(Engine(TableSet(config), optimizer), options)
        self.need_indices = need_indices

    @overload
    def forward(self, features: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]: ...
    @overload
    def forward(self, features: KeyedJagged) -> dict[str, JaggedTensor]: ...
    @untraced
    def forward(
        self, features: Mapping[str, torch.Tensor] | KeyedJagged
    ) -> dict[str, torch.Tensor] | dict[str, JaggedTensor]:
        """The rows of each feature's ids.

        `features`: by the name of each feature its ids, int32 or int64 of any shape; returns by those names rows,
        (*shape, D). Names of no feature are left out.

        Or a TorchRec `KeyedJaggedTensor`, whose keys may come in any order, and those of no feature are left out. Then
        it returns what `torchrec.EmbeddingCollection` does: float32 rows as a `JaggedTensor` by feature; on a GPU it
        waits for the numbers of ids, as that does.

        Raises `InvalidInputError` or `IdOutOfRangeError` and changes nothing.
        """
        if isinstance(features, Mapping):
            ids = self.given_by_features(features)
            rows = self._lookup(self._batch(*ids)).split([each.numel() for each in ids])
            names = [feature.name for feature in features_of(self.table_configs)]
            return {
                name: part.reshape(*of.shape, part.shape[1]) for name, of, part in zip(names, ids, rows, strict=True)
            }
        if is_keyed(features):
            return self._by_keys(features)
        raise InvalidInputError(
            f"features must be a mapping from names to ids, or a KeyedJaggedTensor, got {type(features).__name__}"
        )

    def given_by_features(self, features: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The ids of each feature, in their order. Raises `InvalidInputError`."""
        ids = []
        for feature in features_of(self.table_configs):
            if feature.name not in features:
                raise InvalidInputError(
                    f"there are no ids of feature {feature.name!r}, which table "
                    f"{self.table_configs[feature.table].name!r} looks up; given are "
                    f"{', '.join(map(repr, features)) or 'none'}"
                )
            ids.append(features[feature.name])
        return tuple(ids)

    def _by_keys(self, keyed: KeyedJagged) -> dict[str, JaggedTensor]:
        values, offsets, places = self.by_feature(keyed)
        assert places is not None
        batch = self._batch(values, offsets, places)
        samples = (len(offsets) - 1) // places.count
        lengths = (offsets[1:] - offsets[:-1]).reshape(places.count, samples)
        counts = lengths.sum(1).tolist()
        chosen = [counts[block] for block in places.blocks]
        rows = torch.split(self._lookup(batch)[: sum(chosen)].to(torch.float32), chosen)
        ids = torch.split(values, counts) if self.need_indices else None
        kind = sibling(keyed, "JaggedTensor", JaggedTensor)
        return {
            name: kind(values=part, lengths=lengths[block], weights=None if ids is None else ids[block])
            for name, part, block in zip(output_names(self.table_configs), rows, places.blocks, strict=True)
        }

    def by_feature(self, keyed: KeyedJagged) -> tuple[torch.Tensor, torch.Tensor, Places | None]:
        """See `KeyedModule`; with places always, which tell such a batch from ids by feature."""
        values, offsets, places = super().by_feature(keyed)
        features = self._n_features
        return values, offsets, places or Places(tuple(range(features)), features)

    def _batch(self, *given: Any) -> Batch:
        if isinstance(given[-1], Places):
            return self._batch_by_keys(*given)
        names = [feature.name for feature in features_of(self.table_configs)]
        parts = [as_ids(name, ids, self._hook.device) for name, ids in zip(names, given, strict=True)]
        ids = torch.cat(parts) if len({part.dtype for part in parts}) == 1 else torch.cat([p.long() for p in parts])
        edges = _edges([len(part) for part in parts], ids.device)
        return Batch(as_ids("ids", ids, ids.device), edges, len(edges), True, 1, None, given, names_ends=False)

    def _batch_by_keys(self, values: torch.Tensor, offsets: torch.Tensor, places: Places) -> Batch:
        ids, edges = as_ids("values", values, self._hook.device), as_offsets(offsets, self._hook.device)
        batch, rest = divmod(len(edges) - 1, places.count)
        if len(edges) == 0 or rest:
            raise InvalidInputError(
                f"offsets has {len(edges)} elements; {places.count} keys need {places.count} · B + 1 of them"
            )
        given, own = (values, offsets, places), tuple(range(self._n_features))
        ids, edges, _, places = blocks_once(ids, edges, None, places)
        moved = None if places.blocks == own and places.count == len(own) else places
        return Batch(ids, edges, len(edges), True, batch, None, given, moved)

    def extra_repr(self) -> str:
        config = self.tables.config
        lines = [f"({table.name}): {table.num_embeddings}, {table.embedding_dim}" for table in config.tables]
        return "\n".join([*lines, f"capacity={config.capacity!r}, policy={config.policy}, storage={config.storage}"])


def _edges(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    """Where features' ids begin and end, int64 (F + 1,). Does not synchronise."""
    if device.type != "cuda":
        return torch.tensor([0, *accumulate(lengths)], dtype=torch.int64, device=device)
    edges = torch.zeros(len(lengths) + 1, dtype=torch.int64, device=device)
    for f, length in enumerate(lengths, start=1):
        edges[f:].add_(length)  # by launches, which a graph holds too
    return edges
