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


class Message(NamedTuple):
    """What one rank requests of all, rank by rank: how many ids of each feature, the ids in a block, and, of features
    whose bags the owner pools, how many ids each bag has, and zeros where another rank pools more, or has more samples.
    `values`: int64 (M,) · `sizes`: how many of them each rank gets."""

    values: torch.Tensor
    sizes: list[int]


def copied(values: torch.Tensor, times: int) -> torch.Tensor:
    """The `values`, (K, …), repeated `times` times, one copy after the other."""
    return values.expand(times, *values.shape).flatten(0, 1)


def message(
    counts: torch.Tensor,
    ids: torch.Tensor,
    lengths: torch.Tensor | None = None,
    held: Sequence[int] = (),
    copies: int = 1,
) -> Message:
    """`counts`: int64 (W, F) · `ids`: int64 (W · bound,) · `lengths`: int64 (F, B), in the order of the ranks that hold
    the features, `held` by each · `copies`: how many times the message is sent."""
    ranks = counts.shape[0]
    blocks = torch.cat([counts, ids.view(ranks, -1)], 1)
    if lengths is not None:
        of_ranks = lengths.new_zeros((ranks, max(held), lengths.shape[1]))
        for its, of_rank in zip(of_ranks, lengths.split(list(held)), strict=True):
            its[: len(of_rank)] = of_rank
        blocks = torch.cat([blocks, of_ranks.flatten(1)], 1)
        blocks = blocks if copies == 1 else copied(blocks, copies)
    return Message(blocks.reshape(-1), [blocks.shape[1]] * len(blocks))


def table_wise_sizes(held: Sequence[int], copies: int, samples: int) -> tuple[list[int], list[int]]:
    """The `back` and the `grads` of `Bags`, of a table-wise part with so many samples. `held`, `copies`: see
    `message`."""
    bags = [features * samples for features in held] * copies
    return bags if copies == 1 else [], bags


class ReceivedMessages(NamedTuple):
    """The messages of all ranks. `counts`: int64 (W, F), of each rank, `bound` in all at most · `ids`: int64 (W ·
    bound,) · `lengths`: int64 (F′, W · B), of the features that this rank holds, in these rank by rank."""

    counts: torch.Tensor
    ids: torch.Tensor
    lengths: torch.Tensor | None


def size_of(features: int, bound: int, most_held: int, samples: int) -> int:
    """How long a message is. `features`: F · `most_held`: of how many features any rank pools the bags · `samples`: of
    the rank that has most."""
    return features + bound + most_held * samples


def read(values: torch.Tensor, features: int, bound: int, most_held: int, samples: int, held: int) -> ReceivedMessages:
    """Reads messages of the `size_of` the same arguments. `held`: F′."""
    blocks = values.view(-1, size_of(features, bound, most_held, samples))
    # whatever was received, nobody reads beyond a block
    ends = torch.cumsum(blocks[:, :features], 1).clamp_(0, bound)
    counts = torch.cat([ends[:, :1], ends.diff(dim=1)], 1)
    ids, lengths = blocks[:, features : features + bound].reshape(-1), blocks[:, features + bound :]
    if not held:
        return ReceivedMessages(counts, ids, None)
    of_held = lengths.unflatten(1, (most_held, samples))[:, :held]
    return ReceivedMessages(counts, ids, of_held.transpose(0, 1).flatten(1))
