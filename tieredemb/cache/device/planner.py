"""Planning batches on a GPU: what they look up is found, what they miss is brought in.

A plan launches; what it found, missed and moved is known to the device alone. How the rows travel is the transfer's
(`transfer`): where that has to wait for the host, and the batch is planned ahead, its transfer stays pending, and is
finished later.

Rows of a batch larger than the cache stay where they are and are used there, under records (`plan.Records`): no home
changes while a ticket is in flight, so such a row gets a slot only in a plan after its last ticket.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch

from tieredemb.cache.device.hot_rows import DeviceHotRows
from tieredemb.cache.device.ledger import Begun, Ledger
from tieredemb.cache.device.plan import BatchPlan, Beside, DevicePlan, Missed, OverflowRows, PlanOf
from tieredemb.cache.device.stream_order import SideStream, StreamOrder
from tieredemb.cache.device.ticket import DeviceTicket
from tieredemb.cache.device.transfer import FINISHED, Transfer
from tieredemb.cache.tickets import TicketBook
from tieredemb.errors import InvalidInputError
from tieredemb.kernels.ranges import marked
from tieredemb.kernels.streams import current_stream

LARGE = 1 << 17  # ids of a batch whose sorting, or whose plan's beginning, takes longer than going aside for it (4 µs)
MOST_IDS = 1 << 28  # of a batch, and half of those in flight: while a plan lasts, homes number claims and records too


@dataclass
class Planner:
    """Plans the batches of one cache, under its lock of plans. `rows_lock`: guards tickets and the order of streams,
    and so is taken for both · `unfinished`: the ticket whose transfer has yet to finish; there is at most one, as the
    next plan finishes it first."""

    hot: DeviceHotRows
    launches: DevicePlan
    transfer: Transfer
    ledger: Ledger
    book: TicketBook
    order: StreamOrder
    side: SideStream
    rows_lock: contextlib.AbstractContextManager[bool]
    unfinished: DeviceTicket | None = None

    def check_size(self, n: int, begun: Begun) -> None:
        """Raises `InvalidInputError` for a batch of more ids than a plan can number."""
        if n > MOST_IDS or min(begun.locked + n, self.hot.layout.rows) > 2 * MOST_IDS:
            raise InvalidInputError(
                f"a batch of {n} ids was given for the tables of one width, with {begun.locked} in flight; a GPU plans "
                f"at most {MOST_IDS}, and {2 * MOST_IDS} in flight: split the batch, and drop what keeps batches in "
                f"flight"
            )

    def moves_rows(self, n: int) -> bool:
        """Whether a plan of `n` ids may bring rows in: else all rows that it finds are resident tables'."""
        return self.hot.slots > 0 and n > 0

    def may_lack_slots(self, n: int, locked: int, *, slotless: bool) -> bool:
        """Whether rows may be without a slot once `n` ids are planned, where batches in flight lock those of `locked`
        ids, and may have some without (`slotless`)."""
        return slotless or locked + n > self.hot.slots

    def plan(
        self,
        begun: Begun,
        keys: torch.Tensor,
        homes: torch.Tensor,
        *,
        scored: bool,
        ages: bool,
        client: PlanOf,
        given: torch.cuda.Event | None,
        beside: Beside | None,
        ahead: bool,
    ) -> DeviceTicket:
        """Plans the batch that the ledger has begun; see `DeviceCache.plan`."""
        n = keys.shape[0]
        if not self.moves_rows(n):
            if given is not None:
                given.wait(current_stream())
            self.ledger.count(begun)
            ticket = self.ticket(begun.number, homes, self.transfer.overflow(False))
            self._count(ticket, scored=scored, ages=ages, client=client, beside=beside)
            return ticket
        slotless = self.may_lack_slots(n, begun.locked, slotless=begun.slotless)
        if slotless:
            self.transfer.make_room(min(begun.locked + n, self.hot.layout.rows))
        missed = Missed(n, self.hot.weight.device)
        self.transfer.retire(begun.lag)
        self.ledger.count(begun)  # before the device counts it: a batch too many locks more, one too few less
        overflow = self.transfer.overflow(slotless)
        self.launches.begin(missed, lag=begun.lag, scored=scored, ages=ages, client=client, overflow=overflow)
        if given is not None:
            given.wait(current_stream())
        self.launches.find(keys, homes, missed, scored=scored, overflow=overflow)
        with marked("swap"):
            pending = self.transfer.start(BatchPlan(homes, missed, slotless, scored, beside), ahead=ahead)
            if not ahead:
                pending.finish()
        ticket = self.ticket(begun.number, homes, overflow)
        if not pending.is_finished:
            ticket.is_complete = False
            ticket.pending, ticket.place = pending, self.order.place()
            self.unfinished = ticket
        return ticket

    def finish_last(self, *, usable: bool) -> None:
        """Finishes the transfer that was left pending. Its ticket knows if that fails; it does if the cache is not
        `usable`, whose slots are others' by now. Waits for the GPU and the storage."""
        ticket = self.unfinished
        if ticket is None or ticket.place is None:
            return
        self.unfinished, ticket.failed = None, True
        pending, ticket.pending = ticket.pending, FINISHED
        if not usable:
            ticket.is_complete = True
            return
        with self.order.again(ticket.place), marked("plan"):
            try:
                with marked("swap"):
                    pending.finish()
            except Exception:
                pass  # its forward plans anew, and finds out
            else:
                ticket.failed = False
            finally:
                with self.rows_lock:
                    ticket.ready = self.order.planned()
                    if ticket.ready is not None:
                        ticket.ready.record(current_stream())  # other threads see that it is complete
                    self.order.touched()
                ticket.is_complete = True

    def _count(self, ticket: DeviceTicket, *, scored: bool, ages: bool, client: PlanOf, beside: Beside | None) -> None:
        """A plan where no row moves: beside the lookup, if that comes now and it is worth two events."""

        def run() -> None:
            self.launches.count(ticket.homes, scored=scored, ages=ages, client=client)
            if beside:
                beside()

        if ticket.ready is not None:
            run()
        elif ticket.homes.shape[0] >= LARGE or (beside and torch.cuda.is_current_stream_capturing()):
            self.side.mark()
            ticket.aside = self.side.run(run)
        else:
            run()

    def ticket(self, batch: int, homes: torch.Tensor, overflow: OverflowRows) -> DeviceTicket:
        """The flight of a batch that was planned now."""
        with self.rows_lock:
            ticket = DeviceTicket(batch, homes, overflow, self.book)
            self.ledger.open(ticket, homes.shape[0] if self.hot.slots else 0, overflow.slotless)
            ticket.ready = self.order.planned()
            return ticket
