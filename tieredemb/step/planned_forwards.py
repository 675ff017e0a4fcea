"""Forwards that were planned before they come, and how a forward finds its plan: by the very tensors it is given."""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from tieredemb.step.batch import Given
from tieredemb.step.call import Call

if TYPE_CHECKING:
    from tieredemb.tables.table_set import TableSet

T = TypeVar("T")


class PlanExecutor(Executor):
    """Where plans are made ahead, one after the other. `apart`: on a thread of its own, whenever it gets to them ·
    `is_entered`: whether this thread has entered it for all forwards of a batch, with the caches that these use."""

    apart: bool
    is_entered = False

    def wait_for_inputs(self) -> None:
        """To be called by who reads inputs of what is to be planned, and not by `submit`: the current stream of a GPU
        waits for those that are being copied there."""


class Made(Future[T]):
    """A future that has come: a plan that was made at once, or the `error` that it has ended in. A step makes one for
    each forward that is planned ahead, and what others need to wait costs more than all else here."""

    def __init__(self, made: T | None, error: BaseException | None = None) -> None:
        self._made = made
        self._error = error

    def cancel(self) -> bool:
        return False

    def cancelled(self) -> bool:
        return False

    def done(self) -> bool:
        return True

    def exception(self, timeout: float | None = None) -> BaseException | None:
        return self._error

    def result(self, timeout: float | None = None) -> T:
        if self._error is not None:
            raise self._error
        return self._made  # type: ignore[return-value]

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        fn(self)


class Waiting(abc.ABC):
    """What was planned as one, or is being, and waits for its forwards. `count`: how many they are · `left`: how many
    of them have not come."""

    count = left = 1

    @abc.abstractmethod
    def take(self, tables: TableSet, given: Given) -> int | None:
        """Which of its forwards, if any, one that has come is: in `tables`, of these inputs, as they are now
        (`shown_by`). It is no longer waited for."""

    @abc.abstractmethod
    def call_of(self, number: int) -> Call | None:
        """The call of a forward that was taken, once it is planned; None where planning failed: the forward then finds
        out why by itself."""

    @property
    @abc.abstractmethod
    def failed(self) -> bool:
        """Whether planning ended in an error."""

    @abc.abstractmethod
    def result(self) -> Call:
        """What was planned, of all forwards, while none has come. Raises what planning has ended in."""

    @abc.abstractmethod
    def again(self, call: Call) -> Waiting:
        """The same forwards, which a replay has planned anew as `call`."""

    @abc.abstractmethod
    def wait(self) -> None:
        """Waits until planning has come to an end, if to an error."""

    @abc.abstractmethod
    def drop(self) -> None:
        """Gives the plan up, now or as soon as it is made."""

    def end(self) -> None:
        """Once it is dropped, waits until nothing of it is in flight."""
        self.wait()


class Planned(Waiting):
    """One forward in `tables`. `given`: its inputs, held so that no other tensor can take their place in memory."""

    def __init__(self, tables: TableSet, given: Given, future: Future[Call]) -> None:
        self.tables = tables
        self.given = given
        self._shown = shown_by(given)
        self.future = future

    def take(self, tables: TableSet, given: Given) -> int | None:
        if tables is not self.tables or shown_by(given) != self._shown:
            return None
        self.left = 0
        return 0

    def call_of(self, number: int) -> Call | None:
        future, self.future = self.future, _TAKEN  # a call that a forward has is the forward's alone to keep
        if future.cancelled() or future.exception() is not None:
            return None
        call = future.result()
        return call if call.complete() else None

    @property
    def failed(self) -> bool:
        return has_failed(self.future)

    def result(self) -> Call:
        return self.future.result()

    def again(self, call: Call) -> Planned:
        return Planned(self.tables, self.given, Made(call))

    def wait(self) -> None:
        if not self.future.cancelled():
            self.future.exception()

    def drop(self) -> None:
        if not self.future.cancel():
            self.future.add_done_callback(_release)

    def end(self) -> None:
        self.wait()
        if not self.future.cancelled():
            _release(self.future)  # its callback may come a moment later, on the thread that has planned


def has_failed(future: Future[Any]) -> bool:
    """Whether planning has ended in an error."""
    return future.done() and not future.cancelled() and future.exception() is not None


_TAKEN: Future[Call] = Future()
_TAKEN.cancel()


def _release(future: Future[Call]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.result().release()


class PlannedForwards:
    """The forwards over tables that share caches that were planned: those `waiting` for somebody to take them. Its
    calls may come from several threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # left taken by a tracer's exception at a block's end, it stays passable
        self.waiting: list[Waiting] = []

    def add(self, planned: Waiting) -> None:
        with self._lock:
            self.waiting.append(planned)

    def take(self, tables: TableSet, given: Given) -> Call | None:
        """The call that was planned first for these tensors, as they are now; None if there is none. Waits for it."""
        with self._lock:
            for planned in self.waiting:
                number = planned.take(tables, given)
                if number is not None:
                    if not planned.left:
                        self.waiting.remove(planned)
                    break
            else:
                return None
        return planned.call_of(number)

    def holds(self, planned: Waiting) -> bool:
        """Whether it has yet to be taken, by one of its forwards at least, and nobody has given it up."""
        return planned in self.waiting

    def is_whole(self, planned: Waiting) -> bool:
        """Whether it has not failed, and none of its forwards has come."""
        return planned.left == planned.count and planned in self.waiting and not planned.failed

    def drop(self, planned: Waiting, *, made: bool = False) -> int:
        """Gives up what no forward has taken; returns how many there were to give up that have not failed. `made`:
        waits until it is made, and known whether it fails."""
        if made and planned in self.waiting:
            planned.wait()
        with self._lock:
            if planned not in self.waiting:
                return 0
            self.waiting.remove(planned)
        left = 0 if planned.failed else planned.left
        planned.drop()
        return left

    def drop_all(self) -> None:
        """Gives up all plans, and waits for those that are being made."""
        with self._lock:
            dropped, self.waiting = self.waiting, []
        for planned in dropped:
            planned.drop()
        for planned in dropped:
            planned.end()


def shown_by(given: Given) -> list[Any]:
    """What tells the inputs of a forward, as they are now, from others, as long as they are held: of a tensor where its
    memory begins, how often that was changed in place, which tensors made in inference mode do not tell, and what the
    tensor shows of it; other inputs as they are."""
    found: list[Any] = []
    for part in given:
        if isinstance(part, torch.Tensor):
            version = -1 if part.is_inference() else part._version
            found.append((part.data_ptr(), version, part.shape, part.stride(), part.dtype, part.device))
        else:
            found.append(part)
    return found


def identity(given: Given) -> tuple[Any, ...]:
    """The same, to look them up by."""
    return tuple(shown_by(given))
