"""DLRM (Naumov et al., 2019): a bottom MLP over the integers, dot products of all pairs of vectors, a top MLP.

The model takes its embeddings as a module, `(ids, offsets) → (B, 26 · D)`: the tiered collection, or `EmbeddingBags`,
plain torch, against which the collection is checked. All else is shared.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from examples.dlrm import text
from examples.dlrm.config import ModelConfig
from examples.dlrm.criteo import Rows

TABLES = tuple(f"C{column}" for column in range(1, text.CATEGORIES + 1))


@dataclass(frozen=True)
class Batch:
    """What the model eats. dense: float32 (B, 13); ids: int64 (26 · B,), table by table; offsets: int64
    (26 · B + 1,); labels: float32 (B,)."""

    dense: Tensor
    ids: Tensor
    offsets: Tensor
    labels: Tensor


def to_batch(rows: Rows, rows_per_table: int, device: str) -> Batch:
    """Integers x become log(1 + x), with 0 for missing and negative ones, as in the DLRM repository. A category
    becomes 1 + value mod (rows_per_table - 1); row 0 of each table is the missing value's."""
    dense = np.log1p(np.maximum(rows.integers, 0).astype(np.float32))
    missing = rows.categories == text.NO_CATEGORY
    ids = np.where(missing, 0, 1 + rows.categories % (rows_per_table - 1))
    return Batch(
        _on_device(dense, device),
        _on_device(np.ascontiguousarray(ids.T).reshape(-1), device),
        torch.arange(ids.size + 1, device=device),
        _on_device(rows.labels.astype(np.float32), device),
    )


def _on_device(array: np.ndarray[Any, Any], device: str) -> Tensor:
    """A GPU copies it from pinned memory while the host goes on."""
    tensor = torch.from_numpy(array)
    return tensor if device == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class DLRM(nn.Module):
    """Logits of a click. The dense layers are initialised from `seed` alone, whatever the embeddings are.

    `parameters()` of the bottom and top MLPs belong to a torch optimizer; the embeddings bring their own.
    """

    def __init__(self, embeddings: nn.Module, config: ModelConfig, *, seed: int) -> None:
        super().__init__()
        self.embeddings = embeddings
        width, vectors = config.embedding_dim, len(TABLES) + 1
        generator = torch.Generator("cpu").manual_seed(seed)  # the same layers on every device
        self.bottom = _mlp([text.INTEGERS, *config.bottom, width], generator)
        self.top = _mlp([width + vectors * (vectors - 1) // 2, *config.top, 1], generator)

    def forward(self, batch: Batch) -> Tensor:
        """float32 (B,)."""
        bottom = torch.relu(self.bottom(batch.dense))
        embedded = self.embeddings(batch.ids, batch.offsets)
        size, width = bottom.shape
        vectors = torch.cat([bottom, embedded], dim=1).view(size, len(TABLES) + 1, width)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        interactions = products.index_select(1, _pairs(len(TABLES) + 1, products.device))
        logits: Tensor = self.top(torch.cat([bottom, interactions], dim=1))
        return logits[:, 0]

    def dense_layers(self) -> nn.ModuleDict:
        """The part that a torch optimizer trains."""
        return nn.ModuleDict({"bottom": self.bottom, "top": self.top})


@functools.cache
def _pairs(vectors: int, device: torch.device) -> Tensor:
    """Which of the V · V products of vectors are interactions: int64 (V · (V - 1) / 2,). A constant, and no buffer of
    the model: DistributedDataParallel would send that to all processes before each forward."""
    with torch.inference_mode(False):  # else an evaluation that comes first would make it useless for training
        first, second = torch.tril_indices(vectors, vectors, offset=-1, device=device)
        return first * vectors + second


def _mlp(widths: list[int], generator: torch.Generator) -> nn.Sequential:
    """Linear layers with ReLU between them and the initial values of the DLRM paper's code."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        linear = nn.Linear(inputs, outputs, device="cpu")
        nn.init.normal_(linear.weight, std=(2 / (inputs + outputs)) ** 0.5, generator=generator)
        nn.init.normal_(linear.bias, std=(1 / outputs) ** 0.5, generator=generator)
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])
