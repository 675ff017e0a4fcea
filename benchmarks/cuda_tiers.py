"""Steps over a file against unified memory on a GPU: `python -m benchmarks.cuda_tiers [--rows N] [--directory DIR]`.

Workload W-1.2 of `cuda_step`: forward, backward from a fixed random gradient, and the fused update. Rows of a file pass
through the host, which no CUDA graph can hold: both tiers run eagerly, with the next batch fetched ahead and without.
The file is new, and all of it was just written: in the page cache, as far as the kernel lets it stay there. Where the
dirty pages exceed what the kernel allows, writers wait for the disk: choose fewer --rows, or a --directory in memory.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

import tieredemb
from benchmarks.cuda_command import add_steps, barred, keep, make_parser, parse
from benchmarks.cuda_providers import LR, OURS, Upstream
from benchmarks.cuda_runs import a_batch, run_fetched, run_fresh
from benchmarks.cuda_step import STATISTIC, once, release, say, traffic
from benchmarks.cuda_tables import cold_bytes, discard, set_weights, tiered_tables
from benchmarks.cuda_timing import StepTimes
from benchmarks.cuda_workload import CudaWorkload, batches, quick_workloads, workloads
from benchmarks.record import Record, at_most, measured
from tieredemb.cache.stats import CacheStats
from tieredemb.storage.base import Storage

NAME = "W-1.2"
AHEAD, PLAIN = "prefetch", "no prefetch"
MOST = 1.35  # times unified memory
AGAIN = 10  # steps of warm-up of the second way
OPTIMIZER = tieredemb.RowWiseAdagrad(lr=LR)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the command line asked for."""

    work: CudaWorkload
    warm_up: int
    steps: int
    depth: int
    directory: Path
    quick: bool
    device: torch.device

    @property
    def slots(self) -> int:
        return self.work.tables * self.work.rows // 100

    @property
    def batches(self) -> int:
        """That a tier trains on."""
        return self.warm_up + min(AGAIN, self.warm_up) + 2 * self.steps + self.depth


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A tier's steps by the way of running them; what the tables gave for the last batch in the end, (B, T · D)."""

    runs: dict[str, tuple[StepTimes, CacheStats]]
    out: torch.Tensor
    build_seconds: float
    where: str


def measure(plan: Plan, storage: Storage, where: str, ids: Sequence[torch.Tensor], upstream: Upstream) -> Measured:
    """Builds the tables on a tier, sets all weights, and runs steps with prefetch, then without."""
    start = perf_counter()
    module = tiered_tables(plan.work, plan.slots, OPTIMIZER, plan.device, storage=storage)
    try:
        set_weights(module, plan.work, plan.device)
        build_seconds = perf_counter() - start
        say(f"{where}: built and set in {build_seconds:.1f} s; {dirty_pages()}")

        def step(batch: torch.Tensor) -> None:
            module(batch, upstream.offsets).backward(upstream.gradient)

        fetched, plain = ids[: plan.warm_up + plan.steps + plan.depth], ids[plan.warm_up + plan.steps + plan.depth :]
        runs = {
            AHEAD: timed(plan, where, AHEAD, lambda: run_fetched(
                step, fetched, module, module.stats, warm_up=plan.warm_up, depth=plan.depth, device=plan.device
            )),
            PLAIN: timed(plan, where, PLAIN, lambda: run_fresh(
                step, plain, module.stats, warm_up=min(AGAIN, plan.warm_up), device=plan.device
            )),
        }  # fmt: skip
        with torch.no_grad():
            out = module(ids[-1], upstream.offsets).clone()
        return Measured(runs=runs, out=out, build_seconds=build_seconds, where=where)
    finally:
        discard(module) if isinstance(storage, tieredemb.File) else module.close()


def timed(
    plan: Plan, where: str, way: str, run: Callable[[], tuple[StepTimes, CacheStats]]
) -> tuple[StepTimes, CacheStats]:
    start = perf_counter()
    times, done = run()
    say(f"{where}, {way}: {times.mean_ms:.3f} ms a step ({times}); {perf_counter() - start:.1f} s; {dirty_pages()}")
    return times, done


# --- the file -------------------------------------------------------------------------------------------------------


def check_disk(plan: Plan) -> None:
    needed, free = cold_bytes(plan.work, OPTIMIZER), shutil.disk_usage(plan.directory).free
    if needed > 0.98 * free:
        raise SystemExit(
            f"the file needs {needed / 2**30:.1f} GiB, {plan.directory} has {free / 2**30:.1f} GiB free; choose "
            f"another --directory, or fewer --rows"
        )


