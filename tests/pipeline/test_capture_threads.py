"""Threads that use a module while another captures a step of it: they wait, and everybody's numbers are those of taking
turns. On the CPU, where nothing is captured, stand-ins run what they capture."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Future, wait
from types import SimpleNamespace

import pytest
import torch
from devices import assert_same_bits, idle, randint
from torch.utils.checkpoint import checkpoint
from training import bits, table_configs

import tieredemb as te
from tieredemb.cache.host.cache import HostCache
from tieredemb.pipeline import captured, graphs, ring
from tieredemb.tables.group import HostGroup

ROWS, BAGS, IDS = 300, 8, 3
LONG = 60  # seconds: whoever has not ended then waits for ever
WHILE = 0.3  # seconds in which a thread that does not wait ends


@pytest.fixture
def captures(device, monkeypatch):
    """On the CPU a capture runs what it captures, and the first replay is that."""
    if device == "cuda":
        return
    cpu, threads, nothing = torch.device("cpu"), set(), contextlib.nullcontext

    @contextlib.contextmanager
    def capture(_, **__):
        thread = threading.get_ident()
        threads.add(thread)
        try:
            yield
        finally:
            threads.discard(thread)

    default, stream = (SimpleNamespace(wait_stream=lambda _: None, device=cpu, cuda_stream=each) for each in range(2))
    for name, value in {
        "Stream": lambda: stream,
        "current_stream": lambda _: stream if threading.get_ident() in threads else default,
        "set_stream": lambda _: None,
        "graph_pool_handle": lambda: None,
        "stream": lambda _: nothing(),
        "graph": capture,
        "CUDAGraph": type("CUDAGraph", (), {"replay": lambda _: None, "pool": lambda _: None}),
        "is_current_stream_capturing": lambda: threading.get_ident() in threads,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for module in (captured, ring):
        monkeypatch.setattr(module, "on_device", lambda _: nothing())
    monkeypatch.setattr(captured, "capture_lock", lambda _: nothing())
    for name in ("own_stream", "side_stream"):
        monkeypatch.setattr(captured, name, lambda *_: stream)
    monkeypatch.setattr(captured, "DeviceGroup", HostGroup)
    monkeypatch.setattr(graphs, "_gpus", lambda forwards: [cpu for _ in forwards])
    monkeypatch.setattr(captured, "check_capturable", lambda *_: None)
    monkeypatch.setattr(HostCache, "may_replay", lambda cache: not cache._tickets.live, raising=False)
    monkeypatch.setattr(HostCache, "entered", lambda cache, checked: cache.whole(), raising=False)


# --- what threads do --------------------------------------------------------------------------------------------------


def make():
    """Two tables of two widths, which have a cache each."""
    tables = table_configs(widths=(4, 5), rows=(ROWS, ROWS))
    return te.TieredEmbeddingBagCollection(tables, capacity=40, optimizer=te.Adagrad(lr=0.5))


def batch(seed):
    return randint(0, ROWS, (2 * BAGS * IDS,), seed=seed), torch.arange(2 * BAGS + 1) * IDS


def squares(table, amid=None):
    """A step that trains `table`; `amid` is called between the forward and the backward of its first capture."""
    calls = [] if amid is None else [amid]

    def step(given):
        out = table(*given)
        if calls and torch.cuda.is_current_stream_capturing():
            calls.pop()()
        out.square().sum().backward()
        return out

    return step


def trains(table, **_):
    step, given = squares(table), batch(100)
    return lambda: [step(given)]


def looks_up(table, **_):
    given = batch(100)
    return lambda: [torch.no_grad()(table)(*given)]


def fetches_ahead(table, **_):
    step, given = squares(table), [batch(100 + number) for number in range(3)]
    return lambda: [step(each) for each in te.prefetch(given, table, ids_of=lambda each: each)]


def captures_as_well(table, *, graphed):
    """A step that is about to be captured itself."""
    step, given = squares(table), batch(103)
    step = te.graph_step(step) if graphed else step
    for number in range(3):
        step(batch(100 + number))
    return lambda: [step(given).detach().clone()]


def looks_up_again(table, **_):
    """A forward that its backward runs again: on a GPU on the thread that serves the backward passes of all."""
    given, shift = batch(100), torch.ones(1, requires_grad=True)

    def block(shift):
        return (table(*given) * shift).square()

    out = checkpoint(block, shift, use_reentrant=True, preserve_rng_state=False)

    def work():
        out.sum().backward()
        return [shift.grad]

    return work


def accumulates(table, **_):
    step, given = squares(table), [batch(100 + number) for number in range(2)]

    def work():
        with table.accumulate():
            return [step(each) for each in given]

    return work


def flushes(table, **_):
    return lambda: [table.flush()][:0]


def reads_weights(table, **_):
    return lambda: list(table.state_dict().values())


def reads_counters(table, **_):
    return lambda: [table.stats()][:0]


OTHERS = [trains, looks_up, fetches_ahead, captures_as_well, looks_up_again, accumulates, flushes, reads_weights]


def started(work):
    """Runs `work` on a thread of its own, with the default device of this one."""
    future, default = Future(), torch.get_default_device()

    def run():
        try:
            with contextlib.nullcontext() if default.type == "cpu" else default:
                result = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, daemon=True).start()
    return future


# --- the tests --------------------------------------------------------------------------------------------------------


def take_turns(other, given, at, *, retried=False):
    """What two threads see that do one thing after the other, the other's behind step `at`, or before if it is
    `retried`; and the weights in the end."""
    table = make()
    work, step = other(table, graphed=False), squares(table)
    seen = [step(each) for each in given[: at + (not retried)]]
    others = work()
    seen += [step(each) for each in given[at + (not retried) :]]
    return [*seen, *others, *bits(table)]


def amid_a_capture(other, given, *, ahead=False, fails=False, waits=True):
    """What two threads see, and the weights in the end, if the other begins amid the capture of a step; and which step
    that was."""
    table, futures, seen, steps = make(), [], [], []
    work = other(table, graphed=True)

    def amid():
        futures.append(started(work))
        wait(futures, WHILE)
        assert not waits or not futures[0].done()
        if fails:
            raise KeyError("the step's own")

    train = te.graph_step(squares(table, amid))
    for number, each in enumerate(te.prefetch(given, table) if ahead else given):
        try:
            out = train(each)
        except KeyError:
            futures[0].result(LONG)
            out = train(each)
        seen.append(out.detach().clone())
        if futures and not steps:
            others = futures[0].result(LONG)
            steps.append(number)
    assert idle(table)
    return [*seen, *others, *bits(table)], steps[0]


def check(other, given, **keywords):
    # on a thread of its own, so that what waits for ever fails
    numbers, at = started(lambda: amid_a_capture(other, given, **keywords)).result(4 * LONG)
    assert_same_bits(numbers, take_turns(other, given, at, retried=keywords.get("fails", False)))


@pytest.mark.parametrize("other", OTHERS)
def test_threads_wait_for_a_capture(device, captures, other):
    steps = 8 if device == "cuda" else 4  # the fourth is captured
    check(other, [batch(number) for number in range(steps)])


@pytest.mark.parametrize("other", [*OTHERS, reads_counters])  # which takes no lock on the CPU
def test_threads_wait_for_a_capture_that_plans_ahead(gpu, other):
    check(other, [batch(number) for number in range(14)], ahead=True)


def another(work):
    """As `work`, of a module that the step does not use; all of it, as to build one waits for the GPU too."""

    def starts(_, **keywords):
        def run():
            table = make()
            seen = [each.detach().clone() for each in work(table, **keywords)()]
            return [*seen, *bits(table)]

        return run

    return starts


@pytest.mark.parametrize("work", [trains, captures_as_well, flushes, reads_weights])
def test_threads_that_use_another_module_wait_where_they_would_end_the_capture(device, captures, work):
    steps = 8 if device == "cuda" else 4
    check(another(work), [batch(number) for number in range(steps)], waits=device == "cuda")


def test_a_step_is_not_made_of_other_threads_forwards(device, captures):
    table, other = make(), make()
    looks = looks_up(other)

    def step(given):
        out = table(*given)
        started(looks).result(LONG)
        return out

    forward = te.graph_forward(step)
    forward(batch(0))
    assert forward._step.modules == [table]


@pytest.mark.parametrize("other", [trains, flushes])
def test_threads_go_on_after_a_capture_that_failed(device, captures, other):
    steps = 8 if device == "cuda" else 4
    check(other, [batch(number) for number in range(steps)], fails=True)


@pytest.mark.parametrize("other", [trains, flushes])
def test_threads_go_on_after_a_capture_that_failed_to_plan_ahead(gpu, other):
    check(other, [batch(number) for number in range(14)], ahead=True, fails=True)


def test_the_backward_of_a_captured_step_stays_on_its_thread(device, captures):
    """Autograd's own may be busy with a backward that waits for the capture."""
    table, own = make(), []

    def step(given):
        out = table(*given)
        out.register_hook(lambda _: own.append((threading.get_ident(), torch._C._is_multithreading_enabled())))
        out.sum().backward()

    train = te.graph_step(step)
    for number in range(4):
        train(batch(number))
    assert own[1:] == [(threading.get_ident(), False)] * 3  # the first was the function alone
    assert torch._C._is_multithreading_enabled()


