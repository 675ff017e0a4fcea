"""A lookup without gradient on the CPU, of rows whose cold storage a CPU reads as fast as its slots.

One kernel finds the rows, scores them, and pools them in place, in a slot or in cold storage. Nothing is planned, and
no row is locked, as no backward follows. The cache then fills some of them into slots (`HostCache.read`).

Scores are those of a plan. Missed rows are scored in cold storage; a row that was never written is generated there
first. They are filled into free slots, and in one step of `FILL_EVERY` also replace others. Rows of a dense optimizer
would have to catch up, so they are planned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tieredemb.cache.base import PlanKind
from tieredemb.errors import StorageError
from tieredemb.kernels.parallel_cpu import even_bounds, parallel_for
from tieredemb.kernels.row_format import CARRIERS
from tieredemb.kernels.tracing import ranged
from tieredemb.lookup.bags import BLOCK, EqualBags
from tieredemb.lookup.embedding_bag_cpu import NO_WEIGHTS
from tieredemb.step.batch import Batch
from tieredemb.step.reading_cpu import all_are_right, bags_read, scratch_longs
from tieredemb.tables.group import Group, HostGroup

if TYPE_CHECKING:
    from tieredemb.cache.host.cache import Readable
    from tieredemb.step.program import CallContext
    from tieredemb.tables.table_set import Place

    Array = np.ndarray[Any, Any]
    Bags = tuple[int, int, int, int, int, bool]

READ_GRAIN = 1 << 18  # row elements that are worth a thread, while torch's idle threads spin
_scratch_longs = scratch_longs.py_func


def read(batch: Batch, context: CallContext, place: Place, kind: PlanKind) -> torch.Tensor | None:
    """The pooled rows of a batch, (B, ΣD), or the rows of its ids, (N, D), of tables that are read in place. None if a
    plan is needed: `max_norm` scales rows, rows of several features are not pooled, or ids or offsets are wrong, for
    which the plan raises."""
    options, config, offsets, ids = context.options, place.config, batch.offsets, batch.ids
    if options.max_norm is not None or batch.stack is not None:
        return None
    if isinstance(offsets, EqualBags):
        offsets_at, given, length = 0, offsets.bags + 1, offsets.length
    else:
        if offsets.dtype is not torch.int64:
            offsets = offsets.to(torch.int64)
        offsets_at, given, length = offsets.data_ptr(), offsets.shape[0], -1
    if given < batch.edges - 1 or not (config.pooled or length == 1):
        return None
    if ids.dtype is not torch.int64:
        ids = ids.to(torch.int64)
    ids_at, count = ids.data_ptr(), ids.shape[0]
    if (count and not ids_at) or (length < 0 and given and not offsets_at):
        return None  # a subclass of tensors, without memory
    # the last edge may be missing
    bags = ids_at, count, offsets_at, given, length, batch.exact and given >= batch.edges
    # numpy's memory, as in `HostCall.pool`
    out = np.empty((batch.size, int(context.tables.columns[-1])), CARRIERS[config.output_dtype])
    weights = NO_WEIGHTS
    if batch.weights is not None:
        weights = batch.weights.detach().to(torch.float32).contiguous().numpy()
    skips = options.padding_is_dropped
    try:
        for group in place.groups[1:]:  # before the rows of any width are scored
            if not all_are_right(*bags, _features(group, batch), batch.size, skips, _scratch(bags)):
                return None
        for group in place.groups:
            if not _read_group(group, bags, batch, skips, weights, kind, out):
                return None
    except StorageError:
        if context.tables.placed.now is place:
            raise
        return None  # meanwhile another thread has replaced the caches
    found = torch.from_numpy(out)
    return found if found.dtype is config.output_dtype else found.view(config.output_dtype)


def _features(group: Group, batch: Batch) -> Array:
    """The features of a group as kernels take them; see `KeySpace.packed`."""
    assert isinstance(group, HostGroup)
    if batch.places is None:
        return group.features
    features = group.features.copy()
    features[BLOCK] = group.space.blocks(batch.places)
    return features


def _scratch(bags: Bags) -> Array:
    return np.empty(_scratch_longs(bags[1], bags[3]), np.int64)


@ranged("lookup")
def _read_group(
    group: Group, bags: Bags, batch: Batch, skips: bool, weights: Array, kind: PlanKind, out: Array
) -> bool:
    """Pools the features of one group into their columns of `out`; returns False if ids or offsets are wrong. `bags`,
    `skips`: see `bags_are_right`."""
    assert isinstance(group, HostGroup)
    features, size = _features(group, batch), batch.size
    bounds = even_bounds(size, READ_GRAIN * size // max(1, bags[1] * group.space.width))

    def look_up(rows: Readable, *, notes: bool) -> Array:
        scratch, job_bounds = _scratch(bags), bounds
        if notes:
            job_bounds = [-1, *bounds] if len(bounds) > 2 else [-1, size]
        parallel_for(bags_read, job_bounds, *bags, features, size, skips, weights, *rows, scratch, out)
        return scratch

    return group.cache.read(look_up, kind, client=group.client)
