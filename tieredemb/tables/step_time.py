"""When the next step of a model begins, if each of its tables has a plan of its own: scores age once a step."""

from __future__ import annotations

import weakref
from typing import Protocol


class Lookup(Protocol):
    """A forward of one table."""

    @property
    def is_over(self) -> bool:
        """Whether a backward of it is no longer possible."""


class StepTime:
    """The steps of a model whose tables are looked up separately, in any order, some of them not at all, some twice.

    A step ends with a backward. If there is none, as in inference, it ends when a table is looked up again whose last
    forward has ended. If a table is looked up twice in one step, its first forward has not ended, as its backward is
    still to come.
    """

    def __init__(self) -> None:
        # of each table that this step has looked up in, by its id; None of one that no backward can follow
        self._last: dict[int, weakref.ref[Lookup] | None] = {}
        self._is_over = True

    def begins(self, table: object) -> bool:
        """Whether a forward of `table` that is about to be planned is the first one of a step."""
        if not self._is_over and id(table) in self._last:
            known = self._last[id(table)]
            before = None if known is None else known()
            self._is_over = before is None or before.is_over
        return self._is_over

    def looked_up(self, table: object, lookup: Lookup | None) -> None:
        """A forward of `table` was planned, or one that was planned ahead has started. `lookup`: None of a forward
        without a plan."""
        if self._is_over:
            self._last = {}
            self._is_over = False
        self._last[id(table)] = None if lookup is None else weakref.ref(lookup)

    def backward(self) -> None:
        """A backward has run through some of the tables."""
        self._is_over = True
