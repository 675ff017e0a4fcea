"""Steps of several ranks as CUDA graphs, of a rank that exchanges all with itself by NCCL: the bits of one process,
steps that a graph cannot hold, DistributedDataParallel, and ends. Skips without a GPU; TIEREDEMB_REQUIRE_CUDA=1
fails."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import textwrap
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from devices import assert_same_bits, equal, require_gpu
from sharding.ranks import sharding_of, tables_of
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import random_batch

import tieredemb as te
from tieredemb.errors import IdOutOfRangeError, UnsupportedError
from tieredemb.kernels import collectives
from tieredemb.pipeline.summary import OTHER_SHAPES
from tieredemb.sharding import collection
from tieredemb.sharding.collection import ShardedTieredEmbeddingBagCollection

pytestmark = pytest.mark.gpu
MIXED = tables_of(modes=("sum", "mean", "max"), widths=(4, 8), rows=(1, 3, 17, 40, 25, 9, 31), padding=(None, 0, 2))
SUMS = tables_of(widths=(4, 8), rows=(1, 3, 17, 40, 25, 9, 31), padding=(None, 0, 2))
SAMPLES, STEPS, LONGEST = 7, 12, 250
FIRST = {False: 4, True: 10}  # steps before the first replays, of a loop that fetches ahead and of one that does not


@pytest.fixture
def with_itself(tmp_path, monkeypatch):
    """A process group of this process alone, whose collections are those of several ranks."""
    require_gpu()
    monkeypatch.setattr(collection, "is_alone", lambda exchange: False)
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    gc.collect()  # collections that were not closed hold backward passes on this thread
    dist.destroy_process_group()


def graphs_of(train):
    """What a step of ranks has captured."""
    forms = () if train._forms is None else train._forms._kept.values()
    arenas = (arena for _, rings in forms for ring in rings.values() for arena in ring._arenas)
    return [arena.graph.graph for arena in arenas if arena.graph is not None]


class Replayed:
    """The graphs that were replayed, in their order, none of which it keeps alive: their group could not end."""

    def __init__(self, monkeypatch):
        self.graphs = []
        replay = torch.cuda.CUDAGraph.replay

        def noted(graph):
            self.graphs.append(weakref.ref(graph))
            replay(graph)

        monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", noted)

    def of(self, train):
        """How many replays were of what a step has captured."""
        return sum(graph() in graphs_of(train) for graph in self.graphs)


@pytest.fixture
def replayed(monkeypatch):
    return Replayed(monkeypatch)


class Run:
    """A collection and a dense part, and the step that trains both."""

    def __init__(self, tables, *, sharding=None, max_ids=LONGEST, optimizer=None, recomputes=False, **keywords):
        optimizer = te.Adagrad(lr=0.1) if optimizer is None else optimizer
        keywords = {"capacity": 0.5, "optimizer": optimizer, "device": "cuda"} | keywords
        if sharding is None:
            self.table = te.TieredEmbeddingBagCollection(tables, **keywords)
        else:
            its = sharding_of(sharding, tables)
            self.table = ShardedTieredEmbeddingBagCollection(tables, sharding=its, max_ids=max_ids, **keywords)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, sum(t.embedding_dim for t in tables), device="cuda"))
        self.dense = torch.optim.SGD([self.scale], lr=0.01, foreach=True)
        self.recomputes = recomputes

    def _scaled(self, *given):
        return self.table(*given) * self.scale  # whose gradient takes the rows

    def step(self, batch):
        ids, offsets, target, *weights = batch
        self.dense.zero_grad(set_to_none=True)
        if self.recomputes:
            scaled = checkpoint(self._scaled, ids, offsets, *weights, use_reentrant=False, preserve_rng_state=False)
        else:
            scaled = self._scaled(ids, offsets, *weights)
        out = torch.tanh(scaled)
        loss = (out - target).square().mean() * 10
        loss.backward()
        self.dense.step()
        return {"loss": loss, "out": out}

    def numbers(self):
        return [*self.table.state_dict().values(), self.scale.detach().clone()]


def batches(tables, steps=STEPS, where="cuda", *, weighted=False):
    """ids, offsets and target of each step, and weights of its samples."""
    drawn = [random_batch(tables, SAMPLES, step) for step in range(steps)]
    given = [(ids, offsets, target, *([weights] if weighted else [])) for ids, offsets, weights, target in drawn]
    return [tuple(part.to(where) for part in batch) for batch in given]


def long_batch(target):
    """Of five ids in each bag."""
    ids = torch.cat([torch.arange(SAMPLES * 5) % table.num_embeddings for table in MIXED])
    return ids.cuda(), (torch.arange(len(MIXED) * SAMPLES + 1) * 5).cuda(), target


def first_samples(batch, count):
    """As the last batch of an epoch may be."""
    ids, offsets, target = batch
    tables = range(len(MIXED))
    edges = [offsets[t * SAMPLES : t * SAMPLES + count + 1] for t in tables]
    lengths = torch.cat([each.diff() for each in edges])
    return (
        torch.cat([ids[each[0] : each[-1]] for each in edges]),
        torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
        target[:count],
    )


def compare(tables, replayed, *, sharding, ahead=False, where="cuda", weighted=False, recomputes=False, **keywords):
    """A captured run of ranks against one process, step by step."""
    steps = 25 if ahead else STEPS
    plain, ranks = Run(tables, **keywords), Run(tables, sharding=sharding, recomputes=recomputes, **keywords)
    train = te.graph_step(ranks.step, max_ids=LONGEST)
    loader = batches(tables, steps, where, weighted=weighted)
    for number, batch in enumerate(te.prefetch(loader, ranks.table) if ahead else loader):
        found = {name: value.clone() for name, value in train(batch).items()}
        expected = plain.step(tuple(part.cuda() for part in loader[number]))
        assert_same_bits(found.values(), [value.detach() for value in expected.values()])
    assert_same_bits(ranks.numbers(), plain.numbers())
    assert replayed.of(train) >= steps - FIRST[ahead] - 3 * ahead  # whose last batches have none to go ahead to
    for run in (plain, ranks):
        run.table.close()


# --- the bits of one process ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [False, True], ids=["at once", "ahead"])
@pytest.mark.parametrize("optimizer", [te.RowWiseAdagrad(lr=0.1), te.Adam(lr=0.05)], ids=["sparse", "dense"])
@pytest.mark.parametrize("capacity", [2, 0.3, 1.0])
@pytest.mark.parametrize("sharding", ["rows", "tables", "every other"])
def test_captured_steps_have_the_bits_of_one_process(with_itself, replayed, sharding, capacity, optimizer, ahead):
    compare(MIXED, replayed, sharding=sharding, ahead=ahead, capacity=capacity, optimizer=optimizer)


@pytest.mark.parametrize("ahead", [False, True], ids=["at once", "ahead"])
@pytest.mark.parametrize("sharding", ["rows", "tables", "copies", "every other"])
def test_captured_steps_learn_how_many_ids_they_request(with_itself, replayed, sharding, ahead):
    compare(MIXED, replayed, sharding=sharding, ahead=ahead, max_ids=None)


@pytest.mark.parametrize("max_ids", [LONGEST, None])
def test_steps_that_go_ahead_learn_how_many_rows_come_back(with_itself, max_ids):
    """A row comes back once, however many ids of a batch are of it."""
    ranks = Run(MIXED, sharding="rows", max_ids=max_ids)
    train = te.graph_step(ranks.step, max_ids=LONGEST)
    for batch in te.prefetch(batches(MIXED, 20), ranks.table):
        train(batch)
    context = ranks.table._ranks._context
    assert context.row_bound is not None
    assert context.row_bound < max(context.id_bounds) or max_ids is None
    ranks.table.close()


@pytest.mark.parametrize("ahead", [False, True], ids=["at once", "ahead"])
@pytest.mark.parametrize("sharding", ["rows", "tables", "copies", "every other"])
def test_captured_steps_weigh_samples(with_itself, replayed, sharding, ahead):
    compare(SUMS, replayed, sharding=sharding, ahead=ahead, weighted=True)


@pytest.mark.parametrize("ahead", [False, True], ids=["at once", "ahead"])
@pytest.mark.parametrize(
    "keywords",
    [
        {"dtype": torch.bfloat16, "rounding": "stochastic"},
        {"max_norm": 0.5},
        {"policy": te.LRU(), "storage": te.HostMemory()},
    ],
    ids=lambda keywords: "-".join(keywords),
)
def test_captured_steps_of_other_options(with_itself, replayed, keywords, ahead):
    compare(MIXED, replayed, sharding="every other", ahead=ahead, **keywords)


@pytest.mark.parametrize("ahead", [False, True], ids=["at once", "ahead"])
@pytest.mark.parametrize("capacity", [2, 0.5])
@pytest.mark.parametrize("sharding", ["rows", "every other"])
def test_captured_steps_compute_forwards_again(with_itself, replayed, sharding, capacity, ahead):
    """And train once by them."""
    compare(MIXED, replayed, sharding=sharding, ahead=ahead, capacity=capacity, recomputes=True)


@pytest.mark.parametrize("where", ["cuda", "cpu"])
def test_steps_go_ahead_of_batches_wherever_these_are(with_itself, replayed, where):
    compare(MIXED, replayed, sharding="every other", ahead=True, where=where)


SPIN = 1_000_000  # clock cycles: more than half a millisecond


class Mixed(Run):
    """Beside the collection two bags of this process alone, which share a cache, and are looked up and updated before,
    on another stream if `aside`. The GPU is late with its work for them."""

    def __init__(self, sharding, *, aside=False):
        super().__init__(SUMS, sharding=sharding, capacity=0.3)
        self.stream = torch.cuda.Stream() if aside else None
        torch.manual_seed(0)
        self.bags = nn.ModuleList([nn.EmbeddingBag(rows, 4, mode="sum") for rows in (300, 50)]).cuda()
        te.replace_embedding_bags(self.bags, capacity=0.2, optimizer=te.Adagrad(lr=0.1))

    def step(self, batch):
        *given, first, second = batch
        computes = torch.cuda.current_stream()
        stream = self.stream or computes
        stream.wait_stream(computes)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SPIN)
            before = (self.bags[0](first) + self.bags[1](second)).square().mean()
            torch.cuda._sleep(SPIN)
            before.backward()
        found = super().step(given)
        computes.wait_stream(stream)
        return found | {"before": before}

    def numbers(self):
        return [*super().numbers(), *self.bags.state_dict().values()]


@pytest.mark.parametrize("aside", [False, True])
def test_bags_of_this_process_that_are_planned_as_one(with_itself, replayed, aside):
    """Their plan comes behind what their last one has left, whatever is found out of the ranks' ids beside that; and
    behind their update, which the ledger counts as ended by then: it may take rows that this uses where they lie."""
    plain, ranks = Mixed(None), Mixed("every other", aside=aside)
    train, generator = te.graph_step(ranks.step, max_ids=LONGEST), torch.Generator("cuda").manual_seed(3)
    given = [
        (*batch, *(torch.randint(rows, (SAMPLES, 5), generator=generator, device="cuda") for rows in (300, 50)))
        for batch in batches(SUMS, 25)
    ]
    for number, batch in enumerate(te.prefetch(given, nn.ModuleList([ranks.table, ranks.bags]))):
        found = {name: value.clone() for name, value in train(batch).items()}
        expected = plain.step(given[number])
        assert_same_bits(found.values(), [value.detach() for value in expected.values()])
    assert_same_bits(ranks.numbers(), plain.numbers())
    assert replayed.of(train) >= 8


def test_loops_one_after_the_other_go_ahead(with_itself, replayed):
    """The graphs of the first loop are those of the next ones, as soon as batches are planned again."""
    plain, ranks = Run(MIXED, capacity=0.4), Run(MIXED, sharding="every other", capacity=0.4)
    train, given = te.graph_step(ranks.step, max_ids=LONGEST), batches(MIXED, 16)
    for _ in range(3):
        for batch in te.prefetch(given, ranks.table):
            train(batch)
        for batch in given:
            plain.step(batch)
        train(given[0])
        plain.step(given[0])
    assert_same_bits(ranks.numbers(), plain.numbers())
    assert replayed.of(train) >= 12
    assert len(graphs_of(train)) == 4  # one for each arena of a loop, and that of the step between loops


def test_longer_batches_and_wrong_ids_among_those_that_are_gone_ahead_to(with_itself, replayed):
    plain, ranks = Run(MIXED), Run(MIXED, sharding="every other", max_ids=60)
    train = te.graph_step(ranks.step, max_ids=LONGEST)
    given = batches(MIXED, 40)
    given[14] = long_batch(given[0][2])
    wrong = given[26][0].clone()
    wrong[3] = 10**6
    given[26] = (wrong, *given[26][1:])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, batch in enumerate(te.prefetch(given, ranks.table)):
            if number == 26:
                with pytest.raises(IdOutOfRangeError, match="id 1000000 at position 3"):
                    train(batch)
                continue
            found, expected = train(batch), plain.step(batch)
            assert_same_bits(found.values(), [value.detach() for value in expected.values()])
    assert_same_bits(ranks.numbers(), plain.numbers())
    assert replayed.of(train) >= 12


def test_a_step_that_goes_ahead_and_cannot_be_captured_has_not_happened(with_itself):
    plain, ranks = Run(MIXED), Run(MIXED, sharding="every other")
    reads, refused = True, []

    def step(batch):
        out = ranks.step(batch)
        if reads:
            out["loss"].item()
        return out

    train = te.graph_step(step, max_ids=LONGEST)
    for number, batch in enumerate(te.prefetch(batches(MIXED, 25), ranks.table)):
        reads = number < 8
        try:
            train(batch)
        except UnsupportedError as error:
            refused.append((number, str(error)))
            continue
        plain.step(batch)
    assert refused
    assert all(number < 8 and "test_sharded_cuda_graphs.py" in text for number, text in refused)
    assert_same_bits(ranks.numbers(), plain.numbers())
    assert len(graphs_of(train)) == 3


def test_weights_whose_gradient_is_requested(with_itself, replayed):
    """Gradients of a batch's weights are computed inside, from rows that are received beside the pooled bags."""
    plain, ranks = Run(SUMS), Run(SUMS, sharding="every other")

    def step_of(run):
        def step(batch):
            ids, offsets, target, weights = batch
            weights = weights.detach().requires_grad_()
            run.table(ids, offsets, weights).backward(target)
            return weights.grad

        return step

    train, steps = te.graph_step(step_of(ranks), max_ids=LONGEST), step_of(plain)
    for batch in batches(SUMS, weighted=True):
        n = len(batch[0])
        assert equal(train(batch)[:n], steps(batch))
    assert_same_bits(ranks.numbers(), plain.numbers())
    assert replayed.of(train) >= STEPS - 4


