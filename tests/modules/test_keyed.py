"""Collections that are called by key, as TorchRec's are; with TorchRec itself where it is installed."""

from __future__ import annotations

import importlib.util
import pickle

import keyed
import numpy as np
import pytest
import torch
from devices import assert_same_bits, equal, from_numpy

import tieredemb as te
from tieredemb.errors import IdOutOfRangeError, InvalidInputError, UnsupportedError
from tieredemb.modules.keyed import KeyedTensor

TABLES = [
    te.TableConfig(name="user", num_embeddings=9, embedding_dim=4),
    te.TableConfig(name="video", num_embeddings=40, embedding_dim=4, feature_names=("watched", "liked")),
    te.TableConfig(name="tag", num_embeddings=6, embedding_dim=5, feature_names=("a", "b")),
]
FEATURES = [name for table in TABLES for name in table.features]
ROWS = {name: table.num_embeddings for table in TABLES for name in table.features} | {"else": 10**9}
ORDERS = {
    "same": FEATURES,
    "other": ["b", "liked", "user", "a", "watched"],
    "more": ["else", "watched", "liked", "user", "b", "a"],
}


def by_key(keys, seed=0, samples=6, dtype=torch.int64, weighted=False, kind=keyed.KeyedJaggedTensor):
    """The same bags for a key wherever it stands."""
    ids, sizes, weights = [], [], []
    for key in keys:
        rng = np.random.default_rng([seed, *key.encode()])
        sizes.append(rng.integers(0, 4, samples))
        n = int(sizes[-1].sum())
        ids.append((rng.pareto(1.0, n) * 2).astype(np.int64) % ROWS[key])
        weights.append(rng.standard_normal(n).astype(np.float32))
    values, lengths, shares = (from_numpy(np.concatenate(parts)) for parts in (ids, sizes, weights))
    return kind(keys, values.to(dtype), shares if weighted else None, lengths=lengths.to(dtype))


def plain(jagged):
    return jagged.values(), jagged.offsets()


def pair(tables=TABLES, optimizer=None, capacity=3, **options):
    return [
        te.TieredEmbeddingBagCollection(tables, capacity=capacity, optimizer=optimizer, **options) for _ in range(2)
    ]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_keys_are_looked_up_and_trained_in_any_order(device, order, dtype):
    ours, other = pair(optimizer=te.Adagrad(lr=0.1))
    for seed in range(3):
        out = ours(by_key(ORDERS[order], seed, dtype=dtype))
        expected = other(*plain(by_key(FEATURES, seed)))
        assert isinstance(out, keyed.KeyedTensor)
        assert out.keys() == FEATURES
        assert out.length_per_key() == [4, 4, 4, 5, 5]
        assert equal(out.values(), expected)
        assert equal(out["liked"], expected[:, 8:12])
        out.values().square().sum().backward()
        expected.square().sum().backward()
    assert_same_bits(ours.state_dict().values(), other.state_dict().values())


@pytest.mark.parametrize("order", ORDERS)
def test_weights_count_where_the_collection_is_weighted(device, order):
    (ours, _), (ignores, other) = pair(optimizer=te.SGD(lr=0.1), is_weighted=True), pair(optimizer=te.SGD(lr=0.1))
    batch, reference = by_key(ORDERS[order], weighted=True), by_key(FEATURES, weighted=True)
    batch._weights.requires_grad_()
    reference._weights.requires_grad_()
    assert equal(ignores(batch).values(), other(*plain(reference)))
    out, expected = ours(batch).values(), other(*plain(reference), reference.weights())
    assert equal(out, expected)
    out.square().sum().backward()
    expected.square().sum().backward()
    assert_same_bits(ours.state_dict().values(), other.state_dict().values())
    parts = torch.split(batch._weights.grad, batch.length_per_key())
    expected_parts = torch.split(reference._weights.grad, reference.length_per_key())
    found = dict(zip(batch.keys(), parts, strict=True))
    for key, grad in zip(FEATURES, expected_parts, strict=True):
        assert equal(found[key], grad)
    with pytest.raises(InvalidInputError, match="is_weighted, and the KeyedJaggedTensor has no weights"):
        ours(by_key(FEATURES))


