"""Whole loops, with prefetch and without: `python -m benchmarks.cuda_loops [--workloads W-1.2 …] [--shapes N]`.

The other benchmarks time steps that are in full swing. Here is what a loop takes that a user writes, but for its first
steps: with prefetch it finds out meanwhile whether planning ahead pays. Eager loops over the same tables, without
prefetch and with it, take turns, in random order in each pair. In the first pairs a loop of captured steps with
prefetch joins them, which says how many of its steps were replays. One eager loop comes before all others, and tells
whether these leave something behind that makes later steps slower.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any

import torch

import tieredemb
from benchmarks import cuda_shapes
from benchmarks.compare_checkouts import ratio_of
from benchmarks.cuda_command import barred, keep, make_parser, parse
from benchmarks.cuda_modes import FETCHED, FETCHED_GRAPH
from benchmarks.cuda_providers import OURS, Tiered, Upstream
from benchmarks.cuda_step import as_policy, release, say
from benchmarks.cuda_tables import tiered_tables
from benchmarks.cuda_timing import synchronize
from benchmarks.cuda_workload import Cache, CudaWorkload, batches, quick_workloads, workloads
from benchmarks.record import Record, at_least, at_most, measured
from benchmarks.shapes import ALPHA, Limits, as_one, draw
from benchmarks.shapes import batches as batches_of_shape
from benchmarks.timing import Quantiles

EAGER, BEFORE = "", ", before all loops with prefetch"
PAIRS, STEPS, FIRST, GRAPHS, WARM_UP = 6, 500, 50, 2, 100
PAIRED = 10  # shapes whose eager loops are timed; of the others captured steps alone
POOL = 1000  # batches of a workload, two loops: those of all loops would take tens of GiB, so they come round again
SLOTS = 520_000  # 1 % of the rows of W-1.05 and W-1.2
CONFIDENCE = 0.95  # that an interval holds the true ratio
MOST = 1.03  # time with prefetch by that without
MOST_OF_WORKLOAD = {"W-1.05": 0.97, "W-1.2": 0.90, "W-1.05-bf16": 0.88}  # the same, where steps wait for rows
LEAST_REPLAYED = 0.95  # of the timed steps of a loop over a shape
STATISTIC = "Medians of loops, 20–80 % of them in brackets"

Step = Callable[[Any], object]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the command line asked for. `steps`: of a loop · `first`: of these, those before the timed ones · `pairs`:
    of eager loops without and with prefetch · `graphs`: loops of captured steps · `warm_up`: steps of each way before
    all loops · `pool`, `shape_pool`: different batches of a workload, of a shape."""

    works: tuple[CudaWorkload, ...]
    shapes: int
    pairs: int
    graphs: int
    steps: int
    first: int
    warm_up: int
    pool: int
    shape_pool: int
    limits: Limits
    quick: bool
    device: torch.device

    @property
    def timed(self) -> int:
        """Steps of a loop that are timed."""
        return self.steps - self.first


@dataclass(frozen=True, kw_only=True)
class Loop:
    """What a loop was measured to do. `ms`: a timed step · `replayed`: share of the timed steps that were replays ·
    `ahead`: whether it planned ahead in the end, where prefetch has a choice."""

    ms: float
    replayed: float
    ahead: bool | None


