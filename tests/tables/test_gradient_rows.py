"""The elements of tables' gradients: what user code does to them has the effect that it has on whole tables."""

from __future__ import annotations

import copy
import gc
import math
import pickle

import pytest
import torch
from devices import assert_close, assert_same_bits, equal, idle, on_cpu, randn
from following import loss_of, pair, states, tensors
from pairs import parametrize_pairs
from torch import nn

import tieredemb as te
from tieredemb.errors import InvalidInputError, UnsupportedError

SOME_KINDS = ("SGD", "Adam", "Adagrad weight_decay", "SGD nesterov")


def assert_equal_models(models):
    for ours, theirs in zip(*map(tensors, models), strict=True):
        assert_close(ours, theirs)


def of_tables(model):
    """The parameters of its tables."""
    return [each for name, each in model.named_parameters() if name.startswith("tables")]


def make(optimizer=torch.optim.SGD, **keywords):
    return te.TieredEmbeddingBag(30, 4, mode="sum", capacity=3, optimizer=optimizer, **keywords)


def follower(kind=torch.optim.SGD, **keywords):
    bag = make(kind, **keywords)
    optimizer = kind(bag.parameters(), lr=1.0)
    bag.follow(optimizer)
    return bag, optimizer


def weight(bag):
    """A copy, where the table lies."""
    return bag.weight.detach().clone()


# --- between backward and step ----------------------------------------------------------------------------------------


def clipped_by_value(model):
    nn.utils.clip_grad_value_(model.parameters(), 0.002)


def clipped_one_by_one(model):
    nn.utils.clip_grad_value_(model.parameters(), 0.002, foreach=False)


def signs(model):
    for p in model.parameters():
        p.grad = p.grad.sign()


def scaled_by_element(model):
    for p in model.parameters():
        p.grad.div_(1 + p.grad.abs().max()).tanh_()


def centralised(model):
    for p in model.parameters():
        p.grad.sub_(p.grad * p.grad.mean()).add_(p.grad, alpha=-0.5)


def masked_by_rows(model):
    for p in of_tables(model):
        p.grad[:2] = 0
        p.grad.data[torch.tensor([2, 1])] = 0.0
        p.grad[torch.arange(len(p), device=p.device) == len(p) - 1, :] = 0


def masked_by_a_tensor(model):
    for p in of_tables(model):
        mask = (torch.arange(p.numel(), device=p.device).reshape(p.shape) % 3 == 0).float()
        p.grad.mul_(mask)
        p.grad = p.grad.masked_fill((torch.arange(len(p), device=p.device) % 2 == 0)[:, None], 0.0)


def projected(model):
    for p in of_tables(model):
        p.grad = p.grad - 0.5 * (p.grad * p.grad).sum() * p.grad.clone()


def given_sparse(model):
    for p in of_tables(model):
        p.grad = (
            (p.grad * 0.5).to_sparse() if isinstance(p, nn.Parameter) and type(p) is not nn.Parameter else p.grad / 2
        )


def given_dense(model):
    for p in of_tables(model):
        p.grad = torch.full(p.shape, 0.25, device=p.device)


def with_its_square(model):
    for p in model.parameters():
        p.grad = 0.1 * p.grad  # else rows grow until float32 holds few of their digits
        p.grad = p.grad + (p.grad * p.grad) * 3 + p.grad**3


def then_multiplied(model):
    clipped_by_value(model)
    nn.utils.clip_grad_norm_(model.parameters(), 0.001)
    torch._foreach_mul_([p.grad for p in model.parameters()], 0.5)


def then_zeroed(model):
    clipped_by_value(model)
    of_tables(model)[0].grad.zero_()


def and_another_backward(model):
    clipped_by_value(model)
    loss_of(model, 77).backward()


def between_backwards(model):
    for p in model.parameters():
        p.grad = p.grad.clamp(max=0.001)
    loss_of(model, 78).backward()
    clipped_one_by_one(model)


CHANGES = (
    clipped_by_value, clipped_one_by_one, signs, scaled_by_element, centralised, masked_by_rows, masked_by_a_tensor,
    projected, given_sparse, with_its_square, then_multiplied, then_zeroed, and_another_backward, between_backwards,
)  # fmt: skip


