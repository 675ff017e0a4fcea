"""Steps of ranks that write rows and gradients into each other's memory, captured and eager: the bits of one process,
and of rows that are sent, whichever GPU is late. Skips where NCCL does not take as many ranks."""

from __future__ import annotations

import contextlib
import functools
import itertools
import tempfile
from datetime import timedelta

import pytest
import torch
from devices import equal
from sharding import sequences, test_sharded_gpus
from sharding.ranks import batch_of, calls_of, seven, sharding_of, tables_of, unequal, uneven
from sharding.test_sharded_gpus import EVENTS, LONGEST, RANKS, TABLES, check_counted, compare, world
from sharding.worlds import need_gpus_for
from torch.utils.checkpoint import checkpoint

import tieredemb as te
from tieredemb.sharding.collection import ShardedTieredEmbeddingBagCollection
from tieredemb.sharding.eager_buffers import EagerBuffers
from tieredemb.sharding.gpu_bags import GpuBags, GpuTableWiseBags
from tieredemb.sharding.peer_exchange import PeerExchange
from tieredemb.sharding.request import Request
from tieredemb.sharding.symmetric import SymmetricMemory

pytestmark = pytest.mark.gpu
__all__ = ["world"]  # a fixture, of processes whose environment says that rows are sent


@contextlib.contextmanager
def writing(*, peers=True, has_barriers=True):
    """Ranks write into each other's memory inside if `peers`; then there are barriers, or not."""
    found, barrier = [], SymmetricMemory.barrier

    def noted(memory):
        found.append(memory)
        barrier(memory)

    with pytest.MonkeyPatch.context() as patch:
        if peers:
            patch.delenv("TIEREDEMB_PEER_MEMORY", raising=False)
        patch.setattr(SymmetricMemory, "barrier", noted)
        yield patch
    assert bool(found) == (peers and has_barriers)


def captured_run(rank, size, tables, sharding, *given):
    with writing():
        return test_sharded_gpus.captured_run(rank, size, tables, sharding, *given)


DIFFERENT_SAMPLES = [
    pytest.param({"samples": unequal, "sharding": sharding}, id=f"different samples, {sharding}")
    for sharding in ("tables", "copies", "every other")
]
AT_ONCE_OR_AHEAD = pytest.mark.parametrize("ahead", [False, True], ids=["at once", "ahead"])


@AT_ONCE_OR_AHEAD
@pytest.mark.parametrize(
    "keywords",
    [
        *({"sharding": sharding} for sharding in ("rows", "tables", "copies", "every other")),
        *({"capacity": capacity, "sharding": "rows"} for capacity in (2, 0.3, 1.0)),
        *({"shape": shape} for shape in ("ones", "equal", "some equal", "mostly empty")),
        {"optimizer": te.Adam(lr=0.05)},
        {"optimizer": te.RowWiseAdagrad(lr=0.1), "sharding": "rows"},
        {"max_norm": 0.5},
        {"dtype": torch.bfloat16, "rounding": "stochastic"},
        *DIFFERENT_SAMPLES,
    ],
    ids=str,
)
def test_the_bits_of_one_process(world, keywords, ahead):
    compare(world, ahead=ahead, steps=20, run=captured_run, **keywords)


@AT_ONCE_OR_AHEAD
def test_many_steps(world, ahead):
    compare(world, sharding="rows", steps=10_000, distinct=500, capacity=0.3, ahead=ahead, run=captured_run)


