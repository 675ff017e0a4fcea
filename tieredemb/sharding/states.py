"""The optimizer's state of tables that lie on several ranks, in the state dict of one process: whole on rank 0, and
loaded from rank 0 alone or from every rank. Each call is a collective: all ranks raise the error of one.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from tieredemb.config import OptimizerConfig
from tieredemb.errors import InvalidInputError, UnsupportedError
from tieredemb.lookup.history import History
from tieredemb.sharding.agreed import Announce, Change, agreed, change_on_all_ranks
from tieredemb.sharding.exchange import Exchange
from tieredemb.sharding.header import Phase
from tieredemb.sharding.layout import REPLICATED, Layout
from tieredemb.sharding.shard import Shard
from tieredemb.sharding.whole_rows import gather_rows, gathered_rows, rows_from_rank_0
from tieredemb.tables.row_state import (
    ELSEWHERE,
    LAGGING,
    check_equal_steps,
    check_is_here,
    check_lagging,
    lagging_rows,
    loaded_state,
    state_tensors,
    steps_of,
)
from tieredemb.tables.table_set import LaggingRows, LoadedState, check_memory

Entry = Mapping[str, Any]  # of a table in a state dict, without its steps: tensors by name
LAGGING_ROWS = ("rows", "weight", "state")  # tensors with a row for each row that lags behind
WORDS = "words"
R = TypeVar("R")


class WholeState(NamedTuple):
    """The steps that a table has taken, and its entry in a state dict: empty on other ranks than rank 0."""

    steps: int
    entry: Entry


class _Small(NamedTuple):
    """What a `LoadedState` has beside rows: the steps taken, and, for rows that lag behind, their dtype and the history
    that catches them up to the current step."""

    step: int
    carrier: np.dtype[Any] | None
    history: History | None


@dataclass(frozen=True)
class RowStates:
    """The optimizer state of all tables. `announce`: called before anything that all ranks do, with the phase, and the
    error of this rank or None; raises the error of one on all."""

    layout: Layout
    exchange: Exchange
    shards: Sequence[Shard]
    announce: Announce

    @property
    def tables(self) -> range:
        """Their numbers in the collection."""
        return range(len(self.layout.tables))

    def _place(self, table: int) -> tuple[Shard, int]:
        """The shard of a table on this rank, and the table's number there."""
        shard = next(each for each in self.shards if table in each.tables)
        return shard, shard.tables.index(table)

    def steps(self, table: int) -> int:
        """Optimizer steps that a table has taken: the same on all ranks. Synchronises with a GPU."""
        shard, number = self._place(table)
        return steps_of(shard.engine.tables, number)

    def elsewhere(self) -> dict[str, int]:
        """What a state dict has instead of the tables' state, where another rank's holds that."""
        return {} if self.exchange.rank == 0 else {ELSEWHERE: 0}

    # --- saving -----------------------------------------------------------------------------------------------------

    def gathered(self, config: OptimizerConfig, table: int) -> WholeState:
        """A table's state, whole on rank 0. Raises `StorageFullError` where memory cannot hold it."""
        steps, mine, whole = agreed(
            functools.partial(self.announce, Phase.READ_STATE),
            lambda: (self.steps(table), self._own(config, table), self._buffers(config, table)),
        )
        for name in [each.name for each in config.tensors]:

            def place(rank: int, start: int, rows: torch.Tensor, name: str = name) -> None:
                whole[name][self.layout.saved_part(table, rank).span(start, len(rows))] = rows

            gather_rows(self.exchange, mine[name], place)
        if LAGGING in mine:
            whole |= self._lagging(mine[LAGGING])
        return WholeState(steps, whole)

    def _own(self, config: OptimizerConfig, table: int) -> dict[str, Any]:
        """What this rank saves of a table; rows that lag behind are numbered as in the whole table."""
        shard, number = self._place(table)
        part, tables = self.layout.saved_part(table, self.exchange.rank), shard.engine.tables
        entry: dict[str, Any] = {
            name: rows[: part.own_rows] for name, rows in state_tensors(tables, config, number).items()
        }
        lagging = dict(lagging_rows(tables, number).get(LAGGING, {}))
        if lagging:
            is_own = lagging["rows"] < part.own_rows  # without the row that stands in where a rank has none
            lagging |= {name: lagging[name][is_own] for name in LAGGING_ROWS}
            lagging["rows"] = part.first + part.step * lagging["rows"]
            entry[LAGGING] = lagging  # the rest of it is equal on every rank
        return entry

    def _buffers(self, config: OptimizerConfig, table: int) -> dict[str, torch.Tensor]:
        """On rank 0 tensors for the whole table, before all ranks agree to send their rows."""
        if self.exchange.rank != 0:
            return {}
        of = self.layout.tables[table]
        shapes = {each.name: (of.num_embeddings, each.width(of.embedding_dim)) for each in config.tensors}
        check_memory(of.name, sum(4 * rows * width for rows, width in shapes.values()))
        return {name: torch.empty(shape, dtype=torch.float32, device="cpu") for name, shape in shapes.items()}

    def _lagging(self, mine: dict[str, torch.Tensor]) -> dict[str, Any]:
        """On rank 0 the rows of all ranks that lag behind, in the order of the whole table."""
        found = {name: gathered_rows(self.exchange, mine[name]) for name in LAGGING_ROWS}
        if self.exchange.rank != 0:
            return {}
        order = found["rows"].argsort()
        return {LAGGING: {**mine, **{name: rows[order] for name, rows in found.items()}}}

    # --- loading ----------------------------------------------------------------------------------------------------

    def taken(
        self,
        config: OptimizerConfig,
        state_dict: Mapping[str, Any],
        given: Callable[[], Mapping[int, Entry]],
    ) -> dict[int, LoadedState]:
        """The part, for this rank, of the state that was `given` for tables in a `state_dict`: to all ranks, to rank 0
        alone, or to none, as before the first step. Changes nothing. Raises `InvalidInputError` for what does not
        fit."""
        entries = self._agreed(given)
        ranks_of = self._ranks_of(entries)
        self._agreed(lambda: check_is_here(state_dict, ranks_of.values()))
        partly = {t for t, ranks in ranks_of.items() if 0 < len(ranks) < self.exchange.size}
        sent = partly | {t for t, ranks in ranks_of.items() if ranks and self.layout.owner[t] == REPLICATED}
        if wrong := [t for t in sorted(partly) if ranks_of[t] != [0]]:
            raise InvalidInputError(
                f"the optimizer's state of table {self.layout.tables[wrong[0]].name!r} is given on ranks "
                f"{ranks_of[wrong[0]]}; give it on all ranks, or on rank 0 alone, as state_dict() does"
            )
        loaded = self._agreed(
            lambda: {
                t: self._part(config, t, entries.get(t, {}), self.exchange.rank) for t in self.tables if t not in sent
            }
        )
        for table in sorted(sent):
            loaded[table] = self._part_from_rank_0(config, table, entries.get(table, {}))
        self._check_steps(loaded)
        self._agreed(lambda: self._check(config, loaded))
        return loaded

    def _check(self, config: OptimizerConfig, loaded: Mapping[int, LoadedState]) -> None:
        """Raises `InvalidInputError` where the states of tables do not fit each other."""
        check_equal_steps(config, loaded)
        for shard in self.shards:
            check_lagging(shard.engine.tables, {n: loaded[t] for n, t in enumerate(shard.tables) if t in loaded})

    def _ranks_of(self, entries: Mapping[int, Entry]) -> dict[int, list[int]]:
        """The ranks that were given something for each table."""
        offers = self.exchange.all_gather_object([t for t in self.tables if entries.get(t)])
        return {t: [rank for rank, offered in enumerate(offers) if t in offered] for t in self.tables}

    def _part(self, config: OptimizerConfig, table: int, entry: Entry, rank: int) -> LoadedState:
        """The part of a whole table's entry that belongs to a rank."""
        shard, number = self._place(table)
        return loaded_state(shard.engine.tables, config, number, entry, self.layout.part(table, rank))

    def _part_from_rank_0(self, config: OptimizerConfig, table: int, entry: Entry) -> LoadedState:
        """The same of an entry that rank 0 alone has: it makes each rank's part, and sends it before it makes the
        next."""
        exchange = self.exchange
        for rank in range(exchange.size):
            part = self._agreed(lambda: self._part(config, table, entry, rank) if exchange.rank == 0 else None)  # noqa: B023
            small, rows = (None, None) if part is None else _separated(part)
            small, rows = exchange.broadcast_object(small), rows_from_rank_0(exchange, rank, rows)
            if rank == exchange.rank:
                mine = _joined(small, rows)
        return mine

    def _check_steps(self, loaded: Mapping[int, LoadedState]) -> None:
        """Raises `InvalidInputError` on all ranks where they were given states of different steps."""
        steps = self.exchange.all_gather_object({t: state.step for t, state in sorted(loaded.items())})
        for rank, steps_of_rank in enumerate(steps):
            table = next((t for t in steps_of_rank if steps_of_rank[t] != steps[0][t]), None)
            if table is not None:
                raise InvalidInputError(
                    f"the optimizer's state of table {self.layout.tables[table].name!r} is that of step "
                    f"{steps[0][table]} on rank 0, and of step {steps_of_rank[table]} on rank {rank}; give all "
                    f"ranks the same state dict, or rank 0 alone that of the tables"
                )

    def set(self, loaded: Mapping[int, LoadedState], then: Callable[[], None]) -> None:
        """Overwrites the state of this rank's rows by what was `taken`, once all ranks have space for it; then calls
        `then`."""
        changes: list[Change] = []
        for shard in self.shards:
            states = {number: loaded[t] for number, t in enumerate(shard.tables) if t in loaded}
            if states:
                changes.append(_change(shard, states))
        change_on_all_ranks(functools.partial(self.announce, Phase.WRITE_STATE), changes, then)

    def _agreed(self, action: Callable[[], R]) -> R:
        """See `agreed`, for what is about to be set."""
        return agreed(functools.partial(self.announce, Phase.WRITE_STATE), action)


