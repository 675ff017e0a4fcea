"""`tieredemb.save_checkpoint` and `load_checkpoint`: all tables of a model, and its dense layers, as one."""

from __future__ import annotations

import copy
import os
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

import tieredemb as te
from tieredemb.errors import CheckpointError, ConfigError, StorageError

TABLES = (
    te.TableConfig(name="wide", num_embeddings=30, embedding_dim=16),
    te.TableConfig(name="narrow", num_embeddings=40, embedding_dim=8),
)


class Model(nn.Module):
    """Tables of three widths, two of which share a cache when they are converted, and dense layers with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.EmbeddingBag(50, 8, mode="sum")
        self.item = nn.EmbeddingBag(60, 8, mode="sum")
        self.word = nn.Embedding(20, 16)
        self.norm = nn.BatchNorm1d(8)
        self.top = nn.Linear(24, 1)

    def forward(self, ids):
        return self.top(torch.cat([self.norm(self.user(ids % 50) + self.item(ids % 60)), self.word(ids[:, 0] % 20)], 1))


def built(device="cpu", *, capacity=0.2, kind=torch.optim.Adam, seed=0, **options):
    with torch.device("cpu"):
        torch.manual_seed(seed)
        model = Model()
    model.to(device)
    optimizer = kind(model.parameters(), lr=0.01)
    te.replace_embedding_bags(model, capacity=capacity, optimizer=optimizer, device=device, **options)
    return model, optimizer


def train(model, optimizer, steps, device="cpu"):
    for step in steps:
        ids = torch.randint(1000, (16, 3), generator=torch.Generator("cpu").manual_seed(step), device="cpu").to(device)
        optimizer.zero_grad()
        model(ids).square().mean().backward()
        optimizer.step()


def state(model):
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    assert [name for name, value in wanted.items() if not torch.equal(found[name], value)] == []


def test_a_model_goes_on_with_the_bits_of_one_run(device, tmp_path):
    model, optimizer = built(device)
    train(model, optimizer, range(4), device)
    te.save_checkpoint(model, tmp_path, extra={"step": 4}, optimizer=optimizer)
    train(model, optimizer, range(4, 8), device)
    other, its = built(device, capacity=1.0, seed=7)
    assert te.load_checkpoint(other, tmp_path, optimizer=its) == {"step": 4}
    train(other, its, range(4, 8), device)
    assert_same(state(other), state(model))


def test_a_save_replaces_the_last_one_and_leaves_no_file_of_it(tmp_path):
    model, optimizer = built()
    te.save_checkpoint(model, tmp_path)
    first = set(os.listdir(tmp_path))
    train(model, optimizer, range(1))
    te.save_checkpoint(model, tmp_path)
    assert len(os.listdir(tmp_path)) == len(first)
    assert first & set(os.listdir(tmp_path)) == {"manifest.json"}
    other, _ = built(seed=5)
    te.load_checkpoint(other, tmp_path)
    assert_same(state(other), state(model))


def test_names_are_those_without_what_is_around_a_model(tmp_path):
    model, _ = built()
    te.save_checkpoint(nn.DataParallel(model), tmp_path)
    other, _ = built(seed=5)
    te.load_checkpoint(other, tmp_path)
    assert_same(state(other), state(model))


def test_tables_go_to_a_model_that_serves_them(tmp_path):
    model, optimizer = built()
    train(model, optimizer, range(3))
    te.save_checkpoint(model, tmp_path, optimizer=optimizer)
    with torch.device("cpu"):
        served = te.replace_embedding_bags(Model().eval(), capacity=0.1)
    with pytest.warns(UserWarning, match="optimizer state and steps were left"):
        te.load_checkpoint(served, tmp_path)
    assert_same(state(served), state(model))


def test_dense_layers_can_be_left_out(tmp_path):
    model, _ = built()
    te.save_checkpoint(model, tmp_path, dense=False)
    other, _ = built(seed=5)
    before = state(other)
    with pytest.raises(CheckpointError, match="dense=False"):
        te.load_checkpoint(other, tmp_path)
    assert_same(state(other), before)
    te.load_checkpoint(other, tmp_path, dense=False)
    after, saved = state(other), state(model)
    assert torch.equal(after["user.weight"], saved["user.weight"])
    assert torch.equal(after["top.weight"], before["top.weight"])


def broken(path, kind):
    """A checkpoint of which one kind of file is damaged."""
    (name,) = [each for each in sorted(os.listdir(path)) if each.startswith(kind)][:1]
    data = bytearray((path / name).read_bytes())
    data[len(data) // 2] ^= 1
    (path / name).write_bytes(data)


@pytest.mark.parametrize("kind", ["rows-", "history-", "dense-", "manifest"])
def test_a_damaged_file_is_refused_before_anything_changes(tmp_path, kind):
    model, optimizer = built()
    train(model, optimizer, range(2))
    te.save_checkpoint(model, tmp_path, optimizer=optimizer)
    broken(tmp_path, kind)
    other, its = built(seed=5)
    train(other, its, range(1))
    before = state(other)
    with pytest.raises(CheckpointError, match="damaged"):
        te.load_checkpoint(other, tmp_path, optimizer=its)
    assert_same(state(other), before)
    train(other, its, range(1, 2))


class Wider(Model):
    def __init__(self) -> None:
        super().__init__()
        self.top = nn.Linear(24, 2)


class Renamed(Model):
    def __init__(self) -> None:
        super().__init__()
        self.article = self.item
        del self.item

    def forward(self, ids):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("make", "match"), [(Wider, r"'top.weight' has the shape \(1, 24\)"), (Renamed, r"lacks \['article.weight'\]")]
)
def test_another_model_is_refused_by_name(tmp_path, make, match):
    model, _ = built()
    te.save_checkpoint(model, tmp_path)
    with torch.device("cpu"):
        other = make()
    optimizer = torch.optim.Adam(other.parameters())
    te.replace_embedding_bags(other, capacity=0.2, optimizer=optimizer)
    before = state(other)
    with pytest.raises(CheckpointError, match=match):
        te.load_checkpoint(other, tmp_path)
    assert_same(state(other), before)


def test_tables_that_shared_caches_otherwise_are_refused(tmp_path):
    model, _ = built()
    te.save_checkpoint(model, tmp_path)
    with torch.device("cpu"):
        other = Model()
    optimizer = torch.optim.Adam(other.parameters())
    for name in ("user", "item", "word"):
        te.replace_embedding_bags(other, capacity=0.2, optimizer=optimizer, include=name)
    with pytest.raises(CheckpointError, match="share caches otherwise"):
        te.load_checkpoint(other, tmp_path)


def test_a_part_of_a_model_is_refused_with_the_rest_named(tmp_path):
    model, _ = built()
    with pytest.raises(ConfigError, match="'weight' share their cache with 'item'"):
        te.save_checkpoint(model.user, tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_checkpoint_of_a_module_and_of_a_model_name_the_call_that_loads_them(tmp_path):
    model, _ = built()
    te.save_checkpoint(model, tmp_path / "model")
    model.word.save_checkpoint(tmp_path / "word")
    with pytest.raises(CheckpointError, match=r"tieredemb.load_checkpoint\(model, directory\)"):
        model.word.load_checkpoint(tmp_path / "model")
    with pytest.raises(CheckpointError, match="of one module"):
        te.load_checkpoint(model, tmp_path / "word")


def test_an_optimizer_is_saved_by_the_names_of_its_parameters(tmp_path):
    model, optimizer = built()
    train(model, optimizer, range(2))
    te.save_checkpoint(model, tmp_path, optimizer=optimizer)
    other, _ = built(seed=5)
    reversed_ = torch.optim.Adam(list(other.parameters())[::-1], lr=0.5)
    te.follow(other, reversed_)
    te.load_checkpoint(other, tmp_path, optimizer=reversed_)
    assert reversed_.param_groups[0]["lr"] == 0.01
    assert torch.equal(reversed_.state[other.top.weight]["exp_avg"], optimizer.state[model.top.weight]["exp_avg"])
    train(model, optimizer, range(2, 4))
    train(other, reversed_, range(2, 4))
    assert_same(state(other), state(model))


@pytest.mark.parametrize("bad", ["Adam", torch.optim.Adam, torch.optim.Adam([torch.zeros(3)])])
def test_an_optimizer_of_another_model_is_refused(tmp_path, bad):
    model, _ = built()
    with pytest.raises(ConfigError, match=r"must be a torch.optim.Optimizer|not of this model"):
        te.save_checkpoint(model, tmp_path, optimizer=bad)
    assert os.listdir(tmp_path) == []


def test_a_checkpoint_without_an_optimizer_is_refused_where_one_is_given(tmp_path):
    model, optimizer = built()
    te.save_checkpoint(model, tmp_path)
    with pytest.raises(CheckpointError, match="saved without optimizer="):
        te.load_checkpoint(model, tmp_path, optimizer=optimizer)


def test_gradients_that_wait_for_a_step_keep_rows_where_they_are(tmp_path):
    model, optimizer = built()
    te.save_checkpoint(model, tmp_path)
    model(torch.zeros((4, 3), dtype=torch.int64)).sum().backward()
    with pytest.raises(StorageError, match="zero_grad"):
        te.load_checkpoint(model, tmp_path)
    optimizer.zero_grad()
    te.load_checkpoint(model, tmp_path)


class Extra(nn.Module):
    """A layer whose state no file can bring back without running code."""

    def get_extra_state(self):
        return Extra

    def set_extra_state(self, state):
        raise AssertionError(state)


def test_state_that_would_run_code_is_refused_before_anything_is_written(tmp_path):
    model = nn.Sequential(te.TieredEmbeddingBag(10, 4), Extra())
    with pytest.raises(ConfigError, match="without running code"):
        te.save_checkpoint(model, tmp_path)
    assert os.listdir(tmp_path) == []
    te.save_checkpoint(model, tmp_path, dense=False)


@pytest.mark.parametrize("bad", [None, 3, nn.Linear, nn.Linear(2, 2)])
def test_what_has_no_tables_is_refused(tmp_path, bad):
    for call in (lambda: te.save_checkpoint(bad, tmp_path), lambda: te.load_checkpoint(bad, tmp_path)):
        with pytest.raises(ConfigError, match=r"must be a torch.nn.Module|has no tiered tables"):
            call()


def test_modules_that_stand_alone_and_collections_are_saved_as_well(tmp_path):
    def model(seed):
        return nn.ModuleDict({
            "bag": te.TieredEmbeddingBag(20, 4, optimizer=te.Adagrad(lr=0.1), seed=seed),
            "many": te.TieredEmbeddingBagCollection(TABLES, capacity=0.2, optimizer=te.Adam(lr=0.1), seed=seed),
            "top": nn.Linear(2, 1),
        })  # fmt: skip

    saved = model(0)
    saved["many"](torch.tensor([3, 4, 5]), torch.tensor([0, 1, 3])).sum().backward()
    te.save_checkpoint(saved, tmp_path)
    other = model(0)
    te.load_checkpoint(other, tmp_path)
    assert_same(state(other), state(saved))
    with pytest.raises(CheckpointError, match="seed"):
        te.load_checkpoint(model(1), tmp_path)


def test_a_model_without_an_optimizer_for_some_tables_loads_those_alone_without(tmp_path):
    def model(optimizer):
        return nn.ModuleDict({
            "a": te.TieredEmbeddingBag(20, 4, optimizer=te.Adam(lr=0.1)),
            "b": te.TieredEmbeddingBag(30, 4, optimizer=optimizer),
        })  # fmt: skip

    saved = model(te.Adam(lr=0.1))
    for bag in saved.values():
        bag(torch.tensor([[1, 2]])).sum().backward()
    te.save_checkpoint(saved, tmp_path)
    other = model(None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        te.load_checkpoint(other, tmp_path)
    assert_same(state(other), state(saved))
    for model in (saved, other):
        model["a"](torch.tensor([[1, 3]])).sum().backward()
    assert torch.equal(other["a"].state_dict()["weight"], saved["a"].state_dict()["weight"])


def test_copies_of_a_model_load_its_checkpoint(tmp_path):
    model, optimizer = built()
    train(model, optimizer, range(2))
    te.save_checkpoint(model, tmp_path)
    copied = copy.deepcopy(model)
    train(model, optimizer, range(2, 3))
    te.load_checkpoint(model, tmp_path)
    assert_same(state(copied), state(model))


def test_rows_of_another_dtype_are_rounded(tmp_path):
    tables = [replace(table, mode="sum") for table in TABLES]
    model = nn.Sequential(te.TieredEmbeddingBagCollection(tables, capacity=0.2))
    te.save_checkpoint(model, tmp_path)
    other = nn.Sequential(te.TieredEmbeddingBagCollection(tables, capacity=0.2, dtype=torch.bfloat16))
    te.load_checkpoint(other, tmp_path)
    for name, weight in state(model).items():
        assert torch.equal(state(other)[name], weight.to(torch.bfloat16))


def test_an_optimizer_that_is_not_loaded_is_warned_of_where_tables_train(tmp_path, recwarn):
    model, optimizer = built()
    train(model, optimizer, range(2))
    te.save_checkpoint(model, tmp_path / "with", optimizer=optimizer)
    te.save_checkpoint(model, tmp_path / "without")
    with pytest.warns(UserWarning, match="pass optimizer= to go on as before the save"):
        te.load_checkpoint(built(seed=5)[0], tmp_path / "with")
    recwarn.clear()
    te.load_checkpoint(built(seed=5)[0], tmp_path / "without")
    te.load_checkpoint(built(seed=5)[0], tmp_path / "with", dense=False)
    other, theirs = built(seed=5)
    te.load_checkpoint(other, tmp_path / "with", optimizer=theirs)
    te.load_checkpoint(other.requires_grad_(False), tmp_path / "with")
    assert not recwarn.list


def test_a_checkpoint_of_another_optimizer_names_it(tmp_path):
    table = te.TieredEmbeddingBag(9, 4, optimizer=te.Adam(lr=0.1))
    te.save_checkpoint(table, tmp_path)
    for other in (te.TieredEmbeddingBag(9, 4, optimizer=te.SGD(lr=0.1)), te.TieredEmbeddingBag(8, 4)):
        with pytest.raises(CheckpointError, match=r"Adam|num_embeddings"):
            te.load_checkpoint(other, tmp_path)
