"""One width of a module's tables: their key space, their cache, and the meaning of their rows."""

from __future__ import annotations

import abc
import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tieredemb.cache.base import NO_USE, Cache
from tieredemb.cache.changes import Part
from tieredemb.cache.host.hot_rows import cache_bytes_per_slot
from tieredemb.cache.stats import CacheStats
from tieredemb.config import Array, Capacity, OptimizerConfig, TableConfig, slots_for
from tieredemb.errors import ConfigError, StorageError, StorageFormatError, StorageFullError
from tieredemb.kernels.kept_numbers import KeptNumbers
from tieredemb.kernels.streams import on_device
from tieredemb.lookup.bags import KeySpace
from tieredemb.lookup.histories import Histories
from tieredemb.lookup.history import CopiedRows, History
from tieredemb.lookup.optimizer import new_histories, state_start, state_width
from tieredemb.lookup.rounding import draws_of
from tieredemb.storage.base import ColdRows, HotArrays, RowLayout, RowOpener
from tieredemb.storage.initial import InitialRows, InitialTable
from tieredemb.storage.unified import UnifiedMemory
from tieredemb.tables.config import TableSetConfig, shown_tables

if TYPE_CHECKING:
    from tieredemb.cache.device.cache import DeviceCache
    from tieredemb.cache.device.plan import OverflowRows
    from tieredemb.cache.host.cache import HostCache
    from tieredemb.tables.device_rows import DeviceRows

FETCHED_ROWS = 1 << 16  # planned as one when a cache is filled


