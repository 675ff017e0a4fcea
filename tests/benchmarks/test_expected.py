"""What several GPUs are expected to take: as measured, where it was, and else by what two have shown."""

from __future__ import annotations

import json
import shutil

import pytest

from benchmarks import expected
from benchmarks.charts import Results
from benchmarks.record import RESULTS


def test_more_gpus_take_longer_by_their_exchanges(tmp_path):
    shutil.copy(RESULTS / "cuda-sharding.json", tmp_path)
    results = Results(tmp_path)
    for work, _ in expected.WORK:
        (two, how), (four, of_four), (eight, of_eight) = (
            expected.of_ranks(results, work, ranks) for ranks in expected.RANKS
        )
        assert (how, of_four, of_eight) == ("", " (predicted)", " (predicted)")
        assert (eight - two) / (four - two) == pytest.approx(1.5)  # 7/8 and 3/4 leave a rank, where 1/2 does of two


def test_what_was_measured_takes_the_place_of_a_prediction(tmp_path):
    shutil.copy(RESULTS / "cuda-sharding.json", tmp_path)
    found = json.loads((tmp_path / "cuda-sharding.json").read_text())
    for run in found["runs"].values():
        run["records"] = [record | {"median": 9.0} for record in run["records"]]
    (tmp_path / "cuda-sharding-4.json").write_text(json.dumps(found))
    for row in expected.rows(tmp_path):
        assert row[3].startswith("9 ms: ")
        assert "predicted" in row[4]
