"""What `stats()` of a sharded collection counts of what a rank sends: bytes that can be computed by hand, of eager and
of captured steps, and the time that its host waits for others."""

from __future__ import annotations

import itertools
import time
from dataclasses import fields

import pytest
import torch
import torch.distributed as dist
from sharding.test_sharded_graph_agreement import Step, stand_in

import tieredemb as te
from tieredemb.pipeline.ring import Ring
from tieredemb.pipeline.summary import StepSummary

WIDTH, MAX_IDS, SAMPLES = 4, 8, 3
ID, ROW = 8, 4 * WIDTH  # bytes
IDS, OFFSETS = [[0, 1, 3, 3, 5], [2, 4, 7, 7, 7]], [0, 2, 2, 5]  # of two ranks, which own even and odd ids


def built(*, sharding=None, mode="sum", **keywords):
    table = te.TableConfig(name="t", num_embeddings=10, embedding_dim=WIDTH, mode=mode)
    keywords = {"max_ids": MAX_IDS, "optimizer": te.Adagrad(lr=0.1)} | keywords
    return te.ShardedTieredEmbeddingBagCollection([table], sharding=sharding, capacity=1.0, **keywords)


def batch_of(rank):
    return torch.tensor(IDS[rank % 2]), torch.tensor(OFFSETS)


def sent(stats):
    return stats.id_bytes_sent, stats.row_bytes_sent, stats.gradient_bytes_sent


