"""Runs policies and references over a trace, and finds the capacity of a hit rate.

Each run starts with an empty cache and goes over the whole trace, one plan a batch, which ends before the next one.
Hits are counted from the first measured batch on; the batches before it warm the cache up.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from tieredemb.cache_hit.options import parse_policy
from tieredemb.cache_hit.references import belady, best_static
from tieredemb.cache_hit.simulation import simulate
from tieredemb.cache_hit.workload import Workload
from tieredemb.config import Policy
from tieredemb.progress import Advance

AT_ONCE = 2  # runs: each takes 8 bytes for each row of the trace
TARGET_PRECISION = 0.01  # the capacity of a target is bracketed this closely: hit rates move by far less over 1 %
CLASSIC_POLICIES = {word: parse_policy(word) for word in ("lru", "lfu-forget")}
"""The references that are policies: plain LRU, and LFU as caches have it, where an evicted row loses its
count."""

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class HitRate:
    """One measured point. `capacity`: rows. `hits`: occurrences whose row was resident when their batch was
    planned, of `lookups`. `fetched`: missed rows, once a batch; `evictions`; both None where the reference
    has no such count. `seconds`: wall time of the whole run, warm-up included. `reference`: shown for
    comparison only."""

    workload: Workload
    capacity: int
    policy: str
    reference: bool
    lookups: int
    hits: int
    fetched: int | None = None
    evictions: int | None = None
    seconds: float

    @property
    def hit_rate(self) -> float:
        return self.hits / self.lookups

    @property
    def capacity_share(self) -> float:
        """Capacity over the trace's rows."""
        return self.capacity / self.workload.trace.rows


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A policy or reference under the name that tables and pictures give it. `policy` is None for the two
    that know the future, "static" and "belady"."""

    name: str
    policy: Policy | None = None
    reference: bool = False

    def measure(self, workload: Workload, capacity: int, advance: Advance = lambda accesses: None) -> HitRate:
        """Runs over the whole trace with `capacity` rows. Raises `ConfigError` for an impossible capacity."""
        workload.check_capacity(capacity)
        started = time.perf_counter()
        fetched: int | None = None
        evictions: int | None = None
        if self.policy is not None:
            hits, fetched, evictions = simulate(workload, capacity, self.policy, advance)
        elif self.name == "belady":
            hits, fetched = belady(workload.uses, capacity, workload.first_batch)
        else:
            hits = best_static(workload.trace, capacity, workload.first_batch * workload.batch_size)
        return HitRate(
            workload=workload,
            capacity=capacity,
            policy=self.name,
            reference=self.reference,
            lookups=workload.lookups,
            hits=hits,
            fetched=fetched,
            evictions=evictions,
            seconds=time.perf_counter() - started,
        )


def contenders(policies: dict[str, Policy], *, references: bool) -> list[Contender]:
    """`policies` by name, and after them the references that are not among them."""
    chosen = [Contender(name=name, policy=policy) for name, policy in policies.items()]
    if references:
        classic = {name: policy for name, policy in CLASSIC_POLICIES.items() if name not in policies}
        chosen += [Contender(name=name, policy=policy, reference=True) for name, policy in classic.items()]
        chosen += [Contender(name=name, reference=True) for name in ("static", "belady")]
    return chosen


def side_by_side(work: Callable[[Item, Advance], Result], items: Iterable[Item], advance: Advance) -> Iterator[Result]:
    """`work(item, advance)` of each item, in their order, on `AT_ONCE` threads: runs are compiled code."""
    lock, over = threading.Lock(), threading.Event()

    def counted(accesses: int) -> None:
        if over.is_set():  # the caller was interrupted, and waits for this thread
            raise CancelledError
        with lock:
            advance(accesses)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            yield from pool.map(lambda item: work(item, counted), items)
        finally:
            over.set()


def sweep(
    workload: Workload,
    capacities: Sequence[int],
    chosen: Sequence[Contender],
    advance: Advance = lambda accesses: None,
) -> Iterator[HitRate]:
    """Every contender at every capacity (rows)."""
    _ = workload.uses  # once, and not by each thread
    runs = [(capacity, contender) for capacity in capacities for contender in chosen]
    return side_by_side(lambda run, counted: run[1].measure(workload, run[0], counted), runs, advance)


def capacity_for(
    target: float,
    contender: Contender,
    workload: Workload,
    known: Sequence[HitRate] = (),
    advance: Advance = lambda accesses: None,
) -> HitRate | None:
    """The smallest capacity that reaches the hit rate `target`, as measured there; None if all rows do not.

    Narrows the bracket that the contender's `known` points give by running in it, down to `TARGET_PRECISION`: a
    capacity one percent (or one row) smaller was run and fell short. Takes for granted that the hit rate grows with
    capacity, which a policy may break by a hair.
    """
    reached = min((p for p in known if p.hit_rate >= target), key=lambda p: p.capacity, default=None)
    if reached is None:
        reached = contender.measure(workload, workload.trace.rows, advance)
        if reached.hit_rate < target:
            return None
    short = max((p for p in known if p.capacity < reached.capacity), key=lambda p: p.capacity, default=None)
    halve = False
    while reached.capacity - _rows(short) > max(1, int(_rows(short) * TARGET_PRECISION)):
        width = _width(short, reached)
        point = contender.measure(workload, _between(short, reached, target, halve=halve), advance)
        if point.hit_rate >= target:
            reached = point
        else:
            short = point
        halve = not halve and _width(short, reached) > width / 2
    return reached


def _rows(short: HitRate | None) -> int:
    return 0 if short is None else short.capacity


def _width(short: HitRate | None, reached: HitRate) -> float:
    return math.log(reached.capacity / max(1, _rows(short)))


def _between(short: HitRate | None, reached: HitRate, target: float, *, halve: bool) -> int:
    """The capacity to run next: where a line between the ends, over the logarithm of the capacity, meets `target`, or
    with `halve`, as the last one did not bring them close, the middle. It goes beyond the line by half the precision,
    towards the end that is further away, so that the next one closes the bracket."""
    width, share, beyond = _width(short, reached), 0.5, 0.0
    if short is not None and not halve:
        share = (target - short.hit_rate) / (reached.hit_rate - short.hit_rate)
        beyond = math.copysign(math.log1p(TARGET_PRECISION) / 2, 0.5 - share)
    middle = round(max(1, _rows(short)) * math.exp(share * width + beyond))
    return min(max(middle, _rows(short) + 1), reached.capacity - 1)
