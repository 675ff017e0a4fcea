"""The side of a lookup on a GPU where the bags are: the twin of `host_bags`.

The host has to know how many rows each rank is asked for before it can exchange anything. So it waits once for each
batch, and learns in the same copy whether an id or an offset is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tieredemb.config import features_of
from tieredemb.errors import InvalidInputError, UnsupportedError
from tieredemb.kernels.arguments import struct_type
from tieredemb.kernels.compiler import OPTIONS, blocks_for, kernel
from tieredemb.kernels.row_format import RowFormat
from tieredemb.kernels.streams import on_device
from tieredemb.lookup.bags import feature_name
from tieredemb.lookup.device_bags import (
    MAX_BAGS,
    DeviceBags,
    DeviceKeySpace,
    Edges,
    fault_in,
    find_device_bags,
    new_device_bags,
    words_of,
)
from tieredemb.lookup.device_lookup import DeviceLookup
from tieredemb.sharding.bags import Part
from tieredemb.sharding.layout import Layout
from tieredemb.step.batch import Batch
from tieredemb.step.device_call import DeviceCall
from tieredemb.step.device_group_call import NO_OVERFLOW, ReadRows
from tieredemb.tables.config import TableSetConfig

OWNERS, OCCURRENCES = "sharding/owners.cu", "sharding/occurrences.cu"
THREADS = 256
MOST_BLOCKS = 4224
CELLS = 2  # of an occurrence, to find the first of each row in


class GpuPart:
    """What bags of one part have in common: the key `space` of its rows, as batches name them, who owns these, and the
    kernels that pool rows which lie as they have come. `columns`: int64 (F·D,), those of the outputs that bags of whole
    tables come back for, by rank and feature · `holds`: int64 (W, F), 1 where a rank holds a feature's table."""

    def __init__(self, layout: Layout, part: Part, config: TableSetConfig) -> None:
        device, space = config.device, part.space
        self.space = DeviceKeySpace(space, [-1] * len(space), device)
        row = RowFormat(width=space.width, dtype=config.dtype)
        self.lookup = DeviceLookup(self.space, row, None, config.output_dtype)
        self.width, self.ranks, self.is_whole, self.owner = space.width, layout.size, part.is_whole, part.owner
        tables = space.tables[space.table]

        def upload(array: np.ndarray) -> torch.Tensor:  # type: ignore[type-arg]
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        self._dealt = struct_type(OWNERS, "Dealt")(
            first=upload(space.first), table=upload(tables), owner=upload(layout.owner[tables]),
            ranks=layout.size,
        )  # fmt: skip
        floats = RowFormat(width=space.width, dtype=torch.float32)
        self._lanes, self._vector = floats.lanes, floats.vector
        self._columns_fit = not (space.column % self._vector).any()
        by_rank = space.column[np.argsort(part.owner, kind="stable")]
        self.columns = upload((by_rank[:, None] + np.arange(space.width)).ravel())
        self.holds = upload((part.owner == np.arange(layout.size)[:, None]).astype(np.int64))
        most = ("-DHAS_MAX",) if self.lookup.has_max else ()
        self._gradient = (*OPTIONS, *floats.flags, *most)
        kernel(OWNERS, "owners_find").prepare(device.index)

    def find(
        self, ids: torch.Tensor, edges: Edges, batch: Batch, fault: torch.Tensor, report: int, counts: torch.Tensor
    ) -> GpuBags:
        """The bags, whose `counts`, int64 (W, columns), are added to. `fault`, `report`: see `find_device_bags`. Does
        not synchronise."""
        space, places, n = self.space, batch.places, ids.shape[0]
        bags = new_device_bags(n, space, batch.size, is_all=space.space.is_all(places))
        find_device_bags(bags, ids, edges, space, fault, report, places, padding_is_dropped=True)
        order, asked = self._ask(bags, counts)
        if not self.is_whole:
            return GpuBags(self, bags, order, asked)
        lengths = self._lengths(bags)
        if batch.size:
            is_ragged = lengths.amax(1) != lengths.amin(1)
            counts[:, len(space.space.features) :].copy_(self.holds * is_ragged * batch.size)
        return GpuWholeBags(self, bags, order, asked, lengths)

    def _ask(self, bags: DeviceBags, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The occurrences that are asked for, by rank, and what is asked, both int64 (N,), of which `counts` says how
        many they are; writes the homes of `bags`, which are where rows will be among those that come."""
        n, size, stride, device = bags.keys.shape[0], max(1, bags.batch), counts.stride(0), counts.device
        blocks, n_cells = blocks_for(n, THREADS, MOST_BLOCKS), CELLS * n + 1
        owner, local = torch.empty(n, dtype=torch.int32, device=device), torch.empty_like(bags.keys)
        cells: torch.Tensor | int = 0
        cell, place, firsts = cells, cells, cells
        if not self.is_whole:  # else each occurrence is asked for
            cells, cell = torch.zeros(n_cells, dtype=torch.int32, device=device), torch.empty_like(owner)
        kernel(OWNERS, "owners_find")(
            blocks, THREADS, bags.keys, bags.bag, n, size, self._dealt, owner, local, counts.data_ptr(), stride, cells,
            n_cells, cell,
        )  # fmt: skip
        owner, order = torch.sort(owner, stable=True)
        if not self.is_whole:
            place, is_first = torch.empty_like(owner), torch.empty_like(owner)
            kernel(OWNERS, "firsts_find")(
                blocks, THREADS, owner, order, bags.bag, n, size, self.ranks, cells, cell, is_first, place,
                counts[:, len(self.owner) :].data_ptr(), stride,
            )  # fmt: skip
            firsts = torch.cumsum(is_first, 0, dtype=torch.int32)
        asked = torch.empty_like(local)
        kernel(OWNERS, "asked_place")(
            blocks, THREADS, owner, order, local, n, self.ranks, cells, cell, place, firsts, asked, bags.homes
        )
        return order, asked

    def _lengths(self, bags: DeviceBags) -> torch.Tensor:
        """How many ids of each bag are asked for: int64 (F, B)."""
        before = torch.zeros(bags.homes.shape[0] + 1, dtype=torch.int64, device=bags.homes.device)
        torch.cumsum(bags.homes >= 0, 0, out=before[1:])
        return before[bags.offsets].diff().view(len(self.owner), bags.batch)

    def gradient(
        self, bags: DeviceBags, order: torch.Tensor, grad: torch.Tensor, argmax: torch.Tensor | None, share: float
    ) -> torch.Tensor:
        """The gradients of the occurrences `order`, int64 (K,): float32 (K, D); see `Bags.gradient`."""
        n, columns = order.shape[0], self.space.column
        rows = torch.empty((n, self.width), dtype=torch.float32, device=grad.device)
        fits = self._columns_fit and grad.shape[1] % self._vector == 0 and grad.data_ptr() % 16 == 0
        gradient = kernel(OCCURRENCES, "occurrences_gradient", *self._gradient, *(() if fits else ("-DUNALIGNED",)))
        gradient(
            blocks_for(n * self._lanes, THREADS, MOST_BLOCKS), THREADS, order, n, bags.bag, max(1, bags.batch), columns,
            self.space.mode, grad, grad.shape[1], 0 if argmax is None else argmax, share, rows,
        )  # fmt: skip
        return rows


class GpuBags:
    """See `Bags`: of tables that are dealt out. Rows that have come are pooled as those of slots are, the home of each
    occurrence being where its row is among them: by the same kernels, in the same order, and so to the same bits."""

    counts: torch.Tensor
    sent: list[int]
    ids: list[int]
    back: list[int]
    grads: list[int]

    def __init__(self, part: GpuPart, bags: DeviceBags, order: torch.Tensor, asked: torch.Tensor) -> None:
        """`order`, `asked`: int64 (N,), of which `told` says how many are asked for."""
        self._part, self._bags = part, bags
        self._order, self.asked = order, asked
        self._weights: torch.Tensor | None = None
        self._argmax: torch.Tensor | None = None
        self._rows: torch.Tensor | None = None

    def told(self, counts: torch.Tensor) -> None:
        """The host knows `counts`."""
        self.counts = counts
        ids, more = counts.split(len(self._part.owner), 1)  # type: ignore[no-untyped-call]
        self.sent = self.ids = self.grads = ids.sum(1).tolist()
        self.back = more.sum(1).tolist()
        asked = sum(self.ids)
        self.asked, self._order = self.asked[:asked], self._order[:asked]

    def sent_weights(self, weights: torch.Tensor) -> torch.Tensor | None:
        return None

    def keep(self, every: torch.Tensor) -> None:
        """Nothing: rows are pooled here."""

    def pool(
        self, rows: torch.Tensor, weights: torch.Tensor | None, out: torch.Tensor, *, keep: bool, keep_rows: bool
    ) -> None:
        bags, lookup, hot = self._bags, self._part.lookup, ReadRows(rows, rows, rows)
        with on_device(out.device):
            if weights is not None:  # backward reads them again, and loaders reuse their buffers
                given = weights.detach().to(torch.float32, copy=keep).contiguous()
                self._weights = given if bags.position is None else given[bags.position]
            if keep and lookup.has_max:
                self._argmax = torch.full(out.shape, -1, dtype=torch.int32, device=out.device)
            lookup.pool(hot, NO_OVERFLOW, bags.homes, bags, self._weights, out, self._argmax)
            if keep_rows:
                self._rows = lookup.gather(hot, NO_OVERFLOW, bags.homes)

    def weights_gradient(self, grad: torch.Tensor, out: torch.Tensor) -> None:
        bags = self._bags
        assert self._rows is not None
        with on_device(grad.device):
            gradient = self._part.lookup.weights_gradient(self._rows, bags.homes, bags, grad)
            if bags.position is None:
                out += gradient
            else:  # what belongs to other widths has no position of its own, and a gradient of zero
                out.index_add_(0, bags.position, gradient)

    def gradient(self, grad: torch.Tensor, share: float) -> tuple[torch.Tensor, torch.Tensor | None]:
        bags, lookup = self._bags, self._part.lookup
        with on_device(grad.device):
            rows = self._part.gradient(bags, self._order, grad, self._argmax, share)
            scale = self._weights
            if scale is None and lookup.has_mean:
                scale = lookup.mean_scale(bags.homes, bags)
            return rows, None if scale is None else scale[self._order]

    def tensors(self) -> list[torch.Tensor]:
        held = (*vars(self._bags).values(), self._order, self.asked, self._weights, self._argmax, self._rows)
        return [each for each in held if isinstance(each, torch.Tensor)]


class GpuWholeBags(GpuBags):
    """See `Bags`: of tables that one rank holds each. Padding stays here: a bag is as long as it has ids to look up."""

    def __init__(
        self, part: GpuPart, bags: DeviceBags, order: torch.Tensor, asked: torch.Tensor, lengths: torch.Tensor
    ) -> None:
        """`lengths`: int64 (F, B), how many ids of each bag are asked for."""
        super().__init__(part, bags, order, asked)
        self._lengths = lengths

    def told(self, counts: torch.Tensor) -> None:
        super().told(counts)
        owner, ranks = self._part.owner, self._part.ranks
        self.sent = counts.sum(1).tolist()
        self.back = self.grads = (np.bincount(owner, minlength=ranks) * self._bags.batch).tolist()
        is_ragged = counts[:, len(owner) :].sum(0).numpy() > 0
        if is_ragged.any():
            pieces = []
            for rank, ids in enumerate(torch.split(self.asked, self.ids)):  # type: ignore[no-untyped-call]
                pieces += [ids, *(self._lengths[f] for f in np.flatnonzero(is_ragged & (owner == rank)))]
            self.asked = torch.cat(pieces)

    def sent_weights(self, weights: torch.Tensor) -> torch.Tensor | None:
        given = weights.detach().to(torch.float32)
        return (given if self._bags.position is None else given[self._bags.position])[self._order]

    def keep(self, every: torch.Tensor) -> None:
        with on_device(every.device):
            self._rows = self._part.lookup.gather(ReadRows(every, every, every), NO_OVERFLOW, self._bags.homes)

    def pool(
        self, rows: torch.Tensor, weights: torch.Tensor | None, out: torch.Tensor, *, keep: bool, keep_rows: bool
    ) -> None:
        features = len(self._part.owner)
        bags = rows.view(features, self._bags.batch, self._part.width).transpose(0, 1)
        out.index_copy_(1, self._part.columns, bags.reshape(self._bags.batch, features * self._part.width))

    def gradient(self, grad: torch.Tensor, share: float) -> tuple[torch.Tensor, torch.Tensor | None]:
        features, width = len(self._part.owner), self._part.width
        rows = grad.index_select(1, self._part.columns).view(self._bags.batch, features, width).transpose(0, 1)
        if share != 1.0:  # by a tensor, as a number would be inverted first
            rows = rows / torch.full((1,), share, dtype=torch.float32, device=grad.device)
        return rows.reshape(features * self._bags.batch, width), None

    def tensors(self) -> list[torch.Tensor]:
        return [*super().tensors(), self._lengths]


class GpuFinder:
    """Finds the bags of all `parts`, on the device of `config`. See `Finder`."""

    def __init__(self, layout: Layout, parts: Sequence[Part], config: TableSetConfig) -> None:
        self._device = config.device
        with torch.inference_mode(False), torch.cuda.device(config.device):
            self._parts = [GpuPart(layout, part, config) for part in parts]
        self._columns = [part.columns for part in parts]
        of = [(feature, layout.tables[feature.table]) for feature in features_of(layout.tables)]
        self._names = [feature_name(feature, table) for feature, table in of]
        self._rows = [table.num_embeddings for _, table in of]
        self._ranks = layout.size

    def __call__(self, batch: Batch) -> Sequence[GpuBags]:
        """Waits for the current stream."""
        features, columns = len(self._names), sum(self._columns)
        if torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                "a lookup of several ranks waits for the GPU, to learn how many rows each is asked for, which a CUDA "
                "graph cannot hold: run the step eagerly"
            )
        if features * batch.size > MAX_BAGS:
            raise InvalidInputError(
                f"{features} features × {batch.size} samples are more than {MAX_BAGS} bags; split the batch"
            )
        ids, edges = DeviceCall.inputs(batch)
        fault, report = words_of("Fault"), words_of("Report")
        with on_device(self._device):
            words = torch.zeros(fault + report + self._ranks * columns, dtype=torch.int64, device=self._device)
            counts = torch.split(words[fault + report :].view(self._ranks, columns), self._columns, 1)  # type: ignore[no-untyped-call]
            found = [
                part.find(ids, edges, batch, words[:fault], words[fault:].data_ptr(), its)
                for part, its in zip(self._parts, counts, strict=True)
            ]
            told = words[fault:].cpu()
        error = fault_in(told[:report].tolist(), self._names, self._rows)
        if error is not None:
            raise error
        counts = torch.split(told[report:].view(self._ranks, columns), self._columns, 1)  # type: ignore[no-untyped-call]
        for bags, its in zip(found, counts, strict=True):
            bags.told(its.contiguous())
        return found