def test_tables_that_follow_a_torch_optimizer(with_itself, replayed):
    def step_of(run, optimizer):
        def step(batch):
            ids, offsets, target = batch
            optimizer.zero_grad(set_to_none=True)
            (run.table(ids, offsets) * run.scale - target).square().mean().backward()
            optimizer.step()

        return step

    runs = [Run(MIXED, optimizer=torch.optim.Adam, sharding=sharding) for sharding in (None, "every other")]
    steps = []
    for run in runs:
        optimizer = torch.optim.Adam([run.scale], lr=0.05, capturable=True)
        run.table.follow(optimizer)
        steps.append(step_of(run, optimizer))
    train = te.graph_step(steps[1], max_ids=LONGEST)
    for batch in batches(MIXED):
        steps[0](batch)
        train(batch)
    assert_same_bits(runs[1].numbers(), runs[0].numbers())
    assert replayed.of(train) >= STEPS - 4


def test_learning_rates_and_evaluation_between_steps(with_itself, replayed):
    plain, ranks = Run(MIXED), Run(MIXED, sharding="every other")
    steps = [plain.step, te.graph_step(ranks.step, max_ids=LONGEST)]
    for number, batch in enumerate(batches(MIXED)):
        seen = []
        for run, step in zip((plain, ranks), steps, strict=True):
            step(batch)
            run.table.fused_optimizer.param_groups[0]["lr"] *= 0.8
            with torch.no_grad():
                ids, offsets, *_ = random_batch(MIXED, 5, 1000 + number)
                seen.append(run.table(ids.cuda(), offsets.cuda()))
        assert_same_bits(seen[:1], seen[1:])
    assert_same_bits(ranks.numbers(), plain.numbers())
    assert replayed.of(steps[1]) >= STEPS - 4


