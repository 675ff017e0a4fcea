"""Random sequences of what programs do with a collection, done by ranks, or by one process with the batches of all."""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
import warnings
from dataclasses import dataclass

import torch
from devices import equal
from sharding.ranks import SHAPES, batch_of, joined, tables_of

import tieredemb as te
from tieredemb.sharding.collection import ShardedTieredEmbeddingBagCollection
from tieredemb.sharding.layout import Replicated, RowWise, TableWise

OPTIMIZERS = [te.SGD(lr=0.1), te.RowWiseAdagrad(lr=0.1), te.Adam(lr=0.05), te.SGD(lr=0.1, momentum=0.9)]
ROWS = 1, 2, 5, 17, 60, 300, 2000
SAMPLES = 0, 1, 3, 7, 7, 20
FEW, LONGEST = 30, 4000  # ids: fewer than batches have, and as many as any
STEPS_AT_ONCE = 2  # whose forwards run before the first backward, and that others but loops have


@dataclass(frozen=True)
class Act:
    """`kind`: a function below · `batches`: of each the number, the samples of each rank and the shape; see `batch_of`
    · `depth`: of a loop that fetches ahead, or 0 · `left_at`: the batch before which the loop is left · `captured`:
    whether its steps are · `rank`: that makes a mistake, if one is made."""

    kind: str
    batches: list[tuple[int, tuple[int, ...], str | None]]
    depth: int
    left_at: int
    captured: bool
    rank: int


class Sequence:
    """Tables, how `size` ranks hold them, and what is done. The same for the same `seed`."""

    def __init__(self, seed, size):
        draw, number = random.Random(f"{seed} of {size}"), 0
        rows = tuple(draw.choice(ROWS) for _ in range(draw.randrange(1, 12)))
        widths = tuple(draw.sample([1, 2, 4, 8, 12], draw.randrange(1, 4)))
        modes = draw.choice([("sum",), ("sum", "mean"), ("sum", "mean", "max")])
        self.tables = tables_of(modes=modes, widths=widths, rows=rows, padding=draw.choice([(None,), (None, 0)]))
        kinds = draw.sample([RowWise(), TableWise(), Replicated()], draw.randrange(1, 4))
        self.sharding = draw.choice([None, {table.name: draw.choice(kinds) for table in self.tables}])
        self.keywords = {"capacity": draw.choice([1, 3, 0.1, 0.5, 1.0]), "optimizer": draw.choice(OPTIMIZERS)}
        self.keywords |= draw.choice([{}, {}, {}, {"dtype": torch.bfloat16}, {"max_norm": 0.5}])
        self.max_ids = draw.choice([None, None, FEW, LONGEST])
        self.graph_max_ids = draw.choice([None, LONGEST])
        usual = [draw.choice(SAMPLES[1:]) for _ in range(size)]
        self.acts = []
        for _ in range(draw.randrange(3, 9)):
            kind = draw.choice(["loop", "loop", "loop", *KINDS])
            count = draw.randrange(1, 22) if kind == "loop" else STEPS_AT_ONCE
            varies, batches = draw.random() < 0.3, []
            for _ in range(count):
                samples = [draw.choice(SAMPLES) for _ in range(size)] if varies else usual
                batches.append((number, tuple(samples), draw.choice([None, None, *SHAPES])))
                number += 1
            if kind == "mistake":  # needs an id to be wrong
                batches = [(number - 1, (3,) * size, "ones")]
            left_at = draw.choice([count, count, draw.randrange(count)])
            captured, rank = draw.random() < 0.7, draw.randrange(size)
            self.acts.append(Act(kind, batches, draw.choice([0, 1, 2, 3]), left_at, captured, rank))
        each = [Act("loop", [(number + n, tuple(usual), None) for n in range(12)], 0, 12, True, 0) for _ in range(2)]
        self.acts = [each[0], *self.acts, each[1]]  # so that captured steps are replayed


class Run:
    """What does it. `train`: a captured step, if there is one · `fetches_ahead`: whether loops do, as asked ·
    `mistaken`: called for a batch that has a wrong id on one rank."""

    def __init__(self, model, get, directory, *, train=None, fetches_ahead=False, mistaken=None):
        self.model, self.get, self.directory = model, get, directory
        self.train, self.fetches_ahead, self.mistaken = train, fetches_ahead, mistaken
        self.found = []  # what forwards return, and tables that are read: {} but on rank 0

    def forward(self, batch):
        out = self.model(*batch[:2])
        self.found.append(out.detach().clone())
        return out

    def step(self, batch):
        out = self.forward(batch)
        out.backward(batch[2].to(out.dtype))

    def perform(self, acts):
        for act in acts:
            KINDS[act.kind](self, act, [self.get(*each) for each in act.batches])
        return self.found


def loop(run, act, batches):
    fetches_ahead = run.fetches_ahead and act.depth
    given = te.prefetch(batches, run.model, act.depth, ids_of=lambda each: each[:2]) if fetches_ahead else batches
    for number, batch in enumerate(given):
        if number == act.left_at:
            break
        if act.captured and run.train is not None:
            run.found.append(run.train(batch).clone())
        else:
            run.step(batch)


