"""The example's generated log: reproducible, of Criteo's shape, and as uneven as Meta's tables."""

from __future__ import annotations

import sys
from dataclasses import astuple
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2]))  # the examples are no part of the installed package

from examples.dlrm import locality, text
from examples.dlrm.criteo import CriteoFile, LogError, Rows
from examples.dlrm.locality import WINDOW, Law, Locality
from examples.dlrm.synthetic import BLOCK_ROWS, CARDINALITIES, LAW, GeneratedLog, write_log

# Meta's figures: (uses, share of the used ids with more uses, share of the accesses that they take)
PUBLISHED = ((512, 0.002, 0.336), (64, 0.018, 0.519), (16, 0.114, 0.738), (1, 0.658, 0.973))
PUBLISHED_MEAN_USES = 12.7


def read(log: GeneratedLog | CriteoFile, start: int, stop: int) -> Rows:
    return next(log.batches(start, stop, stop - start))


def assert_equal(given: Rows, wanted: Rows) -> None:
    for name in Rows.__dataclass_fields__:
        np.testing.assert_array_equal(getattr(given, name), getattr(wanted, name))


@pytest.fixture(scope="module")
def window() -> Rows:
    return read(GeneratedLog(rows=WINDOW, seed=1), 0, WINDOW)


def test_generator_repeats_itself_from_any_position() -> None:
    rows = 2 * BLOCK_ROWS + 100
    whole = read(GeneratedLog(rows=rows, seed=3), 0, rows)
    for start, stop in ((0, 1), (BLOCK_ROWS - 2, BLOCK_ROWS + 3), (BLOCK_ROWS, rows), (rows - 1, rows)):
        assert_equal(read(GeneratedLog(rows=rows, seed=3), start, stop), whole[start:stop])


def test_generator_seeds_differ() -> None:
    first, second = (read(GeneratedLog(rows=100, seed=seed), 0, 100) for seed in (0, 1))
    assert (first.categories != second.categories).mean() > 0.5
    assert not np.array_equal(first.labels, second.labels)


def test_generator_blocks_differ() -> None:
    whole = read(GeneratedLog(rows=2 * BLOCK_ROWS), 0, 2 * BLOCK_ROWS)
    assert (whole.categories[:BLOCK_ROWS] != whole.categories[BLOCK_ROWS:]).mean() > 0.5


@pytest.mark.parametrize("name", ["log.tsv", "log.tsv.gz", "log.tsv.xz"])
def test_generated_file_reads_back_as_generated(tmp_path: Path, name: str) -> None:
    rows = BLOCK_ROWS + 10
    log = GeneratedLog(rows=rows, seed=5)
    written = write_log(tmp_path / name, log)
    assert ((tmp_path / name).stat().st_size == written) == (name == "log.tsv")
    file = CriteoFile(tmp_path / name)
    assert len(file) == rows
    assert_equal(read(file, 0, rows), read(log, 0, rows))


def test_generator_refuses_nonsense() -> None:
    with pytest.raises(LogError, match="at least 1 row"):
        GeneratedLog(rows=0)
    with pytest.raises(LogError, match="ends after 10 rows, where 11"):
        list(GeneratedLog(rows=10).batches(0, 11, 5))


def test_generated_rows_have_the_shape_of_criteo(window: Rows) -> None:
    assert set(np.unique(window.labels)) == {0, 1}
    assert 0.15 < window.labels.mean() < 0.35, "about a quarter of Criteo's rows are clicks"
    given = window.categories[window.categories != text.NO_CATEGORY]
    assert given.min() >= 0
    assert given.max() < 2**32
    negative = (window.integers < 0) & (window.integers != text.NO_INTEGER)
    assert negative.any(0).tolist() == [column == 1 for column in range(text.INTEGERS)]
    for column, ids in enumerate(CARDINALITIES):
        assert len(np.unique(window.categories[:, column])) <= ids
    columns_with_gaps = (window.categories == text.NO_CATEGORY).any(0)
    assert 0 < columns_with_gaps.sum() < text.CATEGORIES


