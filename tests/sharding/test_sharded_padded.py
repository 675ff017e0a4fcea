"""Exchanges of one size (`max_ids=`): the bits are those of one process, and so are they where a batch is longer."""

from __future__ import annotations

import math
import warnings
from collections import Counter

import pytest
import torch
from devices import equal
from pairs import parametrize_pairs
from sharding import (
    test_sharded_agreement,
    test_sharded_following,
    test_sharded_modules,
    test_sharded_prefetch,
    test_sharded_whole_tables,
)
from sharding.ranks import SHAPES, batch_of, calls_of, joined, seven, sharding_of, step_of, tables_of, uneven
from sharding.test_sharded_failures import raised
from sharding.test_sharded_memory import short
from sharding.test_sharded_training import compare
from training import NAMES, OPTIMIZERS

import tieredemb as te
from tieredemb.errors import IdOutOfRangeError, InvalidInputError
from tieredemb.sharding import context
from tieredemb.sharding.collection import ShardedTieredEmbeddingBagCollection
from tieredemb.sharding.exchange import Exchange

MIXED = tables_of(modes=("sum", "mean", "max"), widths=(4, 8), rows=(1, 3, 17, 40, 25, 9, 31), padding=(None, 0, 2))
SHARED = [
    te.TableConfig(name="a", num_embeddings=19, embedding_dim=4, feature_names=("x", "y"), padding_idx=1),
    te.TableConfig(name="b", num_embeddings=23, embedding_dim=4),
    te.TableConfig(name="c", num_embeddings=29, embedding_dim=4, mode="mean", feature_names=("u", "v", "w")),
]
MANY = 1500  # more ids than any rank requests from another


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=NAMES)
def test_every_optimizer(worlds, optimizer):
    compare(worlds(3), tables_of(), "all kinds", seven, optimizer=optimizer, capacity=1.0, max_ids=200)


@pytest.mark.parametrize("optimizer", [te.RowWiseAdagrad(lr=0.1), te.Adam(lr=0.05)], ids=["sparse", "dense"])
@pytest.mark.parametrize("size", [2, 4])
def test_any_number_of_ranks(worlds, optimizer, size):
    compare(worlds(size), tables_of(), "all kinds", seven, optimizer=optimizer, capacity=1.0, max_ids=200)


@pytest.mark.parametrize("sharding", ["rows", "tables", "every other", "one rank"])
@pytest.mark.parametrize("modes", [("sum",), ("mean",), ("max",), ("sum", "mean", "max")], ids="-".join)
def test_every_mode_and_sharding(worlds, sharding, modes):
    tables = tables_of(modes=modes, widths=(4, 8), rows=(1, 3, 17, 40, 25, 9, 31), padding=(None, 0, 2))
    compare(worlds(3), tables, sharding, uneven, optimizer=te.Adagrad(lr=0.1), capacity=1.0, max_ids=MANY)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sharding", ["tables", "every other"])
def test_bags_of_any_lengths(worlds, sharding, shape):
    keywords = {"optimizer": te.Adam(lr=0.05), "capacity": 1, "shape": shape, "max_ids": MANY}
    compare(worlds(4), MIXED, sharding, uneven, **keywords)


@pytest.mark.parametrize("sharding", ["rows", "tables", "every other"])
def test_tables_of_several_features(worlds, sharding):
    keywords = {"optimizer": te.Adagrad(lr=0.1), "capacity": 0.5, "shape": "some equal", "max_ids": MANY}
    compare(worlds(2), SHARED, sharding, uneven, **keywords)


@parametrize_pairs(
    options=[{}, {"scale_grad_by_freq": True}, {"max_norm": 0.5}],
    sharding=["rows", "tables", "every other"],
    weighted=["constant", True],
)
def test_weights_of_samples(worlds, options, sharding, weighted):
    tables = tables_of(widths=(4, 8), rows=(1, 3, 17, 40, 25, 9, 31), padding=(None, 0, 2))
    keywords = {"optimizer": te.Adagrad(lr=0.1), "capacity": 0.5, "shape": "some equal", "max_ids": MANY} | options
    compare(worlds(3), tables, sharding, uneven, weighted=weighted, **keywords)


