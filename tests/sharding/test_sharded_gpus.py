"""Steps of ranks that have a GPU each, as many as there are up to four, as CUDA graphs over NCCL: the bits of one
process. Skips where NCCL does not take two ranks (`worlds.has_gpus_for`). There eager steps are compared by
`test_sharded_cuda_worlds.py`. Ranks that write into each other's memory: `test_sharded_peer_memory.py`."""

from __future__ import annotations

import functools
import os
import signal
import tempfile
import time
import warnings

import pytest
import torch
from devices import equal
from sharding import sequences
from sharding.ranks import batch_of, one_process, seven, sharding_of, tables_of
from sharding.test_sharded_cuda_graphs import graphs_of
from sharding.worlds import World, need_gpus_for

import tieredemb as te
from tieredemb.sharding.collection import ShardedTieredEmbeddingBagCollection

pytestmark = pytest.mark.gpu
RANKS = min(4, max(2, torch.cuda.device_count()))
LONGEST = 200 * RANKS
SLEEP, LONG_SLEEP = 200_000_000, 10_000_000_000  # cycles of a GPU: a tenth of a second, and five
TABLES = {"widths": (4, 8), "modes": ("sum", "mean", "max"), "rows": (1, 3, 17, 40, 25, 9, 31), "padding": (None, 0, 2)}


@pytest.fixture(scope="module")
def world():
    """Of ranks with a GPU each."""
    need_gpus_for(RANKS)
    started = world_that_sends()
    yield started
    started.close()


