"""The side of a lookup where the bags are, on either device: which rows they ask whom for, and what becomes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from tieredemb.lookup.bags import KeySpace
from tieredemb.sharding.layout import Layout
from tieredemb.step.batch import Batch
from tieredemb.tables.config import TableSetConfig


class Bags(Protocol):
    """The bags of one width in one batch; tensors lie on the tables' device, but for `counts`.

    `ids`: int64 (K,), of the rows that are asked for, by rank, feature and occurrence: their numbers among those that
    the rank owns of a table · `counts`: int64 (W, F) on the CPU, how many of them.
    """

    ids: torch.Tensor
    counts: torch.Tensor

    def pool(
        self, rows: torch.Tensor, weights: torch.Tensor | None, out: torch.Tensor, *, keep: bool, keep_rows: bool
    ) -> None:
        """Pools the `rows` (K, D) that were asked for into the columns of their features in `out` (B, ΣD). `weights`:
        floats (N,), of the samples · `keep`: whether a backward is to come · `keep_rows`: whether it asks for the
        gradient of the weights. Does not synchronise."""

    def weights_gradient(self, grad: torch.Tensor, out: torch.Tensor) -> None:
        """Adds the gradient of the per-sample weights to their positions in `out`, float32 (N,), given that of the
        outputs, float32 (B, ΣD). Does not synchronise."""

    def gradient(self, grad: torch.Tensor, share: float) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Of each row that was asked for the gradient of its bag, float32 (K, D), divided by `share`, and what it is to
        be multiplied by, float32 (K,), where that is not one. Does not synchronise."""

    def tensors(self) -> list[torch.Tensor]:
        """All that it holds on a GPU."""


Finder = Callable[[Batch], Sequence[Bags]]  # of all widths; raises `InvalidInputError` and `IdOutOfRangeError`


def bag_finder(layout: Layout, spaces: Sequence[KeySpace], config: TableSetConfig) -> Finder:
    """What finds the bags of key `spaces`, one a width, on the device of `config`, that of the whole tables."""
    if config.device.type == "cuda":
        from tieredemb.sharding.gpu_bags import GpuFinder

        return GpuFinder(layout, spaces, config)
    from tieredemb.sharding.host_bags import HostFinder

    return HostFinder(layout, spaces)
