"""What all ranks ask of one, part by part: how much, and in which order it is one batch of all of them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tieredemb.sharding.bags import Part
from tieredemb.sharding.padding import each_asked

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]


def uploaded(values: Array, device: torch.device) -> torch.Tensor:
    """The same on the device. Does not synchronise."""
    told = torch.from_numpy(values)
    return told.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else told


def spans(starts: Array, lengths: Array, device: torch.device) -> torch.Tensor:
    """The numbers from each of the `starts` on, as many as its `lengths` says, span after span: int64 (N,) on the
    device. Does not synchronise."""
    total = int(lengths.sum())
    shift, length = uploaded(np.stack([starts - (np.cumsum(lengths) - lengths), lengths]), device)
    place = torch.repeat_interleave(shift, length, output_size=total)
    return place.add_(torch.arange(total, device=device))


@dataclass(frozen=True)
class Asked:
    """Values that come from all ranks, or go back to them. `counts`: int64 (W, F) on the CPU, how many of each rank and
    feature · `place`: int64 (N,) on the tables' device, where what comes feature by feature, and in these rank by rank,
    lies among what comes rank by rank."""

    counts: torch.Tensor
    place: torch.Tensor

    @classmethod
    def of(cls, counts: torch.Tensor, device: torch.device) -> Asked:
        """What `counts` announce. Does not synchronise."""
        lengths = counts.numpy()
        starts = (np.cumsum(lengths) - lengths.ravel()).reshape(lengths.shape)  # rank by rank, features in their order
        return cls(counts, spans(starts.T.ravel(), lengths.T.ravel(), device))

    def by_feature(self, values: torch.Tensor) -> torch.Tensor:
        """What came rank by rank, feature by feature: as one batch of all ranks has it."""
        return values[self.place]

    def by_rank(self, values: torch.Tensor) -> torch.Tensor:
        """The other way round."""
        out = torch.empty_like(values)
        out[self.place] = values
        return out

    @property
    def per_rank(self) -> list[int]:
        counts: list[int] = self.counts.sum(1).tolist()
        return counts

    @functools.cached_property
    def ends(self) -> list[int]:
        """Where features begin and end, feature by feature: F + 1."""
        return [0, *np.cumsum(self.counts.numpy().sum(0)).tolist()]


class AskedPart:
    """What is asked of the tables of one part. `message`: what comes of it · `answer`: what goes back, a row of each
    id that a rank asks for, once for all of its occurrences, or of whole tables one of each bag · `grads`: what comes
    in the backward, one of each occurrence, or of each bag · `has_ones`: whether that is as the ids are. Once the
    message has come (`take`), `ids`: int64 (N,), feature by feature; and `picked`: int64 (·,), which of them have the
    rows that go back, rank by rank, or of whole tables `edges`: int64 (K + 1,), where their bags begin and end among
    them."""

    ids: torch.Tensor
    picked: torch.Tensor
    edges: torch.Tensor

    def __init__(
        self, part: Part, counts: torch.Tensor, samples: torch.Tensor, rank: int, device: torch.device
    ) -> None:
        """`counts`: int64 (W, columns), of what comes of each rank · `samples`: int64 (W,), how many each has · `rank`:
        this one."""
        self.is_whole, self._device, self._features = part.is_whole, device, len(part.space.features)
        ids, more = counts.split(self._features, 1)  # type: ignore[no-untyped-call]
        if part.is_whole:
            bags = samples[:, None] * torch.from_numpy((part.owner == rank).astype(np.int64))
            self.has_ones = torch.equal(ids, bags) and not bool(more.any())
            self.message = Asked.of(counts.contiguous(), device)
            self.answer = self.grads = self.message if self.has_ones else Asked.of(bags, device)
        else:
            self.has_ones = True
            self.message = self.grads = Asked.of(ids.contiguous(), device)
            self.answer = self.message if torch.equal(ids, more) else Asked.of(more.contiguous(), device)

    @functools.cached_property
    def order(self) -> Asked:
        """That of the ids alone."""
        if self.message.ends[-1] == self.ends[-1]:
            return self.message
        return Asked.of(self.message.counts[:, : self._features].contiguous(), self._device)

    @functools.cached_property
    def ends(self) -> list[int]:
        """Where features begin and end among the ids: F + 1."""
        return self.message.ends[: self._features + 1]

    def take(self, came: torch.Tensor) -> None:
        """Its message has come. Does not synchronise."""
        values = self.message.by_feature(came)
        self.ids, lengths = values[: self.ends[-1]], values[self.ends[-1] :]
        if not self.is_whole:
            self._pick()
        elif self.has_ones:
            self.edges = torch.arange(self.ends[-1] + 1, device=self._device)
        else:
            self.edges = torch.zeros(self.answer.ends[-1] + 1, dtype=torch.int64, device=self._device)
            torch.cumsum(self._lengths(lengths), 0, out=self.edges[1:])

    def _pick(self) -> None:
        """Takes the ids for what they are, of which those that a rank has asked for before are inverted."""
        rows = self.answer.ends[-1]
        if rows == len(self.ids):
            self.picked = self.answer.by_rank(torch.arange(rows, device=self._device))
        else:  # `nonzero` would wait for a GPU
            self.picked = self.answer.by_rank(torch.nonzero_static(self.ids >= 0, size=rows).squeeze(1))
            self.ids = each_asked(self.ids)

    def _lengths(self, told: torch.Tensor) -> torch.Tensor:
        """How many ids the bags have, int64 (K,), by feature and rank: as `told`, or equal."""
        bags = self.answer.ends[-1]
        if len(told) == bags:
            return told
        counts, sizes = self.message.counts.numpy().T, self.answer.counts.numpy().T
        is_told = counts[self._features :] > 0
        equal = np.where(is_told, 0, counts[: self._features] // np.maximum(sizes, 1))
        each, size = uploaded(np.stack([equal.ravel(), sizes.ravel()]), self._device)
        lengths = torch.repeat_interleave(each, size, output_size=bags)
        if len(told):
            starts = np.cumsum(sizes).reshape(sizes.shape) - sizes
            lengths[spans(starts[is_told], sizes[is_told], self._device)] = told
        return lengths

    def tensors(self) -> list[torch.Tensor]:
        """All that lie on the device."""
        its = self.edges if self.is_whole else self.picked
        return [self.message.place, self.answer.place, self.grads.place, self.ids, its]