def world_that_sends():
    """Whose ranks do not write into each other's memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIEREDEMB_PEER_MEMORY", "0")
        return World(RANKS, "cuda")


def captured_run(rank, size, tables, sharding, steps, distinct, shape, ahead, keywords, samples=seven):
    """Trains by captured steps on `distinct` batches, which recur; outputs here, the tables on rank 0, and how many
    steps were replays."""
    model = ShardedTieredEmbeddingBagCollection(
        tables, sharding=sharding_of(sharding, tables), average=False, **{"max_ids": LONGEST} | keywords
    )

    def step(batch):
        ids, offsets, upstream = batch
        out = model(ids, offsets)
        out.backward(upstream.to(out.dtype))
        return out.detach()

    train, replays, replay = te.graph_step(step, max_ids=LONGEST), [], torch.cuda.CUDAGraph.replay

    def noted(graph):
        replays.append(graph in graphs_of(train))
        replay(graph)

    torch.cuda.CUDAGraph.replay = noted
    try:
        drawn = [batch_of(tables, number, rank, samples=samples, shape=shape) for number in range(distinct)]
        given = [(ids, offsets, upstream) for ids, offsets, _, upstream in drawn]
        loader = [given[step % distinct] for step in range(steps)]
        outputs = [train(batch).clone() for batch in (te.prefetch(loader, model) if ahead else loader)]
        weights = dict(model.state_dict())
    finally:
        torch.cuda.CUDAGraph.replay = replay
        model.close()
    return torch.stack(outputs), weights, sum(replays)  # one tensor: each takes a file descriptor to be sent


def compare(
    world, *, sharding="every other", steps=14, distinct=None, shape=None, ahead=False, run=captured_run, samples=seven,
    **keywords,
):  # fmt: skip
    tables, keywords = tables_of(**TABLES), {"optimizer": te.Adagrad(lr=0.1), "capacity": 0.5} | keywords
    found = world.run(run, tables, sharding, steps, distinct or steps, shape, ahead, keywords, samples)
    with torch.device("cuda"):
        alone, weights = one_process(RANKS, tables, steps, samples, False, keywords, shape, distinct)
    for rank, (outputs, *_) in enumerate(found):
        for step, out in enumerate(outputs):
            assert equal(out, alone[rank][step][0]), (rank, step)
    for name, weight in weights.items():
        assert equal(found[0][1][name], weight), name
    assert min(replays for *_, replays in found) >= steps - (12 if ahead else 6)


@pytest.mark.parametrize("ahead", [False, True], ids=["at once", "ahead"])
@pytest.mark.parametrize("optimizer", [te.RowWiseAdagrad(lr=0.1), te.Adam(lr=0.05)], ids=["sparse", "dense"])
@pytest.mark.parametrize("capacity", [2, 0.3, 1.0])
@pytest.mark.parametrize("sharding", ["rows", "tables", "every other"])
def test_gpus_replay_the_bits_of_one_process(world, sharding, capacity, optimizer, ahead):
    compare(world, sharding=sharding, capacity=capacity, optimizer=optimizer, ahead=ahead, steps=20)


@pytest.mark.parametrize("ahead", [False, True], ids=["at once", "ahead"])
@pytest.mark.parametrize("shape", ["ones", "equal", "some equal", "mostly empty"])
def test_gpus_replay_bags_of_any_length(world, shape, ahead):
    compare(world, shape=shape, ahead=ahead, steps=20)


@pytest.mark.parametrize("ahead", [False, True], ids=["at once", "ahead"])
@pytest.mark.parametrize("sharding", ["rows", "copies", "every other"])
def test_gpus_learn_how_many_ids_their_steps_request(world, sharding, ahead):
    compare(world, sharding=sharding, ahead=ahead, steps=30, max_ids=None)


@pytest.mark.parametrize("ahead", [False, True], ids=["at once", "ahead"])
@pytest.mark.parametrize("keywords", [{"max_norm": 0.5}, {"dtype": torch.bfloat16, "rounding": "stochastic"}], ids=str)
def test_gpus_replay_other_options(world, keywords, ahead):
    compare(world, ahead=ahead, steps=20, **keywords)


def captured_on_files(rank, size, tables, sharding, steps, distinct, shape, ahead, keywords, samples=seven):
    with tempfile.TemporaryDirectory() as directory:
        keywords = {**keywords, "storage": te.File(f"{directory}/rows")}
        return captured_run(rank, size, tables, sharding, steps, distinct, shape, ahead, keywords, samples)


@pytest.mark.parametrize("ahead", [False, True], ids=["at once", "ahead"])
def test_gpus_replay_steps_over_files_whose_rows_are_all_resident(world, ahead):
    compare(world, run=captured_on_files, capacity=1.0, ahead=ahead, steps=20)


@pytest.mark.parametrize("ahead", [False, True], ids=["at once", "ahead"])
def test_gpus_replay_many_steps(world, ahead):
    compare(world, sharding="rows", steps=10_000, distinct=500, capacity=0.3, ahead=ahead)


@pytest.mark.parametrize("seed", range(8))
def test_whatever_ranks_on_gpus_do_has_the_bits_of_one_process(world, seed):
    sequences.check(world, seed)


# --- what is counted --------------------------------------------------------------------------------------------------

BOUND, WIDTH, COUNTED_STEPS = 16, 4, 12
LONGEST_STEP = 10.0  # seconds


def counts(rank, size):
    """Bytes of ids, rows and gradients that each captured step has sent to other ranks; how long exchanges took that
    replays made by NCCL, and how long the GPU has waited in them otherwise; and how many were replays."""
    table = te.TableConfig(name="t", num_embeddings=100, embedding_dim=WIDTH)
    model = ShardedTieredEmbeddingBagCollection(
        [table], sharding=te.RowWise(), capacity=0.5, optimizer=te.Adagrad(lr=0.1), max_ids=BOUND
    )

    def step(batch):
        model(*batch).sum().backward()

    train, found, times = te.graph_step(step), [], []
    for number in range(COUNTED_STEPS):
        ids = (torch.arange(10, device="cuda") * (rank + 3) + number) % 100
        before = model.stats()
        train((ids, torch.tensor([0, 3, 3, 10], device="cuda")))
        sent = model.stats() - before
        found.append((sent.id_bytes_sent, sent.row_bytes_sent, sent.gradient_bytes_sent))
        times.append((sent.exchange_seconds, sent.gpu_wait_seconds))
    replayed = train.summary().replayed
    model.close()
    return found, times[-replayed:], replayed


def check_counted(world, run=counts, *, by_nccl=True):
    """Replays send blocks of one size: ids behind how many there are, and a row and a gradient for each. Their time is
    that of NCCL, or of waits for what others write."""
    expected = [(RANKS - 1) * each for each in ((1 + BOUND) * 8, BOUND * WIDTH * 4, BOUND * WIDTH * 4)]
    for found, times, replayed in world.run(run):
        assert replayed >= COUNTED_STEPS // 2
        assert found[-replayed:] == [tuple(expected)] * replayed
        for of_nccl, of_waits in times:
            assert (0 < of_nccl < LONGEST_STEP) == by_nccl
            assert (0 < of_waits < LONGEST_STEP) == (not by_nccl)


def test_gpus_count_what_their_replays_send(world):
    check_counted(world)


# --- what one rank alone meets ----------------------------------------------------------------------------------------


def run_with(rank, events, skipped, *, is_captured):
    """A loop in which something happens on a rank, but for steps that are `skipped`; outputs, tables, and what is
    refused: of each step its number and the error."""
    tables, refused, outputs = tables_of(**TABLES), [], []
    model = ShardedTieredEmbeddingBagCollection(
        tables, sharding=sharding_of("every other", tables), average=False, capacity=0.5,
        optimizer=te.Adagrad(lr=0.1), max_ids=100 if is_captured else None,
    )  # fmt: skip
    fails = is_captured and events.get("capture") == rank

    def step(batch):
        nonlocal fails
        ids, offsets, upstream = batch
        out = model(ids, offsets)
        out.backward(upstream.to(out.dtype))
        if fails and torch.cuda.is_current_stream_capturing():
            fails = False
            raise ValueError("the step's own")
        return out.detach()

    def batch_at(number):
        ids, offsets, _, upstream = batch_of(tables, number, rank, samples=seven)
        if events.get(("long", number)) == rank:
            each = 4 * RANKS
            ids = torch.cat([torch.arange(7 * each) % table.num_embeddings for table in tables])
            offsets = torch.arange(7 * len(tables) + 1) * each
        if events.get(("id", number)) == rank:
            ids = ids + 1000
        return ids.cuda(), offsets.cuda(), upstream

    train = te.graph_step(step, max_ids=LONGEST) if is_captured else step
    batches = [batch_at(number) for number in range(40)]
    for number, batch in enumerate(te.prefetch(batches, model) if is_captured else batches):
        if number in skipped:
            continue
        try:
            outputs.append(train(batch).clone())
        except (te.errors.TieredEmbError, ValueError) as error:
            refused.append((number, str(error)))
    weights, graphs = dict(model.state_dict()), len(graphs_of(train)) if is_captured else 0
    model.close()
    return outputs, weights, refused, graphs


def meets(rank, size, events):
    """A captured run beside an eager one of the steps that were not refused."""
    captured = run_with(rank, events, (), is_captured=True)
    eager = run_with(rank, events, [number for number, _ in captured[2]], is_captured=False)
    return captured, eager


EVENTS = {
    "a long batch": ({("long", 14): 1}, None),
    "a wrong id": ({("id", 14): 0}, "rank 0: id 10"),
    "both": ({("id", 13): 1, ("long", 14): 0}, "rank 1: id 10"),
    "a capture that fails": ({"capture": 1}, "the step's own"),
}


@pytest.mark.parametrize("events", EVENTS)
def test_what_one_rank_meets_all_do(world, events):
    check_events(world, meets, *EVENTS[events])


def check_events(world, run, events, expected):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = world.run(run, events)
    steps = {tuple(number for number, _ in refused) for (*_, refused, _), _ in found}
    assert len(steps) == 1
    assert len(next(iter(steps))) == (expected is not None)
    for (outputs, weights, refused, captured), (its_outputs, its_weights, its_refused, _) in found:
        assert not its_refused
        assert all(expected in text for _, text in refused)
        assert captured == 3
        assert len(outputs) == len(its_outputs) == 40 - len(refused)
        assert all(equal(one, other) for one, other in zip(outputs, its_outputs, strict=True))
        assert all(equal(weights[name], its_weights[name]) for name in its_weights)


def drifts(rank, size, kind, ahead):
    """Captured steps, from number 20 of which rank 1 has another learning rate: the one that raises, what it raises,
    and how many graphs there were before."""
    tables = tables_of(**TABLES)
    model = ShardedTieredEmbeddingBagCollection(
        tables, sharding=sharding_of("every other", tables), capacity=0.5, max_ids=LONGEST,
        optimizer=te.Adagrad(lr=0.1) if kind == "fused" else torch.optim.SGD,
    )  # fmt: skip
    if kind == "fused":
        optimizer = model.fused_optimizer
    else:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1, device="cuda"))], lr=0.1)
        model.follow(optimizer)
    drawn = [batch_of(tables, number, rank, samples=seven) for number in range(30)]
    batches = [(ids.cuda(), offsets.cuda(), upstream) for ids, offsets, _, upstream in drawn]

    def step(batch):
        ids, offsets, upstream = batch
        optimizer.zero_grad()
        out = model(ids, offsets)
        out.backward(upstream)
        optimizer.step()
        return out.detach()

    train, found, graphs = te.graph_step(step, max_ids=LONGEST), (-1, ""), 0
    try:
        for number, batch in enumerate(te.prefetch(batches, model) if ahead else batches):
            optimizer.param_groups[0]["lr"] = 0.2 if (rank == 1 and number >= 20) else 0.1 / (1 + number % 2)
            graphs = len(graphs_of(train))
            train(batch)
    except te.errors.PeerError as error:
        found = number, str(error)
    model.close()
    return *found, graphs


@pytest.mark.parametrize("ahead", [False, True], ids=["at once", "ahead"])
@pytest.mark.parametrize("kind", ["fused", "followed"])
def test_a_rank_that_replays_with_another_learning_rate_is_noticed(world, kind, ahead):
    for number, text, graphs in world.run(drifts, kind, ahead):
        assert number == 20
        assert "differs between the ranks" in text
        assert "0.2" in text
        assert graphs > 0


def spoils(rank, size):
    """Steps of which the gradients of one are multiplied by a NaN: what the next forward raises and, of other
    shards, by calls after it, which rows have changed, and whether all are finite at the end."""
    tables = tables_of(**TABLES)
    model = ShardedTieredEmbeddingBagCollection(
        tables, sharding=sharding_of("every other", tables), capacity=0.5, optimizer=torch.optim.Adagrad
    )
    dense = torch.nn.Parameter(torch.ones(()))
    optimizer = torch.optim.Adagrad([dense], lr=0.1)
    model.follow(optimizer)
    params = optimizer.param_groups[0]["params"]

    def train(batch):
        ids, offsets, upstream = batch
        optimizer.zero_grad()
        model(ids, offsets).backward(upstream)
        dense.grad = upstream.sum()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()

    def until_done(call):
        while True:
            try:
                return call()
            except te.errors.UnsupportedError as error:
                errors.append(str(error))

    errors = []
    drawn = [batch_of(tables, number, rank, samples=seven) for number in range(6)]
    for number, (ids, offsets, _, upstream) in enumerate(drawn):
        batch = ids.cuda(), offsets.cuda(), upstream
        if number == 3:
            before = {name: weight.clone() for name, weight in model.state_dict().items()}
            upstream.fill_(torch.nan)
        if number == 4:
            torch.cuda.synchronize()
            with pytest.raises(te.errors.UnsupportedError, match="multiplied by NaN"):
                train(batch)
            after = until_done(lambda: dict(model.state_dict()))
            until_done(functools.partial(train, batch))
        else:
            train(batch)
    moved = [name for name, weight in after.items() if not torch.equal(weight, before[name])]
    is_finite = all(bool(weight.isfinite().all()) for weight in model.state_dict().values())
    model.close()
    return errors, moved, is_finite


def test_a_step_that_no_rank_can_take_is_raised_on_all(world):
    for errors, moved, is_finite in world.run(spoils):
        assert all("multiplied by NaN" in text for text in errors)
        assert not moved
        assert is_finite


def evaluates_apart(rank, size):
    """Captured steps, then captured lookups, of which rank 1 has one less before it trains on: what is raised then, how
    many graphs there are by then, and whether all can go on."""
    tables = tables_of(**TABLES)
    model = ShardedTieredEmbeddingBagCollection(
        tables, sharding=sharding_of("every other", tables), capacity=0.5, optimizer=te.Adagrad(lr=0.1), max_ids=LONGEST
    )
    drawn = [batch_of(tables, number, rank, samples=seven) for number in range(16)]
    batches = [(ids.cuda(), offsets.cuda(), upstream) for ids, offsets, _, upstream in drawn]

    def step(batch):
        ids, offsets, upstream = batch
        out = model(ids, offsets)
        out.backward(upstream)
        return out.detach()

    @torch.no_grad()
    def look(batch):
        return model(*batch[:2])

    steps = train, evaluate = te.graph_step(step, max_ids=LONGEST), te.graph_forward(look, max_ids=LONGEST)
    for run in steps:
        for batch in batches:
            run(batch)
    text, graphs = "", sum(len(graphs_of(each)) for each in steps)
    try:
        (train if rank == 1 else evaluate)(batches[0])
    except te.errors.PeerError as error:
        text = str(error)
    goes_on = train(batches[1]).isfinite().all().item()
    model.close()
    return text, graphs, goes_on


def test_a_rank_that_replays_a_lookup_where_others_train_is_noticed(world):
    for text, *others in world.run(evaluates_apart):
        assert "rank 0 number 2, rank 1 number 1" in text
        assert others == [2, True]


def dies(rank, size, ahead, amid, captured=True, alike=False):
    """Rank 1 is killed once it has launched a step. Where it dies `amid` that, its GPU is still between forward and
    backward, and does not come to the exchanges of gradients, of dense layers and of rows, in which the others wait;
    those raise, and then wait for nothing. `alike`: whether the batches are of one form, which eager steps
    record; else they wait for the GPU before a header of the ranks."""
    tables = tables_of(**TABLES)
    model = ShardedTieredEmbeddingBagCollection(
        tables, sharding=sharding_of("rows", tables), capacity=0.5, optimizer=te.Adagrad(lr=0.1), max_ids=LONGEST
    )
    drawn = [batch_of(tables, 0 if alike else number, rank, samples=seven) for number in range(30)]
    batches = [(ids.cuda(), offsets.cuda(), upstream) for ids, offsets, _, upstream in drawn]
    sleep = SLEEP
    with torch.cuda.stream(torch.cuda.Stream()):
        top = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(drawn[0][3].shape[1], 1))

    def step(batch):
        ids, offsets, upstream = batch
        out = model(ids, offsets)
        if amid and rank == 1:
            torch.cuda._sleep(sleep)
        if amid:
            top(out).square().mean().backward()
        else:
            out.backward(upstream.to(out.dtype))
        return out.detach()

    train = te.graph_step(step, max_ids=LONGEST) if captured else step
    started = time.monotonic()
    try:
        for number, batch in enumerate(te.prefetch(batches, model) if ahead else batches):
            started = time.monotonic()
            if number == 16 and not captured:  # which is launched more slowly
                sleep = LONG_SLEEP
            train(batch)
            if rank == 1 and number == 16:
                time.sleep(0.02 * amid)
                os.kill(os.getpid(), signal.SIGKILL)
    except te.errors.PeerError as error:
        took = time.monotonic() - started
        torch.cuda.synchronize()
        if amid:
            model.close()
        return str(error), number, took
    return "", number, 0.0


@pytest.mark.parametrize("ahead", [False, True], ids=["at once", "ahead"])
@pytest.mark.parametrize("amid", [False, True], ids=["behind a replay", "amid a replay"])
def test_a_rank_that_is_killed_is_noticed(amid, ahead):
    check_killed(dies, ahead, amid)


@pytest.mark.parametrize("alike", [False, True], ids=["of any size", "of one size"])
@pytest.mark.parametrize("ahead", [False, True], ids=["at once", "ahead"])
def test_a_rank_that_is_killed_amid_an_eager_step_is_noticed(ahead, alike):
    check_killed(dies, ahead, True, False, alike)


def check_killed(run, *how):
    """The other ranks raise in time, and their processes end by themselves."""
    need_gpus_for(RANKS)
    broken = world_that_sends()
    try:
        for pipe in broken.pipes:
            pipe.send((run, how))
        left = [rank for rank in range(RANKS) if rank != 1]
        for rank in left:
            assert broken.pipes[rank].poll(200)
            kind, (text, number, seconds) = broken.pipes[rank].recv()
            assert kind == "returned"
            assert "start all of them again from the last checkpoint" in text
            assert 16 <= number <= 19  # a prefetch loop is told before it hands the next batch out
            assert seconds < 30
        for rank in left:  # all of them, as NCCL's communicators end together
            broken.pipes[rank].close()
        for rank in left:
            broken.processes[rank].join(60)
            assert broken.processes[rank].exitcode == 0
    finally:
        broken.close()
