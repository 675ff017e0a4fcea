"""Whole tables in a state dict that a module is to load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tieredemb.config import TableConfig
from tieredemb.errors import InvalidInputError
from tieredemb.step.table_tensor import TableTensor
from tieredemb.tables.given_tensors import dense_numbers


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
        if state_dict.get(key) is None:
            continue
        try:
            given = state_dict[key]
            weight = dense_numbers(key, given.detached().clone() if isinstance(given, TableTensor) else given)
        except InvalidInputError as error:
            problems.append(str(error))
            continue
        if tuple(weight.shape) == shape:
            weights[number] = weight
        else:
            problems.append(f"{key} has shape {tuple(weight.shape)}, the table has {shape}")
    return weights, problems
