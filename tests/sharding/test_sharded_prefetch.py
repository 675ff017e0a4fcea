"""Batches whose ids are exchanged and planned while the one before computes: the same bits."""

from __future__ import annotations

import threading
import warnings

import pytest
from devices import equal
from sharding.ranks import batch_of, calls_of, one_process, step_of, tables_of, uneven
from sharding.test_sharded_failures import raised
from torch import nn

import tieredemb as te
from tieredemb.errors import StorageFullError
from tieredemb.kernels.parallel_cpu import Pass
from tieredemb.pipeline.autotuner import SharedAutotuner
from tieredemb.sharding.collection import ShardedTieredEmbeddingBagCollection
from tieredemb.sharding.exchange import Exchange
from tieredemb.sharding.header import Phase
from tieredemb.sharding.layout import RowWise
from tieredemb.sharding.request import Request

TABLES = tables_of(modes=("sum", "mean"), widths=(4, 8))
STEPS = 8


def model_of(optimizer, **keywords):
    return ShardedTieredEmbeddingBagCollection(
        TABLES, sharding=RowWise(), optimizer=optimizer, average=False, **keywords
    )


def runs_ahead(rank, size, depth, optimizer, capacity, leave_at):
    """Trains in a prefetch loop, which it may leave and begin again; what was planned and found."""
    model = model_of(optimizer, capacity=capacity)
    batches = [batch_of(TABLES, step, rank, samples=uneven) for step in range(STEPS)]
    found = []
    take = model.planned.take

    def counted(tables, given):
        call = take(tables, given)
        found.append(call is not None)
        return call

    model.planned.take = counted
    outputs = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a rank without samples cannot tell its tensors apart
        for part in (batches[:leave_at], batches[leave_at:]):
            loop = te.prefetch(part, model, depth, ids_of=lambda batch: batch[:2])
            outputs += [step_of(model, batch, weighted=False)[0] for batch in loop]
    weights = dict(model.state_dict())
    waiting = len(model.planned.waiting)
    model.close()
    return outputs, weights, sum(found), waiting


@pytest.mark.parametrize("optimizer", [te.Adagrad(lr=0.1), te.Adam(lr=0.05)], ids=["sparse", "dense"])
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("capacity", [1, 0.5])
@pytest.mark.parametrize("size", [1, 3])
def test_ahead_or_not_bits_are_the_same(worlds, size, depth, optimizer, capacity):
    alone, expected = one_process(size, TABLES, STEPS, uneven, False, {"optimizer": optimizer, "capacity": 1.0})
    answers = worlds(size).run(runs_ahead, depth, optimizer, capacity, 5)
    for rank, (outputs, _, found, waiting) in enumerate(answers):
        assert all(equal(mine, theirs) for mine, (theirs, _) in zip(outputs, alone[rank], strict=True))
        assert found == STEPS
        assert waiting == 0
    for name, weight in expected.items():
        assert equal(answers[0][1][name], weight)


def free_amid_updates(rank, size, optimizer):
    """Whether another thread, as one that plans ahead, got at the rows of each width while rows were updated."""
    model, free = model_of(optimizer, capacity=0.5), []
    caches = [shard.engine.tables.groups[0].cache for shard in model._held]
    run = Pass.run

    def try_locks():
        for cache in caches:
            free.append(cache.lock.acquire(blocking=False))
            if free[-1]:
                cache.lock.release()

    def tried(update):
        other = threading.Thread(target=try_locks)
        other.start()
        other.join()
        run(update)

    Pass.run = tried
    try:
        step_of(model, batch_of(TABLES, 0, rank, samples=uneven), weighted=False)
    finally:
        Pass.run = run
    model.close()
    return free


def test_an_update_keeps_other_threads_from_the_rows_of_all_widths(worlds):
    """One that plans ahead may replace the arrays of a cache whose rows the update is about to reach."""
    for free in worlds(3).run(free_amid_updates, te.Adagrad(lr=0.1)):
        assert len(free) == 4  # two caches, in the update of each
        assert not any(free)


HAPPENS = 4  # the step in which something does
PLANNED = [Phase.PLAN, Phase.FORWARD, Phase.BACKWARD]


