"""What the ranks of one sharded module share: which rows each holds, what they announce, and how much they exchange."""

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
from tieredemb.sharding.header import (
    NO_FINGERPRINT,
    Bound,
    Bounds,
    Counts,
    Header,
    LargestRequest,
    Phase,
    UpdateFingerprint,
)
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

MARGIN, SPREAD = 1.1, 8  # × the largest count of a batch, and × its root, by which counts vary


@dataclass(eq=False, kw_only=True)
class ShardedContext:
    """What the ranks share. `find`: finds the bags of a batch · `columns`: ΣD of an output, of `output_dtype`, on
    `device` · `divisor`: what gradients are divided by · `max_ids`: the size of exchanges, if the user has named it;
    else captured steps learn it from what they have requested so far, as all ranks know · `number`: of the last
    exchange · `most_rows`: the most different rows that this rank has requested from another in one part, of batches
    that captured steps plan ahead · `row_bound`: how many come back there, once the ranks have compared ·
    `most_samples`: of any rank in a forward that is captured, or will be · `offers_ahead`: whether this rank would plan
    eager steps ahead · `plans_ahead`: whether all ranks do."""

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
    most_samples: int = 0
    offers_ahead: bool = True
    plans_ahead: bool = True
    _learned: tuple[int, ...] | None = None
    _has_warned: bool = False

    @property
    def updater(self) -> Engine:
        """The engine with the optimizer of rows here: of several widths the one that follows an optimizer last."""
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
        """Of each part, how many ids a captured step requests from another rank at most. Equal on all ranks; None where
        there was no such step yet."""
        return self._learned if self.max_ids is None else (self.max_ids,) * len(self.no_counts.most)

    def bounds(self, row_bound: int | None) -> Bounds | None:
        """The present bounds of exchanges of captured steps in which `row_bound` rows come back."""
        if self.id_bounds is None:
            return None
        return tuple(Bound(ids, None if row_bound is None else min(ids, row_bound)) for ids in self.id_bounds)

    def warn_if_longer(self, most: Sequence[LargestRequest]) -> None:
        """Warns, once, that a batch of this rank, which requests `most`, has more than `max_ids`."""
        ids = max(each.ids for each in most)
        if self.max_ids is None or ids <= self.max_ids or self._has_warned:
            return
        self._has_warned = True
        warnings.warn(
            f"rank {self.exchange.rank} requests {ids} ids of tables of one width from another rank, more than "
            f"max_ids={self.max_ids}: such a step is exchanged in larger blocks, and runs eagerly, on all ranks; "
            f"pass max_ids={ids} or more to have it captured",
            stacklevel=2,
        )

    def learn_ids(self, most: Sequence[LargestRequest]) -> None:
        """Learns, as all ranks do now, that none requests more than `most` from another for a step that is captured, or
        will be."""
        if self.max_ids is not None:
            return
        known = self._learned or (1,) * len(most)
        self._learned = tuple(
            bound if each.ids <= bound or each.ids > largest else min(with_margin(each.ids), largest)
            for bound, each, largest in zip(known, most, self.largest, strict=True)
        )

    def note_rows(self, most: Sequence[LargestRequest]) -> None:
        """Notes how many rows a batch of this rank requests: later graphs let as many come back."""
        self.most_rows = max(self.most_rows, *(each.rows for each in most))

    def learn_rows(self, most: int) -> None:
        """Learns, as all ranks do now, that no rank has requested more than `most` different rows from another."""
        if self.id_bounds is not None and most > (self.row_bound or 0):
            self.row_bound = min(max(self.id_bounds), with_margin(most))

    @property
    def on_buffers(self) -> bool:
        """Whether this thread runs a captured step, or prepares one: its batches are copied to buffers."""
        return self.shards[0].engine.may_exceed_bags

    @property
    def lookups_change_rows(self) -> bool:
        """Whether a lookup by itself changes rows, even if it is dropped; the same on all ranks."""
        contexts = [shard.context for shard in self.shards]
        return any(each.is_dense or each.options.max_norm is not None for each in contexts)

    @property
    def is_scaled(self) -> bool:
        """Whether infinite gradients prevent the update of tables: all ranks have to know."""
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
        """Announces to all ranks what this one is about to do, with the `counts` of its batch, or that it has met an
        `error`, which all then raise. `updates`: an update follows, whose options are known. Before an eager update it
        waits for a GPU that has the scale of a `GradScaler`. See `Exchange.header`."""
        self.number += 1
        if counts is None:
            counts = self.no_counts
        waits = phase is not Phase.STEP  # a replay does not wait for the one before
        if updates and waits and self.is_scaled:
            self.wait_for_stream()
        fingerprint = self._fingerprint(updates, waits=waits)
        return self.exchange.header(
            phase, self.number, counts, flag=flag, error=error, meanwhile=meanwhile, fingerprint=fingerprint
        )

    def _fingerprint(self, updates: bool, *, waits: bool) -> UpdateFingerprint:
        """The fingerprint of what updates of rows here go by, of any width."""
        optimizer = self.shards[0].engine.optimizer
        if optimizer is None:
            return NO_FINGERPRINT
        coming = optimizer.options_fingerprint(waits=waits) if updates else 0
        return UpdateFingerprint(optimizer.steps_fingerprint, coming, optimizer.fingerprint_values)

    def wait_for(self, done: torch.cuda.Event) -> None:
        """Waits for a GPU, before a header; see `Exchange.wait_for`."""
        self.exchange.wait_for(done, self.no_counts)

    def wait_for_stream(self, done: torch.cuda.Event | None = None) -> None:
        """Waits for what the current stream has launched by now, or for `done`, before this rank reads the results.
        Does nothing on a CPU and in a capture."""
        if self.device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            if done is None:
                done = torch.cuda.Event()
                done.record(current_stream(self.device.index))
            self.wait_for(done)

    def requests(self, samples: int, bounds: Bounds) -> list[Request]:
        """What is requested of each shard here, where no rank has more `samples`, in blocks of the `bounds`."""
        bounds_of_parts = iter(bounds)
        return [shard.request_layout.of(samples, [next(bounds_of_parts) for _ in shard.parts]) for shard in self.shards]

    def message_sizes(self, bounds: Bounds, samples: int) -> list[int]:
        """How many words of each part a message of ids has: see `Part.message_size`."""
        return [part.message_size(bound, samples) for (part, _), bound in zip(self.parts, bounds, strict=True)]

    def check_capacity(self, bounds: Bounds) -> None:
        """Raises `InvalidInputError`, on all ranks alike, where an owner cannot plan blocks as large as the
        `bounds`."""
        ranks, widths = self.exchange.size, (shard.space.width for shard in self.shards for _ in shard.parts)
        for bound, most, width in zip(bounds, self.largest, widths, strict=True):
            if bound.ids > most:
                self.exchange.failures += 1
                raise InvalidInputError(
                    f"a rank requests {bound.ids} ids from another in the tables of width {width}; {ranks} ranks may "
                    f"request {most} at most from each other: split the batch. Nothing was changed"
                )

    @property
    def largest(self) -> list[int]:
        """Of each part, how many ids of one rank an owner can plan at most."""
        of_shards = [
            min(2 * MOST_ENTRIES // max(2, len(shard.parts)), MAX_BAGS // len(shard.space.features))
            for shard in self.shards
        ]
        ranks = self.exchange.size
        return [most // ranks for most, shard in zip(of_shards, self.shards, strict=True) for _ in shard.parts]

    def bags_of(self, batch: Batch) -> tuple[Sequence[Bags], list[LargestRequest]]:
        """The result of `find`. Waits for the current stream."""
        return self.find(batch, self.wait_for_stream)

    @property
    def stages_rows(self) -> bool:
        """Whether lookups wait for the GPU, as rows pass through host memory."""
        return any(not group.cache.cold.device_readable for each in self.shards for group in each.engine.tables.groups)

    @contextlib.contextmanager
    def announcing_errors(self, phase: Phase) -> Iterator[None]:
        """Announces an error of this rank inside to the others, which learn of it by their next header, of that
        `phase`."""
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

    def place_in_output(self, number: int) -> tuple[int, bool]:
        """Sorts parts: shard by shard, and in these as the output of an owner does, which has bags first."""
        part, shard = self.parts[number]
        return self.shards.index(shard), not part.is_table_wise

    @functools.cached_property
    def no_counts(self) -> Counts:
        """The counts of a header that announces no batch."""
        return Counts(0, [LargestRequest(0, 0)] * len(self.parts))


def with_margin(most: int) -> int:
    """A bound for counts of which `most` was the largest so far."""
    return int(MARGIN * most + SPREAD * math.sqrt(most)) + 1
