"""Pairs of models for tests of tables that follow a torch optimizer: tiered tables and a dense layer, and the same
model with whole tables, which torch trains."""

from __future__ import annotations

import functools
import types
from dataclasses import replace

import torch
from devices import on_cpu
from oracle import OracleCollection, RowMeanAdagradReference
from torch import nn
from training import random_batch, table_configs

import tieredemb as te

KINDS = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.01}),
    "Adam": (torch.optim.Adam, {"lr": 0.02, "betas": (0.8, 0.95)}),
    "Adam L2": (torch.optim.Adam, {"lr": 0.02, "weight_decay": 0.1}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.02, "weight_decay": 0.1}),
    "SGD nesterov": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.5, "nesterov": True}),
    "SGD weight_decay": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.5, "dampening": 0.25, "weight_decay": 0.1}),
    "Adagrad weight_decay": (torch.optim.Adagrad, {"lr": 0.1, "weight_decay": 0.1}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.02, "betas": (0.8, 0.95)}),
    "Adamax weight_decay": (torch.optim.Adamax, {"lr": 0.02, "weight_decay": 0.1}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.02, "betas": (0.8, 0.95), "momentum_decay": 0.1}),
    "NAdam decoupled": (torch.optim.NAdam, {"lr": 0.02, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "NAdam weight_decay": (torch.optim.NAdam, {"lr": 0.02, "weight_decay": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "alpha": 0.9}),
    "RMSprop centered": (torch.optim.RMSprop, {"lr": 0.01, "alpha": 0.9, "momentum": 0.5, "centered": True}),
    "RMSprop weight_decay": (torch.optim.RMSprop, {"lr": 0.01, "alpha": 0.9, "momentum": 0.5, "weight_decay": 0.1}),
    "TorchRec": (RowMeanAdagradReference, {"lr": 0.1, "lr_decay": 0.01}),
    "SparseAdam": (torch.optim.SparseAdam, {"lr": 0.05, "betas": (0.8, 0.95)}),
}
DENSE_KINDS = tuple(
    name for name in KINDS if name != "SparseAdam"
)  # that take dense gradients, too, and so train the whole model
TABLES = table_configs(widths=(4, 5), modes=("sum", "mean", "max"), rows=(3, 17, 40), padding=(None, 0))


class Model(nn.Module):
    """Tables and, unless they are `alone`, a dense layer over their outputs."""

    def __init__(self, tables: nn.Module, *, alone: bool = False) -> None:
        super().__init__()
        self.tables = tables
        self.top = nn.Identity() if alone else nn.Linear(sum(table.embedding_dim for table in TABLES), 3)

    def forward(self, ids, offsets):
        return self.top(self.tables(ids, offsets))


def pair(kind, *, capacity=3, optimizer=..., configs=TABLES, seed=0, **options):
    """A tiered model that follows an optimizer of `kind`, the same model with whole tables, and their optimizers."""
    torch_class, defaults = KINDS[kind]
    alone, keywords = kind not in DENSE_KINDS, {**defaults, **options}
    if alone:  # torch has no maxima with sparse gradients
        configs = [replace(table, mode="sum") if table.mode == "max" else table for table in configs]
    given = torch_class if optimizer is ... else optimizer
    tables = te.TieredEmbeddingBagCollection(configs, capacity=capacity, optimizer=given, seed=seed)
    ours = Model(tables, alone=alone)
    theirs = on_cpu(Model(OracleCollection(configs, sparse=alone).load_from(tables), alone=alone))
    theirs.top.load_state_dict(ours.top.state_dict())
    with torch.device("cpu"):
        reference = steps_on_cpu(torch_class(theirs.parameters(), **keywords))
    optimizer = torch_class(ours.parameters(), **keywords)
    tables.follow(optimizer)
    return (ours, theirs), [optimizer, reference]


def steps_on_cpu(optimizer):
    """Keeps the state that an oracle's optimizer makes beside its parameters, whatever the default device."""
    step = optimizer.step

    @functools.wraps(step)
    def run(_, *args, **keywords):
        with torch.device("cpu"):
            return step(*args, **keywords)

    optimizer.step = types.MethodType(run, optimizer)  # schedulers ask for a method
    return optimizer


def loss_of(model, seed, *, batch=6):
    ids, offsets, _, upstream = random_batch(TABLES, batch, seed)
    out = model(ids, offsets)
    return (out.square() + out * upstream[:, : out.shape[1]].to(out)).mean()


def tensors(model):
    """Copies of the weights of a model, in one order for both."""
    if isinstance(model.tables, te.TieredEmbeddingBagCollection):
        tables = list(model.tables.state_dict().values())
    else:
        tables = [bag.weight for bag in model.tables.bags]
    return [each.detach().cpu().clone() for each in (*tables, *model.top.parameters())]


def states(optimizer):
    """The state in an optimizer's state dict, as torch has it."""
    return {
        key: {name: torch.as_tensor(value).cpu() for name, value in entry.items() if name != "lagging"}
        for key, entry in optimizer.state_dict()["state"].items()
    }
