"""What ranks tell each other before they exchange anything, the words of a header; and the sizes of an exchange that
follow from them.

An `UpdateFingerprint` is compared as it is at the header, as one of an earlier moment would tell ranks apart that have
met an error between."""

from __future__ import annotations

import enum
import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tieredemb.config import Array

WORDS = 6  # before the `Counts`: those of `Announcement`, and the flag


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
    WHOLE = 14  # whichever of these
    BUSY = 15  # nothing yet: all others announce again what they have
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
    Phase.BUSY: "tells that it is there, as its GPU has been busy for long",
    Phase.CONSTRUCT: "constructs a sharded collection",
    Phase.BUFFERS: "allocates buffers that other ranks write to",
}


class UpdateFingerprint(NamedTuple):
    """Fingerprints of what updates of rows go by, to be equal on all ranks: `before`, of those so far; `next`, of the
    one that a header announces, or 0. `describe`: what they are of, by name."""

    before: int
    next: int
    describe: Callable[[], dict[str, object]]


NO_FINGERPRINT = UpdateFingerprint(0, 0, dict)


class Announcement(NamedTuple):
    """The words of one rank that have to be those of all: what it is about to do, as which of its calls, whether it has
    met an error, and on which `UpdateFingerprint` it is."""

    phase: int
    number: int
    failed: int
    before: int
    next: int


class LargestRequest(NamedTuple):
    """The most that a batch requests of any rank in one part: `ids`, and in a part that is dealt out different
    `rows`."""

    ids: int
    rows: int


class Bound(NamedTuple):
    """The size of an exchange in one part: how many ids each rank is sent, and how many rows come back where tables are
    dealt out, each of several ids; None if one comes back for each id."""

    ids: int
    rows: int | None

    @classmethod
    def just(cls, most: LargestRequest) -> Bound:
        """That which takes no more than a batch requests."""
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


def largest_requests(counts: Sequence[Array]) -> list[LargestRequest]:
    """Of what each part requests of the ranks, `counts`, int64 (W, 2 F): how many ids of each feature, and how many of
    these are the first of their row; of whole tables zeros."""
    return [LargestRequest(*its.reshape(len(its), 2, -1).sum(2).max(0).tolist()) for its in counts]


class Counts(NamedTuple):
    """What a rank says of its batch: how many `samples` it has, and what it requests in each part at `most`."""

    samples: int
    most: list[LargestRequest]

    @property
    def words(self) -> list[int]:
        """All of it; as many in every header."""
        return [self.samples, *itertools.chain.from_iterable(self.most)]

    @classmethod
    def of(cls, words: Sequence[int]) -> Counts:
        """Those that such words say."""
        return cls(words[0], [*map(LargestRequest, words[1::2], words[2::2])])


class Header(NamedTuple):
    """What each rank has announced: `words`, of its `Counts` · `flags`. These are so few that lists take less time
    than arrays."""

    words: Sequence[Sequence[int]]
    flags: Sequence[int]

    @property
    def samples(self) -> list[int]:
        """How many each rank has."""
        return [its[0] for its in self.words]

    @property
    def most(self) -> list[LargestRequest]:
        """What any rank requests at most, in each part."""
        return Counts.of([*map(max, zip(*self.words, strict=True))]).most

    @property
    def set_by_any(self) -> int:
        """The bits of the flags that any rank has set."""
        return functools.reduce(operator.or_, self.flags)

    @property
    def set_by_all(self) -> int:
        """Those that all have set."""
        return functools.reduce(operator.and_, self.flags)