@pytest.mark.parametrize("weighted", [False, True])
def test_tables_may_look_up_one_feature(device, weighted):
    """TorchRec then names outputs after feature and table."""
    tables = [
        te.TableConfig(name="x", num_embeddings=9, embedding_dim=4, feature_names=("user", "a")),
        te.TableConfig(name="y", num_embeddings=9, embedding_dim=4, feature_names=("user",)),
    ]
    ours, other = pair(tables, te.SGD(lr=0.1), is_weighted=weighted)
    out = ours(by_key(["a", "else", "user"], weighted=weighted))
    assert out.keys() == ["user@x", "a", "user@y"]
    again = by_key(["user", "a"], weighted=weighted)
    first = again.length_per_key()[0]
    twice = [torch.cat([part, part[:first]]) for part in (again._values, again._weights) if part is not None]
    edges = torch.cat([again.offsets(), again.offsets()[1:7] + again.offsets()[-1]])
    expected = other(twice[0], edges, *twice[1:])
    assert equal(out.values(), expected)
    out.values().sum().backward()
    expected.sum().backward()
    assert_same_bits(ours.state_dict().values(), other.state_dict().values())


def test_a_missing_key_is_refused():
    ours, _ = pair()
    with pytest.raises(InvalidInputError, match="has no key 'liked', which table 'video' looks up; it has 'user', 'wa"):
        ours(by_key(["user", "watched", "a", "b"]))


@pytest.mark.parametrize("order", ORDERS)
def test_a_bad_id_names_its_feature_whatever_its_place(device, order):
    ours, _ = pair(check_ids="always")
    batch = by_key(ORDERS[order])
    at = int(batch.offsets()[6 * ORDERS[order].index("liked")])
    batch._values[at] = 40
    with pytest.raises(IdOutOfRangeError) as caught:
        ours(batch)
    assert f"id 40 at position {at} is out of range for feature 'liked' of table 'video'" in str(caught.value)


def test_samples_that_differ_from_key_to_key_are_refused():
    ours, _ = pair()
    for name, told in (("variable_stride_per_key", True), ("inverse_indices_or_none", (FEATURES, torch.zeros(1)))):
        batch = by_key(FEATURES)
        setattr(batch, name, lambda told=told: told)
        with pytest.raises(UnsupportedError, match="numbers of samples that differ from key to key"):
            ours(batch)


@pytest.mark.parametrize("inputs", [(torch.tensor([1]),), ([1], torch.tensor([0, 1])), ("ids",)], ids=str)
def test_other_inputs_are_refused(inputs):
    with pytest.raises(InvalidInputError, match="pass ids and offsets as tensors, or a KeyedJaggedTensor alone"):
        pair()[0](*inputs)


def test_who_has_no_keyed_tensor_gets_ours():
    kind = type("Jagged", (), {name: getattr(keyed.KeyedJaggedTensor, name) for name in ("keys", "values", "offsets")})
    kind.__module__ = "nowhere"
    batch = by_key(FEATURES)
    other = kind()
    other.__dict__.update(batch.__dict__)
    ours, _ = pair()
    with pytest.raises(InvalidInputError, match="KeyedJaggedTensor alone"):
        ours(other)  # it says nothing of weights
    kind.weights_or_none = keyed.KeyedJaggedTensor.weights_or_none
    out, expected = ours(other), ours(batch)
    assert type(out) is KeyedTensor
    assert (out.keys(), out.length_per_key()) == (FEATURES, [4, 4, 4, 5, 5])
    assert out.offset_per_key() == [0, 4, 8, 12, 17, 22]
    assert equal(out.values(), expected.values())
    for key, block in out.to_dict().items():
        assert equal(block, out[key])
        assert equal(block, expected[key])
    with pytest.raises(KeyError):
        out["else"]


def test_half_rows_are_pooled_to_float32_as_torchrec_does(device):
    ours, other = pair(dtype=torch.float16)
    out = ours(by_key(FEATURES)).values()
    assert out.dtype == torch.float32
    assert equal(out, other(*plain(by_key(FEATURES))).float())


