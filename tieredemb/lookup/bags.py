"""A batch of bags: ids and offsets checked, and turned into keys of one key space.

Bags come table-major, as in FBGEMM and TorchRec's KeyedJaggedTensor: bag `t · B + b` is sample b of table t. A key
space may hold only some of a collection's tables (those of one width); its bags are then copied out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tieredemb.config import MODES, TableConfig
from tieredemb.errors import IdOutOfRangeError, InvalidInputError
from tieredemb.kernels import twin

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

SUM, MEAN, MAX = range(len(MODES))


class KeySpace:
    """The tables that share one cache, in terms of the kernels.

    `tables`: their positions in the collection · `start`: int64 (T + 1,), the first key of each, and the number of
    keys · `column`: int64 (T,), where each writes its outputs · `mode`: int32 (T,) · `padding`: int64 (T,), an id or
    −1.
    """

    def __init__(self, configs: Sequence[TableConfig], tables: Sequence[int], columns: Sequence[int]) -> None:
        chosen = [configs[t] for t in tables]
        self.names = [table.name for table in chosen]
        self.tables = np.array(tables, np.int64)
        self.start = np.concatenate([[0], np.cumsum([table.num_embeddings for table in chosen])]).astype(np.int64)
        self.column = np.array([columns[t] for t in tables], np.int64)
        self.mode = np.array([MODES.index(table.mode) for table in chosen], np.int32)
        self.padding = np.array([-1 if t.padding_idx is None else t.padding_idx for t in chosen], np.int64)
        self.width = chosen[0].embedding_dim
        self.covers_all = len(tables) == len(configs)

    def __len__(self) -> int:
        return len(self.tables)

    @property
    def rows(self) -> int:
        return int(self.start[-1])


@dataclass(frozen=True)
class Bags:
    """The bags of one key space in one batch of B samples.

    `keys`: int64 (N,), negative for padding · `offsets`: int64 (T·B + 1,) into `keys` · `sample`, `table`: int32 (N,),
    the sample and the table of each occurrence · `position`: int64 (N,) of each occurrence in the ids given, or None
    where they are the same.
    """

    keys: Array
    offsets: Array
    sample: Array
    table: Array
    position: Array | None
    batch: int


def check_offsets(offsets: Array, ids: int) -> None:
    """Raises `InvalidInputError` unless `offsets` (int64 (K,), K ≥ 1) rise from 0 to at most `ids`."""
    wrong = np.flatnonzero(offsets[1:] < offsets[:-1]) + 1
    first = 0 if offsets[0] != 0 else int(wrong[0]) if len(wrong) else len(offsets) - 1
    if offsets[0] != 0 or len(wrong) or offsets[-1] > ids:
        before = offsets[first - 1] if first else 0
        raise InvalidInputError(offsets_out_of_order(first, int(offsets[first]), int(before), ids, len(offsets)))


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
    return (
        f"id {value} at position {position} is out of range for table {table!r} (0 … {rows - 1}); "
        f"check the feature's hashing or raise num_embeddings"
    )


def make_bags(ids: Array, offsets: Array, space: KeySpace, batch: int, *, padding_is_dropped: bool) -> Bags:
    """The bags of `space` among `ids` (int32 or int64 (N,)) and checked `offsets` (int64 (T·B + 1,), all tables).

    Padding becomes a negative key if `padding_is_dropped`. Raises `IdOutOfRangeError` for the first id outside its
    table.
    """
    kernels: Any = twin(__name__, torch.device("cpu"))
    local = offsets if space.covers_all else _local_offsets(offsets, space, batch)
    n = int(local[-1])
    bags = Bags(
        keys=np.empty(n, np.int64),
        offsets=local,
        sample=np.empty(n, np.int32),
        table=np.empty(n, np.int32),
        position=None if space.covers_all else np.empty(n, np.int64),
        batch=batch,
    )
    padding = space.padding if padding_is_dropped else np.full(len(space), -1, np.int64)
    bad = kernels.fill(ids, offsets, space, padding, bags)
    if bad >= 0:
        _refuse_id(ids, offsets, space, batch, bad)
    return bags


def _local_offsets(offsets: Array, space: KeySpace, batch: int) -> Array:
    """The offsets of the tables of `space` alone, as if only their ids had been given."""
    local = np.zeros(len(space) * batch + 1, np.int64)
    for j, table in enumerate(space.tables):
        bags = offsets[table * batch : (table + 1) * batch + 1]
        local[j * batch : (j + 1) * batch + 1] = bags - bags[0] + local[j * batch]
    return local


def _refuse_id(ids: Array, offsets: Array, space: KeySpace, batch: int, position: int) -> None:
    bag = int(np.searchsorted(offsets, position, side="right")) - 1
    j = int(np.flatnonzero(space.tables == bag // batch)[0])
    rows = int(space.start[j + 1] - space.start[j])
    raise IdOutOfRangeError(id_out_of_range(space.names[j], rows, int(ids[position]), position))
