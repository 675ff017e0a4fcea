"""Warm eager steps of five kinds: tests count their Python calls, `benchmarks.compare_checkouts` times them.

This file uses nothing but torch and the public face of the package, so it runs unchanged on other checkouts. On the CPU
tables are small and each step has the ids of the one before: nearly all of a step is the host's work, and no row
arrives or leaves. On a GPU tables, batches and capacity are those of `benchmarks.cuda_host`, and of two workloads of
`benchmarks.cuda_workload`.
"""

from __future__ import annotations

import contextlib
import gc
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, cycle, groupby
from operator import itemgetter
from time import perf_counter, process_time
from typing import Any

import torch
from torch import nn

import tieredemb

Step = Callable[[], None]
Batch = tuple[torch.Tensor, ...]
Optimizer = Callable[..., torch.optim.Optimizer]
ALPHA = 1.05  # of the Zipf distribution of ids


@dataclass(frozen=True, kw_only=True)
class Size:
    """Tables of `rows` × `width`, batches of `samples` bags of `bag` ids a table. `batches`: how many take turns ·
    `unequal`: the rows of each table, where they differ."""

    rows: int = 1000
    unequal: tuple[int, ...] = ()
    width: int = 8
    samples: int = 20
    bag: int = 2
    capacity: float = 0.1
    batches: int = 1

    def rows_of(self, tables: int) -> tuple[int, ...]:
        """Of each of `tables` tables."""
        return self.unequal or (self.rows,) * tables


SMALL = Size()
GPU = Size(rows=200_000, width=64, samples=2048, bag=1, batches=200)
GPU_TABLES = 26
W_SMALL = Size(rows=1_000_000, width=128, samples=2048, bag=1, capacity=1.0, batches=50)
# rows of the tables of Criteo's Kaggle log, ids that occur once among them
KAGGLE = (
    1460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5683, 8_351_593, 3194, 27, 14_992, 5_461_306, 10,
    5652, 2173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572,
)  # fmt: skip
W_KAGGLE = Size(unequal=KAGGLE, width=32, samples=16_384, bag=1, capacity=0.01, batches=50)


class Model(nn.Module):
    """Tables that are looked up one after the other, and a layer that reads all of their outputs."""

    def __init__(self, tables: int, size: Size, device: str) -> None:
        super().__init__()
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(size.rows, size.width, mode="sum", device=device) for _ in range(tables)
        )
        self.top = nn.Linear(tables * size.width, 1, device=device)

    def forward(self, ids: Batch) -> torch.Tensor:
        outputs = [bag(each) for bag, each in zip(self.bags, ids, strict=True)]
        result: torch.Tensor = self.top(torch.cat(outputs, 1))
        return result


def draw_ids(tables: int, size: Size, device: str, seed: int = 0) -> Iterator[torch.Tensor]:
    """Batches without end, each int64 (T, B, bag): the `size.batches` different ones take turns. No two that follow one
    another are the same tensor."""
    random, of_tables = torch.Generator(device).manual_seed(seed), []
    for rows in size.rows_of(tables):
        mass = torch.arange(1, rows + 1, dtype=torch.float64, device=device) ** -ALPHA
        id_of_rank = torch.randperm(rows, generator=random, device=device)
        drawn = torch.rand(size.batches, size.samples, size.bag, dtype=torch.float64, generator=random, device=device)
        below = mass.cumsum(0)
        of_tables.append(id_of_rank[torch.searchsorted(below, drawn * below[-1]).clamp_(max=rows - 1)])
    ids = list(torch.stack(of_tables, 1))
    return cycle([*ids, *(each.clone() for each in ids)])


def flat(batches: Iterator[torch.Tensor]) -> Iterator[Batch]:
    """ids and offsets of batches, as collections take them."""
    for ids in batches:
        yield ids.view(-1), torch.arange(0, ids.numel() + 1, ids.shape[2], device=ids.device)


def configs(tables: int, size: Size) -> list[tieredemb.TableConfig]:
    return [
        tieredemb.TableConfig(name=f"t{t}", num_embeddings=rows, embedding_dim=size.width)
        for t, rows in enumerate(size.rows_of(tables))
    ]


@contextlib.contextmanager
def collection(
    device: str, *, tables: int, size: Size = SMALL, follow: Optimizer | None = None, prefetch: bool = False
) -> Iterator[Step]:
    """A collection whose updates are fused, Adagrad's, or follow a torch optimizer that `follow` makes."""
    module = tieredemb.TieredEmbeddingBagCollection(
        configs(tables, size),
        capacity=size.capacity,
        optimizer=tieredemb.Adagrad(lr=0.1) if follow is None else torch.optim.Adagrad,
        device=device,
    )
    optimizer = None if follow is None else follow(module.parameters())
    if optimizer is not None:
        module.follow(optimizer)

    def train(batch: Batch) -> None:
        if optimizer is not None:
            optimizer.zero_grad()
        module(*batch).sum().backward()
        if optimizer is not None:
            optimizer.step()

    given = flat(draw_ids(tables, size, device))
    with contextlib.closing(module), in_turn(given, module, prefetch) as batches:
        yield lambda: train(next(batches))


@contextlib.contextmanager
def converted(
    device: str, *, tables: int, follow: Optimizer, size: Size = SMALL, prefetch: bool = False
) -> Iterator[Step]:
    """A model of `nn.EmbeddingBag` that was converted, and follows the torch optimizer that `follow` makes."""
    model = Model(tables, size, device)
    optimizer = follow(model.parameters())
    tieredemb.replace_embedding_bags(model, capacity=size.capacity, optimizer=optimizer)

    def train(ids: Batch) -> None:
        optimizer.zero_grad()
        model(ids).mean().backward()
        optimizer.step()

    apart = (ids.unbind() for ids in draw_ids(tables, size, device))
    try:
        with in_turn(apart, model, prefetch) as batches:
            yield lambda: train(next(batches))
    finally:
        for bag in model.bags:
            bag.close()  # type: ignore[operator]


