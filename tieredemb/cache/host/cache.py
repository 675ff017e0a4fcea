"""The hot cache on the CPU over one key space: plan, fill, write back, tickets, failures.

`plan` brings the rows of a batch into slots and returns a ticket that locks them. Whoever updates hot rows afterwards
marks them dirty; a dirty row is written back when it is evicted, at a flush and at the close, a clean one gives back
its score alone. The cache knows nothing of lookups.

Order inside a plan, so that nothing is lost wherever it ends: victims are written back before they are unpublished,
missed rows are published after they were filled. The slots' keys are the truth. What is derived from them (the map, the
free slots) is made anew by the call that comes after an interrupted one.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tieredemb.cache.base import Cache
from tieredemb.cache.changes import Change
from tieredemb.cache.host.hot_rows import HotRows, stamp
from tieredemb.cache.plan_cpu import Numbering, number, resolve
from tieredemb.cache.policy_cpu import choose_victims, part_of, raise_scores
from tieredemb.cache.tickets import Ticket
from tieredemb.config import Policy
from tieredemb.hash.slot_map import map_bytes_per_slot
from tieredemb.hash.slot_map_cpu import SlotMap
from tieredemb.kernels.constants import MIN_SCORE
from tieredemb.kernels.ranges import ranged
from tieredemb.stats import CacheStats
from tieredemb.storage.base import ColdRows
from tieredemb.storage.initial import InitialRows

if TYPE_CHECKING:
    from collections.abc import Sequence

    Array = np.ndarray[Any, Any]

PIN_ROWS = 1 << 18  # rows of a resident table brought in at once: bounds the memory it takes


class _SlotsMove(Change):
    """Slots change hands: map and free slots may not say so yet."""

    def settle(self, cache: Cache) -> None:
        assert isinstance(cache, HostCache)
        cache.derive()


SLOTS_MOVE = _SlotsMove()


class _Client:
    """One of several who plan by a cache: what its plans have counted, and the time of its last one."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._time = 0

    def planned(self, time: int, counted: dict[str, int]) -> None:
        """It has planned; several plans of one time are one batch."""
        for name, value in counted.items():
            self.counts[name] += value
        self.counts["batches"] += time != self._time
        self._time = time


