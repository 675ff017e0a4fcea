"""How rows travel between a GPU's slots and cold storage: in place by kernels, or staged through the host.

Both are asked by `DeviceCache` in the same order: `retire` before a plan finds, `bring` after it chose its victims.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tieredemb.cache.device_plan import Away, DevicePlan, Missed
from tieredemb.cache.device_rows import DeviceRows
from tieredemb.cache.policy import MIN_SCORE
from tieredemb.kernels.compiler import blocks_for, kernel, options
from tieredemb.storage.base import ColdRows
from tieredemb.storage.initial import InitialRows

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

MOVE = "storage/move.cu"
MOVE_BLOCKS, MOVE_THREADS = 32, 1024  # 16 and more saturate PCIe both ways; 8 reach two thirds of it
RETURN_BLOCKS = 16  # of rows that go back beside other work
LEAVING_SHARE = 9  # ids for each row that leaves through the buffer: what a step's other work hides. Rows both ways
# at once cross PCIe at 510 M requests a second, one way alone at 380–440 M, so the others go while the fill comes
STAGE_ROWS = 1 << 16  # rows staged at once by whole-cache calls: bounds pinned memory


class Transfer(abc.ABC):
    """Moves the rows of one cache."""

    def __init__(self, cold: ColdRows, hot: DeviceRows, initial: InitialRows, plan: DevicePlan) -> None:
        self.cold = cold
        self.hot = hot
        self.plan = plan
        self.device = hot.weight.device
        self._initial = initial
        flags = self._flags = (*options(cold.layout.dtype, cold.layout.width), f"-DSTATE={cold.layout.state_width}")
        self._swap = kernel(MOVE, "rows_swap", "p p p p i any f32 i32 u8 p p p p", *flags)
        self._write_back = kernel(MOVE, "rows_write_back", "p n n n p p any f32 i32 u8 p p p p", *flags)

    def retire(self, batch: int, lag: int) -> None:  # noqa: B027 - rows used in place need no farewell
        """Before `batch` is planned: gives up rows that are no longer used without a slot."""

    @abc.abstractmethod
    def bring(self, missed: Missed, homes: torch.Tensor, slotless: bool) -> None:
        """Gives the chosen victims' slots to missed keys, publishes them, resolves `homes`, and moves the rows."""

    @abc.abstractmethod
    def away(self, slotless: bool) -> Away:
        """Where rows without a slot are now."""

    @abc.abstractmethod
    def write_back(self, first_slot: int, slots: int, first_key: int | None) -> None:
        """Writes a range of slots back and leaves them clean. `first_key`: the key of its first slot where they are a
        resident table's, else the slots' own keys count."""

    @abc.abstractmethod
    def load(self, keys: torch.Tensor, slots: torch.Tensor) -> None:
        """Brings the cold rows `keys` (int64 (K,)) into `slots` (int32 (K,)), which are theirs already."""

    def generate(self, first_key: int, first_slot: int, rows: int) -> None:
        """Generates consecutive rows in consecutive slots."""
        width = self.cold.layout.state_width
        self._initial.generate_range(first_key, first_slot, rows, self.hot.weight, self.hot.state, width)

    def settle(self) -> None:  # noqa: B027
        """Writes back what has no slot."""

    def reload(self) -> None:  # noqa: B027
        """Reads again what has no slot."""

    def restart(self) -> None:  # noqa: B027
        """Drops what has no slot."""

    def size_bytes(self) -> dict[str, int]:
        """Bytes of buffers."""
        return {}

    def _swap_rows(
        self,
        count: Any,
        n: int,
        keys: Any,
        slots: Any,
        victims: Any,
        gone: int,
        weight: Any,
        state: Any,
        untouched: Any,
    ) -> None:
        """Brings cold rows `keys` of `weight` and `state` into `slots`, after the rows `victims` went back there but
        for the first `gone`."""
        hot = self.hot
        self._swap(
            blocks_for(n, 64, MOVE_BLOCKS), MOVE_THREADS, count, keys, slots, victims, gone, hot.weight, hot.state,
            hot.score, hot.dirty, weight, state, untouched, self.plan.moved,
        )  # fmt: skip

    def _load_rows(self, keys: Any, slots: torch.Tensor, weight: Any, state: Any) -> torch.Tensor:
        """Brings cold rows into slots that are theirs; returns which were never written, uint8 (K,)."""
        n = len(slots)
        count = torch.full((1,), n, dtype=torch.int32, device=self.device)
        nobody = torch.full((n,), -1, dtype=torch.int64, device=self.device)
        untouched = torch.empty(n, dtype=torch.uint8, device=self.device)
        self._swap_rows(count, n, keys, slots.contiguous(), nobody, 0, weight, state, untouched)
        return untouched

    def _score_loaded(self, slots: torch.Tensor) -> None:
        """No row in a slot has a score of zero."""
        score = self.hot.score[slots.long()]
        self.hot.score[slots.long()] = torch.where(score == 0, MIN_SCORE, score)


