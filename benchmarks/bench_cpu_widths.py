"""How one capacity is divided among tables of several widths: hit rates of shapes that nobody chose.

Beside what the library reaches stand three simulations (`tieredemb.cache_hit`): caches that keep the same share of the
rows of each width, the best division of the same bytes, which knows all batches, and one cache for all rows whose slots
are as wide as the widest, as other libraries have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

import tieredemb
from benchmarks.conftest import Save
from benchmarks.cuda_workload import cumulative
from benchmarks.record import Record, at_least, measured
from benchmarks.shapes import ALPHA, Limits, Shape, draw
from benchmarks.timing import Quantiles
from tieredemb.cache_hit.division import DividedWorkload, best_division, hit_rate
from tieredemb.cache_hit.options import parse_policy
from tieredemb.cache_hit.run import Contender
from tieredemb.cache_hit.traces import Trace
from tieredemb.cache_hit.workload import Workload

LIMITS = Limits(
    tables=(3, 8, 20, 40, 60),
    widths=((16, 32), (8, 16, 64), (32, 64, 128), (8, 16, 32, 64, 96, 128)),
    largest=5.8,
    bags=(1, 1, 1, 5, 20, 60),
    batches=(64, 512, 2048, 8192),
    shares=(0.01, 0.05, 0.2),
    most_ids=60_000,
    most_bytes=1 << 30,
)
SHAPES, STEPS, WARM_UP = 20, 400, 200
SHORT = 0.005  # of the best division's hit rate, at most
LFU, COUNTS = (Contender(name=word, policy=parse_policy(word)) for word in ("lrfu:300", "lfu"))
OURS, SAME, BEST, WIDEST = "tieredemb", "same share of each width", "best division", "slots as wide as the widest"
CPU = torch.device("cpu")
Ids = list[torch.Tensor]  # of each table, int64 (steps, ids a batch)


def bench_cpu_widths(keep: Save, quick: bool) -> None:
    shapes, steps, warm_up = (2, 60, 30) if quick else (SHAPES, STEPS, WARM_UP)
    records: list[Record] = []
    for shape in _drawn(shapes):
        records += _compare(shape, steps, warm_up)
    keep(
        "cpu-widths",
        f"{shapes} shapes of several widths, drawn by seeds (`benchmarks/shapes.py`): bags of equal lengths, Zipf "
        f"{ALPHA:g}, fp32, RowWiseAdagrad, LFU with a half-life of 300 batches. Hit rate over the batches {warm_up} … "
        f"{steps - 1}, of caches that were empty at the first. The best division knows all batches. Slots as wide as "
        f"the widest: one cache for all rows with exact counts, which stay with rows that leave; the library has as "
        f"many bytes there.",
        records,
    )


def _drawn(count: int) -> list[Shape]:
    """Those of the shapes that have several widths, the first `count`."""
    found: list[Shape] = []
    seed = 0
    while len(found) < count:
        shape = draw(seed, LIMITS)
        if len(set(shape.widths)) > 1:
            found.append(shape)
        seed += 1
    return found


def _compare(shape: Shape, steps: int, warm_up: int) -> list[Record]:
    ids = _ids(shape, steps)
    tables = _tables(shape, shape.share)
    groups = tables.tables.groups
    divided = DividedWorkload(
        workloads=[
            _workload([i for i, width in enumerate(shape.widths) if width == group.space.width], shape, ids, warm_up)
            for group in groups
        ],
        row_bytes=[group.slot_bytes for group in groups],
    )
    slots = [group.slots for group in groups]
    budget = sum(each * size for each, size in zip(slots, divided.row_bytes, strict=True))
    same = hit_rate(divided.measure(LFU, slots, _unheard))
    best = hit_rate(best_division(divided, budget, LFU))
    ours = _hit_rate(tables, shape, ids, warm_up)
    config = f"seed {shape.seed}: {shape}, {shape.share:.0%} cached"
    found = [_record("hit rate", SAME, config, same), _record("hit rate", BEST, config, best)]
    bar = replace(_record("hit rate", OURS, config, ours), **at_least(ours, best - SHORT, ""))
    rows = sum(shape.sizes)
    together = max(1, int(shape.share * rows))
    widest = COUNTS.measure(_workload(range(len(ids)), shape, ids, warm_up), together).hit_rate
    as_many = _hit_rate(_tables(shape, f"{together * max(divided.row_bytes)}B"), shape, ids, warm_up)
    op = "hit rate, same bytes"
    found += [bar, _record(op, WIDEST, config, widest)]
    return [*found, replace(_record(op, OURS, config, as_many), **at_least(as_many, widest, ""))]


def _record(op: str, provider: str, config: str, value: float) -> Record:
    return measured(op, provider, config, "", Quantiles.of([value]))


def _unheard(_: int) -> None:
    """Of the progress of a simulation."""


def _ids(shape: Shape, steps: int) -> Ids:
    random = torch.Generator(CPU).manual_seed(shape.seed)
    found = []
    for rows, bag in zip(shape.sizes, shape.bags, strict=True):
        of_rank, id_of_rank = cumulative(rows, ALPHA, CPU), torch.randperm(rows, generator=random)
        uniform = torch.rand(steps, shape.batch * bag, dtype=torch.double, generator=random)
        found.append(id_of_rank[torch.searchsorted(of_rank, uniform, right=True)])
    return found


def _workload(numbers: Sequence[int], shape: Shape, ids: Ids, warm_up: int) -> Workload:
    """Of some tables, whose rows are numbered on."""
    starts = torch.tensor([0, *(shape.sizes[number] for number in numbers)]).cumsum(0).tolist()
    keys = torch.cat([ids[number] + start for number, start in zip(numbers, starts, strict=False)], 1)
    trace = Trace(name="", ids=keys.reshape(-1).numpy(), rows=starts[-1])
    return Workload(trace=trace, batch_size=keys.shape[1], warm_up=warm_up / len(keys))


def _tables(shape: Shape, capacity: float | str) -> tieredemb.TieredEmbeddingBagCollection:
    return tieredemb.TieredEmbeddingBagCollection(
        [
            tieredemb.TableConfig(name=f"t{number}", num_embeddings=rows, embedding_dim=width)
            for number, (rows, width) in enumerate(zip(shape.sizes, shape.widths, strict=True))
        ],
        capacity=capacity,
        optimizer=tieredemb.RowWiseAdagrad(lr=0.05),
        device="cpu",
    )


def _hit_rate(tables: tieredemb.TieredEmbeddingBagCollection, shape: Shape, ids: Ids, warm_up: int) -> float:
    lengths = torch.tensor(shape.bags).repeat_interleave(shape.batch)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    before = tables.stats()
    for step in range(len(ids[0])):
        if step == warm_up:
            before = tables.stats()
        torch.autograd.backward(tables(torch.cat([each[step] for each in ids]), offsets).sum())
    found = (tables.stats() - before).hit_rate
    tables.close()
    return found
