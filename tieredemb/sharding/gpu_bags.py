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
from tieredemb.lookup.bags import KeySpace, feature_name
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
from tieredemb.sharding.layout import Layout
from tieredemb.step.batch import Batch
from tieredemb.step.device_call import DeviceCall
from tieredemb.step.device_group_call import NO_OVERFLOW, ReadRows
from tieredemb.tables.config import TableSetConfig

OWNERS, OCCURRENCES = "sharding/owners.cu", "sharding/occurrences.cu"
THREADS = 256
MOST_BLOCKS = 4224


class GpuWidth:
    """What bags of one width have in common: the key `space` of all rows, as batches name them, who owns these, and the
    kernels that pool rows which lie as they have come."""

    def __init__(self, layout: Layout, space: KeySpace, config: TableSetConfig) -> None:
        device = config.device
        self.space = DeviceKeySpace(space, [-1] * len(space), device)
        row = RowFormat(width=space.width, dtype=config.dtype)
        self.lookup = DeviceLookup(self.space, row, None, config.output_dtype)
        self.width, self.ranks = space.width, layout.size
        tables = space.tables[space.table]

        def upload(array: np.ndarray) -> torch.Tensor:  # type: ignore[type-arg]
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        self._dealt = struct_type(OWNERS, "Dealt")(
            first=upload(space.first), table=upload(tables), owner=upload(layout.owner[tables]),
            n_features=len(space.features), ranks=layout.size,
        )  # fmt: skip
        floats = RowFormat(width=space.width, dtype=torch.float32)
        self._lanes, self._vector = floats.lanes, floats.vector
        self._columns_fit = not (space.column % self._vector).any()
        most = ("-DHAS_MAX",) if self.lookup.has_max else ()
        self._gradient = (*OPTIONS, *floats.flags, *most)
        kernel(OWNERS, "owners_find").prepare(device.index)

    def find(
        self, ids: torch.Tensor, edges: Edges, batch: Batch, fault: torch.Tensor, report: int, counts: torch.Tensor
    ) -> GpuBags:
        """The bags, whose `counts`, int64 (W, F), are added to. `fault`, `report`: see `find_device_bags`. Does not
        synchronise."""
        space, places, n = self.space, batch.places, ids.shape[0]
        bags = new_device_bags(n, space, batch.size, is_all=space.space.is_all(places))
        find_device_bags(bags, ids, edges, space, fault, report, places, padding_is_dropped=True)
        owner = torch.empty(n, dtype=torch.int32, device=ids.device)
        local, asked = torch.empty_like(bags.keys), torch.empty_like(bags.keys)
        find = kernel(OWNERS, "owners_find")
        find(
            blocks_for(n, THREADS, MOST_BLOCKS), THREADS, bags.keys, bags.bag, n, max(1, batch.size), self._dealt,
            owner, local, counts.data_ptr(), counts.stride(0),
        )  # fmt: skip
        owner, order = torch.sort(owner, stable=True)
        place = kernel(OWNERS, "asked_place")
        place(
            blocks_for(n, THREADS, MOST_BLOCKS), THREADS, owner, order, local, n, self.ranks, asked, bags.homes
        )  # fmt: skip
        return GpuBags(self, bags, order, asked)

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
    """See `Bags`. Rows that have come are pooled as those of slots are, each occurrence's home being where its row is
    among them: by the same kernels, in the same order, and so to the same bits."""

    counts: torch.Tensor

    def __init__(self, width: GpuWidth, bags: DeviceBags, order: torch.Tensor, ids: torch.Tensor) -> None:
        """`order`, `ids`: int64 (N,), of which `told` says how many are asked for."""
        self._width, self._bags = width, bags
        self._order, self.ids = order, ids
        self._weights: torch.Tensor | None = None
        self._argmax: torch.Tensor | None = None
        self._rows: torch.Tensor | None = None

    def told(self, counts: torch.Tensor) -> None:
        """The host knows `counts`."""
        self.counts = counts
        asked = int(counts.sum())
        self.ids, self._order = self.ids[:asked], self._order[:asked]

    def pool(
        self, rows: torch.Tensor, weights: torch.Tensor | None, out: torch.Tensor, *, keep: bool, keep_rows: bool
    ) -> None:
        bags, lookup, hot = self._bags, self._width.lookup, ReadRows(rows, rows, rows)
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
            gradient = self._width.lookup.weights_gradient(self._rows, bags.homes, bags, grad)
            if bags.position is None:
                out += gradient
            else:  # what belongs to other widths has no position of its own, and a gradient of zero
                out.index_add_(0, bags.position, gradient)

    def gradient(self, grad: torch.Tensor, share: float) -> tuple[torch.Tensor, torch.Tensor | None]:
        bags, lookup = self._bags, self._width.lookup
        with on_device(grad.device):
            rows = self._width.gradient(bags, self._order, grad, self._argmax, share)
            scale = self._weights
            if scale is None and lookup.has_mean:
                scale = lookup.mean_scale(bags.homes, bags)
            return rows, None if scale is None else scale[self._order]

    def tensors(self) -> list[torch.Tensor]:
        held = (*vars(self._bags).values(), self._order, self.ids, self._weights, self._argmax, self._rows)
        return [each for each in held if isinstance(each, torch.Tensor)]


class GpuFinder:
    """Finds the bags of all key `spaces`, one a width, on the device of `config`. See `Finder`."""

    def __init__(self, layout: Layout, spaces: Sequence[KeySpace], config: TableSetConfig) -> None:
        self._device = config.device
        with torch.inference_mode(False), torch.cuda.device(config.device):
            self._widths = [GpuWidth(layout, space, config) for space in spaces]
        self._features = [len(space.features) for space in spaces]
        of = [(feature, layout.tables[feature.table]) for feature in features_of(layout.tables)]
        self._names = [feature_name(feature, table) for feature, table in of]
        self._rows = [table.num_embeddings for _, table in of]
        self._ranks = layout.size

    def __call__(self, batch: Batch) -> Sequence[GpuBags]:
        """Waits for the current stream."""
        columns = sum(self._features)
        if torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                "a lookup of several ranks waits for the GPU, to learn how many rows each is asked for, which a CUDA "
                "graph cannot hold: run the step eagerly"
            )
        if columns * batch.size > MAX_BAGS:
            raise InvalidInputError(
                f"{columns} features × {batch.size} samples are more than {MAX_BAGS} bags; split the batch"
            )
        ids, edges = DeviceCall.inputs(batch)
        fault, report = words_of("Fault"), words_of("Report")
        with on_device(self._device):
            words = torch.zeros(fault + report + self._ranks * columns, dtype=torch.int64, device=self._device)
            counts = torch.split(words[fault + report :].view(self._ranks, columns), self._features, 1)  # type: ignore[no-untyped-call]
            found = [
                width.find(ids, edges, batch, words[:fault], words[fault:].data_ptr(), its)
                for width, its in zip(self._widths, counts, strict=True)
            ]
            told = words[fault:].cpu()
        error = fault_in(told[:report].tolist(), self._names, self._rows)
        if error is not None:
            raise error
        counts = torch.split(told[report:].view(self._ranks, columns), self._features, 1)  # type: ignore[no-untyped-call]
        for bags, its in zip(found, counts, strict=True):
            bags.told(its.contiguous())
        return found