@parametrize_pairs(change=CHANGES, kind=SOME_KINDS, capacity=[1, 3, 1.0])
def test_a_gradient_is_changed_as_torch_changes_it(device, change, kind, capacity):
    models, optimizers = pair(kind, capacity=capacity)
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            change(model)
            optimizer.step()
    assert_equal_models(models)
    assert idle(models[0].tables)


def test_every_row_of_a_gradient_can_be_set(device):
    models = [nn.Embedding(300, 4), nn.Embedding(300, 4)]
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.1) for each in models]
    models[1].load_state_dict(models[0].state_dict())
    ours = te.replace_embedding_bags(nn.Sequential(models[0]), capacity=7, optimizer=optimizers[0])
    for model, optimizer in zip((ours, nn.Sequential(models[1])), optimizers, strict=True):
        for step in range(2):
            optimizer.zero_grad()
            model(torch.tensor([1, 5, 5])).square().sum().backward()
            (p,) = model.parameters()
            p.grad.add_(randn(300, 4, seed=step), alpha=0.1)
            optimizer.step()
    assert_close(ours[0].state_dict()["weight"], models[1].weight)


@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_bits_are_those_of_an_update_that_no_one_has_changed(device, kind):
    """Of all capacities; and so is the norm."""
    found, norms, first = [], [], None
    for changes, capacity in ((False, 3), (True, 3), (True, 1), (True, 1.0)):
        (model, _), (optimizer, _) = pair(kind, capacity=capacity)
        first = first or copy.deepcopy(model.state_dict())
        model.load_state_dict(first)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step, batch=300).backward()
            loss_of(model, step + 50, batch=20).backward()
            if changes:
                for p in of_tables(model):
                    p.grad.clamp_(-1e30, 1e30)
            norms.append(torch.stack([p.grad.norm() for p in of_tables(model)]).cpu())
            optimizer.step()
        found.append(tensors(model))
    for each in found[1:]:
        assert_same_bits(each, found[0])
    for at, each in enumerate(norms):
        assert_close(each, norms[at % 3])


def test_gradients_of_tasks_are_kept_and_added(device):
    models, optimizers = pair("Adam")
    for model, optimizer in zip(models, optimizers, strict=True):
        for step in range(2):
            of_tasks = []
            for task in range(3):
                optimizer.zero_grad()
                loss_of(model, 10 * step + task).backward()
                of_tasks.append([p.grad.clone() for p in model.parameters()])
            optimizer.zero_grad()
            for p, first, second, third in zip(model.parameters(), *of_tasks, strict=True):
                p.grad = first + torch.add(second, third, alpha=0.5)
            optimizer.step()
    assert_equal_models(models)


def test_a_copy_of_a_gradient_stays_what_it_was(device):
    bag, optimizer = follower()
    bag(torch.tensor([[1, 2]])).sum().backward()
    kept, doubled = bag.weight.grad.clone(), bag.weight.grad * 2
    squares = bag.weight.grad**2
    bag.weight.grad.mul_(0.0)
    assert kept.norm() > 0
    bag(torch.tensor([[2, 3]])).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    want = torch.zeros(30, 4)
    want[[1, 2]] = 1
    assert equal(kept.to_sparse().to_dense(), want)
    assert equal(doubled.to_sparse().to_dense(), want * 2)
    assert squares.sum() == 8
    assert equal(squares.to_sparse().to_dense(), want)
    assert_close(kept[torch.tensor([2, 0, 1])], want[[2, 0, 1]])
    assert equal(pickle.loads(pickle.dumps(kept)).to_sparse().to_dense(), want)
    assert (kept.sum(), kept.mean(), kept.max(), kept.min(), kept.abs().max()) == (8, 8 / 120, 1, 0, 1)
    assert_close(kept.norm(1), torch.tensor(8.0))
    before = weight(bag)
    bag.weight.grad = kept
    optimizer.step()
    assert equal(weight(bag), before - want)
    del bag, optimizer
    gc.collect()
    assert kept.sum() == 8


