"""Optimizers that move every row on a GPU: `python -m benchmarks.cuda_optimizers [--rows N] [--slots N]`.

Steps of workload W-1.2 of `cuda_step` by each of them against `SparseAdam`, which moves the rows of the batch, in all
modes; and what rows cost that have missed steps. Gradients are those of a mean loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks.cuda_command import keep, make_parser, parse
from benchmarks.cuda_modes import batches_of_modes, measure_modes
from benchmarks.cuda_providers import OURS, Upstream
from benchmarks.cuda_step import STATISTIC, STEPS, release, say
from benchmarks.cuda_tables import set_weights, tiered_tables
from benchmarks.cuda_tiers import moved
from benchmarks.cuda_timing import StepTimes
from benchmarks.cuda_workload import CudaWorkload, batches, quick_workloads, workloads
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
from tieredemb.cache.stats import CacheStats
from tieredemb.config import OptimizerConfig

NAME = "W-1.2"
ROWS, SLOTS = 500_000, 260_000
WARM_UP = 600  # of Adam's first steps those that have no closed form are past


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the command line asked for."""

    work: CudaWorkload
    slots: int
    warm_up: int
    steps: int
    late: LateRows
    device: torch.device


def measure(
    plan: Plan, optimizer: OptimizerConfig, ids: torch.Tensor, upstream: Upstream
) -> dict[str, tuple[StepTimes, CacheStats]]:
    """Builds the tables, sets all weights, and times steps in each mode, by its name."""
    module = tiered_tables(plan.work, plan.slots, optimizer, plan.device)
    try:
        set_weights(module, plan.work, plan.device)
        trained = Trained(module, upstream.offsets, upstream.gradient)
        return measure_modes(trained, iter(ids), warm_up=plan.warm_up, steps=plan.steps, fetched=True)
    finally:
        module.close()


def step_records(plan: Plan) -> list[Record]:
    """Steps of all optimizers on the same batches."""
    upstream = Upstream(plan.work, plan.device)
    of_mean_loss(upstream.gradient)
    ids = batches(plan.work, batches_of_modes(plan.warm_up, plan.steps), plan.device)
    release(plan.device)
    records, baseline = [], {}
    for name, optimizer in OPTIMIZERS.items():
        start = perf_counter()
        for mode, (times, done) in measure(plan, optimizer, ids, upstream).items():
            more: dict[str, Any] = {}
            if name == BASELINE:
                baseline[mode] = times.mean_ms
            else:
                more = {"ratio": times.mean_ms / baseline[mode], "ratio_label": f"× {BASELINE}"}
            config = f"{plan.slots:,} slots, {name}{mode}"
            note = "; ".join(filter(None, (moved(done), replayed(done), str(times))))
            records.append(measured(plan.work.name, OURS, config, "ms", times.quantiles(), note=note, **more))
        release(plan.device)
        say(f"{name}: {perf_counter() - start:.1f} s")
    return records


def title(plan: Plan) -> str:
    return (
        f"Forward, backward from the gradient of a mean loss, and update over unified memory, bags of 1 id, fp32, LFU "
        f"with half-life 300, all rows written before; {plan.work}. The mean of {plan.steps} steps on batches never "
        f"seen before, after {plan.warm_up} of warm-up; the modes take turns. Catch up: {plan.late}."
    )


# --- command line ---------------------------------------------------------------------------------------------------


def plan_of(args: Sequence[str] | None = None) -> tuple[Plan, Path | None]:
    """The plan, and where its results go."""
    parser = make_parser("cuda_optimizers", __doc__, rows=ROWS)
    parser.add_argument("--slots", type=int, default=SLOTS, help="of the cache (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=STEPS, help="timed steps of each mode (default: %(default)s)")
    parser.add_argument("--warm-up", type=int, default=WARM_UP, help="steps before the first (default: %(default)s)")
    parser.add_argument("--late-rows", type=int, default=1_000_000, help="that miss steps (default: %(default)s)")
    chosen = parse(parser, args)
    late = LateRows(rows=chosen.late_rows, width=128)
    plan = Plan(
        work=replace(workloads()[NAME], rows=chosen.rows),
        slots=chosen.slots,
        warm_up=chosen.warm_up,
        steps=chosen.steps,
        late=late,
        device=chosen.device,
    )
    if chosen.quick:
        late = LateRows(rows=min(chosen.late_rows, 100), width=8, gaps=(1, 5), rounds=2, before=5)
        work = quick_workloads()[NAME]
        plan = replace(plan, work=work, slots=min(chosen.slots, 600), late=late)
        plan = replace(plan, warm_up=min(chosen.warm_up, 4), steps=min(chosen.steps, 5))
    return plan, chosen.results


def main(args: Sequence[str] | None = None) -> None:
    plan, results = plan_of(args)
    start = perf_counter()
    records = step_records(plan) + late_records(plan.late, plan.device)
    keep(results, "cuda-optimizers", title(plan), records, statistic=STATISTIC)
    say(f"{perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
