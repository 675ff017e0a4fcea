"""The hot cache on a GPU over one key space: the twin of `HostCache`. Over rows that kernels reach, only whole-cache
calls wait for the device.

It consists of a ledger of batches (`ledger`), the slots (`hot_rows`), the launches of plans (`plan`), the transfer of
rows (`transfer`), the order of streams (`stream_order`), and the planner that runs a batch through these (`planner`).
This file is their interface: what may be called when, under which locks, and the calls that concern all rows.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from tieredemb.cache.base import USE, Cache, PlanKind, ScoreSample
from tieredemb.cache.changes import Part
from tieredemb.cache.device.effects import NOTHING_PLANNED, Effects, Opened
from tieredemb.cache.device.hot_rows import DeviceHotRows
from tieredemb.cache.device.in_place import InPlace
from tieredemb.cache.device.key_ranges import KeyRanges
from tieredemb.cache.device.ledger import Ledger
from tieredemb.cache.device.moves import RowMoves
from tieredemb.cache.device.plan import BatchPlan, Beside, DevicePlan, Missed, OverflowRows, PlanOf
from tieredemb.cache.device.planner import DeferredRows, Planner
from tieredemb.cache.device.stream_order import SideStream, StreamOrder
from tieredemb.cache.device.ticket import DeviceTicket
from tieredemb.cache.device.transfer import Transfer
from tieredemb.cache.host.hot_rows import NO_KEY
from tieredemb.cache.stats import CacheStats
from tieredemb.cache.tickets import Hold
from tieredemb.config import Policy
from tieredemb.errors import StorageError
from tieredemb.kernels.captures import CAPTURING
from tieredemb.kernels.constants import MIN_SCORE
from tieredemb.kernels.inference import no_inference
from tieredemb.kernels.recording import GraphPool
from tieredemb.kernels.streams import current_stream, on_device, synchronize
from tieredemb.kernels.tracing import marked
from tieredemb.storage.base import ColdRows
from tieredemb.storage.initial import InitialRows

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

LOAD_ROWS = 1 << 20  # rows filled at once by whole-cache calls


class NextPlan(NamedTuple):
    """What the launches of the next plan depend on, beside its ids. `lag`: how many batches before it lock their rows ·
    `uncached`: whether rows may get no slot · `records`: the address of the table of such rows · `overflow`: the
    address of their weights."""

    lag: int
    uncached: bool
    records: int
    overflow: int


ALL_RESIDENT = NextPlan(lag=0, uncached=False, records=0, overflow=0)
ANY_NUMBER = 1 << 62  # of ids


class DeviceCache(Cache):
    """See `Cache`. Rows of the key ranges `resident`, (first key, rows) each, have fixed slots: the last ones, in that
    order. `clients`: if several share the cache, the first key of each in ascending order, and the key after the last;
    a row is counted for the client that has its key.

    Calls may be made on any stream (see `StreamOrder`). Raises `DeviceMemoryError` if the slots do not fit.
    """

    def __init__(
        self,
        cold: ColdRows,
        *,
        slots: int,
        policy: Policy | None = None,
        initial: InitialRows,
        device: torch.device,
        resident: Sequence[tuple[int, int]] = (),
        clients: Sequence[int] = (),
    ) -> None:
        super().__init__(cold, slots=slots, policy=policy, initial=initial, device=device)
        self.on_flush: list[Callable[[], None]] = []
        self.plan_lock = threading.RLock()  # lookups and updates go on while a plan waits for its storage
        # memory that graphs use while they run: those of plans, one after another; and beside them those that compute
        self.plan_pool, self.compute_pool = GraphPool(), GraphPool()
        self._recorded: NextPlan | None = None  # the plan that is being recorded
        self.recorded: weakref.WeakSet[Any] = weakref.WeakSet()  # plans that are replayed, for `memory_report`
        self._deferred: weakref.WeakSet[DeferredRows] = weakref.WeakSet()
        self._ledger = Ledger(self._tickets)
        self._captured = NOTHING_PLANNED  # the effects of a replay of the last captured step
        with no_inference(), torch.cuda.device(device):
            self.hot = DeviceHotRows(cold.layout, slots - sum(rows for _, rows in resident), resident, device)
            cold.attach(device)
            self._order = StreamOrder(device, plans_wait=not cold.device_readable)
            # a plan in place only launches; one that waits for its storage lets lookups and updates go on meanwhile
            self._rows_while_planning = self.lock if cold.device_readable else contextlib.nullcontext()
            self._plan = DevicePlan(self.hot, self.scoring, device, clients)
            self._side = SideStream(device)
            self._moves = RowMoves(cold.layout, self.hot, self._plan, initial)
            self.transfer = self._make_transfer()
            # None if only the host reaches cold rows
            self.ranges = KeyRanges(cold, self.hot, self._moves) if cold.device_readable else None
            self._planner = Planner(
                self.hot, self._plan, self.transfer, self._ledger, self._tickets, self._order, self._side, self.lock
            )
            try:
                self._adopt_scores()
                self._restart(fresh=cold.volatile)
            except BaseException:
                self.transfer.drain()  # the caller that opened the storage closes it now
                raise

    def _make_transfer(self) -> Transfer:
        cold, hot, changes = self.cold, self.hot, self.plan_changes
        if cold.device_readable:
            return InPlace(cold, hot, self._plan, self._moves, side=self._side, changes=changes)
        from tieredemb.cache.device.staged import Staged  # importing numba takes a second

        return Staged(cold, hot, self._plan, self._moves, order=self._order, rows_lock=self.lock, changes=changes)

    # --- batches ----------------------------------------------------------------------------------------------------

    def plan(
        self,
        keys: torch.Tensor,
        homes: torch.Tensor,
        kind: PlanKind = USE,
        *,
        client: PlanOf = None,
        given: torch.cuda.Event | None = None,
        beside: Beside | None = None,
    ) -> DeviceTicket:
        """Fills the rows of `keys` (int64 (N,), in range, negative for ids without a lookup) into slots and locks them;
        completes `homes` (int32 (N,)), which has −1 for each key, else the slot of a resident table's row or `DROPPED`.
        Does not synchronise, unless the tier is staged.

        `kind`: how; a plan ahead over a staged tier does not wait: its transfer is finished by `complete`, or by the
        next call that would find it pending. `client`: if several share the cache, whose batch it is: one number, or
        the numbers of all (int32 (K,), on the device, which must outlast the plan and its replays). `given`: an event
        to wait for before `keys` and `homes` are read. `beside`: launches, on the stream that is current when it is
        called, work that needs complete `homes` and may run while rows move. A failing storage raises its error and
        changes no row; the cache stays usable. A transfer that fails later marks the ticket as `failed`. Raises
        `InvalidInputError` for more ids than a plan can number.
        """
        with self.plan_lock, self._rows_while_planning, on_device(self.device), marked("plan"):
            self._moves.make_ready()
            try:
                self.complete_last()
                with self.lock:  # the stream now waits for the updates of all batches that were released
                    self._check_usable()
                    self.cold.begin_changes()
                    self._order.whole()
                    captured = self._recorded is None and torch.cuda.is_current_stream_capturing()
                    self.is_in_graph |= captured and threading.get_ident() not in CAPTURING
                    begun = self._ledger.begin(captured=captured)
                    if self._recorded is not None and self.hot.slots:
                        uncached = self._planner.may_lack_slots(keys.shape[0], begun.locked, uncached=begun.uncached)
                        if (begun.lag, uncached) != (self._recorded.lag, self._recorded.uncached):
                            raise RuntimeError("batches were released while a plan was captured")
                    self._planner.check_size(keys.shape[0], begun)
                    if begun.captured and self._planner.moves_rows(keys.shape[0]):
                        self._check_capture()
                return self._planner.plan(begun, keys, homes, kind, client=client, given=given, beside=beside)
            finally:
                with self.lock:
                    self._ledger.over()
                    self._order.after_plan()

    def _check_capture(self) -> None:
        """Raises `StorageError` if a plan that fills rows cannot be captured."""
        self._ledger.check_recurring()
        if not self.cold.device_readable:
            raise StorageError(
                f"a step over the {self.cold.kind} tier cannot be captured in a CUDA graph: its rows pass through the "
                f"host; use UnifiedMemory() or HostMemory(), or run the step eagerly"
            )

    def complete(self, ticket: DeviceTicket) -> bool:
        """Finishes the plan of a ticket, if it is unfinished; returns False if it failed. Waits for the GPU and the
        storage. Raises `StorageError` if the cache has become unusable."""
        if not ticket.is_complete:  # else it would wait for another plan's storage
            with self.plan_lock, on_device(self.device):
                if self._is_unfinished(ticket):
                    self.complete_last()
                if not (ticket.is_complete or self._is_unfinished(ticket)):  # another call was interrupted
                    ticket.is_complete = ticket.failed = True
        return not ticket.failed

    def _is_unfinished(self, ticket: DeviceTicket) -> bool:
        return any(each.batch == ticket.batch for each in self._planner.unfinished)  # it may be a `TicketShare`

    def complete_last(self, moving: int = 1) -> None:
        """Finishes plans whose transfers are pending, if any; if that fails, their tickets are marked. `moving`: how
        many caches do this at the same time, which share the bandwidth to cold storage. Waits and raises as `complete`
        does."""
        if self._planner.is_over:
            return
        with self.plan_lock, on_device(self.device):
            if self._planner.is_over:
                return
            self._check_open()
            self._recover()
            self._planner.finish_last(usable=not self.suspects.reason, moving=moving)

    def run_beside(self, function: Beside) -> torch.cuda.Event:
        """Calls `function` on a side stream, which waits for the work queued on the current one; returns the event
        after it."""
        with self.plan_lock:
            self._side.mark()
            return self._side.run(function)

    def overflow(self, tickets: Sequence[DeviceTicket]) -> OverflowRows:
        """Where the rows of `tickets` without a slot are now."""
        last = max(tickets, key=lambda ticket: (ticket.overflow.uncached, ticket.batch))
        return self.transfer.overflow_now(last.overflow)

    # --- recorded plans ---------------------------------------------------------------------------------------------

    def next_plan(self, ids: int) -> NextPlan | None:
        """What a plan of as many ids, at least one, would depend on now; None if it is not to be recorded. The current
        stream waits for the work that the plan has to follow. The caller holds the locks of plans and rows until it has
        planned, or releases them and plans otherwise, after other plans perhaps."""
        if not self._planner.is_over:
            self.complete_last()
        self._check_usable()
        if not self.cold.volatile:
            self.cold.begin_changes()
        self._order.whole()
        if self.hot.slots == 0:
            return ALL_RESIDENT
        lag, locked, uncached = self._ledger.next_locks()
        if not self.transfer.may_record():
            return None
        if self._planner.may_lack_slots(ids, locked, uncached=uncached):
            self.transfer.reserve(min(locked + ids, self.hot.layout.rows))
            return NextPlan(lag, True, self._plan.records.table.data_ptr(), self.transfer.overflow(True).weight)
        return NextPlan(lag, False, 0, 0)

    @contextlib.contextmanager
    def recording(self, plan: NextPlan, ids: int) -> Iterator[None]:
        """Inside, a plan of `ids` ids is captured that may be replayed whenever `next_plan` returns `plan`, as now; the
        first time directly afterwards. If its rows pass through the host, its ticket has the `plan` that other calls
        take. The caller holds the locks of plans and rows. Raises `RuntimeError` if another thread has released a
        batch, so that `plan` no longer holds."""
        host = self.transfer.recording(ids) if self.hot.slots else None
        with contextlib.ExitStack() as after:  # the last first; if one is interrupted, the others run all the same
            after.callback(setattr, self, "_recorded", None)
            after.callback(setattr, self._planner, "recording", None)
            after.callback(self._order.whole)  # ordered behind this stream, not the captured one
            self._recorded, self._planner.recording = plan, host
            yield

    @contextlib.contextmanager
    def captured(self) -> Iterator[None]:
        """Inside, work that uses rows is captured. The caller holds the lock of rows."""
        try:
            yield
        finally:
            self._order.compute()  # as above

    def is_behind(self, batch: int) -> bool:
        """Whether a plan made now runs, on the device, after all launches for a released `batch`. A plan on another
        thread runs only after batches that were released when it was requested, and finds the rows of others locked.
        The caller holds the locks of plans and rows."""
        return self._order.is_behind or not self._ledger.is_locked(batch)

    def slots_left(self) -> int:
        """For how many ids the next plan surely has slots; −1 if rows may be without a slot in any case. The caller
        holds the locks of plans and rows."""
        if self.hot.slots == 0:
            return ANY_NUMBER
        _, locked, uncached = self._ledger.next_locks()
        return -1 if uncached else self.hot.slots - locked

    def begun(self, ticket: DeviceTicket, recorded: BatchPlan | None) -> None:
        """Called directly after the recorded plan of `ticket` was replayed. If rows pass through the host, `complete`
        fills them, as for the plan that was `recorded`."""
        ticket.ready, ticket.kept = self._order.planned(), ()
        if recorded is not None:
            plan = recorded.rebind()
            self.transfer.await_report(plan)
            self._planner.leave(ticket, plan)
            self._order.after_plan()

    def apply(self, effects: Effects, ids: int = 0) -> list[DeviceTicket]:
        """Enters a replay with these `effects` in the ledger, before it is launched: counts its plans, locks rows, and
        opens tickets for its batches, which are returned. If the launch never happens, deferred rows do not move.
        `ids`: whose rows each batch locks, if `effects` do not say it. The caller holds the locks of plans and
        rows."""
        first, tickets = self._ledger.count(effects), list[DeviceTicket]()
        for number, homes, overflow, deferred, _ in effects.opens:
            ticket = self._planner.ticket(first + number, homes, overflow, ids)
            ticket.kept = ()  # its memory was counted when it was first planned
            if deferred is not None:
                self._planner.leave(ticket, deferred.rebind())
            tickets.append(ticket)
        return tickets

    # --- captured steps ---------------------------------------------------------------------------------------------

    def may_replay(
        self, known: Sequence[DeviceTicket] = (), last: int | None = None, effects: Effects = NOTHING_PLANNED
    ) -> bool:
        """Whether a captured step may be replayed now, or a step captured; if so, it follows all plans made ahead. Only
        the batches `known` may be in flight (see `Ledger.may_replay`), without rows under records of a smaller table.
        Finishes the transfers of other batches. The caller holds the locks of plans and rows until it has replayed."""
        self._planner.end_capture()
        for ticket, plan in self._planner.unfinished.items():
            if ticket not in known or plan.phase is not plan.left_at:  # or the transfer of its rows was interrupted
                self.complete_last()
                break
        self._check_usable()
        self.cold.begin_changes()
        self._order.whole()
        records = self._plan.records.table
        if any(ticket.overflow.uncached and ticket.overflow.names is not records for ticket in known):
            return False
        return self._ledger.may_replay((ticket.batch for ticket in known), last, effects)

    @contextlib.contextmanager
    def capturing(self, known: Sequence[DeviceTicket]) -> Iterator[None]:
        """Inside, a step is captured while the batches `known` are in flight; it releases some of them, and plans
        others that stay in flight. Each replay finds as many. Rows that it fills have arrived with the first replay,
        which `end_capture` enters."""
        with self.whole():
            self._planner.begin_capture()
            self._ledger.begin_capture(ticket.batch for ticket in known)
        try:
            yield
        finally:
            with self.whole():
                self._captured = self._ledger.end_capture(self._plan.records.table.data_ptr())
                self._order.joined()

    def end_capture(self, opened: Sequence[DeviceTicket]) -> Effects:
        """Called when a captured step was replayed for the first time, with the batches `opened` left in flight. The
        capture is in the ledger as this replay. Returns the effects of each replay."""
        with self.plan_lock, self.lock:
            first = self._ledger.last - self._captured.plans
            left = [ticket for ticket in self._planner.unfinished if ticket.batch <= first]
            self._planner.end_capture(ran=True)
            self._ledger.count(NOTHING_PLANNED)  # so that plans counted in the capture count as eager
            return replace(
                self._captured,
                opens=tuple(
                    Opened(each.batch - first, each.homes, each.overflow, each.plan, each.is_complete)
                    for each in opened
                ),
                fills=bool(left) and all(ticket.is_complete for ticket in left),
            )

    def abort_capture(self) -> None:
        """Rows that the aborted step would have filled stay pending."""
        with self.plan_lock, self.lock:
            self._planner.end_capture()

    def outgrew(self, effects: Effects) -> bool:
        """Whether the table of rows without a slot has grown since the capture, so that the step has to be captured
        anew."""
        return effects.records != self._plan.records.table.data_ptr()

    # --- deferred rows, of captured steps ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def defer_rows(self, deferred: DeferredRows) -> Iterator[None]:
        """Inside, plans of one batch leave missed rows to `deferred`, if rows move by launches alone. `complete_last`
        fills them, or the next call that would find them missing. The caller holds the lock of plans."""
        self._deferred.add(deferred)
        deferred.begin()
        with contextlib.ExitStack() as after:
            after.callback(setattr, self._planner, "deferred", None)
            self._planner.deferred = deferred
            yield

    def place_last(self) -> None:
        """Gives slots to the missed rows of the last plan, if they were deferred: from here on they may be filled."""
        with self.plan_lock, on_device(self.device):
            self._planner.place_last()

    def publish_last(self) -> None:
        """After `place_last`: publishes the slots, before the next plan; it may run beside the filling of rows."""
        with self.plan_lock, on_device(self.device):
            self._planner.publish_last()

    @property
    def unfinished(self) -> int:
        """How many batches have rows that are not filled yet."""
        return len(self._planner.unfinished)

    def rows_arrived(self, tickets: Sequence[DeviceTicket]) -> None:
        """Called when a replay has filled the deferred rows of `tickets`."""
        with self.plan_lock, self.lock:
            self._planner.rows_arrived(tickets)

    # --- calls ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def entered(self, *, checked: bool = False, changes: bool = True) -> Iterator[None]:
        """Holds the cache for one call: its locks and its device; the current stream waits for what others have queued.
        `checked`: whether a larger call was checked already, as while rows change · `changes`: whether weights may
        differ afterwards (`rows_version`)."""
        with self.whole(), on_device(self.device):
            if not checked:
                self._begin_call()
            self._order.whole()
            self.transfer.drain()
            self.rows_version += changes
            try:
                yield
            finally:
                self._order.touched()

    @contextlib.contextmanager
    def using(self, *tickets: DeviceTicket) -> Iterator[None]:
        """Holds the cache for a call that looks up or updates only the rows of `tickets`: it does not wait for plans
        made ahead of other batches."""
        with self.lock, on_device(self.device):
            self.check_rows()
            self._order.compute()
            self.transfer.wait_for_uncached()
            for ticket in tickets:
                ticket.failed |= not ticket.is_complete
                ticket.check()
                if ticket.ready is not None:
                    self._order.arrive(ticket.ready)
                    ticket.ready = None
            yield

    @contextlib.contextmanager
    def in_place(self, ranges: KeyRanges, first: int, rows: int) -> Iterator[tuple[torch.Tensor, OverflowRows]]:
        """Holds the cache for a call that reads or updates the rows of `rows` consecutive keys from `first` on, in
        place; no row moves. Yields their homes, int32 (`rows`,), and where rows without a slot are. `ranges`: of this
        cache. Does not synchronise."""
        with self.entered(changes=False):
            self._moves.make_ready()
            self.cold.begin_changes()
            yield ranges.find(first, rows)

    def hold(self) -> tuple[Hold, torch.cuda.Event]:
        """For a plan ahead on another thread: keeps the rows of batches in flight locked, so that only rows move whose
        use is over before the returned event."""
        with self.lock, on_device(self.device):
            return self._ledger.hold(), self._order.queued()

    @contextlib.contextmanager
    def ahead(self, inputs: Sequence[object], hold: tuple[Hold, torch.cuda.Event] | None) -> Iterator[None]:
        held, after = hold or (None, None)
        with self.plan_lock, on_device(self.device), self._order.ahead(after):
            for part in inputs:
                if isinstance(part, torch.Tensor) and part.is_cuda:
                    part.record_stream(current_stream())
            try:
                yield
            finally:
                if held is not None:
                    held.release()

    def memory(self) -> contextlib.AbstractContextManager[None]:
        """Tensors made inside outlast the plans made ahead in them; see `StreamOrder`."""
        return self._order.memory()

    # --- whole-cache calls ------------------------------------------------------------------------------------------

    def write_back(self) -> None:
        with self.whole():
            self.check_loadable()
            with self.entered(checked=True):
                for update in self.on_flush:
                    update()
                metadata = self.cold.metadata
                metadata.batch, _ = self._plan.time_and_used()  # includes replays, which the host does not count
                metadata.policy = self.scoring.name
                self._write_back()

    def dirty_rows(self) -> tuple[Array, Array, Array]:
        hot = self.hot
        with self.entered(checked=True):
            slots = torch.nonzero((hot.dirty[: hot.slots] != 0) & (hot.key >= 0)).flatten()
            found = [(hot.key[slots], slots)]
            for first_key, first_slot, rows in hot.resident:
                slots = torch.nonzero(hot.dirty[first_slot : first_slot + rows]).flatten()
                found.append((slots + first_key, slots + first_slot))
            parts = [(keys, hot.weight[at], hot.state[at].view(torch.int32), hot.score[at]) for keys, at in found]
            rows_of = [(keys, weight, torch.cat([state, score[:, None]], 1)) for keys, weight, state, score in parts]
            rows_of += self.transfer.uncached_rows()
            keys, weight, state = (torch.cat(each).cpu() for each in zip(*rows_of, strict=True))
        order = torch.argsort(keys)
        carrier = self.cold.layout.carrier
        bits = weight[order].contiguous().view(torch.uint8).numpy().view(carrier)
        return keys[order].numpy(), bits.reshape(-1, self.cold.layout.columns), state[order].numpy().view(np.uint32)

    def check_loadable(self, parts: Iterable[Part] | None = None) -> None:
        self.complete_last()  # else the victims of a dropped batch would be written after the call
        super().check_loadable(parts)
        self.transfer.drain()  # rows of the storage may be replaced next

    def _begin_call(self) -> None:
        self.complete_last()
        super()._begin_call()

    def drop_slots(self, missed: Missed) -> None:
        """After a plan whose `missed` rows own slots that they may not have reached: empties these slots, and writes
        all others back. The cache is empty then. Synchronises."""
        with self.entered(checked=True):
            synchronize(self.device)
            others = [each for each in self._planner.missed_deferred() if each is not missed and not each.is_over]
            for each in (missed, *others):
                homes = self._plan.placed(each)
                slots = homes[homes >= 0]
                self.hot.key[slots] = NO_KEY
                self.hot.dirty[slots] = 0
                records = -2 - homes[homes <= -2]
                if len(records):
                    self._plan.records.free(records)
            self._write_back()
            self._restart(fresh=False)

    def _write_back(self) -> None:
        """Writes back all dirty rows, and the scores of cached rows. Synchronises."""
        self.transfer.write_back(0, self.hot.slots, None)
        for first_key, first_slot, rows in self.hot.resident:
            self.transfer.write_back(first_slot, rows, first_key)
        self.transfer.write_back_uncached()
        synchronize(self.device)

    def _write_back_range(self, start: int, stop: int) -> None:
        with self.entered(checked=True):
            self._write_back()

    def hottest(self) -> torch.Tensor:
        with self.entered(changes=False):
            key, score = self.hot.key, self.hot.score[: self.hot.slots].to(torch.int64) & 0xFFFFFFFF
            order = torch.where(key >= 0, score, -1).argsort(descending=True)
            return key[order][: int((key >= 0).sum())]

    def sample_scores(self, most: int, keys: Array) -> ScoreSample:
        with self.entered(changes=False):
            time, slots = self._plan.time_and_used()  # includes replays, which the host does not count
            score = self.hot.score[: slots : max(1, -(-slots // most))]
            found = self.hot.find(torch.from_numpy(keys).to(self.device))
            words = torch.cat([score, found]).cpu().numpy()  # also waits for writes to cold storage
            return ScoreSample(
                time=time,
                score=words[: len(score)].view(np.uint32),
                slots_each=slots / max(1, len(score)),
                has_slot=words[len(score) :] >= 0,
            )

    @property
    def plans(self) -> int:
        return self._ledger.last

    def _reload_range(self, start: int, stop: int) -> None:
        with self.entered(checked=True):
            key = self.hot.key
            slots = torch.nonzero((key >= start) & (key < stop)).flatten()
            for part in torch.split(slots, LOAD_ROWS):
                self._load(key[part], part.to(torch.int32))
            for first_key, first_slot, rows in self.hot.resident:
                low, high = max(start, first_key), min(stop, first_key + rows)
                self._load_range(low, first_slot + low - first_key, high - low)
            self.transfer.reload_uncached()

    def check_idle(self, call: str) -> None:
        with self.whole():
            self.complete_last()
            super().check_idle(call)

    def forget(self) -> None:
        with self.entered(checked=True):
            super().check_idle("load a checkpoint")
            self._adopt_scores()
            self._restart(fresh=False)

    def _restart(self, *, fresh: bool) -> None:
        """Empties the slots, and fills those of resident tables; if `fresh`, no row was ever written."""
        synchronize(self.device)  # cold rows may have been replaced on the host
        self.hot.reset()
        self._planner.forget()
        self._ledger.restart(self.cold.metadata.batch)
        self._plan.restart(self._ledger.last)
        self.transfer.restart()
        if self.ranges is not None:
            self.ranges.restart()
        for first_key, first_slot, rows in self.hot.resident:
            if fresh:
                self._moves.generate_range(first_key, first_slot, rows)
            else:
                self._load_range(first_key, first_slot, rows)
        self.hot.score[self.hot.slots :].fill_(MIN_SCORE)

    def _load_range(self, first_key: int, first_slot: int, rows: int) -> None:
        for start in range(0, rows, LOAD_ROWS):
            span = torch.arange(start, min(start + LOAD_ROWS, rows), device=self.device)
            self._load(span + first_key, (span + first_slot).to(torch.int32))

    def _load(self, keys: torch.Tensor, slots: torch.Tensor) -> None:
        """Fills slots, which belong to these keys, with cold rows. A row never written is generated; it stays clean in
        the slot of a resident table, whose score is never written back."""
        self.transfer.load(keys, slots)
        resident = slots[slots >= self.hot.slots].long()
        self.hot.dirty[resident] = 0
        self.hot.score[resident] = MIN_SCORE

    def stats(self, client: int | None = None) -> CacheStats:
        with self.whole(), on_device(self.device):
            if not self._planner.has_deferred_alone:  # a captured step fills and counts deferred rows
                self.complete_last()
            super()._begin_call()
            self._order.whole()
            return self.counted(client)

    def counted(self, client: int | None) -> CacheStats:
        totals, layout = self._plan.totals(client), self.cold.layout
        return CacheStats(
            batches=totals["batches"],
            lookups=totals["lookups"],
            hits=totals["hits"],
            unique=totals["unique"],
            rows_filled=totals["filled"],
            bytes_filled=(totals["filled"] - totals["generated"]) * layout.row_bytes,
            evictions=totals["evicted"],
            rows_written_back=totals["written_back"],
            bytes_written_back=totals["written_back"] * layout.row_bytes + totals["scores_written"] * 4,
            rows_overflow=totals["overflow"],
        )

    def memory_report(self) -> dict[str, Any]:
        with self.lock:
            batch = {"plans": self._tickets.size_bytes() + self._plan.size_bytes()}
            batch["records"] = self._plan.records.size_bytes()
            batch["recorded"] = sum(each.size_bytes() for each in self.recorded)
            batch["deferred"] = sum(each.size_bytes() for each in self._deferred)
            return {
                "cache": self.hot.size_bytes(),
                "batch": batch | self.transfer.size_bytes(),
                "cold": {"tier": self.cold.kind} | self.cold.size_bytes(),
            }

    def _release(self) -> None:
        self._planner.unfinished = {}
        self.transfer.drain()
        synchronize(self.device)  # kernels may still read cold rows
