"""A checkpoint of tables with an optimizer, loaded into tables without one: to serve them, or to evaluate.

Weights and scores are loaded, optimizer state is not. Rows of a dense optimizer are at different steps in a
checkpoint, so they catch up to the steps that their tables have taken; so do rows that were never used, if the
optimizer changes them, as weight decay does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from tieredemb.config import Array, OptimizerConfig
from tieredemb.errors import CheckpointError
from tieredemb.kernels.constants import DECAY_LOG
from tieredemb.lookup.histories import Histories, Stored
from tieredemb.lookup.history import CopiedRows, History
from tieredemb.lookup.optimizer import new_histories, state_width
from tieredemb.storage.checkpoint.manifest import Space
from tieredemb.tables.group import Group

OF_OPTIMIZER = frozenset({"optimizer", "state_start", "rows"})  # of an identity: what tables without one do without
_ROWS = 1 << 18  # at once


class WeightsAlone:
    """Which part of the rows of one key space, saved in the form that `entry` describes, the tables of `group` load."""

    def __init__(self, group: Group, extra: Mapping[str, Any], entry: Space, stored: Stored | None) -> None:
        """`extra`: what the checkpoint notes beside the rows · `stored`: the history of steps, or None. Raises
        `CheckpointError`."""
        self._group, self._layout = group, entry.row_layout
        self.optimizer = _optimizer_of(extra, entry)
        self.steps = list(entry.metadata.steps)
        wanted = state_width(self.optimizer, self._layout.width)
        if wanted != self._layout.state_width:
            raise CheckpointError(
                f"the rows of the checkpoint have {self._layout.state_width} words of state, and those of its "
                f"{type(self.optimizer).__name__} {wanted}; use another checkpoint. Nothing was changed"
            )
        self._histories = self._parsed("param_groups" in extra, stored)

    def _parsed(self, is_separate: bool, stored: Stored | None) -> tuple[History, ...]:
        """The history of each table, or one of all; none of an optimizer that is not dense."""
        like = new_histories(self.optimizer, len(self._group.space) if is_separate else 1)
        if like is None:
            return ()
        try:
            if stored is None:
                raise ValueError("it is missing")
            found: Histories = like.parsed(stored, self.steps)
        except ValueError as error:
            raise CheckpointError(
                f"the history of steps in the checkpoint is damaged: {error}; use another checkpoint. Nothing was "
                f"changed"
            ) from error
        return found.of

    def taken(self, keys: Array, weight: Array, state: Array) -> tuple[Array, Array]:
        """Of the rows of `keys`, int64 (K,), as they were saved, what tables without an optimizer have: weights at the
        steps that were taken, carrier (K, D), and scores, uint32 (K, 1)."""
        scores = state[:, -1:]
        if self._histories:
            weight = self._caught_up(keys, weight, state[:, :-1])
        return weight, scores

    def _caught_up(self, keys: Array, weight: Array, state: Array) -> Array:
        from tieredemb.lookup.optimizer_cpu import catch_up

        rows = CopiedRows(np.array(weight), np.array(state), np.empty(len(keys), np.uint8))
        for history, positions in self._by_history(keys):
            rounding = self._group.rounding(keys, steps=self.steps)
            catch_up(rows, positions.astype(np.int32), history, rounding).run()
        return rows.weight

    def _by_history(self, keys: Array) -> list[tuple[History, Array]]:
        """Which of `keys` belong to each history."""
        if len(self._histories) == 1:
            return [(self._histories[0], np.arange(len(keys)))]
        table = np.searchsorted(self._group.space.start, keys, side="right") - 1
        return [(history, np.flatnonzero(table == number)) for number, history in enumerate(self._histories)]

    def move_unused(self) -> None:
        """Writes the rows that were never used, if the optimizer has changed them. The caller has the lock to change
        all rows, and has adopted those that were loaded. Raises `StorageFullError`."""
        space, cold = self._group.space, self._group.cache.cold
        for number in range(len(space)):
            history = self._histories[min(number, len(self._histories) - 1)] if self._histories else None
            if history is None or not _moves_unused(history):
                continue
            first, stop = int(space.start[number]), int(space.start[number + 1])
            cold.reserve_range(first, stop)
            for start in range(first, stop, _ROWS):
                self._move_unused(start, min(start + _ROWS, stop))

    def _move_unused(self, start: int, stop: int) -> None:
        from tieredemb.kernels.row_encoding_cpu import in_encoding

        cold, layout = self._group.cache.cold, self._layout
        unused = np.flatnonzero(cold.state[start:stop, -1] == 0)
        keys = unused + start
        weight = np.empty((len(keys), layout.columns), layout.carrier)
        state = np.empty((len(keys), layout.state_width), np.uint32)
        self._group.initial(self.optimizer).generate(keys, np.arange(len(keys)), weight, state, layout.state_width)
        moved = self._caught_up(keys, weight, state)
        if layout.format.encoding != cold.layout.format.encoding:
            moved = in_encoding(moved, layout.format, cold.layout.format)
        rows = np.empty((stop - start, cold.layout.columns), cold.layout.carrier)
        self._group.cache.copy_rows(start, stop, rows, np.empty((stop - start, 0), np.uint32))
        rows[unused] = moved
        self._group.cache.import_rows(start, rows, None)


def _moves_unused(history: History) -> bool:
    """Whether rows whose state is zeros were moved: by decay, or by steps that have no closed form."""
    last = history.steps - history.base
    return bool(history.logs[last, DECAY_LOG] != 0 or history.coupled[last] != 0)


def _optimizer_of(extra: Mapping[str, Any], entry: Space) -> OptimizerConfig:
    """The optimizer that the rows were saved with. Raises `CheckpointError`."""
    name, options = entry.identity.get("optimizer"), extra.get("param_group")
    kind = OptimizerConfig.known().get(name) if isinstance(name, str) else None
    try:
        if kind is None or not isinstance(options, dict):
            raise ValueError(f"its optimizer is {name!r}")
        known = {each.name for each in fields(kind)}  # schedulers add others
        given: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in options.items() if key in known
        }
        return kind(**given)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint was saved with an optimizer that this library does not know: {error}; upgrade tieredemb, "
            f"or use another checkpoint. Nothing was changed"
        ) from error
