"""Which rows stay: LRFU in forward-decay form, and the choice of victims.

LRFU (Lee et al., "LRFU: a spectrum of policies", IEEE ToC 2001) weighs a use t batches ago by 2^(-t/h). Kept as
`s = log2(sum of 2^(t_i / h))` over the uses at batches t_i, scores of all rows compare at any time without a sweep,
and a use at batch t costs `s ← max(s, t/h) + log2(1 + 2^-|s - t/h|)`. Scores are unsigned 32-bit fixed point with two
to four units a batch, so a frequent row still gains by each use; the range lasts 10^9 batches. A score of zero means
never used, so the clock starts at one unit. Batches are counted as the time of plans, several of which may be of one
(`cache.base.Cache`).

The policy knows scores and locks; it moves no rows.

A row is used once a batch, however often it occurs there, because that is what fetching it costs. The score is written
back and fetched with the row, so a returning row keeps its history, and the cache pays nothing for rows that it does
not hold.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tieredemb import config
from tieredemb.config import Array
from tieredemb.kernels.constants import AGED, CLOCK, COUNT, MAX_SCORE, MIN_SCORE


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """A policy in the terms of its kernel. `unit`: score units in one doubling of weight; `units_per_batch`: the
    clock's increment by a batch; `remember`: whether a fetched row keeps its score; `ties_by_age`: whether of rows with
    equal scores the one used longest ago is evicted; `name`: the unit's identity, by which stored scores are
    recognised."""

    kind: int
    unit: float
    units_per_batch: float
    remember: bool
    ties_by_age: bool
    name: str

    def now(self, time: int) -> int:
        """A time (1, 2, …: the batches that have aged scores) as a score."""
        return min(MAX_SCORE, MIN_SCORE + int(time * self.units_per_batch))

    @property
    def counts_uses(self) -> bool:
        """Whether scores show how often rows were used, also rows outside of the cache."""
        return self.kind != CLOCK and self.remember

    def uses(self, score: Array, time: int) -> Array:
        """How many uses each score (K,), none zero, is worth at a time, float64 (K,); earlier uses are worth less if
        scores age."""
        if self.kind == COUNT:
            return score.astype(np.float64) - MIN_SCORE
        distance: Array = (score.astype(np.float64) - MIN_SCORE - time * self.units_per_batch) / self.unit
        return np.exp2(distance)

    def most_uses(self, time: int) -> float:
        """Those of a row that every batch has used up to a time."""
        if self.kind == COUNT:
            return float(time)
        ratio = 2.0 ** (-self.units_per_batch / self.unit)
        return float((1.0 - ratio**time) / (1.0 - ratio))


def scoring(policy: config.Policy) -> Scoring:
    """The kernel terms of a policy config."""
    if isinstance(policy, config.LRU):
        return Scoring(kind=CLOCK, unit=1.0, units_per_batch=1.0, remember=True, ties_by_age=True, name="clock")
    half_life = policy.half_life_batches
    if math.isinf(half_life):
        kind, unit, units_per_batch, name = COUNT, 1.0, 0.0, "count"
    else:
        unit = 2.0 ** math.ceil(math.log2(2 * half_life))
        kind, units_per_batch, name = AGED, unit / half_life, f"aged:{half_life!r}"
    remember = policy.remember_evicted
    # a cache that forgets is the classic LFU: nothing but the count of the present stay decides
    return Scoring(
        kind=kind, unit=unit, units_per_batch=units_per_batch, remember=remember, ties_by_age=remember, name=name
    )
