"""Tables that one rank holds each: it pools their bags, whose vectors travel. The bits are those of one process."""

from __future__ import annotations

import warnings

import pytest
import torch
from devices import equal
from pairs import parametrize_pairs
from sharding.ranks import SHAPES, batch_of, joined, one_process, seven, sharding_of, step_of, tables_of, uneven
from sharding.test_sharded_failures import raised
from sharding.test_sharded_memory import short
from sharding.test_sharded_training import compare

import tieredemb as te
from tieredemb.sharding.collection import ShardedTieredEmbeddingBagCollection
from tieredemb.sharding.layout import Layout, TableWise
from tieredemb.sharding.shard import own_tables

MIXED = tables_of(modes=("sum", "mean", "max"), widths=(4, 8), rows=(1, 3, 17, 40, 25, 9, 31), padding=(None, 0, 2))
SHARED = [
    te.TableConfig(name="a", num_embeddings=19, embedding_dim=4, feature_names=("x", "y"), padding_idx=1),
    te.TableConfig(name="b", num_embeddings=23, embedding_dim=4),
    te.TableConfig(name="c", num_embeddings=29, embedding_dim=4, mode="mean", feature_names=("u", "v", "w")),
]


# --- outputs and rows are those of one process ------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [2, 3])
def test_bags_of_any_lengths(worlds, size, shape):
    tables = tables_of(modes=("sum", "mean", "max"), padding=(None, 2))
    compare(worlds(size), tables, "tables", uneven, optimizer=te.Adagrad(lr=0.1), capacity=0.5, shape=shape)


@pytest.mark.parametrize("sharding", ["tables", "copies", "every other"])
@pytest.mark.parametrize("capacity", [1, 1.0])
@pytest.mark.parametrize("optimizer", [te.RowWiseAdagrad(lr=0.1), te.Adam(lr=0.05)], ids=["sparse", "dense"])
def test_both_kinds_of_tables_of_all_modes_in_two_widths(worlds, optimizer, capacity, sharding):
    compare(worlds(3), MIXED, sharding, uneven, optimizer=optimizer, capacity=capacity, shape="some equal")


@pytest.mark.parametrize("sharding", ["tables", "copies", "every other"])
def test_tables_of_several_features(worlds, sharding):
    compare(worlds(2), SHARED, sharding, uneven, optimizer=te.Adagrad(lr=0.1), capacity=0.5, shape="some equal")


@parametrize_pairs(
    options=[{}, {"scale_grad_by_freq": True}, {"max_norm": 0.5}],
    sharding=["tables", "copies", "every other"],
    weighted=["constant", True],
)
def test_weights_of_samples(worlds, options, sharding, weighted):
    tables = tables_of(widths=(4, 8), rows=(1, 3, 17, 40, 25, 9, 31), padding=(None, 0, 2))
    keywords = {"optimizer": te.Adagrad(lr=0.1), "capacity": 0.5, "shape": "some equal"} | options
    compare(worlds(3), tables, sharding, uneven, weighted=weighted, **keywords)


@pytest.mark.parametrize("sharding", ["tables", "copies", "every other"])
@pytest.mark.parametrize(
    "keywords",
    [
        {"max_norm": 0.5, "optimizer": te.Adam(lr=0.1)},
        {"scale_grad_by_freq": True, "optimizer": te.Adagrad(lr=0.1)},
        {"dtype": torch.bfloat16, "rounding": "stochastic", "optimizer": te.Adagrad(lr=0.1)},
        {"dtype": torch.bfloat16, "output_dtype": torch.float32, "optimizer": te.SGD(lr=0.1)},
        {"dtype": torch.float32, "output_dtype": torch.bfloat16, "optimizer": te.SGD(lr=0.1)},
        {"dtype": torch.float16, "output_dtype": torch.bfloat16, "optimizer": te.SGD(lr=0.1)},
    ],
    ids=lambda keywords: "-".join(map(str, keywords.values())),
)
def test_every_option(worlds, keywords, sharding):
    modes = ("sum", "mean") if "scale_grad_by_freq" in keywords else ("sum", "mean", "max")
    tables = tables_of(modes=modes, widths=(4, 8), rows=(1, 3, 17, 40, 25, 9, 31), padding=(None, 0, 2))
    compare(worlds(2), tables, sharding, uneven, capacity=0.5, shape="long", **keywords)


