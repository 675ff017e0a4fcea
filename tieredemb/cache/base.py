"""What a cache is on every device: one owner process, one lock, cold storage behind it, whole-cache calls over it."""

from __future__ import annotations

import abc
import contextlib
import gc
import itertools
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from tieredemb.cache.changes import IntentLog, Part, Suspects
from tieredemb.cache.locks import TriedLock
from tieredemb.cache.policy import scoring
from tieredemb.cache.stats import CacheStats
from tieredemb.cache.tickets import Flight, TicketLedger
from tieredemb.config import LFU, Array, Policy
from tieredemb.errors import ForkedError, StorageError
from tieredemb.kernels.constants import MIN_SCORE
from tieredemb.storage.base import STATE_DTYPE, ColdRows
from tieredemb.storage.initial import InitialRows

_numbers = itertools.count()
NO_WORDS = np.empty(0, STATE_DTYPE)


class Look(NamedTuple):
    """Counters of a cache at the time when its use was last looked at: plans, batches, and lookups."""

    plans: int = 0
    batches: int = 0
    lookups: int = 0


class ScoreSample(NamedTuple):
    """Scores of a cache at one time. `time`: of the last plan, which scores are relative to · `score`: uint32 (K,), of
    slots at equal distances, without those of resident tables; 0 if a slot is empty · `slots_each`: how many slots each
    of them represents · `has_slot`: bool (N,), for each requested key whether it is in a slot, so that its score in
    cold storage is outdated."""

    time: int
    score: Array
    slots_each: float
    has_slot: Array


class PlanKind(NamedTuple):
    """How a batch is planned. `scored`: whether it counts as a use of rows; else scores and counters stay unchanged, as
    when a checkpointed forward is recomputed · `ages`: whether its time is later than that of the last plan (see
    `Cache`), for each cache if several plan it · `ahead`: whether other work runs before its rows are used · `trains`:
    whether a backward is expected to update them."""

    scored: bool = True
    ages: bool | tuple[bool, ...] = True
    ahead: bool = False
    trains: bool = False


USE = PlanKind()
USE_IN_STEP = PlanKind(ages=False)  # in the same step of a model
AHEAD = PlanKind(ahead=True, trains=True)
NO_USE = PlanKind(scored=False, ages=False)  # to have rows in slots, without a lookup


