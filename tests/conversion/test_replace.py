"""`replace_embedding_bags` on existing models."""

from __future__ import annotations

import pytest
import torch
from devices import assert_close, equal, randint
from torch import nn

import tieredemb as te
from tieredemb.errors import ConfigError, UnsupportedError


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.bags = nn.ModuleDict({"a": nn.EmbeddingBag(20, 4, mode="sum"), "b": nn.EmbeddingBag(9, 4, mode="max")})
        self.shared = self.again = nn.Embedding(7, 4, padding_idx=2)
        self.fixed = nn.EmbeddingBag.from_pretrained(torch.randn(5, 4), mode="mean", include_last_offset=True)
        self.top = nn.Linear(4, 1)

    def forward(self, ids):
        bags = self.bags["a"](ids) + self.bags["b"](ids % 9)
        fixed = self.fixed((ids % 5).flatten(), torch.arange(0, ids.numel() + 1, ids.shape[1]))
        return self.top(bags + self.shared(ids[:, 0] % 7) * self.again(ids[:, 1] % 7) + fixed)


def test_replaced_model_gives_the_same_results_and_trains_the_same(device):
    torch.manual_seed(0)
    model, plain = Model(), Model()
    plain.load_state_dict(model.state_dict())
    assert te.replace_embedding_bags(model, capacity=0.2, optimizer=te.SGD(lr=0.01)) is model
    assert not model.fixed.is_trainable
    assert type(model.bags["a"]) is type(model.fixed) is te.TieredEmbeddingBag
    assert type(model.shared) is te.TieredEmbedding
    assert model.shared is model.again
    assert list(model.state_dict()) == list(plain.state_dict())
    optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.01)
    dense = torch.optim.SGD(model.parameters(), lr=0.01)
    for seed in range(4):
        ids = randint(0, 20, (6, 4), seed=seed)
        for net, its in ((model, dense), (plain, optimizer)):
            its.zero_grad()
            out = net(ids)
            out.square().sum().backward()
            its.step()
    for name, value in model.state_dict().items():
        assert_close(value, plain.state_dict()[name])


def test_a_bare_embedding_is_returned_as_its_twin(device):
    bag = nn.EmbeddingBag(20, 3, mode="sum", max_norm=1.0, scale_grad_by_freq=True, padding_idx=1).eval()
    twin = te.replace_embedding_bags(bag)
    assert (twin.max_norm, twin.scale_grad_by_freq, twin.padding_idx, twin.mode) == (1.0, True, 1, "sum")
    assert equal(twin.state_dict()["weight"], bag.weight)


def test_a_call_that_replaces_nothing_warns():
    model = nn.Linear(2, 2)
    with pytest.warns(UserWarning, match="nothing was replaced"):
        assert te.replace_embedding_bags(model) is model


def test_training_mode_and_files_go_along(device, tmp_path):
    model = Model().eval()
    te.replace_embedding_bags(model, storage=te.File(str(tmp_path / "rows")))
    assert not model.bags["a"].training
    assert [each.name for each in tmp_path.iterdir()] == ["rows"]  # of all, which share a cache


def test_a_dtype_that_tables_lack_is_left_alone():
    model = nn.Sequential(nn.Embedding(3, 2, dtype=torch.float64))
    with pytest.warns(UserWarning, match=r"'0' has rows of torch.float64"):
        te.replace_embedding_bags(model)
    assert type(model[0]) is nn.Embedding


class Wide(nn.Module):
    """Two tables of one dtype and width each, `second` made as it is given."""

    def __init__(self, **second):
        super().__init__()
        self.first = nn.EmbeddingBag(20, 4, dtype=torch.bfloat16, mode="sum")
        self.second = nn.EmbeddingBag(20, 8, **second)


@pytest.mark.parametrize(
    ("second", "options", "said"),
    [
        ({}, {"rounding": "stochastic"}, "those of table 'second' are of float32"),
        ({}, {"init": {"second": 3}}, "init of table 'second' must be Normal"),
        ({"mode": "max", "scale_grad_by_freq": True}, {}, "'second': scale_grad_by_freq is not supported"),
    ],
    ids=["rounding", "init", "scaling"],
)
def test_refusals_name_the_table_as_the_model_does(second, options, said):
    with pytest.raises(ConfigError, match=said):
        te.replace_embedding_bags(Wide(**second), **options)


def test_an_option_that_tables_lack_is_refused_with_the_table_that_has_it():
    model = Wide()
    adam = torch.optim.Adam([{"params": model.first.parameters()}, {"params": model.second.parameters(), "eps": -1.0}])
    with pytest.raises(ConfigError, match="the weight of 'second': eps must be a finite number"):
        te.replace_embedding_bags(model, optimizer=adam)
    adam.param_groups[1].update(eps=1e-8, amsgrad=True)
    with pytest.raises(UnsupportedError, match=r"the weight of 'second': torch.optim.Adam has amsgrad=True"):
        te.replace_embedding_bags(model, optimizer=adam)


def test_every_setting_goes_along(device):
    bag = nn.EmbeddingBag(20, 3, max_norm=2.0, norm_type=1.0, mode="mean", include_last_offset=True, padding_idx=4)
    embedding = nn.Embedding(20, 3, padding_idx=-1, max_norm=2.0, norm_type=1.0, scale_grad_by_freq=True)
    for module in (bag.eval(), embedding.eval()):
        twin = te.replace_embedding_bags(module)
        for name in module.__constants__:
            assert getattr(twin, name) == getattr(module, name), name
        assert (twin.options.max_norm, twin.options.norm_type) == (2.0, 1.0)
        assert twin.options.scale_grad_by_freq == module.scale_grad_by_freq


@pytest.mark.parametrize("has_all", [True, False], ids=["all parameters", "those that require a gradient"])
@pytest.mark.parametrize("frozen", [(True,), (True, True), (True, False)], ids=len)
def test_frozen_embeddings_are_converted_with_the_usual_optimizer(device, frozen, has_all):
    model = nn.ModuleList(nn.EmbeddingBag(50, 8, mode="sum").requires_grad_(not each) for each in frozen)
    model.append(nn.Linear(8, 1))
    optimizer = torch.optim.Adam((each for each in model.parameters() if has_all or each.requires_grad), lr=0.1)
    count = len(optimizer.param_groups[0]["params"])
    te.replace_embedding_bags(model, capacity=0.1, optimizer=optimizer)
    *tables, top = model
    before = [table.weight.detach().clone() for table in tables]
    top(sum(table(torch.tensor([[1, 2]])) for table in tables)).sum().backward()
    optimizer.step()
    assert len(optimizer.param_groups[0]["params"]) == count
    for table, rows, is_frozen in zip(tables, before, frozen, strict=True):
        assert isinstance(table, te.TieredEmbeddingBag)
        assert table.is_trainable is not is_frozen
        assert torch.equal(table.weight.detach(), rows) is is_frozen


def test_optimizer_without_the_weights_that_train_is_refused(device):
    model = nn.ModuleList([nn.EmbeddingBag(50, 8), nn.EmbeddingBag(50, 8).requires_grad_(False), nn.Linear(8, 1)])
    with pytest.raises(ConfigError, match="none of the 1 embeddings' weights that require a gradient"):
        te.replace_embedding_bags(model, optimizer=torch.optim.Adam(model[2].parameters()))
    with pytest.raises(ConfigError, match="holds no optimizer"):
        te.replace_embedding_bags(model, optimizer=[])
    assert not any(isinstance(each, te.TieredEmbeddingBag) for each in model)
