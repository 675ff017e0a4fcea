"""Key spaces of which several processes hold a part each, as checkpoints name and number them.

A checkpoint that one process has written has an entry for each key space. Of one that several have written every
process has an entry of its own, "<space>@<number>", whose keys are those of the whole key space: who loads it takes
those that are its own from all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from tieredemb.config import Array

SEPARATOR = "@"


class KeyPart(Protocol):
    """A part of a key space, whose rows are numbered by themselves. `rows`: of the whole key space."""

    @property
    def rows(self) -> int: ...

    def holds(self, keys: Array) -> Array:
        """Which of the part's `keys` (int64 (K,)) are rows of the whole, bool (K,): a part of no rows has one, too."""

    def whole(self, keys: Array) -> Array:
        """What the whole key space calls the part's `keys`, int64 (K,): ascending where they are."""

    def own(self, keys: Array) -> tuple[Array, Array]:
        """Which of the whole's `keys` (int64 (K,), ascending) are the part's, bool (K,), and what it calls those."""


def part_name(space: str, number: int) -> str:
    """What a checkpoint calls one process's entry."""
    return f"{space}{SEPARATOR}{number}"


def space_of(name: str) -> str:
    """The key space of an entry."""
    return name.partition(SEPARATOR)[0]


def is_parted(names: Iterable[str]) -> bool:
    """Whether entries are those of several processes."""
    return any(SEPARATOR in name for name in names)
