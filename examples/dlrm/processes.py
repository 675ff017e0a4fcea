"""The processes of a run: this one alone, or several that torchrun has started, each of which trains its part of every
batch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from examples.dlrm.criteo import Rows
from tieredemb.stats import CacheStats


@dataclass(frozen=True)
class Processes:
    """This process, number `rank` of `size`."""

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether it is the one that talks and writes."""
        return self.rank == 0

    def part(self, rows: Rows) -> Rows:
        """Those of a batch that this process trains on: consecutive ones, which may be none of a small batch."""
        start, stop = (number * len(rows) // self.size for number in (self.rank, self.rank + 1))
        return Rows(rows.labels[start:stop], rows.integers[start:stop], rows.categories[start:stop])

    def train_together(self, model: nn.Module) -> nn.Module:
        """The model, of which every process has the same dense layers after each step."""
        return model if self.size == 1 else nn.parallel.DistributedDataParallel(model)

    def sum(self, values: Tensor) -> Tensor:
        """The sum of `values` over all processes, a new tensor."""
        total = values.clone()
        if self.size > 1:
            dist.all_reduce(total)
        return total

    def total(self, stats: CacheStats) -> CacheStats:
        """The counters of all processes together. Each looks up batches, and all of them the same number."""
        if self.size == 1:
            return stats
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, stats)
        return replace(sum(found, CacheStats()), batches=stats.batches)

    def gather(self, values: Tensor) -> Tensor:
        """The `values` (N, …), of any N, of all processes, rank by rank, on each of them."""
        if self.size == 1:
            return values
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, values)
        return torch.cat(found)


@contextmanager
def started(device: str) -> Iterator[Processes]:
    """The processes that torchrun has started, or this one alone. They meet on gloo, and on a GPU on NCCL beside it."""
    if not dist.is_torchelastic_launched():
        yield Processes()
        return
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl")
    try:
        yield Processes(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()
