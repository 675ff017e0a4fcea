"""A collection sharded over a group of one rank, beside the same in one process: it is to cost nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import tieredemb
from benchmarks.conftest import Save
from benchmarks.record import at_most, measured
from benchmarks.timing import interleave
from benchmarks.workload import Size, TieredTables, Workload
from tieredemb.sharding.collection import ShardedTieredEmbeddingBagCollection
from tieredemb.sharding.layout import RowWise

LR, CAPACITY = 0.05, 0.1
BAR = 1.03  # times the plain collection's time
PLAIN, SHARDED = "tieredemb, one process", "tieredemb, sharded over one rank"


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def bench_sharding(keep: Save, quick: bool, group: None) -> None:
    size = Size(warmup=8) if not quick else Size(tables=3, rows=1000, batch=256, warmup=2, rounds=5)
    work, optimizer = Workload(size), tieredemb.RowWiseAdagrad(lr=LR)
    plain = TieredTables(work, optimizer, capacity=CAPACITY)
    sharded = TieredTables(
        work, optimizer, capacity=CAPACITY,
        make=lambda tables, **how: ShardedTieredEmbeddingBagCollection(tables, sharding=RowWise(), **how),
    )  # fmt: skip
    steps = {PLAIN: plain.step, SHARDED: sharded.step}
    interleave(steps, work.batches(size.warmup))
    times = interleave(steps, work.batches(size.rounds))
    for name, weight in plain.module.state_dict().items():
        assert torch.equal(sharded.module.state_dict()[name], weight), "another result is another benchmark"
    ratio = times.ratio(SHARDED, PLAIN)
    records = [
        measured("step", PLAIN, "", "ms", times.quantiles(PLAIN), scale=1e3),
        measured(
            "step", SHARDED, "", "ms", times.quantiles(SHARDED), scale=1e3,
            ratio=ratio, ratio_label="× one process", **at_most(ratio, BAR),
        ),
    ]  # fmt: skip
    for tables in (plain, sharded):
        tables.module.close()
    keep(
        "sharding",
        f"Forward, backward and update of {size}, ids Zipf 1.05, fp32, row-wise Adagrad, capacity {CAPACITY:.0%}, "
        f"every batch new, both taking turns. Ratio: median over the rounds.",
        records,
    )
