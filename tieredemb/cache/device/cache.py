"""The hot cache on a GPU over one key space: the twin of `HostCache`. Over rows that kernels reach, the device says no
word to the host but in whole-cache calls.

It is composed of a ledger of batches (`ledger`), the slots (`hot_rows`), the launches of plans (`plan`), the way rows
travel (`transfer`), the order of streams (`stream_order`), and the planner that leads a batch through them (`planner`).
This file is their face: who may call when, under which locks, and the calls that concern all rows.
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
    """What the launches of the next plan will depend on but its ids: `lag`, how many batches before it lock their rows
    · `uncached`: whether rows may be left without a slot · `records`: the address of the table of those, and
    `overflow`: that of their weights."""

    lag: int
    uncached: bool
    records: int
    overflow: int


ALL_RESIDENT = NextPlan(lag=0, uncached=False, records=0, overflow=0)
ANY_NUMBER = 1 << 62  # of ids


class DeviceCache(Cache):
    """See `Cache`. Rows of the key ranges `resident`, (first key, rows) each, have slots of their own, from
    `slots` less their number on, in that order. `clients`: where several plan by the cache, the first key of each in
    ascending order, and that after the last; a row is counted for the client that has its key.

    Calls may come on any stream (see `StreamOrder`). Raises `DeviceMemoryError` where the slots do not fit.
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
        self.plan_lock = threading.RLock()  # a plan waits for its storage beside lookups and updates
        # of what graphs use while they run: those of plans one after the other, and beside them those that compute
        self.plan_pool, self.compute_pool = GraphPool(), GraphPool()
        self._recorded: NextPlan | None = None  # the plan that is being recorded
        self.recorded: weakref.WeakSet[Any] = weakref.WeakSet()  # plans that are replayed, of which each has a size
        self._deferred: weakref.WeakSet[DeferredRows] = weakref.WeakSet()
        self._ledger = Ledger(self._tickets)
        self._captured = NOTHING_PLANNED  # what replays do of the step that was captured last
        with no_inference(), torch.cuda.device(device):
            self.hot = DeviceHotRows(cold.layout, slots - sum(rows for _, rows in resident), resident, device)
            cold.attach(device)
            self._order = StreamOrder(device, plans_wait=not cold.device_readable)
            # launches in place are over at once; what waits for its storage lets lookups and updates go on meanwhile
            self._rows_while_planning = self.lock if cold.device_readable else contextlib.nullcontext()
            self._plan = DevicePlan(self.hot, self.scoring, device, clients)
            self._side = SideStream(device)
            self._moves = RowMoves(cold.layout, self.hot, self._plan, initial)
            self.transfer = self._make_transfer()
            # None where the host alone reaches cold rows
            self.ranges = KeyRanges(cold, self.hot, self._moves) if cold.device_readable else None
            self._planner = Planner(
                self.hot, self._plan, self.transfer, self._ledger, self._tickets, self._order, self._side, self.lock
            )
            try:
                self._adopt_scores()
                self._restart(fresh=cold.volatile)
            except BaseException:
                self.transfer.drain()  # who has opened the storage closes it now
                raise

    def _make_transfer(self) -> Transfer:
        cold, hot, changes = self.cold, self.hot, self.plan_changes
        if cold.device_readable:
            return InPlace(cold, hot, self._plan, self._moves, side=self._side, changes=changes)
        from tieredemb.cache.device.staged import Staged  # numba takes a second to import

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
        """Makes the rows of `keys` (int64 (N,), in range, negative where there is nothing to look up) resident and
        locks them; completes `homes` (int32 (N,)), which comes with −1 for each key, else with the slot of a resident
        table's row or `DROPPED`. Does not synchronise, unless the tier is staged.

        `kind`: how; one that is made ahead over a staged tier need not wait: its transfer is finished by `complete`, or
        by the next call that would find it pending. `client`: where several share the cache, whose batch it is: a
        number, or those of all whose ids it has (int32 (K,), on the device, to outlast the plan and its replays).
        `given`: comes once `keys` and `homes` are there, if that is yet to be waited for. `beside` launches, on the
        stream that is current when it is called, what needs complete `homes` and may run beside the movement of rows. A
        failing storage raises its error and changes no row; the cache stays usable. A transfer that fails later leaves
        the ticket `failed`. Raises `InvalidInputError` for more ids than a plan can number.
        """
        with self.plan_lock, self._rows_while_planning, on_device(self.device), marked("plan"):
            self._moves.make_ready()
            try:
                self.complete_last()
                with self.lock:  # what was released by now was updated by what the stream now waits for
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
        """Raises `StorageError` where a plan that fills rows cannot be captured."""
        self._ledger.check_recurring()
        if not self.cold.device_readable:
            raise StorageError(
                f"a step over the {self.cold.kind} tier cannot be captured in a CUDA graph: its rows pass through the "
                f"host; use UnifiedMemory() or HostMemory(), or run the step eagerly"
            )

    def complete(self, ticket: DeviceTicket) -> bool:
        """Brings the plan of a ticket to its end, if it has yet to come there; returns False if it failed. Waits for
        the GPU and the storage. Raises `StorageError` where the cache cannot be used any more."""
        if not ticket.is_complete:  # or a plan that waits for its storage would be waited for
            with self.plan_lock, on_device(self.device):
                if self._is_unfinished(ticket):
                    self.complete_last()
                if not (ticket.is_complete or self._is_unfinished(ticket)):  # somebody was interrupted at it
                    ticket.is_complete = ticket.failed = True
        return not ticket.failed

    def _is_unfinished(self, ticket: DeviceTicket) -> bool:
        return any(each.batch == ticket.batch for each in self._planner.unfinished)  # it may be a share

    def complete_last(self, moving: int = 1) -> None:
        """Brings plans to their ends whose transfers are pending, if any; their tickets know if that fails. `moving`:
        how many caches do this at the same time, which share the way to cold storage. Waits and raises as `complete`
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
        """Calls it on a stream beside the current one, behind what that has queued; returns what comes once it is
        done."""
        with self.plan_lock:
            self._side.mark()
            return self._side.run(function)

    def overflow(self, tickets: Sequence[DeviceTicket]) -> OverflowRows:
        """Where the rows of `tickets` lie now that have no slot."""
        last = max(tickets, key=lambda ticket: (ticket.overflow.uncached, ticket.batch))
        return self.transfer.overflow_now(last.overflow)

    # --- recorded plans ---------------------------------------------------------------------------------------------

    def next_plan(self, ids: int) -> NextPlan | None:
        """What a plan of as many ids, one at least, would depend on now, put behind what it has to come behind; None
        where it is not to be recorded. The caller holds the locks of plans and rows until it has planned, or gives
        them back and plans otherwise: another plan may come between then."""
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
        """A plan of `ids` ids is captured inside that is to be replayed wherever `next_plan` is `plan`, as it is now,
        and first of all right behind; where its rows pass through the host, its ticket has the `plan` that the other
        calls take. The caller holds the locks of plans and rows. Raises `RuntimeError` where it is not any more, as
        another thread has released a batch."""
        host = self.transfer.recording(ids) if self.hot.slots else None
        with contextlib.ExitStack() as after:  # the last one first; interrupted there, it does the others all the same
            after.callback(setattr, self, "_recorded", None)
            after.callback(setattr, self._planner, "recording", None)
            after.callback(self._order.whole)  # from here, and not from the stream that was captured
            self._recorded, self._planner.recording = plan, host
            yield

    @contextlib.contextmanager
    def captured(self) -> Iterator[None]:
        """What uses rows is captured inside, for replays. The caller holds the lock of rows."""
        try:
            yield
        finally:
            self._order.compute()  # as above

    def is_behind(self, batch: int) -> bool:
        """Whether a plan that is made now comes, on the device, behind all that was launched for a `batch` that was
        released. One by a thread of its own comes behind those alone that were released when it was asked for, and
        finds the rows of the others locked. The caller holds the locks of plans and rows."""
        return self._order.is_behind or not self._ledger.is_locked(batch)

    def slots_left(self) -> int:
        """For how many ids a plan leaves no row without a slot, if it is the next one; −1 if rows may be without one in
        any case. The caller holds the locks of plans and rows."""
        if self.hot.slots == 0:
            return ANY_NUMBER
        _, locked, uncached = self._ledger.next_locks()
        return -1 if uncached else self.hot.slots - locked

    def begun(self, ticket: DeviceTicket, recorded: BatchPlan | None) -> None:
        """The recorded plan of `ticket` was replayed, right behind. Where rows pass through the host, they come with
        `complete`, as of the plan that was `recorded`."""
        ticket.ready, ticket.kept = self._order.planned(), ()
        if recorded is not None:
            plan = recorded.rebind()
            self.transfer.await_report(plan)
            self._planner.leave(ticket, plan)
            self._order.after_plan()

    def apply(self, effects: Effects, ids: int = 0) -> list[DeviceTicket]:
        """Enters a replay that has these `effects` on the books, before it is launched: its plans count, and lock rows;
        the flights of its batches open, which are returned. Where the launch never comes, what is left for later moves
        nothing. `ids`: whose rows each batch locks, where `effects` do not say it. The caller holds the locks of plans
        and rows."""
        first, tickets = self._ledger.count(effects), list[DeviceTicket]()
        for number, homes, overflow, deferred, _ in effects.opens:
            ticket = self._planner.ticket(first + number, homes, overflow, ids)
            ticket.kept = ()  # it counts where it was planned first
            if deferred is not None:
                self._planner.leave(ticket, deferred.rebind())
            tickets.append(ticket)
        return tickets

    # --- captured steps ---------------------------------------------------------------------------------------------

    def may_replay(
        self, known: Sequence[DeviceTicket] = (), last: int | None = None, effects: Effects = NOTHING_PLANNED
    ) -> bool:
        """Whether a captured step may be replayed now, or one captured, which is put behind all plans made ahead: its
        plans know of no batch in flight but those `known`; see `Ledger.may_replay`. Nor may these use rows without a
        slot under records of before there were more. Transfers of others are ended. The caller holds the locks of plans
        and rows, until it has replayed."""
        self._planner.end_capture()
        for ticket, plan in self._planner.unfinished.items():
            if ticket not in known or plan.phase is not plan.left_at:  # or what was to fill its rows was interrupted
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
        """A step is captured inside while the batches `known` are in flight; it ends some, and leaves others in flight
        that are planned in it. Each replay finds as many. What it fills has arrived with the first replay, which
        `end_capture` enters."""
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
        """A captured step has run a first time, as its capture is on the books, and has left the batches `opened` in
        flight. Returns what each replay does."""
        with self.plan_lock, self.lock:
            first = self._ledger.last - self._captured.plans
            left = [ticket for ticket in self._planner.unfinished if ticket.batch <= first]
            self._planner.end_capture(ran=True)
            self._ledger.count(NOTHING_PLANNED)  # what was counted in the capture
            return replace(
                self._captured,
                opens=tuple(
                    Opened(each.batch - first, each.homes, each.overflow, each.plan, each.is_complete)
                    for each in opened
                ),
                fills=bool(left) and all(ticket.is_complete for ticket in left),
            )

    def abort_capture(self) -> None:
        """What a captured step would have filled is pending still."""
        with self.plan_lock, self.lock:
            self._planner.end_capture()

    def outgrew(self, effects: Effects) -> bool:
        """Whether more rows without a slot were in flight than there was room for at the capture, which has to be made
        anew."""
        return effects.records != self._plan.records.table.data_ptr()

    # --- rows that are left for later, by the steps that are captured -----------------------------------------------

    @contextlib.contextmanager
    def defer_rows(self, deferred: DeferredRows) -> Iterator[None]:
        """Plans made inside, of one batch, leave what they have missed to `deferred`, where rows move by launches
        alone. It comes with `complete_last`, or the next call that would find it missing. The caller holds the lock of
        plans."""
        self._deferred.add(deferred)
        deferred.begin()
        with contextlib.ExitStack() as after:
            after.callback(setattr, self._planner, "deferred", None)
            self._planner.deferred = deferred
            yield

    def place_last(self) -> None:
        """Gives slots to what the last plan has missed, if that was deferred: its rows may come from here on."""
        with self.plan_lock, on_device(self.device):
            self._planner.place_last()

    def publish_last(self) -> None:
        """Behind `place_last`: does what has to come before the next plan, and may come beside the rows."""
        with self.plan_lock, on_device(self.device):
            self._planner.publish_last()

    @property
    def unfinished(self) -> int:
        """How many batches there are whose rows have yet to come."""
        return len(self._planner.unfinished)

    def rows_arrived(self, tickets: Sequence[DeviceTicket]) -> None:
        """A replay has filled what `tickets` had left for later."""
        with self.plan_lock, self.lock:
            self._planner.rows_arrived(tickets)

    # --- calls ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def entered(self, *, checked: bool = False, changes: bool = True) -> Iterator[None]:
        """Holds the cache for one call: its locks, its device, and its place behind what other streams have queued.
        `checked`: for a part of a call that was checked as a whole, such as a change that is under way · `changes`:
        whether to count that rows may have other weights afterwards (`rows_version`)."""
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
        """Holds the cache for a call that looks up or updates the rows of `tickets` alone: it does not wait for plans
        that were made ahead for others."""
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
        """Holds the cache for a call that reads or updates the rows of consecutive keys, those from `first` on, where
        they are; no row moves. Yields their homes, int32 (`rows`,), and where rows without a slot are. `ranges`: its
        own. Does not synchronise."""
        with self.entered(changes=False):
            self._moves.make_ready()
            self.cold.begin_changes()
            yield ranges.find(first, rows)

    def hold(self) -> tuple[Hold, torch.cuda.Event]:
        """Where a thread of its own plans ahead: keeps locked what is in flight now, so that nothing moves but what the
        event's stream is through with."""
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
        """Tensors made inside outlast the plan that is made ahead in them; see `StreamOrder`."""
        return self._order.memory()

    # --- whole-cache calls ------------------------------------------------------------------------------------------

    def write_back(self) -> None:
        with self.whole():
            self.check_loadable()
            with self.entered(checked=True):
                for update in self.on_flush:
                    update()
                metadata = self.cold.metadata
                metadata.batch, _ = self._plan.time_and_used()  # that of all replays, which the host does not count
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
        self.complete_last()  # of a batch that was dropped: its victims are not to be written behind the call
        super().check_loadable(parts)
        self.transfer.drain()  # the rows of the storage may be about to be replaced

    def _begin_call(self) -> None:
        self.complete_last()
        super()._begin_call()

    def drop_slots(self, missed: Missed) -> None:
        """After a plan whose `missed` rows may not have arrived in the slots that are theirs already: such slots are
        emptied, and all others written back. The cache begins anew, without rows. Synchronises."""
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
        """All dirty rows, and the scores of the cached ones. Synchronises."""
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
            time, slots = self._plan.time_and_used()  # replays counted, of which the host does not know
            score = self.hot.score[: slots : max(1, -(-slots // most))]
            found = self.hot.find(torch.from_numpy(keys).to(self.device))
            words = torch.cat([score, found]).cpu().numpy()  # waits for what writes to cold storage, too
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
        """Empties the cached slots and brings the rows of resident tables in; none was ever written if `fresh`."""
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
        """Brings cold rows into slots that are theirs. A row never written is generated, and stays clean in the slot
        of a resident table, whose score is never written back."""
        self.transfer.load(keys, slots)
        resident = slots[slots >= self.hot.slots].long()
        self.hot.dirty[resident] = 0
        self.hot.score[resident] = MIN_SCORE

    def stats(self, client: int | None = None) -> CacheStats:
        with self.whole(), on_device(self.device):
            if not self._planner.has_deferred_alone:  # those are for a captured step to fill, and counted then
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
