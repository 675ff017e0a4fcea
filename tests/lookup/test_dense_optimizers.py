"""Optimizers that move every row, when it is next used: torch's numbers, whatever was read, kept or moved between."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from devices import assert_same_bits
from oracle import torch_optimizer
from training import DENSE, bits, name_of

import tieredemb as te
from tieredemb.errors import ConfigError, InvalidInputError

ROWS, WIDTH = 60, 5
SERIES = [
    te.Adam(lr=0.01),
    te.Adam(lr=0.01, betas=(0.95, 0.999)),
    te.AdamW(lr=0.01, weight_decay=0.1),
    te.SGD(lr=0.1, momentum=0.9),
    te.SGD(lr=0.1, weight_decay=0.1),
]
REPLAYED = [
    te.Adam(lr=0.01, weight_decay=0.1),
    te.Adam(lr=0.01, betas=(0.9, 0.9)),
    te.Adam(lr=0.01, betas=(0.9, 0.5)),
    te.SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    te.Adagrad(lr=0.1, lr_decay=0.01, weight_decay=0.1),
]


def ids_of(step, rows=ROWS):
    """Few rows are used often, some once in a while, and some in the first steps and the last ones alone."""
    random = np.random.default_rng(step)
    found = np.minimum((random.pareto(1.0, (4, 3)) * 2).astype(np.int64), rows // 2)
    if step % 50 == 3:
        found[0] = random.integers(rows // 2, rows, 3)
    if step in (2, 40):
        found[1] = [rows - 1, rows - 2, rows - 3]
    return torch.from_numpy(found)


def upstream(step, scale=1.0):
    return torch.from_numpy(np.random.default_rng(10_000 + step).standard_normal((4, WIDTH)) * scale).float()


def bag_of(optimizer, capacity=7, **keywords):
    return te.TieredEmbeddingBag(ROWS, WIDTH, mode="sum", capacity=capacity, optimizer=optimizer, seed=1, **keywords)


def train(bag, start, stop, *, scale=1.0, schedule=None):
    device = bag.tables.config.device
    for step in range(start, stop):
        if schedule is not None:
            bag.fused_optimizer.param_groups[0]["lr"] = schedule(step)
        bag(ids_of(step).to(device)).backward(upstream(step, scale).to(device))


def reference(optimizer, weight, steps, dtype, *, scale=1.0, schedule=None):
    """Weights of `nn.EmbeddingBag` after `steps` of torch's optimizer, in `dtype`."""
    table = torch.nn.EmbeddingBag(ROWS, WIDTH, mode="sum", dtype=dtype, device="cpu")
    with torch.no_grad():
        table.weight.copy_(weight)
    trainer = torch_optimizer(optimizer, table.parameters())
    for step in range(steps):
        if schedule is not None:
            trainer.param_groups[0]["lr"] = schedule(step)
        trainer.zero_grad()
        table(ids_of(step)).backward(upstream(step, scale).to(dtype))
        trainer.step()
    return table.weight.detach(), trainer.state[table.weight]


def weight_of(bag):
    (weight,) = bag.state_dict().values()
    return weight


# --- torch's numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [*SERIES, *REPLAYED], ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e-8])
def test_rows_end_where_torch_takes_them(device, optimizer, scale):
    """Gradients of a sum, of a mean loss, and next to eps. The measure is what torch's own float32 loses against
    float64: 4 times that, as its errors are as random as ours, and a few roundings."""

    def schedule(step):
        return optimizer.lr * (0.55 + 0.45 * np.cos(step / 40))

    bag = bag_of(optimizer, device=device)
    start = weight_of(bag).cpu()
    train(bag, 0, 450, scale=scale, schedule=schedule)
    exact, state = reference(optimizer, start, 450, torch.float64, scale=scale, schedule=schedule)
    rounded, _ = reference(optimizer, start, 450, torch.float32, scale=scale, schedule=schedule)
    lost = (rounded.double() - exact).abs().max()
    off = (weight_of(bag).cpu().double() - exact).abs().max()
    assert off <= 4 * lost + 2e-6
    kept = bag.fused_optimizer.state_dict()["state"][0]
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.ndim:
            close = (kept[name].cpu().double() - value).abs() <= 1e-4 * value.abs() + 1e-4 * value.abs().max()
            assert close.all(), name