def weighs_on_one(rank, size):
    """Weights on all ranks, whose gradient rank 1 alone requests; then an evaluation."""
    model = model_of(tables_of(), "every other")
    ids, offsets, weights, upstream = batch_of(tables_of(), 0, rank, samples=seven, shape="long")
    weights.requires_grad_(rank == 1)
    model(ids, offsets, weights).backward(upstream)
    with torch.no_grad():
        out = model(ids, offsets, weights)
    found = weights.grad, out, dict(model.state_dict())
    model.close()
    return found


def test_the_gradient_of_weights_may_be_requested_on_one_rank(worlds):
    tables = tables_of()
    batches = [batch_of(tables, 0, rank, samples=seven, shape="long") for rank in range(3)]
    model = te.TieredEmbeddingBagCollection(tables, optimizer=te.Adagrad(lr=0.1), capacity=0.5)
    _, gradient = step_of(model, joined(tables, batches), weighted=True)
    ids, offsets, weights, _ = joined(tables, batches)
    with torch.no_grad():
        outs = model(ids, offsets, weights).split(7)
    answers = worlds(3).run(weighs_on_one)
    assert [each[0] is None for each in answers] == [True, False, True]
    places = torch.arange(len(gradient))  # those of rank 1, feature by feature
    lengths = [int(each[1][(f + 1) * 7] - each[1][f * 7]) for f in range(len(tables)) for each in batches]
    assert equal(answers[1][0], torch.cat([gradient[part] for part in places.split(lengths)[1::3]]))
    assert all(equal(each[1], out) for each, out in zip(answers, outs, strict=True))
    for name, weight in model.state_dict().items():
        assert equal(answers[0][2][name], weight)


# --- ahead, and together ----------------------------------------------------------------------------------------------


def model_of(tables, sharding, **keywords):
    keywords = {"optimizer": te.Adagrad(lr=0.1), "capacity": 0.5, "average": False} | keywords
    return ShardedTieredEmbeddingBagCollection(tables, sharding=sharding_of(sharding, tables), **keywords)


def runs_ahead(rank, size, tables, sharding, depth, weighted, shape):
    model, outputs, found = model_of(tables, sharding), [], []
    batches = [batch_of(tables, step, rank, samples=uneven, shape=shape) for step in range(6)]
    planned = [model.planned, *(held.engine.planned for held in model._held)]  # requests, and the lookups for them
    for each in planned:

        def counted(tables, given, take=each.take):
            call = take(tables, given)
            found.append(call is not None)
            return call

        each.take = counted
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a rank without samples cannot tell its tensors apart
        for batch in te.prefetch(batches, model, depth, ids_of=lambda batch: batch[:2]):
            outputs.append(step_of(model, batch, weighted=weighted))
    weights = dict(model.state_dict())
    waiting = sum(len(each.waiting) for each in planned)
    model.close()
    return outputs, weights, found, waiting


@pytest.mark.parametrize(
    ("sharding", "depth", "weighted", "shape"),
    [
        ("tables", 1, False, "some equal"),
        ("tables", 3, False, "ones"),
        ("tables", 3, True, "some equal"),
        ("every other", 1, False, "ones"),
        ("every other", 1, True, "some equal"),
        ("every other", 3, False, "some equal"),
    ],
)
def test_ahead_or_not_bits_are_the_same(worlds, sharding, depth, weighted, shape):
    tables = tables_of(widths=(4, 8)) if weighted else MIXED
    keywords = {"optimizer": te.Adagrad(lr=0.1), "capacity": 1.0}
    alone, expected = one_process(3, tables, 6, uneven, weighted, keywords, shape)
    answers = worlds(3).run(runs_ahead, tables, sharding, depth, weighted, shape)
    for rank, (outputs, _, found, waiting) in enumerate(answers):
        assert found == [True] * 18  # by the module, and by each width
        for (out, gradient), (its_out, its_gradient) in zip(outputs, alone[rank], strict=True):
            assert equal(out, its_out)
            assert gradient is None if its_gradient is None else equal(gradient, its_gradient)
        assert waiting == 0
    for name, weight in expected.items():
        assert equal(answers[0][1][name], weight)


