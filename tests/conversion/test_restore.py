"""`restore_embedding_bags`: the way back to torch's modules, and the tools that need it."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from devices import assert_close, equal, randint
from torch import nn

import tieredemb as te
from tieredemb.errors import StorageError, StorageFullError, UnsupportedError


class Model(nn.Module):
    def __init__(self, sparse: bool = False):
        super().__init__()
        self.user = nn.Embedding(40, 4, padding_idx=3, sparse=sparse)
        self.tags = nn.EmbeddingBag(30, 4, mode="mean", sparse=sparse)
        self.top = nn.Linear(8, 1)

    def forward(self, user, tags):
        return self.top(torch.cat([self.user(user), self.tags(tags)], dim=1))


def batch(seed):
    return randint(0, 40, (6,), seed=seed), randint(0, 30, (6, 3), seed=seed)


def step(model, optimizer, seed):
    optimizer.zero_grad()
    loss = model(*batch(seed)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def quietly(call, *args, **keywords):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return call(*args, **keywords)


def converted(model, **keywords):
    return quietly(te.replace_embedding_bags, model, **{"capacity": 0.2, **keywords})


def restored(model):
    return quietly(te.restore_embedding_bags, model)


# --- what comes back --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_frozen", [False, True])
def test_restored_modules_have_the_settings_that_they_had(device, is_frozen):
    model = nn.ModuleDict({
        "bag": nn.EmbeddingBag(20, 3, 2.0, 1.0, mode="mean", include_last_offset=True, padding_idx=4),
        "embedding": nn.Embedding(20, 3, padding_idx=-1, scale_grad_by_freq=True, sparse=True),
    }).eval()  # fmt: skip
    model["bag"].requires_grad_(not is_frozen)
    plain = copy.deepcopy(model)
    assert restored(converted(model)) is model
    for name, module in model.items():
        assert type(module) is type(plain[name])
        for setting in module.__constants__:
            assert getattr(module, setting) == getattr(plain[name], setting), setting
        assert not module.training
        assert module.weight.requires_grad == plain[name].weight.requires_grad
        assert (module.weight.device, module.weight.dtype) == (plain[name].weight.device, plain[name].weight.dtype)
        assert equal(module.weight, plain[name].weight)
    assert list(model.state_dict()) == list(plain.state_dict())


def test_a_table_by_itself_becomes_torchs_module(device):
    table = te.TieredEmbeddingBag(20, 3, mode="sum", capacity=4, init=te.Uniform(low=-1, high=1))
    expected = table.state_dict()["weight"]
    module = restored(table)
    assert type(module) is nn.EmbeddingBag
    assert equal(module.weight, expected)


def test_a_module_in_several_places_stays_one(device):
    model = nn.Module()
    model.first = model.second = nn.Embedding(20, 3)
    model.listed = [model.first]
    restored(converted(model.eval()))
    assert type(model.first) is nn.Embedding
    assert model.first is model.second is model.listed[0]


def test_a_weight_has_the_dtype_that_the_model_goes_on_with(device):
    model = nn.Sequential(nn.Embedding(20, 4), nn.Linear(4, 1)).eval()
    converted(model, dtype=torch.bfloat16)
    before = model(torch.arange(20))
    restored(model)
    assert model[0].weight.dtype == torch.float32
    assert equal(model(torch.arange(20)), before)


def test_hooks_of_a_table_stay(device):
    model = converted(nn.Sequential(nn.Embedding(20, 4)).eval())
    handle = model[0].register_forward_hook(lambda module, args, output: output + 1)
    before = model(torch.arange(5))
    restored(model)
    assert equal(model(torch.arange(5)), before)
    handle.remove()
    assert not equal(model(torch.arange(5)), before)


def test_row_files_are_closed_with_the_rows_of_the_last_step(tmp_path):
    table = te.TieredEmbedding(20, 4, capacity=5, storage=te.File(tmp_path / "rows"), optimizer=torch.optim.SGD)
    model = nn.Sequential(table)
    table.follow(optimizer := torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.arange(5)).sum().backward()
    optimizer.step()
    del table
    restored(model)
    again = te.TieredEmbedding(20, 4, storage=te.File(tmp_path / "rows"), optimizer=torch.optim.SGD)
    assert equal(again.state_dict()["weight"], model[0].weight)


# --- its optimizer ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trained", [0, 4])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.01}),
        (torch.optim.AdamW, {"lr": 0.01}),
        (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.5}),
    ],
)
def test_training_goes_on_with_torchs_numbers(device, kind, options, trained):
    model = Model()
    optimizer = kind(model.parameters(), **options)
    converted(model, optimizer=optimizer)
    for seed in range(trained):
        step(model, optimizer, seed)
    plain = Model()
    plain.load_state_dict(model.state_dict())
    reference = kind(plain.parameters(), **options)
    reference.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # whose tensors torch takes as they are
    restored(model)
    assert list(map(id, optimizer.param_groups[0]["params"])) == list(map(id, model.parameters()))
    for seed in range(trained, trained + 4):
        assert equal(step(model, optimizer, seed), step(plain, reference, seed))
    for name, value in model.state_dict().items():
        assert equal(value, plain.state_dict()[name])


def test_a_table_that_follows_sparse_adam_has_sparse_gradients(device):
    model, plain = Model(), Model(sparse=True)
    plain.load_state_dict(model.state_dict())
    ours, theirs = (
        [torch.optim.SparseAdam([*net.user.parameters(), *net.tags.parameters()], lr=0.1),
         torch.optim.SGD(net.top.parameters(), lr=0.1)] for net in (model, plain)
    )  # fmt: skip
    converted(model, optimizer=ours)
    for seed in range(6):
        if seed == 3:
            restored(model)
        for net, optimizers in ((model, ours), (plain, theirs)):
            net(*batch(seed)).square().mean().backward()
            for each in optimizers:
                each.step()
                each.zero_grad()
    for name, value in model.state_dict().items():
        assert_close(value, plain.state_dict()[name])


def test_a_group_that_names_its_params_names_the_weight(device):
    table = te.TieredEmbedding(20, 4, optimizer=torch.optim.SGD)
    model = nn.Sequential(table, nn.Linear(4, 1))
    optimizer = torch.optim.SGD(list(model[1].named_parameters()), lr=0.1)
    table.follow(optimizer)
    restored(model)
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias", "0.weight"]
    assert optimizer.param_groups[0]["params"][2] is model[0].weight


def test_state_of_an_optimizer_of_ours_is_warned_of(device):
    model = nn.Sequential(te.TieredEmbedding(20, 4, optimizer=te.Adagrad(lr=0.1)))
    model(torch.arange(3)).sum().backward()
    with pytest.warns(UserWarning, match="the state of optimizers of tieredemb is not taken along: '0'"):
        te.restore_embedding_bags(model)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_tables_that_memory_does_not_hold_are_refused_with_their_size(tmp_path):
    model = nn.Module()
    model.small = te.TieredEmbedding(10, 64)
    model.large = te.TieredEmbedding(10**9, 64, capacity=100, storage=te.File(tmp_path / "rows"))
    with pytest.raises(StorageFullError, match=r"2 tables as tensors need 256,000,002,560 bytes .* available"):
        te.restore_embedding_bags(model)
    assert type(model.small) is type(model.large) is te.TieredEmbedding
    assert model.large(torch.tensor([10**9 - 1])).shape == (1, 64)


def test_gradients_that_wait_for_a_step_are_refused(device):
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    converted(model, optimizer=optimizer)
    model(*batch(0)).sum().backward()
    with pytest.raises(StorageError, match=r"cannot restore the tables while gradients wait"):
        te.restore_embedding_bags(model)
    assert type(model.user) is te.TieredEmbedding
    optimizer.zero_grad()
    restored(model)


def test_a_batch_in_flight_is_refused(device):
    model = converted(Model(), optimizer=te.SGD(lr=0.1))
    out = model(*batch(0))
    with pytest.raises(StorageError, match="in flight"):
        te.restore_embedding_bags(model)
    out.sum().backward()
    with pytest.warns(UserWarning, match="not taken along"):
        te.restore_embedding_bags(model)


class Locked(Model):
    """Takes no `nn.EmbeddingBag` once it is locked."""

    locked = False

    def __setattr__(self, name, value):
        if self.locked and isinstance(value, nn.EmbeddingBag):
            raise RuntimeError("locked")
        super().__setattr__(name, value)


def test_what_fails_on_the_way_changes_nothing(device):
    model = Locked()
    plain = Model()
    plain.load_state_dict(model.state_dict())
    optimizer, reference = (torch.optim.Adam(net.parameters(), lr=0.01) for net in (model, plain))
    converted(model, optimizer=optimizer)
    object.__setattr__(model, "locked", True)
    with pytest.raises(RuntimeError, match="locked"):
        te.restore_embedding_bags(model)
    assert type(model.user) is te.TieredEmbedding
    for seed in range(4):
        assert_close(step(model, optimizer, seed), step(plain, reference, seed))


def test_collections_are_left_with_a_warning(device):
    table = te.TableConfig(name="a", num_embeddings=9, embedding_dim=2)
    model = nn.Sequential(te.TieredEmbeddingBagCollection([table]))
    with pytest.warns(UserWarning, match=r"'0' is a TieredEmbeddingBagCollection, which torch has no module for"):
        te.restore_embedding_bags(model)


def test_a_model_without_tables_is_warned_of():
    with pytest.warns(UserWarning, match="nothing was restored"):
        te.restore_embedding_bags(nn.Linear(2, 2))


# --- tools ------------------------------------------------------------------------------------------------------------


def make_fx(model, args):
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(model)(*args)


def onnx(model, args, **keywords):
    pytest.importorskip("onnxscript" if keywords["dynamo"] else "onnx")
    torch.onnx.export(model, args, "model.onnx", **keywords)


TOOLS = {
    "export": torch.export.export,
    "strict export": lambda model, args: torch.export.export(model, args, strict=True),
    "onnx": lambda model, args: onnx(model, args, dynamo=True),
    "old onnx": lambda model, args: onnx(model, args, dynamo=False),
    "script": lambda model, args: torch.jit.script(model),
    "trace": torch.jit.trace,
    "functional_call": lambda model, args: torch.func.functional_call(
        model, {name: value.clone() for name, value in model.state_dict().items()}, args
    ),
    "make_fx": make_fx,
    "vmap": lambda model, args: torch.vmap(lambda *each: model(*(arg[None] for arg in each)))(*args),
}


@pytest.mark.parametrize("follows", [False, True])
@pytest.mark.parametrize("tool", TOOLS)
def test_tools_that_take_no_tables_name_the_way_and_it_works(tmp_path, monkeypatch, tool, follows):
    monkeypatch.chdir(tmp_path)
    model = Model().eval()
    converted(model, optimizer=torch.optim.Adam(model.parameters()) if follows else None)
    error = UnsupportedError if tool != "strict export" else torch._dynamo.exc.Unsupported
    for _ in range(3):
        model(*batch(0))
    with pytest.raises(error, match=r"tieredemb\.restore_embedding_bags\(model\)"):
        TOOLS[tool](model, batch(0))
    TOOLS[tool](restored(model), batch(0))


def test_scripted_and_exported_models_give_the_numbers_of_the_tables():
    model = converted(Model().eval())
    expected = model(*batch(1))
    restored(model)
    assert equal(torch.jit.script(model)(*batch(1)), expected)
    assert equal(torch.export.export(model, batch(0)).module()(*batch(1)), expected)
