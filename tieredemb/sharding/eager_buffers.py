"""Buffers in each other's memory: eager forwards of ranks write ids, rows or bags, and gradients there, and NCCL sends
none of these.

Each part has two buffers for rows, or bags, which forwards use alternately, and one for gradients; a replicated one has
the latter alone. A rank writes the rows of a forward behind the barrier of the forward before it: by then all ranks
have read the rows of the last forward that used the same buffer. It writes gradients behind the barrier of their own
forward: by then all ranks have updated their rows by the gradients that were in the buffer. So a forward has one
barrier, behind its rows, and its backward has one.

One forward at a time owns the buffer for gradients: from its rows on, until its gradients, or those of a later forward,
have been exchanged. The gradients of other forwards are sent. All ranks decide this alike, by what all of them know:
the sizes on which they have agreed, and the order of forwards and of backward passes. Buffers are allocated once
several forwards in a row have lacked them, and anew where forwards need larger ones.

A forward that fails on one rank has no barrier. What other ranks have written for it may arrive late, and would then
overwrite rows of the next forward, if that one exchanges blocks of another size. So the next forward sends its rows:
once a rank has received them from all others, what these had written before has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence

from tieredemb.sharding.context import ShardedContext
from tieredemb.sharding.header import Bound, Bounds
from tieredemb.sharding.peer_exchange import PeerExchange
from tieredemb.sharding.symmetric import BufferSpec, PartBuffers, SymmetricMemory, make_parts

LACKING = 4  # forwards in a row without buffers, before these are allocated
MORE = 8  # a buffer is larger than these forwards need by one part in so many
SHARE = 0.25  # of the free memory of a GPU, for buffers at most
MOST_VIEWS = 8  # of buffers, for forwards of other sizes, that are kept
ALTERNATING = 2  # buffers for rows, used in turn


class EagerBuffers:
    """The buffers of one collection's forwards. `is_off`: whether nothing is ever written there."""

    def __init__(self, context: ShardedContext) -> None:
        self._context = context
        self._memory: SymmetricMemory | None = None
        self._capacity: Bounds = ()
        self._samples = 0  # of each rank, as far as bags fit
        self._allocated: Sequence[Sequence[PartBuffers]] = ()  # of each part, of forwards that alternate
        self._ids: PeerExchange | None = None
        self._views: dict[tuple[Bounds, int], Sequence[PartBuffers]] = {}
        self._next = 0  # the buffer for the rows of the next forward
        self._owner: int | None = None  # the forward that owns the buffer for gradients
        self._lacking = 0  # forwards in a row without buffers
        self._failures = 0  # that all ranks knew of when rows were exchanged last
        self._waited = 0.0  # seconds, in memory that was outgrown
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

    def prepare(self, bounds: Bounds, samples: int) -> None:
        """To be called once all ranks have agreed to an exchange of these `bounds`, before a forward in which none has
        more than so many `samples`. Allocates buffers where several forwards in a row have lacked them. A collective;
        waits for the device where it allocates."""
        if self.is_off or not self._grows or self._owner is not None:
            return
        if self._fits(bounds, samples):
            self._lacking = 0
            return
        self._lacking += 1
        if self._lacking == LACKING:
            self._lacking = 0
            self._allocate(bounds, samples)

    def _fits(self, bounds: Bounds, samples: int) -> bool:
        each = zip(bounds, self._capacity, self._context.parts, strict=False)
        return bool(self._capacity) and all(
            bound.ids <= capacity.ids
            and (samples <= self._samples if part.is_table_wise else bound.row_count <= capacity.row_count)
            for bound, capacity, (part, _) in each
        )

    def _allocate(self, bounds: Bounds, samples: int) -> None:
        capacity = tuple(
            Bound(max(_more(bound.ids), old.ids), max(_more(bound.row_count), old.row_count))
            for bound, old in zip(bounds, self._capacity or bounds, strict=True)
        )
        if self._memory is not None:
            self._memory.wait_stream()  # its last uses, on any stream, come before the barrier of the new one
        if self._ids is not None:
            self._ids.wait_stream()
        memory, samples = SymmetricMemory(self._context, SHARE), max(samples, self._samples)
        in_turn = [(number, 0) for number in range(ALTERNATING)]
        allocated = make_parts(memory, self._context, capacity, samples, in_turn)
        if allocated is None:  # the buffers that there are stay
            self.is_off, self._grows = self._memory is None, False
            return
        if self._memory is not None:  # all ranks have met at the barrier of the new one
            self._waited += self._memory.wait_seconds
            self._release(frees=True)
        self._memory, self._capacity, self._allocated = memory, capacity, allocated
        self._samples = samples
        self._ids = memory.exchange_of_ids(BufferSpec.for_ids(self._context, capacity, samples))

    def exchange_of_ids(self, bounds: Bounds, samples: int) -> PeerExchange | None:
        """What exchanges the ids of a forward, if their exchange has these `bounds`; None where they do not fit."""
        return self._ids if self._fits(bounds, samples) else None

    def of(self, bounds: Bounds, samples: int) -> Sequence[PartBuffers] | None:
        """The buffers of a forward whose exchange has these `bounds`: of each row-wise part, with as many rows from
        each rank as it exchanges; of others whole ones (`PartBuffers.of_bags`). None where they do not fit, or where a
        forward has failed before. The current stream may write there from now on."""
        memory = self._memory
        if memory is None or self.is_off:
            return None
        memory.wait_stream()  # also before rows are sent
        if not self._fits(bounds, samples) or self._context.exchange.failures > self._failures:
            return None
        key = (bounds, self._next)
        if key not in self._views:
            if len(self._views) >= MOST_VIEWS:
                self._views.clear()
            self._views[key] = self._view(bounds)
        return self._views[key]

    def _view(self, bounds: Bounds) -> Sequence[PartBuffers]:
        rank, views = self._context.exchange.rank, list[PartBuffers]()
        for (part, _), bound, (rows, grads) in zip(
            self._context.parts, bounds, self._allocated[self._next], strict=True
        ):
            if rows is not None and not part.is_table_wise:
                rows, grads = rows.of_fewer(bound.row_count, rank), grads.of_fewer(bound.ids, rank)
            views.append(PartBuffers(rows, grads))
        return views

    def wait_stream(self) -> None:
        """See `PeerWait.wait_stream`, of the barrier."""
        assert self._memory is not None
        self._memory.wait_stream()

    def barrier(self) -> None:
        """See `SymmetricMemory.barrier`."""
        assert self._memory is not None
        self._memory.barrier()

    def rows_sent(self) -> None:
        """All ranks have launched an exchange of rows, and no barrier."""
        self._failures = self._context.exchange.failures

    def rows_exchanged(self, forward: int, *, trains: bool) -> None:
        """All ranks have launched the barrier behind the rows of a `forward`, by its number."""
        self._next = (self._next + 1) % ALTERNATING
        if trains and self._owner is None:
            self._owner = forward

    def owns_gradients(self, forward: int) -> bool:
        """Whether the gradients of a `forward` are written, and not sent."""
        return self._owner == forward

    def reached(self, forwards: Sequence[int]) -> None:
        """A backward pass of all ranks has reached these forwards, whose gradients are about to be exchanged."""
        if self._owner is not None and self._owner <= max(forwards):
            self._owner = None

    def close(self, *, frees: bool) -> None:
        """See `SymmetricMemory.close`."""
        self.is_off, self._capacity = True, ()
        self._release(frees=frees)

    def _release(self, *, frees: bool) -> None:
        """Releases the memory, to which nothing here refers any more: so it is freed where that is safe."""
        self._allocated, self._ids = (), None
        self._views.clear()
        if self._memory is not None:
            self._memory.close(frees=frees)


def _more(count: int) -> int:
    return count + count // MORE
