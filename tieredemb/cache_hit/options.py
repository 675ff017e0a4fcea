"""What the command line's words for policies and capacities mean."""

from __future__ import annotations

import math
import re

from tieredemb.config import LFU, LRU, Policy, is_whole, parse_bytes, parse_capacity, slots_for
from tieredemb.errors import ConfigError

POLICY_HELP = (
    "lru; lfu (use counts that leave and return with the row); lfu-forget (an evicted row loses its count); "
    "lrfu:HALF_LIFE (counts that halve every HALF_LIFE batches, kept with the row; lrfu alone takes the "
    "library's default); lrfu-forget:HALF_LIFE"
)

_POLICY = re.compile(r"(lru|lfu|lfu-forget|lrfu|lrfu-forget)(?::(.+))?")


def words(values: list[str]) -> list[str]:
    """Splits at commas too, and drops repetitions: `["1%,5%", "1%"]` → `["1%", "5%"]`."""
    return list(dict.fromkeys(word for value in values for word in value.split(",") if word))


def parse_policy(text: str) -> Policy:
    """The policy config of a word such as `lrfu:300`. Raises `ConfigError`."""
    match = _POLICY.fullmatch(text.lower())
    if match is None or (match[2] is not None and not match[1].startswith("lrfu")):
        raise ConfigError(f"policy {text!r} is not known; write one of: {POLICY_HELP}")
    name, half_life = match[1], match[2]
    if name == "lru":
        return LRU()
    remember = not name.endswith("-forget")
    if name.startswith("lfu"):
        return LFU(half_life_batches=math.inf, remember_evicted=remember)
    if half_life is None:
        return LFU(remember_evicted=remember)
    try:
        return LFU(half_life_batches=float(half_life), remember_evicted=remember)
    except ValueError as error:
        raise ConfigError(
            f"policy {text!r} needs a half-life in batches, a number of at least 1, as in 'lrfu:300'"
        ) from error


def capacity_rows(text: str, rows: int) -> int:
    """Rows that a word means on a table of `rows` rows: a count (`2583`), or a share (`0.01`, `1%`; rounded
    up, as everywhere in the library). Raises `ConfigError` for anything else and for more than `rows`."""
    capacity = parse_capacity(text)
    if isinstance(capacity, str):
        raise ConfigError(
            f"capacity {text!r} is not understood; write rows ('2583') or a share of the rows ('0.01', '1%')"
        )
    try:
        if is_whole(capacity) and not 1 <= capacity <= rows:
            raise ConfigError(f"it must lie in 1 … {rows} rows")
        return slots_for(capacity, rows=rows, slot_bytes=1)
    except ConfigError as error:
        raise ConfigError(f"capacity {text!r} is not possible: {error}") from error


def capacity_bytes(text: str, total: int) -> int:
    """Bytes that a word means where all rows take `total` of them: bytes (`8MiB`), or a share (`0.01`, `1%`). Raises
    `ConfigError` for anything else."""
    capacity = parse_capacity(text)
    if isinstance(capacity, str):
        return min(total, parse_bytes(capacity))
    if is_whole(capacity) or not 0 < capacity <= 1:
        raise ConfigError(f"capacity {text!r} of several traces is one in bytes ('8MiB') or a share ('0.01', '1%')")
    return max(1, int(total * capacity))
