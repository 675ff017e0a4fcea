"""State dicts of optimizers as a caller gives them: their parts, checked before any is used."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

from tieredemb.config import is_number, plain
from tieredemb.errors import InvalidInputError, shown
from tieredemb.lookup.histories import MOST_STEPS
from tieredemb.tables.given_tensors import dense_numbers

MAX_STEPS = 2**53  # float64 counts steps
MAX_DENSE_STEPS = MOST_STEPS - 2**28  # so that as many are left as a history can have in memory


def state_of(state_dict: Any) -> Mapping[Hashable, Any]:
    """The states in a state dict, by the numbers of params. Raises `InvalidInputError`."""
    state = _mapping("the state dict", state_dict).get("state")
    return _mapping("'state' of the state dict", state)


def groups_of(state_dict: Any) -> Sequence[Mapping[str, Any]]:
    """The param groups in a state dict, each with a list of `params`. Raises `InvalidInputError`."""
    groups = _mapping("the state dict", state_dict).get("param_groups")
    if not isinstance(groups, list | tuple):
        raise InvalidInputError(f"'param_groups' of the state dict must be a list of dicts, got {shown(groups)}")
    for group in groups:
        params = _mapping("a param group of the state dict", group).get("params")
        if not isinstance(params, list | tuple) or not all(isinstance(each, Hashable) for each in params):
            raise InvalidInputError(f"'params' of a param group must be a list of their numbers, got {shown(params)}")
        if odd := [name for name in group if not isinstance(name, str)]:
            raise InvalidInputError(f"the options of a param group must have names, got {shown(odd[0])}")
    return groups


def only_group(state_dict: Any, tables: int) -> tuple[list[Mapping[str, Any]], Mapping[str, Any]]:
    """The entries of as many tables as an optimizer has that has one param group, in their order, and that group.
    Raises `InvalidInputError`."""
    groups, state = groups_of(state_dict), state_of(state_dict)
    if len(groups) != 1 or len(groups[0]["params"]) != tables:
        sizes = [len(each["params"]) for each in groups]
        raise InvalidInputError(
            f"the state dict must have one param group of {tables} tables, it has {len(groups)} of {sizes} params"
        )
    entries = [checked_entry(state.get(key, {}), f"table {number}") for number, key in enumerate(groups[0]["params"])]
    return entries, groups[0]


def checked_entry(entry: Any, whose: str) -> Mapping[str, Any]:
    """What a state dict holds of a param. Raises `InvalidInputError` unless it is a dict."""
    return _mapping(f"the optimizer's state of {whose}", entry)


def loaded_steps(value: Any, table: str, *, most: int) -> int:
    """Steps taken, from 0 to `most`, as optimizers keep them: a number, or a tensor of one. Raises
    `InvalidInputError`."""
    number = value
    if isinstance(value, torch.Tensor):
        number = dense_numbers(f"'step' of table {table!r}", value)
        number = number.item() if number.numel() == 1 else value
    number = plain(number)
    if not is_number(number) or not 0 <= number <= most or number != int(number):
        raise InvalidInputError(
            f"'step' of table {table!r} must be a whole number of steps from 0 to {most}, got {shown(value)}"
        )
    return int(number)


def _mapping(name: str, value: Any) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise InvalidInputError(f"{name} must be a dict, got {shown(value)}")
    return value
