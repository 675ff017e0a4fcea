"""The bags of a lookup, on either device: which rows their rank requests of which owner, and what it does with them.

Of a row-wise table rows come back, one for all occurrences of an id, and the requesting rank pools them. Of a
table-wise table pooled bags come back. A replicated table is requested as if there were one rank, but the message goes
to all of them, so that each can update its rows; each rank pools its own bags.

An id is sent for every occurrence, as the owner trains and scores each. If it is not the first occurrence of its row,
it is inverted (~), so the message itself says which rows are requested.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from tieredemb.lookup.bags import KeySpace
from tieredemb.sharding.header import Bound, LargestRequest
from tieredemb.sharding.layout import REPLICATED, ROW_WISE, Layout
from tieredemb.step.batch import Batch

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]


NO_KEY = -2  # −1 is the key of ids that are not looked up


@dataclass(frozen=True, eq=False)
class Part:
    """The tables of one width and one kind of sharding. `space`: their key space, as batches name rows · `owner`: int64
    (F,), of each feature the rank that holds its table whole; −1 where all are row-wise · `ranks`, `copies`: there are
    `ranks` different messages, and each is sent `copies` times; where each rank holds the tables, one rank stands for
    all · `sends_padding`: whether owners are sent the ids of padding, too, whose rows they scale, and which add nothing
    to bags."""

    space: KeySpace
    owner: Array
    ranks: int
    copies: int
    sends_padding: bool

    @functools.cached_property
    def is_table_wise(self) -> bool:
        """Whether each table is held whole, by one rank or by all."""
        return bool((self.owner >= 0).all())

    @functools.cached_property
    def by_rank(self) -> Array:
        """Of table-wise tables the features sorted by the ranks that hold them, int64 (F,)."""
        return np.argsort(self.owner, kind="stable")

    @functools.cached_property
    def held(self) -> list[int]:
        """How many features each of the `ranks` has."""
        counts: list[int] = np.bincount(self.owner, minlength=self.ranks).tolist()
        return counts

    @functools.cached_property
    def most_held(self) -> int:
        """How many features' bags any rank pools at most."""
        return max(self.held) if self.is_table_wise else 0

    def message_size(self, bound: Bound, samples: int) -> int:
        """How many words of this part a rank sends to each rank, where none has more `samples`: see `write_messages`
        in `padding`."""
        return len(self.owner) + bound.ids + self.most_held * samples

    def row_sizes(self, bound: Bound, samples: int, rank: int) -> tuple[list[int], list[int]]:
        """How many rows a forward sends from `rank` to each one, and how many it receives from each: of row-wise tables
        as many as may come back, of table-wise ones a bag for each feature and sample. Both are empty where all ranks
        hold the tables, and bags stay on their rank."""
        if not self.is_table_wise:
            sizes = [bound.row_count] * self.ranks
            return sizes, sizes
        if self.copies > 1:
            return [], []
        return [self.held[rank] * samples] * self.ranks, [held * samples for held in self.held]

    def gradient_sizes(self, bound: Bound, samples: int, rank: int) -> tuple[list[int], list[int]]:
        """The same for the gradients of a backward: one for each id, or for each bag; where all ranks hold the tables,
        each is sent those of all bags."""
        if not self.is_table_wise:
            sizes = [bound.ids] * self.ranks
            return sizes, sizes
        bags = [held * samples for held in self.held] * self.copies
        return bags, [bags[rank]] * len(bags)

    def held_by(self, rank: int) -> Array:
        """Which features' bags a rank pools, bool (F,)."""
        is_held: Array = (self.owner == rank) | (self.copies > 1)
        return is_held

    @functools.cached_property
    def padding_keys(self) -> Array:
        """Of each feature the key of its padding, if that is sent, int64 (F,); else one that no occurrence has."""
        padding: Array = np.where(self.space.padding < 0, NO_KEY, self.space.first + self.space.padding)
        return padding if self.sends_padding else np.full_like(padding, NO_KEY)


