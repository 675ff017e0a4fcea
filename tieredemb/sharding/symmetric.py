"""Memory of each rank that the others write to, where their GPUs reach one another: torch's symmetric memory.

A kernel writes a row to where the exchange would put it, instead of packing it first: a row moves once, and no kernel
of NCCL copies it. A rank must not write before all have read what was there, and not read before all have written. For
both there is a barrier (`barrier.cu`) in that memory; and kernels that write end with a fence (`spread.cuh`).

In a captured step (`captures`; for eager ones see `eager_buffers`) barriers stand before the first rows, behind rows,
and behind gradients. Rows and gradients of each forward have buffers of their own, which are written once a replay:
gradients of the step before were read before a rank comes to the barrier with which this step begins. Ids need no
barrier, as their buffer has space for two exchanges (`peer_exchange`). All ranks make buffers before they capture, or
none does. By a word in it each finds out that the memory it has mapped is that of the others.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tieredemb.kernels.inference import no_inference
from tieredemb.kernels.spread import RowSpread
from tieredemb.kernels.streams import capture_lock, on_device
from tieredemb.sharding.bags import Part
from tieredemb.sharding.barrier import Barrier
from tieredemb.sharding.context import ShardedContext
from tieredemb.sharding.exchange import LeavingOnError, shares_memory
from tieredemb.sharding.header import Bound, Bounds, Phase
from tieredemb.sharding.peer_exchange import PeerExchange, words_of_region
from tieredemb.sharding.stats import GRADIENTS, IDS, ROWS

ALIGNED, WORD = 512, 8  # bytes: buffers begin at multiples; a token by which ranks know each other's memory
MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
# what torch raises where it has no such memory; the last three where its version has other (private) names
UNAVAILABLE = (RuntimeError, ImportError, AttributeError, TypeError)


class BufferSpec(NamedTuple):
    """Names a buffer: of the `call`-th forward of a step and a `part`, for its rows or for their gradients, by `kind`;
    or for the ids of all parts of any forward. It has space for W · `each` rows of `width` numbers of a `dtype`."""

    call: int
    part: int
    each: int
    width: int
    dtype: torch.dtype
    kind: str

    @classmethod
    def for_rows(cls, context: ShardedContext, call: int, number: int, bound: Bound, samples: int) -> BufferSpec | None:
        """For the rows of part `number`, or its bags, of at most so many `samples` of each rank. None where bags stay
        on their rank."""
        part, shard = context.parts[number]
        if part.copies > 1:
            return None
        each, dtype = bound.row_count, shard.engine.tables.config.output_dtype
        if part.is_table_wise:
            each, dtype = -(-len(part.owner) * samples // part.ranks), context.output_dtype
        return cls(call, number, each, shard.space.width, dtype, ROWS)

    @classmethod
    def for_gradients(cls, context: ShardedContext, call: int, number: int, bound: Bound, samples: int) -> BufferSpec:
        """For their gradients."""
        part, shard = context.parts[number]
        each = part.most_held * samples if part.is_table_wise else bound.ids
        return cls(call, number, each, shard.space.width, torch.float32, GRADIENTS)

    @classmethod
    def for_ids(cls, context: ShardedContext, bounds: Bounds, samples: int) -> BufferSpec:
        """For the ids of all parts, and the lengths of bags."""
        of_parts = zip(context.parts, bounds, strict=True)
        words = sum(part.message_size(bound, samples) for (part, _), bound in of_parts)
        return cls(0, 0, words_of_region(words), 1, torch.int64, IDS)


@dataclass(frozen=True)
class SymmetricRows:
    """A buffer on this rank, `received` (·, D), to which all ranks write their rows, rank by rank; and `to`: where this
    rank writes its rows on each of them. Of the gradients of bags `to` says where memory begins
    (`GpuBags.send_gradient`). `sent`: how many rows go to other ranks."""

    received: torch.Tensor
    to: RowSpread
    sent: int

    def of_fewer(self, each: int, rank: int) -> SymmetricRows:
        """The beginning of it, for `each` rows of each rank. `rank`: this one."""
        ranks = len(self.to.begins)
        return self.beginning(ranks * each, each, rank * each, (ranks - 1) * each)

    def beginning(self, count: int, each: int, first: int, sent: int) -> SymmetricRows:
        """Its first `count` rows; this rank writes `each` rows to each one, behind the `first`."""
        return SymmetricRows(self.received[:count], RowSpread(self.to.begins, each, first), sent)


class PartBuffers(NamedTuple):
    """The buffers of one part of a forward: for its rows, or bags, if they are exchanged, and for the gradients."""

    rows: SymmetricRows | None
    grads: SymmetricRows

    def is_for(self, bound: Bound) -> bool:
        """Whether each rank gets as many rows and gradients as the `bound` of a row-wise part says."""
        return self.rows is not None and (self.rows.to.each, self.grads.to.each) == (bound.row_count, bound.ids)

    def of_bags(self, part: Part, samples: int, rank: int) -> PartBuffers | None:
        """Those of a `part` whose tables are held whole, where the rank that has most has so many `samples`; None where
        these do not fit."""
        held = part.held * part.copies
        own, ranks, bags = held[rank] * samples, len(held), sum(part.held) * samples
        if len(self.grads.received) < ranks * max(held) * samples:
            return None
        grads = self.grads.beginning(ranks * own, own, 0, sum(held) * samples - own)
        if self.rows is None:
            return PartBuffers(None, grads)
        return PartBuffers(self.rows.beginning(bags, own, sum(held[:rank]) * samples, (ranks - 1) * own), grads)


def make_parts(
    memory: SymmetricMemory, context: ShardedContext, bounds: Bounds, samples: int, calls: Sequence[tuple[int, int]]
) -> list[list[PartBuffers]] | None:
    """The buffers of each of the `calls`, part by part, whose exchanges have these `bounds`, of at most so many
    `samples` of each rank; allocates those that are missing, as `SymmetricMemory.make` does. Of each call the numbers
    by which its buffers for rows, and those for gradients, are named."""
    specs = list[BufferSpec]()
    for of_rows, of_gradients in calls:
        rows = [BufferSpec.for_rows(context, of_rows, number, bound, samples) for number, bound in enumerate(bounds)]
        specs += [spec for spec in rows if spec is not None]
        # in the order of an owner's output: where they lie one behind another, they are not copied to make one tensor
        in_order = sorted(enumerate(bounds), key=lambda its: context.place_in_output(its[0]))
        specs += [BufferSpec.for_gradients(context, of_gradients, *its, samples) for its in in_order]
    specs = [*dict.fromkeys(specs)]
    allocated = memory.make(specs, BufferSpec.for_ids(context, bounds, samples))
    if allocated is None:
        return None
    made = dict(zip(specs, allocated, strict=True))

    def of_part(number: int, bound: Bound, of_rows: int, of_gradients: int) -> PartBuffers:
        rows = BufferSpec.for_rows(context, of_rows, number, bound, samples)
        grads = made[BufferSpec.for_gradients(context, of_gradients, number, bound, samples)]
        return PartBuffers(None if rows is None else made[rows], grads)

    return [[of_part(number, bound, *call) for number, bound in enumerate(bounds)] for call in calls]


class Mapped(NamedTuple):
    """Memory of all ranks: its `buffers`, and where the `words` of a barrier begin on each."""

    buffers: dict[BufferSpec, SymmetricRows]
    words: list[int]


class SymmetricMemory:
    """The shared memory of one collection's ranks. Buffers are kept until it is closed, as a graph that a rank replays
    may write to them. `share`: of the free memory, which it takes at most."""

    def __init__(self, context: ShardedContext, share: float = 1.0) -> None:
        self._context, self._exchange, self._device, self._share = context, context.exchange, context.device, share
        self._is_off = context.device.type != "cuda" or not context.exchange.has_nccl
        self._made: dict[BufferSpec, SymmetricRows] = {}
        self._held: list[Any] = []  # memory, and the handles that map other ranks' memory
        self._barrier: Barrier | None = None
        self._exchanges: dict[BufferSpec, PeerExchange] = {}

    def make(self, specs: Sequence[BufferSpec], of_ids: BufferSpec) -> list[SymmetricRows] | None:
        """The buffers of these `specs`, which are the same on all ranks; allocates those that are missing, and that for
        ids. None on all ranks where a GPU does not reach another one's memory, or lacks memory. A collective; raises
        `PeerError` where a rank has failed meanwhile. Waits for the device."""
        if self._is_off or not specs:
            return None
        missing = [spec for spec in (*specs, of_ids) if spec not in self._made]
        if not missing or self._add(missing):
            return [self._made[spec] for spec in specs]
        return None

    def _add(self, missing: Sequence[BufferSpec]) -> bool:
        """Allocates these, on all ranks or on none; returns whether it did."""
        held = list[Any]()
        try:
            mapped = self._shared(missing, held)
            if mapped is None:
                return False
            self._held.append(tuple(held))
        finally:
            with capture_lock(self._device):  # to free memory waits for the device
                held.clear()
        with LeavingOnError(self._exchange), on_device(self._device), no_inference():
            rank, timeout = self._exchange.rank, self._exchange.timeout.total_seconds()
            if self._barrier is None:
                self._barrier = Barrier(self._device, mapped.words, rank, timeout)
            for spec in missing:
                if spec.kind == IDS:
                    self._exchanges[spec] = PeerExchange(self._device, mapped.buffers[spec].to, rank, timeout)
            self.barrier()  # compiles its kernel, which a capture could not
            met = torch.cuda.Event()
            met.record()
            self._context.wait_for(met)
        self._made |= mapped.buffers
        return True

    def _shared(self, missing: Sequence[BufferSpec], held: list[Any]) -> Mapped | None:
        """Buffers in memory that all ranks have mapped; None on all of them where one could not. Puts this rank's
        memory into `held`, and what maps it, once that is done."""
        starts, size = self._laid_out(missing)
        token = secrets.randbits(62) | 1
        tokens = self._all_succeeded(token if self._allocate(held, size, token) else 0)
        if tokens is None:
            return None
        mapped = self._mapped(held, tokens, dict(zip(missing, starts, strict=True)))
        if self._all_succeeded(int(mapped is not None)) is None:
            return None
        held[0][:WORD] = 0  # all have read it
        return mapped

    def _all_succeeded(self, result: int) -> Sequence[int] | None:
        """The `result` of every rank, which is 0 where it failed. Where one failed returns None, and no rank tries
        again."""
        flags = self._context.announce(Phase.BUFFERS, flag=result).flags
        self._is_off = not all(flags)
        return None if self._is_off else flags

    @property
    def bytes(self) -> int:
        """Bytes that this rank holds."""
        return sum(memory.nbytes for memory, _ in self._held)

    @property
    def wait_seconds(self) -> float:
        """How long this rank's GPU has waited for others. Synchronises."""
        waits = (self._barrier, *self._exchanges.values())
        return sum(each.wait_seconds for each in waits if each is not None)

    def close(self, *, frees: bool) -> None:
        """Releases the memory, once no graph writes to it. Unless it `frees` the memory, that is lost until the process
        ends: to free it would wait for the device, which may be waiting for a rank that has ended."""
        held, self._held, self._made, self._is_off = self._held, [], {}, True
        if held and not frees:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
        elif held:
            with capture_lock(self._device):
                held.clear()

    def barrier(self) -> None:
        """See `Barrier.meet`."""
        assert self._barrier is not None
        self._barrier.meet()

    def wait_stream(self) -> None:
        """See `PeerWait.wait_stream`, of the barrier."""
        assert self._barrier is not None
        self._barrier.wait_stream()

    def exchange_of_ids(self, of_ids: BufferSpec) -> PeerExchange | None:
        """What exchanges ids through such a buffer; None if none was made."""
        return self._exchanges.get(of_ids)

    def _laid_out(self, specs: Sequence[BufferSpec]) -> tuple[list[int], int]:
        """Where each begins, in bytes, and where the last ends."""
        starts, end = [], self._head
        for spec in specs:
            starts.append(end)
            size = self._exchange.size * spec.each * spec.width * spec.dtype.itemsize
            end += -(-size // ALIGNED) * ALIGNED
        return starts, end

    @property
    def _head(self) -> int:
        """Bytes before the first buffer: the token by which ranks know the memory, and the words of a barrier."""
        return -(-WORD * (1 + self._exchange.size) // ALIGNED) * ALIGNED

    def _allocate(self, held: list[Any], size: int, token: int) -> bool:
        """Allocates `size` bytes that other ranks can map, and adds them to `held`. They begin with a `token`, and else
        are zero, as entries that nobody writes are read, though not used. False where that fails."""
        if not self._reaches_all():
            return False
        try:
            import torch.distributed._symmetric_memory as symmetric

            with on_device(self._device), no_inference():
                if self._share < 1.0 and size > self._share * torch.cuda.mem_get_info(self._device)[0]:
                    return False
                memory = symmetric.empty(size, dtype=torch.uint8, device=self._device)
                memory.zero_()
                memory[:WORD].view(torch.int64).fill_(token)
                torch.cuda.current_stream().synchronize()
        except UNAVAILABLE:
            return False
        held.append(memory)
        return True

    def _reaches_all(self) -> bool:
        """Whether all ranks are processes of this host, and this process sees their GPUs and reaches them with its
        own."""
        if not shares_memory():
            return False
        here = {str(torch.cuda.get_device_properties(k).uuid): k for k in range(torch.cuda.device_count())}
        locations, mine = self._exchange.locations, self._device.index
        own = locations[self._exchange.rank]
        if any((place.host, place.shares) != (own.host, own.shares) or place.gpu not in here for place in locations):
            return False
        others = {here[place.gpu] for place in locations} - {mine}
        return all(torch.cuda.can_device_access_peer(mine, other) for other in others)

    def _mapped(self, held: list[Any], tokens: Sequence[int], starts: Mapping[BufferSpec, int]) -> Mapped | None:
        """Maps the memory of all ranks, of which this one's is in `held`; buffers begin there at `starts`. None where
        it cannot, and where a rank's memory does not begin with its token. Ranks wait for each other inside, by torch's
        means: where one fails meanwhile, another may wait for ever."""
        (memory,) = held
        try:
            import torch.distributed._symmetric_memory as symmetric

            with on_device(self._device), no_inference(), _without_multicast():
                handle = symmetric.rendezvous(memory, self._exchange.group)
                held.append(handle)
                of_ranks = [handle.get_buffer(k, (memory.shape[0],), torch.uint8) for k in range(len(tokens))]
                found = torch.cat([memory_of_rank[:WORD] for memory_of_rank in of_ranks]).view(torch.int64)
                if found.tolist() != list(tokens):
                    return None
                begins = [memory_of_rank.data_ptr() for memory_of_rank in of_ranks]
                buffers = {spec: self._rows(spec, memory, begins, start) for spec, start in starts.items()}
                return Mapped(buffers, [begin + WORD for begin in begins])
        except UNAVAILABLE:
            return None

    def _rows(self, spec: BufferSpec, memory: torch.Tensor, begins: Sequence[int], start: int) -> SymmetricRows:
        count = self._exchange.size * spec.each
        buffer = memory[start : start + count * spec.width * spec.dtype.itemsize]
        where = torch.tensor([begin + start for begin in begins], dtype=torch.int64, device=self._device)
        to = RowSpread(where, spec.each, self._exchange.rank * spec.each)
        sent = (self._exchange.size - 1) * spec.each
        return SymmetricRows(buffer.view(spec.dtype).view(count, spec.width), to, sent)


@contextlib.contextmanager
def _without_multicast() -> Iterator[None]:
    """Torch makes no multicast object of the memory inside, as nobody writes to one."""
    before = os.environ.get(MULTICAST)
    os.environ[MULTICAST] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[MULTICAST]
        else:
            os.environ[MULTICAST] = before
