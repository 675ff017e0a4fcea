"""The bags of a lookup on the GPU of the rank that requests it: the twin of `host_bags`.

Before ranks exchange ids, the host has to know the most that it requests from any rank, or whether that fits a size on
which the ranks have agreed. So it waits once for each batch, and reads in the same copy whether an id or an offset is
wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from tieredemb.cache.device.plan import NO_OVERFLOW
from tieredemb.config import features_of
from tieredemb.errors import InvalidInputError, UnsupportedError
from tieredemb.kernels.arguments import struct_type
from tieredemb.kernels.compiler import OPTIONS, blocks_for, kernel
from tieredemb.kernels.constants import DROPPED
from tieredemb.kernels.inference import no_inference
from tieredemb.kernels.row_format import RowFormat
from tieredemb.kernels.spread import MOST_BLOCKS as SPREAD_BLOCKS
from tieredemb.kernels.spread import RowSpread
from tieredemb.kernels.streams import on_device, side_by_side
from tieredemb.lookup.bags import MAX_BAGS, feature_name
from tieredemb.lookup.device_bags import (
    DeviceBags,
    DeviceKeySpace,
    Edges,
    fault_in,
    find_device_bags,
    is_good,
    new_device_bags,
    words_of,
)
from tieredemb.lookup.device_lookup import UNALIGNED, DeviceLookup
from tieredemb.shallow import shallow_copy
from tieredemb.sharding import device_padding
from tieredemb.sharding.bags import Part, Wait
from tieredemb.sharding.header import Bound, LargestRequest, halves_of, largest_requests
from tieredemb.sharding.layout import Layout
from tieredemb.sharding.padding import copied
from tieredemb.step.batch import Batch
from tieredemb.step.device_call import DeviceCall
from tieredemb.step.device_group_call import ReadRows
from tieredemb.tables.config import TableSetConfig

T = TypeVar("T")
OWNERS, OCCURRENCES = "sharding/owners.cu", "sharding/occurrences.cu"
THREADS = 256
MOST_BLOCKS = 4224
CELLS = 2  # for an occurrence, in the hash table that finds the first of each row
CHUNK = 32  # occurrences that a warp reads at once; while they are sorted, each chunk takes 8 (W + 1) bytes


def chunks_of(n: int) -> int:
    """How many chunks `n` occurrences are."""
    return -(-n // CHUNK)


class GpuPart:
    """What the bags of one `part` have in common on a GPU: the key `space` of its rows, as batches name them, and the
    kernels that pool received rows. `sender`: pads its messages."""

    def __init__(self, part: Part, config: TableSetConfig) -> None:
        device, space = config.device, part.space
        self.part = part
        self.space = DeviceKeySpace(space, [-1] * len(space), device)
        row = RowFormat(width=space.width, dtype=config.dtype)
        self.lookup = DeviceLookup(self.space, row, None, config.output_dtype)
        self.width, self.ranks, self.is_table_wise, self.owner = space.width, part.ranks, part.is_table_wise, part.owner
        tables = space.tables[space.table]

        def upload(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        self._padding_keys = upload(part.padding_keys)
        self._row_owners = struct_type(OWNERS, "RowOwners")(
            first=upload(space.first), table=upload(tables), owner=upload(part.owner), ranks=part.ranks,
        )  # fmt: skip
        floats = RowFormat(width=space.width, dtype=torch.float32)
        self._lanes, of_outputs = floats.lanes, RowFormat(width=space.width, dtype=config.output_dtype)
        self._vectors = {  # by dtype, where all columns begin with one
            dtype: its.vector
            for dtype, its in ((torch.float32, floats), (config.output_dtype, of_outputs))
            if not (space.column % its.vector).any()
        }
        most = ("-DHAS_MAX",) if self.lookup.has_max and not self.is_table_wise else ()
        self._gradient = (*OPTIONS, *floats.flags, *most)
        self._output = (*OPTIONS, *of_outputs.flags)
        kernel(OWNERS, "owners_find").prepare(device.index)
        device_padding.prepare(device)
        self.sender = device_padding.Sender(part, device)
        if self.is_table_wise:  # a capture may launch it first
            kernel(OCCURRENCES, "bags_spread", *self._output).load(device.index)

    def find(self, bags: DeviceBags, counts: torch.Tensor, *, finds_firsts: bool = True) -> GpuBags:
        """Finds what `bags` request; adds to their `counts`, int64 (W, 2 F) (`largest_requests`). `finds_firsts`:
        whether ids that were requested before are inverted. Does not synchronise."""
        order, requested = self._find_requests(bags, counts, finds_firsts=finds_firsts and not self.is_table_wise)
        return (GpuTableWiseBags if self.is_table_wise else GpuBags)(self, bags, order, requested, counts)

    def count(self, bags: DeviceBags, counts: torch.Tensor) -> None:
        """Adds to `counts` as `find` does, but counts ids alone. Does not synchronise."""
        self._find_owners(bags, counts)

    def find_bags(self, batch: Batch, words: BagInputs) -> DeviceBags:
        """The bags of a batch. Does not synchronise."""
        space, places = self.space, batch.places
        bags = new_device_bags(words.ids.shape[0], space, batch.size, is_all=space.space.is_all(places))
        find_device_bags(
            bags, words.ids, words.edges, space, words.fault, words.report, places,
            padding_is_dropped=not self.part.sends_padding,
        )  # fmt: skip
        return bags

    def read(self, bags: DeviceBags) -> torch.Tensor:
        """Which of the received rows each occurrence reads, int32 (N,); `DROPPED` for padding."""
        if not self.part.sends_padding:
            return bags.homes
        feature = torch.div(bags.bag, max(1, bags.batch), rounding_mode="floor")
        return bags.homes.masked_fill(bags.keys == self._padding_keys[feature], DROPPED)

    def _find_owners(
        self,
        bags: DeviceBags,
        counts: torch.Tensor,
        cells: torch.Tensor | int = 0,
        cell: torch.Tensor | int = 0,
        of_chunks: torch.Tensor | int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each occurrence the rank that owns its row, int32 (N,), and the row's number there, int64 (N,). Fills
        `cells`, and `cell`, which each occurrence has; and `of_chunks`, by which they are sorted; adds to `counts`."""
        n = bags.keys.shape[0]
        owner, local = torch.empty(n, dtype=torch.int32, device=counts.device), torch.empty_like(bags.keys)
        kernel(OWNERS, "owners_find")(
            blocks_for(n, THREADS, MOST_BLOCKS), THREADS, bags.keys, bags.bag, n, max(1, bags.batch), self._row_owners,
            owner, local, counts.data_ptr(), counts.stride(0), cells, CELLS * n + 1, cell, of_chunks, chunks_of(n),
        )  # fmt: skip
        return owner, local

    def _find_requests(
        self, bags: DeviceBags, counts: torch.Tensor, *, finds_firsts: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The occurrences to request, sorted by rank, and the requested values, both int64 (N,); `counts` says how many
        of them there are. Writes the homes of `bags`: the positions of their rows among those that will be received."""
        n, stride, device = bags.keys.shape[0], counts.stride(0), counts.device
        blocks, n_cells = blocks_for(n, THREADS, MOST_BLOCKS), (CELLS * n + 1) * finds_firsts
        zeros = torch.zeros(n_cells + (self.ranks + 1) * chunks_of(n), dtype=torch.int32, device=device)
        cells: torch.Tensor | int = 0
        cell, is_first, firsts = cells, cells, cells
        if finds_firsts:  # else each occurrence is requested
            cells, cell, is_first = zeros[:n_cells], *torch.empty((2, n), dtype=torch.int32, device=device)
        owner, local = self._find_owners(bags, counts, cells, cell, zeros[n_cells:])
        ends = torch.cumsum(zeros[n_cells:], 0, dtype=torch.int32)
        order, requested, place = torch.empty_like(local), torch.empty_like(local), torch.empty_like(owner)
        kernel(OWNERS, "order_find")(
            blocks, THREADS, owner, bags.bag, n, max(1, bags.batch), self.ranks, ends, chunks_of(n), cells, cell, order,
            place, is_first, counts[:, len(self.owner) :].data_ptr(), stride,
        )  # fmt: skip
        if isinstance(is_first, torch.Tensor):
            firsts = torch.cumsum(is_first, 0, dtype=torch.int32)
        kernel(OWNERS, "requests_place")(
            blocks, THREADS, owner, local, n, self.ranks, cells, cell, place, firsts, requested, bags.homes
        )
        return order, requested

    def gradient(
        self,
        bags: DeviceBags,
        order: torch.Tensor,
        grad: torch.Tensor,
        argmax: torch.Tensor | None,
        divisor: float,
    ) -> torch.Tensor:
        """The gradients of the occurrences `order`, int64 (K,), or, of table-wise tables, of these bags: float32 (K,
        D); see `Bags.gradient`."""
        n = order.shape[0]
        rows = torch.empty((n, self.width), dtype=torch.float32, device=grad.device)
        gradient = kernel(OCCURRENCES, "occurrences_gradient", *self._gradient, *self._alignment(grad))
        gradient(
            blocks_for(n * self._lanes, THREADS), THREADS, order, n,
            0 if self.is_table_wise else bags.bag, max(1, bags.batch), self.space.column, self.space.mode, grad,
            grad.shape[1], 0 if argmax is None else argmax, divisor, rows,
        )  # fmt: skip
        return rows

    def send_bag_gradients(
        self, order: torch.Tensor, grad: torch.Tensor, divisor: float, to: RowSpread, rank: int
    ) -> None:
        """Writes the gradients of the bags `order`, int64 (F · B,), to the memory of their owners. `rank`: this one."""
        n, batch = order.shape[0], grad.shape[0]
        samples = n // len(self.owner)  # of the rank that has most
        most = self.part.most_held * samples
        kernel(OCCURRENCES, "bags_send", *self._gradient, *self._alignment(grad))(
            blocks_for(most * len(to.begins) * self._lanes, THREADS, SPREAD_BLOCKS), THREADS, order, n, most,
            max(1, batch), samples, self.space.column, grad, grad.shape[1], divisor, to.begins, self.sender.before,
            len(to.begins), rank,
        )  # fmt: skip

    def spread(self, bags: torch.Tensor, to: RowSpread) -> None:
        """Writes `bags` that were pooled here, (W · each, D), to the memory of the ranks."""
        n = bags.shape[0]
        kernel(OCCURRENCES, "bags_spread", *self._output)(
            blocks_for(n * self._lanes, THREADS, SPREAD_BLOCKS), THREADS, bags, n, to.of(OCCURRENCES)
        )

    def unpack(self, order: torch.Tensor, rows: torch.Tensor, batch: int, out: torch.Tensor) -> None:
        """Writes received `rows`, (F · B, D), which are the bags `order`, to the columns of their features in `out`,
        (B, ΣD)."""
        n = order.shape[0]
        kernel(OCCURRENCES, "bags_unpack", *self._output, *self._alignment(out))(
            blocks_for(n * self._lanes, THREADS), THREADS, order, n, max(1, batch), self.space.column, rows, out,
            out.shape[1],
        )  # fmt: skip

    def send_gradient(
        self,
        bags: DeviceBags,
        order: torch.Tensor,
        grad: torch.Tensor,
        argmax: torch.Tensor | None,
        divisor: float,
        to: RowSpread,
    ) -> None:
        """Writes the gradients of the occurrences `order`, int64 (`to.rows`,), to the memory of several ranks."""
        n = order.shape[0]
        gradient = kernel(OCCURRENCES, "occurrences_spread", *self._gradient, *self._alignment(grad))
        gradient(
            blocks_for(n * self._lanes, THREADS, SPREAD_BLOCKS), THREADS, order, n, bags.bag, max(1, bags.batch),
            self.space.column, self.space.mode, grad, grad.shape[1], 0 if argmax is None else argmax, divisor,
            to.of(OCCURRENCES),
        )  # fmt: skip

    def _alignment(self, outputs: torch.Tensor) -> tuple[str, ...]:
        """The flags of kernels that read or write outputs or their gradients, (B, ΣD): in vectors, or element by
        element where those do not fit."""
        vector = self._vectors.get(outputs.dtype)
        fits = vector is not None and outputs.shape[1] % vector == 0 and outputs.data_ptr() % 16 == 0
        return () if fits else UNALIGNED


class BagInputs(NamedTuple):
    """What bags are found in, `ids` int64 (N,) and `edges`; and where kernels write what is wrong: see
    `find_device_bags`."""

    ids: torch.Tensor
    edges: Edges
    fault: torch.Tensor
    report: int


class GpuBags:
    """See `Bags`: of row-wise tables. Received rows are pooled like rows in slots, the home of an occurrence being the
    position of its row among them: by the same kernels, in the same order, and so to the same bits."""

    def __init__(
        self, part: GpuPart, bags: DeviceBags, order: torch.Tensor, requested: torch.Tensor, counts: torch.Tensor
    ) -> None:
        """`order`, `requested`: int64 (N,), by rank; as many of the first ones as `counts`, int64 (W, 2 F), says."""
        self._part, self._bags = part, bags
        self._order, self._counts = order, counts
        self._requested = requested
        self._bag_order = order[:0]
        self._weights: torch.Tensor | None = None
        self._argmax: torch.Tensor | None = None
        self._rows: torch.Tensor | None = None

    def pad(self, bound: Bound, samples: int, into: torch.Tensor) -> None:
        bags = self._bags
        if self._part.is_table_wise:  # no rows come back
            bound = Bound(bound.ids, None)
        self._order, self._bag_order = device_padding.pad_bags(
            self._part.sender, self._counts, self._order, self._requested, bags.homes, bags.offsets, into, bound=bound,
            batch=bags.batch, samples=samples,
        )  # fmt: skip

    def sent_weights(self, weights: torch.Tensor) -> torch.Tensor | None:
        return None

    def keep(self, every: torch.Tensor) -> None:
        """Does nothing: rows are pooled here."""

    def pool(
        self, rows: torch.Tensor, weights: torch.Tensor | None, out: torch.Tensor, *, keep: bool, keep_rows: bool
    ) -> None:
        bags, lookup, hot = self._bags, self._part.lookup, ReadRows(rows, rows, rows)
        with on_device(out.device):
            if weights is not None:  # copied, as backward reads them again, and loaders reuse their buffers
                given = weights.detach().to(torch.float32, copy=keep).contiguous()
                self._weights = given if bags.position is None else given[bags.position]
            if keep and lookup.has_max:
                self._argmax = torch.full(out.shape, -1, dtype=torch.int32, device=out.device)
            homes = self._part.read(bags)
            lookup.pool(hot, NO_OVERFLOW, homes, bags, self._weights, out, self._argmax)
            if keep_rows:
                self._rows = lookup.gather(hot, NO_OVERFLOW, homes)

    def weights_gradient(self, grad: torch.Tensor, out: torch.Tensor) -> None:
        bags = self._bags
        assert self._rows is not None
        with on_device(grad.device):
            gradient = self._part.lookup.weights_gradient(self._rows, self._part.read(bags), bags, grad)
            if bags.position is None:
                out += gradient
            else:  # ids of other widths have a gradient of zero
                out.index_add_(0, bags.position, gradient)

    def gradient(self, grad: torch.Tensor, divisor: float) -> tuple[torch.Tensor, torch.Tensor | None]:
        bags, lookup = self._bags, self._part.lookup
        if not bags.homes.shape[0]:  # all entries are padding
            none = grad.new_zeros((self._order.shape[0], self._part.width))
            return none, none[:, 0] if self._weights is not None or lookup.has_mean else None
        with on_device(grad.device):
            return self._part.gradient(bags, self._order, grad, self._argmax, divisor), self._scale()

    def send_gradient(self, grad: torch.Tensor, divisor: float, to: RowSpread, rank: int) -> torch.Tensor | None:
        """Writes the gradients to their owners' memory; returns their factors, as `gradient` does. `rank`: this one."""
        bags = self._bags
        with on_device(grad.device):
            if bags.homes.shape[0]:
                self._part.send_gradient(bags, self._order, grad, self._argmax, divisor, to)
                return self._scale()
            # all entries are padding; they are zeroed, as what was there before may be NaN
            none = replace(bags, bag=bags.bag.new_zeros(1), batch=1)
            zero, argmax = grad.new_zeros((1, grad.shape[1])), self._argmax
            argmax = None if argmax is None else argmax.new_full(zero.shape, -1)
            self._part.send_gradient(none, self._order, zero, argmax, divisor, to)
            return self.gradient(grad, divisor)[1]

    def spread(self, bags: torch.Tensor, to: RowSpread) -> None:
        """Writes `bags` that this rank has pooled to the memory of the ranks that have requested them."""
        with on_device(bags.device):
            self._part.spread(bags, to)

    def _scale(self) -> torch.Tensor | None:
        """The factors of the gradients, one for each that is sent; None where they are ones."""
        scale, lookup = self._weights, self._part.lookup
        if scale is None and lookup.has_mean:
            scale = lookup.mean_scale(self._part.read(self._bags), self._bags)
        return None if scale is None else scale[self._order]

    def tensors(self) -> list[torch.Tensor]:
        held = (*vars(self._bags).values(), self._order, self._bag_order, self._requested)
        held += (self._counts, self._weights, self._argmax, self._rows)
        return [each for each in held if isinstance(each, torch.Tensor)]

    def relocate(self, put: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces each tensor that the plan, the forward and its update need by what `put` returns for it, and drops
        all others. To be called behind `pad`."""
        named = vars(self._bags).items()
        relocated: dict[str, Any] = {name: put(each) for name, each in named if isinstance(each, torch.Tensor)}
        self._bags, self._order, self._bag_order = (
            replace(self._bags, **relocated),
            put(self._order),
            put(self._bag_order),
        )
        self._requested = self._counts = self._order[:0]  # they are sent

    def rebind(self) -> GpuBags:
        """The bags of another forward, which a replay has found and written to these tensors."""
        bags = shallow_copy(self)
        bags._weights = bags._argmax = bags._rows = None
        return bags


class GpuTableWiseBags(GpuBags):
    """See `Bags`: of table-wise tables. Padding ids are not sent, unless their row is to be scaled: a bag is as long as
    it has ids to look up."""

    def sent_weights(self, weights: torch.Tensor) -> torch.Tensor | None:
        given = weights.detach().to(torch.float32)
        if not self._bags.homes.shape[0]:
            return given.new_zeros(len(self._order) * self._part.part.copies)
        sent = (given if self._bags.position is None else given[self._bags.position])[self._order]
        return copied(sent, self._part.part.copies)

    def keep(self, every: torch.Tensor) -> None:
        with on_device(every.device):
            homes = self._part.read(self._bags)
            self._rows = self._part.lookup.gather(ReadRows(every, every, every), NO_OVERFLOW, homes)

    def pool(
        self, rows: torch.Tensor, weights: torch.Tensor | None, out: torch.Tensor, *, keep: bool, keep_rows: bool
    ) -> None:
        with on_device(out.device):
            self._part.unpack(self._bag_order, rows, self._bags.batch, out)

    def gradient(self, grad: torch.Tensor, divisor: float) -> tuple[torch.Tensor, torch.Tensor | None]:
        with on_device(grad.device):
            rows = self._part.gradient(self._bags, self._bag_order, grad, None, divisor)
            return copied(rows, self._part.part.copies), None

    def send_gradient(self, grad: torch.Tensor, divisor: float, to: RowSpread, rank: int) -> torch.Tensor | None:
        with on_device(grad.device):
            self._part.send_bag_gradients(self._bag_order, grad, divisor, to, rank)
        return None


class GpuFinder:
    """Finds the bags of all `parts`, on the device of `config`. See `CountingFinder`."""

    def __init__(self, layout: Layout, parts: Sequence[Part], config: TableSetConfig) -> None:
        self._device = config.device
        with no_inference(), torch.cuda.device(config.device):
            self._parts = [GpuPart(part, config) for part in parts]
        self._columns = [2 * len(part.space.features) for part in parts]
        self._halves = halves_of([len(part.space.features) for part in parts])
        of = [(feature, layout.tables[feature.table]) for feature in features_of(layout.tables)]
        self._names = [feature_name(feature, table) for feature, table in of]
        self._rows = [table.num_embeddings for _, table in of]
        self._ranks = layout.size

    def __call__(self, batch: Batch, wait: Wait = lambda: None) -> tuple[Sequence[GpuBags], list[LargestRequest]]:
        if torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                "a lookup of several ranks waits for the GPU, to learn how many ids it requests from one at most: a "
                "CUDA graph cannot do that; let tieredemb.graph_step capture the step"
            )
        found, words = self._launch(batch, GpuPart.find)
        wait()
        return found, self.read_report(words[words_of("Fault") :].cpu())

    def find_unchecked(self, batch: Batch, *, finds_firsts: bool) -> tuple[list[GpuBags], torch.Tensor]:
        name = "finding ahead" if finds_firsts else "finding"  # on different branches of the graph of a step
        found, words = self._launch(batch, functools.partial(GpuPart.find, finds_firsts=finds_firsts), name)
        return found, words[words_of("Fault") :]

    def drop_faulty(self, words: torch.Tensor) -> None:
        """Requests nothing of a batch that is wrong somewhere, as `words` on the device say, which have its counts: the
        host may read that after an exchange. Does not synchronise."""
        words[words_of("Report") :].mul_(is_good(words))

    def read_report(self, words: torch.Tensor) -> list[LargestRequest]:
        report = words_of("Report")
        error = fault_in(words[:report].tolist(), self._names, self._rows)
        if error is not None:
            raise error
        return largest_requests(words[report:].numpy().reshape(self._ranks, -1), self._halves)

    def report_buffer(self) -> torch.Tensor:
        words = words_of("Report") + self._ranks * sum(self._columns)
        return torch.empty(words, dtype=torch.int64, device="cpu", pin_memory=True)

    def count(self, batch: Batch, wait: Wait = lambda: None) -> list[LargestRequest]:
        _, words = self._launch(batch, GpuPart.count)
        wait()
        return self.read_report(words[words_of("Fault") :].cpu())

    def _launch(
        self, batch: Batch, launch: Callable[[GpuPart, DeviceBags, torch.Tensor], T], name: str = "finding"
    ) -> tuple[list[T], torch.Tensor]:
        """What `launch` returns for each part, and the words that it writes: a fault, its report, and counts. `name`:
        of the streams where it launches in a capture (`side_by_side`)."""
        features, columns = len(self._names), sum(self._columns)
        if features * batch.size > MAX_BAGS:
            raise InvalidInputError(
                f"{features} features × {batch.size} samples are more than {MAX_BAGS} bags; split the batch"
            )
        ids, edges = DeviceCall.inputs(batch)
        fault, report = words_of("Fault"), words_of("Report")
        with on_device(self._device):
            words = torch.zeros(fault + report + self._ranks * columns, dtype=torch.int64, device=self._device)
            given = BagInputs(ids, edges, words[:fault], words[fault:].data_ptr())
            counts = words[fault + report :].view(self._ranks, columns)
            bags = [part.find_bags(batch, given) for part in self._parts]  # one after another: they share a fault
            found = list[T]()

            def launch_part(part: GpuPart, its: DeviceBags, its_counts: torch.Tensor) -> None:
                found.append(launch(part, its, its_counts))

            each = zip(self._parts, bags, torch.split(counts, self._columns, 1), strict=True)
            side_by_side(self._device, [functools.partial(launch_part, *of_part) for of_part in each], name)
            return found, words
