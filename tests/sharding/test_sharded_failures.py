"""When one rank fails or does something else, all raise, and nobody waits for ever."""

from __future__ import annotations

import signal
import time
from datetime import timedelta

import pytest
import torch
from devices import equal
from sharding.ranks import SHARDINGS, batch_of, seven, step_of, tables_of

import tieredemb as te
from tieredemb.errors import StorageFullError
from tieredemb.sharding.collection import ShardedTieredEmbeddingBagCollection
from tieredemb.sharding.exchange import Exchange
from tieredemb.sharding.header import Phase
from tieredemb.sharding.request import Request

TABLES = tables_of()
QUICK, LONG = timedelta(seconds=3), timedelta(seconds=100)


def model_of(sharding="rows", **keywords):
    return ShardedTieredEmbeddingBagCollection(
        TABLES, sharding=SHARDINGS[sharding], capacity=0.5, optimizer=te.Adagrad(lr=0.1), **keywords
    )


def raised(action, *args, **keywords):
    """The error's name and text."""
    try:
        action(*args, **keywords)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def fails_once(rank, size, who, kind):
    """One rank fails in the second step, in one way or another; the others are well, and continue. What was raised, and
    the tables in the end."""
    model = model_of()
    found = None
    for step in range(4):
        ids, offsets, weights, upstream = batch_of(TABLES, step, rank, samples=seven)
        if step == 1:
            bad = rank == who
            if kind == "id":
                wrong = ids.clone()
                wrong[-1] = 40 if bad else wrong[-1]
                found = raised(model, wrong, offsets)
            elif kind == "offset":
                wrong = offsets.clone()
                wrong[1] = -1 if bad else wrong[1]
                found = raised(model, ids, wrong)
            elif kind == "weights":
                found = raised(model, ids, offsets, weights if bad else None)
            elif kind == "storage":
                engine = model._held[0].engine
                begin = engine.begin

                def full(*args, **keywords):
                    raise StorageFullError("no space is left")

                engine.begin = full if bad else begin
                found = raised(model, ids, offsets)
                engine.begin = begin
            elif kind == "options":  # which every update before was found to have
                group, rate = model.fused_optimizer.param_groups[0], model.fused_optimizer.param_groups[0]["lr"]
                group["lr"] = -1.0 if bad else rate
                found = raised(model(ids, offsets).backward, upstream)
                group["lr"] = rate
        step_of(model, (ids, offsets, weights, upstream), weighted=False)
    weights = dict(model.state_dict())
    model.close()
    return found, weights


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize(
    ("kind", "name", "text"),
    [
        ("id", "IdOutOfRangeError", "id 40 at position"),
        ("offset", "InvalidInputError", "offsets"),
        ("weights", "PeerError", "per_sample_weights are given on ranks"),
        ("storage", "StorageFullError", "no space is left"),
        ("options", "ConfigError", "the learning rate is -1.0"),
    ],
)
def test_a_rank_that_fails_is_raised_on_all(worlds, who, kind, name, text):
    _, expected = worlds(3).run(fails_once, -1, "none")[0]
    answers = worlds(3).run(fails_once, who, kind)
    for found, _ in answers:
        assert found[0] == name
        assert text in found[1]
        assert f"[{who}]" in found[1] if kind == "weights" else found[1].startswith(f"rank {who}: ")
    for table, weight in expected.items():
        assert equal(answers[0][1][table], weight)


def does_other_things(rank, size):
    model = model_of(timeout=QUICK)
    ids, offsets, _, upstream = batch_of(TABLES, 0, rank, samples=seven)
    out = model(ids, offsets)
    started = time.monotonic()
    found = raised(out.backward, upstream) if rank == 0 else raised(model, ids, offsets)
    return found, time.monotonic() - started


def test_ranks_that_do_different_things_raise(worlds):
    for (name, text), seconds in worlds(2).run(does_other_things):
        assert name == "PeerError"
        assert "rank 0 updates rows" in text
        assert "rank 1 looks up a batch" in text
        assert seconds < 2


def ends_early(rank, size):
    model = model_of(timeout=QUICK)
    started, found = time.monotonic(), None
    for step in range(2 if rank == 0 else 1):
        ids, offsets, *_ = batch_of(TABLES, step, rank, samples=seven)
        found = raised(model, ids, offsets)
    return found, time.monotonic() - started


def test_a_rank_that_has_nothing_more_to_do_is_waited_for_until_the_timeout(worlds):
    answers = worlds(2).run(ends_early)
    (name, text), seconds = answers[0]
    assert name == "PeerError"
    assert "3 s (timeout=)" in text
    assert seconds < 15
    assert answers[1][0] is None


