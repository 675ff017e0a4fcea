"""Losses that use a table as a whole, so that every row moves in every step: beside torch, converted in one line."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.conftest import Save
from benchmarks.record import Record, at_most, measured
from benchmarks.timing import interleave
from benchmarks.whole_models import MODELS, Sizes, Trained

SIZES = Sizes(items=100_000, users=20_000, edges=1_000_000, fields=26, field_rows=20_000, batch=256)
CAPACITIES, BAR, WARM_UP, ROUNDS = (1.0, 0.1), 1.3, 3, 9
TORCH = "torch"


def bench_cpu_whole(keep: Save, quick: bool) -> None:
    sizes = Sizes() if quick else SIZES
    warm_up, rounds = (1, 2) if quick else (WARM_UP, ROUNDS)
    found: list[Record] = []
    for name in MODELS:
        found += _compare(name, sizes, warm_up, rounds, quick=quick)
    keep(
        "cpu-whole",
        f"Models whose losses use whole tables, as RecBole and FuxiCTR have them: {sizes}; forward, backward and "
        f"`step()` of torch.optim.Adam, all taking turns; {rounds} rounds after {warm_up} of warm-up. Ratio: median "
        f"over rounds.",
        found,
    )


def _compare(name: str, sizes: Sizes, warm_up: int, rounds: int, *, quick: bool) -> list[Record]:
    device = torch.device("cpu")
    steps = {TORCH: Trained(name, sizes, None, device).step}
    steps |= {f"tieredemb, capacity {share:.0%}": Trained(name, sizes, share, device).step for share in CAPACITIES}
    interleave(steps, [()] * warm_up)
    times = interleave(steps, [()] * rounds)
    found = []
    for provider in steps:
        more: dict[str, Any] = {}
        if provider != TORCH:
            ratio = times.ratio(provider, TORCH)
            more = {"ratio": ratio, "ratio_label": "× torch"}
            if provider.endswith(" 100%") and not quick:
                more |= at_most(ratio, BAR)
        found.append(measured("step", provider, name, "ms", times.quantiles(provider), scale=1e3, **more))
    return found
