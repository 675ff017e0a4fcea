"""Cold rows that kernels read and write where they are: no word to the host, whole steps fit a CUDA graph."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch

from tieredemb.cache.changes import IntentLog
from tieredemb.cache.device.hot_rows import DeviceHotRows
from tieredemb.cache.device.moves import MOVE_BLOCKS, RowMoves
from tieredemb.cache.device.plan import BatchPlan, DevicePlan, Missed, OverflowRows
from tieredemb.cache.device.stream_order import SideStream
from tieredemb.cache.device.transfer import FINISHED, DeferredTransfer, PendingTransfer, Transfer, slots_change_hands
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
        changes: IntentLog,
    ) -> None:
        """`changes`: those of plans."""
        self._hot = hot
        self._plan = plan
        self._moves = moves
        self._side = side
        self._changes = changes
        self._weight, self._state = cold.weight.ctypes.data, cold.state.ctypes.data

    def overflow(self, uncached: bool) -> OverflowRows:
        records = self._plan.records.table
        return OverflowRows(uncached, self._weight, self._state, records, records)

    def make_room(self, rows: int) -> None:
        self._plan.records.reserve(rows)

    def start(self, plan: BatchPlan) -> PendingTransfer:
        with self.changing(plan):
            self.place(plan, plan.lag)
            if plan.beside:
                self._side.mark()
                done = self._side.run(functools.partial(self._publish, plan))
                self._bring(plan)
                done.wait(current_stream())
            else:
                self._publish(plan)
                self._bring(plan)
        return FINISHED

    def changing(self, plan: BatchPlan) -> contextlib.AbstractContextManager[None]:
        """What is done inside belongs together."""
        return slots_change_hands(self._changes, plan.missed)

    def place(self, plan: BatchPlan, lag: int) -> None:
        self._plan.place(plan.missed, lag=lag)

    def _publish(self, plan: BatchPlan) -> None:
        self._plan.publish(plan.homes, plan.missed, self.overflow(plan.uncached))
        if plan.beside:
            plan.beside()

    def _bring(self, plan: BatchPlan) -> None:
        self._moves.swap(plan.missed, plan.missed.n, self._weight, self._state, scored=plan.kind.scored, in_place=True)
        self._moves.generate_missed(plan.missed, plan.missed.n, self.overflow(plan.uncached))

    # --- rows left for later ----------------------------------------------------------------------------------------

    def deferred(self, plan: BatchPlan) -> DeferredTransfer:
        return DeferredInPlace(self, plan)

    def publish_deferred(self, plan: BatchPlan) -> torch.cuda.Event | None:
        """Returns what comes once that is done which needs homes but no rows."""
        self._plan.publish(plan.homes, plan.missed, self.overflow(plan.uncached))
        if not plan.beside:
            return None
        self._side.mark()
        return self._side.run(plan.beside)

    def bring_deferred(self, plan: BatchPlan) -> None:
        """Brings the rows of a plan that were left for later."""
        with self.changing(plan):
            self._bring(plan)
        if not torch.cuda.is_current_stream_capturing():
            plan.missed.follow()

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


class DeferredInPlace(DeferredTransfer):
    """Slots pass over at once, unless rows may be left without one: then the cache may have no room for those of three
    batches, and victims are chosen as late as can be, when fewer rows are locked."""

    def __init__(self, transfer: InPlace, plan: BatchPlan) -> None:
        self._transfer = transfer
        self._plan = plan
        self._is_placed = self._is_published = False
        self._aside: torch.cuda.Event | None = None

    @property
    def missed(self) -> Missed:
        return self._plan.missed

    @property
    def defers_places(self) -> bool:
        return self._plan.uncached

    def place(self, lag: int) -> None:
        if not self._is_placed:
            with self._transfer.changing(self._plan):
                self._transfer.place(self._plan, lag)
                self._is_placed = True

    def publish(self) -> None:
        if self._is_published:
            return
        with self._transfer.changing(self._plan):
            self._aside = self._transfer.publish_deferred(self._plan)
            self._is_published = True
        if self._aside is not None and not self.defers_places:  # `finish` may be another capture's
            self._aside.wait(current_stream())
            self._aside = None

    def finish(self) -> None:
        self._transfer.bring_deferred(self._plan)
        if self._aside is not None:
            self._aside.wait(current_stream())
            self._aside = None
        self.is_finished = True

    def rebind(self) -> DeferredInPlace:
        rebound = DeferredInPlace(self._transfer, self._plan)
        rebound._is_placed = rebound._is_published = not self.defers_places
        return rebound
