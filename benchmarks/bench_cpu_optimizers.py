"""Steps of optimizers that move every row against `SparseAdam`, and what rows cost that have missed steps."""

from __future__ import annotations

import torch

from benchmarks.conftest import Save
from benchmarks.cuda_tables import discard, tiered_tables
from benchmarks.dense_optimizers import (
    BASELINE,
    OPTIMIZERS,
    LateRows,
    Trained,
    late_records,
    of_mean_loss,
    replayed,
)
from benchmarks.record import Record, measured
from benchmarks.timing import interleave
from benchmarks.workload import Size, Workload

OURS, CPU = "tieredemb, all resident", torch.device("cpu")


def bench_cpu_optimizers(keep: Save, quick: bool) -> None:
    size = Size(warmup=300) if not quick else Size(tables=3, rows=1000, batch=256, warmup=3, rounds=5)
    late = LateRows(rows=100_000, width=64)
    if quick:
        late = LateRows(rows=100, width=8, gaps=(1, 5), rounds=2, before=5)
    records: list[Record] = []
    for name in OPTIMIZERS:
        if name != BASELINE:
            baseline, other = _steps(size, name)
            records += [other] if records else [baseline, other]
    records += late_records(late, CPU)
    keep(
        "cpu-optimizers",
        f"Step: forward, backward from the gradient of a mean loss, and update of {size}, ids Zipf 1.05, fp32, after "
        f"{size.warmup} steps of warm-up, on batches never seen before, each optimizer taking turns with {BASELINE}; "
        f"ratio: median over the rounds. Catch up: {late}.",
        records,
    )


def _steps(size: Size, other: str) -> list[Record]:
    """The baseline and the `other` optimizer, whose tables take 2 GB each."""
    work = Workload(size)
    of_mean_loss(work.gradient)
    tables = {name: _tables(work, name) for name in (BASELINE, other)}
    steps = {name: each.step for name, each in tables.items()}
    interleave(steps, work.batches(size.warmup))
    before = {name: each.module.stats() for name, each in tables.items()}
    times = interleave(steps, work.batches(size.rounds))
    records = []
    for name, each in tables.items():
        ratio = {} if name == BASELINE else {"ratio": times.ratio(name, BASELINE), "ratio_label": f"× {BASELINE}"}
        note = replayed(each.module.stats() - before[name])
        records.append(measured("step", OURS, name, "ms", times.quantiles(name), scale=1e3, note=note, **ratio))
        discard(each.module)
    return records


def _tables(work: Workload, name: str) -> Trained:
    """Tables with every row in the cache."""
    module = tiered_tables(work.size, 1.0, OPTIMIZERS[name], CPU)
    with torch.no_grad():
        for ids, offsets in work.every_row():
            module(ids, offsets)
    return Trained(module, work.offsets, work.gradient)
