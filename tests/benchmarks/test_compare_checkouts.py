"""Comparing two checkouts: what the intervals say, and a whole run of tiny size."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2]))  # the benchmarks are no part of the installed package

from benchmarks import compare_checkouts
from benchmarks.compare_checkouts import Ratio, confidence_of_each, ratio_of
from benchmarks.warm_steps import PATHS, Size, timed

REPOSITORY = Path(__file__).parents[2]


def drawn(true, seed, *, rounds=10, pairs=15, of_rounds=0.01, of_pairs=0.05):
    """Ratios around `true`, whose rounds differ, and whose pairs differ more; now and then a pair is far off."""
    rng = random.Random(seed)
    return [
        [true * shift * rng.gauss(1, of_pairs) * (5 if rng.random() < 0.1 else 1) for _ in range(pairs)]
        for shift in (rng.gauss(1, of_rounds) for _ in range(rounds))
    ]


def test_interval_of_equal_rounds_is_their_median():
    found = ratio_of([[0.9, 1.1, 50.0], [1.1, 0.2, 7.0]], 0.95)
    assert (found.ratio, found.low, found.high) == pytest.approx((1.1, 1.1, 1.1))


def test_interval_is_students():
    found = ratio_of([[1.0], [1.21]], 0.95)  # logarithms 0 and 2 log 1.1; t(0.975, 1) = 12.7062
    assert found.ratio == pytest.approx(1.1)
    assert (found.low, found.high) == pytest.approx((1.1**-11.7062, 1.1**13.7062), rel=1e-4)


def test_interval_of_swapped_checkouts_is_the_reciprocal():
    rounds = drawn(1.02, 1)
    one, other = ratio_of(rounds, 0.95), ratio_of([[1 / each for each in pairs] for pairs in rounds], 0.95)
    assert (other.ratio, other.low, other.high) == pytest.approx((1 / one.ratio, 1 / one.high, 1 / one.low))


def test_intervals_hold_the_true_ratio_as_often_as_they_say():
    """Not more seldom, although the rounds of a run differ from one another by more than their pairs explain."""
    held = 0
    for seed in range(400):
        found = ratio_of(drawn(1.0, seed, of_rounds=0.03, of_pairs=0.01), 0.9)
        held += found.low <= 1.0 <= found.high
    assert 0.85 <= held / 400 <= 0.95


@pytest.mark.parametrize(("true", "verdict"), [(0.97, "faster"), (1.0, "not told apart"), (1.03, "slower")])
def test_three_percent_are_seen(true, verdict):
    assert ratio_of(drawn(true, 3, of_rounds=0.005, of_pairs=0.02), 0.99).verdict == verdict


def test_verdict_needs_the_whole_interval():
    assert Ratio(1.05, 0.99, 1.12).verdict == Ratio(0.95, 0.9, 1.0).verdict == "not told apart"


def test_intervals_of_several_paths_hold_at_once():
    assert confidence_of_each(0.95, 1) == pytest.approx(0.95)
    assert confidence_of_each(0.95, 5) == pytest.approx(0.99)


# --- whole runs -------------------------------------------------------------------------------------------------------


def test_checkout_is_compared_with_itself(capsys):
    few = ["--device", "cpu", "--rounds", "2", "--pairs", "1", "--path", "collection of 4, prefetched"]
    compare_checkouts.main([str(REPOSITORY), str(REPOSITORY), *few])
    heading, line = capsys.readouterr().out.splitlines()
    assert "wall time of a step on cpu, intervals of 95.0% each" in heading
    assert line.startswith("collection of 4, prefetched ")


@pytest.mark.parametrize("name", PATHS["cuda"])
def test_paths_of_a_gpu_make_steps(name):
    """Tried out on the CPU, with small tables."""
    path = PATHS["cuda"][name]
    with path.make("cpu", **(path.keywords | {"size": Size(batches=3)})) as step:
        assert timed(step, 5, "cpu", "wall") > 0


def test_each_side_imports_its_own_package(tmp_path):
    """A directory whose package cannot be imported is told of, whatever package is installed."""
    (tmp_path / "tieredemb").mkdir()
    (tmp_path / "tieredemb" / "__init__.py").write_text("raise ImportError('the package of this checkout')\n")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.compare_checkouts", str(tmp_path), str(tmp_path), "--device", "cpu"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "ImportError: the package of this checkout" in done.stderr
    assert f"a process of {tmp_path} has ended" in done.stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["no-such-revision", "."], "'no-such-revision' is no directory, and no revision"),
        ([".", ".", "--rounds", "1"], "an interval needs 2 rounds"),
    ],
)
def test_wrong_arguments_are_refused(args, said, capsys):
    with pytest.raises(SystemExit) as refused:
        compare_checkouts.main([*args, "--device", "cpu"])
    assert said in capsys.readouterr().err + str(refused.value)
