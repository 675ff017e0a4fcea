"""What a call changes stands in its cache's book while it does, so that no exception leaves half of it unknown.

An exception, Ctrl-C for one, may come between any two lines, in a handler too. So nothing is undone or ended by
handlers alone: a change is entered before its first step and struck out after its last, and whoever finds one in the
book knows that its call was interrupted, and settles it first. Settled, it has not happened, or it has, or rows are in
doubt: then every later call says so, until they are loaded again.
"""

from __future__ import annotations

import abc
import sys
from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple, Protocol, cast

from tieredemb.errors import BrokenCacheError, StorageError

Part = Hashable  # of the rows, such as the weights of one table: named by the cache's owner


class Doubt(NamedTuple):
    """Rows that are not to be trusted. `reason`: what has failed · `parts`: which; None for all."""

    reason: str
    parts: frozenset[Part] | None = None


class Changed(Protocol):
    """A cache, as its changes settle it. `rows_version`: counts what may change rows where they are."""

    doubts: Doubts
    rows_version: int

    def give_up_batches(self) -> None:
        """Ends the batches in flight."""

    def forget(self) -> None:
        """Drops every hot row without writing it back."""


class Change(abc.ABC):
    """A change that is under way, or was interrupted: `cause` says by what, where that is known."""

    cause = ""
    calls_inside = False  # whether the call that makes it calls the cache meanwhile

    @abc.abstractmethod
    def settle(self, cache: Changed) -> Doubt | None:
        """Undoes or ends it, where it was interrupted; returns what is in doubt if neither can be had. A second call,
        after an interrupted first one, goes on. The caller holds the lock that it was made under."""


class HalfWritten(Change):
    """A change of rows that cannot be taken back once it `has_begun`. `parts` as in `Doubt` · `replaces`: whether cold
    rows are replaced, so that hot ones are those of rows that are gone · `calls_inside`: see `Change`."""

    def __init__(
        self,
        call: str,
        parts: frozenset[Part] | None = None,
        *,
        replaces: bool = False,
        calls_inside: bool = False,
    ) -> None:
        self.calls_inside = calls_inside
        self.call = call
        self.parts = parts
        self.has_begun = False
        self._replaces = replaces

    def doubt(self, cache: Changed) -> Doubt | None:
        """What it leaves in doubt, interrupted."""
        parts = None if self.parts is None else self.parts & cache.doubts.all_parts
        if not self.has_begun or (parts is not None and not parts):
            return None
        return Doubt(interrupted(self.call, self.cause), parts)

    def settle(self, cache: Changed) -> Doubt | None:
        doubt = self.doubt(cache)
        if doubt is not None and self._replaces:
            cache.give_up_batches()
            cache.forget()
        return doubt


def interrupted(call: str, cause: str) -> str:
    """The reason of a doubt, in words."""
    return f"{call} was interrupted{f' by {cause}' if cause else ''}"


class Doubts:
    """What is in doubt in one cache. `all_parts`: of all rows, as their owner names them · `found`: the doubts."""

    def __init__(self) -> None:
        self.all_parts: frozenset[Part] = frozenset()
        self.found: tuple[Doubt, ...] = ()

    @property
    def reason(self) -> str:
        """Why rows are not to be trusted; "" where they are."""
        return "; ".join(dict.fromkeys(doubt.reason for doubt in self.found))

    @property
    def parts(self) -> frozenset[Part]:
        """Those in doubt."""
        return frozenset().union(*(self.all_parts if parts is None else parts for _, parts in self.found))

    def add(self, doubt: Doubt) -> None:
        if doubt not in self.found:
            self.found = (*self.found, doubt)

    def dispel(self, parts: Iterable[Part] | None = None) -> None:
        """Rows were replaced: these `parts`, or all, are what they should be."""
        left = frozenset() if parts is None else self.parts - frozenset(parts)
        self.found = (Doubt(self.reason, left),) if left else ()

    def check(self) -> None:
        """Raises `BrokenCacheError` if there are any."""
        if self.found:
            raise BrokenCacheError(
                f"{self.reason}, so some rows may be as before it and some as after. "
                f"tieredemb.load_checkpoint(model, directory) mends the cache, and so does load_checkpoint(directory) "
                f"of the module, or load_state_dict() of it and of its fused_optimizer; earlier checkpoints are safe. "
                f"tieredemb.save_checkpoint(model, directory) keeps the rows as they are, to be loaded with "
                f"recover=True alone; close() gives them up, and leaves a file marked unclean"
            )


class UnderWay:
    """A change in the book, and the call that makes it: the frame whose end is the change's, `up` from who asks."""

    def __init__(self, change: Change, up: int) -> None:
        self.change = change
        self._frame: Any = sys._getframe(up + 1)

    def forget(self) -> None:
        """It is over: nothing keeps the frame, and what that holds, alive."""
        self._frame = None

    def is_around(self) -> bool:
        """Whether this very call is made inside the change: by a signal handler, or a finaliser."""
        frame: Any = sys._getframe(1)
        while frame is not None:
            if frame is self._frame:
                return True
            frame = frame.f_back
        return False


class ChangeBook:
    """The changes under way that are made under one lock of a cache, which guards the book. `entries`: those that were
    begun and have not ended, the last one last."""

    def __init__(self, doubts: Doubts) -> None:
        self._doubts = doubts
        self.entries: list[UnderWay] = []

    def begin(self, change: Change, *, up: int = 1) -> UnderWay:
        """Enters a change, before its first step. It is the caller's; of a context manager that is a generator, with
        `up=3`, that of who enters it."""
        entry = UnderWay(change, up)
        self.entries.append(entry)
        return entry

    def end(self, entry: UnderWay) -> None:
        """Strikes it out, after its last."""
        self.entries[:] = [other for other in self.entries if other is not entry]
        entry.forget()

    def note(self, error: BaseException) -> None:
        """What is under way ends in `error`."""
        for entry in self.entries:
            entry.change.cause = type(error).__name__

    def settle(self, cache: Changed) -> None:
        """Settles the changes that were interrupted, the last one first. Raises `StorageError` inside of one."""
        left = len(self.entries)
        while left:
            left -= 1
            entry = self.entries[left]
            if entry.is_around():
                if entry.change.calls_inside:
                    continue
                raise StorageError(
                    "this cache is called amid another call of it on the same thread, as by a signal handler; let the "
                    "handler set a flag, and call the cache when the other call has returned"
                )
            doubt = entry.change.settle(cache)
            if doubt is not None:
                self._doubts.add(doubt)
            self.entries.pop(left).forget()

    def settle_rows(self, cache: Changed) -> None:
        """As `settle`, under the lock of rows alone: changes of all rows are left as they are, and are doubts
        already."""
        halves = [entry for entry in self.entries if isinstance(entry.change, HalfWritten)]
        for entry in halves:
            doubt = cast("HalfWritten", entry.change).doubt(cache)
            if doubt is not None and not entry.is_around():
                self._doubts.add(doubt)
        if not halves:
            self.settle(cache)
