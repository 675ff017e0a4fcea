"""Optimizers that move every row, when it is next used: torch's numbers, whatever was read, kept or moved between."""

from __future__ import annotations

import copy
import functools
import math
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from devices import assert_same_bits
from oracle import torch_optimizer
from training import DENSE, bits, name_of

import tieredemb as te
from tieredemb.errors import ConfigError, InvalidInputError
from tieredemb.kernels.constants import WINDOW
from tieredemb.lookup.optimizer import hyperparameters, new_history
from tieredemb.lookup.optimizer_cpu import catch_up

ROWS, WIDTH = 60, 5
SERIES = [
    te.Adam(lr=0.01),
    te.Adam(lr=0.01, betas=(0.95, 0.999)),
    te.AdamW(lr=0.01, weight_decay=0.1),
    te.SGD(lr=0.1, momentum=0.9),
    te.SGD(lr=0.1, weight_decay=0.1),
    te.RMSprop(lr=0.01),
    te.RMSprop(lr=0.001, momentum=0.9, centered=True),
    te.RMSprop(lr=0.001, alpha=0.5, momentum=0.9),  # the mean of squares falls faster than the momentum
    te.Adamax(lr=0.01),
]
REPLAYED = [
    te.Adam(lr=0.01, weight_decay=0.1),
    te.Adam(lr=0.01, betas=(0.9, 0.9)),
    te.Adam(lr=0.01, betas=(0.9, 0.5)),
    te.SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    te.Adagrad(lr=0.1, lr_decay=0.01, weight_decay=0.1),
    te.RMSprop(lr=0.01, momentum=0.5, weight_decay=0.1),
    te.Adamax(lr=0.01, weight_decay=0.1),
    te.Adamax(lr=0.01, betas=(0.9, 0.8)),  # the maximum falls faster than the mean
    te.NAdam(lr=0.01, weight_decay=0.1),
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


def upstream(step):
    return torch.from_numpy(np.random.default_rng(10_000 + step).standard_normal((4, WIDTH))).float()


def bag_of(optimizer, capacity=7, **keywords):
    return te.TieredEmbeddingBag(ROWS, WIDTH, mode="sum", capacity=capacity, optimizer=optimizer, seed=1, **keywords)


def train(bag, start, stop):
    device = bag.tables.config.device
    for step in range(start, stop):
        bag(ids_of(step).to(device)).backward(upstream(step).to(device))


def weight_of(bag):
    (weight,) = bag.state_dict().values()
    return weight


# --- torch's numbers --------------------------------------------------------------------------------------------------


STEPS = WINDOW + 50  # a sum that still grows then is given up
SCALES = 10.0 ** -np.arange(9)  # of the gradients of a column: from those of a sum, past a mean's, to Adam's eps
ONCE = (1, 3, 7, 15, 30, 50, 75, 100, 130, 160, 200, 250, 300, 600, 1000, 1500)  # steps that use a row each
LONG_ROWS = {"missed 1": 7, "missed 10": 11, "missed 500": 20, "once": len(ONCE), "never": 6}
LONG = [
    te.Adam(lr=0.01),
    te.Adam(lr=0.01, betas=(0.9, 0.99)),
    te.Adam(lr=0.01, betas=(0.9, 0.95)),
    te.Adam(lr=0.01, betas=(0.95, 0.999)),
    te.Adam(lr=0.01, betas=(0.9, 0.8)),  # β1 ≥ √β2: the sums grow for good
    te.AdamW(lr=0.01, weight_decay=0.1),
    te.Adam(lr=2e-4, weight_decay=0.1),  # no weight comes near 0, where the sign of L2 would hang on a rounding
    te.SGD(lr=0.1, momentum=0.9, nesterov=True),
    te.SGD(lr=0.1, weight_decay=0.1),
    te.SGD(lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.1),
    te.Adagrad(lr=0.02, lr_decay=0.01, weight_decay=0.1),
    te.RMSprop(lr=0.01),
    te.RMSprop(lr=0.001, momentum=0.9, centered=True),
    te.RMSprop(lr=0.001, alpha=0.5, momentum=0.9),
    te.Adamax(lr=0.01),
    te.Adamax(lr=0.01, eps=1e-2),  # the maxima of rows that miss many steps fall to it
    te.NAdam(lr=0.01),
    te.NAdam(lr=0.01, momentum_decay=0.5, weight_decay=0.1, decoupled_weight_decay=True),
]


def rows_used_alike():
    """(how they are used, their first row, how many they are)"""
    first = 0
    for use, count in LONG_ROWS.items():
        yield use, first, count
        first += count


@functools.cache
def long_batches():
    """(rows that a step uses, row 0 in every one; the gradients of their outputs) of each step."""
    found = []
    for step in range(STEPS):
        rows = [0, 0]
        for use, first, count in rows_used_alike():
            if use.startswith("missed"):
                period = int(use.split()[1]) + 1
                rows += [first + i for i in range(count) if step % period == i * period // count]
        once = next(first for use, first, _ in rows_used_alike() if use == "once")
        rows += [once + i for i, at in enumerate(ONCE) if at == step]
        gradient = np.random.default_rng(step).standard_normal((len(rows), len(SCALES))) * SCALES
        found.append((torch.from_numpy(np.array(rows)), torch.from_numpy(gradient).float()))
    return found


def long_start(optimizer):
    """Weights of the size of what moves them; those of rows used once are 0, so that they are what moved them."""
    shape, generator = (sum(LONG_ROWS.values()), len(SCALES)), torch.Generator("cpu").manual_seed(1)
    normal = torch.randn(shape, generator=generator, device="cpu")
    start = normal.sign() * (0.5 + normal.abs())
    if isinstance(optimizer, te.SGD):
        start *= torch.from_numpy(SCALES)
    for use, first, count in rows_used_alike():
        if use == "once":
            start[first : first + count] = 0.0
    return start


def warm_up_and_decay(step):
    return min(1.0, (step + 1) / 150) * (0.505 + 0.495 * math.cos(math.pi * step / STEPS))


def long_reference(optimizer, start, dtype):
    """Weights after all steps of torch's optimizer, in `dtype`, and its state."""
    weight = torch.nn.Parameter(start.to(dtype, copy=True))
    trainer = torch_optimizer(optimizer, [weight])
    scheduler = torch.optim.lr_scheduler.LambdaLR(trainer, warm_up_and_decay)
    for rows, gradient in long_batches():
        weight.grad = torch.zeros_like(weight).index_add_(0, rows, gradient.to(dtype))
        trainer.step()
        scheduler.step()
    return weight.detach().double(), trainer.state[weight]


@pytest.mark.parametrize("optimizer", LONG, ids=str)
def test_rows_end_where_torch_takes_them(device, optimizer):
    """The measure is what torch's own float32 loses against float64, the most in rows that are used alike and gradients
    of one size: 3 times that, as errors are random, and 8 roundings. Rows that missed 500 steps and more are no worse
    than torch's, but for luck (1.5 times): ours are the same operations, or fewer."""
    start = long_start(optimizer).cpu()
    rows, width = start.shape
    bag = te.TieredEmbeddingBag(rows, width, mode="sum", capacity=7, optimizer=optimizer, device=device)
    bag.load_state_dict({"weight": start})
    scheduler = torch.optim.lr_scheduler.LambdaLR(bag.fused_optimizer, warm_up_and_decay)
    for ids, gradient in long_batches():
        bag(ids[:, None].to(device)).backward(gradient.to(device))
        bag.fused_optimizer.step()
        scheduler.step()
    exact, state = long_reference(optimizer, start, torch.float64)
    rounded, _ = long_reference(optimizer, start, torch.float32)
    lost, off = (rounded - exact).abs(), (weight_of(bag).cpu().double() - exact).abs()
    for use, first, count in rows_used_alike():
        alike = slice(first, first + count)
        times = 3.0 if use in ("missed 1", "missed 10") else 1.5
        bound = times * lost[alike].amax(0) + 8 * 2.0**-24 * exact[alike].abs().amax(0)
        assert (off[alike].amax(0) <= bound).all(), (use, off[alike].amax(0), lost[alike].amax(0))
    kept = bag.fused_optimizer.state_dict()["state"][0]
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.ndim:
            close = (kept[name].cpu().double() - value).abs() <= 1e-5 * value.abs() + 1e-6 * value.abs().amax(0)
            assert close.all(), name


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.99), (0.9, 0.95), (0.95, 0.999), (0.99, 0.999)], ids=str)
def test_missed_steps_move_a_row_as_they_do_one_by_one(betas):
    """A weight of 0 becomes the move itself, whose error then shows: 1e-7 of a series that ends, and roundings. Steps
    that are replayed round again and again."""
    optimizer = te.AdamW(lr=0.01, betas=betas, weight_decay=0.1)
    history, terms = new_history(optimizer), []
    lost = {"at once": 0.0, "replayed": 0.0}
    for step in range(1, 801):
        group = asdict(optimizer) | {"lr": 0.01 * warm_up_and_decay(step)}
        taken = hyperparameters(optimizer, group, np.array([step]), 1.0)
        history.append(step, taken.rate[0], taken.missed, taken.terms)
        terms.append(taken.terms)
        if step in (2, 3, 4, 5, 7, 11, 20, 50, 101, 160, 250, 350, 500, 800):
            for start in np.unique(np.geomspace(1, step - 1, 12).astype(int)):
                found, how = moved(history, start)
                lost[how] = max(lost[how], abs(found / exact_move(terms[start:]) - 1).max())
    assert 0 < lost["at once"] < 4.5e-7
    assert 0 < lost["replayed"] < 4e-6


