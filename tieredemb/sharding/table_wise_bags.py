"""Bags of table-wise and replicated tables, on the CPU of the rank that requests them: the owners receive their ids,
and send the bags pooled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tieredemb.kernels.constants import DROPPED
from tieredemb.kernels.row_format import carrier_view
from tieredemb.lookup.bags_cpu import make_bags
from tieredemb.lookup.embedding_bag_cpu import weights_gradient
from tieredemb.sharding.bags import Part
from tieredemb.sharding.header import Bound
from tieredemb.sharding.padding import Padding, copied, write_messages
from tieredemb.step.batch import Batch

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]


class HostTableWiseBags:
    """See `Bags`. Padding ids are not sent, unless their row is to be scaled: a bag is as long as it has ids to look
    up. `counts`: see `largest_requests`; no id is inverted."""

    _samples: int  # of the rank that has most

    def __init__(self, part: Part, batch: Batch, edges: Array) -> None:
        """Raises `IdOutOfRangeError`. `edges`: of `batch`, checked."""
        space, owner = part.space, part.owner
        self.part, self.space, self.batch = part, space, batch.size
        self._bags = bags = make_bags(
            batch.ids.numpy(),
            edges,
            space,
            batch.size,
            padding_is_dropped=not part.sends_padding,
            places=batch.places,
        )
        is_looked_up: Array = bags.keys >= 0
        self._kept = None if is_looked_up.all() else is_looked_up
        ends = bags.offsets if self._kept is None else np.concatenate([[0], np.cumsum(is_looked_up)])[bags.offsets]
        lengths = np.diff(ends).reshape(len(owner), batch.size)
        starts = ends[:: batch.size][: len(owner)] if batch.size else np.zeros(len(owner), np.int64)
        self._ranges = [slice(start, start + n) for start, n in zip(starts, lengths.sum(1), strict=True)]
        self.counts = np.zeros((part.ranks, 2 * len(owner)), np.int64)
        self.counts[owner, np.arange(len(owner))] = lengths.sum(1)
        self._requested_rows, self._lengths = self._kept_values(bags.keys - space.first[bags.feature]), lengths
        self._rows = np.empty((0, space.width), np.float32)

    def _kept_values(self, values: Array) -> Array:
        """The values of the occurrences that are looked up, of `values` of all."""
        return values if self._kept is None else values[self._kept]

    def pad(self, bound: Bound, samples: int, into: torch.Tensor) -> None:
        part, self._samples = self.part, samples
        counts = torch.from_numpy(self.counts[:, : len(part.owner)])
        self._padding = Padding(counts.sum(1), bound.ids)
        ids = self._padding.pad(torch.from_numpy(self._by_rank(self._requested_rows)))
        lengths = torch.from_numpy(np.pad(self._lengths[part.by_rank], ((0, 0), (0, samples - self.batch))))
        write_messages(into, counts, ids, lengths, part.held)

    def _by_rank(self, values: Array) -> Array:
        """The same `values` sorted by the ranks that own them."""
        return np.concatenate([values[self._ranges[f]] for f in self.part.by_rank])

    def sent_weights(self, weights: torch.Tensor) -> torch.Tensor | None:
        position = self._bags.position
        array = weights.detach().to(torch.float32).contiguous().numpy()
        array = self._kept_values(array[: len(self._bags.keys)] if position is None else array[position])
        return copied(self._padding.pad(torch.from_numpy(self._by_rank(array))), self.part.copies)

    def keep(self, every: torch.Tensor) -> None:
        entries = self._padding.entries_of(torch.arange(len(self._requested_rows), device="cpu"))
        self._rows = carrier_view(every[entries])

    def pool(
        self, rows: torch.Tensor, weights: torch.Tensor | None, out: torch.Tensor, *, keep: bool, keep_rows: bool
    ) -> None:
        for features, its in self._blocks(rows):
            for k, f in enumerate(features):
                first = int(self.space.column[f])
                out[:, first : first + self.space.width] = its[: self.batch, k]

    def _blocks(self, rows: torch.Tensor) -> list[tuple[Array, torch.Tensor]]:
        """Of each rank the features that it holds, and its bags among `rows` of all, (F · B, D): (B, F′, D), where B
        are the samples of the rank that has most."""
        held, width = self.part.held, self.space.width
        pieces = torch.split(rows, [self._samples * count for count in held])
        features = np.split(self.part.by_rank, np.cumsum(held)[:-1])
        return [(of, its.view(self._samples, len(of), width)) for of, its in zip(features, pieces, strict=True)]

    def weights_gradient(self, grad: torch.Tensor, out: torch.Tensor) -> None:
        homes = np.full(len(self._bags.keys), DROPPED, np.int32)
        requested = np.arange(len(homes)) if self._kept is None else np.flatnonzero(self._kept)
        homes[self._by_rank(requested)] = np.arange(len(requested), dtype=np.int32)
        gradient = weights_gradient(self._rows, homes, self._bags, self.space, grad.numpy())
        out.numpy()[slice(len(gradient)) if self._bags.position is None else self._bags.position] = gradient

    def gradient(self, grad: torch.Tensor, divisor: float) -> tuple[torch.Tensor, torch.Tensor | None]:
        width = self.space.width
        rows = torch.zeros((len(self.part.by_rank) * self._samples, width), device="cpu")
        for features, its in self._blocks(rows):
            for k, f in enumerate(features):
                first = int(self.space.column[f])
                its[: self.batch, k] = grad[:, first : first + width]
        if divisor != 1.0:
            rows.numpy()[...] /= np.float32(divisor)
        return rows if self.part.copies == 1 else copied(rows, self.part.copies), None

    def tensors(self) -> list[torch.Tensor]:
        return []