class HostCache(Cache):
    """See `Cache`. Rows of the key ranges `resident`, (first key, rows) each, are brought in once and never leave.
    `clients`: where several plan by the cache, the first key of each in ascending order, and that after the last."""

    def __init__(
        self,
        cold: ColdRows,
        *,
        slots: int,
        policy: Policy | None = None,
        initial: InitialRows | None = None,
        lock_window: int = 0,
        resident: Sequence[tuple[int, int]] = (),
        clients: Sequence[int] = (),
    ) -> None:
        super().__init__(
            cold, slots=slots, policy=policy, initial=initial, lock_window=lock_window, device=torch.device("cpu")
        )
        self.plan_lock = threading.RLock()  # plans move rows that no lookup or update in flight uses, beside those
        self.hot = HotRows(cold.layout, slots)
        self._row_bytes = cold.layout.row_bytes
        self._index = SlotMap(slots)
        self._counts: Counter[str] = Counter()
        self._first_keys = np.array(clients[:-1], np.int64)
        self._clients = [_Client() for _ in self._first_keys]
        self._client: _Client | None = None  # whose plan is being made
        self._last = 0  # number of the last batch planned
        self._resident = tuple(resident)
        self._pinned = sum(rows for _, rows in self._resident)  # slots below are theirs
        self._adopt_scores()
        self._pin()

    # --- batches ----------------------------------------------------------------------------------------------------

    @ranged("plan")
    def plan(self, keys: Array, *, score: bool = True, ages: bool = True, client: int | None = None) -> Ticket:
        """Makes the rows of `keys` (int64 (N,), in range, negative for padding) resident and locks them.

        With `score=False` the batch leaves no trace in scores and counters, as when a checkpointed forward is
        recomputed. With `ages=False` it is of the time of the plan before it; see `Cache`. `client`: whose plan it is,
        where several share the cache. A failing storage raises its error and changes no row; the cache stays usable.
        Lookups and updates of other batches go on meanwhile.
        """
        with self.plan_lock:
            self._check_usable()
            self._client = None if client is None else self._clients[client]
            cold, hot = self.cold, self.hot
            if not cold.volatile:
                cold.begin_changes()
            is_later = ages or cold.metadata.batch == 0
            cold.metadata.batch += is_later
            self._last = batch = self._last + 1
            if len(hot.key) > hot.capacity:
                self._retire_transients(batch)
            numbering = number(keys, self._index.find(keys), hot.last_batch, hot.unique_of_slot, batch)
            unique_slots = numbering.unique_slots
            if len(numbering.missed):
                self._bring(numbering, batch)
            if score:
                raise_scores(unique_slots, hot.score, self._scoring.now(cold.metadata.batch), self._scoring)
                counted = {
                    "lookups": numbering.lookups,
                    "hits": numbering.hits,
                    "unique": len(numbering.unique_keys),
                }
                for name, value in counted.items():
                    self._counts[name] += value
                self._counts["batches"] += is_later
                if self._client is not None:
                    self._client.planned(cold.metadata.batch, counted)
            homes = resolve(numbering.inverse, unique_slots)
            ticket = Ticket(batch, homes, numbering.inverse, numbering.unique_keys, unique_slots, self._book)
            self._book.open(ticket)
            self._client = None
            return ticket

    @ranged("swap")
    def _bring(self, numbering: Numbering, batch: int) -> None:
        """Brings the missed rows of a batch into slots, which `unique_slots` then names."""
        missed = numbering.missed
        moving = self.plan_changes.begin(SLOTS_MOVE)
        slots = self._make_room(len(missed), batch)
        self._fill(numbering.unique_keys[missed], slots)
        numbering.unique_slots[missed] = slots
        self.hot.last_batch[slots] = stamp(batch)
        self.plan_changes.end(moving)

    def _pin(self) -> None:
        """Brings the rows of resident tables into the first slots, where no victim is looked for."""
        counted, self._client = self._counts.copy(), None  # as of batches alone
        for first, rows in self._resident:
            for start in range(first, first + rows, PIN_ROWS):
                keys = np.arange(start, min(start + PIN_ROWS, first + rows), dtype=np.int64)
                self._fill(keys, self.hot.take(len(keys)))
        self._counts = counted

    def derive(self) -> None:
        """Makes what follows from the slots' keys anew: the free slots and the map."""
        self.hot.derive()
        index = SlotMap(len(self.hot))
        slots = self.hot.occupied()
        index.insert(self.hot.key[slots], slots)
        self._index = index

    def _retire_transients(self, batch: int) -> None:
        """Evicts the transient rows that no ticket uses: capacity is a promise between batches."""
        moving = self.plan_changes.begin(SLOTS_MOVE)
        slots = self.hot.transients()
        behind = self.hot.last_batch[slots] - stamp(self._book.oldest(batch))
        self._evict(slots[behind < 0])
        self.plan_changes.end(moving)

    def _make_room(self, rows: int, batch: int) -> Array:
        """Empty slots for `rows` missed rows, int32: evicts what has to go, goes beyond the capacity for the rest."""
        short = rows - self.hot.free
        if short > 0:
            hot = self.hot
            oldest, used = stamp(self._oldest(batch)), min(hot.used, hot.capacity) - self._pinned
            victims = np.empty(0, np.int32)
            if self._clients:
                victims = self._victims(short, part_of(short, used, batch), oldest)
            if len(victims) < short:
                victims = self._victims(short, slice(used), oldest)
            with self.lock:  # the arrays of all rows may be replaced
                self.hot.ensure_transient(short - len(victims))
            self._evict(victims)
            self._count(rows_overflow=short - len(victims))
        with self.lock:
            return self.hot.take(rows)

    def _victims(self, count: int, part: slice, oldest: Any) -> Array:
        """Up to `count` slots, int32, that are to leave, of a `part` of those that no resident table has."""
        first, stop = self._pinned + (part.start or 0), self._pinned + part.stop
        key, score, last_batch = (each[first:stop] for each in (self.hot.key, self.hot.score, self.hot.last_batch))
        by_age = self._scoring.ties_by_age
        return choose_victims(count, key, score, last_batch, oldest, stop - first, by_age) + np.int32(first)

    def _evict(self, slots: Array) -> None:
        if len(slots) == 0:
            return
        keys = self.hot.key[slots]
        self._write_back(keys, slots)
        self._index.erase(keys)
        self.hot.vacate(slots)
        self._count(evictions=len(slots))

    def _write_back(self, keys: Array, slots: Array) -> None:
        is_dirty = self.hot.dirty[slots] != 0
        self.cold.write(keys, slots, self.hot)
        self.hot.dirty[slots] = 0
        self._count(**self._written(is_dirty))
        if self._client is None and self._clients:  # in a whole-cache call each row counts for the client that has it
            of = np.searchsorted(self._first_keys, keys, side="right") - 1
            for client in np.unique(of):
                self._clients[client].counts.update(self._written(is_dirty[of == client]))

    def _written(self, is_dirty: Array) -> dict[str, int]:
        """What counts for rows that were written, whole where they were dirty, and else their scores."""
        dirty = int(np.count_nonzero(is_dirty))
        scores = (len(is_dirty) - dirty) * self.hot.score.itemsize
        return {"rows_written_back": dirty, "bytes_written_back": dirty * self._row_bytes + scores}

    def _fill(self, keys: Array, slots: Array) -> None:
        """Brings the rows `keys` into the empty `slots` and publishes them."""
        if len(keys) == 0:
            return
        hot = self.hot
        if len(hot.key) > hot.capacity:
            self._index.grow(len(hot.key))
        untouched = self.cold.read(keys, slots, hot)
        fresh = slots[untouched]
        hot.dirty[slots] = 0
        hot.dirty[fresh] = 1  # until it was written once, cold storage does not know the row
        if len(fresh):
            self._generate(keys[untouched], fresh, hot.weight, hot.state, hot.state.shape[1])
        hot.score[slots if not self._scoring.remember else fresh] = MIN_SCORE
        hot.key[slots] = keys
        self._index.insert(keys, slots)
        self._count(rows_filled=len(keys), bytes_filled=(len(keys) - len(fresh)) * self._row_bytes)

    # --- whole-cache calls ------------------------------------------------------------------------------------------

    def write_back(self) -> None:
        with self.whole():
            self._client = None
            self._check_open()
            self._settle()
            self.cold.metadata.policy = self._scoring.name
            slots = self.hot.occupied()
            self._write_back(self.hot.key[slots], slots)

    def dirty_rows(self) -> tuple[Array, Array, Array]:
        with self.whole():
            hot, slots = self.hot, self.hot.occupied()
            slots = slots[hot.dirty[slots] != 0]
            slots = slots[np.argsort(hot.key[slots])]
            state = np.concatenate([hot.state[slots], hot.score[slots, None]], axis=1)
            return hot.key[slots], hot.weight[slots], state

    def _slots_in(self, start: int, stop: int) -> Array:
        """Slots that hold rows of the key range start … stop − 1."""
        slots = self.hot.occupied()
        keys = self.hot.key[slots]
        return slots[(keys >= start) & (keys < stop)]

    def _write_back_range(self, start: int, stop: int) -> None:
        slots = self._slots_in(start, stop)
        self._write_back(self.hot.key[slots], slots)

    def _copy_range(self, start: int, stop: int, weight: Array, state: Array) -> Array:
        """As every cache, but without a write: a full disk does not matter."""
        scores = self.cold.copy_range(start, stop, weight, state)
        slots, hot = self._slots_in(start, stop), self.hot
        rows = hot.key[slots] - start
        weight[rows] = hot.weight[slots, : weight.shape[1]]
        state[rows], scores[rows] = hot.state[slots, : state.shape[1]], hot.score[slots]
        return scores

    def _reload_range(self, start: int, stop: int) -> None:
        slots = self._slots_in(start, stop)
        self.cold.read(self.hot.key[slots], slots, self.hot)

    def forget(self) -> None:
        with self.whole():
            self._check_open()
            self.check_idle("load a checkpoint")
            self.hot.reset()
            self._index = SlotMap(len(self.hot))
            self._adopt_scores()
            self._pin()

    def stats(self, client: int | None = None) -> CacheStats:
        if not self.plan_changes.entries:  # or a signal handler may ask amid a plan
            with self.whole():
                self._settle()
        self.doubts.check()
        return self.counted(client)

    def counted(self, client: int | None) -> CacheStats:
        return CacheStats(**(self._counts if client is None else self._clients[client].counts))

    def memory_report(self) -> dict[str, Any]:
        with self.whole():
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

    def _count(self, **more: int) -> None:
        self._counts.update(more)
        if self._client is not None:
            self._client.counts.update(more)
