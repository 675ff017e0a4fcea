"""The figures that the README shows of all that were measured, and those that fall short of a target or of a peer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.record import Record, figure_text, load, load_each, number

ON_CPU = (
    "cpu-step",
    "cpu-converted",
    "cpu-dense",
    "cpu-whole",
    "cpu-decay",
    "cpu-reading",
    "cpu-shapes",
    "cpu-widths",
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
    "cuda-shapes", "cuda-loops", "cuda-rounding", "cuda-opening", "cuda-sharding", "cuda-host", "cuda-whole",
)  # fmt: skip
PEERS = ("× torch", "× FBGEMM", "× nn.EmbeddingBag, eager")  # labels of ratios to what others need


class Figure(NamedTuple):
    """One number of the results: `field` of the records of a benchmark, op, config and provider. Where several fit, as
    config may be left out or a pattern, `of` chooses."""

    name: str
    op: str
    config: str | re.Pattern[str] | None = None
    provider: str = "tieredemb"
    field: str = "median"
    of: Callable[[Iterable[float]], float] = min

    def fits(self, record: Record) -> bool:
        """Whether it is a number of this record."""
        is_its_config = self.config in (None, record.config)
        if isinstance(self.config, re.Pattern):
            is_its_config = self.config.search(record.config) is not None
        is_its_work = record.op == self.op and record.provider == self.provider
        return is_its_work and is_its_config and getattr(record, self.field) is not None


class Headline(NamedTuple):
    """A sentence of the README, with the figures that stand in it."""

    sentence: str
    figures: dict[str, Figure]


CONVERTED, EACH = "tieredemb, converted", "100,000 rows a table"
EAGER, GRAPH_AHEAD = re.compile(r"% cached$"), re.compile(r"CUDA graph, prefetch$")
HEADLINES = (
    Headline(
        "**Training on a CPU.** A step of 26 tables of 100,000 × 16 under torch's dense Adam takes {torch} ms. "
        "Converted in one line, with a tenth of the rows in the cache, it takes {ours} ms.",
        {
            "torch": Figure("cpu-dense", "step, Adam", EACH, "torch, nn.EmbeddingBag"),
            "ours": Figure("cpu-dense", "step, Adam", EACH, CONVERTED),
        },
    ),
    Headline(
        "**Training on a GPU, beside FBGEMM.** Of 26 tables of 2,000,000 × 128, FBGEMM's cache holds 1 % and a step "
        "takes {fbgemm} ms. tieredemb takes {eager} ms in the same GPU memory, and {graph} ms as a CUDA graph that "
        "fetches ahead.",
        {
            "fbgemm": Figure("cuda-step", "W-1.05", "LFU cache of 1 %, managed, by turns with 1051MiB", "FBGEMM"),
            "eager": Figure("cuda-step", "W-1.05", "1051MiB"),
            "graph": Figure("cuda-step", "W-1.05", "1051MiB, CUDA graph, prefetch"),
        },
    ),
    Headline(
        "**GPU memory.** The tables of a DLRM take {cached} MiB of GPU memory with a cache of 1 %, and {whole} MiB "
        "held whole. With the cache, a step takes {ratio} times as long as with whole tables.",
        {
            "cached": Figure("cuda-dlrm", "HBM of the tables", "1 % cache"),
            "whole": Figure("cuda-dlrm", "HBM of the tables", "all resident"),
            "ratio": Figure("cuda-dlrm", "DLRM step", "1 % cache, CUDA graph + prefetch", field="ratio"),
        },
    ),
    Headline(
        "**Serving on a GPU.** A lookup of 256 samples in 26 tables takes {ours} µs as a CUDA graph, and {torch} µs by "
        "`nn.EmbeddingBag` without one.",
        {
            "torch": Figure("cuda-inference", "lookup, all hits", "all resident, eager", "nn.EmbeddingBag × 26"),
            "ours": Figure("cuda-inference", "lookup, all hits", "1 % cache, CUDA graph"),
        },
    ),
    Headline(
        "**Shapes drawn at random, on a GPU.** Of tables of very different sizes with jagged bags, a step takes "
        "{fast} to {slow} times as long as FBGEMM's, and {graph_fast} to {graph_slow} times as a CUDA graph that "
        "fetches ahead.",
        {
            "fast": Figure("cuda-shapes", "step", EAGER, field="ratio", of=min),
            "slow": Figure("cuda-shapes", "step", EAGER, field="ratio", of=max),
            "graph_fast": Figure("cuda-shapes", "step", GRAPH_AHEAD, field="ratio", of=min),
            "graph_slow": Figure("cuda-shapes", "step", GRAPH_AHEAD, field="ratio", of=max),
        },
    ),
    Headline(
        "**Where it is slower.** For table shapes drawn at random, a converted model's step on the CPU takes {least} "
        "to {most} times as long as with torch's sparse gradients, and a lookup alone {low} to {high} times.",
        {
            "least": Figure("cpu-shapes", "step", None, CONVERTED, "ratio", min),
            "most": Figure("cpu-shapes", "step", None, CONVERTED, "ratio", max),
            "low": Figure("cpu-shapes", "lookup", None, CONVERTED, "ratio", min),
            "high": Figure("cpu-shapes", "lookup", None, CONVERTED, "ratio", max),
        },
    ),
)


def headlines(results: Path) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """(sentence, runs that its figures are of) of each headline."""
    for sentence, figures in HEADLINES:
        values, runs = {}, []
        for key, figure in figures.items():
            run = load(results, figure.name)
            found = [getattr(record, figure.field) for record in run["records"] if figure.fits(record)]
            if not found:
                raise ValueError(f"no record of {figure.name} is {figure}")
            values[key] = figure_text(figure.of(found))
            runs.append(run)
        yield sentence.format(**values), runs


class Miss(NamedTuple):
    """A record that misses its target, or that is slower than what it is compared with. `name`: of its benchmark."""

    name: str
    record: Record

    @property
    def what(self) -> str:
        return ", ".join(filter(None, (self.record.op, self.record.config)))

    @property
    def beyond(self) -> float:
        """How far it is beyond its target, or the peer, as a share of that."""
        record = self.record
        if record.met is not False:
            return (record.ratio or 0.0) - 1.0
        target = number(record.bar)
        value = record.ratio if record.ratio is not None and record.bar.endswith("×") else record.median
        return value / target - 1.0 if record.bar.startswith("≤") else target / value - 1.0


def misses(results: Path) -> Iterator[Miss]:
    """All records that miss their target, and those of this library that are slower than a peer."""
    for name in (*ON_CPU, *ON_GPU):
        if not (results / f"{name}.json").exists():
            continue
        for run in load_each(results, name):
            for record in run["records"]:
                ours = record.provider.startswith("tieredemb")
                slower = ours and record.ratio_label in PEERS and (record.ratio or 0.0) > 1.0
                if record.met is False or slower:  # targets are set for us, whatever the provider is called
                    yield Miss(name, record)
