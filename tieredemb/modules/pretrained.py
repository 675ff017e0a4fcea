"""Rows given at construction: what `from_pretrained` and `_weight` of both one-table modules check alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tieredemb.errors import ConfigError


def pretrained_arguments(
    embeddings: torch.Tensor, freeze: bool, names: Sequence[str], args: Sequence[Any], keywords: Mapping[str, Any]
) -> dict[str, Any]:
    """Constructor arguments for the rows `embeddings` (num_embeddings, embedding_dim): `args` are the values of the
    first `names`. Raises `ConfigError`."""
    if embeddings.dim() != 2:
        raise ConfigError(f"embeddings must have two dimensions, got shape {tuple(embeddings.shape)}")
    if freeze and keywords.get("optimizer") is not None:
        raise ConfigError("an optimizer was given for frozen embeddings; pass freeze=False to train them")
    if len(args) > len(names):
        raise ConfigError(f"from_pretrained takes at most {len(names) + 2} positional arguments")
    rows, width = embeddings.shape
    given = {"num_embeddings": rows, "embedding_dim": width, "_weight": embeddings}
    return given | dict(zip(names, args, strict=False)) | dict(keywords)


def check_rows(weight: torch.Tensor | None, num_embeddings: int, embedding_dim: int) -> None:
    """Raises `ConfigError` unless `weight`, where given, has the shape that the arguments say."""
    if weight is not None and tuple(weight.shape) != (num_embeddings, embedding_dim):
        raise ConfigError(
            f"_weight has shape {tuple(weight.shape)}, the arguments say {(num_embeddings, embedding_dim)}"
        )
