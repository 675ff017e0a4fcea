"""The fused optimizer of a sharded collection: one param group for the tables of all widths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tieredemb.errors import ConfigError
from tieredemb.sharding.header import Phase
from tieredemb.sharding.states import RowStates, refuse_names
from tieredemb.tables.fused_optimizer import FusedOptimizer
from tieredemb.tables.given_states import only_group
from tieredemb.tables.param_groups import options_in
from tieredemb.tables.row_state import totals_of


class ShardedOptimizer(torch.optim.Optimizer):
    """Settings of the update that a sharded collection's backward applies; see `FusedOptimizer`. Schedulers change
    `param_groups[0]["lr"]` as usual, on all ranks alike. `step()` does nothing.

    >>> scheduler = torch.optim.lr_scheduler.StepLR(collection.fused_optimizer, step_size=10)    # doctest: +SKIP
    """

    def __init__(self, of_widths: Sequence[FusedOptimizer], states: Callable[[], RowStates]) -> None:
        """`states`: returns the state of rows, once the ranks have agreed to build the collection."""
        self._of_widths, self._states = list(of_widths), states
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
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Does nothing but call `closure`: backward has applied the step."""
        return self._of_widths[0].step(closure)

    def attach_grad_scaler(self, scaler: torch.amp.GradScaler) -> None:
        """Makes the backward divide by the scale of `scaler`; see `FusedOptimizer.attach_grad_scaler`. To be called on
        all ranks: an infinite gradient of one rank prevents the update on all."""
        for each in self._of_widths:
            each.attach_grad_scaler(scaler)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused after construction: the tables are the parameters."""
        if getattr(self, "param_groups", None):
            raise ConfigError("a fused optimizer has one param group, its module's tables; make another module instead")
        torch.optim.Optimizer.add_param_group(self, param_group)

    def state_dict(self) -> dict[str, Any]:
        """As `FusedOptimizer.state_dict`, of whole tables, on rank 0; on the others the param group alone. A
        collective. Raises `StorageFullError` where memory cannot hold the state."""
        refuse_names()
        states, state = self._states(), {}
        states.announce(Phase.READ_STATE)
        for table in states.tables:
            config = self._of_widths[0].config
            steps, entry = states.gathered(config, table)
            if states.exchange.rank == 0:  # steps even if there is no state: random rounding reads them
                step = torch.tensor(float(steps), dtype=torch.float32, device="cpu")
                state[table] = {"step": step, **totals_of(config, steps), **entry}
        groups = [self._of_widths[0].options() | {"params": [*states.tables]}]
        return {"state": state, "param_groups": groups, **states.elsewhere()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads the result of `state_dict`, of this collection or of one in one process, or that of torch's optimizer
        of the same name for these tables: given on all ranks, or the state on rank 0 alone and the param group on all
        of them. A collective. Raises `InvalidInputError` or `ConfigError` on all ranks before anything changes."""
        states, first, options = self._states(), self._of_widths[0], {}

        def given() -> dict[int, Mapping[str, Any]]:
            entries, group = only_group(state_dict, len(states.tables))
            options.update(first.loadable_options(group))
            return dict(enumerate(entries))

        loaded = states.taken(first.config, state_dict, given)
        states.set(loaded, lambda: first.set_options(options))
