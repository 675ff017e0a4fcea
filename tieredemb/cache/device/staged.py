"""Cold rows that only the host reaches: copy threads gather and scatter them, through pinned buffers."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from tieredemb.cache.changes import IntentLog
from tieredemb.cache.device.hot_rows import DeviceHotRows
from tieredemb.cache.device.moves import MOVE, MOVE_BLOCKS, RowMoves
from tieredemb.cache.device.plan import BatchPlan, DevicePlan, Missed, OverflowRows, Phase, field_offsets
from tieredemb.cache.device.row_copies import RowCopies
from tieredemb.cache.device.staging import HostPhase, MissReports, PinnedRows, RowBuffers
from tieredemb.cache.device.stream_order import StreamOrder
from tieredemb.cache.device.transfer import Transfer, slots_change_hands
from tieredemb.kernels.compiler import blocks_for, kernel
from tieredemb.kernels.constants import ASSIGN, MIN_SCORE, PUBLISH
from tieredemb.kernels.inference import no_inference
from tieredemb.kernels.recording import Recording
from tieredemb.kernels.streams import current_stream
from tieredemb.storage.base import ColdRows

STAGE_ROWS = 1 << 16  # rows staged at once by whole-cache calls: bounds pinned memory


class Staged(Transfer):
    """Cold rows that only the host reaches: missed keys are reported to it, and copy threads gather and scatter rows
    through pinned buffers.

    `start` launches a report of missed keys and victims, and waits for nothing. Copy threads gather the missed rows as
    soon as they are reported, while victims' rows are sent from the device. `move` waits for both, and fills the rows;
    in a plan ahead, lookups and updates go on in between. Victims' rows are written to storage meanwhile, until the
    next plan reads. Reserving space for writes, and reads, may fail; both are done before slots change hands, so that a
    failing storage loses nothing. Rows without a slot are on the device, row r for record r.
    """

    def __init__(
        self,
        cold: ColdRows,
        hot: DeviceHotRows,
        plan: DevicePlan,
        moves: RowMoves,
        *,
        order: StreamOrder,
        rows_lock: contextlib.AbstractContextManager[bool],
        changes: IntentLog,
    ) -> None:
        """`rows_lock`: of lookups and updates · `changes`: the log of plans."""
        self._layout = cold.layout
        self._hot = hot
        self._plan = plan
        self._moves = moves
        self._order = order
        self._rows_lock = rows_lock
        self._changes = changes
        self._device = hot.weight.device
        self._launch_report = kernel(MOVE, "missed_report", *moves.flags)
        self._copies = RowCopies(cold)
        self._incoming, self._outgoing = PinnedRows(cold.layout), PinnedRows(cold.layout)
        # buffers of the plan before, which the device may still read, or copy threads may still write to storage
        self._incoming_before, self._outgoing_before = PinnedRows(cold.layout), PinnedRows(cold.layout)
        self._reports = MissReports()
        self._gathers = False  # whether copy threads may be gathering rows that no plan has taken
        self.restart()

    def restart(self) -> None:
        layout = self._layout
        self._grown: torch.cuda.Event | None = None  # after rows without a slot have moved to larger arrays
        self._uncached = 0  # rows without a slot
        self._weight = torch.empty((0, layout.columns), dtype=layout.device_dtype, device=self._device)
        self._state = torch.empty((0, layout.state_width + 1), dtype=torch.int32, device=self._device)

    def overflow(self, uncached: bool) -> OverflowRows:
        return OverflowRows(uncached, self._weight.data_ptr(), self._state.data_ptr(), None, self._plan.records.table)

    def overflow_now(self, planned: OverflowRows) -> OverflowRows:
        return self.overflow(planned.uncached)  # a later plan may have moved them to larger arrays

    def wait_for_uncached(self) -> None:
        if self._grown is not None and not torch.cuda.is_current_stream_capturing():  # else it was waited for outside
            self._grown.wait(current_stream())

    # --- a plan -----------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        self._copies.finish()

    def retire(self, lag: int) -> None:
        if self._uncached == 0:
            return
        records = self._records()
        last = self._plan.records.table.view(torch.int32)[records, field_offsets().last_batch]
        # numbers of the device, which after an interrupt may be behind the host's; 32 bits, which wrap
        oldest = (self._plan.batch() + 1 - lag + 2**31) % 2**32 - 2**31
        gone = records[last - oldest < 0]
        self._store(gone)
        self._plan.records.free(gone)
        self._uncached -= len(gone)

    def start(self, plan: BatchPlan) -> None:
        if plan.host is not None:  # which is recorded
            number, *buffers = (word.data_ptr() for word in plan.host.words)
            self._launch_start(plan, plan.host, number, RowBuffers(*buffers))
            return
        self._end_gather()
        plan.host = HostPhase(plan.missed.n, self._reports)
        self._launch_start(plan, plan.host, plan.host.report.number, self._outgoing.buffers)
        self.await_report(plan)

    def _end_gather(self) -> None:
        """Called before a report overwrites the last one."""
        if self._gathers:  # for a plan that failed, by keys that are overwritten next
            self._copies.finish()

    def _launch_start(self, plan: BatchPlan, host: HostPhase, number: int, buffers: RowBuffers) -> None:
        """Chooses victims, reports them and the missed keys, under `number`, and sends as many of the victims' rows as
        `buffers` hold."""
        launches, missed = self._plan, plan.missed
        launches.choose(missed)
        launches.resolve(plan.homes, missed, self.overflow(plan.uncached), 0)
        self._launch_report(
            blocks_for(missed.n, 256, MOVE_BLOCKS), 256, launches.missed, launches.into_unused, launches.needed,
            launches.selection, missed.n, missed.keys, missed.victims, missed.slots, self._hot.dirty,
            host.report.words.data_ptr(), host.flags.data_ptr(), number, launches.arrivals,
        )  # fmt: skip
        self._send(missed, buffers)

    def await_report(self, plan: BatchPlan) -> None:
        host = plan.host
        assert host is not None
        host.gather = host.gathered = None
        host.report.event.record(current_stream())
        self._gathers = plan.kind.ahead
        if plan.kind.ahead:
            host.gathered = rows = self._free_rows(0)
            host.gather = self._copies.gather_when_reported(host.report, rows.weight, rows.state)

    def may_record(self) -> bool:
        return self._uncached == 0  # to retire them waits for the device, which cannot be recorded

    def recording(self, ids: int) -> HostPhase:
        with no_inference():
            words = torch.empty(1 + len(RowBuffers._fields), dtype=torch.int64, device=self._device)
        return HostPhase(ids, MissReports(), words.unbind())

    def record_move(self, plan: BatchPlan, graph: Recording) -> None:
        assert plan.host is not None
        with no_inference():
            weight = torch.empty((1, self._layout.columns), dtype=self._layout.device_dtype, device=self._device)
            state = torch.empty((1, self._layout.state_width + 1), dtype=torch.int32, device=self._device)
        with graph.recorded([weight.data_ptr(), state.data_ptr()]):
            self._launch_move(plan, plan.missed.n, weight, state)
            if plan.beside:
                plan.beside()
        plan.host.graph = graph

    def expect(self, plan: BatchPlan) -> list[int]:
        host = plan.host
        assert host is not None
        self._end_gather()
        host.expect()
        return [host.report.number, *self._outgoing.buffers]

    def move(self, plan: BatchPlan) -> None:
        launches, missed, host = self._plan, plan.missed, plan.host
        assert host is not None
        sent, misses = host.report.event, host.read()
        if misses.with_slots > self._outgoing.rows:
            self._reserve(misses.with_slots)
            self._send(missed, self._outgoing.buffers)
            sent.record(current_stream())
        self._copies.reserve(misses.leaving, misses.dirty)
        gathered, weight, state = self._gather(misses.keys, host)
        count = misses.keys.shape[0]
        new = count - misses.with_slots
        graph = None if new else host.graph
        if new:
            launches.records.reserve(self._uncached + new)
            self._grow(launches.records.rows)
        with slots_change_hands(self._changes, missed):
            if graph is None:
                self._launch_move(plan, count, weight, state, new)
            else:
                graph.replay([weight.data_ptr(), state.data_ptr()])
            gathered.copied.record(current_stream())
            self._uncached += new
            sent.synchronize()
            if misses.leaving.shape[0]:
                keys = self._outgoing.keep(misses.leaving)  # the next plan overwrites the report
                self._copies.scatter(keys, *self._outgoing.part(misses.into_unused, misses.with_slots))
                self._outgoing, self._outgoing_before = self._outgoing_before, self._outgoing
        if plan.beside and graph is None:
            plan.beside()
        plan.phase = Phase.MOVED

    def _launch_move(
        self, plan: BatchPlan, count: int, weight: torch.Tensor, state: torch.Tensor, new: int = 0
    ) -> None:
        """Has slots change hands, and fills at most `count` missed rows from `weight` and `state`, which may be in
        pinned memory; the last `new` ones have no slot."""
        missed, overflow = plan.missed, self.overflow(plan.uncached)
        self._plan.resolve(plan.homes, missed, overflow, ASSIGN | PUBLISH)
        self._moves.swap(missed, count, weight.data_ptr(), state.data_ptr(), scored=plan.kind.scored, in_place=False)
        if new:
            records = -2 - missed.view("slots", count)[count - new :].long()
            self._weight[records] = weight[count - new :].to(self._device, non_blocking=True)
            self._state[records] = state[count - new :].to(self._device, non_blocking=True)
        self._moves.generate_missed(missed, count, overflow)

    def _send(self, missed: Missed, buffers: RowBuffers) -> None:
        """Sends as many of the victims' rows to the host as `buffers` hold, each to the position of the missed row that
        gets its slot."""
        self._send_rows(missed.n, buffers, self._plan.missed, missed.slots, missed.victims, 0)

    def _grow(self, rows: int) -> None:
        if rows <= len(self._weight):
            return
        # batches in flight read and update them: wait for computations, and let none begin meanwhile
        with self._rows_lock, no_inference():
            self._order.queued().wait(current_stream())
            grown = [
                torch.zeros((rows, t.shape[1]), dtype=t.dtype, device=t.device) for t in (self._weight, self._state)
            ]
            for new, old in zip(grown, (self._weight, self._state), strict=True):
                new[: len(old)] = old
                old.record_stream(current_stream())
            self._weight, self._state = grown
            self._grown = torch.cuda.Event()
            self._grown.record(current_stream())

    # --- rows through the host --------------------------------------------------------------------------------------

    def _gather(
        self, keys: torch.Tensor, host: HostPhase | None = None
    ) -> tuple[PinnedRows, torch.Tensor, torch.Tensor]:
        """Gathers weights and states of cold rows (keys: int64 (K,), on the host), in the layout of storage, in pinned
        memory. They last until the event `copied` of the buffer, which the caller records after its last read. `host`:
        of their plan, for which copy threads may be gathering them already."""
        buffers, gather = (None, None) if host is None else (host.gathered, host.gather)
        if buffers is None or len(keys) > buffers.rows:
            buffers, gather = self._free_rows(len(keys)), None
        weight, state, _ = buffers.part(0, len(keys))
        self._gathers = True
        self._copies.gather(keys, weight, state, begun=gather)
        self._gathers = False
        self._incoming, self._incoming_before = self._incoming_before, self._incoming
        return buffers, weight, state

    def _in(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sends cold rows to the device; see `_gather`."""
        buffers, weight, state = self._gather(keys)
        staged = weight.to(self._device, non_blocking=True), state.to(self._device, non_blocking=True)
        buffers.copied.record(current_stream())
        return staged

    def _free_rows(self, rows: int) -> PinnedRows:
        """A buffer for at least `rows` rows that are gathered."""
        self._incoming.copied.synchronize()
        if rows > self._incoming.rows:
            self._incoming = PinnedRows(self._layout, max(rows, 2 * self._incoming.rows))
        return self._incoming

    def _out(self, slots: torch.Tensor, keys: torch.Tensor) -> None:
        """Writes slots (int32 (K,)) back to the rows `keys` (int64 (K,)); their dirty flags stay."""
        rows = len(slots)
        self._reserve(rows)
        buffers = self._outgoing.buffers._replace(rows=rows)
        self._send_rows(rows, buffers, 0, slots.contiguous(), keys.contiguous(), self._plan.moved)
        self._write(keys, rows)

    def _write(self, keys: torch.Tensor, rows: int) -> None:
        """Writes sent rows to storage: those of `keys`. Reading the keys waits for the device to have sent the rows."""
        host, leaving = keys.cpu(), self._outgoing.part(0, rows)
        self._copies.reserve(host, leaving[2])
        try:
            self._copies.scatter(host, *leaving)
        finally:
            self._copies.finish()

    def _reserve(self, rows: int) -> None:
        """Makes the buffer of rows that leave hold `rows`. Its content may be lost."""
        if rows > self._outgoing.rows:
            current_stream().synchronize()  # a plan that failed may be sending rows yet
            self._outgoing = PinnedRows(self._layout, max(rows, 2 * self._outgoing.rows))

    def _send_rows(self, most: int, buffers: RowBuffers, count: int, slots: Any, keys: Any, moved: int) -> None:
        """Sends the rows of `slots` to the host: at most `most`, as many as `buffers` hold, and as the number at
        `count` says."""
        self._moves.write_back(
            blocks_for(most, 32, MOVE_BLOCKS), count, buffers.rows, 0, 0, slots, keys, buffers.weight, buffers.state,
            buffers.dirty, moved,
        )  # fmt: skip

    # --- whole-cache calls ------------------------------------------------------------------------------------------

    def write_back(self, first_slot: int, slots: int, first_key: int | None) -> None:
        for start in range(first_slot, first_slot + slots, STAGE_ROWS):
            span = torch.arange(start, min(start + STAGE_ROWS, first_slot + slots), device=self._device)
            if first_key is None:
                span = span[self._hot.key[span] >= 0]
                keys = self._hot.key[span]
            else:
                span = span[self._hot.dirty[span] != 0]
                keys = span - first_slot + first_key
            self._out(span.to(torch.int32), keys)
            self._hot.dirty[span] = 0

    def load(self, keys: torch.Tensor, slots: torch.Tensor) -> None:
        for some_keys, some_slots in zip(torch.split(keys, STAGE_ROWS), torch.split(slots, STAGE_ROWS), strict=True):
            self._moves.load(0, some_keys, some_slots, *self._in(some_keys.cpu()), self.overflow(False))

    def write_back_uncached(self) -> None:
        self._store(self._records())

    def uncached_rows(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        records = self._records()
        return [(self._key(records), self._weight[records], self._state[records])]

    def reload_uncached(self) -> None:
        for records in torch.split(self._records(), STAGE_ROWS):
            keys = self._key(records)
            weight, state = self._in(keys.cpu())
            score = state[:, -1]
            untouched = (score == 0).to(torch.uint8)
            state[:, -1] = torch.where(score == 0, MIN_SCORE, score)
            self._weight[records], self._state[records] = weight, state
            count = torch.full((1,), len(records), dtype=torch.int32, device=self._device)
            homes = (-2 - records).to(torch.int32)
            self._moves.generate(count, len(records), keys, homes, untouched, self.overflow(True))

    def _records(self) -> torch.Tensor:
        """The records in use, int64 on the device. Synchronises."""
        return torch.nonzero(self._plan.records.table[: self._plan.records.rows, 0]).flatten()

    def _key(self, records: torch.Tensor) -> torch.Tensor:
        return self._plan.records.table[records, 0] - 1

    def _store(self, records: torch.Tensor) -> None:
        """Writes the rows of records to storage."""
        for some in torch.split(records, STAGE_ROWS):
            self._reserve(len(some))
            weight, state, dirty = self._outgoing.part(0, len(some))
            weight.copy_(self._weight[some], non_blocking=True)
            state.copy_(self._state[some], non_blocking=True)
            dirty.fill_(1)
            self._write(self._key(some), len(some))

    def size_bytes(self) -> dict[str, int]:
        rows = (self._incoming, self._incoming_before, self._outgoing, self._outgoing_before)
        staging = sum(each.size_bytes() for each in rows) + self._reports.size_bytes()
        return {"staging": staging, "away": self._weight.nbytes + self._state.nbytes}
