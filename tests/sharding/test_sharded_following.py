"""Sharded tables that follow a torch optimizer: the bits of one process whose tables do."""

from __future__ import annotations

import math

import pytest
import torch
from devices import equal
from pairs import parametrize_pairs
from sharding.ranks import SHARDINGS, batch_of, joined, tables_of, uneven
from sharding.test_sharded_failures import raised

import tieredemb as te
from tieredemb.sharding.collection import ShardedTieredEmbeddingBagCollection

TABLES = tables_of(widths=(4, 8), padding=(None, 0))
KINDS = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.5}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "Adam": (torch.optim.Adam, {"lr": 0.05, "weight_decay": 0.1}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.05}),
}


def params_of(optimizer):
    return [param for group in optimizer.param_groups for param in group["params"]]


def loop(model, optimizer, batches, how):
    """Steps; "clip": by the norm · "spoil": by one that is NaN, once · "scale": with a scaler, and an infinite gradient
    in the second · "late": of several backwards, and one step without any. What was seen of norms and scales."""
    scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=4.0, growth_interval=100)
    seen = []
    for step, (ids, offsets, _, upstream) in enumerate(batches):
        if how != "late" or step % 2 == 0:
            optimizer.zero_grad()
        out = model(ids, offsets)
        if how == "scale":
            scale = float(scaler.scale(torch.ones(())))
            out.backward(upstream * scale)
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            seen.append(scaler.get_scale())
        else:
            out.backward(upstream)
            if how == "spoil" and step == 2:
                params_of(optimizer)[0].grad = torch.full((1,), math.nan)
                torch.nn.utils.clip_grad_norm_(params_of(optimizer), 0.5)
            if how == "clip":
                seen.append(float(torch.nn.utils.clip_grad_norm_(params_of(optimizer), 0.5)))
            if how != "late" or step % 2 == 1:
                optimizer.step()
    if how == "late":
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()
    return seen


def spoilt(batch, step, rank, how):
    if how == "scale" and (step, rank) == (1, 2):
        batch[3][0, 0] = torch.inf
    return batch


def follows(rank, size, kind, how, when):
    make, options = KINDS[kind]
    dense = torch.nn.Parameter(torch.zeros(1))
    optimizer = make([dense], **options)
    given = {"class": make, "instance": optimizer, "later": None}[when]
    model = ShardedTieredEmbeddingBagCollection(
        TABLES, sharding=SHARDINGS["all kinds"], capacity=1.0, optimizer=given, average=False
    )
    if when != "instance":
        model.follow(optimizer)
    batches = [spoilt(batch_of(TABLES, step, rank, samples=uneven), step, rank, how) for step in range(6)]
    seen = loop(model, optimizer, batches, how)
    assert not list(model.parameters())  # which DistributedDataParallel would take for its own
    weights = dict(model.state_dict())
    model.close()
    return seen, weights


@parametrize_pairs(size=[1, 2, 3], kind=[*KINDS], how=["plain", "clip", "scale", "late"])
def test_following_gives_the_bits_of_one_process(worlds, size, kind, how):
    make, options = KINDS[kind]
    model = te.TieredEmbeddingBagCollection(TABLES, capacity=1.0, optimizer=make)
    optimizer = make([torch.nn.Parameter(torch.zeros(1)), *model.parameters()], **options)
    model.follow(optimizer)
    batches = [
        joined(TABLES, [spoilt(batch_of(TABLES, step, rank, samples=uneven), step, rank, how) for rank in range(size)])
        for step in range(6)
    ]
    seen = loop(model, optimizer, batches, how)
    answers = worlds(size).run(follows, kind, how, "class")
    for its_seen, _ in answers:
        assert its_seen == seen
    for name, weight in model.state_dict().items():
        assert equal(answers[0][1][name], weight), name


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW"])
def test_a_norm_that_is_no_number_leaves_none_in_rows_of_any_rank(worlds, kind):
    for _, weights in worlds(2).run(follows, kind, "spoil", "class")[:1]:
        for name, weight in weights.items():
            assert bool(weight.isnan().all()), name


@pytest.mark.parametrize("when", ["instance", "later"])
def test_an_optimizer_may_be_given_or_come_later(worlds, when):
    expected = worlds(2).run(follows, "Adam", "plain", "class")[0][1]
    found = worlds(2).run(follows, "Adam", "plain", when)[0][1]
    for name, weight in expected.items():
        assert equal(found[name], weight)


