"""The models whose files are kept: small, and of every kind whose files differ."""

from __future__ import annotations

import torch
from torch import nn
from training import NAMES, OPTIMIZERS, random_batch, table_configs

import tieredemb as te

STEPS, LATER_STEPS = 6, 2
RANK_KINDS = ("SGD", "Adagrad", "Adam")  # without state, with state, and with steps that rows may have missed
ONE_PROCESS = [*NAMES, "Adam in bfloat16", "converted", "unclean"]


def tables():
    """Two widths, so that there are two row files."""
    return table_configs(rows=(3, 17, 40), widths=(4, 8))


def collection(name, storage=None):
    """The collection `name` of `ONE_PROCESS`, of more rows than slots."""
    kind = {"Adam in bfloat16": "Adam", "unclean": "Adam"}.get(name, name)
    other = {"dtype": torch.bfloat16, "rounding": "stochastic"} if name == "Adam in bfloat16" else {}
    return te.TieredEmbeddingBagCollection(
        tables(), capacity=12, storage=storage, optimizer=OPTIMIZERS[NAMES.index(kind)], **other
    )


def converted(storage=None):
    """A converted model of three tables, two of which share a cache, and its torch optimizer."""
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {
            "user": nn.EmbeddingBag(30, 4, mode="sum"),
            "item": nn.EmbeddingBag(20, 4, mode="sum"),
            "word": nn.Embedding(10, 8),
        }
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    te.replace_embedding_bags(model, capacity=8, optimizer=optimizer, storage=storage)
    return model, optimizer


def whole(tables, seed=0):
    """The model of these tables and a dense layer."""
    torch.manual_seed(seed)
    return nn.ModuleDict({"tables": tables, "top": nn.Linear(2, 1)})


def train_converted(model, optimizer, first, steps):
    for step in range(first, first + steps):
        draw = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        for module in model.values():
            out = module(torch.randint(0, 3 + step, (4, 2), generator=draw))
            out.backward(torch.randn(out.shape, generator=draw))
        optimizer.step()


def converted_rows(model, optimizer):
    """All that training changes, at the current step."""
    rows = {f"{name} weight": module.state_dict()["weight"] for name, module in model.items()}
    for number, entry in optimizer.state_dict()["state"].items():
        rows |= {f"{number} {key}": value for key, value in entry.items() if isinstance(value, torch.Tensor)}
    return rows


def collection_rows(model):
    """All that training changes, at the current step."""
    rows = {key: value.float() for key, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    for number, entry in model.fused_optimizer.state_dict()["state"].items():
        rows |= {f"{number} {key}": torch.as_tensor(value) for key, value in entry.items() if key != "lagging"}
    return rows


def train_collection(model, first, steps, seed=0):
    """`seed`: of the rank, whose batches are its own."""
    for step in range(first, first + steps):
        ids, offsets, _, upstream = random_batch(tables(), 7, 100 * seed + step)
        out = model(ids, offsets)
        out.backward(upstream.to(out))


def sharded(name, storage=None):
    """A collection of this rank's world, with tables that ranks share by rows, and one that a rank holds whole."""
    return te.ShardedTieredEmbeddingBagCollection(
        tables(), capacity=12, storage=storage, optimizer=OPTIMIZERS[NAMES.index(name)], average=False,
        sharding={"t0": te.TableWise(rank=1), "t1": te.RowWise(), "t2": te.RowWise()},
    )  # fmt: skip
