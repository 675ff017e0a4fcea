"""Steps of tables whose shapes nobody chose, beside FBGEMM's: `python -m benchmarks.cuda_shapes [--shapes N]`.

A step is forward, backward from a fixed random gradient, and the fused update of one collection. FBGEMM keeps the same
tables in managed memory, with an LFU cache of the same share of the rows, and takes turns on the same batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

import tieredemb
from benchmarks.cuda_command import barred, keep, make_parser, parse
from benchmarks.cuda_modes import FETCHED_GRAPH, modes_of
from benchmarks.cuda_providers import LR, OURS, check_room, fbgemm_bags, fbgemm_installed
from benchmarks.cuda_runs import Way, run_in_turns
from benchmarks.cuda_step import PEER, STATISTIC, cache_bytes, once, release, say
from benchmarks.cuda_tables import cold_bytes, tiered_tables
from benchmarks.cuda_timing import StepTimes, allocated_bytes
from benchmarks.record import Record, at_most, measured
from benchmarks.shapes import ALPHA, Jagged, Limits, Shape, as_one, batches, draw
from tieredemb.cache.stats import CacheStats

LIMITS = Limits(
    tables=(3, 8, 20, 40, 60),
    widths=((8,), (16,), (64,), (128,), (16, 32), (8, 16, 64), (32, 64, 128)),
    largest=6.6,
    bags=(*9 * (1,), 5, 20, 60),
    batches=(512, 2048, 8192),
    shares=(0.01, 0.05, 0.2),
    most_ids=4_000_000,
    most_bytes=12 << 30,
)
QUICK = Limits(
    tables=(2, 3), widths=((8, 16),), largest=2.5, bags=(1, 3), batches=(16,), shares=(0.2,), most_ids=10_000,
    most_bytes=1 << 20,
)  # fmt: skip
SHAPES, STEPS, WARM_UP = 20, 50, 60
MOST_OF_MEDIAN, MOST_OF_WORST = 0.40, 0.8  # time of a captured step with prefetch by FBGEMM's, over all shapes
OPTIMIZER = tieredemb.RowWiseAdagrad(lr=LR)
POOL = 60  # batches of a shape: jagged ones of all steps would take tens of GiB, so they come round again


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the command line asked for."""

    shapes: int
    steps: int
    warm_up: int
    pool: int
    limits: Limits
    device: torch.device


def records(plan: Plan) -> list[Record]:
    found: list[Record] = []
    for seed in range(plan.shapes):
        start, shape = perf_counter(), draw(seed, plan.limits)
        found += measure(plan, shape)
        release(plan.device)
        say(f"shape {seed}: {shape}: {perf_counter() - start:.1f} s")
    return found + records_of_all(found, quick=plan.limits is QUICK)


def measure(plan: Plan, shape: Shape) -> list[Record]:
    """The records of one shape."""
    device = plan.device
    pool = [as_one(batch) for batch in batches(shape, plan.pool, device)]
    random = torch.Generator(device).manual_seed(shape.seed)
    gradient = torch.randn(shape.batch, sum(shape.widths), generator=random, device=device).mul_(1e-2)
    if device.type == "cuda":
        check_room(2 * cold_bytes(shape, OPTIMIZER))  # of FBGEMM's, too
    module = tiered_tables(shape, shape.share, OPTIMIZER, device)

    def step(batch: Jagged) -> None:
        torch.autograd.backward(module(*batch), gradient)

    ways: dict[str, Way] = {}
    theirs_mib = 0.0
    if device.type == "cuda" and fbgemm_installed():
        before = allocated_bytes(device)
        bags = fbgemm_bags(list(zip(shape.sizes, shape.widths, strict=True)), device, share=shape.share)
        theirs_mib = (allocated_bytes(device) - before) / 2**20
        ways[PEER] = Way(step=lambda batch: bags(*batch).backward(gradient), batches=anew(pool), warm_up=plan.warm_up)
    most = max(len(ids) for ids, _ in pool)
    ways |= modes_of(
        step, anew(pool), module, module.stats, warm_up=plan.warm_up, fetched=True, device=device, max_ids=most
    )
    runs = run_in_turns(ways, steps=plan.steps, device=device)
    ours_mib = cache_bytes(module.memory_report()) / 2**20
    module.close()
    return _records(shape, runs, ours_mib, theirs_mib)


