"""The words of a header, which announces what a rank is about to do; and the sizes of an exchange that follow from
them.

An `UpdateFingerprint` is computed at the header itself: an earlier one would differ between ranks that have met an
error since.
"""

from __future__ import annotations

import enum
import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from tieredemb.config import Array

WORDS = 6  # of an `Announcement` and the flag, before those of `Counts`


class Phase(enum.IntEnum):
    """What a rank is about to do."""

    PLAN = 0
    FORWARD = 1
    ROWS = 2
    BACKWARD = 3
    STEP = 4
    UPDATE = 5
    READ = 6
    WRITE = 7
    READ_STATE = 8
    WRITE_STATE = 9
    SAVE = 10
    LOAD = 11
    FOLLOW = 12
    NORM = 13
    WHOLE = 14  # any of those with whole tables
    BUSY = 15  # nothing yet: all other ranks announce again what they do
    CONSTRUCT = 16
    BUFFERS = 17

    @property
    def description(self) -> str:
        return _DESCRIPTIONS[self]


_DESCRIPTIONS = {
    Phase.PLAN: "plans a batch ahead",
    Phase.FORWARD: "looks up a batch",
    Phase.ROWS: "sends rows of a batch",
    Phase.BACKWARD: "updates rows in a backward",
    Phase.STEP: "begins a captured step",
    Phase.UPDATE: "ends an accumulate()",
    Phase.READ: "reads whole tables, as state_dict() does",
    Phase.WRITE: "sets whole tables, as load_state_dict() does",
    Phase.READ_STATE: "reads the optimizer's state, as its state_dict() does",
    Phase.WRITE_STATE: "sets the optimizer's state, as its load_state_dict() does",
    Phase.SAVE: "saves a checkpoint",
    Phase.LOAD: "loads a checkpoint",
    Phase.FOLLOW: "follows an optimizer",
    Phase.NORM: "reads the norm of a gradient",
    Phase.WHOLE: "reads or writes whole tables",
    Phase.BUSY: "reports that it is alive, as its GPU has been busy for long",
    Phase.CONSTRUCT: "constructs a sharded collection",
    Phase.BUFFERS: "allocates buffers that other ranks write to",
}


class UpdateFingerprint(NamedTuple):
    """Fingerprints of what updates of rows go by, which have to be equal on all ranks. `before`: of all updates so far
    · `next`: of the update that a header announces, or 0 · `describe`: returns what they are made of, by name."""

    before: int
    next: int
    describe: Callable[[], dict[str, object]]


NO_FINGERPRINT = UpdateFingerprint(0, 0, dict)


class Announcement(NamedTuple):
    """The words of a header that have to be equal on all ranks: the phase, the number of the call, whether the rank has
    met an error, and its `UpdateFingerprint`."""

    phase: int
    number: int
    failed: int
    before: int
    next: int


class LargestRequest(NamedTuple):
    """The most that a batch requests from any one rank in one part: `ids`, and different `rows` in a row-wise part."""

    ids: int
    rows: int


class Bound(NamedTuple):
    """The size of an exchange in one part: how many `ids` each rank is sent, and how many `rows` come back where tables
    are row-wise, one for several ids; None if one comes back for each id."""

    ids: int
    rows: int | None

    @classmethod
    def just(cls, most: LargestRequest) -> Bound:
        """The bound that takes no more than a batch requests."""
        return cls(max(1, most.ids), max(1, most.rows))

    @property
    def row_count(self) -> int:
        """How many rows come back from each rank."""
        return self.ids if self.rows is None else self.rows

    def takes(self, most: LargestRequest) -> bool:
        """Whether the exchange takes what a batch requests."""
        return most.ids <= self.ids and (self.rows is None or most.rows <= self.rows)


Bounds = tuple[Bound, ...]  # of each part


def bounds_take(bounds: Bounds, most: Sequence[LargestRequest]) -> bool:
    """Whether an exchange takes what a batch requests in each part."""
    return all(bound.takes(each) for bound, each in zip(bounds, most, strict=True))


def halves_of(features: Sequence[int]) -> list[int]:
    """Where the two halves of each part begin in the counts of parts that have so many `features`."""
    return [0, *itertools.accumulate(np.repeat(features, 2).tolist())][:-1]


def largest_requests(counts: Array, halves: Sequence[int]) -> list[LargestRequest]:
    """The largest request of each of some parts. `counts`: int64 (W, 2 F), of the parts side by side, of each how many
    ids of each feature go to each rank, and behind them how many of these are the first of their row, zeros for
    table-wise tables · `halves`: where these begin (`halves_of`)."""
    most = np.add.reduceat(counts, halves, axis=1).max(0).tolist()
    return [*map(LargestRequest, most[::2], most[1::2])]


class Counts(NamedTuple):
    """What a header says of a batch: the rank's `samples`, and the `most` that it requests in each part."""

    samples: int
    most: list[LargestRequest]

    @property
    def words(self) -> list[int]:
        """The words of a header, as many in every header."""
        return [self.samples, *itertools.chain.from_iterable(self.most)]

    @classmethod
    def of(cls, words: Sequence[int]) -> Counts:
        """Reads such words."""
        return cls(words[0], [*map(LargestRequest, words[1::2], words[2::2])])


class Header(NamedTuple):
    """What all ranks have announced. `words`: of their `Counts` · `flags`. These are so few that lists are faster than
    arrays."""

    words: Sequence[Sequence[int]]
    flags: Sequence[int]

    @property
    def samples(self) -> int:
        """The most samples that any rank has."""
        most: int = max(map(operator.itemgetter(0), self.words))
        return most

    @property
    def most(self) -> list[LargestRequest]:
        """The most that any rank requests in each part."""
        return Counts.of([*map(max, zip(*self.words, strict=True))]).most

    @property
    def set_by_any(self) -> int:
        """The bits that any rank has set."""
        return functools.reduce(operator.or_, self.flags)

    @property
    def set_by_all(self) -> int:
        """The bits that all ranks have set."""
        return functools.reduce(operator.and_, self.flags)
