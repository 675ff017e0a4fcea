"""A checkpoint of tables with an optimizer loads into tables without one: weights as they are, the state is left."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from training import NAMES, OPTIMIZERS, table_configs, train

import tieredemb as te
from tieredemb.errors import CheckpointError

TABLES = table_configs(rows=(3, 17, 40), widths=(4, 8))


def trained(optimizer, device, **keywords):
    model = te.TieredEmbeddingBagCollection(TABLES, capacity=12, optimizer=optimizer, device=device, **keywords)
    train(model, TABLES, 6)
    return model


def served(device, **keywords):
    return te.TieredEmbeddingBagCollection(TABLES, capacity=9, device=device, **keywords)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=NAMES)
def test_weights_are_those_of_the_trained_tables(device, tmp_path, optimizer):
    model, tables = trained(optimizer, device), served(device)
    model.save_checkpoint(tmp_path, extra={"epoch": 3})
    with pytest.warns(UserWarning, match=f"saved with {type(optimizer).__name__} after 6 steps; its optimizer state"):
        assert tables.load_checkpoint(tmp_path) == {"epoch": 3}
    expected, found = model.state_dict(), tables.state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_weights_of_16_bits_are_those_of_the_trained_tables(device, tmp_path):
    how = {"dtype": torch.bfloat16, "rounding": "stochastic"}
    model = trained(te.AdamW(lr=0.05, weight_decay=0.1), device, **how)
    model.save_checkpoint(tmp_path)
    tables = served(device, **how)
    with pytest.warns(UserWarning, match="AdamW"):
        tables.load_checkpoint(tmp_path)
    expected, found = model.state_dict(), tables.state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_weights_are_rounded_to_the_dtype_of_the_tables(device, tmp_path):
    model = trained(te.AdamW(lr=0.05, weight_decay=0.1), device)
    model.save_checkpoint(tmp_path)
    tables = served(device, dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match="AdamW"):
        tables.load_checkpoint(tmp_path)
    expected, found = model.state_dict(), tables.state_dict()
    assert all(torch.equal(found[name], value.bfloat16()) for name, value in expected.items())


def test_loaded_tables_may_follow_an_optimizer_from_its_first_step(device, tmp_path):
    model, tables = trained(te.Adam(lr=0.05), device), served(device)
    model.save_checkpoint(tmp_path)
    with pytest.warns(UserWarning, match="Adam"):
        tables.load_checkpoint(tmp_path)
    optimizer = torch.optim.Adam([torch.zeros(1, requires_grad=True, device=device)])
    tables.follow(optimizer)
    train(tables, TABLES, 1, optimizer=optimizer)
    assert optimizer.state_dict()["state"][1]["step"] == 1


def test_tables_of_a_converted_model_are_served(device, tmp_path):
    def model_of(optimizer):
        torch.manual_seed(0)
        model = nn.ModuleDict({"a": nn.EmbeddingBag(30, 4, mode="sum"), "b": nn.EmbeddingBag(20, 4, mode="sum")})
        model = model.to(device)
        given = optimizer and optimizer(model.parameters())
        te.replace_embedding_bags(model if given else model.eval(), capacity=6, optimizer=given)
        return model, given

    model, optimizer = model_of(lambda params: torch.optim.AdamW(params, lr=0.05, weight_decay=0.1))
    for step in range(4):
        optimizer.zero_grad()
        for module in model.values() if step % 2 else [model["a"]]:
            module(torch.tensor([[step, 3]], device=device)).sum().backward()
        optimizer.step()
    model["a"].save_checkpoint(tmp_path)
    tables, _ = model_of(None)
    with pytest.warns(UserWarning, match="AdamW"):
        tables["b"].load_checkpoint(tmp_path)
    for name in "ab":
        assert torch.equal(tables[name].state_dict()["weight"], model[name].state_dict()["weight"])


def test_options_that_a_scheduler_added_do_not_matter(device, tmp_path):
    model, tables = trained(te.Adam(lr=0.05), device), served(device)
    torch.optim.lr_scheduler.OneCycleLR(model.fused_optimizer, 0.5, total_steps=10)
    model.save_checkpoint(tmp_path)
    with pytest.warns(UserWarning, match="Adam"):
        tables.load_checkpoint(tmp_path)


def test_a_checkpoint_without_state_loads_without_a_warning(device, tmp_path):
    served(device).save_checkpoint(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        served(device).load_checkpoint(tmp_path)


def test_tables_of_another_model_are_refused_as_ever(device, tmp_path):
    trained(te.Adam(lr=0.05), device).save_checkpoint(tmp_path)
    other = te.TieredEmbeddingBagCollection(TABLES, capacity=9, seed=5, device=device)
    before = other.state_dict()
    with pytest.raises(CheckpointError, match=r"identity\.seed is 0 in the checkpoint and 5"):
        other.load_checkpoint(tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())


def test_tables_with_another_optimizer_are_refused_as_ever(device, tmp_path):
    trained(te.Adagrad(lr=0.05), device).save_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="of another model"):
        served(device, optimizer=te.SGD(lr=0.1)).load_checkpoint(tmp_path)