@torch.no_grad()
def evaluate(run, act, batches):
    for batch in batches:
        run.forward(batch)


def drop(run, act, batches):
    run.forward(batches[0])


def backward_in_reverse(run, act, batches):
    forwards = [(run.forward(batch), batch[2]) for batch in batches]
    for out, upstream in reversed(forwards):
        out.backward(upstream.to(out.dtype))


def accumulate(run, act, batches):
    with run.model.accumulate():
        for batch in batches:
            run.step(batch)


def lower_rate(run, act, batches):
    run.model.fused_optimizer.param_groups[0]["lr"] *= 0.7


def read(run, act, batches):
    run.found.append({name: weight.clone() for name, weight in (run.model.state_dict() or {}).items()})


def return_to_checkpoint(run, act, batches):
    directory = os.path.join(run.directory, str(act.batches[0][0]))
    run.model.save_checkpoint(directory)
    for batch in batches:
        run.step(batch)
    run.model.load_checkpoint(directory)


def mistake(run, act, batches):
    if run.mistaken is not None:
        run.mistaken(run, act, batches[0])


KINDS = {
    each.__name__: each
    for each in (
        loop, evaluate, drop, backward_in_reverse, accumulate, lower_rate, read, return_to_checkpoint, mistake
    )
}  # fmt: skip


def on(device, batch):
    """ids, offsets and gradient there."""
    ids, offsets, _, upstream = batch
    return tuple(part.to(device) for part in (ids, offsets, upstream))


def performed(rank, size, seed, device, captures):
    """What a rank has found, its tables in the end, and how captured steps were run. `captures`: whether any are."""
    sequence = Sequence(seed, size)
    how = {} if sequence.sharding is None else {"sharding": sequence.sharding}
    model = ShardedTieredEmbeddingBagCollection(
        sequence.tables, average=False, max_ids=sequence.max_ids, device=device, **how, **sequence.keywords
    )

    def step(batch):
        out = model(*batch[:2])
        out.backward(batch[2].to(out.dtype))
        return out.detach()

    def mistaken(run, act, batch):
        ids, offsets, _ = batch
        if rank == act.rank:
            ids = ids.clone()
            ids[0] = 10**7
        with contextlib.suppress(te.errors.IdOutOfRangeError, te.errors.PeerError):
            model(ids, offsets)
            raise AssertionError("a wrong id of one rank was not refused on all")

    def get(number, samples, shape):
        return on(device, batch_of(sequence.tables, number, rank, samples=lambda each: samples[each], shape=shape))

    train = te.graph_step(step, max_ids=sequence.graph_max_ids) if captures else None
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as directory:
        warnings.simplefilter("ignore")  # of batches with more than max_ids, or of other shapes than captured ones
        directory = [directory]
        torch.distributed.broadcast_object_list(directory)  # where rank 0 has made one
        found = Run(model, get, directory[0], train=train, fetches_ahead=True, mistaken=mistaken).perform(sequence.acts)
        weights = dict(model.state_dict())
        torch.distributed.barrier()
    model.close()
    return found, weights, train and train.summary()


def performed_alone(size, seed, device):
    """The same of one process with the batches of all ranks: what each of them would have found, and the tables."""
    sequence = Sequence(seed, size)

    def get(number, samples, shape):
        its = [
            batch_of(sequence.tables, number, rank, samples=lambda each: samples[each], shape=shape)
            for rank in range(size)
        ]
        return on(device, joined(sequence.tables, its))

    samples = [each[1] for act in sequence.acts for each in forwards_of(act)]
    model = te.TieredEmbeddingBagCollection(sequence.tables, device=device, **sequence.keywords)
    with tempfile.TemporaryDirectory() as directory:
        found = Run(model, get, directory).perform(sequence.acts)
    weights, of_forwards = dict(model.state_dict()), iter(samples)
    model.close()
    parted = [[each] * size if isinstance(each, dict) else each.split(list(next(of_forwards))) for each in found]
    return [[each[rank] for each in parted] for rank in range(size)], weights


def forwards_of(act):
    """The batches that an act looks up, in their order."""
    if act.kind == "loop":
        return act.batches[: act.left_at]
    return {"drop": act.batches[:1], "lower_rate": [], "read": [], "mistake": []}.get(act.kind, act.batches)


def check(world, seed, *, captures=True, run=performed):
    """A world's sequence against one process."""
    ranks = world.run(run, seed, world.device, captures)
    alone, weights = performed_alone(world.size, seed, world.device)
    for rank, (found, *_) in enumerate(ranks):
        assert len(found) == len(alone[rank])
        for number, (one, other) in enumerate(zip(found, alone[rank], strict=True)):
            if not isinstance(other, dict):
                assert equal(one, other), f"forward {number} of rank {rank}"
            elif rank == 0:
                assert all(equal(one[name], weight) for name, weight in other.items()), f"tables read as {number}"
    for name, weight in weights.items():
        assert equal(ranks[0][1][name], weight), name
    if captures and world.device == "cuda" and Sequence(seed, world.size).max_ids != FEW:
        assert all(summary.replayed for *_, summary in ranks)
