"""Micro-batches: the backward passes inside `accumulate()` are one update, that of the large batch."""

from __future__ import annotations

import copy

import pytest
import torch
from devices import assert_same_bits, equal, idle
from training import NAMES, OPTIMIZERS, bits, random_batch, table_configs

import tieredemb as te
from tieredemb.errors import BackwardError
from tieredemb.step.engine import Engine

ROWS, WIDTH = 30, 4


def joined(tables, micro_batches):
    """The micro-batches (ids, offsets, weights, upstream) as one: the samples of each table in their order."""
    ids, sizes, weights = [], [], []
    for t in range(len(tables)):
        for micro_ids, offsets, micro_weights, upstream in micro_batches:
            edges = offsets[t * len(upstream) : (t + 1) * len(upstream) + 1]
            ids.append(micro_ids[edges[0] : edges[-1]])
            weights.append(micro_weights[edges[0] : edges[-1]])
            sizes.append(edges.diff())
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cat(sizes).cumsum(0)])
    return torch.cat(ids), offsets, torch.cat(weights), torch.cat([micro[3] for micro in micro_batches])


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=NAMES)
@pytest.mark.parametrize("capacity", [1, 12, 1.0])
def test_micro_batches_are_one_update_of_the_large_batch(device, optimizer, capacity):
    tables = table_configs(modes=("sum", "mean", "max"), widths=(4, 5))
    micro, large = (te.TieredEmbeddingBagCollection(tables, capacity=capacity, optimizer=optimizer) for _ in range(2))
    for step in range(3):
        micro_batches = [random_batch(tables, size, 10 * step + size) for size in (7, 1, 4)]
        with micro.accumulate():
            for ids, offsets, _, upstream in micro_batches:
                micro(ids, offsets).backward(upstream)
        ids, offsets, _, upstream = joined(tables, micro_batches)
        large(ids, offsets).backward(upstream)
        assert_same_bits(bits(micro), bits(large))
    assert idle(micro)


def test_per_sample_weights_and_their_gradients_accumulate_too(device):
    tables = table_configs(widths=(4,))
    micro, large = (te.TieredEmbeddingBagCollection(tables, capacity=5, optimizer=te.SGD(lr=0.5)) for _ in range(2))
    micro_batches = [random_batch(tables, size, size) for size in (5, 3)]
    for batch in micro_batches:
        batch[2].requires_grad_()
    with micro.accumulate():
        for ids, offsets, weights, upstream in micro_batches:
            micro(ids, offsets, weights).backward(upstream)
            assert weights.grad is not None  # of the weights there is no step to wait for
    ids, offsets, weights, upstream = joined(tables, micro_batches)
    large(ids, offsets, weights.detach()).backward(upstream)
    assert_same_bits(bits(micro), bits(large))


def make(**keywords):
    return te.TieredEmbeddingBag(ROWS, WIDTH, mode="sum", capacity=3, optimizer=te.SparseAdam(lr=0.1), **keywords)


def test_lookups_inside_read_rows_as_they_were(device):
    bag = make()
    before = bag.state_dict()["weight"]
    with bag.accumulate():
        for row in (1, 2, 1, 5, 1):
            out = bag(torch.tensor([[row]]))
            assert equal(out[0], before[row])
            out.sum().backward()
        assert equal(bag.state_dict()["weight"], before)
    changed = (bag.state_dict()["weight"] != before).any(1)
    assert changed.nonzero().flatten().tolist() == [1, 2, 5]
    assert bag.fused_optimizer.state_dict()["state"][0]["step"] == 1


def test_after_an_error_nothing_is_applied_and_no_row_stays_locked(device):
    bag = make()
    before = bits(bag)

    def fail():
        with bag.accumulate():
            bag(torch.tensor([[1, 2]])).sum().backward()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert_same_bits(bits(bag), before)
    assert idle(bag)
    bag(torch.tensor([[1, 2]])).sum().backward()
    assert not equal(bits(bag)[0], before[0])


def test_empty_and_nested_contexts(device):
    bag = make()
    before = bits(bag)
    with bag.accumulate():
        pass
    with bag.accumulate(), torch.no_grad():
        bag(torch.tensor([[1]]))
    assert_same_bits(bits(bag), before)
    with pytest.raises(BackwardError, match="active already"), bag.accumulate(), bag.accumulate():
        pass
    with bag.accumulate():
        bag(torch.tensor([[1]])).sum().backward()
    assert not equal(bits(bag)[0], before[0])


def test_a_copy_made_inside_accumulates_nothing(device):
    bag = make()
    with bag.accumulate():
        twin = copy.deepcopy(bag)
        twin(torch.tensor([[1]])).sum().backward()
        assert not equal(twin.state_dict()["weight"], bag.state_dict()["weight"])


def test_context_whose_end_was_interrupted_keeps_no_later_update(device, monkeypatch):
    """Or every gradient from then on would be collected, for an end that never comes."""
    bag, twin = (te.TieredEmbeddingBag(40, 4, capacity=5, optimizer=te.SGD(lr=1.0)) for _ in range(2))
    ids = torch.arange(6)[None]

    def interrupt(engine, name, value):
        if name == "_accumulates" and value is None:
            raise KeyboardInterrupt
        object.__setattr__(engine, name, value)

    with monkeypatch.context() as patched:
        patched.setattr(Engine, "__setattr__", interrupt, raising=False)
        with pytest.raises(KeyboardInterrupt), bag.accumulate():
            bag(ids).sum().backward()
    for module in (bag, twin):
        module(ids).sum().backward()
    assert equal(bag.state_dict()["weight"], twin.state_dict()["weight"])