@pytest.mark.parametrize("sharding", ["rows", "every other"])
@pytest.mark.parametrize(
    "keywords",
    [
        {"max_norm": 0.5, "norm_type": 1.0, "optimizer": te.Adam(lr=0.1)},
        {"scale_grad_by_freq": True, "optimizer": te.Adagrad(lr=0.1)},
        {"dtype": torch.bfloat16, "rounding": "stochastic", "optimizer": te.Adagrad(lr=0.1)},
        {"dtype": torch.float16, "output_dtype": torch.bfloat16, "optimizer": te.SGD(lr=0.1)},
        {"policy": te.LRU(), "optimizer": te.SGD(lr=0.1)},
    ],
    ids=lambda keywords: "-".join(map(str, keywords)),
)
def test_every_option(worlds, keywords, sharding):
    modes = ("sum", "mean") if "scale_grad_by_freq" in keywords else ("sum", "mean", "max")
    tables = tables_of(modes=modes, widths=(4, 8), rows=(1, 3, 17, 40, 25, 9, 31), padding=(None, 0, 2))
    compare(worlds(3), tables, sharding, uneven, capacity=0.5, shape="long", max_ids=MANY, **keywords)


# --- what is exchanged ------------------------------------------------------------------------------------------------


def model_of(tables, sharding, **keywords):
    keywords = {"optimizer": te.Adagrad(lr=0.1), "capacity": 0.5, "average": False} | keywords
    return ShardedTieredEmbeddingBagCollection(tables, sharding=sharding_of(sharding, tables), **keywords)


def most_on_rank_2(rank):
    return (2, 1, 30)[rank]


def sizes_sent(rank, size, max_ids, samples, ahead):
    """How often so many numbers are sent to each rank, in the exchanges of four steps; and warnings of it."""
    tables = tables_of()
    model = model_of(tables, "both", max_ids=max_ids)
    batches = [batch_of(tables, step, rank, samples=samples) for step in range(4)]
    with calls_of(Exchange, "send") as calls, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        loop = te.prefetch(batches, model, 1, ids_of=lambda batch: batch[:2]) if ahead else batches
        for batch in loop:
            step_of(model, batch, weighted=False)
    sent = [tuple(n * math.prod(its.given.shape[1:]) for n in its.sent_sizes) for _, its, *_ in calls]
    model.close()
    return Counter(sent), [str(each.message) for each in warned if "max_ids" in str(each.message)]


def are_of_one_size(counts):
    """Whether the exchanges of each step are of the same sizes."""
    return all(count % 4 == 0 for count in counts.values())


@pytest.mark.parametrize("ahead", [False, True])
def test_what_fits_is_exchanged_in_one_size(worlds, ahead):
    for counts, warned in worlds(3).run(sizes_sent, 64, seven, ahead):
        assert not warned
        assert are_of_one_size(counts)
    assert not any(are_of_one_size(counts) for counts, _ in worlds(3).run(sizes_sent, None, seven, ahead))


@pytest.mark.parametrize("ahead", [False, True])
def test_what_is_longer_on_one_rank_is_exchanged_in_larger_blocks_by_all_and_said_once(worlds, ahead):
    answers = worlds(3).run(sizes_sent, 24, most_on_rank_2, ahead)
    assert [len(warned) for _, warned in answers] == [0, 0, 1]
    (text,) = answers[2][1]
    assert text.startswith("rank 2 requests ")
    assert int(text.split("pass max_ids=")[1].split()[0]) > 24
    assert not any(are_of_one_size(counts) for counts, _ in answers)
    for counts, warned in worlds(3).run(sizes_sent, 200, most_on_rank_2, ahead):
        assert not warned
        assert are_of_one_size(counts)


def warned_before(rank, size):
    """Whether a step of at most 24 ids would be captured, twice; how often it warned first, and in all."""
    tables = tables_of()
    model = model_of(tables, "all kinds", max_ids=24)
    batch = batch_of(tables, 0, rank, samples=most_on_rank_2)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        fits = [model.agreement.takes([batch[:2]]) for _ in range(2)]
        before = len(warned)
        step_of(model, batch, weighted=False)
    model.close()
    return fits, before, len(warned)


def test_to_ask_whether_a_batch_fits_says_nothing(worlds):
    assert worlds(3).run(warned_before) == [([True] * 2, 0, 0), ([True] * 2, 0, 0), ([False] * 2, 0, 1)]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("max_ids", [1, 12, 20])
def test_longer_batches_have_the_bits_too(worlds, max_ids, weighted):
    tables = tables_of(widths=(4, 8))
    keywords = {"optimizer": te.Adagrad(lr=0.1), "capacity": 0.5, "steps": 6, "max_ids": max_ids}
    compare(worlds(3), tables, "every other", uneven, weighted=weighted, **keywords)


