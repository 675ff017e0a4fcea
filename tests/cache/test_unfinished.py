"""The transfers that a plan on a GPU defers, without a GPU: what is pending, and what has come."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from tieredemb.cache.base import USE
from tieredemb.cache.device import planner as planner_file
from tieredemb.cache.device.plan import BatchPlan, Phase
from tieredemb.cache.device.planner import Planner


class Rows:
    """A transfer that notes in `done` whose rows it has moved, those that are `missed`, and in `placed` which it has
    given slots; it `fails` once with that."""

    def __init__(self):
        self.done, self.placed, self.fails = [], [], None

    def place(self, plan, lag):
        if plan.phase < Phase.PLACED:
            self.placed.append(plan.missed.name)
            plan.phase = Phase.PLACED

    def publish(self, plan):
        pass

    def move(self, plan):
        fails, self.fails = self.fails, None
        if fails is not None:
            raise fails
        self.done.append(plan.missed.name)
        plan.phase = Phase.MOVED


class PlannedBatch:
    """A ticket."""

    def __init__(self, batch):
        self.batch, self.is_complete, self.failed, self.plan, self.ready = batch, True, False, None, None


class Pending:
    """A planner over nothing, and what its transfers have done."""

    def __init__(self):
        order = SimpleNamespace(whole=lambda: None, planned=lambda: None, touched=lambda: None)
        ledger = SimpleNamespace(lag_of=lambda batch: 1)
        self.rows, self.tickets = Rows(), {}
        self.done = self.rows.done
        self.planner = Planner(None, None, self.rows, ledger, None, order, None, threading.RLock())

    def leave(self, name, *, uncached=False):
        ticket = self.tickets[name] = PlannedBatch(len(self.tickets))
        missed = SimpleNamespace(name=name, have_moved=lambda: self.done.append(f"{name} forgotten"))
        self.planner.leave(ticket, BatchPlan(None, missed, uncached, USE, None, is_deferred=True))
        assert not ticket.is_complete
        return ticket


def test_what_was_left_comes_in_its_order():
    pending = Pending()
    tickets = [pending.leave(name) for name in ("first", "second")]
    assert not pending.planner.is_over
    pending.planner.finish_last(usable=True)
    assert pending.done == ["first", "second"]
    assert pending.planner.is_over
    assert all(ticket.is_complete and not ticket.failed for ticket in tickets)


def test_rows_come_whatever_is_suspect():
    """Their slots have other keys already, and what is there is to go where it belongs."""
    pending = Pending()
    ticket = pending.leave("rows")
    pending.planner.finish_last(usable=False)
    assert pending.done == ["rows"]
    assert ticket.is_complete
    assert not ticket.failed


def test_what_is_interrupted_stays_pending():
    pending = Pending()
    ticket, pending.rows.fails = pending.leave("rows"), KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        pending.planner.finish_last(usable=True)
    assert not pending.planner.is_over
    assert not ticket.is_complete
    pending.planner.finish_last(usable=True)
    assert pending.done == ["rows"]


@pytest.fixture
def capturing(monkeypatch):
    """Whether a capture is under way: in its one place."""
    now = [False]
    monkeypatch.setattr(planner_file.torch.cuda, "is_current_stream_capturing", lambda: now[0])
    return now


def test_what_a_capture_has_launched_is_pending_again_where_that_was_given_up(capturing):
    """In front of what the capture has left, until somebody has seen its replay."""
    pending = Pending()
    ticket = pending.leave("before")
    pending.planner.begin_capture()
    capturing[0] = True
    for _ in range(2):  # amid the capture it is launched once, and has not come
        pending.planner.finish_last(usable=True)
        assert pending.done == ["before"]
        assert not ticket.is_complete
    pending.leave("since")
    capturing[0] = False
    pending.planner.end_capture()
    pending.planner.finish_last(usable=True)
    assert pending.done == ["before", "before", "since"]
    assert ticket.is_complete
    assert pending.planner.is_over


def test_what_a_capture_has_launched_has_come_once_that_was_replayed(capturing):
    pending = Pending()
    before = pending.leave("before")
    pending.planner.begin_capture()
    capturing[0] = True
    pending.planner.finish_last(usable=True)
    since = pending.leave("since")
    capturing[0] = False
    pending.planner.end_capture(ran=True)
    assert before.is_complete
    assert not since.is_complete
    pending.planner.finish_last(usable=True)
    assert pending.done == ["before", "since"]
    assert pending.planner.is_over


def test_slots_are_given_once_after_a_capture_that_nobody_has_ended(capturing):
    """What comes then begins with them, before it is to know of rows."""
    pending = Pending()
    pending.leave("rows", uncached=True)
    pending.planner.begin_capture()
    capturing[0] = True
    pending.planner.place_last()
    capturing[0] = False
    pending.planner.place_last()
    pending.planner.publish_last()
    pending.planner.finish_last(usable=True)
    assert pending.rows.placed == ["rows", "rows"]  # by the capture, which has not run, and for good
    assert pending.done == ["rows"]


def test_what_a_replay_has_brought_is_pending_no_more():
    pending = Pending()
    came, left = pending.leave("came"), pending.leave("left")
    pending.planner.rows_arrived([came])
    assert came.is_complete
    assert not left.is_complete
    pending.planner.finish_last(usable=True)
    assert pending.done == ["left"]


def test_nothing_is_to_come_to_slots_that_were_emptied():
    pending = Pending()
    ticket = pending.leave("rows")
    pending.planner.forget()
    assert ticket.failed
    assert ticket.is_complete
    assert pending.planner.is_over
    pending.planner.finish_last(usable=True)
    assert pending.done == ["rows forgotten"]


def test_a_batch_is_planned_to_where_the_one_before_was():
    rows = planner_file.DeferredRows(behind=None)

    class Memory:
        entered = 0

        def __enter__(self):
            Memory.entered += 1

        def __exit__(self, *_):
            pass

    rows.begin()
    first = [rows.missed(n, torch.device("cpu"), Memory()) for n in (5, 9)]
    assert all(each.is_over for each in first)
    rows.begin()
    assert [rows.missed(n, torch.device("cpu"), Memory()) for n in (5, 9)] == first
    assert Memory.entered == 2
    rows.begin()
    assert rows.missed(6, torch.device("cpu"), Memory()) is not first[0]
    assert rows.size_bytes() == sum(each.size_bytes for each in rows._missed)
