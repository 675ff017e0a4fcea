"""Plans of eager forwards that are recorded and replayed: the numbers of plans that are launched each time, whatever
comes in between. Skips without a GPU; TIEREDEMB_REQUIRE_CUDA=1 fails."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from devices import assert_same_bits
from step.recordings import ROWS, STEPS, both, ids_of, recordings_of
from torch import nn
from training import bits

import tieredemb as te
from tieredemb.errors import IdOutOfRangeError
from tieredemb.kernels import recorder, recording
from tieredemb.step import recorded_plans
from tieredemb.step.recorded_plans import RecordedPlan
from tieredemb.step.recorded_updates import RecordedUpdate

pytestmark = pytest.mark.usefixtures("gpu", "recorded")

CAPACITIES = [1, 40, 1.0]


def made(capacity, **keywords):
    given = {"mode": "sum", "optimizer": te.Adagrad(lr=0.1), "seed": 3} | keywords
    return te.TieredEmbeddingBag(ROWS, 8, capacity=capacity, **given)


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("mode", ["sum", "max"])
@pytest.mark.parametrize("given", ["equal bags", "offsets", "int32", "padding"])
def test_training_has_the_bits_of_plans_that_are_launched(monkeypatch, replays, capacity, mode, given):
    def run():
        bag, outputs = made(capacity, mode=mode, padding_idx=3 if given == "padding" else None), []
        for step in range(STEPS):
            ids = ids_of(step)
            offsets = None
            if given == "offsets":
                ids, offsets = ids.flatten(), torch.tensor([0, 3 + step % 2, 20], device="cuda")
            out = bag(ids.int() if given == "int32" else ids, offsets)
            out.square().sum().backward()
            outputs.append(out.detach())
        return [*outputs, *bits(bag)]

    assert both(monkeypatch, replays, run) >= STEPS - recorder.TIMES - 2


def test_updates_are_recorded_by_their_forwards_and_options():
    bag = made(40)
    for step in range(STEPS):
        bag(ids_of(step)).sum().backward()
        bag.fused_optimizer.param_groups[0]["lr"] *= 0.9
    assert len(recordings_of(bag.tables, bag.tables)) == 1
    two = made(40)
    for step in range(STEPS):
        (two(ids_of(step)).sum() + two(ids_of(step + 1)).sum()).backward()
    assert not recordings_of(two.tables, two.tables)  # of several forwards in one table


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_a_collection_of_two_widths(monkeypatch, replays, capacity):
    tables = [te.TableConfig(name=f"t{width}", num_embeddings=ROWS, embedding_dim=width) for width in (4, 8, 4)]
    tables[2] = te.TableConfig(name="other", num_embeddings=ROWS // 2, embedding_dim=4)

    def run():
        model, outputs = te.TieredEmbeddingBagCollection(tables, capacity=capacity if capacity != 1 else 2,
                                                         optimizer=te.Adam(lr=0.01), seed=1), []  # fmt: skip
        for step in range(STEPS):
            ids = ids_of(step, (3 * 8,)) // 2
            out = model(ids, torch.arange(0, 25, 2, device="cuda"))
            out.square().sum().backward()
            outputs.append(out.detach())
        return [*outputs, *bits(model)]

    assert both(monkeypatch, replays, run) > 0


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("depth", [1, 3])
def test_prefetch(monkeypatch, replays, capacity, depth):
    def run():
        bag, outputs = made(capacity), []
        for ids in te.prefetch([ids_of(step) for step in range(3 * STEPS)], bag, depth):
            out = bag(ids)
            out.square().sum().backward()
            outputs.append(out.detach())
        return [*outputs, *bits(bag)]

    assert both(monkeypatch, replays, run) > STEPS


def test_plans_made_ahead_go_before_the_step_that_they_run_beside(monkeypatch, replays):
    made_on, side_stream = [], recording.side_stream

    def heard(device, priority, name):
        made_on.append(priority)
        return side_stream(device, priority, name)

    monkeypatch.setattr(recording, "side_stream", heard)
    bag = made(40)
    for ids in te.prefetch([ids_of(step) for step in range(STEPS)], bag):
        bag(ids).sum().backward()
    assert replays
    assert -1 in made_on  # plans; their lookups and updates compute
    assert set(made_on) == {0, -1}


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_forwards_in_any_order_with_backwards_late_or_never(monkeypatch, replays, capacity):
    """Several in flight of one form, each with memory of its own; some dropped, some evaluations between."""

    def run():
        bag, outputs, waiting = made(capacity), [], []
        for step in range(4 * STEPS):
            out = bag(ids_of(step))
            outputs.append(out.detach().clone())
            waiting.append(out)
            if step % 7 == 3:
                with torch.no_grad():
                    outputs.append(bag(ids_of(step + 1)))
            if step % 5 == 4:
                del waiting[1]
                sum(each.square().sum() for each in waiting).backward()
                waiting = []
        waiting = []
        return [*outputs, *bits(bag)]

    assert both(monkeypatch, replays, run) > STEPS


def test_gradients_of_weights_read_their_own_plan(monkeypatch, replays):
    """A frozen table's plan is needed for them after its rows are free."""

    def run():
        bag, found = made(40), []
        bag.requires_grad_(False)
        for step in range(STEPS):
            kept = []
            for at in range(3):
                weights = torch.full((8, 5), 1.0 + at, device="cuda", requires_grad=True)
                kept.append((weights, bag(ids_of(3 * step + at), per_sample_weights=weights)))
            for weights, out in kept:
                out.square().sum().backward()
                found.append(weights.grad)
        return found

    assert both(monkeypatch, replays, run) > STEPS


