"""`TieredEmbedding`: one table in place of `torch.nn.Embedding`."""

from __future__ import annotations

from typing import Any

import torch

from tieredemb.config import Capacity, CheckIds, Init, Normal, Placement, Policy, TableConfig, check_flag
from tieredemb.kernels.tracing import untraced
from tieredemb.lookup.bags import EqualBags
from tieredemb.lookup.options import LookupOptions
from tieredemb.lookup.rounding import Rounding
from tieredemb.modules.forwards import LISTENERS
from tieredemb.modules.inputs import as_ids
from tieredemb.modules.one_table import OneTable
from tieredemb.modules.pretrained import given_rows, pretrained_arguments
from tieredemb.step.batch import Batch
from tieredemb.storage.base import Storage
from tieredemb.tables.config import table_set_config
from tieredemb.tables.table_set import TableSet
from tieredemb.tables.torch_kinds import Optimizer


class TieredEmbedding(OneTable):
    """Drop-in for `torch.nn.Embedding` whose table lives in cold storage behind a hot cache.

    The arguments up to `dtype` are those of `torch.nn.Embedding`; the keywords are those of `TieredEmbeddingBag`. The
    row of `padding_idx` is looked up (zeros unless set) and never trained.

    >>> embedding = tieredemb.TieredEmbedding(1000, 4, capacity=100)
    >>> embedding(torch.tensor([[1, 2], [3, 3]])).shape
    torch.Size([2, 2, 4])
    """

    of_torch = torch.nn.Embedding

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: torch.Tensor | None = None,
        _freeze: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        capacity: Capacity = 0.01,
        policy: Policy | None = None,
        storage: Storage | None = None,
        optimizer: Optimizer = None,
        seed: int = 0,
        init: Init | None = None,
        placement: Placement = "auto",
        check_ids: CheckIds = "deferred",
        rounding: Rounding = "nearest",
        output_dtype: torch.dtype | None = None,
    ) -> None:
        table = TableConfig(
            name="weight",
            num_embeddings=num_embeddings,
            embedding_dim=embedding_dim,
            padding_idx=padding_idx,
            init=Normal() if init is None else init,
            placement=placement,
        )
        check_flag("sparse", sparse)
        check_flag("_freeze", _freeze)
        weight = given_rows(_weight, table)
        dtype = weight.dtype if dtype is None and weight is not None else dtype
        config = table_set_config(
            (table,), capacity=capacity, policy=policy, storage=storage, optimizer=optimizer, seed=seed, dtype=dtype,
            device=device, check_ids=check_ids, rounding=rounding, output_dtype=output_dtype,
        )  # fmt: skip
        options = LookupOptions(
            max_norm=max_norm,
            norm_type=norm_type,
            scale_grad_by_freq=scale_grad_by_freq,
            padding_is_dropped=False,
        )
        tables = TableSet(config, weights=None if weight is None else {0: weight})
        self._start(tables, optimizer, options, sparse=sparse)
        self.requires_grad_(not _freeze)

    @classmethod
    def from_pretrained(
        cls, embeddings: torch.Tensor, freeze: bool = True, *args: Any, **kwargs: Any
    ) -> TieredEmbedding:
        """A module with the given rows (num_embeddings, embedding_dim). Further arguments as `torch.nn.Embedding.
        from_pretrained` takes them (padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse), and the keywords of
        the constructor. To train it pass `freeze=False` and an `optimizer`."""
        names = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
        return cls(_freeze=freeze, **pretrained_arguments(embeddings, freeze, names, args, kwargs))

    @untraced
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Rows of `input` (ids, int32 or int64, any shape): (*input.shape, D). Raises `InvalidInputError` or
        `IdOutOfRangeError` and changes nothing."""
        rows = None
        if self.engine.planned.waiting and not LISTENERS:
            rows = self.engine.lookup_planned((input,), self._hook, trains=self.trains)
        if rows is None:
            rows = self._lookup(self._batch(input))
        return rows.reshape(*input.shape, self.embedding_dim)

    def _batch(self, input: torch.Tensor) -> Batch:
        ids = as_ids("input", input, self._hook.device)
        n = len(ids)
        return Batch(ids, EqualBags(n, 1), n + 1, True, n, None, (input,))

    def extra_repr(self) -> str:
        config = self.tables.config
        return (
            f"{self.num_embeddings}, {self.embedding_dim}, capacity={config.capacity!r}, policy={config.policy}, "
            f"storage={config.storage}"
        )
