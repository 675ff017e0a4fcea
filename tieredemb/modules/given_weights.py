"""Whole tables in a state dict that a module is to load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tieredemb.config import TableConfig


def given_weights(
    state_dict: Mapping[str, Any], keys: Sequence[str], tables: Sequence[TableConfig], unexpected_keys: list[str]
) -> tuple[dict[int, torch.Tensor], list[str]]:
    """The weights (rows, D) of `tables`, by their numbers, as far as they are under the `keys` of these, which are not
    unexpected then; and what is wrong with those that cannot be taken."""
    weights: dict[int, torch.Tensor] = {}
    problems = []
    for number, (key, table) in enumerate(zip(keys, tables, strict=True)):
        shape = table.num_embeddings, table.embedding_dim
        if key in unexpected_keys:
            unexpected_keys.remove(key)
        weight = state_dict.get(key)
        if weight is None:
            continue
        if not isinstance(weight, torch.Tensor) or weight.layout is not torch.strided or weight.is_meta:
            problems.append(f"{key} must be a dense tensor with content, got {type(weight).__name__}")
        elif tuple(weight.shape) != shape:
            problems.append(f"{key} has shape {tuple(weight.shape)}, the table has {shape}")
        else:
            weights[number] = weight
    return weights, problems
