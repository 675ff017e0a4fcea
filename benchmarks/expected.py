"""What a captured step with prefetch takes on one, two, four and eight GPUs of one host: as measured, or as predicted
from what two GPUs have shown."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.charts import Results
from benchmarks.record import figure_text

RESULTS = "cuda-sharding"  # of two ranks; those of more have their number behind
GRAPH = ", CUDA graph, prefetch"
RANKS = (2, 4, 8)
WORK = (
    ("W-1.05", "26 tables of 2,000,000 × 128, many rows in use"),
    ("W-1.2", "26 tables of 2,000,000 × 128, fewer rows in use"),
    ("W-kaggle", "the tables of Criteo Kaggle, 3 … 10,131,227 × 32"),
)
HEADS = ["tables", "one GPU", *(f"{ranks} GPUs" for ranks in RANKS)]


def rows(directory: Path) -> Iterator[list[str]]:
    """Of each work the ms of a step; and how many times as many samples a second as with one GPU."""
    results = Results(directory)
    for work, name in WORK:
        alone = results.one(RESULTS, "step", f"{work}, one GPU{GRAPH}").median
        texts = []
        for ranks in RANKS:
            took, how = of_ranks(results, work, ranks)
            texts.append(f"{figure_text(took)} ms{how}: {ranks * alone / took:.1f}×")
        yield [name, f"{figure_text(alone)} ms", *texts]


def of_ranks(results: Results, work: str, ranks: int) -> tuple[float, str]:
    """ms of a step, and whether they are predicted. A rank of W sends (W - 1) / W of what it needs to others, so the
    exchanges that two ranks take grow by that; all else is taken to stay as it is."""
    name = RESULTS if ranks == RANKS[0] else f"{RESULTS}-{ranks}"
    if results.has(name):
        return results.one(name, "step", f"{work}, sharded{GRAPH}").median, ""
    of_two = results.one(RESULTS, "step", f"{work}, sharded{GRAPH}").median
    exchanges = sum(
        results.one(RESULTS, "alone", f"{work}, all-to-all of as many bytes as {what}").median
        for what in ("ids", "rows", "gradients")
    )
    leaving = (ranks - 1) / ranks / ((RANKS[0] - 1) / RANKS[0])
    return of_two + (leaving - 1) * exchanges, " (predicted)"
