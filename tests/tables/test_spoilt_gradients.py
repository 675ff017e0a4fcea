"""Gradients that were multiplied by what is not finite, as by the factor of a norm that is NaN: in torch no row of a
table is a number then, as the zeros of rows that a batch leaves out are multiplied, too."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from devices import assert_close
from following import DENSE_KINDS, loss_of, pair, states, tensors
from torch import nn

import tieredemb as te
from tieredemb.errors import UnsupportedError

MOVES_ALL = [kind for kind in DENSE_KINDS if kind not in ("SGD", "Adagrad", "TorchRec")]


def step(model, optimizer, number, spoil=None):
    optimizer.zero_grad()
    loss_of(model, number).backward()
    if spoil is not None:
        spoil(model)
    optimizer.step()


def clip_by_nan(model):
    model.top.bias.grad.fill_(math.nan)
    assert bool(nn.utils.clip_grad_norm_(model.parameters(), 0.1).isnan())


def clip_by_nan_our_way(model):
    model.top.bias.grad.fill_(math.nan)
    clip = te.clip_grad_norm_ if isinstance(model.tables, te.TieredEmbeddingBagCollection) else nn.utils.clip_grad_norm_
    assert bool(clip(model.parameters(), 0.1, norm_type=1).isnan())


@pytest.mark.parametrize("spoil", [clip_by_nan, clip_by_nan_our_way])
@pytest.mark.parametrize("kind", MOVES_ALL)
def test_a_factor_that_is_not_finite_reaches_rows_that_the_batch_leaves_out(device, kind, spoil):
    models, optimizers = pair(kind)
    for model, optimizer in zip(models, optimizers, strict=True):
        for number in range(3):
            step(model, optimizer, number)
        step(model, optimizer, 3, spoil)
    for ours, theirs in zip(*map(tensors, models), strict=True):
        assert not bool(ours.isfinite().all(1 if ours.dim() > 1 else 0).any())  # of each row
        assert_close(ours, theirs, equal_nan=True)
    for model, optimizer in zip(models, optimizers, strict=True):
        for number in range(4, 7):
            step(model, optimizer, number)
    for ours, theirs in zip(*map(tensors, models), strict=True):
        assert_close(ours, theirs, equal_nan=True)
    mine, its = map(states, optimizers)
    for number, entry in its.items():
        for name, value in entry.items():
            assert torch.equal(mine[number][name].isnan(), value.isnan()), (number, name)


@pytest.mark.parametrize("kind", DENSE_KINDS)
def test_an_infinite_norm_leaves_no_number_where_a_gradient_is_infinite(device, kind):
    models, optimizers = pair(kind)
    for model, optimizer in zip(models, optimizers, strict=True):
        for number in range(3):
            step(model, optimizer, number)
        optimizer.zero_grad()
        hook = model.tables.register_forward_hook(lambda *given: given[-1].register_hook(infinite) and None)
        loss_of(model, 3).backward()
        hook.remove()
        assert bool(nn.utils.clip_grad_norm_(model.parameters(), 0.1).isinf())
        optimizer.step()
    for ours, theirs in zip(*map(tensors, models), strict=True):
        assert_close(ours, theirs, equal_nan=True)


def infinite(grad):
    """The same, of one column infinite."""
    return grad.index_fill(1, grad.new_zeros((), dtype=torch.int64), math.inf)


@pytest.mark.parametrize("kind", ["Adam", "SGD nesterov"])
def test_a_spoilt_gradient_that_is_dropped_spoils_no_step(device, kind):
    models, optimizers = pair(kind)
    for model, optimizer in zip(models, optimizers, strict=True):
        loss_of(model, 0).backward()
        clip_by_nan(model)
        optimizer.zero_grad()
        for number in range(3):
            step(model, optimizer, number)
    for ours, theirs in zip(*map(tensors, models), strict=True):
        assert_close(ours, theirs)


def take_and_wait(optimizer, tables):
    """A step. A CPU refuses one that is spoilt at once, and a GPU tells of it at whatever waits for it next."""
    optimizer.step()
    tables.flush()


@pytest.mark.parametrize("kind", ["SGD", "Adagrad"])
def test_a_spoilt_step_of_rows_that_move_alone_is_refused_before_rows_change(device, kind):
    (model, _), (optimizer, _) = pair(kind)
    for number in range(6):  # a GPU has recorded the step by now
        step(model, optimizer, number, clip_by_a_number)
    before, top = model.tables.state_dict(), copy.deepcopy(model.top.state_dict())
    for number in range(2):
        optimizer.zero_grad()
        loss_of(model, number).backward()
        clip_by_nan(model)
        with pytest.raises(UnsupportedError, match=r"multiplied by NaN.*error_if_nonfinite"):
            take_and_wait(optimizer, model.tables)
        after = model.tables.state_dict()
        assert all(torch.equal(after[name], value) for name, value in before.items())
        model.top.load_state_dict(top)  # which a GPU's optimizer has moved
        step(model, optimizer, number + 2, clip_by_a_number)  # and goes on
        before = model.tables.state_dict()
        assert all(bool(each.isfinite().all()) for each in before.values())
        assert not torch.equal(before[next(iter(before))], after[next(iter(before))])


def clip_by_a_number(model):
    assert bool(nn.utils.clip_grad_norm_(model.parameters(), 0.1).isfinite())


def test_a_spoilt_gradient_of_one_of_several_tables_is_refused(device):
    (model, _), (optimizer, _) = pair("Adam")
    loss_of(model, 0).backward()
    next(iter(model.tables.parameters())).grad.mul_(math.nan)
    before = model.tables.state_dict()
    with pytest.raises(UnsupportedError, match="others of the module"):
        take_and_wait(optimizer, model.tables)
    after = model.tables.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def converted(device, kind, count=3):
    """Tables of a module that share a cache, and torch's; with the optimizer of each."""
    with torch.device("cpu"):
        theirs = nn.ModuleList([nn.EmbeddingBag(9 + 5 * number, 4, mode="sum") for number in range(count)])
    ours = copy.deepcopy(theirs)
    optimizers = [kind(model.parameters(), lr=0.1) for model in (ours, theirs)]
    te.replace_embedding_bags(ours, capacity=3, optimizer=optimizers[0], device=device)
    return (ours, theirs), optimizers