def test_what_waits_to_be_captured_is_not_inside_accumulate(device, captures):
    """Which began while it waited: no graph would hold the update."""
    runs, seen = [], []
    for threaded in (False, True):
        table = make()
        step = squares(table, lambda: seen.append("captured"))
        train = te.graph_step(step) if threaded else step
        for number in range(3):
            train(batch(number))
        fourth = batch(3)
        with contextlib.ExitStack() as outer:
            if threaded:
                with table.tables.locked():
                    future = started(lambda train=train, fourth=fourth: train(fourth))
                    wait([future], WHILE)
                    outer.enter_context(table.accumulate())
                future.result(LONG)
            else:
                outer.enter_context(table.accumulate())
                train(fourth)
        runs.append(bits(table))
    assert_same_bits(*runs)
    assert not seen


def test_ids_left_in_buffers_are_excused_on_the_thread_of_their_step_alone(device, captures):
    table, seen = make(), []

    def amid():
        threads = table.engine.ids_may_exceed_bags
        seen.append((threading.get_ident() in threads, started(lambda: threading.get_ident() in threads).result(LONG)))

    train = te.graph_step(squares(table, amid))
    for number in range(4):
        train(batch(number))
    assert seen == [(True, False)]
    assert not table.engine.ids_may_exceed_bags
