"""The fused optimizer as people use it: schedulers, loss scaling, state dicts."""

from __future__ import annotations

import math

import pytest
import torch
from devices import assert_close, equal, idle
from oracle import torch_optimizer
from torch import nn

import tieredemb as te
from tieredemb.errors import ConfigError, InvalidInputError

ROWS, WIDTH = 12, 4
OPTIMIZERS = [
    te.SGD(lr=0.1),
    te.Adagrad(lr=0.1),
    te.RowWiseAdagrad(lr=0.1),
    te.SparseAdam(lr=0.1),
    te.SparseLion(lr=0.1),
]
NAMES = [type(optimizer).__name__ for optimizer in OPTIMIZERS]


def make(optimizer, capacity=2):
    bag = te.TieredEmbeddingBag(ROWS, WIDTH, mode="sum", capacity=capacity, optimizer=optimizer)
    reference = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True)
    reference.load_state_dict(bag.state_dict())
    return bag, reference


def step(bag, *values, scale=1.0):
    (bag(torch.tensor([values])).sum() * scale).backward()


def weight(bag):
    return bag.state_dict()["weight"]


def test_it_is_a_torch_optimizer_whose_step_does_nothing(device):
    bag, _ = make(te.SGD(lr=0.1))
    optimizer = bag.fused_optimizer
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.1
    step(bag, 1, 2)
    after = weight(bag)
    assert optimizer.step() is None
    assert optimizer.step(lambda: 5) == 5
    optimizer.zero_grad()
    optimizer.zero_grad(set_to_none=False)
    assert equal(weight(bag), after)


def test_upload_has_nobody_to_tell_on_the_cpu():
    bag = te.TieredEmbeddingBag(10, 4, optimizer=te.SGD(lr=0.1))
    bag.fused_optimizer.upload()
    bag.fused_optimizer.param_groups[0]["lr"] = -1.0
    with pytest.raises(ConfigError, match="learning rate is -1"):
        bag.fused_optimizer.upload()


@pytest.mark.parametrize("betas", [(0.9, 0.99), [0.9, 0.99]])
def test_its_own_options_are_checked_again_once_they_change(betas):
    optimizer = te.TieredEmbeddingBag(10, 4, optimizer=te.SparseAdam(lr=0.1)).fused_optimizer
    group = optimizer.param_groups[0]
    group["betas"] = betas
    optimizer.check_options_now()
    optimizer.check_options_now()
    group["betas"] = [*betas]
    optimizer.check_options_now()
    group["betas"][0] = 7.0
    with pytest.raises(ConfigError, match="betas"):
        optimizer.check_options_now()
    group["betas"], group["lr"] = betas, -1.0
    with pytest.raises(ConfigError, match="learning rate"):
        optimizer.check_options_now()


@pytest.mark.parametrize("config", OPTIMIZERS, ids=NAMES)
def test_a_scheduler_drives_the_learning_rate_as_in_torch(device, config):
    bag, reference = make(config)
    theirs = torch_optimizer(config, reference.parameters())
    optimizers = (bag.fused_optimizer, theirs)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in optimizers]
    for _ in range(4):
        for model, optimizer, scheduler in zip((bag, reference), optimizers, schedulers, strict=True):
            optimizer.zero_grad()
            step(model, 1, 2, 2)
            optimizer.step()
            scheduler.step()
    assert bag.fused_optimizer.param_groups[0]["lr"] == config.lr / 16
    assert_close(weight(bag), reference.weight.detach())


@pytest.mark.parametrize("lr", [math.nan, math.inf, -0.1])
def test_a_learning_rate_that_is_none_updates_nothing(device, lr):
    bag, _ = make(te.Adagrad(lr=0.1))
    step(bag, 1)
    before = weight(bag)
    bag.fused_optimizer.param_groups[0]["lr"] = lr
    with pytest.raises(ConfigError, match="learning rate"):
        step(bag, 1)
    assert equal(weight(bag), before)
    assert bag.fused_optimizer.state_dict()["state"][0]["step"] == 1
    bag.fused_optimizer.param_groups[0]["lr"] = 0.1
    step(bag, 1)
    assert not equal(weight(bag), before)


