"""The charts of README and docs: which figures of the results each of them shows.

`charts_plot` draws them. A picture carries a digest of what it shows, so `--check` of `tables` finds one that is out of
step without drawing it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import ROOT
from benchmarks.record import Record, load, number

PICTURES = ROOT / "docs" / "benchmarks"


@dataclass(frozen=True)
class Bar:
    """`values`: one a panel; None where there is none. `series`: what it has a colour for."""

    label: str
    series: str
    values: tuple[float | None, ...]


@dataclass(frozen=True)
class Bars:
    """Groups of bars, by name. `panels`: what their values are · `line`: drawn in each panel, with its name."""

    title: str
    panels: tuple[str, ...]
    groups: tuple[tuple[str, tuple[Bar, ...]], ...]
    line: tuple[float, str] | None = None


@dataclass(frozen=True)
class Lines:
    """Lines by name, of (x, y) each."""

    title: str
    x: str
    y: str
    lines: tuple[tuple[str, tuple[tuple[float, float], ...]], ...]


# its title, its series, and rows: each has a name and a ratio for each series
DotPanel = tuple[str, tuple[str, ...], tuple[tuple[str, tuple[float, ...]], ...]]


@dataclass(frozen=True)
class Dots:
    """Ratios around 1, in panels."""

    title: str
    panels: tuple[DotPanel, ...]


Chart = Bars | Lines | Dots


class Results:
    """Records of the latest runs."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def has(self, name: str) -> bool:
        return (self.directory / f"{name}.json").exists()

    def where(self, name: str) -> str:
        """On how many cores of a CPU the benchmark ran."""
        cores = int(load(self.directory, name)["machine"]["cores"])
        return "on one core" if cores == 1 else f"on {cores} cores"

    def of(self, name: str, op: str, config: str | None = None, provider: str | None = None) -> list[Record]:
        """All records of an op; `config` and `provider` may be left out."""
        return [
            record
            for record in load(self.directory, name)["records"]
            if record.op == op and config in (None, record.config) and provider in (None, record.provider)
        ]

    def one(self, name: str, op: str, config: str, provider: str | None = None) -> Record:
        found = self.of(name, op, config, provider)
        if len(found) != 1:
            raise ValueError(f"{len(found)} records of {name} are {op!r}, {config!r}, {provider}: one was expected")
        return found[0]


# --- the charts -----------------------------------------------------------------------------------------------------

GRAPH = ", CUDA graph, prefetch"
EQUAL = (  # op, what its tables are, capacities and what these are
    ("W-1.05", "26 tables of 2,000,000 × 128, many rows in use",
     (("520,000 slots", "1 % of the rows"), ("1051MiB", "the same memory"))),
    ("W-1.2", "26 tables of 2,000,000 × 128, fewer rows in use",
     (("520,000 slots", "1 % of the rows"), ("1051MiB", "the same memory"))),
    ("W-kaggle", "the tables of Criteo Kaggle, 3 … 10,131,227 × 32", (("337,625 slots", "1 % of the rows"),)),
)  # fmt: skip


def step(results: Results) -> Bars:
    """Time of a step and memory, beside FBGEMM."""
    groups = []
    for op, name, capacities in EQUAL:
        first = capacities[0][0]
        theirs = results.one("cuda-step", op, f"LFU cache of 1 %, managed, by turns with {first}")
        memory = results.one("cuda-step", f"{op}, HBM of the cache", first)
        bars = [Bar("FBGEMM, 1 % of the rows", "FBGEMM", (theirs.median, number(memory.peer)))]
        for capacity, means in capacities:
            mib = results.one("cuda-step", f"{op}, HBM of the cache", capacity).median
            for mode, of_mode in (("", "eager"), (GRAPH, "CUDA graph, prefetch")):
                ms = results.one("cuda-step", op, capacity + mode, "tieredemb").median
                bars.append(Bar(f"tieredemb, {means}, {of_mode}", f"tieredemb, {of_mode}", (ms, mib)))
        groups.append((name, tuple(bars)))
    return Bars("A training step on an H200", ("ms a step", "MiB of GPU memory for the cache"), tuple(groups))


def shapes(results: Results) -> Dots:
    """Shapes that nobody chose, on the CPU beside torch and on a GPU beside FBGEMM."""
    panels = [_cpu_shapes(results)]
    if results.has("cuda-shapes"):
        panels.append(_gpu_shapes(results))
    return Dots("Shapes drawn by a seed: time by the other library's", tuple(panels))


def _cpu_shapes(results: Results) -> DotPanel:
    ours, rows = "tieredemb, converted", []
    for record in results.of("cpu-shapes", "step", provider=ours):
        dense = ratio(results.one("cpu-shapes", "step", record.config, "torch, dense gradients"))
        lookup = ratio(results.one("cpu-shapes", "lookup", record.config, ours))
        rows.append((record.config, (ratio(record), ratio(record) / dense, lookup)))
    series = ("step / torch's, sparse gradients", "step / torch's, dense gradients", "lookup / torch's")
    return f"{results.where('cpu-shapes')}: converted in one line, 10 % of the rows cached", series, tuple(rows)