def test_gradients_that_are_set_by_hand_are_scaled_and_unscaled(device):
    models, optimizers = pair("SGD")
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10)
    for step in range(2):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            if model is models[0]:
                scaler.scale(loss_of(model, step)).backward()
                for p in of_tables(model):
                    p.grad.clamp_(min=-2.0)
                scaler.step(optimizer)
                scaler.update()
            else:
                loss_of(model, step).backward()
                for p in of_tables(model):
                    p.grad.clamp_(min=-2.0 / 2**10)
                optimizer.step()
    assert_equal_models(models)


def test_an_infinite_gradient_by_row_skips_the_step_of_a_scaler(device):
    bag, optimizer = follower()
    scaler, before = torch.amp.GradScaler(device), weight(bag)
    scaler.scale(bag(torch.tensor([[1, 2]])).sum()).backward()
    bag.weight.grad[1] = math.inf
    scaler.step(optimizer)
    assert equal(weight(bag), before)


def test_a_gradient_and_a_tensor_of_all_elements_make_a_tensor(device):
    bag, optimizer = follower()
    before = weight(bag)
    bag(torch.tensor([[1, 2]])).sum().backward()
    grad, ones = bag.weight.grad, torch.ones(30, 4)
    want = torch.zeros(30, 4)
    want[[1, 2]] = 1
    for made in (ones + grad, grad + ones, grad.add(ones), ones.clone().add_(grad), torch.add(ones, grad)):
        assert type(made) is torch.Tensor
        assert equal(made, ones + want)
    assert equal(torch.zeros(30, 4).copy_(grad), want)
    assert equal(torch.where(torch.eye(30, 4) > 0, grad, ones), torch.where(torch.eye(30, 4) > 0, want, ones))
    grad.masked_fill_(torch.eye(30, 4) > 0, 3.0)
    optimizer.step()
    want.masked_fill_(torch.eye(30, 4) > 0, 3.0)
    assert equal(weight(bag), before - want)


