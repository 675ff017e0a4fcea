"""The hot cache on the CPU over one key space: plan, fill, write back, tickets, failures.

`plan` fills the rows of a batch into slots and returns a ticket that locks them. An update marks hot rows dirty; a
dirty row is written back when it is evicted, at a flush and at the close; of a clean row only the score is. The cache
knows nothing of lookups.

Order inside a plan, so that nothing is lost wherever it is interrupted: victims are written back before they are
unpublished; missed rows are filled before they are published. The slots' keys are the truth. What is derived from them
(the map, the free slots) is rebuilt by the first call after an interrupted one.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from tieredemb.cache.base import NO_WORDS, USE, Cache, PlanKind, ScoreSample
from tieredemb.cache.changes import Change, Changed
from tieredemb.cache.host.clients import Clients, Planners
from tieredemb.cache.host.hot_rows import HotRows, stamp
from tieredemb.cache.plan_cpu import (
    MISSED,
    UNIQUE,
    USED,
    Numbering,
    count_arrivals,
    number,
    resolve,
)
from tieredemb.cache.policy_cpu import choose_victims, gains_of, part_of, raise_scores
from tieredemb.cache.stats import CacheStats
from tieredemb.cache.tickets import Ticket
from tieredemb.config import Array, Policy
from tieredemb.errors import StorageFullError
from tieredemb.hash.row_index_cpu import RowIndex
from tieredemb.hash.slot_map import map_bytes_per_slot
from tieredemb.hash.slot_map_cpu import SlotMap
from tieredemb.kernels.constants import MIN_SCORE
from tieredemb.kernels.parallel_cpu import even_bounds, parallel_for
from tieredemb.kernels.tracing import ranged
from tieredemb.storage.base import ColdRows, HotArrays, RowLayout
from tieredemb.storage.initial import InitialRows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PIN_ROWS = 1 << 18  # rows of a resident table filled at once: bounds the memory
FILL_EVERY = 16  # steps that begin with a lookup without a plan: in one of these its missed rows replace others
COPY_GRAIN = 256  # rows that a thread is worth, of some 256 bytes


class _SlotsMove(Change):
    """Slots change hands: the map and the free slots may be outdated."""

    def recover(self, cache: Changed) -> None:
        assert isinstance(cache, HostCache)
        cache.derive()


SLOTS_MOVE = _SlotsMove()


class _Reading(Change):
    """A lookup without a plan: calls of a signal handler are refused meanwhile. If it is interrupted, no row is
    wrong."""

    def recover(self, cache: Changed) -> None:
        pass


READING = _Reading()


class Readable(NamedTuple):
    """What a lookup without a plan reads, and how it notes the use of rows. `slot_plus_one`: where rows are
    (`RowIndex`) · `hot`, `cold`: weights in slots and in cold storage, carriers (C, D) and (rows, D) · `last_batch`,
    `score`: of slots · `state`: uint32 (rows, S), of cold rows; its last word is the score, 0 if the row was never
    written · `number`: of the batch · `now`, `kind`, `unit`, `gains`, `remember`: how scores are raised (`Scoring`),
    those of cold rows only if they are remembered."""

    slot_plus_one: Array
    hot: Array
    cold: Array
    last_batch: Array
    score: Array
    state: Array
    number: int
    now: int
    kind: int
    unit: float
    gains: Array
    remember: bool


class Reading(Protocol):
    """Reads rows, and `notes` their uses. Returns counters, int64: `USED`, the first of which is −1 if inputs are wrong
    and nothing was read; then the keys of rows without a slot, in order of first occurrence."""

    def __call__(self, rows: Readable, *, notes: bool) -> Array: ...


class _Evicted(NamedTuple):
    """Rows that were evicted: their slots, int32 (K,), and which of them were dirty, bool (K,)."""

    slots: Array
    dirty: Array


NONE_EVICTED = _Evicted(np.empty(0, np.int32), np.empty(0, np.bool_))


class _Copies:
    """Arrays for copies of `count` rows; see `HotArrays`."""

    def __init__(self, layout: RowLayout, count: int) -> None:
        self.weight = np.empty((count, layout.columns), layout.carrier)
        self.state = np.empty((count, layout.state_width), np.uint32)
        self.score, self.dirty = np.empty(count, np.uint32), np.zeros(count, np.uint8)


class HostCache(Cache):
    """See `Cache`. Rows of the key ranges `resident`, (first key, rows) each, are filled once and never evicted.
    `clients`: if several share the cache, the first key of each in ascending order, and the key after the last."""

    def __init__(
        self,
        cold: ColdRows,
        *,
        slots: int,
        policy: Policy | None = None,
        initial: InitialRows | None = None,
        resident: Sequence[tuple[int, int]] = (),
        clients: Sequence[int] = (),
    ) -> None:
        super().__init__(cold, slots=slots, policy=policy, initial=initial, device=torch.device("cpu"))
        self.plan_lock = threading.RLock()  # plans move rows beside lookups and updates, which use other rows
        self.hot = HotRows(cold.layout, slots)
        self._row_bytes = cold.layout.row_bytes
        self._index = self._empty_index(slots)
        self._counts: Counter[str] = Counter()
        self._clients = Clients(clients)
        self._last = 0  # number of the last batch planned
        self._readings = 0  # steps that began with a lookup without a plan
        self._due = -1  # the time of the last step in which missed rows replaced others
        self._resident = tuple(resident)
        self._pinned = sum(rows for _, rows in self._resident)  # slots below are of resident tables
        self._adopt_scores()
        self._pin()

    # --- batches ----------------------------------------------------------------------------------------------------

    @ranged("plan")
    def plan(self, keys: Array, kind: PlanKind = USE, *, client: int | Planners | None = None) -> Ticket:
        """Fills the rows of `keys` (int64 (N,), in range, negative for padding) into slots and locks them.

        `kind`: how; here a plan ahead is like any other · `client`: if several share the cache, whose plan it is: that
        of one client, or of several. A failing storage raises its error and changes no row; the cache stays usable.
        Lookups and updates of other batches go on meanwhile.
        """
        with self.plan_lock:
            self._check_usable()
            cold, hot, planners = self.cold, self.hot, client
            if not isinstance(planners, Planners):
                planners = Planners(() if planners is None else (planners,), np.array([0, len(keys)]))
            if not cold.volatile:
                cold.begin_changes()
            advances = kind.ages is True or cold.metadata.batch == 0
            cold.metadata.batch += advances
            self._last = batch = self._last + 1
            self._clients.planner = None  # remains of an interrupted plan
            if len(hot.key) > hot.capacity:
                self._retire_transients(batch)
            slots = self._index.find(keys)
            numbering = number(keys, slots, planners.starts, hot.last_batch, hot.unique_of_slot, batch)
            unique_slots = numbering.unique_slots
            if len(numbering.missed) and not self._fill_missed(numbering, planners, batch):
                cold.metadata.batch -= advances
                return self.plan(keys, kind, client=client)
            if kind.scored:
                raise_scores(unique_slots, hot.score, self.scoring.now(cold.metadata.batch), self.scoring)
                uses, counts = numbering.counted[:, :MISSED], self._counts
                lookups, hits, unique = uses.sum(0).tolist()
                counts["batches"] += advances
                counts["lookups"] += lookups
                counts["hits"] += hits
                counts["unique"] += unique
                if planners.numbers:  # several share the cache
                    self._clients.planned(planners.numbers, cold.metadata.batch, uses.tolist())
            homes = resolve(numbering.inverse, unique_slots)
            uniques = numbering.counted[:, UNIQUE]
            ticket = Ticket(
                batch, homes, numbering.inverse, numbering.unique_keys, unique_slots, uniques, self._tickets
            )
            self._tickets.open(ticket)
            if self._last != batch:  # a signal handler has planned meanwhile, and may have evicted rows that were found
                ticket.release()
                return self.plan(keys, kind._replace(scored=False, ages=False), client=client)
            return ticket

    def read(self, look_up: Reading, kind: PlanKind, *, client: int | None = None) -> bool:
        """A lookup without a plan, which locks no row: rows are read in place, and scored as by a plan. Missed rows are
        then filled into free slots, and in one step of `FILL_EVERY` also replace others. Returns False, and changes
        nothing, if `look_up` reads nothing.

        `look_up`: called a second time, without noting uses, if some rows were never written · `kind`, `client`: see
        `plan`.
        """
        with self.plan_lock:
            self._check_usable()  # before the second lock, which may be taken for ever in a forked child
            with self.lock:
                self.check_rows()  # an update may have been interrupted meanwhile
                reading = self.plan_changes.begin(READING)
                try:
                    return self._read(look_up, kind, client)
                finally:
                    self.plan_changes.clear(reading)

    def _read(self, look_up: Reading, kind: PlanKind, client: int | None) -> bool:
        cold, hot, scoring, metadata = self.cold, self.hot, self.scoring, self.cold.metadata
        assert isinstance(self._index, RowIndex)  # it has all cold rows that are read in place
        advances = kind.ages is True or metadata.batch == 0
        time = metadata.batch + advances
        self._last = batch = self._last + 1  # before rows are stamped with it, in case of an interrupt
        now, terms = scoring.now(time), (scoring.kind, scoring.unit)
        rows = Readable(
            self._index.slot_plus_one, hot.weight, cold.weight, hot.last_batch, hot.score, cold.state,
            batch, now, *terms, gains_of(*terms), scoring.remember,
        )  # fmt: skip
        noted = look_up(rows, notes=True)
        lookups, hits, hot_rows, misses, unwritten = noted[: len(USED)].tolist()
        if lookups < 0:
            return False
        metadata.batch = time
        if advances:
            self._readings += 1
            if self._readings % FILL_EVERY == 0:
                self._due = time
        is_due = self._due == time
        self._clients.planner = None  # remains of an interrupted plan
        if misses:
            missed = noted[len(USED) : len(USED) + misses]
            if unwritten:
                self._write_initial(missed, now)
                look_up(rows, notes=False)
        unique, counts = hot_rows + misses, self._counts
        counts["batches"] += advances
        counts["lookups"] += lookups
        counts["hits"] += hits
        counts["unique"] += unique
        if client is not None:
            self._clients.planned((client,), time, ((lookups, hits, unique),))
        if is_due and len(hot.key) > hot.capacity:
            self._retire_transients(batch)
        if misses and (is_due or hot.free):
            self._fill_free(missed, client, batch, takes=is_due)
        return True

    def _write_initial(self, missed: Array, now: int) -> None:
        """Writes the rows among `missed`, int64 (K,), distinct, that were never written to cold storage, and scores
        them."""
        cold, scoring = self.cold, self.scoring
        keys = missed[cold.state[missed, -1] == 0]
        self._generate(keys, keys, cold.weight, cold.state, cold.layout.state_width)
        cold.state[keys, -1] = MIN_SCORE
        if scoring.remember:
            raise_scores((keys + 1) * cold.state.shape[1] - 1, cold.state.reshape(-1), now, scoring)

    def _fill_free(self, keys: Array, client: int | None, batch: int, *, takes: bool) -> None:
        """Fills the rows `keys`, int64 (K,), distinct, into free slots, as far as there are any. `takes`: also into
        slots of victims, which no batch in flight uses."""
        hot = self.hot
        if takes and len(keys) > hot.free:
            moving = self.plan_changes.begin(SLOTS_MOVE)
            self._clients.planner = client
            self._evict(self._choose_victims(len(keys) - hot.free, batch))
            self.plan_changes.clear(moving)
        slots = self._admit(keys[: hot.free], client)
        if not self.scoring.remember:
            raise_scores(slots, hot.score, self.scoring.now(self.cold.metadata.batch), self.scoring)

    @ranged("swap")
    def _fill_missed(self, numbering: Numbering, planners: Planners, batch: int) -> bool:
        """Fills the missed rows of a batch into slots, and writes these to `unique_slots`. Returns False, and changes
        nothing, if a signal handler has planned since the search, and may have filled some of them."""
        missed = numbering.missed
        moving = self.plan_changes.begin(SLOTS_MOVE)
        if self._last != batch:
            self.plan_changes.clear(moving)
            return False
        if len(planners.numbers) == 1:
            (self._clients.planner,) = planners.numbers
        slots, gone = self._empty_slots(len(missed), batch)
        untouched = self._fill(numbering.unique_keys[missed], slots)
        if len(planners.numbers) > 1:
            self._count_arrivals(numbering, planners, slots, untouched, gone)
        numbering.unique_slots[missed] = slots
        self.hot.last_batch[slots] = stamp(batch)
        self._clients.planner = None
        self.plan_changes.clear(moving)
        return True

    def _count_arrivals(
        self, numbering: Numbering, planners: Planners, slots: Array, untouched: Array, gone: _Evicted
    ) -> None:
        """Counts for several clients the rows that they have filled into `slots`, and the evictions for these."""
        hot, filled = self.hot, numbering.counted[:, MISSED]
        # the plan no longer needs the scratch array of slots
        found = count_arrivals(slots, untouched, gone.slots, gone.dirty, filled, hot.unique_of_slot, hot.capacity)
        for client, rows, (read, evicted, dirty, beyond) in zip(
            planners.numbers, filled.tolist(), found.tolist(), strict=True
        ):
            self._clients.counts[client].update(
                rows_filled=rows, bytes_filled=read * self._row_bytes, evictions=evicted, rows_written_back=dirty,
                bytes_written_back=self._bytes_written(dirty, evicted), rows_overflow=beyond,
            )  # fmt: skip

    def _pin(self) -> None:
        """Fills the rows of resident tables into the first slots, where no victim is chosen."""
        self._clients.planner = None  # remains of an interrupted plan
        counted = self._counts.copy()  # so that only batches count
        for first, rows in self._resident:
            for start in range(first, first + rows, PIN_ROWS):
                keys = np.arange(start, min(start + PIN_ROWS, first + rows), dtype=np.int64)
                self._fill(keys, self.hot.take(len(keys)))
        self._counts = counted

    def _empty_index(self, slots: int) -> SlotMap | RowIndex:
        """A map from keys to slots, still empty."""
        return RowIndex(self.cold.layout.rows) if self.cold.as_fast_as_slots else SlotMap(slots)

    def derive(self) -> None:
        """Rebuilds the free slots and the map from the slots' keys."""
        self.hot.derive()
        index = self._empty_index(len(self.hot))
        slots = self.hot.occupied()
        index.insert(self.hot.key[slots], slots)
        self._index = index

    def _retire_transients(self, batch: int) -> None:
        """Evicts transient rows that no ticket uses: the capacity holds between batches."""
        moving = self.plan_changes.begin(SLOTS_MOVE)
        slots = self.hot.transients()
        behind = self.hot.last_batch[slots] - stamp(self._tickets.oldest(batch))
        slots = slots[behind < 0]
        keys = self.hot.key[slots]
        dirty = self._evict(slots)
        self._count_rows(keys, dirty, evictions=np.ones(len(slots), np.int64))
        self.plan_changes.clear(moving)

    def _empty_slots(self, rows: int, batch: int) -> tuple[Array, _Evicted]:
        """Empty slots for `rows` missed rows, int32, and the rows evicted for them: evicts victims, and adds transient
        slots beyond the capacity for the rest."""
        short, gone = rows - self.hot.free, NONE_EVICTED
        if short > 0:
            victims = self._choose_victims(short, batch)
            with self.lock:  # the arrays of all rows may be replaced
                self.hot.ensure_transient(short - len(victims))
            gone = _Evicted(victims, self._evict(victims))
            self._count(rows_overflow=short - len(victims))
        with self.lock:
            return self.hot.take(rows), gone

    def _choose_victims(self, short: int, batch: int) -> Array:
        """Chooses up to `short` victims: slots, int32."""
        hot, victims = self.hot, np.empty(0, np.int32)
        oldest, used = stamp(self._tickets.oldest(batch)), min(hot.used, hot.capacity) - self._pinned
        if len(self._clients):
            victims = self._victims_in(short, part_of(short, used, batch), oldest)
        return victims if len(victims) == short else self._victims_in(short, slice(used), oldest)

    def _victims_in(self, count: int, part: slice, oldest: Any) -> Array:
        """Chooses up to `count` victims: slots, int32, in a `part` of those without resident tables."""
        first, stop = self._pinned + (part.start or 0), self._pinned + part.stop
        key, score, last_batch = (each[first:stop] for each in (self.hot.key, self.hot.score, self.hot.last_batch))
        by_age = self.scoring.ties_by_age
        return choose_victims(count, key, score, last_batch, oldest, stop - first, by_age) + np.int32(first)

    def _evict(self, slots: Array) -> Array:
        """Evicts rows; returns which were dirty, bool (K,)."""
        if len(slots) == 0:
            return np.empty(0, np.bool_)
        keys = self.hot.key[slots]
        dirty = self._write_back(keys, slots)
        self._index.erase(keys)
        self.hot.vacate(slots)
        self._count(evictions=len(slots))
        return dirty

    def _write_back(self, keys: Array, slots: Array) -> Array:
        """Writes dirty rows as a whole, and of others the score; returns which were dirty, bool (K,)."""
        is_dirty: Array = self.hot.dirty[slots] != 0
        self.cold.write(keys, slots, self.hot)
        self.hot.dirty[slots] = 0
        dirty = int(np.count_nonzero(is_dirty))
        self._count(rows_written_back=dirty, bytes_written_back=int(self._bytes_written(dirty, len(slots))))
        return is_dirty

    def _bytes_written(self, dirty: Any, rows: Any) -> Any:
        """Bytes written back for `rows`, of which `dirty` are dirty; elementwise."""
        return dirty * self._row_bytes + (rows - dirty) * self.hot.score.itemsize

    def _count_rows(self, keys: Array, dirty: Array, **more: Array) -> None:
        """Counts rows that were written back for the clients that have them. `dirty`: bool (K,)."""
        if len(self._clients):
            written = dirty.astype(np.int64)
            more |= {"rows_written_back": written, "bytes_written_back": self._bytes_written(written, 1)}
            self._clients.add_rows(keys, more)

    def _fill(self, keys: Array, slots: Array) -> Array:
        """Fills the rows `keys` into the empty `slots` and publishes them; returns which were generated, bool (K,)."""
        hot = self.hot
        if len(hot.key) > hot.capacity:
            self._index.grow(len(hot.key))
        untouched = self.cold.read(keys, slots, hot)
        fresh = slots[untouched]
        hot.dirty[slots] = 0
        hot.dirty[fresh] = 1  # cold storage does not have the row yet
        if len(fresh):
            self._generate(keys[untouched], fresh, hot.weight, hot.state, hot.state.shape[1])
        hot.score[slots if not self.scoring.remember else fresh] = MIN_SCORE
        hot.key[slots] = keys
        self._index.insert(keys, slots)
        self._count(rows_filled=len(keys), bytes_filled=(len(keys) - len(fresh)) * self._row_bytes)
        return untouched

    # --- whole-cache calls ------------------------------------------------------------------------------------------

    def write_back(self) -> None:
        with self.whole():
            self._check_open()
            self._recover()
            self.cold.metadata.policy = self.scoring.name
            self._write_back_slots(self.hot.occupied())

    def dirty_rows(self) -> tuple[Array, Array, Array]:
        with self.whole():
            hot, slots = self.hot, self.hot.occupied()
            slots = slots[hot.dirty[slots] != 0]
            slots = slots[np.argsort(hot.key[slots])]
            state = np.concatenate([hot.state[slots], hot.score[slots, None]], axis=1)
            return hot.key[slots], hot.weight[slots], state

    def hottest(self) -> Array:
        with self.whole():
            slots = self.hot.occupied()
            slots = slots[slots >= self._pinned]
            keys: Array = self.hot.key[slots[np.argsort(self.hot.score[slots])[::-1]]]
            return keys

    def sample_scores(self, most: int, keys: Array) -> ScoreSample:
        with self.whole():
            self._begin_call()
            slots = self.hot.used - self._pinned
            score = self.hot.score[self._pinned : self.hot.used : max(1, -(-slots // most))].copy()
            return ScoreSample(
                time=self.cold.metadata.batch,
                score=score,
                slots_each=slots / max(1, len(score)),
                has_slot=self._index.find(keys) >= 0,
            )

    @property
    def plans(self) -> int:
        return self._last

    def _slots_in(self, start: int, stop: int) -> Array:
        """Slots that hold rows of the key range start … stop − 1."""
        slots = self._slots_of(start, stop)
        return slots[slots >= 0]

    def _slots_of(self, start: int, stop: int) -> Array:
        """The slot of each row of the key range start … stop − 1, int32 (K,), negative if it has none."""
        return self._index.find(np.arange(start, stop, dtype=np.int64))

    def _write_back_range(self, start: int, stop: int) -> None:
        self._write_back_slots(self._slots_in(start, stop))

    def _write_back_slots(self, slots: Array) -> None:
        """Writes slots back, outside of a plan."""
        self._clients.planner = None  # remains of an interrupted plan
        keys = self.hot.key[slots]
        self._count_rows(keys, self._write_back(keys, slots))

    def _copy_range(self, start: int, stop: int, weight: Array, state: Array, last: Array = NO_WORDS) -> Array:
        """See `Cache`; without a write, so that a full disk does not matter."""
        from tieredemb.storage.rows_cpu import rows_copy

        slots, hot = self._slots_of(start, stop), self.hot
        scores = np.empty(len(slots), np.uint32)
        if (slots < 0).any():
            scores = self.cold.copy_range(start, stop, weight, state)
            if len(last):
                last[:] = self._cold_words(start, stop)
        hot_rows, copies = (hot.weight, hot.state, hot.score), (weight, state, scores, last)
        parallel_for(rows_copy, even_bounds(len(slots), COPY_GRAIN), slots, *hot_rows, *copies)
        return scores

    def _cold_words(self, start: int, stop: int) -> Array:
        """The last word of the state of each row start … stop − 1 in cold storage, uint32 (K,)."""
        if self.cold.in_memory:
            return self.cold.state[start:stop, -2].copy()
        rows = np.empty((stop - start, self.cold.layout.state_width), np.uint32)
        scores = self.cold.copy_range(start, stop, np.empty((len(rows), 0), self.cold.layout.carrier), rows)
        return np.where(scores == 0, np.uint32(0), rows[:, -1])

    def change_range(
        self,
        start: int,
        stop: int,
        change: Callable[[HotArrays, Array], None],
        concerns: Callable[[Array], Array],
    ) -> None:
        """Changes some of the rows start … stop − 1 in place; see `change_rows`. `change`: called without the third
        argument there · `concerns`: given the last words of rows' states, uint32 (K,), 0 for rows never written,
        returns which rows to change, bool (K,). Rows without space in cold storage stay unchanged."""
        with self.whole():
            self._begin_call()
            keys = np.flatnonzero(concerns(self.last_words(start, stop))) + start
            if len(keys):
                with contextlib.suppress(StorageFullError):
                    self.change_rows(keys, lambda rows, places, _: change(rows, places))

    def change_rows(self, keys: Array, change: Callable[[HotArrays, Array, Array], None]) -> None:
        """Changes the rows of `keys`, int64 (K,), distinct, in place, by kernels that change a row as a whole and mark
        it dirty: after an interrupt some rows are changed, and others not. `change` is called with rows, the indices of
        some of them, int32 (U,), and the indices of their keys, int64 (U,): once for rows in slots, and once for copies
        of the others, which are then written back. If there are free slots for all, they are filled before; nothing is
        evicted. Raises `StorageFullError` before rows without a slot are changed."""
        with self.whole():
            self._begin_call()
            if not self.cold.volatile:
                self.cold.begin_changes()
            self.rows_version += 1
            slots = self._index.find(keys)
            cold = np.flatnonzero(slots < 0)
            if 0 < len(cold) <= self.hot.free:
                slots[cold], cold = self._admit(keys[cold]), cold[:0]
            hot = np.flatnonzero(slots >= 0)
            if len(hot):
                change(self.hot, slots[hot], hot)
            if len(cold):
                self._change_cold(keys[cold], lambda rows, places: change(rows, places, cold))

    def _admit(self, keys: Array, client: int | None = None) -> Array:
        """Fills rows into free slots, of which there are enough; returns these, int32 (K,). No batch in flight uses
        them. `client`: whose counters count them."""
        self._clients.planner = client
        moving = self.plan_changes.begin(SLOTS_MOVE)
        slots = self.hot.take(len(keys))
        self._fill(keys, slots)
        self.hot.last_batch[slots] = stamp(self._last)
        self._clients.planner = None
        self.plan_changes.clear(moving)
        return slots

    def _change_cold(self, keys: Array, change: Callable[[HotArrays, Array], None]) -> None:
        rows, places = _Copies(self.cold.layout, len(keys)), np.arange(len(keys), dtype=np.int32)
        self.cold.reserve(keys)
        untouched = np.flatnonzero(self.cold.read(keys, places, rows)).astype(np.int32)
        self._generate(keys[untouched], untouched, rows.weight, rows.state, rows.state.shape[1])
        rows.score[untouched] = MIN_SCORE
        change(rows, places)
        self.cold.write(keys, places, rows)

    def _reload_range(self, start: int, stop: int) -> None:
        slots = self._slots_in(start, stop)
        self.rows_version += 1
        self.cold.read(self.hot.key[slots], slots, self.hot)

    def forget(self) -> None:
        with self.whole():
            self._check_open()
            self.check_idle("load a checkpoint")
            self.rows_version += 1
            self.hot.reset()
            self._index = self._empty_index(len(self.hot))
            self._adopt_scores()
            self._pin()

    def stats(self, client: int | None = None) -> CacheStats:
        if not self.plan_changes.records:  # else a signal handler may ask during a plan
            with self.whole():
                self._recover()
        self.suspects.check()
        return self.counted(client)

    def counted(self, client: int | None) -> CacheStats:
        return CacheStats(**(self._counts if client is None else self._clients.counts[client]))

    def memory_report(self) -> dict[str, Any]:
        with self.whole():
            sizes = self.hot.size_bytes()
            cells, grown = self.slots * map_bytes_per_slot(), 0
            cold = {"tier": self.cold.kind} | self.cold.size_bytes()
            if isinstance(self._index, SlotMap):
                grown = self._index.cells.nbytes - cells  # for a batch
            else:  # the capacity covers as much as a map takes, and cold rows the rest
                cells = min(cells, self._index.slot_plus_one.nbytes)
                cold["index"] = self._index.slot_plus_one.nbytes - cells
            batch = {
                "transient_rows": sizes.pop("transient"),
                "transient_map": grown,
                "plans": self._tickets.size_bytes(),
            }
            return {"cache": sizes | {"map": cells}, "batch": batch, "cold": cold}

    # --- inside -----------------------------------------------------------------------------------------------------

    def _count(self, **more: int) -> None:
        self._counts.update(more)
        if self._clients.planner is not None:
            self._clients.add(more)
