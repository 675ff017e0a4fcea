"""What eager forwards of ranks on a GPU record of the rows that they request: the bits of those that launch it,
whatever comes between. Skips without a GPU; TIEREDEMB_REQUIRE_CUDA=1 fails."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
from devices import equal, require_gpu
from sharding.ranks import batch_of, calls_of, seven, sharded_run, sharding_of, step_of, tables_of
from sharding.test_sharded_training import compare
from sharding.worlds import kept

import tieredemb as te
from tieredemb.sharding.call import ShardedCall
from tieredemb.sharding.collection import ShardedTieredEmbeddingBagCollection
from tieredemb.sharding.exchange import Exchange
from tieredemb.sharding.recorded_requests import (
    CHECKED_FIRST,
    MOST_AT_ONCE,
    MOST_FORMS,
    RecordedRequest,
    RecordedRequests,
)
from tieredemb.step.recorded_plans import RecordedPlan

pytestmark = pytest.mark.usefixtures("gpu")

TABLES = {"widths": (4, 8), "modes": ("sum", "mean", "max"), "rows": (1, 3, 17, 40, 25, 9, 31), "padding": (None, 0, 2)}
MANY, STEPS = 400, 14


@pytest.fixture(scope="module")
def worlds():
    require_gpu()
    yield from kept("cuda")


@contextlib.contextmanager
def counted(*, records=True):
    """Each time that a forward is found and exchanged by replays; or never, if nothing `records`."""
    of = RecordedRequests.of
    with calls_of(RecordedRequest, "exchange") as replays:
        if not records:
            RecordedRequests.of = lambda self, batch: None
        try:
            yield replays
        finally:
            RecordedRequests.of = of


def counts(rank, size, *given):
    """A run, and how many of its forwards were exchanged, and how many plans made, by replays."""
    with counted() as replays, calls_of(RecordedPlan, "replay") as planned:
        return *sharded_run(rank, size, *given), len(replays), len(planned)


@pytest.mark.parametrize("max_ids", [MANY, None])
@pytest.mark.parametrize(
    ("capacity", "optimizer"), [(2, te.RowWiseAdagrad(lr=0.1)), (0.3, te.Adam(lr=0.05)), (1.0, te.Adagrad(lr=0.1))]
)
@pytest.mark.parametrize("sharding", ["rows", "tables", "every other"])
def test_recorded_requests_have_the_bits_of_one_process(worlds, sharding, capacity, optimizer, max_ids):
    tables, keywords = tables_of(**TABLES), {"optimizer": optimizer, "capacity": capacity, "max_ids": max_ids}
    compare(worlds(2), tables, sharding, seven, steps=STEPS, shape="ones", **keywords)
    answers = worlds(2).run(counts, tables, sharding, STEPS, seven, False, keywords, "ones")
    # samples are known from the second step on
    assert {replays for *_, replays, _ in answers} == {STEPS - 3}
    # of each width, once each was recorded; on no rank that holds none of its tables
    assert max(planned for *_, planned in answers) >= 2 * (STEPS - 7)


def test_recorded_requests_of_three_ranks(worlds):
    keywords = {"optimizer": te.Adam(lr=0.05), "capacity": 0.3}
    compare(worlds(3), tables_of(**TABLES), "every other", seven, steps=STEPS, shape="ones", **keywords)


@pytest.mark.parametrize("shape", ["equal", "some equal"])
def test_recorded_requests_of_bags_of_several_ids(worlds, shape):
    keywords = {"optimizer": te.Adagrad(lr=0.1), "capacity": 0.5, "max_ids": MANY}
    compare(worlds(2), tables_of(**TABLES), "every other", seven, steps=STEPS, shape=shape, **keywords)


def disturbed(rank, size, sharding, ahead, max_ids, optimizer, records):
    """Of one form, but what disturbs: ids that do not fit, other samples on one rank, bad ids and offsets, forwards in
    flight, and such as nobody goes back through."""
    tables = tables_of(**TABLES)
    model = ShardedTieredEmbeddingBagCollection(
        tables, sharding=sharding_of(sharding, tables), average=False, capacity=0.5, optimizer=optimizer,
        max_ids=max_ids and 7 * len(tables) - 6,
    )  # fmt: skip
    outputs, refused, batches = [], [], []
    for step in range(24):
        samples = (lambda rank: 7 + rank) if step in (9, 10) else seven
        ids, offsets, _, upstream = batch_of(tables, step, rank, samples=samples, shape="ones")
        if (step, rank) in ((12, 1), (14, 0)):  # all on one rank, where tables are row-wise
            ids = ids // 2 * 2
        if step == 14 and rank == 1:
            ids = ids.clone()
            ids[9] = -4
        if step == 15 and rank == 0:
            ids = ids.clone()
            ids[5] = 1000
        if step == 16 and rank == 1:
            offsets = offsets.clone()
            offsets[3] = 1_000_000
        batches.append((ids, offsets, upstream))

    def look_up(batch):
        return model(batch[0], batch[1])

    checked, again = calls_of(ShardedCall, "_find_and_check"), calls_of(ShardedCall, "_request_again")
    with counted(records=records) as replays, checked as firsts, again as seconds, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a batch that does not fit warns
        flight = []
        for step, batch in enumerate(te.prefetch(batches, model, ids_of=lambda each: each[:2]) if ahead else batches):
            try:
                out = look_up(batch)
            except (te.errors.IdOutOfRangeError, te.errors.InvalidInputError) as error:
                refused.append((step, str(error)))
                continue
            outputs.append(out.detach().clone())
            if step in (5, 6, 7):
                flight.append((out, batch[2]))
                continue
            for its, upstream in [*flight, (out, batch[2])]:
                its.backward(upstream.to(its.dtype))
            flight = []
            if step == 17:
                look_up(batch)  # and is dropped
            if step == 18:
                with torch.no_grad():
                    outputs.append(look_up(batch).clone())
            if step == 19:
                (look_up(batch).sum() + look_up(batches[3]).sum()).backward()
        weights = dict(model.state_dict())
    model.close()
    return outputs, weights, refused, (len(replays), len(firsts), len(seconds))


@pytest.mark.parametrize("optimizer", [te.Adam(lr=0.05), te.RowWiseAdagrad(lr=0.1)], ids=["dense", "sparse"])
@pytest.mark.parametrize("max_ids", [False, True], ids=["learned", "given"])
@pytest.mark.parametrize("ahead", [False, True], ids=["at once", "ahead"])
@pytest.mark.parametrize("sharding", ["rows", "every other"])
def test_recorded_requests_are_disturbed_by_nothing(worlds, sharding, ahead, max_ids, optimizer):
    launched, replayed = (
        worlds(2).run(disturbed, sharding, ahead, max_ids or None, optimizer, records) for records in (False, True)
    )
    for (outputs, weights, refused, counts), (its_outputs, its_weights, its_refused, its_counts) in zip(
        replayed, launched, strict=True
    ):
        replays, checked, again = counts
        assert its_counts == (0, 0, 0)
        assert replays >= 8  # of 24: three are refused, and other samples or a new bound have to come thrice
        if isinstance(optimizer, te.Adam):  # whose lookups bring rows up to date
            assert checked >= replays
            assert again == 0
        else:
            assert checked < replays
        assert refused == its_refused
        assert [step for step, _ in refused] == [14, 15, 16]
        assert "rank 1: id -4" in refused[0][1]
        assert "rank 0: id 1000" in refused[1][1]
        assert "rank 1: " in refused[2][1]
        assert "1000000" in refused[2][1]
        assert len(outputs) == len(its_outputs)
        for number, (one, other) in enumerate(zip(outputs, its_outputs, strict=True)):
            assert equal(one, other), number
        for name, weight in its_weights.items():
            assert equal(weights[name], weight), name


def differs(rank, size, max_ids, how):
    """Rank 1 alone records nothing, if "never"; headers go as between hosts, if "hosts"."""
    tables = tables_of(**TABLES)
    model = ShardedTieredEmbeddingBagCollection(
        tables, sharding=sharding_of("every other", tables), average=False, capacity=0.5, optimizer=te.SGD(lr=0.1),
        max_ids=max_ids,
    )  # fmt: skip
    recorded, outputs, n_headers, patch = model._ranks._context.recorded, [], [], pytest.MonkeyPatch()
    if rank == 1 and how == "never":
        recorded.of = lambda batch: None
    if how == "hosts":
        patch.setenv("TIEREDEMB_PEER_MEMORY", "0")
    for step in range(STEPS):
        batch = batch_of(tables, step, rank, samples=seven, shape="ones")
        with calls_of(Exchange, "header") as headers:
            outputs.append(step_of(model, batch, weighted=False)[0])
        n_headers.append(len(headers))
    weights = dict(model.state_dict())
    model.close()
    patch.undo()
    return outputs, weights, n_headers


@pytest.mark.parametrize("max_ids", [MANY, None])
def test_ranks_that_record_and_others_that_do_not_exchange_the_same(worlds, max_ids):
    never, hosts, all_do = (worlds(2).run(differs, max_ids, how) for how in ("never", "hosts", ""))
    for found in (never, hosts):
        for (outputs, weights, n_headers), (its_outputs, its_weights, its_n_headers) in zip(found, all_do, strict=True):
            assert all(map(equal, outputs, its_outputs))
            assert all(equal(weights[name], its_weights[name]) for name in its_weights)
            assert set(its_n_headers[4:]) == {4}  # two of a forward, two of a backward through whole tables
            # a rank that takes for granted what others do not know learns that it should not, and looks first
            assert set(n_headers[4:]) <= {4, 5}
            assert n_headers[4:].count(5) <= 1


def alternates(rank, size, records):
    """Two forms in turn, one of which is much larger, and then a batch that requests nearly all from one rank."""
    tables = tables_of(rows=(400, 600), widths=(4, 8), padding=(None,))
    model = ShardedTieredEmbeddingBagCollection(
        tables, sharding=sharding_of("rows", tables), average=False, capacity=0.5, optimizer=te.Adam(lr=0.05)
    )
    outputs = []
    with counted(records=records) as replays:
        for step in range(24):
            samples = (lambda rank: 300) if step % 2 else seven
            ids, offsets, _, upstream = batch_of(tables, step, rank, samples=samples, shape="ones")
            if step == 15:
                ids = ids // 2 * 2
            out = model(ids, offsets)
            out.backward(upstream.to(out.dtype))
            outputs.append(out.detach().clone())
        weights = dict(model.state_dict())
        bounds = list(model._ranks._context.recorded._bounds.values())
    model.close()
    return outputs, weights, len(replays), bounds


def test_forms_in_turn_have_bounds_of_their_own(worlds):
    launched, replayed = (worlds(2).run(alternates, records) for records in (False, True))
    assert len({tuple(bounds) for *_, bounds in replayed}) == 1
    for (outputs, weights, replays, bounds), (its_outputs, its_weights, *_) in zip(replayed, launched, strict=True):
        assert replays >= 14
        assert len(bounds) == 2
        for most, least in zip(max(bounds), min(bounds), strict=True):  # of each width
            assert most.ids > 4 * least.ids
            assert most.rows < most.ids  # each of several ids
        assert all(map(equal, outputs, its_outputs))
        assert all(equal(weights[name], its_weights[name]) for name in its_weights)


def weighs(rank, size, ahead, records):
    """Weights whose gradient is requested, of batches that may have been found before their forward."""
    tables = tables_of(widths=(4, 8))
    model = ShardedTieredEmbeddingBagCollection(
        tables, sharding=sharding_of("every other", tables), average=False, capacity=0.5, optimizer=te.SGD(lr=0.1),
        max_ids=7 * len(tables) // 2 - 2,
    )  # fmt: skip
    batches = [batch_of(tables, step, rank, samples=seven, shape="ones") for step in range(STEPS)]
    if rank == 1:  # of which some do not fit
        batches[9] = (batches[9][0] // 2 * 2, *batches[9][1:])
    with counted(records=records) as replays, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loop = te.prefetch(batches, model, 2, ids_of=lambda batch: batch[:2]) if ahead else batches
        found = [step_of(model, batch, weighted=True) for batch in loop]
        weights = dict(model.state_dict())
    model.close()
    return [out for out, _ in found], [grad for _, grad in found], weights, len(replays)


@pytest.mark.parametrize("ahead", [False, True], ids=["at once", "ahead"])
def test_weights_of_samples_are_none_of_what_is_recorded(worlds, ahead):
    launched, replayed = (worlds(2).run(weighs, ahead, records) for records in (False, True))
    for (outputs, grads, weights, replays), (its_outputs, its_grads, its_weights, _) in zip(
        replayed, launched, strict=True
    ):
        assert ahead or not replays  # weights are known of before their forward is found
        assert all(map(equal, [*outputs, *grads], [*its_outputs, *its_grads]))
        assert all(equal(weights[name], its_weights[name]) for name in its_weights)


def puts_off(rank, size, ahead, records):
    """Updates of several forwards at once, after later ones were found already."""
    tables = tables_of(**TABLES)
    model = ShardedTieredEmbeddingBagCollection(
        tables, sharding=sharding_of("every other", tables), average=False, capacity=0.5, optimizer=te.Adam(lr=0.05),
    )  # fmt: skip
    drawn = [batch_of(tables, step, rank, samples=seven, shape="ones") for step in range(18)]
    batches = [(ids, offsets, upstream) for ids, offsets, _, upstream in drawn]
    outputs, accumulating = [], contextlib.ExitStack()
    with counted(records=records) as replays:
        loop = te.prefetch(batches, model, 2, ids_of=lambda each: each[:2]) if ahead else batches
        for step, (ids, offsets, upstream) in enumerate(loop):
            if step % 3 == 0:
                accumulating.enter_context(model.accumulate())
            out = model(ids, offsets)
            out.backward(upstream.to(out.dtype))
            outputs.append(out.detach().clone())
            if step % 3 == 2:
                accumulating.close()
        weights = dict(model.state_dict())
    model.close()
    return outputs, weights, len(replays)


@pytest.mark.parametrize("ahead", [False, True], ids=["at once", "ahead"])
def test_updates_that_are_put_off_read_what_is_their_own(worlds, ahead):
    launched, replayed = (worlds(2).run(puts_off, ahead, records) for records in (False, True))
    for (outputs, weights, replays), (its_outputs, its_weights, _) in zip(replayed, launched, strict=True):
        assert replays >= 12
        assert all(map(equal, outputs, its_outputs))
        assert all(equal(weights[name], its_weights[name]) for name in its_weights)


def changes_form(rank, size):
    """More forms than are kept, each often; how many forwards at once, and forms, are kept."""
    tables = tables_of(**TABLES)
    model = ShardedTieredEmbeddingBagCollection(
        tables, sharding=sharding_of("rows", tables), average=False, capacity=0.5, optimizer=te.SGD(lr=0.1),
        max_ids=MANY,
    )  # fmt: skip
    recorder = model._ranks._context.recorded._recorder
    for form in range(MOST_FORMS + 2):
        for step in range(6):
            batch = batch_of(tables, step, rank, samples=lambda rank, form=form: 3 + form, shape="ones")
            step_of(model, batch, weighted=False)
    held = []
    for step in range(MOST_AT_ONCE + 3):
        ids, offsets, *_ = batch_of(tables, step, rank, samples=lambda rank: 3 + MOST_FORMS + 1, shape="ones")
        held.append(model(ids, offsets))
    forms, at_once = len(recorder._kept), max(map(len, recorder._kept.values()))
    held_bytes = sum(each.size_bytes() for kept in recorder._kept.values() for each in kept)
    cache = model._held[0].engine.tables.groups[0].cache
    reported = cache.memory_report()["batch"]["recorded"]
    torch.stack(held).sum().backward()
    model.close()
    return forms, at_once, held_bytes, reported


def test_forms_and_forwards_at_once_are_bounded(worlds):
    for forms, at_once, held_bytes, reported in worlds(2).run(changes_form):
        assert forms == MOST_FORMS
        assert at_once == MOST_AT_ONCE
        assert 0 < held_bytes <= reported


def looks(rank, size):
    """How often a forward has checked its request before it is sent, and how often it requests again, step by step: one
    batch of rank 1 does not fit."""
    tables = tables_of(rows=(400, 600), widths=(4, 8), padding=(None,))
    model = ShardedTieredEmbeddingBagCollection(
        tables, sharding=sharding_of("rows", tables), average=False, capacity=0.5, optimizer=te.SGD(lr=0.1)
    )
    first, again = [], []
    for step in range(12 + 2 * CHECKED_FIRST):
        ids, offsets, _, upstream = batch_of(tables, step, rank, samples=lambda rank: 2000, shape="ones")
        if step == 10 and rank == 1:
            ids = ids // 2 * 2
        with calls_of(ShardedCall, "_find_and_check") as checked, calls_of(ShardedCall, "_request_again") as replays:
            out = model(ids, offsets)
            out.backward(upstream.to(out.dtype))
        first += [step] * len(checked)
        again += [step] * len(replays)
    model.close()
    return first, again


def test_a_batch_that_does_not_fit_is_requested_again(worlds):
    (first, again), (its_first, its_again) = worlds(2).run(looks)
    assert again == its_again == [10]
    assert its_first[-1] - its_first[0] >= CHECKED_FIRST - 1  # that rank looks first for a while
    assert max(its_first) < 12 + 2 * CHECKED_FIRST - 1
    assert all(step > 10 for step in [*first, *its_first])


def takes_headers(rank, size, infinite):
    """How many headers there are in a step, of row-wise tables alone; a gradient is not finite in the last
    one."""
    tables = tables_of(rows=(400, 600), widths=(8,), padding=(None,))
    model = ShardedTieredEmbeddingBagCollection(
        tables, sharding=sharding_of("rows", tables), average=False, capacity=0.5, optimizer=te.SGD(lr=0.1)
    )
    scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
    model.fused_optimizer.attach_grad_scaler(scaler)
    n_headers = []
    for step in range(STEPS):
        ids, offsets, _, upstream = batch_of(tables, step, rank, samples=seven, shape="ones")
        before = dict(model.state_dict()) if step == STEPS - 1 else {}
        with calls_of(Exchange, "header") as headers:
            out = model(ids, offsets)
            loss = (out * upstream).sum()
            if infinite and step == STEPS - 1 and rank == 1:
                loss = loss * torch.inf
            scaler.scale(loss).backward()
        n_headers.append(len(headers))
        scaler.step(model.fused_optimizer)
        scaler.update()
    after = dict(model.state_dict())
    model.close()
    return n_headers, before, after


@pytest.mark.parametrize("infinite", [False, True])
def test_hosts_tell_each_other_three_times_in_a_step(worlds, infinite):
    for rank, (n_headers, before, after) in enumerate(worlds(2).run(takes_headers, infinite)):
        assert set(n_headers[4:-1]) == {3}
        assert n_headers[-1] == 3 + infinite
        for name in before if rank == 0 else ():
            assert equal(after[name], before[name]) == infinite


def cannot_record(rank, size, fails):
    """Where a plan of rows and bags of both kinds cannot be recorded, which so is launched."""
    tables = tables_of(**TABLES)
    model = ShardedTieredEmbeddingBagCollection(
        tables, sharding=sharding_of("every other", tables), average=False, capacity=0.5,
        optimizer=te.Adagrad(lr=0.1),
    )  # fmt: skip
    record, failed, outputs = RecordedPlan._record, [], []

    def raises(self, *args):
        if fails and len(failed) < 4:
            failed.append(self)
            raise RuntimeError("operation not permitted when stream is capturing")
        return record(self, *args)

    RecordedPlan._record = raises
    try:
        for step in range(STEPS):
            batch = batch_of(tables, step, rank, samples=seven, shape="ones")
            outputs.append(step_of(model, batch, weighted=False)[0])
    finally:
        RecordedPlan._record = record
    weights = dict(model.state_dict())
    model.close()
    return outputs, weights, len(failed)


def test_plans_that_cannot_be_recorded_are_launched(worlds):
    failing, recorded = (worlds(2).run(cannot_record, fails) for fails in (True, False))
    for (outputs, weights, failed), (its_outputs, its_weights, _) in zip(failing, recorded, strict=True):
        assert failed >= 2
        assert all(map(equal, outputs, its_outputs))
        assert all(equal(weights[name], its_weights[name]) for name in its_weights)
