"""What a cache smaller than the tables costs: 10 % and 1 % of the rows over host memory, 10 % over a file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch

import tieredemb
from benchmarks.conftest import Save
from benchmarks.record import at_most, measured
from benchmarks.timing import interleave
from benchmarks.workload import Size, TieredTables, Workload
from tieredemb.cache.stats import CacheStats

BAR = 1.5
RESIDENT, HOST, SMALL, FILE = "all resident", "HostMemory, 10 %", "HostMemory, 1 %", "File in page cache, 10 %"


def bench_tiers(keep: Save, quick: bool, tmp_path: Path) -> None:
    size = Size() if not quick else Size(tables=3, rows=1000, batch=256, warmup=3, rounds=5)
    work, sgd = Workload(size), tieredemb.SGD(lr=0.05)
    file = tmp_path / "rows.tiered"
    variants = {
        RESIDENT: TieredTables(work, sgd, capacity=1.0, resident=True),
        HOST: TieredTables(work, sgd, capacity=0.1),
        SMALL: TieredTables(work, sgd, capacity=0.01),
        FILE: TieredTables(work, sgd, capacity=0.1, storage=tieredemb.File(file)),
    }
    steps = {name: variant.step for name, variant in variants.items()}
    interleave(steps, work.batches(size.warmup))
    before = {name: variant.module.stats() for name, variant in variants.items()}
    times = interleave(steps, work.batches(size.rounds))
    done = {name: variant.module.stats() - before[name] for name, variant in variants.items()}
    _check_same(work, variants)
    variants[FILE].module.close()
    os.unlink(file)
    host, small, on_file = (times.ratio(name, RESIDENT) for name in (HOST, SMALL, FILE))
    to_host = times.ratio(FILE, HOST)
    records = [
        measured("SGD", RESIDENT, "", "ms", times.quantiles(RESIDENT), scale=1e3, note=_note(done[RESIDENT])),
        measured(
            "SGD", HOST, "", "ms", times.quantiles(HOST), scale=1e3,
            ratio=host, ratio_label="× all resident", note=_note(done[HOST]), **at_most(host, BAR),
        ),
        measured(
            "SGD", SMALL, "", "ms", times.quantiles(SMALL), scale=1e3,
            ratio=small, ratio_label="× all resident", note=_note(done[SMALL]),
        ),
        measured(
            "SGD", FILE, "", "ms", times.quantiles(FILE), scale=1e3, ratio=to_host, ratio_label="× HostMemory, 10 %",
            note=f"{on_file:.2f}× all resident; {_note(done[FILE])}", **at_most(to_host, BAR),
        ),
    ]  # fmt: skip
    keep(
        "tiers",
        f"Forward, backward and SGD update of {size}, ids Zipf 1.05, fp32, LFU; {size.warmup} steps of warm-up, then "
        f"{size.rounds} on batches never seen before, the variants taking turns. Ratio: median over the rounds. All "
        f"variants end with the same bits.",
        records,
    )


def _note(done: CacheStats) -> str:
    """What the cache did in the timed rounds, a step."""
    filled, overflow = done.rows_filled // done.batches, done.rows_overflow // done.batches
    beyond = f", {overflow:,} of them beyond the cache" if overflow else ""
    return f"hit rate {done.hit_rate:.1%}, {filled:,} rows filled a step{beyond}"


def _check_same(work: Workload, variants: Mapping[str, TieredTables]) -> None:
    """Every variant has trained the same table, bit for bit."""
    [(ids,)] = work.batches(1)
    with torch.no_grad():
        outputs = [variant.forward(ids) for variant in variants.values()]
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], rtol=0, atol=0)
