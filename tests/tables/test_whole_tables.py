"""Tables that a loss uses as a whole: scores of all rows, sums over weights, and everything else that torch does with a
weight. One update then moves every row, as torch's does."""

from __future__ import annotations

import contextlib

import pytest
import torch
from devices import assert_same_bits, idle
from failing import FailsBackward
from pairs import parametrize_pairs
from torch import nn
from torch.nn import functional
from torch.nn.functional import cross_entropy, linear
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import tieredemb as te
from tieredemb.errors import BackwardError, IdOutOfRangeError, StorageFullError, UnsupportedError
from tieredemb.step.whole_table import Span

ITEMS, USERS, WIDTH = 40, 30, 6
OPTIM = torch.optim
KINDS = {
    "SGD": (OPTIM.SGD, {"lr": 0.1}),
    "SGD momentum decay": (OPTIM.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "SGD decay": (OPTIM.SGD, {"lr": 0.1, "weight_decay": 0.01}),
    "Adagrad": (OPTIM.Adagrad, {"lr": 0.05}),
    "Adagrad decay": (OPTIM.Adagrad, {"lr": 0.05, "weight_decay": 0.01}),
    "Adam": (OPTIM.Adam, {"lr": 0.01}),
    "Adam decay": (OPTIM.Adam, {"lr": 0.01, "weight_decay": 0.01}),
    "AdamW": (OPTIM.AdamW, {"lr": 0.01}),
    "Adamax": (OPTIM.Adamax, {"lr": 0.01}),
    "NAdam": (OPTIM.NAdam, {"lr": 0.01}),
    "RMSprop": (OPTIM.RMSprop, {"lr": 0.01}),
    "RMSprop decay": (OPTIM.RMSprop, {"lr": 0.01, "weight_decay": 0.01}),
}


class Model(nn.Module):
    """Users and items; `padding`: of the items."""

    def __init__(self, padding=None, items=ITEMS, width=WIDTH):
        super().__init__()
        self.items = nn.Embedding(items, width, padding_idx=padding)
        self.users = nn.Embedding(USERS, width)
        self.dense = nn.Linear(width, width)

    def of(self, users):
        return self.dense(self.users(users))


def scored(m, u, i):
    return cross_entropy(m.of(u) @ m.items.weight.T, i)


def scored_by_matmul(m, u, i):
    return cross_entropy(torch.matmul(m.of(u), m.items.weight.transpose(0, 1)), i)


def scored_by_linear(m, u, i):
    return cross_entropy(linear(m.of(u), m.items.weight, m.dense.bias.sum()), i)


def scored_sequences(m, u, i):
    return cross_entropy((m.of(u).view(2, -1, WIDTH) @ m.items.weight.t()).flatten(0, 1), i)


def scored_but_for_the_first(m, u, i):
    return cross_entropy(m.users(u) @ m.items.weight[1:].T, (i - 1).clamp(min=0))


def scored_from_the_left(m, u, i):
    return (m.items.weight @ m.of(u).mean(0)).tanh().sum() + (m.items.weight @ m.of(u).T).sigmoid().mean()


def regularised(m, u, i):
    return found(m, u, i) + 1e-2 * sum(p.square().sum() for p in m.parameters())


def regularised_by_norms(m, u, i):
    items = m.items.weight
    terms = 1e-2 * torch.norm(items, 2) ** 2 + 1e-3 * items.norm(p=1) + (items**2).mean() + (0.5 * items * items).sum()
    return found(m, u, i) + terms + 1e-3 * torch.sum(2 * torch.square(items)) + items.abs().sum() * 1e-3


def propagated(m, u, i):
    every = torch.cat([m.users.weight, m.items.weight])
    every = torch.tanh(every @ every[:WIDTH].T)
    return (every[u] * every[USERS + i]).sum() * 0.1


def multiplied_out(m, u, i):
    items = m.items.weight
    squares = torch.bmm(items.unsqueeze(2), items.unsqueeze(1)).sum(0)
    return (squares * squares).mean() * 0.01 + found(m, u, i)


def picked(m, u, i):
    return (m.items.weight[i] * m.users(u)).sum().tanh() + m.items.weight[2].sum() + m.items.weight[:, 1].exp().sum()


def found(m, u, i):
    return (m.users(u) * m.items(i)).sum(-1).tanh().mean()


LOSSES = (
    scored, scored_by_matmul, scored_by_linear, scored_sequences, scored_but_for_the_first, scored_from_the_left,
    regularised, regularised_by_norms, propagated, multiplied_out, picked,
)  # fmt: skip


def pair(kind, *, capacity, padding=None, **options):
    torch.manual_seed(1)
    models = [Model(padding), Model(padding)]
    models[1].load_state_dict(models[0].state_dict())
    made, numbers = KINDS[kind]
    optimizers = [made(each.parameters(), **numbers) for each in models]
    te.replace_embedding_bags(models[0], capacity=capacity, optimizer=optimizers[0], **options)
    return [each.to(torch.get_default_device()) for each in models], optimizers


def batch(number):
    random = torch.Generator(device="cpu").manual_seed(number)
    users, items = (torch.randint(count, (8,), generator=random, device="cpu") for count in (USERS, ITEMS))
    return users.to(torch.get_default_device()), items.to(torch.get_default_device())


def assert_equal_models(models):
    ours, theirs = (each.state_dict() for each in models)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value.to(ours[name].device), rtol=1e-4, atol=1e-5)


