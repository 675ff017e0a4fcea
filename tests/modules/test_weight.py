"""`.weight` and `scores`: reading whole tables as code for `nn.Embedding` does, at any capacity, tier and optimizer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from devices import assert_close, equal, idle, randint, randn
from torch import nn

import tieredemb as te
from tieredemb.errors import (
    BackwardError,
    ConfigError,
    DeviceMemoryError,
    InvalidInputError,
    StorageFullError,
    UnsupportedError,
)
from tieredemb.tables import table_set

OPTIMIZERS = [te.SGD(lr=0.1), te.AdamW(lr=0.1, weight_decay=0.1)]


def trained(optimizer=None, *, rows=40, make=te.TieredEmbedding, **options):
    """A module of which some rows were used, and moved where there is an optimizer."""
    module = make(rows, 4, **{"capacity": 3} | options, optimizer=optimizer)
    for seed in range(3):
        out = module(randint(0, rows, (2, 3), seed=seed))
        if optimizer is not None:
            out.sum().backward()
    return module


def storages(tmp_path):
    return {"default": None, "host": te.HostMemory(), "file": te.File(str(tmp_path / "rows"))}


# --- reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [te.TieredEmbedding, te.TieredEmbeddingBag])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("tier", ["default", "host", "file"])
def test_weight_without_gradients_is_a_copy_of_the_table(device, tmp_path, tier, optimizer, make):
    module = trained(optimizer, make=make, storage=storages(tmp_path)[tier])
    expected = module.state_dict()["weight"]
    x = randn(5, 4, seed=0)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert equal(module.weight.clone(), expected)
            assert_close(x @ module.weight.T, x.cpu() @ expected.T)
            assert_close(nn.functional.linear(x, module.weight), x.cpu() @ expected.T)
            assert module.weight.clone().device == module.tables.config.device
            assert type(x @ module.weight.T) is torch.Tensor
    for copied in (module.weight.detach(), module.weight.data):
        assert equal(copied.clone(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_weight_tells_what_it_is_and_reads_nothing(device, monkeypatch, dtype):
    module = te.TieredEmbedding(40, 4, dtype=dtype)
    monkeypatch.setattr(table_set.TableSet, "weight", lambda *_: pytest.fail("the table was read"))
    weight, where = module.weight, module.tables.config.device
    assert isinstance(weight, torch.Tensor)
    assert not isinstance(weight, nn.Parameter)
    assert (weight.shape, weight.size(0), len(weight), weight.numel(), weight.dim()) == ((40, 4), 40, 40, 160, 2)
    assert (weight.dtype, weight.device, weight.requires_grad) == (dtype, where, True)
    assert weight.is_cuda == (where.type == "cuda")
    assert (weight.nbytes, weight.is_floating_point()) == (160 * dtype.itemsize, True)
    assert repr(weight) == f"TableWeight((40, 4), dtype={dtype}, device={str(where)!r})"
    assert torch.ones(160).view_as(weight).shape == (40, 4)
    ones = torch.ones(3, dtype=torch.float64)
    made = [
        weight.new_zeros(3),
        torch.zeros_like(weight),
        weight.new_ones((2, 2)),
        ones.to(weight),
        ones.type_as(weight),
    ]
    assert {(each.dtype, each.device) for each in made} == {(dtype, where)}
    assert list(module.parameters()) == []


def test_weight_with_gradients_is_refused_with_what_to_do(device):
    module, x = trained(te.SGD(lr=0.1)), randn(2, 4, seed=0)
    for read in (lambda: x @ module.weight.T, lambda: nn.functional.linear(x, module.weight), lambda: module.weight[3]):
        with pytest.raises(UnsupportedError, match=r"no_grad.*scores"):
            read()
    module.requires_grad_(False)
    x.requires_grad_()
    (x @ module.weight.T).sum().backward()
    assert_close(x.grad, module.state_dict()["weight"].sum(0).expand(2, 4))


def test_requires_grad_of_the_weight_is_that_of_the_module(device):
    module = trained(te.SGD(lr=0.1))
    module.weight.requires_grad = False
    assert not module.is_trainable
    assert not module.weight.requires_grad
    module.weight.requires_grad_()
    assert module.is_trainable


WRITES = {
    "nn.init": lambda m: nn.init.xavier_uniform_(m.weight),
    "nn.init of zeros": lambda m: nn.init.zeros_(m.weight),
    "nn.init of normal values": lambda m: nn.init.normal_(m.weight),
    "nn.init of data": lambda m: nn.init.uniform_(m.weight.data),
    "data.copy_": lambda m: m.weight.data.copy_(torch.zeros(40, 4)),
    "data.normal_": lambda m: m.weight.data.normal_(),
    "a row of data": lambda m: m.weight.data[2].zero_(),
    "an element of data": lambda m: m.weight.data.__setitem__((2, 0), 1.0),
    "a view of a view": lambda m: m.weight.detach().T.view(4, 40).chunk(2)[1].mul_(2),
    "a row": lambda m: m.weight.__setitem__(2, torch.zeros(4)),
    "+=": lambda m: m.weight.__iadd__(1),
    "data +=": lambda m: m.weight.data.__iadd__(1),
    "out=": lambda m: torch.add(torch.ones(40, 4), 1, out=m.weight.data),
    "assignment": lambda m: setattr(m, "weight", nn.Parameter(torch.zeros(40, 4))),
    "assignment of data": lambda m: setattr(m.weight, "data", torch.zeros(40, 4)),
}


@pytest.mark.parametrize("way", WRITES)
def test_weight_refuses_what_would_change_no_row(device, way):
    module = trained()
    for context in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with context(), pytest.raises(UnsupportedError, match="load_state_dict"):
            WRITES[way](module)


def test_copies_of_the_weight_may_be_written(device):
    module = trained()
    before = module.state_dict()["weight"]
    module.weight.data.clone().zero_()
    (module.weight.data * 2).zero_()
    assert_close(torch.zeros(40, 4).copy_(module.weight.data), before)
    if device == "cpu":  # else it is another copy
        assert not module.weight.detach().cpu().numpy().flags.writeable
        assert not np.asarray(module.weight.detach().cpu()).flags.writeable
    assert equal(module.state_dict()["weight"], before)


@pytest.mark.parametrize(
    "ask", [lambda w: w.grad, lambda w: torch.optim.SGD([w], lr=1.0), lambda w: w.register_hook(print)]
)
def test_weight_is_no_parameter_and_says_so(device, ask):
    with pytest.raises(UnsupportedError, match="no parameter"):
        ask(trained(te.SGD(lr=0.1)).weight)


def test_weight_that_memory_cannot_hold_is_refused_with_the_way_out(device, monkeypatch):
    module = trained()
    monkeypatch.setattr(table_set, "available_memory_bytes", lambda: 40 * 4 * 4 - 1)
    monkeypatch.setattr(table_set, "free_bytes", lambda _: 40 * 4 * 4 - 1)
    error = DeviceMemoryError if device == "cuda" else StorageFullError
    with torch.no_grad(), pytest.raises(error, match=r"tieredemb\.scores"):
        module.weight.clone()
    assert module.weight.shape == (40, 4)
    assert te.scores(module, randn(2, 4, seed=0)).shape == (2, 40)


def test_compiled_code_reads_the_weight(device):
    module, x = trained(), randn(2, 4, seed=0)

    @torch.compile(backend="eager")
    def score(x):
        return (x * 2) @ module.weight.T + 1

    with torch.no_grad():
        assert_close(score(x), (x.cpu() * 2) @ module.state_dict()["weight"].T + 1)


def test_collection_has_no_weight_and_says_what_it_has(device):
    collection = te.TieredEmbeddingBagCollection([te.TableConfig(name="t", num_embeddings=9, embedding_dim=4)])
    assert not hasattr(collection, "weight")
    with pytest.raises(AttributeError, match=r"scores\(collection"):
        collection.weight  # noqa: B018
    with pytest.raises(AttributeError, match="nothing"):
        trained().nothing  # noqa: B018


# --- scores -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [None, *OPTIMIZERS], ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("capacity", [1, 0.2, 1.0])
@pytest.mark.parametrize("tier", ["default", "host", "file"])
def test_scores_are_the_products_with_every_row(device, tmp_path, monkeypatch, tier, capacity, optimizer):
    monkeypatch.setattr(table_set, "PART_BYTES", 7 * 16)  # several parts, and a shorter one at the end
    module = trained(optimizer, capacity=capacity, storage=storages(tmp_path)[tier])
    before, counted = module.state_dict()["weight"], module.stats()
    for shape in ((4,), (3, 4), (2, 3, 4), (0, 4)):
        x = randn(*shape, seed=1)
        out = te.scores(module, x)
        assert (out.shape, out.device, out.requires_grad) == ((*shape[:-1], 40), x.device, False)
        assert_close(out, x.cpu() @ before.T)
    now = module.stats()  # on a GPU rows are read where they were written back to
    assert replace(now, bytes_written_back=0) == replace(counted, bytes_written_back=0)
    assert idle(module)
    assert equal(module.state_dict()["weight"], before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scores_have_the_dtype_of_the_rows(device, dtype):
    module = trained(dtype=dtype)
    x = randn(3, 4, seed=0).to(dtype)
    assert_close(te.scores(module, x), x.cpu() @ module.state_dict()["weight"].T, rtol=2e-2, atol=2e-2)


def test_scores_leave_rows_that_were_never_used_where_they_are(tmp_path):
    path = tmp_path / "rows"
    module = te.TieredEmbedding(200_000, 16, capacity=10, storage=te.File(str(path)), device="cpu")
    used = sum(each.stat().st_blocks for each in tmp_path.iterdir())
    te.scores(module, torch.ones(1, 16))
    assert sum(each.stat().st_blocks for each in tmp_path.iterdir()) == used


@pytest.mark.parametrize("optimizer", [None, *OPTIMIZERS], ids=lambda each: type(each).__name__)
def test_scores_have_a_gradient_for_x_and_none_for_the_table(device, monkeypatch, optimizer):
    monkeypatch.setattr(table_set, "PART_BYTES", 7 * 16)
    module = trained(optimizer)
    before = module.state_dict()["weight"]
    x, upstream = randn(2, 3, 4, seed=0).requires_grad_(), randn(2, 3, 40, seed=1)
    te.scores(module, x).backward(upstream)
    assert_close(x.grad, upstream.cpu() @ before)
    assert equal(module.state_dict()["weight"], before)


def test_scores_in_a_step_train_what_x_came_from(device):
    """The tower's gradient passes through the scores to the ids that were looked up, and not to the other rows."""
    module = te.TieredEmbedding(40, 4, capacity=3, optimizer=te.SGD(lr=0.1))
    plain = module.state_dict()["weight"].requires_grad_()
    ids, labels = torch.tensor([1, 2]), torch.tensor([3, 4])
    for _ in range(3):
        nn.functional.cross_entropy(te.scores(module, module(ids)), labels).backward()
        nn.functional.cross_entropy(plain[ids.cpu()] @ plain.detach().T, labels.cpu()).backward()
        with torch.no_grad():
            plain -= 0.1 * plain.grad
            plain.grad = None
    assert_close(module.state_dict()["weight"], plain.detach())


