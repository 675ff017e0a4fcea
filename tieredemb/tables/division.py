"""Divides one capacity among several caches by the use of their rows, anew from time to time.

Now and then a sample of the scores shows which share of the batches uses a row, and so how often a batch looks it up
(`use`). Sampling changes nothing. Slots go where a byte serves most lookups (`shares.by_use`). Caches of changed sizes
are replaced by new ones over the same cold rows, as in a move to another device, and filled with the most used rows by
an unscored plan. So no number changes, and an interrupt leaves the old caches or the new ones.

This is done while no ticket is in flight, before the plan of a forward. Other threads that were about to use the old
caches plan again, as the place of the tables has changed (`table_set.PlaceLocks`). Prefetch leaves a batch unplanned
for it. A captured step is captured anew, as its tables have another place; a cache whose addresses are in a user's
graph is never replaced.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from tieredemb.cache.base import Look
from tieredemb.errors import DeviceMemoryError, StorageError
from tieredemb.tables.shares import by_use, passing_share
from tieredemb.tables.use import use_of

if TYPE_CHECKING:
    from tieredemb.tables.group import Group

FIRST, MOST = 20, 5000  # plans until the first look at the use of rows, and at most between two looks
# × the plans before a look, until the next one: after a look that has changed sizes, and after another
GROWTH, UNCHANGED_GROWTH = 2, 8
PATIENCE = 64  # forwards with batches in flight, before a look is postponed
# additional hits, as a share of all lookups, that justify new caches, which take as long as dozens of steps; more if
# there are fewer plans than that between two looks
LEAST_GAIN, LEAST_GAIN_PLANS = 0.0002, 400
LEAST_PASSING = 0.04  # of `passing_share`: below it a batch uses over five times what caches hold, and hits are random


class Sharing(Protocol):
    """A set of tables whose caches share a capacity, with each other or with those of other sets."""

    division: Division | None

    @property
    def groups(self) -> list[Group]: ...

    def resize(self, slots: Sequence[int]) -> None:
        """Gives the cache of each group another number of slots. Raises `StorageError` while batches are in flight,
        and `DeviceMemoryError`, before anything changes."""


class Division:
    """The capacity that all caches of some sets of tables on one device share. After `FIRST` plans, and then after
    multiples (`GROWTH`, `UNCHANGED_GROWTH`), it looks at their use, between steps, and divides the capacity anew if
    that serves more lookups. Which rows are cached changes no number. A copy of it, as of a module, has no sets until
    these `join`."""

    def __init__(self, sets: Iterable[Sharing] = ()) -> None:
        self._sets = [weakref.ref(tables) for tables in sets]
        self._gap = FIRST  # plans from one look to the next
        self._wanted = False  # whether the next forward without batches in flight is to look
        self._waits = self._replays = 0
        self._capacity: tuple[list[int], int] | None = None  # bytes of slots, and of all, at the first division
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return Division, ()

    def join(self, tables: Sharing) -> None:
        """Adds tables that share the capacity."""
        self._sets.append(weakref.ref(tables))
        tables.division = self

    def _there(self) -> list[Sharing]:
        return [tables for tables in (each() for each in self._sets) if tables is not None]

    def request_if_due(self) -> bool:
        """Returns whether a look is due; if so, the next forward of any of the sets does it. Does not synchronise."""
        self._wanted = self._wanted or any(self.is_due_in(tables) for tables in self._there())
        return self._wanted

    def is_due_in(self, tables: Sharing) -> bool:
        """Whether a look is due, by the plans of one of the sets, whose groups plan equally often."""
        cache = tables.groups[0].cache
        return self._wanted or cache.plans - cache.looked_at.plans + self._replays >= self._gap

    def note_replay(self) -> None:
        """Called when a captured step is replayed, whose plan the host does not count."""
        self._replays += 1

    def divide(self) -> None:
        """Reads how often rows are used, and divides the capacity again if that pays. If batches are in flight, or a
        CUDA graph is being captured, a later call does it. Caches in a user's graph stay. Synchronises with a GPU."""
        if not self._lock.acquire(blocking=False):  # another thread does it
            return
        try:
            sets = self._there()
            groups = [group for tables in sets for group in tables.groups]
            is_free = all(group.cache.is_idle for group in groups) and not _is_capturing(groups[0].cache.device)
            if not is_free and self._waits < PATIENCE:
                self._wanted, self._waits = True, self._waits + 1
                return
            self._wanted, self._waits, self._replays = False, 0, 0
            for group in groups:
                group.cache.looked_at = group.cache.looked_at._replace(plans=group.cache.plans)
            if not is_free or any(group.cache.is_in_graph for group in groups):
                return
            # if another thread has a batch meanwhile, or old and new caches do not fit in memory, nothing changes
            with contextlib.suppress(StorageError, DeviceMemoryError, MemoryError):
                self._look(sets)
        finally:
            self._lock.release()

    def _look(self, sets: list[Sharing]) -> None:
        groups = [group for tables in sets for group in tables.groups]
        if len({group.config.device for group in groups}) > 1:  # some were moved separately
            return
        batches = [group.cache.stats().batches - group.cache.looked_at.batches for group in groups]
        if max(batches) < FIRST // 2:  # several plans are one batch
            return
        gap, self._gap = self._gap, min(GROWTH * self._gap, MOST)
        try:
            if not self._divide(sets, max(batches)):
                self._gap = min(UNCHANGED_GROWTH * gap, MOST)
        finally:
            for group in (group for tables in sets for group in tables.groups):
                counted = group.cache.counted(None)
                group.cache.looked_at = Look(group.cache.plans, counted.batches, counted.lookups)

    def _divide(self, sets: list[Sharing], batches: int) -> bool:
        """Divides the capacity; returns whether caches have new sizes."""
        groups = [group for tables in sets for group in tables.groups]
        uses = [use for group in groups if (use := use_of(group, batches)) is not None]
        if len(uses) < len(groups):
            return False
        sizes = [group.slot_bytes for group in groups]
        if self._capacity is None or self._capacity[0] != sizes:
            self._capacity = sizes, sum(group.slots * group.slot_bytes for group in groups)
        budget = self._capacity[1]
        slots = by_use(budget, uses)
        passing = passing_share(budget, uses)
        if passing < LEAST_PASSING:
            return False
        now, then = (
            sum(use.hits(each, passing) for use, each in zip(uses, given, strict=True))
            for given in ([group.slots for group in groups], slots)
        )
        least = LEAST_GAIN * max(1.0, LEAST_GAIN_PLANS / self._gap)
        if then - now <= least * sum(float(use.lookups @ use.stands_for) for use in uses):
            return False
        given = iter(slots)
        changed = [(tables, [next(given) for _ in tables.groups]) for tables in sets]
        for tables, own in sorted(changed, key=lambda change: _more_bytes(*change)):  # first caches that shrink
            if own != [group.slots for group in tables.groups]:
                tables.resize(own)
        return True


def share_capacity(sets: Sequence[Sharing]) -> None:
    """Has these sets share one capacity on each device."""
    for device in {tables.groups[0].config.device for tables in sets}:
        there = [tables for tables in sets if tables.groups[0].config.device == device]
        if sum(len(tables.groups) for tables in there) > 1:
            division = Division()
            for tables in there:
                division.join(tables)


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _more_bytes(tables: Sharing, slots: list[int]) -> int:
    """How many more bytes the caches need with these slots."""
    return sum((new - group.slots) * group.slot_bytes for group, new in zip(tables.groups, slots, strict=True))
