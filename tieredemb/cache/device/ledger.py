"""The ledger of a GPU's cache: the numbers of its batches, those in flight, and what they lock.

Batches are numbered as they are planned. A replay of a captured step plans batches too, of which the host hears nothing
but that it was replayed: so the capture is entered as `Replays`, and each replay as that. Nothing here knows of a
device. The locks of the cache guard it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from tieredemb.cache.tickets import Flight, Hold, Locked, TicketBook
from tieredemb.errors import StorageError


@dataclass
class Replays:
    """What every replay of a captured step does to the ledger, and what it relies on. `first`: the last batch before
    the capture · `plans`: how many batches a replay plans · `locked`: what they lock, counted from the last batch
    before · `distance`: of `first` from the oldest batch in flight at the capture, and `before`: the ids that were
    locked then · `records`: address of the table of rows without a slot, which batches in flight have to share."""

    first: int = 0
    plans: int = 0
    locked: tuple[Locked, ...] = ()
    distance: int = 0
    before: int = 0
    records: int = 0


NOTHING_PLANNED = Replays()


class Begun(NamedTuple):
    """A batch that is being planned. `number`: its own · `captured`: whether as part of a captured step · `oldest`:
    rows used at or after this batch are locked · `locked`: ids of the batches that lock them · `uncached`: whether one
    of these may use rows without a slot."""

    number: int
    captured: bool
    oldest: int
    locked: int
    uncached: bool

    @property
    def lag(self) -> int:
        """How many batches before this one lock their rows."""
        return self.number - self.oldest


class Ledger:
    """The batches of one cache, whose tickets are in `book`. `lock_window`: how many batches before the one that is
    planned lock their rows in any case."""

    def __init__(self, book: TicketBook, lock_window: int = 0) -> None:
        self._book = book
        self._lock_window = lock_window
        self.last = 0  # the last batch planned; replays count where they are entered (`replayed`)
        self._eager = 0  # the last one planned outside a capture
        self._planning: int | None = None  # the batch that is being planned, and not yet in flight
        self._recurring: frozenset[int] = frozenset()  # in flight, and each replay of what is captured has them anew

    def restart(self, batch: int) -> None:
        """No batch is in flight, and the next one follows `batch`."""
        self.last = self._eager = batch
        self._book.reset()

    # --- a plan -----------------------------------------------------------------------------------------------------

    def begin(self, *, captured: bool = False) -> Begun:
        """The next batch is being planned. It does not count before `count`."""
        batch = self._planning = self.last + 1
        oldest = self._oldest(batch)
        return Begun(batch, captured, oldest, *self._book.locked(oldest))

    def next_locks(self) -> tuple[int, int, bool]:
        """Of the batch that would be planned next: how many before it lock their rows, ids of those, and whether one
        of them may use rows without a slot."""
        batch = self.last + 1
        oldest = self._oldest(batch)
        return batch - oldest, *self._book.locked(oldest)

    def is_locked(self, batch: int) -> bool:
        """Whether the batch that is planned next finds the rows of a planned one locked. A number that is yet to come
        is of before a `restart`."""
        return self._oldest(self.last + 1) <= batch <= self.last

    def lag_of(self, batch: int) -> int:
        """How many batches before a planned one, which is in flight, lock their rows now."""
        return max(0, batch - self._oldest(batch))

    def count(self, begun: Begun) -> None:
        """The batch is about to count on the device."""
        self.last = begun.number
        if not begun.captured:
            self._eager = begun.number

    def count_next(self) -> int:
        """A recorded plan is about to count on the device: the number of its batch."""
        self.last = self._eager = self.last + 1
        return self.last

    def over(self) -> None:
        """No batch is being planned."""
        self._planning = None

    def open(self, flight: Flight, ids: int = 0, uncached: bool = False) -> None:
        """A batch is in flight: it locks the rows of that many ids, and `uncached` may use rows without a slot."""
        self._book.open(flight, ids, uncached)

    def hold(self) -> Hold:
        """Keeps locked what is in flight or being planned now, until the hold ends."""
        return self._book.hold(self.last + 1 if self._planning is None else self._planning)

    # --- captured steps ---------------------------------------------------------------------------------------------

    def check_recurring(self) -> None:
        """Before a batch is planned in a capture. Raises `StorageError` while a batch is in flight that replays will
        not have."""
        if any(batch <= self._eager for batch in self._book.live - self._recurring):
            raise StorageError(
                "a step cannot be captured in a CUDA graph while a batch from before is in flight: each replay would "
                "lock its rows; run its backward first, or drop its outputs"
            )

    def may_replay(self, ended: Iterable[int], last: int | None, replays: Replays) -> bool:
        """Whether a step may be replayed now that ends the batches `ended`: no other is in flight. `last`: number of
        the last batch when they were planned, if no other may follow it · `replays`: of the step, once it was captured,
        which knows of batches no further back, and of no more ids, than were in flight then."""
        ended = set(ended)
        if not self._book.live <= ended or last not in (None, self.last):
            return False
        if replays is NOTHING_PLANNED:
            return True
        distance, before = self._reach(ended)
        return distance <= replays.distance and before <= replays.before

    def begin_capture(self, ended: Iterable[int]) -> Replays:
        """A step is being captured that ends the batches `ended`; each replay ends those of the one before. The result
        is complete after `end_capture`."""
        self._recurring = frozenset(ended)
        distance, before = self._reach(self._recurring)
        return Replays(first=self.last, distance=distance, before=before)

    def end_capture(self, replays: Replays) -> None:
        """The step is captured, with what was planned since `begin_capture`."""
        self._recurring = frozenset()
        replays.plans, replays.locked = self.last - replays.first, self._book.since(replays.first)

    def replayed(self, replays: Replays) -> int:
        """A step was replayed: its plans count. Returns the number of the last batch before them."""
        first = self.last
        self._book.locked(self._oldest(first + 1))  # forgets those that lock nothing any more
        self.last += replays.plans
        self._eager = self.last
        self._book.repeat(first, replays.locked)
        return first

    def _reach(self, ended: Iterable[int]) -> tuple[int, int]:
        """How many batches back the oldest of `ended` was planned, and how many ids are locked since."""
        oldest = min(ended, default=self.last + 1)
        return self.last - oldest, sum(ids for _, ids, _ in self._book.since(oldest - 1))

    def _oldest(self, batch: int) -> int:
        """Rows used at or after this batch are locked while `batch` is planned."""
        return min(self._book.oldest(batch), batch - self._lock_window)
