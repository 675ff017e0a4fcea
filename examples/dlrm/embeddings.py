"""The 26 tables: the tiered collection, and plain `nn.EmbeddingBag`s with torch's optimizer to check it against."""

from __future__ import annotations

from dataclasses import asdict

import torch
from torch import Tensor, nn

from examples.dlrm.config import DTYPES, TrainConfig
from examples.dlrm.model import TABLES
from examples.dlrm.processes import Processes
from tieredemb import (
    SGD,
    Adagrad,
    ShardedTieredEmbeddingBagCollection,
    SparseAdam,
    TableConfig,
    TieredEmbeddingBagCollection,
    Uniform,
)
from tieredemb.errors import UnsupportedError

Collection = TieredEmbeddingBagCollection | ShardedTieredEmbeddingBagCollection


def tiered_tables(config: TrainConfig, processes: Processes) -> Collection:
    """26 tables of sums, initialised as the DLRM paper's code does; each of `processes` holds a part of them."""
    bound = config.model.rows_per_table**-0.5
    tables = [
        TableConfig(
            name=name,
            num_embeddings=config.model.rows_per_table,
            embedding_dim=config.model.embedding_dim,
            init=Uniform(low=-bound, high=bound),
        )
        for name in TABLES
    ]
    kind: type[Collection] = TieredEmbeddingBagCollection
    if processes.size > 1:
        kind = ShardedTieredEmbeddingBagCollection
    return kind(
        tables=tables,
        capacity=config.cache.capacity,
        policy=config.cache.policy,
        storage=config.cache.storage,
        optimizer=config.optimizer,
        seed=config.seed,
        dtype=DTYPES[config.model.dtype],
        rounding=config.model.rounding,
        output_dtype=torch.float32,
        device=config.device,
    )


def reference_optimizer(config: TrainConfig, embeddings: nn.Module) -> torch.optim.Optimizer:
    """torch's optimizer of the same name, for sparse gradients."""
    chosen, parameters = config.optimizer, list(embeddings.parameters())
    if isinstance(chosen, SGD):
        return torch.optim.SGD(parameters, lr=chosen.lr)
    if isinstance(chosen, Adagrad):
        settings = asdict(chosen)
        if settings.pop("weight_decay_on_use"):
            raise UnsupportedError("torch.optim.Adagrad has no weight_decay_on_use; use weight_decay")
        return torch.optim.Adagrad(parameters, **settings)
    if isinstance(chosen, SparseAdam):
        return torch.optim.SparseAdam(parameters, lr=chosen.lr, betas=chosen.betas, eps=chosen.eps)
    raise UnsupportedError(f"torch has no {type(chosen).__name__}; the reference takes SGD, Adagrad or SparseAdam")


class EmbeddingBags(nn.Module):
    """The reference: one plain `nn.EmbeddingBag` a table, with the interface of the tiered collection."""

    def __init__(self, weights: list[Tensor]) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag.from_pretrained(weight.clone(), freeze=False, mode="sum", sparse=True) for weight in weights
        )

    def weights(self) -> list[Tensor]:
        """float32 (rows, D) of each table, shared with the model."""
        return [weight.detach() for weight in self.tables.parameters()]

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        bags = (len(offsets) - 1) // len(self.tables)
        outputs = []
        for number, table in enumerate(self.tables):
            part = offsets[number * bags : (number + 1) * bags + 1]
            outputs.append(table(ids[part[0] : part[-1]], part[:-1] - part[0]))
        return torch.cat(outputs, dim=1)
