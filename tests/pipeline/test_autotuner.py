"""When a loop plans ahead: while that makes its steps faster, by what the GPU says."""

from __future__ import annotations

import pytest
import torch

import tieredemb as te
from tieredemb.pipeline.autotuner import FIRST, LAST, MOST_CUT, REPEAT, SPAN, SPANS, UNTIMED, Autotuner

TRIAL = SPAN * sum(SPANS)


class Gpu:
    """A clock that steps move on, and the events of it."""

    def __init__(self, monkeypatch):
        self.now, self.is_late = 0.0, False
        gpu = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self, stream):
                self.time = gpu.now

            def query(self):
                return not gpu.is_late

            def elapsed_time(self, end):
                return end.time - self.time

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)


@pytest.fixture
def clock(monkeypatch):
    return Gpu(monkeypatch)


def run(autotuner, clock, steps, *, ahead=1.0, alone=2.0, disturbed=(), lucky=()):
    """Which steps planned ahead, that take so long, some of them longer, and others no time."""
    found = []
    for step in range(steps):
        autotuner.step()
        found.append(autotuner.ahead)
        clock.now += (step not in lucky) * (ahead if autotuner.ahead else alone) + 100.0 * (step in disturbed)
    return found


@pytest.mark.parametrize(("alone", "stays"), [(2.0, True), (0.5, False)])
def test_the_faster_way_stays(clock, alone, stays):
    autotuner = Autotuner(torch.device("cuda", 0), 2)
    found = run(autotuner, clock, 100, alone=alone)
    before, other, after = (SPAN * spans for spans in SPANS)
    untimed = 1 + UNTIMED + 2  # the first of them, and those that were planned before it
    first = FIRST + before
    assert found[:first] == [True] * first
    assert found[first : first + untimed + other] == [False] * (untimed + other)
    second = first + untimed + other
    assert found[second : second + untimed + after] == [True] * (untimed + after)
    assert set(found[second + untimed + after + SPAN :]) == {stays}


@pytest.mark.parametrize(("alone", "stays"), [(1.1, True), (0.9, False)])
@pytest.mark.parametrize("drift", [0.995, 1.005])
def test_what_makes_all_steps_faster_by_and_by_decides_nothing(clock, drift, alone, stays):
    autotuner = Autotuner(torch.device("cuda", 0), 1)
    for step in range(100):
        autotuner.step()
        clock.now += drift**step * (1.0 if autotuner.ahead else alone)
    assert autotuner.ahead == stays


def test_a_disturbed_span_does_not_count(clock):
    autotuner = Autotuner(torch.device("cuda", 0), 1)
    assert run(autotuner, clock, 200, disturbed=(FIRST + 1, FIRST + 2 * SPAN))[-1]


@pytest.mark.parametrize("faster", [True, False])
def test_a_bad_moment_of_a_whole_trial_is_made_good_by_those_after_it(clock, faster):
    """It falls on the steps that are faster, those that plan ahead or the others, by chance."""
    autotuner, found = Autotuner(torch.device("cuda", 0), 1), []
    for step in range(260):
        autotuner.step()
        found.append(autotuner.ahead)
        clock.now += 1.0 if autotuner.ahead == faster else 1.3
        clock.now += 5.0 * (autotuner.ahead == faster and step < FIRST + TRIAL + 20)
    assert (not faster) in found[FIRST + TRIAL + 20 :][:REPEAT]
    assert set(found[-20:]) == {faster}


@pytest.mark.parametrize("faster", [True, False])
def test_one_trial_does_not_overrule_two(clock, faster):
    """A bad moment of the host, longer than a trial, falls on the steps of the way that is faster."""
    autotuner = Autotuner(torch.device("cuda", 0), 1)
    times = {"ahead": 1.0 if faster else 1.3, "alone": 1.3 if faster else 1.0}
    bad = {name: 2.0 if time == 1.0 else time for name, time in times.items()}
    assert run(autotuner, clock, 200, **times)[-60:] == [faster] * 60
    while run(autotuner, clock, 1, **bad) == [faster]:  # until the next trial tries the other way
        pass
    found = run(autotuner, clock, TRIAL, **bad) + run(autotuner, clock, 300, **times)
    tried = "".join("01"[each == faster] for each in found).split("1")
    assert max(map(len, tried)) <= 1 + UNTIMED + 1 + SPAN * SPANS[1]
    assert found[-100:] == [faster] * 100


def test_a_lucky_span_does_not_count(clock):
    autotuner = Autotuner(torch.device("cuda", 0), 1)
    assert not run(autotuner, clock, 200, alone=0.8, lucky=range(FIRST + SPAN, FIRST + 2 * SPAN))[-1]


@pytest.mark.parametrize(("alone", "stays"), [(1.02, False), (1.05, True)])
def test_what_saves_next_to_nothing_is_left(clock, alone, stays):
    assert run(Autotuner(torch.device("cuda", 0), 1), clock, 200, alone=alone)[-1] == stays


def test_trials_come_less_and_less_often_and_see_what_changes(clock):
    autotuner = Autotuner(torch.device("cuda", 0), 1)
    assert not run(autotuner, clock, 100, alone=0.5)[-1]
    assert run(autotuner, clock, 20 * FIRST, alone=2.0)[-1]
    found = run(autotuner, clock, 200_000)
    changes = [step for step in range(1, len(found)) if found[step] != found[step - 1]]
    gaps = [later - earlier for earlier, later in zip(changes[::2], changes[2::2], strict=False)]
    assert gaps == sorted(gaps)
    assert LAST < gaps[-1] < LAST + 4 * TRIAL


def test_nothing_waits_for_the_gpu_and_a_trial_goes_on_until_it_has_come(clock):
    autotuner = Autotuner(torch.device("cuda", 0), 1)
    clock.is_late = True
    assert run(autotuner, clock, 1000, alone=0.5)[-1]
    clock.is_late = False
    assert not run(autotuner, clock, 2, alone=0.5)[-1]


@pytest.mark.parametrize("alone", [2.0, 0.5])
@pytest.mark.parametrize("length", [23, 40, 61])
def test_a_trial_goes_on_in_the_next_loop(clock, length, alone):
    """What passes between two loops is timed in neither."""
    autotuner = Autotuner(torch.device("cuda", 0), 1)
    for _ in range(400 // length):
        run(autotuner, clock, length, alone=alone)
        autotuner.leave()
        clock.now += 1000.0
    assert run(autotuner, clock, 1, alone=alone) == [alone > 1.0]


@pytest.mark.parametrize("length", [1, 3, 9])
def test_loops_that_are_too_short_for_a_trial_have_none(clock, length):
    autotuner = Autotuner(torch.device("cuda", 0), 1)
    found = []
    for _ in range(60 * (MOST_CUT + 2) // length):
        found += run(autotuner, clock, length, alone=2.0)
        autotuner.leave()
    assert set(found[-100:]) == {True}
    assert found.count(False) <= 9 * (MOST_CUT + 1)


def test_where_plans_are_made_by_others_nothing_is_timed():
    bag = te.TieredEmbeddingBag(10, 4, device="cpu")
    assert te.prefetch([], bag).autotuner is None
    assert te.prefetch([], bag, 0).autotuner is None