def saves_alone(rank, size):
    model = model_of(timeout=QUICK)
    return raised(model.state_dict) if rank == 1 else None


def test_state_dict_on_one_rank_alone_raises(worlds):
    answers = worlds(2).run(saves_alone)
    assert answers[0] is None
    name, text = answers[1]
    assert name == "PeerError"
    assert "rank 1 reads whole tables" in text


def loads_whole(rank, size, state):
    model = model_of()
    model.load_state_dict(state)
    found = dict(model.state_dict())
    del state["tables.t2.weight"]
    missing = raised(model.load_state_dict, state)
    model.close()
    return found, missing


def test_whole_tables_are_loaded_on_every_rank(worlds):
    state = {f"tables.t{t}.weight": torch.randn(n, 4) for t, n in enumerate((1, 3, 17, 40))}
    answers = worlds(3).run(loads_whole, state)
    for name, weight in state.items():
        assert equal(answers[0][0][name], weight)
    for _, (kind, text) in answers:
        assert kind == "RuntimeError"
        assert "tables.t2.weight" in text


def loads_what_it_has(rank, size, kind):
    model = model_of()
    whole = dict(model.state_dict())  # on rank 0 alone
    given = {name: weight + 1 for name, weight in whole.items()}
    if kind == "shape on rank 1" and rank == 1:
        given["tables.t1.weight"] = torch.zeros(2, 4)
    if kind == "ranks 1 and 2 alone":
        given = {} if rank == 0 else {"tables.t3.weight": torch.zeros(40, 4)}
    if kind == "float8":  # which gloo cannot send
        given = {name: torch.ones_like(weight).to(torch.float8_e4m3fn) for name, weight in whole.items()}
    if kind == "full on rank 1" and rank == 1:
        cold = model._held[0].engine.tables.groups[0].cache.cold

        def full(*_):
            raise te.errors.StorageFullError("no space left")

        cold.reserve_range = full
    failure = raised(model.load_state_dict, given)
    found = dict(model.state_dict())
    model.close()
    return whole, found, failure


@pytest.mark.parametrize("kind", ["rank 0 alone", "float8"])
def test_what_rank_0_has_of_a_state_dict_is_loaded_by_all(worlds, kind):
    answers = worlds(3).run(loads_what_it_has, kind)
    assert [failure for *_, failure in answers] == [None] * 3
    before, after, _ = answers[0]
    assert len(before) == 4
    for name, weight in before.items():
        assert equal(after[name], torch.ones_like(weight) if kind == "float8" else weight + 1)


def test_tables_that_one_rank_has_no_space_for_none_loads(worlds):
    answers = worlds(3).run(loads_what_it_has, "full on rank 1")
    for before, after, (error, text) in answers:
        assert (error, text) == ("StorageFullError", "rank 1: no space left")
        assert all(equal(after[name], weight) for name, weight in before.items())


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("shape on rank 1", "tables.t1.weight has shape (2, 4), the table has (3, 4)"),
        ("ranks 1 and 2 alone", "the weights of table 't3' are given on ranks [1, 2]"),
    ],
)
def test_a_state_dict_that_one_rank_cannot_load_none_loads(worlds, kind, text):
    answers = worlds(3).run(loads_what_it_has, kind)
    for rank, (before, after, (error, told_of)) in enumerate(answers):
        assert error == "RuntimeError"
        assert text in told_of
        assert told_of.count("are given on ranks") == (kind != "shape on rank 1")
        assert ("rank 1: " in told_of) == (kind == "shape on rank 1" and rank != 1)
        assert all(equal(after[name], weight) for name, weight in before.items())