@contextlib.contextmanager
def sharded(device: str, *, tables: int, size: Size = SMALL) -> Iterator[Step]:
    """A rank's part of a collection over the ranks of `torch.distributed`, which all make their steps together. Every
    other table is row-wise, the others are table-wise, as in models with tables large and small."""
    kinds: list[Any] = [tieredemb.RowWise(), tieredemb.TableWise()]
    module = tieredemb.ShardedTieredEmbeddingBagCollection(
        configs(tables, size),
        sharding={f"t{t}": kinds[t % 2] for t in range(tables)},
        capacity=size.capacity,
        optimizer=tieredemb.Adagrad(lr=0.1),
        device=device,
    )
    batches = flat(draw_ids(tables, size, device, seed=torch.distributed.get_rank()))
    with contextlib.closing(module):
        yield lambda: module(*next(batches)).sum().backward()


@contextlib.contextmanager
def in_turn(batches: Iterator[Batch], model: nn.Module, prefetch: bool) -> Iterator[Iterator[Batch]]:
    """The batches, fetched ahead with `prefetch`."""
    if not prefetch:
        yield batches
        return
    with contextlib.closing(iter(tieredemb.prefetch(batches, model))) as loop:  # type: ignore[type-var]
        yield loop


# --- paths ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Path:
    """A kind of step, which each of `ranks` processes makes."""

    make: Callable[..., contextlib.AbstractContextManager[Step]]
    keywords: dict[str, Any]
    ranks: int = 1

    def entered(self, device: str) -> contextlib.AbstractContextManager[Step]:
        """Yields a function that makes one step; closes its tables in the end."""
        return self.make(device, **self.keywords)


_MADE = count()


def new_rate() -> float:
    """A learning rate that no other optimizer of this process has: the numbers of each step number are kept for the
    process, so they would cost a second optimizer with the same rate nothing."""
    return 0.0123 * (1 + 1e-6 * next(_MADE))


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=new_rate())


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=new_rate())


def adagrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=new_rate())


ON_GPU: dict[str, Any] = {"tables": GPU_TABLES, "size": GPU, "follow": adagrad}
PATHS: dict[str, dict[str, Path]] = {
    "cpu": {
        "collection of 4": Path(collection, {"tables": 4}),
        "4 converted, following Adam": Path(converted, {"tables": 4, "follow": adam}),
        "26 converted, following SGD": Path(converted, {"tables": 26, "follow": sgd}),
        "collection of 4, prefetched": Path(collection, {"tables": 4, "prefetch": True}),
        # the last one, as no path begins on its second rank that would end it there
        "sharded collection of 4, on 2 ranks": Path(sharded, {"tables": 4}, ranks=2),
    },
    "cuda": {
        "collection of 26": Path(collection, ON_GPU),
        "26 converted": Path(converted, ON_GPU),
        "26 converted, following Adam": Path(converted, ON_GPU | {"follow": adam}),
        "collection of 26, prefetched": Path(collection, ON_GPU | {"prefetch": True}),
        "26 converted, prefetched": Path(converted, ON_GPU | {"prefetch": True}),
        "W-small": Path(collection, {"tables": GPU_TABLES, "size": W_SMALL}),
        "W-kaggle": Path(collection, {"tables": GPU_TABLES, "size": W_KAGGLE}),
    },
}


# --- a process that makes the steps of one checkout -------------------------------------------------------------------

WARM_UP = {"cpu": 30, "cuda": 80}  # steps


CLOCKS = {"wall": perf_counter, "processor": process_time}  # the latter: of all threads of the process


def timed(step: Step, steps: int, device: str, clock: str) -> float:
    """Seconds of the host for one step, on a GPU until it is enqueued: the median of `steps`, which leaves out those in
    which another program had the processor."""
    seconds, now = [], CLOCKS[clock]
    for _ in range(steps):
        start = now()
        step()
        seconds.append(now() - start)
    if device == "cuda":
        torch.cuda.synchronize()
    return statistics.median(seconds)


@contextlib.contextmanager
def ranks_joined(count: int, rank: int, meeting: str) -> Iterator[None]:
    """The process group of `count` ranks; none of one, where tables would not train in it."""
    if count == 1:
        yield
        return
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=count)
    yield
    torch.distributed.destroy_process_group()


def serve(device: str, clock: str, rank: int, meeting: str) -> None:
    """Answers lines of JSON. The first one that is printed says where the package is, and what paths there are. For
    each ["path", steps] of the input the seconds of a step follow. A path ends where another one begins."""
    if device == "cpu":
        torch.set_num_threads(1)  # in small work threads wait for one another longer than they work
    ranks = {name: path.ranks for name, path in PATHS[device].items()}
    print(json.dumps({"package": tieredemb.__file__, "paths": ranks}), flush=True)
    for name, requests in groupby(map(json.loads, sys.stdin), itemgetter(0)):
        with ranks_joined(ranks[name], rank, meeting), PATHS[device][name].entered(device) as step:
            timed(step, WARM_UP[device], device, clock)
            gc.collect()
            gc.freeze()  # what is there now is not looked through again amid steps
            for _, steps in requests:
                if ranks[name] > 1:
                    torch.distributed.barrier()
                print(json.dumps(timed(step, steps, device, clock)), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