@pytest.mark.parametrize(
    "make_config",
    [
        lambda: te.SGD(lr=math.nan),
        lambda: te.SGD(lr=-1),
        lambda: te.SGD(lr="0.1"),
        lambda: te.Adagrad(eps=-1),
        lambda: te.SparseAdam(betas=(0.9, 1.0)),
        lambda: te.SparseAdam(betas=0.9),
        lambda: te.SparseAdam(eps=0.0),
        lambda: te.RowWiseAdagrad(initial_accumulator_value=-1),
        lambda: te.SparseLion(lr=0.1, betas=(-0.1, 0.9)),
        lambda: te.SparseLion(lr=0.1, betas=(0.9, 0.99, 0.999)),
        lambda: te.SparseLion(lr=0.1, weight_decay=-1),
        lambda: te.SparseLion(lr=-1),
    ],
)
def test_configs_refuse_numbers_that_are_none(make_config):
    with pytest.raises(ConfigError):
        make_config()


@pytest.mark.parametrize("config", OPTIMIZERS, ids=NAMES)
def test_state_dict_continues_in_another_module(device, config):
    first, _ = make(config)
    for values in ((1, 2), (2, 3), (3, 3, 4)):
        step(first, *values)
    first.fused_optimizer.param_groups[0]["lr"] = 0.05
    second, _ = make(config, capacity=ROWS)
    second.load_state_dict(first.state_dict())
    second.fused_optimizer.load_state_dict(first.fused_optimizer.state_dict())
    for bag in (first, second):
        step(bag, 2, 4, 5)
    assert equal(weight(first), weight(second))


@pytest.mark.parametrize("config", [OPTIMIZERS[1], *OPTIMIZERS[3:]], ids=["Adagrad", "SparseAdam", "SparseLion"])
def test_state_dict_of_torch_continues_here_and_back(device, config):
    bag, reference = make(config)
    theirs = torch_optimizer(config, reference.parameters())
    for _ in range(3):
        theirs.zero_grad()
        step(reference, 1, 2, 2)
        theirs.step()
    bag.load_state_dict(reference.state_dict())
    bag.fused_optimizer.load_state_dict(theirs.state_dict())
    again = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True)
    again.load_state_dict(bag.state_dict())
    back = torch_optimizer(config, again.parameters())
    options = back.state_dict()["param_groups"]  # torch's groups hold options of its own
    back.load_state_dict({"state": bag.fused_optimizer.state_dict()["state"], "param_groups": options})
    for model, optimizer in ((bag, bag.fused_optimizer), (reference, theirs), (again, back)):
        optimizer.zero_grad()
        step(model, 2, 3)
        optimizer.step()
    assert_close(weight(bag), reference.weight.detach())
    assert_close(again.weight, reference.weight)


def test_state_dict_has_what_the_state_of_unused_rows_starts_with(device):
    bag, _ = make(te.Adagrad(lr=0.1, initial_accumulator_value=0.5))
    step(bag, 3, 4)
    (state,) = bag.fused_optimizer.state_dict()["state"].values()
    used = torch.isin(torch.arange(ROWS), torch.tensor([3, 4]))
    assert equal(state["sum"], torch.where(used, 1.5, 0.5)[:, None].expand(-1, WIDTH))


def test_state_dict_of_other_shapes_is_refused_before_anything_changes(device):
    bag, _ = make(te.SparseAdam(lr=0.1))
    step(bag, 1)
    good = bag.fused_optimizer.state_dict()
    bad = {"state": {0: good["state"][0] | {"exp_avg_sq": torch.zeros(3, 3)}}, "param_groups": good["param_groups"]}
    with pytest.raises(InvalidInputError, match="exp_avg_sq"):
        bag.fused_optimizer.load_state_dict(bad)
    with pytest.raises(InvalidInputError, match="one param group of 1 tables"):
        bag.fused_optimizer.load_state_dict({"state": {}, "param_groups": []})
    assert equal(bag.fused_optimizer.state_dict()["state"][0]["exp_avg_sq"], good["state"][0]["exp_avg_sq"])


