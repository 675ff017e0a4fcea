"""One width of a module's tables: their key space, their cache, and what their rows mean."""

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
    """The tables of one width: their key space and cache. `is_dense`: whether their optimizer moves every row in every
    step · `kept`: what a dense optimizer keeps of its steps, as the
    host knows it; None of others, and of tables that take steps of their own together · `client`: its number among
    several who plan by one cache · `clients`: those of several who plan as one."""

    cache: Cache

    def __init__(
        self,
        config: TableSetConfig,
        space: KeySpace,
        capacity: Capacity,
        name: str,
        rows: RowOpener | ColdRows,
    ) -> None:
        """`rows`: what opens them, or those of a group whose place this one takes."""
        self.config = config
        self.space = space
        self.capacity = capacity
        self.name = name
        self.own = slice(len(space))  # its tables among those of the cold storage
        self.stepping: Sequence[int] = range(len(space))  # those that take its steps
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
                    counted = [each.steps for each in cold.history.of]  # those of a file that was recovered
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
                cold.close()  # as it was: no row has changed, and what it holds may not have been read
            raise

    def _opened(self, rows: RowOpener, layout: RowLayout) -> ColdRows:
        if isinstance(rows, UnifiedMemory) and len(self.resident) == len(self.space):
            rows = replace(rows, pretouch=False)  # rows that are all resident reach it at a flush alone
        return rows.open(layout, name=self.name, identity=self.identity)

    @abc.abstractmethod
    def _make_cache(self, cold: ColdRows) -> None:
        """Makes the cache over `cold`."""

    def _connect(self) -> None:  # noqa: B027 - a host needs nothing
        """Makes what lookups and updates need beside the cache."""

    def of_table(self, position: int, config: TableSetConfig) -> Group:
        """The group of one of its tables alone, which take steps of their own: over the same rows and cache. `config`:
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
        """The group of some of its tables, which take steps of their own, to be looked up as one. `config`: of those
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
        """Makes what lookups and updates of one table need beside the cache of the `whole`."""

    @property
    def is_read_in_place(self) -> bool:
        """Whether a lookup without gradient reads rows where they lie, and needs none in a slot."""
        return False

    def stats(self) -> CacheStats:
        """Totals of its plans since the cache was made. Synchronises with a GPU."""
        return self.cache.stats(self.client)

    @property
    def counted(self) -> CacheStats:
        """The same, whatever has become of the cache."""
        return self.cache.counted(self.client)

    def initial(self, optimizer: OptimizerConfig | None) -> InitialRows:
        """What generates the rows of its tables, with the state that `optimizer` starts with."""
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
        """The first key of each table, and that after the last, where each is looked up by itself."""
        return [int(key) for key in self.space.start] if self.config.separate else []

    def _parts(self) -> frozenset[Part]:
        """What may be suspect of the rows, table by table: their weights, and their state where they have any."""
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
        """What a dense optimizer keeps of its steps, as it is now; None of others. Synchronises with a GPU."""
        return self.kept

    @property
    def history_bytes(self) -> int:
        """Bytes of what a dense optimizer keeps of its steps, those of all tables that share the cache."""
        histories: Histories | None = self.cache.cold.history
        return 0 if histories is None else histories.size_bytes()

    @property
    def steps_replayed(self) -> int:
        """Steps that rows of a dense optimizer were made to take one by one. Synchronises with a GPU."""
        return 0 if self.kept is None else self.kept.replayed

    def check_steps(self) -> None:  # noqa: B027 - a host takes every step
        """Raises `BackwardError` where a GPU has refused steps. Synchronises with it."""

    def restart_counts(self) -> None:
        """Replayed steps are counted from here on, by whoever has the cold rows next."""
        if self.kept is not None:
            self.kept.replayed = 0

    def restart_history(self) -> None:
        """Every row of a dense optimizer stands at the steps that were taken. Synchronises with a GPU."""
        if self.kept is not None:
            self.kept.restart(self.steps[0])

    def rounding(self, keys: Array, *, ahead: int = 0, steps: Sequence[int] | None = None) -> Any:
        """How a CPU's kernels round weights into rows of these `keys`, int64 (C,), when tables have taken so many
        steps more than `steps`, by default those that they have taken (rounding_cpu.py)."""
        from tieredemb.kernels.rounding_cpu import NEAREST

        if self.draws is None:
            return NEAREST
        taken = self.cache.cold.metadata.steps if steps is None else steps
        return self.draws.on_host(keys, np.array(taken, np.int64) + ahead)

    def export_rows(self, start: int, stop: int, weight: Array, state: Array) -> None:
        """As that of the cache, but rows of a dense optimizer as they are at the steps that were taken."""
        history = self.history
        if history is not None:
            self._keep_replayed(start, stop, history)
        self._export(self.cache.export_rows, start, stop, weight, state)

    def _keep_replayed(self, start: int, stop: int, history: History) -> None:  # noqa: B027
        """Before rows of a dense optimizer are read: those that would be made to take steps one by one stay at the last
        of these, so that nobody takes them again."""

    def kept_until(self, history: History) -> int | None:
        """The step that rows stay at when they are read; None where they stay as they are: rows that are not float32
        are rounded each time that they are brought forward."""
        until = history.replayed_until
        return until if until > history.base and self.cache.cold.layout.format.is_float32 else None

    def copy_rows(self, start: int, stop: int, weight: Array, state: Array) -> None:
        """The same for who is amid a call of the cache, and holds its locks."""
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
                export(start, start, weight[:0], state[:0])  # whose checks are those of the call
                steps = np.maximum(self.cache.copy_weights(start, stop, weight), history.base)
                if (steps >= history.steps).all():  # as after a step that has reached all of them
                    return
            rows = self._rows_for(start, stop)
            export(start, stop, rows.weight, rows.state)
        self._catch_up(rows, history, np.arange(start, stop))
        weight[:], state[:] = rows.weight[:, : weight.shape[1]], rows.state[:, : state.shape[1]]

    def import_weights(self, start: int, weight: Array) -> None:
        """Overwrites the weights (carrier (K, D)) of the rows from `start` on, as `Cache.import_rows` does. Rows of a
        dense optimizer are at the current step then; those that have these weights already stay as they lie, so that
        what is saved and loaded again goes on with the same bits."""
        state, history = None, self.history
        if history is not None and history.steps:  # before the first one no row lags behind
            raw = self._rows_for(start, start + len(weight))
            self.cache.copy_rows(start, start + len(weight), raw.weight, raw.state)
            now = CopiedRows(raw.weight.copy(), raw.state.copy(), raw.dirty)
            self._catch_up(now, history, np.arange(start, start + len(weight)))
            same = (now.weight.view(np.uint8) == weight.view(np.uint8)).all(1)
            weight, state = weight.copy(), now.state
            weight[same], state[same] = raw.weight[same], raw.state[same]
        self.cache.import_rows(start, weight, state)

    def import_states(self, start: int, state: Array, step: int) -> None:
        """Overwrites the optimizer state, uint32 (K, ·) without the step of a dense one, of the rows from `start` on.
        Those are at the current step then, which is to be called `step`."""
        weight, history = None, self.history
        if history is not None:
            now = self._rows_for(start, start + len(state))
            self.cache.copy_rows(start, start + len(state), now.weight, now.state)
            self._catch_up(now, history, np.arange(start, start + len(state)))
            weight = now.weight
            state = np.concatenate([state, np.full((len(state), 1), step, np.uint32)], axis=1)
        self.cache.import_rows(start, weight, state)

    def export_lagging(self, start: int, stop: int, history: History) -> tuple[Array, Array, Array]:
        """Of the rows start … stop − 1 those that bringing to the current step changes: their positions, int64 (K,),
        and weights and states as they lie."""
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
        """Rows (positions after `start`, int64 (K,)) lie as they did at an earlier step, where that makes them what
        they are at the current one: `weight` carrier (K, D), `state` uint32 (K, S)."""
        held = self._rows_for(start, start + count)
        self.cache.copy_rows(start, start + count, held.weight, held.state)
        now = CopiedRows(weight.copy(), state.copy(), held.dirty)
        self._catch_up(now, history, start + rows)
        same = (now.weight.view(np.uint8) == held.weight[rows].view(np.uint8)).all(1)
        held.weight[rows[same]], held.state[rows[same]] = weight[same], state[same]
        self.cache.import_rows(start, held.weight, held.state)

    def take_history(self, history: History) -> None:
        """Takes over what a saved optimizer of the same kind kept of its steps. Synchronises with a GPU."""
        assert self.kept is not None
        self.kept.take(history)
        self.cache.cold.history.share()
        self._adopt_history()

    def _catch_up(self, rows: CopiedRows, history: History, keys: Array) -> None:
        """Brings copies of the rows of `keys` to the steps that were taken."""
        from tieredemb.lookup.optimizer_cpu import catch_up

        catch_up(rows, np.arange(len(rows.weight), dtype=np.int32), history, self.rounding(keys)).run()

    def _rows_for(self, start: int, stop: int) -> CopiedRows:
        layout, rows = self.cache.cold.layout, stop - start
        weight = np.empty((rows, layout.columns), layout.carrier)
        return CopiedRows(weight, np.empty((rows, layout.state_width), np.uint32), np.empty(rows, np.uint8))

    @abc.abstractmethod
    def fetch(self, keys: Any) -> None:
        """Brings rows into slots that nobody has used, as many of them as there are: `keys`, int64 (K,) on the group's
        device, distinct. It is no use of the rows."""

    @property
    def _cached_slots(self) -> int:
        """Slots that rows come into and leave."""
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

    def _adopt_history(self) -> None:  # noqa: B027 - a host works on it as it lies
        """A history that was replaced with the cold rows counts from now on."""


