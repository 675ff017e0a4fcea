"""Captured steps of several ranks, as far as hosts have a part in them: all replay, or all capture, or all run the
function, whatever one of them meets. Graphs are stood in for, and ranks meet on gloo."""

from __future__ import annotations

import contextlib
import gc
import threading
import warnings

import pytest
import torch
from sharding.ranks import batch_of, seven, sharding_of, tables_of
from sharding.test_sharded_failures import raised

import tieredemb as te
from tieredemb.cache.locks import Locks
from tieredemb.errors import ConfigError, InvalidInputError
from tieredemb.kernels import collectives
from tieredemb.pipeline import ring
from tieredemb.pipeline.forms import Forms
from tieredemb.pipeline.lookups import LookupSpec
from tieredemb.sharding.captures import Captures
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
    """What stands in for a `StepFunction`, of a batch that it is given, and for its buffers. `capacity`: for ids."""

    device, divisions, eager_steps, number, trains = torch.device("cpu"), (), 2, 1, True

    def __init__(self, model):
        self.model, self.buffers, self.did = model, self, []
        self.batch = self.fails = None
        self.is_fresh, self.capacity = True, 200
        self.modules, self.caches, self.locks = [model], [self], Locks(())
        self.engines = [shard.engine for shard in model._ranks._context.shards]
        self.lookups = lambda batch: [LookupSpec(self.model, batch[:2])]

    @contextlib.contextmanager
    def on_buffers(self):
        for engine in self.engines:
            engine.ids_may_exceed_bags.add(threading.get_ident())
        try:
            yield
        finally:
            for engine in self.engines:
                engine.ids_may_exceed_bags.clear()

    def function(self):
        ids, offsets, _, upstream = self.batch
        with self.on_buffers():
            self.model(ids, offsets).backward(upstream)

    def another(self):
        return self

    def load(self, batch):
        if batch[0].dtype is not torch.int64:
            raise InvalidInputError("of another dtype")
        self.batch = batch

    @property
    def form(self):
        return 7 * 4 + 1

    def form_of(self, batch):
        return len(batch[1])

    def has_other_shapes(self, batch):
        if self.fails == "shapes":
            raise ValueError("no memory to look at them")
        return len(batch[0]) > self.capacity or self.form_of(batch) != self.form

    def of_form_of(self, batch):
        self.capacity = len(batch[0])
        return self

    def is_current(self):
        return True

    def __call__(self, batch):
        self.did.append("function")
        self.batch = batch
        self.function()

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

    def free(self, graph):
        graph.reset()

    def run_observed(self, batch):
        if self.did[-1:] != ["capture"]:  # of which nothing runs
            self.did.append("eager")
            self.function()

    def beside(self, run):
        return run()


def stand_in(step, patches):
    """Has rings, on the CPU, capture and replay what stands in for their step."""
    patches.setattr(ring, "on_device", lambda device: contextlib.nullcontext())
    patches.setattr(torch.cuda, "CUDAGraph", lambda: Graph(step))
    patches.setattr(ring, "own_stream", lambda *given: None)
    patches.setattr(torch.cuda, "Event", lambda: Event(1))
    patches.setattr(ring, "on_stream", lambda stream: contextlib.nullcontext())
    patches.setattr(Captures, "wait_for_stream", lambda agreement: step.did.append("wait"))


def runs(rank, size, events, max_ids=40):
    """What a rank does in each step, and what it raises; `events`: of step and rank, something that happens there."""
    gc.collect()  # a collection that others have left would end its group meanwhile, and graphs with it
    sharding = sharding_of("all kinds", TABLES)
    model = ShardedTieredEmbeddingBagCollection(
        TABLES, sharding=sharding, capacity=0.5, optimizer=te.Adagrad(lr=0.1), max_ids=max_ids
    )
    step, patches = Step(model), pytest.MonkeyPatch()
    stand_in(step, patches)
    train, errors = te.graph_step(step), []
    train._step, train._agreement = step, model.agreement
    train._forms = Forms(step, step, model.agreement, train._summary)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for number in range(STEPS):
                event = events.get((number, rank))
                batch = batch_of(TABLES, number, rank, samples=seven)
                if event == "long":
                    ids = torch.zeros(7 * 4 * 6, dtype=torch.int64)
                    batch = ids, torch.arange(7 * 4 + 1) * 6, None, batch[3]
                if event == "of one owner":
                    offsets = (torch.arange(7 * 4 + 1) * 28).clamp(max=7 * 28)
                    batch = torch.zeros(7 * 28, dtype=torch.int64), offsets, None, batch[3]
                if event == "more ids":
                    batch = torch.zeros(7 * 4 * 10, dtype=torch.int64), torch.arange(7 * 4 + 1) * 10, *batch[2:]
                if event == "fewer samples":
                    batch = batch_of(TABLES, number, rank, samples=lambda *_: 3)
                if event == "int32":
                    batch = batch[0].int(), *batch[1:]
                if event == "pageable":
                    batch = *batch[:2], torch.zeros(1 << 15), batch[3]
                if event == "id":
                    batch = batch[0] + 50, *batch[1:]
                # a scheduler's, which comes back to what it was
                model.fused_optimizer.param_groups[0]["lr"] = 0.3 if event == "rate" else 0.1 / (1 + number % 2)
                step.number = 2 if event == "another step" else 1
                if event == "freed":
                    collectives.free_all()
                step.is_fresh, step.fails, before = event != "in flight", event, len(step.did)
                errors.append(raised(train, batch))
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
    """Holds a graph whose replay ends, or never, or fails: one that never ends is freed once NCCL is given up, which
    that is once the graph is freed."""

    def __init__(self, ends):
        self.ends, self.did = ends, []
        self.is_given_up, self.is_free = threading.Event(), threading.Event()

    def ends_in_time(self):
        if self.ends is None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return self.ends

    def free(self):
        if self.ends is False:
            assert self.is_given_up.wait(10)
        self.did.append("free")
        self.is_free.set()

    def abort(self):
        self.is_given_up.set()
        assert self.is_free.wait(10)
        self.did.append("aborted")


