"""The best division of one capacity in bytes among several caches, each of which serves a trace of its own.

Each cache is run with some capacities. Of all choices of one capacity for each cache that fit the bytes in total, the
one with most hits is found. Capacities near that choice are run next, and those that use up the bytes left, until no
better choice is found. Hits need not grow evenly: a cache that is smaller than a batch may have almost none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tieredemb.cache_hit.run import Contender, HitRate, side_by_side
from tieredemb.cache_hit.workload import Workload
from tieredemb.errors import ConfigError
from tieredemb.progress import Advance

GROWTH = 1.5  # from each capacity of the first runs to the next
AROUND = (0.8, 0.9, 1.1, 1.2)  # of a choice, where the next runs are made; closer to it in each round
MOST_ROUNDS = 5
CHOICES = 5000  # steps of the bytes: of the choices within one, the best is kept
PRECISION = 0.0002  # hit rates that differ by less are the same

Chosen = tuple[HitRate, ...]


@dataclass(frozen=True, kw_only=True)
class DividedWorkload:
    """Traces that are looked up in the same steps, each in a cache of its own: batch number i of each is of step i.
    `row_bytes`: for each cache, the bytes of a row. Raises `ConfigError`."""

    workloads: Sequence[Workload]
    row_bytes: Sequence[int]

    def __post_init__(self) -> None:
        batches = {-(-each.trace.ids.size // each.batch_size) for each in self.workloads}
        if len(batches) > 1:
            raise ConfigError(
                f"traces that share a capacity must have equally many batches, got {sorted(batches)}; pass a "
                f"--batch-size for each, so that batches of the same number are of the same step"
            )
        if len(self.row_bytes) != len(self.workloads) or min(self.row_bytes) < 1:
            raise ConfigError(
                f"{len(self.workloads)} traces need the bytes of a row of each, at least 1, got "
                f"{', '.join(map(str, self.row_bytes)) or 'none'} (--row-bytes)"
            )

    @property
    def all_bytes(self) -> int:
        """All rows of each."""
        return sum(each.trace.rows * size for each, size in zip(self.workloads, self.row_bytes, strict=True))

    @property
    def least_bytes(self) -> int:
        """One row of each."""
        return sum(self.row_bytes)

    def equal_shares(self, budget: int) -> list[int]:
        """Rows of each cache where all hold the same share of their rows."""
        share = min(1.0, budget / self.all_bytes)
        return [max(1, int(each.trace.rows * share)) for each in self.workloads]

    def measure(self, contender: Contender, capacities: Sequence[int], advance: Advance) -> list[HitRate]:
        """Runs each cache with so many rows."""
        runs = zip(self.workloads, capacities, strict=True)
        return list(side_by_side(lambda run, counted: contender.measure(run[0], run[1], counted), runs, advance))


def hit_rate(points: Sequence[HitRate]) -> float:
    """Of all lookups, whichever cache they were served by."""
    return sum(point.hits for point in points) / sum(point.lookups for point in points)


def best_division(
    divided: DividedWorkload, budget: int, contender: Contender, advance: Advance = lambda accesses: None
) -> list[HitRate]:
    """The measured capacities, one for each cache, that have most hits within `budget` bytes. Raises `ConfigError`
    for bytes that hold no row of each."""
    if budget < divided.least_bytes:
        raise ConfigError(
            f"a capacity of {budget} bytes holds no row of each of {len(divided.workloads)} traces; one of each takes "
            f"{divided.least_bytes} bytes"
        )
    known: list[dict[int, HitRate]] = [{} for _ in divided.workloads]
    for points, workload, size in zip(known, divided.workloads, divided.row_bytes, strict=True):
        most = min(workload.trace.rows, (budget - divided.least_bytes) // size + 1)
        _measure(points, workload, [*_powers(most), most], contender, advance)
    best = _best_choice(divided, known, budget)
    for number in range(MOST_ROUNDS):
        left = budget - sum(point.capacity * size for point, size in zip(best, divided.row_bytes, strict=True))
        for points, point, workload, size in zip(known, best, divided.workloads, divided.row_bytes, strict=True):
            rows, most = point.capacity, max(points)
            near = [round(rows * (1 + (factor - 1) / 2**number)) for factor in AROUND]
            wanted = sorted({min(most, max(1, each)) for each in (*near, rows + left // size)})
            _measure(points, workload, wanted, contender, advance)
        before, best = best, _best_choice(divided, known, budget)
        if number and hit_rate(best) <= hit_rate(before) + PRECISION:
            break
    return best


def _powers(most: int) -> list[int]:
    found = [1]
    while found[-1] * GROWTH < most:
        found.append(max(found[-1] + 1, int(found[-1] * GROWTH)))
    return found


def _measure(
    known: dict[int, HitRate], workload: Workload, capacities: Sequence[int], contender: Contender, advance: Advance
) -> None:
    _ = workload.uses  # once, and not by each thread
    new = [capacity for capacity in dict.fromkeys(capacities) if capacity not in known]
    found = side_by_side(lambda capacity, counted: contender.measure(workload, capacity, counted), new, advance)
    known.update(zip(new, found, strict=True))


def _best_choice(divided: DividedWorkload, known: Sequence[dict[int, HitRate]], budget: int) -> list[HitRate]:
    """One known point for each cache: the choice with most hits whose total fits the bytes."""
    choices: list[tuple[int, int, tuple[HitRate, ...]]] = [(0, 0, ())]  # hits, bytes, and of which points
    for points, size in zip(known, divided.row_bytes, strict=True):
        longer = [
            (hits + point.hits, used + point.capacity * size, (*chosen, point))
            for hits, used, chosen in choices
            for point in points.values()
            if used + point.capacity * size <= budget
        ]
        choices = _undominated(longer, max(1, budget // CHOICES))
    return list(max(choices, key=lambda choice: choice[:2])[2])


def _undominated(choices: list[tuple[int, int, Chosen]], step: int) -> list[tuple[int, int, Chosen]]:
    """Those that have more hits than any with as many bytes or fewer, one for each `step` of these."""
    found: list[tuple[int, int, Chosen]] = []
    for choice in sorted(choices, key=lambda choice: (choice[1], -choice[0])):
        if not found or choice[0] > found[-1][0]:
            if found and choice[1] // step == found[-1][1] // step and len(found) > 1:
                found.pop()
            found.append(choice)
    return found
