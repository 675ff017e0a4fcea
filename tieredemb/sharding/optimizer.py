"""The fused optimizer of a sharded collection: one param group for the tables of all widths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tieredemb.errors import ConfigError, UnsupportedError
from tieredemb.tables.fused_optimizer import FusedOptimizer
from tieredemb.tables.param_groups import options_in


class ShardedOptimizer(torch.optim.Optimizer):
    """Settings of the update that a sharded collection's backward applies; see `FusedOptimizer`. Schedulers change
    `param_groups[0]["lr"]` as usual, on all ranks alike. `step()` does nothing. The state of the rows is saved by the
    module's `save_checkpoint`."""

    def __init__(self, of_widths: Sequence[FusedOptimizer]) -> None:
        self._of_widths = list(of_widths)
        params = [param for each in of_widths for param in each.param_groups[0]["params"]]
        super().__init__(params, options_in(of_widths[0].param_groups[0]))
        for each in of_widths:
            each.param_groups = self.param_groups

    @property
    def is_scaled(self) -> bool:
        """Whether an enabled scaler is attached."""
        return self._of_widths[0].is_scaled

    @property
    def found_inf(self) -> bool | torch.Tensor:
        """Whether the last backward met a gradient that is not finite, on any rank, and so updated nothing."""
        return self._of_widths[0].found_inf

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Does nothing but call `closure`: backward has applied the step."""
        return self._of_widths[0].step(closure)

    def attach_grad_scaler(self, scaler: torch.amp.GradScaler) -> None:
        """Makes the backward divide by the scale of `scaler`; see `FusedOptimizer.attach_grad_scaler`. To be done on
        all ranks: an infinity that one of them meets keeps the tables of all from the update."""
        for each in self._of_widths:
            each.attach_grad_scaler(scaler)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused after construction: the tables are the parameters."""
        if getattr(self, "param_groups", None):
            raise ConfigError("a fused optimizer has one param group, its module's tables; make another module instead")
        torch.optim.Optimizer.add_param_group(self, param_group)

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """Not of rows that lie on several ranks: raises `UnsupportedError`."""
        raise UnsupportedError(
            "the optimizer's state lies on several ranks; save it with the rows, by save_checkpoint(directory)"
        )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See `state_dict`."""
        raise UnsupportedError("the optimizer's state lies on several ranks; load it by load_checkpoint(directory)")