REFUSED = {
    "add_": lambda g: g.add_(1.0),
    "select": lambda g: g[0],
    "slice": lambda g: g[1:],
    "a choice of columns": lambda g: g.__setitem__((slice(None), 0), 0.0),
    "a choice of elements": lambda g: g.__setitem__(torch.ones(30, 4, dtype=torch.bool), 0.0),
    "rows": lambda g: g.__setitem__(slice(2), torch.ones(2, 4)),
    "reciprocal": lambda g: 2.0 / g,
    "a comparison": lambda g: g > 0,
    "fill_": lambda g: g.fill_(1.0),
    "view": lambda g: g.view(-1),
    "cat": lambda g: torch.cat([g, g]),
    "cumsum": lambda g: g.cumsum(0),
    "softmax": lambda g: g.softmax(1),
    "matmul": lambda g: g @ torch.ones(4, 4),
    "numpy": lambda g: g.cpu().numpy(),
    "half": lambda g: g.half(),
    "norm of order 0": lambda g: g.norm(0),
    "least": lambda g: g.norm(-math.inf),
    "tolist": lambda g: g.tolist(),
    "_foreach_add_": lambda g: torch._foreach_add_([g], 1.0),
    "not finite": lambda g: g.sign().mul_(math.inf),
    "into a number": lambda g: torch.ones(()).add_(g),
    "a norm over some": lambda g: g.norm(dim=0),
    "a sum over some": lambda g: g.sum(1),
    "a maximum over some": lambda g: g.max(dim=0),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_makes_a_gradient_of_every_row_is_refused(device, name):
    bag, optimizer = follower()
    before = weight(bag)
    bag(torch.tensor([[1, 2]])).sum().backward()
    with pytest.raises(UnsupportedError, match="of a table's gradient would make a gradient of every row"):
        REFUSED[name](bag.weight.grad)
    assert_close(bag.weight.grad.norm(), torch.tensor(8.0).sqrt())
    optimizer.step()
    assert equal(weight(bag)[[1, 2]], before[[1, 2]] - 1.0)


def test_what_is_no_gradient_of_a_table_is_refused(device):
    bag, optimizer = follower(torch.optim.Adam)
    before = weight(bag)
    for given in (torch.ones(30, 3), torch.ones(29, 4).to_sparse(), 3.0):
        with pytest.raises(InvalidInputError, match=r"the gradient of a table of shape \(30, 4\).*got"):
            bag.weight.grad = given
    bag(torch.tensor([[1, 2]])).sum().backward()
    with pytest.raises(InvalidInputError, match=r"has that shape"):
        bag.weight.grad + torch.ones(7, 4)
    optimizer.step()
    assert not equal(weight(bag), before)
    padded = te.TieredEmbedding(30, 4, padding_idx=5, capacity=3, optimizer=torch.optim.SGD)
    optimizer = torch.optim.SGD(padded.parameters(), lr=1.0)
    padded.follow(optimizer)
    padded(torch.tensor([5, 6])).sum().backward()
    padded.weight.grad.clamp_(max=0.5)
    before = weight(padded)
    optimizer.step()
    assert equal(weight(padded)[5:7], before[5:7] - torch.tensor([[0.0], [0.5]]))
    padded.weight.grad = torch.ones(30, 4)  # as in torch, lookups alone leave padding out
    optimizer.step()
    assert equal(weight(padded)[5:7], before[5:7] - torch.tensor([[1.0], [1.5]]))


# --- hooks ------------------------------------------------------------------------------------------------------------


@parametrize_pairs(kind=SOME_KINDS, capacity=[1, 1.0])
def test_hooks_of_a_table_are_called_with_its_gradient(device, kind, capacity):
    models, optimizers = pair(kind, capacity=capacity)
    for model in models:
        for p in model.parameters():
            p.register_hook(lambda grad: grad.clamp(-0.002, 0.002))
            p.register_hook(lambda grad: None)
            p.register_hook(lambda grad: grad * 2)
    for step in range(2):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            for backward in range(2):
                loss_of(model, 10 * step + backward).backward()
            optimizer.step()
    assert_equal_models(models)
    assert idle(models[0].tables)


def test_a_hook_is_removed_and_one_of_some_tables_leaves_others(device):
    models, optimizers = pair("Adam")
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            handle = of_tables(model)[1].register_hook(torch.sign)
            optimizer.zero_grad()
            loss_of(model, step).backward()
            handle.remove()
            loss_of(model, step + 10).backward()
            optimizer.step()
    assert_equal_models(models)


def test_the_step_comes_in_backward(device):
    """As PyTorch's tutorial has it, to save memory."""
    bags = [make(torch.optim.Adam), on_cpu(nn.EmbeddingBag(30, 4, mode="sum"))]
    bags[1].load_state_dict(bags[0].state_dict())
    for bag in bags:
        optimizer = torch.optim.Adam(bag.parameters(), lr=0.1)
        if bag is bags[0]:
            bag.follow(optimizer)

        def step(p, optimizer=optimizer):
            assert p.grad.norm() > 0
            optimizer.step()
            optimizer.zero_grad()

        bag.weight.register_post_accumulate_grad_hook(step)
        for ids in ([1, 2], [2, 5], [1, 1]):
            bag(torch.tensor([ids], device=bag.weight.device)).square().sum().backward()
            assert bag.weight.grad is None
    assert_close(weight(bags[0]), bags[1].weight)


def test_a_hook_that_fails_leaves_the_gradient_as_it_was(device):
    bag, optimizer = follower()
    before = weight(bag)
    bag(torch.tensor([[1, 2]])).sum().backward()

    def fails(grad):
        raise ZeroDivisionError

    handle = bag.weight.register_hook(fails)
    with pytest.raises(ZeroDivisionError):
        bag(torch.tensor([[1, 3]])).sum().backward()
    handle.remove()
    optimizer.step()
    assert equal(weight(bag)[[1, 2, 3]], before[[1, 2, 3]] - torch.tensor([[1.0], [1.0], [0.0]]))
    gc.collect()
    assert idle(bag)
    bag.requires_grad_(False)
    with pytest.raises(RuntimeError, match="cannot register a hook"):
        bag.weight.register_hook(fails)


# --- torch.autograd.grad ----------------------------------------------------------------------------------------------


@parametrize_pairs(kind=SOME_KINDS, capacity=[1, 3, 1.0])
def test_gradients_are_asked_for_and_set(device, kind, capacity):
    models, optimizers = pair(kind, capacity=capacity)
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            params = list(model.parameters())
            for p, grad in zip(params, torch.autograd.grad(loss_of(model, step), params), strict=True):
                p.grad = grad
            optimizer.step()
    assert_equal_models(models)
    assert idle(models[0].tables)


def test_asking_for_gradients_trains_nothing_and_leaves_other_backwards_alone(device):
    models, optimizers = pair("Adam")
    for model, optimizer in zip(models, optimizers, strict=True):
        of_tables(model)[0].register_hook(lambda grad: grad * 0.5)
        loss = loss_of(model, 1) * 2
        table, bias = of_tables(model)[0], model.top.bias
        first = torch.autograd.grad(
            [loss, model.top.bias.sum()], [bias, table], [torch.tensor(3.0), None], retain_graph=True
        )
        if model is models[0]:
            before = tensors(model)
            optimizer.step()  # has nothing to take
            assert_same_bits(tensors(model), before)
            ours = first
        else:
            assert_close(ours[0], first[0])
            assert_close(ours[1].to_sparse().to_dense(), first[1])
        loss.backward()
        optimizer.step()
    assert_equal_models(models)
    assert states(optimizers[0])[0]["step"] == 1


def test_a_table_that_a_loss_does_not_reach_has_no_gradient(device):
    bag, _ = follower()
    other, linear = make(), nn.Linear(4, 1)
    other.follow(torch.optim.SGD(other.parameters(), lr=0.1))
    loss = linear(bag(torch.tensor([[1, 2]]))).sum()
    with pytest.raises(RuntimeError, match="allow_unused=True"):
        torch.autograd.grad(loss, [linear.weight, other.weight], retain_graph=True)
    found = torch.autograd.grad(loss, [other.weight, linear.weight], allow_unused=True, retain_graph=True)
    assert found[0] is None
    assert found[1].norm() > 0
    found = torch.autograd.grad(loss, [other.weight, bag.weight], materialize_grads=True, retain_graph=True)
    assert found[0].norm() == 0 < found[1].norm()
    with pytest.raises(UnsupportedError, match="create_graph=True"):
        torch.autograd.grad(loss, [bag.weight], create_graph=True)
    bag.requires_grad_(False)
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.autograd.grad(loss, [bag.weight])
    fused = te.TieredEmbeddingBag(30, 4, capacity=3, optimizer=te.SGD(lr=0.1))
    with pytest.raises(UnsupportedError, match="leave the table out of the inputs"):
        torch.autograd.grad(fused(torch.tensor([[1]])).sum(), [fused.weight])


# --- every kind of lookup ---------------------------------------------------------------------------------------------


class Rows(nn.Module):
    """Rows of ids of several tables, not pooled."""

    def __init__(self, tiered):
        super().__init__()
        names, widths = ("a", "b"), 4
        if tiered:
            tables = [te.TableConfig(name=name, num_embeddings=20, embedding_dim=widths) for name in names]
            self.tables = te.TieredEmbeddingCollection(tables, capacity=3, optimizer=torch.optim.Adagrad)
        else:
            self.tables = on_cpu(nn.ModuleDict({name: nn.Embedding(20, widths) for name in names}))

    def forward(self, ids):
        given = {name: ids[number] for number, name in enumerate("ab")}
        if isinstance(self.tables, te.TieredEmbeddingCollection):
            found = self.tables(given)
        else:
            found = {name: table(given[name].cpu()) for name, table in self.tables.items()}
        return torch.cat([found["a"].reshape(-1, 4), found["b"].reshape(-1, 4)])


def test_rows_that_are_not_pooled(device):
    models = [Rows(True), Rows(False)]
    for ours, theirs in zip(models[0].state_dict().values(), models[1].tables.values(), strict=True):
        theirs.weight.data.copy_(ours)
    for model in models:
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        if model is models[0]:
            model.tables.follow(optimizer)
        for step in range(3):
            optimizer.zero_grad()
            ids = torch.tensor([[1, 2, 2], [5 + step, 7, 7]])
            out = model(ids)
            (out.square() * (1 + torch.arange(6, device=out.device))[:, None]).sum().backward()
            nn.utils.clip_grad_value_(model.parameters(), 1.5)
            optimizer.step()
    for ours, theirs in zip(models[0].state_dict().values(), models[1].tables.values(), strict=True):
        assert_close(ours, theirs.weight)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keywords", [{}, {"padding_idx": 2}, {"max_norm": 1.0}])
def test_bags_of_every_kind(device, mode, dtype, keywords):
    bag = te.TieredEmbeddingBag(30, 4, mode=mode, capacity=2, optimizer=torch.optim.SGD, dtype=dtype, **keywords)
    other = on_cpu(nn.EmbeddingBag(30, 4, mode=mode, **keywords))
    other.weight.data.copy_(weight(bag))
    ids, offsets, has_weights = torch.tensor([1, 2, 2, 9, 2, 1]), torch.tensor([0, 3, 3]), mode == "sum"
    for each in (bag, other):
        weights = (
            torch.linspace(0.5, 2, 6).to(each.weight.device) if has_weights and "max_norm" not in keywords else None
        )
        optimizer = torch.optim.SGD(each.parameters(), lr=1.0)
        if each is bag:
            bag.follow(optimizer)
        where = "cpu" if each is other else ids.device
        out = each(ids.to(where), offsets.to(where), weights if weights is None else weights.to(each.weight.dtype))
        out.float().backward(randn(3, 4, seed=3).to(out))
        nn.utils.clip_grad_value_(each.parameters(), 0.75)
        optimizer.step()
    assert_close(
        weight(bag), other.weight, check_dtype=False, **({} if dtype is torch.float32 else {"atol": 0.02, "rtol": 0.02})
    )


def test_gradients_that_are_divided_by_frequencies(device):
    options = {"padding_idx": 3, "scale_grad_by_freq": True}
    ours = te.TieredEmbedding(30, 4, capacity=2, optimizer=torch.optim.SGD, **options)
    theirs = on_cpu(nn.Embedding(30, 4, **options))
    theirs.weight.data.copy_(weight(ours))
    for each in (ours, theirs):
        optimizer = torch.optim.SGD(each.parameters(), lr=1.0)
        if each is ours:
            ours.follow(optimizer)
        each(torch.tensor([1, 2, 2, 3, 9, 2], device=each.weight.device)).square().sum().backward()
        nn.utils.clip_grad_value_(each.parameters(), 0.75)
        optimizer.step()
    assert_close(weight(ours), theirs.weight)


def test_converted_tables_of_one_cache(device):
    models = [nn.ModuleList([nn.Embedding(20 + 7 * n, 4) for n in range(4)]) for _ in "ab"]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.1) for model in models]
    te.replace_embedding_bags(models[0], capacity=5, optimizer=optimizers[0])
    for model, optimizer in zip(models, optimizers, strict=True):
        for step in range(3):
            optimizer.zero_grad()
            for number, table in enumerate(model):
                if number != step:  # some are not looked up
                    table(torch.tensor([number, 3, 3 + step])).square().sum().backward()
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            nn.utils.clip_grad_value_([p for p in model.parameters() if p.grad is not None], 0.3)
            assert len(grads) == 4 - (step < 4)
            optimizer.step()
    for ours, theirs in zip(*models, strict=True):
        assert_close(weight(ours), theirs.weight)