class Group(abc.ABC):
    """The tables of one width: their key space and cache. `is_dense`: whether their optimizer changes every row in
    every step · `kept`: a dense optimizer's history, as the host knows it; None for others, and for several tables with
    separate steps · `client`: its number, if several clients share a cache · `clients`: the numbers of several clients
    that plan as one."""

    cache: Cache

    def __init__(
        self,
        config: TableSetConfig,
        space: KeySpace,
        capacity: Capacity,
        name: str,
        rows: RowOpener | ColdRows,
    ) -> None:
        """`rows`: opens them, or the rows of a group that this one replaces."""
        self.config = config
        self.space = space
        self.capacity = capacity
        self.name = name
        self.own = slice(len(space))  # the numbers of its tables in the cold storage
        self.stepping: Sequence[int] = range(len(space))  # the tables that take its steps
        self.client: int | None = None
        self.clients: tuple[int, ...] = ()
        tables = [config.tables[t] for t in space.tables]
        layout = row_layout(config, space.rows, space.width)
        self.slots = slots_for(
            capacity,
            rows=layout.rows,
            slot_bytes=slot_bytes(layout, config.device),
            of=shown_tables([table.name for table in tables], config.label),
        )
        self.resident = resident_tables(tables, self.slots, config.device)
        self.identity = identity_of(config, tables)
        opened = not isinstance(rows, ColdRows)
        cold = rows if isinstance(rows, ColdRows) else self._opened(rows, layout)
        try:
            _check_steps(cold, len(tables))
            if cold.history is None:
                cold.history = new_histories(config.optimizer, len(tables) if config.separate else 1)
                if cold.history is not None and (cold.saved_history is not None or any(cold.metadata.steps)):
                    cold.history.take(parsed_histories(cold))
                    counted = [each.steps for each in cold.history.of]  # of a recovered file
                    cold.metadata.steps = counted if config.separate else counted * len(tables)
            self.is_dense = cold.history is not None
            parts = [config.part(int(t)) for t in space.tables]
            self.draws = draws_of(space, parts, config.seed) if config.rounding == "stochastic" else None
            self.kept: History | None = None
            if cold.history is not None and not config.separate:
                self.kept = cold.history.of[0]
            self._make_cache(cold)
            self._connect()
            self.cache.suspects.all_parts = self._parts()
            if not opened:
                self.adopt()
        except BaseException:
            if opened:
                cold.close()  # unchanged, as its content may not have been read
            raise

    def _opened(self, rows: RowOpener, layout: RowLayout) -> ColdRows:
        if isinstance(rows, UnifiedMemory) and len(self.resident) == len(self.space):
            rows = replace(rows, pretouch=False)  # resident rows are written only by a flush
        return rows.open(layout, name=self.name, identity=self.identity)

    @abc.abstractmethod
    def _make_cache(self, cold: ColdRows) -> None:
        """Makes the cache over `cold`."""

    def _connect(self) -> None:  # noqa: B027 - a host needs nothing
        """Builds what lookups and updates need beside the cache."""

    def of_table(self, position: int, config: TableSetConfig) -> Group:
        """The group of a single one of its tables, which take separate steps, over the same rows and cache. `config`:
        of that table."""
        return self._beside(
            config=config,
            space=KeySpace(config.tables, [0], [0], int(self.space.start[position])),
            own=slice(position, position + 1),
            stepping=(position,),
            client=position,
            clients=(),
            resident=[0] if position in self.resident else [],
            kept=None if self.cache.cold.history is None else self.cache.cold.history.of[position],
        )

    def of_tables(self, positions: Sequence[int], config: TableSetConfig) -> Group:
        """The group of some of its tables, which take separate steps, to be looked up as one. `config`: of those
        tables."""
        return self._beside(
            config=config,
            space=self.space.of_tables(positions),
            own=self.own,
            stepping=tuple(positions),
            client=None,
            clients=tuple(positions),
            resident=[number for number, position in enumerate(positions) if position in self.resident],
            kept=None,
        )

    def _beside(self, **own: Any) -> Group:
        beside = object.__new__(type(self))
        shared = ("capacity", "name", "slots", "identity", "cache", "is_dense", "draws")
        beside.__dict__.update({name: getattr(self, name) for name in shared} | own)
        beside._join(self)
        return beside

    def _join(self, whole: Group) -> None:  # noqa: B027 - a host needs nothing
        """Builds what lookups and updates of one table need beside the cache of the `whole`."""

    @property
    def is_read_in_place(self) -> bool:
        """Whether a lookup without gradient reads rows in place, and needs none in a slot."""
        return False

    def stats(self) -> CacheStats:
        """Totals of its plans since the cache was made. Synchronises with a GPU."""
        return self.cache.stats(self.client)

    @property
    def counted(self) -> CacheStats:
        """The same, even of a closed cache."""
        return self.cache.counted(self.client)

    def initial(self, optimizer: OptimizerConfig | None) -> InitialRows:
        """Generates the initial rows of its tables, with the initial state of `optimizer`."""
        space, config = self.space, self.config
        tables = [(config.tables[t], config.part(int(t))) for t in space.tables]
        return InitialRows(
            [
                InitialTable(
                    start=int(start),
                    number=part.number,
                    init=table.init,
                    padding_idx=table.padding_idx,
                    first_id=part.first,
                    id_step=part.step,
                )
                for start, (table, part) in zip(space.start[:-1], tables, strict=True)
            ],
            seed=self.config.seed,
            state_value=state_start(optimizer),
            has_last_step=optimizer is not None and optimizer.is_dense,
            device=self.config.device,
        )

    def _client_keys(self) -> list[int]:
        """The first key of each table, and the key after the last, if tables are looked up separately."""
        return [int(key) for key in self.space.start] if self.config.separate else []

    def _parts(self) -> frozenset[Part]:
        """The parts of rows in intent logs: for each table the weights, and the state if there is any."""
        kinds = ("weight", "state") if self.cache.cold.layout.state_width else ("weight",)
        return frozenset((int(table), kind) for table in self.space.tables for kind in kinds)

    @property
    def resident_ranges(self) -> list[tuple[int, int]]:
        """First key and number of rows of each resident table."""
        start = self.space.start
        return [(int(start[j]), int(start[j + 1] - start[j])) for j in self.resident]

    @property
    def slot_bytes(self) -> int:
        """Bytes that one slot takes on its device, map included."""
        return slot_bytes(row_layout(self.config, 1, self.space.width), self.config.device)

    @property
    def steps(self) -> list[int]:
        """Optimizer steps that each table has taken. Synchronises with a GPU."""
        return self.cache.cold.metadata.steps[self.own]

    @steps.setter
    def steps(self, steps: list[int]) -> None:
        self.cache.cold.metadata.steps[self.own] = steps

    @property
    def history(self) -> History | None:
        """The present history of a dense optimizer; None for others. Synchronises with a GPU."""
        return self.kept

    @property
    def history_bytes(self) -> int:
        """Bytes of a dense optimizer's history, for all tables that share the cache."""
        histories: Histories | None = self.cache.cold.history
        return 0 if histories is None else histories.size_bytes()

    @property
    def steps_replayed(self) -> int:
        """Steps of a dense optimizer that rows have replayed one by one. Synchronises with a GPU."""
        return 0 if self.kept is None else self.kept.replayed

    def check_steps(self) -> None:  # noqa: B027 - a host takes every step
        """Raises `BackwardError` if a GPU has refused steps. Synchronises with it."""

    def restart_counts(self) -> None:
        """Resets the counter of replayed steps, for the next owner of the cold rows."""
        if self.kept is not None:
            self.kept.replayed = 0

    def restart_history(self) -> None:
        """Restarts the history when every row of a dense optimizer is at the current step. Synchronises with a GPU."""
        if self.kept is not None:
            self.kept.restart(self.steps[0])

    def rounding(self, keys: Array, *, ahead: int = 0, steps: Sequence[int] | None = None) -> Any:
        """How a CPU's kernels round weights of the rows `keys`, int64 (C,), `ahead` steps after `steps`, by default
        after those that tables have taken (rounding_cpu.py)."""
        from tieredemb.kernels.rounding_cpu import NEAREST

        if self.draws is None:
            return NEAREST
        taken = self.cache.cold.metadata.steps if steps is None else steps
        return self.draws.on_host(keys, np.array(taken, np.int64) + ahead)

    def export_rows(self, start: int, stop: int, weight: Array, state: Array) -> None:
        """As `Cache.export_rows`, with rows of a dense optimizer at the current step."""
        history = self.history
        if history is not None:
            self._keep_replayed(start, stop, history)
        self._export(self.cache.export_rows, start, stop, weight, state)

    def _keep_replayed(self, start: int, stop: int, history: History) -> None:  # noqa: B027
        """Called before rows of a dense optimizer are read: rows that would replay many steps one by one catch up in
        place, so that no later read replays those steps again."""

    def kept_until(self, history: History) -> int | None:
        """The step that rows catch up to, in place, when they are read; None if they stay unchanged: rows that are not
        float32 are rounded each time that they catch up."""
        until = history.replayed_until
        return until if until > history.base and self.cache.cold.layout.format.is_float32 else None

    def copy_rows(self, start: int, stop: int, weight: Array, state: Array) -> None:
        """The same within a call of the cache, which holds its locks."""
        self._export(self.cache.copy_rows, start, stop, weight, state)

    def _export(
        self, export: Callable[[int, int, Array, Array], None], start: int, stop: int, weight: Array, state: Array
    ) -> None:
        history = self.history
        if history is None:
            export(start, stop, weight, state)
            return
        with self.cache.whole():
            if not state.shape[1]:
                export(start, start, weight[:0], state[:0])  # for its checks
                steps = np.maximum(self.cache.copy_weights(start, stop, weight), history.base)
                if (steps >= history.steps).all():  # as after a step over all rows
                    return
            rows = self._rows_for(start, stop)
            export(start, stop, rows.weight, rows.state)
        self._catch_up(rows, history, np.arange(start, stop))
        weight[:], state[:] = rows.weight[:, : weight.shape[1]], rows.state[:, : state.shape[1]]

    def import_weights(self, start: int, weight: Array) -> None:
        """Overwrites the weights (carrier (K, D)) of the rows from `start` on, as `Cache.import_rows` does. Rows of a
        dense optimizer are then at the current step, except those that have these weights already: they stay unchanged,
        so that training continues with the same bits after a save and load."""
        state, history = None, self.history
        if history is not None and history.steps:  # before the first step no row lags behind
            raw = self._rows_for(start, start + len(weight))
            self.cache.copy_rows(start, start + len(weight), raw.weight, raw.state)
            now = CopiedRows(raw.weight.copy(), raw.state.copy(), raw.dirty)
            self._catch_up(now, history, np.arange(start, start + len(weight)))
            same = (now.weight.view(np.uint8) == weight.view(np.uint8)).all(1)
            weight, state = weight.copy(), now.state
            weight[same], state[same] = raw.weight[same], raw.state[same]
        self.cache.import_rows(start, weight, state)

    def import_states(self, start: int, state: Array, step: int) -> None:
        """Overwrites the optimizer state, uint32 (K, ·) without the step of a dense one, of the rows from `start` on,
        which are then at the current step, with the number `step`."""
        weight, history = None, self.history
        if history is not None:
            now = self._rows_for(start, start + len(state))
            self.cache.copy_rows(start, start + len(state), now.weight, now.state)
            self._catch_up(now, history, np.arange(start, start + len(state)))
            weight = now.weight
            state = np.concatenate([state, np.full((len(state), 1), step, np.uint32)], axis=1)
        self.cache.import_rows(start, weight, state)

    def export_lagging(self, start: int, stop: int, history: History) -> tuple[Array, Array, Array]:
        """The rows among start … stop − 1 that would change by catching up: their positions, int64 (K,), and weights
        and states unchanged."""
        raw = self._rows_for(start, stop)
        self.cache.export_rows(start, stop, raw.weight, raw.state)
        now = CopiedRows(raw.weight.copy(), raw.state.copy(), raw.dirty)
        self._catch_up(now, history, np.arange(start, stop))
        differ = (now.weight.view(np.uint8) != raw.weight.view(np.uint8)).any(1)
        differ |= (now.state[:, :-1] != raw.state[:, :-1]).any(1)
        rows = np.flatnonzero(differ)
        return rows, raw.weight[rows], raw.state[rows]

    def import_lagging(
        self, start: int, count: int, rows: Array, weight: Array, state: Array, history: History
    ) -> None:
        """Restores rows (positions after `start`, int64 (K,)) at an earlier step, if catching up makes them what they
        are now: `weight` carrier (K, D), `state` uint32 (K, S)."""
        held = self._rows_for(start, start + count)
        self.cache.copy_rows(start, start + count, held.weight, held.state)
        now = CopiedRows(weight.copy(), state.copy(), held.dirty)
        self._catch_up(now, history, start + rows)
        same = (now.weight.view(np.uint8) == held.weight[rows].view(np.uint8)).all(1)
        held.weight[rows[same]], held.state[rows[same]] = weight[same], state[same]
        self.cache.import_rows(start, held.weight, held.state)

    def take_history(self, history: History) -> None:
        """Takes over the history of a saved optimizer of the same kind. Synchronises with a GPU."""
        assert self.kept is not None
        self.kept.take(history)
        self.cache.cold.history.share()
        self._adopt_history()

    def _catch_up(self, rows: CopiedRows, history: History, keys: Array) -> None:
        """Brings copies of the rows of `keys` to the current step."""
        from tieredemb.lookup.optimizer_cpu import catch_up

        catch_up(rows, np.arange(len(rows.weight), dtype=np.int32), history, self.rounding(keys)).run()

    def _rows_for(self, start: int, stop: int) -> CopiedRows:
        layout, rows = self.cache.cold.layout, stop - start
        weight = np.empty((rows, layout.columns), layout.carrier)
        return CopiedRows(weight, np.empty((rows, layout.state_width), np.uint32), np.empty(rows, np.uint8))

    @abc.abstractmethod
    def fetch(self, keys: Any) -> None:
        """Fills unused slots with the rows of `keys`, int64 (K,) on the group's device, distinct, as many as fit. This
        does not count as a use of the rows."""

    @property
    def _cached_slots(self) -> int:
        """Slots that are not of resident tables."""
        return self.slots - sum(rows for _, rows in self.resident_ranges)

    def adopt(self) -> None:
        """Takes over cold rows and metadata that were replaced as a whole."""
        self.cache.forget()
        metadata = self.cache.cold.metadata
        metadata.steps = metadata.steps or [0] * len(self.space)
        self.take_over()

    def take_over(self) -> None:
        """Takes over steps and history that were replaced with the cold rows. Synchronises with a GPU."""
        metadata = self.cache.cold.metadata
        self.steps = metadata.steps[self.own]
        self._adopt_history()

    def _adopt_history(self) -> None:  # noqa: B027 - on a host nothing needs to be uploaded
        """Uses a history that was replaced with the cold rows."""


