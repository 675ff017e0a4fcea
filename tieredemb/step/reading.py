"""A lookup without gradient on the CPU, of rows whose cold storage a CPU reads as fast as its slots.

One kernel finds the rows, scores them, and pools them where they lie, in a slot or in cold storage. Nothing is planned,
and no row is locked, as no backward follows. The cache then says which of them come into slots (`HostCache.read`).

Scores are those of a plan. Missed rows are scored in cold storage, where one that was never written is generated
first. They come into free slots, and in one step of `BRING_EVERY` also into slots of others. Rows of a dense optimizer
would have to be brought to the current step, so they are planned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tieredemb.cache.base import PlanKind
from tieredemb.cache.plan_cpu import USED, Uses
from tieredemb.errors import StorageError
from tieredemb.kernels.parallel_cpu import even_bounds, parallel_for
from tieredemb.kernels.row_format import CARRIERS
from tieredemb.kernels.tracing import ranged
from tieredemb.lookup.bags import EqualBags, rows_space
from tieredemb.lookup.embedding_bag_cpu import NO_WEIGHTS
from tieredemb.step.batch import Batch
from tieredemb.step.reading_cpu import all_are_right, bags_read
from tieredemb.tables.group import Group, HostGroup

if TYPE_CHECKING:
    from tieredemb.cache.host.cache import Readable
    from tieredemb.step.program import CallContext
    from tieredemb.tables.table_set import Place

    Array = np.ndarray[Any, Any]

READ_GRAIN = 1 << 18  # row elements a thread is worth, beside threads of torch that wait for work without sleeping
_INTS, _WORDS, _LONGS = np.empty(0, np.int32), np.empty((0, 0), np.uint32), np.empty(len(USED), np.int64)
NO_USES = Uses(_INTS, _WORDS.reshape(-1), _WORDS, 0, 0, 0, 0.0, _INTS, False, _LONGS, _LONGS)


def read(batch: Batch, context: CallContext, place: Place, kind: PlanKind) -> torch.Tensor | None:
    """The pooled rows of a batch, (B, ΣD), or the rows of its ids, (N, D), of tables that are read in place. None where
    a plan is needed: `max_norm` scales rows, rows of several features are not pooled, or ids or offsets are wrong, of
    which the plan says what it is."""
    options = context.options
    if options.max_norm is not None or batch.stack is not None:
        return None
    if not place.config.pooled and not (isinstance(batch.offsets, EqualBags) and batch.offsets.length == 1):
        return None
    ids, offsets = batch.ids, batch.offsets
    if ids.dtype is not torch.int64:
        ids = ids.to(torch.int64)
    # a copy, as other threads may be writing to offsets
    edges = offsets.edges() if isinstance(offsets, EqualBags) else offsets.numpy().astype(np.int64)
    dtype, columns = place.config.output_dtype, context.tables.columns
    # numpy's memory, as in `HostCall.pool`
    out = np.empty((batch.size, int(columns[-1])), CARRIERS[dtype])
    weights = NO_WEIGHTS
    if batch.weights is not None:
        weights = batch.weights.detach().to(torch.float32).contiguous().numpy()
    bags = ids.numpy(), edges, batch.exact and len(edges) >= batch.edges  # where the last edge is there
    try:
        for group in place.groups[1:]:  # before the rows of any width are scored
            of, keys = (group.space.first, group.space.size, group.space.padding), np.empty(len(ids), np.int64)
            if not all_are_right(*bags, _blocks(group, batch), batch.size, *of, keys):
                return None
        for group in place.groups:
            its = *bags, _blocks(group, batch), batch.size
            if not _read_group(group, its, weights, options.padding_is_dropped, kind, out):
                return None
    except StorageError:
        if context.tables.placed.now is place:
            raise
        return None  # another thread has made the caches anew meanwhile
    found = torch.from_numpy(out)
    return found if found.dtype is dtype else found.view(dtype)


def _blocks(group: Group, batch: Batch) -> Array:
    """Of each feature of a group the number of its block of bags, int64 (F,)."""
    return group.space.features if batch.places is None else group.space.blocks(batch.places)


@ranged("lookup")
def _read_group(
    group: Group,
    bags: tuple[Array, Array, bool, Array, int],
    weights: Array,
    padding_is_dropped: bool,
    kind: PlanKind,
    out: Array,
) -> bool:
    """Pools the features of one group into their columns of `out`; returns False where ids or offsets are wrong.
    `bags`: ids, offsets, whether the last of these has to be the end of the ids, the block of each feature among the
    bags (`KeySpace.blocks`), and how many a feature has."""
    assert isinstance(group, HostGroup)
    space, ids, batch = group.space, bags[0], bags[-1]
    count = len(ids)
    mode = space.mode if group.config.pooled else rows_space(space.width, "sum").mode
    padding = space.padding if padding_is_dropped else np.full(len(space.padding), -1, np.int64)
    of = (*bags, space.first, space.size, padding, mode, space.column, weights)
    scratch = np.empty(count, np.int64), np.empty(count, np.int64)
    bounds = even_bounds(batch, READ_GRAIN * batch // max(1, count * space.width))

    def look_up(rows: Readable, uses: Uses | None) -> bool:
        if uses is None:
            parallel_for(bags_read, bounds, *of, *rows, *NO_USES, *scratch, out)
            return True
        noting = [-1, *bounds] if len(bounds) > 2 else [-1, batch]
        parallel_for(bags_read, noting, *of, *rows, *uses, *scratch, out)
        return bool(uses.counted[0] >= 0)

    return group.cache.read(look_up, count, kind, client=group.client)
