"""Rows given at construction: what `from_pretrained` and `_weight` of both one-table modules check alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tieredemb.config import TableConfig, check_flag
from tieredemb.errors import ConfigError, ConfigTypeError, InvalidInputError
from tieredemb.tables.given_tensors import dense_numbers


def pretrained_arguments(
    embeddings: torch.Tensor, freeze: bool, names: Sequence[str], args: Sequence[Any], keywords: Mapping[str, Any]
) -> dict[str, Any]:
    """Constructor arguments for the rows `embeddings` (num_embeddings, embedding_dim): `args` are the values of the
    first `names`. Raises `ConfigError`."""
    embeddings = _rows("embeddings", embeddings)
    check_flag("freeze", freeze)
    if embeddings.dim() != 2:
        raise ConfigError(f"embeddings must have two dimensions, got shape {tuple(embeddings.shape)}")
    if freeze and keywords.get("optimizer") is not None:
        raise ConfigError("an optimizer was given for frozen embeddings; pass freeze=False to train them")
    if len(args) > len(names):
        raise ConfigError(f"from_pretrained takes at most {len(names) + 2} positional arguments")
    rows, width = embeddings.shape
    given = {"num_embeddings": rows, "embedding_dim": width, "_weight": embeddings}
    return given | dict(zip(names, args, strict=False)) | dict(keywords)


def given_rows(weight: torch.Tensor | None, table: TableConfig) -> torch.Tensor | None:
    """`weight`, where given, without its gradient. Raises `ConfigError` unless it can be read as rows of the table's
    shape."""
    if weight is None:
        return None
    shape, weight = (table.num_embeddings, table.embedding_dim), _rows("_weight", weight)
    if tuple(weight.shape) != shape:
        raise ConfigError(f"_weight has shape {tuple(weight.shape)}, the arguments say {shape}")
    return weight


def _rows(name: str, value: object) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise ConfigTypeError(f"{name} must be a tensor, got {type(value).__name__}; use torch.as_tensor")
    try:
        return dense_numbers(name, value)
    except InvalidInputError as error:
        raise ConfigError(str(error)) from error
