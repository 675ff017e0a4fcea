"""Whole training steps on a GPU: `python -m benchmarks.cuda_step [--workloads W-HBM W-1.05 …] [--policy 300 inf]`.

A step is forward, backward from a fixed random gradient, and the fused update; eager, with prefetch, as a CUDA graph,
and as one that goes ahead. Every provider and cache sees the same batches, warms up on the first and is timed on the
rest, none of which it has seen.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

import tieredemb
from benchmarks.cuda_modes import FETCHED, FETCHED_GRAPH, GRAPH, OF_DEVICE, batches_of_modes, measure_modes
from benchmarks.cuda_providers import (
    FBGEMM,
    OURS,
    TORCH,
    Tiered,
    Upstream,
    check_room,
    fbgemm_installed,
    fbgemm_step,
    torch_step,
)
from benchmarks.cuda_runs import Way, a_batch, run_fresh, run_in_turns
from benchmarks.cuda_swap import swap_requests_per_ms
from benchmarks.cuda_timing import StepTimes
from benchmarks.cuda_workload import PEER_EARLIER, Cache, CudaWorkload, batches, quick_workloads, workloads
from benchmarks.record import RESULTS, Record, at_least, at_most, measured, save
from benchmarks.timing import Quantiles
from tieredemb.cache.stats import CacheStats
from tieredemb.config import Policy

WARM_UP, STEPS = 150, 200
TORCH_WARM_UP, TORCH_STEPS = 10, 50  # it has no cache to warm, and is slow
REQUESTS_PER_MS = 510_000  # of 128 bytes, that PCIe carries in both directions together (H200)
PEER = "FBGEMM"
STATISTIC = (
    "Means of wall time, where several ways take turns the median of those of 5 runs, 20–80 % of device events in "
    "brackets"
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the command line asked for."""

    works: tuple[CudaWorkload, ...]
    policies: tuple[Policy, ...]
    providers: tuple[str, ...]
    warm_up: int
    steps: int
    untouched: bool
    device: torch.device
    requests_per_ms: float = REQUESTS_PER_MS  # of PCIe, both ways together, as the swap alone reaches them


def measure(plan: Plan, work: CudaWorkload) -> list[Record]:
    """The records of one workload, in the order of the table."""
    start = perf_counter()
    ids = list(batches(work, batches_of_modes(plan.warm_up, plan.steps), plan.device))
    upstream = Upstream(work, plan.device)
    release(plan.device)
    say(f"{work}: {len(ids)} batches drawn in {perf_counter() - start:.1f} s")
    records = []
    if TORCH in plan.providers and work.resident:
        warm_up, steps = min(TORCH_WARM_UP, plan.warm_up), min(TORCH_STEPS, plan.steps)
        step = torch_step(work, upstream)
        times, _ = run_fresh(step, ids[: warm_up + steps], CacheStats, warm_up=warm_up, device=plan.device)
        del step
        release(plan.device)
        name = f"nn.EmbeddingBag × {work.tables}, sparse, torch.optim.Adagrad"
        records.append(measured(work.name, name, "all resident", "ms", times.quantiles(), note=str(times)))
    beside = {}
    if FBGEMM in plan.providers and fbgemm_installed():
        check_room(work.cold_bytes if work.resident else 2 * work.cold_bytes)  # of both, which are there together
        beside[PEER] = Way(step=fbgemm_step(work, upstream), batches=cycle(ids), warm_up=plan.warm_up)
    if OURS in plan.providers:
        for cache in work.caches:
            for policy in plan.policies[:1] if work.resident else plan.policies:
                records += measure_tiered(plan, work, cache, policy, ids, upstream, beside)
    else:
        runs = run_in_turns(beside, steps=plan.steps, device=plan.device)
        records += [peer_record(work, times) for times, _ in runs.values()]
    return records


def peer_record(work: CudaWorkload, times: StepTimes, turns_with: str = "") -> Record:
    config = "all resident" if work.resident else "LFU cache of 1 %, managed"
    config += "" if work.dtype is torch.float32 else ", fp16"
    config += f", by turns with {turns_with}" if turns_with else ""
    return measured(work.name, PEER, config, "ms", times.quantiles(), note=str(times))