ROOTS = np.concatenate([[0.0], np.logspace(-12, 2, 29)]).astype(np.float32)  # √v: on both sides of any eps


def moved(history, start):
    """Where weights of 0 whose m is 1 go from step `start` to the last one, and how they were brought there."""
    state = np.concatenate([np.ones_like(ROOTS), ROOTS**2, [0.0]], dtype=np.float32)[None].view(np.uint32)
    state[0, -1] = start
    hot = SimpleNamespace(weight=np.zeros((1, len(ROOTS)), np.float32), state=state, dirty=np.zeros(1, np.uint8))
    bring = catch_up(hot, np.zeros(1, np.int32), history)
    bring.run()
    return hot.weight[0], "replayed" if bring.replayed else "at once"


def exact_move(terms):
    """The same, step by step in float64."""
    weight, m, root = np.zeros(len(ROOTS)), 1.0, np.sqrt((ROOTS**2).astype(np.float64))
    for term in terms:
        m, root = m * term.first, root * term.root_second
        weight = term.decay * weight - term.weight * m / (term.point * root + term.eps)
    return weight


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


@pytest.mark.parametrize(
    ("optimizer", "factor"),
    [
        (te.Adam(lr=0.1), 1.0),
        (te.Adam(lr=0.1, betas=(0.9, 0.5)), 1.0),
        (te.AdamW(lr=0.1, weight_decay=0.5), 0.95),
        (te.SGD(lr=0.1, momentum=0.9), 1.0),
        (te.RMSprop(lr=0.1, momentum=0.9, centered=True), 1.0),
        (te.Adamax(lr=0.1), 1.0),
        (te.NAdam(lr=0.1, weight_decay=0.5, decoupled_weight_decay=True), 0.95),
    ],
    ids=str,
)
def test_a_row_without_moments_replays_no_step(device, optimizer, factor):
    """It has decayed, and the same is read as is trained."""
    bag = bag_of(optimizer, device=device)
    before = weight_of(bag)
    ids = torch.tensor([[0]], device=device)
    for _ in range(40):
        bag(ids).sum().backward()
    assert bag.stats().steps_replayed == 0
    with torch.no_grad():
        read = bag(torch.tensor([[9]], device=device))[0]
    torch.testing.assert_close(read.cpu(), before[9] * factor**40, rtol=1e-6, atol=0)
    trained = bag(torch.tensor([[9], [9]], device=device))
    assert_same_bits(trained[0], read)
    trained.sum().backward()
    assert bag.stats().steps_replayed == 0


