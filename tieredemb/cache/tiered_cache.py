"""The hot cache over one key space: plan, fill, write back, tickets, failures.

`plan` brings the rows of a batch into slots and returns a ticket that locks them. Whoever updates hot rows afterwards
marks them dirty; a dirty row is written back when it is evicted, at a flush and at the close, a clean one gives back
its score alone. The cache knows nothing of lookups.

Order inside a plan, so that a failure loses nothing: victims are written back before they are unpublished, missed rows
are published after they were filled.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tieredemb.cache.hot_rows import HotRows, slot_bytes, stamp
from tieredemb.cache.plan import number, resolve
from tieredemb.cache.policy import MIN_SCORE, policy_kernels, scoring
from tieredemb.cache.tickets import Ticket, TicketBook
from tieredemb.config import LFU, Policy
from tieredemb.errors import ConfigError, ForkedError, StorageError
from tieredemb.hash.slot_map import map_bytes_per_slot, slot_map
from tieredemb.stats import CacheStats
from tieredemb.storage.base import ColdRows, RowLayout
from tieredemb.storage.initial import InitialRows

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]


def cache_bytes_per_slot(layout: RowLayout) -> int:
    """Bytes that one slot costs, map included: what a capacity in bytes is divided by."""
    return slot_bytes(layout) + map_bytes_per_slot()


class TieredCache:
    """A cache of `slots` rows over `cold`.

    `initial` generates rows that were never written (without it they are zeros). `lock_window`: rows of this many
    previous batches are never evicted. Calls are serialised; none may come from a forked child.
    """

    def __init__(
        self,
        cold: ColdRows,
        *,
        slots: int,
        policy: Policy | None = None,
        initial: InitialRows | None = None,
        lock_window: int = 0,
        device: torch.device | None = None,
    ) -> None:
        if lock_window < 0:
            raise ConfigError(f"lock_window must be 0 or more batches, got {lock_window}")
        self.cold = cold
        self.slots = slots
        self.policy = policy or LFU()
        self.device = device or torch.device("cpu")
        self.hot = HotRows(cold.layout, slots)
        self._index = slot_map(slots, self.device)
        self._initial = initial
        self._lock_window = lock_window
        self._kernels = policy_kernels(self.device)
        self._scoring = scoring(self.policy)
        self._book = TicketBook()
        self._counts: Counter[str] = Counter()
        self.lock = threading.RLock()
        self._pid = os.getpid()
        self._closed = False
        self._adopt_scores()

    # --- batches ----------------------------------------------------------------------------------------------------

    def plan(self, keys: Array, *, score: bool = True) -> Ticket:
        """Makes the rows of `keys` (int64 (N,), in range, negative for padding) resident and locks them.

        With `score=False` the batch leaves no trace in scores and counters, as when a checkpointed forward is
        recomputed. A failing storage raises its error and changes no row; the cache stays usable.
        """
        with self.lock:
            self._check_usable()
            cold = self.cold
            cold.metadata.batch += 1
            batch = cold.metadata.batch
            self._retire_transients(batch)
            numbering = number(keys, self._index, self.hot, stamp(batch), self.device)
            missed = numbering.missed
            slots = self._make_room(len(missed), batch)
            unique_slots = numbering.unique_slots
            self._fill(numbering.unique_keys[missed], slots)
            unique_slots[missed] = slots
            self.hot.last_batch[slots] = stamp(batch)
            if score:
                self._kernels.raise_scores(unique_slots, self.hot.score, self._scoring.now(batch), self._scoring)
                self._count(
                    batches=1,
                    lookups=numbering.lookups,
                    hits=numbering.hits,
                    unique=len(numbering.unique_keys),
                )
            homes = resolve(numbering.inverse, unique_slots, self.device)
            ticket = Ticket(batch, homes, numbering.inverse, numbering.unique_keys, unique_slots, self._book)
            self._book.open(ticket)
            return ticket

    def _oldest(self, batch: int) -> int:
        """Rows used at or after this batch are locked while `batch` is planned."""
        return min(self._book.oldest(batch), batch - self._lock_window)

    def _retire_transients(self, batch: int) -> None:
        """Evicts the transient rows that no ticket uses: capacity is a promise between batches."""
        if len(self.hot) == self.hot.capacity:
            return
        slots = self.hot.transients()
        behind = self.hot.last_batch[slots] - stamp(self._book.oldest(batch))
        self._evict(slots[behind < 0])

    def _make_room(self, rows: int, batch: int) -> Array:
        """Empty slots for `rows` missed rows, int32: evicts what has to go, goes beyond the capacity for the rest."""
        short = rows - self.hot.free
        if short > 0:
            hot = self.hot
            oldest, used = stamp(self._oldest(batch)), min(hot.used, hot.capacity)
            victims = self._kernels.choose_victims(
                short, hot.key, hot.score, hot.last_batch, oldest, used, self._scoring.ties_by_age
            )
            self.hot.ensure_transient(short - len(victims))
            self._evict(victims)
            self._count(rows_overflow=short - len(victims))
        return self.hot.take(rows)

    def _evict(self, slots: Array) -> None:
        if len(slots) == 0:
            return
        keys = self.hot.key[slots]
        self._write_back(keys, slots)
        self._index.erase(keys)
        self.hot.vacate(slots)
        self._count(evictions=len(slots))

    def _write_back(self, keys: Array, slots: Array) -> None:
        dirty = int(np.count_nonzero(self.hot.dirty[slots]))
        self.cold.write(keys, slots, self.hot)
        self.hot.dirty[slots] = 0
        clean_bytes = (len(slots) - dirty) * self.hot.score.itemsize
        self._count(rows_written_back=dirty, bytes_written_back=dirty * self.cold.layout.row_bytes + clean_bytes)

    def _fill(self, keys: Array, slots: Array) -> None:
        """Brings the rows `keys` into the empty `slots` and publishes them."""
        if len(keys) == 0:
            return
        hot = self.hot
        if len(hot) > hot.capacity:
            self._index.grow(len(hot))
        try:
            untouched = self.cold.read(keys, slots, hot)
            fresh = slots[untouched]
            hot.dirty[slots] = 0
            hot.dirty[fresh] = 1  # until it was written once, cold storage does not know the row
            self._generate(keys[untouched], fresh, hot.weight, hot.state, hot.state.shape[1])
            hot.score[slots if not self._scoring.remember else fresh] = MIN_SCORE
        except BaseException:
            hot.vacate(slots)
            raise
        hot.key[slots] = keys
        self._index.insert(keys, slots)
        self._count(rows_filled=len(keys), bytes_filled=(len(keys) - len(fresh)) * self.cold.layout.row_bytes)

    # --- whole-cache calls ------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Writes every dirty row and every score back: afterwards cold storage alone holds the truth."""
        with self.lock:
            self._check_usable()
            slots = self.hot.occupied()
            self._write_back(self.hot.key[slots], slots)
            self.cold.metadata.policy = self._scoring.name
            self.cold.flush()

    def export_rows(self, start: int, stop: int, weight: Array, state: Array) -> None:
        """Copies the rows start … stop − 1 as they are now: `weight` carrier (K, D), `state` uint32 (K, S), either
        may have no columns. Rows never used are generated into the copy alone: cold storage does not grow."""
        with self.lock:
            self._write_back_range(start, stop)
            cold = self.cold
            weight[:] = cold.weight[start:stop, : weight.shape[1]]
            state[:] = cold.state[start:stop, : state.shape[1]]
            untouched = np.flatnonzero(cold.state[start:stop, -1] == 0)
            self._generate(untouched + start, untouched, weight, state, state.shape[1])

    def import_rows(self, start: int, weight: Array | None, state: Array | None) -> None:
        """Overwrites weights (carrier (K, D)) or optimizer state (uint32 (K, S)) of the rows from `start` on, wherever
        they live. What is None stays, scores too; rows in flight stay in their slots. Raises `StorageFullError` before
        anything changes."""
        stop = start + len(weight if weight is not None else state if state is not None else ())
        with self.lock:
            self._write_back_range(start, stop)
            cold = self.cold
            cold.reserve_range(start, stop)
            untouched = np.flatnonzero(cold.state[start:stop, -1] == 0) + start
            # weights that are about to be overwritten need not be generated
            target = cold.weight if weight is None else np.empty((cold.layout.rows, 0), cold.layout.carrier)
            self._generate(untouched, untouched, target, cold.state, cold.layout.state_width)
            cold.state[untouched, -1] = MIN_SCORE
            if weight is not None:
                cold.weight[start:stop] = weight
            if state is not None:
                cold.state[start:stop, :-1] = state
            slots = self._slots_in(start, stop)
            cold.read(self.hot.key[slots], slots, self.hot)

    def _slots_in(self, start: int, stop: int) -> Array:
        """Slots that hold rows of the key range start … stop − 1."""
        slots = self.hot.occupied()
        keys = self.hot.key[slots]
        return slots[(keys >= start) & (keys < stop)]

    def _write_back_range(self, start: int, stop: int) -> None:
        self._check_usable()
        slots = self._slots_in(start, stop)
        self._write_back(self.hot.key[slots], slots)

    def forget(self) -> None:
        """Drops every hot row without writing it back, for a cold storage that was replaced as a whole. Refused while
        tickets are in flight."""
        with self.lock:
            self._check_usable()
            self.check_idle("load a checkpoint")
            slots = self.hot.occupied()
            self._index.erase(self.hot.key[slots])
            self.hot.vacate(slots)
            self._adopt_scores()

    def check_idle(self, call: str) -> None:
        """Raises `StorageError` if a batch is in flight."""
        if self._book.live:
            raise StorageError(
                f"cannot {call} while {self._book.live} batch(es) are in flight; run or drop their backward first"
            )

    def close(self) -> None:
        """Flushes a cold storage that outlives the process, and closes it. A second call does nothing."""
        with self.lock:
            if self._closed or os.getpid() != self._pid:
                return
            if not self.cold.volatile:
                self.flush()
            self._closed = True
            self.cold.close()

    def stats(self) -> CacheStats:
        """Totals since the cache was built. Does not synchronise."""
        return CacheStats(**self._counts)

    def memory_report(self) -> dict[str, Any]:
        """Bytes of every allocation: `cache` (what the capacity buys), `batch` (beyond it), `cold`."""
        with self.lock:
            sizes = self.hot.size_bytes()
            cells = self.slots * map_bytes_per_slot()  # what it has beyond them it grew for a batch
            batch = {
                "transient_rows": sizes.pop("transient"),
                "transient_map": self._index.cells.nbytes - cells,
                "plans": self._book.size_bytes(),
            }
            return {
                "cache": sizes | {"map": cells},
                "batch": batch,
                "cold": {"tier": self.cold.kind} | self.cold.size_bytes(),
            }

    # --- inside -----------------------------------------------------------------------------------------------------

    def _generate(self, keys: Array, rows: Array, weight: Array, state: Array, state_width: int) -> None:
        """Writes the initial row of each key to `rows` of `weight` and of the first words of `state`."""
        if self._initial is not None:
            self._initial.generate(keys, rows, weight, state, state_width)
        else:
            weight[rows] = 0
            state[rows, :state_width] = 0

    def _adopt_scores(self) -> None:
        """Scores left by another policy mean nothing here: such rows start from the lowest score."""
        metadata = self.cold.metadata
        if metadata.policy not in ("", self._scoring.name):
            for start, stop in self.cold.used_ranges():
                scores = self.cold.state[start:stop, -1]
                scores[np.flatnonzero(scores > MIN_SCORE)] = MIN_SCORE  # pages of untouched rows stay unwritten
        metadata.policy = self._scoring.name

    def _count(self, **more: int) -> None:
        self._counts.update(more)

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedError(
                "this cache belongs to the parent process; build the module in the child, or start the process with "
                "the 'spawn' method (a DataLoader's workers must not touch the module)"
            )
        if self._closed:
            raise StorageError("this cache was closed; build a new module over the same storage to go on")