def trains_in_all_ways(rank, size, sharding, average):
    """Ahead, several forwards in an update, and gradients divided by the ranks."""
    model = model_of(MIXED, sharding, max_ids=MANY, average=average)
    batches = [batch_of(MIXED, step, rank, samples=uneven, shape="some equal") for step in range(6)]
    for batch in te.prefetch(batches[:3], model, 2, ids_of=lambda batch: batch[:2]):
        step_of(model, batch, weighted=False)
    with model.accumulate():
        for batch in batches[3:]:
            step_of(model, batch, weighted=False)
    weights = dict(model.state_dict())
    model.close()
    return weights


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("sharding", ["rows", "tables", "every other"])
def test_ahead_and_accumulated(worlds, sharding, average):
    model = te.TieredEmbeddingBagCollection(MIXED, optimizer=te.Adagrad(lr=0.1), capacity=1.0)

    def of_all(step):
        batches = [batch_of(MIXED, step, rank, samples=uneven, shape="some equal") for rank in range(3)]
        *batch, upstream = joined(MIXED, batches)
        return *batch, upstream / torch.full((1,), 3.0 if average else 1.0)

    for step in range(3):
        step_of(model, of_all(step), weighted=False)
    with model.accumulate():
        for step in range(3, 6):
            step_of(model, of_all(step), weighted=False)
    found = worlds(3).run(trains_in_all_ways, sharding, average)[0]
    for name, weight in model.state_dict().items():
        assert equal(found[name], weight)


def runs_bounded(rank, size, function, *args):
    """The same of collections that have a bound."""
    defaults = ShardedTieredEmbeddingBagCollection.__init__.__kwdefaults__
    defaults["max_ids"] = MANY
    try:
        return function(rank, size, *args)
    finally:
        defaults["max_ids"] = None


class Bounded:
    """A world in which collections have a bound where none is given."""

    def __init__(self, world):
        self.world, self.size = world, world.size

    def run(self, function, *args):
        return self.world.run(runs_bounded, function, *args)


@pytest.fixture
def bounded(worlds):
    return lambda size: Bounded(worlds(size))


@pytest.mark.parametrize("how", ["plain", "clip", "scale", "late"])
@pytest.mark.parametrize("kind", ["Adagrad", "Adam"])
def test_following(bounded, kind, how):
    test_sharded_following.test_following_gives_the_bits_of_one_process(bounded, 3, kind, how)


def test_a_model_is_clipped(bounded):
    test_sharded_following.test_a_model_with_sharded_tables_is_clipped(bounded, 3, 2.0)


@pytest.mark.parametrize("sharding", ["rows", "tables", "every other"])
def test_gradients_that_wait_for_a_step_are_scaled(bounded, sharding):
    test_sharded_whole_tables.test_gradients_that_wait_for_a_step_are_scaled(bounded, sharding)


def test_scaled_losses_several_forwards_and_a_gradient_on_one_rank(bounded):
    test_sharded_modules.test_an_infinite_gradient_of_one_rank_keeps_all_from_the_step(bounded, 2)
    test_sharded_modules.test_several_forwards_are_one_step(bounded)
    test_sharded_whole_tables.test_the_gradient_of_weights_may_be_requested_on_one_rank(bounded)


def test_plans_and_forwards_that_meet(bounded):
    test_sharded_prefetch.test_a_bad_id_that_was_planned_comes_at_its_batch_on_all_ranks(bounded)
    test_sharded_agreement.test_a_plan_that_one_rank_cannot_take_is_given_up_on_all(bounded)
    test_sharded_agreement.test_forwards_are_ordered_by_when_they_came(bounded)


# --- what cannot be ---------------------------------------------------------------------------------------------------


def built(rank, size, bounds):
    return raised(model_of, tables_of(), "rows", max_ids=bounds[rank])


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "many", 2**40])
def test_a_bound_that_cannot_be_is_refused(worlds, bad):
    for kind, text in worlds(2).run(built, (bad, bad)):
        assert kind == "ConfigError"
        assert (
            "max_ids must be the number of ids that a rank requests from another at most, 1 … 67108864 with 2 ranks"
            in text
        )


def test_bounds_that_differ_are_refused(worlds):
    for kind, text in worlds(2).run(built, (5, 6)):
        assert kind == "ConfigError"
        assert "max_ids differs between the ranks: 5 on rank 0, 6 on rank 1" in text


