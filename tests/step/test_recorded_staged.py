"""Plans over a tier whose rows pass through the host, recorded in two halves: the numbers of plans that are launched,
whatever happens between the halves. Skips without a GPU; TIEREDEMB_REQUIRE_CUDA=1 fails."""

from __future__ import annotations

import itertools
import threading
import time

import pytest
import torch
from devices import assert_same_bits
from step.recordings import ROWS, STEPS, both, ids_of
from torch import nn
from training import bits

import tieredemb as te
from tieredemb.cache.device.plan import Records
from tieredemb.cache.device.row_copies import RowCopies
from tieredemb.cache.device.staged import Staged
from tieredemb.errors import StorageFullError
from tieredemb.pipeline.plan_executors import WorkerExecutor
from tieredemb.step.recorded_plans import RecordedPlans

pytestmark = pytest.mark.usefixtures("gpu", "recorded")


@pytest.fixture
def made(tmp_path):
    """Makes tables over new files."""
    numbers = itertools.count()

    def make(capacity, **keywords):
        given = {"mode": "sum", "optimizer": te.Adagrad(lr=0.1), "seed": 3} | keywords
        storage = te.File(tmp_path / f"rows{next(numbers)}")
        return te.TieredEmbeddingBag(ROWS, 8, capacity=capacity, storage=storage, **given)

    return make


def trained(bag, batches, before=lambda: None):
    """Outputs and rows after training. `before`: each forward."""
    outputs = []
    for ids in batches:
        before()
        out = bag(ids)
        out.square().sum().backward()
        outputs.append(out.detach())
    found = [*outputs, *bits(bag)]
    bag.close()
    return found


@pytest.mark.parametrize("capacity", [40, 100, 1.0])
@pytest.mark.parametrize("keywords", [
    {}, {"mode": "max"}, {"mode": "mean", "padding_idx": 3}, {"optimizer": te.Adam(lr=0.05)}, {"max_norm": 0.5},
    {"dtype": torch.bfloat16, "rounding": "stochastic"},
], ids=lambda keywords: "-".join(keywords))  # fmt: skip
def test_training_has_the_bits_of_plans_that_are_launched(monkeypatch, replays, made, capacity, keywords):
    def run():
        return trained(made(capacity, **keywords), [ids_of(step) for step in range(2 * STEPS)])

    assert both(monkeypatch, replays, run) > STEPS


@pytest.mark.parametrize("on_thread", [False, True])
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("capacity", [70, 200, 1.0])
def test_prefetch(monkeypatch, replays, made, capacity, depth, on_thread):
    """On the thread of the loop, and on one of its own, as where storage is slow."""
    if on_thread:
        monkeypatch.setattr(WorkerExecutor, "QUICK", 0.0)

    def run():
        bag = made(capacity)
        return trained(bag, te.prefetch([ids_of(step) for step in range(4 * STEPS)], bag, depth))

    count = both(monkeypatch, replays, run)
    if (capacity, depth) != (70, 3):  # four batches of 40 ids lack slots: some rows have none, and plans are launched
        assert count > STEPS


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_prefetch_of_a_gpu_that_lags_behind_the_host(monkeypatch, replays, made, depth):
    """A plan on the thread replays into nothing that the GPU has yet to read for an earlier batch, which the host has
    released."""
    monkeypatch.setattr(WorkerExecutor, "QUICK", 0.0)

    def run():
        bag = made(250)
        batches = te.prefetch([ids_of(step) for step in range(4 * STEPS)], bag, depth)
        return trained(bag, batches, lambda: torch.cuda._sleep(5_000_000))  # clock cycles: some 3 ms

    assert both(monkeypatch, replays, run) > 0


