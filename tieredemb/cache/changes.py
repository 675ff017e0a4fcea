"""The intent log of a cache: it records each change while it is made, so that no exception leaves an unknown half.

An exception such as Ctrl-C may be raised between any two lines, in a handler too. So handlers alone undo or complete
nothing: a change is recorded before its first step and cleared after its last. A call that finds a record knows that
the change was interrupted, and recovers first. Then the change has happened or not, or rows are suspect: in that case
every later call raises, until they are loaded again.
"""

from __future__ import annotations

import abc
import sys
from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple, Protocol

from tieredemb.errors import BrokenCacheError, StorageError

Part = Hashable  # a part of the rows, such as the weights of one table, named by the cache's owner


class Suspect(NamedTuple):
    """Rows that may be wrong. `reason`: what has failed · `parts`: which rows; None for all."""

    reason: str
    parts: frozenset[Part] | None = None


class Changed(Protocol):
    """A cache, as recovery uses it. `rows_version`: counts calls that may change rows in place."""

    suspects: Suspects
    rows_version: int

    def abort_batches(self) -> None:
        """Aborts the batches in flight."""

    def forget(self) -> None:
        """Drops every hot row without writing it back."""


class Change(abc.ABC):
    """A change that is being made, or was interrupted. `cause`: the name of the exception, if known."""

    cause = ""
    calls_inside = False  # whether its call makes other calls of the cache meanwhile

    @abc.abstractmethod
    def recover(self, cache: Changed) -> Suspect | None:
        """Undoes or completes an interrupted change; if neither is possible, returns the suspect rows. If a call is
        interrupted, a second one continues. The caller holds the lock that the change was made under."""


class HalfWritten(Change):
    """A change of rows that cannot be undone once it `has_begun`. `parts` as in `Suspect` · `replaces`: whether cold
    rows are replaced, so that hot rows are outdated · `calls_inside`: see `Change`."""

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
        """The rows that are suspect if it was interrupted."""
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
    """The suspect rows of one cache. `all_parts`: the parts of all its rows, as their owner names them · `found`: the
    suspect ones."""

    def __init__(self) -> None:
        self.all_parts: frozenset[Part] = frozenset()
        self.found: tuple[Suspect, ...] = ()

    @property
    def reason(self) -> str:
        """Why rows are suspect; "" if none are."""
        return "; ".join(dict.fromkeys(suspect.reason for suspect in self.found))

    @property
    def parts(self) -> frozenset[Part]:
        """The suspect parts."""
        return frozenset().union(*(self.all_parts if parts is None else parts for _, parts in self.found))

    def add(self, suspect: Suspect) -> None:
        if suspect not in self.found:
            self.found = (*self.found, suspect)

    def clear(self, parts: Iterable[Part] | None = None) -> None:
        """Called when rows were replaced: these `parts`, or all, are right again."""
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
    """The record of a change, and of its call: the frame that ends with the change, `up` frames above the caller's."""

    def __init__(self, change: Change, up: int) -> None:
        self.change = change
        self._frame: Any = sys._getframe(up + 1)

    def forget(self) -> None:
        """Called when the change is over: does not keep the frame, and what that references, alive."""
        self._frame = None

    def is_around(self) -> bool:
        """Whether the present call is made inside the change, by a signal handler or a finaliser."""
        frame: Any = sys._getframe(1)
        while frame is not None:
            if frame is self._frame:
                return True
            frame = frame.f_back
        return False


class IntentLog:
    """The changes that are being made under one lock of a cache, which also guards the log. `records`: of changes that
    have begun and not ended, in order."""

    def __init__(self, suspects: Suspects) -> None:
        self._suspects = suspects
        self.records: list[IntentRecord] = []

    def begin(self, change: Change, *, up: int = 1) -> IntentRecord:
        """Records a change of the caller, before its first step. A context manager that is a generator passes `up=3`,
        for a change of the function that enters it."""
        record = IntentRecord(change, up)
        self.records.append(record)
        return record

    def clear(self, record: IntentRecord) -> None:
        """Clears the record of a change, after its last step."""
        self.records[:] = [other for other in self.records if other is not record]
        record.forget()

    def note(self, error: BaseException) -> None:
        """Notes that the present changes end in `error`."""
        for record in self.records:
            record.change.cause = type(error).__name__

    def recover(self, cache: Changed) -> None:
        """Recovers from interrupted changes, the last one first. Raises `StorageError` inside a change."""
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
        """As `recover`, under the lock of rows alone: changes of all rows stay recorded, and their rows count as
        suspect."""
        halves = [(each, half) for each in self.records if isinstance(half := each.change, HalfWritten)]
        for record, change in halves:
            suspect = change.suspect(cache)
            if suspect is not None and not record.is_around():
                self._suspects.add(suspect)
        if not halves:
            self.recover(cache)
