"""Options on a GPU: whether a replay has to send them again, found for many tables as one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tieredemb as te
from tieredemb.errors import ConfigError
from tieredemb.tables.param_groups import SeenGroups, is_same
from tieredemb.tables.sent_options import SentOptions

RATES = {"lr": 0.5, "betas": (0.9, 0.99), "foreach": None}


def test_param_groups_are_compared_without_asking_a_tensor():
    group = {"params": [torch.zeros(2)], **RATES}
    assert is_same(group, RATES)
    assert is_same({**group, "param_names": ["a"]}, RATES)
    assert not is_same({**group, "lr": 0.25}, RATES)
    assert not is_same({**group, "lr": torch.tensor(0.5)}, RATES)  # it may be another number at any time
    assert not is_same({**group, "betas": (torch.tensor(0.9), 0.99)}, RATES)
    assert not is_same({"params": [], "lr": 0.5}, RATES)


def test_groups_are_there_while_nothing_in_them_is_replaced():
    optimizer = torch.optim.Adagrad([nn.Parameter(torch.zeros(1)) for _ in range(2)], lr=0.1)
    seen = SeenGroups(optimizer)
    assert seen.are_there()
    optimizer.param_groups[0]["lr"] = 0.2
    assert not seen.are_there()
    seen = SeenGroups(optimizer)
    optimizer.param_groups[0]["params"].reverse()
    assert not seen.are_there()
    seen = SeenGroups(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    assert not seen.are_there()
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    assert not SeenGroups(optimizer).are_there()
    optimizer.param_groups[0]["lr"] = 0.1
    seen = SeenGroups(optimizer)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    assert not seen.are_there()


@pytest.fixture
def followed():
    """26 modules are as good as three: tables that follow one torch optimizer, and it."""
    model = nn.ModuleList(nn.EmbeddingBag(10, 4, mode="sum", sparse=True) for _ in range(3))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.5)
    te.replace_embedding_bags(model, capacity=0.5, optimizer=optimizer, device="cpu")
    return [each.engine.optimizer for each in model], optimizer


@pytest.fixture
def fused():
    """Tables that have their optimizers, and one of these."""
    made = [te.TieredEmbeddingBag(10, 4, optimizer=te.SGD(lr=0.5), device="cpu") for _ in range(3)]
    return [each.fused_optimizer for each in made], made[1].fused_optimizer


@pytest.fixture(params=["followed", "fused"])
def tables(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def uploads(monkeypatch, tables):
    """The optimizers that were asked one by one, in turn."""
    asked = []
    for kind in {type(each) for each in tables[0]}:
        upload = kind.upload

        def noted(self, upload=upload):
            asked.append(self)
            upload(self)

        monkeypatch.setattr(kind, "upload", noted)
    return asked


def said(optimizers):
    return [each.on_device.sent["lr"] for each in optimizers]


def test_what_has_not_changed_is_not_sent_again(tables, uploads):
    optimizers, _ = tables
    sent = SentOptions(optimizers)
    for _ in range(3):
        sent.send()
    assert uploads == optimizers
    assert said(optimizers) == [0.5] * 3


def test_a_rate_that_has_changed_is_sent(tables, uploads):
    optimizers, source = tables
    sent = SentOptions(optimizers)
    sent.send()
    source.param_groups[0]["lr"] = 0.25
    sent.send()
    assert len(uploads) == 6
    assert said(optimizers) == [0.25 if each.source is source else 0.5 for each in optimizers]


def test_a_rate_that_others_sent_meanwhile_is_sent_back(tables, uploads):
    optimizers, source = tables
    sent = SentOptions(optimizers)
    first, second = source.param_groups[0]["lr"], 0.25
    sent.send()
    source.param_groups[0]["lr"] = second
    for each in optimizers:  # an eager step
        each.upload()
    source.param_groups[0]["lr"] = first
    sent.send()
    assert said(optimizers) == [0.5] * 3
    sent.send()
    assert len(uploads) == 9


def test_a_wrong_rate_is_refused_each_time_and_a_right_one_sent_after(tables, uploads):
    optimizers, source = tables
    sent = SentOptions(optimizers)
    sent.send()
    source.param_groups[0]["lr"] = -1.0
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"-1\.0"):
            sent.send()
    source.param_groups[0]["lr"] = 0.5
    sent.send()
    assert said(optimizers) == [0.5] * 3


def test_tables_that_come_to_follow_another_optimizer_are_asked_anew(followed):
    optimizers, _ = followed
    sent = SentOptions(optimizers)
    sent.send()
    other = torch.optim.Adagrad([nn.Parameter(torch.zeros(1))], lr=0.125)
    optimizers[1].follow(other)
    sent.send()
    assert said(optimizers) == [0.5, 0.125, 0.5]


def test_steps_of_a_dense_optimizer_are_noted(monkeypatch):
    bag = te.TieredEmbeddingBag(10, 4, optimizer=te.Adam(lr=0.5), device="cpu")
    optimizer, noted = bag.fused_optimizer, []
    monkeypatch.setattr(type(optimizer.on_device), "notes_steps", True)
    monkeypatch.setattr(type(optimizer.on_device), "note_step", lambda self: noted.append(self))
    sent = SentOptions([optimizer])
    for _ in range(3):
        sent.send()
    assert noted == [optimizer.on_device] * 3
