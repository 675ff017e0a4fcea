"""Caches that share one capacity, which is divided among them by what their rows are used for, again and again."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from tieredemb.errors import DeviceMemoryError, StorageError
from tieredemb.tables.shares import by_use, passing_share
from tieredemb.tables.use import use_of

if TYPE_CHECKING:
    from tieredemb.tables.group import Group

FIRST, MOST = 20, 5000  # plans until the first look at what rows are used for, and between two looks at most
PATIENCE = 8  # calls in a row that find batches in flight, before it is put off
LEAST_GAIN = 0.0002  # of all lookups, that more of them hit: for less no cache is made anew
LEAST_PASSING = 0.04  # a batch uses over five times what caches hold: which rows stay is chance


class Sharing(Protocol):
    """A set of tables whose caches share a capacity, among themselves or with those of others."""

    division: Division | None

    @property
    def groups(self) -> list[Group]: ...

    def resize(self, slots: Sequence[int]) -> None:
        """Gives the cache of each group another number of slots. Raises `StorageError` while batches are in flight,
        and `DeviceMemoryError`, before anything changes."""


class Division:
    """The capacity that all caches of some sets of tables share, of those on one device. It is looked at after `FIRST`
    plans, then each time that they have doubled, between steps, and divided anew where that serves more lookups. Which
    rows are cached changes no number."""

    def __init__(self, sets: Iterable[Sharing]) -> None:
        self._sets = [weakref.ref(tables) for tables in sets]
        self._next = self._gap = FIRST  # plans until the next look
        self._waits = self._replays = 0

    def _there(self) -> list[Sharing]:
        return [tables for tables in (each() for each in self._sets) if tables is not None]

    @property
    def is_due(self) -> bool:
        """Whether it is time to look. Does not synchronise."""
        return any(self.is_due_in(tables) for tables in self._there())

    def is_due_in(self, tables: Sharing) -> bool:
        """The same, as one of the sets tells, whose groups plan equally often."""
        return tables.groups[0].cache.plans + self._replays >= self._next

    def note_replay(self) -> None:
        """A captured step is replayed, whose plan the host does not count."""
        self._replays += 1

    def divide(self) -> None:
        """Looks, and divides anew where that pays; unless batches are in flight, or a CUDA graph is being captured:
        then at one of the next calls, or later. Caches that a graph of the user's knows stay. Synchronises with a
        GPU."""
        sets = self._there()
        caches = [group.cache for tables in sets for group in tables.groups]
        is_free = all(cache.is_idle for cache in caches) and not _is_capturing(caches[0].device)
        self._waits = 0 if is_free else self._waits + 1
        if not is_free and self._waits < PATIENCE:
            return
        try:
            if is_free and not any(cache.is_in_graph for cache in caches):
                # where another thread's batch has come meanwhile, or old and new caches have no room together, it stays
                with contextlib.suppress(StorageError, DeviceMemoryError):
                    self._divide(sets)
        finally:
            plans = max(group.cache.plans for tables in sets for group in tables.groups)
            self._next, self._gap = plans + self._replays + self._gap, min(2 * self._gap, MOST)

    def _divide(self, sets: list[Sharing]) -> None:
        groups = [group for tables in sets for group in tables.groups]
        if len({group.config.device for group in groups}) > 1:  # some were moved by themselves
            return
        for group in groups:
            group.cache.write_back()  # scores, too
        uses = [use for use in map(use_of, groups) if use is not None]
        if len(uses) < len(groups):
            return
        budget = sum(group.slots * group.slot_bytes for group in groups)
        slots = by_use(budget, uses)
        passing = passing_share(budget, uses)
        if passing < LEAST_PASSING:
            return
        now, then = (
            sum(use.hits(each, passing) for use, each in zip(uses, given, strict=True))
            for given in ([group.slots for group in groups], slots)
        )
        if then - now < LEAST_GAIN * sum(float(use.lookups @ use.stands_for) for use in uses):
            return
        given = iter(slots)
        changed = [(tables, [next(given) for _ in tables.groups]) for tables in sets]
        for tables, own in sorted(changed, key=lambda change: _more_bytes(*change)):  # first those that give room
            if own != [group.slots for group in tables.groups]:
                tables.resize(own)


def share_capacity(sets: Sequence[Sharing]) -> None:
    """The capacity of these sets is one, on each device, from here on."""
    for device in {tables.groups[0].config.device for tables in sets}:
        there = [tables for tables in sets if tables.groups[0].config.device == device]
        if sum(len(tables.groups) for tables in there) > 1:
            division = Division(there)
            for tables in there:
                tables.division = division


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _more_bytes(tables: Sharing, slots: list[int]) -> int:
    """How many more the caches take with so many slots."""
    return sum((new - group.slots) * group.slot_bytes for group, new in zip(tables.groups, slots, strict=True))