def nothing(model, optimizer, number):
    pass


def clipped(model, optimizer, number):
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def clipped_by_value(model, optimizer, number):
    nn.utils.clip_grad_value_(model.parameters(), 0.01)


def with_another_backward(model, optimizer, number):
    scored(model, *batch(number + 100)).backward()
    (0.5 * regularised(model, *batch(number + 200))).backward()


def with_lookups(model, optimizer, number):
    found(model, *batch(number + 100)).backward()


CHANGES = (nothing, clipped, clipped_by_value, with_another_backward, with_lookups)


@parametrize_pairs(loss=LOSSES, kind=list(KINDS), change=CHANGES, capacity=[1, 7, 1.0], padding=[None, 0])
def test_losses_over_whole_tables_train_as_in_torch(device, loss, kind, change, capacity, padding):
    models, optimizers = pair(kind, capacity=capacity, padding=padding)
    for number in range(4):
        losses = []
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            losses.append((loss if number != 2 else found)(model, *batch(number)))  # a step of lookups alone between
            losses[-1].backward()
            change(model, optimizer, number)
            optimizer.step()
        torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)
    assert_equal_models(models)
    assert idle(models[0].items)


@parametrize_pairs(loss=(scored, regularised, picked), kind=list(KINDS), dtype=[torch.float32, torch.bfloat16])
def test_capacity_changes_no_bit(device, loss, kind, dtype):
    ends = []
    for capacity in (1, 7, 1.0):
        made, numbers = KINDS[kind]
        torch.manual_seed(1)
        model = Model().to(dtype)
        optimizer = made(model.parameters(), **numbers)
        te.replace_embedding_bags(model, capacity=capacity, optimizer=optimizer, dtype=dtype, seed=0)
        model.to(device)
        for number in range(3):
            optimizer.zero_grad()
            loss(model, *batch(number)).backward()
            optimizer.step()
        ends.append(list(model.state_dict().values()))
    assert_same_bits(ends[0], ends[1])
    assert_same_bits(ends[0], ends[2])


@parametrize_pairs(
    width=[1, 3, 8, 20, 64, 96, 130, 300], kind=["Adam", "SGD momentum decay"], dtype=[torch.float32, torch.bfloat16]
)
def test_capacity_changes_no_bit_of_rows_of_any_width(device, width, kind, dtype):
    ends = []
    for capacity in (1, 1.0):
        made, numbers = KINDS[kind]
        torch.manual_seed(1)
        model = Model(items=11, width=width).to(dtype)
        optimizer = made(model.parameters(), **numbers)
        te.replace_embedding_bags(model, capacity=capacity, optimizer=optimizer, dtype=dtype, seed=0)
        model.to(device)
        for number in range(3):
            optimizer.zero_grad()
            (model.items.weight.square().sum() + model.items(torch.arange(number + 1)).sum()).backward()
            optimizer.step()
        ends.append(list(model.state_dict().values()))
    assert_same_bits(*ends)


def test_no_row_leaves_the_cache_for_a_whole_table(device):
    models, optimizers = pair("Adam", capacity=7)
    items = models[0].items
    items(torch.arange(5)).sum().backward()
    optimizers[0].step()
    before = items.stats()
    for loss in (lambda w: w.square().sum(), lambda w: w.exp().sum(), lambda w: (torch.ones(2, WIDTH) @ w.T).sum()):
        optimizers[0].zero_grad()
        loss(items.weight).backward()
        optimizers[0].step()
    assert items.stats().evictions == before.evictions
    with torch.no_grad():
        items(torch.arange(5))
    assert items.stats().hits - before.hits == 5