def test_a_row_without_moments_is_moved_by_l2_in_the_gradient(device):
    bag = bag_of(te.Adam(lr=0.01, weight_decay=0.5), device=device)
    before = weight_of(bag)
    for _ in range(3):
        bag(torch.tensor([[0]], device=device)).sum().backward()
    moved = bag(torch.tensor([[9]], device=device))[0]
    assert bag.stats().steps_replayed == 3
    torch.testing.assert_close(moved.cpu(), before[9] - 0.03 * before[9].sign(), rtol=0, atol=1e-3)  # m̂/√v̂ is near 1


def test_decay_is_exact_where_its_product_is_no_normal_float(device):
    """After 70,000 steps of lr 0.1 and decay 0.1 a running product of float32 would be a denormal; a row's is not."""
    bag = bag_of(te.SGD(lr=0.1, weight_decay=0.1), device=device)
    history = bag.tables.groups[0].kept
    optimizer, hyper = bag.tables.config.optimizer, {"lr": 0.1, "momentum": 0, "nesterov": 0, "weight_decay": 0.1}
    for step in range(1, 70_001):
        history.append(step, 0.1, (0.1, 0.0, 0.0, 1.0), optimizer.step_terms(hyper, step))
    spent = history.logs[70_000, 2] - history.logs[69_900, 2]
    assert np.exp(history.logs[70_000, 2]) < 1e-38
    assert np.exp(spent) == pytest.approx(0.99**100, rel=1e-9)


# --- L2 of the rows in use --------------------------------------------------------------------------------------------

ON_USE = [
    te.Adam(lr=0.01, weight_decay_on_use=0.1),
    te.SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay_on_use=0.1),
    te.SGD(lr=0.1, weight_decay_on_use=0.1),
    te.Adagrad(lr=0.1, weight_decay_on_use=0.1),
]


