"""How unevenly ids are used: a law with two parts, its expected statistics, and its fit to published ones.

Meta published, for 788 production-like tables, how often an id is used in a batch of 131,072 samples
(facebookresearch/dlrm_datasets, 2022). No single power law has that shape: a heavy head (0.2 % of the used ids take
34 % of the accesses) sits on a broad body of ids used some 8 to 64 times. So a rank is drawn from one of two
Zipf–Mandelbrot laws, (rank + shift)^-exponent, in their integral form: distribution function and inverse are closed
formulas, exact for tables of any size.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from examples.dlrm.optional import require

Array = np.ndarray[Any, Any]
WINDOW = 131_072  # samples of a published batch
EDGES = 2 ** np.arange(16)  # uses of an id in the window: 1, 2, 4 … 32,768


@dataclass(frozen=True, kw_only=True)
class Law:
    """Rank-frequency law of a table. `head_share` of the accesses follow (rank + head_shift)^-head_exponent, the
    others (rank + body_shift)^-body_exponent, both cut at the table's number of ids. No exponent may be 1."""

    head_share: float
    head_shift: float
    head_exponent: float
    body_shift: float
    body_exponent: float

    def cumulative(self, rank: Array, ids: int) -> Array:
        """Share of the accesses that go to the `rank` most used of `ids` ids."""
        head = _cumulative(rank, self.head_shift, self.head_exponent, ids)
        body = _cumulative(rank, self.body_shift, self.body_exponent, ids)
        return np.asarray(self.head_share * head + (1 - self.head_share) * body)

    def ranks(self, part: Array, uniform: Array, ids: Array) -> Array:
        """Draws ranks 0 … ids - 1, int64, from two uniform numbers in [0, 1) each; shapes broadcast."""
        in_head = part < self.head_share
        shift = np.where(in_head, self.head_shift, self.body_shift)
        power = 1 - np.where(in_head, self.head_exponent, self.body_exponent)
        tail = np.expm1(power * np.log1p(ids / shift))
        rank = shift * np.expm1(np.log1p(uniform * tail) / power)
        return np.asarray(np.minimum(rank.astype(np.int64), ids - 1))


def _cumulative(rank: Array, shift: float, exponent: float, ids: int) -> Array:
    power = 1 - exponent
    return np.asarray(np.expm1(power * np.log1p(rank / shift)) / np.expm1(power * np.log1p(ids / shift)))


@dataclass(frozen=True)
class Locality:
    """Use counts of ids in a window. mean_uses: accesses a used id; ids: share of the used ids, (16,), that are used
    at most 1, 2, 4 … 32,768 times; accesses: share of the accesses, (16,), that go to them."""

    mean_uses: float
    ids: Array
    accesses: Array

    def residuals(self, target: Locality) -> Array:
        """Deviations from `target`: relative for the mean, in shares for the 32 points."""
        mean = [np.log(self.mean_uses / target.mean_uses)]
        return np.concatenate([mean, self.ids - target.ids, self.accesses - target.accesses])

    def beyond(self, uses: int) -> tuple[float, float]:
        """(share of ids, share of accesses) of the ids used more than `uses` times; `uses`: one of `EDGES`."""
        at = int(np.searchsorted(EDGES, uses))
        return 1 - float(self.ids[at]), 1 - float(self.accesses[at])


def read_published(path: str | Path) -> Locality:
    """The statistics in Meta's file, averaged over its batches. Raises `ValueError` where it holds none."""
    content = Path(path).read_text()
    means = [float(value) for value in re.findall(r"Avg col size: ([\d.]+)", content)]
    curves = [[float(v) for v in re.findall(r"[\d.]+", line)] for line in re.findall(r"^\['.*\]$", content, re.M)]
    if not means or len(curves) != 2 * len(means) or any(len(curve) != 18 for curve in curves):
        raise ValueError(f"{path} does not hold the locality statistics of facebookresearch/dlrm_datasets")
    # each batch prints two cumulative curves, of ids and of accesses, at 0, 1, 2, 4 … 32,768 and above
    ids, accesses = np.mean(curves[0::2], axis=0), np.mean(curves[1::2], axis=0)
    return Locality(float(np.mean(means)), ids[1:17], accesses[1:17])


