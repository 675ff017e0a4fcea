"""How one capacity is divided among several caches: each gets the same share of its rows, and at least one row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tieredemb.config import Capacity, is_whole, parse_bytes, parse_capacity, plain
from tieredemb.errors import ConfigError


class Sharer(NamedTuple):
    """A cache that is to share a capacity: the rows behind it, and the bytes that one of its slots takes."""

    rows: int
    slot_bytes: int


def shares(capacity: Capacity, sharers: Sequence[Sharer]) -> list[Capacity]:
    """What of `capacity` each of the `sharers` gets. A share of the rows stays one; rows and bytes are divided. Raises
    `ConfigError` for bytes that hold no row of each."""
    if len(sharers) == 1:
        return [capacity]
    capacity = plain(parse_capacity(capacity) if isinstance(capacity, str) else capacity)
    if isinstance(capacity, str):
        budget, least = parse_bytes(capacity), sum(each.slot_bytes for each in sharers)
        if budget < least:
            raise ConfigError(
                f"capacity {capacity!r} holds no row of each of {len(sharers)} caches; one of each takes {least} bytes"
            )
        total = sum(each.rows * each.slot_bytes for each in sharers)
        return [max(1, (budget - least) * each.rows // total) for each in sharers]
    if is_whole(capacity) and capacity >= 1:
        rows = sum(each.rows for each in sharers)
        return [max(1, capacity * each.rows // rows) for each in sharers]
    return [capacity] * len(sharers)
