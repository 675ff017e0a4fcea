"""What a GPU was told of the options of many optimizers, told again before a replay where any has changed: asked as
one, in a tenth of the time that each of many tables takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tieredemb.tables.device_options import DeviceOptions
from tieredemb.tables.param_groups import SeenGroups
from tieredemb.tables.row_optimizer import RowOptimizer


class _Told(NamedTuple):
    """Of one `optimizer`, when the GPU was told last: what its `options` there were made of (`said`), from the param
    groups of which torch optimizer."""

    optimizer: RowOptimizer
    source: torch.optim.Optimizer | None
    options: DeviceOptions
    said: object


class OptionsTold:
    """Of the `optimizers` whose updates a captured step holds."""

    def __init__(self, optimizers: Sequence[RowOptimizer]) -> None:
        self._optimizers = optimizers
        self._told: list[_Told] | None = None
        self._groups: list[SeenGroups] = []
        self._dense: list[DeviceOptions] = []

    def tell(self) -> None:
        """A step is about to come: as `upload` of each. Does not synchronise. Raises `ConfigError` as that does."""
        if self._told is not None and self._is_as_told(self._told):
            for options in self._dense:
                options.note_step()
            return
        self._told = None
        for optimizer in self._optimizers:
            optimizer.upload()
        told = [_Told(each, each.source, each.on_device, each.on_device.said) for each in self._optimizers]
        sources = {id(each.source): each.source for each in told}
        self._groups = [SeenGroups(source) for source in sources.values() if source is not None]
        self._dense = [each.options for each in told if each.options.notes_steps]
        self._told = told

    def _is_as_told(self, told: list[_Told]) -> bool:
        for optimizer, source, options, said in told:
            if optimizer.source is not source or optimizer.on_device is not options or options.said is not said:
                return False
        return all(groups.are_there() for groups in self._groups)