def filesystem(path: Path) -> str:
    """Kind of the filesystem that holds `path`; "unknown" where /proc does not tell."""
    kinds: dict[Path, str] = {}
    try:
        for line in Path("/proc/self/mounts").read_text().splitlines():
            _, point, kind, *_ = line.split()
            kinds[Path(point.replace("\\040", " "))] = kind  # of mounts at one point the last counts
    except OSError:
        return "unknown"
    return next((kinds[part] for part in (path.resolve(), *path.resolve().parents) if part in kinds), "unknown")


def dirty_pages() -> str:
    """Pages in memory that the disk does not have yet, of those that the kernel allows before writers wait."""
    try:
        counts = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
        dirty, most = (int(counts[name]) * 4096 / 2**30 for name in ("nr_dirty", "nr_dirty_threshold"))
    except (OSError, KeyError, ValueError):
        return "dirty pages unknown"
    return f"dirty pages {dirty:.1f} of {most:.1f} GiB"


# --- records --------------------------------------------------------------------------------------------------------


def records_of(plan: Plan, unified: Measured, file: Measured, dirty: str) -> list[Record]:
    records = []
    same = "" if torch.equal(unified.out, file.out) else "not "
    for tier in (unified, file):
        for way, (times, done) in tier.runs.items():
            more: dict[str, Any] = {}
            note = f"{traffic(plan.work, times, done)}; {times}" if tier is unified else f"{moved(done)}; {times}"
            if tier is file:
                more = {"ratio": times.mean_ms / unified.runs[way][0].mean_ms, "ratio_label": f"× {unified.where}"}
                if way == AHEAD:
                    more |= barred(at_most(more["ratio"], MOST), quick=plan.quick)
                    note += f"; in the end {same}the bits of {unified.where}; {dirty}"
            config = f"{plan.slots:,} slots over {tier.where}, {way}"
            records.append(measured(plan.work.name, OURS, config, "ms", times.quantiles(), note=note, **more))
        op = f"{plan.work.name}, building {cold_bytes(plan.work, OPTIMIZER) / 2**30:.1f} GiB, weights set"
        records.append(measured(op, OURS, tier.where, "s", once(tier.build_seconds)))
    return records


def moved(done: CacheStats) -> str:
    filled, written = (a_batch(count, done) for count in (done.rows_filled, done.rows_written_back))
    return f"{filled:,.0f} missed rows and {written:,.0f} written back a batch"


def title(plan: Plan, kind: str) -> str:
    return (
        f"Forward, backward and update over a file ({kind}, in the page cache) and over unified memory, bags of 1 id, "
        f"fp32, row-wise Adagrad, LFU with half-life 300, all rows written before, eager; {plan.work}. The mean of "
        f"{plan.steps} steps on batches never seen before: with {plan.depth} fetched ahead, after {plan.warm_up} of "
        f"warm-up, then without, after {min(AGAIN, plan.warm_up)} more."
    )


# --- command line ---------------------------------------------------------------------------------------------------


def plan_of(args: Sequence[str] | None = None) -> tuple[Plan, Path | None]:
    """The plan, and where its results go."""
    parser = make_parser("cuda_tiers", __doc__, rows=workloads()[NAME].rows)
    add_steps(parser)
    parser.add_argument(
        "--directory", type=Path, default=Path(tempfile.gettempdir()), help="of the file (default: %(default)s)"
    )
    chosen = parse(parser, args)
    plan = Plan(
        work=quick_workloads()[NAME] if chosen.quick else replace(workloads()[NAME], rows=chosen.rows),
        warm_up=min(chosen.warm_up, 4) if chosen.quick else chosen.warm_up,
        steps=min(chosen.steps, 5) if chosen.quick else chosen.steps,
        depth=chosen.depth,
        directory=chosen.directory,
        quick=chosen.quick,
        device=chosen.device,
    )
    return plan, chosen.results


def main(args: Sequence[str] | None = None) -> None:
    plan, results = plan_of(args)
    check_disk(plan)
    start, kind = perf_counter(), filesystem(plan.directory)
    ids, upstream = list(batches(plan.work, plan.batches, plan.device)), Upstream(plan.work, plan.device)
    release(plan.device)
    say(f"{plan.work}: {len(ids)} batches drawn in {perf_counter() - start:.1f} s; file on {plan.directory}, {kind}")
    in_memory = tieredemb.UnifiedMemory() if plan.device.type == "cuda" else tieredemb.HostMemory()
    unified = measure(plan, in_memory, type(in_memory).__name__, ids, upstream)
    release(plan.device)
    with tempfile.TemporaryDirectory(dir=plan.directory) as directory:
        file = measure(plan, tieredemb.File(Path(directory) / "rows"), "File", ids, upstream)
        dirty = dirty_pages()
    release(plan.device)
    keep(results, "cuda-tiers", title(plan, kind), records_of(plan, unified, file, dirty), statistic=STATISTIC)
    say(f"{perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