def test_weights_of_a_batch_that_was_planned_ahead(monkeypatch, replays):
    def run():
        bag, found, last = made(40), [], None
        bag.requires_grad_(False)
        for ids in te.prefetch([ids_of(step) for step in range(3 * STEPS)], bag):
            weights = torch.full((8, 5), 2.0, device="cuda", requires_grad=True)
            out = bag(ids, per_sample_weights=weights)
            if last is not None:  # later than the next forward
                last[1].square().sum().backward()
                found.append(last[0].grad)
            last = weights, out
        return found

    assert both(monkeypatch, replays, run) > STEPS


def test_a_bad_id_is_reported_and_updates_nothing(replays):
    bag = made(40)
    for step in range(STEPS):
        bag(ids_of(step)).sum().backward()
    assert replays
    before = bits(bag)
    bad = ids_of(0)
    bad[2, 1] = ROWS
    count = len(replays)
    bag(bad).sum().backward()
    assert len(replays) == count + 1
    with pytest.raises(IdOutOfRangeError, match=f"id {ROWS} at position 11"):
        bag.flush()
    assert_same_bits(bits(bag), before)


def test_other_streams_come_in_turn(monkeypatch, replays):
    streams = [torch.cuda.Stream() for _ in range(3)]

    def run():
        bag, outputs = made(40), []
        for step in range(STEPS):
            ids = ids_of(step)
            torch.cuda.synchronize()
            with torch.cuda.stream(streams[step % 3]):
                torch.cuda._sleep(10_000_000)
                out = bag(ids)
                out.square().sum().backward()
                outputs.append(out.detach())
        torch.cuda.synchronize()
        return [*outputs, *bits(bag)]

    assert both(monkeypatch, replays, run) > 0


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("capacity", [2, 0.3, 1.0])
def test_converted_tables_that_share_a_cache(monkeypatch, replays, capacity, prefetch):
    found = []

    def run():
        torch.manual_seed(0)
        model = nn.ModuleList([nn.EmbeddingBag(rows, 4, mode="sum") for rows in (ROWS, 50, 120)]).cuda()
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        te.replace_embedding_bags(model, capacity=capacity, optimizer=optimizer)
        batches, outputs = [[ids_of(3 * step + at) % (50, 50, 50)[at] for at in range(3)] for step in range(20)], []
        for batch in te.prefetch(batches, model) if prefetch else batches:
            out = torch.cat([bag(ids) for bag, ids in zip(model, batch, strict=True)], 1)
            optimizer.zero_grad()
            out.square().sum().backward()
            optimizer.step()
            outputs.append(out.detach())
        whole = model[0].tables.whole
        found.append(len(recordings_of(whole, whole)))
        return [*outputs, *model.state_dict().values()]

    assert both(monkeypatch, replays, run) > (10 if prefetch else 20)  # plans of all three tables, or of each
    recorded, launched = found
    assert prefetch or recorded == 1
    assert not launched


def test_forms_that_change_each_time_are_not_recorded(monkeypatch, replays):
    recorded = []
    monkeypatch.setattr(RecordedPlan, "__init__", lambda self, *_: recorded.append(self))
    bag = made(40)
    for step in range(STEPS):
        bag(ids_of(step, (8, 2 + step))).sum().backward()
    assert not recorded
    assert not replays


