"""What plans do to the books of a cache, as data. `DeviceCache.apply` enters it for each replay, of a recorded plan or
of a captured step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from tieredemb.cache.device.plan import BatchPlan, OverflowRows
from tieredemb.cache.tickets import Locked


class Opened(NamedTuple):
    """A batch that a replay leaves in flight, planned to where an earlier one was. `number`: counted from the last
    batch before · `homes`, `overflow`: see `DeviceTicket` · `deferred`: its plan, where that leaves rows for later, and
    `arrives`: whether these come in the same replay."""

    number: int
    homes: torch.Tensor
    overflow: OverflowRows
    deferred: BatchPlan | None = None
    arrives: bool = False


@dataclass(frozen=True)
class Effects:
    """What plans that are launched or replayed as one do to the books, and what a replay relies on. `plans`: how many
    batches they plan · `opens`: those that a replay leaves in flight · `locked`: what the batches lock, counted from
    the last one before, where that is not entered with their tickets · `fills`: whether a replay fills all rows that
    were left for it.

    `distance`: of the last batch before from the oldest one in flight at the capture, and `before`: the ids that were
    locked then · `records`: address of the table of rows without a slot, which batches in flight have to share."""

    plans: int = 0
    opens: tuple[Opened, ...] = ()
    locked: tuple[Locked, ...] = ()
    fills: bool = False
    distance: int = 0
    before: int = 0
    records: int = 0


NOTHING_PLANNED = Effects()
ONE_PLAN = Effects(plans=1)