# --- as objects -------------------------------------------------------------------------------------------------------


X = torch.tensor([[1, 2, 3], [3, 4, 5]])


class Small(nn.Module):
    """One table and a dense layer."""

    def __init__(self):
        super().__init__()
        self.tables = nn.EmbeddingBag(20, 4, mode="sum")
        self.top = nn.Linear(4, 1)

    def forward(self, ids=X):
        return self.top(self.tables(ids.to(self.top.weight.device))).square().sum()


def kept_over_zero_grad(model, optimizer):
    p = model.tables.weight
    model().backward()
    old, view = p.grad, p.grad.data.detach()
    optimizer.zero_grad()
    model(X + 5).backward()
    p.grad = p.grad + old + view
    optimizer.step()


def kept_over_a_step(model, optimizer):
    p = model.tables.weight
    model().backward()
    old = p.grad
    optimizer.step()
    optimizer.zero_grad()
    p.grad = old * 0.5
    optimizer.step()


def changed_after_it_was_assigned(model, optimizer):
    p = model.tables.weight
    p.grad = buffer = torch.zeros(p.shape, device=p.device)
    model().backward()
    buffer.mul_(0.1)
    optimizer.step()
    optimizer.zero_grad()
    model().backward()
    p.grad = half = p.grad.clone()
    half.mul_(0.5)
    optimizer.step()