# --- what a graph cannot hold -----------------------------------------------------------------------------------------


def test_a_batch_of_more_ids_than_fit_runs_eagerly(with_itself, replayed):
    plain, ranks = Run(MIXED), Run(MIXED, sharding="every other", max_ids=60)
    train = te.graph_step(ranks.step, max_ids=LONGEST)
    short = batches(MIXED, 6)
    long = long_batch(short[0][2])
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for batch in [*short, long, *short, long, *short]:
            found, expected = train(batch), plain.step(batch)
            assert_same_bits(found.values(), [value.detach() for value in expected.values()])
    said = [str(each.message) for each in warned if "max_ids" in str(each.message)]
    assert len(said) == 1
    assert "more than max_ids=60" in said[0]
    assert replayed.of(train) >= 12
    assert_same_bits(ranks.numbers(), plain.numbers())


@pytest.mark.parametrize("ahead", [False, True], ids=["at once", "ahead"])
def test_without_max_ids_a_batch_of_more_ids_has_steps_captured_anew(with_itself, ahead):
    plain, ranks = Run(MIXED), Run(MIXED, sharding="every other", max_ids=None)
    train = te.graph_step(ranks.step, max_ids=LONGEST)
    short = batches(MIXED, 12)
    long = long_batch(short[0][2])
    loader = [*short, long, *short, long, *short, long, *short]
    for batch in te.prefetch(iter(loader), ranks.table) if ahead else loader:
        expected = plain.step(batch)
        assert_same_bits(train(batch).values(), [value.detach() for value in expected.values()])
    its = train.summary()  # the first of the long ones alone does not fit
    assert its.replayed + its.captured >= len(loader) - (24 if ahead else 8)
    assert_same_bits(ranks.numbers(), plain.numbers())