def eager_run(rank, size, tables, sharding, steps, distinct, shape, ahead, keywords, samples=seven):
    """As `captured_run`, by eager steps, most of which write."""
    with (
        writing(),
        calls_of(EagerBuffers, "rows_exchanged") as written,
        calls_of(GpuBags, "send_gradient") as of_rows,
        calls_of(GpuTableWiseBags, "send_gradient") as of_bags,
    ):
        model = ShardedTieredEmbeddingBagCollection(
            tables, sharding=sharding_of(sharding, tables), average=False, **keywords
        )
        drawn = [batch_of(tables, number, rank, samples=samples, shape=shape) for number in range(distinct)]
        loader = [(its[0], its[1], its[3]) for its in (drawn[step % distinct] for step in range(steps))]
        outputs = []
        for ids, offsets, upstream in te.prefetch(loader, model, ids_of=lambda its: its[:2]) if ahead else loader:
            out = model(ids, offsets)
            out.backward(upstream.to(out.dtype))
            outputs.append(out.detach())
        weights = dict(model.state_dict())
        model.close()
    kinds = [of_rows] * (sharding not in ("tables", "copies")) + [of_bags] * (sharding != "rows")
    assert min(map(len, [written, *kinds])) >= steps // 2
    return torch.stack(outputs), weights, steps


def eager_on_files(rank, size, tables, sharding, steps, distinct, shape, ahead, keywords, samples=seven):
    with tempfile.TemporaryDirectory() as directory:
        keywords = {**keywords, "storage": te.File(f"{directory}/rows")}
        return eager_run(rank, size, tables, sharding, steps, distinct, shape, ahead, keywords, samples)


@AT_ONCE_OR_AHEAD
def test_eager_steps_over_files_write_to_the_bits_of_one_process(world, ahead):
    compare(world, ahead=ahead, steps=40, run=eager_on_files, capacity=0.3)


@AT_ONCE_OR_AHEAD
@pytest.mark.parametrize("keywords", [
    *({"sharding": sharding} for sharding in ("rows", "tables", "copies", "every other")),
    {"capacity": 2}, {"shape": "ones"}, {"shape": "mostly empty"}, {"optimizer": te.Adam(lr=0.05)}, {"max_norm": 0.5},
    {"max_ids": LONGEST}, {"dtype": torch.bfloat16, "rounding": "stochastic"},
    *DIFFERENT_SAMPLES, pytest.param({"samples": uneven}, id="no samples"),
], ids=str)  # fmt: skip
def test_eager_steps_write_to_the_bits_of_one_process(world, keywords, ahead):
    compare(world, ahead=ahead, steps=40, run=eager_run, **keywords)


def performed(*given):
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TIEREDEMB_PEER_MEMORY", raising=False)
        return sequences.performed(*given)


@pytest.mark.parametrize("seed", range(8))
def test_whatever_ranks_do_has_the_bits_of_one_process(world, seed):
    sequences.check(world, seed, run=performed)


def counts(rank, size):
    with writing():
        return test_sharded_gpus.counts(rank, size)


def test_what_is_written_counts_as_sent(world):
    check_counted(world, counts, by_nccl=False)


# --- beside what is sent ----------------------------------------------------------------------------------------------


SPIN = 3_000_000  # clock cycles: some 2 ms, in which another rank could be a step ahead
LATE = {  # before what sends or reads them
    "ids go": (PeerExchange, "send"), "rows came": (GpuBags, "pool"), "gradients came": (Request, "gradient"),
}  # fmt: skip


def spun(function):
    """It, behind a kernel that does nothing for long."""

    @functools.wraps(function)
    def late(*args, **keywords):
        torch.cuda._sleep(SPIN)
        return function(*args, **keywords)

    return late


def step_of(kind, model, late):
    """A step of that kind; `late`: where this rank is late."""
    scale = torch.ones((), requires_grad=True)  # for what is multiplied by it the rows are computed again

    def spin(place):
        if late == place:
            torch.cuda._sleep(SPIN)

    def scaled(ids, offsets):
        return model(ids, offsets) * scale

    def step(batch):
        ids, offsets, upstream, *others = batch
        spin("before")
        if kind == "recomputed":
            out = checkpoint(scaled, ids, offsets, use_reentrant=False, preserve_rng_state=False)
        else:
            out = model(ids, offsets)
        spin("behind rows")
        if kind == "looks up":
            return out.clone()
        loss = (out * upstream).sum()
        if kind == "twice":
            loss = loss + (model(*others) * out.detach() * upstream).sum()
        if kind == "one of two":
            model(*others)
        loss.backward()
        scale.grad = None
        return out.detach()

    return step


