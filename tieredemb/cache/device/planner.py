"""Planning batches on a GPU: what they look up is found, what they miss is filled.

A plan launches; what it found, missed and moved is known to the device alone. How the rows travel is the transfer's
(`transfer`): where that has to wait for the host, and the batch is planned ahead, its transfer stays pending, and is
finished later.

Rows of a batch larger than the cache stay where they are and are used there, under records (`plan.Records`): no home
changes while a ticket is in flight, so such a row gets a slot only in a plan after its last ticket.

A record is freed by the first plan after that last ticket. On a staged tier the rows under records lie on the device;
on the CPU such rows get transient slots (`host.hot_rows`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from tieredemb.cache.base import PlanKind
from tieredemb.cache.device.effects import ONE_PLAN
from tieredemb.cache.device.hot_rows import DeviceHotRows
from tieredemb.cache.device.ledger import Begun, Ledger
from tieredemb.cache.device.plan import BatchPlan, Beside, DevicePlan, Missed, OverflowRows, Phase, PlanOf
from tieredemb.cache.device.stream_order import ResumePoint, SideStream, StreamOrder
from tieredemb.cache.device.ticket import DeviceTicket
from tieredemb.cache.device.transfer import Transfer
from tieredemb.cache.tickets import TicketLedger
from tieredemb.errors import InvalidInputError
from tieredemb.kernels.inference import no_inference
from tieredemb.kernels.streams import current_stream
from tieredemb.kernels.tracing import marked

if TYPE_CHECKING:
    from tieredemb.cache.device.staging import HostPhase

LARGE = 1 << 17  # ids of a batch whose sorting, or whose plan's beginning, takes longer than a side stream costs (4 µs)
MOST_IDS = 1 << 28  # of a batch, and half of those in flight: while a plan lasts, homes number claims and records too


class DeferredRows:
    """What the plans of one batch have missed, whose rows are deferred: of one batch after the other the same
    memory, for captured steps. `behind`: the stream on which the rows of the batch before are on their way."""

    def __init__(self, behind: torch.cuda.Stream) -> None:
        self.behind = behind
        self._missed: list[Missed] = []
        self._taken = 0

    def begin(self) -> None:
        """A batch is about to be planned."""
        self._taken = 0

    def missed(self, n: int, device: torch.device, memory: contextlib.AbstractContextManager[None]) -> Missed:
        """For the next plan, of n ids. What is made inside `memory` outlasts plans."""
        at, self._taken = self._taken, self._taken + 1
        if at == len(self._missed) or self._missed[at].n != n:
            with no_inference(), memory:  # it is changed in place when that is over
                missed = Missed(n, device)
                missed.have_moved()
            self._missed[at:] = [missed]
        return self._missed[at]

    def size_bytes(self) -> int:
        return sum(missed.size_bytes for missed in self._missed)


@dataclass
class Planner:
    """Plans the batches of one cache, under its lock of plans. `rows_lock`: guards tickets and the order of streams,
    and so is taken for both · `unfinished`: the batches whose rows have yet to come, in their order, and their plans:
    the next plan fills them first, and so there is one at most, but while a captured step is replayed that begins
    another · `in_capture`: whether a step that fills them is being captured, or was and has yet to be replayed ·
    `deferred`: where plans are to leave rows for later, if they are · `recording`: of the plan that is being recorded,
    where its rows pass through the host."""

    hot: DeviceHotRows
    launches: DevicePlan
    transfer: Transfer
    ledger: Ledger
    tickets: TicketLedger
    order: StreamOrder
    side: SideStream
    rows_lock: contextlib.AbstractContextManager[bool]
    unfinished: dict[DeviceTicket, BatchPlan] = field(default_factory=dict)
    in_capture: bool = False
    deferred: DeferredRows | None = None
    recording: HostPhase | None = None

    def check_size(self, n: int, begun: Begun) -> None:
        """Raises `InvalidInputError` for a batch of more ids than a plan can number."""
        if n > MOST_IDS or min(begun.locked + n, self.hot.layout.rows) > 2 * MOST_IDS:
            raise InvalidInputError(
                f"a batch of {n} ids was given for the tables of one width, with {begun.locked} in flight; a GPU plans "
                f"at most {MOST_IDS}, and {2 * MOST_IDS} in flight: split the batch, and drop what keeps batches in "
                f"flight"
            )

    def moves_rows(self, n: int) -> bool:
        """Whether a plan of `n` ids may fill rows: else all rows that it finds are resident tables'."""
        return self.hot.slots > 0 and n > 0

    def may_lack_slots(self, n: int, locked: int, *, uncached: bool) -> bool:
        """Whether rows may be without a slot once `n` ids are planned, where batches in flight lock those of `locked`
        ids, and may have some without (`uncached`)."""
        return uncached or locked + n > self.hot.slots

    def plan(
        self,
        begun: Begun,
        keys: torch.Tensor,
        homes: torch.Tensor,
        kind: PlanKind,
        *,
        client: PlanOf,
        given: torch.cuda.Event | None,
        beside: Beside | None,
    ) -> DeviceTicket:
        """Plans the batch that the ledger has begun; see `DeviceCache.plan`."""
        n = keys.shape[0]
        if not self.moves_rows(n):
            if given is not None:
                given.wait(current_stream())
            self.ledger.count(ONE_PLAN, captured=begun.captured)
            ticket = self.ticket(begun.number, homes, self.transfer.overflow(False))
            self._count(ticket, kind, client=client, beside=beside)
            return ticket
        uncached = self.may_lack_slots(n, begun.locked, uncached=begun.uncached)
        if uncached:
            self.transfer.reserve(min(begun.locked + n, self.hot.layout.rows))
        device, lag = self.hot.weight.device, begun.lag
        missed = Missed(n, device) if self.deferred is None else self.deferred.missed(n, device, self.order.memory())
        self.transfer.retire(lag)
        self.ledger.count(ONE_PLAN, captured=begun.captured)
        overflow = self.transfer.overflow(uncached)
        plan = BatchPlan(homes, missed, uncached, kind, beside, lag, host=self.recording)
        plan.is_deferred = self.deferred is not None and self.transfer.can_defer
        if plan.is_deferred:  # on the books before anything changes hands; what never comes to that moves nothing
            ticket = self.ticket(begun.number, homes, overflow)
            self.leave(ticket, plan)
        self.launches.begin(missed, kind, lag=lag, client=client, overflow=overflow)
        if given is not None:
            given.wait(current_stream())
        self.launches.find(keys, homes, missed, kind, overflow=overflow, may_arrive=plan.is_deferred)
        if plan.is_deferred:
            if plan.left_at is Phase.PUBLISHED:
                self.transfer.place(plan, lag)
                self.transfer.publish(plan)
            return ticket
        with marked("swap"):
            self.transfer.start(plan)
            if plan.phase is not Phase.MOVED and not kind.ahead and self.recording is None:
                self.transfer.move(plan)
        ticket = self.ticket(begun.number, homes, overflow)
        ticket.side_done, plan.side_done = plan.side_done, None
        if self.recording is not None:
            ticket.plan = plan
        elif plan.phase is not Phase.MOVED:
            self.leave(ticket, plan)
        return ticket

    def leave(self, ticket: DeviceTicket, plan: BatchPlan) -> None:
        """The rows of `ticket` come later, by `finish_last`: on the stream that first needs them if they are deferred,
        else where the plan is made."""
        if plan.is_deferred:
            ticket.plan = plan
        else:
            plan.resume_point = self.order.resume_point()
        ticket.is_complete = False
        self.unfinished[ticket] = plan

    def begin_capture(self) -> None:
        """What is unfinished is filled by a step that is captured: it stays on the books until that was replayed."""
        self.in_capture = True

    def end_capture(self, *, ran: bool = False) -> None:
        """Outside of a capture: what one launched has arrived if it `ran`. Else, where it was aborted, or nobody has
        seen its first replay, that is to be launched again; the device knows what has arrived."""
        if not self.in_capture or torch.cuda.is_current_stream_capturing():
            return
        if ran:
            self.rows_arrived([ticket for ticket, plan in self.unfinished.items() if plan.phase is Phase.MOVED])
        else:
            self.unfinished |= {ticket: plan.rebind() for ticket, plan in self.unfinished.items() if plan.is_deferred}
        self.in_capture = False

    def forget(self) -> None:
        """Slots are emptied: nothing is to come any more."""
        for missed in self.missed_deferred():
            missed.have_moved()
        for ticket in self.unfinished:
            ticket.failed = ticket.is_complete = True
        self.unfinished, self.in_capture = {}, False

    def missed_deferred(self) -> list[Missed]:
        """What was left for later, and may have yet to come."""
        return [plan.missed for plan in self.unfinished.values() if plan.is_deferred]

    def rows_arrived(self, tickets: Collection[DeviceTicket]) -> None:
        """What fills the rows of `tickets` was launched."""
        for ticket in tickets:
            ticket.is_complete = True
            self.unfinished.pop(ticket, None)

    @property
    def is_over(self) -> bool:
        """Whether no rows have yet to come."""
        return not (self.unfinished or self.in_capture)

    @property
    def has_deferred_alone(self) -> bool:
        """Whether all rows that have yet to come are left for the replay of a captured step."""
        return not self.in_capture and all(plan.is_deferred for plan in self.unfinished.values())

    def place_last(self) -> None:
        """Gives slots to what is yet to come."""
        self.end_capture()
        for ticket, plan in [*self.unfinished.items()]:
            self.transfer.place(plan, self.ledger.lag_of(ticket.batch))

    def publish_last(self) -> None:
        """Behind `place_last`: does what has to come before the next plan, and the rows need not wait for."""
        for plan in [*self.unfinished.values()]:
            self.transfer.publish(plan)

    def finish_last(self, *, usable: bool, moving: int = 1) -> None:
        """Brings the rows that have yet to come, while as many caches do as are `moving`. Their tickets know if that
        fails; it does if the cache is not `usable`, but for deferred rows. Waits for the GPU and the storage, but for
        those."""
        self.end_capture()
        while pending := self._pending():
            ticket, plan = pending[0]
            if plan.resume_point is None:  # whatever is suspect, its slots have changed hands
                plan.moving = moving
                self._finish_deferred(ticket, plan)
            else:
                del self.unfinished[ticket]
                if usable:
                    self._finish(ticket, plan, plan.resume_point)
                else:
                    ticket.failed = ticket.is_complete = True

    def _pending(self) -> list[tuple[DeviceTicket, BatchPlan]]:
        """What is unfinished, but for what is filled by the step that is being captured."""
        return [each for each in self.unfinished.items() if not (self.in_capture and each[1].phase is Phase.MOVED)]

    def _finish(self, ticket: DeviceTicket, plan: BatchPlan, point: ResumePoint) -> None:
        ticket.failed = True
        with self.order.resumed(point), marked("plan"):
            try:
                with marked("swap"):
                    self.transfer.move(plan)
            except Exception:
                pass  # its forward plans anew, and finds out
            else:
                ticket.failed = False
            finally:
                self._arrives(ticket)
                ticket.is_complete = True

    def _finish_deferred(self, ticket: DeviceTicket, plan: BatchPlan) -> None:
        """Slots have changed hands, or are about to: it stays on the books until all is launched, and if that is
        captured until it is replayed."""
        if self.deferred is not None:  # another plan of the same batch
            current_stream().wait_stream(self.deferred.behind)
        with self.rows_lock:
            self.order.whole()
        with marked("plan"), marked("swap"):
            self.transfer.place(plan, self.ledger.lag_of(ticket.batch))
            self.transfer.publish(plan)
            self.transfer.move(plan)
        self._arrives(ticket)
        if not self.in_capture:
            self.rows_arrived([ticket])

    def _arrives(self, ticket: DeviceTicket) -> None:
        with self.rows_lock:
            ticket.ready = self.order.planned()
            if ticket.ready is not None:
                ticket.ready.record(current_stream())  # other threads see that it is complete
            self.order.touched()

    def _count(self, ticket: DeviceTicket, kind: PlanKind, *, client: PlanOf, beside: Beside | None) -> None:
        """A plan where no row moves: beside the lookup, if that comes now and it is worth two events."""

        def run() -> None:
            self.launches.count(ticket.homes, kind, client=client)
            if beside:
                beside()

        if ticket.ready is not None:
            run()
        elif ticket.homes.shape[0] >= LARGE or (beside and torch.cuda.is_current_stream_capturing()):
            self.side.mark()
            ticket.side_done = self.side.run(run)
        else:
            run()

    def ticket(self, batch: int, homes: torch.Tensor, overflow: OverflowRows, ids: int | None = None) -> DeviceTicket:
        """The flight of a batch that was planned now. `ids`: how many it has, if there is room for more in `homes`."""
        ids = homes.shape[0] if ids is None else ids
        with self.rows_lock:
            ticket = DeviceTicket(batch, homes, overflow, self.tickets)
            self.tickets.open(ticket, ids if self.hot.slots else 0, overflow.uncached)
            ticket.ready = self.order.planned()
            return ticket
