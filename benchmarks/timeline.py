"""One steady training step on a GPU, kernel by kernel: `python -m benchmarks.timeline`; with `--plot` its picture.

The step is that of `cuda_dlrm` over the tables and ids of W-1.05: one CUDA graph that plans a batch and brings
its rows while it computes. It is timed first, then some steps are profiled, and the one of median length is kept.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity

import tieredemb
from benchmarks.cuda_command import make_parser, parse
from benchmarks.cuda_dlrm import BOTTOM, TOP, Plan, Trainer, training_batches
from benchmarks.cuda_providers import LR, OURS
from benchmarks.cuda_runs import run_fetched
from benchmarks.cuda_step import say, show
from benchmarks.cuda_tables import set_weights, tiered_tables
from benchmarks.cuda_timing import StepTimes
from benchmarks.cuda_workload import workloads
from benchmarks.machine import ROOT, machine_key
from benchmarks.record import RESULTS, Record, load, measured, save
from benchmarks.timeline_plot import timeline
from benchmarks.timeline_trace import Activity, Step, median_step, steps_of
from benchmarks.timing import Quantiles
from examples.dlrm.config import ModelConfig
from examples.dlrm.profile import prepare_for_graphs
from tieredemb.kernels.tracing import KERNELS
from tieredemb.pipeline import autotuner
from tieredemb.plots import check_picture
from tieredemb.plots import save as save_picture

NAME = "timeline"
PICTURE = ROOT / "docs" / "timeline.png"
WARM_UP, STEPS = 100, 50  # steps until the cache is warm; timed steps
WARMUP, PROFILED, AFTER = 5, 12, 2  # steps under the profiler: that do not count, that do; steps after, as it stops
NEVER = 10**9  # steps before a trial
LEAST_STEPS = (WARMUP + PROFILED + AFTER + 1) // 2  # a plan draws batches for three times as many
STATISTIC = (
    f"The step: mean of wall time, 20–80 % of device events in brackets. All else: medians of {PROFILED - 2} profiled "
    "steps; groups of kernels run beside each other"
)


@contextlib.contextmanager
def without_trials() -> Iterator[None]:
    """Steps that are made inside always go ahead: a trial of the other way amid those that are profiled is none of
    them."""
    first, autotuner.FIRST = autotuner.FIRST, NEVER
    try:
        yield
    finally:
        autotuner.FIRST = first


def measure(plan: Plan, trace_path: Path | None = None) -> tuple[StepTimes, list[Step]]:
    """Times of steps, and others step by step; on the CPU there are none of these. The trace goes to `trace_path`."""
    work = plan.work
    module = tiered_tables(work, work.caches[0].capacity, tieredemb.RowWiseAdagrad(lr=LR), plan.device)
    try:
        set_weights(module, work, plan.device)
        trainer = Trainer(module, plan)
        train, drawn = tieredemb.graph_step(trainer.step), iter(training_batches(plan, plan.batches))
        timed = list(islice(drawn, plan.warm_up + plan.steps + plan.depth))
        with without_trials():
            times, _ = run_fetched(
                train, timed, trainer.model, module.stats, warm_up=plan.warm_up, depth=plan.depth, device=plan.device
            )
            say(f"{times.mean_ms:.3f} ms a step ({times})")
            trace = profile(train, list(islice(drawn, WARMUP + PROFILED + AFTER)), trainer.model, plan, trace_path)
        return times, steps_of(trace) if plan.device.type == "cuda" else []
    finally:
        module.close()


def profile(
    step: Callable[[Any], object], batches: Sequence[Any], model: nn.Module, plan: Plan, path: Path | None
) -> dict[str, Any]:
    """The chrome trace of `PROFILED` steps, also at `path`."""
    prepare_for_graphs()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if plan.device.type == "cuda" else [])]
    with TemporaryDirectory() as directory:
        path = path or Path(directory) / "trace.json"
        with torch.profiler.profile(
            activities=activities,
            schedule=torch.profiler.schedule(wait=0, warmup=WARMUP, active=PROFILED, repeat=1),
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
        ) as profiler:
            for batch in tieredemb.prefetch(batches, model, plan.depth):
                step(batch)
                profiler.step()
        trace: dict[str, Any] = json.loads(path.read_text())
        return trace


# --- results --------------------------------------------------------------------------------------------------------


def records_of(times: StepTimes, steps: Sequence[Step]) -> list[Record]:
    profiled = Quantiles.of([step.us for step in steps])
    records = [
        measured("step", OURS, "", "ms", times.quantiles(), note=str(times)),
        measured("step under the profiler", OURS, "", "ms", profiled, scale=1e-3),
    ]
    for group in median_step(steps).group_us:
        of_group = Quantiles.of([step.group_us.get(group, 0.0) for step in steps])
        records.append(measured(group, OURS if group in KERNELS else "torch", "", "ms", of_group, scale=1e-3))
    return records


def keep(results: Path, workload: str, records: Sequence[Record], step: Step) -> None:
    """Saves the records, and beside them all activities of `step`."""
    save(results, NAME, workload, records, statistic=STATISTIC)
    path = results / f"{NAME}.json"
    document = json.loads(path.read_text())
    document["runs"][machine_key()]["step"] = asdict(step)
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


def plot(results: Path, picture: Path) -> None:
    """Draws the step of the latest run."""
    check_picture(picture)
    if not (results / f"{NAME}.json").exists():
        raise SystemExit(f"no {NAME}.json in {results}: run python -m benchmarks.{NAME} on a machine with a GPU first")
    run = load(results, NAME)
    step = Step(run["step"]["us"], tuple(Activity(**activity) for activity in run["step"]["activities"]))
    unprofiled = next(record.median for record in run["records"] if record.op == "step")
    where = run["machine"].get("gpu", run["machine"]["cpu"])
    picture.parent.mkdir(parents=True, exist_ok=True)
    save_picture(timeline(step, f"{run['workload']}\n{where}; without the profiler {unprofiled:.2f} ms"), picture)
    print(f"picture written to {picture}")


def workload_text(plan: Plan) -> str:
    work = plan.work
    return (
        f"DLRM over {work.tables} × {work.rows:,} × {work.width}, batch {work.batch:,}, Zipf {work.alpha:g}, "
        f"{work.caches[0]}; one CUDA graph a step, which goes two batches ahead"
    )


# --- command line ---------------------------------------------------------------------------------------------------


def make_options() -> argparse.ArgumentParser:
    parser = make_parser(NAME, __doc__, rows=workloads()["W-1.05"].rows)
    parser.add_argument("--warm-up", type=int, default=WARM_UP, help="steps before the first (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=STEPS, help="timed steps (default: %(default)s)")
    parser.add_argument("--trace", type=Path, help="where to keep the whole chrome trace too")
    parser.add_argument(
        "--plot", type=Path, nargs="?", const=PICTURE, metavar="PNG",
        help=f"draw the results that there are, and run nothing (default: {PICTURE.relative_to(ROOT)})",
    )  # fmt: skip
    return parser


def plan_of(chosen: argparse.Namespace) -> Plan:
    work = replace(workloads()["W-1.05"], rows=chosen.rows)
    model = ModelConfig(rows_per_table=work.rows, embedding_dim=work.width, bottom=BOTTOM, top=TOP)
    warm_up, steps = chosen.warm_up, max(chosen.steps, LEAST_STEPS)
    if chosen.quick:
        few = replace(work.caches[0], capacity=600)
        work = replace(work, rows=min(chosen.rows, 2000), batch=16, caches=(few,))
        model = replace(model, rows_per_table=work.rows, bottom=(16,), top=(16,))
        warm_up, steps = min(warm_up, 4), LEAST_STEPS
    return Plan(
        work=work, model=model, variants=(), warm_up=warm_up, steps=steps, depth=1, quick=chosen.quick,
        device=chosen.device,
    )  # fmt: skip


def main(args: Sequence[str] | None = None) -> None:
    parser = make_options()
    chosen = parser.parse_args(args)
    if chosen.plot is not None:
        plot(chosen.results or RESULTS, chosen.plot)
        return
    chosen = parse(parser, args)
    plan = plan_of(chosen)
    times, steps = measure(plan, chosen.trace)
    if not steps:
        say("the steps run; a timeline is of a GPU")
        return
    records = records_of(times, steps)
    for record in records:
        show(record)
    if chosen.results is None:
        say("not the whole benchmark: nothing is kept without --results")
    else:
        keep(chosen.results, workload_text(plan), records, median_step(steps))


if __name__ == "__main__":
    main()
