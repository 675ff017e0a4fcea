"""Checkpoints of a model whose tables lie on several ranks: all its collections as one."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tieredemb.sharding import checkpoint
from tieredemb.sharding.distributed_ranks import DistributedRanks
from tieredemb.sharding.header import Phase
from tieredemb.tables.checkpoint import Beside


class Collection(Protocol):
    """One of the model's collections: the `ranks` that save and load it, and the `names` of its tables in the model."""

    @property
    def ranks(self) -> DistributedRanks: ...

    @property
    def names(self) -> tuple[str, ...]: ...


Collections = Sequence[tuple[str, Collection]]  # each with the prefix of its key spaces' names


def save(
    collections: Collections,
    directory: str | os.PathLike[str],
    extra: dict[str, Any],
    *,
    dense: Callable[[], bytes] | None,
) -> None:
    """See `tieredemb.save_checkpoint`. `dense`: returns the dense layers, on rank 0."""
    checkpoint.save(_rows(collections, Phase.SAVE), directory, extra, dense=dense)


def load(
    collections: Collections, directory: str | os.PathLike[str], *, recover: bool, beside: Beside | None
) -> dict[str, Any]:
    """See `tieredemb.load_checkpoint`. `beside`: see `tables.checkpoint.load`."""
    for _, each in collections:
        each.ranks.ready_to_load()
    return checkpoint.load(_rows(collections, Phase.LOAD), directory, recover=recover, beside=beside, stacklevel=5)


def _rows(collections: Collections, phase: Phase) -> list[checkpoint.ShardedRows]:
    return [each.ranks.rows(phase, prefix, each.names) for prefix, each in collections]
