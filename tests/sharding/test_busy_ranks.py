"""A rank whose GPU is busy for long, before a header of the ranks, finds out that another has gone; those
that are all there go on. What a GPU does is played here; `test_sharded_gpus.py` has some that wait for a killed rank.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from datetime import timedelta

import pytest
import torch
from devices import equal
from sharding.ranks import batch_of, calls_of, one_process, seven, step_of, tables_of
from sharding.test_sharded_failures import LONG, QUICK, raised
from sharding.worlds import World

import tieredemb as te
from tieredemb.sharding import exchange
from tieredemb.sharding.collection import ShardedTieredEmbeddingBagCollection
from tieredemb.sharding.context import ShardedContext
from tieredemb.sharding.exchange import Exchange
from tieredemb.sharding.header import Phase
from tieredemb.sharding.layout import RowWise

TABLES, RANKS, STEPS = tables_of(), 3, 4
KEYWORDS = {"capacity": 0.5, "optimizer": te.Adagrad(lr=0.1)}


class Busy:
    """What a GPU does, and is asked for `times` times before it is done."""

    def __init__(self, times):
        self.times = times

    def query(self):
        self.times -= 1
        return self.times < 0


@contextlib.contextmanager
def busy_model(times, *, shares=True, patience=0.02, timeout=LONG):
    """A model whose rank waits before it reads what its ids are, and whole tables; other settings of `exchange`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "PATIENCE", patience)
        patch.setenv("TIEREDEMB_PEER_MEMORY", str(int(shares)))
        model = ShardedTieredEmbeddingBagCollection(
            TABLES, sharding=RowWise(), average=False, timeout=timeout, **KEYWORDS
        )
        context = model._ranks._context
        find = context.find

        def waits(done=None):
            context.wait_for(Busy(times))

        def found(batch, wait):
            wait()
            return find(batch, wait)

        context.find, context.wait_for_stream = found, waits
        yield model
        model.close()


def trains(rank, size, who, shares):
    """Steps and whole tables, where the GPUs of ranks `who` are busy; how often this rank has announced it."""
    with (
        calls_of(Exchange, "_exchange_headers") as calls,
        busy_model(1500 if rank in who else 0, shares=shares) as model,
    ):
        batches = [batch_of(TABLES, step, rank, samples=seven) for step in range(STEPS)]
        outputs = [step_of(model, batch, weighted=False)[0] for batch in batches]
        weights, state = dict(model.state_dict()), model.fused_optimizer.state_dict()
    return outputs, weights, len(state["state"]), sum(call[1] == Phase.BUSY for call in calls)


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("who", [(0,), (2,), (0, 1, 2)], ids=str)
def test_ranks_that_are_busy_for_long_train_the_same_bits(worlds, who, shares):
    outputs, weights = one_process(RANKS, TABLES, STEPS, seven, False, KEYWORDS)
    found = worlds(RANKS).run(trains, who, shares)
    for rank, (its, *_, said) in enumerate(found):
        assert all(equal(one, other) for one, (other, _) in zip(its, outputs[rank], strict=True))
        assert (said > 0) == (rank in who)
    assert found[0][1].keys() == weights.keys()
    assert all(equal(found[0][1][name], weights[name]) for name in weights)
    assert found[0][2] > 0


def meets(rank, size):
    """Rank 1 has a wrong id, which the others hear of while rank 0 is busy; then all go on."""
    ids, offsets, *_ = batch_of(TABLES, 0, rank, samples=seven)
    wrong = ids.clone()
    wrong[0] = 10**6 if rank == 1 else wrong[0]
    with busy_model(1500 if rank == 0 else 0) as model:
        return raised(model, wrong, offsets), raised(model, ids, offsets)


def test_what_a_rank_meets_one_that_is_busy_hears_of(worlds):
    for (kind, text), then in worlds(RANKS).run(meets):
        assert kind == "IdOutOfRangeError"
        assert text.startswith("rank 1: ")
        assert then is None


def waits_too_long(rank, size, patience):
    """What rank 0 waits for never ends."""
    ids, offsets, *_ = batch_of(TABLES, 0, rank, samples=seven)
    with busy_model(10**9 if rank == 0 else 0, timeout=QUICK, patience=patience) as model:
        started = time.monotonic()
        return raised(model, ids, offsets), time.monotonic() - started


