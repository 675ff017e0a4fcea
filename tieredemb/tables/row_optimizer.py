"""What updates rows: the contract between a step and whoever knows the numbers of an update."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from tieredemb.lookup.optimizer import Hyperparameters

if TYPE_CHECKING:
    from tieredemb.tables.device_options import DeviceOptions
    from tieredemb.tables.group import DeviceGroup


class RowOptimizer(Protocol):
    """`FusedOptimizer`, whose update comes with the backward, or `FollowedOptimizer`, whose update comes with a torch
    optimizer's step."""

    on_device: DeviceOptions  # the options on their GPU

    @property
    def source(self) -> torch.optim.Optimizer | None:
        """The torch optimizer whose param groups have the options, if there is one."""

    @property
    def is_there(self) -> bool:
        """Whether gradients can be taken: not where a torch optimizer is to be followed that has yet to come."""

    @property
    def stepping(self) -> object:
        """While a step is applied, one object of all whose tables take it by the same numbers; None of others."""

    def look_for(self) -> bool:
        """Follows the torch optimizer that has the tables among its params, where one is to be followed; returns
        whether there is one."""

    def numbers(self, steps: tuple[int, ...], grads: Sequence[torch.Tensor]) -> Hyperparameters | None:
        """On the CPU: the numbers of the next step of tables that have taken so many `steps`, or None where they take
        none."""

    def scaling(self, grads: list[torch.Tensor]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """On a GPU: whether the step is to be skipped, and what gradients are divided by, both float32 (), or None.
        Does not synchronise."""

    def spoilt(self) -> torch.Tensor | None:
        """Float32 (T,): NaN for tables all of whose gradients were multiplied by what is not finite, those of rows that
        no batch reached included, else 0; or None. Does not synchronise."""

    def alike(self) -> Hashable:
        """What is equal of optimizers that give tables of equal rows, at equal steps, equal numbers."""

    def options_fingerprint(self, *, waits: bool) -> int:
        """Equal on ranks whose options are equal now: of 32 bits. `waits`: of what lies on a GPU, too, for which it
        waits."""

    @property
    def steps_fingerprint(self) -> int:
        """Equal on ranks whose torch optimizers have taken as many steps, of as many lookups, and had equal options at
        the last one: of 63 bits. 0 of a fused one, whose steps come with backwards."""

    def course(self) -> dict[str, object]:
        """What both are of, by name. May wait for a GPU."""

    def options_on(self, group: DeviceGroup) -> torch.Tensor:
        """On a GPU: what it knows of the options, float64 (`MOST_NUMBERS`,). Does not synchronise."""

    def upload(self) -> None:
        """Tells the GPU of the options as they are now, before a captured step is replayed. Does not synchronise."""

    def move(self) -> None:
        """Follows the tables to another device."""

    def options(self) -> dict[str, Any]:
        """lr, eps, … as numbers, for a checkpoint."""

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raises `ConfigError` unless `options` of a checkpoint can be taken over. Changes nothing."""

    def check_options_now(self) -> None:
        """Raises `ConfigError` unless its own options, as they are now, are such as an update takes."""

    def set_options(self, options: Mapping[str, Any]) -> None:
        """Takes over those of a checkpoint."""
