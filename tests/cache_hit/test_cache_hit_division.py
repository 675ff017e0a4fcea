"""One capacity in bytes for several traces: the division that serves most lookups, beside all that there are."""

from __future__ import annotations

import csv
import itertools
from pathlib import Path

import numpy as np
import pytest

from tieredemb.__main__ import main
from tieredemb.cache_hit.division import DividedWorkload, best_division, hit_rate
from tieredemb.cache_hit.options import parse_policy
from tieredemb.cache_hit.run import Contender
from tieredemb.cache_hit.traces import Trace
from tieredemb.cache_hit.workload import Workload
from tieredemb.errors import ConfigError

POLICY = Contender(name="lrfu:50", policy=parse_policy("lrfu:50"))
BATCHES = 60


def _workload(name: str, rows: int, batch: int, power: float, seed: int) -> Workload:
    drawn = np.random.default_rng(seed).random(BATCHES * batch) ** power
    return Workload(trace=Trace(name=name, ids=(rows * drawn).astype(np.int64), rows=rows), batch_size=batch)


def _divided() -> DividedWorkload:
    works = [_workload("busy", 40, 64, 3.0, 0), _workload("idle", 60, 8, 1.0, 1), _workload("hot", 12, 30, 5.0, 2)]
    return DividedWorkload(workloads=works, row_bytes=[3, 5, 8])


@pytest.mark.parametrize("budget", [40, 90, 200, 400])
def test_the_best_division_is_the_best_of_all(budget: int) -> None:
    divided = _divided()
    hits = [
        {rows: POLICY.measure(work, rows).hits for rows in range(1, work.trace.rows + 1)} for work in divided.workloads
    ]
    best = max(
        sum(of[rows] for of, rows in zip(hits, choice, strict=True))
        for choice in itertools.product(*hits)
        if sum(rows * size for rows, size in zip(choice, divided.row_bytes, strict=True)) <= budget
    )
    found = best_division(divided, budget, POLICY)
    assert sum(point.capacity * size for point, size in zip(found, divided.row_bytes, strict=True)) <= budget
    assert sum(point.hits for point in found) >= best - 0.005 * sum(point.lookups for point in found)
    assert hit_rate(found) >= hit_rate(divided.measure(POLICY, divided.equal_shares(budget), lambda done: None))


def test_bytes_that_hold_all_rows_hit_all_that_were_there_before() -> None:
    found = best_division(_divided(), 10_000, POLICY)
    assert [point.capacity for point in found] == [40, 60, 12]


def _save(path: Path, rows: int, batch: int, seed: int) -> str:
    np.save(path, _workload("", rows, batch, 3.0, seed).trace.ids)
    return str(path)


def test_the_command_divides_a_capacity_in_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    users, items = _save(tmp_path / "users.npy", 900, 64, 0), _save(tmp_path / "items.npy", 5000, 8, 1)
    options = ["--row-bytes", "117", "309", "--batch-size", "64", "8", "--policy", "lrfu:50,lru"]
    table = tmp_path / "best.csv"
    command = ["cache-hit", users, "--beside", items, *options, "--capacity", "16KiB", "10%", "--csv", str(table)]
    assert main([*command, "--quiet"]) == 0
    printed = capsys.readouterr().out
    assert "16,384" in printed
    assert "rows of users" in printed
    assert "rows of items" in printed
    with table.open() as file:
        lines = list(csv.DictReader(file))
    assert [(line["trace"], line["policy"]) for line in lines] == [
        (name, policy) for _ in range(2) for policy in ("lrfu:50", "lru") for name in ("users", "items")
    ]
    first = lines[:2]
    assert 117 * int(first[0]["capacity_rows"]) + 309 * int(first[1]["capacity_rows"]) <= 16384


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--row-bytes", "117"], "need the bytes of a row of each"),
        ([], "got none"),
        (["--row-bytes", "117", "0"], "'0' is not possible"),
        (["--row-bytes", "117", "309", "--batch-size", "64"], "equally many batches"),
        (["--row-bytes", "117", "309", "--batch-size", "64", "8", "4"], "2 traces need one --batch-size or 2"),
        (["--row-bytes", "117", "309", "--capacity", "100B"], "holds no row of each"),
        (["--row-bytes", "117", "309", "--capacity", "100"], "in bytes"),
        (["--row-bytes", "117", "309", "--target", "0.5"], "without --target"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_command_refuses(tmp_path: Path, options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    users, items = _save(tmp_path / "users.npy", 90, 64, 0), _save(tmp_path / "items.npy", 500, 8, 1)
    sizes = [] if "--batch-size" in options else ["--batch-size", "64", "8"]
    assert main(["cache-hit", users, "--beside", items, *sizes, *options, "--quiet"]) == 2
    assert said in capsys.readouterr().err


def test_bytes_of_rows_are_for_several_traces(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache-hit", "--zipf", "1", "--row-bytes", "4"]) == 2
    assert "pass --beside too" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="holds no row of each"):
        best_division(_divided(), 15, POLICY)
