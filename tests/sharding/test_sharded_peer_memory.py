"""Captured steps of ranks that write rows and gradients into each other's memory: the bits of one process, and of rows
that are sent, whichever GPU is late. Skips where there are not as many GPUs as ranks."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
from devices import equal
from sharding import test_sharded_gpus
from sharding.ranks import batch_of, calls_of, seven, tables_of
from sharding.test_sharded_gpus import EVENTS, LONGEST, RANKS, TABLES, check_counted, compare, world
from torch.utils.checkpoint import checkpoint

import tieredemb as te
from tieredemb.sharding.collection import ShardedTieredEmbeddingBagCollection
from tieredemb.sharding.gpu_bags import GpuBags
from tieredemb.sharding.request import Request
from tieredemb.sharding.symmetric import SymmetricMemory

__all__ = ["world"]  # a fixture, of processes whose environment says that rows are sent


@contextlib.contextmanager
def writing(*, peers=True, has_barriers=True):
    """Ranks write into each other's memory inside if `peers`; then what is captured has barriers, or not."""
    found, barrier = [], SymmetricMemory.barrier

    def noted(memory):
        if torch.cuda.is_current_stream_capturing():
            found.append(memory)
        barrier(memory)

    with pytest.MonkeyPatch.context() as patch:
        if peers:
            patch.delenv("TIEREDEMB_PEER_MEMORY", raising=False)
        patch.setattr(SymmetricMemory, "barrier", noted)
        yield patch
    assert bool(found) == (peers and has_barriers)


def captured_run(rank, size, tables, sharding, *given):
    with writing(has_barriers=sharding != "tables"):
        return test_sharded_gpus.captured_run(rank, size, tables, sharding, *given)


AT_ONCE_OR_AHEAD = pytest.mark.parametrize("ahead", [False, True], ids=["at once", "ahead"])


@AT_ONCE_OR_AHEAD
@pytest.mark.parametrize(
    "keywords",
    [
        *({"sharding": sharding} for sharding in ("rows", "tables", "every other")),
        *({"capacity": capacity, "sharding": "rows"} for capacity in (2, 0.3, 1.0)),
        *({"shape": shape} for shape in ("ones", "equal", "some equal", "mostly empty")),
        {"optimizer": te.Adam(lr=0.05)},
        {"optimizer": te.RowWiseAdagrad(lr=0.1), "sharding": "rows"},
        {"max_norm": 0.5},
        {"dtype": torch.bfloat16, "rounding": "stochastic"},
    ],
    ids=str,
)
def test_the_bits_of_one_process(world, keywords, ahead):
    compare(world, ahead=ahead, steps=20, run=captured_run, **keywords)


@AT_ONCE_OR_AHEAD
def test_many_steps(world, ahead):
    compare(world, sharding="rows", steps=10_000, distinct=500, capacity=0.3, ahead=ahead, run=captured_run)


def counts(rank, size):
    with writing():
        return test_sharded_gpus.counts(rank, size)


def test_what_is_written_counts_as_sent(world):
    check_counted(world, counts)


# --- beside what is sent ----------------------------------------------------------------------------------------------


SPIN = 3_000_000  # clock cycles: some 2 ms, in which another rank could be a step ahead
LATE = {"rows came": (GpuBags, "pool"), "gradients came": (Request, "gradient")}  # before who reads them


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

    return (te.graph_forward if kind == "looks up" else te.graph_step)(step, max_ids=LONGEST)


def run_of(rank, size, kind, ahead, late):
    """Outputs of steps of that kind here, and the tables, both ways of exchanging. `late`: where which rank is. Of sums
    that are dealt out alone NCCL exchanges nothing in which ranks would wait for each other."""
    found, tables = [], tables_of(**TABLES | {"modes": ("sum",)})
    for peers in (True, False):
        with writing(peers=peers) as patch:
            for name, (owner, method) in LATE.items():
                if late == (name, rank):
                    patch.setattr(owner, method, spun(getattr(owner, method)))
            model = ShardedTieredEmbeddingBagCollection(
                tables, sharding=te.RowWise(), capacity=0.3, optimizer=te.Adagrad(lr=0.1), max_ids=LONGEST
            )
            train = step_of(kind, model, late[0] if late[1] == rank else "")
            drawn = [batch_of(tables, number, rank, samples=seven) for number in range(40)]
            others = [other[:2] if "tw" in kind else () for other in drawn[20:]]
            loader = [(*its[:2], its[3], *other) for its, other in zip(drawn[:20], others, strict=True)]
            with calls_of(ShardedTieredEmbeddingBagCollection, "_lookup") as lookups:
                outputs = [train(batch).clone() for batch in (te.prefetch(loader, model) if ahead else loader)]
            found.append([torch.stack(outputs), *model.state_dict().values()])
            assert ("peers" in model.memory_report()) == peers
            model.close()
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
])  # fmt: skip
def test_a_late_gpu_is_waited_for(world, kind, late, rank):
    """The other reads nothing that it has yet to write, and overwrites nothing that it has yet to read: which could be
    where a step only looks up, and else is kept from it by what comes between."""
    check_same(world.run(run_of, kind, True, (late, rank)))


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
