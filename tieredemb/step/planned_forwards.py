"""Forwards that were planned before they come, and how a forward finds its plan: by the very tensors it is given."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

import torch

from tieredemb.step.batch import Given
from tieredemb.step.call import Call

T = TypeVar("T")
Marks = list[Any]


class PlanExecutor(Executor):
    """Where plans are made ahead, one after the other. `apart`: on a thread of its own, whenever it gets to them ·
    `is_entered`: whether this thread has entered it for all forwards of a batch, with the caches that these use."""

    apart: bool
    is_entered = False


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


class Planned:
    """A forward that was planned ahead, or is being. `given`: its inputs, held so that no other tensor can take their
    place in memory."""

    def __init__(self, given: Given, future: Future[Call]) -> None:
        self.given = given
        self._marks, self._forms = marks(given), forms(given)
        self.future = future

    def is_of(self, given: Given, its_marks: Marks) -> bool:
        """Whether it is of these inputs, as they are now (`marks`), or of others that show the same memory."""
        return its_marks == self._marks and forms(given) == self._forms

    def call(self) -> Call | None:
        """The call, once it is planned; None where planning failed: the forward then finds out why by itself."""
        future, self.future = self.future, _TAKEN  # a call that a forward has is the forward's alone to keep
        if future.cancelled() or future.exception() is not None:
            return None
        call = future.result()
        return call if call.complete() else None

    @property
    def failed(self) -> bool:
        """Whether planning ended in an error."""
        return self.future.done() and not self.future.cancelled() and self.future.exception() is not None

    def wait(self) -> None:
        """Waits until planning has come to an end, if to an error."""
        if not self.future.cancelled():
            self.future.exception()

    def drop(self) -> None:
        """Gives the plan up, now or as soon as it is made."""
        if not self.future.cancel():
            self.future.add_done_callback(_release)


_TAKEN: Future[Call] = Future()
_TAKEN.cancel()


def _release(future: Future[Call]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.result().release()


class PlannedForwards:
    """The forwards over one set of tables that were planned: those `waiting` for somebody to take them. Its calls may
    come from several threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # left taken by a tracer's exception at a block's end, it stays passable
        self.waiting: list[Planned] = []

    def add(self, planned: Planned) -> None:
        with self._lock:
            self.waiting.append(planned)

    def take(self, given: Given) -> Call | None:
        """The call that was planned first for these tensors, as they are now; None if there is none. Waits for it."""
        its_marks = marks(given)
        with self._lock:
            for planned in self.waiting:
                if planned.is_of(given, its_marks):
                    self.waiting.remove(planned)
                    break
            else:
                return None
        return planned.call()

    def holds(self, planned: Planned) -> bool:
        """Whether no forward has taken the plan, and nobody has given it up."""
        return planned in self.waiting

    def drop(self, planned: Planned, *, made: bool = False) -> bool:
        """Gives up a plan that no forward has taken; returns whether there was one to give up. `made`: waits until it
        is made, and known whether it fails."""
        if made and planned in self.waiting:
            planned.wait()
        with self._lock:
            if planned not in self.waiting:
                return False
            self.waiting.remove(planned)
        planned.drop()
        return True

    def drop_all(self) -> None:
        """Gives up all plans, and waits for those that are being made."""
        with self._lock:
            dropped, self.waiting = self.waiting, []
        for planned in dropped:
            planned.drop()
        for planned in dropped:
            if not planned.future.cancelled():
                planned.future.exception()
                _release(planned.future)  # its callback may come a moment later, on the thread that has planned


def marks(given: Given) -> Marks:
    """Where the memory of tensors begins, and how often it was changed in place, which tensors made in inference mode
    do not tell; other inputs as they are."""
    return [
        (part.data_ptr(), -1 if part.is_inference() else part._version) if isinstance(part, torch.Tensor) else part
        for part in given
    ]


def forms(given: Given) -> list[tuple[Any, ...]]:
    """What tensors show of that memory."""
    return [(part.shape, part.stride(), part.dtype, part.device) for part in given if isinstance(part, torch.Tensor)]


def identity(given: Given) -> tuple[Any, ...]:
    """What tells tensors and their content from others, as long as they are held."""
    return (*marks(given), *forms(given))
