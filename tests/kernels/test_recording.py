"""Recordings, without a GPU: whether there are any, which pool of memory, captures that are interrupted."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from disturbances.disturbed import LineInterrupts

from tieredemb.kernels import captures, recording
from tieredemb.kernels.compiler import LISTENERS
from tieredemb.kernels.recording import GraphPool


class Graph:
    """A recording, as far as its pool knows it."""


def test_a_pool_is_shared_while_any_graph_uses_it(monkeypatch):
    handles = iter(range(10))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    pool = GraphPool()
    assert [pool.handle(), pool.handle()] == [0, 1]  # nothing was captured with the first
    one, other = Graph(), Graph()
    pool.used_by(one)
    assert pool.handle() == 1
    pool.used_by(other)
    del one
    assert pool.handle() == 1
    del other
    assert pool.handle() == 2  # torch has forgotten it with its last graph
    pool.used_by(third := Graph())
    pool.begin_anew()  # a recording has failed
    assert [pool.handle(), pool.handle()] == [3, 4]
    pool.used_by(fourth := Graph())
    del third  # has no part in the new one
    assert pool.handle() == 4
    del fourth


def test_recording_can_be_switched_off(monkeypatch):
    monkeypatch.setattr(recording, "_knows_nodes", lambda: True)
    monkeypatch.delenv("TIEREDEMB_RECORD", raising=False)
    assert recording.can_record()
    for value, expected in (("0", False), ("", False), ("1", True)):
        monkeypatch.setenv("TIEREDEMB_RECORD", value)
        assert recording.can_record() is expected
    monkeypatch.setattr(recording, "_knows_nodes", lambda: False)
    assert not recording.can_record()


class Captured:
    """A capture that an interrupt ends: before it has begun, or after."""

    def __init__(self, begins):
        self.begins = begins
        self.capturing = False

    def __enter__(self):
        self.capturing = self.begins
        raise KeyboardInterrupt

    def pool(self):
        raise RuntimeError("no capture has ended")

    def capture_end(self):
        self.capturing = False


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_an_interrupt_gives_up_no_others_part_in_a_pool(monkeypatch, begins, shared):
    captured, released = Captured(begins), []
    stream = type("Stream", (), {"device": None, "device_index": 0, "wait_stream": lambda *_: None})()
    monkeypatch.setattr(captures, "_AtOnce", lambda graph, **_: graph)
    monkeypatch.setattr(captures.Capture, "_release_generator", lambda self: None)
    for name, answer in (
        ("current_stream", lambda device=None: stream),
        ("set_stream", lambda stream: None),
        ("is_current_stream_capturing", lambda: captured.capturing),
        ("graph_pool_handle", lambda: "its own"),
    ):
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *_: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda *given: released.append(given[1]), raising=False)
    with (
        pytest.raises(KeyboardInterrupt),
        captures.Capture(captured, stream, "others'" if shared else None, at_once=True),
    ):
        pass
    assert released == ([] if shared and not begins else ["others'" if shared else "its own"])


class Whole:
    """A capture that goes as it should."""

    def __init__(self):
        self.capturing = False

    def __enter__(self):
        self.capturing = True

    def __exit__(self, *_):
        self.capturing = False

    def pool(self):
        return "its own"

    def capture_end(self):
        self.capturing = False


def captured(monkeypatch, graph, streams):
    """What makes a `Capture` of it, whose streams are told of in `streams`."""
    here = type("Stream", (), {"device": None, "device_index": 0, "wait_stream": lambda *_: None})()
    monkeypatch.setattr(captures, "_AtOnce", lambda graph, **_: graph)
    monkeypatch.setattr(captures.Capture, "_release_generator", lambda self: None)
    for name, answer in (
        ("current_stream", lambda device=None: here),
        ("set_stream", streams.append),
        ("is_current_stream_capturing", lambda: graph.capturing),
    ):
        monkeypatch.setattr(torch.cuda, name, answer)
    return here, lambda: captures.Capture(graph, here, "a pool", at_once=True)


def test_a_capture_that_is_interrupted_anywhere_has_ended(monkeypatch):
    graph, streams, at = Whole(), [], 0
    here, make = captured(monkeypatch, graph, streams)
    while True:
        interrupts = LineInterrupts(at)
        try:
            with interrupts.on(), make():
                assert threading.get_ident() in captures.CAPTURING
        except KeyboardInterrupt:
            pass
        else:
            break
        assert not graph.capturing, f"line {at}"
        assert threading.get_ident() not in captures.CAPTURING, f"line {at}"
        assert set(streams) <= {here}
        at += 1
    assert at > 12


def test_the_collector_is_back_after_an_interrupt_anywhere():
    at = 0
    while True:
        interrupts = LineInterrupts(at)
        try:
            with interrupts.on(), captures.no_collector():
                assert not gc.isenabled()
        except KeyboardInterrupt:
            pass
        else:
            break
        assert gc.isenabled(), f"line {at}"
        at += 1
    assert gc.isenabled()
    assert at > 4


def test_launches_are_noted_no_longer_once_a_recording_was_interrupted_anywhere():
    at = 0
    while True:
        interrupts = LineInterrupts(at)
        try:
            with interrupts.on(), recording._listening(lambda *_: None):
                assert threading.get_ident() in LISTENERS
        except KeyboardInterrupt:
            pass
        else:
            break
        assert threading.get_ident() not in LISTENERS, f"line {at}"
        at += 1
    assert at > 4