def fails_once(rank, size, kind):
    """Rank 1 fails in the second step; the others are well, and all go on."""
    tables, errors = tables_of(), []
    model = model_of(tables, "all kinds", max_ids=64)
    exchange = model._ranks._context.exchange
    sending = exchange.sending
    for step in range(4):
        ids, offsets, _, upstream = batch_of(tables, step, rank, samples=seven)
        fails = (rank, step) == (1, 1)
        if fails and kind == "id":
            ids = ids.clone()
            ids[-1] = 40
        if fails and kind == "memory":
            exchange.sending = short(exchange.sending)
        errors.append(
            raised(lambda ids=ids, offsets=offsets, upstream=upstream: model(ids, offsets).backward(upstream))
        )
        exchange.sending = sending
    weights = dict(model.state_dict())
    model.close()
    return errors, weights


@pytest.mark.parametrize(("kind", "error"), [("id", "IdOutOfRangeError"), ("memory", "StorageFullError")])
def test_a_rank_that_fails_is_raised_on_all(worlds, kind, error):
    tables = tables_of()
    model = te.TieredEmbeddingBagCollection(tables, optimizer=te.Adagrad(lr=0.1), capacity=1.0)
    for step in (0, 2, 3):
        batches = [batch_of(tables, step, rank, samples=seven) for rank in range(3)]
        step_of(model, joined(tables, batches), weighted=False)
    answers = worlds(3).run(fails_once, kind)
    for errors, _ in answers:
        assert [each is None for each in errors] == [True, False, True, True]
        assert errors[1][0] == error
        assert errors[1][1].startswith("rank 1: ")
    for name, weight in model.state_dict().items():
        assert equal(answers[0][1][name], weight)


# --- around a captured step -------------------------------------------------------------------------------------------


def agrees(rank, size, max_ids, mine, bad):
    """What the ranks agree on, each able to do `mine`, before a batch of which rank 1's may be `bad`."""
    tables = tables_of()
    model = model_of(tables, "all kinds", max_ids=max_ids)
    ids, offsets, _, upstream = batch_of(tables, 0, rank, samples=uneven)
    if bad and rank == 1:
        ids = torch.full_like(torch.cat([ids, ids.new_zeros(1)]), 50)
        offsets = torch.cat([offsets[:1], torch.full((4,), 1)])
    agreement, found, failed = model.agreement, [], None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            does = mine[rank] * agreement.takes([(ids, offsets)])
        except (InvalidInputError, IdOutOfRangeError) as error:
            does, failed = 0, error
        error = raised(lambda: found.append(agreement.agree(does, failed)))
    if not bad:
        model(ids, offsets).backward(upstream)
    model.close()
    return found, error


@pytest.mark.parametrize(
    ("max_ids", "mine", "all_can"), [(64, (3, 3, 3), 3), (64, (3, 2, 3), 2), (64, (3, 0, 1), 0), (12, (3, 3, 3), 0)]
)
def test_ranks_do_what_all_can(worlds, max_ids, mine, all_can):
    for found, error in worlds(3).run(agrees, max_ids, mine, False):
        assert (found, error) == ([all_can], None)


def test_a_wrong_id_is_noticed_before_a_replay_on_all_ranks(worlds):
    for found, (error, text) in worlds(3).run(agrees, 64, (1, 1, 1), True):
        assert not found
        assert error in ("IdOutOfRangeError", "InvalidInputError")
        assert text.startswith("rank 1: ")


def counts_rows(rank, size, counts):
    """What the ranks agree on, and how many rows come back, as each has counted more."""
    model = model_of(tables_of(), "all kinds", max_ids=64)
    context, found = model._ranks._context, []
    for each in counts:
        context.most_rows = each[rank]
        found.append((model.agreement.agree(rank | 2), context.row_bound))
    model.close()
    return found


def test_the_bound_of_rows_is_what_the_ranks_have_counted_and_some_more(worlds):
    """It grows where one has counted more than fits, and never shrinks, nor beyond `max_ids`."""
    answers = worlds(3).run(counts_rows, [(0, 0, 0), (5, 9, 2), (3, 30, 2), (5, 9, 40), (90, 0, 0)])
    assert answers == [[(2, None), (2, 34), (2, 34), (2, 64), (2, 64)]] * 3


def runs_other_steps(rank, size, which):
    """Each rank runs one of its steps, by number; then all run the same. What is raised."""
    model = model_of(tables_of(), "all kinds", max_ids=64)
    agreement, found = model.agreement, []
    numbers = [agreement.begin_step() for _ in range(3)]
    found.append(raised(agreement.agree, 1, step=numbers[which[rank]]))
    found.append(raised(lambda: found.append(agreement.agree(3, step=numbers[0]))))
    model.close()
    return found