def failing(function, at):
    """It, which fails once."""
    numbers = itertools.count()

    @functools.wraps(function)
    def other(*args, **keywords):
        if next(numbers) == at:
            raise MemoryError("of this rank alone")
        return function(*args, **keywords)

    return other


def spoiled(number, rank, ids, offsets, upstream):
    """A batch of which a rank has a gradient that is no number, or, in the next step, no ids."""
    if rank == 1 and number in (12, 16):
        upstream = torch.full_like(upstream, torch.inf)
    if rank == 1 and number in (13, 17):
        ids, offsets = ids[:0], torch.zeros_like(offsets)
    return ids, offsets, upstream


def eager_step_of(kind, model, late):
    """The same, of kinds that eager steps alone have, too."""
    step, number = step_of("twice" if kind == "accumulates" else kind, model, late), itertools.count()

    def other(batch):
        if kind == "accumulates":
            with model.accumulate():
                return step(batch)
        if kind == "evaluates between":
            with torch.no_grad():
                evaluated = model(*batch[3:])
            return torch.cat([evaluated, step(batch)])
        if "fails" in kind:
            try:
                return step(batch)
            except te.errors.PeerError:
                return torch.zeros_like(batch[2])
        if kind == "drops some" and next(number) % 3 == 1:
            return model(*batch[:2]).detach()
        if kind == "other streams":
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                out = step(batch)
            torch.cuda.current_stream().wait_stream(stream)
            out.record_stream(torch.cuda.current_stream())
            return out
        return step(batch)

    return other


EAGER_ALONE = (
    *("fails once", "fails to look up", "is scaled", "accumulates", "evaluates between", "drops some"),
    *("other streams", "follows"),
)


def run_of(rank, size, kind, ahead, late, captured=True):
    """Outputs of steps of that kind here, and the tables, both ways of exchanging. `late`: where which rank is. For
    row-wise sums alone NCCL exchanges nothing in which ranks would wait for each other."""
    # ranks have to join gradients of means, in which one may fail
    found, tables = [], tables_of(**TABLES | {"modes": ("sum", "mean") if kind == "fails once" else ("sum",)})
    for peers in (True, False):
        with writing(peers=peers) as patch:
            for name, (owner, method) in LATE.items():
                if late == (name, rank):
                    patch.setattr(owner, method, spun(getattr(owner, method)))
            model = ShardedTieredEmbeddingBagCollection(
                tables, sharding=te.RowWise(), capacity=0.3, max_ids=LONGEST,
                optimizer=torch.optim.Adagrad if kind == "follows" else te.Adagrad(lr=0.1),
            )  # fmt: skip
            its_late = late[0] if late[1] == rank else ""
            if kind == "follows":
                dense = torch.optim.Adagrad([torch.zeros(1, requires_grad=True)], lr=0.1)
                model.follow(dense)
            if kind == "is scaled":
                scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
                scaler.scale(torch.ones(()))  # which is when it has its scale
                model.fused_optimizer.attach_grad_scaler(scaler)
            if kind == "fails once" and rank == 1:
                patch.setattr(Request, "gradient", failing(Request.gradient, at=10))
            if kind == "fails to look up" and rank == 1:
                patch.setattr(Request, "look_up", failing(Request.look_up, at=20))
            train = (step_of if captured else eager_step_of)(kind, model, its_late)
            if captured:
                train = (te.graph_forward if kind == "looks up" else te.graph_step)(train, max_ids=LONGEST)
            drawn = [batch_of(tables, number, rank, samples=seven) for number in range(40)]
            others = [other[:2] if "tw" in kind or kind == "accumulates" else () for other in drawn[20:]]
            loader = [(*its[:2], its[3], *other) for its, other in zip(drawn[:20], others, strict=True)]
            if kind == "is scaled":
                loader = [spoiled(number, rank, *its) for number, its in enumerate(loader)]
            with calls_of(ShardedTieredEmbeddingBagCollection, "_lookup") as lookups:
                outputs = []
                for batch in te.prefetch(loader, model) if ahead else loader:
                    outputs.append(train(batch).clone())
                    if kind == "follows":
                        dense.step()
                    if kind == "is scaled":
                        scaler.step(model.fused_optimizer)
                        scaler.update()
                        outputs.append(torch.full_like(outputs[-1], scaler.get_scale()))
            found.append([torch.stack(outputs), *model.state_dict().values()])
            assert ("peers" in model.memory_report()) == peers
            model.close()
        if not captured:
            continue
        in_each = 2 if kind in ("twice", "one of two", "recomputed") else 1
        assert len(lookups) % in_each == 0
        assert len(lookups) < 20 * in_each  # some steps were replays
    return found


