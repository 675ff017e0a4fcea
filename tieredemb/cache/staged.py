"""Cold rows that the host alone reaches: its threads gather and scatter them in pinned buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tieredemb.cache.device_plan import Away, DevicePlan, Missed
from tieredemb.cache.device_rows import DeviceRows
from tieredemb.cache.transfer import MOVE_BLOCKS, MOVE_THREADS, Beside, Transfer
from tieredemb.kernels.compiler import blocks_for
from tieredemb.storage.base import ColdRows
from tieredemb.storage.initial import InitialRows

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

STAGE_ROWS = 1 << 16  # rows staged at once by whole-cache calls: bounds pinned memory


class _Buffers:
    """Rows on their way, as pinned host memory, and as the arrays that a storage moves (`storage.base.HotArrays`)."""

    def __init__(self, cold: ColdRows, rows: int) -> None:
        layout = cold.layout
        self.rows = rows
        self.pinned = {
            "weight": torch.empty((rows, layout.width), dtype=layout.dtype, device="cpu", pin_memory=True),
            "state": torch.empty((rows, layout.state_width), dtype=torch.int32, device="cpu", pin_memory=True),
            "score": torch.empty(rows, dtype=torch.int32, device="cpu", pin_memory=True),
            "dirty": torch.empty(rows, dtype=torch.uint8, device="cpu", pin_memory=True),
        }
        carriers = {"weight": layout.carrier, "state": np.dtype(np.uint32), "score": np.dtype(np.uint32)}
        arrays = {
            name: tensor.view(torch.uint8).numpy().view(carriers.get(name, np.dtype(np.uint8)))
            if tensor.numel()
            else np.empty(tensor.shape, carriers.get(name, np.dtype(np.uint8)))
            for name, tensor in self.pinned.items()
        }
        self.weight, self.state = arrays["weight"], arrays["state"]
        self.score, self.dirty = arrays["score"], arrays["dirty"]

    def to(self, device: torch.device, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The first `rows` rows on the device as cold rows lie: weights, and states with the score at their end."""
        weight = self.pinned["weight"][:rows].to(device, non_blocking=True)
        state = self.pinned["state"][:rows].to(device, non_blocking=True)
        score = self.pinned["score"][:rows].to(device, non_blocking=True)
        return weight, torch.cat([state, score[:, None]], 1)

    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.pinned.values())


