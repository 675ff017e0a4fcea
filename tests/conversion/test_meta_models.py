"""Models that were built on the meta device: their tables are generated row by row, and never held whole."""

from __future__ import annotations

import warnings

import forks
import pytest
import torch
from devices import assert_close, equal, randint
from torch import nn

import tieredemb as te
from tieredemb.errors import ConfigError, StorageExistsError


class Model(nn.Module):
    def __init__(self, rows=5000):
        super().__init__()
        self.user = nn.Embedding(rows, 8, padding_idx=3)
        self.tags = nn.EmbeddingBag(3000, 8, mode="mean")
        self.item = nn.EmbeddingBag(2000, 4, mode="sum")
        self.top = nn.Linear(20, 1)

    def forward(self, user, tags):
        return self.top(torch.cat([self.user(user), self.tags(tags), self.item(tags % 2000)], dim=1))


def on_meta(make=Model, *args):
    with torch.device("meta"):
        return make(*args)


def converted(model, **keywords):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return te.replace_embedding_bags(model, **{"capacity": 0.1, **keywords})


def rows_of(model):
    return {
        name: module.weight.detach().cpu().clone() for name, module in model.named_modules() if hasattr(module, "stats")
    }


def step(model, optimizer, seed):
    optimizer.zero_grad()
    model(randint(0, 5000, (6,), seed=seed), randint(0, 3000, (6, 3), seed=seed)).square().mean().backward()
    optimizer.step()


def test_rows_begin_as_torchs_modules_begin_theirs(device):
    model = converted(on_meta().eval())
    rows = rows_of(model)
    assert rows["user"].shape == (5000, 8)
    assert not rows["user"][3].any()
    for each in rows.values():
        assert abs(each.mean()) < 0.03
        assert abs(each.std() - 1) < 0.03
    assert not (rows["user"][:2000, :4] == rows["item"]).any(1).sum() > 1  # the padding row alone may be
    assert not (rows["user"][:3000] == rows["tags"]).any()
    assert model.user.tables.config.device == torch.get_default_device()
    assert model.top.weight.is_meta


def test_seeds_give_other_rows_and_the_same_seed_the_same():
    one, again, other = (rows_of(converted(on_meta().eval(), seed=seed)) for seed in (0, 0, 1))
    for name, rows in one.items():
        assert equal(rows, again[name])
        assert not (rows == other[name]).all(1).sum() > 1


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_an_optimizer_over_meta_params_trains_tables_and_dense_layers(device, monkeypatch, kind):
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    model = on_meta()
    optimizer = kind(model.parameters(), lr=0.1)
    converted(model, optimizer=optimizer)
    model.to_empty(device=device)
    model.top.reset_parameters()
    plain = Model()
    plain.load_state_dict(model.state_dict())
    reference = kind(plain.parameters(), lr=0.1)
    for seed in range(3):
        step(model, optimizer, seed)
        step(plain, reference, seed)
    for name, value in model.state_dict().items():
        assert_close(value, plain.state_dict()[name])


def test_an_optimizer_that_is_built_later_trains_tables_and_dense_layers(device):
    model = converted(on_meta(), optimizer=torch.optim.Adagrad)
    model.to_empty(device=device)
    model.top.reset_parameters()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    for module in model.modules():
        if isinstance(module, te.TieredEmbedding | te.TieredEmbeddingBag):
            module.follow(optimizer)
    plain = Model()
    plain.load_state_dict(model.state_dict())
    reference = torch.optim.Adagrad(plain.parameters(), lr=0.1)
    for seed in range(3):
        step(model, optimizer, seed)
        step(plain, reference, seed)
    for name, value in model.state_dict().items():
        assert_close(value, plain.state_dict()[name])


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.Adagrad])
def test_dense_params_that_to_empty_would_replace_are_warned_of(kind):
    with torch.device("meta"):
        model = Model()
        optimizer = kind(model.parameters())
    said = rf"2 params of dense layers on the meta device.*optimizer=torch\.optim\.{kind.__name__}"
    with pytest.warns(UserWarning, match=said):
        te.replace_embedding_bags(model, optimizer=optimizer)
    assert optimizer.state_dict()["state"].get(0, {}).get("sum", torch.zeros(5000, 8)).shape == (5000, 8)


