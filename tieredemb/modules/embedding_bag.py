"""`TieredEmbeddingBag`: one table in place of `torch.nn.EmbeddingBag`."""

from __future__ import annotations

from typing import Any

import torch

from tieredemb.config import Capacity, CheckIds, Init, Mode, Normal, Placement, Policy, TableConfig, check_flag
from tieredemb.errors import ConfigError, InvalidInputError, UnsupportedInputError
from tieredemb.kernels.tracing import untraced
from tieredemb.lookup.bags import EqualBags
from tieredemb.lookup.options import LookupOptions
from tieredemb.lookup.rounding import Rounding
from tieredemb.modules.forwards import LISTENERS
from tieredemb.modules.inputs import as_ids, as_offsets, check_weights, widened
from tieredemb.modules.one_table import OneTable
from tieredemb.modules.pretrained import given_rows, pretrained_arguments
from tieredemb.step.batch import Batch
from tieredemb.storage.base import Storage
from tieredemb.tables.config import table_set_config
from tieredemb.tables.table_set import TableSet
from tieredemb.tables.torch_kinds import Optimizer


def check_scaling(mode: Mode, scale_grad_by_freq: bool) -> None:
    """Raises `ConfigError` for arguments that exclude each other."""
    check_flag("scale_grad_by_freq", scale_grad_by_freq)
    if scale_grad_by_freq and mode == "max":
        raise ConfigError("scale_grad_by_freq is not supported with mode='max'; use 'sum' or 'mean'")


