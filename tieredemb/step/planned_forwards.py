"""Forwards that were planned ahead, and how a forward finds its plan: by its very input tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from tieredemb.shallow import shallow_copy
from tieredemb.step.batch import Given
from tieredemb.step.forwards import Forward, Forwards
from tieredemb.step.program import Call

if TYPE_CHECKING:
    from tieredemb.tables.table_set import TableSet

T = TypeVar("T")


class PlanExecutor(Executor):
    """Makes plans ahead, one after another. `on_thread`: on another thread, when that is free; else at once, on the
    thread that has entered it for all forwards of a batch, with the caches that these use."""

    on_thread: bool

    def wait_for_inputs(self) -> None:
        """Called before inputs are read outside of `submit`: the current stream of a GPU waits for those that are being
        copied there."""


class CompletedFuture(Future[T]):
    """A completed future: a plan that was made at once, or the `error` that it ended in. A step makes one for each
    forward that is planned ahead, and the locks of other futures would cost more than all else here."""

    def __init__(self, result: T | None, error: BaseException | None = None) -> None:
        self._result = result
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
        return self._result  # type: ignore[return-value]

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        fn(self)


def identity(given: Given) -> tuple[Any, ...]:
    """The guards of a forward's inputs (as `torch.compile` calls what must not change): of a tensor its address,
    version (−1 in inference mode, which counts none), shape, strides, dtype and device. While inputs are held, their
    guards distinguish them, unchanged, from all others; they are hashable."""
    found: list[Any] = []
    for part in given:
        if isinstance(part, torch.Tensor):
            version = -1 if part.is_inference() else part._version
            found.append((part.data_ptr(), version, part.shape, part.stride(), part.dtype, part.device))
        else:
            found.append(part)
    return tuple(found)


def guards_of(forwards: Sequence[Given]) -> tuple[list[tuple[Any, ...]], tuple[object, ...]]:
    """The `identity` of each, and a signature: the forms (`BatchForm`) of batches with equal signatures differ only in
    the numbers of ids, and these only where there are offsets."""
    guards, signature = [], list[object]()
    known = dict[int, tuple[Any, ...]]()  # many tables may be given the same offsets
    for given in forwards:
        guard: list[Any] = []
        for each in given:
            if not isinstance(each, torch.Tensor):
                guard.append(each)
                continue
            found = known.get(id(each))
            if found is None:
                version = -1 if each.is_inference() else each._version
                found = each.data_ptr(), version, each.shape, each.stride(), each.dtype, each.device
                known[id(each)] = found
            is_any_number = not guard and len(given) > 1 and len(found[2]) == 1
            guard.append(found)
            signature += None if is_any_number else found[2], *found[3:]
        signature.append(None)
        guards.append(tuple(guard))
    return guards, tuple(signature)


class Planned:
    """Forwards that are planned as one, and have yet to start. `forwards`: the tables of each, no table twice, and its
    inputs, which are held so that no other tensor gets their memory · `numbers`: the number of the forward by the
    identity of its tables · `guards`: of the inputs of each, None once it has started · `count`: how many forwards ·
    `left`: how many have not started · `shared`: of several forwards, the plan that they share."""

    def __init__(
        self,
        forwards: Sequence[tuple[TableSet, Given]],
        future: Future[Any],
        guards: Sequence[tuple[Any, ...]] | None = None,
        shared: Forwards | None = None,
    ) -> None:
        self._forwards = forwards
        self.shared = shared
        self._contexts = None if shared is None else shared.contexts
        self.numbers = {id(tables): number for number, (tables, _) in enumerate(forwards)}
        if guards is None:
            guards = [identity(given) for _, given in forwards]
        self.guards: list[tuple[Any, ...] | None] = [*guards]
        self._in_place: list[tuple[Any, ...]] | None = None  # the guards when planned, for `rebind`
        self.count = self.left = len(forwards)
        self.future: Future[Call] = future
        self.call: Call | None = None  # once the plan is complete, while some forwards are left

    @property
    def failed(self) -> bool:
        """Whether planning ended in an error."""
        return self.future.done() and not self.future.cancelled() and self.future.exception() is not None

    def result(self) -> Call:
        """The planned call, before any forward has started. Raises the error of the plan."""
        return self.future.result()

    def rebind(self, call: Call) -> Planned:
        """The same forwards, which a replay has planned anew as `call`: the inputs have the same addresses, and new
        versions."""
        if self._in_place is None:
            self._in_place = [identity(given) for _, given in self._forwards]
        guards = []
        for (_, given), guard in zip(self._forwards, self._in_place, strict=True):
            now: list[Any] = []
            for each, part in zip(given, guard, strict=True):
                if isinstance(each, torch.Tensor) and part[1] >= 0:
                    part = part[0], each._version, *part[2:]
                now.append(part)
            guards.append(tuple(now))
        planned = shallow_copy(self)
        planned.guards, planned.left, planned.call, planned.future = [*guards], self.count, None, CompletedFuture(call)
        planned.shared = None if self._contexts is None else Forwards(call, self._contexts)
        return planned

    def wait(self) -> None:
        """Waits until the plan is made, or has failed."""
        if not self.future.cancelled():
            self.future.exception()

    def drop(self) -> None:
        """Drops the plan, now or as soon as it is made."""
        if not self.future.cancel():
            self.future.add_done_callback(self._release)

    def end(self) -> None:
        """After `drop`: waits until nothing of it is in flight."""
        self.wait()
        self._release(self.future)  # its callback may run a moment later, on the planning thread

    def _release(self, future: Future[Call]) -> None:
        if not future.cancelled() and future.exception() is None:
            left = [number for number, guard in enumerate(self.guards) if guard is not None]
            _release_parts(future.result(), self.shared, *left)


def _release_parts(call: Call, shared: Forwards | None, *numbers: int) -> None:
    """Releases the planned call; of several forwards, the parts of those with these `numbers`."""
    if shared is None:
        call.release()
    else:
        shared.release_part(*numbers)


_TAKEN: Future[Any] = Future()
_TAKEN.cancel()


class PlannedForwards:
    """Planned forwards, over tables that share caches or are in related pools. `waiting`: the plans that have yet to be
    taken. Several threads may call it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant, in case a tracer's exception at a block's end leaves it taken
        self.waiting: list[Planned] = []

    def add(self, planned: Planned) -> None:
        with self._lock:
            self.waiting.append(planned)

    def take(self, tables: TableSet, given: Given) -> Call | Forward | None:
        """The first call planned for these tensors, unchanged since; None if there is none, or planning failed: the
        forward then plans anew, and raises. Waits for the plan."""
        with self._lock:
            for planned in self.waiting:
                number = planned.numbers.get(id(tables), -1)
                if number < 0:
                    continue
                guards = planned.guards[number]
                if guards is None or identity(given) != guards:
                    continue
                planned.guards[number], future, shared = None, planned.future, planned.shared
                planned.left -= 1
                if not planned.left:  # from here on the forward alone keeps its call alive
                    self.waiting.remove(planned)
                    planned.future, planned.shared = _TAKEN, None
                break
            else:
                return None
        call = planned.call
        if call is None:
            if future.cancelled() or future.exception() is not None:
                return None
            call = future.result()
            if not call.complete():
                _release_parts(call, shared, number)
                return None
        planned.call = call if planned.left else None
        if shared is None:
            return call
        part = shared.share(number, given)
        if part is None:
            _release_parts(call, shared, number)
        return part

    def holds(self, planned: Planned) -> bool:
        """Whether a forward has yet to take it, and it was not dropped."""
        return planned in self.waiting

    def is_whole(self, planned: Planned) -> bool:
        """Whether it has not failed, and none of its forwards has started."""
        return planned.left == planned.count and planned in self.waiting and not planned.failed

    def drop(self, planned: Planned, *, wait: bool = False) -> int:
        """Drops a plan; returns how many forwards had yet to take it, 0 if it failed. `wait`: until the plan is made,
        and it is known whether it fails."""
        if wait and planned in self.waiting:
            planned.wait()
        with self._lock:
            if planned not in self.waiting:
                return 0
            self.waiting.remove(planned)
        left = 0 if planned.failed else planned.left
        planned.drop()
        return left

    def drop_all(self) -> None:
        """Drops all plans, and waits for those that are being made."""
        with self._lock:
            dropped, self.waiting = self.waiting, []
        for planned in dropped:
            planned.drop()
        for planned in dropped:
            planned.end()
