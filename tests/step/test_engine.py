"""Several modules on one engine: the tables are theirs together."""

from __future__ import annotations

import copy

import pytest
import torch
from devices import assert_same_bits, equal, randint
from torch import nn
from training import bits

import tieredemb as te
from tieredemb.errors import BackwardError
from tieredemb.lookup.options import LookupOptions
from tieredemb.modules.base import TieredModule

ROWS, WIDTH = 30, 4


class Face(te.TieredEmbeddingBag):
    """Another face of a bag's engine."""

    def __init__(self, bag, options=None):
        TieredModule.__init__(self, bag.engine, options or bag.options)
        self.mode, self.include_last_offset, self.embedding_dim = bag.mode, False, bag.embedding_dim


def make(**keywords):
    return te.TieredEmbeddingBag(ROWS, WIDTH, mode="sum", capacity=7, optimizer=te.Adagrad(lr=0.5), **keywords)


def batches(number):
    return [(randint(0, ROWS, (6, 3), seed=2 * n), randint(0, ROWS, (5, 2), seed=2 * n + 1)) for n in range(number)]


def test_one_backward_through_several_faces_is_one_update(device):
    bag, alone = make(), make()
    face = Face(bag)
    for first, second in batches(8):
        (bag(first).sum() + face(second).square().sum()).backward()
        (alone(first).sum() + alone(second).square().sum()).backward()
    assert_same_bits(bits(bag), bits(alone))
    assert bag.fused_optimizer.state_dict()["state"][0]["step"] == 8
    assert face.fused_optimizer is bag.fused_optimizer


def test_faces_treat_rows_each_in_their_way(device):
    """What scales gradients by frequency scales those of its own lookups."""
    bag, alone = make(), make()
    face = Face(bag, LookupOptions(scale_grad_by_freq=True))
    ids = torch.tensor([[3, 3, 3, 5]])
    face(ids).sum().backward()
    alone(torch.tensor([[3, 5]])).sum().backward()
    assert equal(bag.state_dict()["weight"], alone.state_dict()["weight"])


def test_frozen_face_leaves_rows_to_the_others(device):
    bag, alone = make(), make()
    face = Face(bag).requires_grad_(False)
    for first, second in batches(4):
        assert not face(second).requires_grad
        (bag(first).sum() + face(second).sum()).backward()
        alone(first).sum().backward()
    assert equal(bag.state_dict()["weight"], alone.state_dict()["weight"])


def test_accumulation_covers_all_faces(device):
    bag, alone = make(), make()
    face = Face(bag)
    for first, second in batches(3):
        with bag.accumulate():
            bag(first).sum().backward()
            face(second).sum().backward()
            with pytest.raises(BackwardError, match="active already"), face.accumulate():
                pass
        (alone(first).sum() + alone(second).sum()).backward()
    assert_same_bits(bits(bag), bits(alone))


def test_copies_of_a_model_keep_faces_on_one_engine(device):
    model = nn.ModuleList([bag := make(), Face(bag)])
    copied = copy.deepcopy(model)
    assert copied[0].engine is copied[1].engine
    assert copied[0].engine is not bag.engine
    (copied[0](torch.tensor([[1]])).sum() + copied[1](torch.tensor([[2]])).sum()).backward()
    assert not equal(copied[0].state_dict()["weight"], bag.state_dict()["weight"])


def test_prefetch_plans_for_all_faces(device):
    model, alone = nn.ModuleList([bag := make(), Face(bag)]), make()
    for first, second in te.prefetch(batches(6), model, 2):
        (model[0](first).sum() + model[1](second).sum()).backward()
    for first, second in batches(6):
        (alone(first).sum() + alone(second).sum()).backward()
    assert_same_bits(bits(bag), bits(alone))
