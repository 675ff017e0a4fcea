"""The contract between a step and the optimizer, which provides the hyperparameters of an update."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from tieredemb.lookup.optimizer import Hyperparameters

if TYPE_CHECKING:
    from tieredemb.tables.device_options import DeviceOptions
    from tieredemb.tables.group import DeviceGroup


class RowOptimizer(Protocol):
    """`FusedOptimizer`, which updates in the backward, or `FollowedOptimizer`, which updates in a torch optimizer's
    step."""

    on_device: DeviceOptions  # the options on their GPU

    @property
    def source(self) -> torch.optim.Optimizer | None:
        """The torch optimizer whose param groups have the options, if there is one."""

    @property
    def is_there(self) -> bool:
        """Whether gradients can be applied: not while a torch optimizer that is to be followed is still unknown."""

    @property
    def stepping(self) -> object:
        """While a step is applied, an object shared by all tables with equal hyperparameters; else None."""

    def look_for(self) -> bool:
        """If a torch optimizer is to be followed: looks for one that has the tables among its params, and follows it;
        returns whether there is one."""

    def numbers(self, steps: tuple[int, ...], grads: Sequence[torch.Tensor]) -> Hyperparameters | None:
        """On the CPU: the hyperparameters of the next step of tables that have taken `steps`, or None if they take
        none."""

    def scaling(self, grads: list[torch.Tensor]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """On a GPU: whether the step is to be skipped, and what gradients are divided by, both float32 (), or None.
        Does not synchronise."""

    def spoilt(self) -> torch.Tensor | None:
        """Float32 (T,): NaN for tables whose gradient was multiplied by a factor that is not finite, also in rows that
        no batch reached, else 0; or None. Does not synchronise."""

    def alike(self) -> Hashable:
        """A key, equal for optimizers that give equal hyperparameters for equal rows at equal steps."""

    def options_fingerprint(self, *, waits: bool) -> int:
        """A fingerprint of 32 bits, equal on ranks with equal present options. `waits`: includes options on a GPU, for
        which it waits."""

    @property
    def steps_fingerprint(self) -> int:
        """A fingerprint of 63 bits, equal on ranks whose torch optimizers have taken as many steps, of as many lookups,
        with equal options at the last one. 0 for a fused one, which steps in backwards."""

    def fingerprint_values(self) -> dict[str, object]:
        """What both fingerprints are made of, by name, for messages. May wait for a GPU."""

    def options_on(self, group: DeviceGroup) -> torch.Tensor:
        """On a GPU: the options there, float64 (`MOST_NUMBERS`,). Does not synchronise."""

    def upload(self) -> None:
        """Sends the present options to the GPU, before a captured step is replayed. Does not synchronise."""

    def move(self) -> None:
        """Follows the tables to another device."""

    def options(self) -> dict[str, Any]:
        """lr, eps, … as numbers, for a checkpoint."""

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raises `ConfigError` unless `options` of a checkpoint can be taken over. Changes nothing."""

    def check_options_now(self) -> None:
        """Raises `ConfigError` unless its present options are valid for an update."""

    def set_options(self, options: Mapping[str, Any]) -> None:
        """Takes over the options of a checkpoint."""