def records_of_all(found: Sequence[Record], *, quick: bool) -> list[Record]:
    """The median and the worst ratio of captured steps with prefetch, over all shapes of which records were `found`."""
    of_mode = [record for record in found if record.op == "step" and record.config.endswith(FETCHED_GRAPH)]
    ratios = [record.ratio for record in of_mode if record.ratio is not None]
    if not ratios:
        return []
    each = {"median": (median(ratios), MOST_OF_MEDIAN), "worst": (max(ratios), MOST_OF_WORST)}
    op = f"{FETCHED_GRAPH.removeprefix(', ')} / {PEER}"
    return [
        measured(
            op,
            OURS,
            f"{which} of {len(ratios)} shapes",
            "",
            once(value),
            **barred(at_most(value, most, ""), quick=quick),
        )
        for which, (value, most) in each.items()
    ]


def anew(pool: Sequence[Jagged]) -> Iterator[Jagged]:
    """The pool over and over, each time as tensors of their own: a plan belongs to its ids tensor."""
    return ((ids[:], offsets[:]) for ids, offsets in cycle(pool))


def _records(
    shape: Shape, runs: dict[str, tuple[StepTimes, CacheStats]], ours_mib: float, theirs_mib: float
) -> list[Record]:
    config, found = f"{shape}, {100 * shape.share:g} % cached", []
    theirs = runs.pop(PEER, None)
    if theirs is not None:
        found.append(measured("step", PEER, config, "ms", theirs[0].quantiles(), note=str(theirs[0])))
    for mode, (times, done) in runs.items():
        more: dict[str, Any] = {}
        if theirs is not None:
            more = {"ratio": times.mean_ms / theirs[0].mean_ms, "ratio_label": "× FBGEMM"}
        note = f"hit rate {done.hit_rate:.1%}; {times}"
        found.append(measured("step", OURS, config + mode, "ms", times.quantiles(), note=note, **more))
    found.append(measured("HBM of the cache", OURS, config, "MiB", once(ours_mib)))
    if theirs is not None:
        found.append(measured("HBM of the cache", PEER, config, "MiB", once(theirs_mib)))
    return found


def title(plan: Plan) -> str:
    text = (
        f"{plan.shapes} shapes drawn by the seeds 0 … {plan.shapes - 1} (`benchmarks/shapes.py`): jagged bags of the "
        f"given mean of ids, Zipf {ALPHA:g}, fp32, row-wise Adagrad, unified memory, LFU. Forward, backward and update "
        f"of one collection: the mean of {plan.steps} steps after at least {plan.warm_up} of warm-up, over "
        f"{plan.pool} batches that come round again; FBGEMM, with an LFU cache of the same share of the rows over "
        "managed memory, takes turns on them. HBM: of this library's cache without batch buffers; what torch allocated "
        "while FBGEMM's module was built."
    )
    return text if fbgemm_installed() else f"{text} FBGEMM is not installed here."


# --- command line ---------------------------------------------------------------------------------------------------


def plan_of(args: Sequence[str] | None = None) -> tuple[Plan, Path | None]:
    """The plan, and where its results go."""
    parser = make_parser("cuda_shapes", __doc__)
    parser.add_argument("--shapes", type=int, default=SHAPES, help="seeds 0, 1, … (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=STEPS, help="timed steps of each mode (default: %(default)s)")
    parser.add_argument("--warm-up", type=int, default=WARM_UP, help="steps before the first (default: %(default)s)")
    chosen = parse(parser, args)
    if chosen.quick:
        return Plan(shapes=2, steps=5, warm_up=4, pool=8, limits=QUICK, device=chosen.device), chosen.results
    plan = Plan(
        shapes=chosen.shapes, steps=chosen.steps, warm_up=chosen.warm_up, pool=POOL, limits=LIMITS,
        device=chosen.device,
    )  # fmt: skip
    return plan, chosen.results


def main(args: Sequence[str] | None = None) -> None:
    plan, results = plan_of(args)
    start = perf_counter()
    found = records(plan)
    keep(results, "cuda-shapes", title(plan), found, statistic=STATISTIC)
    say(f"{perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