class _Leaving:
    """Rows on their way back: a buffer on the device, and the stream that empties it."""

    def __init__(self, cold: ColdRows, device: torch.device) -> None:
        self._layout, self._device = cold.layout, device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
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

    Some victims leave their slots for a buffer, and go back from there on a stream of their own while the new rows are
    looked up and updated. The next plan's rows are moved once the buffer is empty, so cold storage is never behind when
    it is read. A captured step writes all back at once: its end would have to wait for the other stream.
    """

    def __init__(self, cold: ColdRows, hot: DeviceRows, initial: InitialRows, plan: DevicePlan) -> None:
        super().__init__(cold, hot, initial, plan)
        self._weight, self._state = cold.weight.ctypes.data, cold.state.ctypes.data
        self._leaving = _Leaving(cold, self.device)
        self._captured = False  # a graph that has been may be replayed at any time: nothing may be on its way then
        self._leave = kernel(MOVE, "rows_leave", "p p p any f32 i32 u8 any i32 i64 u8 i32 i p", *self._flags)
        self._return = kernel(MOVE, "rows_return", "any i32 i64 u8 i32 p p", *self._flags)

    def away(self, slotless: bool) -> Away:
        return Away(slotless, self._weight, self._state, self.plan.records.table)

    def bring(self, missed: Missed, homes: torch.Tensor, slotless: bool) -> None:
        self.plan.settle(homes, missed, self.away(slotless), commit=True)
        self._captured = self._captured or torch.cuda.is_current_stream_capturing()
        gone = 0 if self._captured else missed.n // LEAVING_SHARE
        if gone:
            self._send_off(missed, gone)
        count, keys, slots = self.plan.missed, missed.keys, missed.slots
        self._swap_rows(count, missed.n, keys, slots, missed.victims, gone, self._weight, self._state, missed.untouched)
        self._generate(count, missed.n, keys, slots, missed.untouched)
        if gone:
            self._send_back(gone)

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
    buffers. Every plan waits for the device, and for the storage.

    Victims are written back before anything changes hands and missed rows are read before they are published, so that
    a storage that fails loses nothing. Rows without a slot lie on the device, row r for record r.
    """

    def __init__(self, cold: ColdRows, hot: DeviceRows, initial: InitialRows, plan: DevicePlan) -> None:
        super().__init__(cold, hot, initial, plan)
        self._buffers = _Buffers(cold, 0)
        self.restart()

    def restart(self) -> None:
        layout = self.cold.layout
        self._keys: dict[int, int] = {}  # of the records in use
        self._weight = torch.empty((0, layout.width), dtype=layout.dtype, device=self.device)
        self._state = torch.empty((0, layout.state_width + 1), dtype=torch.int32, device=self.device)

    def away(self, slotless: bool) -> Away:
        return Away(slotless, self._weight.data_ptr(), self._state.data_ptr(), None)

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

    def bring(self, missed: Missed, homes: torch.Tensor, slotless: bool) -> None:
        self.plan.settle(homes, missed, self.away(slotless), commit=False)
        count = self.plan.missed_count()
        keys = missed.view("keys", count).cpu().numpy()
        victims, slots = missed.view("victims", count), missed.view("slots", count)
        leaving = victims >= 0
        self._out(slots[leaving], victims[leaving])
        weight, state = self._in(keys)
        self.plan.settle(homes, missed, self.away(slotless), commit=True)
        self._place(slots, weight, state)
        if slotless:
            self._place_away(slots, keys, weight, state)

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
        self._grow(len(self.plan.records.table))
        self._weight[records] = weight[chosen]
        self._state[records] = state[chosen]
        self._keys |= dict(zip(records.tolist(), keys[chosen.cpu().numpy()].tolist(), strict=True))

    def _grow(self, rows: int) -> None:
        if rows > len(self._weight):
            grown = [
                torch.zeros((rows, t.shape[1]), dtype=t.dtype, device=t.device) for t in (self._weight, self._state)
            ]
            for new, old in zip(grown, (self._weight, self._state), strict=True):
                new[: len(old)] = old
            self._weight, self._state = grown

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
        weight = torch.empty((rows, layout.width), dtype=layout.dtype, device=self.device)
        state = torch.empty((rows, layout.state_width + 1), dtype=torch.int32, device=self.device)
        dirty = torch.empty(rows, dtype=torch.uint8, device=self.device)
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
