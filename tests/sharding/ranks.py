"""What ranks do in tests, and one process that does it alone on the batches of all of them: on the default
device, which is a world's own."""

from __future__ import annotations

import contextlib

import numpy as np
import torch
from devices import from_numpy
from training import random_batch, table_configs

import tieredemb as te
from tieredemb.sharding.collection import ShardedTieredEmbeddingBagCollection
from tieredemb.sharding.layout import Replicated, RowWise, TableWise

SHARDINGS = {
    "rows": RowWise(),
    "tables": TableWise(),
    "copies": Replicated(),
    "both": {"t0": RowWise(), "t1": TableWise(), "t2": RowWise(), "t3": TableWise(rank=0)},
    "all kinds": {"t0": RowWise(), "t1": TableWise(), "t2": Replicated(), "t3": TableWise(rank=0)},
    "chosen": None,
    "one rank": TableWise(rank=1),
}


def sharding_of(name, tables):
    """One of `SHARDINGS`, or "every other": one or two tables that are row-wise, that one rank holds whole, that all
    hold, and so on."""
    if name != "every other":
        return SHARDINGS[name]
    kinds, each = (RowWise(), TableWise(), Replicated()), 2 if len(tables) > 4 else 1
    return {table.name: kinds[n // each % 3] for n, table in enumerate(tables)}


SHAPES = {  # how many ids the bags of feature f have, of a rank, by a generator
    "ones": lambda rng, f, rank, size: np.ones(size, np.int64),
    "equal": lambda rng, f, rank, size: np.full(size, (3, 0, 1, 7)[(f + rank) % 4]),
    "some equal": lambda rng, f, rank, size: rng.integers(0, 6, size) if (f + rank) % 2 else np.full(size, 2),
    "long": lambda rng, f, rank, size: rng.integers(0, 40, size),
    "mostly empty": lambda rng, f, rank, size: rng.integers(0, 12, size) // 11,
}


def batch_of(tables, step, rank, *, samples, shape=None):
    """ids, offsets, weights and gradient of a rank's own batch. Ranks differ in samples, and one may have none.
    `shape`: one of `SHAPES`; else bags have up to 4 ids."""
    size, seed = samples(rank), 1000 * step + rank
    if shape is None:
        return random_batch(tables, size, seed)
    rng = np.random.default_rng(seed)
    features = [table for table in tables for _ in table.features]
    sizes = [SHAPES[shape](rng, f, rank, size) for f in range(len(features))]
    ids = [rng.random(n.sum()) ** 3 * table.num_embeddings for n, table in zip(sizes, features, strict=True)]
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(sizes))]).astype(np.int64)
    upstream = rng.standard_normal((size, sum(table.embedding_dim for table in features)))
    weights = rng.standard_normal(offsets[-1])
    ids = np.concatenate(ids).astype(np.int64)
    return from_numpy(ids), from_numpy(offsets), from_numpy(weights).float(), from_numpy(upstream).float()


def joined(tables, batches):
    """The batches of all ranks as one: feature by feature, and in these rank by rank."""
    ids, lengths, weights = [], [], []
    for f in range(sum(len(table.features) for table in tables)):
        for its_ids, offsets, its_weights, upstream in batches:
            size = len(upstream)
            edges = offsets[f * size : (f + 1) * size + 1]
            ids.append(its_ids[edges[0] : edges[-1]])
            weights.append(its_weights[edges[0] : edges[-1]])
            lengths.append(edges.diff())
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cat(lengths).cumsum(0)])
    return torch.cat(ids), offsets, torch.cat(weights), torch.cat([each[3] for each in batches])


def parted(tables, batches, values):
    """What `joined` put together, of each rank."""
    lengths = []
    for f in range(sum(len(table.features) for table in tables)):
        for _, offsets, _, upstream in batches:
            size = len(upstream)
            lengths.append(int(offsets[(f + 1) * size] - offsets[f * size]))
    pieces = values.split(lengths)
    return [torch.cat(pieces[rank :: len(batches)]) for rank in range(len(batches))]


def padded(part, bags, bound, samples, device="cpu"):
    """The messages that `bags` of a `part` become, one to each rank."""
    size = part.message_size(bound, samples)
    beside = torch.full((part.ranks * part.copies, size + 3), 77, dtype=torch.int64, device=device)  # of other parts
    bags.pad(bound, samples, beside[:, 1 : 1 + size])
    assert bool((beside[:, [0, -2, -1]] == 77).all())
    return beside[:, 1 : 1 + size]


def step_of(model, batch, *, weighted):
    """`weighted`: with weights of the samples and their gradient, "constant": without it."""
    ids, offsets, weights, upstream = batch
    weights = weights.clone().requires_grad_(weighted != "constant") if weighted else None
    out = model(ids, offsets, weights) if weighted else model(ids, offsets)
    out.backward(upstream.to(out.dtype))
    return out.detach().clone(), None if weights is None or weights.grad is None else weights.grad.clone()


def sharded_run(rank, size, tables, sharding, steps, samples, weighted, keywords, shape=None):
    """Trains on the ranks; outputs and gradients of weights here, and the tables on rank 0."""
    model = ShardedTieredEmbeddingBagCollection(
        tables, sharding=sharding_of(sharding, tables), average=False, **keywords
    )
    outputs = [
        step_of(model, batch_of(tables, step, rank, samples=samples, shape=shape), weighted=weighted)
        for step in range(steps)
    ]
    weights = model.state_dict()
    model.close()
    return outputs, dict(weights)


def one_process(size, tables, steps, samples, weighted, keywords, shape=None, distinct=None):
    """The same alone: outputs and gradients of weights of each rank, and the tables. `distinct`: how many batches there
    are, if they recur."""
    keywords = {name: value for name, value in keywords.items() if name != "max_ids"}  # which is of ranks alone
    model = te.TieredEmbeddingBagCollection(tables, **keywords)
    outputs = [[] for _ in range(size)]
    drawn = [
        [batch_of(tables, number, rank, samples=samples, shape=shape) for rank in range(size)]
        for number in range(distinct or steps)
    ]
    whole = [joined(tables, batches) for batches in drawn]
    for step in range(steps):
        batches = drawn[step % len(drawn)]
        out, gradient = step_of(model, whole[step % len(drawn)], weighted=weighted)
        gradients = [None] * size if gradient is None else parted(tables, batches, gradient)
        for rank, rows in enumerate(out.split([len(each[3]) for each in batches])):
            outputs[rank].append((rows, gradients[rank]))
    weights = dict(model.state_dict())
    model.close()
    return outputs, weights


@contextlib.contextmanager
def calls_of(kind, name):
    """The arguments of each call of a method inside, in the process of a rank."""
    calls, method = [], getattr(kind, name)

    def noted(*args, **keywords):
        calls.append(args)
        return method(*args, **keywords)

    setattr(kind, name, noted)
    try:
        yield calls
    finally:
        setattr(kind, name, method)


def seven(rank):
    return 7


def unequal(rank):
    """Different numbers, none of which is zero."""
    return (4, 7, 2, 9)[rank]


def uneven(rank):
    """Different numbers, one of which is zero."""
    return (5, 0, 9, 2)[rank]


def tables_of(**keywords):
    return table_configs(**keywords)
