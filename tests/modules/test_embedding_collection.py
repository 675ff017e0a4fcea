"""`TieredEmbeddingCollection` against a `TieredEmbedding` for each table, bit for bit, and against TorchRec's."""

from __future__ import annotations

import copy
import importlib.util
import math

import keyed
import numpy as np
import pytest
import torch
from devices import assert_same_bits, equal, from_numpy, randn
from training import NAMES, OPTIMIZERS

import tieredemb as te
from tieredemb.errors import ConfigError, IdOutOfRangeError, InvalidInputError
from tieredemb.modules.keyed import JaggedTensor

TABLES = [
    te.TableConfig(name="user", num_embeddings=9, embedding_dim=4, padding_idx=2),
    te.TableConfig(name="video", num_embeddings=40, embedding_dim=4, feature_names=("watched", "liked")),
    te.TableConfig(name="word", num_embeddings=30, embedding_dim=4, padding_idx=0, feature_names=("title", "query")),
]
FEATURES = [name for table in TABLES for name in table.features]
TABLE_OF = {name: t for t, table in enumerate(TABLES) for name in table.features}
SHAPES = {"user": (7,), "watched": (3, 5), "liked": (0,), "title": (2, 2, 3), "query": ()}
ORDERS = {
    "same": FEATURES,
    "other": ["query", "liked", "user", "title", "watched"],
    "more": ["else", "watched", "liked", "user", "query", "title"],
}


def some_ids(seed):
    rng = np.random.default_rng(seed)
    rows = {name: TABLES[t].num_embeddings for name, t in TABLE_OF.items()}
    return {
        name: from_numpy((rng.pareto(1.0, math.prod(shape)) * 2).astype(np.int64) % rows[name]).reshape(shape)
        for name, shape in SHAPES.items()
    }


def pair(optimizer=None, *, capacity=3, **options):
    """A collection, and an embedding for each table with the same rows, all of it in the cache."""
    ours = te.TieredEmbeddingCollection(TABLES, capacity=capacity, optimizer=optimizer, **options)
    weights = list(ours.state_dict().values())
    weights[0][2] = 3.0  # a padding row is read as it is
    ours.load_state_dict({f"tables.{table.name}.weight": weights[t] for t, table in enumerate(TABLES)})
    alone = []
    for table, weight in zip(TABLES, weights, strict=True):
        shape, padding = (table.num_embeddings, table.embedding_dim), table.padding_idx
        given = {"optimizer": optimizer, "capacity": 1.0, "_weight": weight, **options}
        alone.append(te.TieredEmbedding(*shape, padding, **given))
    return ours, alone


def rows_alone(alone, ids):
    """Rows by feature; those of a table's features are looked up at once, in their order."""
    rows = {}
    for table, embedding in zip(TABLES, alone, strict=True):
        flat = [ids[name].reshape(-1) for name in table.features]
        parts = embedding(torch.cat(flat)).split([len(part) for part in flat])
        rows |= {name: part.reshape(*ids[name].shape, 4) for name, part in zip(table.features, parts, strict=True)}
    return rows


def loss_of(rows, seed):
    return sum((rows[name] * randn(*rows[name].shape, seed=seed + k)).sum() for k, name in enumerate(FEATURES))


def trained(module):
    state = module.fused_optimizer.state_dict()["state"]
    return [value for entry in state.values() for name, value in entry.items() if name != "lagging"]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=NAMES)
def test_rows_of_features_are_those_of_embeddings(device, optimizer):
    ours, alone = pair(optimizer)
    for seed in range(4):
        ids = some_ids(seed)
        rows, expected = ours(ids), rows_alone(alone, ids)
        assert list(rows) == FEATURES
        for name in FEATURES:
            assert equal(rows[name], expected[name]), name
        loss_of(rows, seed).backward()
        loss_of(expected, seed).backward()
    assert_same_bits(ours.state_dict().values(), [each for module in alone for each in module.state_dict().values()])
    states = [torch.as_tensor(each) for each in trained(ours)]
    others = [torch.as_tensor(each) for module in alone for each in trained(module)]
    assert_same_bits(states, others)


OPTIONS = [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"dtype": torch.bfloat16}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_are_those_of_embeddings(device, options):
    ours, alone = pair(te.SGD(lr=0.1), **options)
    for seed in range(2):
        ids = some_ids(seed)
        rows, expected = ours(ids), rows_alone(alone, ids)
        assert_same_bits(rows.values(), expected.values())
        loss_of(rows, seed).backward()
        loss_of(expected, seed).backward()
    assert_same_bits(ours.state_dict().values(), [each for module in alone for each in module.state_dict().values()])


