"""A thread that plans on a GPU beside the one that computes: when each of them goes on. No GPU takes part."""

from __future__ import annotations

import contextlib
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch

from tieredemb.cache.turns import give_turn, take_turn
from tieredemb.pipeline import lanes

LONG = 10  # seconds: what has not happened then never will


@pytest.fixture
def lane(monkeypatch):
    event = SimpleNamespace(record=lambda *_: None, wait=lambda *_: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _: contextlib.nullcontext())
    monkeypatch.setattr(lanes, "side_stream", lambda *_: None)
    monkeypatch.setattr(lanes._Turn, "PATIENCE", 10 * LONG)
    with lanes.WorkerLane(torch.device("cpu")) as lane:
        yield lane


class Plan:
    """A plan that launches, waits for `storage`, and launches the rest."""

    def __init__(self):
        self.storage = threading.Event()
        self.said = []

    def __call__(self):
        self.said.append("asks")
        give_turn()
        assert self.storage.wait(LONG)
        self.said.append("has")
        take_turn()
        self.said.append("ends")
        return self.said


def until(condition):
    for _ in range(LONG * 1000):
        if condition():
            return
        threading.Event().wait(0.001)
    raise AssertionError("it never was")


def test_a_plan_launches_before_its_submitter_goes_on(lane):
    plan = Plan()
    future = lane.submit(plan)
    assert plan.said == ["asks"]
    plan.storage.set()
    assert future.result(LONG) == ["asks", "has", "ends"]


def test_a_plan_that_has_its_rows_leaves_the_interpreter_until_it_is_wanted(lane):
    plan = Plan()
    plan.storage.set()
    future = lane.submit(plan)
    until(lambda: lane._last.lingers)
    assert plan.said == ["asks", "has"]
    assert future.exception(LONG) is None
    assert plan.said[-1] == "ends"


def test_a_plan_is_wanted_at_the_latest_when_the_next_one_comes(lane):
    first, second = Plan(), Plan()
    first.storage.set()
    lane.submit(first)
    until(lambda: lane._last.lingers)
    lane.submit(second)
    assert first.said[-1] == "ends"
    assert second.said == ["asks"]
    second.storage.set()


def test_no_submitter_waits_behind_a_slow_storage(lane):
    first, second = Plan(), Plan()
    futures = [lane.submit(first), lane.submit(second)]
    assert second.said == []
    first.storage.set()
    second.storage.set()
    assert [future.result(LONG)[-1] for future in futures] == ["ends", "ends"]


def test_a_plan_is_not_left_waiting_for_ever(lane, monkeypatch):
    monkeypatch.setattr(lanes._Turn, "PATIENCE", 0.01)
    plan = Plan()
    plan.storage.set()
    lane.submit(plan)
    until(lambda: plan.said[-1] == "ends")


def test_plans_that_fail_or_are_given_up_let_others_go_on(lane):
    def fails():
        raise KeyError("lost")

    assert isinstance(lane.submit(fails).exception(LONG), KeyError)
    slow, given_up = Plan(), Plan()
    lane.submit(slow)
    future = lane.submit(given_up)
    assert future.cancel()
    slow.storage.set()
    after = Plan()
    after.storage.set()
    assert lane.submit(after).result(LONG)[-1] == "ends"
    assert given_up.said == []


def test_a_lane_keeps_no_plan_alive(lane):
    future = lane.submit(lambda: Plan())
    made = weakref.ref(future.result(LONG))
    del future
    until(lambda: made() is None)
