"""What a run tells: a progress bar, a summary, a plot."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from examples.dlrm.optional import require
from examples.dlrm.progress import Point, Progress
from tieredemb.config import Capacity

_BLUE, _ORANGE, _GREY = "#0b62a4", "#c8500a", "#5a5a5a"


@dataclass(frozen=True)
class Scores:
    """On the held-out rows. log_loss: in nats; auc: NaN when all rows have one label."""

    auc: float
    log_loss: float


def score(labels: Tensor, probabilities: Tensor) -> Scores:
    """labels, probabilities: float64 (rows,), as `Trainer.predict` returns them."""
    metrics = require("sklearn.metrics", "scikit-learn", "measuring AUC and log loss")
    expected, given = labels.numpy(), probabilities.numpy()
    auc = metrics.roc_auc_score(expected, given) if 0 < expected.mean() < 1 else float("nan")
    return Scores(float(auc), float(metrics.log_loss(expected, given, labels=[0, 1])))


def capacity_text(capacity: Capacity) -> str:
    """A capacity as a reader wants it: "1 % of the rows", "5,000 rows", "512MiB"."""
    if isinstance(capacity, float):
        return f"{100 * capacity:g} % of the rows"
    return f"{capacity:,} rows" if isinstance(capacity, int) else capacity


def device_text(device: str) -> str:
    """What trains: "the CPU", or the GPU's name."""
    return "the CPU" if device == "cpu" else torch.cuda.get_device_name(device)


class Bar:
    """A progress bar that is there before log and tables are. It shows loss and hit rate of the last interval, and
    samples/s."""

    def __init__(self) -> None:
        tqdm = require("tqdm", "tqdm", "the progress bar").tqdm
        self._bar: Any = tqdm(desc="preparing log and tables", unit=" samples", unit_scale=True, dynamic_ncols=True)

    def begin(self, total: int, done: int) -> None:
        """The training begins: of `total` samples an earlier run trained `done`."""
        self._bar.reset(total)
        self._bar.n = self._bar.initial = done
        self._bar.set_description("training")

    def __call__(self, point: Point) -> None:
        self._bar.set_postfix_str(f"loss {point.loss:.4f}, hit rate {_percent(point.hit_rate)}", refresh=False)
        self._bar.update(point.samples - self._bar.n)

    def close(self) -> None:
        self._bar.close()


def last_tenth(points: list[Point]) -> Point:
    """Mean loss and hit rate over the last tenth of the intervals."""
    last = points[-max(1, len(points) // 10) :]
    loss = float(np.mean([point.loss for point in last]))
    # where batches are planned ahead, the last ones were looked up in an interval before
    looked_up = [point.hit_rate for point in last if not np.isnan(point.hit_rate)]
    return Point(last[-1].samples, loss, float(np.mean(looked_up)) if looked_up else float("nan"))


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run leaves to tell. tier: name of the cold tier; memory: the collection's `memory_report()`, empty for the
    reference; device: what trained; samples_per_second: without compiling; against_torch: see `comparison`, "" where it
    was not asked for."""

    progress: Progress
    scores: Scores
    tier: str
    memory: dict[str, Any]
    device: str
    samples_per_second: float
    against_torch: str = ""


def summary(run: Run, *, verbose: bool) -> str:
    """The run as a table of text: the memory, the hit rate and the distance from plain torch come last. `verbose`: with
    what was moved, and each allocation."""
    progress, last, stats = run.progress, last_tenth(run.progress.points), run.progress.stats
    lines = [
        ("train loss, all", f"{_mean_loss(progress.points):.4f}"),
        ("train loss, last tenth", f"{last.loss:.4f}"),
        ("test log loss", f"{run.scores.log_loss:.4f}"),
        ("test AUC", f"{run.scores.auc:.4f}"),
        ("samples/s", f"{run.samples_per_second:,.0f} on {run.device}, without compiling"),
    ]
    leaves = _leaves(run.memory)
    if stats.lookups and verbose:
        filled, written = _size(stats.bytes_filled), _size(stats.bytes_written_back)
        lines += [
            (f"moved {run.tier} → cache", f"{filled} ({stats.rows_filled:,} rows filled, new ones generated in place)"),
            (f"moved cache → {run.tier}", f"{written} ({stats.rows_written_back:,} rows written back)"),
            *((f"memory, {name}", _size(size)) for name, size in leaves),
        ]
    if stats.lookups:  # nothing to say of the reference, which has no cache
        cache, tables = (sum(size for name, size in leaves if f".{part}." in name) for part in ("cache", "cold"))
        share = f" ({100 * cache / tables:.2g} %)" if cache < tables else ""
        lines += [
            (
                "memory",
                f"{_size(cache)} of cache for {_size(tables)} of tables with optimizer state{share}, in {run.tier}",
            ),
            ("hit rate", f"{_percent(stats.hit_rate)} of lookups, {_percent(last.hit_rate)} in the last tenth"),
        ]
    if run.against_torch:
        lines.append(("against plain torch", run.against_torch))
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines)


def plot(path: Path, progress: Progress, scores: Scores, title: str) -> None:
    """Writes loss and hit rate over the samples trained, as a PNG (or what the suffix of `path` says)."""
    figure = require("matplotlib.figure", "matplotlib", "the plot").Figure(
        figsize=(8, 6), dpi=150, layout="constrained"
    )
    upper, lower = figure.subplots(2, 1, sharex=True)
    samples = np.array([point.samples for point in progress.points]) / 1000
    losses = np.array([point.loss for point in progress.points])
    upper.plot(
        samples,
        losses,
        color=_BLUE,
        alpha=0.35,
        linewidth=1,
        label=f"training, every {progress.points[0].samples:,} samples",
    )
    span = max(1, len(losses) // 10)
    if span > 1:
        mean = np.convolve(losses, np.ones(span) / span, mode="valid")
        upper.plot(samples[span - 1 :], mean, color=_BLUE, linewidth=2, label=f"mean of {span} of them")
    label = f"held-out rows at the end: {scores.log_loss:.4f}"
    upper.axhline(scores.log_loss, color=_GREY, linestyle="--", linewidth=1.5, label=label)
    upper.set_ylabel("log loss (nats)")
    upper.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=3, fontsize="small", borderaxespad=0.2)
    lower.plot(samples, 100 * np.array([point.hit_rate for point in progress.points]), color=_ORANGE, linewidth=2)
    lower.set_ylabel("cache hit rate (% of lookups)")
    lower.set_ylim(0, 100)
    lower.set_xlabel("samples trained (thousands)")
    for axes in (upper, lower):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.01)
    figure.suptitle(f"{title}\ntest AUC {scores.auc:.4f}, hit rate {_percent(progress.stats.hit_rate)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _mean_loss(points: list[Point]) -> float:
    """Mean over all samples; the points are intervals of nearly equal length."""
    samples = np.diff([0, *(point.samples for point in points)])
    return float(np.average([point.loss for point in points], weights=samples))


def _percent(share: float) -> str:
    return "–" if np.isnan(share) else f"{100 * share:.1f} %"


def _size(size_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if abs(size_bytes) < 1024:
            return f"{size_bytes:,.0f} {unit}" if unit == "B" else f"{size_bytes:,.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:,.1f} GiB"


def _leaves(report: dict[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    """(dotted name, bytes) of a nested report."""
    leaves: list[tuple[str, float]] = []
    for name, value in report.items():
        if isinstance(value, dict):
            leaves += _leaves(value, f"{prefix}{name}.")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            leaves.append((f"{prefix}{name}", value))
    return leaves
