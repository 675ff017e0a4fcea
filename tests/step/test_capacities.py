"""For how many ids recorded plans have room, and how many steps are replayed so, without a GPU."""

from __future__ import annotations

import weakref

import numpy as np
import pytest

from tieredemb.kernels.recorder import Recorder
from tieredemb.step.capacities import LEAST_CAPACITY, MOST_CAPACITIES, STEPS_AN_OCTAVE, Capacities, capacity_for

STEPS, WARM_UP = 400, 50


class Recording:
    """A plan, which is free once it was made."""

    def is_free(self):
        return True

    def size_bytes(self):
        return 0


def replayed(steps):
    """The share of steps after the first ones whose plans are replayed, and how much more room they have than ids."""
    capacities, recorder, reported = Capacities(), Recorder(most=8), weakref.WeakSet()
    found, excess = [], []
    for counts in steps:
        rooms = capacities.of(counts)
        assert all(capacity >= count for capacity, count in zip(rooms, counts, strict=True))
        key = tuple(rooms)
        found.append(recorder.find(key) is not None)
        if not found[-1]:
            recorder.record(key, Recording, reported)
        excess.append(sum(rooms) / sum(counts))
    return np.mean(found[WARM_UP:]), np.mean(excess)


def counts_of(seed, grows):
    """The ids of each of one to three pools of tables with bags of 0 … 60 ids, step by step. `grows`: by how much more
    or less than usual, of a step by its number."""
    random = np.random.default_rng(seed)
    batch = int(2 ** random.uniform(6, 13))
    longest = [random.integers(2, 61, random.integers(1, 20)) for _ in range(random.integers(1, 4))]
    mean = np.array([batch * each.sum() / 2 for each in longest])
    deviation = np.array([np.sqrt(batch / 12 * (each**2).sum()) for each in longest])
    for step in range(STEPS):
        drawn = grows(step, random) * random.normal(mean, deviation)
        yield [max(1, int(count)) for count in drawn]


def test_nearly_all_steps_of_jagged_batches_are_replayed():
    for seed in range(20):
        share, excess = replayed(counts_of(seed, lambda *_: 1))
        assert share >= 0.97
        assert excess < 1.2


@pytest.mark.parametrize(
    "grows",
    [lambda step, _: 1 + 0.5 * np.sin(step / 40), lambda _, random: random.uniform(0.5, 1.5)],
    ids=["slowly", "at once"],
)
def test_most_steps_of_batches_whose_size_changes_are_replayed(grows):
    shares, excess = zip(*[replayed(counts_of(seed, grows)) for seed in range(20)], strict=True)
    assert np.mean(shares) >= 0.95
    assert max(excess) < 1.3


def test_batches_of_one_size_have_little_more_room_than_they_need():
    capacities = Capacities()
    for counts in ([100_000, 70_000], [9, 1_000_000]):
        assert [capacities.of(counts) for _ in range(5)] == [[*map(capacity_for, counts)]] * 5


def test_far_smaller_batches_have_capacities_of_their_own():
    capacities = Capacities()
    large, small = [10**6], [10**5]
    assert capacities.of(large) == [capacity_for(10**6)]
    assert capacities.of(small) == [capacity_for(10**5)]
    assert capacities.of(large) == [capacity_for(10**6)]
    assert capacities.of([10**6 - 1000]) == [capacity_for(10**6)]


def test_a_capacity_grows_by_more_than_it_has_to():
    capacities = Capacities()
    (first,) = capacities.of([10**5])
    count = first + 1
    assert capacities.of([count]) == [capacity_for(count + count // STEPS_AN_OCTAVE)]
    assert capacities.of([10**5]) == capacities.of([count])  # in the place of the first


def test_the_capacities_used_last_are_known():
    capacities = Capacities()
    sizes = [4**power for power in range(5, 6 + MOST_CAPACITIES)]
    for size in sizes:
        capacities.of([size + 1])
    assert len(capacities._known) == MOST_CAPACITIES


def test_rooms_are_few_and_not_much_larger():
    for n in [1, 255, 256, 257, 4095, 4096, 4097, 10**5, 10**6 + 1, 2**28]:
        capacity = capacity_for(n)
        assert n <= capacity <= max(n + LEAST_CAPACITY - 1, n * (1 + 1 / STEPS_AN_OCTAVE))
    assert capacity_for(0) == 0
    assert len({capacity_for(n) for n in range(2**16, 2**17)}) <= STEPS_AN_OCTAVE + 1
