"""Rows of tables that are laid out anew: with the state that another optimizer needs."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import numpy as np

from tieredemb.config import OptimizerConfig
from tieredemb.errors import ConfigError
from tieredemb.tables.group import Group, make_group
from tieredemb.tables.table_set import COPY_ROWS, Place, TableSet


def lay_out(tables: TableSet, optimizer: OptimizerConfig) -> None:
    """Gives every row the state that `optimizer` starts with; weights, scores and numbers of batches stay.

    Takes memory for the rows a second time while it runs. Raises `ConfigError` for tables that were trained or whose
    tier is no memory, and `StorageError` while batches are in flight, before anything changes.
    """
    tables = tables.whole
    with tables.locked():
        for group in tables.groups:
            group.cache.check_idle("change the optimizer")
            if any(group.steps):
                raise ConfigError(
                    f"these tables have been trained with the state of {type(group.config.optimizer).__name__}; build "
                    f"new ones for {type(optimizer).__name__}, and load the weights"
                )
            if not group.cache.cold.in_memory:
                raise ConfigError(
                    f"rows on the {group.cache.cold.kind} tier cannot be laid out anew for {type(optimizer).__name__}; "
                    f"pass the torch optimizer, or its class, to the module's constructor"
                )
        tables.flush()
        config, before, counted = replace(tables.config, optimizer=optimizer), tables.groups, tables.stats()
        with contextlib.ExitStack() as undo:
            groups: list[Group] = []
            for group in before:
                groups.append(make_group(config, group.space, group.capacity, group.name, config.storage))
                undo.callback(groups[-1].cache.abandon)
                _copy_rows(group, groups[-1])
            place = Place(config, groups, counted)
            undo.pop_all()
        tables.placed.now = place
        for group in before:
            group.cache.abandon()
            group.cache.cold.close()


def _copy_rows(source: Group, target: Group) -> None:
    """Weights and scores of the rows that were written, and state as it starts."""
    old, new = source.cache.cold, target.cache.cold
    optimizer = target.config.optimizer
    start_word = np.float32(0.0 if optimizer is None else optimizer.state_start).view(np.uint32)
    for start in range(0, source.space.rows, COPY_ROWS):
        stop = min(start + COPY_ROWS, source.space.rows)
        scores = old.state[start:stop, -1]
        if scores.any():
            new.weight[start:stop] = old.weight[start:stop]
            new.state[start:stop, :-1] = np.where(scores[:, None] != 0, start_word, np.uint32(0))
            if optimizer is not None and optimizer.is_dense:
                new.state[start:stop, -2] = 0  # the step that a row stands at
            new.state[start:stop, -1] = scores
    new.metadata.batch, new.metadata.policy = old.metadata.batch, old.metadata.policy
    target.adopt()
