"""Tables sharded over the GPUs of one host, beside one of them alone: `python -m benchmarks.cuda_sharding`.

Each rank is a process with a GPU of its own, which trains its own batches: first a plain collection, all ranks at the
same time, each on tables of its own; then one collection that they share, dealt out row by row, with as many slots a
rank; and beside it what a step is made of, each part alone. A DLRM likewise, its dense layers in
DistributedDataParallel. Bars are those of two GPUs; the results of more are kept beside, by their number. `--quick
--device cpu` tries the harness out.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import tieredemb
from benchmarks.cuda_command import barred, keep, make_parser, parse
from benchmarks.cuda_dlrm import Plan as DlrmPlan
from benchmarks.cuda_dlrm import Trainer, training_batches
from benchmarks.cuda_dlrm import plan_of as dlrm_plan_of
from benchmarks.cuda_modes import FETCHED, FETCHED_GRAPH, GRAPH, MODE_STEPS, ONE_THREAD, on_one_thread
from benchmarks.cuda_providers import LR, OURS, Upstream
from benchmarks.cuda_runs import a_batch, run_fetched, run_fresh
from benchmarks.cuda_step import STATISTIC, floor_ms, once, release, say
from benchmarks.cuda_tables import set_weights, tiered_tables
from benchmarks.cuda_timing import ROUNDS, StepTimes, timed
from benchmarks.cuda_workload import Cache, CudaWorkload, batches, every_row, quick_workloads, workloads
from benchmarks.record import Record, at_least, at_most, measured
from benchmarks.timing import Quantiles

NAMES, SLOTS, DLRM = ("W-1.05", "W-1.2"), 520_000, "DLRM"
PLAIN, SHARDED = "one GPU", "sharded"
RESIDENT, EXCHANGES = "resident", "exchanges"
EAGER, CAPTURED = ("", FETCHED, ONE_THREAD), (GRAPH, FETCHED_GRAPH)
ROOM = 1.02  # × the ids of the fullest batch that one rank asks another for
MOST_EAGER, MOST_GRAPH = 1.5, {"W-1.05": 1.25, DLRM: 1.2}  # × one GPU's time
LEAST_SHARE, MOST_MISSES, LEAST_EXCHANGE = 0.85, 0.9, 0.8
BARRED_RANKS = 2
OPTIMIZER = tieredemb.RowWiseAdagrad(lr=LR)
TIMEOUT = timedelta(seconds=120)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the command line asked for."""

    works: tuple[CudaWorkload, ...]
    dlrm: DlrmPlan
    slots: int
    ranks: int
    warm_up: int
    steps: int
    quick: bool
    device: str

    def barred(self, bar: dict[str, Any]) -> dict[str, Any]:
        """The fields of a bar, which is one of two GPUs."""
        return barred(bar, quick=self.quick) if self.ranks == BARRED_RANKS else {}


class Done(NamedTuple):
    """Steps of one kind on one rank. `floor_ms`: what PCIe alone needs for what moved · `misses`: rows, a step."""

    times: StepTimes
    floor_ms: float
    misses: float


class Exchanges(NamedTuple):
    """Milliseconds of each alone: rows that come back, gradients that go, and a bare exchange of as many bytes as the
    gradients in equal parts. `sent`: MiB of rows and of gradients that leave a rank."""

    rows: Quantiles
    gradients: Quantiles
    bare: Quantiles
    sent: tuple[float, float]


Steps = dict[tuple[str, str, str], Done]  # by workload, who, and mode


# --- a rank ---------------------------------------------------------------------------------------------------------


class Tables:
    """A collection, and its step."""

    def __init__(self, module: Any, upstream: Upstream) -> None:
        self.module, self.upstream = module, upstream

    def step(self, ids: torch.Tensor) -> None:
        self.module(ids, self.upstream.offsets).backward(self.upstream.gradient)


