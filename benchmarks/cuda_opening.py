"""What stands before the first step on a GPU: `python -m benchmarks.cuda_opening`.

The first step of a process, with nothing compiled before it and with what an earlier process has left on disk; and
opening tables in unified memory that the machine has not touched before, then again, beside a plain fill of as many
bytes. Run it first on a machine: memory is fresh once. On a GPU; `--device cpu` tries the harness out.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import torch

from benchmarks.children import child
from benchmarks.cuda_command import barred, keep, make_parser, parse
from benchmarks.cuda_step import once, say
from benchmarks.cuda_workload import workloads
from benchmarks.record import Record, at_most, measured
from benchmarks.timing import Quantiles

FIRST_SECONDS, OPEN_SECONDS = 3.0, 2.0
RUNS = 3
TABLES = workloads()["W-1.2"]
PARTS = ("context", "import", "build", "forward", "backward")  # of a first step, behind `import torch`


def first_steps(device: torch.device, runs: int, *, quick: bool) -> list[Record]:
    """Each cold run has empty caches, and what the first has compiled is there for all warm ones."""
    with tempfile.TemporaryDirectory() as directory:

        def run(caches: str) -> dict[str, float]:
            at = Path(directory) / caches
            names = ("CUPY_CACHE_DIR", "CUDA_CACHE_PATH", "NUMBA_CACHE_DIR")
            # a quick run is to show that it runs, and need not wait for compilers
            return child("first_step_on", device.type, **({} if quick else {name: str(at / name) for name in names}))

        cold = [run(str(number)) for number in range(runs)]
        warm = [run("0") for _ in range(runs)]
    found = []
    for config, samples in (("nothing compiled before", cold), ("compiled by another process", warm)):
        seconds = Quantiles.of([sum(sample[part] for part in PARTS) for sample in samples])
        usual = sorted(samples, key=lambda sample: sum(sample[part] for part in PARTS))[len(samples) // 2]
        note = ", ".join(f"{part} {usual[part]:.2f} s" for part in PARTS)
        bar = barred(at_most(seconds.median, FIRST_SECONDS, " s"), quick=quick) if samples is cold else {}
        found.append(measured("first step beyond import torch", "tieredemb", config, "s", seconds, note=note, **bar))
    return found


def opened(device: torch.device, rows: int, *, quick: bool) -> list[Record]:
    """Opening in this order: memory that nobody has touched, then what the process before has left."""
    configs = ("memory never touched", "memory used before")
    samples = [child("open_tables", device.type, TABLES.tables, rows, TABLES.width) for _ in configs]
    size_bytes, found = int(samples[0]["bytes"]), []
    for config, sample in zip(configs, samples, strict=True):
        bar = barred(at_most(sample["seconds"], OPEN_SECONDS, " s"), quick=quick)
        op = f"open {size_bytes / 2**30:.1f} GiB"
        committed = f"all of it committed {sample['committed']:.1f} s after the beginning"
        found.append(
            measured(op, "tieredemb on UnifiedMemory", config, "s", once(sample["seconds"]), note=committed, **bar)
        )
    start = perf_counter()
    torch.empty(size_bytes, dtype=torch.uint8).fill_(0)
    seconds = perf_counter() - start
    threads = f"by {torch.get_num_threads()} threads"
    found.append(measured("fill as many bytes", "torch, host memory", threads, "s", once(seconds)))
    return found


def title(rows: int) -> str:
    return (
        f"Every figure in a fresh process. First step: everything between `import torch` and the end of the first "
        f"backward of a table of 1,000,000 × 64, 4,096 bags of 4 ids, row-wise Adagrad. Opening: {TABLES.tables} × "
        f"{rows:,} × {TABLES.width} fp32 with row-wise Adagrad in unified memory, on a machine that was just started."
    )


def main(args: Sequence[str] | None = None) -> None:
    chosen = parse(make_parser("cuda_opening", __doc__, rows=TABLES.rows), args)
    start, rows = perf_counter(), min(chosen.rows, 300) if chosen.quick else chosen.rows
    found = opened(chosen.device, rows, quick=chosen.quick)
    found += first_steps(chosen.device, 1 if chosen.quick else RUNS, quick=chosen.quick)
    keep(chosen.results, "cuda-opening", title(rows), found, statistic="Medians, 20–80 % in brackets")
    say(f"{perf_counter() - start:.0f} s in all, on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
