"""Steps on a GPU that never wait for the host: nothing synchronises, whole steps replay from a CUDA graph with the bits
of eager ones, and a forward on another stream sees the update. Skips without a GPU; TIEREDEMB_REQUIRE_CUDA=1 fails.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from devices import assert_same_bits, equal, randint
from torch import nn
from training import NAMES, OPTIMIZERS, bits, random_batch, table_configs

import tieredemb as te
from tieredemb.errors import StorageError
from tieredemb.kernels.compiler import MODULES
from tieredemb.step.device_call import DeviceCall

pytestmark = pytest.mark.usefixtures("gpu")

SLEEP = 2**30  # clock cycles: half a second, a hundred times what the host needs for a step
CASES = {  # how lookups are pooled, and what the module is built with
    "sum": (("sum",), {}),
    "mean and max": (("mean", "max"), {}),
    "per-sample weights": (("sum",), {}),
    "max_norm": (("sum",), {"max_norm": 1.0}),
    "scale_grad_by_freq": (("sum", "mean"), {"scale_grad_by_freq": True}),
    "resident": (("sum",), {"capacity": 1.0}),
    "loss scaling": (("sum",), {}),
}


@contextlib.contextmanager
def synchronisation_is_an_error():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("case", CASES)
def test_training_step_does_not_wait_for_the_gpu(case):
    """Neither as torch sees it, nor as the clock does: the host has queued the steps while the GPU still sleeps."""
    modes, keywords = CASES[case]
    tables = table_configs(modes=modes, widths=(4, 5))
    keywords = {"capacity": 5, "optimizer": te.Adagrad(lr=0.1)} | keywords
    model = te.TieredEmbeddingBagCollection(tables, **keywords)
    scaler = torch.amp.GradScaler("cuda") if case == "loss scaling" else None
    if scaler is not None:
        model.fused_optimizer.attach_grad_scaler(scaler)

    def step(batch):
        ids, offsets, weights, upstream = batch
        shares = weights.requires_grad_() if case == "per-sample weights" else None
        out = model(ids, offsets, shares)
        if scaler is None:
            out.backward(upstream)
        else:
            scaler.scale((out * upstream).sum()).backward()

    batches = [random_batch(tables, 7, seed) for seed in range(2)]  # a queue holds about a thousand launches
    for batch in batches * 2:  # compiles the kernels
        step(batch)
    with torch.no_grad():
        model(*batches[0][:2])
    MODULES.wait_for_begun()  # what is compiled ahead takes cores that steps wait for
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP)
    done = torch.cuda.Event()
    done.record()
    with synchronisation_is_an_error():
        for batch in batches:
            step(batch)
        with torch.no_grad():
            model(*batches[0][:2])
    assert not done.query()
    torch.cuda.synchronize()
    assert model.stats().batches == 8 * len(model.tables.groups)


@pytest.mark.parametrize("make", ["bag", "embedding"])
def test_modules_of_one_table_do_not_wait_for_the_gpu(make):
    keywords = {"capacity": 7, "optimizer": te.SparseAdam(lr=0.1)}
    if make == "bag":
        module = te.TieredEmbeddingBag(300, 4, mode="sum", **keywords)
    else:
        module = te.TieredEmbedding(300, 4, padding_idx=3, **keywords)
    batches = [randint(0, 300, (40, 3), seed=seed) for seed in range(4)]
    for batch in batches:
        module(batch).sum().backward()
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP)
    done = torch.cuda.Event()
    done.record()
    with synchronisation_is_an_error():
        for batch in batches:
            module(batch).sum().backward()
    assert not done.query()


# --- graphs -----------------------------------------------------------------------------------------------------------

BAGS = 8


class Run:
    """Training on static buffers: `step` reads the batch that `load` copied there. A dense part without matrix
    products, whose bits might depend on the workspace that a graph gives them."""

    def __init__(self, tables, **keywords):
        self.tables = tables
        self.table = te.TieredEmbeddingBagCollection(tables, **keywords)
        width = sum(table.embedding_dim for table in tables)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.dense = torch.optim.SGD([self.scale], lr=0.01, foreach=True)
        self.ids, self.offsets = self.batch(0)
        self.target = torch.linspace(-1, 1, BAGS * width).reshape(BAGS, width)
        self.out = self.loss = None

    def batch(self, seed):
        """Bags of any size, 4 ids a bag on average: shapes stay, everything else changes."""
        parts, edges = [], [torch.zeros(1, dtype=torch.int64)]
        for t, table in enumerate(self.tables):
            n, rows = 4 * BAGS, table.num_embeddings
            hot = randint(0, min(rows, 8), (n,), seed=1000 * seed + 2 * t)
            any_of_them = randint(0, rows, (n,), seed=1000 * seed + 2 * t + 1)
            parts.append(torch.where(any_of_them % 3 == 0, hot, any_of_them))
            cuts = randint(0, n + 1, (BAGS - 1,), seed=1000 * seed + 500 + t).sort().values
            edges.append(torch.cat([cuts, torch.tensor([n])]) + t * n)
        return torch.cat(parts), torch.cat(edges)

    def load(self, seed):
        ids, offsets = self.batch(seed)
        self.ids.copy_(ids)
        self.offsets.copy_(offsets)

    def step(self):
        self.dense.zero_grad(set_to_none=True)
        out = torch.tanh(self.table(self.ids, self.offsets) * self.scale)
        loss = (out - self.target).square().mean() * 10
        loss.backward()
        self.dense.step()
        self.out, self.loss = out.detach(), loss.detach()  # a graph of the warm-up must not live on into the capture

    def warm_up(self):
        """On a side stream, as torch's documentation of graphs asks for."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for seed in range(3):
                self.load(seed)
                self.step()
        torch.cuda.current_stream().wait_stream(side)

    def capture(self):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        return graph

    def seen(self):
        return [self.out.clone(), self.loss.clone()]

    def numbers(self):
        return [*bits(self.table), self.scale.detach().clone()]


