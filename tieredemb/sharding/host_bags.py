"""The bags of a lookup on the CPU of the rank that requests it: which rows they request of which owner, and their
pooling.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tieredemb.config import Array
from tieredemb.kernels.constants import DROPPED, MAX
from tieredemb.kernels.row_format import carrier_view
from tieredemb.lookup.bags import EqualBags
from tieredemb.lookup.bags_cpu import checked_edges, make_bags
from tieredemb.lookup.embedding_bag_cpu import NO_ARGMAX, NO_WEIGHTS, mean_scale, pool, weights_gradient
from tieredemb.sharding.bags import Bags, Part, Wait
from tieredemb.sharding.header import Bound, LargestRequest, halves_of, largest_requests
from tieredemb.sharding.layout import Layout
from tieredemb.sharding.owners_cpu import find_owners
from tieredemb.sharding.padding import Padding, plain_ids, write_messages
from tieredemb.sharding.table_wise_bags import HostTableWiseBags
from tieredemb.step.batch import Batch


def edges_of(batch: Batch) -> Array:
    """The checked edges of a batch's bags, int64. Raises `InvalidInputError`."""
    if isinstance(batch.offsets, EqualBags):
        return batch.offsets.edges()
    return checked_edges(batch.offsets.numpy(), len(batch.ids), batch.edges, exact=batch.exact)


class HostFinder:
    """Finds the bags of all `parts`. See `CountingFinder`."""

    def __init__(self, layout: Layout, parts: Sequence[Part]) -> None:
        self._layout, self._parts = layout, parts
        self._halves = [halves_of([len(part.space.features)]) for part in parts]

    def __call__(self, batch: Batch, wait: Wait = lambda: None) -> tuple[Sequence[Bags], list[LargestRequest]]:
        edges = edges_of(batch)
        found = [
            HostTableWiseBags(part, batch, edges) if part.is_table_wise else HostBags(part, self._layout, batch, edges)
            for part in self._parts
        ]
        each = zip(found, self._halves, strict=True)  # of parts on different numbers of ranks
        return found, [most for bags, halves in each for most in largest_requests(bags.counts, halves)]

    def count(self, batch: Batch, wait: Wait = lambda: None) -> list[LargestRequest]:
        return self(batch)[1]

    def find_unchecked(self, batch: Batch, *, finds_firsts: bool) -> tuple[Sequence[Bags], torch.Tensor]:
        """On a CPU errors are raised at once."""
        return self(batch)[0], self.report_buffer()

    def read_report(self, words: torch.Tensor) -> list[LargestRequest]:
        return [LargestRequest(0, 0)] * len(self._parts)

    def report_buffer(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.int64, device="cpu")


class HostBags:
    """See `Bags`: of row-wise tables. `counts`: see `largest_requests`."""

    def __init__(self, part: Part, layout: Layout, batch: Batch, edges: Array) -> None:
        """Raises `IdOutOfRangeError`. `edges`: of `batch`, checked."""
        space, drops = part.space, not part.sends_padding
        self.space = space
        self._bags = bags = make_bags(
            batch.ids.numpy(), edges, space, batch.size, padding_is_dropped=drops, places=batch.places
        )
        found = find_owners(bags, space, layout.size)
        self._order, self._homes = found.order, found.homes
        self._padding: Array | None = None  # occurrences that are sent but add nothing to their bags
        if part.sends_padding:
            self._padding = bags.keys == part.padding_keys[bags.feature]
        self._requested = torch.from_numpy(found.requested)
        self.counts = np.concatenate([found.counts, found.firsts], 1)
        self._rows = np.empty((0, space.width), np.float32)
        self._weights, self._argmax, self._is_weighted = NO_WEIGHTS, NO_ARGMAX, False

    def pad(self, bound: Bound, samples: int, into: torch.Tensor) -> None:
        counts, firsts = torch.from_numpy(self.counts).split(len(self.space.features), 1)
        padding, order = Padding(counts.sum(1), bound.ids), self._order
        homes, requested = torch.from_numpy(self._homes), self._requested
        if bound.rows is None:
            padding.place(homes, torch.from_numpy(order))
            requested = plain_ids(requested)
        else:
            Padding(firsts.sum(1), bound.rows).move(homes)
        self._order = padding.pad(torch.from_numpy(order)).numpy()
        write_messages(into, counts, padding.pad(requested))

    def sent_weights(self, weights: torch.Tensor) -> torch.Tensor | None:
        return None

    def keep(self, every: torch.Tensor) -> None:
        """Does nothing: rows are pooled here."""

    def pool(
        self, rows: torch.Tensor, weights: torch.Tensor | None, out: torch.Tensor, *, keep: bool, keep_rows: bool
    ) -> None:
        if weights is not None:
            self._is_weighted = True
            position = self._bags.position
            array = weights.detach().to(torch.float32, copy=True).contiguous().numpy()
            self._weights = array[: len(self._homes)] if position is None else array[position]
        if keep and self.space.has_max:
            self._argmax = np.full(out.shape, -1, np.int32)
        found, bags, space = carrier_view(rows), self._bags, self.space
        pool(found, self._read(), bags, space, self._weights, carrier_view(out), self._argmax)
        if keep_rows:
            self._rows = found

    def _read(self) -> Array:
        """Which of the received rows each occurrence reads, int32 (N,)."""
        homes = self._homes
        return homes if self._padding is None else np.where(self._padding, np.int32(DROPPED), homes)

    def weights_gradient(self, grad: torch.Tensor, out: torch.Tensor) -> None:
        gradient = weights_gradient(self._rows, self._read(), self._bags, self.space, grad.numpy())
        out.numpy()[slice(len(gradient)) if self._bags.position is None else self._bags.position] = gradient

    def gradient(self, grad: torch.Tensor, divisor: float) -> tuple[torch.Tensor, torch.Tensor | None]:
        space, order, width = self.space, self._order, self.space.width
        if not len(self._homes):  # all entries are padding
            none, scaled = torch.zeros((len(order), width), device="cpu"), self._is_weighted or space.has_mean
            return none, none.new_zeros(len(order)) if scaled else None
        feature = self._bags.feature[order]
        columns = space.column[feature][:, None] + np.arange(width)
        samples = self._bags.sample[order][:, None]
        rows = grad.numpy()[samples, columns]
        if space.has_max:
            is_not_maximum = (space.mode[feature] == MAX)[:, None] & (self._argmax[samples, columns] != order[:, None])
            rows[is_not_maximum] = 0.0
        if divisor != 1.0:
            rows /= np.float32(divisor)
        if not self._is_weighted and not space.has_mean:
            return torch.from_numpy(rows), None
        scale = self._weights if self._is_weighted else mean_scale(self._bags, space, self._read())
        return torch.from_numpy(rows), torch.from_numpy(scale[order])

    def tensors(self) -> list[torch.Tensor]:
        return []