def test_gradient_of_scores_of_rows_that_have_changed_is_refused(device):
    module, x = trained(te.SGD(lr=0.1)), randn(2, 4, seed=0).requires_grad_()
    changes = [
        lambda: module(torch.tensor([1])).sum().backward(),
        lambda: module.load_state_dict(module.state_dict()),
    ]
    for change in changes:
        out = te.scores(module, x)
        change()
        with pytest.raises(BackwardError, match="take the scores again"):
            out.sum().backward()
    te.scores(module, x).sum().backward()


def test_scores_with_a_gradient_are_refused_where_lookups_scale_rows(device):
    module, x = trained(max_norm=0.5), randn(2, 4, seed=0)
    assert_close(te.scores(module, x), x.cpu() @ module.state_dict()["weight"].T)
    with pytest.raises(UnsupportedError, match="max_norm"):
        te.scores(module, x.requires_grad_())


def test_scores_of_a_collection_are_those_of_the_table_named(device):
    tables = [te.TableConfig(name=n, num_embeddings=r, embedding_dim=d) for n, r, d in (("a", 9, 4), ("b", 7, 2))]
    collection = te.TieredEmbeddingBagCollection([*tables, te.TableConfig(name="c", num_embeddings=5, embedding_dim=4)])
    for name, width in (("a", 4), ("b", 2), ("c", 4)):
        x = randn(3, width, seed=0)
        expected = x.cpu() @ collection.state_dict()[f"tables.{name}.weight"].T
        assert_close(te.scores(collection, x, table=name), expected)
    for table in (None, "d"):
        with pytest.raises(ConfigError, match="'a', 'b', 'c'"):
            te.scores(collection, x, table=table)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: torch.ones(3, 5), InvalidInputError, "table's 4 columns"),
        (lambda: torch.tensor(1.0), InvalidInputError, "table's 4 columns"),
        (lambda: torch.ones(3, 4).double(), InvalidInputError, "float32, got torch.float64"),
        (lambda: [1.0] * 4, TypeError, "must be a tensor"),
    ],
)
def test_scores_refuse_an_x_that_does_not_fit(device, make, error, message):
    with pytest.raises(error, match=message):
        te.scores(trained(), make())
    with pytest.raises(ConfigError, match="Linear"):
        te.scores(nn.Linear(4, 4), torch.ones(4))