@pytest.mark.parametrize("ahead", [False, True], ids=["at once", "ahead"])
def test_batches_of_other_shapes_run_eagerly_and_of_more_ids_are_captured_anew(with_itself, replayed, ahead):
    """Without max_ids."""
    plain, ranks = Run(MIXED), Run(MIXED, sharding="every other", max_ids=None)
    train, given = te.graph_step(ranks.step), batches(MIXED, 36)
    for at in (7, 20, 33):
        given[at] = first_samples(given[at], 3)
    given = sorted(given[:6], key=lambda batch: len(batch[0])) + given[6:]
    for batch in te.prefetch(iter(given), ranks.table) if ahead else given:
        expected = plain.step(batch)
        assert_same_bits(train(batch).values(), [value.detach() for value in expected.values()])
    assert_same_bits(ranks.numbers(), plain.numbers())
    assert train.summary().eager[OTHER_SHAPES] == 3
    assert replayed.of(train) >= (1 if ahead else 8)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("sharding", [None, "rows", "tables", "copies", "every other"])
def test_whatever_comes_has_the_bits_of_eager_steps(with_itself, sharding, seed):
    """In loops that go ahead or not, and may be left early: batches like most, long ones, ones of fewer samples, and
    wrong ones. Between loops: steps by themselves, captured and eager, and evaluation. Without `sharding` by the
    collection of one process, which reports wrong ids on a GPU at a later call, so that it has none."""
    draw = random.Random(f"{sharding} {seed}")
    keywords = {
        "capacity": draw.choice([2, 0.3, 0.6, 1.0]),
        "optimizer": draw.choice([te.RowWiseAdagrad(lr=0.1), te.Adagrad(lr=0.1), te.Adam(lr=0.05)]),
    }
    max_ids = draw.choice([None, 60, LONGEST])
    plain, ranks = Run(MIXED, **keywords), Run(MIXED, sharding=sharding, max_ids=max_ids, **keywords)
    train = te.graph_step(ranks.step, max_ids=draw.choice([None, LONGEST]))
    evaluate = te.graph_forward(lambda batch: ranks.table(*batch[:2]), max_ids=LONGEST)
    given, wrong = batches(MIXED, 60), random_batch(MIXED, SAMPLES, 1)[0].index_fill(0, torch.tensor([3]), 10**6)
    kinds = {
        "like most": lambda: draw.choice(given),
        "long": lambda: long_batch(given[0][2]),
        "few": lambda: first_samples(draw.choice(given), draw.randrange(1, SAMPLES)),
        "wrong": lambda: (wrong.cuda(), random_batch(MIXED, SAMPLES, 1)[1].cuda(), given[0][2]),
    }
    if sharding is None:
        del kinds["wrong"]

    def check(batch, step):
        if (batch[0] == 10**6).any():
            with pytest.raises(IdOutOfRangeError, match="id 1000000 at position 3"):
                step(batch)
        else:
            found, expected = step(batch), plain.step(batch)
            assert_same_bits(found.values(), [value.detach() for value in expected.values()])

    check(given[0], train)  # like most, as graphs of ranks are of the first form
    for _ in range(8):
        ahead, weights = draw.random() < 0.7, draw.choice([(1, 0, 0, 0), (12, 1, 0, 0), (12, 1, 1, 1)])
        loader = [kinds[kind]() for kind in draw.choices(list(kinds), weights[: len(kinds)], k=draw.randrange(1, 24))]
        left_at = draw.choice([len(loader), draw.randrange(len(loader))])
        for number, batch in enumerate(te.prefetch(iter(loader), ranks.table) if ahead else loader):
            if number == left_at:
                break
            check(batch, train)
        for between in draw.choices(["captured", "eager", "evaluation"], k=draw.randrange(3)):
            batch = draw.choice(given)
            if between == "evaluation":
                with torch.no_grad():
                    assert equal(evaluate(batch), plain.table(*batch[:2]))
            else:
                check(batch, train if between == "captured" else ranks.step)
    for batch in given[:12]:
        check(batch, train)
    assert_same_bits(ranks.numbers(), plain.numbers())
    assert train.summary().replayed