def parsed_histories(cold: ColdRows) -> Histories:
    """The histories that a storage was closed with. Raises `StorageFormatError`."""
    steps = None if cold.was_recovered else cold.metadata.steps  # recovered parts may be of different flushes
    try:
        if cold.saved_history is None:
            raise ValueError("it is missing")
        parsed: Histories = cold.history.parsed(cold.saved_history, steps)
    except ValueError as error:
        raise StorageFormatError(
            f"the history of steps in the {cold.kind} tier is not one that this library writes: {error}; restore the "
            f"file, or open it with File(path, fresh=True) and load a checkpoint"
        ) from error
    except OSError as error:
        raise StorageError(f"reading the history of steps in the {cold.kind} tier failed: {error}") from error
    return parsed


def _check_steps(cold: ColdRows, tables: int) -> None:
    """Gives new rows a number of steps for each table. Raises `StorageFormatError` if the rows have others."""
    cold.metadata.steps = cold.metadata.steps or [0] * tables
    if len(cold.metadata.steps) != tables:
        raise StorageFormatError(
            f"the {cold.kind} tier counts the steps of {len(cold.metadata.steps)} tables and this model has {tables}; "
            f"restore the file, or open it with File(path, fresh=True) and load a checkpoint"
        )


class HostGroup(Group):
    """A group on the CPU."""

    cache: HostCache

    def _make_cache(self, cold: ColdRows) -> None:
        from tieredemb.cache.host.cache import HostCache

        self.cache = HostCache(
            cold, slots=self.slots, policy=self.config.policy, initial=self.initial(self.config.optimizer),
            resident=self.resident_ranges,
            clients=self._client_keys(),
        )  # fmt: skip

    @property
    def is_read_in_place(self) -> bool:
        return self.cache.cold.as_fast_as_slots and not self.is_dense

    @functools.cached_property
    def features(self) -> Array:
        """Its features as lookups in place take them; see `KeySpace.packed`."""
        return self.space.packed(pooled=self.config.pooled)

    def _keep_replayed(self, start: int, stop: int, history: History) -> None:
        until = self.kept_until(history)
        if until is None:
            return

        def is_behind(steps: Array) -> Array:
            behind: Array = np.maximum(steps, history.base) < until
            return behind

        self.cache.change_range(
            start, stop, lambda rows, places: self.catch_up_to(until, rows, places, history), is_behind
        )

    def fetch(self, keys: Array) -> None:
        for start in range(0, min(len(keys), self._cached_slots), FETCHED_ROWS):
            some = keys[start : min(start + FETCHED_ROWS, self._cached_slots)]
            self.cache.plan(some, NO_USE).release()

    @property
    def shared_history(self) -> History | None:
        """For tables that plan as one: the history of a dense optimizer, if all have the same."""
        histories: Histories | None = self.cache.cold.history
        return None if histories is None else histories.shared_by(self.clients)

    @property
    def histories(self) -> Sequence[History]:
        """The histories of a dense optimizer's tables: a single one if all tables have the same, else one for each
        table that is planned together with others."""
        shared = self.shared_history if self.clients else self.kept
        return [self.cache.cold.history.of[table] for table in self.clients] if shared is None else [shared]

    def count_replayed(self, counted: Sequence[int]) -> None:
        """For tables that plan as one: counts steps that their rows have replayed one by one."""
        for table, more in zip(self.clients, counted, strict=True):
            self.cache.cold.history.of[table].replayed += more

    def catch_up_to(
        self, until: int, rows: HotArrays, places: Array, history: History, starts: Array | None = None
    ) -> None:
        """Brings rows at `places`, int32 (U,), that are behind to the step `until`. `starts`: where the rows of each
        table begin, for several that plan as one."""
        from tieredemb.lookup.optimizer_cpu import catch_up

        taken = catch_up(rows, places, history, until=until, starts=starts)
        taken.run()
        if starts is None:
            history.replayed += taken.replayed
        else:
            self.count_replayed(taken.replayed_by(starts))

    def _connect(self) -> None:
        """Has the kernels of updates compiled while forwards, which are needed first, run."""
        if self.config.optimizer is None:
            return
        from tieredemb.kernels.compile_beside import compile_beside
        from tieredemb.lookup.optimizer_cpu import put_back, update_calls

        hot, histories = self.cache.hot, self.cache.cold.history
        history = None if histories is None else histories.of[0]
        rounding = self.rounding(hot.key, ahead=1)
        calls = update_calls(hot, self.space, self.config.optimizer, history, rounding)
        if history is not None and self.config.separate:
            calls.append(put_back(hot, np.empty(0, np.int32), self._rows_for(0, 0)).call)
        compile_beside(calls)