def test_what_is_found_in_the_gradient_is_torchs(device):
    models, _ = pair("SGD", capacity=7)
    for model in models:
        scored(model, *batch(0)).backward()
        regularised(model, *batch(1)).backward()
    ours, theirs = (each.items.weight.grad for each in models)
    torch.testing.assert_close(ours.norm(), theirs.norm())
    torch.testing.assert_close(ours.norm(1), theirs.norm(1))
    torch.testing.assert_close(ours.abs().max(), theirs.abs().max())
    torch.testing.assert_close(ours.to_sparse().to_dense(), theirs)
    of = [torch.autograd.grad(scored(each, *batch(2)), [each.items.weight])[0] for each in models]
    torch.testing.assert_close(of[0].to_sparse().to_dense(), of[1])
    alone = [torch.autograd.grad(scored(each, *batch(2)), [each.dense.weight])[0] for each in models]
    torch.testing.assert_close(*alone)
    torch.testing.assert_close(models[0].items.weight.grad.norm(), theirs.norm())  # as it was


def test_hooks_see_it(device):
    models, optimizers = pair("SGD", capacity=7)
    for model, optimizer in zip(models, optimizers, strict=True):
        model.items.weight.register_hook(lambda grad: grad * 0.5)
        for number in range(2):
            optimizer.zero_grad()
            scored(model, *batch(number)).backward()
            regularised(model, *batch(number)).backward()
            optimizer.step()
    assert_equal_models(models)


def test_a_scaler_and_autocast(device):
    models, optimizers = pair("Adam", capacity=7)
    kind = torch.device(device).type
    for model, optimizer in zip(models, optimizers, strict=True):
        scaler = torch.amp.GradScaler(kind, init_scale=2.0**10)
        for number in range(3):
            optimizer.zero_grad()
            with torch.autocast(kind, torch.bfloat16):
                loss = scored(model, *batch(number))
            scaler.scale(loss + regularised(model, *batch(number))).backward()
            if number == 1:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
    ours, theirs = (each.state_dict() for each in models)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value.to(ours[name].device), rtol=0.05, atol=0.02)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64])
@pytest.mark.parametrize("rows", [torch.float32, torch.bfloat16])
def test_products_are_made_and_refused_as_torch_does(device, monkeypatch, rows, dtype, autocast):
    plain = nn.Embedding(ITEMS, WIDTH, dtype=rows, device=device)
    model = nn.Sequential(nn.Embedding(ITEMS, WIDTH, dtype=rows, device=device))
    model[0].load_state_dict(plain.state_dict())
    te.replace_embedding_bags(model, optimizer=OPTIM.SGD(model.parameters(), lr=0.1), capacity=7)
    x = torch.arange(2 * WIDTH, device=device).reshape(2, WIDTH).to(dtype)
    with torch.autocast(torch.device(device).type, autocast, enabled=autocast is not None):
        if dtype not in (torch.float64, torch.int64) and (autocast is not None or dtype == rows):
            monkeypatch.setattr(Span, "whole", lambda span: pytest.fail("all rows were read as one tensor"))
            made, expected = x @ model[0].weight.T, x @ plain.weight.T
            assert made.dtype == expected.dtype
            torch.testing.assert_close(made, expected)
            return
        for weight in (plain.weight, model[0].weight):
            with pytest.raises(RuntimeError, match="dtype"):
                x @ weight.T


def test_a_loss_that_is_not_finite_is_skipped_by_a_scaler(device):
    models, optimizers = pair("Adam", capacity=7)
    before = models[0].state_dict()
    scaler = torch.amp.GradScaler(torch.device(device).type)
    scaler.scale(scored(models[0], *batch(0)) * float("inf")).backward()
    scaler.step(optimizers[0])
    scaler.update()
    assert_same_bits(list(models[0].state_dict().values()), list(before.values()))


def test_recomputed_forwards(device):
    models, optimizers = pair("Adam", capacity=7)
    for model, optimizer in zip(models, optimizers, strict=True):
        for number in range(2):
            optimizer.zero_grad()
            users, items = batch(number)
            vectors = model.of(users)
            logits = checkpoint(lambda x, model=model: x @ model.items.weight.T, vectors, use_reentrant=False)
            cross_entropy(logits, items).backward()
            optimizer.step()
    assert_equal_models(models)


