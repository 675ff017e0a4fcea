"""Imported by the process whose forks are ranks: what a rank would need a second for is done here, once. Modules are
imported, numba is set up, the kernels of a step are loaded, and all of that is no concern of a rank's collector."""

from __future__ import annotations

import gc

import torch
import torch._dynamo  # which the first optimizer imports
from training import random_batch, table_configs

import tieredemb as te


def train():
    """A step and a reading, on this thread alone: a fork has no others."""
    tables = table_configs()
    model = te.TieredEmbeddingBagCollection(tables, capacity=0.5, optimizer=te.Adagrad(lr=0.1))
    ids, offsets, _, upstream = random_batch(tables, 7, 0)
    model(ids, offsets).backward(upstream)
    with torch.no_grad():
        model(ids, offsets)
    model.close()


torch.set_num_threads(1)
if not torch.backends.cuda.is_built():  # backward passes look for GPUs, and have threads for them, which forks have not
    train()
gc.collect()
gc.freeze()