def test_several_calls_are_one_update(device):
    ours, alone = pair(te.Adagrad(lr=0.1))
    first, second = some_ids(0), some_ids(1)
    (loss_of(ours(first), 0) + loss_of(ours(second), 1)).backward()
    (loss_of(rows_alone(alone, first), 0) + loss_of(rows_alone(alone, second), 1)).backward()
    assert_same_bits(ours.state_dict().values(), [each for module in alone for each in module.state_dict().values()])


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_followed_tables_have_norms_and_take_factors(device, norm_type):
    ours, alone = pair(torch.optim.SGD)
    optimizers = []
    for module in (ours, *alone):
        optimizers.append(torch.optim.SGD(module.parameters(), lr=0.1))
        module.follow(optimizers[-1])
    ids = some_ids(3)
    loss_of(ours(ids), 0).backward()
    loss_of(rows_alone(alone, ids), 0).backward()
    norms = ours.engine.optimizer.pending.norms(norm_type)
    assert_same_bits(norms.split(1), [module.engine.optimizer.pending.norms(norm_type) for module in alone])
    for t, factor in enumerate((0.5, 2.0, 0.25)):
        list(ours.parameters())[t].grad.mul_(factor)
        next(alone[t].parameters()).grad.mul_(factor)
    for optimizer in optimizers:
        optimizer.step()
    assert_same_bits(ours.state_dict().values(), [each for module in alone for each in module.state_dict().values()])


def test_ids_may_be_of_two_dtypes_and_of_other_features_too(device):
    ours, alone = pair()
    ids = some_ids(0)
    mixed = {"else": torch.zeros(3), **ids, "user": ids["user"].int()}
    assert_same_bits(ours(mixed).values(), rows_alone(alone, ids).values())


def test_copies_look_up_alike():
    ours, alone = pair()
    ids = some_ids(0)
    assert_same_bits(copy.deepcopy(ours)(ids).values(), rows_alone(alone, ids).values())


def test_what_does_not_fit_is_refused(device):
    ours, _ = pair(check_ids="always")
    ids = some_ids(0)
    with pytest.raises(InvalidInputError, match="no ids of feature 'liked', which table 'video' looks up; given"):
        ours({name: value for name, value in ids.items() if name != "liked"})
    with pytest.raises(InvalidInputError, match="a mapping from names to ids, or a KeyedJaggedTensor, got Tensor"):
        ours(ids["user"])
    with pytest.raises(InvalidInputError, match="title must be int32 or int64"):
        ours({**ids, "title": ids["title"].float()})
    with pytest.raises(IdOutOfRangeError, match="id 40 at position 21 is out of range for feature 'watched' of table"):
        ours({**ids, "watched": torch.tensor([0] * 14 + [40])})
    with pytest.raises(ConfigError, match="table 'a' has mode='mean', and this collection pools nothing"):
        te.TieredEmbeddingCollection([te.TableConfig(name="a", num_embeddings=3, embedding_dim=4, mode="mean")])
    wide = te.TableConfig(name="wide", num_embeddings=3, embedding_dim=5)
    with pytest.raises(ConfigError, match="rows of 4 and 5 weights; build a collection for each width"):
        te.TieredEmbeddingCollection([TABLES[0], wide])


# --- by key -----------------------------------------------------------------------------------------------------------


def by_key(keys, seed=0, samples=6, kind=keyed.KeyedJaggedTensor):
    """The same ids for a key wherever it stands."""
    ids, sizes = [], []
    for key in keys:
        rng = np.random.default_rng([seed, *key.encode()])
        rows = TABLES[TABLE_OF[key]].num_embeddings if key in TABLE_OF else 10**9
        sizes.append(rng.integers(0, 4, samples))
        ids.append((rng.pareto(1.0, int(sizes[-1].sum())) * 2).astype(np.int64) % rows)
    values, lengths = (from_numpy(np.concatenate(parts)) for parts in (ids, sizes))
    return kind(keys, values, lengths=lengths)


def ids_by_key(batch):
    ids = dict(zip(batch.keys(), torch.split(batch.values(), batch.length_per_key()), strict=True))
    return {name: ids[name] for name in FEATURES}


@pytest.mark.parametrize("order", ORDERS)
def test_keys_are_looked_up_in_any_order(device, order):
    ours, alone = pair(te.Adagrad(lr=0.1))
    ours.need_indices = True
    for seed in range(3):
        batch = by_key(ORDERS[order], seed)
        found, ids = ours(batch), ids_by_key(batch)
        expected = rows_alone(alone, ids)
        assert list(found) == FEATURES
        for name, jagged in found.items():
            k = batch.keys().index(name)
            assert type(jagged) is keyed.JaggedTensor
            assert equal(jagged.values(), expected[name])
            assert equal(jagged.lengths(), batch.lengths()[k * 6 : (k + 1) * 6])
            assert equal(jagged.weights_or_none(), ids[name])
        loss_of({name: jagged.values() for name, jagged in found.items()}, seed).backward()
        loss_of(expected, seed).backward()
    assert_same_bits(ours.state_dict().values(), [each for module in alone for each in module.state_dict().values()])


