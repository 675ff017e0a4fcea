"""The options of a param group on a GPU: sent when they have changed, and not at every step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tieredemb.kernels.streams import outside_capture
from tieredemb.lookup.optimizer import MOST_NUMBERS, check_rate
from tieredemb.tables.group import DeviceGroup
from tieredemb.tables.table_set import TableSet


class DeviceOptions:
    """The options of the tables' optimizer on their GPU; on the CPU nothing is sent.

    Made with the optimizer: memory taken while a step is captured would belong to the graph.
    """

    def __init__(self, tables: TableSet) -> None:
        device = tables.config.device
        self._tables = tables
        self._numbers: torch.Tensor | None = None
        self._skipped: torch.Tensor | None = None
        if device.type == "cuda":
            self._numbers = torch.zeros(MOST_NUMBERS, dtype=torch.float64, device=device)
            self._skipped = torch.zeros((), dtype=torch.float32, device=device)
        self.sent: dict[str, Any] | None = None  # the values sent last: another object each time
        self.made_from: object = None  # what the caller has made these values from

    @property
    def numbers(self) -> torch.Tensor:
        """float64 (`MOST_NUMBERS`,), of which the learning rate is the first; see `device_numbers`."""
        assert self._numbers is not None
        return self._numbers

    @property
    def skipped(self) -> torch.Tensor:
        """float32 (), whether the next step is to be refused; see `refuse_spoilt`."""
        assert self._skipped is not None
        return self._skipped

    @property
    def notes_steps(self) -> bool:
        """Whether `note_step` has an effect."""
        return any(isinstance(each, DeviceGroup) and each.is_dense for each in self._tables.groups)

    def note_step(self) -> None:
        """The next step will use the options that were sent last."""
        for each in self._tables.groups:
            if isinstance(each, DeviceGroup):
                each.note_step()

    def send(self, options: Mapping[str, Any]) -> None:
        """Takes over `options`, numbers by name. Does not synchronise, and is no part of a capture. Raises
        `ConfigError` for a learning rate that is negative or no number."""
        self.note_step()
        if self.sent == options:
            return
        check_rate(options["lr"])
        first = self._tables.groups[0]
        if self._numbers is not None and isinstance(first, DeviceGroup):
            with first.cache.using(), outside_capture(first.config.device):
                first.lookup.set_options(self._numbers, options)
        self.sent = dict(options)