def test_rows_without_a_slot(monkeypatch, replays, made):
    """A replayed plan finds some, whose second half is launched then; while there are any, plans are."""
    halves = []
    launch = Staged._launch_move

    def heard(self, plan, count, weight, state, new=0):
        halves.append(new)
        launch(self, plan, count, weight, state, new)

    monkeypatch.setattr(Staged, "_launch_move", heard)

    def run():
        bag, outputs = made(60), []
        for step in range(6 * STEPS):
            some = step % 12 == 11
            out = bag(torch.arange(100 * step, 100 * step + 100, device="cuda")[:, None] % ROWS if some else
                      ids_of(step, (100, 1)) % 50)  # fmt: skip
            out.square().sum().backward()
            outputs.append(out.detach())
        found = [*outputs, *bits(bag)]
        bag.close()
        return found

    assert both(monkeypatch, replays, run) > STEPS
    assert max(halves) > 0


def test_to_ask_what_a_plan_would_depend_on_changes_nothing(made):
    bag = made(60)
    bag(torch.arange(100, device="cuda")[:, None]).square().sum().backward()
    cache = bag.tables.groups[0].cache
    uncached, batch = cache.transfer._uncached, cache.plans
    assert uncached == 40
    with cache.plan_lock, cache.lock:
        assert cache.next_plan(5) is None
    assert (cache.transfer._uncached, cache.plans) == (uncached, batch)
    bag(torch.arange(5, device="cuda")[:, None]).square().sum().backward()
    bag(torch.arange(5, device="cuda")[:, None]).square().sum().backward()
    assert cache.transfer._uncached == 0
    bag.close()


@pytest.mark.parametrize("depth", [1, 3])
def test_a_plan_on_the_thread_comes_between_what_a_forward_asks_and_plans(monkeypatch, made, depth):
    """Rows without a slot are given up late on the GPU, and once a forward has asked whether its plan may be recorded,
    and lets go of the locks, the host waits for the thread to go first."""
    monkeypatch.setattr(WorkerExecutor, "QUICK", 0.0)
    free, ask = Records.free, RecordedPlans.plan

    def late(self, records):
        torch.cuda._sleep(1_000_000)
        free(self, records)

    def waits(self, *args, **keywords):
        is_recorded = ask(self, *args, **keywords)
        if not is_recorded and threading.current_thread() is threading.main_thread():
            time.sleep(0.005)
        return is_recorded

    monkeypatch.setattr(Records, "free", late)
    monkeypatch.setattr(RecordedPlans, "plan", waits)

    def run():
        bag = made(5)

        def drops():
            bag(ids_of(1000, (4, 3)))

        batches = te.prefetch([ids_of(step) for step in range(3 * STEPS)], bag, depth)
        return trained(bag, batches, drops)

    with monkeypatch.context() as patch:
        patch.setenv("TIEREDEMB_RECORD", "0")
        expected = run()
    for _ in range(3):
        assert_same_bits(run(), expected)


def test_a_collection_of_two_widths(monkeypatch, replays, tmp_path):
    tables = [te.TableConfig(name=f"t{n}", num_embeddings=ROWS, embedding_dim=width) for n, width in enumerate((4, 8))]
    numbers = itertools.count()

    def run():
        model = te.TieredEmbeddingBagCollection(
            tables, capacity=300, optimizer=te.Adagrad(lr=0.01), seed=1,
            storage=te.File(tmp_path / f"rows{next(numbers)}"),
        )  # fmt: skip
        outputs = []
        batches = [ids_of(step, (3 * 8,)) % 20 for step in range(3 * STEPS)]
        offsets = torch.arange(0, 25, device="cuda")
        for step, ids in enumerate(te.prefetch(batches, model, ids_of=lambda ids: (ids, offsets))):
            out = model(ids, offsets)
            out.square().sum().backward()
            outputs.append(out.detach())
            if step % 10 == 9:
                model.flush()
        found = [*outputs, *bits(model)]
        model.close()
        return found

    assert both(monkeypatch, replays, run) > STEPS


@pytest.mark.parametrize("prefetch", [False, True])
def test_converted_tables_that_share_a_cache(monkeypatch, replays, tmp_path, prefetch):
    numbers = itertools.count()

    def run():
        torch.manual_seed(0)
        model = nn.ModuleList([nn.EmbeddingBag(rows, 4, mode="sum") for rows in (ROWS, 50, 120)]).cuda()
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        te.replace_embedding_bags(
            model, capacity=0.7, optimizer=optimizer, storage=te.File(tmp_path / f"rows{next(numbers)}")
        )
        batches, outputs = [[ids_of(3 * step + at) % 50 for at in range(3)] for step in range(20)], []
        for batch in te.prefetch(batches, model) if prefetch else batches:
            out = torch.cat([bag(ids) for bag, ids in zip(model, batch, strict=True)], 1)
            optimizer.zero_grad()
            out.square().sum().backward()
            optimizer.step()
            outputs.append(out.detach())
        return [*outputs, *model.state_dict().values()]

    assert both(monkeypatch, replays, run) > 10


