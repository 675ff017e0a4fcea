"""What is told of all tables of a model, and done with them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tieredemb as te
from tieredemb.errors import ConfigError, StorageError, UnsupportedError


def built(**options):
    torch.manual_seed(0)
    model = nn.ModuleDict({
        "user": nn.EmbeddingBag(50, 8, mode="sum"),
        "item": nn.EmbeddingBag(60, 8, mode="sum"),
        "word": nn.EmbeddingBag(20, 16, mode="sum"),
    })  # fmt: skip
    return te.replace_embedding_bags(model, capacity=0.2, **options)


def look_up(model):
    for bag in model.values():
        bag(torch.tensor([[1, 2, 3], [3, 4, 5]]))


def test_stats_of_a_shared_cache_are_counted_once():
    model = built()
    before = te.stats(model)
    look_up(model)
    assert (te.stats(model) - before).lookups == 18


def test_memory_is_reported_under_the_names_of_the_tables():
    model = built()
    report = te.memory_report(model)
    assert list(report) == ["user.weight, item.weight", "word.weight"]
    assert report["word.weight"] == model["word"].memory_report()


def test_flush_writes_all_rows_of_a_model_back(tmp_path):
    model = built(optimizer=te.Adagrad(lr=0.1))
    for bag in model.values():
        bag(torch.tensor([[1, 2]])).sum().backward()
    before = te.stats(model).rows_written_back
    te.flush(model)
    assert te.stats(model).rows_written_back - before == 6


def test_close_ends_all_tables_of_a_model(tmp_path):
    model = built(optimizer=te.Adagrad(lr=0.1), storage=te.File(tmp_path / "rows"))
    te.close(model)
    te.close(model)
    for bag in model.values():
        with pytest.raises(StorageError):
            bag(torch.tensor([[1]]))


def test_gradients_that_close_drops_are_warned_of(recwarn):
    model = nn.Sequential(nn.EmbeddingBag(9, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    te.replace_embedding_bags(model, capacity=0.5, optimizer=optimizer)
    model(torch.tensor([[1]])).sum().backward()
    with pytest.warns(UserWarning, match="call step\\(\\) before, or zero_grad"):
        te.close(model)
    recwarn.clear()
    te.close(model)
    assert not recwarn.list


def test_all_tables_of_a_model_follow_one_optimizer():
    model = nn.ModuleDict({
        "a": te.TieredEmbeddingBag(20, 4, optimizer=torch.optim.Adam),
        "b": te.TieredEmbeddingBagCollection(
            [te.TableConfig(name="t", num_embeddings=9, embedding_dim=4)], capacity=0.5, optimizer=torch.optim.Adam
        ),
        "c": te.TieredEmbeddingBag(20, 8),
    })  # fmt: skip
    optimizer = torch.optim.Adam([*model.parameters(), nn.Parameter(torch.zeros(1))], lr=0.1)
    te.follow(model, optimizer)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    outputs = (
        model["a"](torch.tensor([[1]])),
        model["b"](torch.tensor([1]), torch.tensor([0, 1])),
        model["c"](torch.tensor([[1]])),
    )
    sum(out.sum() for out in outputs).backward()
    optimizer.step()
    moved = [name for name, value in model.state_dict().items() if not torch.equal(value, before[name])]
    assert moved == list(before)


def test_a_module_that_cannot_follow_is_named_and_none_follows():
    model = nn.ModuleDict({
        "a": te.TieredEmbeddingBag(20, 4, optimizer=torch.optim.SGD),
        "b": te.TieredEmbeddingBag(20, 4, optimizer=te.SGD(lr=0.1)),
    })  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"^b: "):
        te.follow(model, optimizer)
    with pytest.raises(ConfigError, match="is to follow"):
        _ = model["a"].fused_optimizer


def test_an_optimizer_that_no_table_can_follow_is_refused_by_name():
    model = nn.ModuleDict({"a": te.TieredEmbeddingBag(20, 4)})
    with pytest.raises(UnsupportedError, match=r"^a: "):
        te.follow(model, torch.optim.ASGD([nn.Parameter(torch.zeros(1))]))


@pytest.mark.parametrize("call", [te.stats, te.memory_report, te.flush, te.close])
@pytest.mark.parametrize("bad", [None, nn.Linear(2, 2)])
def test_what_has_no_tables_is_refused(call, bad):
    with pytest.raises(ConfigError, match=r"must be a torch.nn.Module|has no tiered tables"):
        call(bad)


def test_report_of_a_pool_has_what_a_dense_optimizer_keeps_of_steps_once(device):
    model = nn.ModuleList(nn.EmbeddingBag(50, 4, mode="sum") for _ in range(3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    te.replace_embedding_bags(model, capacity=0.5, optimizer=optimizer, device=device)

    def steps():
        (found,) = te.memory_report(model).values()
        assert found == model[0].memory_report() == model[2].memory_report()
        return found["width 4"]["optimizer"]["steps"]

    before = steps()
    assert before > 0
    model[1](torch.tensor([[1, 2]], device=device)).sum().backward()
    optimizer.step()
    assert steps() == before * (2 if device == "cpu" else 1)  # a CPU's table has steps of its own now
