"""Where eager forwards of ranks write rows and gradients into each other's memory, and send neither.

Of each part that is dealt out there are two rooms for rows, which forwards take in turn, and one for gradients. A rank
writes the rows of a forward behind the barrier of the one before: by then all have read those of the one before that,
which lay there. It writes gradients behind the barrier of their own forward: by then all have updated by those that lay
there. So a forward has one barrier, behind its rows, and its backward one.

One forward at a time has the room for gradients: from its rows on until its gradients, or those of a later forward,
have been exchanged. Others send theirs. All of this is decided alike on all ranks, by what all of them know: the sizes
that were agreed on, and the order of forwards and of backward passes. Rooms are made once several forwards in a row
have needed them, and made anew where these need more.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tieredemb.sharding.bags import Part
from tieredemb.sharding.context import ShardedContext
from tieredemb.sharding.header import Bound, Bounds
from tieredemb.sharding.shard import Shard
from tieredemb.sharding.symmetric import PartRooms, Room, SymmetricMemory, SymmetricRows

AGAIN = 4  # forwards in a row that find no room before it is made
MORE = 8  # a room has one part in so many more than these need
SHARE = 0.25  # of the memory of a GPU that is free, for rooms at most
MOST_VIEWS = 8  # of rooms, for forwards of other sizes, that are kept
TURNS = 2


class EagerRooms:
    """Those of the forwards of one collection. `is_off`: whether nothing is ever written there."""

    def __init__(self, context: ShardedContext) -> None:
        self._context = context
        self._is_dealt = [not part.is_whole for shard in context.shards for part in shard.parts]
        self._memory: SymmetricMemory | None = None
        self._most: Bounds = ()  # what there is room for
        self._made: Sequence[SymmetricRows] = ()  # of each part that is dealt out: for rows in turn, and for gradients
        self._views: dict[tuple[Bounds, int], Sequence[PartRooms | None]] = {}
        self._turn = 0
        self._holder: int | None = None  # the forward that has the room for gradients
        self._lacked = 0  # forwards in a row that have found no room
        self._waited = 0.0  # in rooms that were outgrown
        self._grows = True
        self.is_off = not context.exchange.has_nccl or context.device.type != "cuda"

    @property
    def wait_seconds(self) -> float:
        """See `SymmetricMemory.wait_seconds`."""
        return self._waited + (0.0 if self._memory is None else self._memory.wait_seconds)

    @property
    def bytes(self) -> int:
        """Of this rank's memory."""
        return 0 if self._memory is None else self._memory.bytes

    def prepare(self, bounds: Bounds) -> None:
        """All ranks have agreed to an exchange of these `bounds`, before a forward. Makes room for it where such
        forwards come again and again. A collective; waits for the device where it makes room."""
        if self.is_off or not self._grows or self._holder is not None:
            return
        if self._fits(bounds):
            self._lacked = 0
            return
        self._lacked += 1
        if self._lacked == AGAIN:
            self._lacked = 0
            self._make(bounds)

    def _fits(self, bounds: Bounds) -> bool:
        pairs = zip(bounds, self._most, self._is_dealt, strict=False)
        return bool(self._most) and all(
            its.ids <= most.ids and _rows(its) <= _rows(most) for its, most, is_dealt in pairs if is_dealt
        )

    def _make(self, bounds: Bounds) -> None:
        before = self._most or bounds
        most = tuple(
            Bound(max(_more(its.ids), old.ids), max(_more(_rows(its)), _rows(old)))
            for its, old in zip(bounds, before, strict=True)
        )
        rooms = []
        for number, (part, shard) in enumerate(self._parts):
            if not part.is_whole:
                width, dtype = part.space.width, shard.engine.tables.config.output_dtype
                rooms += [Room(turn, number, _rows(most[number]), width, dtype, False) for turn in range(TURNS)]
                rooms.append(Room(0, number, most[number].ids, width, torch.float32, True))
        memory = SymmetricMemory(self._context, SHARE)
        made = memory.make(rooms)
        if made is None:  # and what there is stays
            self.is_off, self._grows = self._memory is None, False
            return
        if self._memory is not None:  # of which all have come to the barrier of the new one
            self._waited += self._memory.wait_seconds
            self._give_up(frees=True)
        self._memory, self._most, self._made = memory, most, made

    @property
    def _parts(self) -> list[tuple[Part, Shard]]:
        return [(part, shard) for shard in self._context.shards for part in shard.parts]

    def of(self, bounds: Bounds) -> Sequence[PartRooms | None] | None:
        """Those of a forward whose exchange has these `bounds`: of each part that is dealt out, as many rows from each
        rank as it exchanges; None where there is no room. The current stream may write there from now on."""
        memory = self._memory
        if memory is None or not self._fits(bounds):
            return None
        memory.follow()
        key = (bounds, self._turn)
        if key not in self._views:
            if len(self._views) >= MOST_VIEWS:
                self._views.clear()
            self._views[key] = self._view(bounds)
        return self._views[key]

    def _view(self, bounds: Bounds) -> Sequence[PartRooms | None]:
        its, exchange, found = iter(self._made), self._context.exchange, list[PartRooms | None]()
        for (part, _), bound in zip(self._parts, bounds, strict=True):
            if part.is_whole:
                found.append(None)
                continue
            rows, grads = [next(its) for _ in range(TURNS)][self._turn], next(its)
            found.append(
                PartRooms(rows.of_fewer(_rows(bound), exchange.rank), grads.of_fewer(bound.ids, exchange.rank))
            )
        return found

    def follow(self) -> None:
        """See `Barrier.follow`."""
        assert self._memory is not None
        self._memory.follow()

    def barrier(self) -> None:
        """See `SymmetricMemory.barrier`."""
        assert self._memory is not None
        self._memory.barrier()

    def rows_came(self, forward: int, *, trains: bool) -> None:
        """All ranks have come to the barrier behind the rows of a `forward`, by its number."""
        self._turn = (self._turn + 1) % TURNS
        if trains and self._holder is None:
            self._holder = forward

    def has_gradients(self, forward: int) -> bool:
        """Whether those of a `forward` are written."""
        return self._holder == forward

    def reached(self, forwards: Sequence[int]) -> None:
        """A backward pass of all ranks has reached these forwards, and exchanged their gradients."""
        if self._holder is not None and self._holder <= max(forwards):
            self._holder = None

    def close(self, *, frees: bool) -> None:
        """See `SymmetricMemory.close`."""
        self.is_off, self._most = True, ()
        self._give_up(frees=frees)

    def _give_up(self, *, frees: bool) -> None:
        """Gives the memory up, which nothing here names any more: so it is freed where that is safe."""
        self._made = ()
        self._views.clear()
        if self._memory is not None:
            self._memory.close(frees=frees)


def _rows(bound: Bound) -> int:
    """How many come back from each rank."""
    return bound.ids if bound.rows is None else bound.rows


def _more(count: int) -> int:
    return count + count // MORE
