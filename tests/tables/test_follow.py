"""Tables follow a torch optimizer: whatever is done with it, the model trains as one with whole tables."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import math
import pickle
import re
import warnings
import weakref
from collections import defaultdict

import pytest
import torch
import torch.nn.utils.prune
from devices import assert_close, assert_same_bits, equal, idle, randn
from following import DENSE_KINDS, KINDS, loss_of, pair, states, tensors
from oracle import RowMeanAdagradReference
from pairs import parametrize_pairs
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import tieredemb as te
from tieredemb.errors import BackwardError, ConfigError, InvalidInputError, StorageError, UnsupportedError
from tieredemb.step import pending_gradients
from tieredemb.step.table_parameter import TableParameter


def assert_equal_models(models, **tolerance):
    for ours, theirs in zip(*map(tensors, models), strict=True):
        assert_close(ours, theirs, **tolerance)


def train(models, optimizers, *, steps=4, backwards=1, first=0):
    for step in range(first, first + steps):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            for part in range(backwards):
                loss_of(model, 10 * step + part).backward()
            optimizer.step()


def make(optimizer=torch.optim.SGD, rows=30, width=4, **keywords):
    return te.TieredEmbeddingBag(rows, width, mode="sum", capacity=3, optimizer=optimizer, **keywords)


def weight(bag):
    return bag.state_dict()["weight"]


# --- the update -------------------------------------------------------------------------------------------------------


@parametrize_pairs(kind=[*KINDS], capacity=[1, 3, 1.0], backwards=[1, 2])
def test_training_is_that_of_whole_tables(device, kind, capacity, backwards):
    models, optimizers = pair(kind, capacity=capacity)
    train(models, optimizers, backwards=backwards)
    assert_equal_models(models)
    assert idle(models[0].tables)


@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_those_of_any_capacity_and_of_one_large_backward(device, kind):
    trained = [pair(kind, capacity=capacity) for capacity in (1, 1.0)]
    for models, _ in trained:
        models[1].load_state_dict(trained[0][0][1].state_dict())
        models[0].top.load_state_dict(models[1].top.state_dict())
    for models, optimizers in trained:
        train(models[:1], optimizers[:1], backwards=2)
        for step in range(3):  # the norm's bits depend on no slot either
            optimizers[0].zero_grad()
            loss_of(models[0], step, batch=20).backward()
            loss_of(models[0], step + 10).backward()
            nn.utils.clip_grad_norm_(models[0].parameters(), 0.01)
            optimizers[0].step()
    assert_same_bits(*(tensors(models[0]) for models, _ in trained))
    small, large = (make(torch.optim.Adagrad(nn.ParameterList([nn.Parameter(torch.zeros(1))]), lr=0.1)) for _ in "ab")
    for values in ([1, 2, 2], [2, 5, 1]):
        small(torch.tensor([values])).sum().backward()
    large(torch.tensor([[1, 2, 2], [2, 5, 1]])).sum().backward()
    for bag in (small, large):
        bag.engine.optimizer.optimizer.step()
    assert equal(weight(small), weight(large))


def test_calls_are_applied_in_the_order_of_their_forwards(device):
    bags, norms = [make(torch.optim.SGD) for _ in "ab"], []
    for bag, order in zip(bags, ([0, 1, 2], [2, 0, 1]), strict=True):
        optimizer = torch.optim.SGD(bag.parameters(), lr=1e4)  # so that weights hide no rounding of the sums
        bag.follow(optimizer)
        outputs = [bag(torch.tensor([[1, 2], [part, 1]])) for part in range(3)]
        for part in order:
            outputs[part].backward(randn(2, 4, seed=part))
        norms.append(nn.utils.clip_grad_norm_(bag.parameters(), 1e9))
        optimizer.step()
    assert equal(*norms)
    assert equal(*map(weight, bags))


def test_backward_alone_changes_nothing_and_a_step_is_taken_once(device):
    models, optimizers = pair("Adagrad")
    model, optimizer = models[0], optimizers[0]
    before = tensors(model)
    loss_of(model, 1).backward()
    assert_same_bits(tensors(model), before)
    optimizer.step()
    after = tensors(model)
    assert not equal(after[1], before[1])
    optimizer.zero_grad()
    optimizer.step()  # saw no backward
    assert_same_bits(tensors(model), after)
    assert states(optimizer)[0]["step"] == 1


@pytest.mark.parametrize("kind", KINDS)
def test_zero_grad_drops_what_was_collected(device, kind):
    models, optimizers = pair(kind)
    for model, optimizer in zip(models, optimizers, strict=True):
        loss_of(model, 1).backward()
        optimizer.zero_grad()
        loss_of(model, 2).backward()
        optimizer.step()
        loss_of(model, 3).backward()
        model.zero_grad()
    assert_equal_models(models)
    assert idle(models[0].tables)


@pytest.mark.parametrize("foreach", [False, True])
def test_zero_grad_to_zero_is_a_step_with_a_zero_gradient(device, foreach):
    models, optimizers = pair("Adagrad", foreach=foreach)
    for model, optimizer in zip(models, optimizers, strict=True):
        loss_of(model, 1).backward()
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()
    assert_equal_models(models)
    assert states(optimizers[0])[0]["step"] == states(optimizers[1])[0]["step"] == 1
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.zero_grad(set_to_none=False)
        loss_of(model, 2).backward()
        (loss_of(model, 3) * math.inf).backward()
        optimizer.zero_grad(set_to_none=False)
        loss_of(model, 4).backward()
        optimizer.step()
    assert_equal_models(models)
    assert idle(models[0].tables)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_without_a_backward_are_those_of_torch(device, kind):
    """With a zero gradient where `.grad` is there, and none where it is None. Not by torch's foreach form, its default
    on a GPU: with nesterov a step adds to `.grad` there, so that a second one is of more than zeros."""
    models, optimizers = pair(kind, **({"foreach": False} if kind in DENSE_KINDS else {}))
    for model, optimizer in zip(models, optimizers, strict=True):

        def backward(seed, model=model):
            loss_of(model, seed).backward()

        def zero(optimizer=optimizer):
            optimizer.zero_grad(set_to_none=False)

        def zero_of_model(model=model):
            model.zero_grad(set_to_none=False)

        for act in (
            (zero, optimizer.step),  # nothing is there yet
            (lambda: backward(1), optimizer.step),
            *[(zero, optimizer.step)] * 3,
            (lambda: backward(2), optimizer.step),
            (zero, lambda: backward(3), zero, optimizer.step, zero, optimizer.step, optimizer.step),
            (lambda: backward(4), lambda: backward(5), optimizer.step),
            (optimizer.zero_grad, optimizer.step, zero, optimizer.step),  # it is None
            (lambda: backward(6), model.zero_grad, optimizer.step),
            (lambda: backward(7), optimizer.step, zero_of_model, optimizer.step),
        ):
            for part in act:
                part()
    assert_equal_models(models)
    steps = [[entry.get("step") for entry in states(optimizer).values()] for optimizer in optimizers]
    assert steps[0] == steps[1]
    assert idle(models[0].tables)


def test_a_gradient_is_zeros_from_a_step_to_the_next_backward(device):
    (model, _), (optimizer, _) = pair("Adam")
    table = model.tables.engine.table_parameters[0]
    assert table.grad is None
    loss_of(model, 1).backward()
    assert table.grad.norm() > 0
    optimizer.step()
    with pytest.warns(UserWarning, match=r"read it between backward\(\) and step\(\)"):
        assert table.grad.norm() == 0
    assert nn.utils.clip_grad_norm_(model.tables.parameters(), 1.0) == 0
    loss_of(model, 2).backward()
    assert table.grad.norm() > 0
    optimizer.step()
    optimizer.zero_grad()
    assert table.grad is None


def test_what_is_written_into_a_zero_gradient_is_refused():
    (model, _), (optimizer, _) = pair("Adam")
    loss_of(model, 1).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    before = tensors(model)
    with pytest.raises(UnsupportedError, match="add_ of a table's gradient would make a gradient of every row"):
        model.tables.engine.table_parameters[1].grad.add_(1.0)
    assert_same_bits(tensors(model), before)
    optimizer.step()
    assert states(optimizer)[0]["step"] == 2


def test_a_missing_zero_grad_is_warned_of_once(device):
    models, (optimizer, _) = pair("SGD")
    model = models[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(2):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        loss_of(model, 3).backward()
        optimizer.step()
        loss_of(model, 4).backward()
        before = tensors(model)
        with pytest.raises(UserWarning, match="no zero_grad"):
            optimizer.step()
        assert_same_bits(tensors(model), before)
        optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
def test_closures_are_run_before_the_update(device, kind):
    models, optimizers = pair(kind)
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):

            def closure(model=model, optimizer=optimizer, step=step):
                optimizer.zero_grad()
                loss = loss_of(model, step)
                loss.backward()
                if kind in DENSE_KINDS:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                return loss

            loss_of(model, 77).backward()  # the closure drops it
            loss = optimizer.step(closure) if step else optimizer.step(closure=closure)
            assert loss.shape == ()
    assert_equal_models(models)


def test_the_update_comes_before_hooks_of_others(device):
    bag = make(torch.optim.SGD)
    optimizer = torch.optim.SGD(bag.parameters(), lr=0.1)

    def drop(*_):
        for param in bag.parameters():
            param.grad = None

    optimizer.register_step_post_hook(drop)
    bag.follow(optimizer)
    before = weight(bag)
    bag(torch.tensor([[1, 2]])).sum().backward()
    optimizer.step()
    assert not equal(weight(bag), before)


def test_a_step_whose_closure_leaves_what_tables_lack_changes_nothing(device):
    models, (optimizer, _) = pair("SGD")

    def closure():
        loss_of(models[0], 1).backward()
        optimizer.param_groups[0]["weight_decay"] = 0.1

    before = tensors(models[0])
    with pytest.raises(ConfigError, match="weight_decay"):
        optimizer.step(closure)
    assert_same_bits(tensors(models[0]), before)


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step == 1 else 1.0),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_schedulers_drive_the_tables(device, kind, schedule):
    models, optimizers = pair(kind)
    schedulers = [schedule(optimizer) for optimizer in optimizers]
    for step in range(4):
        train(models, optimizers, steps=1, first=step)
        for scheduler in schedulers:
            scheduler.step()
    assert_equal_models(models)


def test_one_cycle_drives_lr_and_betas(device):
    models, optimizers = pair("SparseAdam")
    for optimizer in optimizers:  # OneCycleLR cycles betas where the defaults have them
        optimizer.schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.3, total_steps=6, base_momentum=0.5, max_momentum=0.9
        )
    seen = []
    for step in range(5):
        train(models, optimizers, steps=1, first=step)
        seen.append(optimizers[0].param_groups[0]["betas"][0])
        for optimizer in optimizers:
            optimizer.schedule.step()
    assert len(set(seen)) > 2
    assert_equal_models(models)


@pytest.mark.parametrize("kind", DENSE_KINDS)
def test_lr_may_be_a_tensor(device, kind):
    models, optimizers = pair(kind)
    optimizers[0].param_groups[0]["lr"] = torch.tensor(0.05)
    optimizers[1].param_groups[0]["lr"] = torch.tensor(0.05, device="cpu")
    for optimizer in optimizers:
        optimizer.param_groups[0]["foreach"] = False
    train(models, optimizers, steps=2)
    for optimizer in optimizers:
        optimizer.param_groups[0]["lr"].fill_(0.0125)
    train(models, optimizers, steps=2, first=2)
    assert_equal_models(models)


@pytest.mark.parametrize(
    ("kind", "option", "value"),
    [("SGD", "lr", 0.01), ("Adagrad", "eps", 0.5), ("Adagrad", "lr_decay", 0.9), ("SparseAdam", "betas", (0.1, 0.2))],
)
def test_a_change_in_the_param_group_counts_from_the_next_step(device, kind, option, value):
    models, optimizers = pair(kind)
    train(models, optimizers, steps=1)
    for optimizer in optimizers:
        optimizer.param_groups[0][option] = value
    train(models, optimizers, steps=2, first=1)
    assert_equal_models(models)


@pytest.mark.parametrize(
    ("option", "value", "error", "said"),
    [
        ("momentum", 0.9, ConfigError, "built without room"),
        ("weight_decay", 0.1, ConfigError, "built without room"),
        ("nesterov", True, ConfigError, "nesterov needs a momentum"),
        ("maximize", True, UnsupportedError, "maximize=True"),
        ("lr", math.nan, ConfigError, "lr must be a finite number"),
        ("lr", -1.0, ConfigError, "lr must be a finite number"),
    ],
)
def test_an_option_that_tables_lack_stops_the_step_before_anything_changes(device, option, value, error, said):
    models, (optimizer, _) = pair("SGD")
    model = models[0]
    loss_of(model, 1).backward()
    before, group = tensors(model), optimizer.param_groups[0]
    old, group[option] = group[option], value
    with pytest.raises(error, match=said):
        optimizer.step()
    assert_same_bits(tensors(model), before)
    group[option] = old
    optimizer.step()  # nothing was lost
    assert not equal(tensors(model)[1], before[1])


def skip_what_torch_lacks(device, kind, flags):
    if device == "cuda" and flags.get("fused") and KINDS[kind][0] is torch.optim.Adagrad:
        pytest.skip("torch has no fused Adagrad on CUDA devices")
    if not flags.keys() <= inspect.signature(KINDS[kind][0]).parameters.keys():
        pytest.skip(f"torch's {kind} has no such flag")


@pytest.mark.parametrize("flags", [{"foreach": True}, {"foreach": False}, {"fused": True}])
@pytest.mark.parametrize("kind", DENSE_KINDS)
def test_flags_of_the_implementation_mean_nothing_to_tables(device, kind, flags):
    skip_what_torch_lacks(device, kind, flags)
    models, optimizers = pair(kind, **flags)
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.2)
            optimizer.step()
    assert_equal_models(models)


class Mine(torch.optim.SGD):
    """A subclass, which may do anything."""


PARAMS = [nn.Parameter(torch.zeros(3, device="cpu"))]


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (lambda: torch.optim.Rprop(PARAMS), "cannot follow Rprop.*torch.optim.Adagrad"),
        (lambda: torch.optim.Rprop, "cannot follow Rprop"),
        (lambda: Mine(PARAMS, lr=0.1), "Mine, a subclass of torch.optim.SGD"),
        (lambda: torch.optim.SGD(PARAMS, lr=0.1, maximize=True), "maximize=True"),
        (lambda: torch.optim.Adam(PARAMS, amsgrad=True), "amsgrad=True"),
        (lambda: torch.optim.AdamW(PARAMS, amsgrad=True), "amsgrad=True"),
        (lambda: torch.optim.Adagrad(PARAMS, differentiable=True), "differentiable=True"),
        (lambda: torch.optim.SparseAdam(PARAMS, maximize=True), "maximize=True"),
        (lambda: RowMeanAdagradReference(PARAMS, weight_decay=0.1), "torchrec.optim.RowWiseAdagrad has weight_decay"),
        (lambda: torch.optim.Adadelta, "Give the tables one of these.*'Optimizers' .*'If you have another optimizer'"),
    ],
)
def test_kinds_and_options_that_tables_lack_are_refused_by_name(optimizer, said):
    with pytest.raises(UnsupportedError, match=said):
        make(optimizer())


# --- loss scaling -----------------------------------------------------------------------------------------------------


def scalers(device, **keywords):
    return [torch.amp.GradScaler(each, init_scale=1024.0, growth_interval=2, **keywords) for each in (device, "cpu")]


def corrupt(model, where):
    """A hook that makes one gradient infinite: of a table alone, or of the dense part alone."""
    if where == "dense":
        return model.top.bias.register_hook(lambda grad: grad * math.inf)
    return model.tables.register_forward_hook(
        lambda module, inputs, out: (
            out.register_hook(lambda grad: grad.index_fill(1, grad.new_zeros((), dtype=torch.int64), math.inf)) and None
        )
    )


@parametrize_pairs(kind=[*KINDS], flags=[{}, {"fused": True}], where=["nowhere", "table", "dense"], clips=[False, True])
def test_an_unattached_scaler_skips_steps_of_tables_and_dense_part_alike(device, kind, flags, where, clips):
    skip_what_torch_lacks(device, kind, flags)
    if kind not in DENSE_KINDS and (where == "dense" or clips or flags):
        pytest.skip("torch.optim.SparseAdam trains tables alone, has no fused form, and sparse gradients have no norm")
    models, optimizers = pair(kind, **flags)
    both = scalers(device)
    for step in range(5):
        for model, optimizer, scaler in zip(models, optimizers, both, strict=True):
            optimizer.zero_grad()
            with contextlib.ExitStack() as hooks:
                if step == 2 and where != "nowhere":
                    handle = corrupt(model, where)
                    hooks.callback(handle.remove)
                scaler.scale(loss_of(model, step)).backward()
            if clips:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.2)
            scaler.step(optimizer)
            scaler.update()
    assert both[0].get_scale() == both[1].get_scale() == (4096.0 if where == "nowhere" else 2048.0)
    assert_equal_models(models)
    models[0].zero_grad()
    assert idle(models[0].tables)


def test_a_scaler_works_where_no_dense_parameter_is_left(device):
    bag = make(torch.optim.SGD)
    optimizer = torch.optim.SGD(bag.parameters(), lr=1.0)
    bag.follow(optimizer)
    scaler = torch.amp.GradScaler(device, init_scale=256.0)
    before = weight(bag)
    for factor in (1.0, math.inf, math.nan):
        optimizer.zero_grad()
        scaler.scale(bag(torch.tensor([[1, 2]])).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    assert equal(weight(bag)[[1, 2]], before[[1, 2]] - 1.0)
    assert scaler.get_scale() == 64.0


# --- clipping ---------------------------------------------------------------------------------------------------------


@parametrize_pairs(kind=[*DENSE_KINDS], capacity=[1, 1.0], foreach=[None, False, True])
def test_torch_clips_by_the_global_norm(device, kind, capacity, foreach):
    models, optimizers = pair(kind, capacity=capacity)
    for step in range(3):
        norms = []
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=foreach))
            assert_close(
                nn.utils.get_total_norm([p.grad for p in model.parameters()]), torch.tensor(0.1), rtol=1e-4, atol=0
            )
            optimizer.step()
        assert_close(*norms)
    assert_equal_models(models)


@pytest.mark.parametrize("norm_type", [2, 1, math.inf, 3.0, 0.5, "inf"])
def test_our_clipping_takes_any_norm(device, norm_type):
    models, optimizers = pair("SGD")
    for step in range(3):
        norms = []
        for model, optimizer in zip(models, optimizers, strict=True):
            clip = te.clip_grad_norm_ if model is models[0] else nn.utils.clip_grad_norm_
            given = model if model is models[0] and step else list(model.parameters())
            optimizer.zero_grad()
            loss_of(model, step).backward()
            norms.append(clip(given, 0.1, norm_type))
            optimizer.step()
        assert_close(*norms)
    assert_equal_models(models)


@pytest.mark.parametrize("norm_type", [2, 1])
def test_what_comes_after_a_clipping_is_added_unclipped(device, norm_type):
    models, optimizers = pair("Adagrad")
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            for part in range(3):
                loss_of(model, 10 * step + part).backward()
                if part < 2:
                    clip = te.clip_grad_norm_ if model is models[0] else nn.utils.clip_grad_norm_
                    clip(model.parameters(), 0.05, norm_type)
            optimizer.step()
    assert_equal_models(models)


def test_norms_are_those_of_the_gradient_summed_by_row(device):
    bag = te.TieredEmbedding(9, 3, padding_idx=0, capacity=2, optimizer=torch.optim.SGD)
    plain = nn.Embedding(9, 3, padding_idx=0).to("cpu")
    optimizer = torch.optim.SGD(bag.parameters(), lr=0.1)
    bag.follow(optimizer)
    (parameter,) = bag.parameters()
    for ids in ([1, 1, 0, 2], [2, 5, 0, 5]):
        upstream = torch.arange(12.0).reshape(4, 3)
        bag(torch.tensor(ids)).backward(upstream)
        plain(torch.tensor(ids, device="cpu")).backward(upstream.cpu())
        assert_close(parameter.grad.norm(), plain.weight.grad.norm())
        assert parameter.grad is parameter.grad


def test_a_norm_that_is_only_read_changes_no_bit(device):
    (one, _), (first, _) = pair("Adagrad")
    (other, _), (second, _) = pair("Adagrad")
    other.top.load_state_dict(one.top.state_dict())
    for model, optimizer in ((one, first), (other, second)):
        for step in range(3):
            optimizer.zero_grad()
            for part in range(2):
                loss_of(model, 10 * step + part).backward()
                if model is one:
                    assert all(bool(p.grad.isfinite().all()) for p in model.parameters())
            optimizer.step()
    assert_same_bits(tensors(one), tensors(other))


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("norm_type", [1, 2.0, 3.5, math.inf])
def test_torch_clips_by_any_norm(device, norm_type, foreach):
    models, optimizers = pair("Adam")
    for step in range(3):
        norms = []
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            for part in range(2):
                loss_of(model, 10 * step + part).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type, foreach=foreach))
            optimizer.step()
        assert_close(*norms)
    assert_equal_models(models)


def test_clipping_of_other_kinds_is_refused_before_anything_changes(device):
    models, (optimizer, _) = pair("SGD")
    model = models[0]
    loss_of(model, 1).backward()
    grads = [p.grad.clone() for p in model.top.parameters()]
    with pytest.raises(InvalidInputError, match="norm_type"):
        te.clip_grad_norm_(model, 0.1, norm_type=0)
    assert_same_bits([p.grad for p in model.top.parameters()], grads)
    fused = te.TieredEmbeddingBag(9, 3, optimizer=te.SGD(lr=0.1))
    with pytest.raises(ConfigError, match="updated in backward"):
        te.clip_grad_norm_(nn.Sequential(fused), 0.1)
    optimizer.zero_grad()


def test_a_norm_that_nobody_reads_is_never_computed(device, monkeypatch):
    models, (optimizer, _) = pair("Adagrad")
    monkeypatch.setattr("tieredemb.step.pending_gradients.gradient_norms", None)
    train(models[:1], [optimizer], backwards=2)
    loss_of(models[0], 1).backward()
    with pytest.raises(TypeError):
        nn.utils.clip_grad_norm_(models[0].parameters(), 0.1)


@pytest.mark.parametrize("norm_type", [1.0, 2.0])
def test_the_norms_of_all_tables_are_computed_at_once(device, monkeypatch, norm_type):
    model = pair("Adagrad")[0][0]
    counted, computed = [], pending_gradients.gradient_norms

    def count(*args):
        counted.append(args)
        return computed(*args)

    monkeypatch.setattr(pending_gradients, "gradient_norms", count)
    loss_of(model, 1).backward()
    for clip in (nn.utils.clip_grad_norm_, te.clip_grad_norm_):
        counted.clear()
        clip(model.parameters(), 0.1, norm_type)
        assert len(counted) <= (2 if norm_type == 1 else 1)  # of another order, and for what they are multiplied by


@pytest.mark.parametrize("where", ["table", "dense"])
def test_a_gradient_that_is_not_finite_is_clipped_as_in_torch(device, where):
    models, optimizers = pair("SGD")
    norms = []
    for model, optimizer in zip(models, optimizers, strict=True):
        handle = corrupt(model, where)
        loss_of(model, 1).backward()
        handle.remove()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
    assert_close(*norms)
    assert_equal_models(models, equal_nan=True)
    assert bool(tensors(models[0])[0 if where == "table" else -1].isnan().any())


def test_a_gradient_that_is_not_finite_can_be_made_an_error(device):
    models, _ = pair("SGD")
    (loss_of(models[0], 1) * math.inf).backward()
    with pytest.raises(RuntimeError, match="not finite"):
        te.clip_grad_norm_(models[0], 0.1, error_if_nonfinite=True)


@pytest.mark.parametrize("factor", [0.5, 2.0, -1.0])
def test_a_gradient_is_applied_with_its_factor(device, factor):
    bag = make()
    optimizer = torch.optim.SGD(bag.parameters(), lr=1.0)
    bag.follow(optimizer)
    (parameter,) = bag.parameters()
    before = weight(bag)
    bag(torch.tensor([[1, 2]])).sum().backward()
    parameter.grad.mul_(factor)
    optimizer.step()
    assert equal(weight(bag)[[1, 2]], before[[1, 2]] - factor)


def halved(p):
    p.grad = p.grad.clone() * 0.5


def halved_by_torch(p):
    torch._foreach_mul_([p.grad], 0.5)


def halved_through_data(p):
    p.grad.data /= torch.tensor(2.0)


def halved_by_setting_data(p):
    p.grad.data = p.grad.data / 2


def negated_twice(p):
    p.grad = p.grad.neg().neg() * torch.full((1, 1), 0.5)


@pytest.mark.parametrize("halve", [halved, halved_by_torch, halved_through_data, halved_by_setting_data, negated_twice])
def test_a_gradient_is_multiplied_by_numbers(device, halve):
    bag = make()
    optimizer = torch.optim.SGD(bag.parameters(), lr=1.0)
    bag.follow(optimizer)
    before = weight(bag)
    bag(torch.tensor([[1, 2]])).sum().backward()
    halve(bag.weight)
    halve(bag.weight)
    assert_close((bag.weight.grad**2).sum(), torch.tensor(0.5))
    optimizer.step()
    assert equal(weight(bag)[[1, 2]], before[[1, 2]] - 0.25)


def test_a_gradient_is_replaced_by_one_of_its_shape(device):
    (model, _), (optimizer, _) = pair("SGD")
    first, second, _ = model.tables.parameters()
    loss_of(model, 1).backward()
    with pytest.raises(InvalidInputError, match="can be replaced by a tensor of that shape"):
        first.grad = second.grad
    with pytest.raises(InvalidInputError, match="has that shape"):
        first.grad.copy_(torch.ones(second.shape))
    second.grad = torch.zeros(second.shape)
    assert second.grad.norm() == 0 < first.grad.norm()
    optimizer.zero_grad()
    loss_of(model, 3).backward()
    first.grad = torch.zeros_like(first.grad)
    assert first.grad.norm() == 0 < second.grad.norm()
    kept, norm = second.grad, second.grad.norm()
    optimizer.zero_grad()
    assert_close(kept.norm(), norm)
    first.grad = torch.zeros(first.shape)
    with pytest.raises(BackwardError, match="gradients of some tables of one module were set to None and others not"):
        optimizer.step()


def test_gradients_are_zeroed_one_by_one(device):
    """Of some tables of a module: their rows take a step with a gradient of zeros, as in torch."""
    models, optimizers = pair("Adam")
    train(models, optimizers, steps=1)
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.zero_grad()
        loss_of(model, 5).backward()
        next(iter(model.tables.parameters())).grad.zero_()
        loss_of(model, 6).backward()
        list(model.tables.parameters())[1].grad.mul_(0.0)
        optimizer.step()
    assert_equal_models(models)


def test_a_gradient_is_shown_by_its_norm(device):
    bag = make()
    bag.follow(torch.optim.SGD(bag.parameters(), lr=1.0))
    bag(torch.tensor([[1, 2]])).sum().backward()
    grad = bag.weight.grad
    assert repr(grad) == f"TableGradient(norm=2.828, size=(30, 4), device={str(grad.device)!r})"
    assert grad.shape == bag.weight.shape
    assert grad.dtype == torch.float32
    bag.zero_grad()
    assert repr(grad) == f"TableGradient(norm=2.828, size=(30, 4), device={str(grad.device)!r})"
    assert pickle.loads(pickle.dumps(grad)).norm() == grad.norm()


# --- state dicts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_dict_is_that_of_the_model_with_whole_tables(device, kind):
    models, optimizers = pair(kind)
    assert states(optimizers[0]).keys() == states(optimizers[1]).keys()  # before the first step, too
    train(models, optimizers)
    ours, theirs = map(states, optimizers)
    assert list(ours) == list(theirs)
    for key, entry in theirs.items():
        assert ours[key].keys() == entry.keys()
        for name, value in entry.items():
            assert_close(ours[key][name], value)
    types = [
        {name: type(value) for name, value in each.state_dict()["state"].get(0, {}).items() if name != "lagging"}
        for each in optimizers
    ]
    assert types[0] == types[1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_resumes_in_either_direction(device, kind, tmp_path):
    models, optimizers = pair(kind)
    train(models, optimizers)
    for name, model, optimizer in zip(("ours", "theirs"), models, optimizers, strict=True):
        tables = dict(zip("abc", tensors(model), strict=False))
        torch.save(
            {"tables": tables, "top": model.top.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / name
        )
    for name in ("ours", "theirs"):
        file = torch.load(tmp_path / name, map_location="cpu", weights_only=True)
        again, others = pair(kind, capacity=1, seed=9)
        again[0].tables.load_state_dict(dict(zip(again[0].tables.state_dict(), file["tables"].values(), strict=True)))
        for bag, rows in zip(again[1].tables.bags, file["tables"].values(), strict=True):
            bag.load_state_dict({"weight": rows})
        for model, optimizer in zip(again, others, strict=True):
            model.top.load_state_dict(file["top"])
            optimizer.load_state_dict(copy.deepcopy(file["optimizer"]))  # torch keeps the tensors of a dict
        went_on = [(models[0], optimizers[0])] if name == "ours" else [(models[1], optimizers[1])]
        kept = copy.deepcopy(went_on[0][0].state_dict()), copy.deepcopy(went_on[0][1].state_dict())
        train(again, others, steps=2, first=7)
        train([went_on[0][0]], [went_on[0][1]], steps=2, first=7)
        for ours, theirs, wanted in zip(*map(tensors, (*again, went_on[0][0])), strict=True):
            assert_close(ours, wanted)
            assert_close(theirs, wanted)
            if name == "ours":
                assert equal(ours, wanted)
        went_on[0][0].load_state_dict(kept[0])
        went_on[0][1].load_state_dict(kept[1])


def test_a_state_dict_that_does_not_fit_changes_nothing(device):
    models, (optimizer, _) = pair("Adagrad")
    train(models[:1], [optimizer], steps=2)
    before, good = states(optimizer), optimizer.state_dict()
    for change, error, said in (
        (lambda bad: bad["state"][1].update(sum=torch.zeros(2, 2)), InvalidInputError, "'sum' of table"),
        (lambda bad: bad["param_groups"][0].update(weight_decay=0.5), ConfigError, "built without room"),
        (lambda bad: bad["param_groups"][0]["params"].pop(0), ValueError, "doesn't match the size"),
    ):
        bad = copy.deepcopy(good)
        change(bad)
        with pytest.raises(error, match=said):
            optimizer.load_state_dict(bad)
        for key, entry in states(optimizer).items():
            assert all(equal(entry[name], value) for name, value in before[key].items())


def test_a_table_too_large_for_a_state_dict_names_the_way_through_checkpoints(monkeypatch, tmp_path):
    models, (optimizer, _) = pair("Adagrad")
    model = models[0]
    train([model], [optimizer], steps=2)
    monkeypatch.setattr("tieredemb.tables.table_set.available_memory_bytes", lambda: 10)
    with pytest.raises(te.errors.StorageFullError, match="save_checkpoint"):
        optimizer.state_dict()
    model.tables.follow(optimizer, in_state_dict=False)
    saved = optimizer.state_dict()
    assert set(saved["state"]) == {3, 4}  # the dense layer's
    model.tables.save_checkpoint(tmp_path / "tables")
    monkeypatch.undo()
    again, (other, _) = pair("Adagrad", capacity=1)
    again[0].tables.follow(other, in_state_dict=False)
    again[0].top.load_state_dict(model.top.state_dict())
    again[0].tables.load_checkpoint(tmp_path / "tables")
    other.load_state_dict(copy.deepcopy(saved))
    train([model], [optimizer], steps=2, first=5)
    train(again[:1], [other], steps=2, first=5)
    assert_same_bits(tensors(model), tensors(again[0]))


def test_checkpoints_go_between_following_and_fused_modules(device, tmp_path):
    following, fused = make(torch.optim.Adagrad), make(te.Adagrad())
    optimizer = torch.optim.Adagrad(following.parameters(), lr=0.3)
    following.follow(optimizer)
    following(torch.tensor([[1, 2]])).sum().backward()
    optimizer.step()
    following.save_checkpoint(tmp_path / "a", extra={"epoch": 1})
    assert fused.load_checkpoint(tmp_path / "a") == {"epoch": 1}
    assert fused.fused_optimizer.param_groups[0]["lr"] == 0.3
    optimizer.zero_grad()
    following(torch.tensor([[1, 5]])).sum().backward()
    fused(torch.tensor([[1, 5]])).sum().backward()
    optimizer.step()
    assert equal(weight(following), weight(fused))
    fused.fused_optimizer.param_groups[0]["lr"] = 0.7
    fused.save_checkpoint(tmp_path / "b")
    following.load_checkpoint(tmp_path / "b")
    assert optimizer.param_groups[0]["lr"] == 0.3  # the torch optimizer's to save and load


# --- who follows whom -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["class", "optimizer first", "tables first"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_optimizer_may_be_built_before_or_after_the_tables(device, kind, order):
    torch_class, options = KINDS[kind]
    if kind == "Adagrad":
        options = options | {"initial_accumulator_value": 0.2}
    plain = nn.EmbeddingBag(30, 4, mode="sum", sparse=kind not in DENSE_KINDS).to("cpu")
    dense = nn.Parameter(torch.zeros(2))
    if order == "class":
        bag = make(torch_class)
        optimizer = torch_class(bag.parameters(), **options)
        bag.follow(optimizer)
    elif order == "optimizer first":
        optimizer = torch_class([dense], **options)
        bag = make(optimizer)
    else:
        bag = make(None)
        bag(torch.tensor([[1, 2]]))  # rows that were written keep their weights
        optimizer = torch_class([dense], **options)
        bag.follow(optimizer)
    plain.load_state_dict(bag.state_dict())
    reference = torch_class(plain.parameters(), **options)
    for step in range(3):
        for model, its in ((bag, optimizer), (plain, reference)):
            its.zero_grad()
            where = None if model is bag else "cpu"
            model(torch.tensor([[1, 2], [step, 3]], device=where)).square().sum().backward()
            its.step()
    assert_close(weight(bag), plain.weight.detach())


def test_tables_laid_out_anew_keep_rows_and_scores(device):
    bag, twin = make(None), make(None)
    for ids in ([[1, 2]], [[2, 3]], [[4, 5]]):
        bag(torch.tensor(ids))
    before = weight(bag)
    bag.follow(torch.optim.Adagrad([nn.Parameter(torch.zeros(1))], initial_accumulator_value=0.5))
    assert equal(weight(bag), before)
    assert equal(before, weight(twin))
    assert bag.stats().lookups == 6
    assert all(bool((rows == 0.5).all()) for _, rows in bag.tables.state_parts(0))


def test_layouts_that_cannot_change_are_refused(tmp_path):
    bag = te.TieredEmbeddingBag(9, 4, capacity=3, storage=te.File(tmp_path / "rows"))
    with pytest.raises(ConfigError, match=r"file tier.*constructor"):
        bag.follow(torch.optim.SparseAdam([nn.Parameter(torch.zeros(1))]))
    other = te.TieredEmbeddingBag(
        9, 4, capacity=3, storage=te.File(tmp_path / "more"), optimizer=torch.optim.SparseAdam
    )
    other.follow(torch.optim.SparseAdam(other.parameters()))


def test_each_of_several_optimizers_steps_its_own_tables(device):
    bags = [make(torch.optim.Adagrad), make(torch.optim.SGD)]
    kinds = [torch.optim.Adagrad, torch.optim.SGD]
    optimizers = [kind(bag.parameters(), lr=0.1) for kind, bag in zip(kinds, bags, strict=True)]
    for bag, optimizer in zip(bags, optimizers, strict=True):
        bag.follow(optimizer)
    before = [weight(bag) for bag in bags]
    (bags[0](torch.tensor([[1, 2]])).sum() * bags[1](torch.tensor([[1, 2]])).sum()).backward()
    optimizers[1].step()
    assert equal(weight(bags[0]), before[0])
    assert not equal(weight(bags[1]), before[1])
    optimizers[0].step()
    assert not equal(weight(bags[0]), before[0])


def test_one_optimizer_steps_the_tables_of_several_modules(device):
    bags = [make(torch.optim.SGD, rows=rows) for rows in (5, 9)]
    plain = [nn.EmbeddingBag(rows, 4, mode="sum").to("cpu") for rows in (5, 9)]
    for bag, whole in zip(bags, plain, strict=True):
        whole.load_state_dict(bag.state_dict())
    optimizer = torch.optim.SGD(nn.ModuleList(bags).parameters(), lr=0.1)
    reference = torch.optim.SGD(nn.ModuleList(plain).parameters(), lr=0.1)
    for bag in bags:
        bag.follow(optimizer)
    for models, its, where in ((bags, optimizer, None), (plain, reference, "cpu")):
        ids = torch.tensor([[1, 2]], device=where)
        (models[0](ids).sum() * models[1](ids).sum()).backward()
        nn.utils.clip_grad_norm_([p for model in models for p in model.parameters()], 0.5)
        its.step()
    for bag, whole in zip(bags, plain, strict=True):
        assert_close(weight(bag), whole.weight.detach())


@pytest.mark.parametrize("kind", KINDS)
def test_another_optimizer_may_be_followed_and_starts_anew(device, kind):
    models, optimizers = pair(kind)
    train(models, optimizers)
    torch_class, options = KINDS[kind]
    others = [torch_class(model.parameters(), **options) for model in models]
    loss_of(models[0], 1).backward()
    with pytest.raises(StorageError, match="zero_grad"):
        models[0].tables.follow(others[0])
    optimizers[0].zero_grad()
    models[0].tables.follow(others[0])
    train(models, others, first=4)
    assert_equal_models(models)
    assert not any(isinstance(each, TableParameter) for each in optimizers[0].param_groups[0]["params"])
    optimizers[0].zero_grad()
    optimizers[0].step()
    models[0].tables.follow(others[0])  # again
    another = torch.optim.SparseAdam if kind == "SGD" else torch.optim.SGD
    with pytest.raises(ConfigError, match="build new tables"):
        models[0].tables.follow(another(models[0].tables.parameters(), lr=0.1))
    train(models, others, first=8)
    assert_equal_models(models)


def test_several_param_groups_need_a_choice(device):
    dense = [nn.Parameter(torch.zeros(2)) for _ in "ab"]
    optimizer = torch.optim.SGD([{"params": dense[:1], "lr": 1.0}, {"params": dense[1:], "lr": 0.5}], lr=0.1)
    with pytest.raises(ConfigError, match=r"2 param groups.*the class.*follow"):
        make(optimizer)
    for number, choice in ((0, optimizer.param_groups[0]), (1, 1)):
        bag = make(torch.optim.SGD)
        with pytest.raises(ConfigError, match=r"2 param groups.*group="):
            bag.follow(optimizer)
        for wrong in (2, -1, True, {"params": []}, "first"):
            with pytest.raises(ConfigError, match="group"):
                bag.follow(optimizer, group=wrong)
        bag.follow(optimizer, group=choice)
        assert any(each is bag.engine.table_parameters[0] for each in optimizer.param_groups[number]["params"])
        before = weight(bag)
        bag(torch.tensor([[3]])).sum().backward()
        optimizer.step()
        assert_close(weight(bag)[3], before[3] - (1.0, 0.5)[number])
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", KINDS)
def test_tables_take_the_places_and_the_state_of_old_params(device, kind):
    (ours, theirs), (_, old) = pair(kind)
    train([theirs], [old], steps=2)
    twin, reference = copy.deepcopy(theirs), copy.deepcopy(old.state_dict())
    tables = te.TieredEmbeddingBagCollection(
        ours.tables.table_configs, capacity=3, optimizer=KINDS[kind][0], device="cpu"
    )
    tables.load_state_dict(dict(zip(tables.state_dict(), tensors(theirs), strict=False)))
    weights, before = [bag.weight for bag in theirs.tables.bags], states(old)
    tables.follow(old, instead_of=weights)
    assert not any(param is each for group in old.param_groups for param in group["params"] for each in weights)
    assert list(states(old)) == list(before)
    for key, entry in states(old).items():
        totals = [(entry.pop(name), before[key].pop(name)) for name in ("mu_product",) if name in entry]
        assert all(equal(entry[name], value) for name, value in before[key].items())
        for ours, value in totals:  # a product that each rounds in its own way
            torch.testing.assert_close(ours, value)
    theirs.tables = tables
    other = KINDS[kind][0](twin.parameters(), **KINDS[kind][1])
    other.load_state_dict(reference)
    train([theirs, twin], [old, other], steps=2, first=5)
    assert_equal_models([theirs, twin])


def test_instead_of_is_checked_before_anything_changes():
    plain = nn.EmbeddingBag(30, 4)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    bag = make(torch.optim.SGD)
    for wrong, said in (
        ([], "0 params for 1 tables"),
        ([nn.Parameter(torch.zeros(3, 4))], r"shape \(3, 4\)"),
        ([nn.Parameter(torch.zeros(30, 4))], "does not have"),
    ):
        with pytest.raises(ConfigError, match=said):
            bag.follow(optimizer, instead_of=wrong)
    assert optimizer.param_groups[0]["params"] == [plain.weight]
    bag.follow(optimizer, instead_of=[plain.weight])
    with pytest.raises(ConfigError, match="leave instead_of out"):
        bag.follow(optimizer, instead_of=[plain.weight])


def test_optimizers_with_named_params_stay_whole():
    dense = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(dense.named_parameters(), lr=0.1)
    make(optimizer)
    group = optimizer.param_groups[0]
    assert len(group["param_names"]) == len(group["params"]) == 3


def test_what_cannot_be_followed_is_refused():
    fused = make(te.SGD(lr=0.1))
    with pytest.raises(ConfigError, match="updated in backward, by SGD"):
        fused.follow(torch.optim.SGD(PARAMS, lr=0.1))
    bag = make(torch.optim.SGD)
    with pytest.raises(ConfigError, match=r"torch.optim.Optimizer, got"):
        bag.follow(te.SGD(lr=0.1))
    with pytest.raises(ConfigError, match="is to follow a torch optimizer"):
        bag.fused_optimizer  # noqa: B018
    with pytest.raises(
        BackwardError, match=r"table 'weight', which is to follow.*tieredemb.follow\(model, optimizer\)"
    ):
        bag(torch.tensor([[1]])).sum().backward()
    optimizer = torch.optim.SGD(bag.parameters(), lr=0.1)
    bag.follow(optimizer)
    with pytest.raises(ConfigError, match=r"follows a torch.optim.SGD"):
        bag.fused_optimizer  # noqa: B018
    optimizer.param_groups[0]["params"].clear()
    bag(torch.tensor([[1]])).sum().backward()
    with pytest.raises(ConfigError, match="no longer in one param group"):
        optimizer.step()


# --- tables as parameters ---------------------------------------------------------------------------------------------


def test_tables_are_parameters_with_the_names_of_a_state_dict(device):
    bag = make(torch.optim.SGD)
    model = nn.Sequential(bag, nn.Linear(4, 1))
    assert isinstance(bag, nn.Module)
    assert [type(each) for each in bag.parameters()] == [TableParameter]
    assert all(isinstance(each, nn.Parameter) and each.is_leaf and each.requires_grad for each in model.parameters())
    assert [tuple(each.shape) for each in model.parameters()] == [(30, 4), (1, 4), (1,)]
    assert list(model.state_dict()) == ["0.weight", "1.weight", "1.bias"]
    assert model.load_state_dict(model.state_dict()).missing_keys == []
    assert model.load_state_dict(dict(model.named_parameters())).missing_keys == []
    assert list(make(te.SGD(lr=0.1)).parameters()) == list(make(None).parameters()) == []
    assert bag.weight is next(bag.parameters())
    for each in (model, pickle.loads(pickle.dumps(model)), copy.deepcopy(model), pair("SGD")[0][0]):
        assert [name for name, _ in each.named_parameters()] == list(each.state_dict())


def test_a_parameter_that_was_replaced_is_refused(device):
    model, _ = follower()
    named = dict(model.named_parameters())
    torch.func.functional_call(model, named, torch.tensor([[1, 2]]))
    moved = {name: each.detach() + 1.0 for name, each in named.items()}
    with pytest.raises(UnsupportedError, match=r"parameter 'weight' of a tiered module was replaced"):
        torch.func.functional_call(model, moved, torch.tensor([[1, 2]]))
    del moved["0.weight"]
    torch.func.functional_call(model, moved, torch.tensor([[1, 2]]))


def test_parameters_that_are_picked_by_their_names_are_those_of_torchs_modules(device):
    """As models pick what they regularise, and scripts what decays."""
    model, _ = follower()
    model.train()
    plain = nn.Sequential(nn.EmbeddingBag(10, 4, mode="sum"), nn.Linear(4, 1))
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]


def test_hooks_of_a_step_see_gradients_whenever_they_came(device):
    """Before the tables followed, or after: in both they change what the step applies."""
    rows = []
    for late in (False, True):
        bag = make()
        optimizer = torch.optim.SGD(bag.parameters(), lr=1.0)

        def halve(*_, bag=bag):
            assert nn.utils.clip_grad_norm_(bag.parameters(), 1e9) > 0
            bag.weight.grad.mul_(0.5)

        if not late:
            optimizer.register_step_pre_hook(halve)
        bag.follow(optimizer)
        if late:
            optimizer.register_step_pre_hook(halve)
        before = weight(bag)
        bag(torch.tensor([[1, 2]])).sum().backward()
        optimizer.step()
        rows.append((before - weight(bag))[[1, 2]])
    assert equal(*rows)
    assert_close(rows[0], torch.full((2, 4), 0.5))


def test_a_global_hook_of_a_step_sees_gradients(device):
    bag = make()
    optimizer = torch.optim.SGD(bag.parameters(), lr=1.0)
    bag.follow(optimizer)

    def halve(*_):
        nn.utils.clip_grad_value_(bag.parameters(), 0.5)

    before, seen = weight(bag), []
    bag(torch.tensor([[1, 2]])).sum().backward()
    handles = [register_optimizer_step_pre_hook(halve)]
    handles.append(register_optimizer_step_post_hook(lambda *_: seen.append(bag.weight.grad)))
    try:
        optimizer.step()
    finally:
        for each in handles:
            each.remove()
    assert equal((before - weight(bag))[[1, 2]], torch.full((2, 4), 0.5))
    assert seen[0] is not None


def test_a_step_that_fails_gives_gradients_back(device):
    model, optimizer = follower()
    before = weight(model[0])
    model(torch.tensor([[1, 2]])).sum().backward()
    kept = model[1].weight.grad
    model[1].weight.grad = torch.ones(kept.shape).to_sparse()
    for _ in range(2):
        try:
            optimizer.step()
        except RuntimeError:
            assert model[0].weight.grad.norm() > 0
        with torch.no_grad():
            assert model[0].weight.grad.norm() > 0
    assert equal(weight(model[0]), before)
    model[1].weight.grad = kept
    optimizer.step()
    assert not equal(weight(model[0]), before)


def test_a_copy_of_an_optimizer_without_the_state_of_tables_is_told(device):
    (model, _), (optimizer, _) = pair("Adam")
    train([model], [optimizer], steps=2)
    saved = copy.deepcopy(optimizer.state_dict())
    lost = copy.deepcopy(optimizer).state_dict()
    with pytest.warns(UserWarning, match=r"none of 't0', 't1', 't2', whose state begins anew"):
        optimizer.load_state_dict(lost)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.load_state_dict(saved)
        optimizer.load_state_dict({**saved, "state": {}})


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "SGD nesterov"])  # torch's Adagrad fails without its state
@pytest.mark.parametrize("empties", [lambda o: o.state.clear(), lambda o: setattr(o, "state", defaultdict(dict))])
def test_where_an_optimizers_state_is_emptied_that_of_tables_is(device, kind, empties):
    """To train a next fold with the same optimizer."""
    models, optimizers = pair(kind)
    train(models, optimizers)
    for model, optimizer in zip(models, optimizers, strict=True):
        empties(optimizer)
        optimizer.zero_grad()
        loss_of(model, 7).backward()
        told = pytest.warns(UserWarning, match="begins anew, too: 't0', 't1', 't2'")
        with told if model is models[0] else contextlib.nullcontext():
            optimizer.step()
    train(models, optimizers, first=9)
    assert_equal_models(models)
    ours, theirs = map(states, optimizers)
    assert [entry["step"] for entry in ours.values() if "step" in entry] == [
        entry["step"] for entry in theirs.values() if "step" in entry
    ]
    optimizers[0].load_state_dict(copy.deepcopy(optimizers[1].state_dict()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(models, optimizers, first=20)
    assert_equal_models(models)


def test_views_and_what_is_detached_freeze_no_table(device):
    model, _ = follower()
    parameter = model[0].weight
    for each in (parameter.detach(), parameter.data, parameter.detach()[3]):
        each.requires_grad_(False)
        each.requires_grad = False
        assert parameter.requires_grad
        assert not each.requires_grad
        assert each.is_leaf
        assert each.grad is None
        with pytest.raises(UnsupportedError, match=r"weight\.detach\(\)\.clone\(\)"):
            each.requires_grad_()
    parameter.requires_grad_(False)
    nn.Embedding.from_pretrained(parameter.data)
    with pytest.raises(UnsupportedError, match="records no gradients of its own"):
        nn.Parameter(parameter.data)
    assert not parameter.requires_grad


def test_a_parameter_is_read_in_inference_mode(device):
    model, _ = follower()
    parameter = model[0].weight
    with torch.inference_mode():
        row, flat = parameter[3], parameter.view(-1)
        assert equal(row + 0, parameter.detach()[3].clone())
        assert repr(parameter).startswith("TableTensor(")
        assert float(flat[12]) == float(row[0])


def test_a_parameter_is_as_other_tensors_are(device):
    model, _ = follower()
    parameter = model[0].weight
    assert parameter.data.new(parameter.size()).shape == parameter.shape
    assert parameter.is_same_size(parameter.detach())
    assert torch.full_like(parameter, 3, dtype=torch.int64).dtype == torch.int64
    copy.copy(parameter).zero_()
    assert not weight(model[0]).any()
    with pytest.raises(UnsupportedError, match=r"parameter 'weight_orig' .*prune"):
        nn.utils.prune.l1_unstructured(model[0], "weight", 0.5)
    assert [name for name, _ in model.named_parameters()] == ["0.weight", "1.weight", "1.bias"]
    torch.utils.swap_tensors(parameter, nn.Parameter(torch.zeros(30, 4)))
    with pytest.raises(UnsupportedError, match="parameter 'weight' of a tiered module was replaced"):
        model(torch.tensor([[1, 2]]))


@pytest.mark.parametrize("optimizer", [None, torch.optim.Adam])
def test_tables_go_with_their_module(device, optimizer):
    """And not when garbage is collected, in a loop that builds one model after another."""
    bag = make(optimizer)
    if optimizer is not None:
        its = optimizer(bag.parameters(), lr=0.1)
        bag.follow(its)
    gone = weakref.ref(bag.tables)
    gc.collect()
    gc.disable()
    try:
        del bag
        assert gone() is None
    finally:
        gc.enable()


def follower():
    """A model of one table that follows the optimizer beside it."""
    bag = make(torch.optim.Adam)
    model = nn.Sequential(bag, nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    bag.follow(optimizer)
    return model, optimizer


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop])
def test_another_optimizer_over_the_tables_is_refused_at_its_step(device, kind):
    model, _ = follower()
    other = kind(model.parameters(), lr=0.1)
    before = weight(model[0])
    model(torch.tensor([[1, 2]])).sum().backward()
    with pytest.raises(UnsupportedError, match=r"another one, a Adam.*tieredemb.follow\(model, optimizer\)"):
        other.step()
    assert equal(weight(model[0]), before)
    if kind is torch.optim.Adam:
        other.zero_grad()
        model[0].follow(other)
        model(torch.tensor([[1, 2]])).sum().backward()
        other.step()
        assert not equal(weight(model[0]), before)


def plain_twin(model):
    """The same with a whole table."""
    twin = nn.Sequential(nn.EmbeddingBag(30, 4, mode="sum"), nn.Linear(4, 1)).to("cpu")
    twin.load_state_dict(model.state_dict())
    return twin, torch.optim.Adam(twin.parameters(), lr=0.1)


def stepped(model, optimizer, ids):
    optimizer.zero_grad()
    model(torch.tensor(ids, device=model[1].weight.device)).square().sum().backward()
    optimizer.step()


def averaged_by_torch(model, step):
    averaged = torch.optim.swa_utils.AveragedModel(model)
    for _ in range(3):
        step()
        averaged.update_parameters(model)
    return averaged.module


def averaged_with_buffers(model, step):
    ema = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    averaged = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=ema, use_buffers=True)
    for _ in range(3):
        step()
        averaged.update_parameters(model)
    return averaged.module


def averaged_by_lerp(model, step):
    averaged = copy.deepcopy(model)
    for _ in range(3):
        step()
        with torch.no_grad():
            for into, each in zip(averaged.parameters(), model.parameters(), strict=True):
                into.lerp_(each, 0.1)
    return averaged


def averaged_by_foreach(model, step):
    averaged = copy.deepcopy(model)
    step()
    with torch.no_grad():
        torch._foreach_lerp_([*averaged.parameters()], [*model.parameters()], 0.5)
    return averaged


def averaged_by_data(model, step):
    other = copy.deepcopy(model)
    step()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        p.data = (p.detach() + q.detach()) / 2
    return model


def shadowed(model, step):
    """The class for averages that is copied most: by name, put into the model to evaluate it, and taken out again."""
    shadow = {name: p.data.clone() for name, p in model.named_parameters() if p.requires_grad}
    for _ in range(3):
        step()
        for name, p in model.named_parameters():
            shadow[name] = 0.9 * shadow[name] + 0.1 * p.data
    kept = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        p.data = shadow[name]
    evaluated = copy.deepcopy(model)
    for name, p in model.named_parameters():
        p.data = kept[name]
    step()
    return nn.ModuleList([evaluated, model])


def kept_as_a_list(model, step):
    best = copy.deepcopy(list(model.parameters()))
    step()
    with torch.no_grad():
        for p, b in zip(model.parameters(), best, strict=True):
            p.copy_(b)
    return model


def kept_as_a_vector(model, step):
    best = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    step()
    nn.utils.vector_to_parameters(best, model.parameters())
    return model


def pickled_parameters(model, step):
    best = pickle.loads(pickle.dumps([*model.parameters()]))
    assert all(type(each) is nn.Parameter for each in best)
    step()
    for p, b in zip(model.parameters(), best, strict=True):
        p.data.copy_(b)
    return model


def begun_again(model, step):
    step()
    for p in model.parameters():
        if p.dim() > 1:
            torch.manual_seed(5)
            nn.init.xavier_uniform_(p)
    step()
    return model


def clamped(model, step):
    for _ in range(2):
        step()
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.5, 0.5)
            torch._foreach_mul_([*model.parameters()], 0.9)
    return model


def normalised(model, step):
    """As models of knowledge graphs do after each step."""
    for _ in range(3):
        step()
        model[0].weight.data = nn.functional.normalize(model[0].weight.data, dim=-1)
    return model


WRITES = (
    averaged_by_torch, averaged_with_buffers, averaged_by_lerp, averaged_by_foreach, averaged_by_data, shadowed,
    kept_as_a_list, kept_as_a_vector, pickled_parameters, begun_again, clamped, normalised,
)  # fmt: skip


@pytest.mark.parametrize("write", WRITES)
def test_what_is_written_to_parameters_reaches_the_rows(device, write):
    model, optimizer = follower()
    twin, its = plain_twin(model)
    written = []
    if device == "cuda" and write is begun_again:
        pytest.skip("a GPU's generator draws other numbers than that of the CPU")
    for each, steps in ((model, optimizer), (twin, its)):
        stepped(each, steps, [[3, 4]])
        ids = iter([[[1, 2]], [[2, 29]], [[7, 7]], [[0, 1]]])
        written.append(write(each, lambda each=each, steps=steps, ids=ids: stepped(each, steps, next(ids))))
    for ours, theirs in zip(*(each.state_dict().values() for each in written), strict=True):
        assert_close(ours, theirs)
    for each, steps in ((model, optimizer), (twin, its)):  # they train on from there
        stepped(each, steps, [[5, 1]])
    for ours, theirs in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert_close(ours, theirs)


@pytest.mark.parametrize("which", [0, 3, 4])
def test_each_of_many_tables_is_looked_at(device, which):
    tables = [te.TableConfig(name=f"t{t}", num_embeddings=9, embedding_dim=4) for t in range(5)]
    model = te.TieredEmbeddingBagCollection(tables, capacity=1.0, optimizer=torch.optim.SGD)
    model.follow(torch.optim.SGD(model.parameters(), lr=0.1))
    given = torch.ones(len(tables), dtype=torch.int64), torch.arange(len(tables) + 1)
    parameter = list(model.parameters())[which]
    assert model(*given).requires_grad
    parameter.requires_grad = False
    with pytest.raises(UnsupportedError, match=r"1 of the 5 tables of one module are frozen"):
        model(*given)
    for each in model.parameters():
        each.requires_grad = False
    assert not model(*given).requires_grad
    for each in model.parameters():
        each.requires_grad = True
    assert model(*given).requires_grad
    with torch.no_grad():
        parameter.fill_(2.0)
    assert model(*given).sum(0).reshape(5, 4)[which].tolist() == [2.0] * 4
    name = list(model._parameters)[which]
    model._parameters[name] = nn.Parameter(torch.ones(9, 4))  # as functional_call() does it
    with pytest.raises(UnsupportedError, match=f"parameter '{re.escape(name)}' of a tiered module was replaced"):
        model(*given)


def test_zero_grad_of_another_optimizer_drops_the_gradients_of_its_own_params_alone(device):
    tables = [te.TableConfig(name=name, num_embeddings=9, embedding_dim=4) for name in "ab"]
    model = te.TieredEmbeddingBagCollection(tables, capacity=1.0, optimizer=torch.optim.SGD)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.follow(optimizer)
    other = torch.optim.SGD([next(model.parameters())], lr=0.1)
    model(torch.tensor([1, 2]), torch.tensor([0, 1, 2])).sum().backward()
    other.zero_grad()
    first, second = model.parameters()
    assert first.grad is None
    assert second.grad is not None
    with pytest.raises(BackwardError, match="set to None and others not"):
        optimizer.step()
    optimizer.zero_grad()
    assert first.grad is second.grad is None
    optimizer.step()  # of no table


def test_copies_of_copies_are_looked_up_as_they_are(device):
    copied, _ = follower()
    ids = torch.tensor([[1, 2]])
    with torch.no_grad():
        expected = copied(ids)
        for _ in range(9):
            copied = pickle.loads(pickle.dumps(copy.deepcopy(copied)))
            assert_same_bits([copied(ids)], [expected])


def test_a_parameter_moves_with_its_tables(device):
    model, optimizer = follower()
    parameter = model[0].weight
    model.load_state_dict(copy.deepcopy(model).state_dict())
    for where in ("cpu", device):
        model.to(where)
        for state in optimizer.state.values():  # as user code moves it, which torch does not
            state.update({name: each.to(where) for name, each in state.items() if name != "step"})
        assert model[0].weight is parameter is optimizer.param_groups[0]["params"][0]
        assert parameter.device.type == where
        before = weight(model[0])
        stepped(model, optimizer, [[1, 2]])
        assert not equal(weight(model[0]), before)
    model.float()


def test_a_parameter_of_what_is_gone_says_so():
    model, _ = follower()
    parameter = model[0].weight
    del model
    gc.collect()
    assert parameter.shape == (30, 4)
    assert repr(parameter) == "TableTensor(<StorageError>, size=(30, 4), dtype=torch.float32)"
    with pytest.raises(StorageError, match="tables of this parameter are gone"):
        parameter.detach().clone()


def test_gradients_are_zeroed_by_hand(device):
    models, optimizers = pair("Adagrad")
    for step in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            for each in model.parameters():
                if each.grad is not None:
                    each.grad.detach_()
                    each.grad.zero_()
            loss_of(model, step).backward()
            if step % 2:
                optimizer.step()
    assert_equal_models(models)


def test_parameters_made_in_inference_mode_may_be_trained(device):
    with torch.inference_mode():
        bag = make(torch.optim.SGD)
    optimizer = torch.optim.SGD(bag.parameters(), lr=0.1)
    bag.follow(optimizer)
    (0.0 * next(bag.parameters()).square().sum() + bag(torch.tensor([[1]])).sum()).backward()
    optimizer.step()


def test_freezing_a_model_freezes_its_following_tables(device):
    bag = make(torch.optim.SGD)
    model = nn.Sequential(bag, nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bag.follow(optimizer)
    model.requires_grad_(False)
    assert not bag.is_trainable
    assert not model(torch.tensor([[1]])).requires_grad
    model.requires_grad_(True)
    assert bag.is_trainable
    bag.requires_grad_(False)
    assert not bag.is_trainable
    model.requires_grad_(True)
    assert bag.is_trainable
    late = make(None).requires_grad_(False)
    late.follow(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))
    assert not late.is_trainable
    assert late.requires_grad_(True).is_trainable
    before = weight(bag)
    model(torch.tensor([[1]])).sum().backward()
    optimizer.step()
    assert not equal(weight(bag), before)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_follows_nobody_until_it_is_told_to(device, copied):
    models, (optimizer, _) = pair("Adagrad")
    train(models[:1], [optimizer], steps=2)
    twin = copied(models[0])
    assert [type(each) for each in twin.tables.parameters()] == [TableParameter] * 3
    with pytest.raises(BackwardError, match="none has it among its params"):
        loss_of(twin, 1).backward()
    other = torch.optim.Adagrad(twin.parameters(), lr=0.1, lr_decay=0.01)
    twin.tables.follow(other)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train([models[0], twin], [optimizer, other], steps=2, first=4)
    assert_same_bits(tensors(models[0]), tensors(twin))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
@pytest.mark.parametrize("order", [1, -1])
def test_a_model_and_its_optimizer_copied_together_belong_together(device, order, copied):
    models, (optimizer, _) = pair("Adagrad")
    train(models[:1], [optimizer], steps=2)
    twin, other = copied((models[0], optimizer)[::order])[::order]
    assert [type(each) for each in other.param_groups[0]["params"][:3]] == [TableParameter] * 3
    twin.tables.follow(other)
    train([models[0], twin], [optimizer, other], steps=2, first=4)
    assert_same_bits(tensors(models[0]), tensors(twin))


def test_calls_that_move_rows_are_refused_while_gradients_wait(device, tmp_path):
    bag = make(torch.optim.SGD)
    optimizer = torch.optim.SGD(bag.parameters(), lr=1.0)
    bag.follow(optimizer)
    bag.save_checkpoint(tmp_path / "a")
    before = weight(bag)
    bag(torch.tensor([[1, 2]])).sum().backward()
    for call in (
        lambda: bag.load_checkpoint(tmp_path / "a"),
        lambda: copy.deepcopy(bag),
        lambda: pickle.dumps(bag),
    ):
        with pytest.raises(StorageError, match=r"step\(\) or zero_grad\(\)"):
            call()
    bag.save_checkpoint(tmp_path / "b")  # without what waits
    bag.float()
    bag.flush()
    bag.load_state_dict({"weight": before + 1})  # as torch: the gradient counts for the new weights
    optimizer.step()
    assert_close(weight(bag)[[1, 2]], before[[1, 2]])
    bag.load_checkpoint(tmp_path / "b")
    assert equal(weight(bag), before)


def test_a_module_may_be_closed_or_dropped_while_gradients_wait(device):
    bag = make(torch.optim.SGD)
    optimizer = torch.optim.SGD([*bag.parameters(), nn.Parameter(torch.zeros(1))], lr=1.0)
    bag.follow(optimizer)
    bag(torch.tensor([[1, 2]])).sum().backward()
    bag.close()
    assert next(bag.parameters()).grad is None
    optimizer.step()
    other = make(torch.optim.SGD)
    other.engine.follow(torch.optim.SGD(other.parameters(), lr=1.0))
    other(torch.tensor([[1, 2]])).sum().backward()
    gone = weakref.ref(other.tables)
    table_parameters, kept = list(other.parameters()), other.engine.optimizer.optimizer
    del other
    gc.collect()
    assert gone() is None
    assert table_parameters[0].grad is None
    kept.step()
    kept.load_state_dict(kept.state_dict())


def test_the_gradients_of_some_tables_of_a_module_cannot_be_dropped_alone(device):
    models, (optimizer, _) = pair("SGD")
    tables = models[0].tables
    loss_of(models[0], 1).backward()
    next(tables.parameters()).grad = None
    before = tensors(models[0])
    with pytest.raises(BackwardError, match="step together"):
        optimizer.step()
    assert_same_bits(tensors(models[0]), before)
    optimizer.zero_grad()
    assert idle(tables)


def test_accumulate_and_the_step_that_follows_are_one_update(device):
    models, optimizers = pair("Adagrad")
    for model, optimizer in zip(models, optimizers, strict=True):
        with model.tables.accumulate() if model is models[0] else contextlib.nullcontext():
            for part in range(3):
                loss_of(model, part).backward()
        optimizer.step()
    assert_equal_models(models)


def test_a_step_that_an_interrupt_ends_before_the_update_may_be_taken_again(device, monkeypatch):
    models, (optimizer, _) = pair("SGD")
    loss_of(models[0], 1).backward()
    before = tensors(models[0])[:3]

    def interrupt(*args, **keywords):
        raise KeyboardInterrupt

    handle = optimizer.register_step_pre_hook(interrupt)  # behind the tables' own
    with pytest.raises(KeyboardInterrupt) as kept:
        optimizer.step()
    handle.remove()
    assert next(models[0].tables.parameters()).grad is not None  # outside of the step, though its frame is kept
    assert_same_bits(tensors(models[0])[:3], before)
    optimizer.step()
    assert not equal(tensors(models[0])[1], before[1])
    assert kept is not None


# --- NAdam's product of momenta ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", [{"betas": (0.5, 0.95)}, {"momentum_decay": 0.2}], ids=str)
def test_nadam_is_refused_a_momentum_of_which_no_product_is_kept(option):
    (ours, _), (optimizer, _) = pair("NAdam")
    loss_of(ours, 0).backward()
    optimizer.step()
    before, old = tensors(ours), dict(optimizer.param_groups[0])
    optimizer.param_groups[0].update(option)
    loss_of(ours, 1).backward()
    with pytest.raises(ConfigError, match="mu_product is kept of steps that all have one"):
        optimizer.step()
    assert_same_bits(tensors(ours), before)
    optimizer.param_groups[0].update({name: old[name] for name in option})
    optimizer.step()


def test_nadam_refuses_a_state_of_other_momenta():
    (ours, _), (optimizer, _) = pair("NAdam")
    loss_of(ours, 0).backward()
    optimizer.step()
    saved, before = copy.deepcopy(optimizer.state_dict()), tensors(ours)
    next(entry for entry in saved["state"].values() if "lagging" in entry)["mu_product"] *= 0.9
    with pytest.raises(InvalidInputError, match="'mu_product' of table"):
        optimizer.load_state_dict(saved)
    assert_same_bits(tensors(ours), before)


# --- Adamax's eps -----------------------------------------------------------------------------------------------------


def test_adamax_has_eps_in_the_state_of_rows_that_no_step_has_used():
    (ours, theirs), optimizers = pair("Adamax", eps=0.25)
    train([ours, theirs], optimizers, steps=3)
    for entry, expected in zip(*(states(each).values() for each in optimizers), strict=True):
        torch.testing.assert_close(entry["exp_inf"], expected["exp_inf"])
        assert (entry["exp_inf"] >= 0.25).all()


# --- RMSprop's parts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("option", "value"), [("momentum", 0.5), ("centered", True)])
def test_rmsprop_is_refused_what_its_rows_have_no_room_for(option, value):
    (ours, _), (optimizer, _) = pair("RMSprop")
    before = tensors(ours)
    optimizer.param_groups[0][option] = value
    loss_of(ours, 0).backward()
    with pytest.raises(ConfigError, match=f"{option} of the param group.*without room"):
        optimizer.step()
    assert_same_bits(tensors(ours), before)


def test_rmsprop_may_stop_what_it_began_with(device):
    models, optimizers = pair("RMSprop centered")
    train(models, optimizers, steps=4)
    for each in optimizers:
        each.param_groups[0].update(momentum=0.0, centered=False)
    train(models, optimizers, steps=4, first=4)
    for each in optimizers:
        each.param_groups[0].update(momentum=0.5, centered=True)
    train(models, optimizers, steps=6, first=8)
    assert_equal_models(models)


def test_a_rate_that_was_another_for_a_while_is_that_of_the_step(tmp_path, device):
    """Others look at the param group between two steps, as a checkpoint does."""
    bag = te.TieredEmbeddingBag(20, 4, mode="sum", capacity=20, optimizer=torch.optim.SGD, device=device)
    optimizer = torch.optim.SGD(bag.parameters(), lr=0.5)
    bag.follow(optimizer)

    def step():
        before = bag.state_dict()["weight"]
        optimizer.zero_grad()
        bag(torch.tensor([[1, 2]], device=device)).sum().backward()
        optimizer.step()
        return (before - bag.state_dict()["weight"])[1].tolist()

    assert step() == pytest.approx([0.5] * 4)
    (group,) = optimizer.param_groups
    rate, group["lr"] = group["lr"], 0.0
    bag.save_checkpoint(tmp_path / "c")
    group["lr"] = rate
    assert step() == pytest.approx([0.5] * 4)


@pytest.mark.parametrize("told", ["no zero_grad", "was emptied"])
def test_warnings_of_a_step_name_who_called_it(told):
    model = nn.ModuleList(nn.EmbeddingBag(10, 4, mode="sum") for _ in range(2))
    optimizer = torch.optim.Adam(model.parameters())
    te.replace_embedding_bags(model, capacity=8, optimizer=optimizer)
    for _ in range(2):
        sum(bag(torch.tensor([[1, 2]])).sum() for bag in model).backward()
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            optimizer.step()
        if told == "was emptied":
            optimizer.zero_grad()
            optimizer.state.clear()
    names = [each.filename for each in found if told in str(each.message)]
    assert names
    assert set(names) == {__file__}
