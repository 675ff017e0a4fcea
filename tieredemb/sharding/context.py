"""What the ranks of one sharded module share: which rows each holds, what they tell each other, and how much they
exchange."""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tieredemb.errors import InvalidInputError, PeerError
from tieredemb.kernels.streams import current_stream
from tieredemb.lookup.bags import MAX_BAGS
from tieredemb.sharding.bags import Bags, CountingFinder, Part
from tieredemb.sharding.exchange import Exchange
from tieredemb.sharding.header import NO_COURSE, Bound, Bounds, Counts, Course, Header, Most, Phase
from tieredemb.sharding.layout import Layout
from tieredemb.sharding.optimizer import ShardedOptimizer
from tieredemb.sharding.padding import MOST_ENTRIES
from tieredemb.sharding.shard import Shard
from tieredemb.step.batch import Batch
from tieredemb.step.program import BackwardPass
from tieredemb.tables.fused_optimizer import FusedOptimizer

if TYPE_CHECKING:
    from tieredemb.sharding.request import Request
    from tieredemb.step.engine import Engine

ROOM, SPREAD = 1.1, 8  # × the most that there were in a batch, and × their root, by which counts differ


@dataclass(eq=False, kw_only=True)
class ShardedContext:
    """What they share. `find`: finds the bags of a batch · `columns`: ΣD of an output, which are of `output_dtype`,
    on `device` · `divisor`: what gradients are divided by · `max_ids`: what exchanges of one size are padded to, if the
    user has named it; else those of captured steps are padded to what they have requested so far, as all ranks know ·
    `number`: of the last exchange · `most_rows`: the most different rows that this rank has asked another for in one
    part, of batches that captured steps go ahead to, and `row_bound`: how many come back there, once the ranks have
    told each other · `offers_ahead`: whether this rank would plan eager steps ahead, and `plans_ahead`: whether all
    do."""

    layout: Layout
    exchange: Exchange
    shards: Sequence[Shard]
    find: CountingFinder
    columns: int
    output_dtype: torch.dtype
    device: torch.device
    divisor: float
    backward_pass: BackwardPass
    optimizer: FusedOptimizer | ShardedOptimizer | None
    max_ids: int | None = None
    number: int = 0
    most_rows: int = 0
    row_bound: int | None = None
    offers_ahead: bool = True
    plans_ahead: bool = True
    _learned: tuple[int, ...] | None = None
    _told_longer: bool = False

    @property
    def updater(self) -> Engine:
        """Who has the optimizer of rows here: of several widths that which comes to follow one last."""
        return self.shards[-1].engine

    def check_trainable(self) -> None:
        """Raises `BackwardError` where the tables have no optimizer."""
        for shard in self.shards:
            shard.context.check_trainable()

    def check_options_now(self) -> None:
        """Raises `ConfigError` where the tables' optimizer has options that no update takes."""
        for shard in self.shards:
            shard.context.check_trainable().check_options_now()

    @property
    def id_bounds(self) -> tuple[int, ...] | None:
        """Of each part, how many ids a captured step requests of another rank at most. All ranks know the same; None
        where there was no such step yet."""
        return self._learned if self.max_ids is None else (self.max_ids,) * len(self.no_counts.most)

    def bounds(self, row_bound: int | None) -> Bounds | None:
        """Of the exchanges of captured steps, as of now, in which `row_bound` rows come back."""
        if self.id_bounds is None:
            return None
        return tuple(Bound(ids, None if row_bound is None else min(ids, row_bound)) for ids in self.id_bounds)

    def warn_if_longer(self, most: Sequence[Most]) -> None:
        """Says once that a batch of this rank, which requests so much, is of more than `max_ids`."""
        ids = max(each.ids for each in most)
        if self.max_ids is None or ids <= self.max_ids or self._told_longer:
            return
        self._told_longer = True
        warnings.warn(
            f"rank {self.exchange.rank} asks another rank for {ids} ids of tables of one width, more than "
            f"max_ids={self.max_ids}: such a step is exchanged in larger blocks, and runs eagerly, on all ranks; "
            f"pass max_ids={ids} or more to have it captured",
            stacklevel=2,
        )

    def know_ids(self, most: Sequence[Most]) -> None:
        """All ranks know now that none requests more than `most` of another in a batch of a step that is captured, or
        is to be."""
        if self.max_ids is not None:
            return
        known = self._learned or (1,) * len(most)
        self._learned = tuple(
            bound if each.ids <= bound or each.ids > largest else min(with_room(each.ids), largest)
            for bound, each, largest in zip(known, most, self.largest, strict=True)
        )

    def note_rows(self, most: Sequence[Most]) -> None:
        """Notes how many rows a batch of this rank asks for: later graphs have room for as many to come back."""
        self.most_rows = max(self.most_rows, *(each.rows for each in most))

    def know_rows(self, most: int) -> None:
        """All ranks know now that no rank has asked another for more different rows than `most`."""
        if self.id_bounds is not None and most > (self.row_bound or 0):
            self.row_bound = min(max(self.id_bounds), with_room(most))

    @property
    def on_buffers(self) -> bool:
        """Whether this thread runs a captured step, or one on the way to it, whose batches are copied to buffers."""
        return self.shards[0].engine.may_exceed_bags

    @property
    def lookups_change_rows(self) -> bool:
        """Whether a lookup by itself does, whatever comes of it; the same on all ranks."""
        contexts = [shard.context for shard in self.shards]
        return any(each.is_dense or each.options.max_norm is not None for each in contexts)

    @property
    def is_scaled(self) -> bool:
        """Whether infinite gradients keep the tables from an update: all ranks have to know."""
        return self.optimizer is not None and self.optimizer.is_scaled

    def announce(
        self,
        phase: Phase,
        *,
        counts: Counts | None = None,
        flag: int = 0,
        error: Exception | None = None,
        meanwhile: Callable[[], object] | None = None,
        updates: bool = False,
    ) -> Header:
        """All ranks are to do something, for which each tells `counts` of its batch, or this one has met an `error`,
        which all then raise. `updates`: an update follows, whose options are known. Waits for a GPU that has
        the scale of a `GradScaler`, before an eager one. See `Exchange.header`."""
        self.number += 1
        if counts is None:
            counts = self.no_counts
        waits = phase is not Phase.STEP  # no replay waits for the one before
        if updates and waits and self.is_scaled:
            self.wait_for_stream()
        course = self._course(updates, waits=waits)
        return self.exchange.header(
            phase, self.number, counts, flag=flag, error=error, meanwhile=meanwhile, course=course
        )

    def _course(self, updates: bool, *, waits: bool) -> Course:
        """What updates of rows here go by, of whatever width."""
        optimizer = self.shards[0].engine.optimizer
        if optimizer is None:
            return NO_COURSE
        coming = optimizer.options_fingerprint(waits=waits) if updates else 0
        return Course(optimizer.steps_fingerprint, coming, optimizer.course)

    def wait_for(self, done: torch.cuda.Event) -> None:
        """Waits for a GPU before the ranks tell each other anything; see `Exchange.wait_for`."""
        self.exchange.wait_for(done, self.no_counts)

    def wait_for_stream(self, done: torch.cuda.Event | None = None) -> None:
        """The same for all that the current stream has launched by now, or for `done`: before this rank reads what
        comes of it. On a CPU, and in a capture, there is nothing to do."""
        if self.device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            if done is None:
                done = torch.cuda.Event()
                done.record(current_stream(self.device.index))
            self.wait_for(done)

    def requests(self, samples: Sequence[int], bounds: Bounds) -> list[Request]:
        """What is requested of each shard here, where the ranks have so many `samples`, in blocks of the `bounds`."""
        its = iter(bounds)
        return [shard.requests.of(samples, [next(its) for _ in shard.parts]) for shard in self.shards]

    def check_room(self, bounds: Bounds) -> None:
        """Raises `InvalidInputError`, on all ranks alike, where these blocks are more than an owner can plan."""
        ranks, widths = self.exchange.size, (shard.space.width for shard in self.shards for _ in shard.parts)
        for bound, most, width in zip(bounds, self.largest, widths, strict=True):
            if bound.ids > most:
                self.exchange.failures += 1
                raise InvalidInputError(
                    f"a rank requests {bound.ids} ids of another in the tables of width {width}; {ranks} ranks may "
                    f"request {most} at most of each other: split the batch. Nothing was changed"
                )

    @property
    def largest(self) -> list[int]:
        """Of each part, how many ids of a rank an owner can plan at most."""
        of_shards = [
            min(2 * MOST_ENTRIES // max(2, len(shard.parts)), MAX_BAGS // len(shard.space.features))
            for shard in self.shards
        ]
        ranks = self.exchange.size
        return [most // ranks for most, shard in zip(of_shards, self.shards, strict=True) for _ in shard.parts]

    def bags_of(self, batch: Batch) -> tuple[Sequence[Bags], list[Most]]:
        """What `find` finds. Waits for the current stream."""
        return self.find(batch, self.wait_for_stream)

    @property
    def stages_rows(self) -> bool:
        """Whether lookups wait for the GPU, as rows come through host memory."""
        return any(not group.cache.cold.device_readable for each in self.shards for group in each.engine.tables.groups)

    @contextlib.contextmanager
    def telling(self, phase: Phase) -> Iterator[None]:
        """What this rank alone fails in, inside, the others learn of by the next header, which is of that `phase`."""
        try:
            yield
        except PeerError:
            raise
        except Exception as error:
            self.announce(phase, error=error)
            raise

    @functools.cached_property
    def parts(self) -> Sequence[tuple[Part, Shard]]:
        """The parts of all shards, each with its shard."""
        return [(part, shard) for shard in self.shards for part in shard.parts]

    @functools.cached_property
    def no_counts(self) -> Counts:
        """Of a header that announces no batch."""
        return Counts(0, [Most(0, 0)] * len(self.parts))


def with_room(most: int) -> int:
    """A bound of counts that were this many at most."""
    return int(ROOM * most + SPREAD * math.sqrt(most)) + 1
