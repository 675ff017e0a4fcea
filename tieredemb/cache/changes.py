"""What a call changes stands in its cache's book while it does, so that no exception leaves half of it unknown.

An exception, Ctrl-C for one, may come between any two lines, in a handler too. So nothing is undone or ended by
handlers alone: a change is entered before its first step and struck out after its last, and whoever finds one in the
book knows that its call was interrupted, and settles it first. Settled, it has not happened, or it has, or rows are in
doubt: then every later call says so, until they are loaded again.
"""

from __future__ import annotations

import abc
from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from tieredemb.errors import BrokenCacheError

if TYPE_CHECKING:
    from tieredemb.cache.base import Cache

Part = Hashable  # of the rows, such as the weights of one table: named by the cache's owner


class Doubt(NamedTuple):
    """Rows that are not to be trusted. `reason`: what has failed · `parts`: which; None for all."""

    reason: str
    parts: frozenset[Part] | None = None


class Change(abc.ABC):
    """A change that is under way, or was interrupted: `cause` says by what, where that is known."""

    cause = ""

    @abc.abstractmethod
    def settle(self, cache: Cache) -> Doubt | None:
        """Undoes or ends it, where it was interrupted; returns what is in doubt if neither can be had. A second call,
        after an interrupted first one, goes on. The caller holds the lock that it was made under."""


class HalfWritten(Change):
    """A change of rows that cannot be taken back once it `has_begun`. `parts` as in `Doubt`."""

    def __init__(self, call: str, parts: frozenset[Part] | None = None) -> None:
        self.call = call
        self.parts = parts
        self.has_begun = False

    def settle(self, cache: Cache) -> Doubt | None:
        parts = None if self.parts is None else self.parts & cache.doubts.all_parts
        if not self.has_begun or (parts is not None and not parts):
            return None
        return Doubt(interrupted(self.call, self.cause), parts)


def interrupted(call: str, cause: str) -> str:
    """The reason of a doubt, in words."""
    return f"{call} was interrupted{f' by {cause}' if cause else ''}"


class Doubts:
    """What is in doubt in one cache. `all_parts`: of all rows, as their owner names them."""

    def __init__(self) -> None:
        self.all_parts: frozenset[Part] = frozenset()
        self._found: tuple[Doubt, ...] = ()

    @property
    def reason(self) -> str:
        """Why rows are not to be trusted; "" where they are."""
        return "; ".join(dict.fromkeys(doubt.reason for doubt in self._found))

    @property
    def parts(self) -> frozenset[Part]:
        """Those in doubt."""
        return frozenset().union(*(self.all_parts if parts is None else parts for _, parts in self._found))

    def add(self, doubt: Doubt) -> None:
        if doubt not in self._found:
            self._found = (*self._found, doubt)

    def dispel(self, parts: Iterable[Part] | None = None) -> None:
        """Rows were replaced: these `parts`, or all, are what they should be."""
        left = frozenset() if parts is None else self.parts - frozenset(parts)
        self._found = (Doubt(self.reason, left),) if left else ()

    def check(self) -> None:
        """Raises `BrokenCacheError` if there are any."""
        if self._found:
            raise BrokenCacheError(
                f"{self.reason}, so some rows may be as before it and some as after. load_checkpoint(directory) mends "
                f"the cache, and so does load_state_dict() of the module and of its fused_optimizer; earlier "
                f"checkpoints are safe. save_checkpoint(directory) keeps the rows as they are, to be loaded with "
                f"recover=True alone; close() gives them up, and leaves a file marked unclean"
            )


class ChangeBook:
    """The changes under way that are made under one lock of a cache, which guards the book."""

    def __init__(self, doubts: Doubts) -> None:
        self._doubts = doubts
        self._under_way: list[Change] = []

    def begin(self, change: Change) -> None:
        """Enters a change, before its first step."""
        self._under_way.append(change)

    def end(self, change: Change) -> None:
        """Strikes it out, after its last."""
        self._under_way.remove(change)

    @property
    def is_open(self) -> bool:
        """Whether a change is under way, or was interrupted."""
        return bool(self._under_way)

    def note(self, error: BaseException) -> None:
        """What is under way ends in `error`."""
        for change in self._under_way:
            change.cause = type(error).__name__

    def settle(self, cache: Cache) -> None:
        """Settles the changes that were interrupted, the last one first."""
        while self._under_way:
            change = self._under_way[-1]
            doubt = change.settle(cache)
            if doubt is not None:
                self._doubts.add(doubt)
            self._under_way.pop()
