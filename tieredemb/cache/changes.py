"""What a call changes stands in its cache's intent log while it does, so that no exception leaves half of it unknown.

An exception, Ctrl-C for one, may come between any two lines, in a handler too. So nothing is undone or ended by
handlers alone: a change is recorded before its first step and cleared after its last, and whoever finds a record knows
that its call was interrupted, and recovers first. After that the change has not happened, or it has, or rows are
suspect: then every later call says so, until they are loaded again.
"""

from __future__ import annotations

import abc
import sys
from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple, Protocol

from tieredemb.errors import BrokenCacheError, StorageError

Part = Hashable  # of the rows, such as the weights of one table: named by the cache's owner


class Suspect(NamedTuple):
    """Suspect rows: they are not to be trusted. `reason`: what has failed · `parts`: which; None for all."""

    reason: str
    parts: frozenset[Part] | None = None


class Changed(Protocol):
    """A cache, as recovery changes it. `rows_version`: counts what may change rows where they are."""

    suspects: Suspects
    rows_version: int

    def abort_batches(self) -> None:
        """Aborts the batches in flight."""

    def forget(self) -> None:
        """Drops every hot row without writing it back."""


class Change(abc.ABC):
    """A change that is under way, or was interrupted: `cause` says by what, where that is known."""

    cause = ""
    calls_inside = False  # whether the call that makes it calls the cache meanwhile

    @abc.abstractmethod
    def recover(self, cache: Changed) -> Suspect | None:
        """Undoes or ends it, where it was interrupted; returns what is suspect if neither can be had. A second call,
        after an interrupted first one, goes on. The caller holds the lock that it was made under."""


class HalfWritten(Change):
    """A change of rows that cannot be taken back once it `has_begun`. `parts` as in `Suspect` · `replaces`: whether
    cold rows are replaced, so that hot ones are those of rows that are gone · `calls_inside`: see `Change`."""

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

    def suspect(self, cache: Changed) -> Suspect | None:
        """The rows that it makes suspect where it was interrupted."""
        parts = None if self.parts is None else self.parts & cache.suspects.all_parts
        if not self.has_begun or (parts is not None and not parts):
            return None
        return Suspect(interrupted(self.call, self.cause), parts)

    def recover(self, cache: Changed) -> Suspect | None:
        suspect = self.suspect(cache)
        if suspect is not None and self._replaces:
            cache.abort_batches()
            cache.forget()
        return suspect


def interrupted(call: str, cause: str) -> str:
    """Why rows are suspect, in words."""
    return f"{call} was interrupted{f' by {cause}' if cause else ''}"


class Suspects:
    """The suspect rows of one cache. `all_parts`: the parts of all its rows, as their owner names them · `found`:
    those that are suspect."""

    def __init__(self) -> None:
        self.all_parts: frozenset[Part] = frozenset()
        self.found: tuple[Suspect, ...] = ()

    @property
    def reason(self) -> str:
        """Why rows are not to be trusted; "" where they are."""
        return "; ".join(dict.fromkeys(suspect.reason for suspect in self.found))

    @property
    def parts(self) -> frozenset[Part]:
        """Those that are suspect."""
        return frozenset().union(*(self.all_parts if parts is None else parts for _, parts in self.found))

    def add(self, suspect: Suspect) -> None:
        if suspect not in self.found:
            self.found = (*self.found, suspect)

    def clear(self, parts: Iterable[Part] | None = None) -> None:
        """Rows were replaced: these `parts`, or all, are what they should be."""
        left = frozenset() if parts is None else self.parts - frozenset(parts)
        self.found = (Suspect(self.reason, left),) if left else ()

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


class IntentRecord:
    """The record of a change, and the call that makes it: the frame that ends with the change, `up` frames above that
    of the caller."""

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


class IntentLog:
    """The changes under way that are made under one lock of a cache, which guards the log. `records`: those of changes
    that have begun and not ended, the last one last."""

    def __init__(self, suspects: Suspects) -> None:
        self._suspects = suspects
        self.records: list[IntentRecord] = []

    def begin(self, change: Change, *, up: int = 1) -> IntentRecord:
        """Records a change, before its first step. It is the caller's; of a context manager that is a generator, with
        `up=3`, that of who enters it."""
        record = IntentRecord(change, up)
        self.records.append(record)
        return record

    def clear(self, record: IntentRecord) -> None:
        """Clears the record of a change, after its last step."""
        self.records[:] = [other for other in self.records if other is not record]
        record.forget()

    def note(self, error: BaseException) -> None:
        """What is under way ends in `error`."""
        for record in self.records:
            record.change.cause = type(error).__name__

    def recover(self, cache: Changed) -> None:
        """Recovers from the changes that were interrupted, the last one first. Raises `StorageError` inside of one."""
        left = len(self.records)
        while left:
            left -= 1
            record = self.records[left]
            if record.is_around():
                if record.change.calls_inside:
                    continue
                raise StorageError(
                    "this cache is called amid another call of it on the same thread, as by a signal handler; let the "
                    "handler set a flag, and call the cache when the other call has returned"
                )
            suspect = record.change.recover(cache)
            if suspect is not None:
                self._suspects.add(suspect)
            self.records.pop(left).forget()

    def recover_rows(self, cache: Changed) -> None:
        """As `recover`, under the lock of rows alone: changes of all rows are left as they are, and make rows
        suspect already."""
        halves = [(each, half) for each in self.records if isinstance(half := each.change, HalfWritten)]
        for record, change in halves:
            suspect = change.suspect(cache)
            if suspect is not None and not record.is_around():
                self._suspects.add(suspect)
        if not halves:
            self.recover(cache)
