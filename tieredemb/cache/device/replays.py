"""What captured steps need of a GPU's cache: each replay plans batches of which the host has to keep book."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tieredemb.cache.base import Cache
from tieredemb.cache.device.plan import Away, DevicePlan
from tieredemb.cache.device.stream_order import StreamOrder
from tieredemb.cache.tickets import Flight, Locked, TicketBook
from tieredemb.errors import StorageError


class DeviceTicket(Flight):
    """A planned batch in flight on a GPU. `homes`: int32 (N,), the slot of each occurrence, −2 − r for a row that is
    used without one, or `DROPPED` · `away`: where such rows were, if there may be any · `ready`: comes once the rows
    are there, where another stream brings them than the one that computes · `aside`: comes once what was to run beside
    the plan is done, where the lookup need not wait for it · `ended`: whether its plan has
    come to its end, and `failed`: whether that was none."""

    def __init__(self, batch: int, homes: torch.Tensor, away: Away, book: TicketBook) -> None:
        super().__init__(batch, book)
        self.homes = homes
        self.away = away
        self.kept: tuple[Any, ...] = (homes,)  # what lives as long as it, and is counted as the plan's
        self.ready: torch.cuda.Event | None = None
        self.aside: torch.cuda.Event | None = None
        self.ended = True

    def size_bytes(self) -> int:
        return sum(value.nbytes for value in self.kept if isinstance(value, torch.Tensor))


@dataclass
class Replays:
    """What every replay of a captured step does to the numbers of a cache, and what it relies on. `plans`: batches that
    it plans · `locked`: what they lock, counted from the last batch before · `distance`: of that batch from the oldest
    in flight then, and `before`: the ids that those lock · `records`: address of the table of rows without a slot,
    which batches in flight have to share."""

    plans: int = 0
    locked: tuple[Locked, ...] = ()
    distance: int = 0
    before: int = 0
    records: int = 0


NOTHING_PLANNED = Replays()


class CapturableCache(Cache, abc.ABC):
    """The numbers of the batches that a GPU's cache has planned, those that replays have planned among them."""

    _batch: int  # the last one planned: numbers tickets
    _eager: int  # the last one planned outside a capture
    _recurring: set[int]  # batches in flight that each replay of the step being captured has anew
    _order: StreamOrder
    _plan: DevicePlan

    @property
    def last(self) -> int:
        """Number of the last batch planned; replays count where they are told of (`replayed`)."""
        return self._batch

    def may_replay(
        self, ended: Sequence[DeviceTicket] = (), last: int | None = None, replays: Replays = NOTHING_PLANNED
    ) -> bool:
        """Whether a captured step may be replayed now, which is put behind all plans made ahead: its plans know of no
        batch in flight but those that it ends, `ended`. `last`: number of the last batch planned when they were ·
        `replays`: of the step, once it was captured. The caller holds the locks of plans and rows, until it has
        replayed."""
        self._check_usable()
        self.cold.begin_changes()
        self._order.whole()
        live = self._book.live
        if live and not live <= {ticket.batch for ticket in ended}:
            return False
        if last is not None and last != self._batch:
            return False
        if replays is NOTHING_PLANNED:
            return True
        distance, before = self._reach(ended)
        return distance <= replays.distance and before <= replays.before

    def _reach(self, ended: Sequence[DeviceTicket]) -> tuple[int, int]:
        """How many batches back the oldest of `ended` was planned, and how many ids are locked since."""
        oldest = min((ticket.batch for ticket in ended), default=self._batch + 1)
        return self._batch - oldest, self._book.locked(oldest)[0]

    @contextlib.contextmanager
    def capturing(self, ended: Sequence[DeviceTicket]) -> Iterator[Replays]:
        """A step is captured inside that ends the batches `ended`, and leaves others in flight that are planned in it.
        Each replay ends those of the one before. What comes in is complete after the capture."""
        replays = Replays()
        with self.whole():
            self._recurring, first = {ticket.batch for ticket in ended}, self._batch
            replays.distance, replays.before = self._reach(ended)
        try:
            yield replays
        finally:
            with self.whole():
                self._recurring = set()
                self._order.joined()
                replays.plans, replays.locked = self._batch - first, self._book.since(first)
                replays.records = self._plan.records.table.data_ptr()

    def outgrew(self, replays: Replays) -> bool:
        """Whether more rows without a slot were in flight than there was room for at the capture, which has to be made
        anew."""
        return replays.records != self._plan.records.table.data_ptr()

    def replayed(self, replays: Replays) -> int:
        """A step was replayed: its plans count. Returns the number of the last batch before them."""
        with self.plan_lock, self.lock:
            first = self._batch
            self._book.locked(self._book.oldest(first + 1))  # forgets those that lock nothing any more
            self._batch += replays.plans
            self._eager = self._batch
            self._book.repeat(first, replays.locked)
            return first

    def reopen(self, ticket: DeviceTicket, batch: int) -> DeviceTicket:
        """The flight of `batch`, which a replay has planned to where `ticket` was planned."""
        with self.plan_lock, self.lock:
            again = DeviceTicket(batch, ticket.homes, ticket.away, self._book)
            again.kept = ()  # it counts where it was planned first
            self._book.open(again)
            return again

    def _check_capture(self, *, moves: bool) -> None:
        if not torch.cuda.is_current_stream_capturing():
            self._eager = self._batch + 1
            return
        if not moves:
            return
        if any(batch <= self._eager for batch in self._book.live - self._recurring):
            raise StorageError(
                "a step cannot be captured in a CUDA graph while a batch from before is in flight: each replay would "
                "lock its rows; run its backward first, or drop its outputs"
            )
        if not self.cold.device_readable:
            raise StorageError(
                f"a step over the {self.cold.kind} tier cannot be captured in a CUDA graph: its rows pass through the "
                f"host; use UnifiedMemory() or HostMemory(), or run the step eagerly"
            )