def warmed_up(tables, **keywords):
    """Two runs of one kind, after the same first steps."""
    runs = [Run(tables, **keywords) for _ in range(2)]
    for run in runs:
        run.warm_up()
    return runs


def stepped(eager, run, graph, stop):
    """Seeds from 3 up to `stop`, once each has gone through an eager step of one run and a replay of the other."""
    for seed in range(3, stop):
        eager.load(seed)
        run.load(seed)
        eager.step()
        graph.replay()
        yield seed


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=NAMES)
@pytest.mark.parametrize("capacity", [2, 40, 1.0])  # rows: fewer than a batch needs, fewer than the tables have, all
def test_replayed_steps_give_the_bits_of_eager_ones(optimizer, capacity):
    tables = table_configs(widths=(4, 5), modes=("sum", "mean", "max"), rows=(1, 3, 100, 300))
    eager, run = warmed_up(tables, capacity=capacity, optimizer=optimizer)
    graph = run.capture()
    for seed in stepped(eager, run, graph, 27):
        assert_same_bits(run.seen(), eager.seen())
        if seed == 15:  # whole-cache calls between replays
            assert_same_bits(run.numbers(), eager.numbers())
            run.table.flush()
    assert_same_bits(run.numbers(), eager.numbers())
    mine, other = run.table.stats(), eager.table.stats()
    assert (mine.batches, mine.lookups) == (other.batches, other.lookups)


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("capacity", [2, 40, 1.0])
def test_bags_of_a_large_batch_are_found_beside_its_captured_plan(monkeypatch, capacity, large):
    monkeypatch.setattr("tieredemb.step.device_call.LARGE", 1 if large else 1000)
    find, streams = DeviceCall._find_bags, []
    monkeypatch.setattr(
        DeviceCall, "_find_bags", lambda *given: streams.append(torch.cuda.current_stream()) or find(*given)
    )
    tables = table_configs(widths=(4, 5), rows=(3, 300))
    eager, run = warmed_up(tables, capacity=capacity, optimizer=te.Adagrad(lr=0.05))
    graph = run.capture()
    assert (streams[-1] != torch.cuda.graph.default_capture_stream) == large
    for _ in stepped(eager, run, graph, 15):
        assert_same_bits(run.seen(), eager.seen())
    assert_same_bits(run.numbers(), eager.numbers())


def test_a_flush_between_a_forward_and_its_backward_after_replays():
    tables = table_configs(widths=(4,), rows=(3, 300))
    eager, run = warmed_up(tables, capacity=20, optimizer=te.SparseAdam(lr=0.05))
    graph = run.capture()
    for _ in stepped(eager, run, graph, 40):
        pass
    results = []
    for each in (eager, run):
        first = each.table(*each.batch(50))
        each.table.flush()
        second = each.table(*each.batch(51))
        (first.sum() + second.square().sum()).backward()
        results.append([first.detach(), second.detach(), *each.numbers()])
    assert_same_bits(*results)


@pytest.mark.parametrize("capacity", [100, 1.0])
def test_a_step_that_was_never_run_can_be_captured(capacity):
    """Once its kernels are compiled: what it allocates for later steps must not be made anew by each replay."""
    tables = table_configs(widths=(4,), rows=(3, 300))
    other, eager, run = (Run(tables, capacity=capacity, optimizer=te.Adagrad(lr=0.05)) for _ in range(3))
    other.warm_up()
    graph = run.capture()
    for seed in range(5):
        eager.load(seed)
        run.load(seed)
        eager.step()
        graph.replay()
        assert_same_bits(run.seen(), eager.seen())
    assert_same_bits(run.numbers(), eager.numbers())


