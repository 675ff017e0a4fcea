"""Tickets: batches in flight. A slot is locked while the last batch that used it is not older than the oldest ticket.

There are no reference counts, so nothing leaks: a ticket that is dropped (its autograd node died without a backward) is
released by its finaliser. The garbage collector may do so at any point, in any thread, so a release only appends to a
queue, which the ledger reads under the cache's lock.

A batch is in flight from its plan until its update is done, or its forward without gradient is done, or its autograd
node dies without a backward, or the loop that planned it ahead is left.
"""

from __future__ import annotations

import abc
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from tieredemb.config import Array
from tieredemb.errors import StorageError

FORGET_EVERY = 256  # batches: it takes some microseconds

Locked = tuple[int, int, bool]  # a batch, its ids, whether it may use rows without a slot


class Flight(abc.ABC):
    """A planned batch in flight, on any device: it ends when it is released, or dropped."""

    _released: Callable[[int], None] | None = None  # an incomplete object is over already

    def __init__(self, batch: int, tickets: TicketLedger) -> None:
        self.batch = batch
        self.failed = False  # whether its homes are wrong: it can only be dropped
        self._released = tickets.released.append

    def check(self) -> None:
        """Raises `StorageError` if it has failed."""
        if self.failed:
            raise StorageError(
                "this batch has no plan that came to its end, or rows were loaded since; look it up again"
            )

    @property
    def lasts(self) -> bool:
        """Whether it is still unreleased."""
        return self._released is not None

    def release(self) -> None:
        """Ends the flight: the batch's rows may be evicted. A second call does nothing."""
        released = self._released
        if released is not None:
            released(self.batch)  # harmless if done twice, after an interrupt before the next line
            self._released = None

    def __del__(self) -> None:
        self.release()

    @abc.abstractmethod
    def size_bytes(self) -> int:
        """Bytes of the plan's arrays."""


class Hold:
    """Keeps rows locked for a later plan on another thread: the rows of batches in flight when it was made, and of
    later ones. It ends when it is released, or dropped."""

    def __init__(self, batch: int, tickets: TicketLedger) -> None:
        self.batch = batch
        self._finalizer = weakref.finalize(self, tickets.dropped.append, batch)
        self._finalizer.atexit = False

    @property
    def lasts(self) -> bool:
        """Whether it is still unreleased."""
        return self._finalizer.alive

    def release(self) -> None:
        self._finalizer()


class Ticket(Flight):
    """A planned batch in flight on the CPU.

    `homes`: int32 (N,), the slot of each occurrence, or `DROPPED` for padding · `inverse`: int32 (N,), the position of
    each occurrence among the unique keys, −1 for padding · `unique_keys`: int64 (U,) · `unique_slots`: int32 (U,) ·
    `uniques`: int64 (K,), how many of the unique keys are of each client that the plan is of.
    """

    def __init__(
        self,
        batch: int,
        homes: Array,
        inverse: Array,
        unique_keys: Array,
        unique_slots: Array,
        uniques: Array,
        tickets: TicketLedger,
    ) -> None:
        super().__init__(batch, tickets)
        self.homes = homes
        self.inverse = inverse
        self.unique_keys = unique_keys
        self.unique_slots = unique_slots
        self.uniques = uniques

    def size_bytes(self) -> int:
        return sum(array.nbytes for array in (self.homes, self.inverse, self.unique_keys, self.unique_slots))


class TicketShare:
    """Some occurrences of a batch in flight. `own`: attributes of the share, such as its `homes`; all others are those
    of the ticket `whole`."""

    def __init__(self, whole: Flight, **own: Any) -> None:
        self.__dict__.update(own, whole=whole)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["whole"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.whole, name, value)


class TicketLedger:
    """The tickets of one cache."""

    def __init__(self) -> None:
        self.released: deque[int] = deque()
        self.dropped: deque[int] = deque()
        self._live: set[int] = set()
        self._held: list[int] = []
        self._locked: deque[Locked] = deque()
        self._tickets: weakref.WeakSet[Flight] = weakref.WeakSet()
        self._holds: weakref.WeakSet[Hold] = weakref.WeakSet()

    def forget_dropped(self) -> None:
        """Releases unreachable tickets and holds, in case an interrupt, which Python swallows, has ended their
        finaliser."""
        self._live &= {ticket.batch for ticket in self._tickets}
        held = [hold.batch for hold in self._holds if hold.lasts]
        while self.dropped:
            self.dropped.popleft()
        self._held = held

    def open(self, ticket: Flight, ids: int = 0, uncached: bool = False) -> None:
        """Enters a ticket; called in the order of batches."""
        if ticket.batch % FORGET_EVERY == 0:
            self.forget_dropped()
        self._live.add(ticket.batch)
        if ids:
            self._locked.append((ticket.batch, ids, uncached))
        self._tickets.add(ticket)

    def size_bytes(self) -> int:
        """Bytes of the plans that are still referenced, in flight or not."""
        return sum(ticket.size_bytes() for ticket in self._tickets)

    def abort(self) -> None:
        """Aborts all batches in flight, before their rows are replaced."""
        for ticket in list(self._tickets):
            ticket.failed = True
            ticket.release()

    def reset(self) -> None:
        """Forgets which batches locked rows: none is in flight, and batches may be numbered anew."""
        self._locked.clear()

    def oldest(self, default: int) -> int:
        """Batch of the oldest ticket in flight, or `default`. Rows used at or after it are locked."""
        while self.dropped:
            dropped = self.dropped.popleft()
            if dropped in self._held:  # else it was forgotten before its finaliser ran
                self._held.remove(dropped)
        live = self.live
        return min((*live, *self._held)) if live or self._held else default

    def hold(self, following: int) -> Hold:
        """Locks the rows of batches in flight, and of all from batch `following` on, until the hold ends."""
        oldest = min(self.live, default=following)  # other holds lock rows by themselves
        self._held.append(oldest)
        hold = Hold(oldest, self)
        self._holds.add(hold)
        return hold

    @property
    def live(self) -> set[int]:
        """The batches in flight."""
        while self.released:
            self._live.discard(self.released.popleft())
        return self._live

    def locked(self, oldest: int) -> tuple[int, bool]:
        """How many ids batches have from `oldest` on, the oldest whose rows are locked: batches released since lock
        theirs too. And whether one of them may use rows without a slot."""
        while self._locked and self._locked[0][0] < oldest:
            self._locked.popleft()
        locked, uncached = 0, False  # computed each time: there are few, and an interrupt could spoil a kept sum
        for _, ids, is_uncached in self._locked:
            locked += ids
            uncached |= is_uncached
        return locked, uncached

    def since(self, batch: int) -> tuple[Locked, ...]:
        """What batches after `batch` have locked, in their order, with numbers relative to it."""
        return tuple((number - batch, ids, uncached) for number, ids, uncached in self._locked if number > batch)

    def repeat(self, batch: int, locked: Iterable[Locked]) -> None:
        """Enters batches after `batch` that lock as earlier ones did (`since`)."""
        self._locked.extend([(batch + number, ids, uncached) for number, ids, uncached in locked])