def test_scores_have_a_gradient_for_tables_that_follow(device):
    models, optimizers = pair("Adam", capacity=7)
    for number in range(2):
        users, items = batch(number)
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            x = model.of(users)
            logits = te.scores(model.items, x) if model is models[0] else x @ model.items.weight.T
            cross_entropy(logits, items).backward()
            optimizer.step()
    assert_equal_models(models)


# --- what else is done with it ----------------------------------------------------------------------------------------


def looked_up_beside_sums(m, w):
    return w.sum() + 5 * m.items(torch.tensor([3, 4], device=w.device)).sum() + w.mean() + 0 * w.sum()


def of_a_parameter(m, w):
    return (m.users.weight[:3] @ w.T).square().sum() + (m.dense.weight @ w.T).square().sum()


def changed_in_place(m, w):
    one, two, three = w**2, w * 1.0, w * 2
    one.clamp_(max=0.1)
    two[0] = 0.0
    functional.relu(three, inplace=True)
    return one.sum() + two.square().sum() + three.sum() + (-w).add_(1.0).mul_(w).sum()


def by_lists(m, w):
    return w[[1, 2]].sum() + w[[1, 2], 0].sum() + w[[True] * len(w)].mean()


def by_torchs_lookups(m, w):
    ids = torch.tensor([1, 2, 2], device=w.device)
    found = functional.embedding(ids, w, sparse=True).square().sum()
    return (
        found
        + functional.embedding(ids, w, max_norm=0.5).sum()
        + functional.embedding_bag(ids[None], w, max_norm=0.4).sum()
    )


def watched(m, w):
    of = w * 2
    of.retain_grad()
    (of * torch.arange(w.shape[1], device=w.device)).sum().backward(retain_graph=True)
    (grad,) = torch.autograd.grad(of.sum(), [of])
    return (of * of.grad).sum() + (of * grad).mean()


USES = (looked_up_beside_sums, of_a_parameter, changed_in_place, by_lists, by_torchs_lookups, watched)


@parametrize_pairs(use=USES, kind=["SGD", "Adam", "Adagrad decay"], clips=[False, True])
def test_a_weight_is_used_as_torchs(device, use, kind, clips):
    models, optimizers = pair(kind, capacity=7)
    for _ in range(3):
        values = []
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            values.append(use(model, model.items.weight))
            values[-1].backward()
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        torch.testing.assert_close(*values, rtol=1e-4, atol=1e-5)
    assert_equal_models(models)


def test_a_buffer_that_is_used_again_changes_no_gradient(device):
    models, optimizers = pair("SGD", capacity=7)
    for model, optimizer in zip(models, optimizers, strict=True):
        buffer, factor = torch.ones(2, WIDTH), torch.tensor(2.0)
        for number in range(2):
            buffer.fill_(number + 1.0)
            (buffer @ model.items.weight.T).square().mean().backward()
        (model.items.weight * factor).square().mean().backward()
        factor.fill_(9.0)
        optimizer.step()
    assert_equal_models(models)


@pytest.mark.parametrize("order", [0.5, 1, 1.5, 2, 3, float("inf")])
@pytest.mark.parametrize("scale", [1.0, 0.0, 1e30, float("nan")])
def test_norms_have_the_gradients_of_torchs(device, order, scale):
    """Also where several elements are the largest, and where the norm is zero or overflows."""
    models, _ = pair("SGD", capacity=7)
    for model in models:
        with torch.no_grad():
            if scale == scale:
                model.items.weight.mul_(scale)
            model.items.weight[[3, 9, 30], 2] = 4.0 * scale  # where it is a NaN these alone are
        found = model.items.weight.norm(order)
        found.backward()
    ours, theirs = (each.items.weight.grad.to_sparse().to_dense() for each in models)
    torch.testing.assert_close(ours, theirs, equal_nan=True)


def test_a_gradient_that_was_given_and_changed_is_refused(device):
    models, optimizers = pair("SGD", capacity=7)
    for use in (lambda w: torch.ones(2, WIDTH) @ w.T, lambda w: w.clone()):
        found = use(models[0].items.weight)
        grad = torch.ones_like(found)
        found.backward(grad)
        grad.mul_(7)
        with pytest.raises(BackwardError, match="pass a clone"):
            optimizers[0].step()
        optimizers[0].zero_grad()


