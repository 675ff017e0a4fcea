"""The report of a run: a table for each batch size, the capacities for a wanted hit rate, and a CSV file."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tieredemb.cache_hit.division import hit_rate
from tieredemb.cache_hit.run import HitRate
from tieredemb.cache_hit.workload import Workload
from tieredemb.errors import ConfigError

CSV_FIELDS = (
    "trace",
    "accesses",
    "rows",
    "batch_size",
    "lock_window",
    "warm_up",
    "capacity_rows",
    "capacity_share",
    "policy",
    "reference",
    "hit_rate",
    "lookups",
    "hits",
    "fetched_rows",
    "evictions",
    "seconds",
)


def heading(workload: Workload) -> str:
    """One line that says what was measured."""
    trace = workload.trace
    return (
        f"{trace.name}: {trace.ids.size:,} accesses to {trace.rows:,} rows "
        f"in batches of {workload.batch_size:,}, lock window {workload.lock_window}; "
        f"hit rate over the last {workload.lookups:,} accesses"
    )


def hit_rate_table(points: Sequence[HitRate]) -> str:
    """The points of one workload: a line a capacity, a column a policy, references marked by an asterisk."""
    names = {point.policy: f"{point.policy}{' *' if point.reference else ''}" for point in points}
    lines: dict[int, dict[str, float]] = {}
    for point in points:
        lines.setdefault(point.capacity, {})[point.policy] = point.hit_rate
    rows = points[0].workload.trace.rows
    body = [
        [f"{capacity:,}", f"{capacity / rows:.2%}", *(f"{rates[name]:.3f}" for name in names)]
        for capacity, rates in lines.items()
    ]
    return _aligned(["capacity (rows)", "of rows", *names.values()], body)


def target_table(target: float, found: Mapping[str, HitRate | None], workload: Workload) -> str:
    """The capacity at which each policy reaches the hit rate `target`; None: not even with every row
    resident."""
    body = []
    for name, point in found.items():
        if point is None:
            body.append([name, "not reached", f"{workload.trace.rows:,} rows are too few", ""])
        else:
            body.append([name, f"{point.capacity:,}", f"{point.capacity_share:.2%}", f"{point.hit_rate:.3f}"])
    return _aligned([f"hit rate {target:g}", "capacity (rows)", "of rows", "hit rate there"], body)


class Divided(NamedTuple):
    """What a capacity in bytes reaches with a policy: where each cache has the same share of its rows, and with the
    best division."""

    budget: int
    policy: str
    same: Sequence[HitRate]
    best: Sequence[HitRate]


def division_table(found: Sequence[Divided]) -> str:
    """A line a capacity and policy: both hit rates, and the rows of each trace in the best division."""
    traces = [point.workload.trace for point in found[0].best]
    body = [
        [
            f"{each.budget:,}",
            each.policy,
            f"{hit_rate(each.same):.3f}",
            f"{hit_rate(each.best):.3f}",
            *(f"{point.capacity:,} ({point.capacity_share:.1%})" for point in each.best),
        ]
        for each in found
    ]
    names = [f"rows of {trace.name}" for trace in traces]
    return _aligned(["capacity (bytes)", "policy", "same share of rows", "best division", *names], body)


def _aligned(headers: list[str], body: list[list[str]]) -> str:
    """A table as GitHub reads it, of which numbers stand to the right."""
    widths = [max(len(row[k]) for row in (headers, *body)) for k in range(len(headers))]
    names = headers[0].startswith("hit rate")  # in the first column
    left = [names, *(False for _ in headers[1:])]

    def line(row: list[str]) -> str:
        cells = (
            f"{cell:{'<' if to_left else '>'}{width}}" for cell, to_left, width in zip(row, left, widths, strict=True)
        )
        return f"| {' | '.join(cells)} |"

    rule = (
        f":{'-' * (width + 1)}" if to_left else f"{'-' * (width + 1)}:"
        for to_left, width in zip(left, widths, strict=True)
    )
    return "\n".join([line(headers), f"|{'|'.join(rule)}|", *map(line, body)])


def write_csv(path: str | Path, points: Sequence[HitRate]) -> None:
    """One line a (trace, batch size, capacity, policy). Raises `ConfigError` if `path` cannot be written."""
    try:
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(CSV_FIELDS)
            writer.writerows(_csv_line(point) for point in points)
    except OSError as error:
        raise ConfigError(f"the CSV file {str(path)!r} cannot be written: {error}") from error


def _csv_line(point: HitRate) -> list[object]:
    workload, trace = point.workload, point.workload.trace
    return [
        trace.name,
        trace.ids.size,
        trace.rows,
        workload.batch_size,
        workload.lock_window,
        workload.warm_up,
        point.capacity,
        f"{point.capacity_share:.6f}",
        point.policy,
        int(point.reference),
        f"{point.hit_rate:.6f}",
        point.lookups,
        point.hits,
        "" if point.fetched is None else point.fetched,
        "" if point.evictions is None else point.evictions,
        f"{point.seconds:.3f}",
    ]
