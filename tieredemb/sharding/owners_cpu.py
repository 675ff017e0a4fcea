"""Which rank owns the row of each occurrence, and which occurrence is the first of its row: on a CPU what `owners.cu`
does, for row-wise tables.

A hash table of each table's ids finds the first ones, in half the time of a sort.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tieredemb.hash.slot_map_cpu import first_cell
from tieredemb.kernels.constants import DROPPED, EMPTY_CELL
from tieredemb.kernels.cpu import inline
from tieredemb.kernels.parallel_cpu import even_bounds, over_ranges, parallel_for
from tieredemb.lookup.bags import KeySpace
from tieredemb.lookup.bags_cpu import Bags

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

GRAIN = 8192  # occurrences a thread is worth
CELLS = 2  # for an occurrence, in the hash table


class Owners(NamedTuple):
    """What is requested of which rank. `counts`, `firsts`: int64 (W, F), how many occurrences of each feature a rank
    owns the row of, and how many of these are the first of their row · `order`: int64 (K,), those occurrences by rank ·
    `requested`: int64 (K,), the number of each one's row among those that its owner holds of the table, inverted (~)
    where the occurrence is not the first · `homes`: int32 (N,), the position of each occurrence's row among those that
    come back, one for each first occurrence; `DROPPED` for padding."""

    counts: Array
    firsts: Array
    order: Array
    requested: Array
    homes: Array


def find_owners(bags: Bags, space: KeySpace, ranks: int) -> Owners:
    """The owners of the rows of `bags`."""
    n, features, tables = len(bags.keys), len(space.features), len(space.tables)
    edges = bags.offsets[:: bags.batch] if bags.batch else np.zeros(features + 1, np.int64)
    of = bags.keys, edges, np.searchsorted(space.table, np.arange(tables + 1)), space.start, space.tables, ranks
    counts, firsts = np.zeros((ranks, features), np.int64), np.zeros((ranks, features), np.int64)
    owner, number, homes = np.empty(n, np.int32), np.empty(n, np.int32), np.empty(n, np.int32)
    bounds = even_bounds(tables, GRAIN * tables // max(1, n))
    parallel_for(owners_find, bounds, *of, owner, number, counts, firsts)
    requested = np.empty(counts.sum(), np.int64)
    order = np.empty_like(requested)
    parallel_for(requests_place, bounds, *of, owner, number, _starts(counts), _starts(firsts), order, requested, homes)
    return Owners(counts, firsts, order, requested, homes)


def _starts(counts: Array) -> Array:
    """Where the counts of each rank and feature begin, rank by rank: int64 (W, F)."""
    starts: Array = (np.cumsum(counts) - counts.ravel()).reshape(counts.shape)
    return starts


@inline
def first_of(keys, i, cells):
    """The first occurrence with the key of occurrence i, among those entered in `cells` so far; enters i if there is
    none. `cells` hold occurrences + 1."""
    n = cells.shape[0]
    cell = first_cell(keys[i], n)
    while cells[cell] != EMPTY_CELL:
        first = np.int64(cells[cell]) - 1
        if keys[first] == keys[i]:
            return first
        cell = cell + 1 if cell + 1 < n else 0
    cells[cell] = i + 1
    return np.int64(i)


@over_ranges
def owners_find(lo, hi, keys, edges, features, start, names, ranks, owner, number, counts, firsts):
    """Writes, for the occurrences of tables lo … hi − 1, `owner`: the rank that owns the row, or −1; and `number`: of a
    first occurrence its number among those of its feature and rank; of others the first occurrence, inverted.
    `features`: int64 (T + 1,), where the tables' features begin. Moves 20 bytes an occurrence, and as many at random in
    cells and keys."""
    for table in range(lo, hi):
        begin, end = edges[features[table]], edges[features[table + 1]]
        cells = np.zeros(CELLS * (end - begin) + 1, np.int32)
        for feature in range(features[table], features[table + 1]):
            for i in range(edges[feature], edges[feature + 1]):
                if keys[i] < 0:
                    owner[i] = -1
                    continue
                rank = np.int64(np.uint64(keys[i] - start[table] + names[table]) % np.uint64(ranks))
                owner[i] = rank
                first = first_of(keys, i, cells)
                if first == i:
                    number[i] = firsts[rank, feature]
                    firsts[rank, feature] += 1
                else:
                    number[i] = ~first
                counts[rank, feature] += 1


@over_ranges
def requests_place(
    lo, hi, keys, edges, features, start, names, ranks, owner, number, next_entry, first_row, order, requested, homes
):
    """Writes what is requested for the occurrences of tables lo … hi − 1, in their order, and the positions of their
    rows. `next_entry`, `first_row`: int64 (W, F), where the requests of a rank and feature begin, which is counted up,
    and where its rows begin. Moves 40 bytes an occurrence."""
    for table in range(lo, hi):
        for feature in range(features[table], features[table + 1]):
            for i in range(edges[feature], edges[feature + 1]):
                rank = owner[i]
                if rank < 0:
                    homes[i] = DROPPED
                    continue
                k = next_entry[rank, feature]
                next_entry[rank, feature] += 1
                local = np.int64(np.uint64(keys[i] - start[table]) // np.uint64(ranks))
                order[k] = i
                if number[i] >= 0:
                    homes[i] = first_row[rank, feature] + number[i]
                    requested[k] = local
                else:
                    homes[i] = homes[~number[i]]
                    requested[k] = ~local
