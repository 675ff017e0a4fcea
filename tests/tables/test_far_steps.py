"""Tables that have taken more steps than 31 bits count: saved, loaded and opened again, to the same bits."""

from __future__ import annotations

import pytest
import torch
from devices import equal

import tieredemb as te
from tieredemb.errors import InvalidInputError

FAR = [2**24 + 1, 2**31 - 2, 2**31 + 5, 2**32 - 2**29]
OPTIMIZERS = [te.Adam(lr=0.1, weight_decay=0.1), te.SGD(lr=0.1, momentum=0.5), te.SparseAdam(lr=0.1)]


def bag_of(optimizer, **keywords):
    return te.TieredEmbeddingBag(20, 3, mode="sum", capacity=4, optimizer=optimizer, **keywords)


def step(bag, number):
    ids = torch.tensor([[number % 20, (3 * number) % 20]])
    bag(ids).sum().backward()


def at(steps, optimizer, **keywords):
    """Tables that have taken `steps`, as far as they know, and three more, which some rows have missed."""
    bag = bag_of(optimizer, **keywords)
    step(bag, 1)
    state = bag.fused_optimizer.state_dict()
    state["state"][0].pop("lagging", None)
    bag.fused_optimizer.load_state_dict({**state, "state": {0: {**state["state"][0], "step": steps}}})
    for number in (1, 2, 5):
        step(bag, number)
    return bag


def check_same(bag, other):
    for _ in range(2):
        assert equal(bag.state_dict()["weight"], other.state_dict()["weight"])
        one, two = (each.fused_optimizer.state_dict()["state"][0] for each in (bag, other))
        assert all(equal(torch.as_tensor(one[name]), torch.as_tensor(two[name])) for name in one if name != "lagging")
        step(bag, 7)
        step(other, 7)


@pytest.mark.parametrize("steps", FAR)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda each: type(each).__name__)
def test_far_steps_come_back_from_a_checkpoint(device, tmp_path, optimizer, steps):
    bag = at(steps, optimizer)
    bag.save_checkpoint(tmp_path)
    other = bag_of(optimizer)
    other.load_checkpoint(tmp_path)
    assert other.tables.groups[0].steps == [steps + 3]
    check_same(bag, other)


@pytest.mark.parametrize("steps", FAR)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda each: type(each).__name__)
def test_far_steps_come_back_from_a_file(device, tmp_path, optimizer, steps):
    bag = at(steps, optimizer, storage=te.File(tmp_path / "rows"))
    expected = at(steps, optimizer)
    bag.close()
    check_same(expected, bag_of(optimizer, storage=te.File(tmp_path / "rows")))


@pytest.mark.parametrize("steps", FAR)
@pytest.mark.parametrize("optimizer", OPTIMIZERS[:2], ids=lambda each: type(each).__name__)
def test_far_steps_of_dense_optimizers_come_back_from_a_state_dict(device, optimizer, steps):
    bag, other = at(steps, optimizer), bag_of(optimizer)
    other.load_state_dict(bag.state_dict())
    other.fused_optimizer.load_state_dict(bag.fused_optimizer.state_dict())
    assert other.tables.groups[0].steps == [steps + 3]  # though torch keeps them in float32
    check_same(bag, other)


def test_more_steps_than_rows_can_note_are_refused(device):
    bag = at(10, OPTIMIZERS[0])
    before = bag.state_dict()["weight"].clone()
    state = bag.fused_optimizer.state_dict()
    state["state"][0].pop("lagging", None)
    with pytest.raises(InvalidInputError, match="'step' of table 'weight' must be a whole number of steps from 0 to"):
        bag.fused_optimizer.load_state_dict({**state, "state": {0: {**state["state"][0], "step": 2**32}}})
    assert equal(bag.state_dict()["weight"], before)
    step(bag, 1)