def test_a_first_step_larger_than_the_cache_cannot_be_captured():
    """Its rows without a slot need room that outlasts the graph."""
    tables = table_configs(widths=(4,), rows=(3, 300))
    other, run = (Run(tables, capacity=2, optimizer=te.Adagrad(lr=0.05)) for _ in range(2))
    other.warm_up()
    with pytest.raises(StorageError, match=r"may use \d+ rows without a slot.* run it once before"):
        run.capture()
    run.warm_up()
    run.capture().replay()


def test_capture_beside_a_batch_in_flight_is_refused():
    run = Run(table_configs(widths=(4,), rows=(3, 300)), capacity=20, optimizer=te.SGD(lr=0.1))
    run.warm_up()
    kept = run.table(*run.batch(9))
    with pytest.raises(StorageError, match="while a batch from before is in flight"):
        run.capture()
    del kept
    graph = run.capture()
    before = run.numbers()
    graph.replay()
    assert not all(equal(a, b) for a, b in zip(run.numbers(), before, strict=True))


def test_eager_steps_and_replays_take_turns():
    tables = table_configs(widths=(4,), rows=(3, 300))
    eager, run = warmed_up(tables, capacity=20, optimizer=te.SparseAdam(lr=0.05))
    graph = run.capture()
    for seed in range(3, 20):
        for each in (eager, run):
            each.load(seed)
        eager.step()
        if seed % 3:
            graph.replay()
        else:
            out, loss = run.out, run.loss  # the graph's own, which an eager step must not lose
            run.step()
            assert_same_bits(run.seen(), eager.seen())
            run.out, run.loss = out, loss
        with torch.no_grad():
            ids, offsets = run.batch(seed + 100)
            assert equal(run.table(ids, offsets), eager.table(ids, offsets))
    assert_same_bits(run.numbers(), eager.numbers())


def test_learning_rate_that_was_uploaded_reaches_replayed_steps():
    tables = table_configs(widths=(4,), rows=(3, 300))
    eager, run = warmed_up(tables, capacity=20, optimizer=te.Adagrad(lr=0.1, lr_decay=0.01))
    graph = run.capture()
    for seed in range(3, 12):
        for each in (eager, run):
            each.load(seed)
            each.table.fused_optimizer.param_groups[0]["lr"] = 0.5 / seed
        eager.step()
        run.table.fused_optimizer.upload()
        graph.replay()
        assert_same_bits(run.seen(), eager.seen())
    assert_same_bits(run.numbers(), eager.numbers())


def test_bad_ids_of_a_replayed_step_are_told_and_update_nothing():
    tables = table_configs(widths=(4,), rows=(3, 300))
    run = Run(tables, capacity=20, optimizer=te.SGD(lr=0.1))
    run.warm_up()
    graph = run.capture()
    before = bits(run.table)
    run.load(5)
    run.ids[40] = 300
    graph.replay()
    with pytest.raises(te.errors.IdOutOfRangeError, match=r"id 300 at position 40 .*'t1'"):
        run.table.stats()
    assert_same_bits(bits(run.table), before)
    run.load(6)
    graph.replay()
    assert not all(equal(a, b) for a, b in zip(bits(run.table), before, strict=True))


# --- streams ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [2, 1.0])
@pytest.mark.parametrize("late", ["main", "side"])
def test_a_forward_on_another_stream_sees_the_update(late, capacity):
    """The updating stream sleeps first; nobody but the cache makes the other one wait."""
    batches = [randint(0, 300, (50, 3), seed=seed) for seed in range(3)]
    outs = []
    for delayed in (False, True):
        bag = te.TieredEmbeddingBag(300, 4, mode="sum", capacity=capacity, optimizer=te.Adagrad(lr=0.1))
        bag(batches[0]).sum().backward()
        side, main = torch.cuda.Stream(), torch.cuda.current_stream()
        first, second = (main, side) if late == "main" else (side, main)
        torch.cuda.synchronize()
        with torch.cuda.stream(first):
            if delayed:
                torch.cuda._sleep(SLEEP // 2)
            bag(batches[1]).square().sum().backward()
        with torch.cuda.stream(second), torch.no_grad():
            seen = bag(batches[1])
        with torch.cuda.stream(second):
            bag(batches[2]).square().sum().backward()
        with torch.cuda.stream(first), torch.no_grad():
            again = bag(batches[2])
        torch.cuda.synchronize()
        outs.append([seen, again, *bits(bag)])
    assert_same_bits(*outs)
