"""Which rows a GPU requests from which rank, and how it pools them, against the CPU twin. Skips without a GPU;
TIEREDEMB_REQUIRE_CUDA=1 fails."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from devices import assert_close, equal
from sharding.ranks import padded

import tieredemb as te
from tieredemb.errors import IdOutOfRangeError, InvalidInputError
from tieredemb.kernels.spread import RowSpread
from tieredemb.lookup.bags import Places
from tieredemb.sharding.bags import parts_of
from tieredemb.sharding.finder import bag_finder
from tieredemb.sharding.header import Bound
from tieredemb.sharding.layout import Layout, Replicated, RowWise, TableWise
from tieredemb.step.batch import Batch
from tieredemb.tables.config import table_set_config

pytestmark = pytest.mark.usefixtures("gpu")

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SHAPES = {  # tables, samples, most ids of a bag
    "several ids": (9, 500, 5),
    "one sample": (40, 1, 4),
    "one table": (1, 3000, 3),
    "no ids": (3, 5, 1),
    "no samples": (3, 0, 5),
    "long": (26, 1200, 7),
}
MODES = {"sum": ("sum",), "mean": ("sum", "mean"), "all": ("max", "sum", "mean")}


def a_batch(shape, modes, rng):
    """Tables of two widths, ids and offsets; some ids are the padding of their table."""
    count, samples, most = SHAPES[shape]
    tables = [
        te.TableConfig(
            name=f"t{t}", num_embeddings=3 + 7 * t, embedding_dim=(4, 6)[t % 2], padding_idx=0 if t % 3 else None,
            mode=modes[t % len(modes)], feature_names=("x", "y") if t == 2 else (),
        )
        for t in range(count)
    ]  # fmt: skip
    features = [table for table in tables for _ in table.features]
    sizes = rng.integers(0, most, len(features) * samples)
    each = sizes.reshape(len(features), samples).sum(1)
    ids = [
        (rng.random(n) ** 2 * table.num_embeddings).astype(np.int64) for table, n in zip(features, each, strict=True)
    ]
    return tables, np.concatenate([*ids, np.empty(0, np.int64)]), np.concatenate([[0], np.cumsum(sizes)])


def finders(tables, ranks, sharding, **keywords):
    """What finds bags, on a CPU and on a GPU, the parts, and ΣD."""
    layout = Layout(tables, ranks, sharding)
    widths = [table.embedding_dim for table in tables for _ in table.features]
    columns = np.concatenate([[0], np.cumsum(widths)]).astype(np.int64)
    parts = []
    for width in sorted({*widths}):
        of_width = [t for t, table in enumerate(tables) if table.embedding_dim == width]
        parts += parts_of(layout, of_width, list(columns))
    made = []
    for device in (CPU, GPU):
        config = table_set_config(
            tuple(tables), capacity=1.0, policy=None, storage=None, optimizer=None, seed=0, dtype=torch.float32,
            device=device, check_ids="deferred", **keywords,
        )  # fmt: skip
        made.append(bag_finder(layout, parts, config))
    return made, parts, int(columns[-1])


def batch_on(device, ids, offsets, samples, places=None):
    ids, offsets = torch.from_numpy(ids).to(device), torch.from_numpy(offsets).to(device)
    return Batch(ids, offsets, len(offsets), True, samples, None, (ids, offsets), places)


def are_as(one, other):
    """What was gathered, the outputs and the gradients of the weights, on either device."""
    (mine, out, of_weights), (theirs, its_out, its_of_weights) = one, other
    for number, (part, its) in enumerate(zip(mine, theirs, strict=True)):
        assert (part is None and its is None) or equal(part, its), number
    assert equal(out, its_out)
    assert_close(of_weights, its_of_weights)  # a GPU sums along a tree


def requested_of(messages, part, bound):
    """The message to each rank, without the padding of its block."""
    pieces, features = [], len(part.owner)
    for piece in messages.cpu():
        counts, ids, lengths = piece[:features], piece[features : features + bound], piece[features + bound :]
        pieces += [counts, ids[: counts.sum()], lengths]
    return torch.cat(pieces)


@pytest.mark.parametrize("modes", MODES)
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_go_to_each_rank(shape, modes):
    """Those that would be sent, zeros of who has no ids, each behind as many of the ranks before; nothing else is
    written."""
    rng, ranks, rank = np.random.default_rng(5), 3, 1
    tables, ids, offsets = a_batch(shape, MODES[modes], rng)
    samples, bound = SHAPES[shape][1], len(ids) + 5
    (_, find), parts, columns = finders(tables, ranks, RowWise())
    grad = torch.from_numpy(rng.standard_normal((samples, columns))).float().cuda()
    for part, bags in zip(parts, find(batch_on(GPU, ids, offsets, samples))[0], strict=True):
        width = part.space.width
        padded(part, bags, Bound(bound, None), samples, GPU)
        out = torch.zeros((samples, columns), device=GPU)
        rows = torch.from_numpy(rng.standard_normal((ranks * bound, width))).float().cuda()
        bags.pool(rows, None, out, keep=True, keep_rows=False)
        expected, scale = bags.gradient(grad, 3.0)
        memory = [torch.full((ranks * bound, width), torch.nan, device=GPU) for _ in range(ranks)]
        begins = torch.tensor([its.data_ptr() for its in memory], device=GPU)
        found = bags.send_gradient(grad, 3.0, RowSpread(begins, bound, rank * bound), rank)
        assert (found is None) == (scale is None)
        assert scale is None or equal(found, scale)
        for its, sent in zip(memory, expected.split(bound), strict=True):
            assert equal(its[rank * bound : (rank + 1) * bound], sent)
            assert its[: rank * bound].isnan().all()
            assert its[(rank + 1) * bound :].isnan().all()


@pytest.mark.parametrize("ranks", [1, 3, 300])
@pytest.mark.parametrize("modes", MODES)
@pytest.mark.parametrize("once", [False, True], ids=["each row", "rows once"])
@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_are_requested_pooled_and_trained_as_on_a_cpu(shape, is_known, once, modes, ranks):
    """`is_known`: whether the host knows how much is requested, as it does outside a capture; and then another rank has
    more samples · `once`: whether a row comes back once, however many ids request it."""
    rng = np.random.default_rng(3)
    tables, ids, offsets = a_batch(shape, MODES[modes], rng)
    kinds = {1: TableWise(), 3: Replicated()}
    sharding = {table.name: kinds.get(t % 8, RowWise()) for t, table in enumerate(tables)}
    samples, most_samples = SHAPES[shape][1], SHAPES[shape][1] + 3 * is_known
    both, parts, columns = finders(tables, ranks, sharding)
    most = [find(batch_on(where, ids, offsets, samples))[1] for find, where in zip(both, (CPU, GPU), strict=True)]
    assert most[0] == most[1]
    requested = [each.ids for each in most[0]]
    for find, device in zip(both, (CPU, GPU), strict=True):
        assert [each.ids for each in find.count(batch_on(device, ids, offsets, samples))] == requested
    weights = torch.from_numpy(rng.standard_normal(len(ids))).float() if modes == "sum" else None
    grad = torch.from_numpy(rng.standard_normal((samples, columns))).float()
    found = []
    for find, device in zip(both, (CPU, GPU), strict=True):
        out = torch.zeros((samples, columns), device=device)
        of_weights, gathered = torch.zeros(len(ids), device=device), []
        given = batch_on(device, ids, offsets, samples)
        for number, bags in enumerate((find(given) if is_known else find.find_unchecked(given, finds_firsts=once))[0]):
            rng, part = np.random.default_rng(number), parts[number]
            ids_of_rank, rows = (each + 5 for each in most[0][number])
            bound, width, features = Bound(ids_of_rank, rows if once else None), part.space.width, len(part.owner)
            messages = padded(part, bags, bound, most_samples, device)
            live = messages[:, :features].sum(1).cpu()
            slots = [torch.arange(int(n), device="cpu") + bound.ids * rank for rank, n in enumerate(live)]
            slots = torch.cat(slots)
            back = sum(part.row_sizes(bound, most_samples, 0)[1]) or features * most_samples
            rows = torch.from_numpy(rng.standard_normal((back, width))).float()
            every = torch.from_numpy(rng.standard_normal((ranks * bound.ids, width))).float()
            its = None if weights is None else weights.to(device)
            bags.pool(rows.to(device), its, out, keep=True, keep_rows=weights is not None)
            gathered.append(requested_of(messages, part, bound.ids))
            rows, scale = bags.gradient(grad.to(device), float(ranks))
            assert len(rows) == sum(part.gradient_sizes(bound, most_samples, 0)[0])
            gathered += [
                rows if part.is_table_wise else rows.cpu()[slots],
                None if scale is None else scale.cpu()[slots],
            ]
            if weights is not None:
                mine = bags.sent_weights(its)
                gathered.append(None if mine is None else mine.cpu()[slots])
                bags.keep(every.to(device))
                bags.weights_gradient(grad.to(device), of_weights)
        found.append((gathered, out, of_weights))
    are_as(*found)


def test_features_may_come_in_another_order():
    rng = np.random.default_rng(1)
    tables, ids, offsets = a_batch("several ids", ("sum",), rng)
    tables = [te.TableConfig(name=f"t{t}", num_embeddings=500, embedding_dim=(4, 6)[t % 2]) for t in range(9)]
    places = Places((3, 0, 8, 1, 9, 5, 2, 7, 4), 10)  # table 2 of the batch has two features
    sharding = {table.name: TableWise() if t < 4 else RowWise() for t, table in enumerate(tables)}
    both, parts, _ = finders(tables, 3, sharding)
    host, device = (
        find(batch_on(where, ids, offsets, 500, places))[0] for find, where in zip(both, (CPU, GPU), strict=True)
    )
    for part, mine, theirs in zip(parts, host, device, strict=True):
        messages = [
            requested_of(padded(part, bags, Bound(len(ids), None), 500, where), part, len(ids))
            for bags, where in ((mine, CPU), (theirs, GPU))
        ]
        assert equal(*messages)


@pytest.mark.parametrize("rows", [1, 50, 1_000_000])
def test_a_row_of_many_occurrences_is_requested_once(rows):
    """More occurrences than a GPU has threads for at once, of one row, of some or of nearly as many."""
    count = 300_000
    ids = (np.random.default_rng(3).random(count) ** 2 * rows).astype(np.int64)
    tables = [te.TableConfig(name="t", num_embeddings=rows, embedding_dim=4)]
    both, (part,), _ = finders(tables, 2, RowWise())
    outs, messages, different = [], [], np.unique(ids)
    for find, where in zip(both, (CPU, GPU), strict=True):
        (bags,), (most,) = find(batch_on(where, ids, np.arange(count + 1), count))
        assert most.rows == max(np.bincount(different % 2))
        bound = Bound.just(most)
        messages.append(requested_of(padded(part, bags, bound, count, where), part, bound.ids))
        received = torch.from_numpy(np.random.default_rng(4).standard_normal((2 * bound.row_count, 4))).float()
        outs.append(torch.zeros((count, 4), device=where))
        bags.pool(received.to(where), None, outs[-1], keep=False, keep_rows=False)
    assert equal(*messages)
    assert equal(*outs)


@pytest.mark.parametrize("kind", ["id", "negative id", "offset", "end"])
def test_errors_have_the_same_words(kind):
    tables, ids, offsets = a_batch("several ids", ("sum",), np.random.default_rng(2))
    both, *_ = finders(tables, 2, RowWise())
    if kind in ("id", "negative id"):
        ids[[17, 400]] = 1000 if kind == "id" else -5
    else:
        offsets[70 if kind == "offset" else -1] = offsets[-1] - 1 if kind == "end" else -3
    errors = []
    for find, device in zip(both, (CPU, GPU), strict=True):
        with pytest.raises((IdOutOfRangeError, InvalidInputError)) as error:
            find(batch_on(device, ids, offsets, 500))
        errors.append((error.type, str(error.value)))
    assert errors[0] == errors[1]