def test_a_spoilt_step_of_tables_of_a_converted_model_is_refused_by_name(device):
    (ours, _), (optimizer, _) = converted(device, torch.optim.SGD)
    before, ids = ours.state_dict(), torch.tensor([[1, 8], [2, 3]], device=device)
    sum(bag(ids).square().sum() for bag in reversed(ours)).backward()
    for parameter in ours[1].parameters():
        parameter.grad.mul_(math.nan)
    with pytest.raises(UnsupportedError, match=r"gradient of table '1"):
        take_and_wait(optimizer, ours[0])
    after = ours.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize("order", [1, -1])
def test_the_order_of_forwards_does_not_decide_which_table_is_spoilt(device, order):
    models, optimizers = converted(device, torch.optim.Adam)
    for model, optimizer, where in zip(models, optimizers, (device, "cpu"), strict=True):
        ids = torch.tensor([[1, 8], [2, 3]], device=where)
        sum(bag(ids).square().sum() for bag in list(model)[::order]).backward()
        for parameter in model[2].parameters():
            parameter.grad.mul_(math.nan)
        optimizer.step()
    for found, wanted in zip(*(model.state_dict().values() for model in models), strict=True):
        assert_close(found, wanted, equal_nan=True)


def test_a_captured_step_that_is_spoilt_is_refused(device):
    if device != "cuda":
        pytest.skip("a CUDA graph")
    bag = te.TieredEmbeddingBag(50, 4, mode="sum", capacity=20, optimizer=torch.optim.SGD, device=device)
    dense = nn.Linear(4, 1, device=device)
    optimizer = torch.optim.SGD([*bag.parameters(), *dense.parameters()], lr=0.1)
    bag.follow(optimizer)

    def train(batch):
        ids, target = batch
        loss = (dense(bag(ids)) - target).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_([*bag.parameters(), *dense.parameters()], 0.1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss.detach()

    def batch(number, target=1.0):
        ids = torch.arange(8, device=device).view(4, 2) + number
        return ids, torch.full((4, 1), target, device=device)

    replay = te.graph_step(train, batch(0))
    for number in range(8):
        replay(batch(number))
    (before,) = bag.state_dict().values()
    replay(batch(0, math.nan))
    torch.cuda.synchronize()
    with pytest.raises(UnsupportedError, match="multiplied by NaN"):
        replay(batch(1))
    (after,) = bag.state_dict().values()
    assert torch.equal(after, before)


def test_a_spoilt_gradient_that_is_zeroed_by_hand_spoils_no_step(device):
    models, optimizers = pair("Adam")
    for model, optimizer in zip(models, optimizers, strict=True):
        loss_of(model, 0).backward()
        clip_by_nan(model)
        loss_of(model, 1).backward()  # which is added to what is there
        for parameter in model.parameters():
            parameter.grad.zero_()
        optimizer.step()
    for ours, theirs in zip(*map(tensors, models), strict=True):
        assert_close(ours, theirs)


def test_tables_of_a_converted_model_are_spoilt_each_by_its_own_factor(device):
    (ours, theirs), optimizers = converted(device, torch.optim.Adam, count=2)
    for number in range(4):
        for model, optimizer, where in zip((ours, theirs), optimizers, (device, "cpu"), strict=True):
            optimizer.zero_grad()
            ids = torch.tensor([[number, 8], [2, 3]], device=where)
            sum(bag(ids).square().sum() for bag in model).backward()
            if number == 1:
                for parameter in model[1].parameters():
                    parameter.grad.mul_(math.nan)
            optimizer.step()
    for found, wanted in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
        assert_close(found, wanted, equal_nan=True)
    assert [bool(weight.isnan().all()) for weight in theirs.state_dict().values()] == [False, True]


def test_sparse_gradients_spoil_the_rows_of_the_batch_alone(device):
    bag = te.TieredEmbeddingBag(20, 4, mode="sum", capacity=3, optimizer=torch.optim.SparseAdam)
    optimizer = torch.optim.SparseAdam(bag.parameters())
    bag.follow(optimizer)
    bag(torch.tensor([[1, 2], [2, 7]])).sum().backward()
    for parameter in bag.parameters():
        parameter.grad.mul_(math.nan)
    optimizer.step()
    (weight,) = bag.state_dict().values()
    assert weight.isnan().all(1).nonzero().flatten().tolist() == [1, 2, 7]
