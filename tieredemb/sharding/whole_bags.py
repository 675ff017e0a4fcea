"""Bags of tables that one rank holds each, on the CPU where they are: their ids go there, and they come back pooled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tieredemb.kernels.constants import DROPPED
from tieredemb.kernels.row_format import carrier_view
from tieredemb.lookup.bags_cpu import make_bags
from tieredemb.lookup.embedding_bag_cpu import weights_gradient
from tieredemb.sharding.bags import Part
from tieredemb.sharding.padding import Padding, message
from tieredemb.step.batch import Batch

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]


class HostWholeBags:
    """See `Bags`. Padding stays here, unless its row is to be scaled: a bag is as long as it has ids to look up."""

    def __init__(self, part: Part, ranks: int, batch: Batch, edges: Array) -> None:
        """Raises `IdOutOfRangeError`. `edges`: of `batch`, checked."""
        space, owner = part.space, part.owner
        self.space, self.batch, self._owner = space, batch.size, owner
        self._bags = bags = make_bags(
            batch.ids.numpy(),
            edges,
            space,
            batch.size,
            padding_is_dropped=not part.sends_padding,
            places=batch.places,
        )
        kept: Array = bags.keys >= 0
        self._kept = None if kept.all() else kept
        ends = bags.offsets if self._kept is None else np.concatenate([[0], np.cumsum(kept)])[bags.offsets]
        self._order = np.argsort(owner, kind="stable")  # of features, by rank
        lengths = np.diff(ends).reshape(len(owner), batch.size)
        is_ragged = lengths.min(1, initial=np.iinfo(np.int64).max) < lengths.max(1, initial=0)
        starts = ends[:: batch.size][: len(owner)] if batch.size else np.zeros(len(owner), np.int64)
        self._ranges = [slice(start, start + n) for start, n in zip(starts, lengths.sum(1), strict=True)]
        rows = self._those_kept(bags.keys - space.first[bags.feature])
        counts = np.zeros((ranks, 2, len(owner)), np.int64)
        counts[owner, 0, np.arange(len(owner))] = lengths.sum(1)
        counts[owner, 1, np.arange(len(owner))] = is_ragged * batch.size
        self.counts = torch.from_numpy(counts.reshape(ranks, -1))
        self.sent, self.ids = counts.sum((1, 2)).tolist(), counts[:, 0].sum(1).tolist()
        self.back = self.grads = (np.bincount(owner, minlength=ranks) * batch.size).tolist()
        asked = []
        for rank in range(ranks):
            its = np.flatnonzero(owner == rank)
            asked += [rows[self._ranges[f]] for f in its] + [lengths[f] for f in its if is_ragged[f]]
        self.asked = torch.from_numpy(np.concatenate(asked))
        self._asked_rows, self._lengths = rows, lengths
        self._padding: Padding | None = None
        self._rows = np.empty((0, space.width), np.float32)

    def _those_kept(self, values: Array) -> Array:
        """Of values of all occurrences those that are looked up."""
        return values if self._kept is None else values[self._kept]

    def pad(self, bound: int, rows: int | None = None) -> None:
        self._padding = Padding(torch.tensor(self.ids, dtype=torch.int64, device="cpu"), bound)
        ids = self._padding.pad(torch.from_numpy(self._by_rank(self._asked_rows)))
        lengths = torch.from_numpy(self._lengths[self._order])
        self.ids = [bound] * len(self.ids)
        held = np.bincount(self._owner, minlength=len(self.ids)).tolist()
        self.asked, self.sent = message(self.counts[:, : len(self._owner)], ids, lengths, held)

    def _by_rank(self, values: Array) -> Array:
        """Of values of those occurrences that are looked up those by rank."""
        return np.concatenate([values[self._ranges[f]] for f in self._order])

    def sent_weights(self, weights: torch.Tensor) -> torch.Tensor | None:
        position = self._bags.position
        array = weights.detach().to(torch.float32).contiguous().numpy()
        array = self._those_kept(array[: len(self._bags.keys)] if position is None else array[position])
        sent = torch.from_numpy(self._by_rank(array))
        return sent if self._padding is None else self._padding.pad(sent)

    def keep(self, every: torch.Tensor) -> None:
        if self._padding is not None:
            every = every[self._padding.entries_of(torch.arange(len(self._asked_rows), device="cpu"))]
        self._rows = carrier_view(every)

    def pool(
        self, rows: torch.Tensor, weights: torch.Tensor | None, out: torch.Tensor, *, keep: bool, keep_rows: bool
    ) -> None:
        for f, its in zip(self._order, rows.view(len(self._order), self.batch, self.space.width), strict=True):
            first = int(self.space.column[f])
            out[:, first : first + self.space.width] = its

    def weights_gradient(self, grad: torch.Tensor, out: torch.Tensor) -> None:
        homes = np.full(len(self._bags.keys), DROPPED, np.int32)
        asked = np.arange(len(homes)) if self._kept is None else np.flatnonzero(self._kept)
        homes[np.concatenate([asked[self._ranges[f]] for f in self._order])] = np.arange(len(asked), dtype=np.int32)
        gradient = weights_gradient(self._rows, homes, self._bags, self.space, grad.numpy())
        out.numpy()[slice(len(gradient)) if self._bags.position is None else self._bags.position] = gradient

    def gradient(self, grad: torch.Tensor, share: float) -> tuple[torch.Tensor, torch.Tensor | None]:
        width, array = self.space.width, grad.numpy()
        rows = np.empty((len(self._order), self.batch, width), np.float32)
        for k, f in enumerate(self._order):
            first = self.space.column[f]
            rows[k] = array[:, first : first + width]
        if share != 1.0:
            rows /= np.float32(share)
        return torch.from_numpy(rows.reshape(-1, width)), None

    def tensors(self) -> list[torch.Tensor]:
        return []