def sharded_tables(work: CudaWorkload, slots: int, device: torch.device, max_ids: int | None) -> Any:
    """Of all ranks; see `tiered_tables`."""
    tables = [
        tieredemb.TableConfig(name=f"t{t}", num_embeddings=work.rows, embedding_dim=work.width)
        for t in range(work.tables)
    ]
    return tieredemb.ShardedTieredEmbeddingBagCollection(
        tables, sharding=tieredemb.RowWise(), capacity=slots, optimizer=OPTIMIZER, device=device, max_ids=max_ids,
        timeout=TIMEOUT,
    )  # fmt: skip


def owners(work: CudaWorkload, ids: torch.Tensor, ranks: int) -> torch.Tensor:
    """The ranks that own the rows of `ids` (T · B,)."""
    return (ids.view(work.tables, -1) + torch.arange(work.tables, device=ids.device)[:, None]) % ranks


def most_asked(work: CudaWorkload, ids: torch.Tensor, ranks: int) -> int:
    """How many of the ids of a batch one rank asks another for at most, with some room."""
    most = max(int(owners(work, batch, ranks).flatten().bincount(minlength=ranks).max()) for batch in ids)
    every = torch.tensor([most])
    dist.all_reduce(every, op=dist.ReduceOp.MAX)
    return int(ROOM * int(every)) + 1