class TieredEmbeddingBag(OneTable):
    """Drop-in for `torch.nn.EmbeddingBag` whose table lives in cold storage behind a hot cache.

    The arguments up to `dtype` are those of `torch.nn.EmbeddingBag`. `sparse` is accepted and changes nothing: the
    gradient is never a tensor, backward applies it. The others, by keyword:

    - `capacity`: rows of the hot cache (int), their share of the table (float in (0, 1], or `"5%"`) or its bytes
      (`"512MiB"`).
    - `policy`: `LFU(half_life_batches=300)` or `LRU()`.
    - `storage`: `HostMemory()` (the default on the CPU), `UnifiedMemory()` (the default on a GPU), `File(path)` or
      `Pmem(directory)`.
    - `optimizer`: `Adagrad(lr=…)` or another of the library's optimizers, applied in backward; or a torch optimizer,
      with whose `step()` the update comes, or the class of one that is to be followed later (see `follow`). Without one
      the module serves, and a backward through it raises `BackwardError`.
    - `seed`, `init`: what the rows start as; a row is generated when it is first used.
    - `placement`: whether all rows stay in the hot cache (`"resident"`), come and go (`"cached"`), or as suits the
      capacity (`"auto"`).
    - `check_ids`: on a GPU `"deferred"` lets a batch with a bad id read zeros and update nothing, and raises at the
      next call that synchronises anyway (`stats`, `flush`, `state_dict`, …) or a forward that sees it; `"always"`
      waits for the GPU in every forward and raises there. The CPU always raises at once.
    - `rounding`: of rows of 16 bits (`dtype=`), once an update: to `"nearest"`, or `"stochastic"`, up or down at random
      so that the mean stays, by random bits that depend on seed, table, id, step and element alone.
    - `output_dtype`: float32, float16 or bfloat16; that of the rows by default.

    Raises `ConfigError` for an argument that is not allowed. No forward or backward synchronises with a GPU, unless
    its tier is staged through the host (`File`, `Pmem`).

    >>> bag = tieredemb.TieredEmbeddingBag(1000, 4, mode="sum", capacity=100, optimizer=tieredemb.SGD(lr=0.1))
    >>> out = bag(torch.tensor([1, 2, 2, 999]), torch.tensor([0, 1]))
    >>> out.sum().backward()      # updates rows 1, 2 and 999
    >>> out.shape, bag.stats().lookups
    (torch.Size([2, 4]), 4)
    """

    of_torch = torch.nn.EmbeddingBag

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: Mode = "mean",
        sparse: bool = False,
        _weight: torch.Tensor | None = None,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
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
            mode=mode,
            padding_idx=padding_idx,
            init=Normal() if init is None else init,
            placement=placement,
        )
        check_scaling(mode, scale_grad_by_freq)
        check_flag("sparse", sparse)
        check_flag("include_last_offset", include_last_offset)
        weight = given_rows(_weight, table)
        dtype = weight.dtype if dtype is None and weight is not None else dtype
        config = table_set_config(
            (table,), capacity=capacity, policy=policy, storage=storage, optimizer=optimizer, seed=seed, dtype=dtype,
            device=device, check_ids=check_ids, rounding=rounding, output_dtype=output_dtype,
        )  # fmt: skip
        options = LookupOptions(max_norm=max_norm, norm_type=norm_type, scale_grad_by_freq=scale_grad_by_freq)
        tables = TableSet(config, weights=None if weight is None else {0: weight})
        self._start(tables, optimizer, options, sparse=sparse, include_last_offset=include_last_offset)

    def _start(
        self,
        tables: TableSet,
        optimizer: Optimizer,
        options: LookupOptions,
        *,
        sparse: bool = False,
        include_last_offset: bool = False,
    ) -> None:
        super()._start(tables, optimizer, options, sparse=sparse)
        self.mode = tables.config.tables[0].mode
        self.include_last_offset = include_last_offset

    @classmethod
    def from_pretrained(
        cls, embeddings: torch.Tensor, freeze: bool = True, *args: Any, **kwargs: Any
    ) -> TieredEmbeddingBag:
        """A module with the given rows (num_embeddings, embedding_dim). Further arguments as `torch.nn.EmbeddingBag.
        from_pretrained` takes them (max_norm, norm_type, scale_grad_by_freq, mode, sparse, include_last_offset,
        padding_idx), and the keywords of the constructor. To train it pass `freeze=False` and an `optimizer`."""
        names = (
            "max_norm",
            "norm_type",
            "scale_grad_by_freq",
            "mode",
            "sparse",
            "include_last_offset",
            "padding_idx",
        )
        module = cls(**pretrained_arguments(embeddings, freeze, names, args, kwargs))
        module.requires_grad_(not freeze)
        return module

    @untraced
    def forward(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Pools bags of rows: (B, D).

        `input`: ids, int32 or int64, (N,) with `offsets` (B,) (or (B + 1,) with `include_last_offset`), or (B, L) for
        bags of equal length. As in torch one of ids and offsets may be uint8, int8 or int16 beside the other ·
        `per_sample_weights`: of the ids' shape and the outputs' dtype, for mode "sum". Raises `InvalidInputError` or
        `IdOutOfRangeError` and changes nothing.
        """
        if per_sample_weights is None and self.engine.planned.waiting and not LISTENERS:
            given = (input,) if offsets is None else (input, offsets)
            found = self.engine.lookup_planned(given, self._hook, trains=self.trains)
            if found is not None:
                return found
        return self._lookup(self._batch(input, offsets, per_sample_weights))

    def _batch(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> Batch:
        device, weights = self._hook.device, None
        ids = as_ids("input", widened(input, offsets), device)
        if per_sample_weights is not None:
            if self.mode != "sum":
                raise UnsupportedInputError(
                    f"per_sample_weights is only supported for mode='sum', this module has mode={self.mode!r}"
                )
            weights = check_weights(per_sample_weights, input, self.tables.config.output_dtype)
        dimensions = input.dim()
        if dimensions == 2:
            if offsets is not None:
                raise InvalidInputError("offsets must be None for 2-D input, whose rows are the bags")
            bags, length = input.shape
            return Batch(ids, EqualBags(bags, length), bags + 1, True, bags, weights, (input,))
        if dimensions != 1:
            raise InvalidInputError(f"input must have one or two dimensions, got shape {tuple(input.shape)}")
        if offsets is None:
            raise InvalidInputError("offsets is missing: 1-D input needs the start of each bag; or pass 2-D input")
        starts = as_offsets(widened(offsets, input), device)
        given = starts.shape[0]
        if given == 0:
            if self.include_last_offset:
                raise InvalidInputError("with include_last_offset offsets has at least one element, got none")
            return Batch(ids, EqualBags(0, 0), 1, False, 0, weights, (input, offsets))
        bags = given - self.include_last_offset
        return Batch(ids, starts, bags + 1, False, bags, weights, (input, offsets))

    def extra_repr(self) -> str:
        parts = f"{self.num_embeddings}, {self.embedding_dim}, mode={self.mode!r}"
        config = self.tables.config
        return f"{parts}, capacity={config.capacity!r}, policy={config.policy}, storage={config.storage}"