def clips(rank, size, norm_type):
    """A model that holds a sharded collection, clipped as a whole; its norm, and the gradients of its dense layer."""
    dense = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(dense.parameters(), lr=0.1)
    model = ShardedTieredEmbeddingBagCollection(
        TABLES, sharding=SHARDINGS["all kinds"], capacity=1.0, optimizer=optimizer, average=False
    )
    ids, offsets, _, upstream = batch_of(TABLES, 0, rank, samples=uneven)
    model(ids, offsets).backward(upstream)
    found = float(te.clip_grad_norm_(torch.nn.ModuleList([model, dense]), 1.0, norm_type=norm_type))
    again = float(te.clip_grad_norm_(torch.nn.ModuleList([model, dense]), 1.0, norm_type=norm_type))
    optimizer.zero_grad()
    model.close()
    return found, again


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 2.5, math.inf])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_model_with_sharded_tables_is_clipped(worlds, size, norm_type):
    model = te.TieredEmbeddingBagCollection(TABLES, capacity=1.0, optimizer=torch.optim.SGD)
    model.follow(torch.optim.SGD(model.parameters(), lr=0.1))
    ids, offsets, _, upstream = joined(TABLES, [batch_of(TABLES, 0, rank, samples=uneven) for rank in range(size)])
    model(ids, offsets).backward(upstream)
    expected = float(te.clip_grad_norm_(model, 1.0, norm_type=norm_type))
    for found, again in worlds(size).run(clips, norm_type):
        assert found == expected
        assert again == pytest.approx(1.0, rel=1e-4)


def follows_later(rank, size, how):
    """Rank 1 does otherwise than rank 0 when it follows; then all follow as they should, and take a step."""
    kind, options = torch.optim.Adagrad, {"lr": 0.1}
    model = ShardedTieredEmbeddingBagCollection(
        TABLES,
        sharding=SHARDINGS["all kinds"],
        capacity=1.0,
        optimizer=None if how == "memory" else kind,
        average=False,
    )
    dense = torch.nn.Parameter(torch.zeros(1))
    wrong, params = kind([dense], lr=0.1), 1
    group = None
    if rank == 1 and how == "kind":
        wrong = torch.optim.SGD([dense], lr=0.1)
    elif rank == 1 and how == "options":
        wrong = kind([dense], lr=0.2)
    elif how == "group":
        wrong.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
        group = rank
    elif rank == 1 and how == "none":
        wrong = "Adagrad"
    elif rank == 1 and how == "memory":
        tables = model._held[1].engine.tables
        tables.placed.now.groups[0].cache.check_idle = full
    found = raised(model.follow, wrong, group=group)
    if how == "memory" and rank == 1:
        del tables.placed.now.groups[0].cache.check_idle
    if wrong != "Adagrad":
        assert [len(each["params"]) for each in wrong.param_groups] == [params] * len(wrong.param_groups)
        wrong.step()
        assert not any(entry for entry in wrong.state_dict()["state"] if entry > 1)
    optimizer = kind([dense], **options)
    model.follow(optimizer)
    ids, offsets, _, upstream = batch_of(TABLES, 0, rank, samples=uneven)
    model(ids, offsets).backward(upstream)
    optimizer.step()
    weights = dict(model.state_dict())
    model.close()
    return found, weights


def full(*_):
    raise te.errors.StorageFullError("no space left")


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        ("kind", "ConfigError", "differs between the ranks: torch.optim.Adagrad, Adagrad(lr=0.1"),
        ("options", "ConfigError", "what the tables are to follow differs between the ranks"),
        ("group", "ConfigError", "the param group differs between the ranks: number 0 on rank 0, number 1 on rank 1"),
        ("none", "ConfigError", "rank 1: follow needs a torch.optim.Optimizer"),
        ("memory", "StorageFullError", "rank 1: no space left"),
    ],
)
def test_what_one_rank_cannot_follow_none_follows(worlds, how, error, text):
    model = te.TieredEmbeddingBagCollection(TABLES, capacity=1.0, optimizer=torch.optim.Adagrad)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    model.follow(optimizer)
    ids, offsets, _, upstream = joined(TABLES, [batch_of(TABLES, 0, rank, samples=uneven) for rank in range(2)])
    model(ids, offsets).backward(upstream)
    optimizer.step()
    answers = worlds(2).run(follows_later, how)
    for (name, said), _ in answers:
        assert name == error
        assert text in said
    for name, weight in model.state_dict().items():
        assert equal(answers[0][1][name], weight), name


def fails_to_follow(rank, size):
    """Rank 1 is given other tables; what is left in the optimizer of each."""
    dense = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([dense], lr=0.1)
    tables = TABLES if rank == 0 else [te.TableConfig(name="other", num_embeddings=3, embedding_dim=4)]
    try:
        ShardedTieredEmbeddingBagCollection(tables, optimizer=optimizer)
    except te.errors.ConfigError as error:
        return str(error), len(optimizer.param_groups[0]["params"])


def test_a_collection_that_is_not_built_leaves_the_optimizer_as_it_was(worlds):
    for text, params in worlds(2).run(fails_to_follow):
        assert "tables differs between the ranks" in text
        assert params == 1