def test_param_groups_cannot_be_added():
    bag, _ = make(te.SGD(lr=0.1))
    with pytest.raises(ConfigError, match="one param group"):
        bag.fused_optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


# --- loss scaling -----------------------------------------------------------------------------------------------------


def scaled(bag, device, scale=2.0**10):
    scaler = torch.amp.GradScaler(device, init_scale=scale, growth_interval=1000)
    bag.fused_optimizer.attach_grad_scaler(scaler)
    return scaler


@pytest.mark.parametrize("config", OPTIMIZERS, ids=NAMES)
def test_backward_divides_by_the_scale(device, config):
    plain, _ = make(config)
    bag, _ = make(config)
    scaler = scaled(bag, device)
    for _ in range(3):
        step(plain, 1, 2)
        scaler.scale(bag(torch.tensor([[1, 2]])).sum()).backward()
        scaler.step(bag.fused_optimizer)
        scaler.update()
        bag.fused_optimizer.zero_grad()
    assert equal(weight(bag), weight(plain))
    assert not bag.fused_optimizer.found_inf


def test_a_gradient_that_is_not_finite_updates_nothing_and_lowers_the_scale(device):
    bag, _ = make(te.SparseAdam(lr=0.1))
    scaler = scaled(bag, device)
    step(bag, 1, 2, scale=2.0**10)
    before, scale = weight(bag), scaler.get_scale()
    for bad in (math.inf, math.nan):
        scaler.scale(bag(torch.tensor([[1, 2]])).sum() * bad).backward()
        assert bag.fused_optimizer.found_inf
        scaler.step(bag.fused_optimizer)
        scaler.update()
        bag.fused_optimizer.zero_grad()
    assert equal(weight(bag), before)
    assert scaler.get_scale() == scale / 4
    assert bag.fused_optimizer.state_dict()["state"][0]["step"] == 1
    assert idle(bag)


def test_one_infinity_holds_back_every_table_of_a_collection(device):
    tables = [te.TableConfig(name=n, num_embeddings=9, embedding_dim=d) for n, d in (("a", 4), ("b", 5))]
    model = te.TieredEmbeddingBagCollection(tables, optimizer=te.SGD(lr=1.0), capacity=2)
    scaled(model, device)
    before = model.state_dict()
    upstream = torch.ones(1, 9)
    upstream[0, 8] = math.inf
    model(torch.tensor([1, 2]), torch.tensor([0, 1, 2])).backward(upstream)
    for name, value in model.state_dict().items():
        assert equal(value, before[name])


def test_attach_needs_a_scaler():
    bag, _ = make(te.SGD(lr=0.1))
    with pytest.raises(ConfigError, match="GradScaler"):
        bag.fused_optimizer.attach_grad_scaler(2.0)


@pytest.mark.parametrize("config", OPTIMIZERS, ids=NAMES)
def test_state_dict_of_an_optimizer_that_took_no_step_starts_again(device, config):
    bag, reference = make(config)
    fresh = torch_optimizer(te.SGD(lr=0.1) if isinstance(config, te.RowWiseAdagrad) else config, reference.parameters())
    step(bag, 1, 2)
    bag.fused_optimizer.load_state_dict({"state": {}, "param_groups": fresh.state_dict()["param_groups"]})
    bag.load_state_dict(reference.state_dict())
    again, _ = make(config)
    again.load_state_dict(reference.state_dict())
    for module in (bag, again):
        step(module, 2, 3)
    assert equal(weight(bag), weight(again))
    assert bag.fused_optimizer.state_dict()["state"][0]["step"] == 1
