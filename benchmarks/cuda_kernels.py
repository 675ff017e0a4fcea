"""The CUDA kernels one by one on a GPU: `python -m benchmarks.cuda_kernels [--only swap] [--results DIR]`.

Medians of device events over graph replays, each kernel's bytes as a share of the measured copy. Workload W-HBM:
26 tables × 1,000,000 × 128, batch 65,536, bags of 1 id, bounded Zipf 1.05, fp32, row-wise Adagrad. Rows move to and
from a unified table of 25 GiB (`cuda_swap`).
"""

from __future__ import annotations

import argparse
from collections.abc import Collection
from functools import partial
from pathlib import Path

import numpy as np
import torch

import tieredemb
from benchmarks.cuda_swap import swap_records
from benchmarks.cuda_timing import timed, zeros
from benchmarks.record import RESULTS, Record, at_least, at_most, measured, save
from benchmarks.timing import Quantiles
from tieredemb.kernels.compiler import OPTIONS, Kernel, blocks_for, meeting_blocks, options
from tieredemb.kernels.constants import CHUNK
from tieredemb.kernels.row_format import RowFormat
from tieredemb.kernels.source import read
from tieredemb.lookup.homes_sort import note_words, sort_homes
from tieredemb.lookup.optimizer import recipe_file, recipe_flags
from tieredemb.lookup.rounding import no_draws

TABLES, ROWS, BATCH, WIDTH, ALPHA = 26, 1_000_000, 65_536, 128, 1.05
FINDS = 1 << 24
GROUPS = ("map", "victims", "lookup", "update", "swap")
WORKLOAD = (
    "26 tables × 1,000,000 × 128, batch 65,536, bags of 1 id, ids Zipf 1.05, fp32, row-wise Adagrad; maps at load 0.5; "
    "swap and fill: random rows of a unified table of 52,000,000 × 128, their state and score included."
)


def zipf_keys() -> torch.Tensor:
    """Keys of one batch, table-major, int64 (T · B,): ranks mapped to ids by a permutation of each table."""
    weights = torch.arange(1, ROWS + 1, dtype=torch.double, device="cuda") ** -ALPHA
    cumulative = weights.cumsum(0) / weights.sum()
    parts = []
    for table in range(TABLES):
        ranks = torch.searchsorted(cumulative, torch.rand(BATCH, dtype=torch.double, device="cuda")).clamp(max=ROWS - 1)
        parts.append(torch.randperm(ROWS, device="cuda")[ranks] + table * ROWS)
    return torch.cat(parts)


def copy_bandwidth() -> tuple[Record, float]:
    """A copy of 4 GiB and its rate in bytes a millisecond, read and written."""
    source = torch.randn(2**30, device="cuda")
    target = torch.empty_like(source)
    samples = timed(lambda: target.copy_(source), graph=False)  # a graph would hand it to the slower copy engine
    moved = 2 * source.nbytes
    return measured("copy", "torch", "4 GiB", "ms", samples, moved_mb=moved / 1e6, share=1.0), moved / samples.median


def map_records(slots: int, bars: dict[str, float]) -> list[Record]:
    """Finds and inserts of a map of `slots` keys, in 10⁹ keys a second."""
    cells, keys = zeros(2 * slots, 2, dtype=torch.int64), torch.randperm(3 * slots, device="cuda")[:slots].contiguous()
    homes, count = torch.arange(slots, dtype=torch.int32, device="cuda"), torch.tensor([slots], device="cuda").int()
    insert = Kernel("hash/slot_map.cu", "slot_map_insert")
    find = Kernel("hash/slot_map.cu", "slot_map_find")
    empty = timed(cells.zero_)

    def fill() -> None:
        cells.zero_()
        insert(blocks_for(slots, 256, 32_768), 256, cells, len(cells), keys, homes, count)

    inserted = timed(fill)
    hits = keys[torch.randint(0, slots, (FINDS,), device="cuda")]
    absent = torch.randint(3 * slots, 6 * slots, (FINDS,), device="cuda")
    half = torch.where(torch.rand(FINDS, device="cuda") < 0.5, hits, absent)
    found = zeros(FINDS)
    records = [_rate("slot_map insert", slots, slots, inserted, empty.median, bars)]
    for op, wanted in (("slot_map find, hits", hits), ("slot_map find, half misses", half)):
        find(blocks_for(FINDS, 256), 256, cells, len(cells), wanted, FINDS, found)
        if not torch.equal((found >= 0), wanted < 3 * slots):
            raise RuntimeError(f"{op} is wrong")
        samples = timed(partial(find, blocks_for(FINDS, 256), 256, cells, len(cells), wanted, FINDS, found))
        records.append(_rate(op, slots, FINDS, samples, 0.0, bars))
    return records


