"""Plans batches on a GPU: finds the rows that they look up, and fills those that they miss.

A plan only launches: hits, misses and moved rows are known to the device alone. The transfer moves the rows
(`transfer`). If it has to wait for the host, and the batch is planned ahead, the transfer stays pending, and is
finished later.

If a batch is larger than the cache, some rows get no slot, and are used elsewhere, under records (`plan.Records`): no
home changes while a ticket is in flight, so such a row gets a slot only in a plan after its last ticket. The first such
plan frees the record. On a staged tier these rows are on the device. A CPU uses transient slots instead
(`host.hot_rows`).
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

LARGE = 1 << 17  # ids: more take longer to sort, or to begin a plan with, than a side stream costs (4 µs)
MOST_IDS = 1 << 28  # ids of a batch, and half of those in flight: during a plan homes also number claims and records


class DeferredRows:
    """The missed rows of the plans of one batch, which are deferred, for captured steps; successive batches use the
    same memory. `behind`: the stream that fills the rows of the batch before."""

    def __init__(self, behind: torch.cuda.Stream) -> None:
        self.behind = behind
        self._missed: list[Missed] = []
        self._taken = 0

    def begin(self) -> None:
        """Called before a batch is planned."""
        self._taken = 0

    def missed(self, n: int, device: torch.device, memory: contextlib.AbstractContextManager[None]) -> Missed:
        """The memory for the next plan, of n ids. Tensors made inside `memory` outlast plans."""
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
    """Plans the batches of one cache, under its lock of plans. `rows_lock`: guards tickets and the order of streams ·
    `unfinished`: the batches whose rows are not filled yet, in their order, with their plans: the next plan fills them
    first, so there is at most one, except while the replay of a captured step begins another · `in_capture`: whether a
    step that fills them is being captured, or was and has yet to be replayed · `deferred`: takes the missed rows of
    plans that are to defer them · `recording`: of the plan that is being recorded, if its rows pass through the
    host."""

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
        """Whether a plan of `n` ids may fill rows; else all its rows are of resident tables."""
        return self.hot.slots > 0 and n > 0

    def may_lack_slots(self, n: int, locked: int, *, uncached: bool) -> bool:
        """Whether rows may get no slot when `n` ids are planned, while batches in flight lock the rows of `locked` ids,
        some perhaps without a slot (`uncached`)."""
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
        """Plans the batch that the ledger began; see `DeviceCache.plan`."""
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
        if plan.is_deferred:  # in the ledger before slots change hands; if none do, nothing moves
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
        """Leaves the rows of `ticket` to `finish_last`: on the stream that first needs them if they are deferred, else
        on the stream of the plan."""
        if plan.is_deferred:
            ticket.plan = plan
        else:
            plan.resume_point = self.order.resume_point()
        ticket.is_complete = False
        self.unfinished[ticket] = plan

    def begin_capture(self) -> None:
        """Unfinished rows are filled by a step that is captured: they stay in the ledger until it is replayed."""
        self.in_capture = True

    def end_capture(self, *, ran: bool = False) -> None:
        """After a capture: rows whose transfer it launched have arrived if it `ran`. If it was aborted, or its first
        replay was not seen, they are launched again; the device knows which have arrived."""
        if not self.in_capture or torch.cuda.is_current_stream_capturing():
            return
        if ran:
            self.rows_arrived([ticket for ticket, plan in self.unfinished.items() if plan.phase is Phase.MOVED])
        else:
            self.unfinished |= {ticket: plan.rebind() for ticket, plan in self.unfinished.items() if plan.is_deferred}
        self.in_capture = False

    def forget(self) -> None:
        """Called when slots are emptied: no row is to be filled any more."""
        for missed in self.missed_deferred():
            missed.have_moved()
        for ticket in self.unfinished:
            ticket.failed = ticket.is_complete = True
        self.unfinished, self.in_capture = {}, False

    def missed_deferred(self) -> list[Missed]:
        """Deferred rows that may not be filled yet."""
        return [plan.missed for plan in self.unfinished.values() if plan.is_deferred]

    def rows_arrived(self, tickets: Collection[DeviceTicket]) -> None:
        """Called when the transfers that fill the rows of `tickets` were launched."""
        for ticket in tickets:
            ticket.is_complete = True
            self.unfinished.pop(ticket, None)

    @property
    def is_over(self) -> bool:
        """Whether no rows are left to be filled."""
        return not (self.unfinished or self.in_capture)

    @property
    def has_deferred_alone(self) -> bool:
        """Whether all rows left to be filled are deferred to the replay of a captured step."""
        return not self.in_capture and all(plan.is_deferred for plan in self.unfinished.values())

    def place_last(self) -> None:
        """Gives slots to the rows that are left to be filled."""
        self.end_capture()
        for ticket, plan in [*self.unfinished.items()]:
            self.transfer.place(plan, self.ledger.lag_of(ticket.batch))

    def publish_last(self) -> None:
        """After `place_last`: publishes these slots, which the next plan needs, and the filling of rows does not."""
        for plan in [*self.unfinished.values()]:
            self.transfer.publish(plan)

    def finish_last(self, *, usable: bool, moving: int = 1) -> None:
        """Fills the rows that are left to be filled. `moving`: how many caches do so at the same time. Waits for the
        GPU and the storage, unless rows are deferred. If that fails, or the cache is not `usable`, their tickets are
        marked as failed; deferred rows are filled in any case."""
        self.end_capture()
        while pending := self._pending():
            ticket, plan = pending[0]
            if plan.resume_point is None:  # its slots have changed hands, even if rows are suspect
                plan.moving = moving
                self._finish_deferred(ticket, plan)
            else:
                del self.unfinished[ticket]
                if usable:
                    self._finish(ticket, plan, plan.resume_point)
                else:
                    ticket.failed = ticket.is_complete = True

    def _pending(self) -> list[tuple[DeviceTicket, BatchPlan]]:
        """The unfinished batches, without those that the step being captured fills."""
        return [each for each in self.unfinished.items() if not (self.in_capture and each[1].phase is Phase.MOVED)]

    def _finish(self, ticket: DeviceTicket, plan: BatchPlan, point: ResumePoint) -> None:
        ticket.failed = True
        with self.order.resumed(point), marked("plan"):
            try:
                with marked("swap"):
                    self.transfer.move(plan)
            except Exception:
                pass  # its forward plans anew, and raises
            else:
                ticket.failed = False
            finally:
                self._arrives(ticket)
                ticket.is_complete = True

    def _finish_deferred(self, ticket: DeviceTicket, plan: BatchPlan) -> None:
        """Slots have changed hands, or are about to: the plan stays in the ledger until all is launched; if that is
        captured, until it is replayed."""
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
                ticket.ready.record(current_stream())  # recorded before other threads see that it is complete
            self.order.touched()

    def _count(self, ticket: DeviceTicket, kind: PlanKind, *, client: PlanOf, beside: Beside | None) -> None:
        """A plan where no row moves: beside the lookup, if that follows now and it is worth two events."""

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
        """The ticket of a batch that was planned now. `ids`: how many it has, if `homes` has more."""
        ids = homes.shape[0] if ids is None else ids
        with self.rows_lock:
            ticket = DeviceTicket(batch, homes, overflow, self.tickets)
            self.tickets.open(ticket, ids if self.hot.slots else 0, overflow.uncached)
            ticket.ready = self.order.planned()
            return ticket
