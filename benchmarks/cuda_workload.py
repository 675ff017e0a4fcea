"""Workloads of the GPU step benchmark, their bars, and ids that no cache has seen before.

Ids follow a bounded Zipf over the rows of each table, p(r) ∝ r^-α for r = 1 … rows, ranks mapped to ids by a random
permutation of the table. All batches of a run are drawn on the device before anything is timed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from benchmarks.warm_steps import KAGGLE
from tieredemb.config import Capacity
from tieredemb.lookup.rounding import Rounding

SEED = 7
PEER_EARLIER = "measured earlier on an H200, with FBGEMM 1.6.0"
DRAWN_AT_ONCE = 1 << 22  # doubles and ranks of a chunk: 64 MiB


@dataclass(frozen=True, kw_only=True)
class Cache:
    """A cache to measure, and its bars: milliseconds a step, of a CUDA graph on the GPU alone, with prefetch, and as a
    CUDA graph with prefetch; the share that PCIe alone needs of the latter; hit rate, MiB of HBM; and an eager step's
    time by that of the same as a graph, and by the peer's. Eager with prefetch may take 1.05 (W-1.05), 1.2 (W-1.2) and
    1.5 times what a graph with prefetch took when it planned one batch ahead."""

    capacity: Capacity
    most_ms: float | None = None
    most_device_ms: float | None = None
    most_fetched_ms: float | None = None
    most_prefetched_ms: float | None = None
    least_pcie_share: float | None = None
    least_hit_rate: float | None = None
    most_mib: float | None = None
    most_of_graph: float | None = None
    most_of_peer: float | None = None

    def __str__(self) -> str:
        if self.capacity == 1.0:
            return "all resident"
        return self.capacity if isinstance(self.capacity, str) else f"{self.capacity:,} slots"


@dataclass(frozen=True, kw_only=True)
class Peer:
    """What FBGEMM, the strongest peer, reaches on the workload: milliseconds a step, hit rate, MiB of HBM for its cache
    (LFU, 1 % of the rows, managed memory); `name` says when it was measured."""

    name: str
    ms: float
    hit_rate: float | None = None
    cache_mib: float | None = None


@dataclass(frozen=True, kw_only=True)
class CudaWorkload:
    """`tables` tables of `rows` × `width`, batches of `batch` samples, bags of 1 id, Zipf `alpha`; the `caches`
    to measure, and the `peer`. `unequal`: the rows of each table, where they differ; `rows` are the most then ·
    `dtype`, `rounding`: of the rows, if not fp32; outputs and gradients are."""

    name: str
    tables: int = 26
    rows: int
    unequal: tuple[int, ...] = ()
    width: int = 128
    batch: int
    alpha: float
    caches: tuple[Cache, ...]
    peer: Peer | None = None
    dtype: torch.dtype = torch.float32
    rounding: Rounding = "nearest"

    @property
    def row_bytes(self) -> int:
        """Of a row's weights."""
        return self.width * self.dtype.itemsize

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each table."""
        return self.unequal or (self.rows,) * self.tables

    @property
    def widths(self) -> tuple[int, ...]:
        """Of each table."""
        return (self.width,) * self.tables

    @property
    def lookups(self) -> int:
        """Ids of a batch."""
        return self.tables * self.batch

    @property
    def resident(self) -> bool:
        return all(cache.capacity == 1.0 for cache in self.caches)

    @property
    def cold_bytes(self) -> int:
        """Bytes of all rows in cold storage: weights, one word of optimizer state, one of score."""
        return sum(self.sizes) * (self.row_bytes + 8)

    def __str__(self) -> str:
        rows = f"{min(self.sizes)} … {self.rows:,}" if self.unequal else f"{self.rows:,}"
        more = "" if self.dtype is torch.float32 else f", {self.dtype}, rounding {self.rounding}"
        return f"{self.name}: {self.tables} × {rows} × {self.width}, batch {self.batch:,}, Zipf {self.alpha:g}{more}"


def workloads() -> dict[str, CudaWorkload]:
    """By name. The peer's figures are of the same batches, and the bars are for an H200 too."""
    small = Cache(
        capacity="1051MiB", most_ms=1.85, most_prefetched_ms=1.65, least_hit_rate=0.823, most_mib=1051,
        most_of_graph=1.03, most_fetched_ms=1.62, least_pcie_share=0.95,
    )  # fmt: skip
    known = (
        CudaWorkload(
            name="W-HBM", rows=1_000_000, batch=65_536, alpha=1.05, caches=(Cache(capacity=1.0, most_ms=1.30),),
            peer=Peer(name=PEER_EARLIER, ms=1.424),
        ),
        CudaWorkload(
            name="W-small", rows=1_000_000, batch=2048, alpha=1.05,
            caches=(Cache(capacity=1.0, most_device_ms=0.115, most_of_peer=0.55),),
            peer=Peer(name=PEER_EARLIER, ms=0.439),
        ),
        CudaWorkload(
            name="W-1.05", rows=2_000_000, batch=16_384, alpha=1.05,
            caches=(
                Cache(
                    capacity=520_000, most_ms=2.40, most_prefetched_ms=2.40, least_pcie_share=0.93,
                    least_hit_rate=0.757, most_mib=300, most_of_graph=1.03, most_fetched_ms=2.38,
                ),
                small,
            ),
            peer=Peer(name=PEER_EARLIER, ms=2.855, hit_rate=0.766, cache_mib=1051),
        ),
        CudaWorkload(
            name="W-1.2", rows=2_000_000, batch=16_384, alpha=1.2,
            caches=(
                Cache(
                    capacity=520_000, most_ms=1.08, most_prefetched_ms=0.85, least_hit_rate=0.917, most_mib=300,
                    most_of_graph=1.10, most_fetched_ms=1.00, least_pcie_share=0.90,
                ),
                Cache(
                    capacity="1051MiB", most_ms=0.95, most_prefetched_ms=0.72, least_hit_rate=0.939, most_mib=1051,
                    most_of_graph=1.10, most_fetched_ms=0.74, least_pcie_share=0.85,
                ),
            ),
            peer=Peer(name=PEER_EARLIER, ms=1.428, hit_rate=0.919, cache_mib=1051),
        ),
        CudaWorkload(
            name="W-kaggle", rows=max(KAGGLE), unequal=KAGGLE, width=32, batch=16_384, alpha=1.1,
            caches=(Cache(capacity=sum(KAGGLE) // 100, most_mib=60, most_of_graph=1.35, most_fetched_ms=0.45),),
            peer=Peer(name=PEER_EARLIER, ms=1.542, cache_mib=560),
        ),
        CudaWorkload(
            name="W-1.05-bf16", rows=2_000_000, batch=16_384, alpha=1.05, dtype=torch.bfloat16,
            rounding="stochastic", caches=(
                Cache(capacity="924MiB", most_prefetched_ms=0.84, most_mib=924, least_pcie_share=0.88),
            ),
            peer=Peer(name=f"fp16, {PEER_EARLIER}", ms=1.803, cache_mib=924),
        ),
        CudaWorkload(
            name="W-1.2-bf16", rows=2_000_000, batch=16_384, alpha=1.2, dtype=torch.bfloat16,
            rounding="stochastic", caches=(Cache(capacity="924MiB", most_mib=924),),
        ),
    )  # fmt: skip
    return {workload.name: workload for workload in known}


def quick_workloads() -> dict[str, CudaWorkload]:
    """The same names at sizes that try the harness out: their figures mean nothing, so they have no bars."""
    sizes = {"W-HBM": (1.05, 1.0), "W-small": (1.05, 1.0), "W-1.05": (1.05, 600), "W-1.2": (1.2, "512KiB")}
    equal = [
        CudaWorkload(
            name=name, tables=3, rows=20_000, width=128, batch=64 if name == "W-small" else 256, alpha=alpha,
            caches=(Cache(capacity=capacity),),
        )
        for name, (alpha, capacity) in sizes.items()
    ]  # fmt: skip
    unequal = CudaWorkload(
        name="W-kaggle", tables=3, rows=20_000, unequal=(3, 20_000, 500), width=32, batch=256, alpha=1.1,
        caches=(Cache(capacity=600),),
    )  # fmt: skip
    halves = [
        CudaWorkload(
            name=f"{name}-bf16", tables=3, rows=20_000, width=128, batch=256, alpha=alpha, dtype=torch.bfloat16,
            rounding="stochastic", caches=(Cache(capacity="256KiB"),),
        )
        for name, alpha in (("W-1.05", 1.05), ("W-1.2", 1.2))
    ]  # fmt: skip
    return {work.name: work for work in (*equal, unequal, *halves)}


def batches(work: CudaWorkload, count: int, device: torch.device) -> torch.Tensor:
    """Ids of `count` batches, int64 (count, T · B), each row table-major. The same ids for the same seed and device.

    Drawn in chunks, one table after the other: beside the result 8 · rows bytes of cumulative weights for each size of
    table, as much for one permutation, and a few chunks.
    """
    random = torch.Generator(device).manual_seed(SEED)
    of_rank = {rows: cumulative(rows, work.alpha, device) for rows in set(work.sizes)}
    ids = torch.empty(count, work.tables, work.batch, dtype=torch.int64, device=device)
    together = max(1, DRAWN_AT_ONCE // work.batch)
    for table, rows in enumerate(work.sizes):
        id_of_rank = torch.randperm(rows, generator=random, device=device)
        for start in range(0, count, together):
            part = ids[start : start + together, table]
            uniform = torch.rand(part.shape, dtype=torch.double, generator=random, device=device)
            # uniform < 1 and the last cumulative is exactly 1, so the rank stays below the rows
            part.copy_(id_of_rank[torch.searchsorted(of_rank[rows], uniform, right=True)])
    return ids.view(count, -1)


def cumulative(rows: int, alpha: float, device: torch.device) -> torch.Tensor:
    """Of each rank, the probability of one up to it, double (rows,)."""
    ranks = torch.arange(1, rows + 1, dtype=torch.double, device=device)
    summed = ranks.pow_(-alpha).cumsum_(0)
    summed /= summed[-1].clone()
    return summed


def every_row(sizes: Sequence[int], most_ids: int, device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Ids and offsets of batches, none of more than `most_ids`, that name every row of tables of `sizes` once. A table
    that has no more rows has empty bags."""
    rows, together = torch.tensor(sizes, device=device), max(1, most_ids // len(sizes))
    for start in range(0, max(sizes), together):
        ids = torch.arange(start, min(start + together, max(sizes)), device=device)
        is_row = ids < rows[:, None]
        yield ids.expand(len(sizes), -1)[is_row], torch.cat([rows.new_zeros(1), is_row.view(-1).cumsum(0)])