class Loops:
    """Loops of `step` on the next `given` batches, over the tables of one module."""

    def __init__(
        self, step: Step, given: Iterator[Any], module: tieredemb.TieredEmbeddingBagCollection, device: torch.device
    ) -> None:
        self._given, self._module, self._device = given, module, device
        self._captured = tieredemb.graph_step(step)
        self._steps: dict[str, Step] = {EAGER: step, FETCHED: step, FETCHED_GRAPH: self._captured}

    def run(self, way: str, steps: int, first: int = 0) -> Loop:
        """One loop of as many steps, which is timed behind the `first` ones."""
        step, batches = self._steps[way], list(islice(self._given, steps))
        fetched = None if way == EAGER else tieredemb.prefetch(batches, self._module)
        loop = iter(batches if fetched is None else fetched)
        for batch in islice(loop, first):
            step(batch)
        before = self._captured.summary().replayed
        gc.collect()
        synchronize(self._device)
        start = perf_counter()
        for batch in loop:
            step(batch)
        synchronize(self._device)
        seconds, timed = perf_counter() - start, steps - first
        autotuner = None if fetched is None or way == FETCHED_GRAPH else fetched.autotuner
        return Loop(
            ms=1e3 * seconds / timed,
            replayed=(self._captured.summary().replayed - before) / timed,
            ahead=None if autotuner is None else autotuner.ahead,
        )

    def run_in_turns(self, plan: Plan, pairs: int) -> dict[str, list[Loop]]:
        """The loops of each way: `pairs` of the eager ones, and an eager one before."""
        found: dict[str, list[Loop]] = {way: [] for way in (EAGER, FETCHED) if pairs} | {FETCHED_GRAPH: []}
        before = []
        for way in found:
            self.run(way, plan.warm_up)
            if way == EAGER:
                before.append(self.run(EAGER, plan.steps, plan.first))
        order = Random(0)
        for turn in range(max(pairs, plan.graphs)):
            ways = [way for way in found if turn < (plan.graphs if way == FETCHED_GRAPH else pairs)]
            for way in order.sample(ways, len(ways)):
                found[way].append(self.run(way, plan.steps, plan.first))
        return found | {BEFORE: before} if pairs else found


def measure_workload(plan: Plan, work: CudaWorkload) -> list[Record]:
    start = perf_counter()
    pool, upstream = batches(work, plan.pool, plan.device), Upstream(work, plan.device)
    release(plan.device)
    is_given = plan.quick or work.resident or work.unequal
    cache = work.caches[0] if is_given else Cache(capacity=SLOTS)
    tiered = Tiered(work, cache, as_policy("300"), upstream)
    try:
        if work.resident:
            tiered.fill()
        else:
            tiered.load()
        given = (pool[number % len(pool)] for number in count())
        ready = perf_counter()
        loops = Loops(tiered.step, given, tiered.module, plan.device).run_in_turns(plan, plan.pairs)
    finally:
        tiered.close()
    end = perf_counter()
    say(f"{work.name}: {ready - start:.1f} s to draw batches and set weights, {end - ready:.1f} s of loops")
    return records_of(plan, f"{work.name}, ", str(cache), loops, MOST_OF_WORKLOAD.get(work.name, MOST))


def measure_shape(plan: Plan, seed: int) -> list[Record]:
    start, device = perf_counter(), plan.device
    shape = draw(seed, plan.limits)
    pool = [as_one(batch) for batch in batches_of_shape(shape, plan.shape_pool, device)]
    random = torch.Generator(device).manual_seed(seed)
    gradient = torch.randn(shape.batch, sum(shape.widths), generator=random, device=device).mul_(1e-2)
    module = tiered_tables(shape, shape.share, cuda_shapes.OPTIMIZER, device)

    def step(batch: Any) -> None:
        torch.autograd.backward(module(*batch), gradient)

    try:
        loops = Loops(step, cuda_shapes.anew(pool), module, device)
        found = loops.run_in_turns(plan, plan.pairs if seed < PAIRED else 0)
    finally:
        module.close()
    say(f"shape {seed}: {shape}: {perf_counter() - start:.1f} s")
    config = f"shape {seed}: {shape}, {100 * shape.share:g} % cached"
    return records_of(plan, "", config, found, MOST, LEAST_REPLAYED)


def records_of(
    plan: Plan, prefix: str, config: str, loops: dict[str, list[Loop]], most: float, least: float | None = None
) -> list[Record]:
    """The records of the loops over one set of tables. `most`: time with prefetch by that without · `least`: share of
    replays."""
    found, ms = [], {way: [loop.ms for loop in of_way] for way, of_way in loops.items()}
    for way, times in ms.items():
        found.append(measured(f"{prefix}step of a loop", OURS, config + way, "ms", Quantiles.of(times)))
    if FETCHED in ms:
        ratios = [fetched / eager for fetched, eager in zip(ms[FETCHED], ms[EAGER], strict=True)]
        interval, samples = ratio_of([[ratio] for ratio in ratios], CONFIDENCE), Quantiles.of(ratios)
        note = f"interval {interval.low:.3f} … {interval.high:.3f}"
        ahead = [loop.ahead for loop in loops[FETCHED]]
        if None not in ahead:
            note += f"; {sum(map(bool, ahead))} of {len(ahead)} loops planned ahead in the end"
        more = barred(at_most(samples.median, most, ""), quick=plan.quick)
        found.append(measured(f"{prefix}prefetch / eager", OURS, config, "", samples, note=note, **more))
        later = Quantiles.of([each / ms[BEFORE][0] for each in ms[EAGER]])
        found.append(measured(f"{prefix}eager / eager before", OURS, config, "", later))
    replayed = Quantiles.of([loop.replayed for loop in loops[FETCHED_GRAPH]])
    more = {} if least is None else barred(at_least(replayed.median, least, ""), quick=plan.quick)
    found.append(measured(f"{prefix}steps replayed", OURS, config, "", replayed, **more))
    return found


