"""`slot_map` find against `numpy.searchsorted` over the sorted keys, from 10^4 to 10^7 keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.conftest import Save
from benchmarks.record import Record, at_least, measured
from benchmarks.timing import Interleaved, interleave
from tieredemb.hash.slot_map_cpu import SlotMap

IDS = 1 << 20  # looked up a call: their cache lines alone exceed the last-level cache
SIZES = (10_000, 31_623, 100_000, 316_228, 1_000_000, 3_162_278, 10_000_000)
BARRED = (1_000_000, 10_000_000)
FASTER, SCALES = 3.0, 1.7
SEARCH, ONE, TWO = "numpy.searchsorted", "slot_map, 1 thread", "slot_map, 2 threads"
Array = np.ndarray[Any, Any]


def bench_slot_map(keep: Save, quick: bool, results: Path) -> None:
    sizes, ids, rounds = (SIZES, IDS, 7) if not quick else ((10_000, 100_000), 1 << 14, 3)
    times = {keys: _time(keys, ids, rounds) for keys in sizes}
    keep(
        "slot-map",
        f"{ids:,} random ids, all present, looked up among random int64 keys; load 0.5; providers taking turns. "
        f"Nanoseconds an id; ratio: median over the rounds.",
        [record for keys, of_size in times.items() for record in _records(keys, ids, of_size)],
    )
    _plot(times, ids, results / "slot-map.png")


def _time(keys: int, ids: int, rounds: int) -> Interleaved:
    rng = np.random.default_rng(keys)
    ordered = np.unique(rng.integers(0, 2**47, keys + keys // 100))[:keys]
    stored = rng.permutation(ordered)
    slot_map = SlotMap(keys)
    slot_map.insert(stored, np.arange(keys, dtype=np.int32))
    wanted = [(stored[rng.integers(0, keys, ids)],) for _ in range(3)]

    def find(threads: int, queries: Array) -> Array:
        torch.set_num_threads(threads)
        return slot_map.find(queries)

    steps = {
        SEARCH: lambda queries: np.searchsorted(ordered, queries),
        ONE: lambda queries: find(1, queries),
        TWO: lambda queries: find(2, queries),
    }
    np.testing.assert_array_equal(stored[find(1, wanted[0][0])], wanted[0][0])
    interleave(steps, wanted[:1])
    return interleave(steps, [wanted[i % len(wanted)] for i in range(rounds)])


def _records(keys: int, ids: int, times: Interleaved) -> list[Record]:
    faster, scales = 1 / times.ratio(ONE, SEARCH), 1 / times.ratio(TWO, ONE)
    barred = keys in BARRED
    config, scale = f"{keys:,} keys", 1e9 / ids
    return [
        measured("find", SEARCH, config, "ns", times.quantiles(SEARCH), scale=scale),
        measured(
            "find", ONE, config, "ns", times.quantiles(ONE), scale=scale,
            ratio=faster, ratio_label="× as fast as searchsorted", **(at_least(faster, FASTER) if barred else {}),
        ),
        measured(
            "find", TWO, config, "ns", times.quantiles(TWO), scale=scale,
            ratio=scales, ratio_label="× as fast as 1 thread", **(at_least(scales, SCALES) if barred else {}),
        ),
    ]  # fmt: skip


def _plot(times: dict[int, Interleaved], ids: int, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    keys = list(times)
    for provider, color in ((SEARCH, "tab:gray"), (ONE, "tab:blue"), (TWO, "tab:orange")):
        spread = [times[size].quantiles(provider) for size in keys]
        medians = [1e9 / ids * q.median for q in spread]
        axes.plot(keys, medians, "o-", color=color, label=provider)
        low, high = ([1e9 / ids * getattr(q, name) for q in spread] for name in ("p20", "p80"))
        axes.fill_between(keys, low, high, color=color, alpha=0.15, linewidth=0)
        below = provider == TWO  # the lowest line
        at: dict[str, Any] = {
            "xytext": (0, -8 if below else 7),
            "textcoords": "offset points",
            "va": "top" if below else "bottom",
        }
        axes.annotate(f"{medians[-1]:,.0f} ns", (keys[-1], medians[-1]), ha="center", **at)
    axes.set(xscale="log", yscale="log", xlabel="keys", ylabel="nanoseconds an id", title="Finding an id's slot")
    axes.margins(x=0.08, y=0.12)
    axes.grid(which="major", alpha=0.3)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