def steps(rank, size, peer_memory, weighted, keywords):
    """Bytes by kind of a step, of another one after it, and of an evaluation; whether counters only grow; and whether a
    state dict counts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIEREDEMB_PEER_MEMORY", peer_memory)
        model = built(**keywords, is_weighted=weighted)
        ids, offsets = batch_of(rank)
        weights = [torch.ones(len(ids), requires_grad=True)] if weighted else []
        snapshots = [model.stats()]
        for _ in range(2):
            model(ids, offsets, *weights).sum().backward()
            snapshots.append(model.stats())
        with torch.no_grad():
            model(ids, offsets, *weights)
        snapshots.append(model.stats())
        model.state_dict()
        is_counted = model.stats().bytes_sent != snapshots[-1].bytes_sent
        of_model = te.stats(torch.nn.Sequential(model))
        model.close()
    pairs = list(itertools.pairwise(snapshots))
    grows = all(getattr(late, f.name) >= getattr(early, f.name) for early, late in pairs for f in fields(late))
    return [sent(late - early) for early, late in pairs], grows, is_counted, sent(of_model) == sent(snapshots[-1])


def check(world, expected, *, peer_memory="1", weighted=False, for_weights=0, **keywords):
    """Expected of each rank: ids, rows and gradients of a training step · `for_weights`: of its rows those that the
    gradient of weights alone takes."""
    for found, (ids, rows, gradients) in zip(world.run(steps, peer_memory, weighted, keywords), expected, strict=True):
        (one, other, evaluation), grows, is_counted, is_of_model = found
        assert one == other == (ids, rows, gradients)
        assert evaluation == (ids, rows - for_weights * bool(rows), 0)
        assert grows
        assert not is_counted
        assert is_of_model


@pytest.mark.parametrize("peer_memory", ["0", "1"])
@pytest.mark.parametrize("size", [2, 3])
def test_blocks_for_others_are_counted_at_their_padded_size(worlds, size, peer_memory):
    """Ids behind how many there are; rows and gradients, one for each id."""
    expected = [((1 + MAX_IDS) * ID, MAX_IDS * ROW, MAX_IDS * ROW)] * size
    others = size - 1
    check(worlds(size), [tuple(others * each for each in its) for its in expected], peer_memory=peer_memory)


def test_scales_of_gradients_are_counted_with_them(worlds):
    check(worlds(2), [((1 + MAX_IDS) * ID, MAX_IDS * ROW, MAX_IDS * (ROW + 4))] * 2, mode="mean")


def test_without_max_ids_the_fullest_block_counts(worlds):
    """Which is that of rank 0 for rank 1: four ids, of three rows."""
    check(worlds(2), [((1 + 4) * ID, 3 * ROW, 4 * ROW)] * 2, max_ids=None)


def test_tables_held_whole_send_bags(worlds):
    """Rank 1 has them: rank 0 sends it the gradients of its bags. Both send lengths of bags: messages are equally
    long."""
    ids = (1 + MAX_IDS + SAMPLES) * ID
    check(worlds(2), [(ids, 0, SAMPLES * ROW), (ids, SAMPLES * ROW, 0)], sharding=te.TableWise(rank=1))


def test_weights_count_as_ids_and_what_their_gradient_takes_as_rows(worlds):
    ids, all_rows = (1 + MAX_IDS + SAMPLES) * ID + MAX_IDS * 4, MAX_IDS * ROW
    expected = [(ids, all_rows, SAMPLES * ROW), (ids, SAMPLES * ROW + all_rows, 0)]
    check(worlds(2), expected, sharding=te.TableWise(rank=1), weighted=True, for_weights=all_rows)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_tables_that_all_hold_send_no_rows(worlds, size, weighted):
    """A rank sends the others its ids, the lengths of its bags, and their gradients; nothing comes back."""
    ids = (1 + MAX_IDS + SAMPLES) * ID + MAX_IDS * 4 * weighted
    expected = [((size - 1) * ids, 0, (size - 1) * SAMPLES * ROW)] * size
    check(worlds(size), expected, sharding=te.Replicated(), weighted=weighted)


def test_stats_add_up_whichever_tables_they_are_of():
    plain = te.TieredEmbeddingBag(10, WIDTH, capacity=10)
    plain(torch.tensor([[1, 2]]))
    cached, of_rank = plain.stats(), te.ShardedStats(lookups=5, row_bytes_sent=7, wait_seconds=0.5)
    assert not hasattr(cached, "bytes_sent")
    assert cached + of_rank == of_rank + cached
    assert (cached + of_rank).lookups == 7
    assert (cached + of_rank).bytes_sent == 7
    assert cached + of_rank - cached == of_rank
    assert cached - cached == te.CacheStats()


# --- captured steps ---------------------------------------------------------------------------------------------------


class Sends(Step):
    """A step whose exchanges are those of its runs, one of which is captured; hosts send nothing in a replay. `seen`:
    what is counted at the end of a run."""

    def __init__(self, model):
        super().__init__(model)
        self.seen = []

    def run_observed(self, batch):
        super().function()
        self.seen.append(sent(self.model.stats()))

    def function(self):
        self.did.append("sends nothing")


def captured(rank, size):
    """What each step sends by the counters, how many replays there were, and what the counters were in each run."""
    model, counted = built(), []
    step = Sends(model)
    with pytest.MonkeyPatch.context() as patches:
        stand_in(step, patches)
        patches.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)  # what is captured runs here
        steps = Ring(step, step, 0, model.agreement, StepSummary())
        for number in range(8):
            before, step.is_fresh = model.stats(), number != 5
            steps.run((*batch_of(rank), None, torch.ones(SAMPLES, WIDTH)))
            counted.append(sent(model.stats() - before))
    model.close()
    return counted, step.did.count("sends nothing"), step.seen


def test_each_replay_counts_what_its_capture_would_send(worlds):
    of_step = ((1 + MAX_IDS) * ID, MAX_IDS * ROW, MAX_IDS * ROW)
    for counted, replays, seen in worlds(2).run(captured):
        assert replays == 5
        assert counted == [of_step] * 8
        runs = [1, 2, 2, 6]  # the third is captured, the last is the eager one behind replays
        assert seen == [tuple(number * each for each in of_step) for number in runs]


# --- waits ------------------------------------------------------------------------------------------------------------

SLEEP, SEEN = 0.5, 0.1  # seconds; a rank may come late to its own wait


def waits(rank, size, peer_memory, first):
    """How long a rank has waited where rank 1 sleeps before a step: the `first`, or one behind it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIEREDEMB_PEER_MEMORY", peer_memory)
        model = built()
        ids, offsets = batch_of(rank)
        for number in range(1 if first else 2):
            dist.barrier()
            before = model.stats()
            if rank == 1 and (first or number):
                time.sleep(SLEEP)
            model(ids, offsets).sum().backward()
        waited = (model.stats() - before).wait_seconds
        model.close()
    return waited


@pytest.mark.parametrize("first", [False, True], ids=["later", "first"])
@pytest.mark.parametrize("peer_memory", ["0", "1"])
def test_a_host_counts_how_long_it_waits_for_others(worlds, peer_memory, first):
    waited, _ = worlds(2).run(waits, peer_memory, first)
    assert waited > SEEN


def travels_slowly(rank, size):
    """The seconds of a step whose messages take long, and of a state dict, which does not count."""
    model = built()
    ids, offsets = batch_of(rank)
    model(ids, offsets).sum().backward()
    before, send = model.stats(), dist.all_to_all_single

    def slow(*args, **keywords):
        time.sleep(SLEEP)
        return send(*args, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", slow)
        model(ids, offsets).sum().backward()
        of_step = model.stats() - before
        model.state_dict()
        of_state_dict = model.stats() - before - of_step
    model.close()
    return of_step.exchange_seconds, of_step.wait_seconds, of_state_dict.exchange_seconds


def test_a_host_counts_how_long_its_messages_travel(worlds):
    for exchanged, waited, of_state_dict in worlds(2).run(travels_slowly):
        assert exchanged > 3 * SLEEP  # ids, rows, gradients
        assert waited < SLEEP
        assert of_state_dict == 0
