"""The ledger of a GPU's cache: the numbers of its batches, the batches in flight, and what they lock.

Batches are numbered as they are planned. A replay plans batches too, which the host does not see. What a launch or a
replay does is data, its `Effects`; `count` enters its batches. Nothing here uses a device. The locks of the cache guard
it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from tieredemb.cache.device.effects import NOTHING_PLANNED, Effects
from tieredemb.cache.tickets import Hold, TicketLedger
from tieredemb.errors import StorageError


class Begun(NamedTuple):
    """A batch that is being planned. `number`: of the batch · `captured`: whether in a captured step · `lag`: how many
    batches before this one lock their rows · `locked`: how many ids these have · `uncached`: whether one of them may
    use rows without a slot."""

    number: int
    captured: bool
    lag: int
    locked: int
    uncached: bool


class Ledger:
    """The batches of one cache, with the ledger of its tickets."""

    def __init__(self, tickets: TicketLedger) -> None:
        self._tickets = tickets
        self.last = 0  # the last batch planned, as the host counts
        self._eager = 0  # the last one planned outside a capture
        self._planning: int | None = None  # the batch that is being planned, not yet in flight
        self._recurring: frozenset[int] = frozenset()  # batches in flight that each replay of the capture has anew
        self._captured_from = NOTHING_PLANNED, 0  # what the capture relies on, and the last batch before it

    def restart(self, batch: int) -> None:
        """Called when no batch is in flight: the next one follows `batch`."""
        self.last = self._eager = batch
        self._tickets.reset()

    # --- a plan -----------------------------------------------------------------------------------------------------

    def begin(self, *, captured: bool = False) -> Begun:
        """Begins to plan the next batch, which `count` counts later."""
        self._planning = self.last + 1
        return Begun(self._planning, captured, *self.next_locks())

    def next_locks(self) -> tuple[int, int, bool]:
        """For the batch that would be planned next: how many batches before it lock their rows, how many ids these
        have, and whether one of them may use rows without a slot."""
        batch = self.last + 1
        oldest = self._tickets.oldest(batch)
        return batch - oldest, *self._tickets.locked(oldest)

    def is_locked(self, batch: int) -> bool:
        """Whether the next plan finds the rows of a planned `batch` locked. A number larger than the last one is from
        before a `restart`."""
        return self._tickets.oldest(self.last + 1) <= batch <= self.last

    def lag_of(self, batch: int) -> int:
        """How many batches before `batch`, which is in flight, lock their rows now."""
        return max(0, batch - self._tickets.oldest(batch))

    def count(self, effects: Effects, *, captured: bool = False) -> int:
        """Counts batches that are about to be launched or replayed, or are being `captured`; once the capture has run,
        they count as planned outside of it. This is done before the device counts them, as a batch too many only locks
        too much, and one too few too little. Returns the number of the last batch before them."""
        first = self.last
        self.last = first + effects.plans
        if not captured:
            self._eager = self.last
        if effects.locked:
            self._tickets.locked(self._tickets.oldest(first + 1))  # forgets batches that lock nothing any more
            self._tickets.repeat(first, effects.locked)
        return first

    def over(self) -> None:
        """Called when no batch is being planned."""
        self._planning = None

    def hold(self) -> Hold:
        """Keeps the rows of batches in flight or being planned locked, until the hold ends."""
        return self._tickets.hold(self.last + 1 if self._planning is None else self._planning)

    # --- captured steps ---------------------------------------------------------------------------------------------

    def check_recurring(self) -> None:
        """Called before a batch is planned in a capture. Raises `StorageError` if a batch is in flight that replays
        will not have."""
        if any(batch <= self._eager for batch in self._tickets.live - self._recurring):
            raise StorageError(
                "a step cannot be captured in a CUDA graph while a batch from before is in flight: each replay would "
                "lock its rows; run its backward first, or drop its outputs"
            )

    def may_replay(self, ended: Iterable[int], last: int | None, effects: Effects) -> bool:
        """Whether a step that releases the batches `ended` may be replayed now: no other is in flight. `last`: number
        of the last batch when they were planned, if no other may follow · `effects`: of the step, once it is captured:
        batches in flight must not go back further, nor have more ids, than at its capture."""
        ended = set(ended)
        if not self._tickets.live <= ended or last not in (None, self.last):
            return False
        if effects is NOTHING_PLANNED:
            return True
        distance, before = self._reach(ended)
        return distance <= effects.distance and before <= effects.before

    def begin_capture(self, ended: Iterable[int]) -> None:
        """Begins the capture of a step that releases the batches `ended`; each replay releases those of the last
        one."""
        self._recurring = frozenset(ended)
        distance, before = self._reach(self._recurring)
        self._captured_from = Effects(distance=distance, before=before), self.last

    def end_capture(self, records: int = 0) -> Effects:
        """Ends a capture; returns the effects of a replay, which plans what was planned since `begin_capture`."""
        self._recurring = frozenset()
        relies_on, first = self._captured_from
        return replace(relies_on, plans=self.last - first, locked=self._tickets.since(first), records=records)

    def _reach(self, ended: Iterable[int]) -> tuple[int, int]:
        """How many batches ago the oldest of `ended` was planned, and how many ids were locked since."""
        oldest = min(ended, default=self.last + 1)
        return self.last - oldest, sum(ids for _, ids, _ in self._tickets.since(oldest - 1))
