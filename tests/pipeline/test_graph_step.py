"""Steps that the library captures: the bits of the function itself, batches that fit and those that do not."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace

import pytest
import torch
from counters import Replays
from devices import assert_same_bits, equal, idle, randint
from pairs import parametrize_pairs
from torch import nn
from training import NAMES, OPTIMIZERS, bits, random_batch, table_configs

import tieredemb as te
from tieredemb.errors import IdOutOfRangeError, InvalidInputError, UnsupportedError
from tieredemb.modules.forwards import observe_forwards
from tieredemb.pipeline.buffers import Buffers
from tieredemb.pipeline.captured import StepFunction
from tieredemb.pipeline.summary import NO_GPU, OTHER_SHAPES

ROWS, WIDTH = 300, 4


class Run:
    """A model of tables and a dense part, its optimizers, and the step that trains it."""

    def __init__(self, tables, **keywords):
        self.tables = tables
        self.table = te.TieredEmbeddingBagCollection(tables, **keywords)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, sum(table.embedding_dim for table in tables)))
        self.dense = torch.optim.SGD([self.scale], lr=0.01, foreach=True)

    def step(self, batch):
        ids, offsets, weights, target = batch
        self.dense.zero_grad(set_to_none=True)
        out = torch.tanh(self.table(ids, offsets, weights) * self.scale)
        loss = (out - target).square().mean() * 10
        loss.backward()
        self.dense.step()
        return {"loss": loss, "out": [out]}

    def numbers(self):
        return [*bits(self.table), self.scale.detach().clone()]


def batches(tables, steps, *, samples=7, seed=0):
    return [random_batch(tables, samples, 100 * seed + step) for step in range(steps)]


# --- the same bits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=NAMES)
@pytest.mark.parametrize("capacity", [2, 40, 1.0])
def test_steps_have_the_bits_of_the_function(device, optimizer, capacity):
    tables = table_configs(widths=(4, 5), rows=(1, 3, 100, ROWS))
    eager, graphed = (Run(tables, capacity=capacity, optimizer=optimizer) for _ in range(2))
    train = te.graph_step(graphed.step, max_ids=200)
    for batch in batches(tables, 12):
        expected, result = eager.step(batch), train(batch)
        assert_same_bits([result["loss"], *result["out"]], [expected["loss"], *expected["out"]])
        assert not result["loss"].requires_grad
    assert_same_bits(graphed.numbers(), eager.numbers())
    assert (graphed.table.stats().batches, idle(graphed.table)) == (eager.table.stats().batches, True)


def test_schedulers_evaluation_and_whole_table_calls_between_steps(device):
    tables = table_configs(widths=(4,), rows=(3, ROWS))
    eager, graphed = (Run(tables, capacity=40, optimizer=te.Adagrad(lr=0.5)) for _ in range(2))
    schedulers = [
        torch.optim.lr_scheduler.ExponentialLR(each.table.fused_optimizer, gamma=0.8) for each in (eager, graphed)
    ]
    steps = [eager.step, te.graph_step(graphed.step, max_ids=100)]
    for number, batch in enumerate(batches(tables, 12)):
        seen = []
        for each, step, scheduler in zip((eager, graphed), steps, schedulers, strict=True):
            step(batch)
            each.table.fused_optimizer.step()
            scheduler.step()
            with torch.no_grad():
                seen.append(each.table(*random_batch(tables, 5, 1000 + number)[:2]))
            if number % 4 == 3:
                each.table.flush()
        assert_same_bits(*[[out] for out in seen])
    assert_same_bits(graphed.numbers(), eager.numbers())


def test_lookups_alone(device):
    table = te.TieredEmbeddingBag(ROWS, WIDTH, mode="sum", capacity=20)
    look_up = te.graph_forward(table)
    for step in range(6):
        ids = randint(0, ROWS, (8, 3), seed=step)
        with torch.no_grad():
            assert equal(look_up(ids).clone(), table(ids))
    assert idle(table)


@pytest.mark.parametrize("ids", [[], [5], list(range(12))])
def test_batches_of_fewer_ids_read_nothing_of_longer_ones(device, ids):
    tables = [te.TableConfig(name="t", num_embeddings=ROWS, embedding_dim=WIDTH, mode="sum")]
    table = te.TieredEmbeddingBagCollection(tables, capacity=20, optimizer=te.SGD(lr=1.0))
    # integers, so that sums have no order
    table.load_state_dict({"tables.t.weight": (torch.arange(ROWS * WIDTH).reshape(ROWS, WIDTH) % 17).float()})

    def step(batch):
        out = table(batch["ids"], batch["offsets"])
        out.sum().backward()
        return out

    train = te.graph_step(step)
    for _ in range(5):  # the last of them a replay
        train({"ids": torch.arange(12), "offsets": torch.tensor([0, 5, 12])})
    before = table.state_dict()["tables.t.weight"]
    short = torch.tensor(ids, dtype=torch.int64)
    out = train({"ids": short, "offsets": torch.tensor([0, len(ids) // 2, len(ids)])})
    assert equal(out.sum(0), before[short.cpu()].sum(0) if len(ids) else torch.zeros(WIDTH))
    after = table.state_dict()["tables.t.weight"]
    assert (after != before).any(1).nonzero().flatten().tolist() == sorted(set(ids))


def test_errors_of_a_replayed_step_come_at_a_later_one(gpu):
    table = te.TieredEmbeddingBag(ROWS, WIDTH, mode="sum", capacity=20, optimizer=te.SGD(lr=0.5))

    def step(ids):
        table(ids).sum().backward()

    train = te.graph_step(step)
    for _ in range(5):
        train(torch.arange(6).reshape(2, 3))
    before = bits(table)
    train(torch.tensor([[0, 1, ROWS], [3, 4, 5]]))
    torch.cuda.synchronize()
    with pytest.raises(IdOutOfRangeError, match=f"id {ROWS} at position 2"):
        train(torch.arange(6).reshape(2, 3))
    assert_same_bits(bits(table), before)


def test_beside_batches_in_flight_a_step_is_the_function(device):
    """A replay would not know their rows to be locked."""
    tables = table_configs(widths=(4,), rows=(ROWS,))
    eager, graphed = (Run(tables, capacity=20, optimizer=te.SGD(lr=0.5)) for _ in range(2))
    steps = [eager.step, te.graph_step(graphed.step, max_ids=100)]
    for number, batch in enumerate(batches(tables, 12)):
        kept = []
        for each, step in zip((eager, graphed), steps, strict=True):
            if number % 3 == 2:
                kept.append(each.table(*random_batch(tables, 5, 1000 + number)[:2]))
            step(batch)
        for out in kept:
            out.sum().backward()
    assert_same_bits(graphed.numbers(), eager.numbers())
    assert idle(graphed.table)


# --- with the next batch planned inside -------------------------------------------------------------------------------


@parametrize_pairs(optimizer=dict(zip(NAMES, OPTIMIZERS, strict=True)), capacity=[2, 40, 1.0], depth=[1, 3])
def test_fetched_ahead_steps_have_the_bits_of_the_function(device, monkeypatch, optimizer, capacity, depth):
    tables, replays = table_configs(widths=(4, 5), rows=(1, 3, 100, ROWS)), Replays(monkeypatch)
    eager, graphed = (Run(tables, capacity=capacity, optimizer=optimizer) for _ in range(2))
    train = te.graph_step(graphed.step, max_ids=200)
    for epoch in range(2):
        given = batches(tables, 10, seed=epoch)
        for number, batch in enumerate(te.prefetch(given, graphed.table, depth)):
            expected, result = eager.step(given[number]), train(batch)
            assert_same_bits([result["loss"], *result["out"]], [expected["loss"], *expected["out"]])
    assert_same_bits(graphed.numbers(), eager.numbers())
    assert idle(graphed.table)
    replays.check(device, 7)


@pytest.mark.parametrize("capacity", [3, 40])
def test_whatever_comes_between_fetched_ahead_steps(device, monkeypatch, tmp_path, capacity):
    """Evaluation, eager and captured, batches kept in flight, whole-table calls, a checkpoint loaded, a loop left."""
    tables, replays = table_configs(widths=(4,), rows=(3, ROWS)), Replays(monkeypatch)
    eager, graphed = (Run(tables, capacity=capacity, optimizer=te.Adagrad(lr=0.5)) for _ in range(2))
    train = te.graph_step(graphed.step, max_ids=100)
    evaluations = [torch.no_grad()(eager.table), te.graph_forward(lambda given: graphed.table(*given), max_ids=100)]
    given = batches(tables, 64)

    def between(number, each, evaluate):
        if number % 8 == 3:
            inputs = random_batch(tables, 5, 1000 + number)[:2]
            return evaluate(*inputs) if each is eager else evaluate(inputs)
        if number % 8 == 5:
            each.table.flush()
        if number == 30:
            each.table.save_checkpoint(tmp_path / str(id(each)))
        if number == 38:
            each.table.load_checkpoint(tmp_path / str(id(each)))
        return None

    at = 0
    for stop in (25, 64):
        for batch in te.prefetch(given[at:], graphed.table, 1):
            kept = []
            for each, step in zip((eager, graphed), (eager.step, train), strict=True):
                if at % 8 == 7:
                    kept.append(each.table(*random_batch(tables, 5, 2000 + at)[:2]))
                step(given[at] if each is eager else batch)
            seen = [between(at, each, evaluate) for each, evaluate in zip((eager, graphed), evaluations, strict=True)]
            if seen[0] is not None:
                assert_same_bits([seen[1]], [seen[0]])
            for out in kept:
                out.sum().backward()
            at += 1
            if at == stop:
                break
    assert at == 64
    assert_same_bits(graphed.numbers(), eager.numbers())
    assert idle(graphed.table)
    replays.check(device, 12)


def squares(table):
    """A step that trains `table` alone."""

    def step(ids):
        out = table(ids)
        out.square().sum().backward()
        return out

    return step


@pytest.mark.parametrize("capacity", [30, 200])
@pytest.mark.parametrize("launched", [False, True])
def test_a_replay_that_is_interrupted(gpu, monkeypatch, capacity, launched):
    """Before it is launched nothing has happened, behind it the step has; rows that were on their way come, or have."""
    given = [randint(0, ROWS, (8, 3), seed=step).to("cuda") for step in range(30)]
    eager, graphed = (
        te.TieredEmbeddingBag(ROWS, WIDTH, mode="sum", capacity=capacity, optimizer=te.Adagrad(lr=0.5))
        for _ in range(2)
    )
    steps = [squares(each) for each in (eager, graphed)]
    replay, count = torch.cuda.CUDAGraph.replay, 0

    def interrupted(graph):
        nonlocal count
        count += 1
        if launched or count % 4:
            replay(graph)
        if count % 4 == 0:
            raise KeyboardInterrupt

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", interrupted)
    train = te.graph_step(steps[1])
    for number, ids in enumerate(te.prefetch(given, graphed)):
        try:
            train(ids)
        except KeyboardInterrupt:
            if not launched:
                continue
        steps[0](given[number])
    assert count >= 8
    assert_same_bits(bits(graphed), bits(eager))
    assert idle(graphed)


@pytest.mark.parametrize("capacity", [30, 200])
def test_a_capture_that_fails_behind_plans_that_missed_nothing(gpu, capacity):
    """To end such a plan again is nothing, whatever the plan after it has missed."""
    same = randint(0, ROWS, (8, 3), seed=0)
    given = [(same if number < 7 else randint(0, ROWS, (8, 3), seed=number)).to("cuda") for number in range(24)]
    eager, graphed = (
        te.TieredEmbeddingBag(ROWS, WIDTH, mode="sum", capacity=capacity, optimizer=te.Adagrad(lr=0.5))
        for _ in range(2)
    )
    steps, fails = [squares(each) for each in (eager, graphed)], [True]

    def step(ids):
        if torch.cuda.is_current_stream_capturing() and fails:
            fails.clear()
            raise ValueError("the step's own")
        return steps[1](ids)

    train = te.graph_step(step)
    for number, ids in enumerate(te.prefetch(given, graphed)):
        try:
            train(ids)
        except ValueError:
            train(ids)
        steps[0](given[number])
    assert not fails
    assert_same_bits(bits(graphed), bits(eager))
    assert idle(graphed)


@pytest.mark.parametrize("capacity", [30, 200])
def test_padding_that_is_read_ahead(device, capacity):
    """Its occurrences are told by the ids of the very batch, which a graph keeps in a place of their own."""
    given = [randint(0, ROWS, (24,), seed=step).int() for step in range(20)]
    for ids in given:
        ids[::3] = 0
    runs = []
    for mode in ("eager", "ahead"):
        table = te.TieredEmbedding(ROWS, WIDTH, padding_idx=0, capacity=capacity, optimizer=te.Adagrad(lr=0.5))
        step = squares(table)
        train = step if mode == "eager" else te.graph_step(step)
        for ids in given if mode == "eager" else te.prefetch(given, table):
            train(ids)
        runs.append(bits(table))
        assert idle(table)
    assert_same_bits(*runs)


@pytest.mark.parametrize("large", [30, 80])
def test_a_large_batch_between_fetched_ahead_steps(device, monkeypatch, large):
    """Its rows without a slot are still locked when the next batch is planned, which then uses them where they are: no
    graph that was captured before knows of such rows, or of so many."""
    runs, replays = [], Replays(monkeypatch)
    given = [randint(0, ROWS, (2, 4), seed=step) for step in range(30)]
    for mode in ("eager", "ahead"):
        table = te.TieredEmbeddingBag(ROWS, WIDTH, mode="sum", capacity=24, optimizer=te.Adagrad(lr=0.5))
        step = squares(table)
        train, seen = step if mode == "eager" else te.graph_step(step), []
        for number, ids in enumerate(given if mode == "eager" else te.prefetch(given, table)):
            seen.append(train(ids).detach().clone())
            if number % 9 == 8:
                with torch.no_grad():
                    seen.append(table(torch.cat([given[number + 1].flatten(), torch.arange(large)])[None]))
        runs.append([*seen, *bits(table)])
        assert idle(table)
    assert_same_bits(*runs)
    replays.check(device, 10)


def test_results_of_steps_before_a_capture_keep_their_memory_until_they_are_read(gpu):
    """Their stream may have another owner next, which allocates as soon as one was dropped."""
    function = SimpleNamespace(device=torch.device("cuda", 0), _beside=torch.cuda.Stream())
    result = StepFunction.beside(function, lambda: {"loss": [torch.full((1 << 20,), 7.0, device="cuda")]})
    torch.cuda._sleep(20_000_000)
    read = result["loss"][0].clone()
    del result
    with torch.cuda.stream(function._beside):
        other = torch.full((1 << 20,), 3.0, device="cuda")
    torch.cuda.synchronize()
    assert (read == 7).all()
    assert (other == 3).all()


def test_calls_inside_accumulate_are_one_update(device):
    """Gradients are summed around the calls, which no graph would know."""
    runs = []
    given = [randint(0, ROWS, (4, 3), seed=step) for step in range(24)]
    for mode in ("function", "alone", "ahead"):
        table = te.TieredEmbeddingBag(ROWS, WIDTH, mode="sum", capacity=40, optimizer=te.Adagrad(lr=0.5))
        step = squares(table)
        train, outs = step if mode == "function" else te.graph_step(step), []
        batches = iter(te.prefetch(given, table) if mode == "ahead" else given)
        for number in range(0, len(given), 4):
            if number % 8:
                outs += [train(next(batches)).detach().clone() for _ in range(4)]
                continue
            with table.accumulate():
                outs += [train(next(batches)).detach().clone() for _ in range(4)]
        runs.append([*outs, *bits(table)])
        if mode == "ahead":
            batches.close()
        assert idle(table)
    assert_same_bits(runs[1], runs[0])
    assert_same_bits(runs[2], runs[0])


def test_tables_that_move_or_freeze_are_captured_anew(gpu):
    runs = []
    for graphed in (False, True):
        table = te.TieredEmbeddingBag(ROWS, WIDTH, mode="sum", capacity=40, optimizer=te.Adagrad(lr=0.5), device="cuda")
        scale = nn.Parameter(torch.ones(WIDTH))

        def step(ids, table=table, scale=scale):
            out = table(ids) * scale
            out.square().sum().backward()
            return out

        train, outs = te.graph_step(step) if graphed else step, []
        for number in range(24):
            if number == 8:
                table.cpu().cuda()
            if number in (12, 18):
                table.requires_grad_(number == 18)
            outs.append(train(randint(0, ROWS, (8, 3), seed=number)).detach().clone())
        runs.append([*outs, *bits(table)])
    assert_same_bits(*runs)


def test_a_bad_batch_before_the_capture_is_told_as_what_it_is(gpu):
    for ahead in (False, True):
        table = te.TieredEmbeddingBag(ROWS, WIDTH, mode="sum", capacity=40, optimizer=te.SGD(lr=0.5))

        def step(ids, table=table):
            table(ids).sum().backward()

        train, told = te.graph_step(step), []
        given = [randint(0, ROWS, (8, 3), seed=number) for number in range(12)]
        given[2 if ahead else 1][3, 1] = ROWS + 5
        for ids in te.prefetch(given, table) if ahead else given:
            torch.cuda.synchronize()
            try:
                train(ids)
            except IdOutOfRangeError as error:
                told.append(str(error))
                train(ids)
        assert len(told) == 1
        assert f"id {ROWS + 5} at position 10" in told[0]
        assert idle(table)


@pytest.mark.parametrize("ahead", [False, True])
def test_what_a_step_raises_while_it_is_captured_is_what_comes(gpu, ahead):
    runs, given = [], [randint(0, ROWS, (8, 3), seed=number) for number in range(14)]
    for graphed in (False, True):
        table = te.TieredEmbeddingBag(ROWS, WIDTH, mode="sum", capacity=40, optimizer=te.Adagrad(lr=0.5))
        raised = []

        def step(ids, table=table, raised=raised):
            out = table(ids)
            if torch.cuda.is_current_stream_capturing() and not raised:
                raised.append(True)
                raise KeyError("the step's own")
            out.square().sum().backward()
            return out

        train, outs, told = te.graph_step(step) if graphed else step, [], 0
        for ids in te.prefetch(given, table) if graphed and ahead else given:
            try:
                out = train(ids)
            except KeyError as error:
                told += "the step's own" in str(error)
                out = train(ids)
            outs.append(out.detach().clone())
        assert told == graphed
        runs.append([*outs, *bits(table)])
        assert idle(table)
    assert_same_bits(*runs)


def _both(steps, loop):
    for ids in loop:
        for train in steps:
            train(ids)


def test_two_captured_steps_in_one_loop_are_warned_of(gpu):
    table = te.TieredEmbeddingBag(ROWS, WIDTH, mode="sum", capacity=40, optimizer=te.SGD(lr=0.5))
    other = te.TieredEmbeddingBag(ROWS, WIDTH, mode="sum", capacity=40, optimizer=te.SGD(lr=0.5))
    steps = [te.graph_step(lambda ids, each=each: each(ids).sum().backward()) for each in (table, other)]
    loop = iter(
        te.prefetch([randint(0, ROWS, (8, 3), seed=number) for number in range(8)], nn.ModuleList([table, other]))
    )
    steps[0](next(loop))
    with pytest.warns(UserWarning, match="two captured steps"):
        steps[1](next(loop))
    _both(steps, loop)
    assert idle(table)
    assert idle(other)


def test_forwards_that_no_batch_shows_are_planned_inside_the_step(device, monkeypatch):
    """Ids that the step computes, beside those that were planned ahead; two forwards of one module in one backward."""
    runs, replays = [], Replays(monkeypatch)
    given = [randint(0, ROWS, (8, 3), seed=step) for step in range(14)]
    for mode in ("eager", "ahead"):
        table = te.TieredEmbeddingBag(ROWS, WIDTH, mode="sum", capacity=30, optimizer=te.Adagrad(lr=0.5))

        def step(ids, table=table):
            out = table((ids + 1) % ROWS) * 2 + table(ids)
            out.square().sum().backward()
            return out

        train = step if mode == "eager" else te.graph_step(step)
        outs = [train(ids).detach().clone() for ids in (given if mode == "eager" else te.prefetch(given, table))]
        runs.append([*outs, *bits(table)])
        assert idle(table)
    assert_same_bits(*runs)
    replays.check(device, 4)


def test_lookups_alone_with_fetching_ahead(device, monkeypatch):
    replays, table = Replays(monkeypatch), te.TieredEmbeddingBag(ROWS, WIDTH, mode="mean", capacity=20)
    look_up = te.graph_forward(table)
    for ids in te.prefetch([randint(0, ROWS, (8, 3), seed=step) for step in range(10)], table):
        seen = look_up(ids).clone()
        with torch.no_grad():
            assert equal(seen, table(ids))
    assert idle(table)
    look_up = te.graph_forward(table)
    for ids in te.prefetch([randint(0, ROWS, (8, 3), seed=step) for step in range(12)], table, ids_of=lambda ids: ids):
        look_up(ids)
    assert idle(table)
    replays.check(device, 5)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_batch_of_other_shapes_is_run_by_the_function(device, ahead):
    tables = [te.TieredEmbeddingBag(ROWS, WIDTH, mode="sum", capacity=20, optimizer=te.SGD(lr=0.5)) for _ in range(2)]
    given = [randint(0, ROWS, (8, 3), seed=step) for step in range(12)]
    given = [*given, given[0][:5], *given, given[0][:0]]
    train = te.graph_step(lambda ids: tables[0](ids).sum().backward())
    for ids in te.prefetch(given, tables[0]) if ahead else given:
        train(ids)
    for ids in given:
        tables[1](ids).sum().backward()
    assert_same_bits(bits(tables[0]), bits(tables[1]))
    assert idle(tables[0])
    summary = train.summary()
    if device == "cuda":
        assert summary.eager[OTHER_SHAPES] == 2
        assert summary.replayed >= 8
        assert "2 eager: a batch of other shapes" in str(summary)
    else:
        assert summary.eager == {NO_GPU: len(given)}
    assert summary.replayed + summary.captured + summary.eager.total() == len(given)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("capacity", [2, 60])
def test_shapes_that_come_again_are_captured_too(device, capacity, ahead):
    """However they take turns. Where the capacity is divided anew, after 20 batches, all are captured anew."""
    tables = table_configs(widths=(4, 5), rows=(1, 3, 100, ROWS))
    eager, graphed = (Run(tables, capacity=capacity, optimizer=te.Adagrad(lr=0.5)) for _ in range(2))
    sizes = [8, 8, 3, 8, 1, 3, 8, 1, *(3 * [8]), *(6 * [3]), *(3 * [8, 3, 1, 8]), *range(2, 14), *(8 * [8])]
    given = [batches(tables, 1, samples=size, seed=step)[0] for step, size in enumerate(sizes)]
    train = te.graph_step(graphed.step)
    for number, batch in enumerate(te.prefetch(given, graphed.table) if ahead else given):
        expected, result = eager.step(given[number]), train(batch)
        assert_same_bits([result["loss"], *result["out"]], [expected["loss"], *expected["out"]])
    assert_same_bits(graphed.numbers(), eager.numbers())
    counted = [run.table.stats() for run in (eager, graphed)]
    assert (counted[0].batches, counted[0].lookups) == (counted[1].batches, counted[1].lookups)
    assert idle(graphed.table)
    summary = train.summary()
    if device == "cuda":
        assert summary.captured >= 3
        assert summary.replayed >= (1 if ahead else 15)
        # two that come again, before the division and behind it, and those of the range that come once
        assert summary.eager[OTHER_SHAPES] <= 2 + 2 + 10
    assert summary.replayed + summary.captured + summary.eager.total() == len(given)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_smaller_last_batch_is_replayed_from_some_epoch_on(gpu, ahead):
    table = te.TieredEmbeddingBag(ROWS, WIDTH, mode="sum", capacity=20, optimizer=te.SGD(lr=0.5))
    train = te.graph_step(lambda ids: table(ids).sum().backward())
    given = [randint(0, ROWS, (8, 3), seed=step) for step in range(6)]
    given.append(given[0][:5])
    replayed = 0
    for _ in range(8):
        for ids in te.prefetch(given, table) if ahead else given:
            before = train.summary().replayed
            train(ids)
        replayed += train.summary().replayed - before  # of the last batch
    assert replayed >= 3
    assert idle(table)


def test_shapes_that_take_turns_are_captured_as_far_as_they_are_kept(device):
    """The first one of them is kept for good."""
    tables = [te.TieredEmbeddingBag(ROWS, WIDTH, mode="sum", capacity=20, optimizer=te.SGD(lr=0.5)) for _ in "ab"]
    train = te.graph_step(lambda ids: tables[0](ids).square().sum().backward())
    given = [randint(0, ROWS, (1 + step % 10, 3), seed=step) for step in range(120)]
    for ids in given:
        train(ids)
        tables[1](ids).square().sum().backward()
    assert_same_bits(bits(tables[0]), bits(tables[1]))
    if device == "cuda":
        assert train.summary().captured <= 12
        assert train.summary().replayed >= 40
        before = train.summary().replayed
        train(given[0])
        assert train.summary().replayed == before + 1


def test_requests_of_any_size_are_captured(device):
    table = te.TieredEmbeddingBag(ROWS, WIDTH, mode="mean", capacity=20)
    serve = te.graph_forward(table)
    requests = [randint(0, ROWS, (1 + step % 3, 3), seed=step) for step in range(30)]
    for ids in requests:
        found = serve(ids).clone()
        with torch.no_grad():
            assert equal(found, table(ids))
    if device == "cuda":
        assert serve.summary().replayed + serve.summary().captured >= len(requests) - 12


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32])
def test_a_batch_of_another_form_is_refused_when_it_comes(gpu, dtype):
    table = te.TieredEmbeddingBag(ROWS, WIDTH, mode="sum", capacity=20, optimizer=te.SGD(lr=0.5))
    train = te.graph_step(lambda ids: table(ids.long()).sum().backward())
    given = [randint(0, ROWS, (8, 3), seed=step) for step in range(8)]
    loop = iter(te.prefetch([*given, given[0].to(dtype)], table))
    for _ in given:
        train(next(loop))
    other = next(loop)
    with pytest.raises(InvalidInputError, match=str(dtype)):
        train(other)
    loop.close()
    assert idle(table)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("capacity", [2, 60])
def test_batches_of_more_and_more_ids(device, capacity, ahead):
    """The first one has the fewest: a graph of more room takes the place of one that a batch does not fit."""
    tables = table_configs(widths=(4, 5), rows=(1, 3, 100, ROWS))
    eager, graphed = (Run(tables, capacity=capacity, optimizer=te.Adagrad(lr=0.5)) for _ in range(2))
    given = sorted(batches(tables, 30), key=lambda batch: len(batch[0]))
    given = [*given, *given[::-1], *given[5:]]
    train = te.graph_step(graphed.step)
    for batch in te.prefetch(given, graphed.table) if ahead else given:
        train(batch)
    for batch in given:
        eager.step(batch)
    assert_same_bits(graphed.numbers(), eager.numbers())
    summary = train.summary()
    if device == "cuda":
        assert summary.replayed > len(given) / 2
        assert summary.replayed + summary.captured + summary.eager.total() == len(given)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("capacity", [20, 90])
def test_counters_are_read_before_every_step(device, capacity, ahead):
    """And steps are captured and replayed all the same."""
    tables = [te.TieredEmbeddingBag(ROWS, WIDTH, mode="sum", capacity=capacity, optimizer=te.SGD(lr=0.5)) for _ in "ab"]
    given = [randint(0, ROWS, (8, 3), seed=step) for step in range(16)]
    train, seen = te.graph_step(lambda ids: tables[0](ids).sum().backward()), []
    for ids in te.prefetch(given, tables[0]) if ahead else given:
        seen.append(tables[0].stats())
        train(ids)
    for ids in given:
        tables[1](ids).sum().backward()
    assert_same_bits(bits(tables[0]), bits(tables[1]))
    assert all(later.lookups >= before.lookups for before, later in itertools.pairwise(seen))
    counted = [table.stats() for table in tables]
    assert (counted[0].batches, counted[0].lookups) == (counted[1].batches, counted[1].lookups)
    if device == "cuda":
        assert train.summary().replayed >= 6


@pytest.mark.parametrize("capacity", [2, 60, 300])
def test_steps_that_go_ahead_and_then_do_not_have_the_bits_of_the_function(device, capacity):
    """Both ways are tried in a loop as long as this one. A batch that was planned ahead is used all the same: none is
    planned, and counted, twice."""
    tables = table_configs(widths=(4, 5), rows=(1, 3, 100, ROWS))
    eager, graphed = (Run(tables, capacity=capacity, optimizer=te.Adagrad(lr=0.5)) for _ in range(2))
    train, given = te.graph_step(graphed.step, max_ids=200), batches(tables, 90)
    for number, batch in enumerate(te.prefetch(given, graphed.table)):
        expected, result = eager.step(given[number]), train(batch)
        assert_same_bits([result["loss"], *result["out"]], [expected["loss"], *expected["out"]])
    assert_same_bits(graphed.numbers(), eager.numbers())
    counted = [run.table.stats() for run in (eager, graphed)]
    assert (counted[0].batches, counted[0].lookups) == (counted[1].batches, counted[1].lookups)
    assert idle(graphed.table)
    if device == "cuda":
        assert train.summary().replayed >= 60


@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_is_warm_for_the_loops_after_the_first(gpu, ahead):
    table = te.TieredEmbeddingBag(ROWS, WIDTH, mode="sum", capacity=90, optimizer=te.SGD(lr=0.5))
    train = te.graph_step(lambda ids: table(ids).sum().backward())
    given = [randint(0, ROWS, (8, 3), seed=step) for step in range(14)]
    seen = []
    for _ in range(3):
        for ids in te.prefetch(given, table) if ahead else given:
            train(ids)
        seen.append(train.summary().replayed)
    at_ends = 4 if ahead else 0  # the first two batches of a loop have no plans, and the last two none ahead
    assert seen[2] - seen[1] >= len(given) - at_ends - 1


def test_an_example_batch_says_how_many_ids_may_come(device):
    tables = [te.TableConfig(name="t", num_embeddings=ROWS, embedding_dim=WIDTH, mode="sum")]
    table = te.TieredEmbeddingBagCollection(tables, capacity=20)
    example = {"ids": torch.arange(12), "offsets": torch.tensor([0, 5, 12])}
    look_up = te.graph_forward(lambda batch: table(batch["ids"], batch["offsets"]), example)
    for ids in (5, 1, 12, 7, 12, 3):
        batch = {"ids": torch.arange(ids), "offsets": torch.tensor([0, ids // 2, ids])}
        with torch.no_grad():
            assert equal(look_up(batch).clone(), table(batch["ids"], batch["offsets"]))
    larger = {"ids": torch.arange(13), "offsets": torch.tensor([0, 5, 13])}
    with torch.no_grad():
        assert equal(look_up(larger).clone(), table(larger["ids"], larger["offsets"]))


# --- what fits --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Sample:
    ids: torch.Tensor
    offsets: torch.Tensor
    label: torch.Tensor


def buffers(max_ids=None):
    """Of a batch with 4 ids in 2 bags."""
    table = te.TieredEmbeddingBag(ROWS, WIDTH, mode="sum", include_last_offset=True)
    batch = {"sample": Sample(torch.arange(4), torch.tensor([0, 1, 4]), torch.zeros(2)), "name": "n"}
    with observe_forwards() as forwards, torch.no_grad():
        table(batch["sample"].ids, batch["sample"].offsets)
    return Buffers(batch, forwards, max_ids)


def test_batches_are_copied_to_buffers(device):
    own = buffers(max_ids=6)
    assert len(own.batch["sample"].ids) == 6
    own.load({"sample": Sample(torch.arange(5) + 10, torch.tensor([0, 2, 5]), torch.ones(2)), "name": "other"})
    sample = own.batch["sample"]
    assert sample.ids[:5].tolist() == [10, 11, 12, 13, 14]
    assert (sample.offsets.tolist(), sample.label.tolist()) == ([0, 2, 5], [1.0, 1.0])


def test_a_batch_of_one_tensor_is_copied_or_refused(device):
    table = te.TieredEmbeddingBag(ROWS, WIDTH, mode="sum")
    given = torch.arange(6).reshape(2, 3)
    with observe_forwards() as forwards, torch.no_grad():
        table(given)
    own = Buffers(given, forwards)
    for batch in (given + 1, (given + 7).cpu(), (torch.arange(6) + 13).reshape(3, 2).T, given.repeat(1, 2)[:, :3]):
        own.load(batch)
        assert equal(own.batch, batch)
    for batch, message in ((given.T, r"shape \(3, 2\)"), (given.flatten(), r"shape \(6,\)"), (given.int(), "int32")):
        with pytest.raises(InvalidInputError, match=message):
            own.load(batch)
    with pytest.raises(InvalidInputError, match=r"tensors at the batch\[0\], the captured one had the batch"):
        own.load([given])
    assert equal(own.batch, given)  # the last that fitted


def test_a_batch_of_many_tensors_is_copied_or_refused(device):
    table = te.TieredEmbeddingBag(ROWS, WIDTH, mode="sum")
    given = [torch.arange(6).reshape(2, 3) + at for at in range(5)]
    with observe_forwards() as forwards, torch.no_grad():
        for each in given:
            table(each)
    own = Buffers(given, forwards)
    odd = [given[0] + 1, (given[1] + 7).cpu(), (torch.arange(6) + 13).reshape(3, 2).T, *given[:2]]
    for batch in ([each * 2 for each in given], odd, given):
        own.load(batch)
        assert all(equal(*pair) for pair in zip(own.batch, batch, strict=True))
    with pytest.raises(InvalidInputError, match=r"the batch\[3\] has shape \(3, 2\)"):
        own.load([*odd[:3], given[3].T, given[4]])
    with pytest.raises(InvalidInputError, match=r"the batch\[4\] is torch.float32"):
        own.load([*odd[:4], given[4].float()])
    with pytest.raises(InvalidInputError, match=r"tensors at"):
        own.load(given[:4])
    assert all(equal(*pair) for pair in zip(own.batch, given, strict=True))  # the last that fitted
    same = Buffers([given[0]] * 5, forwards)
    same.load([given[1]] * 5)
    assert equal(same.batch[4], given[1])
    with pytest.raises(InvalidInputError, match="was one tensor with another place"):
        same.load(given)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"sample": Sample(torch.arange(7), torch.tensor([0, 1, 7]), torch.zeros(2))}, r"\.ids has shape \(7,\)"),
        ({"sample": Sample(torch.arange(4).int(), torch.tensor([0, 1, 4]), torch.zeros(2))}, "int32"),
        ({"sample": Sample(torch.arange(4), torch.tensor([0, 4]), torch.zeros(2))}, r"\.offsets has shape \(2,\)"),
        ({"sample": Sample(torch.arange(4), torch.tensor([0, 1, 4]), torch.zeros(3))}, r"\['sample'\]\.label"),
        ({"sample": Sample(torch.arange(4), torch.tensor([0, 1, 4]), None)}, "tensors at"),
        (torch.zeros(3), "tensors at the batch, the captured one had"),
    ],
)  # fmt: skip
def test_batches_that_do_not_fit_are_refused(batch, message):
    own = buffers(max_ids=6)
    with pytest.raises(InvalidInputError, match=message):
        own.load(batch)


def test_buffers_of_more_ids_and_of_other_forms():
    own = buffers(max_ids=6)

    def batch_of(ids, labels=2, dtype=torch.int64, name="n"):
        offsets = torch.tensor([0, 1, ids])
        return {"sample": Sample(torch.arange(ids, dtype=dtype), offsets, torch.zeros(labels)), "name": name}

    others = [own.has_other_shapes(batch) for batch in (batch_of(6), batch_of(7), batch_of(4, labels=3))]
    assert others == [False, True, True]
    assert not own.has_other_shapes(batch_of(4, dtype=torch.int32))  # which no buffers take
    assert not own.has_other_shapes(torch.zeros(3))
    assert own.form_of(batch_of(7)) == own.form
    larger = own.of_form_of(batch_of(7))
    assert len(larger.batch["sample"].ids) >= 7
    larger.load(batch_of(7))
    assert larger.batch["sample"].ids[:7].tolist() == [*range(7)]
    assert len(own.batch["sample"].ids) == 6
    other = own.of_form_of(batch_of(9, labels=3, name="m"))
    assert (other.form, other.batch["name"]) == (own.form_of(batch_of(1, labels=3)), "m")
    other.load(batch_of(9, labels=3))
    assert other.batch["sample"].ids[:9].tolist() == [*range(9)]
    with pytest.raises(InvalidInputError, match=r"\.label has shape \(2,\)"):
        other.load(batch_of(9))


def test_buffers_of_another_form_are_as_distinct_as_the_first():
    """Whatever one tensor the batch has at several places that they are made for."""
    table = te.TieredEmbeddingBag(ROWS, WIDTH, mode="sum")
    given = [torch.arange(6).reshape(2, 3) + at for at in range(5)]
    with observe_forwards() as forwards, torch.no_grad():
        for each in given:
            table(each)
    fewer = [each[:1] for each in given]
    other = Buffers(given, forwards).of_form_of([fewer[0], fewer[0], *fewer[2:]])
    other.load(fewer)
    assert all(equal(*pair) for pair in zip(other.batch, fewer, strict=True))
    same = Buffers([given[0]] * 5, forwards).of_form_of([fewer[1]] * 5)
    same.load([fewer[3]] * 5)
    assert all(equal(each, fewer[3]) for each in same.batch)
    with pytest.raises(InvalidInputError, match="was one tensor with another place"):
        same.load(fewer)


def test_ids_of_a_row_each_do_not_fill_buffers_of_bags():
    table = te.TieredEmbeddingBag(ROWS, WIDTH, mode="sum", include_last_offset=True)
    ids, offsets = torch.arange(4), torch.tensor([0, 1, 4])
    with observe_forwards() as forwards, torch.no_grad():
        table(ids, offsets)
    own = Buffers((ids, offsets), forwards)
    other = own.of_form_of((torch.arange(24).reshape(8, 3), offsets))
    for batch in ((torch.arange(3), offsets), (torch.arange(8), offsets), (torch.tensor(3), offsets)):
        assert other.has_other_shapes(batch)
    other.load((torch.arange(24).reshape(8, 3) + 1, offsets))
    assert own.of_form_of((torch.tensor(3), offsets)).has_other_shapes((ids, offsets))


def test_bags_without_a_last_offset_have_as_many_ids_as_the_first():
    table = te.TieredEmbeddingBag(ROWS, WIDTH, mode="sum")
    ids, offsets = torch.arange(4), torch.tensor([0, 1])
    with observe_forwards() as forwards, torch.no_grad():
        table(ids, offsets)
    own = Buffers((ids, offsets), forwards, 10)
    with pytest.raises(InvalidInputError, match=r"shape \(3,\).*\(4,\)"):
        own.load((torch.arange(3), offsets))


def test_objects_that_cannot_be_copied_are_refused():
    class Opaque:
        def __init__(self, ids):
            self.ids = ids

    table = te.TieredEmbedding(ROWS, WIDTH)
    batch = Opaque(torch.arange(3))
    with observe_forwards() as forwards, torch.no_grad():
        table(batch.ids)
    with pytest.raises(InvalidInputError, match="mappings, sequences and dataclasses"):
        Buffers(batch, forwards, None)


@pytest.mark.parametrize("max_ids", [-1, 1.5, True])
def test_wrong_arguments_are_refused(max_ids):
    with pytest.raises(InvalidInputError, match="max_ids"):
        te.graph_step(lambda batch: batch, max_ids=max_ids)
    with pytest.raises(InvalidInputError, match="step must be a function"):
        te.graph_step(3)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"storage": "file", "capacity": 5}, "rows of the file tier"),
        ({"check_ids": "always"}, "check_ids"),
        ({"device": "cpu"}, "on cpu"),
    ],
)
def test_what_no_graph_can_hold_is_refused(gpu, tmp_path, keywords, message):
    if "storage" in keywords:
        keywords = keywords | {"storage": te.File(str(tmp_path / "rows"))}
    table = te.TieredEmbeddingBag(ROWS, WIDTH, **keywords)
    other = te.TieredEmbeddingBag(ROWS, WIDTH)  # on the GPU, so that there is something to capture
    look_up = te.graph_forward(lambda ids: (table(ids.to(table.tables.config.device)), other(ids)))
    with pytest.raises(UnsupportedError, match=message):
        look_up(torch.arange(4)[None])
