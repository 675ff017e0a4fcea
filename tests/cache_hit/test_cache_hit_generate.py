"""Generated traces follow the law they claim, drift as much as they claim, and come back by their seed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tieredemb.cache_hit.generate import ZipfTrace, generate
from tieredemb.errors import ConfigError


def _overlap_of_most_used(ids: np.ndarray, rows: int, top: int) -> float:
    """Share of the `top` rows of the first half that are also among the top rows of the second."""
    halves = np.split(ids, 2)
    most_used = [set(np.argsort(np.bincount(half, minlength=rows))[-top:].tolist()) for half in halves]
    return len(most_used[0] & most_used[1]) / top


@pytest.mark.parametrize("alpha", [0.0, 0.8, 1.3])
def test_zipf_frequencies_follow_the_law(alpha: float) -> None:
    rows, accesses = 500, 400_000
    trace = generate(ZipfTrace(alpha=alpha, rows=rows, accesses=accesses))
    law = np.arange(1, rows + 1) ** -alpha
    law /= law.sum()
    frequencies = np.sort(np.bincount(trace.ids, minlength=rows))[::-1] / accesses
    assert trace.ids.shape == (accesses,)
    assert trace.rows == rows
    # five standard deviations of a binomial, and the bias of sorting noise where ranks are nearly equal
    np.testing.assert_allclose(frequencies, law, atol=5 * np.sqrt(law[0] / accesses))
    assert frequencies[:10].sum() == pytest.approx(law[:10].sum(), rel=0.03 if alpha else 0.15)


def test_zipf_popularity_says_nothing_about_the_id() -> None:
    trace = generate(ZipfTrace(alpha=1.0, rows=1000, accesses=50_000))
    assert abs(np.corrcoef(np.arange(1000), np.bincount(trace.ids, minlength=1000))[0, 1]) < 0.1


def test_zipf_same_seed_same_trace() -> None:
    config: dict[str, Any] = {"alpha": 1.0, "rows": 100, "accesses": 1000, "drift": 0.1, "drift_every": 100}
    first = generate(ZipfTrace(**config, seed=3)).ids
    np.testing.assert_array_equal(first, generate(ZipfTrace(**config, seed=3)).ids)
    assert (first != generate(ZipfTrace(**config, seed=4)).ids).any()


@pytest.mark.parametrize(("drift", "low", "high"), [(0.0, 0.9, 1.0), (0.5, 0.35, 0.65), (1.0, 0.0, 0.1)])
def test_drift_moves_its_share_of_the_ranks(drift: float, low: float, high: float) -> None:
    rows, accesses, top = 2000, 400_000, 20
    overlaps = [
        _overlap_of_most_used(
            generate(
                ZipfTrace(alpha=1.0, rows=rows, accesses=accesses, drift=drift, drift_every=accesses // 2, seed=seed)
            ).ids,
            rows,
            top,
        )
        for seed in range(8)
    ]
    assert low <= np.mean(overlaps) <= high


def test_drift_keeps_the_law_in_every_stretch() -> None:
    rows, step = 200, 50_000
    trace = generate(ZipfTrace(alpha=1.0, rows=rows, accesses=4 * step, drift=1.0, drift_every=step))
    law = 1 / np.arange(1, rows + 1)
    for stretch in np.split(trace.ids, 4):
        frequencies = np.sort(np.bincount(stretch, minlength=rows))[::-1] / step
        np.testing.assert_allclose(frequencies, law / law.sum(), atol=0.01)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"alpha": -0.1}, "exponent must be .* at least 0, got -0.1"),
        ({"alpha": float("nan")}, "got nan"),
        ({"rows": 0}, "rows of a generated trace .* got 0"),
        ({"rows": 2**40}, "got 1099511627776"),
        ({"accesses": -5}, "accesses must .* got -5"),
        ({"drift": 1.5}, r"drift .* \[0, 1\], got 1.5"),
        ({"drift_every": 0}, "drift_every must be at least 1 access, got 0"),
        ({"seed": -1}, "seed .* got -1"),
    ],
)
def test_zipf_impossible_values_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ZipfTrace(**({"alpha": 1.0, "rows": 10, "accesses": 10} | changed))
