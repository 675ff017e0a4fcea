"""Captured steps of several ranks, as far as hosts have a part in them: all replay, or all capture, or all run the
function, whatever one of them meets. Graphs are stood in for, and ranks meet on gloo."""

from __future__ import annotations

import contextlib
import threading
import warnings

import pytest
import torch
from sharding.ranks import batch_of, seven, sharding_of, tables_of
from sharding.test_sharded_failures import told

import tieredemb as te
from tieredemb.errors import ConfigError, InvalidInputError
from tieredemb.kernels import collectives
from tieredemb.pipeline import graph_together
from tieredemb.pipeline.graph_together import StepTogether
from tieredemb.pipeline.lookups import LookupSpec
from tieredemb.sharding.collection import ShardedTieredEmbeddingBagCollection

STEPS, TABLES = 14, tables_of()


class Graph:
    """What stands in for a graph: a replay runs the function, as on a GPU its kernels would."""

    def __init__(self, step):
        self.step, self.is_there = step, True

    def replay(self):
        assert self.is_there
        self.step.did.append("replay")
        self.step.function()

    def reset(self):
        self.is_there = False


class Step:
    """What stands in for a `StepFunction`, of a batch that it is given."""

    device, eager_steps = torch.device("cpu"), 2

    def __init__(self, model):
        self.model, self.buffers, self.did = model, self, []
        self.batch = self.fails = None
        self.is_fresh = True
        self.caches, self.locked = [self], contextlib.nullcontext()
        self.on_buffers = contextlib.nullcontext
        self.lookups = lambda batch: [LookupSpec(self.model, batch[:2])]

    def function(self):
        ids, offsets, _, upstream = self.batch
        self.model(ids, offsets).backward(upstream)

    def again(self):
        return self

    def load(self, batch):
        if len(batch[0]) > 200:
            raise InvalidInputError("too long for the buffers")
        self.batch = batch

    def may_replay(self):
        return self.is_fresh

    def accumulates(self):
        return False

    def before_replay(self):
        if self.fails == "before":
            raise ConfigError("lr is negative")

    def after_capture(self):
        pass

    @contextlib.contextmanager
    def capture(self, graph):
        self.did.append("capture")
        if self.fails == "capture":
            raise ValueError("the step's own")
        yield

    def heard(self, batch):
        if self.did[-1:] != ["capture"]:  # of which nothing runs
            self.did.append("eager")
            self.function()

    def beside(self, run):
        return run()


def runs(rank, size, events):
    """What a rank does in each step, and what it is told; `events`: of step and rank, something that happens there."""
    sharding = sharding_of("both", TABLES)
    model = ShardedTieredEmbeddingBagCollection(
        TABLES, sharding=sharding, capacity=0.5, optimizer=te.Adagrad(lr=0.1), max_ids=40
    )
    step, patches = Step(model), pytest.MonkeyPatch()
    patches.setattr(graph_together, "on_device", lambda device: contextlib.nullcontext())
    patches.setattr(torch.cuda, "CUDAGraph", lambda: Graph(step))
    patches.setattr(torch.cuda, "Stream", lambda *given, **named: None)
    patches.setattr(torch.cuda, "Event", lambda: Event(1))
    patches.setattr(graph_together, "on_stream", lambda stream: contextlib.nullcontext())
    together, errors = StepTogether(step, model.agreement), []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for number in range(STEPS):
                event = events.get((number, rank))
                batch = batch_of(TABLES, number, rank, samples=seven)
                if event == "long":
                    ids = torch.zeros(7 * 4 * 6, dtype=torch.int64)
                    batch = ids, torch.arange(7 * 4 + 1) * 6, None, batch[3]
                if event == "too long":
                    batch = torch.zeros(300, dtype=torch.int64), *batch[1:]
                if event == "id":
                    batch = batch[0] + 50, *batch[1:]
                if event == "freed":
                    collectives.free_all()
                step.is_fresh, step.fails, before = event != "in flight", event, len(step.did)
                errors.append(told(together.run, batch))
                step.did[before:] = [tuple(step.did[before:])]
    finally:
        patches.undo()
        model.close()
    return step.did, errors


class Event:
    """Of a replay that has ended from the given query on, or never ends."""

    def __init__(self, ends):
        self.ends, self.asked = ends, 0

    def record(self):
        pass

    def query(self):
        self.asked += 1
        return 0 < self.ends <= self.asked


def test_a_replay_that_waits_for_a_rank_that_has_gone_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(collectives, "PATIENCE", 0.05)
    assert collectives.is_over(Event(1))
    assert collectives.is_over(Event(3))
    assert not collectives.is_over(Event(0))
    monkeypatch.setattr(collectives, "PATIENCE", 1000.0)
    assert not collectives.is_over(Event(0), 0.05)


class Holder:
    """Holds a graph whose replay ends at the given query, or never: then its end waits for NCCL's, and that for its."""

    def __init__(self, ends):
        self.replay, self.did = Event(ends), []
        self.is_given_up, self.is_free = threading.Event(), threading.Event()

    def is_over(self, patience):
        return collectives.is_over(self.replay, patience)

    def free(self):
        if not self.replay.ends:
            assert self.is_given_up.wait(10)
        self.did.append("free")
        self.is_free.set()

    def abort(self):
        self.is_given_up.set()
        assert self.is_free.wait(10)
        self.did.append("aborted")


@pytest.mark.parametrize(
    ("replay", "more", "does"),
    [(2, (), ["free"]), (0, (), ["free", "aborted"]), (1, (2,), ["free"]), (1, (0,), ["free", "aborted"])],
)
def test_what_waits_for_a_rank_that_has_gone_is_ended_before_graphs_are_freed(monkeypatch, replay, more, does):
    holder = Holder(replay)
    monkeypatch.setattr(collectives, "_HOLDERS", {holder})
    monkeypatch.setattr(collectives, "_of_nccl", lambda: [holder])
    collectives.free_all(*map(Event, more), patience=0.05)
    assert holder.did == does


USUAL = [("eager",)] * 2 + [("capture", "replay")] + [("replay",)] * (STEPS - 3)


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize(
    ("event", "number", "does", "error"),
    [
        ("none", 5, ("replay",), None),
        ("long", 5, ("eager",), None),
        ("in flight", 5, ("eager",), None),
        ("freed", 5, ("capture", "replay"), None),
        ("id", 5, (), "IdOutOfRangeError"),
        ("too long", 5, (), "InvalidInputError"),
        ("before", 5, (), "ConfigError"),
        ("capture", 2, ("capture",), "PeerError"),
    ],
)
def test_ranks_do_the_same_whatever_one_of_them_meets(worlds, rank, event, number, does, error):
    expected = list(USUAL)
    expected[number] = does
    if event == "capture":  # the next one captures in its place
        expected[number + 1] = USUAL[number]
    for did, errors in worlds(3).run(runs, {(number, rank): event}):
        assert did == expected
        met = [(step, each) for step, each in enumerate(errors) if each is not None]
        assert [(step, kind) for step, (kind, _) in met] == ([] if error is None else [(number, error)])
        assert all(text.startswith(f"rank {rank}: ") for _, (_, text) in met)
