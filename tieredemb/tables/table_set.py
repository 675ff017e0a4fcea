"""The tables of one module: grouped by width, each group a key space with one cache over one cold storage."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from tieredemb.cache.changes import HalfWritten, Part
from tieredemb.cache.locks import Locks
from tieredemb.cache.stats import CacheStats
from tieredemb.config import Array, Capacity, InitFunction, features_of, without_functions
from tieredemb.errors import ConfigError, DeviceMemoryError, StorageFullError
from tieredemb.kernels.row_format import RowFormat, carrier_view
from tieredemb.lookup.bags import KeySpace, feature_name
from tieredemb.lookup.history import History
from tieredemb.progress import progress
from tieredemb.storage.base import RowOpener, RowSet
from tieredemb.storage.host import advise_huge_pages
from tieredemb.tables.collected import when_collected
from tieredemb.tables.config import TableSetConfig
from tieredemb.tables.given_rows import rows_of_part
from tieredemb.tables.group import Group, make_group, move_group, row_layout, slot_bytes
from tieredemb.tables.shares import Sharer, shares
from tieredemb.tables.step_time import StepTime

if TYPE_CHECKING:
    from tieredemb.tables.division import Division

COPY_ROWS = 1 << 18  # rows copied at once by whole-table calls that compute with them: bounds their memory
COPY_BYTES = 1 << 28  # of rows copied at once unchanged; each time the cache is searched for them
DENSE_BYTES = 1 << 24  # of rows of a dense optimizer, which are copied several times
PART_BYTES = 1 << 26  # of the parts in which a table is read: larger than a CPU's caches, and small in memory
_CPU = torch.device("cpu")


EARLIER = "; this was in an earlier batch, which has updated no row"
NOT_BEGUN = f"{EARLIER}, and this one was not begun: call it again"


class Rows(NamedTuple):
    """Copies of cold rows `start` to `stop` of a group, counted from its first: weights carrier (K, D), states uint32
    (K, S + 1)."""

    start: int
    stop: int
    weight: Array
    state: Array


class LaggingRows(NamedTuple):
    """Rows at an earlier step: rows int64 (K,), ascending, weight carrier (K, D), state uint32 (K, S), and the history
    by which they catch up."""

    rows: Array
    weight: Array
    state: Array
    history: History | None


class LoadedState(NamedTuple):
    """A table's optimizer state from a state dict: the steps taken; `words`, tensors (rows, ·) of S numbers a row side
    by side, or None without any; and of a dense optimizer the rows at an earlier step, if it has them."""

    step: int
    words: tuple[torch.Tensor, ...] | None
    lagging: LaggingRows | None = None


Kept = tuple[list[int], History | None]  # the steps of tables, and a dense optimizer's history of them


class Place:
    """The device, caches and storages of tables. `device_type`: of the config's device · `groups`: by width ·
    `reports`: where a GPU reports bad ids and offsets, and steps that it refuses: one, or one for each group if these
    have ids of their own; none on the CPU · `faults`: the first one, or None · `other_faults`: the reports for several
    sets of tables as one · `earlier`: counters from before the last move · `rows`: locks the rows, but not plans; each
    `with` takes `held()` · `are_read_in_place`: see `Group.is_read_in_place`, for all groups · `recorded`: recordings,
    by the context of calls, or by the tables of updates; it does not reference the place, and is freed with it."""

    def __init__(
        self,
        config: TableSetConfig,
        groups: Sequence[Group],
        earlier: CacheStats,
        reports: Sequence[Any] | None = None,
    ) -> None:
        self.config = config
        self.device_type: str = config.device.type
        if reports is None:
            own = make_fault_report(config)
            reports = [] if own is None else [own]
        self.reports = reports
        self.faults: Any = reports[0] if reports else None
        self.other_faults: list[Any] = [*reports] if config.separate else []
        self.earlier = earlier
        self.recorded: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self.groups: list[Group] = []
        self.add(*groups)

    def check_earlier(self) -> None:
        """Called before a forward: raises for an earlier batch that a GPU refused, if it was reported by now."""
        self.check_faults(NOT_BEGUN)

    def check_faults(self, ending: str) -> None:
        """Raises for a batch that a GPU refused, once the device has reported it. `ending`: what the message ends
        with."""
        if self.faults is not None:
            self.faults.check(ending)
            for report in self.other_faults:
                report.check(ending)

    def add(self, *groups: Group) -> None:
        self.groups += groups
        self.are_read_in_place = all(group.is_read_in_place for group in self.groups)
        self.rows = Locks((group.cache for group in self.groups), plans=False)


class Placed:
    """Refers to the present place, which changes in one step, even if interrupted; it also closes the tables."""

    def __init__(self, now: Place) -> None:
        self.now = now
        self._pid = os.getpid()

    def close(self) -> None:
        """Flushes and closes all. If one cannot be flushed, none is closed, so that its rows can be saved elsewhere."""
        if os.getpid() != self._pid:  # a forked child, where locks may be held for ever
            return
        caches = [group.cache for group in self.now.groups]
        with Locks(caches):
            with contextlib.ExitStack() as all_of_them:  # if one fails, the others are flushed all the same
                for cache in caches:
                    all_of_them.callback(cache.seal)
            for cache in caches:
                cache.close()

    def discard(self) -> None:
        """Closes opened storages without a change, before any row was used."""
        for group in self.now.groups:
            group.cache.close()


class Derived(Placed):
    """A place derived from the places of other tables, also after these have moved. `make`: makes it from their present
    places and its own last one."""

    def __init__(self, sources: Sequence[Placed], make: Callable[[Sequence[Place], Place | None], Place]) -> None:
        self._make = make
        self._of: Sequence[tuple[Placed, Place | None]] = [(source, None) for source in sources]  # with last places
        self._now: Place | None = None

    @property
    def now(self) -> Place:  # type: ignore[override]
        for source, place in self._of:
            if source.now is not place:
                break
        else:
            assert self._now is not None
            return self._now
        there = [source.now for source, _ in self._of]
        self._now = self._make(there, self._now)
        self._of = [(source, place) for (source, _), place in zip(self._of, there, strict=True)]
        return self._now


class PlaceLocks(Locks):
    """The locks of all present caches of tables: as a thread that waits for them may wait for one that replaces the
    caches, they are taken anew until the caches are the present ones."""

    def __init__(self, placed: Placed) -> None:
        super().__init__(())
        self._placed = placed

    def __enter__(self) -> None:
        while True:
            place = self._placed.now
            self._locks = Locks([group.cache for group in place.groups])._locks
            super().__enter__()
            if self._placed.now is place:
                return
            self.__exit__()


class TableSet:
    """Opens the tables of `config`, by `rows` if given, else by the storage of the config. Closes (flushes) them when
    it is freed or the process exits.

    `weights`: of the tables by their numbers, (rows, D) each, which are written unless the storage keeps rows of an
    earlier owner; the caller fills what `rows` opens · `placed`: refers to their place `now` · `step_time`: if other
    tables are looked up in the same steps, when these begin.
    """

    step_time: StepTime | None = None
    division: Division | None = None  # of a capacity shared by its caches, perhaps with others
    related: Any = None  # of a pool: what it shares with related pools (`Related`)

    @functools.cached_property
    def engines(self) -> weakref.WeakSet[Any]:
        """The engines of the tables: each has `tables`, and their `optimizer`."""
        return weakref.WeakSet()

    def __init__(
        self,
        config: TableSetConfig,
        *,
        rows: RowOpener | None = None,
        weights: Mapping[int, torch.Tensor] | None = None,
    ) -> None:
        functions = {t: table.init for t, table in enumerate(config.tables) if callable(table.init)}
        if functions:
            config = replace(config, tables=without_functions(config.tables))
        self.placed = Placed(Place(config, [], CacheStats()))
        widths_of = [config.tables[feature.table].embedding_dim for feature in features_of(config.tables)]
        starts = np.concatenate([[0], np.cumsum(widths_of)])
        # rows that are not pooled, all of one width, are stacked
        is_wide = config.pooled and not config.separate
        self.columns = (starts if is_wide else np.array([0] * len(widths_of) + widths_of[:1])).astype(np.int64)
        widths = sorted({table.embedding_dim for table in config.tables})
        self._replaced = 0  # how often rows were replaced
        self._finalizer = when_collected(self, self.placed.close)
        members = [[t for t, table in enumerate(config.tables) if table.embedding_dim == width] for width in widths]
        spaces = [KeySpace(config.tables, each, list(self.columns)) for each in members]
        sharers = [Sharer(s.rows, slot_bytes(row_layout(config, 1, s.width), config.device)) for s in spaces]
        opens = rows is None
        names = [config.label + (f"width{width}" if len(widths) > 1 else "") for width in widths]
        fills = bool(functions or weights)
        try:
            with contextlib.ExitStack() as opening:
                if rows is None:
                    given = "what was given as its weights" if weights else ""
                    rows = opening.enter_context(config.storage.opening(names, given=given, fills=fills))
                for name, space, capacity in zip(names, spaces, shares(config.capacity, sharers), strict=True):
                    self.placed.now.add(make_group(config, space, capacity, name, rows))
        except BaseException:
            self.placed.discard()
            self._finalizer.detach()
            raise
        if fills:
            self._fill(functions, weights or {}, is_last=opens)

    def _fill(
        self, functions: Mapping[int, InitFunction], weights: Mapping[int, torch.Tensor], *, is_last: bool
    ) -> None:
        """Writes the initial rows of tables, except those kept from an earlier owner. If it fails, the file is invalid.
        `is_last`: whether no other initial rows are written."""
        try:
            self._initialise({table: function for table, function in functions.items() if self.is_new(table)})
            if new := {table: weight for table, weight in weights.items() if self.is_new(table)}:
                self.set_weights(new)
            if is_last:
                self.filled()
        except BaseException:
            for group in self.groups:
                group.cache.close()
            self._finalizer.detach()
            raise

    def _initialise(self, functions: Mapping[int, InitFunction]) -> None:
        """Fills the rows of tables by their `init` functions."""
        if not functions:
            return
        with self.changing("the init of a table") as change:
            for table in functions:
                self.reserve(table)
            change.has_begun = True
            for table, function in functions.items():
                group, _, first = self.locate(table)
                own = self.config.tables[table], function, self.config.seed, self.config.part(table)
                for start, rows in rows_of_part(*own):
                    group.import_weights(first + start, encoded(rows, group.cache.cold.layout.format))

    def undo_opening(self) -> None:
        """Closes tables that are not to be used after all: rows of an earlier owner stay unchanged."""
        if any(group.cache.cold.is_new for group in self.groups):
            self.close()
        else:
            self.placed.discard()
            self._finalizer.detach()

    def is_new(self, table: int) -> bool:
        """Whether the rows of a table are new, and not kept from an earlier owner."""
        return self.locate(table)[0].cache.cold.is_new

    def filled(self) -> None:
        """Called when all initial rows were written; see `Storage.opening`."""
        for group in self.groups:
            if group.cache.cold.is_new:
                group.cache.cold.filled()

    @property
    def row_set(self) -> RowSet | None:
        """The files of the rows, which were opened as one; None if rows end with the process."""
        return self.groups[0].cache.cold.row_set

    @property
    def named(self) -> str:
        """The tables' names in messages."""
        names = [table.name for table in self.config.tables]
        if len(names) == 1:
            return f"table {names[0]!r}"
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"tables {', '.join(map(repr, names[:3]))}{more}"

    @property
    def whole(self) -> TableSet:
        """All tables that share caches with these."""
        return self

    @property
    def config(self) -> TableSetConfig:
        return self.placed.now.config

    @property
    def groups(self) -> list[Group]:
        return self.placed.now.groups

    @property
    def faults(self) -> Any:
        """Where a GPU reports bad ids and offsets; None on the CPU."""
        return self.placed.now.faults

    @property
    def n_features(self) -> int:
        """The number of features of all tables."""
        return len(self.columns) - 1

    @property
    def output_width(self) -> int:
        """ΣD, columns of a pooled output; or D."""
        return int(self.columns[-1])

    def locate(self, table: int) -> tuple[Group, int, int]:
        """Group of a table, its position there, and its first key."""
        for group in self.groups:
            found = np.flatnonzero(group.space.tables == table)
            if len(found):
                return group, int(found[0]), int(group.space.start[found[0]])
        raise IndexError(table)

    # --- tables as tensors ------------------------------------------------------------------------------------------

    def weight(
        self,
        table: int,
        device: torch.device = _CPU,
        dtype: torch.dtype | None = None,
        *,
        start: int = 0,
        stop: int | None = None,
    ) -> torch.Tensor:
        """A copy of a table's weights (rows, D) at the current step on a device; or of the rows `start` … `stop` − 1.
        `dtype`: of the copy, by default that of the rows. Raises `StorageFullError` or `DeviceMemoryError` if memory
        cannot hold it."""
        config, own = self.config.tables[table], self.weight_dtype(table)
        stop = config.num_embeddings if stop is None else stop
        out = self._empty(table, config.embedding_dim, dtype or own, device, stop - start)
        if device.type == "cpu" and out.dtype == own:
            for first, last in self._parts("copying weights", table, _row_bytes(out), start=start, stop=stop):
                self._read(table, first, out[first - start : last - start])
        else:
            for first, rows in self.weight_parts(table, start, stop):
                out[first - start : first - start + len(rows)] = rows.to(device)
        self.check_faults()
        return out

    def empty_weight(self, table: int, device: torch.device, rows: int) -> torch.Tensor:
        """A tensor (rows, D) for weights of a table. Raises as `weight` does."""
        return self._empty(table, self.config.tables[table].embedding_dim, self.weight_dtype(table), device, rows)

    def weight_dtype(self, table: int) -> torch.dtype:
        """The dtype of a table's weights as a tensor."""
        return self.locate(table)[0].cache.cold.layout.format.encoding.dtype

    @property
    def writes(self) -> int:
        """How often rows were replaced or written to, without updates."""
        return self._replaced

    def version(self, table: int) -> tuple[int, int]:
        """Changes when a table's rows are updated or replaced. Synchronises with a GPU."""
        group, position, _ = self.locate(table)
        return self._replaced, group.steps[position]

    def weight_parts(self, table: int, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, torch.Tensor]]:
        """A table's weights in parts, as `weight` copies them: first row, and a CPU tensor (K, D), which is overwritten
        by the next part."""
        config = self.config.tables[table]
        dtype, stop = self.weight_dtype(table), config.num_embeddings if stop is None else stop
        most = max(1, min(stop - start, PART_BYTES // (config.embedding_dim * dtype.itemsize)))
        part = torch.empty((most, config.embedding_dim), dtype=dtype, device="cpu")
        for first in range(start, stop, most):
            rows = part[: stop - first]
            self._read(table, first, rows)
            yield first, rows

    def _read(self, table: int, start: int, out: torch.Tensor) -> None:
        """Copies the weights of the rows from `start` on to a CPU tensor (K, D)."""
        with self.locked():
            group, _, first = self.locate(table)
            first += start
            with carried(out, group.cache.cold.layout.format) as rows:
                group.export_rows(first, first + len(out), rows, np.empty((len(out), 0), np.uint32))

    def set_weights(
        self, weights: Mapping[int, torch.Tensor], *, once_ready: Callable[[], object] | None = None
    ) -> None:
        """Overwrites the weights of tables with (rows, D) each, rounded to the rows' dtype. `once_ready`: called once
        space is reserved, before anything changes; it may raise. Raises `StorageFullError` before that."""
        with self.changing("load_state_dict", [self.part(table, "weight") for table in weights]) as change:
            for table in weights:
                self.reserve(table)
            if once_ready is not None:
                once_ready()
            change.has_begun = True
            for table, weight in weights.items():
                self._write_weight(table, weight)

    def set_rows(self, table: int, start: int, rows: torch.Tensor) -> None:
        """Overwrites the weights of the rows from `start` on with (K, D), rounded to the rows' dtype. Raises as
        `change_rows` does."""

        def given(first: int, part: torch.Tensor) -> torch.Tensor:
            return rows[first - start : first - start + len(part)]

        self.change_rows(table, start, start + len(rows), given, reads=False)

    def change_rows(
        self,
        table: int,
        start: int,
        stop: int,
        change: Callable[[int, torch.Tensor], torch.Tensor],
        *,
        reads: bool = True,
    ) -> None:
        """Overwrites the weights of the rows `start` … `stop` − 1, part by part. `change` is called with the number of
        a part's first row and a CPU tensor (K, D), which has the part's weights if `reads`, and returns the new ones.
        Rows of a dense optimizer are then at the current step. Waits for a GPU. If it is interrupted after the first
        part, the cache is broken (`BrokenCacheError`) until the whole table is written. Raises `StorageFullError`
        before anything changes."""
        self.change_spans(table, [(start, stop)], change, reads=reads)

    def change_spans(
        self,
        table: int,
        spans: Sequence[tuple[int, int]],
        change: Callable[[int, torch.Tensor], torch.Tensor],
        *,
        reads: bool = True,
    ) -> None:
        """As `change_rows`, for several spans of rows, (first, one after the last), as one change."""
        group, _, key = self.locate(table)
        config, dtype = self.config.tables[table], self.weight_dtype(table)
        row = group.cache.cold.layout.format
        with self.locked():
            if reads or spans != [(0, config.num_embeddings)]:  # writing the whole table repairs a broken one
                self._read(table, spans[0][0], torch.empty((0, config.embedding_dim), dtype=dtype, device="cpu"))
            with self.changing("writing to a table", [self.part(table, "weight")]) as changed:
                for start, stop in spans:
                    group.cache.cold.reserve_range(key + start, key + stop)
                row_bytes = config.embedding_dim * dtype.itemsize
                parts = (
                    self._parts("writing to a table", table, row_bytes, PART_BYTES, start=start, stop=stop)
                    for start, stop in spans
                )
                for first, last in itertools.chain.from_iterable(parts):
                    part = torch.empty((last - first, config.embedding_dim), dtype=dtype, device="cpu")
                    if reads:
                        with carried(part, row) as rows:
                            group.copy_rows(key + first, key + last, rows, np.empty((len(part), 0), np.uint32))
                    new = encoded(change(first, part).detach().to(device="cpu"), row)
                    changed.has_begun = True
                    group.import_weights(key + first, new)

    def part(self, table: int, kind: str) -> Part:
        """The name of a table's "weight" or "state" in its cache's intent log."""
        return table, kind

    @property
    def parts(self) -> list[Part]:
        """All parts of its tables, as named in intent logs."""
        return [self.part(table, kind) for table in range(len(self.config.tables)) for kind in ("weight", "state")]

    def reserve(self, table: int) -> None:
        """Reserves space for all rows of a table."""
        group, _, first = self.locate(table)
        group.cache.cold.reserve_range(first, first + self.config.tables[table].num_embeddings)

    def _write_weight(self, table: int, weight: torch.Tensor) -> None:
        group, _, first = self.locate(table)
        for start, stop in self._parts("setting weights", table, _row_bytes(weight)):
            rows = encoded(weight[start:stop].detach().to(device="cpu"), group.cache.cold.layout.format)
            group.import_weights(first + start, rows)

    def state_parts(self, table: int) -> Iterator[tuple[int, torch.Tensor]]:
        """A table's optimizer state at the current step, in parts: first row, and float32 (K, S) on the CPU, which is
        overwritten by the next part."""
        group, _, first = self.locate(table)
        width = group.cache.cold.layout.state_width - (group.history is not None)  # without the step of each row
        part = torch.empty((0, width), dtype=torch.float32, device="cpu")
        for start, stop in self._parts("copying optimizer state", table, 4 * width, PART_BYTES):
            if len(part) < stop - start:
                part = torch.empty((stop - start, width), dtype=torch.float32, device="cpu")
            no_weight = np.empty((stop - start, 0), group.cache.cold.layout.carrier)
            group.export_rows(first + start, first + stop, no_weight, part[: stop - start].numpy().view(np.uint32))
            yield start, part[: stop - start]

    def set_states(
        self,
        states: Mapping[int, LoadedState],
        then: Callable[[], None],
        *,
        once_ready: Callable[[], object] | None = None,
    ) -> None:
        """Overwrites the steps that tables have taken, and their optimizer state, if they have any. `then`: called as a
        part of the change · `once_ready`: see `set_weights`. Raises `StorageFullError` before anything changes."""
        parts = [self.part(table, "state") for table in states]
        with self.changing("load_state_dict of the optimizer", parts) as change:
            for table, state in states.items():
                if state.words is not None:
                    self.reserve(table)
            if once_ready is not None:
                once_ready()
            change.has_begun = True
            for table, state in states.items():
                if state.words is not None:
                    self._write_state(table, state.words, state.step)
            for table, state in states.items():
                group, position, _ = self.locate(table)
                group.steps = [*group.steps[:position], state.step, *group.steps[position + 1 :]]
            for group in self.groups:
                group.restart_history()
            self._write_lagging({table: state.lagging for table, state in states.items() if state.lagging is not None})
            then()

    def _write_lagging(self, lagging: Mapping[int, LaggingRows]) -> None:
        """Restores rows that were saved at an earlier step, if their weights at the current step equal the tables'."""
        for group in self.groups:
            history = next(
                (lagging[t].history for t in group.space.tables if t in lagging and lagging[t].history), None
            )
            if history is None or history.steps != group.steps[0]:
                continue
            group.take_history(history)
            for table in (int(t) for t in group.space.tables if t in lagging):
                _, _, first = self.locate(table)
                for start, stop in _chunks(self.config.tables[table].num_embeddings):
                    rows = lagging[table]
                    some = slice(*np.searchsorted(rows.rows, (start, stop)))
                    if some.stop > some.start:
                        part = rows.rows[some] - start
                        weight, state = rows.weight[some], rows.state[some]
                        group.import_lagging(first + start, stop - start, part, weight, state, history)

    def lagging(self, table: int, *, with_history: bool) -> LaggingRows | None:
        """The rows of a dense optimizer's table that are at an earlier step, if that makes a difference; None for other
        optimizers. `with_history`: also the history of steps."""
        group, _, first = self.locate(table)
        history = group.history
        if history is None:
            return None
        found = []
        for start, stop in _chunks(self.config.tables[table].num_embeddings):
            rows, weight, state = group.export_lagging(first + start, first + stop, history)
            found.append((rows + start, weight, state))
        rows, weight, state = (np.concatenate(parts) for parts in zip(*found, strict=True))
        return LaggingRows(rows, weight, state, history if with_history else None)

    def _write_state(self, table: int, words: Sequence[torch.Tensor], step: int) -> None:
        group, _, first = self.locate(table)
        width = sum(each.shape[1] for each in words)
        for start, stop in self._parts("setting optimizer state", table, 4 * width):
            rows = torch.empty((stop - start, width), dtype=torch.float32, device="cpu")
            for part, each in zip(torch.split(rows, [each.shape[1] for each in words], dim=1), words, strict=True):
                part.copy_(each[start:stop].detach())
            group.import_states(first + start, rows.numpy().view(np.uint32), step)

    def _parts(
        self,
        title: str,
        table: int,
        row_bytes: int,
        at_once: int = COPY_BYTES,
        *,
        start: int = 0,
        stop: int | None = None,
    ) -> Iterator[tuple[int, int]]:
        """The rows `start` … `stop` − 1 of a table, by default all, in parts (first, one after the last) of at most
        `at_once` bytes, with `row_bytes` a row; shows progress."""
        rows = (self.config.tables[table].num_embeddings if stop is None else stop) - start
        most = max(1, at_once // max(1, row_bytes))
        if self.locate(table)[0].is_dense:
            most = max(1, min(COPY_ROWS, DENSE_BYTES // max(1, row_bytes)))
        with progress(title, rows * row_bytes) as advance:
            for first, last in _chunks(rows, most):
                yield start + first, start + last
                advance((last - first) * row_bytes)

    def _empty(
        self, table: int, width: int, dtype: torch.dtype, device: torch.device = _CPU, rows: int | None = None
    ) -> torch.Tensor:
        rows = self.config.tables[table].num_embeddings if rows is None else rows
        on_gpu = device.type == "cuda"
        check_memory(self.config.tables[table].name, rows * width * dtype.itemsize, device)
        out = torch.empty((rows, width), dtype=dtype, device=device)
        if not on_gpu:
            advise_huge_pages(out.data_ptr(), out.nbytes)
        return out

    # --- whole-set calls --------------------------------------------------------------------------------------------

    def locked(self) -> Locks:
        """Keeps other threads from all caches."""
        return PlaceLocks(self.placed)

    def adopt(self) -> None:
        """Takes over cold rows and metadata that were replaced as a whole."""
        for group in self.groups:
            group.adopt()

    @contextlib.contextmanager
    def changing(
        self, call: str, parts: Iterable[Part] | None = None, *, calls_inside: bool = False
    ) -> Iterator[HalfWritten]:
        """Holds all caches for a call that replaces `parts` of rows (table and "weight" or "state"), or all, hot and
        cold. If it is interrupted after it `has_begun`, these are suspect; once it is done they no longer are.
        `calls_inside`: whether it calls the caches meanwhile, to read or plan."""
        with self.locked():
            change = HalfWritten(
                call, None if parts is None else frozenset(parts), replaces=parts is None, calls_inside=calls_inside
            )
            for group in self.groups:
                group.cache.check_loadable(change.parts)
            records = []
            for group in self.groups:
                records.append(group.cache.changes.begin(change, up=3))
            try:
                self._replaced += 1
                yield change
            except BaseException as error:
                for group in self.groups:
                    group.cache.changes.note(error)
                if not change.has_begun:  # nothing to recover; the record keeps objects alive
                    for group, record in zip(self.groups, records, strict=True):
                        group.cache.changes.clear(record)
                raise
            for group, record in zip(self.groups, records, strict=True):
                group.cache.changes.clear(record)
                group.cache.suspects.clear(change.parts)

    def flush(self) -> None:
        """Writes all hot rows back: cold storage is then complete."""
        with self.locked(), contextlib.ExitStack() as all_of_them:  # if one fails, the others are flushed all the same
            for group in self.groups:
                all_of_them.callback(group.cache.flush)
        self.check_faults()
        for group in self.groups:
            group.check_steps()

    def check_moves(self, moved: Sequence[TableSet]) -> None:
        """Raises `UnsupportedError` if tables that share caches are not all among the `moved` sets."""

    def move(self, device: torch.device) -> None:
        """Moves the caches to `device` over the same cold rows. Raises `StorageError` while batches are in flight."""
        with self.locked():
            self._renew(
                replace(self.config, device=device), [group.capacity for group in self.groups], "move the tables"
            )

    def resize(self, slots: Sequence[int]) -> None:
        """Gives the cache of each group another number of slots, with the hottest rows of the old ones. Needs memory
        for old and new caches while it runs. Raises `StorageError` while batches are in flight, and
        `DeviceMemoryError`, before anything changes."""
        with self.locked():
            hottest = [group.cache.hottest() for group in self.groups]
            config = replace(self.config, capacity=slots[0]) if len(slots) == 1 else self.config  # for copies
            self._renew(config, slots, "resize the caches")
            for group, keys in zip(self.groups, hottest, strict=True):
                group.fetch(keys)

    def _renew(self, config: TableSetConfig, capacities: Sequence[Capacity], call: str) -> None:
        """Replaces the groups by new ones over the same cold rows. The caller holds the caches."""
        for group in self.groups:
            group.cache.check_idle(call)
        self.flush()
        counted, before = self.stats(), self.groups
        for group in before:
            group.restart_counts()
        with contextlib.ExitStack() as undo:  # if one width does not fit, the others stay where they are
            groups: list[Group] = []
            for group, capacity in zip(before, capacities, strict=True):
                groups.append(move_group(group, config, capacity))
                undo.callback(groups[-1].cache.abandon)
            place = Place(config, groups, counted)
            undo.pop_all()
        self.placed.now = place
        for group in before:
            group.cache.abandon()

    def close(self) -> None:
        """Flushes and closes, then raises errors that a GPU has reported since. A second call does nothing; after a
        failed one (a full disk) it tries again."""
        self.placed.close()
        self._finalizer.detach()
        self.check_faults()

    def stats(self) -> CacheStats:
        """Totals of all groups. Synchronises with a GPU, and raises errors that it has reported since."""
        with self.locked():
            total = sum((group.stats() for group in self.groups), self.placed.now.earlier)
            for group in self.groups:
                group.check_steps()
            total += CacheStats(steps_replayed=sum(group.steps_replayed for group in self.groups))
        self.check_faults()
        return total

    def check_faults(self) -> None:
        """Raises for a batch that a GPU refused, once the device has reported it."""
        self.placed.now.check_faults(EARLIER)

    def memory_report(self) -> dict[str, Any]:
        """Bytes of every allocation, for each width. `optimizer`: the history of a dense one, about 100 bytes a
        step."""
        reports = {}
        for group in self.groups:
            reports[f"width {group.space.width}"] = group.cache.memory_report()
        self._add_history(reports)
        return reports

    def _add_history(self, reports: dict[str, Any]) -> None:
        for group in self.groups:
            if size := self._history_bytes(group):
                reports[f"width {group.space.width}"]["optimizer"] = {"steps": size}

    def _history_bytes(self, group: Group) -> int:
        return group.history_bytes

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles include the rows, which only memory tiers support."""
        with self.locked():
            return self._copied()

    def _copied(self) -> tuple[Any, ...]:
        parts, kept = self._copies()
        metadata = [(g.cache.cold.metadata.batch, g.cache.cold.metadata.policy) for g in self.groups]
        return _rebuild, (self.config, metadata, parts, kept)

    def _copies(self) -> tuple[list[list[Rows]], list[Kept]]:
        """For each group copies of the rows that were written, the steps of its tables, and its history. The caller
        holds the caches."""
        for group in self.groups:
            group.cache.check_idle("copy or pickle the tables")
            if not group.cache.cold.in_memory:
                raise ConfigError(
                    f"{self.named} on the {group.cache.cold.kind} tier cannot be copied or pickled (two owners would "
                    f"write one storage); use tieredemb.save_checkpoint(model, directory) and load_checkpoint(model, "
                    f"directory)"
                )
        self.flush()
        return [list(_copied_rows(group)) for group in self.groups], [
            (group.steps, copy.deepcopy(group.kept)) for group in self.groups
        ]

    def put_copies(self, parts: Sequence[Sequence[Rows]], kept: Sequence[Kept]) -> None:
        """Replaces the rows by what `_copies` has returned."""
        for group, rows, (steps, history) in zip(self.groups, parts, kept, strict=True):
            cold, first = group.cache.cold, int(group.space.start[0])
            for start, stop, weight, state in rows:
                cold.weight[first + start : first + stop] = weight
                cold.state[first + start : first + stop] = state
            if history is not None and group.kept is not None:
                group.kept.take(history)
                cold.history.share()
            group.cache.forget()
            group.steps = steps
            group.take_over()

    def __deepcopy__(self, memo: dict[int, Any]) -> TableSet:
        rebuild, args = self.__reduce__()
        copied: TableSet = rebuild(*args)
        memo[id(self)] = copied
        return copied


def make_fault_report(config: TableSetConfig) -> Any:
    """The report for a GPU's ids and offsets out of range, and steps that it refuses; None on the CPU, which raises at
    once."""
    if config.device.type != "cuda":
        return None
    from tieredemb.lookup.device_bags import FaultReport

    tables = config.tables
    of = [(feature_name(feature, tables[feature.table]), tables[feature.table]) for feature in features_of(tables)]
    rows = [table.num_embeddings for _, table in of]
    return FaultReport([name for name, _ in of], rows, [table.name for table in tables])


def _rebuild(
    config: TableSetConfig,
    metadata: Sequence[tuple[int, str]],
    parts: Sequence[Sequence[Rows]],
    kept: Sequence[Kept],
) -> TableSet:
    tables = TableSet(config)
    for group, (batch, policy) in zip(tables.groups, metadata, strict=True):
        group.cache.cold.metadata.batch, group.cache.cold.metadata.policy = batch, policy
    tables.put_copies(parts, kept)
    return tables


def _copied_rows(group: Group) -> Iterator[Rows]:
    first, cold = int(group.space.start[0]), group.cache.cold
    for start, stop in _chunks(group.space.rows):
        rows = slice(first + start, first + stop)
        if cold.state[rows, -1].any():
            yield Rows(start, stop, cold.weight[rows].copy(), cold.state[rows].copy())


def _chunks(rows: int, at_once: int = COPY_ROWS) -> Iterator[tuple[int, int]]:
    return ((start, min(start + at_once, rows)) for start in range(0, rows, at_once))


def _row_bytes(values: torch.Tensor) -> int:
    return values.shape[1] * values.element_size()


def encoded(values: torch.Tensor, row: RowFormat) -> Array:
    """CPU values (K, D) as rows in their carrier."""
    if row.encoding.is_direct:
        return carrier_view(values.to(row.encoding.dtype).contiguous())
    from tieredemb.kernels.row_encoding_cpu import rows_encode

    rows = np.empty((len(values), row.columns), row.carrier)
    rows_encode(values.to(torch.float32).contiguous().numpy(), rows)
    return rows


@contextlib.contextmanager
def carried(out: torch.Tensor, row: RowFormat) -> Iterator[Array]:
    """Inside, an array for rows in their carrier; at the end `out`, a CPU tensor (K, D), gets their values."""
    if row.encoding.is_direct:
        yield carrier_view(out)
        return
    from tieredemb.kernels.row_encoding_cpu import rows_decode

    rows = np.empty((len(out), row.columns), row.carrier)
    yield rows
    values = np.empty(out.shape, np.float32)
    rows_decode(rows, values)
    out.copy_(torch.from_numpy(values))


def check_memory(table: str, needed: int, device: torch.device = _CPU) -> None:
    """Raises `StorageFullError` or `DeviceMemoryError` if a table as one tensor of `needed` bytes does not fit."""
    on_gpu = device.type == "cuda"
    available = free_bytes(device) if on_gpu else available_memory_bytes()
    if needed > available:
        raise (DeviceMemoryError if on_gpu else StorageFullError)(
            f"table {table!r} as one tensor needs {needed / 2**30:.1f} GiB, {available / 2**30:.1f} GiB of "
            f"{'the GPU' if on_gpu else 'memory'} are available; use tieredemb.save_checkpoint(model, directory) to "
            f"save it, or tieredemb.scores(module, x) to multiply with it, which take tables larger than memory"
        )


def free_bytes(device: torch.device) -> int:
    """Bytes of a GPU that torch can allocate: free ones, and unused ones in its pools."""
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def available_memory_bytes() -> int:
    """Memory that can be allocated without swapping."""
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
