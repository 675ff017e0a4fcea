"""What stands before the first step: the import, compilation, opening a table far larger than memory."""

from __future__ import annotations

from pathlib import Path

from benchmarks.children import child
from benchmarks.conftest import Save
from benchmarks.record import Record, at_most, measured
from benchmarks.timing import Quantiles

IMPORT_SECONDS, OPEN_SECONDS, OPEN_MIB = 0.5, 2.0, 200.0
FIRST_SECONDS = {"README's first example": ("first_example", 4.0), "README's first cache-hit": ("first_command", 6.0)}
DISK = 1.05  # blocks over pages of the rows used: the filesystem's own extent blocks count too
MIB = 2**20


def bench_opening(keep: Save, quick: bool, tmp_path: Path) -> None:
    runs = 7 if not quick else 2
    rows = 1_000_000_000 if not quick else 1_000_000
    keep(
        "opening",
        "Every figure in fresh processes. Import: what `import tieredemb` adds after `import torch`. Beyond a process "
        "that finds all kernels on the disk: what compiling costs, on two cores. First step: the first forward, and "
        "backward with update, of a process, with and without kernels cached on disk by an earlier one; kernels are "
        f"counted that it compiles itself. Opening: {rows:,} × 64 fp32 on a new `File`, capacity 100,000 rows, then "
        "5 batches of 1,000 random ids.",
        [
            *_imports(runs),
            *_first_minute(min(runs, 5), tmp_path),
            *_first_steps(min(runs, 5), tmp_path / "kernels"),
            *_opening(min(runs, 5), rows, tmp_path),
        ],
    )


def _imports(runs: int) -> list[Record]:
    child("imports")  # files into the page cache, bytecode onto the disk
    samples = [child("imports") for _ in range(runs)]
    torch, ours = (Quantiles.of([sample[name] for sample in samples]) for name in ("torch", "tieredemb"))
    return [
        measured("import", "torch", "", "s", torch),
        measured(
            "import", "tieredemb, after torch", "", "s", ours,
            ratio=ours.median / torch.median, ratio_label="× import torch",
            **at_most(ours.median, IMPORT_SECONDS, " s"),
        ),
    ]  # fmt: skip


def _first_minute(runs: int, directory: Path) -> list[Record]:
    records = []
    for work, (job, most) in FIRST_SECONDS.items():
        cold, beyond, warm = [], [], []
        for run in range(runs):
            cache = str(directory / f"{job}{run}")
            first, again = (child(job, NUMBA_CACHE_DIR=cache)["seconds"] for _ in range(2))
            cold.append(first)
            warm.append(again)
            beyond.append(first - again)
        over = Quantiles.of(beyond)
        records += [
            measured(work, "first process", "nothing compiled", "s", Quantiles.of(cold)),
            measured(work, "second process", "kernels cached", "s", Quantiles.of(warm)),
            measured(work, "first process", "beyond the second", "s", over, **at_most(over.median, most, " s")),
        ]
    return records


def _first_steps(runs: int, cache: Path) -> list[Record]:
    cold = child("first_step", NUMBA_CACHE_DIR=str(cache))
    warm = [child("first_step", NUMBA_CACHE_DIR=str(cache)) for _ in range(runs)]
    compiled = max(sample["compiled"] for sample in warm)
    records = []
    for part in ("forward", "backward"):
        first, second = Quantiles.of([cold[part]]), Quantiles.of([sample[part] for sample in warm])
        records += [
            measured(f"first {part}", "first process", "kernels compiled", "s", first),
            measured(
                f"first {part}", "second process", "kernels cached", "s", second,
                ratio=second.median / first.median, ratio_label="× first process",
            ),
        ]  # fmt: skip
    counts = (Quantiles.of([cold["compiled"]]), Quantiles.of([sample["compiled"] for sample in warm]))
    return [
        *records,
        measured("kernels compiled", "first process", "", "", counts[0]),
        measured("kernels compiled", "second process", "", "", counts[1], **at_most(compiled, 0, "")),
    ]


def _opening(runs: int, rows: int, directory: Path) -> list[Record]:
    samples = []
    for run in range(runs):
        path = directory / f"rows{run}.tiered"
        samples.append(child("open_file", path, rows, min(100_000, rows // 10), 5, 1000))
        path.unlink()
    seconds, resident, disk, pages, trained = (
        Quantiles.of([sample[name] for sample in samples])
        for name in ("seconds", "resident", "disk_bytes", "pages_bytes", "train_seconds")
    )
    file_gib, used = samples[0]["file_bytes"] / 2**30, samples[0]["rows_used"]
    times = max(sample["disk_bytes"] / sample["pages_bytes"] for sample in samples)
    on_file = "tieredemb on File"
    return [
        measured(
            "open", on_file, f"{rows:,} rows", "s", seconds,
            note=f"a sparse file of {file_gib:,.0f} GiB", **at_most(seconds.median, OPEN_SECONDS, " s"),
        ),
        measured(
            "resident memory added by opening", on_file, f"{rows:,} rows", "MiB", resident, scale=1 / MIB,
            note="cache of 100,000 rows, map and numba included",
            **at_most(resident.median / MIB, OPEN_MIB, " MiB"),
        ),
        measured("train 5 batches, close", on_file, f"{rows:,} rows", "s", trained),
        measured(
            "disk blocks after training", on_file, f"{rows:,} rows", "MiB", disk, scale=1 / MIB,
            ratio=times, ratio_label="× the pages of the rows used", **at_most(times, DISK),
            note=f"{used:,} rows used, {pages.median / MIB:,.1f} MiB in pages of weights and of scores",
        ),
    ]  # fmt: skip
