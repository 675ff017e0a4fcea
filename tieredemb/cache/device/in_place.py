"""Cold rows that kernels read and write where they are: no word to the host, whole steps fit a CUDA graph."""

from __future__ import annotations

from typing import Any

import torch

from tieredemb.cache.changes import ChangeBook
from tieredemb.cache.device.hot_rows import DeviceHotRows
from tieredemb.cache.device.moves import MOVE_BLOCKS, RowMoves
from tieredemb.cache.device.plan import BatchPlan, DevicePlan, OverflowRows
from tieredemb.cache.device.stream_order import SideStream
from tieredemb.cache.device.transfer import FINISHED, PendingTransfer, Transfer, slots_change_hands
from tieredemb.kernels.compiler import blocks_for
from tieredemb.kernels.streams import current_stream
from tieredemb.storage.base import ColdRows


class InPlace(Transfer):
    """Cold rows that kernels read and write where they are. Nothing synchronises: a transfer is finished once it was
    started. Rows without a slot stay in cold storage for as long as a ticket uses them.

    What needs homes but no rows runs beside the movement of rows, on a stream of its own.
    """

    def __init__(
        self,
        cold: ColdRows,
        hot: DeviceHotRows,
        plan: DevicePlan,
        moves: RowMoves,
        *,
        side: SideStream,
        changes: ChangeBook,
    ) -> None:
        """`changes`: those of plans."""
        self._hot = hot
        self._plan = plan
        self._moves = moves
        self._side = side
        self._changes = changes
        self._weight, self._state = cold.weight.ctypes.data, cold.state.ctypes.data

    def overflow(self, slotless: bool) -> OverflowRows:
        records = self._plan.records.table
        return OverflowRows(slotless, self._weight, self._state, records, records)

    def make_room(self, rows: int) -> None:
        self._plan.records.reserve(rows)

    def start(self, plan: BatchPlan, *, ahead: bool) -> PendingTransfer:
        missed, count, overflow = plan.missed, self._plan.missed, self.overflow(plan.slotless)
        with slots_change_hands(self._changes, missed):
            self._plan.place(plan.homes, missed, overflow)
            if plan.beside:
                self._side.mark()
            self._moves.swap(
                count, missed.n, missed.keys, missed.slots, missed.victims, self._plan.needed, self._weight,
                self._state, missed.untouched, scored=plan.scored,
            )  # fmt: skip
            self._moves.generate(
                count, missed.n, missed.keys, missed.slots, missed.untouched, overflow, some=self._plan.untouched
            )
        if plan.beside:
            self._side.run(plan.beside).wait(current_stream())
        return FINISHED

    def load(self, keys: torch.Tensor, slots: torch.Tensor) -> None:
        if len(keys):
            self._moves.load(keys, keys, slots, self._weight, self._state, self.overflow(False))

    def write_back(self, first_slot: int, slots: int, first_key: int | None) -> None:
        keys: Any = self._hot.key if first_key is None else 0
        self._moves.write_back(
            blocks_for(slots, 32, 4 * MOVE_BLOCKS), 0, slots, first_slot, first_key or 0, 0, keys, self._weight,
            self._state, 0, self._plan.moved,
        )  # fmt: skip