@pytest.mark.parametrize("optimizer", [*SERIES, *REPLAYED], ids=str)
def test_a_forward_reads_rows_at_the_current_step(device, optimizer):
    bag = bag_of(optimizer, device=device)
    table = torch.nn.EmbeddingBag(ROWS, WIDTH, mode="sum", device="cpu")
    with torch.no_grad():
        table.weight.copy_(weight_of(bag))
    trainer = torch_optimizer(optimizer, table.parameters())
    for step in range(120):
        ids, grad = ids_of(step), upstream(step)
        out, expected = bag(ids.to(device)), table(ids)
        torch.testing.assert_close(out.cpu(), expected, rtol=1e-4, atol=1e-4)
        trainer.zero_grad()
        out.backward(grad.to(device))
        expected.backward(grad)
        trainer.step()


def test_missed_steps_are_replayed_where_they_have_no_closed_form(device):
    """Of Adam's first steps those that count; under L2 and steep betas every one; of the rest none."""
    for optimizer in SERIES[3:]:
        bag = bag_of(optimizer, device=device)
        train(bag, 0, 120)
        assert bag.stats().steps_replayed == 0
    bag = bag_of(te.Adagrad(weight_decay=0.5), device=device)
    for ids in ([0], [1], [1], [1], [0], [2]):
        bag(torch.tensor([ids], device=device)).sum().backward()
    assert bag.stats().steps_replayed == 1 + 3 + 5  # row 1 after a step, row 0 after three more, row 2 never used


def test_a_row_first_used_late_has_decayed_since_the_start(device):
    bag = bag_of(te.AdamW(lr=0.1, weight_decay=0.5), device=device)
    before = weight_of(bag)
    for _ in range(100):
        bag(torch.tensor([[0]], device=device)).sum().backward()
    torch.testing.assert_close(weight_of(bag)[9], before[9] * (1 - 0.1 * 0.5) ** 100, rtol=1e-5, atol=0)
    torch.testing.assert_close(bag(torch.tensor([[9]], device=device))[0].cpu(), before[9].cpu() * 0.95**100)


def test_decay_is_exact_where_its_product_is_no_normal_float(device):
    """After 70,000 steps of lr 0.1 and decay 0.1 a running product of float32 would be a denormal; a row's is not."""
    bag = bag_of(te.SGD(lr=0.1, weight_decay=0.1), device=device)
    history = bag.tables.groups[0].cache.cold.history
    optimizer, hyper = bag.tables.config.optimizer, {"lr": 0.1, "momentum": 0, "nesterov": 0, "weight_decay": 0.1}
    for step in range(1, 70_001):
        history.append(step, 0.1, (0.1, 0.0, 0.0, 1.0), optimizer.step_terms(hyper, step))
    spent = history.logs[70_000, 2] - history.logs[69_900, 2]
    assert np.exp(history.logs[70_000, 2]) < 1e-38
    assert np.exp(spent) == pytest.approx(0.99**100, rel=1e-9)


# --- bits -------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=DENSE, ids=name_of)
def dense(request):
    return request.param


def test_reading_leaves_rows_as_they_are(device, dense):
    plain, read = bag_of(dense, device=device), bag_of(dense, device=device)
    train(plain, 0, 360)
    for start in range(0, 360, 60):
        train(read, start, start + 60)
        bits(read)
        with torch.no_grad():
            first = read(torch.arange(ROWS, device=device)[None])
            assert_same_bits([read(torch.arange(ROWS, device=device)[None])], [first])
        read.requires_grad_(False)
        read(torch.arange(ROWS, device=device)[None])
        read.requires_grad_(True)
    assert_same_bits(bits(read), bits(plain))


def test_what_is_read_is_what_a_training_forward_sees(device, dense):
    bag = bag_of(dense, device=device)
    train(bag, 0, 333)
    ids = torch.arange(ROWS, device=device)[:, None]
    saved = weight_of(bag)
    with torch.no_grad():
        read = bag(ids)
    assert_same_bits([read.cpu(), bag(ids).detach().cpu()], [saved.cpu(), saved.cpu()])


def test_copies_checkpoints_and_files_go_on_with_the_same_bits(device, dense, tmp_path):
    whole = bag_of(dense, capacity=ROWS, device=device)
    train(whole, 0, 360)
    saved = bag_of(dense, device=device)
    train(saved, 0, 230)
    saved.save_checkpoint(tmp_path / "saved")
    copied, loaded = copy.deepcopy(saved), bag_of(dense, capacity=9, device=device)
    loaded.load_checkpoint(tmp_path / "saved")
    filed = bag_of(dense, storage=te.File(str(tmp_path / "rows")), device=device)
    train(filed, 0, 230)
    filed.close()
    filed = bag_of(dense, storage=te.File(str(tmp_path / "rows")), capacity=4, device=device)
    for each in (copied, loaded, filed):
        train(each, 230, 360)
        assert_same_bits(bits(each), bits(whole))


