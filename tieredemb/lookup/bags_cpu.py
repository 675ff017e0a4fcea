"""The bags of a batch on the CPU: ids and offsets checked, and turned into keys of one key space."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tieredemb.errors import IdOutOfRangeError, InvalidInputError
from tieredemb.kernels.cpu import jit
from tieredemb.kernels.parallel_cpu import even_bounds, over_ranges, parallel_for
from tieredemb.lookup.bags import KeySpace, Places, id_out_of_range, offsets_out_of_order

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

BAG_GRAIN = 2048
ALL_VALID = -1


@dataclass(frozen=True)
class Bags:
    """The bags of one key space in one batch of B samples.

    `keys`: int64 (N,), negative for padding · `offsets`: int64 (F·B + 1,) into `keys`, or (F·(B + 1),) if features
    `have_ends`: then ids that are in no bag may lie between them · `sample`, `feature`: int32 (N,), the sample and the
    feature of each occurrence · `position`: int64 (N,) of each occurrence in the ids given, or None where they are the
    same.
    """

    keys: Array
    offsets: Array
    sample: Array
    feature: Array
    position: Array | None
    batch: int
    have_ends: bool = False


def checked_edges(offsets: Array, ids: int, edges: int, *, exact: bool) -> Array:
    """Checked offsets with the end of the last bag, as an int64 array of our own: backward reads them again, and
    loaders reuse their buffers. `edges`: how many there are to be, the last of which may be missing and is then `ids` ·
    `exact`: whether the last must be that. Raises `InvalidInputError`."""
    given = len(offsets)
    array = np.empty(max(given, edges), np.int64)
    array[:given] = offsets
    array[given:] = ids
    if given and not offsets_rise(array, given, ids):
        check_offsets(array[:given], ids)
    if exact and array[-1] != ids:
        before = int(array[-2]) if len(array) > 1 else 0
        raise InvalidInputError(offsets_out_of_order(len(array) - 1, int(array[-1]), before, ids, len(array)))
    return array


def check_offsets(offsets: Array, ids: int) -> None:
    """Raises `InvalidInputError` unless `offsets` (int64 (K,), K ≥ 1) rise from 0 to at most `ids`."""
    wrong = np.flatnonzero(offsets[1:] < offsets[:-1]) + 1
    first = 0 if offsets[0] != 0 else int(wrong[0]) if len(wrong) else len(offsets) - 1
    if offsets[0] != 0 or len(wrong) or offsets[-1] > ids:
        before = offsets[first - 1] if first else 0
        raise InvalidInputError(offsets_out_of_order(first, int(offsets[first]), int(before), ids, len(offsets)))


@jit
def offsets_rise(offsets, count, ids):
    """Whether the first `count` of `offsets`, one at least, rise from 0 to at most `ids`."""
    good = offsets[0] == 0 and offsets[count - 1] <= ids
    for k in range(1, count):
        good &= offsets[k - 1] <= offsets[k]
    return good


def join_edges(offsets: Array, which: Array, parts: Array, counts: Array, batch: int, edges: Array) -> bool:
    """Fills `edges`, int64 (·,), with the edges of bags of features that were looked up separately, as
    `device_bags.join_bags` does. Returns whether all offsets rise from 0 to at most the feature's number of ids.
    `offsets`: int64 (U, B), distinct ones · `which`: int64 (K,), for each feature with offsets their row there ·
    `parts`: int64 (5, F), for each feature the number of ids of its pool before its own; its position in `which`, or
    −1; the length of its bags without offsets; the number of its pool; and for the last one in a pool that pool's
    number of ids, else −1 · `counts`: ids of each feature, int64 (F,)."""
    features = parts.shape[1]
    good = np.ones(features, np.bool_)
    bounds = even_bounds(features, max(1, BAG_GRAIN // batch))
    parallel_for(edges_join, bounds, offsets, which, parts, counts, batch, edges, good)
    return bool(good.all())


@over_ranges
def edges_join(lo, hi, offsets, which, parts, counts, batch, edges, good):
    """The bags of features lo … hi − 1. Moves 16 bytes a bag."""
    for f in range(lo, hi):
        start, block, length, pool, end = parts[0, f], parts[1, f], parts[2, f], parts[3, f], parts[4, f]
        to = f * batch + pool
        if block < 0:
            for b in range(batch):
                edges[to + b] = start + b * length
        else:
            own = offsets[which[block]]
            good[f] = offsets_rise(own, batch, counts[f])
            for b in range(batch):
                edges[to + b] = start + own[b]
        if end >= 0:
            edges[to + batch] = end


def make_bags(
    ids: Array,
    offsets: Array,
    space: KeySpace,
    batch: int,
    *,
    padding_is_dropped: bool,
    places: Places | None = None,
) -> Bags:
    """The bags of `space` among `ids` (int32 or int64 (N,)) and checked `offsets` (int64, of all features, or of
    those at `places`).

    Padding becomes a negative key if `padding_is_dropped`. Raises `IdOutOfRangeError` for the first id outside its
    table.
    """
    blocks = space.features if places is None else space.blocks(places)
    is_all = space.covers_all and places is None
    local = offsets if is_all else _local_offsets(offsets, blocks, batch)
    n = int(local[-1])
    bags = Bags(
        keys=np.empty(n, np.int64),
        offsets=local,
        sample=np.empty(n, np.int32),
        feature=np.empty(n, np.int32),
        position=None if is_all else np.empty(n, np.int64),
        batch=batch,
    )
    padding = space.padding if padding_is_dropped else np.full(len(space.features), -1, np.int64)
    bad = fill(ids, offsets, blocks, space, padding, bags)
    if bad >= 0:
        _refuse_id(ids, offsets, blocks, space, batch, bad)
    return bags


def one_by_one(bags: Bags) -> Bags:
    """Bags of one occurrence each, with a sample of its own."""
    n = len(bags.keys)
    own = np.arange(n + 1, dtype=np.int64)
    return Bags(bags.keys, own, own[:n].astype(np.int32), bags.feature, bags.position, n)


def _local_offsets(offsets: Array, blocks: Array, batch: int) -> Array:
    """The offsets of some blocks of bags alone, as if only their ids had been given."""
    local = np.zeros(len(blocks) * batch + 1, np.int64)
    for j, block in enumerate(blocks):
        bags = offsets[block * batch : (block + 1) * batch + 1]
        local[j * batch : (j + 1) * batch + 1] = bags - bags[0] + local[j * batch]
    return local


def _refuse_id(ids: Array, offsets: Array, blocks: Array, space: KeySpace, batch: int, position: int) -> None:
    bag = int(np.searchsorted(offsets, position, side="right")) - 1
    j = int(np.flatnonzero(blocks == bag // batch)[0])
    raise IdOutOfRangeError(id_out_of_range(space.names[j], int(space.size[j]), int(ids[position]), position))


def fill(ids: Array, offsets: Array, blocks: Array, space: KeySpace, padding: Array, bags: Bags) -> int:
    """Fills the arrays of `bags` but its offsets; returns the first position of an id out of range, or −1."""
    position = np.empty(0, np.int64) if bags.position is None else bags.position
    of = (blocks, space.first, space.size, padding)
    outputs = (bags.keys, bags.sample, bags.feature, position)
    bounds = even_bounds(len(space.features) * bags.batch, BAG_GRAIN)
    bad = np.full(bounds[-1] // BAG_GRAIN + 1, ALL_VALID)  # the first of a range, by the grain that it begins in
    parallel_for(bags_fill, bounds, ids, offsets, bags.offsets, *of, bags.batch, *outputs, bad)
    return min((first for first in bad.tolist() if first != ALL_VALID), default=ALL_VALID)


@over_ranges
def bags_fill(lo, hi, ids, offsets, local, blocks, start, size, padding, batch, keys, sample, feature, position, found):
    """Bags lo … hi − 1 of the key space. Moves 8 + 16 bytes an occurrence."""
    bad = ALL_VALID
    for bag in range(lo, hi):
        j = bag // batch
        b = bag - j * batch
        first = offsets[blocks[j] * batch + b]
        rows = size[j]
        for k in range(local[bag], local[bag + 1]):
            i = first + k - local[bag]
            row = np.int64(ids[i])
            if (row < 0 or row >= rows) and bad == ALL_VALID:
                bad = i
            keys[k] = -1 if row == padding[j] else row + start[j]
            sample[k] = b
            feature[k] = j
            if position.shape[0] > 0:
                position[k] = i
    found[lo // BAG_GRAIN] = bad
