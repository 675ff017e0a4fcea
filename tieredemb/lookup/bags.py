"""Key spaces: tables that share a cache, and what is wrong with ids and offsets into them.

Bags come table-major, as in FBGEMM and TorchRec's KeyedJaggedTensor: bag `t · B + b` is sample b of table t. A key
space may hold only some of a collection's tables (those of one width); its bags are then copied out.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tieredemb.config import MODES, TableConfig
from tieredemb.kernels.constants import MAX, MEAN

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]


class KeySpace:
    """The tables that share one cache, in terms of the kernels.

    `tables`: int64 (T,), their positions in the collection · `start`: int64 (T + 1,), the first key of each, and the
    number of keys · `column`: int64 (T,), where each writes its outputs · `mode`: int32 (T,) · `padding`: int64 (T,),
    an id or −1 · `has_mean`, `has_max`: whether a table is pooled so.
    """

    def __init__(self, configs: Sequence[TableConfig], tables: Sequence[int], columns: Sequence[int]) -> None:
        chosen = [configs[t] for t in tables]
        self.names = [table.name for table in chosen]
        self.tables = np.array(tables, np.int64)
        self.start = np.concatenate([[0], np.cumsum([table.num_embeddings for table in chosen])]).astype(np.int64)
        self.column = np.array([columns[t] for t in tables], np.int64)
        self.mode = np.array([MODES.index(table.mode) for table in chosen], np.int32)
        self.padding = np.array([-1 if t.padding_idx is None else t.padding_idx for t in chosen], np.int64)
        self.has_mean = bool((self.mode == MEAN).any())
        self.has_max = bool((self.mode == MAX).any())
        self.width = chosen[0].embedding_dim
        self.covers_all = len(tables) == len(configs)

    def __len__(self) -> int:
        return len(self.tables)

    @property
    def rows(self) -> int:
        return int(self.start[-1])


@functools.cache
def rows_space(width: int, mode: Any) -> KeySpace:
    """A key space of one table, of which lookups in rows of no table ask width and mode alone."""
    return KeySpace([TableConfig(name="weight", num_embeddings=1, embedding_dim=width, mode=mode)], [0], [0])


def offsets_out_of_order(k: int, value: int, before: int, ids: int, count: int) -> str:
    """What is wrong with offset `k` of `count`, of value `value` after `before`, over `ids` ids."""
    if k == 0 and value != 0:
        return f"offsets[0] must be 0, got {value}; the first bag starts at the first id"
    if k and value < before:
        if value == ids and k == count - 1:  # the end that goes without saying
            k, value = k - 1, before
        else:
            return (
                f"offsets must not fall, but offsets[{k}] = {value} after offsets[{k - 1}] = {before}; "
                f"a bag's offset is where it starts, not its length"
            )
    if value > ids:
        return f"offsets[{k}] = {value} lies beyond the {ids} ids given; offsets count ids"
    return f"the last offset is {value} but there are {ids} ids; it must be their number"


def id_out_of_range(table: str, rows: int, value: int, position: int) -> str:
    """What is wrong with an id."""
    advice = "check the feature's hashing or raise num_embeddings"
    if value < 0:
        advice = "give what is missing an id of its own, and name that padding_idx"
    return f"id {value} at position {position} is out of range for table {table!r} (0 … {rows - 1}); {advice}"