def parsed_histories(cold: ColdRows) -> Histories:
    """What a storage was closed with. Raises `StorageFormatError`."""
    steps = None if cold.was_recovered else cold.metadata.steps  # what was recovered may be of different flushes
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
    """Gives new rows steps, one number for each table. Raises `StorageFormatError` for rows that come with others."""
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
        """What a lookup in place knows of its features; see `KeySpace.packed`."""
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
        """Of tables that plan as one: what a dense optimizer keeps of their steps, where it is the same of all."""
        histories: Histories | None = self.cache.cold.history
        return None if histories is None else histories.shared_by(self.clients)

    @property
    def histories(self) -> Sequence[History]:
        """What a dense optimizer keeps of the steps of its tables: one where it is the same of all, else that of each
        of those that plan as one."""
        shared = self.shared_history if self.clients else self.kept
        return [self.cache.cold.history.of[table] for table in self.clients] if shared is None else [shared]

    def count_replayed(self, counted: Sequence[int]) -> None:
        """Of tables that plan as one: steps that their rows were made to take one by one."""
        for table, more in zip(self.clients, counted, strict=True):
            self.cache.cold.history.of[table].replayed += more

    def catch_up_to(
        self, until: int, rows: HotArrays, places: Array, history: History, starts: Array | None = None
    ) -> None:
        """Brings rows at `places`, int32 (U,), to the step `until`, those that are behind it. `starts`: where those of
        each table begin, of several that plan as one."""
        from tieredemb.lookup.optimizer_cpu import catch_up

        taken = catch_up(rows, places, history, until=until, starts=starts)
        taken.run()
        if starts is None:
            history.replayed += taken.replayed
        else:
            self.count_replayed(taken.replayed_by(starts))

    def _connect(self) -> None:
        """Has the kernels of updates compiled beside those of forwards, which come first."""
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
    """A group on a GPU: what it knows of its tables, its kernels and the steps taken live there."""

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
        self._all_steps = steps = self.device_steps  # and not the group, which would keep the cache alive
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
        # where what a dense optimizer keeps is, or of several tables that plan as one, each table's
        self.past = None if self.device_history is None else self.device_history.past
        if self.device_history is not None and self.kept is not None:
            self.cache.on_flush.append(functools.partial(self.device_history.download, self.kept))

    @property
    def tables(self) -> torch.Tensor | None:
        """The numbers of the tables that plan as one, on the device, int32 (K,); None of all, or of one."""
        return self._whole.numbered(self.clients) if self.clients else None

    @property
    def device_client(self) -> int | torch.Tensor | None:
        """The client, or the numbers of those that plan as one."""
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
        else:  # to plan rows moves them, so only those that need it are planned
            with self.cache.entered(changes=False):
                stands = np.maximum(self.cache.last_words(start, stop), history.base)
            behind = np.flatnonzero(stands < until)
            if len(behind) == 0:
                return
            found = self.rows(position, torch.from_numpy(behind + start - first).to(self.config.device))
        # rows that the storage has no space for stay as they are
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
        """Finds the rows `start` … `stop` − 1 of its table at a `position` where they are, and holds the cache; over
        staged tiers it plans them, and waits for the GPU."""
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
        """Rows that are read inside are as they are at the steps that were taken before: a step begins inside, and of
        rows that it has yet to update nothing is known of it."""
        self._steps_before = self.device_steps.clone()
        try:
            yield
        finally:
            self._steps_before = None

    def note_step(self) -> None:
        """A step is about to be launched, of a dense optimizer; see `DeviceHistory.note_step`."""
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
        """The same of its own tables on the device."""
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
    """The group of a key space on the device of its tables. `rows`: what opens them, or those of another group."""
    return (DeviceGroup if config.device.type == "cuda" else HostGroup)(config, space, capacity, name, rows)


