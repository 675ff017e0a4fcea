"""How well rows of 16 bits train: `python -m benchmarks.cuda_rounding`.

The example, a DLRM on a generated log, with rows of each dtype and rounding, and the same seeds: the AUC on the log's
held-out end. On a GPU, a CUDA graph a step; `--quick --device cpu` tries the harness out.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch

from benchmarks.cuda_command import keep, make_parser, parse
from benchmarks.cuda_step import say
from benchmarks.record import Record, at_least, measured
from benchmarks.timing import Quantiles
from examples.dlrm.config import CacheConfig, ModelConfig, TrainConfig
from examples.dlrm.synthetic import GeneratedLog
from examples.dlrm.trainer import Trainer
from tieredemb.lookup.rounding import Rounding

WAYS: tuple[tuple[str, Rounding], ...] = (
    ("fp32", "nearest"), ("bf16", "nearest"), ("bf16", "stochastic"), ("fp16", "nearest"), ("fp16", "stochastic"),
)  # fmt: skip
LOG_ROWS, SEEDS, BATCH = 3_000_000, 4, 512
MOST_LOST = 0.0005  # of AUC, that stochastic rounding may cost on the mean
STATISTIC = "Means of the seeds, and the least and the largest"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the command line asked for. `rows`: of the log."""

    rows: int
    rows_per_table: int
    seeds: int
    device: torch.device


def area_under_curve(labels: torch.Tensor, scores: torch.Tensor) -> float:
    """As `sklearn.metrics.roc_auc_score`, which machines with a GPU may lack: the share of pairs of a click and a
    non-click in which the click has the higher score, ties counting half."""
    clicked, other = scores[labels > 0.5].sort().values, scores[labels <= 0.5].sort().values
    below = torch.searchsorted(other, clicked, right=False) + torch.searchsorted(other, clicked, right=True)
    return float(below.double().sum() / 2 / (len(clicked) * len(other)))


def trained(plan: Plan, log: GeneratedLog, seed: int, dtype: str, rounding: Rounding) -> float:
    """The AUC of one run."""
    on_gpu = plan.device.type == "cuda"
    config = TrainConfig(
        model=ModelConfig(rows_per_table=plan.rows_per_table, dtype=dtype, rounding=rounding),
        cache=CacheConfig(capacity=0.2, prefetch=int(on_gpu)), batch_size=BATCH, device=plan.device.type, seed=seed,
        graph=on_gpu,
    )  # fmt: skip
    with Trainer(config, log) as trainer:
        trainer.run()
        return area_under_curve(*trainer.predict())


def records(plan: Plan) -> list[Record]:
    found: dict[tuple[str, Rounding], list[float]] = {way: [] for way in WAYS}
    for seed in range(plan.seeds):
        start, log = perf_counter(), GeneratedLog(rows=plan.rows, seed=seed)
        for way in WAYS:
            found[way].append(trained(plan, log, seed, *way))
        say(f"seed {seed}: {perf_counter() - start:.1f} s")
    whole, made = found[WAYS[0]], []
    for (dtype, rounding), scores in found.items():
        mean, lost = statistics.fmean(scores), [before - now for before, now in zip(whole, scores, strict=True)]
        of_seeds = Quantiles(mean, min(scores), max(scores), len(scores))
        note = ""
        if scores is not whole:
            note = f"{-statistics.fmean(lost):+.5f} beside fp32 ({-max(lost):+.5f} to {-min(lost):+.5f})"
        more = at_least(-statistics.fmean(lost), -MOST_LOST, "") if rounding == "stochastic" else {}
        made.append(measured("test AUC", "tieredemb", f"{dtype}, {rounding}", "", of_seeds, note=note, **more))
    return made


def title(plan: Plan) -> str:
    return (
        f"The example's DLRM at its default sizes ({plan.rows_per_table:,} rows a table, width 16, Adagrad), batch "
        f"{BATCH}, one pass over a generated log of {plan.rows:,} rows, of which the last 20 % are the test; "
        f"{plan.seeds} seeds, of the log, the model and the rounding."
    )


def plan_of(args: Sequence[str] | None = None) -> tuple[Plan, Path | None]:
    """The plan, and where its results go."""
    parser = make_parser("cuda_rounding", __doc__, rows=100_000)
    parser.add_argument("--log-rows", type=int, default=LOG_ROWS, help="of the log (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="runs of each way (default: %(default)s)")
    chosen = parse(parser, args)
    quick = Plan(rows=6000, rows_per_table=min(chosen.rows, 500), seeds=2, device=chosen.device)
    whole = Plan(rows=chosen.log_rows, rows_per_table=chosen.rows, seeds=chosen.seeds, device=chosen.device)
    return quick if chosen.quick else whole, chosen.results


def main(args: Sequence[str] | None = None) -> None:
    plan, results = plan_of(args)
    start = perf_counter()
    found = records(plan)
    keep(results, "cuda-rounding", title(plan), found, statistic=STATISTIC)
    say(f"{perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