def measure_tiered(
    plan: Plan,
    work: CudaWorkload,
    cache: Cache,
    policy: Policy,
    ids: Sequence[torch.Tensor],
    upstream: Upstream,
    beside: Mapping[str, Way],
) -> list[Record]:
    """Builds a collection, measures it in all modes by turns with the ways `beside`, and gives its memory back."""
    release(plan.device)
    start = perf_counter()
    tiered = Tiered(work, cache, policy, upstream)
    try:
        if work.resident:
            tiered.fill()
        elif not plan.untouched:
            tiered.load()
        runs = measure_modes(
            tiered, iter(ids), warm_up=plan.warm_up, steps=plan.steps, fetched=not work.resident,
            of_device=work.resident, beside=beside,
        )  # fmt: skip
        report = tiered.module.memory_report()
    finally:
        tiered.close()
    barred = cache if policy == plan.policies[0] else Cache(capacity=cache.capacity)
    config = str(cache) if policy == plan.policies[0] else f"{cache}, {describe(policy)}"
    records, ms = [], {name: times.mean_ms for name, (times, _) in runs.items()}
    if PEER in runs:
        times, _ = runs.pop(PEER)
        records.append(peer_record(work, times, config))
        if work.peer is not None:
            work = replace(work, peer=replace(work.peer, name="FBGEMM, by turns with it", ms=times.mean_ms))
    records += [
        step_record(work, step_bar(barred, mode), config + mode, *measured_run) for mode, measured_run in runs.items()
    ]
    if FETCHED_GRAPH in runs and barred.least_pcie_share is not None:
        floor = floor_ms(work.row_bytes, runs[FETCHED_GRAPH][1], plan.requests_per_ms)
        share = floor / runs[FETCHED_GRAPH][0].mean_ms
        more = at_least(share, barred.least_pcie_share, "")
        note = f"of {plan.requests_per_ms / 1e3:,.0f} M requests/s, the swap alone"
        op = f"{work.name}, PCIe's share"
        records.append(measured(op, OURS, config + FETCHED_GRAPH, "", once(share), note=note, **more))
    records += ratio_records(work, barred, config, ms)
    if not work.resident:
        records.append(hit_record(work, barred, config, runs[""][1]))
    records += [memory_record(work, barred, config, report, tiered), build_record(work, config, tiered)]
    del tiered
    release(plan.device)
    say(f"{work.name}, {config}: {perf_counter() - start:.1f} s")
    return records


def step_bar(cache: Cache, mode: str) -> float | None:
    """Milliseconds that a step may take."""
    if mode.endswith(OF_DEVICE):
        return cache.most_device_ms
    bars = {"": cache.most_ms, GRAPH: cache.most_ms}
    bars |= {FETCHED: cache.most_fetched_ms, FETCHED_GRAPH: cache.most_prefetched_ms}
    return bars[mode]


# --- records --------------------------------------------------------------------------------------------------------


def step_record(work: CudaWorkload, most_ms: float | None, config: str, times: StepTimes, done: CacheStats) -> Record:
    more: dict[str, Any] = {} if most_ms is None else at_most(times.mean_ms, most_ms, " ms")
    if work.peer is not None:
        more |= {"ratio": times.mean_ms / work.peer.ms, "ratio_label": "× FBGEMM"}
        more["peer"] = f"{work.peer.ms:g} ms ({work.peer.name})"
    note = f"{traffic(work, times, done)}; {times}"
    return measured(work.name, OURS, config, "ms", times.quantiles(), note=note, **more)


def ratio_records(work: CudaWorkload, cache: Cache, config: str, ms: dict[str, float]) -> list[Record]:
    """An eager step's time by that of the same as a graph, with prefetch by that without, and where there is a bar by
    the peer's."""
    asked = [("", GRAPH, cache.most_of_graph), (FETCHED, FETCHED_GRAPH, None), (FETCHED, "", 1.0)]
    if cache.most_of_peer is not None:
        asked.append(("", PEER, cache.most_of_peer))
    found = []
    for mode, other, most in asked:
        if mode in ms and other in ms:
            ratio, names = ms[mode] / ms[other], [name.removeprefix(", ") or "eager" for name in (mode, other)]
            more: dict[str, Any] = {} if most is None else at_most(ratio, most, "")
            found.append(measured(f"{work.name}, {' / '.join(names)}", OURS, config, "", once(ratio), **more))
    return found


