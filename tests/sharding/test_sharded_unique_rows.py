"""Rows of row-wise tables: of an id that occurs several times in a rank's batch one comes back, from which
all of its occurrences are pooled. The bits are those of one process. All blocks have the size of the fullest one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from devices import equal
from pairs import parametrize_pairs
from sharding.ranks import batch_of, joined, seven, step_of, tables_of, uneven
from sharding.test_sharded_training import compare
from sharding.test_sharded_whole_tables import MIXED, SHARED, counts_sent, model_of

import tieredemb as te
from tieredemb.kernels.constants import DROPPED
from tieredemb.lookup.bags import KeySpace
from tieredemb.lookup.bags_cpu import make_bags
from tieredemb.sharding import owners_cpu
from tieredemb.sharding.layout import Layout, RowWise

# --- what travels -----------------------------------------------------------------------------------------------------


def rows_of(tables, rank, size, shape):
    """How many ids a rank requests from each rank, and how many rows of these tables those are."""
    ids, offsets = (each.cpu().numpy() for each in batch_of(tables, 0, rank, samples=seven, shape=shape)[:2])
    layout, numbers = Layout(tables, size, RowWise()), [t for t, table in enumerate(tables) for _ in table.features]
    table = np.repeat(numbers, np.diff(offsets[:: seven(rank)]))
    kept = ids != np.array([-1 if each.padding_idx is None else each.padding_idx for each in tables])[table]
    rows = np.stack([layout.owners(table, ids), table, ids])[:, kept]
    return [np.bincount(each[0], minlength=size) for each in (rows, np.unique(rows, axis=1))]


@pytest.mark.parametrize("tables", [tables_of(padding=(None, 2)), SHARED], ids=["tables", "features"])
@pytest.mark.parametrize("shape", ["ones", "some equal", "long", "mostly empty"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_row_comes_back_once_to_each_rank_that_requests_it(worlds, size, shape, tables):
    ids, rows = zip(*(rows_of(tables, rank, size, shape) for rank in range(size)), strict=True)
    assert shape in ("ones", "mostly empty") or np.sum(rows) < np.sum(ids) / 2
    features, most, back = sum(len(table.features) for table in tables), np.max(ids), np.max(rows)
    for sent in worlds(size).run(counts_sent, tables, "rows", shape):
        sent, scales = sent[:3], sent[3:]
        # counts and ids, rows of width 4, a gradient of each id
        assert sent == [size * (features + most), size * back * 4, size * most * 4]
        assert scales == ([size * most] if tables is SHARED else [])  # of means


# --- bits are those of one process ------------------------------------------------------------------------------------

FEW = tables_of(modes=("sum", "mean", "max"), widths=(4, 8), rows=(1, 3, 5, 4, 2, 40, 7), padding=(None, 0, 2))


@pytest.mark.parametrize("tables", [FEW, SHARED], ids=["tables", "features"])
@parametrize_pairs(
    optimizer=[te.Adagrad(lr=0.1), te.Adam(lr=0.05)], capacity=[1, 1.0], sharding=["rows", "every other"]
)
def test_long_bags_of_few_rows(worlds, tables, optimizer, capacity, sharding):
    compare(worlds(3), tables, sharding, uneven, optimizer=optimizer, capacity=capacity, shape="long")


@pytest.mark.parametrize("weighted", ["constant", True])
@pytest.mark.parametrize("options", [{}, {"scale_grad_by_freq": True}, {"max_norm": 0.5}], ids=["", "freq", "norm"])
def test_weights_of_samples_are_of_occurrences(worlds, options, weighted):
    tables = tables_of(widths=(4, 8), rows=(1, 3, 5, 4), padding=(None, 0))
    keywords = {"optimizer": te.Adagrad(lr=0.1), "capacity": 0.5, "shape": "long"} | options
    compare(worlds(2), tables, "rows", uneven, weighted=weighted, **keywords)


def alternates(rank, size, tables, sharding):
    """Outputs of lookups that train, that only read, and of frozen tables, by turns."""
    model, outputs = model_of(tables, sharding, optimizer=te.Adam(lr=0.05)), []
    for step in range(4):
        batch = batch_of(tables, step, rank, samples=uneven, shape="long")
        outputs.append(step_of(model, batch, weighted=False)[0])
        with torch.no_grad():
            outputs.append(model(*batch_of(tables, 10 + step, rank, samples=uneven, shape="long")[:2]))
        model.requires_grad_(False)
        outputs.append(model(*batch[:2]))
        model.requires_grad_(True)
    model.close()
    return outputs


@pytest.mark.parametrize("sharding", ["rows", "every other"])
def test_lookups_that_only_read_see_rows_of_a_dense_optimizer_as_they_are(worlds, sharding):
    model, expected = te.TieredEmbeddingBagCollection(MIXED, optimizer=te.Adam(lr=0.05), capacity=0.5), []
    for step in range(4):
        batch, other = (
            joined(MIXED, [batch_of(MIXED, number, rank, samples=uneven, shape="long") for rank in range(3)])
            for number in (step, 10 + step)
        )
        expected.append(step_of(model, batch, weighted=False)[0])
        with torch.no_grad():
            expected += [model(*other[:2]), model(*batch[:2])]
    outputs = worlds(3).run(alternates, MIXED, sharding)
    for alone, *ranks in zip(expected, *outputs, strict=True):
        assert equal(torch.cat(ranks), alone)


# --- who owns what ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grain", [1, owners_cpu.GRAIN], ids=["threads", "alone"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 300])
@pytest.mark.parametrize("samples", [0, 1, 40])
@pytest.mark.parametrize("count", [1, 6])
def test_owners_are_requested_each_row_once(count, samples, ranks, grain, monkeypatch):
    monkeypatch.setattr(owners_cpu, "GRAIN", grain)
    rng = np.random.default_rng(count + samples + ranks)
    tables = [
        te.TableConfig(name=f"t{t}", num_embeddings=2 + 9 * t, embedding_dim=4, padding_idx=0 if t % 2 else None,
                       feature_names=("x", "y", "z") if t == 1 else ())
        for t in range(count)
    ]  # fmt: skip
    features = [table for table in tables for _ in table.features]
    sizes = rng.integers(0, 6, (len(features), samples))
    ids = [rng.integers(0, table.num_embeddings, n) for table, n in zip(features, sizes.sum(1), strict=True)]
    space = KeySpace(tables, range(count), [4 * f for f in range(len(features))])
    edges = np.concatenate([[0], np.cumsum(sizes)])
    bags = make_bags(np.concatenate(ids), edges, space, samples, padding_is_dropped=True)
    found = owners_cpu.find_owners(bags, space, ranks)

    homes, counts = np.full(len(bags.keys), DROPPED), np.zeros((2, ranks, len(features)), np.int64)
    order, requested, seen = [], [], {}
    table = space.table[bags.feature]
    rows = bags.keys - space.start[table]
    for rank in range(ranks):
        for i in np.flatnonzero((bags.keys >= 0) & ((rows + table) % ranks == rank)):
            is_first = bags.keys[i] not in seen
            homes[i] = seen.setdefault(bags.keys[i], len(seen))
            order.append(i)
            requested.append(rows[i] // ranks if is_first else ~(rows[i] // ranks))
            counts[:, rank, bags.feature[i]] += 1, is_first
    assert found.order.tolist() == order
    assert found.requested.tolist() == requested
    assert found.homes.tolist() == homes.tolist()
    assert np.array_equal([found.counts, found.firsts], counts)