def meets(rank, size, event, optimizer, weighted):
    """Trains in a prefetch loop, in one step of which something happens to rank 1. The headers of each step,
    what was raised, outputs and tables."""
    tables = tables_of(rows=(40, 60), widths=(8,))
    model = ShardedTieredEmbeddingBagCollection(
        tables, sharding=RowWise(), optimizer=optimizer, average=False, capacity=0.5
    )
    batches = [batch_of(tables, step, rank, samples=lambda rank: 5) for step in range(STEPS)]
    phases, outputs, errors = [], [], []
    look_up = Request.look_up

    def full(*args, **keywords):
        raise StorageFullError("no space is left")

    with calls_of(Exchange, "header") as headers:
        for step, batch in enumerate(te.prefetch(batches, model, ids_of=lambda batch: batch[:2])):
            happens = event if (rank, step) == (1, HAPPENS) else None
            if happens == "no plan":
                model.planned.drop_all()
            Request.look_up = full if happens == "full" else look_up
            error = raised(lambda: outputs.append(step_of(model, batch, weighted=weighted)[0]))  # noqa: B023
            Request.look_up = look_up
            if error is not None:
                errors.append((step, error))
            phases.append([its[1] for its in headers])
            headers.clear()
    weights = dict(model.state_dict())
    model.close()
    return phases, errors, outputs, weights


@pytest.mark.parametrize(
    ("optimizer", "weighted", "usual"),
    [
        (te.Adagrad(lr=0.1), False, PLANNED),
        (te.Adagrad(lr=0.1), True, [Phase.PLAN, Phase.FORWARD, Phase.ROWS, Phase.BACKWARD, Phase.BACKWARD]),
        (te.Adam(lr=0.1), False, [Phase.PLAN, Phase.FORWARD, Phase.ROWS, Phase.BACKWARD]),
    ],
    ids=["announced with its rows", "weighted", "dense"],
)
def test_a_planned_forward_is_announced_with_its_rows_where_nothing_is_lost_by_it(worlds, optimizer, weighted, usual):
    """Gradients that are yet to be multiplied by weights may be too many for a rank: then no rank updates."""
    for phases, errors, *_ in worlds(3).run(meets, None, optimizer, weighted):
        assert not errors
        assert phases[1:-1] == [usual] * (STEPS - 2)
        assert phases[-1] == usual[1:]  # nothing is left to plan


def test_what_one_rank_has_not_planned_all_ask_for_anew(worlds):
    tables = tables_of(rows=(40, 60), widths=(8,))
    given = {"optimizer": te.Adagrad(lr=0.1), "capacity": 1.0}
    alone, expected = one_process(3, tables, STEPS, lambda rank: 5, False, given)
    answers = worlds(3).run(meets, "no plan", te.Adagrad(lr=0.1), False)
    for rank, (phases, errors, outputs, _) in enumerate(answers):
        assert not errors
        again = [Phase.PLAN, Phase.FORWARD, Phase.FORWARD, Phase.ROWS, Phase.BACKWARD]
        assert phases[HAPPENS : HAPPENS + 2] == [again, again]  # it had planned two batches
        assert phases[HAPPENS + 2] == PLANNED
        assert all(equal(mine, theirs) for mine, (theirs, _) in zip(outputs, alone[rank], strict=True))
    for name, weight in expected.items():
        assert equal(answers[0][3][name], weight)


def test_what_one_rank_fails_in_before_it_is_announced_all_raise(worlds):
    answers = worlds(3).run(meets, "full", te.Adagrad(lr=0.1), False)
    for phases, errors, outputs, _ in answers:
        assert errors == [(HAPPENS, ("StorageFullError", "rank 1: no space is left"))]
        assert len(outputs) == STEPS - 1
        assert phases[HAPPENS + 1] == PLANNED


def learns(rank, size):
    """The loop finds out by itself which tensors the model looks up."""
    model = nn.Sequential(model_of(te.SGD(lr=0.1), capacity=0.5))
    planned = model[0].planned
    ahead = []
    for ids, offsets, _, upstream in te.prefetch(
        [batch_of(TABLES, step, rank, samples=lambda rank: 5 + rank) for step in range(5)], model
    ):
        ahead.append(len(planned.waiting))
        model[0](ids, offsets).backward(upstream)
    weights = dict(model[0].state_dict())
    model[0].close()
    return ahead, weights