@pytest.mark.parametrize("patience", [0.02, 10.0])
def test_a_rank_that_is_busy_for_longer_than_others_wait_leaves_them(worlds, patience):
    found = worlds(RANKS).run(waits_too_long, patience)
    assert found[0][0][1].startswith("the GPU of rank 0 was still busy after 3 s (timeout=)")
    for rank, ((kind, text), seconds) in enumerate(found):
        assert kind == "PeerError"
        assert "start all of them again from the last checkpoint" in text.replace("Start", "start")
        assert seconds < 1.6 * QUICK.total_seconds(), rank


def is_left(rank, size, where):
    """Rank 1 is killed where the others look up a batch, or read whole tables, and all they wait for is a GPU; what
    those raise, and when."""
    with busy_model(0) as model:
        for step in range(2):
            step_of(model, batch_of(TABLES, step, rank, samples=seven), weighted=False)
        if rank == 1:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        context = model._ranks._context
        context.wait_for_stream = lambda done=None: context.wait_for(Busy(10**9))
        ids, offsets, *_ = batch_of(TABLES, 2, rank, samples=seven)
        started = time.monotonic()
        found = raised(model, ids, offsets) if where == "lookup" else raised(model.state_dict)
        return found, time.monotonic() - started


@pytest.mark.parametrize("where", ["lookup", "tables"])
def test_a_rank_that_is_busy_finds_out_that_another_was_killed(where):
    world = World(RANKS)
    try:
        for pipe in world.pipes:
            pipe.send((is_left, (where,)))
        for rank in (0, 2):
            assert world.pipes[rank].poll(30)
            kind, value = world.pipes[rank].recv()
            assert kind == "returned", value
            (name, text), seconds = value
            assert name == "PeerError"
            assert text.startswith(
                f"rank {rank} reports that it is alive, as its GPU has been busy for long, and another"
            )
            assert seconds < 5
    finally:
        world.close()


def announces(rank, size):
    """A header of which rank 0's is late: how often the others do what they do meanwhile."""
    done = []
    with calls_of(Exchange, "_exchange_headers") as calls, busy_model(1500 if rank == 0 else 0) as model:
        context = model._ranks._context
        context.wait_for_stream()
        context.exchange.header(Phase.FORWARD, 1, context.no_counts, meanwhile=lambda: done.append(None))
    return len(done), len(calls)


def test_what_a_rank_does_meanwhile_it_does_once(worlds):
    for times, rounds in worlds(RANKS).run(announces):
        assert times == 1
        assert rounds > 1


def waits_of(rank, size, scaled):
    """How often this rank waits for its GPU in a step."""
    with busy_model(0) as model:
        if scaled:
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
            scaler.scale(torch.ones(1))
            model.fused_optimizer.attach_grad_scaler(scaler)
        with calls_of(ShardedContext, "wait_for") as calls:
            step_of(model, batch_of(TABLES, 0, rank, samples=seven), weighted=False)
    return len(calls)


@pytest.mark.parametrize(("scaled", "waits"), [(False, 2), (True, 4)])
def test_what_the_host_reads_of_a_gpu_it_waits_for_so(worlds, scaled, waits):
    """Before it reads what the ids are, and rows come through it; and whether a gradient is finite, and the scale."""
    assert worlds(2).run(waits_of, scaled) == [waits, waits]


def test_a_wait_that_is_given_up_ends_what_the_gpu_does(monkeypatch):
    ended = []
    monkeypatch.setattr(exchange, "end_waits", ended.append)
    its = Exchange.__new__(Exchange)  # of no process group
    its.rank, its.timeout, its.failures, its._broken, its._device = 0, timedelta(seconds=0.05), 0, "", "a GPU"
    its._held = []
    its._check, its._exchange_headers = lambda: None, lambda *given: None
    its.wait_for(Busy(0), None)
    assert not its.is_broken
    with pytest.raises(te.errors.PeerError, match="the GPU of rank 0 was still busy"):
        its.wait_for(Busy(10**9), None)
    assert its.is_broken
    assert ended == ["a GPU"]