def test_a_wrong_id_is_refused_before_anything_happens(with_itself, replayed):
    plain, ranks = Run(MIXED), Run(MIXED, sharding="every other")
    train = te.graph_step(ranks.step, max_ids=LONGEST)
    given = batches(MIXED)
    for number, batch in enumerate(given):
        if number == 8:
            ids = batch[0].clone()
            ids[3] = 10**6
            with pytest.raises(IdOutOfRangeError, match="id 1000000 at position 3"):
                train((ids, *batch[1:]))
        train(batch)
        plain.step(batch)
    assert_same_bits(ranks.numbers(), plain.numbers())
    assert replayed.of(train) >= STEPS - 4


def test_a_step_that_cannot_be_captured_has_not_happened(with_itself):
    plain, ranks = Run(MIXED), Run(MIXED, sharding="every other")

    def step(batch):
        out = ranks.step(batch)
        if reads:
            out["loss"].item()
        return out

    train = te.graph_step(step, max_ids=LONGEST)
    for number, batch in enumerate(batches(MIXED)):
        reads = number < 5
        if number in (3, 4):  # which would be captured
            with pytest.raises(UnsupportedError, match=r"test_sharded_cuda_graphs\.py"):
                train(batch)
        else:
            train(batch)
            plain.step(batch)
    assert_same_bits(ranks.numbers(), plain.numbers())
    assert graphs_of(train)