class DeviceGroup(Group):
    """A group on a GPU: its key space, its kernels and the steps taken are there."""

    cache: DeviceCache
    _steps_before: torch.Tensor | None = None  # see `reading_before`

    def __init__(
        self, config: TableSetConfig, space: KeySpace, capacity: Capacity, name: str, rows: RowOpener | ColdRows
    ) -> None:
        with torch.cuda.device(config.device):
            super().__init__(config, space, capacity, name, rows)

    def _make_cache(self, cold: ColdRows) -> None:
        from tieredemb.cache.device.cache import DeviceCache

        config = self.config
        self.cache = DeviceCache(
            cold, slots=self.slots, policy=config.policy, initial=self.initial(config.optimizer), device=config.device,
            resident=self.resident_ranges, clients=self._client_keys(),
        )  # fmt: skip

    def _connect(self) -> None:
        from tieredemb.lookup.device_history import new_pasts

        cold, ranges = self.cache.cold, self.resident_ranges
        self.first_slots = [-1] * len(self.space)
        slot = self.slots - sum(rows for _, rows in ranges)
        for j, (_, rows) in zip(self.resident, ranges, strict=True):
            self.first_slots[j] = slot
            slot += rows
        self.device_steps = torch.tensor(cold.metadata.steps, dtype=torch.int64, device=self.config.device)
        self._all_steps = steps = self.device_steps  # not the group, which would keep the cache alive
        self.cache.on_flush.append(lambda: cold.metadata.__dict__.update(steps=steps.tolist()))
        self._numbers = KeptNumbers(self.config.device, torch.int32)
        self.pasts: torch.Tensor | None = None
        if self.config.separate and cold.history is not None:
            self.pasts = new_pasts(len(self.space), self.config.device)
        self._make_lookup()

    def _join(self, whole: Group) -> None:
        assert isinstance(whole, DeviceGroup)
        self._whole = whole
        self.device_steps, self._all_steps = whole.device_steps[self.own], whole._all_steps
        past = None
        if self.client is not None and whole.pasts is not None:
            past = whole.pasts[self.client]
        tables = self.clients if self.client is None else (self.client,)
        self.first_slots = [whole.first_slots[table] for table in tables]
        with torch.cuda.device(self.config.device):
            self._make_lookup(past)
        if self.clients:
            self.past = whole.pasts

    def _make_lookup(self, past: torch.Tensor | None = None) -> None:
        from tieredemb.lookup.device_bags import DeviceKeySpace
        from tieredemb.lookup.device_history import DeviceHistory
        from tieredemb.lookup.device_lookup import DeviceLookup
        from tieredemb.lookup.rounding import DeviceDraws

        config, row = self.config, self.cache.cold.layout.format
        self.device_space = DeviceKeySpace(self.space, self.first_slots, config.device, separate=config.separate)
        draws = None
        if self.draws is not None:
            draws = DeviceDraws(self.draws, self.space, self.first_slots, self._all_steps)
        self.lookup = DeviceLookup(
            self.device_space, row, config.optimizer, config.output_dtype, separate=config.separate, draws=draws
        )
        self.device_history = None if self.kept is None else DeviceHistory(self.kept, self.device_steps, past)
        # addresses of a dense optimizer's history; for several tables that plan as one, of each table's
        self.past = None if self.device_history is None else self.device_history.past
        if self.device_history is not None and self.kept is not None:
            self.cache.on_flush.append(functools.partial(self.device_history.download, self.kept))

    @property
    def tables(self) -> torch.Tensor | None:
        """The numbers of the tables that plan as one, on the device, int32 (K,); None for all, or for one."""
        return self._whole.numbered(self.clients) if self.clients else None

    @property
    def device_client(self) -> int | torch.Tensor | None:
        """The client, or the numbers of several that plan as one."""
        return self.tables if self.clients else self.client

    @property
    def steps(self) -> list[int]:
        """Optimizer steps that each table has taken. Synchronises."""
        steps: list[int] = self.device_steps.tolist()
        return steps

    @steps.setter
    def steps(self, steps: list[int]) -> None:
        self.cache.cold.metadata.steps[self.own] = steps
        self.device_steps.copy_(torch.tensor(steps, dtype=torch.int64, device="cpu"))

    @property
    def history(self) -> History | None:
        if self.kept is not None and self.device_history is not None:
            self.device_history.download(self.kept)
        return self.kept

    @property
    def steps_replayed(self) -> int:
        return 0 if self.device_history is None else self.device_history.replayed()

    def check_steps(self) -> None:
        if self.device_history is not None:
            self.device_history.check()

    def fetch(self, keys: torch.Tensor) -> None:
        with on_device(self.config.device):
            for some in torch.split(keys[: self._cached_slots], FETCHED_ROWS):
                homes = torch.full_like(some, -1, dtype=torch.int32)
                ticket = self.cache.plan(some, homes, NO_USE, client=self.device_client)
                ticket.kept = (some, homes)
                ticket.release()

    def _keep_replayed(self, start: int, stop: int, history: History) -> None:
        until = self.kept_until(history)
        if until is None:
            return
        position = int(np.searchsorted(self.space.start, start, "right")) - 1
        first = int(self.space.start[position])
        if self.first_slots[position] >= 0 or self.cache.ranges is not None:
            found = self.range(position, start - first, stop - first)
        else:  # a plan moves rows, so only those that need it are planned
            with self.cache.entered(changes=False):
                stands = np.maximum(self.cache.last_words(start, stop), history.base)
            behind = np.flatnonzero(stands < until)
            if len(behind) == 0:
                return
            found = self.rows(position, torch.from_numpy(behind + start - first).to(self.config.device))
        # rows without space in storage stay unchanged
        with contextlib.suppress(StorageFullError), found as rows:
            rows.keep_replayed()

    @contextlib.contextmanager
    def rows(self, position: int, ids: torch.Tensor) -> Iterator[DeviceRows]:
        """Plans rows, `ids` int64 (K,) on the device, distinct, of its table at a `position`, and holds them and the
        cache, as `DeviceCache.using` does. Waits for a GPU over staged tiers alone."""
        with on_device(self.config.device):
            first = self.first_slots[position]
            if first >= 0:
                keys, homes = torch.full_like(ids, -1), (ids + first).to(torch.int32)
            else:
                keys, homes = ids + int(self.space.start[position]), torch.full_like(ids, -1, dtype=torch.int32)
            ticket = self.cache.plan(keys, homes, NO_USE, client=self.device_client)
            ticket.kept = (keys, homes)
            try:
                with self.cache.using(ticket):
                    yield self._found(position, homes, self.cache.overflow([ticket]))
            finally:
                ticket.release()

    @contextlib.contextmanager
    def range(self, position: int, start: int, stop: int) -> Iterator[DeviceRows]:
        """Finds the rows `start` … `stop` − 1 of its table at a `position` in place, and holds the cache; over staged
        tiers it plans them, and waits for the GPU."""
        from tieredemb.cache.device.plan import NO_OVERFLOW

        with on_device(self.config.device):
            first, device = self.first_slots[position], self.config.device
            if first >= 0:
                with self.cache.entered(changes=False):
                    homes = torch.arange(first + start, first + stop, dtype=torch.int32, device=device)
                    yield self._found(position, homes, NO_OVERFLOW)
            elif (ranges := self.cache.ranges) is not None:
                key = int(self.space.start[position]) + start
                with self.cache.in_place(ranges, key, stop - start) as (homes, overflow):
                    yield self._found(position, homes, overflow)
            else:
                with self.rows(position, torch.arange(start, stop, device=device)) as found:
                    yield found

    def _found(self, position: int, homes: torch.Tensor, overflow: OverflowRows) -> DeviceRows:
        from tieredemb.tables.device_rows import DeviceRows

        feature, count = int(np.flatnonzero(self.space.table == position)[0]), len(homes)
        bag = torch.arange(feature * count, (feature + 1) * count, dtype=torch.int32, device=homes.device)
        steps = self.device_steps if self._steps_before is None else self._steps_before
        return DeviceRows(self.lookup, feature, bag, homes, self.cache.hot, overflow, self.past, steps, self.tables)

    @contextlib.contextmanager
    def reading_before(self) -> Iterator[None]:
        """Inside, rows are read at the step before: the step that begins inside is not yet in the history, and has not
        updated all rows."""
        self._steps_before = self.device_steps.clone()
        try:
            yield
        finally:
            self._steps_before = None

    def note_step(self) -> None:
        """Called before a step of a dense optimizer is launched; see `DeviceHistory.note_step`."""
        if self.device_history is not None:
            self.device_history.note_step()

    def numbered(self, tables: Sequence[int]) -> torch.Tensor:
        """Numbers of its tables on the device, int32 (K,), ascending; see `KeptNumbers`."""
        return self._numbers.get(tuple(sorted(tables)))

    @property
    def history_bytes(self) -> int:
        return super().history_bytes + self.device_history_bytes

    @property
    def device_history_bytes(self) -> int:
        """The same for its own tables on the device."""
        return 0 if self.device_history is None else self.device_history.size_bytes()

    def restart_history(self) -> None:
        super().restart_history()
        self._adopt_history()

    def _adopt_history(self) -> None:
        if self.device_history is not None and self.kept is not None:
            self.device_history.adopt(self.kept)


