"""Cold rows that kernels read and write where they are: no word to the host, whole steps fit a CUDA graph."""

from __future__ import annotations

from typing import Any

import torch

from tieredemb.cache.device_plan import Away, DevicePlan, Missed
from tieredemb.cache.device_rows import DeviceRows
from tieredemb.cache.transfer import MOVE, MOVE_BLOCKS, MOVE_THREADS, Beside, Transfer
from tieredemb.kernels.compiler import blocks_for, kernel
from tieredemb.storage.base import ColdRows
from tieredemb.storage.initial import InitialRows

RETURN_BLOCKS = 16  # of rows that go back beside other work
LEAVING_SHARE = 9  # ids for each row that leaves through the buffer: what a step's other work hides. Rows both ways
# at once cross PCIe at 510 M requests a second, one way alone at 380–440 M, so the others go while the fill comes


class _Leaving:
    """Rows on their way back: a buffer on the device, and the stream that empties it."""

    def __init__(self, cold: ColdRows, device: torch.device) -> None:
        self._layout, self._device = cold.layout, device
        # before what is queued meanwhile, or it would run after that
        self.stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self.filled = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.emptied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.reserve(0)

    def reserve(self, rows: int) -> None:
        """Makes the buffer hold `rows` rows. The current stream must have waited for `emptied`."""
        layout, device = self._layout, self._device
        self.rows = rows
        self.places = (
            torch.empty((rows, layout.width), dtype=layout.dtype, device=device),
            torch.empty((rows, layout.state_width + 1), dtype=torch.int32, device=device),
            torch.empty(rows, dtype=torch.int64, device=device),  # keys
            torch.empty(rows, dtype=torch.uint8, device=device),  # whether dirty
            torch.zeros(1, dtype=torch.int32, device=device),  # how many
        )

    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.places)


class InPlace(Transfer):
    """Cold rows that kernels read and write where they are. Nothing synchronises.

    What needs homes but no rows runs beside the movement of rows, on a stream of its own.

    Some victims leave their slots for a buffer, and go back from there on a stream of their own while the new rows are
    looked up and updated. The next plan's rows are moved once the buffer is empty, so cold storage is never behind when
    it is read. A captured step writes all back at once: its end would have to wait for the other stream.
    """

    def __init__(self, cold: ColdRows, hot: DeviceRows, initial: InitialRows, plan: DevicePlan) -> None:
        super().__init__(cold, hot, initial, plan)
        self._weight, self._state = cold.weight.ctypes.data, cold.state.ctypes.data
        self._leaving = _Leaving(cold, self.device)
        self._side = torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]
        self._settled = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._aside = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._captured = False  # a graph that has been may be replayed at any time: nothing may be on its way then
        self._leave = kernel(MOVE, "rows_leave", "p p p any f32 i32 u8 any i32 i64 u8 i32 i p", *self._flags)
        self._return = kernel(MOVE, "rows_return", "any i32 i64 u8 i32 p p", *self._flags)

    def away(self, slotless: bool) -> Away:
        return Away(slotless, self._weight, self._state, self.plan.records.table)

    def bring(
        self, missed: Missed, homes: torch.Tensor, *, slotless: bool, scored: bool, beside: Beside | None
    ) -> None:
        self.plan.settle(homes, missed, self.away(slotless), commit=True)
        if beside:
            self._settled.record(torch.cuda.current_stream())
        self._captured = self._captured or torch.cuda.is_current_stream_capturing()
        gone = 0 if self._captured else missed.n // LEAVING_SHARE
        if gone:
            self._send_off(missed, gone)
        count, keys, slots = self.plan.missed, missed.keys, missed.slots
        self._swap_rows(
            count, missed.n, keys, slots, missed.victims, gone, self._weight, self._state, missed.untouched,
            scored=scored,
        )  # fmt: skip
        self._generate(count, missed.n, keys, slots, missed.untouched)
        if gone:
            self._send_back(gone)
        if beside:
            self._settled.wait(self._side)
            with torch.cuda.stream(self._side):
                beside()
            self._aside.record(self._side)
            self._aside.wait(torch.cuda.current_stream())

    def _send_off(self, missed: Missed, gone: int) -> None:
        """The first victims leave their slots for the buffer, once it is empty."""
        hot, leaving = self.hot, self._leaving
        leaving.emptied.wait(torch.cuda.current_stream())
        if gone > leaving.rows:
            leaving.reserve(gone)
        self._leave(
            blocks_for(gone, 32, 132), MOVE_THREADS, self.plan.missed, missed.slots, missed.victims, hot.weight,
            hot.state, hot.score, hot.dirty, *leaving.places, gone, self.plan.moved,
        )  # fmt: skip

    def _send_back(self, gone: int) -> None:
        """The buffer is written back beside what follows; not beside the fill, as one direction of PCIe takes from the
        other."""
        leaving = self._leaving
        leaving.filled.record(torch.cuda.current_stream())
        leaving.filled.wait(leaving.stream)
        blocks = blocks_for(gone, 32, RETURN_BLOCKS)
        self._return(
            blocks, MOVE_THREADS, *leaving.places, self._weight, self._state, stream=leaving.stream.cuda_stream
        )
        leaving.emptied.record(leaving.stream)

    def size_bytes(self) -> dict[str, int]:
        return {"leaving": self._leaving.size_bytes()}

    def load(self, keys: torch.Tensor, slots: torch.Tensor) -> None:
        if len(keys) == 0:
            return
        untouched = self._load_rows(keys, slots, self._weight, self._state)
        count = torch.full((1,), len(keys), dtype=torch.int32, device=self.device)
        self._generate(count, len(keys), keys, slots.contiguous(), untouched)
        self._score_loaded(slots)

    def _generate(self, count: Any, n: int, keys: Any, slots: Any, untouched: Any) -> None:
        hot, width = self.hot, self.cold.layout.state_width
        self._initial.generate_missed(
            count, n, keys, slots, untouched, hot.weight, hot.state, self._weight, self._state, width
        )

    def write_back(self, first_slot: int, slots: int, first_key: int | None) -> None:
        hot = self.hot
        keys: Any = hot.key if first_key is None else 0
        self._write_back(
            blocks_for(slots, 32, 4 * MOVE_BLOCKS), MOVE_THREADS, 0, slots, first_slot, first_key or 0, 0, keys,
            hot.weight, hot.state, hot.score, hot.dirty, self._weight, self._state, 0, self.plan.moved,
        )  # fmt: skip
