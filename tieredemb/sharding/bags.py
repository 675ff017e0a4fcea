"""The side of a lookup where the bags are, on either device: what they ask whom for, and what becomes of it.

Of a table that is dealt out rows come back, of an id that occurs several times once, and each occurrence is pooled from
there; of one that a rank holds whole, pooled bags. One that all ranks hold is asked for as if there were one rank, and
what that is sent goes to all of them, so that each can update its rows; each pools its own bags itself.

An id goes for every occurrence, as the owner trains and scores each. That of an occurrence which is not the first of
its row is inverted, so that the message says by itself which rows are asked for.
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


NO_KEY = -2  # −1 is that of what is not looked up


@dataclass(frozen=True, eq=False)
class Part:
    """The tables of one width of one kind. `space`: their key space, as batches name rows · `owner`: int64 (F,), of
    each feature the rank that holds its table whole; −1 where all are dealt out · `ranks`: how many ranks are sent
    something else each, and as many times the same, `copies`: one rank, the owner of all, stands for all of them where
    each holds the tables · `sends_padding`: whether owners are sent the ids of padding, too, whose rows they scale, and
    which add nothing to bags."""

    space: KeySpace
    owner: Array
    ranks: int
    copies: int
    sends_padding: bool

    @functools.cached_property
    def is_table_wise(self) -> bool:
        """Whether each of the tables is held whole, by one rank or by all."""
        return bool((self.owner >= 0).all())

    @functools.cached_property
    def by_rank(self) -> Array:
        """Of whole tables the features by the ranks that hold them, int64 (F,)."""
        return np.argsort(self.owner, kind="stable")

    @functools.cached_property
    def held(self) -> list[int]:
        """And how many each of the `ranks` has."""
        its: list[int] = np.bincount(self.owner, minlength=self.ranks).tolist()
        return its

    def held_by(self, rank: int) -> Array:
        """Which features' bags a rank pools, bool (F,)."""
        its: Array = (self.owner == rank) | (self.copies > 1)
        return its

    @functools.cached_property
    def padding_keys(self) -> Array:
        """Of each feature the key of the padding whose id is sent, int64 (F,), or one that no occurrence has."""
        padding: Array = np.where(self.space.padding < 0, NO_KEY, self.space.first + self.space.padding)
        return padding if self.sends_padding else np.full_like(padding, NO_KEY)


def parts_of(
    layout: Layout, tables: Sequence[int], columns: Sequence[int], *, sends_padding: bool = False
) -> list[Part]:
    """Those of the `tables` of one width: those that are dealt out, those that one rank holds, and those that all hold,
    as far as there are any. `columns`: see `KeySpace`."""
    parts = []
    for kind in (ROW_WISE, 0, REPLICATED):
        its = [t for t in tables if min(layout.owner[t], 0) == kind]
        if its:
            space = KeySpace(layout.tables, its, columns)
            owner, copies = layout.owner[space.tables[space.table]], 1
            if kind == REPLICATED:
                owner, copies = np.zeros_like(owner), layout.size
            parts.append(Part(space, owner, layout.size // copies, copies, sends_padding))
    return parts


class Bags(Protocol):
    """The bags of one part in one batch; tensors lie on the tables' device. Once they are padded (`pad`):

    `requested`: int64 (M,), the values of a `Message` · `sent`: how many of these each rank is sent, `ids`: how many
    ids among these · `back`: how many rows come back from each, (·, D), or of whole tables one of each bag, by feature
    and sample; empty where nothing travels back · `grads`: how many gradients each is sent: one of each id, or of each
    bag."""

    requested: torch.Tensor
    sent: list[int]
    ids: list[int]
    back: list[int]
    grads: list[int]

    def pad(self, bound: Bound) -> None:
        """Makes a `Message` of one size of what is requested, which the `bound` takes: each rank is sent as many ids,
        and as many weights, and gradients of tables that are dealt out. Of these as many rows come back, and no id is
        inverted; or `bound.rows`. Does not synchronise."""

    def sent_weights(self, weights: torch.Tensor) -> torch.Tensor | None:
        """Those of the ids that are asked for, float32 (K,), where their owner pools, of `weights`: floats (N,), of the
        samples. Does not synchronise."""

    def keep(self, every: torch.Tensor) -> None:
        """Keeps the rows of the ids, (K, D), for the gradient of their weights, where their owner pools."""

    def pool(
        self, rows: torch.Tensor, weights: torch.Tensor | None, out: torch.Tensor, *, keep: bool, keep_rows: bool
    ) -> None:
        """Makes of what has come back, `rows`, the columns of their features in `out` (B, ΣD). `weights`: as of
        `sent_weights` · `keep`: whether a backward is to come · `keep_rows`: whether it asks for the gradient of the
        weights. Does not synchronise."""

    def weights_gradient(self, grad: torch.Tensor, out: torch.Tensor) -> None:
        """Adds the gradient of the per-sample weights to their positions in `out`, float32 (N,), given that of the
        outputs, float32 (B, ΣD). Does not synchronise."""

    def gradient(self, grad: torch.Tensor, divisor: float) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The gradients: of each id that of its bag, or of whole tables those of the bags, float32 (·, D), divided by
        `divisor`; and what it is to be multiplied by, float32 (K,), where that is not one, and its owner does not know.
        Does not synchronise."""

    def tensors(self) -> list[torch.Tensor]:
        """All that it holds on a GPU."""


Wait = Callable[[], object]  # for what the current stream of a GPU has launched


class CountingFinder(Protocol):
    """Finds the bags of all parts; and looks at a batch before it is looked up in a graph, which can wait for
    nothing."""

    def __call__(self, batch: Batch, wait: Wait = lambda: None) -> tuple[Sequence[Bags], list[LargestRequest]]:
        """The bags of each part of a batch, and what it requests. Raises `InvalidInputError` and `IdOutOfRangeError`.
        Waits for the current stream, by `wait` before it reads what a GPU has found."""

    def count(self, batch: Batch, wait: Wait = lambda: None) -> list[LargestRequest]:
        """How many ids a batch requests in each part; no rows are counted. Raises and waits as the call."""

    def unchecked(self, batch: Batch, *, finds_firsts: bool) -> tuple[Sequence[Bags], torch.Tensor]:
        """The bags of a batch, and words, int64 on its device, that tell `most` of it. `finds_firsts`: whether ids that
        were asked for before are inverted. Does not synchronise."""

    def most(self, words: torch.Tensor) -> list[LargestRequest]:
        """What a batch requests in each part, by such words that have come to the CPU. Raises as the call."""

    def report_buffer(self) -> torch.Tensor:
        """On the CPU, for such words."""