def check_same(found):
    for one, other in found:
        assert all(equal(its, same) for its, same in zip(one, other, strict=True))


@pytest.mark.parametrize(("kind", "ahead"), [
    ("twice", False), ("twice", True), ("one of two", False), ("recomputed", False), ("recomputed", True),
    ("looks up", False), ("looks up", True),
])  # fmt: skip
def test_ranks_write_what_they_would_send(world, kind, ahead):
    check_same(world.run(run_of, kind, ahead, ("nowhere", 0)))


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize(("kind", "late"), [
    *(("once", late) for late in ("before", "rows came", "behind rows", "gradients came")),
    ("twice", "behind rows"), ("looks up", "before"), ("looks up", "rows came"),
    ("once", "ids go"), ("twice", "ids go"), ("recomputed", "ids go"),
])  # fmt: skip
def test_a_late_gpu_is_waited_for(world, kind, late, rank):
    """The other reads nothing that it has yet to write, and overwrites nothing that it has yet to read: which could be
    where a step only looks up, and else is kept from it by what comes between."""
    check_same(world.run(run_of, kind, True, (late, rank)))


@AT_ONCE_OR_AHEAD
@pytest.mark.parametrize("kind", ["once", "twice", "one of two", "recomputed", "looks up", *EAGER_ALONE])
def test_ranks_write_what_they_would_send_eagerly(world, kind, ahead):
    check_same(world.run(run_of, kind, ahead, ("nowhere", 0), False))


@AT_ONCE_OR_AHEAD
@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize(("kind", "late"), [
    *(("once", late) for late in ("before", "rows came", "behind rows", "gradients came")),
    ("looks up", "before"), ("looks up", "rows came"), ("other streams", "rows came"),
    *((kind, "ids go") for kind in ("once", "other streams", "looks up", "recomputed")),
])  # fmt: skip
def test_a_late_gpu_is_waited_for_eagerly(world, kind, late, rank, ahead):
    check_same(world.run(run_of, kind, ahead, (late, rank), False))


# --- what one rank alone meets ----------------------------------------------------------------------------------------


def lacks(rank, size, what, *given):
    """Rank 1 has no memory for it, or cannot map that of the others."""
    with writing(has_barriers=False) as patch:
        if rank == 1:
            found = getattr(SymmetricMemory, what)
            patch.setattr(SymmetricMemory, what, lambda *given: (found(*given), None)[1])
        held, close = [], SymmetricMemory.close
        patch.setattr(SymmetricMemory, "close", lambda memory, **how: (held.append(memory.bytes), close(memory, **how)))
        found = test_sharded_gpus.captured_run(rank, size, *given)
    assert held == [0]
    return found


@AT_ONCE_OR_AHEAD
@pytest.mark.parametrize("what", ["_allocate", "_mapped"])
def test_what_one_rank_lacks_keeps_all_to_sending(world, what, ahead):
    tables, (sharding, steps) = tables_of(**TABLES), ("every other", 20)
    keywords = {"optimizer": te.Adagrad(lr=0.1), "capacity": 0.5}
    found = world.run(lacks, what, tables, sharding, steps, steps, None, ahead, keywords)
    sent = world.run(test_sharded_gpus.captured_run, tables, sharding, steps, steps, None, ahead, keywords)
    for (outputs, weights, _), (others, their_weights, _) in zip(found, sent, strict=True):
        assert equal(outputs, others)
        assert all(equal(weights[name], their_weights[name]) for name in their_weights)