class Cache(abc.ABC):
    """A cache of `slots` rows over `cold`.

    `initial` generates rows that were never written (without it they are zeros). Calls are serialised; a forked child
    may make none.

    A plan has a number, by which rows are locked, and by which of rows with equal scores the one used longest ago is
    evicted; and a time, which scores are made of. A plan normally `ages` scores (`PlanKind`): it has the next time.
    Plans that follow in the same step of a model need not: with the same time and other keys, they score rows as one
    plan of all keys, and count as one batch.

    If several `clients` share a cache, each has a number, and counters of its own.
    """

    def __init__(
        self,
        cold: ColdRows,
        *,
        slots: int,
        policy: Policy | None,
        initial: InitialRows | None,
        device: torch.device,
    ) -> None:
        self.number = next(_numbers)  # caches are locked in the order of their creation (`locks.Locks`)
        self.cold = cold
        self.slots = slots
        self.policy = policy or LFU()
        self.device = device
        self.lock = threading.RLock()  # rows and their arrays: lookups and updates
        self.plan_lock = self.lock  # state of plans: keys, scores, free slots; taken before `lock`
        self._initial = initial
        self.scoring = scoring(self.policy)
        self._tickets = TicketLedger()
        self._pid = os.getpid()
        self._closed = False
        self.looked_at = Look()
        self.is_in_graph = False  # whether a user's CUDA graph has its addresses, for good
        self.rows_version = 0  # counts calls that may change rows in place
        self.suspects = Suspects()
        self.plan_changes = IntentLog(self.suspects)  # guarded by `plan_lock`
        self.changes = IntentLog(self.suspects)  # by `lock`

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Holds off plans, lookups and updates."""
        with self.plan_lock, self.lock:
            yield

    # --- what a device provides -------------------------------------------------------------------------------------

    @abc.abstractmethod
    def dirty_rows(self) -> tuple[Array, Array, Array]:
        """Copies of all dirty rows in host memory: keys int64 (K,), ascending, weight carrier (K, D) and state uint32
        (K, S + 1). For a storage that can take no more."""

    @abc.abstractmethod
    def write_back(self) -> None:
        """Writes every dirty row, every score and the metadata to cold storage, which is then complete, but durable
        only once it is flushed. Works even if rows are suspect."""

    @abc.abstractmethod
    def hottest(self) -> Any:
        """Keys of the rows in slots, int64 (K,) on the cache's device, by descending score, without rows of resident
        tables."""

    @abc.abstractmethod
    def sample_scores(self, most: int, keys: Array) -> ScoreSample:
        """Scores of at most `most` slots, and which of `keys` (int64 (N,), in range, of no resident table) have a slot.
        Changes nothing: no row moves, no score is raised, no use is counted. A row without a slot, of a batch larger
        than the cache, counts as a row of cold storage, where its score may be that before the batch. Synchronises with
        a GPU; all scores that it wrote to cold storage have arrived then."""

    @property
    @abc.abstractmethod
    def plans(self) -> int:
        """The number of the last plan, as far as the host knows. Does not synchronise."""

    @property
    def is_idle(self) -> bool:
        """Whether no batch is in flight, as far as the host knows."""
        return not self._tickets.live

    @abc.abstractmethod
    def forget(self) -> None:
        """Drops every hot row without writing it back, after cold storage was replaced as a whole. Refused while
        tickets are in flight. Part of a change (`IntentLog`)."""

    @abc.abstractmethod
    def stats(self, client: int | None = None) -> CacheStats:
        """Totals since the cache was built, including loads of checkpoints; or the counters of a `client`. Synchronises
        with a GPU."""

    @abc.abstractmethod
    def counted(self, client: int | None) -> CacheStats:
        """What `stats` returns, without a check: also of a closed cache."""

    @abc.abstractmethod
    def memory_report(self) -> dict[str, Any]:
        """Bytes of every allocation: `cache` (within the capacity), `batch` (beyond it), `cold`."""

    @abc.abstractmethod
    def _write_back_range(self, start: int, stop: int) -> None:
        """Writes the current rows start … stop − 1 to cold storage."""

    def _copy_range(self, start: int, stop: int, weight: Array, state: Array, last: Array = NO_WORDS) -> Array:
        """Copies the current rows start … stop − 1, as `ColdRows.copy_range` does. `last`: uint32 (K,), receives the
        last word of each state, or is empty."""
        self._write_back_range(start, stop)
        if len(last):
            every = np.empty((len(last), self.cold.layout.state_width), STATE_DTYPE)
            self.cold.copy_range(start, stop, weight[:, :0], every)
            last[:] = every[:, -1]
        return self.cold.copy_range(start, stop, weight, state)

    @abc.abstractmethod
    def _reload_range(self, start: int, stop: int) -> None:
        """Reads hot rows among start … stop − 1 again from cold storage."""

    def release_locks(self) -> None:
        """Releases the locks of this thread, which is in no call of the cache, before another thread plans. An
        exception of a tracer at the end of a `with` block leaves them taken, and the other thread would wait for
        ever."""
        for lock in (self.lock, self.plan_lock):
            while lock._is_owned():  # type: ignore[attr-defined]
                lock.release()

    def is_held(self) -> bool:
        """Whether this thread has one of the locks."""
        return any(lock._is_owned() for lock in (self.lock, self.plan_lock))  # type: ignore[attr-defined]

    def hold(self) -> Any:
        """Made before another thread plans `ahead`, and passed there; if it is freed before, no plan is made. None if
        nothing is needed."""
        return None

    def ahead(self, inputs: Sequence[object], hold: Any) -> contextlib.AbstractContextManager[None]:
        """Inside, plans are made from `inputs`, tensors among them, ahead of the batch that computes; on a GPU on a
        side stream."""
        return contextlib.nullcontext()

    # --- rows as arrays ---------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Writes every dirty row and every score back: cold storage is then complete, and durable if it outlives the
        process."""
        with self.whole():
            self._begin_call()
            self.write_back()
            self.cold.flush()

    def export_rows(self, start: int, stop: int, weight: Array, state: Array) -> None:
        """Copies the current rows start … stop − 1: `weight` carrier (K, D), `state` uint32 (K, S), either of which may
        have no columns. Rows never used are generated into the copy alone: cold storage does not grow."""
        with self.whole():
            self._begin_call()
            self.copy_rows(start, stop, weight, state)

    def copy_rows(self, start: int, stop: int, weight: Array, state: Array) -> None:
        """`export_rows` within a call of the cache, which holds its locks."""
        untouched = np.flatnonzero(self._copy_range(start, stop, weight, state) == 0)
        self._generate(untouched + start, untouched, weight, state, state.shape[1])

    def copy_weights(self, start: int, stop: int, weight: Array) -> Array:
        """As `copy_rows`, for weights alone; returns the last word of each row's state, uint32 (K,), 0 for rows that
        were never written."""
        last = np.empty(stop - start, STATE_DTYPE)
        none = np.empty((len(last), 0), STATE_DTYPE)
        untouched = np.flatnonzero(self._copy_range(start, stop, weight, none, last) == 0)
        self._generate(untouched + start, untouched, weight, none, 0)
        last[untouched] = 0
        return last

    def last_words(self, start: int, stop: int) -> Array:
        """The last word of the state of each row start … stop − 1, uint32 (K,), 0 for rows that were never written. The
        caller holds the locks."""
        words = np.empty(stop - start, STATE_DTYPE)
        none = np.empty((len(words), 0), self.cold.layout.carrier), np.empty((len(words), 0), STATE_DTYPE)
        words[self._copy_range(start, stop, *none, words) == 0] = 0
        return words

    def import_rows(self, start: int, weight: Array | None, state: Array | None) -> None:
        """Overwrites weights (carrier (K, D)) or optimizer state (uint32 (K, S)) of the rows from `start` on, in every
        home; what is None stays, and so do scores. Rows in flight stay in their slots. Part of a change (`IntentLog`),
        whose call has reserved space, and holds the locks."""
        stop = start + len(weight if weight is not None else state if state is not None else ())
        self._write_back_range(start, stop)
        cold = self.cold
        if weight is None:  # weights that are about to be overwritten need not be generated
            untouched = np.flatnonzero(cold.state[start:stop, -1] == 0) + start
            self._generate(untouched, untouched, cold.weight, cold.state, 0)
        cold.put_range(start, weight, state, self._begun_state())
        self._reload_range(start, stop)

    # --- life -------------------------------------------------------------------------------------------------------

    def abort_batches(self) -> None:
        """Aborts the batches in flight, whatever holds them, such as a traceback: their updates are refused from now
        on."""
        self._tickets.abort()

    def check_idle(self, call: str) -> None:
        """Raises `StorageError` if a batch is in flight."""
        if self._tickets.live:
            gc.collect()  # unreachable batches do not count
            self._tickets.forget_dropped()
        if self._tickets.live:
            raise StorageError(
                f"cannot {call} while {len(self._tickets.live)} batch(es) are in flight; run or drop their backward "
                f"first"
            )

    def seal(self) -> None:
        """Does the part of closing that may fail: flushes a cold storage that outlives the process and marks it clean,
        unless rows are suspect. The cache can still be used, and then removes the mark."""
        if os.getpid() != self._pid:  # a forked child, where the lock may be held for ever
            return
        with self.whole():
            if self._closed or self.cold.released:
                return
            self.check_loadable()
            if not self.cold.volatile and not self.suspects.reason:
                self.write_back()
                self.cold.seal()

    def close(self) -> None:
        """Closes a cold storage that was sealed. A second call does nothing, or completes an interrupted one."""
        if os.getpid() != self._pid:
            return
        with self.whole():
            if self._closed:
                return
            if not self.cold.released:
                self._release()
            self.cold.close()
            self._closed = True

    def abandon(self) -> None:
        """Leaves cold storage to another cache; this one was flushed and becomes unusable."""
        with self.whole():
            self._closed = True
            self._release()

    def _release(self) -> None:  # noqa: B027 - arrays in host memory are freed with the cache
        """Frees what the cache holds beside its cold storage."""

    # --- inside -----------------------------------------------------------------------------------------------------

    def _generate(self, keys: Array, rows: Array, weight: Array, state: Array, state_width: int) -> None:
        """Writes the initial row of each key to `rows` of `weight` and of the first words of `state`."""
        if self._initial is not None:
            self._initial.generate(keys, rows, weight, state, state_width)
        else:
            weight[rows] = 0
            state[rows, :state_width] = 0

    def _begun_state(self) -> Array:
        """The initial state of a row, uint32 (S,)."""
        words = self.cold.layout.state_width
        return np.zeros(words, STATE_DTYPE) if self._initial is None else self._initial.state(words)

    def _adopt_scores(self) -> None:
        """Resets the scores of another policy, which are not comparable, to the lowest score."""
        metadata = self.cold.metadata
        if metadata.policy not in ("", self.scoring.name):
            self.cold.begin_changes()
            for start, stop in self.cold.used_ranges():
                scores = self.cold.state[start:stop, -1]
                scores[np.flatnonzero(scores > MIN_SCORE)] = MIN_SCORE  # pages of untouched rows stay unwritten
        metadata.policy = self.scoring.name

    def check_loadable(self, parts: Iterable[Part] | None = None) -> None:
        """Recovers from interrupted calls. Raises as every call does, except for suspect rows that loading `parts`
        (None: all) is to replace. The caller holds the locks of plans and rows."""
        self._check_open()
        self._recover()
        if parts is not None and self.suspects.parts.isdisjoint(parts):
            self.suspects.check()

    def _begin_call(self) -> None:
        """Called first by every whole-cache call, under both locks."""
        self._check_usable()

    def _check_usable(self) -> None:
        """Called first by every call, under the lock of plans."""
        if self._closed or self.cold.released or os.getpid() != self._pid:
            self._check_open()
        if self.plan_changes.records or self.changes.records:
            self._recover()
        if self.suspects.found:
            self.suspects.check()

    def check_rows(self, *tickets: Flight) -> None:
        """Called first by every lookup or update of rows in slots, those of `tickets`, under the lock of rows: from now
        on hot rows may be newer than cold ones."""
        if self._closed or self.cold.released or os.getpid() != self._pid:
            self._check_open()
        if self.changes.records:
            self.changes.recover_rows(self)
        if self.suspects.found:
            self.suspects.check()
        for ticket in tickets:
            if ticket.failed:
                ticket.check()
        if not self.cold.volatile:
            self.cold.begin_changes()

    def _recover(self) -> None:
        """Recovers from interrupted calls, under the lock of plans; a thread with the lock of rows is still at work."""
        self.plan_changes.recover(self)
        if self.changes.records:
            with TriedLock(self.lock) as taken:
                if taken:
                    self.changes.recover(self)

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedError(
                "this cache belongs to the parent process; build the module in the child, or start the process with "
                "the 'spawn' method (a DataLoader's workers must not touch the module)"
            )
        if self._closed or self.cold.released:
            raise StorageError(
                "the cache of these tables was closed, by close() or tieredemb.close(model); to go on, build a new "
                "module over the same File or Pmem, or load a checkpoint into a new one"
            )