def averages(rank, size, sharding):
    model = model_of(MIXED, sharding, average=True)
    for step in range(2):
        step_of(model, batch_of(MIXED, step, rank, samples=uneven, shape="some equal"), weighted=False)
    weights = dict(model.state_dict())
    model.close()
    return weights


@pytest.mark.parametrize("sharding", ["tables", "copies", "every other"])
def test_gradients_are_divided_by_the_ranks(worlds, sharding):
    model = te.TieredEmbeddingBagCollection(MIXED, optimizer=te.Adagrad(lr=0.1), capacity=1.0)
    for step in range(2):
        batches = [batch_of(MIXED, step, rank, samples=uneven, shape="some equal") for rank in range(3)]
        *batch, upstream = joined(MIXED, batches)
        step_of(model, (*batch, upstream / torch.full((1,), 3.0)), weighted=False)
    found = worlds(3).run(averages, sharding)[0]
    for name, weight in model.state_dict().items():
        assert equal(found[name], weight)


def accumulates(rank, size, sharding):
    model = model_of(MIXED, sharding)
    with model.accumulate():
        for step in range(3):
            step_of(model, batch_of(MIXED, step, rank, samples=uneven, shape="some equal"), weighted=False)
    weights = dict(model.state_dict())
    model.close()
    return weights


@pytest.mark.parametrize("sharding", ["tables", "copies", "every other"])
def test_several_forwards_are_one_update(worlds, sharding):
    model = te.TieredEmbeddingBagCollection(MIXED, optimizer=te.Adagrad(lr=0.1), capacity=1.0)
    with model.accumulate():
        for step in range(3):
            batches = [batch_of(MIXED, step, rank, samples=uneven, shape="some equal") for rank in range(3)]
            step_of(model, joined(MIXED, batches), weighted=False)
    found = worlds(3).run(accumulates, sharding)[0]
    for name, weight in model.state_dict().items():
        assert equal(found[name], weight)


def scaled(model, dense, batches):
    """Steps of an optimizer that the tables follow, each after its gradients were scaled, as a scaler unscales them."""
    optimizer = torch.optim.Adagrad([dense], lr=0.1)
    model.follow(optimizer)
    scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=4.0, growth_interval=100)
    for batch in batches:
        optimizer.zero_grad()
        out = model(*batch[:2])
        out.backward(batch[3] * float(scaler.scale(torch.ones(()))))
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return dict(model.state_dict())


def follows(rank, size, sharding):
    model = model_of(MIXED, sharding, optimizer=torch.optim.Adagrad)
    batches = [batch_of(MIXED, step, rank, samples=uneven, shape="mostly empty") for step in range(4)]
    weights = scaled(model, torch.nn.Parameter(torch.zeros(1)), batches)
    model.close()
    return weights


@pytest.mark.parametrize("sharding", ["tables", "copies", "every other"])
def test_gradients_that_wait_for_a_step_are_scaled(worlds, sharding):
    model = te.TieredEmbeddingBagCollection(MIXED, optimizer=torch.optim.Adagrad, capacity=1.0)
    batches = [
        joined(MIXED, [batch_of(MIXED, step, rank, samples=uneven, shape="mostly empty") for rank in range(3)])
        for step in range(4)
    ]
    expected = scaled(model, torch.nn.Parameter(torch.zeros(1)), batches)
    found = worlds(3).run(follows, sharding)[0]
    for name, weight in expected.items():
        assert equal(found[name], weight)


# --- failures ---------------------------------------------------------------------------------------------------------


def fails_once(rank, size, kind):
    """Rank 1 fails in the second step, whose batches are weighted; the others are well, and all go on."""
    tables, errors = tables_of(), []
    model = model_of(tables, "tables")
    exchange = model._ranks._context.exchange
    sending = exchange.sending
    for step in range(4):
        ids, offsets, weights, upstream = batch_of(tables, step, rank, samples=seven, shape="long")
        fails = (rank, step) == (1, 1)
        if fails and kind == "id":
            ids[-1] = 40
        if fails and kind == "offset":
            offsets[1] = -1
        if fails and kind == "memory":
            exchange.sending = short(exchange.sending)  # for weights, before anything else
        errors.append(raised(step_of, model, (ids, offsets, weights, upstream), weighted=True))
        exchange.sending = sending
    weights = dict(model.state_dict())
    model.close()
    return errors, weights


