"""The hot cache on a GPU over one key space: the twin of `TieredCache`, without a word from the device to the host.

`plan` launches; what it found, missed and moved is known to the device alone. Cold rows that kernels read in place
(`in_place.InPlace`) need no host at all, so that a step can be captured in a CUDA graph; other tiers are staged
(`staged.Staged`) and make the host wait.

Rows of a batch larger than the cache stay where they are and are used there, under records (`device_plan.Records`): no
home changes while a ticket is in flight, so such a row gets a slot only in a plan after its last ticket.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from tieredemb.cache.device_plan import Away, DevicePlan, Missed
from tieredemb.cache.device_rows import DeviceRows
from tieredemb.cache.in_place import InPlace
from tieredemb.cache.policy import MIN_SCORE
from tieredemb.cache.replays import CapturableCache, DeviceTicket
from tieredemb.cache.staged import Staged
from tieredemb.cache.stream_order import StreamOrder
from tieredemb.cache.tickets import Hold
from tieredemb.cache.transfer import Beside, Transfer
from tieredemb.config import Policy
from tieredemb.errors import InvalidInputError, StorageError
from tieredemb.kernels.ranges import marked
from tieredemb.kernels.streams import on_device, synchronize
from tieredemb.stats import CacheStats
from tieredemb.storage.base import ColdRows
from tieredemb.storage.initial import InitialRows

LARGE = 1 << 17  # ids of a batch whose sorting, or whose plan's beginning, takes longer than going aside for it (4 µs)
LOAD_ROWS = 1 << 20  # rows brought in at once by whole-cache calls
MOST_IDS = 1 << 28  # of a batch, and half of those in flight: while a plan lasts, homes number claims and records too


class _Asked(NamedTuple):
    """A plan made ahead that has yet to come to its end, by `move`: on that stream, in that mode. `after`: what it came
    behind."""

    ticket: DeviceTicket
    move: Callable[[], None]
    stream: torch.cuda.Stream
    after: torch.cuda.Event | None
    inference: bool


class DeviceCache(CapturableCache):
    """See `Cache`. Rows of the key ranges `resident`, (first key, rows) each, have slots of their own, from
    `slots` less their number on, in that order.

    Calls may come on any stream (see `StreamOrder`). Raises `DeviceMemoryError` where the slots do not fit.
    """

    def __init__(
        self,
        cold: ColdRows,
        *,
        slots: int,
        policy: Policy | None = None,
        initial: InitialRows,
        lock_window: int = 0,
        device: torch.device,
        resident: Sequence[tuple[int, int]] = (),
    ) -> None:
        super().__init__(cold, slots=slots, policy=policy, initial=initial, lock_window=lock_window, device=device)
        self._resident = tuple(resident)
        pinned = sum(rows for _, rows in self._resident)
        self._cached = slots - pinned
        self._batch = self._eager = 0  # see `_restart`
        self._recurring = set()
        self._planning: int | None = None  # the batch that is being planned, and not yet in flight
        self._asked: _Asked | None = None
        self.on_flush: list[Callable[[], None]] = []
        self._order = StreamOrder(device)
        self.plan_lock = threading.RLock()  # a plan waits for its storage beside lookups and updates
        with torch.inference_mode(False), torch.cuda.device(device):
            self.hot = DeviceRows(cold.layout, self._cached, pinned, device)
            cold.attach(device)
            self._plan = DevicePlan(self.hot, self._scoring, device)
            kind = InPlace if cold.device_readable else Staged
            self._transfer: Transfer = kind(cold, self.hot, initial, self._plan, self._grow_beside)
            self._adopt_scores()
            self._restart(fresh=cold.volatile)

    # --- batches ----------------------------------------------------------------------------------------------------

    def plan(
        self,
        keys: torch.Tensor,
        homes: torch.Tensor,
        *,
        score: bool = True,
        given: torch.cuda.Event | None = None,
        beside: Beside | None = None,
        ahead: bool = False,
    ) -> DeviceTicket:
        """Makes the rows of `keys` (int64 (N,), in range, negative where there is nothing to look up) resident and
        locks them; completes `homes` (int32 (N,)), which comes with −1 for each key, else with the slot of a resident
        table's row or `DROPPED`. Does not synchronise, unless the tier is staged.

        With `score=False` the batch leaves no trace in scores and counters, as when a checkpointed forward is
        recomputed. `given`: comes once `keys` and `homes` are there, if that is yet to be waited for. `beside`
        launches, on the stream that is current when it is called, what needs complete `homes` and may run beside the
        movement of rows. `ahead`: whether other work comes before these rows are used, so that a plan over a staged
        tier need not wait: it is brought to its end by `complete`, or by the next call that would find it without one.
        A failing storage raises its error and changes no row; the cache stays usable. Raises `InvalidInputError` for
        more ids than a plan can number.
        """
        # launches in place are over at once; what waits for its storage lets lookups and updates go on meanwhile
        rows = self.lock if self._transfer.in_place else contextlib.nullcontext()
        with self.plan_lock, rows, on_device(self.device), marked("plan"):
            try:
                return self._plan_next(keys, homes, score=score, given=given, beside=beside, ahead=ahead)
            finally:
                with self.lock:
                    self._planning = None
                    if not self._transfer.in_place:
                        self._order.after_plan()

    def _plan_next(
        self,
        keys: torch.Tensor,
        homes: torch.Tensor,
        *,
        score: bool,
        given: torch.cuda.Event | None,
        beside: Beside | None,
        ahead: bool,
    ) -> DeviceTicket:
        n = keys.shape[0]
        moves = self._cached > 0 and n > 0
        self.complete_last()
        with self.lock:  # what was released by now was updated by what the stream now waits for
            self._check_usable()
            self._order.whole()
            batch = self._planning = self._batch + 1
            oldest = self._oldest(batch)
            locked, slotless = self._book.locked(oldest)
            self._check_size(n, locked)
            self._check_capture(moves=moves)
        if not moves:
            if given is not None:
                given.wait()
            self._batch = batch
            ticket = self._ticket(batch, homes, slotless=False)
            self._count(ticket, score=score, beside=beside)
            return ticket
        slotless = slotless or locked + n > self._cached
        if slotless:
            self._transfer.make_room(min(locked + n, self.cold.layout.rows))
        missed = Missed(n, self.device)
        self._transfer.retire(batch, batch - oldest)
        self._batch = batch  # before the device counts it: a batch too many locks more, one too few less
        away = self._transfer.away(slotless)
        self._plan.begin(missed, lag=batch - oldest, scored=score, away=away)
        if given is not None:
            given.wait()
        self._plan.find(keys, homes, missed, scored=score, away=away)
        move = functools.partial(self._move, missed, homes, slotless=slotless, scored=score, beside=beside)
        if not ahead or self._transfer.in_place:
            move()
            return self._ticket(batch, homes, slotless=slotless)
        asked = self._transfer.ask(missed, homes, slotless=slotless, ahead=True)
        ticket = self._ticket(batch, homes, slotless=slotless)
        ticket.ended = False
        where = torch.cuda.current_stream(), self._order.after, torch.is_inference_mode_enabled()
        self._asked = _Asked(ticket, functools.partial(move, asked), *where)
        return ticket

    def complete(self, ticket: DeviceTicket) -> bool:
        """Brings the plan of a ticket to its end, if it has yet to come there; returns whether it has, or it failed."""
        if not ticket.ended:  # or a plan that waits for its storage would be waited for
            with self.plan_lock, on_device(self.device):
                if self._asked is not None and self._asked.ticket is ticket:
                    self.complete_last()
                if not ticket.ended:  # somebody was interrupted at it
                    ticket.ended = ticket.failed = True
        return not ticket.failed

    def complete_last(self) -> None:
        """Brings the plan to its end that was made ahead and has none, if any; its ticket knows if it fails."""
        if self._asked is None:
            return
        with self.plan_lock, on_device(self.device):
            asked = self._asked
            if asked is None:
                return
            self._check_usable()
            self._asked, asked.ticket.failed = None, True
            with (
                torch.inference_mode(asked.inference),
                torch.cuda.stream(asked.stream),
                self._order.ahead(asked.after),
                marked("plan"),
            ):
                try:
                    asked.move()
                except Exception:
                    pass  # its forward plans anew, and finds out
                else:
                    asked.ticket.failed = False
                finally:
                    with self.lock:
                        asked.ticket.ready = self._order.planned()
                        self._order.touched()
                    asked.ticket.ended = True

    def _count(self, ticket: DeviceTicket, *, score: bool, beside: Beside | None) -> None:
        """A plan where no row moves: beside the lookup, if that comes now and it is worth two events."""

        def run() -> None:
            self._plan.count(ticket.homes, scored=score)
            if beside:
                beside()

        if ticket.ready is not None:
            run()
            ticket.ready.record()
        elif ticket.homes.shape[0] >= LARGE or (beside and torch.cuda.is_current_stream_capturing()):
            ticket.aside = self.aside(run)
        else:
            run()

    def aside(self, function: Beside) -> torch.cuda.Event:
        """Calls it on a stream beside the current one, behind what that has queued; returns what comes once it is
        done."""
        with self.plan_lock:
            self._transfer.mark()
            return self._transfer.aside(function)

    def _move(self, missed: Missed, homes: torch.Tensor, asked: Any = None, **keywords: Any) -> None:
        """Lets the transfer bring what was missed in. From the moment that slots change hands until their rows are on
        the way nothing may interrupt: the new keys would own the old rows."""
        try:
            with marked("swap"):
                self._transfer.bring(missed, homes, asked, **keywords)
        except BaseException as error:
            if self._transfer.committed and not torch.cuda.is_current_stream_capturing():  # of which nothing has run
                self._broken = f"moving rows was interrupted by {type(error).__name__}"
            self._transfer.committed = False
            raise

    @contextlib.contextmanager
    def _grow_beside(self) -> Iterator[None]:
        """What is done inside comes behind what the computing stream has queued, and that queues nothing meanwhile."""
        with self.lock:
            self._order.queued().wait()
            yield

    def away(self, tickets: Sequence[DeviceTicket]) -> Away:
        """Where the rows of `tickets` lie that have no slot, now: on staged tiers a later plan may move them."""
        last = max(tickets, key=lambda ticket: (ticket.away.slotless, ticket.batch)).away
        return last if self._transfer.in_place else self._transfer.away(last.slotless)

    def _ticket(self, batch: int, homes: torch.Tensor, *, slotless: bool) -> DeviceTicket:
        with self.lock:
            ticket = DeviceTicket(batch, homes, self._transfer.away(slotless), self._book)
            self._book.open(ticket, homes.shape[0] if self._cached else 0, slotless)
            ticket.ready = self._order.planned()
            return ticket

    def _check_size(self, n: int, locked: int) -> None:
        if n > MOST_IDS or min(locked + n, self.cold.layout.rows) > 2 * MOST_IDS:
            raise InvalidInputError(
                f"a batch of {n} ids was given for the tables of one width, with {locked} in flight; a GPU plans at "
                f"most {MOST_IDS}, and {2 * MOST_IDS} in flight: split the batch, and drop what keeps batches in flight"
            )

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Holds the cache for one call: its locks, its device, and its place behind what other streams have queued."""
        with self.whole(), on_device(self.device):
            self.complete_last()
            self._check_usable()
            self._order.whole()
            self._transfer.finish()
            try:
                yield
            finally:
                if not self._transfer.in_place:
                    self._order.touched()

    @contextlib.contextmanager
    def using(self, *tickets: DeviceTicket) -> Iterator[None]:
        """Holds the cache for a call that looks up or updates the rows of `tickets` alone: it does not wait for plans
        that were made ahead for others."""
        with self.lock, on_device(self.device):
            self._check_usable()
            self._order.compute()
            self._transfer.follow()
            for ticket in tickets:
                if ticket.failed or not ticket.ended:
                    raise StorageError("this batch has no plan that came to its end; look it up again")
                if ticket.ready is not None:
                    ticket.ready.wait()
                    ticket.ready = None
            yield

    def hold(self) -> tuple[Hold, torch.cuda.Event]:
        """Where a thread of its own plans ahead: keeps locked what is in flight now, so that nothing moves but what the
        event's stream is through with."""
        with self.lock, on_device(self.device):
            planning = self._planning
            following = self._batch + 1 if planning is None else planning
            return self._book.hold(following), self._order.queued()

    @contextlib.contextmanager
    def ahead(self, inputs: Sequence[torch.Tensor], hold: tuple[Hold, torch.cuda.Event] | None) -> Iterator[None]:
        held, after = hold or (None, None)
        with self.plan_lock, on_device(self.device), self._order.ahead(after):
            for tensor in inputs:
                if tensor.is_cuda:
                    tensor.record_stream(torch.cuda.current_stream())
            try:
                yield
            finally:
                if held is not None:
                    held.release()

    def memory(self) -> contextlib.AbstractContextManager[None]:
        """Tensors made inside outlast the plan that is made ahead in them; see `StreamOrder`."""
        return self._order.memory()

    # --- whole-cache calls ------------------------------------------------------------------------------------------

    def flush(self) -> None:
        with self.entered():
            self._write_back()
            for update in self.on_flush:
                update()
            metadata = self.cold.metadata
            metadata.batch = self._plan.batch()  # all replays included, of which `_batch` knows those that plan ahead
            metadata.policy = self._scoring.name
            self.cold.flush()

    def _write_back(self) -> None:
        """All dirty rows, and the scores of the cached ones. Synchronises."""
        self._transfer.write_back(0, self._cached, None)
        first_slot = self._cached
        for first_key, rows in self._resident:
            self._transfer.write_back(first_slot, rows, first_key)
            first_slot += rows
        self._transfer.settle()
        synchronize(self.device)

    def _write_back_range(self, start: int, stop: int) -> None:
        with self.entered():
            self._write_back()

    def _reload_range(self, start: int, stop: int) -> None:
        with self.entered():
            key = self.hot.key
            slots = torch.nonzero((key >= start) & (key < stop)).flatten()
            for part in torch.split(slots, LOAD_ROWS):
                self._load(key[part], part.to(torch.int32))
            first_slot = self._cached
            for first_key, rows in self._resident:
                low, high = max(start, first_key), min(stop, first_key + rows)
                self._load_range(low, first_slot + low - first_key, high - low)
                first_slot += rows
            self._transfer.reload()

    def check_idle(self, call: str) -> None:
        with self.whole():
            self.complete_last()  # of a batch that was given up: its victims are not to be written behind the call
            self._check_usable()
            super().check_idle(call)

    def forget(self) -> None:
        with self.entered():
            self.check_idle("load a checkpoint")
            self._adopt_scores()
            self._restart(fresh=False)

    def _restart(self, *, fresh: bool) -> None:
        """Empties the cached slots and brings the rows of resident tables in; none was ever written if `fresh`."""
        synchronize(self.device)  # cold rows may have been replaced on the host
        self.hot.reset()
        self._batch = self._eager = self.cold.metadata.batch
        self._book.reset()
        self._plan.restart(self._batch)
        self._transfer.restart()
        first_slot = self._cached
        for first_key, rows in self._resident:
            if fresh:
                self._transfer.generate(first_key, first_slot, rows)
            else:
                self._load_range(first_key, first_slot, rows)
            first_slot += rows
        self.hot.score[self._cached :].fill_(MIN_SCORE)
        self._plan.clear_totals()

    def _load_range(self, first_key: int, first_slot: int, rows: int) -> None:
        for start in range(0, rows, LOAD_ROWS):
            span = torch.arange(start, min(start + LOAD_ROWS, rows), device=self.device)
            self._load(span + first_key, (span + first_slot).to(torch.int32))

    def _load(self, keys: torch.Tensor, slots: torch.Tensor) -> None:
        """Brings cold rows into slots that are theirs. A row never written is generated, and stays clean in the slot
        of a resident table, whose score is never written back."""
        self._transfer.load(keys, slots)
        resident = slots[slots >= self._cached].long()
        self.hot.dirty[resident] = 0
        self.hot.score[resident] = MIN_SCORE

    def stats(self) -> CacheStats:
        with self.entered():
            totals = self._plan.totals()
        layout = self.cold.layout
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
            batch = {"plans": self._book.size_bytes() + self._plan.size_bytes()}
            batch["records"] = self._plan.records.size_bytes()
            return {
                "cache": self.hot.size_bytes(),
                "batch": batch | self._transfer.size_bytes(),
                "cold": {"tier": self.cold.kind} | self.cold.size_bytes(),
            }

    def _release(self) -> None:
        self._asked = None
        self._transfer.finish()
        synchronize(self.device)  # kernels may still read cold rows