def _rate(op: str, slots: int, keys: int, samples: Quantiles, less: float, bars: dict[str, float]) -> Record:
    """Keys a second of `samples` (ms), of which clearing the map takes `less`."""
    median, low, high = (keys / (ms - less) / 1e6 for ms in (samples.median, samples.p80, samples.p20))
    rates = Quantiles(median, low, high, samples.rounds)
    bar = at_least(rates.median, bars[op], "") if op in bars else {}
    return measured(op, "tieredemb", f"{slots:,} keys", "G keys/s", rates, **bar)


def victim_records(rate: float) -> list[Record]:
    """Choosing 100,000 of 10 million slots by (score, last batch)."""
    slots, needed = 10_000_000, torch.tensor([100_000], dtype=torch.int32, device="cuda")
    uniform = torch.rand(slots, device="cuda")
    score = (700 + 200 * uniform + torch.rand(slots, device="cuda") ** 8 * 8000).int()
    last = torch.randint(1, 300, (slots,), device="cuda", dtype=torch.int32)
    selection, victims, counts = zeros(read("cache/policy.cu").layout("Selection").size // 4), zeros(slots), zeros(28)
    counts[0], counts[2] = needed, slots  # missed, used
    clock = torch.tensor([300, 300, 1000, (290 << 32) | 300], device="cuda")
    select = Kernel("cache/policy.cu", "victims_select", options(), cooperative=True)
    blocks = meeting_blocks(torch.cuda.current_device())

    def choose() -> None:
        selection.zero_()
        select(blocks, 1024, selection, counts, clock, score, last, slots, 1024.0, 1, 0, victims)

    samples = timed(choose)
    moved = slots * (2 * 8 + 2 * 4 + 8)  # two digits of the score, two of the age, the pass that emits
    more = {"moved_mb": moved / 1e6, "share": moved / samples.median / rate} | at_most(samples.median, 0.2, " ms")
    return [measured("choose victims", "tieredemb", "10,000,000 slots, 100,000 victims", "ms", samples, **more)]


def lookup_records(rate: float, weight: torch.Tensor, homes: torch.Tensor) -> list[Record]:
    """The pooled lookup of all tables."""
    flags = options(torch.float32, WIDTH)
    pool = Kernel("lookup/embedding_bag.cu", "bags_pool", flags)
    offsets, mode = torch.arange(len(homes) + 1, device="cuda"), zeros(TABLES)
    column, out = torch.arange(TABLES, device="cuda") * WIDTH, torch.empty(BATCH, TABLES * WIDTH, device="cuda")
    blocks = blocks_for(TABLES * ((BATCH + 3) // 4) * 32, 256)
    samples = timed(
        lambda: pool(
            blocks, 256, weight, 0, 0, homes, offsets, BATCH, BATCH, len(homes), mode, column, 0, 0, out,
            TABLES * WIDTH, 0,
        )
    )  # fmt: skip
    if not torch.equal(out[7, :WIDTH], weight[homes[7].long()]):
        raise RuntimeError("the lookup is wrong")
    moved = 2 * out.nbytes
    more = {"moved_mb": moved / 1e6, "share": moved / samples.median / rate} | at_most(samples.median, 0.43, " ms")
    return [measured("lookup, W-HBM", "tieredemb", "", "ms", samples, **more)]


def update_records(rate: float, weight: torch.Tensor, homes: torch.Tensor) -> list[Record]:
    """Sorting, finding segments, and backward with row-wise Adagrad."""
    optimizer = tieredemb.RowWiseAdagrad()
    n, file = len(homes), recipe_file(optimizer)
    nearest = no_draws(file)
    flags = (*OPTIONS, *RowFormat(width=WIDTH, state_width=1).flags, *recipe_flags(optimizer))
    segments = Kernel(file, "segments_find", flags)
    short = Kernel(
        file,
        "segments_update",
        flags,
    )
    long = Kernel(file, "long_segments_update", flags)
    bag, bags, grad = (
        torch.arange(n, dtype=torch.int32, device="cuda"),
        zeros(n),
        torch.randn(BATCH, TABLES * WIDTH).cuda(),
    )
    column = torch.arange(TABLES, device="cuda") * WIDTH
    work, items, longs = zeros(4), zeros(n, 4), zeros(n // CHUNK + 1, 4)
    ordered, order = zeros(n), zeros(n)
    parts, state = torch.empty(2 * (n // CHUNK + 1), WIDTH, device="cuda"), torch.zeros(len(weight), 1, device="cuda")
    dirty, rates = zeros(len(weight), dtype=torch.uint8), torch.full((TABLES,), 0.01, device="cuda")
    numbers = torch.tensor([1e-8, 1.0], device="cuda")
    sort_homes(homes, bag, 0, items, ordered, order, bags)

    def find() -> None:
        work.zero_()
        segments(blocks_for(n, 256), 256, ordered, n, bags, BATCH, work, items, longs)

    def update() -> None:
        short(
            8448, 256, work, items, n, bags, BATCH, column, grad, 0, 0, TABLES * WIDTH, 0, 0, 0, 0, weight, state, 0,
            0, 0, dirty, rates, numbers, 0, parts, 0, 0, nearest,
        )  # fmt: skip
        long(132, 256, work, longs, parts, weight, state, 0, 0, 0, dirty, rates, numbers, 0, 0, 0, nearest)

    found = timed(find)
    samples = timed(update)
    unique = len(torch.unique(homes))
    moved = grad.nbytes + unique * 2 * (WIDTH + 1) * 4
    more = {"moved_mb": moved / 1e6, "share": moved / samples.median / rate} | at_most(samples.median, 0.6, " ms")
    return [
        *sort_records(homes),
        measured("segments, W-HBM", "tieredemb", "", "ms", found),
        measured("backward + update, W-HBM", "tieredemb", f"{unique:,} unique rows", "ms", samples, **more),
    ]


def sort_records(homes: torch.Tensor) -> list[Record]:
    """The sort of a long batch, which is torch's, and of one as long as W-small's beside torch's."""
    short = homes.view(TABLES, -1)[:, :2048].reshape(-1)
    n = len(short)
    bag = torch.arange(n, dtype=torch.int32, device="cuda")
    notes, room, found = zeros(note_words(n)), zeros(n, 4), [zeros(n) for _ in range(3)]

    def sort() -> None:
        notes.zero_()
        sort_homes(short, bag, notes.data_ptr(), room, *found)

    own, theirs = timed(sort), timed(lambda: torch.sort(short, stable=True))
    if not torch.equal(found[1].long(), torch.sort(short, stable=True).indices):
        raise RuntimeError("the sort is wrong")
    return [
        measured("sort, W-HBM", "torch.sort", "", "ms", timed(lambda: torch.sort(homes, stable=True))),
        measured("sort, W-small", "torch.sort", "", "ms", theirs),
        measured("sort, W-small", "tieredemb", "", "ms", own, **at_most(own.median, 0.045, " ms")),
    ]


def measure(only: Collection[str]) -> list[Record]:
    """Records of the chosen `GROUPS`; the copy is always measured, as the others are compared with it."""
    copied, rate = copy_bandwidth()
    records = [copied]
    if "map" in only:
        bars = {"slot_map insert": 13.0, "slot_map find, hits": 32.0, "slot_map find, half misses": 28.0}
        records += [*map_records(10_000_000, bars), *map_records(50_000_000, {"slot_map find, hits": 28.0})]
    if "victims" in only:
        records += victim_records(rate)
    if {"lookup", "update"} & set(only):
        weight, homes = torch.randn(TABLES * ROWS, WIDTH, device="cuda"), zipf_keys().int()
        records += lookup_records(rate, weight, homes) if "lookup" in only else []
        records += update_records(rate, weight, homes) if "update" in only else []
        del weight, homes
    if "swap" in only:
        records += swap_records()
    return records


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cuda_kernels", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=GROUPS, help="measure these and keep nothing")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no GPU: torch.cuda.is_available() is false")
    torch.manual_seed(0)
    np.random.seed(0)
    records = measure(chosen.only)
    if chosen.only == GROUPS:
        save(chosen.results, "cuda-kernels", WORKLOAD, records)
    for record in records:
        verdict = "" if record.met is None else f"{record.bar}: {'met' if record.met else 'missed'}"
        share = "" if record.share is None else f"{record.share:.0%} of the copy"
        print(f"{record.op:28} {record.config:36} {record.median:8.3g} {record.unit:9} {share:18} {verdict}")


if __name__ == "__main__":
    main()
