"""What modules of one table have in common: the names that `nn.Embedding` and `nn.EmbeddingBag` give it."""

from __future__ import annotations

import abc
from typing import Any, Self

import torch

from tieredemb.errors import UnsupportedError
from tieredemb.kernels.tracing import RESTORE, untraced
from tieredemb.lookup.options import LookupOptions
from tieredemb.modules.base import TieredModule
from tieredemb.step.engine import Engine
from tieredemb.step.table_tensor import TableTensor
from tieredemb.tables.table_set import TableSet
from tieredemb.tables.torch_kinds import Optimizer


class InPlaceOf(abc.ABCMeta):
    """Type of modules that are built in the place of those of a class of torch, `of_torch`: their class is equal to it,
    for code that looks for embeddings by `type(module) == nn.Embedding`, as regularisers of libraries do. They are no
    instances of it."""

    of_torch: type[torch.nn.Module] | None

    def __eq__(cls, other: object) -> bool:
        return cls is other or (other is not None and other is cls.__dict__.get("of_torch"))

    __hash__ = abc.ABCMeta.__hash__


class OneTable(TieredModule, metaclass=InPlaceOf):
    """Base of the modules that hold one table."""

    num_embeddings: int
    embedding_dim: int

    @classmethod
    def over(cls, tables: TableSet, optimizer: Optimizer, options: LookupOptions, **settings: Any) -> Self:
        """A module of the one table of `tables`, which may share their cache with others. `settings`: those of torch's
        that concern neither rows nor lookups."""
        module = cls.__new__(cls)
        module._start(tables, optimizer, options, **settings)
        return module

    def _start(self, tables: TableSet, optimizer: Optimizer, options: LookupOptions, *, sparse: bool = False) -> None:
        super().__init__(Engine(tables, optimizer), options)
        (table,) = tables.config.tables
        self.num_embeddings = table.num_embeddings
        self.embedding_dim = table.embedding_dim
        self.padding_idx = table.padding_idx
        self.max_norm = options.max_norm
        self.norm_type = options.norm_type
        self.scale_grad_by_freq = options.scale_grad_by_freq
        self.sparse = sparse

    @property
    @untraced
    def weight(self) -> TableTensor:
        """The table as a tensor, (num_embeddings, embedding_dim) in the rows' dtype on the module's device.

        Shape, dtype and device cost nothing. What computes with it reads a copy of the rows, anew each time, and waits
        for a GPU: under `torch.no_grad()` or `torch.inference_mode()`, of a frozen module, or as `weight.detach()` and
        `weight.data`. What writes to it there (in-place operations, `nn.init`, an index, `weight.data = rows`), or to a
        view of it, changes the rows on every tier; optimizer state stays. Setting its `requires_grad` freezes or thaws
        the module.

        Raises `UnsupportedError` in a backward that reaches the table this way, for writes where gradients are
        recorded, for `grad`, and for what a table lacks, such as storage; `StorageFullError` or `DeviceMemoryError`
        where memory cannot hold the rows: `tieredemb.scores` multiplies with tables of any size, and pointwise
        operations write to them.

        >>> embedding = tieredemb.TieredEmbedding(1000, 4)
        >>> embedding.weight.shape
        torch.Size([1000, 4])
        >>> with torch.no_grad():
        ...     (torch.ones(2, 4) @ embedding.weight.T).shape
        torch.Size([2, 1000])
        >>> embedding.weight.data[0] = 1.0
        >>> embedding(torch.tensor([0])).tolist()
        [[1.0, 1.0, 1.0, 1.0]]
        """
        parameter = self._table_parameters.get("weight")
        return TableTensor(self, 0) if parameter is None else parameter

    def reset_parameters(self) -> None:
        """Draws all rows anew, as that of `nn.Embedding`: normal values of torch's generator, and zeros for padding.
        Optimizer state stays. Waits for a GPU. Raises `StorageFullError` or `DeviceMemoryError` where memory cannot
        hold the table: pass init= for one of any size."""
        rows = self.weight.detached()
        torch.nn.init.normal_(rows)
        if self.padding_idx is not None:
            rows[self.padding_idx].zero_()

    def _weight_key(self, table: int) -> str:
        return "weight"

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            raise UnsupportedError(
                "the weight of a tiered table cannot be assigned: its rows live in several places; "
                "load_state_dict({'weight': rows}) sets them, and from_pretrained(rows) makes a table of a tensor. For "
                f"torch.func.functional_call() with other weights: {RESTORE}"
            )
        super().__setattr__(name, value)
