"""A model built as Facebook's `dlrm_s_pytorch.py` builds its own: 26 bags of NumPy sizes and weights with sparse
gradients, called one by one with offsets, and SGD under a schedule of its own class."""

from __future__ import annotations

import copy
import itertools
import warnings

import numpy as np
import torch
from devices import assert_close
from torch import nn

import tieredemb as te

TABLES, WIDTH, DENSE, BATCH, STEPS = 26, 8, 13, 32, 30
ROWS = np.random.default_rng(0).choice([3, 10, 27, 105, 633, 1460], TABLES)  # a NumPy array, as from its data files


class Schedule(torch.optim.lr_scheduler.LRScheduler):
    """Warm-up, then the first rate, then a quadratic decay, as its `LRPolicyScheduler` has it."""

    def __init__(self, optimizer, *, warm_up, decay_from, decay_for):
        self.warm_up, self.decay_from, self.decay_for = warm_up, decay_from, decay_for
        super().__init__(optimizer)

    def get_lr(self):
        count, scale = self._step_count, 1.0
        if count < self.warm_up:
            scale = count / self.warm_up
        elif count >= self.decay_from:
            scale = max(1 - (count - self.decay_from) / self.decay_for, 0) ** 2
        return [max(1e-7, rate * scale) for rate in self.base_lrs]


class DLRM(nn.Module):
    def __init__(self, rng):
        super().__init__()
        pairs = (TABLES + 1) * TABLES // 2
        self.emb_l = nn.ModuleList(self._bag(rows, rng) for rows in ROWS)
        self.bot_l = self._mlp([DENSE, 16, WIDTH], rng, nn.ReLU())
        self.top_l = self._mlp([WIDTH + pairs, 16, 1], rng, nn.Sigmoid())

    def _bag(self, rows, rng):
        bag, limit = nn.EmbeddingBag(rows, WIDTH, mode="sum", sparse=True), np.sqrt(1 / rows)
        weight = rng.uniform(low=-limit, high=limit, size=(rows, WIDTH)).astype(np.float32)
        bag.weight.data = torch.tensor(weight, requires_grad=True)
        return bag

    def _mlp(self, sizes, rng, last):
        layers = []
        for n, m in itertools.pairwise(sizes):
            layers += [nn.Linear(n, m), nn.ReLU()]
            weight = rng.normal(0, np.sqrt(2 / (m + n)), size=(m, n)).astype(np.float32)
            layers[-2].weight.data = torch.tensor(weight, requires_grad=True)
        return nn.Sequential(*layers[:-1], last)

    def forward(self, dense, offsets, ids):
        bottom = self.bot_l(dense)
        bags = [bag(ids[k], offsets[k], per_sample_weights=None) for k, bag in enumerate(self.emb_l)]
        features = torch.stack([bottom, *bags], 1)
        products = torch.bmm(features, features.transpose(1, 2))
        rows, columns = torch.tril_indices(TABLES + 1, TABLES + 1, -1)
        return self.top_l(torch.cat([bottom, products[:, rows, columns]], 1))


def batch_of(rng):
    """Dense features (B, 13), offsets (26, B), a list of ids, labels (B, 1)."""
    sizes = rng.integers(0, 4, (TABLES, BATCH))
    offsets = np.concatenate([np.zeros((TABLES, 1), np.int64), sizes.cumsum(1)[:, :-1]], 1)
    ids = [torch.tensor(rng.integers(0, rows, many)) for rows, many in zip(ROWS, sizes.sum(1), strict=True)]
    dense, labels = rng.random((BATCH, DENSE), np.float32), rng.integers(0, 2, (BATCH, 1)).astype(np.float32)
    return torch.tensor(dense), torch.tensor(offsets), ids, torch.tensor(labels)


def test_dlrm_converted_in_one_line_trains_the_same(device, one_thread):
    rng = np.random.default_rng(1)
    plain = DLRM(rng)
    ours = copy.deepcopy(plain)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in (ours, plain)]
    schedules = [Schedule(each, warm_up=10, decay_from=20, decay_for=15) for each in optimizers]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        te.replace_embedding_bags(ours, capacity=0.05, optimizer=optimizers[0])
    assert all(type(bag) is te.TieredEmbeddingBag for bag in ours.emb_l)
    for _ in range(STEPS):
        *inputs, labels = batch_of(rng)
        losses = []
        for model, optimizer, schedule in zip((ours, plain), optimizers, schedules, strict=True):
            loss = nn.functional.binary_cross_entropy(model(*inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.detach())
        assert_close(*losses)
    assert optimizers[0].param_groups[0]["lr"] == optimizers[1].param_groups[0]["lr"] < 0.5
    assert sum(bag.stats().rows_written_back for bag in ours.emb_l)
    weights = plain.state_dict()
    assert list(ours.state_dict()) == list(weights)
    for name, value in ours.state_dict().items():
        assert_close(value, weights[name])