def test_what_ranks_cannot_agree_on_is_refused(with_itself):
    ranks, other = Run(MIXED, sharding="rows"), Run(MIXED, sharding="rows")
    (batch,) = batches(MIXED, 1)
    with pytest.raises(UnsupportedError, match="ids that are none of its batch's tensors"):
        te.graph_step(lambda batch: ranks.step((batch[0].clone(), *batch[1:])))(batch)
    with pytest.raises(UnsupportedError, match="2 sharded collections"):
        te.graph_step(lambda batch: (ranks.step(batch), other.step(batch)))(batch)
    graph = torch.cuda.CUDAGraph()
    by_hand = torch.cuda.graph(graph, capture_error_mode="thread_local")  # threads of NCCL ask for events
    with pytest.raises(UnsupportedError, match=r"let tieredemb\.graph_step capture the step"), by_hand:
        ranks.table(*batch[:2])


# --- around it --------------------------------------------------------------------------------------------------------


def test_distributed_data_parallel_is_warmed_up(with_itself, replayed):
    plain, ranks = Run(MIXED), Run(MIXED, sharding="every other")
    columns = len(plain.scale)
    tops = [nn.Linear(columns, 3, device="cuda") for _ in range(2)]
    tops[1].load_state_dict(tops[0].state_dict())
    with torch.cuda.stream(torch.cuda.Stream()):
        wrapped = nn.parallel.DistributedDataParallel(tops[1], device_ids=[0])
    torch.cuda.current_stream().synchronize()
    calls = []

    def step_of(run, top, inner):
        dense = torch.optim.SGD(inner.parameters(), lr=0.05)

        def step(batch):
            calls.append(torch.cuda.is_current_stream_capturing())
            dense.zero_grad(set_to_none=True)
            loss = top(run.table(*batch[:2])).square().mean()
            loss.backward()
            dense.step()
            return loss.detach()

        return step

    train, alone = te.graph_step(step_of(ranks, wrapped, tops[1]), max_ids=LONGEST), step_of(plain, tops[0], tops[0])
    losses = [train(batch).clone() for batch in batches(MIXED, 20)]
    captured = calls.index(True)
    assert captured >= 11
    for number, batch in enumerate(batches(MIXED, 20)):
        assert equal(losses[number], alone(batch)), number
    assert replayed.of(train) >= 20 - captured
    for run, top in ((ranks, tops[1]), (plain, tops[0])):
        run.all = [*run.table.state_dict().values(), *top.parameters()]
    assert_same_bits(ranks.all, plain.all)