def traffic(work: CudaWorkload, times: StepTimes, done: CacheStats) -> str:
    """What moved between the tiers, and the share of the time that PCIe alone would have needed for it."""
    if not done.rows_filled and not done.rows_overflow:
        return f"hit rate {done.hit_rate:.1%}"
    floor = floor_ms(work.row_bytes, done)
    filled, written = (a_batch(count, done) for count in (done.rows_filled, done.rows_written_back))
    overflow = f", {a_batch(done.rows_overflow, done):,.0f} beyond the cache" if done.rows_overflow else ""
    return (
        f"{filled:,.0f} missed rows and {written:,.0f} written back a batch{overflow}; PCIe alone needs {floor:.2f} "
        f"ms, {floor / times.mean_ms:.0%} of the step"
    )


def floor_ms(row_bytes: int, done: CacheStats, requests_per_ms: float = REQUESTS_PER_MS) -> float:
    """Milliseconds a batch that PCIe alone needs for what moved, of rows of such weights. A row is requested in pieces
    of 128 bytes, and one more for state and score; a clean victim gives back its score, and a row beyond the cache is
    read and written where it lies."""
    row_requests = -(-row_bytes // 128) + 1
    clean = done.evictions - done.rows_written_back
    requests = row_requests * (done.rows_filled + done.rows_written_back + 2 * done.rows_overflow) + clean
    return a_batch(requests, done) / requests_per_ms


def hit_record(work: CudaWorkload, cache: Cache, config: str, done: CacheStats) -> Record:
    more: dict[str, Any] = {} if cache.least_hit_rate is None else at_least(done.hit_rate, cache.least_hit_rate, "")
    if work.peer is not None and work.peer.hit_rate is not None:
        more["peer"] = f"{work.peer.hit_rate:g} ({PEER_EARLIER})"
    return measured(f"{work.name}, hit rate", OURS, config, "", once(done.hit_rate), **more)


def memory_record(work: CudaWorkload, cache: Cache, config: str, report: dict[str, Any], tiered: Tiered) -> Record:
    mib = cache_bytes(report) / 2**20
    more: dict[str, Any] = {} if cache.most_mib is None else at_most(mib, cache.most_mib, " MiB")
    if work.peer is not None and work.peer.cache_mib is not None:
        more["peer"] = f"{work.peer.cache_mib:,g} MiB ({PEER_EARLIER})"
    note = f"batch buffers not included; torch allocated {tiered.allocated / 2**20:,.0f} MiB while it was built"
    return measured(f"{work.name}, HBM of the cache", OURS, config, "MiB", once(mib), note=note, **more)


def build_record(work: CudaWorkload, config: str, tiered: Tiered) -> Record:
    note = f"then {tiered.load_seconds:.1f} s to set all weights" if tiered.load_seconds else ""
    op = f"{work.name}, building {work.cold_bytes / 2**30:.1f} GiB"
    return measured(op, OURS, config, "s", once(tiered.build_seconds), note=note)


def cache_bytes(report: dict[str, Any]) -> int:
    """Bytes of everything that a `memory_report()` lists under "cache", of all widths."""
    return sum(_total(part["cache"]) for part in report.values())


def _total(sizes: int | dict[str, Any]) -> int:
    return sum(map(_total, sizes.values())) if isinstance(sizes, dict) else sizes


def once(value: float) -> Quantiles:
    return Quantiles(value, value, value, 1)


# --- command line ---------------------------------------------------------------------------------------------------


def as_policy(text: str) -> Policy:
    """`lru`, or the half-life of an LFU in batches, which may be `inf`."""
    try:
        return tieredemb.LRU() if text == "lru" else tieredemb.LFU(half_life_batches=float(text))
    except ValueError as error:  # `ConfigError` is one
        raise argparse.ArgumentTypeError(f"{text!r} is neither lru nor a half-life of at least 1 ({error})") from error


def describe(chosen: Policy) -> str:
    return "LRU" if isinstance(chosen, tieredemb.LRU) else f"LFU with half-life {chosen.half_life_batches:g}"


def parse(args: Sequence[str] | None = None) -> tuple[Plan, Path | None]:
    """The plan, and where its results go: what is not the whole benchmark is kept only where --results asks for it, as
    it would replace the whole one."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cuda_step", description=__doc__)
    parser.add_argument(
        "--results", type=Path, help=f"directory of the results (default: {RESULTS.name}/ for a whole run)"
    )
    parser.add_argument("--workloads", nargs="+", choices=list(workloads()), default=list(workloads()))
    parser.add_argument("--steps", type=int, default=STEPS, help="timed steps (default: %(default)s)")
    parser.add_argument("--warm-up", type=int, default=WARM_UP, help="steps before them (default: %(default)s)")
    parser.add_argument(
        "--policy", type=as_policy, nargs="+", default=[as_policy("300")], metavar="HALF_LIFE", dest="policies",
        help="half-lives of the LFU in batches, inf, or lru; the first has the bars (default: 300)",
    )  # fmt: skip
    parser.add_argument("--providers", nargs="+", choices=(OURS, TORCH, FBGEMM), default=[OURS, TORCH, FBGEMM])
    parser.add_argument(
        "--untouched", action="store_true", help="do not set the weights: rows are generated when missed"
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes and few steps")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"), help="cpu only with --quick")
    chosen = parser.parse_args(args)
    if chosen.steps < 1 or chosen.warm_up < 1:
        parser.error(f"--steps and --warm-up must be at least 1, got {chosen.steps} and {chosen.warm_up}")
    if chosen.device.type == "cpu" and not chosen.quick:
        parser.error("the workloads are made for a GPU; try the harness out with --quick --device cpu")
    known = quick_workloads() if chosen.quick else workloads()
    plan = Plan(
        works=tuple(known[name] for name in dict.fromkeys(chosen.workloads)),
        policies=tuple(dict.fromkeys(chosen.policies)),
        providers=tuple(chosen.providers),
        warm_up=min(chosen.warm_up, 8) if chosen.quick else chosen.warm_up,
        steps=min(chosen.steps, 20) if chosen.quick else chosen.steps,
        untouched=chosen.untouched,
        device=chosen.device,
    )
    usual = {
        "workloads": list(known),
        "warm_up": WARM_UP,
        "policies": [as_policy("300")],
        "untouched": False,
        "quick": False,
    }
    whole = all(getattr(chosen, name) == value for name, value in usual.items())
    whole = whole and chosen.steps >= STEPS and OURS in plan.providers
    return plan, chosen.results or (RESULTS if whole else None)


def check_device(device: torch.device) -> None:
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no GPU: torch.cuda.is_available() is false; try the harness out with --quick --device cpu")


def title(plan: Plan) -> str:
    cold = "rows were never written" if plan.untouched else "all rows written before"
    first = describe(plan.policies[0])
    text = (
        f"Forward, backward and update, bags of 1 id, row-wise Adagrad, {first}, unified memory, {cold}: the "
        f"mean of {plan.steps} steps on batches never seen before, after {plan.warm_up} of warm-up, eager, with the "
        f"next batch fetched ahead, as replays of a CUDA graph, as replays that fetch the next batch, and those of "
        f"FBGEMM, which all take turns. {'; '.join(map(str, plan.works))}. Hit rate: of the lookups, before the "
        f"batch's own rows came in."
    )
    if FBGEMM in plan.providers and not fbgemm_installed():
        text += f" FBGEMM is not installed here; its figures were {PEER_EARLIER}."
    return text


def release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def show(record: Record) -> None:
    verdict = "" if record.met is None else f"{record.bar}: {'met' if record.met else 'MISSED'}"
    figure = f"{record.median:9.4g} {record.unit:4}"
    line = f"{record.op:28} {record.provider:12.12} {record.config:26} {figure} {verdict:18} {record.note}"
    print(line, flush=True)


def main(args: Sequence[str] | None = None) -> None:
    plan, results = parse(args)
    check_device(plan.device)
    start, records = perf_counter(), []
    if OURS in plan.providers and any(cache.least_pcie_share for work in plan.works for cache in work.caches):
        plan = replace(plan, requests_per_ms=swap_requests_per_ms())
    for work in plan.works:
        of_work = measure(plan, work)
        for record in of_work:
            show(record)
        records += of_work
    if results is None:
        say("not the whole benchmark: nothing is kept without --results")
    else:
        save(results, "cuda-step", title(plan), records, statistic=STATISTIC)
    say(f"{perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
