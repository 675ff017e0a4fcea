"""Timers: interleaved rounds for comparisons, medians with 20/80 percentiles, and this machine's copy bandwidth."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter, sleep
from typing import Any

import numpy as np

SETTLE_SECONDS = 0.01  # torch's OpenMP threads spin for milliseconds after a step: not on the next provider's time
COPY_BYTES = 256 << 20  # far beyond any last-level cache


@dataclass(frozen=True)
class Quantiles:
    """Median and 20/80 percentiles of `rounds` samples."""

    median: float
    p20: float
    p80: float
    rounds: int

    @classmethod
    def of(cls, samples: Sequence[float] | np.ndarray[Any, Any]) -> Quantiles:
        p20, median, p80 = (float(value) for value in np.percentile(samples, (20, 50, 80)))
        return cls(median, p20, p80, len(samples))


@dataclass(frozen=True)
class Interleaved:
    """Seconds of every provider, round by round."""

    seconds: Mapping[str, list[float]]

    def quantiles(self, provider: str) -> Quantiles:
        return Quantiles.of(self.seconds[provider])

    def ratio(self, provider: str, baseline: str) -> float:
        """Median over the rounds of time / time of the baseline in the same round: what disturbs a round hits both."""
        return float(np.median(np.divide(self.seconds[provider], self.seconds[baseline])))


def interleave(steps: Mapping[str, Callable[..., object]], rounds: Iterable[tuple[Any, ...]]) -> Interleaved:
    """Calls every step with the arguments of each round, in turn; the first one changes from round to round."""
    seconds: dict[str, list[float]] = {provider: [] for provider in steps}
    order = list(steps)
    gc.collect()
    for args in rounds:
        for provider in order:
            sleep(SETTLE_SECONDS)
            start = perf_counter()
            steps[provider](*args)
            seconds[provider].append(perf_counter() - start)
        order.append(order.pop(0))
    return Interleaved(seconds)


def copier(threads: int) -> Callable[[], object]:
    """A function that copies `COPY_BYTES` with `threads` threads: the ceiling of kernels that move rows. It moves
    twice that, once read and once written."""
    source = np.ones(COPY_BYTES, np.uint8)
    target = np.zeros_like(source)
    parts = list(zip(np.array_split(target, threads), np.array_split(source, threads), strict=True))
    pool = ThreadPoolExecutor(threads)
    return lambda: list(pool.map(lambda part: np.copyto(*part), parts))
