"""Cold rows that the host alone reaches: its threads gather and scatter them in pinned buffers."""

from __future__ import annotations

from typing import Any

import torch

from tieredemb.cache.device.plan import LAST_BATCH, Away, DevicePlan, Missed
from tieredemb.cache.device.row_copies import RowCopies
from tieredemb.cache.device.rows import DeviceRows
from tieredemb.cache.device.staging import Asked, MissReports, PinnedRows
from tieredemb.cache.device.transfer import MOVE, MOVE_BLOCKS, MOVE_THREADS, Beside, Transfer
from tieredemb.kernels.compiler import blocks_for, kernel
from tieredemb.kernels.constants import MIN_SCORE
from tieredemb.storage.base import ColdRows
from tieredemb.storage.initial import InitialRows

STAGE_ROWS = 1 << 16  # rows staged at once by whole-cache calls: bounds pinned memory
PLACE_BLOCKS = 4 * MOVE_BLOCKS  # staged rows move inside the device, whose memory takes more to saturate than PCIe


class Staged(Transfer):
    """Cold rows that the host alone reaches: missed keys travel to it, its threads gather and scatter rows in pinned
    buffers.

    A plan has two parts. The first asks the device what is missed and who leaves, and waits for nothing; threads gather
    the missed rows as soon as they are told, while the victims' come from the device. The second waits for both, and
    brings the rows; where a plan is made ahead, lookups and updates go on in between. The victims' rows are written
    beside what follows, until the next plan reads. What may fail, to take space for what is to be written and to read,
    comes before anything changes hands, so that a storage that fails loses nothing. Rows without a slot lie on the
    device, row r for record r.
    """

    in_place = False

    def __init__(self, cold: ColdRows, hot: DeviceRows, initial: InitialRows, plan: DevicePlan, *apart: Any) -> None:
        super().__init__(cold, hot, initial, plan, *apart)
        self._tell = kernel(MOVE, "missed_tell", *self._flags)
        self._copies = RowCopies(cold)
        self._coming, self._leaving = PinnedRows(cold.layout), PinnedRows(cold.layout)
        # those of the plan before, which may yet be being copied to the device, or written
        self._copied, self._written = PinnedRows(cold.layout), PinnedRows(cold.layout)
        self._reports = MissReports()
        self._gathers = False  # what a plan was told of, and has not taken yet
        self.restart()

    def restart(self) -> None:
        layout = self.cold.layout
        self._grown: torch.cuda.Event | None = None  # comes once rows without a slot have moved to larger arrays
        self._slotless = 0  # rows without a slot
        self._weight = torch.empty((0, layout.columns), dtype=layout.device_dtype, device=self.device)
        self._state = torch.empty((0, layout.state_width + 1), dtype=torch.int32, device=self.device)

    def away(self, slotless: bool) -> Away:
        return Away(slotless, self._weight.data_ptr(), self._state.data_ptr(), None)

    def follow(self) -> None:
        if self._grown is not None:
            self._grown.wait()

    # --- a plan -----------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        self._copies.finish()

    def retire(self, lag: int) -> None:
        if self._slotless == 0:
            return
        records = self._records()
        last = self.plan.records.table.view(torch.int32)[records, LAST_BATCH]
        # in the device's own numbers, which an interrupt may have left behind the host's, and in 32 bits, which wrap
        oldest = (self.plan.batch() + 1 - lag + 2**31) % 2**32 - 2**31
        gone = records[last - oldest < 0]
        self._store_away(gone)
        self.plan.records.free(gone)
        self._slotless -= len(gone)

    def ask(self, missed: Missed, homes: torch.Tensor, *, slotless: bool, ahead: bool) -> Asked:
        plan = self.plan
        plan.choose(missed)
        plan.settle(homes, missed, self.away(slotless), commit=False)
        if self._gathers:  # for a plan that has failed, by keys that are about to be overwritten
            self._copies.finish()
        asked = self._reports.expect(missed.n)
        report = asked.report
        self._tell(
            blocks_for(missed.n, 256, MOVE_BLOCKS), 256, plan.missed, plan.room, plan.needed, plan.selection, missed.n,
            missed.keys, missed.victims, missed.slots, self.hot.dirty, report.words.data_ptr(), asked.flags.data_ptr(),
            report.number, plan.arrivals,
        )  # fmt: skip
        report.event.record()
        self._send(missed)
        asked.sent.record()
        self._gathers = ahead
        if ahead:
            asked.gathered = rows = self._free_rows(0)
            asked.gathers = self._copies.gather_when_reported(report, rows.weight, rows.state)
        return asked

    def bring(
        self,
        missed: Missed,
        homes: torch.Tensor,
        asked: Asked | None = None,
        *,
        slotless: bool,
        scored: bool,
        beside: Beside | None,
    ) -> None:
        plan = self.plan
        asked = asked or self.ask(missed, homes, slotless=slotless, ahead=False)
        moves = asked.moves()
        if moves.with_slots > self._leaving.rows:
            self._make_room(moves.with_slots)
            self._send(missed)
            asked.sent.record()
        self._copies.reserve(moves.leaving, moves.dirty)
        weight, state = self._in(moves.keys, asked)
        count = len(moves.keys)
        new = count - moves.with_slots
        if new:
            plan.records.reserve(self._slotless + new)
            self._grow(plan.records.rows)
        away = self.away(slotless)
        with self._slots_change_hands(missed):
            plan.settle(homes, missed, away, commit=True)
            self._swap_rows(
                plan.missed, count, 0, missed.slots, missed.victims, 0, weight, state, missed.untouched, scored=scored,
                most_blocks=PLACE_BLOCKS,
            )  # fmt: skip
            if new:
                records = -2 - missed.view("slots", count)[moves.with_slots :].long()
                self._weight[records] = weight[moves.with_slots :]
                self._state[records] = state[moves.with_slots :]
                self._slotless += new
            self._generate(plan.missed, count, missed.keys, missed.slots, missed.untouched, away, some=plan.untouched)
            asked.sent.synchronize()
            if len(moves.leaving):
                keys = torch.from_numpy(moves.leaving.numpy().copy())  # the next plan tells others there
                self._copies.scatter(keys, *self._leaving.part(moves.room, moves.with_slots))
                self._leaving, self._written = self._written, self._leaving
        if beside:
            beside()

    def _send(self, missed: Missed) -> None:
        """Sends as many of the victims' rows to the host as there is room for, each where the row that it leaves for is
        among the missed."""
        rows, missing = self._leaving.rows, self.plan.missed
        self._send_rows(rows, missing, missed.slots, missed.victims, 0)

    def _grow(self, rows: int) -> None:
        if rows <= len(self._weight):
            return
        with self._apart(), torch.inference_mode(False):  # batches in flight read and update them
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

    def _in(self, keys: torch.Tensor, asked: Asked | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Cold rows (keys: int64 (K,), on the host) on their way to the device, as they lie in storage. `asked`: of
        what they are told, which may be gathering them."""
        gathered, begun = (None, None) if asked is None else (asked.gathered, asked.gathers)
        if gathered is None or len(keys) > gathered.rows:
            gathered, begun = self._free_rows(len(keys)), None
        weight, state, _ = gathered.part(0, len(keys))
        self._gathers = True
        self._copies.gather(keys, weight, state, begun=begun)
        self._gathers = False
        staged = weight.to(self.device, non_blocking=True), state.to(self.device, non_blocking=True)
        gathered.copied.record()
        self._coming, self._copied = self._copied, self._coming
        return staged

    def _free_rows(self, rows: int) -> PinnedRows:
        """Room for rows that come, at least as many."""
        self._coming.copied.synchronize()
        if rows > self._coming.rows:
            self._coming = PinnedRows(self.cold.layout, max(rows, 2 * self._coming.rows))
        return self._coming

    def _out(self, slots: torch.Tensor, keys: torch.Tensor) -> None:
        """Writes slots (int32 (K,)) back to the rows `keys` (int64 (K,)); their dirty flags stay."""
        rows = len(slots)
        self._make_room(rows)
        self._send_rows(rows, 0, slots.contiguous(), keys.contiguous(), self.plan.moved)
        self._write(keys, rows)

    def _write(self, keys: torch.Tensor, rows: int) -> None:
        """Writes what leaves to storage: the rows of `keys`, which come from the device behind them."""
        host, leaving = keys.cpu(), self._leaving.part(0, rows)
        self._copies.reserve(host, leaving[2])
        try:
            self._copies.scatter(host, *leaving)
        finally:
            self._copies.finish()

    def _make_room(self, rows: int) -> None:
        """Room for rows that leave. What is there is lost."""
        if rows > self._leaving.rows:
            torch.cuda.current_stream().synchronize()  # a plan that failed may be sending rows yet
            self._leaving = PinnedRows(self.cold.layout, max(rows, 2 * self._leaving.rows))

    def _send_rows(self, rows: int, count: int, slots: Any, keys: Any, moved: int) -> None:
        """Sends the rows of `rows` slots to the host, or of as many as the number at `count` says, if that is less."""
        hot, leaving = self.hot, self._leaving
        self._write_back(
            blocks_for(rows, 32, MOVE_BLOCKS), MOVE_THREADS, count, rows, 0, 0, slots, keys, hot.weight, hot.state,
            hot.score, hot.dirty, leaving.weight.data_ptr(), leaving.state.data_ptr(), leaving.dirty.data_ptr(), moved,
        )  # fmt: skip

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
            self._load_rows(0, some_keys, some_slots, *self._in(some_keys.cpu()))
            self._score_loaded(some_slots)

    def settle(self) -> None:
        self._store_away(self._records())

    def slotless_rows(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        records = self._records()
        return [(self._key(records), self._weight[records], self._state[records])]

    def reload(self) -> None:
        for records in torch.split(self._records(), STAGE_ROWS):
            keys = self._key(records)
            weight, state = self._in(keys.cpu())
            score = state[:, -1]
            untouched = (score == 0).to(torch.uint8)
            state[:, -1] = torch.where(score == 0, MIN_SCORE, score)
            self._weight[records], self._state[records] = weight, state
            count = torch.full((1,), len(records), dtype=torch.int32, device=self.device)
            self._generate(count, len(records), keys, (-2 - records).to(torch.int32), untouched, self.away(True))

    def _records(self) -> torch.Tensor:
        """The records in use, int64 on the device. Synchronises."""
        return torch.nonzero(self.plan.records.table[: self.plan.records.rows, 0]).flatten()

    def _key(self, records: torch.Tensor) -> torch.Tensor:
        return self.plan.records.table[records, 0] - 1

    def _store_away(self, records: torch.Tensor) -> None:
        for some in torch.split(records, STAGE_ROWS):
            self._make_room(len(some))
            weight, state, dirty = self._leaving.part(0, len(some))
            weight.copy_(self._weight[some], non_blocking=True)
            state.copy_(self._state[some], non_blocking=True)
            dirty.fill_(1)
            self._write(self._key(some), len(some))

    def size_bytes(self) -> dict[str, int]:
        rows = (self._coming, self._copied, self._leaving, self._written)
        staging = sum(each.size_bytes() for each in rows) + self._reports.size_bytes()
        return {"staging": staging, "away": self._weight.nbytes + self._state.nbytes}
