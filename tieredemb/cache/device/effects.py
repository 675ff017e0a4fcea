"""What plans enter in the ledger of a cache, as data. `DeviceCache.apply` enters it for each replay, of a recorded plan
or of a captured step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from tieredemb.cache.device.plan import BatchPlan, OverflowRows
from tieredemb.cache.tickets import Locked


class Opened(NamedTuple):
    """A batch that a replay leaves in flight, planned into the memory of an earlier one. `number`: counted from the
    last batch before · `homes`, `overflow`: see `DeviceTicket` · `deferred`: its plan, if that defers rows · `arrives`:
    whether the same replay fills these."""

    number: int
    homes: torch.Tensor
    overflow: OverflowRows
    deferred: BatchPlan | None = None
    arrives: bool = False


@dataclass(frozen=True)
class Effects:
    """What plans that are launched or replayed as one enter in the ledger, and what a replay relies on. `plans`: how
    many batches they plan · `opens`: the batches that a replay leaves in flight · `locked`: what the batches lock,
    counted from the last one before, if their tickets do not enter it · `fills`: whether a replay fills all deferred
    rows.

    `distance`: from the oldest batch in flight at the capture to the last batch before, and `before`: the ids locked
    then · `records`: address of the table of rows without a slot, which batches in flight must share."""

    plans: int = 0
    opens: tuple[Opened, ...] = ()
    locked: tuple[Locked, ...] = ()
    fills: bool = False
    distance: int = 0
    before: int = 0
    records: int = 0


NOTHING_PLANNED = Effects()
ONE_PLAN = Effects(plans=1)
