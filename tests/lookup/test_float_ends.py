"""Gradients and weights at the ends of float32: rows are infinite, no number or finite where torch's are."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from oracle import NEEDS_SPARSE_GRADIENTS, torch_optimizer
from training import NAMES, OPTIMIZERS, name_of

import tieredemb as te

pytestmark = pytest.mark.usefixtures("one_thread")

GRADIENTS = (1e-45, 1e-38, 1e-20, 1e19, 1.9e19, 1e20, 1e30, 3e38, -3e38, 0.0, -0.0, math.inf, -math.inf, math.nan)
WEIGHTS = (0.5, 1e-45, -1e-38, 3e38, -0.0, math.inf, math.nan)
FIRST = (0, 0, 0, 300)  # the step in which the rows of a use have one of those gradients; then they have ordinary ones
PERIODS = (1, 3, 200, 150)  # of their steps: rows that miss many are brought to a step by a closed form
STEPS = 620
MORE = [  # what the others have no example of
    te.Adam(lr=0.05),
    te.Adam(lr=0.05, weight_decay=0.1),
    te.Adam(lr=0.05, betas=(0.9, 0.5)),
    te.AdamW(lr=0.5, weight_decay=1.0),  # weights have decayed to zero before they are used again
    te.SGD(lr=0.1, weight_decay=0.1),
    te.SGD(lr=0.05, momentum=0.9),
    te.SparseLion(lr=0.02),
    te.RMSprop(lr=0.05),
    te.RMSprop(lr=0.05, momentum=0.9, weight_decay=0.1),
    te.RMSprop(lr=0.05, centered=True),
    te.Adamax(lr=0.05),
    te.Adamax(lr=0.05, weight_decay=0.1),
    te.NAdam(lr=0.05),
    te.NAdam(lr=0.05, eps=0.01, weight_decay=0.1),  # of a small eps the sign of L2 would hang on a rounding
]
ALL = OPTIMIZERS + MORE
OF_TORCH = [te.SGD(lr=0.1), te.SGD(lr=0.05, momentum=0.9), te.Adagrad(lr=0.1), te.SparseAdam(), te.Adam(), te.AdamW()]
OF_TORCH += [te.RMSprop(momentum=0.9, centered=True), te.Adamax(), te.NAdam()]
NAMES_OF_ALL = NAMES + [f"{name_of(each)} more {i}" for i, each in enumerate(MORE)]


def uses():
    """(row, which use it has) of a table in which each use has rows of all weights."""
    return [(use * len(WEIGHTS) + i, use) for use in range(len(FIRST)) for i in range(len(WEIGHTS))]


def start():
    weights = torch.tensor(WEIGHTS, dtype=torch.float32, device="cpu").repeat(len(FIRST))
    return weights[:, None].repeat(1, len(GRADIENTS))


@functools.cache
def batches():
    """(ids (B, 1), gradient (B, D)) of each step."""
    ends = torch.tensor(GRADIENTS, dtype=torch.float32, device="cpu")
    ordinary = [torch.full_like(ends, -0.5), torch.full_like(ends, 0.25)]
    found = []
    for step in range(STEPS):
        ids, gradients = [], []
        for row, use in uses():
            at = step - FIRST[use]
            if at >= 0 and at % PERIODS[use] == 0:
                ids.append(row)
                gradients.append(ends if at == 0 else ordinary[at % 2])
        found.append((torch.tensor(ids, device="cpu")[:, None], torch.stack(gradients)))
    return found


@functools.cache
def trained_by_torch(config):
    sparse = isinstance(config, NEEDS_SPARSE_GRADIENTS)
    bag = torch.nn.EmbeddingBag.from_pretrained(start(), mode="sum", sparse=sparse, freeze=False)
    optimizer = torch_optimizer(config, bag.parameters())
    for ids, gradient in batches():
        optimizer.zero_grad()
        bag(ids).backward(gradient)
        optimizer.step()
    return bag.weight.detach()


def assert_ends_alike(found, wanted):
    torch.testing.assert_close(found.cpu(), wanted, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("config", ALL, ids=NAMES_OF_ALL)
def test_rows_end_as_torch_ends_them_at_the_ends_of_float32(device, config):
    bag = te.TieredEmbeddingBag.from_pretrained(
        start().to(device), mode="sum", capacity=9, optimizer=config, freeze=False
    )
    for ids, gradient in batches():
        bag(ids.to(device)).backward(gradient.to(device))
    assert_ends_alike(bag.state_dict()["weight"], trained_by_torch(config))


@pytest.mark.parametrize("config", OF_TORCH, ids=map(repr, OF_TORCH))
def test_rows_that_follow_a_torch_optimizer_end_as_it_ends_them(device, config):
    with torch.device("cpu"):
        kind = type(torch_optimizer(config, [torch.nn.Parameter(torch.zeros(1))]))
    bag = te.TieredEmbeddingBag.from_pretrained(
        start().to(device), mode="sum", capacity=9, optimizer=kind, freeze=False
    )
    bag.follow(optimizer := torch_optimizer(config, bag.parameters()))
    for ids, gradient in batches():
        optimizer.zero_grad()
        bag(ids.to(device)).backward(gradient.to(device))
        optimizer.step()
    assert_ends_alike(bag.state_dict()["weight"], trained_by_torch(config))


def test_capacity_changes_no_bit_at_the_ends_of_float32(device):
    found = []
    for capacity in (1, len(start())):
        bag = te.TieredEmbeddingBag.from_pretrained(
            start().to(device), mode="sum", capacity=capacity, optimizer=te.AdamW(lr=0.05), freeze=False
        )
        for ids, gradient in batches()[:350]:
            bag(ids.to(device)).backward(gradient.to(device))
        found.append(bag.state_dict()["weight"].view(torch.int32))
    assert torch.equal(*found)