def on_use_reference(optimizer, weight, steps, decay_of):
    """Weights after `steps` of torch's optimizer, in float64, which is given the decay in the gradients of rows that a
    step uses, and 0 for others."""
    weight = torch.nn.Parameter(weight.double())
    trainer = torch_optimizer(optimizer, [weight])
    for step in range(steps):
        ids, used = ids_of(step), ids_of(step).unique()
        weight.grad = torch.zeros_like(weight)
        weight.grad.index_add_(0, ids.ravel(), upstream(step).double().repeat_interleave(ids.shape[1], 0))
        weight.grad[used] += decay_of(step) * weight.detach()[used]
        trainer.step()
    return weight.detach()


@pytest.mark.parametrize("optimizer", ON_USE, ids=str)
def test_decay_on_use_is_in_the_gradients_of_the_rows_that_a_step_uses(device, optimizer):
    """Whatever lies in the cache, and replaying no more steps than without it."""

    def decay_of(step):
        return 0.1 if step < 80 else 0.02

    bags = [
        bag_of(each, capacity, device=device)
        for each, capacity in ((optimizer, 7), (optimizer, ROWS), (replace(optimizer, weight_decay_on_use=0.0), 7))
    ]
    start = weight_of(bags[0]).cpu()
    for bag in bags:
        train(bag, 0, 80)
        if bag is not bags[-1]:
            bag.fused_optimizer.param_groups[0]["weight_decay_on_use"] = 0.02
        train(bag, 80, 160)
    assert_same_bits(bits(bags[0]), bits(bags[1]))
    torch.testing.assert_close(
        weight_of(bags[0]).cpu().double(), on_use_reference(optimizer, start, 160, decay_of), rtol=1e-5, atol=1e-5
    )
    assert bags[0].stats().steps_replayed == bags[2].stats().steps_replayed


def test_decay_on_use_alone_moves_no_other_row(device):
    for optimizer in ON_USE[2:]:
        assert not optimizer.is_dense
        bag = bag_of(optimizer, device=device)
        before = weight_of(bag)
        bag(torch.tensor([[3, 4]], device=device)).backward(torch.zeros(1, WIDTH, device=device))
        moved = (weight_of(bag) != before).any(1)
        assert moved.nonzero().ravel().tolist() == [3, 4]


@pytest.mark.parametrize("kind", [te.Adam, te.SGD, te.Adagrad])
def test_one_kind_of_l2_excludes_the_other(kind):
    with pytest.raises(ConfigError, match=r"weight_decay is 0\.1 and weight_decay_on_use is 0\.2"):
        kind(lr=0.1, weight_decay=0.1, weight_decay_on_use=0.2)
    with pytest.raises(ConfigError, match="weight_decay_on_use must be"):
        kind(lr=0.1, weight_decay_on_use=-0.1)
    bag = bag_of(kind(lr=0.1, weight_decay=0.1), device="cpu")
    before = bits(bag)
    bag.fused_optimizer.param_groups[0]["weight_decay_on_use"] = 0.2
    with pytest.raises(ConfigError, match="leave one of them at 0"):
        bag(torch.tensor([[1]])).sum().backward()
    assert_same_bits(bits(bag), before)


# --- bits -------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=DENSE, ids=name_of)
def dense(request):
    return request.param


def test_reading_leaves_rows_as_they_are(device, dense):
    plain, read = bag_of(dense, device=device), bag_of(dense, device=device)
    train(plain, 0, 300)
    for start in range(0, 300, 60):
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
    train(whole, 0, 300)
    saved = bag_of(dense, device=device)
    train(saved, 0, 190)
    saved.save_checkpoint(tmp_path / "saved")
    copied, loaded = copy.deepcopy(saved), bag_of(dense, capacity=9, device=device)
    loaded.load_checkpoint(tmp_path / "saved")
    filed = bag_of(dense, storage=te.File(str(tmp_path / "rows")), device=device)
    train(filed, 0, 190)
    filed.close()
    filed = bag_of(dense, storage=te.File(str(tmp_path / "rows")), capacity=4, device=device)
    for each in (copied, loaded, filed):
        train(each, 190, 300)
        assert_same_bits(bits(each), bits(whole))


def test_state_dicts_go_on_with_the_same_bits(device, dense):
    whole = bag_of(dense, capacity=ROWS, device=device)
    train(whole, 0, 300)
    saved, loaded = bag_of(dense, device=device), bag_of(dense, capacity=3, device=device)
    train(saved, 0, 190)
    loaded.load_state_dict(saved.state_dict())
    loaded.fused_optimizer.load_state_dict(saved.fused_optimizer.state_dict())
    assert_same_bits(bits(loaded), bits(saved))
    train(loaded, 190, 300)
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
    for start in (0, 120):
        train(plain, start, start + 120)
        train(loaded, start, start + 120)
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
