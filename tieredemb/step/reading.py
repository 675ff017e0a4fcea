"""A lookup without gradient on the CPU, of rows whose cold storage a CPU reads as fast as its slots.

One kernel finds the rows and pools them where they lie, in a slot or in cold storage. Nothing is planned, and no row is
locked, as no backward follows. The cache then scores the rows, and says which of them come into slots
(`HostCache.read`).

Scores are those of a plan. Missed rows are scored in cold storage, where one that was never written is generated
first. They come into free slots, and in one step of `BRING_EVERY` also into slots of others. Rows of a dense optimizer
would have to be brought to the current step, so they are planned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tieredemb.cache.base import PlanKind
from tieredemb.cache.plan_cpu import NOT_READ
from tieredemb.errors import StorageError
from tieredemb.kernels.parallel_cpu import even_bounds, parallel_for
from tieredemb.kernels.row_format import CARRIERS
from tieredemb.kernels.tracing import ranged
from tieredemb.lookup.bags import EqualBags, rows_space
from tieredemb.lookup.bags_cpu import checked_edges
from tieredemb.lookup.embedding_bag_cpu import NO_WEIGHTS, POOL_GRAIN
from tieredemb.step.batch import Batch
from tieredemb.step.reading_cpu import bags_read, ids_are_inside
from tieredemb.tables.group import HostGroup

if TYPE_CHECKING:
    from tieredemb.cache.host.cache import Readable
    from tieredemb.step.program import CallContext
    from tieredemb.tables.table_set import Place

    Array = np.ndarray[Any, Any]


def read(batch: Batch, context: CallContext, place: Place, kind: PlanKind) -> torch.Tensor | None:
    """The pooled rows of a batch, (B, ΣD), or the rows of its ids, (N, D), of tables that are read in place. None where
    a plan is needed: `max_norm` scales rows, rows of several features are not pooled, or an id is out of range, of
    which the plan says what is wrong. Raises `InvalidInputError` before anything changes."""
    options = context.options
    if options.max_norm is not None or batch.stack is not None:
        return None
    if not place.config.pooled and not (isinstance(batch.offsets, EqualBags) and batch.offsets.length == 1):
        return None
    ids = batch.ids.numpy()
    if ids.dtype != np.int64:
        ids = ids.astype(np.int64)
    if isinstance(batch.offsets, EqualBags):
        edges = batch.offsets.edges()
    else:
        edges = checked_edges(batch.offsets.numpy(), len(ids), batch.edges, exact=batch.exact)
    dtype, columns = place.config.output_dtype, context.tables.columns
    # numpy's memory, as in `HostCall.pool`
    out = np.empty((batch.size, int(columns[-1])), CARRIERS[dtype])
    weights = NO_WEIGHTS
    if batch.weights is not None:
        weights = batch.weights.detach().to(torch.float32).contiguous().numpy()
    try:
        bags = []
        for group in place.groups:
            blocks = group.space.features if batch.places is None else group.space.blocks(batch.places)
            bags.append((ids, edges, blocks, batch.size))
        for group, its in zip(place.groups[1:], bags[1:], strict=True):  # before the rows of any width are scored
            if not ids_are_inside(*its, group.space.size):
                return None
        for group, its in zip(place.groups, bags, strict=True):
            assert isinstance(group, HostGroup)
            if not _read_group(group, its, weights, options.padding_is_dropped, kind, out):
                return None
    except StorageError:
        if context.tables.placed.now is place:
            raise
        return None  # another thread has made the caches anew meanwhile
    return torch.from_numpy(out).view(dtype)


@ranged("lookup")
def _read_group(
    group: HostGroup,
    bags: tuple[Array, Array, Array, int],
    weights: Array,
    padding_is_dropped: bool,
    kind: PlanKind,
    out: Array,
) -> bool:
    """Pools the features of one group into their columns of `out`; returns False where an id is out of range. `bags`:
    ids, edges, the block of each feature among these (`KeySpace.blocks`), and how many bags a feature has."""
    space, (ids, _, _, batch) = group.space, bags
    mode = space.mode if group.config.pooled else rows_space(space.width, "sum").mode
    padding = space.padding if padding_is_dropped else np.full(len(space.padding), -1, np.int64)
    of = (*bags, space.first, space.size, padding, mode, space.column, weights)
    homes = np.empty(len(ids), np.int64)
    homes.fill(NOT_READ)
    bounds = even_bounds(batch, POOL_GRAIN * batch // max(1, len(ids) * space.width))

    def look_up(rows: Readable) -> tuple[Array, int] | None:
        counted = np.zeros(2, np.int64)
        parallel_for(bags_read, bounds, *of, *rows, homes, out, counted)
        missed, bad = counted.tolist()
        return None if bad else (homes, missed)

    return group.cache.read(look_up, kind, client=group.client)