class Staged(Transfer):
    """Cold rows that the host alone reaches: missed keys travel to it, its threads gather and scatter rows in pinned
    buffers. Every plan waits for the device, and for the storage; where a thread of its own plans ahead, lookups and
    updates go on meanwhile.

    Victims are written back before anything changes hands and missed rows are read before they are published, so that
    a storage that fails loses nothing. Rows without a slot lie on the device, row r for record r.
    """

    in_place = False

    def __init__(self, cold: ColdRows, hot: DeviceRows, initial: InitialRows, plan: DevicePlan, *apart: Any) -> None:
        super().__init__(cold, hot, initial, plan, *apart)
        self._buffers = _Buffers(cold, 0)
        self._grown: torch.cuda.Event | None = None  # comes once rows without a slot have moved to larger arrays
        self.restart()

    def restart(self) -> None:
        layout = self.cold.layout
        self._grown = None
        self._keys: dict[int, int] = {}  # of the records in use
        self._weight = torch.empty((0, layout.width), dtype=layout.dtype, device=self.device)
        self._state = torch.empty((0, layout.state_width + 1), dtype=torch.int32, device=self.device)

    def away(self, slotless: bool) -> Away:
        return Away(slotless, self._weight.data_ptr(), self._state.data_ptr(), None)

    def follow(self) -> None:
        if self._grown is not None:
            self._grown.wait()

    # --- a plan -----------------------------------------------------------------------------------------------------

    def retire(self, batch: int, lag: int) -> None:
        if not self._keys:
            return
        table = self.plan.records.table.cpu()
        stamp = batch - lag
        last = table.numpy().view(np.int32).reshape(-1, 4)[:, 2]
        behind = (last.astype(np.int64) - stamp + 2**31) % 2**32 - 2**31
        gone = [record for record in self._keys if behind[record] < 0]
        self._store_away(gone)
        for record in gone:
            del self._keys[record]

    def bring(
        self, missed: Missed, homes: torch.Tensor, *, slotless: bool, scored: bool, beside: Beside | None
    ) -> None:
        self.plan.choose(missed)
        self.plan.settle(homes, missed, self.away(slotless), commit=False)
        count = self.plan.missed_count()
        keys = missed.view("keys", count).cpu().numpy()
        victims, slots = missed.view("victims", count), missed.view("slots", count)
        leaving = victims >= 0
        self._out(slots[leaving], victims[leaving])
        weight, state = self._in(keys)
        if slotless:
            self._grow(len(self.plan.records.table))
        self.committed = True
        self.plan.settle(homes, missed, self.away(slotless), commit=True)
        self._place(slots, weight, state)
        if slotless:
            self._place_away(slots, keys, weight, state)
        self.plan.score(missed, self.away(slotless), scored=scored)
        self.committed = False
        if beside:
            beside()

    def _place(self, slots: torch.Tensor, weight: torch.Tensor, state: torch.Tensor) -> None:
        """Puts staged row m into slots[m], where that is one."""
        if len(slots):
            self._load_rows(torch.arange(len(slots), device=self.device), slots, weight, state)

    def _place_away(self, slots: torch.Tensor, keys: Array, weight: torch.Tensor, state: torch.Tensor) -> None:
        """Puts the staged rows of missed keys without a slot to their records' rows."""
        chosen = torch.nonzero(slots < -1).flatten()
        if len(chosen) == 0:
            return
        records = -2 - slots[chosen].long()
        self._weight[records] = weight[chosen]
        self._state[records] = state[chosen]
        self._keys |= dict(zip(records.tolist(), keys[chosen.cpu().numpy()].tolist(), strict=True))

    def _grow(self, rows: int) -> None:
        if rows <= len(self._weight):
            return
        with self._apart():  # batches in flight read and update them
            grown = [
                torch.zeros((rows, t.shape[1]), dtype=t.dtype, device=t.device) for t in (self._weight, self._state)
            ]
            for new, old in zip(grown, (self._weight, self._state), strict=True):
                new[: len(old)] = old
                old.record_stream(torch.cuda.current_stream())
            self._weight, self._state = grown
            self._grown = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._grown.record()

    # --- rows through the host --------------------------------------------------------------------------------------

    def _reserved(self, rows: int) -> _Buffers:
        if rows > self._buffers.rows:
            self._buffers = _Buffers(self.cold, max(rows, 2 * self._buffers.rows))
        return self._buffers

    def _in(self, keys: Array) -> tuple[torch.Tensor, torch.Tensor]:
        """Cold rows on the device, generated where they were never written."""
        buffers = self._reserved(len(keys))
        rows = np.arange(len(keys), dtype=np.int32)
        untouched = np.flatnonzero(self.cold.read(keys, rows, buffers))
        self._initial.generate(keys[untouched], untouched, buffers.weight, buffers.state, self.cold.layout.state_width)
        staged = buffers.to(self.device, len(keys))
        torch.cuda.current_stream().synchronize()  # the buffers are about to be used again
        return staged

    def _out(self, slots: torch.Tensor, keys: torch.Tensor) -> None:
        """Writes slots (int32 (K,)) back to the rows `keys` (int64 (K,)); their dirty flags stay."""
        rows = len(slots)
        if rows == 0:
            return
        layout, hot = self.cold.layout, self.hot
        # of a clean row the kernel writes the score alone
        weight = torch.zeros((rows, layout.width), dtype=layout.dtype, device=self.device)
        state = torch.zeros((rows, layout.state_width + 1), dtype=torch.int32, device=self.device)
        dirty = torch.zeros(rows, dtype=torch.uint8, device=self.device)
        self._write_back(
            blocks_for(rows, 32, 4 * MOVE_BLOCKS), MOVE_THREADS, 0, rows, 0, 0, slots.contiguous(), keys.contiguous(),
            hot.weight, hot.state, hot.score, hot.dirty, weight, state, dirty, self.plan.moved,
        )  # fmt: skip
        self._store(keys.cpu().numpy(), weight, state, dirty)

    def _store(self, keys: Array, weight: torch.Tensor, state: torch.Tensor, dirty: torch.Tensor) -> None:
        buffers, rows = self._reserved(len(keys)), len(keys)
        width = self.cold.layout.state_width
        for name, tensor in (
            ("weight", weight), ("state", state[:, :width]), ("score", state[:, width]), ("dirty", dirty)
        ):  # fmt: skip
            buffers.pinned[name][:rows].copy_(tensor, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        self.cold.write(keys, np.arange(rows, dtype=np.int32), buffers)

    # --- whole-cache calls ------------------------------------------------------------------------------------------

    def write_back(self, first_slot: int, slots: int, first_key: int | None) -> None:
        for start in range(first_slot, first_slot + slots, STAGE_ROWS):
            span = torch.arange(start, min(start + STAGE_ROWS, first_slot + slots), device=self.device)
            if first_key is None:
                span = span[self.hot.key[span] >= 0]
                keys = self.hot.key[span]
            else:
                span = span[self.hot.dirty[span] != 0]
                keys = span - first_slot + first_key
            self._out(span.to(torch.int32), keys)
            self.hot.dirty[span] = 0

    def load(self, keys: torch.Tensor, slots: torch.Tensor) -> None:
        for some_keys, some_slots in zip(torch.split(keys, STAGE_ROWS), torch.split(slots, STAGE_ROWS), strict=True):
            self._place(some_slots, *self._in(some_keys.cpu().numpy()))
            self._score_loaded(some_slots)

    def settle(self) -> None:
        self._store_away(list(self._keys))

    def reload(self) -> None:
        if self._keys:
            records = torch.tensor(list(self._keys), device=self.device)
            self._weight[records], self._state[records] = self._in(np.array(list(self._keys.values()), np.int64))

    def _store_away(self, records: list[int]) -> None:
        for start in range(0, len(records), STAGE_ROWS):
            some = records[start : start + STAGE_ROWS]
            rows = torch.tensor(some, device=self.device)
            dirty = torch.ones(len(some), dtype=torch.uint8, device=self.device)
            keys = np.array([self._keys[record] for record in some], np.int64)
            self._store(keys, self._weight[rows], self._state[rows], dirty)

    def size_bytes(self) -> dict[str, int]:
        away = self._weight.nbytes + self._state.nbytes
        return {"staging": self._buffers.size_bytes(), "away": away}
