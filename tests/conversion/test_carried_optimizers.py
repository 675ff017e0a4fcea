"""Weights that carry an optimizer, which steps in backward, become tables that go on by it."""

from __future__ import annotations

import gc
import warnings
import weakref

import pytest
import torch
from devices import assert_close, assert_same_bits
from oracle import RowMeanAdagradReference
from torch import nn

import tieredemb as te
from tieredemb.errors import ConfigError, UnsupportedError

CARRIED = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.5}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.1}),
    "Adam": (torch.optim.Adam, {"lr": 0.05, "betas": (0.8, 0.95)}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "alpha": 0.9, "momentum": 0.5}),
    "TorchRec": (RowMeanAdagradReference, {"lr": 0.1}),
}


@pytest.fixture(autouse=True, scope="module")
def torch_has_them():
    """Not while tests are collected: it imports for two seconds, in each worker."""
    pytest.importorskip("torch.distributed.optim")


def carry(kind, options, weight):
    from torch.distributed.optim import _apply_optimizer_in_backward

    _apply_optimizer_in_backward(kind, [weight], options)


def models(kind, options):
    """Two equal models whose tables carry an optimizer."""
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.ModuleDict({"user": nn.EmbeddingBag(30, 4, mode="sum"), "item": nn.EmbeddingBag(20, 4, mode="sum")})
        carry(kind, options, model["user"].weight)
        carry(kind, options | {"lr": 2 * options["lr"]}, model["item"].weight)
        found.append(model)
    return found


def train(model, first, steps):
    for step in range(first, first + steps):
        draw = torch.Generator("cpu").manual_seed(step)
        for module in model.values():
            out = module(torch.randint(0, 20, (5, 3), generator=draw))
            out.backward(torch.randn(out.shape, generator=draw))


def weights(model):
    return [module.state_dict()["weight"].clone() for module in model.values()]


def convert(model, **keywords):
    """The warnings of a conversion."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        te.replace_embedding_bags(model, capacity=5, **keywords)
    return [str(each.message) for each in said]


@pytest.mark.parametrize("trained", [0, 3])
@pytest.mark.parametrize("kind", CARRIED)
def test_tables_go_on_by_the_optimizer_that_their_weights_carry(kind, trained):
    ours, theirs = models(*CARRIED[kind])
    for model in (ours, theirs):
        train(model, 0, trained)
    said = convert(ours)
    assert any("'user' by" in each and "'item' by" in each for each in said)
    assert not any("will not train" in each for each in said)
    for model in (ours, theirs):
        train(model, trained, 4)
    for one, other in zip(weights(ours), weights(theirs), strict=True):
        assert_close(one, other)


@pytest.mark.parametrize("attribute", ["_overlapped_optimizer", "_overlapped_optimizers"])
def test_names_that_earlier_versions_gave_are_understood(attribute):
    bag = nn.EmbeddingBag(30, 4)
    optimizer = torch.optim.Adagrad(bag.parameters(), lr=0.25)
    setattr(bag.weight, attribute, [optimizer] if attribute.endswith("s") else optimizer)
    with pytest.warns(UserWarning, match="the model by Adagrad"):
        twin = te.replace_embedding_bags(bag, capacity=5)
    assert twin.fused_optimizer.config == te.Adagrad(lr=0.25)


def test_torchrec_users_are_told_of_the_rule_of_sharded_tables():
    ours, _ = models(*CARRIED["TorchRec"])
    assert any("tieredemb.RowWiseAdagrad(lr=" in each for each in convert(ours))


def test_a_torch_optimizer_trains_the_tables_that_carry_none():
    torch.manual_seed(0)
    model = nn.ModuleDict({"user": nn.EmbeddingBag(30, 4), "item": nn.EmbeddingBag(20, 4)})
    carry(torch.optim.SGD, {"lr": 0.1}, model["user"].weight)
    optimizer = torch.optim.Adam(model["item"].parameters())
    convert(model, optimizer=optimizer)
    assert isinstance(model["user"].fused_optimizer.config, te.SGD)
    train(model, 0, 1)
    before = weights(model)[1]
    optimizer.step()
    assert not torch.equal(weights(model)[1], before)


def test_an_optimizer_that_is_given_replaces_what_weights_carry():
    ours, _ = models(*CARRIED["SGD"])
    said = convert(ours, optimizer=te.RowWiseAdagrad(lr=0.5))
    assert any("no longer updated as" in each and "'user'; 'item'" in each for each in said)
    assert ours["user"].fused_optimizer.config == te.RowWiseAdagrad(lr=0.5)


def test_old_weights_are_freed():
    """torch's hooks would hold them for good."""
    ours, _ = models(*CARRIED["Adagrad"])
    old = weakref.ref(ours["user"].weight)
    convert(ours)
    gc.collect()
    assert old() is None


class OnlyNamed(torch.optim.Optimizer):
    """As those that TorchRec names for FBGEMM are: without param groups."""

    def __init__(self, params, **options):
        self._params, self._options = params, options


@pytest.mark.parametrize(
    ("kind", "error", "said"),
    [
        (torch.optim.Rprop, UnsupportedError, "cannot follow Rprop"),
        (OnlyNamed, UnsupportedError, "'user' carries .*OnlyNamed, which has no param group.*tieredemb.SparseAdam"),
        (lambda params, **options: torch.optim.Adam(params, amsgrad=True), UnsupportedError, "amsgrad=True"),
    ],
)
def test_what_tables_lack_is_refused_before_anything_changes(kind, error, said):
    ours, _ = models(kind, {"lr": 0.1})
    before, module = weights(ours), ours["user"]
    with pytest.raises(error, match=said):
        te.replace_embedding_bags(ours, capacity=5)
    assert ours["user"] is module
    assert_same_bits(weights(ours), before)


def test_several_optimizers_on_one_weight_are_refused():
    ours, _ = models(*CARRIED["SGD"])
    carry(torch.optim.Adam, {}, ours["item"].weight)
    with pytest.raises(ConfigError, match="'item' carries 2 optimizers"):
        te.replace_embedding_bags(ours, capacity=5)
