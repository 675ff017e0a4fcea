"""A torch optimizer's param groups: whether what they say has changed, found without a look at any tensor, for which a
GPU would have to be waited for."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from operator import is_
from typing import Any

import torch

PARAMS = frozenset({"params", "param_names"})  # keys of a group that are not options


def options_in(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a param group, without its params."""
    return {name: value for name, value in group.items() if name not in PARAMS}


def is_plain(values: Iterable[object]) -> bool:
    """Whether no value is, or holds, what may change in place, as a tensor does."""
    for value in values:
        if isinstance(value, tuple):
            if not is_plain(value):
                return False
        elif value is not None and not isinstance(value, bool | int | float | str):
            return False
    return True


def is_same(group: Mapping[str, Any], options: Mapping[str, Any]) -> bool:
    """Whether a param group has the `options` that it had before, which were plain."""
    if len(group) - len(PARAMS & group.keys()) != len(options):
        return False
    for name, value in group.items():
        before = options.get(name, options)
        if value is before or name in PARAMS:
            continue
        if type(value) is not type(before) or (type(value) is tuple and not is_plain(value)) or value != before:
            return False
    return True


class SeenGroups:
    """The param groups of an `optimizer`, as they are now. It does not keep that alive."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._are_plain = True
        self._groups: list[tuple[dict[str, Any], list[Any], list[Any]]] = []  # each, its values, its params
        for group in optimizer.param_groups:
            self._are_plain &= is_plain(options_in(group).values())
            self._groups.append((group, [*group.values()], [*group["params"]]))

    def are_there(self) -> bool:
        """Whether they are the very same still, in each value and param. Never where one holds a tensor, which may
        change in place."""
        optimizer = self._optimizer()
        if optimizer is None or not self._are_plain:
            return False
        groups = optimizer.param_groups
        if len(groups) != len(self._groups):
            return False
        for group, (known, values, params) in zip(groups, self._groups, strict=True):
            if group is not known or len(group) != len(values) or not all(map(is_, group.values(), values)):
                return False
            if len(group["params"]) != len(params) or not all(map(is_, group["params"], params)):
                return False
        return True