def move_group(group: Group, config: TableSetConfig, capacity: Capacity) -> Group:
    """A group over the same cold rows on the device of `config`. The old one was flushed, and is to be given
    up once all groups have moved."""
    return make_group(config, group.space, capacity, group.name, group.cache.cold)


def slot_bytes(layout: RowLayout, device: torch.device) -> int:
    """Bytes that one slot costs on a device, map included: what a capacity in bytes is divided by."""
    if device.type == "cuda":
        from tieredemb.cache.device.hot_rows import device_slot_bytes

        return device_slot_bytes(layout)
    return cache_bytes_per_slot(layout)


def resident_tables(tables: Sequence[TableConfig], slots: int, device: torch.device) -> list[int]:
    """Which of the tables of one cache never leave it, by position. Raises `ConfigError` where they do not fit.

    Those asked for; and on a GPU, where a resident table costs no lookup in the map, with `placement="auto"` all where
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
    """What the rows of a key space mean, as JSON: another meaning must not open the same file."""
    optimizer = None if config.optimizer is None else type(config.optimizer).__name__
    described = [asdict(table) | {"init": repr(table.init), "mode": None} for table in tables]
    for table in described:
        del table["placement"], table["feature_names"]  # where rows are and who reads them: nothing of what they mean
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
    """The groups of tables on a GPU, as what they are."""
    return [group for group in groups if isinstance(group, DeviceGroup)]