def test_ranks_that_run_different_steps_raise(worlds):
    """Before any replays: a graph that sends gradients would wait for ever for one that does not."""
    for (kind, text), *rest in worlds(3).run(runs_other_steps, (0, 2, 0)):
        assert kind == "PeerError"
        assert "rank 0 number 1, rank 1 number 3, rank 2 number 1" in text
        assert rest == [3, None]
    assert worlds(3).run(runs_other_steps, (1, 1, 1)) == [[None, 3, None]] * 3


def does_not_agree(rank, size):
    """Rank 0 runs eagerly where the others are about to replay."""
    tables = tables_of()
    model = model_of(tables, "all kinds", max_ids=64)
    ids, offsets, *_ = batch_of(tables, 0, rank, samples=seven)
    return raised(model, ids, offsets) if rank == 0 else raised(model.agreement.agree, 1)


def test_a_rank_that_does_not_take_part_is_noticed_at_once(worlds):
    for kind, text in worlds(3).run(does_not_agree):
        assert kind == "PeerError"
        assert "rank 0 looks up a batch" in text
        assert "rank 1 begins a captured step" in text


def captures(rank, size, fails, ahead):
    """As in a capture, of which nothing runs on a GPU: what is looked up, and what ends it. Then a step as usual. Where
    it goes `ahead`, what it looks up was planned before, and is computed again."""
    tables = tables_of()
    model = model_of(tables, "all kinds", max_ids=64)
    ids, offsets, _, upstream = batch_of(tables, 0, rank, samples=seven)
    agreement, errors = model.agreement, []
    now = [(ids, offsets)]
    following = [(ids.clone(), offsets.clone())]

    def step():
        with agreement.capturing(following, planned=now) if ahead else agreement.capturing(now):
            if fails == "early" and rank == 1:
                raise ValueError("the step's own")
            out = model(ids.clone(), offsets) if (fails, rank) == ("ids", 1) else model(ids, offsets)
            if fails == "amid" and rank == 1:
                raise ValueError("the step's own")
            out.backward(upstream)
            if fails == "late" and rank == 1:
                raise ValueError("the step's own")

    def captured():
        try:
            step()
        except Exception as error:
            agreement.not_captured(error)
            raise
        agreement.agree(1)

    is_capturing, torch.cuda.is_current_stream_capturing = torch.cuda.is_current_stream_capturing, lambda: True
    try:
        errors.append(raised(captured))
    finally:
        torch.cuda.is_current_stream_capturing = is_capturing
    errors.append(raised(lambda: model(ids, offsets).backward(upstream)))
    model.close()
    return errors


@pytest.mark.parametrize("ahead", [False, True], ids=["at once", "ahead"])
@pytest.mark.parametrize("fails", ["", "early", "ids", "amid", "late"])
def test_a_capture_that_fails_on_one_rank_fails_on_all(worlds, fails, ahead):
    told_of = ("UnsupportedError", "are none of its batch's tensors") if fails == "ids" else ("PeerError", "ValueError")
    for errors in worlds(3).run(captures, fails, ahead):
        assert errors[1] is None
        if not fails:
            assert errors[0] is None
            continue
        assert errors[0][0] == told_of[0]
        assert told_of[1] in errors[0][1]
        assert errors[0][1].startswith("rank 1: ")


def requests_too_much(rank, size):
    """In the second step all request more than blocks may hold."""
    model, errors, most = model_of(MIXED, "rows"), [], context.MOST_ENTRIES
    for step in range(3):
        if step == 1:
            context.MOST_ENTRIES = 2 * size
        errors.append(
            raised(lambda step=step: step_of(model, batch_of(MIXED, step, rank, samples=seven), weighted=False))
        )
        context.MOST_ENTRIES = most
    weights = dict(model.state_dict())
    model.close()
    return errors, weights


def test_blocks_that_no_owner_takes_are_refused_on_all_ranks(worlds):
    answers = worlds(2).run(requests_too_much)
    for errors, _ in answers:
        assert [each is None for each in errors] == [True, False, True]
        assert errors[1][0] == "InvalidInputError"
        assert "2 ranks may request 2 at most from each other: split the batch" in errors[1][1]
    assert answers[0][0] == answers[1][0]
    alone = te.TieredEmbeddingBagCollection(MIXED, optimizer=te.Adagrad(lr=0.1), capacity=0.5)
    for step in (0, 2):
        step_of(alone, joined(MIXED, [batch_of(MIXED, step, rank, samples=seven) for rank in range(2)]), weighted=False)
    for name, weight in alone.state_dict().items():
        assert equal(answers[0][1][name], weight), name
