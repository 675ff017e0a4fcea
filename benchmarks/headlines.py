"""The figures that the README shows of all that were measured, and those that fall short of a bar or of a peer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.record import Record, load, load_each

ON_CPU = (
    "cpu-step",
    "cpu-converted",
    "cpu-dense",
    "cpu-shapes",
    "tiers",
    "cpu-optimizers",
    "cpu-kernels",
    "slot-map",
    "opening",
    "state",
    "sharding",
)
ON_GPU = (
    "cuda-step", "cuda-kernels", "cuda-dlrm", "cuda-inference", "cuda-tiers", "cuda-optimizers", "cuda-converted",
    "cuda-shapes", "cuda-rounding", "cuda-opening", "cuda-sharding",
)  # fmt: skip
PEERS = ("× torch", "× FBGEMM", "× nn.EmbeddingBag, eager")  # labels of ratios to what others need


class Headline(NamedTuple):
    """A record by its benchmark, op, config and provider. `means`: what `op` stands for, where that does not say it."""

    name: str
    op: str
    config: str
    provider: str = "tieredemb"
    means: str = ""


HEADLINES = (
    Headline("cpu-step", "SGD", "bags of 1", "tieredemb, all resident", "step on the CPU, all resident, SGD"),
    Headline("cpu-step", "Adagrad", "bags of 1", "tieredemb, all resident", "step on the CPU, all resident, Adagrad"),
    Headline("tiers", "SGD", "", "HostMemory, 10 %", "step on the CPU, cache of 10 %, SGD"),
    Headline("tiers", "SGD", "", "File in page cache, 10 %", "step on the CPU, cache of 10 % over a file, SGD"),
    Headline(
        "opening",
        "README's first example",
        "beyond the second",
        "first process",
        "a first process of the first example",
    ),
    Headline("opening", "open", "1,000,000,000 rows", "tieredemb on File", "open a new file"),
    Headline("cuda-dlrm", "DLRM step", "1 % cache, CUDA graph + prefetch"),
    Headline("cuda-dlrm", "HBM of the tables", "1 % cache"),
    Headline("cuda-dlrm", "HBM of the tables", "all resident"),
    Headline("cuda-dlrm", "DLRM step", "1 % cache, Adagrad, CUDA graph + prefetch"),
    Headline("cuda-step", "W-1.05", "520,000 slots, CUDA graph, prefetch"),
    Headline("cuda-step", "W-1.05", "1051MiB, CUDA graph, prefetch"),
    Headline("cuda-step", "W-1.2", "1051MiB, CUDA graph, prefetch"),
    Headline(
        "cuda-converted", "step", "capacity 10 %, prefetch", "tieredemb, converted", "26 tables converted in one line"
    ),
    Headline("cuda-converted", "step", "capacity 10 %, CUDA graph, prefetch", "tieredemb, converted", "the same"),
    Headline("cuda-inference", "lookup, all hits", "1 % cache, CUDA graph"),
)


def headlines(results: Path) -> Iterator[tuple[str, Record, dict[str, Any]]]:
    """(what was measured, its record, its run) of each headline that has been measured."""
    for name, op, config, provider, means in HEADLINES:
        if not (results / f"{name}.json").exists():
            continue
        run = load(results, name)
        for record in run["records"]:
            if (record.op, record.config, record.provider) == (op, config, provider):
                yield ", ".join(filter(None, (means or op, config))), record, run


def misses(results: Path) -> Iterator[tuple[str, Record, dict[str, Any]]]:
    """As `headlines`: all records that miss their bar, and those of this library that are slower than a peer."""
    for name in (*ON_CPU, *ON_GPU):
        if not (results / f"{name}.json").exists():
            continue
        for run in load_each(results, name):
            for record in run["records"]:
                ours = record.provider.startswith("tieredemb")
                slower = ours and record.ratio_label in PEERS and (record.ratio or 0.0) > 1.0
                if record.met is False or slower:  # bars are set for us, whatever the provider is called
                    yield ", ".join(filter(None, (record.op, record.config))), record, run
