"""Tables that several features look up in, against each table alone with all its bags in one feature: bit for bit."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from devices import assert_same_bits, equal, from_numpy
from training import NAMES, OPTIMIZERS

import tieredemb as te
from tieredemb.errors import ConfigError, IdOutOfRangeError, InvalidInputError

TABLES = [
    te.TableConfig(name="user", num_embeddings=9, embedding_dim=4),
    te.TableConfig(name="video", num_embeddings=40, embedding_dim=4, feature_names=("watched", "liked"), padding_idx=0),
    te.TableConfig(name="tag", num_embeddings=6, embedding_dim=5, feature_names=["a", "b", "c"]),
    te.TableConfig(name="word", num_embeddings=300, embedding_dim=4, feature_names=("title", "query")),
]
TABLE_OF = [t for t, table in enumerate(TABLES) for _ in table.features]


def a_batch(seed, samples=7):
    """Of each feature ids, sizes of bags, weights, and the gradient of its outputs."""
    rng = np.random.default_rng(seed)
    parts = []
    for t in TABLE_OF:
        sizes = rng.integers(0, 5, samples)
        n = int(sizes.sum())
        ids = np.minimum((rng.pareto(1.0, n) * 2).astype(np.int64), TABLES[t].num_embeddings - 1)
        upstream = rng.standard_normal((samples, TABLES[t].embedding_dim)).astype(np.float32)
        parts.append((ids, sizes, rng.standard_normal(n).astype(np.float32), upstream))
    return parts


def inputs_of(parts):
    """ids, offsets and weights of features as one batch."""
    ids, sizes, weights = (np.concatenate([part[k] for part in parts]) for k in range(3))
    return from_numpy(ids), from_numpy(np.concatenate([[0], np.cumsum(sizes)])), from_numpy(weights)


def pair(optimizer=None, *, mode="sum", capacity=3, **options):
    """A collection with shared tables, and each of them alone, all of it in the cache."""
    tables = [replace(table, mode=mode) for table in TABLES]
    shared = te.TieredEmbeddingBagCollection(tables, capacity=capacity, optimizer=optimizer, **options)
    alone = []
    for table in tables:
        by_itself = [replace(table, feature_names=())]
        alone.append(te.TieredEmbeddingBagCollection(by_itself, capacity=1.0, optimizer=optimizer, **options))
    load(alone, shared)
    return shared, alone


def load(alone, shared):
    for t, module in enumerate(alone):
        name = f"tables.{TABLES[t].name}.weight"
        module.load_state_dict({name: shared.state_dict()[name]})


def forward_pair(shared, alone, parts, *, weighted=False):
    """Outputs of both: (B, ΣD), and of each table (features · B, D)."""
    ids, offsets, weights = inputs_of(parts)
    out = shared(ids, offsets, weights) if weighted else shared(ids, offsets)
    others = []
    for t, module in enumerate(alone):
        own, edges, shares = inputs_of([part for part, table in zip(parts, TABLE_OF, strict=True) if table == t])
        others.append(module(own, edges, shares) if weighted else module(own, edges))
    return out, others


def upstream_pair(parts):
    of_tables = [
        np.concatenate([part[3] for part, table in zip(parts, TABLE_OF, strict=True) if table == t])
        for t in range(len(TABLES))
    ]
    return from_numpy(np.concatenate([part[3] for part in parts], 1)), [from_numpy(each) for each in of_tables]


def columns(others, samples=7):
    """The outputs of tables as the collection lays them out: a block of columns a feature."""
    return torch.cat([block for each in others for block in each.split(samples)], 1)


def trained(module):
    """Weights and states of all tables, at the current step."""
    state = module.fused_optimizer.state_dict()["state"]
    found = [value for entry in state.values() for name, value in entry.items() if name != "lagging"]
    return [*module.state_dict().values(), *(each for each in found if torch.as_tensor(each).dim())]


def by_table(alone):
    weights = [value for module in alone for value in module.state_dict().values()]
    return [*weights, *(state for module in alone for state in trained(module)[1:])]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=NAMES)
def test_features_of_a_table_train_it_as_one(device, optimizer):
    shared, alone = pair(optimizer)
    for step in range(4):
        parts = a_batch(step)
        out, others = forward_pair(shared, alone, parts)
        assert equal(out, columns(others))
        upstream, upstreams = upstream_pair(parts)
        out.backward(upstream)
        for other, grad in zip(others, upstreams, strict=True):
            other.backward(grad)
    assert_same_bits(trained(shared), by_table(alone))


@pytest.mark.parametrize("mode", ["mean", "max"])
def test_features_are_pooled_in_every_mode(device, mode):
    shared, alone = pair(te.Adagrad(lr=0.1), mode=mode)
    for step in range(3):
        parts = a_batch(step)
        out, others = forward_pair(shared, alone, parts)
        assert equal(out, columns(others))
        upstream, upstreams = upstream_pair(parts)
        out.backward(upstream)
        for other, grad in zip(others, upstreams, strict=True):
            other.backward(grad)
    assert_same_bits(trained(shared), by_table(alone))


@pytest.mark.parametrize("options", [{}, {"scale_grad_by_freq": True}, {"max_norm": 1.0}], ids=str)
def test_features_are_weighted_and_scaled_as_bags_of_one(device, options):
    shared, alone = pair(te.SGD(lr=0.1), **options)
    parts = a_batch(0)
    out, others = forward_pair(shared, alone, parts, weighted=True)
    assert equal(out, columns(others))
    upstream, upstreams = upstream_pair(parts)
    out.backward(upstream)
    for other, grad in zip(others, upstreams, strict=True):
        other.backward(grad)
    assert_same_bits(trained(shared), by_table(alone))


def test_long_segments_of_features_are_one_sum(device):
    """More than a chunk of occurrences of one row, in each of three features."""
    shared, alone = pair(te.SGD(lr=0.1))
    parts = a_batch(0, samples=40)
    parts = [(ids * 0 + 1, sizes, weights, upstream) for ids, sizes, weights, upstream in parts]
    out, others = forward_pair(shared, alone, parts)
    upstream, upstreams = upstream_pair(parts)
    out.backward(upstream)
    for other, grad in zip(others, upstreams, strict=True):
        other.backward(grad)
    assert_same_bits(trained(shared), by_table(alone))


def test_several_calls_of_features_are_one_update(device):
    shared, alone = pair(te.Adagrad(lr=0.1))
    first, second = a_batch(1), a_batch(2)
    with shared.accumulate():
        for parts in (first, second):
            forward_pair(shared, [], parts)[0].backward(upstream_pair(parts)[0])
    for t, module in enumerate(alone):
        with module.accumulate():
            for parts in (first, second):
                own = inputs_of([part for part, table in zip(parts, TABLE_OF, strict=True) if table == t])
                module(*own[:2]).backward(upstream_pair(parts)[1][t])
    assert_same_bits(trained(shared), by_table(alone))


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
def test_norm_of_a_shared_table_is_that_of_its_rows(device, norm_type):
    shared, alone = pair(torch.optim.SGD)
    shared.follow(torch.optim.SGD(shared.parameters(), lr=0.1))
    for module in alone:
        module.follow(torch.optim.SGD(module.parameters(), lr=0.1))
    parts = a_batch(3)
    out, others = forward_pair(shared, alone, parts)
    upstream, upstreams = upstream_pair(parts)
    out.backward(upstream)
    for other, grad in zip(others, upstreams, strict=True):
        other.backward(grad)
    norms = shared.engine.optimizer.pending.norms(norm_type)
    assert_same_bits(norms.split(1), [module.engine.optimizer.pending.norms(norm_type) for module in alone])


def test_a_factor_reaches_every_column_of_a_table(device):
    """Clipping multiplies the gradient of a table by a factor: in all columns of its features, and in no other."""
    shared, alone = pair(torch.optim.SGD)
    optimizers = []
    for module in (shared, *alone):
        optimizers.append(torch.optim.SGD(module.parameters(), lr=0.1))
        module.follow(optimizers[-1])
    parts = a_batch(3)
    out, others = forward_pair(shared, alone, parts)
    upstream, upstreams = upstream_pair(parts)
    out.backward(upstream)
    for other, grad in zip(others, upstreams, strict=True):
        other.backward(grad)
    factors = [0.5, 2.0, 0.25, 4.0]
    for t, factor in enumerate(factors):
        list(shared.parameters())[t].grad.mul_(factor)
        next(alone[t].parameters()).grad.mul_(factor)
    for optimizer in optimizers:
        optimizer.step()
    assert_same_bits(shared.state_dict().values(), [each for module in alone for each in module.state_dict().values()])


def test_prefetched_features_train_as_without(device):
    batches = [inputs_of(a_batch(seed))[:2] for seed in range(6)]
    weights = []
    for depth in (0, 2):
        shared, _ = pair(te.Adagrad(lr=0.1), capacity=30)
        for ids, offsets in te.prefetch(batches, shared, depth):
            shared(ids, offsets).square().sum().backward()
        weights.append(shared.state_dict().values())
    assert_same_bits(*weights)


def test_a_table_without_feature_names_has_one_of_its_own():
    assert TABLES[0].features == ("user",)
    assert replace(TABLES[0], name="other").features == ("other",)
    assert TABLES[2].features == ("a", "b", "c")


def test_who_looks_up_in_a_table_changes_none_of_its_rows(tmp_path):
    plain = [replace(table, feature_names=()) for table in TABLES]
    shared, other = (te.TieredEmbeddingBagCollection(tables, capacity=0.5) for tables in (TABLES, plain))
    assert_same_bits(shared.state_dict().values(), other.state_dict().values())
    shared.save_checkpoint(tmp_path / "saved")
    other.load_checkpoint(tmp_path / "saved")


@pytest.mark.parametrize("names", ["watched", ("a", "a"), (1,), ("",), None], ids=str)
def test_feature_names_that_are_none_are_refused(names):
    with pytest.raises(ConfigError, match="feature_names of table 'video' must"):
        te.TableConfig(name="video", num_embeddings=3, embedding_dim=4, feature_names=names)


def test_a_bad_id_names_its_feature(device):
    shared, _ = pair(check_ids="always")
    ids, offsets, _ = inputs_of(a_batch(0))
    for f, told in ((0, "for table 'user' (0 … 8)"), (4, "for feature 'b' of table 'tag' (0 … 5)")):
        at = int(offsets[f * 7])
        bad = ids.clone()
        bad[at] = 1000
        with pytest.raises(IdOutOfRangeError) as caught:
            shared(bad, offsets)
        assert f"id 1000 at position {at} is out of range {told}" in str(caught.value)


def test_offsets_are_to_be_those_of_all_features(device):
    shared, _ = pair()
    with pytest.raises(InvalidInputError, match="8 features need 8 · B \\+ 1 of them"):
        shared(torch.tensor([1]), torch.tensor([0, 1, 1, 1, 1]))
