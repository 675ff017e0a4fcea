"""Steps of several ranks as CUDA graphs: what is found out before each of them, so that nothing inside has to wait.

A graph exchanges what fits `max_ids`, and can refuse nothing: when a host hears of it, the dense layers have taken
their step. So the ids of a batch are looked at before the replay, on a stream beside the one that computes: a wrong id
is told of on all ranks, and a batch that is longer runs eagerly on all of them.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Sequence

import torch

from tieredemb.errors import UnsupportedError
from tieredemb.sharding.bags import Bags, CountingFinder, Part
from tieredemb.sharding.context import ShardedContext
from tieredemb.sharding.exchange import Phase
from tieredemb.sharding.lasting_call import LastingCall
from tieredemb.sharding.symmetric import PartRooms, Room, SymmetricMemory
from tieredemb.step.agreement import UNKNOWN_IDS, Agreement
from tieredemb.step.batch import Batch, Given
from tieredemb.step.planned_forwards import identity

MOST_BITS = 16  # of a flag: behind them stands how many rows a rank has asked another for


class Captures(Agreement):
    """That of a collection. `make_batch`: makes a checked batch of what a forward is given."""

    def __init__(self, context: ShardedContext, finder: CountingFinder, make_batch: Callable[..., Batch]) -> None:
        self._context, self._finder, self._make_batch = context, finder, make_batch
        self._known: set[object] = set()  # what is looked up in the step that is being captured
        self._told = 0
        self._behind_rows: Callable[[], object] | None = None
        self._symmetric = SymmetricMemory(context)
        self._rows_each: int | None = None  # that come from each rank of a part, where there is room to write them to
        self._calls = 0  # of that step so far

    def check(self) -> None:
        exchange = self._context.exchange
        if self._context.max_ids is None:
            raise UnsupportedError(
                "a step of several ranks is a CUDA graph where its exchanges have one size: pass max_ids= to the "
                "ShardedTieredEmbeddingBagCollection, the most ids that a rank asks another for in tables of one "
                "width, or call the function itself"
            )
        if not exchange.has_nccl:
            raise UnsupportedError(
                "a step of several ranks is a CUDA graph where GPUs send each other rows by NCCL, and in this process "
                "group hosts do: make it by init_process_group('cpu:gloo,cuda:nccl'), or call the function itself"
            )

    @property
    def plans_ahead(self) -> bool:
        return self._context.plans_ahead

    def offer(self, *, ahead: bool) -> None:
        self._context.offers_ahead = ahead

    def takes(self, given: Sequence[Given]) -> bool:
        return self._context.fits(max(map(self._count, given), default=0))

    def _count(self, given: Given) -> int:
        device = self._context.device
        moved = [part.to(device, non_blocking=True) if isinstance(part, torch.Tensor) else part for part in given]
        return self._finder.count(self._make_batch(*moved))

    def room(self) -> torch.Tensor:
        """On the CPU, for words that a graph will tell."""
        return self._finder.room()

    def took(self, calls: Sequence[object]) -> bool:
        of_ranks = [call for call in calls if isinstance(call, LastingCall)]
        return all(call.told is None or call.fits(self._finder.most(call.told)) for call in of_ranks)

    def are_as_now(self, calls: Sequence[object]) -> bool:
        return all(call.row_bound == self._context.row_bound for call in calls if isinstance(call, LastingCall))

    def agree(self, mine: int, error: Exception | None = None) -> int:
        context = self._context
        flag = mine | context.most_rows << MOST_BITS
        flags: list[int] = context.announce(Phase.STEP, flag=flag, error=error).flags.tolist()
        context.know_rows(max(flags) >> MOST_BITS)
        return functools.reduce(operator.and_, flags) & ((1 << MOST_BITS) - 1)

    @contextlib.contextmanager
    def capturing(self, given: Sequence[Given], *, ahead: bool) -> Iterator[None]:
        self._told = self._context.exchange.failures
        self._make_rooms(len(given), ahead=ahead)
        self._known = {identity(each) for each in given}
        try:
            yield
        finally:
            self._known, self._rows_each = set(), None

    def _make_rooms(self, calls: int, *, ahead: bool) -> None:
        """Where ranks can write into each other's memory, room for rows and gradients of so many forwards."""
        context, self._calls = self._context, 0
        rows = (context.row_bound if ahead else None) or context.max_ids
        if rows is not None and self._symmetric.make([room for k in range(calls) for room in self._rooms(k, rows)]):
            self._rows_each = rows

    def _rooms(self, call: int, rows: int) -> list[Room]:
        """Of the rows of each part that is dealt out, and of their gradients."""
        most, rooms = self._context.max_ids, list[Room]()
        assert most is not None
        for number, (part, dtype) in enumerate(self._parts()):
            if not part.is_whole:
                rooms.append(Room(call, number, rows, part.space.width, dtype, False))
                rooms.append(Room(call, number, most, part.space.width, torch.float32, True))
        return rooms

    def _parts(self) -> Iterator[tuple[Part, torch.dtype]]:
        """Those of all shards, and of which dtype their rows are."""
        for shard in self._context.shards:
            for part in shard.parts:
                yield part, shard.engine.tables.config.output_dtype

    @contextlib.contextmanager
    def behind_rows(self, exchanges: Callable[[], object]) -> Iterator[None]:
        self._behind_rows = exchanges
        try:
            yield
        finally:
            self._behind_rows = None

    def not_captured(self, error: Exception) -> None:
        exchange = self._context.exchange
        if exchange.size > 1 and exchange.failures == self._told:  # else all ranks know of it
            self._context.announce(Phase.STEP, error=error)

    def rows_sent(self) -> None:
        """A lookup has sent its rows."""
        exchanges, self._behind_rows = self._behind_rows, None
        if exchanges is not None:
            exchanges()

    # --- what a forward inside asks ---------------------------------------------------------------------------------

    def rooms(self) -> list[PartRooms | None] | None:
        """Where rows and gradients of the next forward inside go, of each part that is dealt out; None where they are
        exchanged. The current stream waits for all ranks, before the first of a step: before their hosts have agreed
        to send rows, as nothing runs in a capture."""
        if not self.is_active or self._rows_each is None:
            return None
        made = {(room.part, room.is_of_gradients): self._symmetric.rows(room)
                for room in self._rooms(self._calls, self._rows_each)}  # fmt: skip
        if self._calls == 0:  # whoever reads what an earlier step has left
            self.meet()
        self._calls += 1
        found = list[PartRooms | None]()
        for number, _ in enumerate(self._parts()):
            rows, grads = made.get((number, False)), made.get((number, True))
            found.append(None if rows is None or grads is None else PartRooms(rows, grads))
        return found

    @property
    def bytes(self) -> int:
        """Of the room for what other ranks write."""
        return self._symmetric.bytes

    def close(self, *, frees: bool) -> None:
        """See `SymmetricMemory.close`."""
        self._symmetric.close(frees=frees)

    def meet(self) -> None:
        """The current stream waits until all ranks have come there."""
        self._symmetric.meet()

    @property
    def is_active(self) -> bool:
        """Whether the current stream is one of a step that is being captured."""
        return bool(self._known) and torch.cuda.is_current_stream_capturing()

    def find(self, batch: Batch, *, finds_firsts: bool) -> tuple[Sequence[Bags], torch.Tensor]:
        """The bags of a forward inside, and words that will tell of them. Raises `UnsupportedError` for one of which
        nobody finds out whether its ids fit."""
        if identity(batch.given) not in self._known:
            raise UnsupportedError(UNKNOWN_IDS)
        return self._finder.unchecked(batch, finds_firsts=finds_firsts)