def _separated(state: LoadedState) -> tuple[_Small, dict[str, torch.Tensor]]:
    """The small things of a state, and its rows by name."""
    step, words, lagging = state
    rows = {} if words is None else {WORDS: torch.cat([each.to("cpu", torch.float32) for each in words], dim=1)}
    if lagging is None:
        return _Small(step, None, None), rows
    views = {"rows": lagging.rows, "weight": lagging.weight.view(np.uint8), "state": lagging.state.view(np.int32)}
    rows |= {name: torch.from_numpy(np.ascontiguousarray(view)) for name, view in views.items()}
    return _Small(step, lagging.weight.dtype, lagging.history), rows


def _joined(small: _Small, rows: Mapping[str, torch.Tensor]) -> LoadedState:
    """The inverse: the state."""
    step, carrier, history = small
    words = (rows[WORDS],) if WORDS in rows else None
    if carrier is None:
        return LoadedState(step, words)
    number, weight, state = (rows[name].numpy() for name in LAGGING_ROWS)
    return LoadedState(step, words, LaggingRows(number, weight.view(carrier), state.view(np.uint32), history))


def refuse_names() -> None:
    """Raises `UnsupportedError` inside of `torch.distributed.checkpoint.state_dict`, which names an optimizer's params
    as the model does."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict":
            raise UnsupportedError(
                "torch.distributed.checkpoint calls an optimizer's params by their names in the model, and sharded "
                "tables are no parameters of it; give it the optimizer of the dense layers alone, with tables that "
                "have an optimizer of tieredemb, and save them by save_checkpoint(directory) beside; or save "
                "optimizer.state_dict() by torch.save on rank 0"
            )
        frame = frame.f_back


def _change(shard: Shard, states: Mapping[int, LoadedState]) -> Change:
    def change(once_ready: Callable[[], None]) -> None:
        shard.engine.tables.set_states(states, lambda: None, once_ready=once_ready)

    return change
