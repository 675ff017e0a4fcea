"""Small tables, batches of skewed ids and training loops that many tests share."""

from __future__ import annotations

import numpy as np
from devices import from_numpy

import tieredemb as te

OPTIMIZERS = [
    te.SGD(lr=0.1),
    te.Adagrad(lr=0.1, lr_decay=0.01, initial_accumulator_value=0.1),
    te.RowWiseAdagrad(lr=0.1),
    te.RowMeanAdagrad(lr=0.1, lr_decay=0.01, initial_accumulator_value=0.1),
    te.SparseAdam(lr=0.05, betas=(0.8, 0.95)),
    te.SparseLion(lr=0.02, betas=(0.7, 0.9), weight_decay=0.3),
    te.Adam(lr=0.05, betas=(0.8, 0.95)),
    te.AdamW(lr=0.05, betas=(0.8, 0.999), weight_decay=0.1),
    te.SGD(lr=0.1, momentum=0.5, nesterov=True),
    te.SGD(lr=0.1, momentum=0.5, dampening=0.25, weight_decay=0.1),
    te.Adagrad(lr=0.1, weight_decay=0.1, initial_accumulator_value=0.1),
    te.Adamax(lr=0.05, betas=(0.8, 0.95)),
    te.NAdam(lr=0.05, betas=(0.8, 0.95), weight_decay=0.1, decoupled_weight_decay=True),
    te.RMSprop(lr=0.02, alpha=0.9),
    te.RMSprop(lr=0.02, alpha=0.9, momentum=0.5, centered=True),
]
DENSE = [optimizer for optimizer in OPTIMIZERS if optimizer.is_dense]


def name_of(optimizer):
    """Short and its own: what makes a kind dense is in it."""
    told = [
        name for name in ("nesterov", "weight_decay", "centered") if optimizer.is_dense and getattr(optimizer, name, 0)
    ]
    return " ".join([type(optimizer).__name__, *told])


NAMES = [name_of(optimizer) for optimizer in OPTIMIZERS]


def table_configs(*, widths=(4,), modes=("sum",), rows=(1, 3, 17, 40), padding=(None, 0), placement="auto"):
    return [
        te.TableConfig(
            name=f"t{i}",
            num_embeddings=n,
            embedding_dim=widths[i % len(widths)],
            mode=modes[i % len(modes)],
            padding_idx=padding[i % len(padding)],
            placement=placement,
        )
        for i, n in enumerate(rows)
    ]


def random_batch(tables, batch, seed, *, integer=False):
    """ids, offsets, per-sample weights and upstream gradient of a batch with skewed ids and bags of 0 … 4."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(0, 5, len(tables) * batch)
    ids = [
        np.minimum((rng.pareto(1.0, n) * 2).astype(np.int64), table.num_embeddings - 1)
        for table, n in zip(tables, sizes.reshape(len(tables), batch).sum(1), strict=True)
    ]
    ids = from_numpy(np.concatenate([*ids, np.empty(0, np.int64)]))
    offsets = from_numpy(np.concatenate([[0], np.cumsum(sizes)]))
    width = sum(table.embedding_dim for table in tables)
    upstream = rng.integers(-3, 4, (batch, width)) if integer else rng.standard_normal((batch, width))
    weights = rng.integers(-2, 3, len(ids)) if integer else rng.standard_normal(len(ids))
    return ids, offsets, from_numpy(weights).float(), from_numpy(upstream).float()


def train(model, tables, steps, *, weighted=False, optimizer=None, integer=False, batch=7):
    outputs = []
    for step in range(steps):
        ids, offsets, weights, upstream = random_batch(tables, batch, step, integer=integer)
        out = model(ids, offsets, weights) if weighted else model(ids, offsets)
        outputs.append(out.detach().clone())
        if optimizer is not None:
            optimizer.zero_grad()
        out.backward(upstream.to(out))
        if optimizer is not None:
            optimizer.step()
    return outputs


def bits(model):
    """All that training changes, at the current step."""
    state = model.fused_optimizer.state_dict()["state"]
    found = (value for entry in state.values() for name, value in entry.items() if name != "lagging")
    return [*model.state_dict().values(), *found]