def test_state_dicts_go_on_with_the_same_bits(device, dense):
    whole = bag_of(dense, capacity=ROWS, device=device)
    train(whole, 0, 360)
    saved, loaded = bag_of(dense, device=device), bag_of(dense, capacity=3, device=device)
    train(saved, 0, 230)
    loaded.load_state_dict(saved.state_dict())
    loaded.fused_optimizer.load_state_dict(saved.fused_optimizer.state_dict())
    assert_same_bits(bits(loaded), bits(saved))
    train(loaded, 230, 360)
    assert_same_bits(bits(loaded), bits(whole))


def test_rows_that_have_other_weights_do_not_go_back(device, dense):
    """A state dict says how rows lay; they lie so where the weights are those of then, and nowhere else."""
    saved, other = bag_of(dense, device=device), bag_of(dense, capacity=3, device=device)
    train(saved, 0, 120)
    weights = {name: torch.full_like(value, 0.5) for name, value in other.state_dict().items()}
    other.load_state_dict(weights)
    other.fused_optimizer.load_state_dict(saved.fused_optimizer.state_dict())
    assert_same_bits([weight_of(other)], list(weights.values()))


@pytest.mark.parametrize("name", ["rows", "weight", "state", "history"])
def test_lagging_rows_that_do_not_fit_are_refused_before_anything_changes(name):
    saved, other = bag_of(te.Adam(lr=0.1), device="cpu"), bag_of(te.Adam(lr=0.1), device="cpu")
    train(saved, 0, 20)
    train(other, 0, 3)
    before, state = bits(other), saved.fused_optimizer.state_dict()
    part = state["state"][0]["lagging"][name]
    state["state"][0]["lagging"][name] = part.flip(0) if name == "rows" else part[:-1]
    with pytest.raises(InvalidInputError, match="lagging"):
        other.fused_optimizer.load_state_dict(state)
    assert_same_bits(bits(other), before)


def test_weights_that_rows_have_already_change_nothing(device, dense):
    plain, loaded = bag_of(dense, device=device), bag_of(dense, device=device)
    for start in (0, 150):
        train(plain, start, start + 150)
        train(loaded, start, start + 150)
        loaded.load_state_dict(loaded.state_dict())
    assert_same_bits(bits(loaded), bits(plain))


def test_new_weights_are_at_the_current_step(device, dense):
    bag = bag_of(dense, device=device)
    train(bag, 0, 50)
    weights = {name: torch.full_like(value, 0.5) for name, value in bag.state_dict().items()}
    bag.load_state_dict(weights)
    assert_same_bits([weight_of(bag)], list(weights.values()))
    with torch.no_grad():
        assert (bag(torch.arange(ROWS, device=device)[:, None]) == 0.5).all()


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "name"),
    [(te.SGD(lr=0.1), "momentum"), (te.SGD(lr=0.1), "weight_decay"), (te.Adagrad(), "weight_decay")],
)
def test_an_option_that_rows_have_no_room_for_is_refused_before_a_step(optimizer, name):
    bag = bag_of(optimizer, device="cpu")
    before = bits(bag)
    bag.fused_optimizer.param_groups[0][name] = 0.5
    with pytest.raises(ConfigError, match=f"{name} of the param group is 0.5.*build the tables"):
        bag(torch.tensor([[1]])).sum().backward()
    assert_same_bits(bits(bag), before)


def test_tables_of_different_steps_are_refused():
    tables = [te.TableConfig(name=name, num_embeddings=9, embedding_dim=2) for name in "ab"]
    bags = te.TieredEmbeddingBagCollection(tables, capacity=4, optimizer=te.Adam(), device="cpu")
    state = bags.fused_optimizer.state_dict()
    state["state"][1]["step"] = torch.tensor(3.0)
    with pytest.raises(InvalidInputError, match=r"different numbers of steps \(0, 3\)"):
        bags.fused_optimizer.load_state_dict(state)


@pytest.mark.parametrize(
    "wrong",
    [{"nesterov": True}, {"momentum": 0.9, "nesterov": True, "dampening": 0.1}, {"nesterov": 2}, {"momentum": -1}],
)
def test_sgd_refuses_what_torch_refuses(wrong):
    with pytest.raises(ConfigError):
        replace(te.SGD(lr=0.1), **wrong)