class Rank:
    """One of the processes. `wait`: for the others."""

    def __init__(self, plan: Plan, number: int, wait: Callable[[], object]) -> None:
        self.plan, self.number, self.wait = plan, number, wait
        self.device = torch.device("cpu") if plan.device == "cpu" else torch.device("cuda", number)
        self._again = min(MODE_STEPS, plan.warm_up)  # steps of warm-up of a further mode
        self._count = plan.warm_up + 4 * self._again + 5 * plan.steps + 4

    def ids(self, work: CudaWorkload) -> torch.Tensor:
        """Batches that no other rank has."""
        drawn = batches(work, self.plan.ranks * self._count, self.device)[self.number :: self.plan.ranks].clone()
        release(self.device)
        return drawn

    def run_modes(
        self,
        modes: Sequence[str],
        work: CudaWorkload,
        module: Any,
        model: nn.Module,
        step: Callable[[Any], object],
        given: Iterator[Any],
    ) -> Iterator[tuple[str, Done]]:
        plan, device, start = self.plan, self.device, perf_counter()
        for mode in modes:
            if mode == modes[0] and mode in CAPTURED:
                step = tieredemb.graph_step(step)
            warm_up = self._again if mode else plan.warm_up
            self.wait()
            if mode in (FETCHED, FETCHED_GRAPH):
                some = list(islice(given, warm_up + plan.steps + 2))
                times, done = run_fetched(
                    step, some, model, module.stats, warm_up=warm_up, depth=1, device=device, wait=self.wait
                )
            else:
                some = list(islice(given, warm_up + plan.steps))
                with on_one_thread() if mode == ONE_THREAD else contextlib.nullcontext():
                    times, done = run_fresh(step, some, module.stats, warm_up=warm_up, device=device, wait=self.wait)
            yield mode, Done(times, floor_ms(work.row_bytes, done), a_batch(done.rows_filled, done))
        if self.number == 0:
            say(f"{work.name}, {type(module).__name__}: {perf_counter() - start:.1f} s")

    @property
    def _modes(self) -> Sequence[Sequence[str]]:
        """Eager steps, and where there is a GPU those whose backward has no thread of its own, and captured ones."""
        return (EAGER, CAPTURED) if self.device.type == "cuda" else (EAGER[:2],)

    def steps(self, who: str, work: CudaWorkload) -> Steps:
        ids, found = self.ids(work), {}
        left = iter(ids)
        for modes in self._modes:
            module = self.tables(who, work, ids, modes)
            step = Tables(module, Upstream(work, self.device)).step
            for mode, done in self.run_modes(modes, work, module, module, step, left):
                found[work.name, who, mode] = done
            module.close()
            del module, step
            release(self.device)
        return found

    def dlrm_steps(self, who: str) -> Steps:
        of = replace(self.plan.dlrm, device=self.device, warm_up=self.plan.warm_up, steps=self.plan.steps)
        ranks, warm_up = self.plan.ranks, of.warm_up + 4 * self._again
        every = training_batches(of, ranks * (warm_up + 5 * of.steps + 4))
        given, found = every[self.number :: ranks], {}
        ids, left = torch.stack([batch.ids for batch in given]), iter(given)
        for modes in self._modes:
            module = self.tables(who, of.work, ids, modes)
            on_gpu = self.device.type == "cuda"
            with torch.cuda.stream(torch.cuda.Stream(self.device)) if on_gpu else contextlib.nullcontext():
                trainer = Trainer(module, of)
                if who == SHARDED:
                    trainer.model = nn.parallel.DistributedDataParallel(trainer.model)  # type: ignore[assignment]
            for mode, done in self.run_modes(modes, of.work, module, trainer.model, trainer.step, left):
                found[of.work.name, who, mode] = done
            module.close()
            del module, trainer
            release(self.device)
        return found

    def tables(self, who: str, work: CudaWorkload, ids: torch.Tensor, modes: Sequence[str]) -> Any:
        """A collection for steps of these modes, all of whose rows were written."""
        if who == PLAIN:
            module: Any = tiered_tables(work, self.plan.slots, OPTIMIZER, self.device)
        else:
            asked = most_asked(work, ids, self.plan.ranks) if modes is CAPTURED else None
            module = sharded_tables(work, self.plan.slots, self.device, asked)
        set_weights(module, work, self.device)
        return module

    def resident(self, work: CudaWorkload) -> Quantiles:
        """Captured steps of a plain collection that holds all rows."""
        ids, upstream = self.ids(work)[0], Upstream(work, self.device)
        module = tiered_tables(work, 1.0, OPTIMIZER, self.device)
        with torch.no_grad():
            for some, offsets in every_row(work.sizes, work.lookups, self.device):
                module(some, offsets)
        step = tieredemb.graph_step(Tables(module, upstream).step)
        times, _ = run_fresh(step, [ids] * (MODE_STEPS + ROUNDS), module.stats, warm_up=MODE_STEPS, device=self.device)
        module.close()
        return times.quantiles()

    def exchanges(self, work: CudaWorkload) -> Exchanges:
        """Those of one batch."""
        ids, ranks, device = self.ids(work)[0], self.plan.ranks, self.device
        owner = owners(work, ids, ranks)
        keys = ids.view(work.tables, -1) + work.rows * torch.arange(work.tables, device=device)[:, None]
        unique = [len(keys[owner == rank].unique()) for rank in range(ranks)]
        occurrences = owner.flatten().bincount(minlength=ranks).tolist()
        equal = [sum(occurrences) // ranks] * ranks

        def timed_exchange(asked: list[int], *, back: bool) -> Quantiles:
            theirs = torch.tensor(asked, device=device)
            dist.all_to_all_single(theirs, theirs.clone())
            sent, came = (theirs.tolist(), asked) if back else (asked, theirs.tolist())
            given = torch.zeros(sum(sent), work.width, device=device)
            out = torch.empty(sum(came), work.width, device=device)
            self.wait()
            return timed(lambda: dist.all_to_all_single(out, given, came, sent))

        away = (1 - 1 / ranks) * 4 * work.width / 2**20
        return Exchanges(
            timed_exchange(unique, back=True),
            timed_exchange(occurrences, back=False),
            timed_exchange(equal, back=False),
            (sum(unique) * away, sum(occurrences) * away),
        )

    def run(self, tell: Callable[[Any], object], meeting: str) -> None:
        """Tells all that it measures: first alone, as a plain collection trains in no world of several processes."""
        plan, on_gpu = self.plan, self.device.type == "cuda"
        for work in plan.works:
            tell(self.steps(PLAIN, work))
            if on_gpu:
                tell({(work.name, RESIDENT): self.resident(work)})
                release(self.device)
        tell(self.dlrm_steps(PLAIN))
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        dist.init_process_group(backend, f"file://{meeting}", rank=self.number, world_size=plan.ranks, timeout=TIMEOUT)
        for work in plan.works:
            if on_gpu:
                tell({(work.name, EXCHANGES): self.exchanges(work)})
            tell(self.steps(SHARDED, work))
        tell(self.dlrm_steps(SHARDED))
        dist.destroy_process_group()


def serve(plan: Plan, number: int, meeting: str, barrier: Any, pipe: Any) -> None:
    """What the process of a rank does."""
    try:
        if plan.device == "cuda":
            torch.cuda.set_device(number)
        else:
            torch.set_num_threads(1)
        Rank(plan, number, lambda: barrier.wait(TIMEOUT.total_seconds())).run(pipe.send, meeting)
    except BaseException:
        say(traceback.format_exc())
        pipe.close()
        os._exit(1)  # the others may wait for this one, and it for graphs


# --- records --------------------------------------------------------------------------------------------------------


def records_of(plan: Plan, name: str, found: Sequence[dict[Any, Any]]) -> list[Record]:
    """Of one workload. `found`: by rank; a step takes as long as on the rank that is slowest."""
    records, ms = [], {}
    for _, who, mode in (key for key in found[0] if key[0] == name and len(key) == 3):
        done = max((its[name, who, mode] for its in found), key=lambda each: each.times.mean_ms)
        ms[who, mode] = done.times.mean_ms
        note = f"{done.misses:,.0f} missed rows a rank, for which PCIe needs {done.floor_ms:.2f} ms; {done.times}"
        more: dict[str, Any] = {}
        if who == SHARDED:
            ratio = ms[who, mode] / ms[PLAIN, mode]
            more = {"ratio": ratio, "ratio_label": "× one GPU"}
            most = MOST_GRAPH.get(name) if mode == FETCHED_GRAPH else None if mode else MOST_EAGER
            if most is not None:
                more |= plan.barred(at_most(ratio, most))
        records.append(measured("step", OURS, f"{name}, {who}{mode}", "ms", done.times.quantiles(), note=note, **more))
    if name != DLRM and (SHARDED, "") in ms:
        misses = [max(its[name, who, ""].misses for its in found) for who in (SHARDED, PLAIN)]
        ratio = misses[0] / max(1.0, misses[1])
        bar = plan.barred(at_most(ratio, MOST_MISSES))
        records.append(measured("misses of a rank / one GPU's", OURS, name, "", once(ratio), **bar))
    if (name, EXCHANGES) in found[0]:
        records += records_of_parts(plan, name, found, ms.get((SHARDED, FETCHED_GRAPH)))
    return records


def records_of_parts(plan: Plan, name: str, found: Sequence[dict[Any, Any]], ms: float | None) -> list[Record]:
    """What a captured step, of `ms`, is made of."""

    def slowest(samples: Sequence[Quantiles]) -> Quantiles:
        return max(samples, key=lambda each: each.median)

    each: list[Exchanges] = [its[name, EXCHANGES] for its in found]
    rows, gradients = (slowest([getattr(its, part) for its in each]) for part in ("rows", "gradients"))
    bare, resident = slowest([its.bare for its in each]), slowest([its[name, RESIDENT] for its in found])
    alone = (
        ("NCCL", "exchange of rows", rows, f"{each[0].sent[0]:.1f} MiB leave a rank"),
        ("NCCL", "exchange of gradients", gradients, f"{each[0].sent[1]:.1f} MiB leave a rank"),
        ("NCCL", "bare all-to-all", bare, "of as many bytes as the gradients, in equal parts"),
        (OURS, "captured step of one GPU", resident, "of as many lookups, all rows resident"),
    )
    records = [measured("alone", who, f"{name}, {what}", "ms", its, note=note) for who, what, its, note in alone]
    share = bare.median / gradients.median
    bar = plan.barred(at_least(share, LEAST_EXCHANGE))
    records.append(measured("rate of the gradients' exchange / of a bare one", "NCCL", name, "", once(share), **bar))
    if ms is not None:
        floor = max(its[name, SHARDED, FETCHED_GRAPH].floor_ms for its in found)
        together = sum(its.median for its in (rows, gradients, resident))
        bound = max(floor, together)
        bar = plan.barred(at_least(bound / ms, LEAST_SHARE))
        note = f"the larger of PCIe's {floor:.2f} ms and {together:.2f} of the parts, one after the other"
        records.append(
            measured("bound of a captured step / its time", OURS, name, "", once(bound / ms), note=note, **bar)
        )
    return records


def run(plan: Plan) -> tuple[list[Record], list[int]]:
    """Starts the ranks, and puts together what they find: what all of them have told before one fails is returned,
    and which have failed."""
    context = multiprocessing.get_context("spawn")
    found: list[dict[Any, Any]] = [{} for _ in range(plan.ranks)]
    with tempfile.TemporaryDirectory() as directory:
        pipes, processes, barrier = [], [], context.Barrier(plan.ranks)
        for number in range(plan.ranks):
            ours, theirs = context.Pipe(duplex=False)
            args = plan, number, str(Path(directory) / "store"), barrier, theirs
            processes.append(context.Process(target=serve, args=args, daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        with contextlib.suppress(EOFError):
            while True:
                for its, told in zip(found, [pipe.recv() for pipe in pipes], strict=True):
                    its |= told
        for process in processes:
            process.join(60)
            process.kill()
    failed = [number for number, process in enumerate(processes) if process.exitcode != 0]
    return [record for name in (*NAMES, DLRM) for record in records_of(plan, name, found)], failed


# --- command line ---------------------------------------------------------------------------------------------------


def title(plan: Plan) -> str:
    return (
        f"Forward, backward and update over {plan.ranks} ranks, one GPU each, NCCL; {', '.join(map(str, plan.works))}; "
        f"bags of 1 id, fp32, row-wise Adagrad, unified memory, all rows written before, {plan.slots:,} slots a rank, "
        f"row by row over the ranks; the batch is a rank's. DLRM: that of cuda-dlrm. The mean of {plan.steps} steps on "
        f"batches never seen before, on the rank that is slowest: eager after {plan.warm_up} of warm-up, then with "
        f"prefetch, then without it under `torch.autograd.set_multithreading_enabled(False)`; then of a collection "
        f"with max_ids of {ROOM} × the fullest batch as CUDA graphs, without and with prefetch."
    )


def plan_of(args: Sequence[str] | None = None) -> tuple[Plan, Path | None]:
    """The plan, and where its results go."""
    parser = make_parser("cuda_sharding", __doc__, rows=workloads()[NAMES[0]].rows)
    parser.add_argument("--ranks", type=int, default=BARRED_RANKS, help="processes, one a GPU (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=100, help="timed steps of each mode (default: %(default)s)")
    parser.add_argument("--warm-up", type=int, default=120, help="steps before the first (default: %(default)s)")
    chosen = parse(parser, args)
    known = quick_workloads() if chosen.quick else workloads()
    if chosen.device.type == "cuda" and torch.cuda.device_count() < chosen.ranks:
        raise SystemExit(f"{chosen.ranks} ranks need as many GPUs, here are {torch.cuda.device_count()}")
    works = tuple(replace(known[name], rows=min(chosen.rows, known[name].rows)) for name in NAMES)
    slots = 600 if chosen.quick else SLOTS
    quick = ["--quick", "--device", chosen.device.type] if chosen.quick else []
    dlrm, _ = dlrm_plan_of([*quick, "--rows", str(works[0].rows)])
    return Plan(
        works=tuple(replace(work, caches=(Cache(capacity=slots),)) for work in works), dlrm=dlrm, slots=slots,
        ranks=chosen.ranks, warm_up=min(chosen.warm_up, 4) if chosen.quick else chosen.warm_up,
        steps=min(chosen.steps, 5) if chosen.quick else chosen.steps, quick=chosen.quick, device=chosen.device.type,
    ), chosen.results  # fmt: skip


def main(args: Sequence[str] | None = None) -> None:
    plan, results = plan_of(args)
    start = perf_counter()
    records, failed = run(plan)
    name = "cuda-sharding" if plan.ranks == BARRED_RANKS else f"cuda-sharding-{plan.ranks}"
    keep(None if failed else results, name, title(plan), records, statistic=STATISTIC)
    say(f"{perf_counter() - start:.0f} s in all")
    if failed:
        raise SystemExit(f"ranks {failed} have failed, as told above: what is said of the others is not kept")


if __name__ == "__main__":
    main()
