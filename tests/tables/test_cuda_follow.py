"""Tables that follow a torch optimizer on a GPU: steps wait for nothing, and fit a graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from devices import assert_same_bits, randint
from torch import nn

import tieredemb as te

pytestmark = pytest.mark.usefixtures("gpu")
ROWS, WIDTH = 60, 8


def make(kind=torch.optim.Adagrad, capacity=40, **options):
    bag = te.TieredEmbeddingBag(ROWS, WIDTH, mode="sum", capacity=capacity, optimizer=kind)
    optimizer = kind(bag.parameters(), **{"lr": 0.1, **options})
    bag.follow(optimizer)
    return bag, optimizer


def stepping(bag, optimizer, *, clips=False, parts=1):
    def step(ids):
        optimizer.zero_grad()
        for part in ids.chunk(parts):
            loss = bag(part).square().mean()
            loss.backward()
        if clips:
            nn.utils.clip_grad_norm_(bag.parameters(), 0.01)
        optimizer.step()
        return loss.detach()

    return step


def batches(count=12):
    return [randint(0, ROWS, (8, 4), seed=seed) for seed in range(count)]


def state_of(bag, optimizer):
    values = [torch.as_tensor(value) for entry in optimizer.state_dict()["state"].values() for value in entry.values()]
    return [*bag.state_dict().values(), *values]


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """Fails what waits for the GPU, as far as torch sees it."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam])
def test_a_step_waits_for_nothing(kind, clips, parts):
    bag, optimizer = make(kind)
    step = stepping(bag, optimizer, clips=clips, parts=parts)
    given = batches(4)
    for ids in given[:2]:
        step(ids)
    with no_waiting():
        for ids in given[2:]:
            step(ids)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam])
def test_a_captured_step_takes_in_the_optimizers_step(kind, clips, ahead):
    eager, captured = make(kind), make(kind)
    run = stepping(*eager, clips=clips)
    train = te.graph_step(stepping(*captured, clips=clips))
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for _, optimizer in (eager, captured)]
    for ids in batches():
        run(ids)
        schedulers[0].step()
    for ids in te.prefetch(batches(), captured[0]) if ahead else batches():
        train(ids)
        schedulers[1].step()  # told to each replay
    assert_same_bits(state_of(*eager), state_of(*captured))


def test_a_captured_step_reads_a_learning_rate_on_the_gpu():
    eager, captured = make(lr=torch.tensor(0.1, device="cpu")), make(lr=torch.tensor(0.1))
    run, train = stepping(*eager), te.graph_step(stepping(*captured))
    for number, ids in enumerate(batches()):
        for call, (_, optimizer) in ((run, eager), (train, captured)):
            optimizer.param_groups[0]["lr"].fill_(0.1 / (1 + number))
            call(ids)
    assert_same_bits(state_of(*eager), state_of(*captured))


def test_norms_are_the_same_bits_at_any_capacity():
    norms = []
    for capacity in (1, 7, ROWS):
        bag, _ = make(torch.optim.SGD, capacity=capacity)
        for ids in batches(3):
            bag(ids).square().mean().backward()
        norms.append([te.clip_grad_norm_(bag, 1.0, norm_type) for norm_type in (2.0, 1.0, 3.0, float("inf"))])
    for found in norms[1:]:
        assert_same_bits(found, norms[0])


def test_following_tables_move_to_the_gpu_and_back():
    bag = te.TieredEmbeddingBag(ROWS, WIDTH, mode="sum", capacity=7, optimizer=torch.optim.Adagrad, device="cpu")
    optimizer = torch.optim.Adagrad(bag.parameters(), lr=0.1)
    bag.follow(optimizer)
    twin, its = make()
    for where in ("cpu", "cuda", "cpu"):
        bag.to(where)
        assert next(bag.parameters()).device.type == where
        for ids in batches(2):
            stepping(bag, optimizer)(ids.to(where))
            stepping(twin, its)(ids)
    assert optimizer.state_dict()["state"][0]["step"] == its.state_dict()["state"][0]["step"] == 6