def fails_amid(rank, size, at):
    """Steps of two sizes in turn, of which one fails on rank 1, and comes late on the GPU of rank 0, which knows of the
    next by then."""
    found, tables, number = [], tables_of(**TABLES | {"modes": ("sum",)}), 0
    drawn = [batch_of(tables, step, rank, samples=lambda rank, step=step: 7 + 50 * (step % 2)) for step in range(24)]
    look_up = Request.look_up

    def fails(*args, **keywords):
        if (rank, number) == (1, at):
            raise MemoryError("of this rank alone")
        return look_up(*args, **keywords)

    for peers in (True, False):
        with writing(peers=peers) as patch:
            patch.setattr(Request, "look_up", fails)
            model = ShardedTieredEmbeddingBagCollection(
                tables, sharding=te.RowWise(), capacity=0.3, optimizer=te.Adagrad(lr=0.1)
            )
            outputs = []
            loop = te.prefetch([(*its[:2], its[3]) for its in drawn], model, ids_of=lambda its: its[:2])
            for number, (ids, offsets, upstream) in enumerate(loop):
                if (rank, number) == (0, at):
                    torch.cuda._sleep(10 * SPIN)
                with contextlib.suppress(te.errors.PeerError):
                    out = model(ids, offsets)
                    out.backward(upstream)
                    outputs.append(out.detach())
            assert len(outputs) == len(drawn) - 1
            found.append([*outputs, *model.state_dict().values()])
            model.close()
    return found


@pytest.mark.parametrize("at", [14, 17])
def test_what_a_failed_forward_writes_late_is_over_no_rows_of_the_next(world, at):
    check_same(world.run(fails_amid, at))


def meets(rank, size, events):
    with writing():
        return test_sharded_gpus.meets(rank, size, events)


@pytest.mark.parametrize("events", EVENTS)
def test_what_one_rank_meets_all_do(world, events):
    test_sharded_gpus.check_events(world, meets, *EVENTS[events])


def dies(rank, size, ahead, amid):
    with writing():
        return test_sharded_gpus.dies(rank, size, ahead, amid)


@AT_ONCE_OR_AHEAD
@pytest.mark.parametrize("amid", [False, True], ids=["behind a replay", "amid a replay"])
def test_a_rank_that_is_killed_is_noticed(amid, ahead):
    test_sharded_gpus.check_killed(dies, ahead, amid)


def dies_eagerly(rank, size, ahead):
    with writing():
        return test_sharded_gpus.dies(rank, size, ahead, True, False, True)


@AT_ONCE_OR_AHEAD
def test_a_rank_that_is_killed_amid_an_eager_step_is_noticed(ahead):
    test_sharded_gpus.check_killed(dies_eagerly, ahead)


def waits_in_vain(rank, size):
    """The GPU of rank 1 is at the exchange of gradients long after the ranks' timeout, and no host waits for it."""
    with writing():
        tables = tables_of(**TABLES)
        model = ShardedTieredEmbeddingBagCollection(
            tables, sharding=te.RowWise(), capacity=0.5, optimizer=te.Adagrad(lr=0.1), timeout=timedelta(seconds=2)
        )
        ids, offsets, _, upstream = batch_of(tables, 0, rank, samples=seven)
        for step in range(12):
            out = model(ids, offsets)
            if rank == 1 and step == 11:
                torch.cuda._sleep(2 * test_sharded_gpus.LONG_SLEEP)
            out.backward(upstream)
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize()
            return "waited"
        return "failed"


def test_a_gpu_that_waits_for_another_in_vain_fails():
    need_gpus_for(RANKS)
    broken = test_sharded_gpus.world_that_sends()
    try:
        for pipe in broken.pipes:
            pipe.send((waits_in_vain, ()))
        assert broken.pipes[0].poll(120)
        with contextlib.suppress(EOFError):  # where NCCL's watchdog finds the error first, it ends the process
            assert broken.pipes[0].recv() == ("returned", "failed")
    finally:
        broken.close()
