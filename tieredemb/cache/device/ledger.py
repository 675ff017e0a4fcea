"""The ledger of a GPU's cache: the numbers of its batches, those in flight, and what they lock.

Batches are numbered as they are planned. A replay plans batches too, of which the host knows nothing but that it was
replayed. What a launch or a replay does is data, its `Effects`, of which `count` enters the batches. Nothing here knows
of a device. The locks of the cache guard it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from tieredemb.cache.device.effects import NOTHING_PLANNED, Effects
from tieredemb.cache.tickets import Hold, TicketLedger
from tieredemb.errors import StorageError


class Begun(NamedTuple):
    """A batch that is being planned. `number`: its own · `captured`: whether as part of a captured step · `lag`: how
    many batches before this one lock their rows · `locked`: ids of those · `uncached`: whether one of them may use rows
    without a slot."""

    number: int
    captured: bool
    lag: int
    locked: int
    uncached: bool


class Ledger:
    """The batches of one cache, whose tickets are in `tickets`."""

    def __init__(self, tickets: TicketLedger) -> None:
        self._tickets = tickets
        self.last = 0  # the last batch planned, by the `count` of the host
        self._eager = 0  # the last one planned outside a capture
        self._planning: int | None = None  # the batch that is being planned, and not yet in flight
        self._recurring: frozenset[int] = frozenset()  # in flight, and each replay of what is captured has them anew
        self._captured_from = NOTHING_PLANNED, 0  # what that relies on, and the last batch before it

    def restart(self, batch: int) -> None:
        """No batch is in flight, and the next one follows `batch`."""
        self.last = self._eager = batch
        self._tickets.reset()

    # --- a plan -----------------------------------------------------------------------------------------------------

    def begin(self, *, captured: bool = False) -> Begun:
        """The next batch is being planned. It does not count before `count`."""
        self._planning = self.last + 1
        return Begun(self._planning, captured, *self.next_locks())

    def next_locks(self) -> tuple[int, int, bool]:
        """Of the batch that would be planned next: how many before it lock their rows, ids of those, and whether one
        of them may use rows without a slot."""
        batch = self.last + 1
        oldest = self._tickets.oldest(batch)
        return batch - oldest, *self._tickets.locked(oldest)

    def is_locked(self, batch: int) -> bool:
        """Whether the batch that is planned next finds the rows of a planned one locked. A number that is yet to come
        is of before a `restart`."""
        return self._tickets.oldest(self.last + 1) <= batch <= self.last

    def lag_of(self, batch: int) -> int:
        """How many batches before a planned one, which is in flight, lock their rows now."""
        return max(0, batch - self._tickets.oldest(batch))

    def count(self, effects: Effects, *, captured: bool = False) -> int:
        """What plans batches is about to be launched, or replayed, or is being `captured`, which counts as outside of a
        capture once that has run: before the device counts them, as a batch too many locks more, and one too few less.
        Returns the number of the last batch before them."""
        first = self.last
        self.last = first + effects.plans
        if not captured:
            self._eager = self.last
        if effects.locked:
            self._tickets.locked(self._tickets.oldest(first + 1))  # forgets those that lock nothing any more
            self._tickets.repeat(first, effects.locked)
        return first

    def over(self) -> None:
        """No batch is being planned."""
        self._planning = None

    def hold(self) -> Hold:
        """Keeps locked what is in flight or being planned now, until the hold ends."""
        return self._tickets.hold(self.last + 1 if self._planning is None else self._planning)

    # --- captured steps ---------------------------------------------------------------------------------------------

    def check_recurring(self) -> None:
        """Before a batch is planned in a capture. Raises `StorageError` while a batch is in flight that replays will
        not have."""
        if any(batch <= self._eager for batch in self._tickets.live - self._recurring):
            raise StorageError(
                "a step cannot be captured in a CUDA graph while a batch from before is in flight: each replay would "
                "lock its rows; run its backward first, or drop its outputs"
            )

    def may_replay(self, ended: Iterable[int], last: int | None, effects: Effects) -> bool:
        """Whether a step may be replayed now that ends the batches `ended`: no other is in flight. `last`: number of
        the last batch when they were planned, if no other may follow it · `effects`: of the step, once it was captured,
        which knows of batches no further back, and of no more ids, than were in flight then."""
        ended = set(ended)
        if not self._tickets.live <= ended or last not in (None, self.last):
            return False
        if effects is NOTHING_PLANNED:
            return True
        distance, before = self._reach(ended)
        return distance <= effects.distance and before <= effects.before

    def begin_capture(self, ended: Iterable[int]) -> None:
        """A step is being captured that ends the batches `ended`; each replay ends those of the one before."""
        self._recurring = frozenset(ended)
        distance, before = self._reach(self._recurring)
        self._captured_from = Effects(distance=distance, before=before), self.last

    def end_capture(self, records: int = 0) -> Effects:
        """The step is captured: the effects of a replay, which plans what was planned since `begin_capture`."""
        self._recurring = frozenset()
        relies_on, first = self._captured_from
        return replace(relies_on, plans=self.last - first, locked=self._tickets.since(first), records=records)

    def _reach(self, ended: Iterable[int]) -> tuple[int, int]:
        """How many batches back the oldest of `ended` was planned, and how many ids are locked since."""
        oldest = min(ended, default=self.last + 1)
        return self.last - oldest, sum(ids for _, ids, _ in self._tickets.since(oldest - 1))
