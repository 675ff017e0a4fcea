"""Which rank owns which rows of a sharded collection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tieredemb.config import TableConfig, TablePart, by_name, is_whole, keep_plain
from tieredemb.errors import ConfigError, shown

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class RowWise:
    """The rows of a table are divided among all ranks: rank (id + t) mod W holds row `id` of the collection's table
    number `t`. Neighbours lie on different ranks, and so do the rows that are used most. A lookup exchanges a row for
    each different id of a rank's batch, and its backward a gradient for each occurrence. Where bags have one id that is
    hardly ever more than `TableWise` exchanges, and of a small table far less: so it is the default.

    >>> sharding = {"user": tieredemb.RowWise(), "country": tieredemb.TableWise(rank=0)}
    """


@by_name
@dataclass(frozen=True, kw_only=True)
class TableWise:
    """One `rank` holds a table whole: by default the one whose tables have fewest lookups. It pools the table's bags: a
    lookup exchanges a vector for each of them.

    >>> tieredemb.TableWise(rank=0)
    TableWise(rank=0)
    """

    rank: int | None = None

    def __post_init__(self) -> None:
        keep_plain(self)
        if self.rank is not None and (not is_whole(self.rank) or self.rank < 0):
            raise ConfigError(f"rank must be an integer of 0 or more, got {shown(self.rank)}")


@by_name
@dataclass(frozen=True)
class Replicated:
    """Every rank holds a table whole, and looks up its own bags without the others: a lookup exchanges ids, and neither
    rows nor pooled bags. In backward each rank sends the gradients of its bags to all others, and updates its copy as
    one process would that has the batches of all ranks: the copies stay equal bit for bit. For small tables, as each
    rank has all of the rows, their optimizer state, and the work of all updates.

    >>> sharding = {"user": tieredemb.RowWise(), "country": tieredemb.Replicated()}
    """


Sharding = RowWise | TableWise | Replicated
ROW_WISE, REPLICATED = -1, -2  # instead of an owner, for tables that no rank holds alone


class Layout:
    """Which of `size` ranks own the rows of `tables`. `owner`: int64 (T,), of each table the rank that alone holds it
    whole, or `ROW_WISE` or `REPLICATED` · `is_default`: of each table, whether no sharding was given."""

    def __init__(
        self, tables: Sequence[TableConfig], size: int, sharding: Mapping[str, Sharding] | Sharding | None = None
    ) -> None:
        """`sharding`: by the names of tables, or of all; `RowWise()` by default. Raises `ConfigError`."""
        self.tables = tuple(tables)
        self.size = size
        given = [sharding.get(each.name) if isinstance(sharding, Mapping) else sharding for each in self.tables]
        self.is_default = [each is None for each in given]
        self.sharding = [_checked(*each) for each in zip(self.tables, given, strict=True)]
        _check_names(self.tables, sharding)
        self.owner = np.full(len(self.tables), ROW_WISE, np.int64)
        lookups = np.zeros(size, np.int64)
        for t in sorted(range(len(self.tables)), key=lambda t: -len(self.tables[t].features)):
            kind, table = self.sharding[t], self.tables[t]
            if not isinstance(kind, TableWise):
                self.owner[t] = REPLICATED if isinstance(kind, Replicated) else ROW_WISE
                continue
            if kind.rank is not None and kind.rank >= size:
                raise ConfigError(
                    f"table {table.name!r} is to be held by rank {kind.rank}, of {size} ranks (0 … {size - 1}); leave "
                    f"rank out, or start more processes"
                )
            self.owner[t] = int(lookups.argmin()) if kind.rank is None else kind.rank
            lookups[self.owner[t]] += len(table.features)

    def part(self, table: int, rank: int) -> TablePart:
        """The rows of a table that a rank holds."""
        rows = self.tables[table].num_embeddings
        if self.owner[table] == ROW_WISE:
            return TablePart(table, (rank - table) % self.size, self.size, rows)
        return TablePart(table, 0 if self.owner[table] in (rank, REPLICATED) else rows, 1, rows)

    def saved_part(self, table: int, rank: int) -> TablePart:
        """The rows of a table that a rank saves, and counts: of a replicated one rank 0 all of them, other ranks
        none."""
        part = self.part(table, rank)
        return replace(part, first=part.rows) if rank and self.owner[table] == REPLICATED else part

    def owners(self, tables: Array, ids: Array) -> Array:
        """The ranks that own rows, or `REPLICATED`, int64 (N,): `ids` of `tables`, both int64 (N,)."""
        owner = self.owner[tables]
        return np.where(owner == ROW_WISE, (ids + tables) % self.size, owner)

    def local(self, tables: Array, ids: Array) -> Array:
        """The numbers of such rows among those of the table that their owner holds, int64 (N,)."""
        return np.where(self.owner[tables] == ROW_WISE, ids // self.size, ids)


def _checked(table: TableConfig, given: Sharding | None) -> Sharding:
    if given is None:
        return RowWise()
    if not isinstance(given, Sharding):
        raise ConfigError(
            f"sharding of table {table.name!r} must be RowWise(), TableWise(…) or Replicated(), got {shown(given)}"
        )
    return given


def _check_names(tables: Sequence[TableConfig], sharding: Mapping[str, Sharding] | Sharding | None) -> None:
    if isinstance(sharding, Mapping):
        unknown = sorted(set(sharding) - {table.name for table in tables})
        if unknown:
            raise ConfigError(
                f"sharding names {', '.join(map(repr, unknown))}, of which there is no table; the tables are "
                f"{', '.join(repr(table.name) for table in tables)}"
            )
