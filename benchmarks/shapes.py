"""Shapes that nobody chose: tables, rows, widths, bags and batches drawn by a seed, small tables among large ones.

The other benchmarks have tables of one size and bags of one id, as the papers have. Models have neither.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import torch

from benchmarks.cuda_workload import cumulative

ALPHA = 1.1  # of the Zipf law that ids follow, mapped to rows by a random permutation
SMALLEST = 1.0  # decimal logarithm of the fewest rows
Jagged = tuple[torch.Tensor, torch.Tensor]  # ids int64 (N,) and offsets int64 (B + 1,)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What shapes are drawn from. `largest`: decimal logarithm of the most rows · `bags`: mean ids of a bag ·
    `shares`: of the rows, that a cache holds · `most_ids`, `most_bytes`: of a batch, of all weights."""

    tables: tuple[int, ...]
    widths: tuple[tuple[int, ...], ...]
    largest: float
    bags: tuple[int, ...]
    batches: tuple[int, ...]
    shares: tuple[float, ...]
    most_ids: int
    most_bytes: int


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Tables of `sizes` (rows) × `widths`, with bags of 0 … 2 · `bags` - 1 ids, or of 1; `share` of the rows are
    cached."""

    seed: int
    sizes: tuple[int, ...]
    widths: tuple[int, ...]
    bags: tuple[int, ...]
    batch: int
    share: float

    @property
    def mean_ids(self) -> int:
        """Ids of a batch."""
        return self.batch * sum(self.bags)

    def __str__(self) -> str:
        rows = f"{min(self.sizes):,}–{max(self.sizes):,}"
        widths = "/".join(map(str, sorted(set(self.widths))))
        bags = "/".join(map(str, sorted(set(self.bags))))
        return f"{len(self.sizes)} tables of {rows} rows × {widths}, bags of {bags}, batch {self.batch:,}"


def draw(seed: int, limits: Limits) -> Shape:
    random = Random(seed)
    tables, widths = random.choice(limits.tables), random.choice(limits.widths)
    width = [random.choice(widths) for _ in range(tables)]
    rows = [int(10 ** random.uniform(SMALLEST, limits.largest)) for _ in range(tables)]
    bags = [random.choice(limits.bags) for _ in range(tables)]
    batch, share = random.choice(limits.batches), random.choice(limits.shares)
    while batch * sum(bags) > limits.most_ids:
        batch //= 2
    while 4 * sum(r * w for r, w in zip(rows, width, strict=True)) > limits.most_bytes:
        rows = [each // 2 + 1 for each in rows]
    return Shape(seed=seed, sizes=tuple(rows), widths=tuple(width), bags=tuple(bags), batch=batch, share=share)


def batches(shape: Shape, count: int, device: torch.device) -> list[list[Jagged]]:
    """Of each batch, each table's ids and offsets. The same ids for the same seed and device."""
    random = torch.Generator(device).manual_seed(shape.seed)
    tables = [
        _of_table(rows, bag, shape.batch, count, random) for rows, bag in zip(shape.sizes, shape.bags, strict=True)
    ]
    return [list(batch) for batch in zip(*tables, strict=True)]


def _of_table(rows: int, bag: int, batch: int, count: int, random: torch.Generator) -> list[Jagged]:
    device = random.device
    of_rank = cumulative(rows, ALPHA, device)
    id_of_rank = torch.randperm(rows, generator=random, device=device)
    found = []
    for _ in range(count):
        lengths = torch.ones(batch, dtype=torch.int64, device=device)
        if bag > 1:
            lengths = torch.randint(0, 2 * bag, (batch,), generator=random, device=device)
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        uniform = torch.rand(int(offsets[-1]), dtype=torch.double, generator=random, device=device)
        found.append((id_of_rank[torch.searchsorted(of_rank, uniform, right=True)], offsets))
    return found


def as_one(batch: list[Jagged]) -> Jagged:
    """The tables' ids behind one another, and offsets into them, (T · B + 1,)."""
    lengths = torch.cat([offsets.diff() for _, offsets in batch])
    return torch.cat([ids for ids, _ in batch]), torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
