"""A batch that a GPU's cache has planned, in flight."""

from __future__ import annotations

from typing import Any

import torch

from tieredemb.cache.device.plan import BatchPlan, OverflowRows
from tieredemb.cache.tickets import Flight, TicketLedger


class DeviceTicket(Flight):
    """A planned batch in flight on a GPU. `homes`: int32 (N,), the slot of each occurrence, −2 − r for a row without
    a slot, or `DROPPED` · `overflow`: where such rows were when the batch was planned, if there may be any · `ready`:
    the event after the rows are filled, if another stream than the computing one fills them · `side_done`: the event
    after work beside the plan, if the lookup need not wait for it · `is_complete`: whether the plan is finished, and
    `failed`: whether it has failed · `plan`: of deferred rows, or a recorded plan with a part of the host."""

    def __init__(self, batch: int, homes: torch.Tensor, overflow: OverflowRows, tickets: TicketLedger) -> None:
        super().__init__(batch, tickets)
        self.homes = homes
        self.overflow = overflow
        self.kept: tuple[Any, ...] = (homes,)  # what lives as long as it, and is counted as the plan's
        self.ready: torch.cuda.Event | None = None
        self.side_done: torch.cuda.Event | None = None
        self.is_complete = True
        self.plan: BatchPlan | None = None

    def size_bytes(self) -> int:
        return sum(value.nbytes for value in self.kept if isinstance(value, torch.Tensor))
