"""`max_norm` of rows of padding, which owners scale for whoever has them in a batch: the bits of one process."""

from __future__ import annotations

import pytest
import torch
from devices import equal
from ranks import batch_of, joined, parted, sharding_of, step_of
from training import table_configs

import tieredemb as te
from tieredemb.sharding.collection import ShardedTieredEmbeddingBagCollection

TABLES = table_configs(modes=("sum", "mean", "max"), widths=(4, 8), rows=(3, 17, 40, 25, 9, 31), padding=(None, 0, 2))
WEIGHED = table_configs(widths=(4, 8), rows=(3, 17, 40, 25, 9, 31), padding=(None, 0, 2))
NAMES = [f"tables.{table.name}.weight" for table in TABLES]  # in a state dict
STEPS = 4


def samples(rank):
    return (5, 7, 3)[rank]


def load(model):
    shapes = [(table.num_embeddings, table.embedding_dim) for table in TABLES]
    filled = [torch.linspace(-2, 3, rows * width).reshape(rows, width) for rows, width in shapes]
    model.load_state_dict(dict(zip(NAMES, filled, strict=True)))


def run(rank, size, tables, sharding, keywords, weighted):
    model = ShardedTieredEmbeddingBagCollection(
        tables, sharding=sharding_of(sharding, tables), average=False, **keywords
    )
    load(model)
    batches = [batch_of(tables, step, rank, samples=samples, shape="some equal") for step in range(STEPS)]
    found = [step_of(model, batch, weighted=weighted) for batch in batches]
    weights = dict(model.state_dict())
    model.close()
    return found, weights


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("more", [{}, {"max_ids": 512}], ids=["", "one size"])
@pytest.mark.parametrize("sharding", ["rows", "tables", "every other"])
def test_owners_scale_rows_of_padding_as_one_process_does(worlds, sharding, more, weighted):
    tables = WEIGHED if weighted else TABLES
    keywords = {"max_norm": 0.5, "optimizer": te.AdamW(lr=0.1, weight_decay=0.1), "capacity": 0.5}
    alone = te.TieredEmbeddingBagCollection(tables, **keywords)
    load(alone)
    before = [weight.clone() for weight in alone.state_dict().values()]
    answers = worlds(2).run(run, tables, sharding, keywords | more, weighted)
    for step in range(STEPS):
        batches = [batch_of(tables, step, rank, samples=samples, shape="some equal") for rank in range(2)]
        out, gradient = step_of(alone, joined(tables, batches), weighted=weighted)
        gradients = parted(tables, batches, gradient) if weighted else [None, None]
        for rank, rows in enumerate(out.split([samples(0), samples(1)])):
            assert equal(answers[rank][0][step][0], rows)
            assert not weighted or equal(answers[rank][0][step][1], gradients[rank])
    padded = [table.padding_idx for table in tables]
    for name, weight, old, row in zip(alone.state_dict(), alone.state_dict().values(), before, padded, strict=True):
        assert equal(answers[0][1][name], weight)
        assert row is None or bool((weight[row].abs() < old[row].abs()).any())  # it was scaled