@pytest.fixture
def held(monkeypatch):
    def hold(ends):
        holder = Holder(ends)
        monkeypatch.setattr(collectives, "_HOLDERS", {holder})
        monkeypatch.setattr(collectives, "_of_nccl", lambda: [holder])
        return holder

    return hold


@pytest.mark.parametrize(("ends", "does"), [(True, ["free"]), (False, ["free", "aborted"]), (None, ["free"])])
def test_a_replay_that_waits_for_a_rank_that_has_gone_is_ended_before_it_is_freed(held, ends, does):
    holder = held(ends)
    collectives.free_all()
    assert holder.did == does


@pytest.mark.parametrize(("ends", "does"), [(True, ["free"]), (False, ["free", "aborted"]), (None, ["free"])])
def test_a_gpu_that_waits_for_a_rank_that_has_gone_is_ended(held, monkeypatch, ends, does):
    holder, is_over = held(ends), threading.Event()

    def synchronize(device):
        if ends is None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        assert ends or is_over.wait(10)

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(collectives, "LAST", 0.05)
    collectives.end_waits(torch.device("cuda", 0))
    is_over.set()
    assert holder.did == does


class Barrier:
    """What stands in for a barrier of our own."""

    def __init__(self, ends):
        self.ends, self.is_ended = ends, False

    def ends_in_time(self):
        return self.ends

    def end(self):
        self.is_ended = True


@pytest.mark.parametrize("ends", [True, False])
def test_a_barrier_that_waits_for_a_rank_that_has_gone_is_ended(held, monkeypatch, ends):
    holder, barrier = held(True), Barrier(ends)
    holder.is_given_up.set()
    monkeypatch.setattr(collectives, "_WAITING", {barrier})
    collectives.free_all()
    assert barrier.is_ended == (not ends)


def test_without_new_threads_graphs_are_freed_all_the_same(held, monkeypatch):
    """As in Python 3.12 at its end."""
    holder = held(False)
    holder.is_given_up.set()

    def start(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", start)
    collectives.free_all()
    assert holder.did == ["free"]


USUAL = [("eager",)] * 2 + [("capture", "replay")] + [("replay",)] * (STEPS - 3)


def test_a_batch_whose_copy_waits_for_the_gpu_is_copied_once_that_is_waited_for(worlds):
    for here, (did, errors) in enumerate(worlds(3).run(runs, {(4, 1): "pageable"})):
        assert errors == [None] * STEPS
        assert did == [*USUAL[:4], ("wait", "replay") if here == 1 else ("replay",), *USUAL[5:]]


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize(
    ("event", "number", "does", "error"),
    [
        ("none", 5, ("replay",), None),
        ("long", 5, ("eager",), None),
        ("in flight", 5, ("eager",), None),
        ("freed", 5, ("capture", "replay"), None),
        ("id", 5, (), "IdOutOfRangeError"),
        ("int32", 5, (), "InvalidInputError"),
        ("shapes", 5, (), "PeerError"),
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


@pytest.mark.parametrize("rank", [0, 2])
def test_all_ranks_run_the_function_where_one_has_a_batch_of_other_shapes(worlds, rank):
    events = {(1, rank): "fewer samples", (7, rank): "fewer samples", (8, (rank + 1) % 3): "fewer samples"}
    for here, (did, errors) in enumerate(worlds(3).run(runs, events)):
        assert errors == [None] * STEPS
        of_this = ("function",) if here == rank else ("eager",)
        of_next = ("function",) if here == (rank + 1) % 3 else ("eager",)
        # the ranks whose batches are in buffers warm up meanwhile, and wait for the one whose batch is not
        assert did == [
            *(("eager",), of_this, ("eager",), ("capture", "replay")),
            *(3 * [("replay",)]), of_this, of_next, *((STEPS - 9) * [("replay",)]),
        ]  # fmt: skip


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_requests_more_ids_than_fit_gets_more_and_all_capture_anew(worlds, rank):
    for did, errors in worlds(3).run(runs, {(5, rank): "more ids", (10, rank): "more ids"}, 300):
        assert errors == [None] * STEPS
        assert did == [*USUAL[:5], ("eager",), ("eager",), ("capture", "replay"), *((STEPS - 8) * [("replay",)])]


@pytest.mark.parametrize("rank", [0, 2])
def test_without_max_ids_a_batch_of_more_ids_than_before_makes_all_ranks_capture_anew(worlds, rank):
    expected = list(USUAL)
    expected[5:7] = ("eager",), ("capture", "replay")
    events = {(5, rank): "of one owner", (9, (rank + 1) % 3): "of one owner"}  # the second of which fits
    for did, errors in worlds(3).run(runs, events, None):
        assert errors == [None] * STEPS
        assert did == expected


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize(
    ("event", "text", "goes_on"),
    [
        ("rate", "lr of the Adagrad that updates the rows differs between the ranks: ", False),
        ("another step", "rank {rank} number 2", True),
    ],
)
def test_a_rank_that_would_replay_otherwise_is_noticed(worlds, rank, event, text, goes_on):
    """Before any rank replays."""
    for did, errors in worlds(3).run(runs, {(5, rank): event}):
        assert did[:6] == [*USUAL[:5], ()]
        kind, said = errors[5]
        assert kind == "PeerError"
        assert text.format(rank=rank) in said
        assert errors[:5] == [None] * 5
        assert all((error is None) == goes_on for error in errors[6:])
