"""One contract for every policy: scores against the formula, victims against a sort."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieredemb import LFU, LRU
from tieredemb.cache.host.hot_rows import stamp
from tieredemb.cache.policy import scoring
from tieredemb.cache.policy_cpu import choose_victims, raise_scores
from tieredemb.errors import ConfigError
from tieredemb.kernels.constants import MAX_SCORE, MIN_SCORE

POLICIES = [LRU(), LFU(), LFU(half_life_batches=1), LFU(half_life_batches=1e6), LFU(half_life_batches=math.inf)]


def used_at(policy, batches):
    """Score of a row after uses at the given batches."""
    score, terms = np.array([MIN_SCORE], np.uint32), scoring(policy)
    for batch in batches:
        raise_scores(np.array([0], np.int32), score, terms.now(batch), terms)
    return int(score[0])


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_policy_never_scores_a_used_row_zero(policy):
    assert used_at(policy, [1]) > MIN_SCORE > 0


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_policy_raises_the_score_by_every_use(policy):
    scores = [used_at(policy, range(1, n + 1)) for n in range(1, 400)]
    assert scores == sorted(set(scores))


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_policy_saturates_at_the_end_of_its_range(policy):
    score, terms = np.array([MAX_SCORE], np.uint32), scoring(policy)
    raise_scores(np.array([0], np.int32), score, terms.now(2**31), terms)
    assert score[0] == MAX_SCORE or isinstance(policy, LRU)


@pytest.mark.parametrize("half_life", [1.0, 10.0, 300.0, 1e5])
def test_lfu_score_is_the_log_of_the_decayed_count(half_life):
    rng = np.random.default_rng(1)
    terms = scoring(LFU(half_life_batches=half_life))
    for _ in range(20):
        batches = np.sort(rng.choice(np.arange(1, 2000), 60, replace=False))
        exact = batches[-1] / half_life + math.log2(np.sum(2.0 ** ((batches - batches[-1]) / half_life)))
        # each of the 60 uses rounds once to half a unit
        assert (
            abs((used_at(LFU(half_life_batches=half_life), batches) - MIN_SCORE) / terms.unit - exact) < 61 / terms.unit
        )


def test_lfu_prefers_frequent_rows_and_forgets_them():
    frequent = list(range(1, 101))
    assert used_at(LFU(half_life_batches=300), frequent) > used_at(LFU(half_life_batches=300), [101])
    assert used_at(LFU(half_life_batches=10), frequent) < used_at(LFU(half_life_batches=10), [200])
    assert used_at(LRU(), frequent) < used_at(LRU(), [101])
    assert used_at(LFU(half_life_batches=math.inf), frequent) > used_at(LFU(half_life_batches=math.inf), [10**6])


@given(
    st.lists(
        st.tuples(st.integers(-1, 5), st.sampled_from([0, 1, 2, 3, 1000, 2**31, 2**32 - 1]), st.integers(1, 6)),
        min_size=1,
        max_size=60,
    ),
    st.integers(1, 60),
    st.integers(1, 8),
)
def test_victims_are_the_lowest_unlocked_rows(slots, count, oldest):
    key = np.array([k for k, _, _ in slots], np.int64)
    score = np.array([s for _, s, _ in slots], np.uint32)
    last = np.array([b for _, _, b in slots], np.int32)
    victims = choose_victims(count, key, score, last, stamp(oldest), len(key), True).tolist()
    candidates = [i for i in range(len(key)) if key[i] >= 0 and last[i] < oldest]
    expected = sorted(candidates, key=lambda i: (score[i], last[i]))[:count]
    assert len(set(victims)) == len(victims) == len(expected)
    assert set(victims) <= set(candidates)
    assert sorted((score[i], last[i]) for i in victims) == [(score[i], last[i]) for i in expected]


def test_without_ties_by_age_the_score_alone_decides():
    rng = np.random.default_rng(0)
    score, last = rng.integers(1, 6, 500).astype(np.uint32), rng.integers(1, 50, 500).astype(np.int32)
    for count in (1, 77, 499, 500, 600):
        victims = choose_victims(count, np.arange(500), score, last, stamp(40), 500, False)
        expected = np.sort(score[last < 40])[:count]
        assert len(set(victims.tolist())) == len(victims)
        assert (last[victims] < 40).all()
        assert np.array_equal(np.sort(score[victims]), expected)


def test_victims_are_exact_in_a_large_skewed_cache():
    rng = np.random.default_rng(0)
    n = 50_000
    score = (2.0 ** rng.uniform(0, 32, n)).astype(np.uint32)
    last = rng.integers(1, 50, n).astype(np.int32)
    victims = choose_victims(12_345, np.arange(n), score, last, stamp(100), n, True)
    expected = np.lexsort((last, score))[:12_345]
    assert np.array_equal(np.sort(victims), np.sort(expected)) or sorted(
        zip(score[victims], last[victims], strict=True)
    ) == list(zip(score[expected], last[expected], strict=True))


def test_locks_compare_signed_when_the_batch_number_wraps():
    last = np.array([stamp(2**31 - 3), stamp(2**31 + 1)])
    oldest = stamp(2**31 - 1)
    victims = choose_victims(2, np.array([1, 2]), np.array([5, 5], np.uint32), last, oldest, 2, True)
    assert victims.tolist() == [0]


@pytest.mark.parametrize("half_life", [0, 0.5, -1, math.nan, "300", True, 2.0**40])
def test_lfu_refuses_a_half_life_that_is_none(half_life):
    with pytest.raises(ConfigError, match="half_life_batches"):
        LFU(half_life_batches=half_life)


def test_lfu_score_is_rounded_to_nearest():
    terms = scoring(LFU(half_life_batches=300))
    distances = np.arange(0, 3000, 7)
    for distance in distances:
        score = np.array([10_000 - distance], np.uint32)
        raise_scores(np.array([0], np.int32), score, 10_000, terms)
        exact = 10_000 + terms.unit * math.log2(1 + 2.0 ** (-distance / terms.unit))
        assert abs(int(score[0]) - exact) <= 0.5