def test_generated_ids_of_different_columns_differ(window: Rows) -> None:
    columns = [np.unique(column[column != text.NO_CATEGORY]) for column in window.categories.T]
    assert len(np.unique(np.concatenate(columns))) == sum(map(len, columns))


@pytest.mark.parametrize("ids", [3, 1000, 5_000_000])
@pytest.mark.parametrize("law", [LAW, Law(head_share=0.5, head_shift=0.5, head_exponent=0.7, body_shift=50,
                                          body_exponent=2.5)])  # fmt: skip
def test_law_draws_what_it_says(law: Law, ids: int) -> None:
    draws = 200_000
    random = np.random.default_rng(0)
    ranks = law.ranks(random.random(draws), random.random(draws), np.array(ids))
    assert ranks.min() == 0
    assert ranks.max() < ids
    bounds = np.unique(np.geomspace(1, ids, 20).astype(np.int64))
    drawn = (ranks[None, :] < bounds[:, None]).mean(1)
    np.testing.assert_allclose(drawn, law.cumulative(bounds, ids), atol=4 * 0.5 / draws**0.5)


def test_expected_statistics_are_those_of_a_sample(window: Rows) -> None:
    sample, expected = locality.measured(window.categories.T), locality.expected(LAW, CARDINALITIES)
    assert np.abs(sample.residuals(expected)).max() < 0.005


def test_measured_counts_by_hand() -> None:
    # uses: 1, 1 and 3 in the first table, 5 in the second
    sample = locality.measured([np.array([7, 8, 9, 9, 9]), np.full(5, 7)])
    assert sample.mean_uses == 10 / 4
    assert sample.beyond(1) == (0.5, 0.8)
    assert sample.beyond(4) == (0.25, 0.5)


def test_generated_ids_are_as_uneven_as_published(window: Rows) -> None:
    sample = locality.measured(window.categories.T)
    assert sample.mean_uses == pytest.approx(PUBLISHED_MEAN_USES, rel=0.01)
    for uses, ids, accesses in PUBLISHED:
        given_ids, given_accesses = sample.beyond(uses)
        # measured: within 10 % of the ids' shares and a point of the accesses'
        assert given_ids == pytest.approx(ids, rel=0.12), uses
        assert given_accesses == pytest.approx(accesses, abs=0.012), uses


def test_law_is_the_fit_to_the_published_file(data_dir: Path) -> None:
    target = locality.read_published(data_dir / "traces" / "meta_locality_stats_2022.txt")
    assert target.mean_uses == pytest.approx(PUBLISHED_MEAN_USES)
    for uses, ids, accesses in PUBLISHED:
        assert target.beyond(uses) == pytest.approx((ids, accesses), abs=1e-4)
    assert astuple(locality.fit(target, CARDINALITIES)) == pytest.approx(astuple(LAW), rel=0.01)
    deviations = locality.expected(LAW, CARDINALITIES).residuals(target)
    assert np.sqrt((deviations**2).mean()) < 0.0105
    assert np.abs(deviations).max() < 0.038


def test_fit_finds_a_known_law() -> None:
    tables = (10, 1000, 50_000, 1_000_000)
    known = locality.expected(LAW, tables)
    found = locality.expected(locality.fit(known, tables), tables)
    assert np.abs(found.residuals(known)).max() < 2e-3


def test_published_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("Avg col size: 3\n")
    with pytest.raises(ValueError, match="does not hold the locality statistics"):
        locality.read_published(tmp_path / "notes.txt")


def test_comparison_is_a_table(window: Rows) -> None:
    sample: Locality = locality.measured(window.categories.T)
    table = locality.comparison(sample, LAW, CARDINALITIES, sample).splitlines()
    assert table[0] == "| | published | fitted | measured |"
    assert all(line.count("|") == 5 for line in table)
