"""The tables of a model: which sets of them share caches, and what each table is called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from tieredemb.errors import ConfigError, UnsupportedError
from tieredemb.modules.lookup_module import LookupModule
from tieredemb.modules.names import named_modules, table_name
from tieredemb.step.engine import Engine
from tieredemb.tables.pool import Member, Pool
from tieredemb.tables.table_set import TableSet

if TYPE_CHECKING:
    from tieredemb.sharding.together import Together


@dataclass(frozen=True, kw_only=True)
class FoundTables:
    """Tables of one process that share caches. `tables`: all of them · `engines`: which look up in them · `names`: of
    each table, in the order of `tables`."""

    tables: TableSet
    engines: Sequence[Engine]
    names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class FoundSharded:
    """The tables of a collection that lies on several ranks."""

    ranks: Together
    names: tuple[str, ...]


def tiered_modules(model: nn.Module) -> dict[str, LookupModule]:
    """The modules of a model that hold tables, by their names. Raises `ConfigError` where there is none."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    found = {name: module for name, module in named_modules(model) if isinstance(module, LookupModule)}
    if not found:
        raise ConfigError(
            f"this {type(model).__name__} has no tiered tables; convert its embeddings by "
            f"tieredemb.replace_embedding_bags(model, capacity=…)"
        )
    return found


def found_tables(model: nn.Module) -> list[FoundTables]:
    """The sets of tables of one process, each once; those of a sharded collection of one rank, too."""
    sets: dict[int, tuple[TableSet, list[Engine], dict[int, str]]] = {}
    for path, module in tiered_modules(model).items():
        if module.together is not None:
            continue
        for engine in module.engines:
            whole = engine.tables.whole
            _, engines, names = sets.setdefault(id(whole), (whole, [], {}))
            engines.append(engine)
            for number, table in zip(_numbers(engine.tables), engine.tables.config.tables, strict=True):
                names.setdefault(number, table_name(path, module, table.name))
    return [
        FoundTables(tables=whole, engines=engines, names=_all_names(whole, names))
        for whole, engines, names in sets.values()
    ]


def found_sharded(model: nn.Module) -> list[FoundSharded]:
    """The collections that lie on several ranks, all on the same ones. Raises `UnsupportedError` where others do, or
    where each rank has tables of its own beside them."""
    found, alone, names = [], [], list[str]()
    for path, module in tiered_modules(model).items():
        if module.together is None:
            alone.append(path or type(module).__name__)
            continue
        names.append(path or type(module).__name__)
        its = tuple(table_name(path, module, table.name) for table in module.together.tables)
        found.append(FoundSharded(ranks=module.together, names=its))
    if not found:
        return found
    if alone:
        raise UnsupportedError(
            f"{', '.join(map(repr, alone))} {'has' if len(alone) == 1 else 'have'} tables of each process beside the "
            f"sharded ones of {', '.join(map(repr, names))}, and nobody knows which process's count; call "
            f"save_checkpoint(directory) and load_checkpoint(directory) of each of these modules"
        )
    if len({tuple(each.ranks.exchange.ranks) for each in found}) > 1:
        raise UnsupportedError(
            f"the collections {', '.join(map(repr, names))} lie on different ranks; call save_checkpoint(directory) "
            f"and load_checkpoint(directory) of each of them"
        )
    return found


def _numbers(tables: TableSet) -> Sequence[int]:
    return [tables.number] if isinstance(tables, Member) else range(len(tables.config.tables))


def _all_names(whole: TableSet, names: dict[int, str]) -> tuple[str, ...]:
    """Of all tables of a set. Raises `ConfigError` where the model has not all that share their cache."""
    tables = whole.config.tables
    if isinstance(whole, Pool):
        missing = sorted({each.number for each in list(whole.members)} - set(names))
        if missing:
            left = ", ".join(repr(tables[number].name) for number in missing)
            raise ConfigError(
                f"{', '.join(map(repr, sorted(names.values())))} share their cache with {left}, which this model does "
                f"not have; pass the model that was converted"
            )
    return tuple(names.get(number, table.name) for number, table in enumerate(tables))
