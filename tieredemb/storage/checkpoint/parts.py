"""Key spaces of which several processes have a part each, and their names and numbers in checkpoints.

A checkpoint that one process has written has an entry for each key space. If several have written it, each process has
an entry of its own, "<space>@<number>", with keys of the whole key space: a process that loads it selects its own from
all entries.
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
        """Which of the whole's `keys` (int64 (K,), ascending) are in the part, bool (K,), and their keys there."""


def part_name(space: str, number: int) -> str:
    """What a checkpoint calls one process's entry."""
    return f"{space}{SEPARATOR}{number}"


def space_of(name: str) -> str:
    """The key space of an entry."""
    return name.partition(SEPARATOR)[0]


def is_parted(names: Iterable[str]) -> bool:
    """Whether the entries are of several processes."""
    return any(SEPARATOR in name for name in names)