@pytest.mark.parametrize("ahead", [False, True])
def test_distributed_data_parallel_is_warm_for_the_loops_after_the_first(with_itself, ahead):
    run = Run(MIXED, optimizer=te.SGD(lr=0.1))
    with torch.cuda.stream(torch.cuda.Stream()):
        top = nn.parallel.DistributedDataParallel(nn.Linear(len(run.scale), 3, device="cuda"), device_ids=[0])
    torch.cuda.current_stream().synchronize()
    train = te.graph_step(lambda batch: top(run.table(*batch[:2])).square().mean().backward(), max_ids=LONGEST)
    given, seen = batches(MIXED, 18), []
    for _ in range(3):
        for batch in te.prefetch(given, run.table) if ahead else given:
            train(batch)
        seen.append(train.summary().replayed)
    at_ends = 4 if ahead else 0  # the first two batches of a loop have no plans, and the last two none ahead
    assert seen[2] - seen[1] >= len(given) - at_ends - 1


@pytest.mark.parametrize("ahead", [False, True])
def test_graphs_are_freed_before_a_group_ends_and_captured_anew(with_itself, replayed, ahead):
    plain, ranks = Run(MIXED), Run(MIXED, sharding="every other")
    train = te.graph_step(ranks.step, max_ids=LONGEST)
    given = batches(MIXED, 30)
    for number, batch in enumerate(te.prefetch(given, ranks.table) if ahead else given):
        if number == 12:
            first = graphs_of(train)
            assert first
            dist.destroy_process_group(dist.new_group([0]))
            assert not graphs_of(train)
        train(batch)
    assert graphs_of(train)
    assert not set(map(id, graphs_of(train))) & set(map(id, first))
    collectives.free_all()
    collectives.free_all()
    for batch in given:
        plain.step(batch)
    assert_same_bits(ranks.numbers(), plain.numbers())


SCRIPT = """
import sys
import torch
import torch.distributed as dist
import tieredemb as te
from tieredemb.sharding import collection

how, store = sys.argv[1:]
collection.is_alone = lambda exchange: False
torch.cuda.set_device(0)
dist.init_process_group("cpu:gloo,cuda:nccl", "file://" + store, rank=0, world_size=1)
tables = [te.TableConfig(name="a", num_embeddings=500, embedding_dim=4)]
model = te.ShardedTieredEmbeddingBagCollection(
    tables, sharding=te.RowWise(), capacity=0.5, optimizer=te.Adagrad(lr=0.1), device="cuda", max_ids=64
)
scale = torch.nn.Parameter(torch.ones(4, device="cuda"))

def step(batch):
    loss = (model(*batch) * scale).square().sum()
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total

train = te.graph_step(step)
for number in range(8):
    loss = train((torch.arange(6, device="cuda") + number, torch.arange(7, device="cuda")))
assert train.summary().replayed
if how == "an error":
    raise ValueError("the user's own")
if how == "destroyed":
    dist.destroy_process_group()
if how == "closed":
    model.close()
    dist.destroy_process_group()
if how == "destroyed, then closed":
    dist.destroy_process_group()
    model.close()
print("ended")
"""


@pytest.mark.parametrize("how", ["destroyed", "closed", "destroyed, then closed", "nothing", "an error"])
def test_a_process_with_a_captured_step_ends(gpu, tmp_path, how):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, str(script), how, str(tmp_path / "store")]
    path = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, env={**os.environ, "PYTHONPATH": path}, check=False
    )
    said = done.stdout + done.stderr
    assert "terminate called" not in said
    if how == "an error":
        assert "the user's own" in said
    else:
        assert done.returncode == 0, said
        assert "ended" in done.stdout
