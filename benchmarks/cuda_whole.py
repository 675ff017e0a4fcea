"""Losses that use tables as a whole on a GPU, beside torch: `python -m benchmarks.cuda_whole`.

Where a tenth of the rows is cached, the others cross PCIe in each step: to be read for the loss, again for the gradient
of the other factor, and to be updated. They are counted, and their rate is that of a swap alone in the same run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch

from benchmarks.cuda_command import barred, keep, make_parser, parse
from benchmarks.cuda_step import release, say
from benchmarks.cuda_swap import swap_requests_per_ms
from benchmarks.cuda_timing import synchronize
from benchmarks.record import Record, at_least, at_most, measured
from benchmarks.timing import Quantiles, interleave
from benchmarks.whole_models import MODELS, SCORES, WIDTH, Sizes, Trained

SIZES = Sizes(items=2_000_000, users=200_000, edges=5_000_000, fields=26, field_rows=200_000, batch=256)
CAPACITIES, WARM_UP, ROUNDS, STEPS = (1.0, 0.1), 3, 9, 5
TORCH = "torch"
MOST, LEAST = 1.3, 0.8  # of torch's time where all rows are cached · of a swap's rate where few are
PIECE = 128  # bytes of a request
OF_STATE = 4 * (2 * WIDTH + 1) // PIECE + 1  # requests: two moments and a step of each row, and its score
READ = 4 * WIDTH // PIECE + 1  # requests of a row that is read as it is now: its weights, and which step it stands at
UPDATED = 2 * (4 * WIDTH // PIECE + OF_STATE)  # read, and written


def records(sizes: Sizes, device: torch.device, *, quick: bool) -> list[Record]:
    rounds = 2 if quick else ROUNDS
    rate = None if device.type == "cpu" else swap_requests_per_ms()
    found: list[Record] = []
    for name in MODELS:
        start = perf_counter()
        found += _compare(name, sizes, device, rounds, rate, quick=quick)
        release(device)
        say(f"{name}: {perf_counter() - start:.1f} s")
    return found


def _compare(
    name: str, sizes: Sizes, device: torch.device, rounds: int, rate: float | None, *, quick: bool
) -> list[Record]:
    trained = {TORCH: Trained(name, sizes, None, device)}
    for share in CAPACITIES:
        trained[f"tieredemb, capacity {share:.0%}"] = Trained(name, sizes, share, device)
    turns = {provider: _turn(each, device) for provider, each in trained.items()}
    interleave(turns, [()] * WARM_UP)
    cached = trained[f"tieredemb, capacity {CAPACITIES[-1]:.0%}"]
    times = interleave(turns, [()] * rounds)
    found = []
    for provider in turns:
        more: dict[str, Any] = {}
        if provider != TORCH:
            ratio = times.ratio(provider, TORCH)
            more = {"ratio": ratio, "ratio_label": "× torch"}
            if provider.endswith(" 100%"):
                more |= barred(at_most(ratio, MOST), quick=quick)
        found.append(measured("step", provider, name, "ms", times.quantiles(provider), scale=1e3 / STEPS, **more))
    if name == SCORES and rate is not None:
        done = cached.stats()
        cold = sizes.items - (done.rows_filled - done.evictions)  # rows that are in no slot
        requests = cold * (2 * READ + UPDATED)
        milliseconds = times.quantiles(f"tieredemb, capacity {CAPACITIES[-1]:.0%}").median * 1e3 / STEPS
        share = requests / milliseconds / rate
        note = f"{cold:,} rows, {requests / 1e6:.1f} M requests a step; a swap alone makes {rate / 1e3:.0f} M/s"
        more = {"note": note} | barred(at_least(share, LEAST), quick=quick)
        found.append(measured("step, PCIe's share", "tieredemb", name, "", Quantiles(share, share, share, 1), **more))
    return found


def _turn(trained: Trained, device: torch.device) -> Callable[[], None]:
    def turn() -> None:
        for _ in range(STEPS):
            trained.step()
        synchronize(device)

    return turn


def main(args: Sequence[str] | None = None) -> None:
    parser = make_parser("cuda_whole", __doc__)
    chosen = parse(parser, args)
    sizes, rounds = (Sizes(), 2) if chosen.quick else (SIZES, ROUNDS)
    start = perf_counter()
    title = (
        f"Models whose losses use whole tables, as RecBole and FuxiCTR have them: {sizes}; forward, backward and "
        f"`step()` of torch.optim.Adam, fp32, {STEPS} steps a turn, all taking turns; {rounds} rounds after {WARM_UP} "
        f"of warm-up. Ratio: median over rounds."
    )
    keep(chosen.results, "cuda-whole", title, records(sizes, chosen.device, quick=chosen.quick), statistic="")
    say(f"{perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