def expected(law: Law, tables: Sequence[int], window: int = WINDOW) -> Locality:
    """Statistics of `window` samples with one id of each table, whose numbers of ids are `tables`; use counts are
    taken as Poisson. Ranks beyond 64 are taken in groups of about 7 %."""
    special = require("scipy.special", "scipy", "the expected locality")
    used = 0.0
    ids, accesses = np.zeros(len(EDGES)), np.zeros(len(EDGES))
    for size in tables:
        bounds = np.arange(min(size, 64) + 1)
        if size > 64:
            bounds = np.unique(np.concatenate([bounds, np.geomspace(64, size, 160).astype(np.int64)]))
        members = np.diff(bounds)
        uses = window * np.diff(law.cumulative(bounds, size)) / members
        unused = np.exp(-uses)
        used += float((members * (1 - unused)).sum())
        ids += (members * (special.pdtr(EDGES[:, None], uses) - unused)).sum(1)
        accesses += (members * uses * special.pdtr(EDGES[:, None] - 1, uses)).sum(1)
    total = window * len(tables)
    return Locality(total / used, ids / used, accesses / total)


def measured(columns: Iterable[Array]) -> Locality:
    """Statistics of a sample: one array of ids (any integers) for each table."""
    uses = np.concatenate([np.unique(column, return_counts=True)[1] for column in columns])
    at_most = uses[None, :] <= EDGES[:, None]
    return Locality(float(uses.mean()), at_most.mean(1), (at_most * uses).sum(1) / uses.sum())


def fit(target: Locality, tables: Sequence[int]) -> Law:
    """The law whose expected statistics over `tables` lie nearest to `target` (least squares over the mean and the
    32 points). Takes about ten seconds."""
    optimize = require("scipy.optimize", "scipy", "fitting the law")
    # unbounded coordinates: the logit of the share, the logarithms of the shifts
    solution = optimize.least_squares(
        lambda x: expected(_law(x), tables).residuals(target), [0.0, 0.0, 1.05, 9.0, 3.0], x_scale=[1, 1, 0.2, 1, 1]
    )
    return _law(solution.x)


def _law(x: Array) -> Law:
    return Law(
        head_share=float(1 / (1 + np.exp(-x[0]))),
        head_shift=float(np.exp(x[1])),
        head_exponent=float(x[2]),
        body_shift=float(np.exp(x[3])),
        body_exponent=float(x[4]),
    )


def rounded(law: Law) -> Law:
    """The law to four significant digits, as it is written into `synthetic.py`."""
    names = Law.__dataclass_fields__
    return Law(**{name: float(f"{value:.4g}") for name, value in zip(names, astuple(law), strict=True)})


def comparison(target: Locality, law: Law, tables: Sequence[int], sample: Locality) -> str:
    """A Markdown table of the published, the expected and the measured statistics."""
    columns = (target, expected(law, tables), sample)
    lines = ["| | published | fitted | measured |", "|---|---|---|---|"]
    lines.append("| mean uses of a used id | " + " | ".join(f"{c.mean_uses:.2f}" for c in columns) + " |")
    for uses in (512, 64, 16, 1):
        ids, accesses = zip(*(c.beyond(uses) for c in columns), strict=True)
        for name, shares in (("used ids", ids), ("accesses", accesses)):
            values = " | ".join(f"{100 * share:.2f} %" for share in shares)
            lines.append(f"| {name} with more than {uses} use{'s' * (uses > 1)} | {values} |")
    deviations = (c.residuals(target)[1:] for c in columns)
    worst = " | ".join(f"{100 * abs(d).max():.1f} (rms {100 * (d**2).mean() ** 0.5:.1f})" for d in deviations)
    return "\n".join([*lines, f"| largest deviation of the 32 points, percentage points | {worst} |"])
