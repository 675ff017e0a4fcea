"""Generated traces: a bounded Zipf law over row ids, at rest or drifting.

Rank r = 1 … R is drawn with probability r^-α / Σ r^-α, independently at each access. A random permutation
maps ranks to ids, so that popularity says nothing about an id. Drift: after every `drift_every` accesses,
`drift` of all ranks (uniformly chosen, rounded down) have their ids permuted among themselves, so the law
stays and its carriers change: with drift 0.01 a row keeps its rank for about 100 × `drift_every` accesses.
Steps are counted in accesses, not in batches, so that all batch sizes see one trace.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tieredemb.cache_hit.formats import MAX_ACCESSES
from tieredemb.cache_hit.traces import Trace
from tieredemb.errors import ConfigError

MAX_GENERATED_ROWS = 2**30  # the law's cumulative distribution takes 8 bytes a row


@dataclass(frozen=True, kw_only=True)
class ZipfTrace:
    """`alpha`: exponent, 0 is uniform. `rows`: R, ids are in [0, R). `accesses`: length. `drift`: share of
    the ranks in [0, 1] that change their ids every `drift_every` accesses. Raises `ConfigError`."""

    alpha: float
    rows: int
    accesses: int
    drift: float = 0.0
    drift_every: int = 100_000
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.alpha) and self.alpha >= 0):
            raise ConfigError(f"the Zipf exponent must be a finite number of at least 0, got {self.alpha!r}")
        if not 1 <= self.rows <= MAX_GENERATED_ROWS:
            raise ConfigError(f"rows of a generated trace must lie in 1 … {MAX_GENERATED_ROWS}, got {self.rows!r}")
        if not 1 <= self.accesses <= MAX_ACCESSES:
            raise ConfigError(f"accesses must lie in 1 … {MAX_ACCESSES}, got {self.accesses!r}")
        if not 0 <= self.drift <= 1:
            raise ConfigError(f"drift is a share of the ranks and must lie in [0, 1], got {self.drift!r}")
        if self.drift_every < 1:
            raise ConfigError(f"drift_every must be at least 1 access, got {self.drift_every!r}")
        if self.seed < 0:
            raise ConfigError(f"seed must be an integer of at least 0, got {self.seed!r}")

    @property
    def name(self) -> str:
        drifting = f", drift {self.drift:g} every {self.drift_every:,}" if self.drift else ""
        return f"zipf {self.alpha:g}{drifting}"


def generate(config: ZipfTrace) -> Trace:
    """The trace of `config`: the same ids for the same config. Its `rows` are R, though not all need occur.

    >>> generate(ZipfTrace(alpha=1.0, rows=1000, accesses=5000)).ids.shape
    (5000,)
    """
    rng = np.random.default_rng(config.seed)
    cumulative = np.cumsum(np.arange(1, config.rows + 1, dtype=np.float64) ** -config.alpha)
    cumulative /= cumulative[-1]
    id_of_rank: NDArray[np.int64] = rng.permutation(config.rows)
    moving = int(config.drift * config.rows)
    step = config.drift_every if moving else config.accesses
    ids = np.empty(config.accesses, np.int64)
    for start in range(0, config.accesses, step):
        if start:
            ranks = rng.choice(config.rows, moving, replace=False)
            id_of_rank[ranks] = id_of_rank[rng.permutation(ranks)]
        stop = min(start + step, config.accesses)
        # random() < 1 and the last cumulative is exactly 1, so the rank stays below R
        ids[start:stop] = id_of_rank[np.searchsorted(cumulative, rng.random(stop - start), side="right")]
    return Trace(name=config.name, ids=ids, rows=config.rows)
