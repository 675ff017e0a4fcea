"""Cold rows that kernels read and write in place: nothing waits for the host, and whole steps fit a CUDA graph."""

from __future__ import annotations

import functools
from typing import Any

import torch

from tieredemb.cache.changes import IntentLog
from tieredemb.cache.device.hot_rows import DeviceHotRows
from tieredemb.cache.device.moves import MOVE_BLOCKS, RowMoves
from tieredemb.cache.device.plan import BatchPlan, Beside, DevicePlan, OverflowRows, Phase
from tieredemb.cache.device.stream_order import SideStream
from tieredemb.cache.device.transfer import Transfer, slots_change_hands
from tieredemb.kernels.compiler import blocks_for
from tieredemb.kernels.constants import PUBLISH
from tieredemb.kernels.streams import current_stream
from tieredemb.storage.base import ColdRows


class InPlace(Transfer):
    """Cold rows that kernels read and write in place. Nothing synchronises: `start` launches all phases. Rows without a
    slot stay in cold storage as long as a ticket uses them.

    Work that needs homes but no rows runs on a side stream while rows move.
    """

    can_defer = True

    def __init__(
        self,
        cold: ColdRows,
        hot: DeviceHotRows,
        plan: DevicePlan,
        moves: RowMoves,
        *,
        side: SideStream,
        changes: IntentLog,
    ) -> None:
        """`changes`: the log of plans."""
        self._hot = hot
        self._plan = plan
        self._moves = moves
        self._side = side
        self._changes = changes
        self._weight, self._state = cold.weight.ctypes.data, cold.state.ctypes.data

    def overflow(self, uncached: bool) -> OverflowRows:
        records = self._plan.records.table
        return OverflowRows(uncached, self._weight, self._state, records, records)

    def reserve(self, rows: int) -> None:
        self._plan.records.reserve(rows)

    # --- phases -----------------------------------------------------------------------------------------------------

    def start(self, plan: BatchPlan) -> None:
        with slots_change_hands(self._changes, plan.missed):
            self._plan.place(plan.missed, lag=plan.lag)
            if plan.beside:
                # in a graph, where events are free for the host, also beside the lookup
                outlasts = torch.cuda.is_current_stream_capturing() and not plan.kind.ahead
                self._side.mark()
                done = self._side.run(functools.partial(self._publish, plan, None if outlasts else plan.beside))
                if outlasts:
                    plan.side_done = self._side.run(plan.beside)
                self._fill(plan)
                done.wait(current_stream())
            else:
                self._publish(plan)
                self._fill(plan)
        plan.phase = Phase.MOVED

    def place(self, plan: BatchPlan, lag: int) -> None:
        if plan.phase >= Phase.PLACED:
            return
        with slots_change_hands(self._changes, plan.missed):
            self._plan.place(plan.missed, lag=lag)
            plan.phase = Phase.PLACED

    def publish(self, plan: BatchPlan) -> None:
        if plan.phase >= Phase.PUBLISHED:
            return
        with slots_change_hands(self._changes, plan.missed):
            self._publish(plan)
            if plan.beside:
                self._side.mark()
                plan.side_done = self._side.run(plan.beside)
            plan.phase = Phase.PUBLISHED
        if plan.left_at is Phase.PUBLISHED:  # `move` may be in another capture
            self._wait_for_side(plan)

    def move(self, plan: BatchPlan) -> None:
        with slots_change_hands(self._changes, plan.missed):
            self._fill(plan)
        if not torch.cuda.is_current_stream_capturing():
            plan.missed.record_stream()
        self._wait_for_side(plan)
        plan.phase = Phase.MOVED

    def _publish(self, plan: BatchPlan, beside: Beside | None = None) -> None:
        self._plan.resolve(plan.homes, plan.missed, self.overflow(plan.uncached), PUBLISH)
        if beside:
            beside()

    def _fill(self, plan: BatchPlan) -> None:
        self._moves.swap(
            plan.missed, plan.missed.n, self._weight, self._state, scored=plan.kind.scored, in_place=True,
            moving=plan.moving,
        )  # fmt: skip
        self._moves.generate_missed(plan.missed, plan.missed.n, self.overflow(plan.uncached))

    def _wait_for_side(self, plan: BatchPlan) -> None:
        if plan.side_done is not None:
            plan.side_done.wait(current_stream())
            plan.side_done = None

    # --- whole-cache calls ------------------------------------------------------------------------------------------

    def load(self, keys: torch.Tensor, slots: torch.Tensor) -> None:
        if len(keys):
            self._moves.load(keys, keys, slots, self._weight, self._state, self.overflow(False))

    def write_back(self, first_slot: int, slots: int, first_key: int | None) -> None:
        keys: Any = self._hot.key if first_key is None else 0
        self._moves.write_back(
            blocks_for(slots, 32, 4 * MOVE_BLOCKS), 0, slots, first_slot, first_key or 0, 0, keys, self._weight,
            self._state, 0, self._plan.moved,
        )  # fmt: skip