def test_init_says_by_name_what_rows_begin_as(device):
    def ones(rows, generator):
        return torch.ones_like(rows)

    model = converted(on_meta().eval(), init={"user": te.Uniform(low=2, high=3), "t*": ones})
    rows = rows_of(model)
    assert 2 <= rows["user"][4:].min() <= rows["user"].max() <= 3
    assert (rows["tags"] == 1).all()
    assert rows["item"].std() > 0.9
    assert (rows_of(converted(on_meta().eval(), init=ones))["item"] == 1).all()


class Own(nn.Embedding):
    def reset_parameters(self):
        nn.init.uniform_(self.weight, -0.1, 0.1)


def test_a_class_with_values_of_its_own_is_refused_without_init(device):
    model = on_meta(lambda: nn.ModuleDict({"a": Own(9, 4), "b": nn.Embedding(9, 4)})).eval()
    with pytest.raises(ConfigError, match=r"'a' is a Own on the meta device.*pass init="):
        te.replace_embedding_bags(model)
    assert type(model["b"]) is nn.Embedding
    converted(model, init={"a": te.Uniform(low=-0.1, high=0.1)})
    assert rows_of(model)["a"].abs().max() <= 0.1


@pytest.mark.parametrize(
    ("init", "said"),
    [
        ({"nobody": te.Normal()}, "init='nobody' matches no embedding"),
        ({"user": 3}, "init of table 'user' must be Normal"),
        (3, "must be Normal"),
    ],
)
def test_an_init_that_cannot_be_is_refused(init, said):
    model = on_meta().eval()
    with pytest.raises(ConfigError, match=said):
        te.replace_embedding_bags(model, init=init)
    assert type(model.user) is nn.Embedding


def test_tables_with_and_without_content_share_a_cache(device):
    model = Model()
    model.tags = nn.EmbeddingBag(3000, 8, device="meta")
    model.eval()
    before = model.user.weight.detach().clone()
    converted(model)
    assert equal(model.user.weight.detach(), before)
    assert model.tags.weight.detach().std() > 0.9
    assert model.user.tables.whole is model.tags.tables.whole


def test_rows_of_a_file_are_not_taken_unasked(tmp_path):
    model = on_meta()
    optimizer = torch.optim.SGD([model.user.weight, model.tags.weight, model.item.weight], lr=0.1)
    converted(model, storage=te.File(tmp_path / "rows"), optimizer=optimizer)
    model.user(torch.arange(5)).sum().backward()
    optimizer.step()
    expected = rows_of(model)
    for module in (model.user, model.item):
        module.close()
    with pytest.raises(StorageExistsError, match="what the rows of the model begin as would be written over them"):
        converted(on_meta().eval(), storage=te.File(tmp_path / "rows"), optimizer=torch.optim.SGD)
    again = converted(on_meta(), storage=te.File(tmp_path / "rows", keep=True), optimizer=torch.optim.SGD)
    for name, rows in rows_of(again).items():
        assert equal(rows, expected[name])


def test_a_checkpoint_of_a_model_with_content_is_loaded(tmp_path):
    model = converted(Model(), optimizer=torch.optim.SGD)
    for name in ("user", "item"):
        getattr(model, name).save_checkpoint(tmp_path / name)
    loaded = converted(on_meta(), optimizer=torch.optim.SGD)
    for name in ("user", "item"):
        getattr(loaded, name).load_checkpoint(tmp_path / name)
    expected = rows_of(model)
    for name, rows in rows_of(loaded).items():
        assert equal(rows, expected[name])


def test_a_table_larger_than_memory_takes_the_rows_that_are_used(tmp_path):
    """Of 256 GB: what is committed stays small."""
    script = """
        import resource, torch, tieredemb
        from torch import nn
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with torch.device("meta"):
            model = nn.Sequential(nn.EmbeddingBag(1_000_000_000, 64, mode="sum"), nn.Linear(64, 1))
        tieredemb.replace_embedding_bags(
            model, capacity=1000, storage=tieredemb.File("rows"), optimizer=torch.optim.Adagrad
        )
        model.to_empty(device="cpu")
        model[1].reset_parameters()
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        model[0].follow(optimizer)
        model(torch.tensor([[0, 999_999_999]])).sum().backward()
        optimizer.step()
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
    """
    done = forks.run(script, base=forks.TORCH, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 700 << 20
