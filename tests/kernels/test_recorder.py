"""What a recorder records, keeps and frees, and when it gives up, without a GPU."""

from __future__ import annotations

import gc
import warnings
import weakref

import pytest
import torch

from tieredemb.kernels import recorder
from tieredemb.kernels.recorder import MOST_COUNTED, MOST_FAILURES, TIMES, Recorder, attempt


class Recording:
    """What a recorder keeps, as far as it knows it."""

    def __init__(self):
        self.free = True

    def is_free(self):
        return self.free

    def size_bytes(self):
        return 1


@pytest.fixture
def reported():
    return weakref.WeakSet()


@pytest.fixture
def run(reported):
    """Runs the program of a key, by the recording that is returned, or by launches."""

    def run(of, key, make=Recording):
        return of.find(key) or of.record(key, make, reported)

    return run


def test_what_comes_the_third_time_is_recorded_and_then_found(run, reported):
    of = Recorder(most=4)
    assert [run(of, "a") for _ in range(TIMES)] == [None] * TIMES
    recording = run(of, "a")
    assert recording is not None
    assert [run(of, "a") for _ in range(5)] == [recording] * 5
    assert set(reported) == {recording}


def test_keys_that_differ_each_time_are_launched_and_forgotten(run):
    of = Recorder(most=4)
    assert [run(of, key) for key in range(5 * MOST_COUNTED)] == [None] * 5 * MOST_COUNTED
    assert run(of, "a") is run(of, "a") is None
    for key in range(MOST_COUNTED):
        run(of, key)
    assert run(of, "a") is None  # it was counted too long ago


def test_as_many_recordings_of_a_key_as_may_be_in_use(run):
    of, used = Recorder(most=4, at_once=3), []
    for _ in range(TIMES):
        run(of, "a")
    for _ in range(3):
        used.append(run(of, "a"))  # at once, as the key is known
        used[-1].free = False
    assert len(set(used)) == 3
    assert run(of, "a") is None
    used[1].free = True
    assert run(of, "a") is used[1]


def test_the_keys_used_last_are_kept_and_what_they_displace_is_freed_and_put_off(run, reported):
    of, made = Recorder(most=2), {}
    for key in "ab":
        made[key] = [run(of, key) for _ in range(TIMES + 1)][-1]
    assert run(of, "a") is made["a"]
    for _ in range(TIMES + 1):
        run(of, "c")
    assert run(of, "a") is made["a"]
    gone = weakref.ref(made.pop("b"))
    gc.collect()
    assert gone() is None
    assert len(reported) == 2
    assert [run(of, "b") for _ in range(MOST_COUNTED + TIMES)] == [None] * (MOST_COUNTED + TIMES)
    assert run(of, "b") is not None


def test_chosen_keys_are_dropped(run):
    of = Recorder(most=4)
    kept = {key: [run(of, key) for _ in range(TIMES + 1)][-1] for key in (1, 2, 3)}
    of.drop(lambda key: key != 2)
    assert run(of, 2) is kept[2]
    assert run(of, 1) is not kept[1]


def test_it_gives_up_after_failures_and_keeps_what_it_has(run, reported):
    of, failed = Recorder(most=4), []

    def fails():
        failed.append(1)
        raise torch.OutOfMemoryError("none left")

    recording = [run(of, "a") for _ in range(TIMES + 1)][-1]
    assert [run(of, "b", fails) for _ in range(10)] == [None] * 10
    assert len(failed) == MOST_FAILURES
    assert run(of, "b") is None
    assert run(of, "a") is recording
    assert set(reported) == {recording}


def test_an_interrupt_of_a_recording_is_raised_and_no_failure(run):
    of = Recorder(most=4)

    def interrupted():
        raise KeyboardInterrupt

    for _ in range(TIMES):
        run(of, "a")
    for _ in range(MOST_FAILURES + 1):
        with pytest.raises(KeyboardInterrupt):
            run(of, "a", interrupted)
    assert run(of, "a") is not None


def test_how_often_a_program_is_launched_first_can_be_changed(run, monkeypatch):
    monkeypatch.setattr(recorder, "TIMES", 10**9)
    of = Recorder(most=4)
    assert [run(of, "a") for _ in range(100)] == [None] * 100
    monkeypatch.setattr(recorder, "TIMES", 0)
    assert run(of, "b") is not None


@pytest.mark.parametrize(
    ("error", "warns"),
    [
        (torch.OutOfMemoryError("none left"), False),
        (RuntimeError("CUDA error: operation failed due to a previous error during capture"), False),
        (RuntimeError("the CUDA driver refused to launch plan_begin (1 x 32): error 901"), False),
        (RuntimeError("error 9017 of ours"), True),
        (RuntimeError("use_count > 0 INTERNAL ASSERT FAILED"), True),
    ],
)
def test_mistakes_are_warned_of_and_disturbances_are_not(error, warns):
    def fails():
        raise error

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert attempt(fails) is None
    assert len(seen) == warns
