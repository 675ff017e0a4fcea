"""How one capacity is divided among several caches: at first each gets the same share of its rows, and at least one;
once it is known what rows are used for, each gets what serves most lookups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tieredemb.config import Capacity, as_capacity, is_whole, parse_bytes
from tieredemb.errors import ConfigError
from tieredemb.tables.use import Use


class Sharer(NamedTuple):
    """A cache that is to share a capacity: the rows behind it, and the bytes that one of its slots takes."""

    rows: int
    slot_bytes: int


def shares(capacity: Capacity, sharers: Sequence[Sharer]) -> list[Capacity]:
    """What of `capacity` each of the `sharers` gets. A share of the rows stays one; rows and bytes are divided. Raises
    `ConfigError` for bytes that hold no row of each."""
    capacity = as_capacity(capacity)
    if len(sharers) == 1:
        return [capacity]
    if isinstance(capacity, str):
        budget, least = parse_bytes(capacity), sum(each.slot_bytes for each in sharers)
        if budget < least:
            raise ConfigError(
                f"capacity {capacity!r} holds no row of each of {len(sharers)} caches; one of each takes {least} "
                f"bytes; raise the capacity, or give the tables fewer widths"
            )
        total = sum(each.rows * each.slot_bytes for each in sharers)
        return [max(1, (budget - least) * each.rows // total) for each in sharers]
    if is_whole(capacity) and capacity >= 1:
        rows = sum(each.rows for each in sharers)
        return [max(1, capacity * each.rows // rows) for each in sharers]
    return [capacity] * len(sharers)


def by_use(budget: int, uses: Sequence[Use]) -> list[int]:
    """Slots of each cache, which together take at most `budget` bytes, or the least that the caches need if that is
    more. Slots go to the rows with most lookups per byte, of any cache. If bytes are left when all rows that are used
    have a slot, they are divided among the caches in proportion to the bytes of their other rows."""
    passing = passing_share(budget, uses)
    slots = np.array([use.least + passing * use.in_batch for use in uses])
    sizes = np.array([use.slot_bytes for use in uses])
    of = np.repeat(np.arange(len(uses)), [len(use.share) for use in uses])
    taken = np.concatenate([use.stands_for * (1.0 - passing * use.share) for use in uses])  # slots of rows held
    price = taken * sizes[of]
    worth = np.concatenate([use.stands_for * use.lookups for use in uses]) / np.maximum(price, 1e-9)
    order = np.argsort(-worth, kind="stable")
    spent, left = np.cumsum(price[order]), budget - float(slots @ sizes)
    held = int(np.searchsorted(spent, left, side="right"))
    slots += np.bincount(of[order[:held]], weights=taken[order[:held]], minlength=len(uses))
    if held < len(order) and left > 0:  # a part of the rows that the next one stands for
        slots[of[order[held]]] += (left - (spent[held - 1] if held else 0)) / sizes[of[order[held]]]
    slots = np.minimum(slots, [use.rows for use in uses])
    uncached = np.array([use.rows for use in uses]) - slots
    free, total = budget - float(slots @ sizes), float(uncached @ sizes)
    if free > 0 and total > 0:
        slots += uncached * min(1.0, free / total)
    given = [max(use.least, int(each)) for use, each in zip(uses, slots, strict=True)]
    left_over = budget - sum(each * use.slot_bytes for use, each in zip(uses, given, strict=True))
    for number in sorted(range(len(uses)), key=lambda number: -uses[number].slot_bytes):
        use = uses[number]
        more = max(0, min(left_over // use.slot_bytes, use.rows - given[number]))
        given[number] += more
        left_over -= more * use.slot_bytes
    return given


def passing_share(budget: int, uses: Sequence[Use]) -> float:
    """How much of what a batch uses can have slots while it passes: all, or as much as a fifth of the bytes holds."""
    in_batch = sum(use.in_batch * use.slot_bytes for use in uses)
    left = max(0, budget - sum(use.least * use.slot_bytes for use in uses))
    return min(1.0, left / (5 * in_batch)) if in_batch else 1.0
