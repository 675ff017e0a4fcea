"""Regularisers of libraries, which are found by the names that these use."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import tieredemb as te

pytestmark = pytest.mark.usefixtures("thawed")


class RegularizationLoss(nn.Module):
    """torch-rechub's, as far as it is looked at."""

    def __init__(self, **factors):
        super().__init__()
        self.embedding_l1, self.embedding_l2 = factors.get("l1", 0.0), factors.get("l2", 0.0)


class Trainer:
    def __init__(self, model, **factors):
        self.model, self.criterion, self.reg_loss_fn = model, nn.BCELoss(), RegularizationLoss(**factors)


class Regularised(nn.Module):
    """deepctr-torch's model, as far as it is looked at."""

    def __init__(self, l1=0.0, l2=0.0):
        super().__init__()
        self.embedding_dict = nn.ModuleDict({"user": nn.Embedding(9, 4)})
        self.top = nn.Linear(4, 1)
        self.regularization_weight = [(list(self.embedding_dict.parameters()), l1, l2), ([self.top.weight], 0.0, 0.5)]


def make():
    return nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 1))


def said(model, optimizer=None):
    """What a conversion warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        te.replace_embedding_bags(model, optimizer=optimizer or torch.optim.Adam(model.parameters()))
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("inside", [False, True])
def test_loss_that_looks_for_embeddings_is_told(inside):
    model = make()
    trainer = Trainer(nn.ModuleList([model]) if inside else model, l2=0.01)  # DataParallel is a model around it
    (text,) = said(model)
    assert "RegularizationLoss has l2=0.01 of embeddings" in text
    assert "add 0.02 to the weight_decay" in text
    assert trainer.reg_loss_fn.embedding_l2


def test_loss_without_a_trainer_is_told():
    loss = RegularizationLoss(l1=0.5)
    (text,) = said(make())
    assert "l1=0.5 of embeddings" in text
    assert loss.embedding_l1


def test_loss_of_another_model_is_not_told():
    others = [Trainer(make(), l2=0.01), Trainer(make())]
    model = make()
    mine = Trainer(model)
    assert said(model) == []
    assert len({each.model for each in (*others, mine)}) == 3


@pytest.mark.parametrize(("l1", "l2"), [(0.0, 0.0), (0.0, 0.01), (0.5, 0.0)])
def test_listed_weights_that_are_updated_in_backward_leave_the_list(l1, l2):
    model = Regularised(l1, l2)
    texts = said(model, te.SGD(lr=0.1))
    assert len(texts) == bool(l1 or l2)
    assert all("regularization_weight of the Regularised" in text for text in texts)
    (tables, *_), (dense, *_) = model.regularization_weight
    assert tables == []
    assert dense[0] is model.top.weight


def test_listed_weights_that_follow_an_optimizer_are_the_tables():
    model = Regularised(0.5, 0.01)
    assert said(model) == []
    (tables, *_), (dense, *_) = model.regularization_weight
    assert tables == list(model.embedding_dict.parameters())
    assert dense[0] is model.top.weight
    (tables[0].abs().sum() + tables[0].square().sum()).backward()
    assert model.embedding_dict["user"].weight.grad.norm() > 0
    model.zero_grad()
    te.restore_embedding_bags(model)
    assert model.regularization_weight[0][0][0] is model.embedding_dict["user"].weight