def parts_of(
    layout: Layout, tables: Sequence[int], columns: Sequence[int], *, sends_padding: bool = False
) -> list[Part]:
    """The parts of the `tables` of one width: the row-wise ones, the table-wise ones, and the replicated ones, as far
    as there are any. `columns`: see `KeySpace`."""
    parts = []
    for kind in (ROW_WISE, 0, REPLICATED):
        tables_of_kind = [t for t in tables if min(layout.owner[t], 0) == kind]
        if tables_of_kind:
            space = KeySpace(layout.tables, tables_of_kind, columns)
            owner, copies = layout.owner[space.tables[space.table]], 1
            if kind == REPLICATED:
                owner, copies = np.zeros_like(owner), layout.size
            parts.append(Part(space, owner, layout.size // copies, copies, sends_padding))
    return parts


class Bags(Protocol):
    """The bags of one part in one batch; tensors lie on the tables' device. They are padded first (`pad`). Rows come
    back as `Part.row_sizes` says, (·, D), and of table-wise tables one for each bag, by sample and feature. Where all
    ranks hold the tables, these are the bags that were pooled here."""

    def pad(self, bound: Bound, samples: int, into: torch.Tensor) -> None:
        """Writes what is requested of each rank to its message: `into`, int64 (W, M), see `write_messages`. The `bound`
        takes what is requested: each rank is sent `bound.ids` ids, and as many weights, and gradients of row-wise
        tables. `bound.rows` rows come back; where that is None one for each id, and no id is inverted. Owners that pool
        bags do so for as many `samples` as any rank has: where there are fewer here, the others are without ids. Does
        not synchronise."""

    def sent_weights(self, weights: torch.Tensor) -> torch.Tensor | None:
        """The weights of the requested ids, float32 (W · bound,), where their owner pools them; of `weights`, floats
        (N,), of the samples. Does not synchronise."""

    def keep(self, every: torch.Tensor) -> None:
        """Keeps the rows of all ids, (·, D), for the gradient of their weights, where their owner pools them."""

    def pool(
        self, rows: torch.Tensor, weights: torch.Tensor | None, out: torch.Tensor, *, keep: bool, keep_rows: bool
    ) -> None:
        """Pools the received `rows` into the columns of their features in `out` (B, ΣD). `weights`: as for
        `sent_weights` · `keep`: whether a backward will follow · `keep_rows`: whether that computes the gradient of the
        weights. Does not synchronise."""

    def weights_gradient(self, grad: torch.Tensor, out: torch.Tensor) -> None:
        """Adds the gradient of the per-sample weights to their positions in `out`, float32 (N,), given the gradient of
        the outputs, float32 (B, ΣD). Does not synchronise."""

    def gradient(self, grad: torch.Tensor, divisor: float) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The gradients to send: of each id that of its bag, or of table-wise tables those of the bags, float32 (·, D),
        divided by `divisor`; and their factors, float32 (W · bound,), where these are not ones, and the owner does not
        know them. Does not synchronise."""

    def tensors(self) -> list[torch.Tensor]:
        """All tensors that it has on a GPU."""


Wait = Callable[[], object]  # for what the current stream of a GPU has launched


class CountingFinder(Protocol):
    """Finds the bags of all parts. For a batch that a graph will look up, which cannot wait for anything, it counts
    before what that requests."""

    def __call__(self, batch: Batch, wait: Wait = lambda: None) -> tuple[Sequence[Bags], list[LargestRequest]]:
        """The bags of each part of a batch, and the most that it requests in each. Raises `InvalidInputError` and
        `IdOutOfRangeError`. Waits for the current stream, by `wait`, before it reads what a GPU has found."""

    def count(self, batch: Batch, wait: Wait = lambda: None) -> list[LargestRequest]:
        """The most ids that a batch requests in each part; rows are not counted. Raises and waits as the call does."""

    def find_unchecked(self, batch: Batch, *, finds_firsts: bool) -> tuple[Sequence[Bags], torch.Tensor]:
        """The bags of a batch, and words, int64 on its device, of which `read_report` makes what it requests.
        `finds_firsts`: whether ids that were requested before are inverted. Does not synchronise."""

    def read_report(self, words: torch.Tensor) -> list[LargestRequest]:
        """The most that a batch requests in each part, by such words on the CPU. Raises as the call does."""

    def report_buffer(self) -> torch.Tensor:
        """Memory on the CPU for such words."""