def test_recordings_are_few_and_counted_and_end_with_the_place():
    bag = made(40)
    for size in range(2, 2 + recorded_plans.MOST_FORMS + 3):
        for step in range(4):
            bag(ids_of(step, (3, size))).sum().backward()
    plans = recordings_of(bag.tables, bag.call_context)
    assert len(plans) == recorded_plans.MOST_FORMS
    (report,) = bag.memory_report().values()
    assert report["batch"]["recorded"] >= sum(each.size_bytes() for each in plans) > 0
    del plans
    expected = bits(bag)
    bag.cpu()
    assert_same_bits([each.cpu() for each in bits(bag)], [each.cpu() for each in expected])
    bag.cuda()
    for step in range(4):
        bag(ids_of(step)).sum().backward()
    assert len(recordings_of(bag.tables, bag.call_context)) <= 1


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("none left"),
        RuntimeError("operation not permitted when stream is capturing"),
        RuntimeError("the CUDA driver refused to launch plan_begin (1 x 32): error 901"),
    ],
)
@pytest.mark.parametrize("at", [RecordedPlan, RecordedUpdate])
def test_what_cannot_be_recorded_is_launched(monkeypatch, replays, at, error):
    failures = []

    def refuse(*_):
        failures.append(error)
        raise error

    def run():
        bag, outputs = made(40), []
        for step in range(STEPS):
            out = bag(ids_of(step))
            out.square().sum().backward()
            outputs.append(out.detach())
        return [*outputs, *bits(bag)]

    expected = run()
    monkeypatch.setattr(at, "_record", staticmethod(refuse))
    assert_same_bits(run(), expected)
    assert len(failures) == recorder.MOST_FAILURES


def test_another_error_of_a_recording_is_warned_of(monkeypatch):
    def refuse(*_):
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(RecordedPlan, "_record", refuse)
    bag = made(40)
    for step in range(recorder.TIMES):
        bag(ids_of(step))
    with pytest.warns(UserWarning, match="could not be recorded, and is launched as before.*a mistake"):
        out = bag(ids_of(0))
    assert_same_bits([out], [bag(ids_of(0))])


def test_nothing_keeps_tables_that_nobody_has():
    """Their memory is free as soon as they are, and not when the garbage collector finds them."""
    bag = made(40)
    for step in range(STEPS):
        bag(ids_of(step)).sum().backward()
    assert recordings_of(bag.tables, bag.tables)
    cache = weakref.ref(bag.tables.groups[0].cache)
    gc.disable()
    try:
        bag.cpu()
        assert cache() is None
        del bag
        other = made(40)
        for step in range(STEPS):
            other(ids_of(step)).sum().backward()
        cache = weakref.ref(other.tables.groups[0].cache)
        del other
        assert cache() is None
    finally:
        gc.enable()


def test_limited_norms_leave_segments_of_their_own(monkeypatch, replays):
    """Of tables that share a cache, whose plans sort nothing: what is found by the forward is gone after its step."""

    def run():
        torch.manual_seed(0)
        model = nn.ModuleList([nn.EmbeddingBag(rows, 4, mode="sum", max_norm=1.0) for rows in (ROWS, 50)]).cuda()
        te.replace_embedding_bags(model, capacity=60, optimizer=te.SGD(lr=0.1))
        kept = []
        for step in range(STEPS):
            kept.append(torch.empty(4096 * step + 1, device="cuda"))  # the allocator gives other places
            model[0](ids_of(step)).square().sum().backward()
        return [*model.state_dict().values()]

    assert both(monkeypatch, replays, run) > 0


def test_more_rows_without_a_slot_than_when_a_plan_was_recorded(monkeypatch, replays):
    def run():
        bag = te.TieredEmbeddingBag(10**5, 8, mode="sum", capacity=64, optimizer=te.SGD(lr=0.1), seed=2)
        random = torch.Generator("cpu").manual_seed(0)
        for first in (300, 350, 350, 1000, 10, 10, 10, 600, 2000):
            drawn = (torch.randint(10**5, (n, 1), generator=random, device="cpu").cuda() for n in (first, 600))
            sum(bag(ids).sum() for ids in drawn).backward()
        return bits(bag)

    both(monkeypatch, replays, run)


def test_a_lookup_that_cannot_be_recorded_is_launched(monkeypatch, replays):
    def refuse(*_):
        raise torch.OutOfMemoryError("none left")

    def run():
        bag, outputs = made(40), []
        for ids in te.prefetch([ids_of(step) for step in range(3 * STEPS)], bag):
            out = bag(ids)
            out.square().sum().backward()
            outputs.append(out.detach())
        return [*outputs, *bits(bag)]

    expected = run()
    recorded = RecordedPlan._record_lookup

    def fails(self, call, out):
        with monkeypatch.context() as patch:
            patch.setattr(type(call), "report_faults", refuse)
            return recorded(self, call, out)

    monkeypatch.setattr(RecordedPlan, "_record_lookup", fails)
    assert_same_bits(run(), expected)


def test_a_lookup_on_another_stream_right_behind_a_recording():
    """What is recorded last is what the next call on another stream waits for."""
    bag, other = made(40), torch.cuda.Stream()
    with torch.no_grad():
        for ids in te.prefetch([ids_of(step) for step in range(STEPS)], bag):
            torch.cuda._sleep(10_000_000)
            out = bag(ids)
            with torch.cuda.stream(other):
                bag(ids_of(99))
            assert_same_bits([out], [bag(ids)])