def is_interrupted(rank, size, where):
    """Ctrl-C on rank 1 in the second step, after which it goes on: where ids are about to be sent, where
    gradients are, or have come, or have come and are put into order, or while it waits for the header of another."""
    model, errors = model_of("all kinds" if where == "order" else "rows", timeout=LONG), []
    context = model._ranks._context
    gradient, send, received = Request.gradient, Exchange.send, Exchange._receive_headers

    def interrupted(*_):
        raise KeyboardInterrupt

    def waits(self, *headers):
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        return received(self, *headers)

    def raises(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, raises)
    started = time.monotonic()
    for step in range(4):
        ids, offsets, _, upstream = batch_of(TABLES, step, rank, samples=seven)

        def run(ids=ids, offsets=offsets, upstream=upstream, step=step):
            if (rank, step, where) == (1, 1, "ids"):
                Exchange.send = interrupted
            out = model(ids, offsets)
            if (rank, step) == (1, 1):
                if where in ("came", "order"):
                    Request.gradient = interrupted
                elif where == "send":
                    Exchange.send = interrupted
                else:
                    Exchange._receive_headers = waits
            elif step == 1 and where == "header":
                time.sleep(1)
            out.backward(upstream)

        try:
            errors.append(raised(run))
        except KeyboardInterrupt:
            errors.append(("KeyboardInterrupt", ""))
        Request.gradient, Exchange.send, Exchange._receive_headers = gradient, send, received
    signal.signal(signal.SIGALRM, before)
    context.exchange.close()
    return errors, time.monotonic() - started


@pytest.mark.parametrize("where", ["ids", "came", "order", "send", "header"])
def test_a_rank_that_is_interrupted_leaves_nobody_behind(worlds, where):
    """All know of it by their next call at the latest, and nobody has updated what another has not and goes on. Where
    gradients that have come are those of an update the others do not wait to learn of it."""
    for rank, (errors, seconds) in enumerate(worlds(3).run(is_interrupted, where)):
        assert errors[0] is None
        if rank == 1 or where != "came":
            assert errors[1] is not None
        if rank == 1:
            assert errors[1][0] == "KeyboardInterrupt"
        assert {error[0] for error in errors[2:]} == {"PeerError"}
        assert seconds < 10


def between_hosts(rank, size):
    """As where ranks share no memory."""
    patch = pytest.MonkeyPatch()
    patch.setenv("TIEREDEMB_PEER_MEMORY", "0")
    model = model_of()
    errors = [raised(model, *batch_of(TABLES, step, rank, samples=seven)[:2]) for step in range(2)]
    if rank == 0:
        errors.append(raised(model, torch.tensor([10**6]), torch.zeros(3, dtype=torch.int64)))
    else:
        errors.append(raised(model, *batch_of(TABLES, 2, rank, samples=seven)[:2]))
    model.close()
    patch.undo()
    return errors


def test_headers_of_ranks_that_share_no_memory_go_by_gloo(worlds):
    found = worlds(3).run(between_hosts)
    assert len({errors[2] for errors in found}) == 1
    assert all(errors[:2] == [None, None] and errors[2] is not None for errors in found)


def fails_meanwhile(rank, size, shares):
    """What rank 1 does while its header is on its way fails; then all go on."""
    patch = pytest.MonkeyPatch()
    patch.setenv("TIEREDEMB_PEER_MEMORY", str(int(shares)))
    model = model_of(timeout=LONG)
    context, started = model._ranks._context, time.monotonic()

    def fails():
        if rank == 1:
            raise RuntimeError("the driver refused")

    errors = []
    for number in (1, 2):
        how = {"meanwhile": fails} if number == 1 else {}
        errors.append(raised(lambda: context.exchange.header(Phase.FORWARD, number, context.no_counts, **how)))  # noqa: B023
    model.close()
    patch.undo()
    return errors, time.monotonic() - started


@pytest.mark.parametrize("shares", [True, False])
def test_a_rank_that_fails_while_its_header_is_on_its_way_leaves_the_others(worlds, shares):
    found = worlds(3).run(fails_meanwhile, shares)
    for rank, (errors, seconds) in enumerate(found):
        assert errors[1][0] == "PeerError"
        assert seconds < 10
        if rank == 1:
            assert errors[0] == ("RuntimeError", "the driver refused")
            assert "rank 1 has failed" in errors[1][1]


def pauses(rank, size):
    """Longer between two headers than a rank is waited for; then rank 1 ends, and the others look up more."""
    model = model_of(timeout=QUICK)
    context, errors = model._ranks._context, []
    for step in range(2):
        time.sleep(3.5 * step)
        context.exchange.agree(None, {})
        ids, offsets, _, upstream = batch_of(TABLES, step, rank, samples=seven)
        errors.append(raised(lambda: model(ids, offsets).backward(upstream)))  # noqa: B023
    if rank == 1:
        model.close()
    started = time.monotonic()
    errors.append(raised(model, ids, offsets))
    seconds = time.monotonic() - started
    model.close()
    return errors, seconds


def test_what_is_expected_next_is_not_waited_for_before_it_is_requested(worlds):
    for errors, seconds in worlds(3).run(pauses):
        assert errors[:2] == [None, None]
        assert errors[2][0] == "PeerError"
        assert seconds < 10