def test_elements_of_rows_that_are_others_by_now_are_refused(device):
    models, _ = pair("SGD", capacity=7)
    kept = models[0].items.weight * 1.0
    with torch.no_grad():
        models[0].items.weight.zero_()
    for late in (torch.sum, torch.Tensor.exp, torch.square):
        with pytest.raises(BackwardError, match="were updated or written to"):
            late(kept)


# --- chunks -----------------------------------------------------------------------------------------------------------

LARGE = 300_000  # rows of 6 float32: two chunks on a CPU


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that an operation has made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, (list, tuple)) else [result]:
            if type(each) is torch.Tensor and not each.is_meta:
                self.elements = max(self.elements, each.numel())
        return result


@pytest.mark.parametrize("loss", ["product", "squares", "norm", "torch.norm", "vector_norm"])
@pytest.mark.parametrize("capacity", [0.1, 1.0])
def test_no_more_than_a_chunk_is_held(loss, capacity):
    torch.manual_seed(1)
    models = [nn.Embedding(LARGE, WIDTH) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [OPTIM.Adam(each.parameters(), lr=0.01) for each in models]
    ours = te.replace_embedding_bags(nn.Sequential(models[0]), capacity=capacity, optimizer=optimizers[0])
    x, target = torch.randn(2, WIDTH), torch.tensor([5, LARGE - 1])

    norms = {"norm": torch.Tensor.norm, "torch.norm": torch.norm, "vector_norm": torch.linalg.vector_norm}

    def loss_of(weight):
        if loss == "product":
            return cross_entropy(x @ weight.T, target)
        if loss == "squares":
            return weight.square().sum()
        return norms[loss](weight)

    for number in range(2):
        for model, optimizer in zip((ours[0], models[1]), optimizers, strict=True):
            optimizer.zero_grad()
            model(torch.tensor([3, LARGE // 2, number])).sum().backward()
            with Largest() if model is ours[0] else contextlib.nullcontext() as largest:
                loss_of(model.weight).backward()
                if number:
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            if model is ours[0]:
                assert largest.elements < LARGE * WIDTH
    torch.testing.assert_close(ours.state_dict()["0.weight"], models[1].weight.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "kind", ["SGD momentum decay", "SGD decay", "Adagrad decay", "Adam", "Adam decay", "RMSprop decay"]
)
@pytest.mark.parametrize("capacity", [0.1, 1.0])
def test_losses_over_several_chunks_train_as_in_torch(device, kind, capacity):
    """The gradient of a sum or norm is made of the rows of each chunk amid the step, which has updated others."""
    rows, width = (2_200_000, 1) if device == "cuda" else (180_000, WIDTH)
    made, numbers = KINDS[kind]
    models = []
    for _ in range(2):
        torch.manual_seed(1)
        models.append(nn.Sequential(nn.Embedding(rows, width)))
    optimizers = [made(each.parameters(), **numbers) for each in models]
    te.replace_embedding_bags(models[0], capacity=capacity, optimizer=optimizers[0])
    for _ in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            weight = model[0].weight
            (model(torch.tensor([3, rows - 1])).sum() + weight.square().sum() + weight.norm()).backward()
            optimizer.step()
    ours, theirs = (each.state_dict()["0.weight"] for each in models)
    torch.testing.assert_close(ours, theirs.to(ours.device), rtol=1e-4, atol=1e-5)


def test_a_table_behind_a_thousand_features_trains_as_in_torch(device):
    """Kernels number the bags of all features in int32, and a row of a chunk is a bag of its own."""
    rows = 2_100_000 if device == "cuda" else 10_000
    configs = [
        te.TableConfig(name="many", num_embeddings=4, embedding_dim=1, feature_names=[f"f{i}" for i in range(1030)]),
        te.TableConfig(name="large", num_embeddings=rows, embedding_dim=1),
    ]
    bags = te.TieredEmbeddingBagCollection(configs, optimizer=OPTIM.SGD, device=device)
    optimizer = OPTIM.SGD(bags.parameters(), lr=0.25)
    bags.follow(optimizer)
    weight = dict(bags.named_parameters())["tables.large.weight"]
    before = weight.detach().clone()
    weight.square().sum().backward()
    optimizer.step()
    torch.testing.assert_close(weight.detach(), before / 2)


def test_elements_that_tie_in_several_chunks_share_the_gradient():
    bag = te.TieredEmbedding(LARGE, WIDTH, optimizer=OPTIM.SGD, capacity=7)
    with torch.no_grad():
        bag.weight.zero_()
        bag.weight[0, :2], bag.weight[LARGE - 1, 5] = 5.0, -5.0
    bag.follow(OPTIM.SGD(bag.parameters(), lr=0.1))
    bag.weight.norm(float("inf")).backward()
    grad = bag.weight.grad.to_sparse().to_dense()
    torch.testing.assert_close(grad[[0, 0, LARGE - 1], [0, 1, 5]], torch.tensor([1, 1, -1]) / 3)
    assert grad.count_nonzero() == 3


def test_what_needs_all_rows_at_once_is_refused_where_memory_cannot_hold_them(monkeypatch):
    models, _ = pair("SGD", capacity=7)
    monkeypatch.setattr("tieredemb.tables.table_set.available_memory_bytes", lambda: 100)
    with pytest.raises(StorageFullError, match="as one tensor needs"):
        models[0].items.weight.exp()


# --- what cannot be ---------------------------------------------------------------------------------------------------


def test_a_batch_that_is_refused_updates_no_row(device):
    models, optimizers = pair("Adam", capacity=7)
    items, before = models[0].items, list(models[0].state_dict().values())

    def step():
        (items(torch.tensor([1, ITEMS])).sum() + items.weight.square().sum()).backward()
        optimizers[0].step()
        models[0].state_dict()  # a GPU says by now that it has refused the batch

    with pytest.raises(IdOutOfRangeError, match="out of range"):
        step()
    assert_same_bits(list(models[0].state_dict().values()), before)


def test_a_backward_that_fails_leaves_nothing(device):
    models, optimizers = pair("Adam", capacity=7)
    model = models[0]
    before = list(model.state_dict().values())

    with pytest.raises(RuntimeError, match="planted"):
        (
            scored(model, *batch(0))
            + FailsBackward.apply(model.of(batch(1)[0])).sum() * 0
            + regularised(model, *batch(2))
        ).backward()
    optimizers[0].zero_grad()
    optimizers[0].step()
    assert_same_bits(list(model.state_dict().values()), before)


@pytest.mark.parametrize("loss", [scored, regularised])
def test_rows_that_change_between_forward_and_backward_are_refused(device, loss):
    models, _ = pair("SGD", capacity=7)
    value = loss(models[0], *batch(0))
    with torch.no_grad():
        models[0].items.weight.mul_(2)
    with pytest.raises(BackwardError, match="were updated or written to"):
        value.backward()


def test_rows_that_change_between_backward_and_step_are_refused(device):
    models, optimizers = pair("SGD", capacity=7)
    regularised(models[0], *batch(0)).backward()
    with torch.no_grad():
        models[0].items.weight.mul_(2)
    before = list(models[0].state_dict().values())
    with pytest.raises(BackwardError, match="were updated or written to"):
        optimizers[0].step()
    assert_same_bits(list(models[0].state_dict().values()), before)
    optimizers[0].zero_grad()


def test_sparse_adam_is_refused_as_in_torch(device):
    bag = te.TieredEmbedding(ITEMS, WIDTH, optimizer=OPTIM.SparseAdam)
    optimizer = OPTIM.SparseAdam(list(bag.parameters()), lr=0.1)
    bag.follow(optimizer)
    bag.weight.square().sum().backward()
    with pytest.raises(UnsupportedError, match="takes sparse gradients alone"):
        optimizer.step()


def test_tables_that_are_updated_in_backward_refuse_it(device):
    bag = te.TieredEmbedding(ITEMS, WIDTH, optimizer=te.SGD(lr=0.1))
    with pytest.raises(UnsupportedError, match="no gradient reaches this tiered table"):
        bag.weight.square().sum().backward()
    with pytest.raises(UnsupportedError, match="no gradient reaches this tiered table"):
        (torch.ones(1, WIDTH) @ bag.weight.T).sum().backward()


def test_a_frozen_table_is_read_alone(device):
    models, optimizers = pair("SGD", capacity=7)
    for model, optimizer in zip(models, optimizers, strict=True):
        model.items.weight.requires_grad_(False)
        (scored(model, *batch(0)) + model.items.weight.square().sum()).backward()
        optimizer.step()
    assert_equal_models(models)
