"""Exchanges of one size: requests are padded to a bound that all ranks know, so that no host has to know how many there
are.

Counts are sent with the ids, and the receiver computes where everything lies. On a CPU these are operations on tensors;
on a GPU kernels do the same, as no host knows the counts (`device_padding`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

MOST_ENTRIES = 1 << 27  # of a part: a GPU takes 2²⁸ ids of all parts, which are seldom more than two


class Padding:
    """Values that lie rank by rank, and the blocks of `bound` entries, one a rank, in which they are sent: a block
    begins with the rank's values. Nobody reads the rest of it, which has copies of some value, and so is finite where
    they are."""

    def __init__(self, sizes: torch.Tensor, bound: int) -> None:
        """`sizes`: int64 (W,), how many values each rank has, `bound` at most."""
        self.bound, self.entries = bound, sizes.shape[0] * bound
        self._ends = torch.cumsum(sizes, 0)
        self._starts = self._ends - sizes
        inside = torch.arange(bound, device=sizes.device)
        self._numbers = (self._starts[:, None] + inside).view(-1)

    def pad(self, values: torch.Tensor) -> torch.Tensor:
        """The blocks (W · bound, …) of `values` (N, …), which may have more at the end than the ranks have."""
        if len(values) == 0:
            return values.new_zeros((self.entries, *values.shape[1:]))
        return values.index_select(0, self._numbers.clamp(max=len(values) - 1))

    def entries_of(self, number: torch.Tensor) -> torch.Tensor:
        """The entries of values, by their numbers: int64 (K,)."""
        rank = torch.searchsorted(self._ends, number, right=True).clamp_(max=len(self._ends) - 1)
        return (number - self._starts[rank] + rank * self.bound).clamp_(0, self.entries - 1)

    def place(self, homes: torch.Tensor, order: torch.Tensor) -> None:
        """Writes the entries of the values `order`, int64 (K,), which are occurrences, to `homes`, int32 (N,).
        Occurrences in `order` behind the ranks' values keep their homes."""
        number = torch.arange(len(order), device=homes.device)
        entry = self.entries_of(number).to(homes.dtype)
        homes.index_copy_(0, order, torch.where(number < self._ends[-1], entry, homes[order]))

    def move(self, homes: torch.Tensor) -> None:
        """Makes `homes`, int32 (N,), which are numbers of values, their entries; negative ones stay."""
        entry = self.entries_of(homes.clamp(min=0).to(torch.int64)).to(homes.dtype)
        torch.where(homes >= 0, entry, homes, out=homes)


def firsts_of(ids: torch.Tensor, counts: torch.Tensor, bound: int) -> torch.Tensor:
    """Of each entry the position of its row among those that come back, `bound` for each rank: int64 (W · B,). Entries
    of ids that were requested before, and entries without an id, get the position behind all rows. `ids`: int64 (W ·
    B,), as they were requested · `counts`: int64 (W,), how many of each rank's block are ids."""
    blocks = ids.view(len(counts), -1)
    number = torch.arange(blocks.shape[1], device=ids.device)
    is_first = (blocks >= 0) & (number < counts[:, None])
    at = torch.cumsum(is_first, 1) - 1
    is_returned = is_first & (at < bound)
    at += torch.arange(len(counts), device=ids.device)[:, None] * bound
    return torch.where(is_returned, at, len(counts) * bound).view(-1)


def plain_ids(ids: torch.Tensor) -> torch.Tensor:
    """The ids themselves, of which those that were requested before may be inverted."""
    return ids ^ (ids >> 63)


def copied(values: torch.Tensor, times: int) -> torch.Tensor:
    """The `values`, (K, …), repeated `times` times, one copy after the other."""
    return values.expand(times, *values.shape).flatten(0, 1)


def write_messages(
    into: torch.Tensor,
    counts: torch.Tensor,
    ids: torch.Tensor,
    lengths: torch.Tensor | None = None,
    held: Sequence[int] = (),
) -> None:
    """Writes the messages of one rank to all, `into`, int64 (W, M): how many ids of each feature, the ids in a block,
    and, of features whose bags the receiver pools, how many ids each bag has, and zeros where another rank pools more.
    `counts`: int64 (W, F), or (1, F) where all ranks get the same · `ids`: int64 (W · bound,), or as many as one gets ·
    `lengths`: int64 (F, B), in the order of the ranks that hold the features, `held` by each."""
    ranks, features = counts.shape
    blocks = ids.view(ranks, -1)
    end = features + blocks.shape[1]
    into[:, :features] = counts
    into[:, features:end] = blocks
    if lengths is not None:
        of_ranks = lengths.new_zeros((ranks, max(held), lengths.shape[1]))
        for its, of_rank in zip(of_ranks, lengths.split(list(held)), strict=True):
            its[: len(of_rank)] = of_rank
        into[:, end:] = of_ranks.flatten(1)


class ReceivedMessages(NamedTuple):
    """The messages of all ranks. `counts`: int64 (W, F), of each rank, `bound` in all at most · `ids`: int64 (W ·
    bound,) · `lengths`: int64 (F′, W · B), of the features that this rank holds, in these rank by rank."""

    counts: torch.Tensor
    ids: torch.Tensor
    lengths: torch.Tensor | None


def read(messages: torch.Tensor, features: int, bound: int, held: int, samples: int) -> ReceivedMessages:
    """Reads the `messages` of all ranks to one, int64 (W, M). `held`: F′."""
    # whatever was received, nobody reads beyond a block
    ends = torch.cumsum(messages[:, :features], 1).clamp_(0, bound)
    counts = torch.cat([ends[:, :1], ends.diff(dim=1)], 1)
    lengths = features + bound
    ids = messages[:, features:lengths].reshape(-1)
    if not held:
        return ReceivedMessages(counts, ids, None)
    of_held = messages[:, lengths : lengths + held * samples].unflatten(1, (held, samples))
    return ReceivedMessages(counts, ids, of_held.transpose(0, 1).flatten(1))
