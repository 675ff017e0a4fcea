"""`replace_embedding_bags` on existing models."""

from __future__ import annotations

import pytest
import torch
from devices import assert_close, equal, randint
from torch import nn

import tieredemb as te


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


def test_every_setting_goes_along(device):
    bag = nn.EmbeddingBag(20, 3, max_norm=2.0, norm_type=1.0, mode="mean", include_last_offset=True, padding_idx=4)
    embedding = nn.Embedding(20, 3, padding_idx=-1, max_norm=2.0, norm_type=1.0, scale_grad_by_freq=True)
    for module in (bag.eval(), embedding.eval()):
        twin = te.replace_embedding_bags(module)
        for name in module.__constants__:
            assert getattr(twin, name) == getattr(module, name), name
        assert (twin.options.max_norm, twin.options.norm_type) == (2.0, 1.0)
        assert twin.options.scale_grad_by_freq == module.scale_grad_by_freq