def test_more_rows_leave_than_there_is_room_for(monkeypatch, replays, made):
    """The same few ids at first, for which buffers are small, and then others each time."""

    def run():
        same, others = ids_of(0, (64, 1)), torch.arange(ROWS, device="cuda")
        batches = [same if step < STEPS else others.roll(64 * step)[:64, None] for step in range(3 * STEPS)]
        return trained(made(70), batches)

    assert both(monkeypatch, replays, run) > STEPS


@pytest.mark.parametrize("ahead", [False, True])
def test_a_storage_that_fails_changes_no_row(monkeypatch, replays, made, ahead):
    batches = [ids_of(step) for step in range(3 * STEPS)]
    expected = trained(made(100), batches)
    bag, outputs, failing, failed = made(100), [], [], 0
    reserve = RowCopies.reserve

    def full(self, *given):
        if failing:
            raise StorageFullError("no space is left")
        reserve(self, *given)

    monkeypatch.setattr(RowCopies, "reserve", full)
    for step, ids in enumerate(te.prefetch(batches, bag) if ahead else batches):
        if failing:
            try:
                bag(ids)
            except StorageFullError:
                failed += 1
            else:
                assert ahead  # it was planned before
            failing.clear()
        out = bag(ids)
        out.square().sum().backward()
        outputs.append(out.detach())
        if step % 6 == 5 and step + 1 < len(batches):
            failing.append(step)
    assert failed > 0
    assert replays
    assert_same_bits([*outputs, *bits(bag)], expected)
    bag.close()


def test_an_interrupt_between_the_halves_loses_nothing(monkeypatch, replays, made):
    batches = [ids_of(step) for step in range(3 * STEPS)]
    expected = trained(made(100), batches)
    bag, outputs, comes = made(100), [], []

    def interrupted(method):
        def call(self, *given, **named):
            if comes and comes[0] is method:
                comes.clear()
                raise KeyboardInterrupt
            return method(self, *given, **named)

        return call

    places = [(Staged, "expect"), (Staged, "await_report"), (Staged, "move"), (RowCopies, "gather")]
    methods = [getattr(*place) for place in places]
    for place, method in zip(places, methods, strict=True):
        monkeypatch.setattr(*place, interrupted(method))
    for step, ids in enumerate(batches):
        if step >= STEPS:
            comes[:] = [methods[step % len(methods)]]
            with pytest.raises(KeyboardInterrupt):
                bag(ids_of(step + 500))
        out = bag(ids)
        out.square().sum().backward()
        outputs.append(out.detach())
    assert replays
    assert_same_bits([*outputs, *bits(bag)], expected)
    bag.close()


def test_others_use_rows_while_a_replayed_plan_waits_for_its_storage(monkeypatch, replays, made):
    bag = made(200)
    for step in range(STEPS):
        held = bag(ids_of(2 * step))
        bag(ids_of(2 * step + 1)).sum().backward()
        held.sum().backward()
    held = bag(ids_of(0))
    waits, goes_on, found = threading.Event(), threading.Event(), []
    gather = RowCopies.gather

    def slow(self, *given, **named):
        waits.set()
        found.append(goes_on.wait(30))
        return gather(self, *given, **named)

    monkeypatch.setattr(RowCopies, "gather", slow)
    count = len(replays)
    other = threading.Thread(target=lambda: bag(ids_of(STEPS)))
    other.start()
    assert waits.wait(30)
    held.sum().backward()  # an update, which needs the rows alone
    torch.cuda.synchronize()
    goes_on.set()
    other.join(30)
    assert found == [True]
    assert len(replays) == count + 1
    bag.close()