def test_tables_may_look_up_one_feature(device):
    tables = [
        te.TableConfig(name=name, num_embeddings=9, embedding_dim=4, feature_names=("user",)) for name in ("x", "y")
    ]
    ours = te.TieredEmbeddingCollection(tables, capacity=3)
    batch = keyed.KeyedJaggedTensor(["user"], torch.tensor([3, 1, 8]), lengths=torch.tensor([2, 1]))
    found = ours(batch)
    weights = ours.state_dict()
    assert list(found) == ["user@x", "user@y"]
    for name, jagged in found.items():
        assert equal(jagged.values(), weights[f"tables.{name[-1]}.weight"][[3, 1, 8]])


def test_who_has_no_jagged_tensor_gets_ours():
    class Jagged(keyed.KeyedJaggedTensor):
        pass

    batch = by_key(FEATURES)
    kind = type("Other", (), {k: v for k, v in vars(keyed.KeyedJaggedTensor).items() if k != "__dict__"})
    kind.__module__ = "nowhere"
    other = kind(batch.keys(), batch.values(), lengths=batch.lengths())
    ours, _ = pair()
    assert type(ours(other)["user"]) is JaggedTensor
    assert type(ours(Jagged(batch.keys(), batch.values(), lengths=batch.lengths()))["user"]) is keyed.JaggedTensor


@pytest.mark.parametrize("form", ["mapping", "keyed"])
@pytest.mark.parametrize("told", [False, True])
def test_ids_are_fetched_ahead(device, recwarn, form, told):
    batches = [some_ids(seed) if form == "mapping" else by_key(ORDERS["other"], seed) for seed in range(6)]
    for batch in batches if form == "mapping" else ():
        batch["liked"] = batch["user"] + 1  # one empty tensor is like another
    ours, other = (pair(te.Adagrad(lr=0.1), capacity=20)[0] for _ in range(2))
    planned = []
    plan_ahead = ours.plan_ahead
    ours.plan_ahead = lambda *given, **keywords: planned.append(plan_ahead(*given, **keywords)) or planned[-1]

    def step(module, batch):
        rows = module(batch)
        loss_of(rows if form == "mapping" else {name: each.values() for name, each in rows.items()}, 0).backward()

    for batch in te.prefetch(batches, ours, depth=2, ids_of=(lambda batch: batch) if told else None):
        step(ours, batch)
    for batch in batches:
        step(other, batch)
    assert len(planned) == (6 if told else 5)
    assert not any(plan.failed for plan in planned)
    assert not recwarn.list
    assert_same_bits(ours.state_dict().values(), other.state_dict().values())


@pytest.mark.parametrize("fetched", [False, True])
def test_a_captured_step_takes_ids_by_feature(device, fetched):
    batches = [some_ids(seed) for seed in range(8)]
    for batch in batches:
        batch["liked"] = batch["user"] + 1  # one empty tensor is like another
    ours, other = (pair(te.Adagrad(lr=0.1), capacity=40)[0] for _ in range(2))
    upstream = {name: randn(*each.shape, 4, seed=k) for k, (name, each) in enumerate(batches[0].items())}

    def step_of(module):
        def step(batch):
            rows = module(batch)
            loss = sum((rows[name].square() * upstream[name]).sum() for name in FEATURES)
            loss.backward()
            return loss

        return step

    train, eager = te.graph_step(step_of(ours)), step_of(other)
    for batch in te.prefetch(batches, ours) if fetched else batches:
        train(batch)
    for batch in batches:
        eager(batch)
    assert_same_bits(ours.state_dict().values(), other.state_dict().values())


@pytest.mark.skipif(importlib.util.find_spec("torchrec") is None, reason="torchrec is not installed")
@pytest.mark.parametrize("order", ORDERS)
def test_collection_trains_as_torchrec(order):
    import torchrec

    tables = [te.TableConfig(name=t.name, num_embeddings=40, embedding_dim=4, feature_names=t.features) for t in TABLES]
    configs = [
        torchrec.EmbeddingConfig(name=t.name, num_embeddings=40, embedding_dim=4, feature_names=list(t.features))
        for t in tables
    ]
    theirs = torchrec.EmbeddingCollection(tables=configs, need_indices=True)
    ours = te.TieredEmbeddingCollection(tables, capacity=5, optimizer=te.SGD(lr=0.1), need_indices=True)
    ours.load_state_dict({f"tables.{t.name}.weight": theirs.embeddings[t.name].weight.detach() for t in TABLES})
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for seed in range(3):
        batch = by_key(ORDERS[order], seed, kind=torchrec.KeyedJaggedTensor)
        found, expected = ours(batch), theirs(batch)
        assert list(found) == list(expected)
        for name, jagged in found.items():
            assert type(jagged) is torchrec.JaggedTensor
            torch.testing.assert_close(jagged.values(), expected[name].values())
            assert equal(jagged.lengths(), expected[name].lengths())
            assert equal(jagged.offsets(), expected[name].offsets())
            assert equal(jagged.weights(), expected[name].weights())
        loss_of({name: jagged.values() for name, jagged in found.items()}, seed).backward()
        optimizer.zero_grad()
        loss_of({name: jagged.values() for name, jagged in expected.items()}, seed).backward()
        optimizer.step()