def asked_for_and_clipped(model, optimizer):
    p = model.tables.weight
    (p.grad,) = torch.autograd.grad(model(), [p])
    nn.utils.clip_grad_norm_([p], 1.0)
    optimizer.step()


def of_every_row(model, optimizer):
    p = model.tables.weight
    p.grad = torch.ones(p.shape, device=p.device)
    assert p.grad.norm() > 0
    assert repr(p.grad)
    p.grad.mul_(0.5)
    p.grad += p.grad.clone()
    nn.utils.clip_grad_value_([p], 0.3)
    optimizer.step()


def begun_with_zeros(model, optimizer):
    p = model.tables.weight
    p.grad = torch.zeros_like(p)
    (grad,) = torch.autograd.grad(model(), [p])
    p.grad = p.grad + grad
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    nn.utils.clip_grad_value_([p], 1.0)
    model().backward()
    optimizer.step()


def by_rows_and_columns(model, optimizer):
    p = model.tables.weight
    model().backward()
    rows = torch.linspace(0.5, 1, 20, device=p.device)[:, None]
    p.grad.mul_(rows).mul_(torch.tensor([1.0, 0.0, 1.0, 1.0], device=p.device)).div_(rows)
    p.grad.masked_fill_(rows > 0.8, 0.0).clamp_(-rows, rows).abs_()
    torch._foreach_abs_([p.grad])
    assert p.grad.view(20, 4).count_nonzero() == (p.grad.reshape(p.shape).amax() > 0) * p.grad.count_nonzero()
    assert p.grad.any()
    optimizer.step()


