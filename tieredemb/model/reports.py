"""What a module tells of its tables, and does with them, for all tables of a model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

from torch import nn

from tieredemb.cache.stats import CacheStats
from tieredemb.model.found import found_tables, tiered_modules


def stats(model: nn.Module) -> CacheStats:
    """Counters of all tables of a model since they were built, those of caches that several share once; of sharded
    tables the rows that this rank owns, and what it has sent (`ShardedStats`). Subtract two snapshots to measure a
    stretch of work. Synchronises with a GPU, and raises what it has found wrong since. Raises `ConfigError` for a model
    without tiered tables.

    >>> model = nn.Sequential(tieredemb.TieredEmbeddingBag(1000, 4), nn.Linear(4, 1))
    >>> before = tieredemb.stats(model)
    >>> out = model(torch.tensor([[1, 2], [2, 3]]))
    >>> (tieredemb.stats(model) - before).lookups
    4
    """
    counted = [each.tables.stats() for each in found_tables(model)]
    return sum(counted + [module.stats() for module in _sharded(model).values()], CacheStats())


def memory_report(model: nn.Module) -> dict[str, Any]:
    """Bytes of every allocation of a model's tables: of each set of tables that share a cache, under their names, a
    dict as the `memory_report()` of a module returns it. Raises `ConfigError` for a model without tiered tables.

    >>> model = nn.Sequential(tieredemb.TieredEmbeddingBag(1000, 4), nn.Linear(4, 1))
    >>> list(tieredemb.memory_report(model))
    ['0.weight']
    """
    found = {_title(each.names): each.tables.memory_report() for each in found_tables(model)}
    return found | {name or type(module).__name__: module.memory_report() for name, module in _sharded(model).items()}


def flush(model: nn.Module) -> None:
    """Writes the hot rows of all tables of a model back to cold storage; of sharded ones those of this rank. One that
    fails keeps no other from being written. Raises `ConfigError` for a model without tiered tables.

    >>> model = nn.Sequential(tieredemb.TieredEmbeddingBag(1000, 4), nn.Linear(4, 1))
    >>> tieredemb.flush(model)
    """
    sharded = (module.flush for module in _sharded(model).values())
    _each([*(each.tables.flush for each in found_tables(model)), *sharded])


def close(model: nn.Module) -> None:
    """Flushes all tables of a model and closes their cold storage; the model is unusable afterwards. Gradients that
    wait for a step are dropped, with a warning. One that fails keeps no other from being closed; a second call tries it
    again. Runs by itself at exit. Raises `ConfigError` for a model without tiered tables.

    >>> bag = tieredemb.TieredEmbeddingBag(1000, 4, storage=tieredemb.File("user.rows"))
    >>> model = nn.Sequential(bag, nn.Linear(4, 1))
    >>> tieredemb.close(model)    # the file is clean now
    """
    _each([module.close for module in tiered_modules(model).values()])


def _sharded(model: nn.Module) -> dict[str, Any]:
    """The collections that lie on several ranks, by their names."""
    return {name: module for name, module in tiered_modules(model).items() if module.distributed_ranks is not None}


def _each(calls: Iterable[Any]) -> None:
    with contextlib.ExitStack() as all_of_them:
        for call in reversed(list(calls)):
            all_of_them.callback(call)


def _title(names: tuple[str, ...]) -> str:
    return ", ".join(names)