def make_group(
    config: TableSetConfig, space: KeySpace, capacity: Capacity, name: str, rows: RowOpener | ColdRows
) -> Group:
    """The group of a key space on the device of its tables. `rows`: opens them, or the rows of another group."""
    return (DeviceGroup if config.device.type == "cuda" else HostGroup)(config, space, capacity, name, rows)


def move_group(group: Group, config: TableSetConfig, capacity: Capacity) -> Group:
    """A group over the same cold rows on the device of `config`. The old one was flushed, and is to be abandoned once
    all groups have moved."""
    return make_group(config, group.space, capacity, group.name, group.cache.cold)


def slot_bytes(layout: RowLayout, device: torch.device) -> int:
    """Bytes of one slot on a device, including its map: a capacity in bytes is divided by this."""
    if device.type == "cuda":
        from tieredemb.cache.device.hot_rows import device_slot_bytes

        return device_slot_bytes(layout)
    return cache_bytes_per_slot(layout)


def resident_tables(tables: Sequence[TableConfig], slots: int, device: torch.device) -> list[int]:
    """Which tables of one cache are resident, by position. Raises `ConfigError` if they do not fit.

    Those requested; and on a GPU, where a resident table costs no lookup in the map, with `placement="auto"` all where
    the capacity holds them all, else small ones: at most a hundredth of the slots each, a tenth in all.
    """
    chosen = {j for j, table in enumerate(tables) if table.placement == "resident"}
    rows = sum(tables[j].num_embeddings for j in chosen)
    if rows > slots - (len(chosen) < len(tables)):
        names = ", ".join(repr(tables[j].name) for j in sorted(chosen))
        raise ConfigError(
            f"the resident tables {names} have {rows} rows, which leave no room for others in a capacity of {slots} "
            f"slots; raise the capacity, or give them placement='auto' or 'cached'"
        )
    if device.type == "cuda":
        auto = [j for j, table in enumerate(tables) if table.placement == "auto"]
        if sum(tables[j].num_embeddings for j in auto) + rows <= slots - (len(auto) + len(chosen) < len(tables)):
            chosen.update(auto)
        else:
            small = 0
            for j in sorted(auto, key=lambda j: tables[j].num_embeddings):
                small += tables[j].num_embeddings
                if tables[j].num_embeddings <= slots // 100 and small <= slots // 10 and small + rows < slots:
                    chosen.add(j)
    return sorted(chosen)