def stepped_twice(model, optimizer):
    model().backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.step()


def hooked_in_place(model, optimizer):
    def clamp(grad):
        grad.clamp_(-0.1, 0.1)

    model.tables.weight.register_hook(clamp)
    model().backward()
    optimizer.step()


def asked_whether_it_is_finite(model, optimizer):
    p = model.tables.weight
    model().backward()
    for _ in range(2):
        assert torch.isfinite(p.grad).shape == p.shape
        assert torch.isfinite(p.grad).all()
        assert not torch.isnan(p.grad).any()
        p.grad.clamp_(-1, 1)
    assert torch.isfinite(p.grad).sum() == 80
    assert (~torch.isfinite(p.grad)).count_nonzero() == torch.isinf(p.grad).sum() == 0
    p.grad.data[3] = math.inf
    assert torch.isinf(p.grad).any()
    assert not torch.isfinite(p.grad).all()


def kept_data(model, optimizer):
    p, others = model.tables.weight, torch.ones(20, 4, device=model.top.weight.device)
    old = p.data
    p.data = others
    model().backward()
    p.data = old
    p.data, others = others, p.data
    optimizer.step()
    p.data = (p.data + others) / 2


OBJECTS = (
    kept_over_zero_grad, kept_over_a_step, changed_after_it_was_assigned, asked_for_and_clipped, of_every_row,
    begun_with_zeros, by_rows_and_columns, stepped_twice, hooked_in_place,
    asked_whether_it_is_finite, kept_data,
)  # fmt: skip


