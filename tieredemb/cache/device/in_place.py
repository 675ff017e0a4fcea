"""Cold rows that kernels read and write where they are: no word to the host, whole steps fit a CUDA graph."""

from __future__ import annotations

from typing import Any

import torch

from tieredemb.cache.device.plan import Away, DevicePlan, Missed
from tieredemb.cache.device.rows import DeviceRows
from tieredemb.cache.device.transfer import MOVE_BLOCKS, MOVE_THREADS, Beside, Transfer
from tieredemb.kernels.compiler import blocks_for
from tieredemb.storage.base import ColdRows
from tieredemb.storage.initial import InitialRows


class InPlace(Transfer):
    """Cold rows that kernels read and write where they are. Nothing synchronises.

    What needs homes but no rows runs beside the movement of rows, on a stream of its own.
    """

    in_place = True

    def __init__(self, cold: ColdRows, hot: DeviceRows, initial: InitialRows, plan: DevicePlan, *apart: Any) -> None:
        super().__init__(cold, hot, initial, plan, *apart)
        self._weight, self._state = cold.weight.ctypes.data, cold.state.ctypes.data

    def away(self, slotless: bool) -> Away:
        return Away(slotless, self._weight, self._state, self.plan.records.table)

    def make_room(self, rows: int) -> None:
        self.plan.records.reserve(rows)

    def bring(
        self,
        missed: Missed,
        homes: torch.Tensor,
        asked: Any = None,
        *,
        slotless: bool,
        scored: bool,
        beside: Beside | None,
    ) -> None:
        count, keys, slots, away = self.plan.missed, missed.keys, missed.slots, self.away(slotless)
        with self._slots_change_hands(missed):
            self.plan.place(homes, missed, away)
            if beside:
                self.mark()
            self._swap_rows(
                count, missed.n, keys, slots, missed.victims, self.plan.needed, self._weight, self._state,
                missed.untouched, scored=scored,
            )  # fmt: skip
            self._generate(count, missed.n, keys, slots, missed.untouched, away, some=self.plan.untouched)
        if beside:
            self.aside(beside).wait()

    def load(self, keys: torch.Tensor, slots: torch.Tensor) -> None:
        if len(keys) == 0:
            return
        self._load_rows(keys, keys, slots, self._weight, self._state)
        self._score_loaded(slots)

    def write_back(self, first_slot: int, slots: int, first_key: int | None) -> None:
        hot = self.hot
        keys: Any = hot.key if first_key is None else 0
        self._write_back(
            blocks_for(slots, 32, 4 * MOVE_BLOCKS), MOVE_THREADS, 0, slots, first_slot, first_key or 0, 0, keys,
            hot.weight, hot.state, hot.score, hot.dirty, self._weight, self._state, 0, self.plan.moved,
        )  # fmt: skip