def identity_of(config: TableSetConfig, tables: Sequence[TableConfig]) -> dict[str, Any]:
    """The meaning of a key space's rows, as JSON: a file opens only with the same meaning."""
    optimizer = None if config.optimizer is None else type(config.optimizer).__name__
    described = [asdict(table) | {"init": repr(table.init), "mode": None} for table in tables]
    for table in described:
        del table["placement"], table["feature_names"]  # not part of the rows' meaning
    identity: dict[str, Any] = {"tables": described, "seed": config.seed, "optimizer": optimizer}
    identity["state_start"] = state_start(config.optimizer)
    if config.parts:
        identity["parts"] = [asdict(config.part(t)) for t, table in enumerate(config.tables) if table in tables]
    if config.optimizer is not None and config.optimizer.is_dense:
        identity["rows"] = "each with the step that it was last brought to"
    result: dict[str, Any] = json.loads(json.dumps(identity))
    return result


def row_layout(config: TableSetConfig, rows: int, width: int) -> RowLayout:
    return RowLayout(rows=rows, width=width, dtype=config.dtype, state_width=state_width(config.optimizer, width))


def device_groups(groups: Sequence[Group]) -> list[DeviceGroup]:
    """The groups of tables on a GPU, with their type."""
    return [group for group in groups if isinstance(group, DeviceGroup)]