@pytest.mark.parametrize(
    ("kind", "name", "text"),
    [
        ("id", "IdOutOfRangeError", "rank 1: id 40 at position"),
        ("offset", "InvalidInputError", "rank 1: offsets"),
        ("memory", "StorageFullError", "rank 1: no memory is left"),
    ],
)
def test_a_rank_that_fails_is_raised_on_all(worlds, kind, name, text):
    tables = tables_of()
    model = te.TieredEmbeddingBagCollection(tables, optimizer=te.Adagrad(lr=0.1), capacity=1.0)
    for step in (0, 2, 3):
        batches = [batch_of(tables, step, rank, samples=seven, shape="long") for rank in range(3)]
        step_of(model, joined(tables, batches), weighted=True)
    answers = worlds(3).run(fails_once, kind)
    for errors, _ in answers:
        assert [each is None for each in errors] == [True, False, True, True]
        assert errors[1][0] == name
        assert errors[1][1].startswith(text)
    for table, weight in model.state_dict().items():
        assert equal(answers[0][1][table], weight)


def differs_in_outputs(rank, size):
    return raised(model_of, tables_of(), "tables", output_dtype=(torch.float32, torch.bfloat16)[rank])


def test_ranks_agree_on_what_bags_are_rounded_to(worlds):
    for kind, text in worlds(2).run(differs_in_outputs):
        assert kind == "ConfigError"
        assert "output_dtype differs between the ranks" in text


# --- what travels -----------------------------------------------------------------------------------------------------


def counts_sent(rank, size, tables, sharding, shape):
    """How many numbers this rank sends in each exchange of a step, but for headers."""
    model, sent = model_of(tables, sharding), []
    exchange = model._ranks._context.exchange
    send = exchange.send

    def counted(sending, *kind):
        sent.append(sending.given.numel())
        return send(sending, *kind)

    exchange.send = counted
    step_of(model, batch_of(tables, 0, rank, samples=seven, shape=shape), weighted=False)
    model.close()
    return sent


def counts_values(rank, size, shape, padding=None):
    """The same, of four tables."""
    return counts_sent(rank, size, tables_of(rows=(40, 40, 40, 40), padding=(padding,)), "tables", shape)


def largest_request(shape, padding=None):
    """The most ids that one of two ranks requests from one, of four tables of which each holds two."""
    tables, found = tables_of(rows=(40, 40, 40, 40), padding=(padding,)), []
    for rank in range(2):
        ids, offsets, *_ = batch_of(tables, 0, rank, samples=seven, shape=shape)
        each = [
            int((its != (-1 if padding is None else padding)).sum()) for its in ids.split(offsets[::7].diff().tolist())
        ]
        found += [each[0] + each[2], each[1] + each[3]]
    return max(found)


@pytest.mark.parametrize(("shape", "padding"), [("equal", None), ("ones", None), ("some equal", None), ("long", 0)])
def test_bags_travel_as_vectors(worlds, shape, padding):
    """4 features of width 4, 7 samples on each of 2 ranks, each of which holds 2 of the tables. Padding stays."""
    most, bags = largest_request(shape, padding), 4 * 7
    assert padding is None or most < largest_request(shape)
    held = 2 * 2 * 7 * 4  # what a rank sends back: vectors of the bags of 2 tables, of 2 ranks
    for sent in worlds(2).run(counts_values, shape, padding):
        assert sent == [2 * (4 + most) + bags, held, bags * 4]  # counts, ids and lengths of bags first


def test_a_table_of_one_rank_is_no_part_of_another(worlds):
    """All tables on rank 1: rank 0 owns nothing, and both train."""
    tables = tables_of(modes=("sum", "max"))
    compare(worlds(2), tables, "one rank", uneven, optimizer=te.Adagrad(lr=0.1), capacity=0.5, shape="long")


@pytest.mark.parametrize(
    ("given", "made"),
    [("auto", ["auto", "auto"]), ("resident", ["resident", "auto"]), ("cached", ["cached", "cached"])],
)
def test_a_table_that_another_rank_holds_need_not_be_resident(given, made):
    table = te.TableConfig(name="a", num_embeddings=9, embedding_dim=4, placement=given)
    layout = Layout((table,), 2, TableWise(rank=0))
    own = [own_tables(layout, [0], rank)[0] for rank in range(2)]
    assert [each.num_embeddings for each in own] == [9, 1]
    assert [each.placement for each in own] == made
