"""`.weight` and `scores`: reading whole tables as code for `nn.Embedding` does, at any capacity, tier and optimizer."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from devices import assert_close, equal, idle, randint, randn
from torch import nn

import tieredemb as te
from tieredemb.errors import (
    BackwardError,
    BrokenCacheError,
    ConfigError,
    DeviceMemoryError,
    InvalidInputError,
    StorageError,
    StorageFullError,
    UnsupportedError,
)
from tieredemb.step import table_tensor
from tieredemb.tables import table_set
from tieredemb.tables.group import Group

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
    reads = (lambda: x @ module.weight.T, lambda: nn.functional.linear(x, module.weight), lambda: module.weight[3] + 0)
    for read in reads:
        before = module.state_dict()["weight"]
        out = read()
        assert out.requires_grad
        with pytest.raises(UnsupportedError, match=r"no_grad.*scores"):
            (out.sum() + module(torch.tensor([1])).sum()).backward()
        assert equal(module.state_dict()["weight"], before)
        assert idle(module)
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


# --- writing ----------------------------------------------------------------------------------------------------------


def seeded(fill):
    def filled(w):
        torch.manual_seed(3)
        fill(w)

    return filled


def assign_data(w):
    w.data = torch.full((40, 4), 2.0)


def in_place_operators(w):
    w *= 2
    w[:5] += 1
    w[3, 1] -= 4


def by_view_of_a_view(w):
    w.view(4, 40).T[3].unsqueeze(0).squeeze().fill_(7)


WRITES = {
    "nn.init": seeded(nn.init.xavier_uniform_),
    "nn.init of normal values": seeded(nn.init.normal_),
    "nn.init by name": seeded(lambda w: nn.init.uniform_(tensor=w)),
    "nn.init of data": seeded(lambda w: nn.init.uniform_(w.data)),
    "data.copy_": lambda w: w.data.copy_(torch.arange(160.0).view(40, 4)),
    "a row of data": lambda w: w.data[2].zero_(),
    "an element of data": lambda w: w.data.__setitem__((2, 0), 1.0),
    "some rows": lambda w: w.__setitem__(torch.tensor([3, 3, 39]), torch.ones(3, 4)),
    "rows under a mask": lambda w: w.__setitem__(torch.arange(40) % 3 == 0, 0.0),
    "columns": lambda w: w[:, 1:3].mul_(-1),
    "every third row": lambda w: w[1::3].add_(1),
    "transposed": lambda w: w.T[2].add_(1),
    "flat": lambda w: w.view(-1)[::7].fill_(5),
    "a view of a view": by_view_of_a_view,
    "parts": lambda w: [part.mul_(2) for part in w.chunk(3)],
    "rows one by one": lambda w: [row.mul_(2) for row in w],
    "operators": in_place_operators,
    "out=": lambda w: torch.mul(w, 0.5, out=w),
    "by itself": lambda w: w.add_(w.flip(0)),
    "a row by another": lambda w: w[0].copy_(w[1]),
    "div_ by its norms": lambda w: w.div_(w.norm(dim=1, keepdim=True)),
    "lerp_": lambda w: w.lerp_(torch.ones(40, 4), 0.25),
    "clamp_": lambda w: w.clamp_(-0.1, 0.1),
    "masked_fill_": lambda w: w.masked_fill_(torch.arange(40)[:, None] > 20, 1.0),
    "index_add_": lambda w: w.index_add_(0, torch.tensor([1, 1, 5]), torch.ones(3, 4)),
    "foreach": lambda w: torch._foreach_mul_([w, torch.ones(2)], 0.5),
    "embedding with max_norm": lambda w: nn.functional.embedding(torch.tensor([1, 5, 5]), w, max_norm=0.1),
    "assignment of data": assign_data,
    "nothing": lambda w: w[:0].zero_(),
    "complex numbers": lambda w: torch.view_as_complex(w.view(40, 2, 2)).mul_(2 - 1j),
    "one complex number": lambda w: torch.view_as_complex(w.view(40, 2, 2))[7, 1].fill_(3j),
    "bits": lambda w: w.view(torch.int32)[3:5].bitwise_and_(-65536),
    "bytes": lambda w: w.view(torch.uint8)[9].zero_(),
}


@pytest.mark.parametrize("optimizer", [None, *OPTIMIZERS], ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("way", WRITES)
def test_what_writes_to_the_weight_changes_the_rows_as_those_of_a_tensor(device, way, optimizer):
    module = trained(optimizer)
    plain = module.weight.detach().clone()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            for weight in (module.weight, plain):
                WRITES[way](weight)
            assert equal(module.state_dict()["weight"], plain.cpu())
            assert_close(module(torch.tensor([[1, 5, 39]])).cpu(), plain[[1, 5, 39]].cpu()[None])
    assert idle(module)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tier", ["default", "host", "file"])
@pytest.mark.parametrize("capacity", [1, 1.0])
def test_rows_of_any_tier_and_dtype_are_written(device, tmp_path, tier, dtype, capacity):
    module = trained(te.Adagrad(lr=0.1), storage=storages(tmp_path)[tier], dtype=dtype, capacity=capacity)
    plain = module.weight.detach().clone()
    state = module.fused_optimizer.state_dict()["state"][0]["sum"]
    for weight in (module.weight.data, plain):
        weight.mul_(3)
        weight[7:9].sub_(0.25)
    assert equal(module.state_dict()["weight"], plain.cpu())
    assert equal(module.fused_optimizer.state_dict()["state"][0]["sum"], state)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda each: type(each).__name__)
def test_written_rows_train_on_from_the_current_step(device, optimizer):
    """As a table does whose rows were loaded, with the state that it had."""
    written, loaded = trained(optimizer), trained(optimizer)
    rows = loaded.state_dict()["weight"]
    rows[10:20] = 0.5
    loaded.load_state_dict({"weight": rows})
    written.weight.data[10:20] = 0.5
    for module in (written, loaded):
        for seed in range(3):
            module(randint(0, 40, (2, 3), seed=10 + seed)).square().sum().backward()
    assert equal(written.state_dict()["weight"], loaded.state_dict()["weight"])


@pytest.mark.parametrize("optimizer", [None, *OPTIMIZERS], ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("way", ["div_ by its norms", "lerp_", "clamp_", "masked_fill_", "data.copy_", "by itself"])
def test_large_tables_are_written_in_parts(device, monkeypatch, way, optimizer):
    module = trained(optimizer)
    plain = module.weight.detach().clone()
    monkeypatch.setattr(table_tensor, "PART_BYTES", 100)
    for name in ("PART_BYTES", "DENSE_BYTES"):
        monkeypatch.setattr(table_set, name, 7 * 16)
    with torch.no_grad():
        for weight in (module.weight, plain):
            WRITES[way](weight)
    assert equal(module.state_dict()["weight"], plain.cpu())


@pytest.mark.parametrize("make", ["Embedding", "EmbeddingBag"])
def test_parameters_are_reset_as_those_of_torch(device, make):
    plain = getattr(nn, make)(40, 4, padding_idx=3)
    tiered = getattr(te, f"Tiered{make}")(40, 4, padding_idx=3, capacity=3)
    model = nn.ModuleList([tiered])
    for each in (nn.ModuleList([plain]), model):
        torch.manual_seed(3)
        each.apply(lambda m: m.reset_parameters() if hasattr(m, "reset_parameters") else None)
    assert equal(tiered.state_dict()["weight"], plain.weight.detach().cpu())


def test_a_pointwise_write_needs_no_memory_for_the_whole_table(monkeypatch):
    module = te.TieredEmbedding(4000, 8, capacity=3, device="cpu")
    monkeypatch.setattr(table_tensor, "PART_BYTES", 100)
    monkeypatch.setattr(table_set, "available_memory_bytes", lambda: 4000)
    module.weight.data.mul_(0).add_(2)
    with pytest.raises(StorageFullError, match="as one tensor needs"):
        module.weight.data.sort()
    monkeypatch.undo()
    assert torch.equal(module.state_dict()["weight"], torch.full((4000, 8), 2.0))


def test_a_write_that_fails_on_its_way_leaves_the_table_suspect(monkeypatch):
    module = trained(te.SGD(lr=0.1), device="cpu")
    rows = module.state_dict()["weight"]
    monkeypatch.setattr(table_tensor, "PART_BYTES", 100)
    monkeypatch.setattr(table_set, "PART_BYTES", 7 * 16)
    imports, calls = Group.import_weights, []

    def interrupted(self, *given):
        calls.append(given)
        if len(calls) == 3:
            raise KeyboardInterrupt
        imports(self, *given)

    monkeypatch.setattr(Group, "import_weights", interrupted)
    with pytest.raises(KeyboardInterrupt):
        module.weight.data.mul_(2)
    monkeypatch.undo()
    for use in (
        lambda: module(torch.tensor([1])),
        lambda: module.weight.data[0].zero_(),
        lambda: module.weight.data + 0,
    ):
        with pytest.raises(BrokenCacheError, match="writing to a table was interrupted by KeyboardInterrupt"):
            use()
    module.weight.data.copy_(rows)  # all of it, as load_state_dict() does
    assert torch.equal(module.state_dict()["weight"], rows)


def test_an_operation_that_fails_changes_no_row(device):
    module = trained(te.SGD(lr=0.1))
    rows = module.state_dict()["weight"]
    for wrong in (lambda w: w.add_(torch.ones(3)), lambda w: w.copy_(torch.ones(41, 4)), lambda w: w[50].zero_()):
        with pytest.raises((RuntimeError, IndexError)):
            wrong(module.weight.data)
    with pytest.raises(InvalidInputError, match=r"of shape \(40, 4\) can be replaced by a tensor of that shape"):
        module.weight.data = torch.ones(40, 5)
    assert equal(module.state_dict()["weight"], rows)


def test_rows_that_wait_for_their_update_may_be_written(device):
    """As weights are clipped after a backward."""
    found = []
    for convert in (False, True):
        table = nn.Embedding(40, 4)
        nn.init.constant_(table.weight, 0.5)
        optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
        model = nn.ModuleList([table])
        if convert:
            te.replace_embedding_bags(model, capacity=3, optimizer=optimizer)
        for ids in ([1, 2], [2, 30]):
            model[0](torch.tensor(ids)).square().sum().backward()
            model[0].weight.data.clamp_(-0.4, 0.4)
            optimizer.step()
            optimizer.zero_grad()
        found.append(model[0].weight.detach().clone())
    assert_close(found[1].cpu(), found[0].cpu())


@pytest.mark.parametrize("way", ["set_", "resize_", "t_", "unsqueeze_", "squeeze_", "transpose_", "assignment"])
def test_what_a_table_cannot_become_is_refused(device, way):
    module = trained()
    rows, w = module.state_dict()["weight"], module.weight.data
    ways = {
        "set_": lambda: w.set_(torch.ones(40, 4)),
        "resize_": lambda: w.resize_(2, 2),
        "t_": lambda: w.t_(),
        "unsqueeze_": lambda: w.unsqueeze_(0),
        "squeeze_": lambda: w.squeeze_(),
        "transpose_": lambda: w.transpose_(0, 1),
        "assignment": lambda: setattr(module, "weight", nn.Parameter(torch.zeros(40, 4))),
    }
    with pytest.raises(UnsupportedError):
        ways[way]()
    assert equal(module.state_dict()["weight"], rows)


def test_what_writes_where_gradients_are_recorded_is_refused_as_by_torch(device):
    module = trained(te.SGD(lr=0.1))
    for write in (lambda: module.weight.mul_(2), lambda: module.weight[0].zero_()):
        with pytest.raises(UnsupportedError, match=r"torch\.no_grad\(\), or to weight\.data"):
            write()


def test_rows_are_rewritten_where_gradients_are_recorded(device):
    """As pykeen does after each step: what is read there has a graph, and the gradient that nobody asks for is none."""
    module = trained(te.SGD(lr=0.1))
    x = nn.functional.normalize(module.weight.view(40, 2, 2), dim=-1)
    assert x.requires_grad
    module.weight.data = x.view(40, 4)
    assert equal(module.state_dict()["weight"], x.detach().view(40, 4).cpu())


@pytest.mark.parametrize("width", [1, 3, 6])
def test_elements_larger_than_those_of_the_rows(device, width):
    module = te.TieredEmbedding(40, width, capacity=3)
    plain = module.weight.detach().clone()
    for weight in (module.weight.data, plain):
        pairs = torch.view_as_complex(weight.view(-1)[2:].view(-1, 2))
        pairs[3:7] *= 1j
        pairs[-1] = 5
    assert equal(module.state_dict()["weight"], plain.cpu())


def test_views_of_the_weight_follow_the_table(device):
    module = trained(te.SGD(lr=0.1))
    row, flat = module.weight.data[1], module.weight.detach().view(-1)
    module(torch.tensor([1])).sum().backward()
    assert equal((row + 0).cpu(), module.state_dict()["weight"][1])
    module.load_state_dict({"weight": torch.ones(40, 4)})
    assert (flat == 1).all()
    module.close()
    with pytest.raises(StorageError):
        row + 0


def test_the_weight_is_printed_with_its_first_rows_and_its_tier(device):
    module = te.TieredEmbedding(40, 2, init=te.Normal(mean=0.5, std=0.0), capacity=3, storage=te.HostMemory())
    where = f"dtype=torch.float32, device={str(module.weight.device)!r}, tier='host')"
    rows = ",\n        ".join(["[0.5000, 0.5000]"] * 3)
    assert repr(module.weight) == f"TableTensor([{rows}], …, size=(40, 2), {where}"
    assert repr(module.weight[7]) == f"TableTensor([0.5000, 0.5000], size=(2,), {where}"
    assert repr(module.weight[7, 1]) == f"TableTensor(0.5000, size=(), {where}"
    assert repr(module.weight.T) == f"TableTensor(…, size=(2, 40), {where}"
    assert repr(module.weight[:0]) == f"TableTensor([], size=(0, 2), {where}"
    half = te.TieredEmbedding(40, 2, init=te.Normal(mean=0.5, std=0.0), dtype=torch.float16, capacity=3)
    assert repr(half.weight[7, 1]).startswith("TableTensor(0.5000, size=(), dtype=torch.float16, ")
    weight = module.weight
    module.close()
    assert repr(weight) == f"TableTensor(<StorageError>, …, size=(40, 2), {where}"


def test_copies_of_the_weight_are_tensors_of_their_own(device):
    module = trained()
    before = module.state_dict()["weight"]
    for copied in (module.weight.data.clone(), module.weight.data * 2, copy.deepcopy(module.weight)):
        assert type(copied) is torch.Tensor
        copied.zero_()
    assert_close(torch.zeros(40, 4).copy_(module.weight.data), before)
    assert torch.equal(pickle.loads(pickle.dumps(module.weight)).cpu(), before)
    assert module.weight.data.tolist() == before.tolist()
    if device == "cpu":
        for array in (module.weight.detach().numpy(), np.asarray(module.weight.detach())):
            assert not array.flags.writeable  # what is written there would be lost
            assert (array == before.numpy()).all()
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