def test_a_pickled_collection_is_called_by_key():
    ours, _ = pair()
    expected = ours(by_key(ORDERS["more"])).values().detach()
    assert equal(pickle.loads(pickle.dumps(ours))(by_key(ORDERS["more"])).values(), expected)


# --- fetching ahead ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_keys_are_fetched_ahead(device, recwarn, order, told):
    batches = [by_key(ORDERS[order], seed) for seed in range(6)]
    ours, other = pair(optimizer=te.Adagrad(lr=0.1), capacity=30)
    planned = []
    plan_ahead = ours.plan_ahead
    ours.plan_ahead = lambda *given, **keywords: planned.append(plan_ahead(*given, **keywords)) or planned[-1]
    for batch in te.prefetch(batches, ours, depth=2, ids_of=(lambda batch: batch) if told else None):
        ours(batch).values().square().sum().backward()
    for batch in batches:
        other(batch).values().square().sum().backward()
    assert len(planned) == (6 if told else 5)
    assert not any(plan.failed for plan in planned)
    assert not recwarn.list
    assert_same_bits(ours.state_dict().values(), other.state_dict().values())


def test_a_plan_for_one_order_of_keys_serves_no_other(device, recwarn):
    """The very tensors, under other names."""
    ours, other = pair(optimizer=te.SGD(lr=0.1), capacity=30)
    tables_are_alike = ["user", "liked", "watched", "b", "a"]
    batch = by_key(FEATURES)
    renamed = keyed.KeyedJaggedTensor(tables_are_alike, batch.values(), offsets=batch.offsets())
    for handed in te.prefetch([batch], ours, ids_of=lambda batch: batch):
        assert handed is batch
        out = ours(renamed).values()
    assert "planned a batch that no forward looked up" in str(recwarn.pop().message)
    assert equal(out, other(renamed).values())


@pytest.mark.parametrize("fetched", [False, True])
@pytest.mark.parametrize("order", ["other", "more"])
def test_a_captured_step_makes_its_keys(device, order, fetched):
    keys, samples = ORDERS[order], 6
    batches = []
    for seed in range(8):
        rng = np.random.default_rng(seed)
        values = np.concatenate([rng.integers(0, ROWS[key], samples) for key in keys])
        batches.append((from_numpy(values), torch.arange(len(values) + 1)))
    ours, other = pair(optimizer=te.Adagrad(lr=0.1), capacity=30)

    def step_of(module):
        def step(batch):
            out = module(keyed.KeyedJaggedTensor(keys, batch[0], offsets=batch[1])).values()
            out.square().sum().backward()
            return out

        return step

    train, eager = te.graph_step(step_of(ours)), step_of(other)
    for batch in te.prefetch(batches, ours) if fetched else batches:
        train(batch)
    for batch in batches:
        eager(batch)
    assert_same_bits(ours.state_dict().values(), other.state_dict().values())


# --- TorchRec itself --------------------------------------------------------------------------------------------------


@pytest.mark.skipif(importlib.util.find_spec("torchrec") is None, reason="torchrec is not installed")
@pytest.mark.parametrize("order", ORDERS)
def test_collection_trains_as_torchrec(order):
    import torchrec

    configs = [
        torchrec.EmbeddingBagConfig(
            name=table.name,
            num_embeddings=table.num_embeddings,
            embedding_dim=table.embedding_dim,
            feature_names=list(table.features),
        )
        for table in TABLES
    ]
    theirs = torchrec.EmbeddingBagCollection(configs)
    ours, _ = pair(optimizer=te.SGD(lr=0.1))
    ours.load_state_dict({f"tables.{t.name}.weight": theirs.embedding_bags[t.name].weight.detach() for t in TABLES})
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for seed in range(3):
        batch = by_key(ORDERS[order], seed, kind=torchrec.KeyedJaggedTensor)
        out, expected = ours(batch), theirs(batch)
        assert type(out) is torchrec.KeyedTensor
        assert (out.keys(), out.length_per_key()) == (expected.keys(), expected.length_per_key())
        torch.testing.assert_close(out.values(), expected.values())
        torch.testing.assert_close(out["liked"], expected["liked"])
        out.values().square().sum().backward()
        optimizer.zero_grad()
        expected.values().square().sum().backward()
        optimizer.step()