def _gpu_shapes(results: Results) -> DotPanel:
    rows = []
    for record in results.of("cuda-shapes", "step", provider="tieredemb"):
        if record.config.endswith(" cached"):
            graph = ratio(results.one("cuda-shapes", "step", record.config + GRAPH, "tieredemb"))
            rows.append((record.config, (ratio(record), graph)))
    series = ("eager step / FBGEMM's", "CUDA graph, prefetch / FBGEMM's eager step")
    return "on a GPU: one collection", series, tuple(rows)


def limits(results: Results) -> Bars:
    """How close the largest parts of a step are to what the hardware can do."""
    steps = []
    for op, name in (("W-1.05", "many rows in use"), ("W-1.2", "fewer rows in use")):
        for capacity, means in EQUAL[0][2]:
            part = results.one("cuda-step", f"{op}, PCIe's share", capacity + GRAPH).median
            steps.append(Bar(f"{name}, {means}", "of PCIe", (100 * part,)))
    kernels = [
        Bar(name, "of a copy on the GPU", (100 * share(results.one("cuda-kernels", op, config)),))
        for name, op, config in (
            ("lookup of bags", "lookup, W-HBM", ""),
            ("backward and update", "backward + update, W-HBM", "562,486 unique rows"),
            ("choice of victims", "choose victims", "10,000,000 slots, 100,000 victims"),
        )
    ]
    cpu = [
        Bar(name, "of a copy by the CPU", (100 * share(results.one("cpu-kernels", op, "")),))
        for name, op in (
            ("lookup of bags", "pool"),
            ("backward and update", "update"),
            ("search of ids in the hash map", "find"),
            ("fill of missed rows", "fill missed rows"),
        )
    ]
    return Bars(
        "Share of the hardware's limit",
        ("% of what PCIe or a plain copy reaches",),
        (
            ("whole steps on an H200", tuple(steps)),
            ("kernels on an H200", tuple(kernels)),
            (f"kernels {results.where('cpu-kernels')}", tuple(cpu)),
        ),
        line=(100.0, "the limit"),
    )


def sizes(results: Results) -> Lines:
    """What a step costs by the size of the tables, under torch's dense Adam."""
    lines = []
    for provider, name in (("torch, nn.EmbeddingBag", "torch"), ("tieredemb, converted", "converted, 10 % cached")):
        points = [
            (number(record.config), record.median) for record in results.of("cpu-dense", "step, Adam", None, provider)
        ]
        lines.append((name, tuple(points)))
    title = f"A step of 26 tables × 16 under torch's dense Adam, {results.where('cpu-dense')}"
    return Lines(title, "rows of each table", "ms a step", tuple(lines))


def gpus(results: Results) -> Bars:
    """A step of two GPUs by that of one, which has half as many samples."""
    groups = []
    work = (
        ("W-1.05", "many rows in use"), ("W-1.2", "fewer rows in use"),
        ("W-kaggle", "the tables of Criteo Kaggle"), ("DLRM", "a whole DLRM"),
    )  # fmt: skip
    for op, name in work:
        bars = []
        for mode, of_mode in (("", "eager"), (", CUDA graph", "CUDA graph"), (GRAPH, "CUDA graph, prefetch")):
            record = results.one("cuda-sharding", "step", f"{op}, sharded{mode}")
            bars.append(Bar(of_mode, f"tieredemb, {of_mode}", (ratio(record),)))
        groups.append((name, tuple(bars)))
    return Bars(
        "Two H200s with twice the samples",
        ("time of a step by that of one GPU",),
        tuple(groups),
        line=(1.0, "one GPU"),
    )


CHARTS: dict[str, Callable[[Results], Chart]] = {
    "step": step,
    "shapes": shapes,
    "limits": limits,
    "sizes": sizes,
    "gpus": gpus,
}


def ratio(record: Record) -> float:
    if record.ratio is None:
        raise ValueError(f"{record} has no ratio")
    return record.ratio


def share(record: Record) -> float:
    if record.share is None:
        raise ValueError(f"{record} has no share")
    return record.share


# --- pictures -------------------------------------------------------------------------------------------------------


def digest(chart: Chart) -> str:
    """Of what a picture shows, and of how it is drawn."""
    drawn = Path(__file__).with_name("charts_plot.py").read_bytes()
    return hashlib.sha256(repr(chart).encode() + drawn).hexdigest()


def pictures(results: Path, directory: Path = PICTURES) -> Iterator[tuple[Path, Chart, bool]]:
    """Each picture's path, what it shows, and whether the file there shows it."""
    for name, chart_of in CHARTS.items():
        path, chart = directory / f"{name}.svg", chart_of(Results(results))
        yield path, chart, path.exists() and digest(chart) in path.read_text()


def write(results: Path, directory: Path = PICTURES) -> None:
    """Draws the pictures that are out of step."""
    from benchmarks.charts_plot import save

    for path, chart, in_step in pictures(results, directory):
        if not in_step:
            save(chart, path, digest(chart))
