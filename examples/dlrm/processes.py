"""The processes of a run: this one alone, or several that torchrun has started, each of which trains its part of every
batch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from examples.dlrm.criteo import Rows
from tieredemb.cache.stats import CacheStats

COUNTERS = [each.name for each in fields(CacheStats)]


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

    def train_together(self, model: nn.Module, *, captured: bool) -> nn.Module:
        """The model, of which every process has the same dense layers after each step. `captured`: in a CUDA graph."""
        if self.size == 1:
            return model
        with _another_stream() if captured else nullcontext():
            together = nn.parallel.DistributedDataParallel(model)
        together.register_comm_hook(None, _in_order)  # type: ignore[no-untyped-call]
        return together

    def sum(self, values: Tensor) -> Tensor:
        """The sum of `values` over all processes, a new tensor."""
        total = values.clone()
        if self.size > 1:
            dist.all_reduce(total)
        return total

    def total(self, stats: CacheStats) -> CacheStats:
        """The counters of the caches of all processes together. Each looks up batches, and all of them the same number.
        What processes send each other is none of them: one that goes on alone has nothing of the kind."""
        if self.size == 1:
            return stats
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, stats)
        counted = {name: sum(getattr(each, name) for each in found) for name in COUNTERS}
        return CacheStats(**counted | {"batches": stats.batches})

    def gather(self, values: Tensor) -> Tensor:
        """The `values` (N, …), of any N, of all processes, rank by rank, on each of them."""
        if self.size == 1:
            return values
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, values)
        return torch.cat(found)


def _in_order(_, bucket):  # type: ignore[no-untyped-def] # torch takes annotations that are no strings, or none
    """The mean of a gradient over the processes, summed rank by rank. Gloo's own sum goes by where a number lies in a
    buffer, which `DistributedDataParallel` lays out anew after its first step: a resumed run would have other bits."""
    mine = bucket.buffer()
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]

    def mean(_: object) -> Tensor:
        total = found[0]
        for each in found[1:]:
            total += each
        return total / len(found)

    return dist.all_gather(found, mine, async_op=True).get_future().then(mean)


@contextmanager
def _another_stream() -> Iterator[None]:
    """Than the default one, which is in no graph: torch ties what `DistributedDataParallel` makes to the stream that is
    current then."""
    stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)


def on_this_host() -> tuple[int, int]:
    """The number of this process here, and how many there are: those that torchrun has started, or this one alone."""
    if not dist.is_torchelastic_launched():
        return 0, 1
    return int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])


@contextmanager
def started(device: str) -> Iterator[Processes]:
    """The processes that torchrun has started, or this one alone. They meet on gloo, and on a GPU on NCCL beside it."""
    if not dist.is_torchelastic_launched():
        yield Processes()
        return
    if device == "cuda":
        torch.cuda.set_device(on_this_host()[0])
    dist.init_process_group("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl")
    try:
        yield Processes(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()
