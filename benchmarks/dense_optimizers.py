"""What CPU and GPU measure of optimizers that move every row: which ones, and what rows cost that have missed steps.

A training forward brings each of its rows to the current step: at once, where the optimizer's steps have a closed form,
or by replaying those that the row has missed. What that takes is the difference between a forward of rows that were
last used some steps ago and the same forward once more, of rows that are at the current step by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

import tieredemb
from benchmarks.cuda_runs import a_batch
from benchmarks.cuda_timing import run_steps
from benchmarks.record import Record, measured
from benchmarks.timing import Quantiles
from tieredemb.cache.stats import CacheStats
from tieredemb.config import OptimizerConfig

BASELINE = "SparseAdam"  # moves the rows of a batch alone, with as large a state
OPTIMIZERS: dict[str, OptimizerConfig] = {
    BASELINE: tieredemb.SparseAdam(lr=1e-3),
    "Adam": tieredemb.Adam(lr=1e-3),
    "AdamW": tieredemb.AdamW(lr=1e-3),
    "Adam, weight_decay_on_use": tieredemb.Adam(lr=1e-3, weight_decay_on_use=1e-5),
}
MISSING_STEPS: dict[str, OptimizerConfig] = {
    "Adam": tieredemb.Adam(lr=1e-3),
    "Adam, weight_decay": tieredemb.Adam(lr=1e-3, weight_decay=1e-5),
    "SGD, momentum, weight_decay": tieredemb.SGD(lr=0.01, momentum=0.9, weight_decay=1e-5),
}


def of_mean_loss(gradient: torch.Tensor) -> torch.Tensor:
    """A random gradient of outputs, scaled in place to that of a mean loss: one over their number, where those of a sum
    would be 1. Moments then are as small as they are in training."""
    return gradient.div_(gradient.abs().mean() * gradient.numel())


@dataclass(frozen=True)
class Trained:
    """The tables of one optimizer, the offsets of its batches, and the gradient of its outputs in every step."""

    module: tieredemb.TieredEmbeddingBagCollection
    offsets: torch.Tensor
    gradient: torch.Tensor

    @property
    def device(self) -> torch.device:
        return self.offsets.device

    def step(self, ids: torch.Tensor) -> None:
        torch.autograd.backward(self.module(ids, self.offsets), self.gradient)


def replayed(done: CacheStats) -> str:
    """How many steps rows were made to take one by one, in words; none where none were."""
    return f"{a_batch(done.steps_replayed, done):,.0f} missed steps replayed a batch" if done.steps_replayed else ""


@dataclass(frozen=True, kw_only=True)
class LateRows:
    """`rows` × `width`, all rows of a batch, in one table that is resident; the steps that they have missed (`gaps`),
    how often each is measured, and how many steps were taken before the first."""

    rows: int
    width: int
    gaps: tuple[int, ...] = (1, 10, 100, 500)
    rounds: int = 10
    before: int = 600  # of Adam's first steps those that have no closed form are past

    def __str__(self) -> str:
        return (
            f"a training forward of {self.rows:,} rows × {self.width} of one resident table, all last used as many "
            f"steps ago, less the same forward of rows at the current step, whose own time stands first; "
            f"{self.before} steps had been taken before, median of {self.rounds} rounds"
        )


def late_records(size: LateRows, device: torch.device) -> list[Record]:
    """What rows cost that have missed steps, by optimizer and by how many, in nanoseconds a row."""
    records = []
    for name, optimizer in MISSING_STEPS.items():
        late = _Late(size, optimizer, device)
        now: list[float] = []
        by_gap = []
        for gap in size.gaps:
            more, steps = late.measure(gap, now)
            note = f"{Quantiles.of(more).median / steps:.2f} ns a step, {steps:g} of them replayed" if steps else ""
            config = f"{name}, {gap} steps missed" if gap > 1 else f"{name}, 1 step missed"
            by_gap.append(measured("catch up", "tieredemb", config, "ns a row", Quantiles.of(more), note=note))
        records += [measured("forward", "tieredemb", f"{name}, none missed", "ns a row", Quantiles.of(now)), *by_gap]
        late.module.close()
    return records


class _Late:
    """A table whose rows miss steps."""

    def __init__(self, size: LateRows, optimizer: OptimizerConfig, device: torch.device) -> None:
        self.size, self.device = size, device
        self.module = tieredemb.TieredEmbeddingBag(
            size.rows + 1, size.width, mode="sum", capacity=1.0, optimizer=optimizer, device=device
        )
        self.ids = torch.arange(size.rows, device=device)[:, None]
        self.other = torch.tensor([[size.rows]], device=device)
        self.gradient = of_mean_loss(torch.randn(size.rows, size.width, device=device))
        self.take(size.before)

    def take(self, steps: int) -> None:
        """Steps that use one other row."""
        for _ in range(steps):
            self.module(self.other).backward(self.gradient[:1])

    def measure(self, gap: int, now: list[float]) -> tuple[Sequence[float], float]:
        """Nanoseconds a row that a forward takes longer after `gap` missed steps, in each round, and how many of them
        a row has replayed. Adds to `now` what the forward takes of rows at the current step."""
        more = []
        replayed = 0
        for _ in range(self.size.rounds):
            self.module(self.ids).backward(self.gradient)
            self.take(gap)
            before = self.module.stats().steps_replayed
            late = self.forward_ns()
            replayed += self.module.stats().steps_replayed - before
            current = self.forward_ns()
            now.append(current)
            more.append(late - current)
        return more, replayed / (self.size.rounds * self.size.rows)

    def forward_ns(self) -> float:
        """A training forward, in nanoseconds a row."""
        [spent_ms] = run_steps(self.module, [self.ids], self.device).step_ms
        return float(spent_ms) * 1e6 / self.size.rows