def records(plan: Plan) -> list[Record]:
    found = []
    for work in plan.works:
        found += measure_workload(plan, work)
        release(plan.device)
    for seed in range(plan.shapes):
        found += measure_shape(plan, seed)
        release(plan.device)
    return found


def title(plan: Plan) -> str:
    works = "; ".join(map(str, plan.works))
    return (
        f"Loops of {plan.steps} steps, each of a prefetch of its own: the mean time of all steps but the first "
        f"{plan.first}, end of the loop included. A step is forward, backward and update of one collection, row-wise "
        f"Adagrad, unified memory, LFU with half-life 300. {plan.pairs} pairs of eager loops over the same tables, "
        f"without and with prefetch, in random order, and {plan.graphs} loops of captured steps with prefetch among "
        f"them, after {plan.warm_up} steps of each. prefetch / eager: the median of the pairs, with Student's interval "
        f"of {CONFIDENCE:.0%} for the mean of their logarithms. eager / eager before: by the time of an eager loop "
        f"that came before any with prefetch. Steps replayed: the share of the timed ones. {works}: "
        f"bags of 1 id, all rows written before, {plan.pool} batches that come round again. Shapes drawn by the seeds "
        f"0 … {plan.shapes - 1} (`benchmarks/shapes.py`), the first {min(PAIRED, plan.shapes)} of which have eager "
        f"loops: jagged bags of the given mean of ids, Zipf {ALPHA:g}, fp32, {plan.shape_pool} batches that come round "
        f"again, `graph_step` without `max_ids`."
    )


# --- command line ---------------------------------------------------------------------------------------------------


def plan_of(args: Sequence[str] | None = None) -> tuple[Plan, Path | None]:
    """The plan, and where its results go."""
    parser, known = make_parser("cuda_loops", __doc__), workloads()
    parser.add_argument("--workloads", nargs="*", choices=list(known), default=list(known), help="none: shapes alone")
    parser.add_argument("--shapes", type=int, default=cuda_shapes.SHAPES, help="seeds 0, 1, … (default: %(default)s)")
    parser.add_argument("--no-shapes", action="store_true", help="workloads alone")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="of eager loops (default: %(default)s)")
    parser.add_argument("--graphs", type=int, default=GRAPHS, help="loops of captured steps (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each loop (default: %(default)s)")
    parser.add_argument("--first", type=int, default=FIRST, help="of these, not timed (default: %(default)s)")
    chosen = parse(parser, args)
    if chosen.pairs < 2:
        parser.error("an interval needs 2 --pairs at least")
    if chosen.steps <= chosen.first:
        parser.error(f"loops of {chosen.steps} --steps have none behind the --first {chosen.first}")
    if chosen.quick:
        known = quick_workloads()
    plan = Plan(
        works=tuple(known[name] for name in dict.fromkeys(chosen.workloads)),
        shapes=0 if chosen.no_shapes else chosen.shapes,
        pairs=chosen.pairs,
        graphs=chosen.graphs,
        steps=chosen.steps,
        first=chosen.first,
        warm_up=WARM_UP,
        pool=POOL,
        shape_pool=cuda_shapes.POOL,
        limits=cuda_shapes.LIMITS,
        quick=chosen.quick,
        device=chosen.device,
    )
    if chosen.quick:
        plan = replace(plan, shapes=min(plan.shapes, 2), pairs=2, graphs=1, steps=8, first=3, warm_up=4)
        plan = replace(plan, pool=10, shape_pool=8, limits=cuda_shapes.QUICK)
    return plan, chosen.results


def main(args: Sequence[str] | None = None) -> None:
    plan, results = plan_of(args)
    start = perf_counter()
    found = records(plan)
    keep(results, "cuda-loops", title(plan), found, statistic=STATISTIC)
    say(f"{perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