def assert_trains_alike(habit, kind, *, by_class=False):
    models = [Small(), on_cpu(Small())]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        optimizer = None if by_class and model is models[0] else kind(model.parameters(), lr=0.1)
        if model is models[0]:
            te.replace_embedding_bags(model, capacity=5, optimizer=kind if by_class else optimizer)
        habit(model, optimizer or kind(model.parameters(), lr=0.1))
    for ours, theirs in zip(*(model.state_dict().values() for model in models), strict=True):
        assert_close(ours, theirs)


@pytest.mark.filterwarnings("ignore:no zero_grad", "ignore:the old weights")
@pytest.mark.parametrize("habit", OBJECTS)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_a_gradient_is_an_object_as_in_torch(device, habit, kind):
    assert_trains_alike(habit, kind)


def test_flags_of_a_gradient_are_no_mask(device):
    bag, _ = follower()
    bag(torch.tensor([[1, 2]])).sum().backward()
    for use in (
        lambda g, f: torch.where(f, g, 0.0),
        lambda g, f: g.masked_fill(f, 0.0),
        lambda g, f: g.__setitem__(f, 0),
    ):
        with pytest.raises(UnsupportedError, match=r"nan_to_num_|a choice of elements"):
            use(bag.weight.grad, torch.isnan(bag.weight.grad))


def stepped_by_a_closure(model, optimizer):
    def closure():
        optimizer.zero_grad()
        loss = model()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)


def resumed(model, optimizer):
    source = on_cpu(Small())
    its = type(optimizer)(source.parameters(), lr=0.1)
    source.load_state_dict({name: each.cpu() for name, each in model.state_dict().items()})
    for _ in range(3):
        its.zero_grad()
        source().backward()
        its.step()
    model.load_state_dict(source.state_dict())
    optimizer.load_state_dict(copy.deepcopy(its.state_dict()))
    for _ in range(3):
        optimizer.zero_grad()
        model().backward()
        optimizer.step()


@pytest.mark.parametrize("habit", [stepped_by_a_closure, resumed])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop, torch.optim.NAdam])
def test_an_optimizer_that_is_found_has_begun_before(device, habit, kind):
    """With a closure, or with a state that was loaded."""
    assert_trains_alike(habit, kind, by_class=True)


# --- updates by hand --------------------------------------------------------------------------------------------------


def in_place(params):
    for p in params:
        p.add_(p.grad, alpha=-0.1)


def by_difference(params):
    for p in params:
        p -= 0.1 * p.grad


def by_data(params):
    for p in params:
        p.data = p.data - 0.1 * p.grad.data


def by_lists(params):
    torch._foreach_add_(params, [p.grad for p in params], alpha=-0.1)


def perturbed(params):
    kept = [p.data.clone() for p in params]
    for p, before in zip(params, kept, strict=True):
        p.data.add_(p.grad / p.grad.norm())
        p.data = before - 0.1 * p.grad


@parametrize_pairs(
    update=[in_place, by_difference, by_data, by_lists, perturbed], kind=["SGD", "Adam"], capacity=[1, 1.0]
)
def test_an_update_by_hand_reaches_the_rows(device, update, kind, capacity):
    models, optimizers = pair(kind, capacity=capacity)
    for step in range(2):
        for model, optimizer in zip(models, optimizers, strict=True):
            loss_of(model, step).backward()
            with torch.no_grad():
                update(list(model.parameters()))
            optimizer.zero_grad()
    assert_equal_models(models)


def test_other_sums_with_a_gradient_are_refused(device):
    bag, _ = follower()
    before = weight(bag)
    bag(torch.tensor([[1, 2]])).sum().backward()
    p = bag.weight
    for update in (
        lambda: p.addcdiv_(p.grad, p.grad**2),
        lambda: p * p.grad,
        lambda: p.grad - p,
        lambda: p[:3].add_(p.grad),
        lambda: torch.dot(p.view(-1), p.grad),
    ):
        with torch.no_grad(), pytest.raises(UnsupportedError, match="of a table and a gradient of one"):
            update()
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        p.add_(p.grad)
    assert equal(weight(bag), before)
