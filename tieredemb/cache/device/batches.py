"""Planning batches on a GPU: what they look up is found, what they miss is brought in.

`plan` launches; what it found, missed and moved is known to the device alone. Cold rows that kernels read in place
(`in_place.InPlace`) need no host at all, so that a step can be captured in a CUDA graph; other tiers are staged
(`staged.Staged`): their plans have two parts, of which the second waits for the host.

Rows of a batch larger than the cache stay where they are and are used there, under records (`device_plan.Records`): no
home changes while a ticket is in flight, so such a row gets a slot only in a plan after its last ticket.
"""

from __future__ import annotations

import abc
import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from tieredemb.cache.device.plan import Away, Missed
from tieredemb.cache.device.replays import CapturableCache, DeviceTicket
from tieredemb.cache.device.transfer import Beside, Transfer
from tieredemb.errors import InvalidInputError
from tieredemb.kernels.ranges import marked
from tieredemb.kernels.streams import on_device

LARGE = 1 << 17  # ids of a batch whose sorting, or whose plan's beginning, takes longer than going aside for it (4 µs)
MOST_IDS = 1 << 28  # of a batch, and half of those in flight: while a plan lasts, homes number claims and records too


class _PutOff(NamedTuple):
    """A plan made ahead that has yet to come to its end, by `move`: on that stream, in that mode. `after`: what it came
    behind."""

    ticket: DeviceTicket
    move: Callable[[], None]
    stream: torch.cuda.Stream
    after: torch.cuda.Event | None
    inference: bool


class DeviceBatches(CapturableCache, abc.ABC):
    """The batches of a cache of `_cached` slots. `_put_off`: the plan whose second part has yet to come."""

    device: torch.device
    _cached: int
    _planning: int | None  # the batch that is being planned, and not yet in flight
    _put_off: _PutOff | None
    _transfer: Transfer

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
        A failing storage raises its error and changes no row; the cache stays usable. What fails in an end that was put
        off leaves the ticket `failed`. Raises `InvalidInputError` for more ids than a plan can number.
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
            self.cold.begin_changes()
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
        self._transfer.retire(batch - oldest)
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
        self._put_off = _PutOff(ticket, functools.partial(move, asked), *where)
        return ticket

    def complete(self, ticket: DeviceTicket) -> bool:
        """Brings the plan of a ticket to its end, if it has yet to come there; returns False if it failed. Waits for
        the GPU and the storage. Raises `StorageError` where the cache cannot be used any more."""
        if not ticket.ended:  # or a plan that waits for its storage would be waited for
            with self.plan_lock, on_device(self.device):
                if self._put_off is not None and self._put_off.ticket is ticket:
                    self.complete_last()
                if not ticket.ended:  # somebody was interrupted at it
                    ticket.ended = ticket.failed = True
        return not ticket.failed

    def complete_last(self) -> None:
        """Brings the plan to its end that was made ahead and has none, if any; its ticket knows if it fails. Waits and
        raises as `complete` does."""
        if self._put_off is None:
            return
        with self.plan_lock, on_device(self.device):
            last = self._put_off
            if last is None:
                return
            self._check_open()
            self._settle()
            self._put_off, last.ticket.failed = None, True
            if self.doubts.reason:  # the slots are others' by now
                last.ticket.ended = True
                return
            with (
                torch.inference_mode(last.inference),
                torch.cuda.stream(last.stream),
                self._order.ahead(last.after),
                marked("plan"),
            ):
                try:
                    last.move()
                except Exception:
                    pass  # its forward plans anew, and finds out
                else:
                    last.ticket.failed = False
                finally:
                    with self.lock:
                        last.ticket.ready = self._order.planned()
                        self._order.touched()
                    last.ticket.ended = True

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
        """Lets the transfer bring what was missed in."""
        with marked("swap"):
            self._transfer.bring(missed, homes, asked, **keywords)

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
