"""The figures known for real traces, reproduced by the command as a user runs it.

The traces lie beside the project and are no part of it, see `data_dir`.
"""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tieredemb.__main__ import main

COLUMNS = ("lru", "lfu-forget", "lrfu:300", "static", "belady")
TOLERANCE = 0.005
# trace, batch size, capacity, the columns' hit rates, further half-lives
KNOWN = [
    ("scarab-recs.trace.xz", 512, 2583, (0.283, 0.367, 0.391, 0.389, 0.487), {"lrfu:1000": 0.391}),
    ("scarab-recs.trace.xz", 512, 12918, (0.471, 0.462, 0.531, 0.555, 0.663), {}),
    ("scarab-recs.trace.xz", 4096, 12918, (0.453, 0.480, 0.506, 0.555, 0.646), {"lrfu:50": 0.509}),
    ("OLTP.lis.zst", 512, 3737, (0.461, 0.420, 0.488, 0.475, 0.639), {"lrfu:100": 0.498}),
    ("orm-busy.trace.xz", 256, 1526, (0.626, 0.586, 0.626, 0.435, 0.731), {"lrfu:50": 0.643}),
]


@pytest.mark.data
@pytest.mark.parametrize(("file", "batch_size", "capacity", "rates", "half_lives"), KNOWN)
def test_cache_hit_reproduces_the_known_answers(
    data_dir: Path,
    tmp_path: Path,
    file: str,
    batch_size: int,
    capacity: int,
    rates: tuple[float, ...],
    half_lives: dict[str, float],
) -> None:
    known = dict(zip(COLUMNS, rates, strict=True)) | half_lives
    policies = [name for name in known if name not in ("static", "belady")]
    table = tmp_path / "table.csv"
    options = ["--lock-window", "1", "--batch-size", str(batch_size), "--capacity", str(capacity)]
    code = main(
        ["cache-hit", str(data_dir / "traces" / file), *options, "--policy", *policies, "--csv", str(table), "--quiet"]
    )
    assert code == 0
    with table.open() as lines:
        measured = {line["policy"]: float(line["hit_rate"]) for line in csv.DictReader(lines)}
    off = {name: measured[name] - known[name] for name in known}
    assert all(abs(difference) <= TOLERANCE for difference in off.values()), off
