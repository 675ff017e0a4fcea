"""Key spaces: tables that share a cache, and messages about wrong ids and offsets into them.

A feature looks up in a table: it has bags, and columns of the output. A table has one feature, unless its config names
several. Bags are feature-major, as in FBGEMM and TorchRec's KeyedJaggedTensor: bag `f · B + b` is sample
b of feature f. A key space may hold only some of a collection's tables (those of one width); the bags of its features
are then copied out.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tieredemb.config import MODES, Array, Feature, TableConfig, features_of
from tieredemb.kernels.constants import MAX, MEAN

MAX_BAGS = 2**31 - 1  # of all features of a batch: kernels number them in int32
# for each feature the number of its block of bags, and its fields in a `KeySpace`: the rows of `KeySpace.packed`
BLOCK, FIRST, SIZE, PADDING, COLUMN, MODE = range(6)


@dataclass(frozen=True)
class Places:
    """Where features have their bags in a batch with another order, or with more blocks. `blocks`: for each feature of
    the collection the number of its block of B bags · `count`: how many blocks there are."""

    blocks: tuple[int, ...]
    count: int


class EqualBags(NamedTuple):
    """So many `bags` of `length` ids each, without an array of their edges."""

    bags: int
    length: int

    def edges(self) -> Array:
        """Where they start and end, int64 (bags + 1,)."""
        return np.arange(self.bags + 1, dtype=np.int64) * self.length


class KeySpace:
    """The tables that share one cache, and their features, in terms of the kernels.

    Of tables: `tables`, int64 (T,), their positions in the collection · `start`, int64 (T + 1,), the first key of each,
    and that after the last. Of features: `features`, int64 (F,), their positions in the collection · `table`, int64
    (F,), which of `tables` each looks up in · `first`, `size`, int64 (F,), that one's first key and rows · `column`,
    int64 (F,), where each writes its outputs · `mode`, int32 (F,) · `padding`, int64 (F,), an id or −1.
    `is_shared`: whether a table has several features · `has_mean`, `has_max`: whether one is pooled so · `names`: of
    the features, for messages.
    """

    def __init__(
        self, configs: Sequence[TableConfig], tables: Sequence[int], columns: Sequence[int], first: int = 0
    ) -> None:
        """`columns`: of all features of the collection · `first`: the first key, where others have those before it."""
        chosen = [configs[t] for t in tables]
        self.tables = np.array(tables, np.int64)
        self.start = np.cumsum([first, *(table.num_embeddings for table in chosen)], dtype=np.int64)
        position = {t: j for j, t in enumerate(tables)}
        everyone = features_of(configs)
        features = [f for f, feature in enumerate(everyone) if feature.table in position]
        of = [configs[everyone[f].table] for f in features]
        self.names = [feature_name(everyone[f], table) for f, table in zip(features, of, strict=True)]
        self.features = np.array(features, np.int64)
        self.table = np.array([position[everyone[f].table] for f in features], np.int64)
        self.first = self.start[self.table]
        self.size = np.array([table.num_embeddings for table in of], np.int64)
        self.column = np.array([columns[f] for f in features], np.int64)
        self.mode = np.array([MODES.index(table.mode) for table in of], np.int32)
        self.padding = np.array([-1 if t.padding_idx is None else t.padding_idx for t in of], np.int64)
        self.is_shared = len(features) > len(tables)
        self.has_mean = bool((self.mode == MEAN).any())
        self.has_max = bool((self.mode == MAX).any())
        self.width = chosen[0].embedding_dim
        self.covers_all = len(features) == len(everyone)

    def __len__(self) -> int:
        return len(self.tables)

    def of_tables(self, positions: Sequence[int]) -> KeySpace:
        """The key space of some of the tables, with one feature each and unchanged keys; `start` stays that of all."""
        some, chosen = copy.copy(self), list(positions)
        some.tables = some.features = some.table = np.arange(len(chosen))
        some.first, some.size, some.column = self.first[chosen], self.size[chosen], self.column[chosen]
        some.mode, some.padding = self.mode[chosen], self.padding[chosen]
        some.names = [self.names[position] for position in chosen]
        some.has_mean, some.has_max = bool((some.mode == MEAN).any()), bool((some.mode == MAX).any())
        return some

    def blocks(self, places: Places) -> Array:
        """Of each feature the number of its block of bags among those given, int64 (F,)."""
        return np.array(places.blocks, np.int64)[self.features]

    def packed(self, *, pooled: bool) -> Array:
        """What kernels know of the features as one array, int64 (6, F); see `BLOCK`. Rows that are not `pooled` are
        sums of one."""
        mode = self.mode if pooled else np.full(len(self.mode), MODES.index("sum"))
        return np.array([self.features, self.first, self.size, self.padding, self.column, mode], np.int64)

    def is_all(self, places: Places | None) -> bool:
        """Whether the given bags are those of these features, in order."""
        return self.covers_all and places is None

    @property
    def rows(self) -> int:
        return int(self.start[-1] - self.start[0])


@functools.cache
def rows_space(width: int, *modes: Any) -> KeySpace:
    """A key space of a feature for each of the `modes`, for lookups in rows without a table, which need only width and
    mode."""
    named = enumerate(modes)
    tables = [TableConfig(name=f"weight{k}", num_embeddings=1, embedding_dim=width, mode=mode) for k, mode in named]
    return KeySpace(tables, range(len(tables)), [width * k for k in range(len(tables))])


def offsets_out_of_order(k: int, value: int, before: int, ids: int, count: int) -> str:
    """What is wrong with offset `k` of `count`, of value `value` after `before`, over `ids` ids."""
    if k == 0 and value != 0:
        return f"offsets[0] must be 0, got {value}; the first bag starts at the first id"
    if k and value < before:
        if value == ids and k == count - 1:  # the end, which may be omitted
            k, value = k - 1, before
        else:
            return (
                f"offsets must not fall, but offsets[{k}] = {value} after offsets[{k - 1}] = {before}; "
                f"a bag's offset is where it starts, not its length"
            )
    if value > ids:
        return f"offsets[{k}] = {value} lies beyond the {ids} ids given; offsets count ids"
    return f"the last offset is {value} but there are {ids} ids; it must be their number"


def feature_name(feature: Feature, table: TableConfig) -> str:
    """How messages name a feature and its table."""
    own = f"table {table.name!r}"
    return own if table.features == (table.name,) else f"feature {feature.name!r} of {own}"


def id_out_of_range(feature: str, rows: int, value: int, position: int) -> str:
    """What is wrong with an id. `feature`: as messages name it."""
    advice = "check the feature's hashing or raise num_embeddings"
    if value < 0:
        advice = "give what is missing an id of its own, and name that padding_idx"
    return f"id {value} at position {position} is out of range for {feature} (0 … {rows - 1}); {advice}"