def test_what_is_looked_up_is_learned_from_the_first_batch(worlds):
    _, expected = one_process(2, TABLES, 5, lambda rank: 5 + rank, False, {"optimizer": te.SGD(lr=0.1)})
    answers = worlds(2).run(learns)
    for ahead, _ in answers:
        assert ahead[0] == 0
        assert min(ahead[1:4]) >= 1
    for name, weight in expected.items():
        assert equal(answers[0][1][name], weight)


def meets_a_bad_id(rank, size):
    model = model_of(te.SGD(lr=0.1), capacity=0.5)
    batches = [batch_of(TABLES, step, rank, samples=lambda rank: 5 + rank) for step in range(4)]
    if rank == 1:
        batches[2][0][-1] = 40
    found = []
    for batch in te.prefetch(batches, model, ids_of=lambda batch: batch[:2]):
        found.append(raised(step_of, model, batch, weighted=False))
    model.close()
    return found


def test_a_bad_id_that_was_planned_comes_at_its_batch_on_all_ranks(worlds):
    for found in worlds(2).run(meets_a_bad_id):
        assert [each is None for each in found] == [True, True, False, True]
        assert found[2][0] == "IdOutOfRangeError"
        assert found[2][1].startswith("rank 1: id 40")


def leaves(rank, size):
    """Leaves the loop early, and continues without one."""
    model = model_of(te.Adagrad(lr=0.1), capacity=0.5)
    batches = [batch_of(TABLES, step, rank, samples=lambda rank: 5) for step in range(6)]
    for step, batch in enumerate(te.prefetch(batches, model, 2, ids_of=lambda batch: batch[:2])):
        step_of(model, batch, weighted=False)
        if step == 2:
            break
    for batch in batches[3:]:
        step_of(model, batch, weighted=False)
    weights = dict(model.state_dict())
    waiting = len(model.planned.waiting), len(model._held[0].engine.planned.waiting)
    model.close()
    return weights, waiting


def test_a_loop_that_is_left_leaves_nothing_behind(worlds):
    _, expected = one_process(2, TABLES, 6, lambda rank: 5, False, {"optimizer": te.Adagrad(lr=0.1)})
    (weights, waiting), _ = worlds(2).run(leaves)
    assert waiting == (0, 0)
    for name, weight in expected.items():
        assert equal(weights[name], weight)


class Told:
    """Replaces the autotuner: says for each step whether planning ahead pays."""

    def __init__(self, steps):
        self.steps, self.at = steps, 0

    @property
    def ahead(self):
        return self.steps[min(self.at, len(self.steps)) - 1] if self.at else True

    def step(self):
        self.at += 1

    def leave(self):
        pass


def paced(rank, size, steps):
    """A loop that plans ahead where rank `steps` says so; in which steps it had."""
    model = model_of(te.Adagrad(lr=0.1), capacity=0.5)
    batches = [batch_of(TABLES, step, rank, samples=lambda rank: 5) for step in range(len(steps[0]))]
    loop = te.prefetch(batches, model, ids_of=lambda batch: batch[:2])
    assert isinstance(loop.autotuner, SharedAutotuner)  # which has nothing to find out on a CPU, and does as others do
    if steps[rank]:
        loop.autotuner = SharedAutotuner(Told(steps[rank]), model.agreement)
    planned, outputs = [], []
    for batch in loop:
        planned.append(len(model.planned.waiting))
        outputs.append(step_of(model, batch, weighted=False)[0])
    weights = dict(model.state_dict())
    model.close()
    return planned, outputs, weights


def test_ranks_plan_ahead_where_the_first_of_them_finds_that_it_pays(worlds):
    on, off = [True] * 12, [True] * 3 + [False] * 5 + [True] * 4
    alone, expected = one_process(3, TABLES, 12, lambda rank: 5, False, {"optimizer": te.Adagrad(lr=0.1)})
    answers = worlds(3).run(paced, (off, on, []))
    for rank, (planned, outputs, weights) in enumerate(answers):
        # of this batch and the next one: what the first rank announces with a forward holds from the next batch on
        assert planned == [2, 2, 2, 2, 1, 0, 0, 0, 0, 1, 2, 1], rank
        assert all(equal(mine, theirs) for mine, (theirs, _) in zip(outputs, alone[rank], strict=True))
        assert not rank or not weights
    for name, weight in expected.items():
        assert equal(answers[0][2][name], weight)
