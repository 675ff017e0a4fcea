"""Captures that fail, and losses kept from eager steps: what comes says what to do, and all works afterwards, with the
bits of a model that never saw it."""

from __future__ import annotations

import contextlib
import gc
import itertools
import re
import threading
import weakref

import pytest
import torch
from devices import assert_same_bits, idle, randint
from test_capture_threads import LONG, captures, started  # noqa: F401 - a fixture, too
from torch import nn
from training import bits

import tieredemb as te
from tieredemb.errors import UnsupportedError
from tieredemb.kernels.captures import Capture
from tieredemb.kernels.streams import side_stream
from tieredemb.pipeline.leaves import Leaves
from tieredemb.pipeline.uncapturable import REASONS, check_optimizers, explain

ROWS, WIDTH = 300, 4
IDS = [randint(0, ROWS, (8, 3), seed=seed) for seed in range(40)]


class Run:
    """A table, a dense part with its optimizer, and a step that zeroes its gradients at its end. `plants`: what it does
    beside that, once, when it is captured."""

    def __init__(self, *, dropout=0.0, ahead=False):
        self.table = te.TieredEmbeddingBag(ROWS, WIDTH, mode="sum", capacity=40, optimizer=te.Adagrad(lr=0.5))
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.dense = torch.optim.SGD([self.scale], lr=0.01, foreach=True)
        self.dropout, self.ahead = dropout, ahead
        self.plants = {}

    def planted(self, place, value):
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing() and place in self.plants:
            self.plants.pop(place)(value)

    def step(self, ids):
        out = nn.functional.dropout(self.table(ids) * self.scale, self.dropout)
        self.planted("forward", out)
        out.register_hook(lambda grad: self.planted("backward", grad))
        loss = out.square().mean()
        loss.backward()
        self.planted("update", loss)
        self.dense.step()
        self.dense.zero_grad(set_to_none=True)
        return loss

    def numbers(self):
        return [*bits(self.table), self.scale.detach().clone()]

    def train(self, given, failures=None, step=None):
        """Captured steps; one that fails is taken again, and what it has raised is kept as text."""
        train = step or te.graph_step(self.step)
        for ids in te.prefetch(given, self.table) if self.ahead else given:
            try:
                train(ids)
            except (UnsupportedError, RuntimeError, ValueError, KeyboardInterrupt) as error:
                if failures is None:
                    raise
                failures.append((type(error), str(error), type(error.__cause__)))
                self.after_failure(ids)
                train(ids)

    def after_failure(self, ids):
        """All of it synchronises, draws or computes on the stream that is current."""
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        for stream in (side_stream(ids.device, 0, "capture"), torch.cuda.default_stream()):
            with torch.cuda.stream(stream):
                assert not torch.cuda.is_current_stream_capturing()
        assert torch.randint(5, (100,)).max() < 5
        assert nn.functional.dropout(torch.ones(100), 0.5).max() == 2
        assert self.scale.grad is None
        started(self.table.stats).result(LONG)  # on a thread of its own, for which nothing may be locked
        self.table.flush()


def check_recovery(plants, *, ahead, tmp_path):
    """Returns what the planted error was told as."""
    given = [ids.to("cuda") for ids in IDS]
    twin, run, failures = Run(), Run(ahead=ahead), []
    run.plants = dict(plants)
    for ids in given[:14]:
        twin.step(ids)
    run.train(given[:14], failures)
    assert not run.plants
    assert len(failures) == 1
    assert_same_bits(run.numbers(), twin.numbers())
    for each in (run, twin):
        each.step(given[14])
    run.table.save_checkpoint(tmp_path / "table")
    for ahead_too in (False, True):
        run.ahead = ahead_too
        run.train(given[15:25])
        for ids in given[15:25]:
            twin.step(ids)
    assert_same_bits(run.numbers(), twin.numbers())
    assert idle(run.table)
    return failures[0]


# --- what a step may do that no graph can hold ------------------------------------------------------------------------


def other_stream():
    """A stream that is not captured: torch hands out 32 of them in turn, some of which the capture may have."""
    for _ in range(64):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            if not torch.cuda.is_current_stream_capturing():
                return stream
    raise AssertionError("all of torch's streams are captured")


def waits_for_other_stream(out):
    torch.cuda.current_stream().wait_stream(other_stream())


def memory_for_other_stream(out):
    with torch.cuda.stream(other_stream()):
        torch.ones(1 << 26)


def left_on_other_stream(out):
    other = other_stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        out * 2


def default_stream_waits(out):
    torch.cuda.default_stream().wait_stream(torch.cuda.current_stream())


def waits_for_own_event(out):
    event = torch.cuda.Event()
    event.record()
    event.synchronize()


def swallowed(out):
    with contextlib.suppress(RuntimeError):
        out.sum().item()


def synchronized_elsewhere(out):
    def work():
        with contextlib.suppress(RuntimeError):  # it is refused, and the capture is over
            torch.cuda.synchronize()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def new_generator(out):
    torch.rand(3, generator=torch.Generator("cuda"))


def strays(out):
    torch.cuda.set_stream(torch.cuda.Stream())
    raise ValueError("the step's own")


def leaves_and_raises(out):
    left_on_other_stream(out)
    raise ValueError("the step's own")


def waits_and_raises(out):
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        raise ValueError("the step's own") from None


ILLEGAL = {
    "item": (lambda out: out.sum().item(), "waits for the GPU"),
    "cpu": (lambda out: out.detach().cpu(), "pinned|waits for the GPU"),
    "condition": (lambda out: bool(out.sum() > 0), "waits for the GPU"),
    "mask": (lambda out: out[out > 0], "waits for the GPU"),
    "synchronize": (lambda out: torch.cuda.synchronize(), "waits for the GPU"),
    "unpinned": (lambda out: torch.ones(4, device="cpu").to(out.device), "not pinned"),
    "other stream": (waits_for_other_stream, "work from outside"),
    "memory": (memory_for_other_stream, "memory for a stream"),
    "left on other stream": (left_on_other_stream, "wait_stream"),
    "default stream": (default_stream_waits, "default stream"),
    "event": (waits_for_own_event, "an event of the step|waits for the GPU"),
    "swallowed": (swallowed, "swallowed"),
    "generator": (new_generator, "generator of the step's own"),
}
AT_THE_END = ["left on other stream", "swallowed"]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("name", ILLEGAL)
def test_an_illegal_call_in_a_captured_step_is_told_and_recovered_from(gpu, tmp_path, name, ahead):
    plant, message = ILLEGAL[name]
    torch.cuda.empty_cache()  # or a stream of torch's pool may have memory from another test
    kind, text, cause = check_recovery({"forward": plant}, ahead=ahead, tmp_path=tmp_path)
    assert kind is UnsupportedError
    assert issubclass(cause, RuntimeError)
    assert re.search(message, text)
    assert "test_capture_failures.py, line" in text or name in AT_THE_END


@pytest.mark.parametrize("ahead", [False, True])
def test_an_error_that_is_kept_keeps_no_step_from_being_captured(gpu, ahead):
    """Its traceback holds the graph of the capture that failed."""
    given = [ids.to("cuda") for ids in IDS[:20]]
    twin, run, kept = Run(), Run(ahead=ahead), []
    run.plants = {"update": lambda loss: loss.item()}
    train = te.graph_step(run.step)
    for ids in te.prefetch(given, run.table) if ahead else given:
        try:
            train(ids)
        except UnsupportedError as error:
            kept.append(error)
            train(ids)
    for ids in given:
        twin.step(ids)
    assert len(kept) == 1
    assert train.summary().captured
    assert_same_bits(run.numbers(), twin.numbers())


def test_a_generator_that_the_capture_does_not_know_is_told_and_recovered_from(gpu, tmp_path):
    own = torch.Generator("cuda")
    before = own.get_state()
    plants = {"forward": lambda out: torch.rand(3, generator=own)}
    kind, text, _ = check_recovery(plants, ahead=False, tmp_path=tmp_path)
    assert kind is UnsupportedError
    assert "generator of the step's own" in text
    assert torch.equal(own.get_state(), before)
    torch.rand(3, generator=own)


@pytest.mark.parametrize("place", ["backward", "update"])
def test_an_illegal_call_is_told_wherever_it_comes(gpu, tmp_path, place):
    kind, text, _ = check_recovery({place: lambda value: value.sum().item()}, ahead=True, tmp_path=tmp_path)
    assert kind is UnsupportedError
    assert "test_capture_failures.py, line" in text


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("place", ["forward", "backward", "update"])
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_what_a_captured_step_raises_is_what_comes(gpu, tmp_path, place, kind, ahead):
    def plant(value):
        raise kind("the step's own")

    failure = check_recovery({place: plant}, ahead=ahead, tmp_path=tmp_path)
    assert failure == (kind, "the step's own", type(None))


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("plant", [strays, leaves_and_raises, waits_and_raises])
def test_what_is_raised_comes_before_what_has_become_of_the_capture(gpu, tmp_path, plant, ahead):
    failure = check_recovery({"forward": plant}, ahead=ahead, tmp_path=tmp_path)
    assert failure == (ValueError, "the step's own", type(None))


def test_a_thread_that_waits_for_the_gpu_ends_a_capture_and_no_more(gpu, tmp_path):
    kind, text, _ = check_recovery({"forward": synchronized_elsewhere}, ahead=True, tmp_path=tmp_path)
    assert kind is UnsupportedError
    assert "another thread" in text


@pytest.mark.parametrize("ahead", [False, True])
def test_a_captured_step_inside_another_is_refused(gpu, tmp_path, ahead):
    other = te.TieredEmbeddingBag(ROWS, WIDTH, mode="sum", capacity=40)
    look_up = te.graph_forward(other)
    for ids in IDS[:5]:
        look_up(ids.to("cuda"))
    ids = IDS[5].to("cuda")
    plants = {"forward": lambda out: look_up(ids)}
    kind, text, _ = check_recovery(plants, ahead=ahead, tmp_path=tmp_path)
    assert kind is UnsupportedError
    assert "called inside another one" in text


@pytest.mark.parametrize("ahead", [False, True])
def test_dropout_goes_on_after_a_capture_that_failed(gpu, ahead):
    given, failures, run = [ids.to("cuda") for ids in IDS], [], Run(dropout=0.5, ahead=ahead)
    run.plants = {"forward": lambda out: out.sum().item()}
    run.train(given[:12], failures)
    assert len(failures) == 1
    seen = []

    def step(ids):
        out = nn.functional.dropout(run.table(ids) * 0 + 1, 0.5)
        out.sum().backward()
        return out

    train = te.graph_step(step)
    for ids in te.prefetch(given[:12], run.table) if ahead else given[:12]:
        seen.append(train(ids).clone())
    assert all(not torch.equal(one, other) for one, other in itertools.pairwise(seen))


def test_graphs_captured_before_draw_from_the_default_generator_after_a_capture_that_failed(gpu):
    """A generator put in its place would not be theirs."""
    runs = []
    for fails in (False, True):
        graph, out = torch.cuda.CUDAGraph(), torch.zeros(8)
        with torch.cuda.graph(graph):
            out.copy_(torch.rand(8))
        torch.cuda.synchronize()  # the beginning of a capture sets what graphs draw from, on a stream of its own
        torch.manual_seed(7)
        seen = []
        for number in range(4):
            if fails and number == 2:
                with pytest.raises(RuntimeError), Capture(torch.cuda.CUDAGraph(), torch.cuda.Stream()):
                    torch.rand(3).sum().item()
            graph.replay()
            seen += [out.clone(), torch.rand(8)]
        runs.append(seen)
    assert_same_bits(*runs)


def test_what_follows_a_capture_that_failed_comes_behind_its_recovery(gpu, monkeypatch):
    """Which sets what the graphs that were captured before draw their random numbers from."""
    release, stream = Capture._release_pool, torch.cuda.Stream()
    monkeypatch.setattr(Capture, "_release_pool", lambda each: (release(each), torch.cuda._sleep(10**8)))  # 50 ms
    with pytest.raises(RuntimeError), Capture(torch.cuda.CUDAGraph(), stream):
        torch.rand(3).sum().item()
    torch.cuda.current_stream().synchronize()
    assert stream.query()


@pytest.mark.parametrize("at_once", [False, True])
def test_what_follows_a_capture_comes_behind_its_beginning(gpu, monkeypatch, at_once):
    """Which sets what all graphs draw their random numbers from."""
    graph, stream, begin = torch.cuda.CUDAGraph(), torch.cuda.Stream(), torch.cuda.CUDAGraph.capture_begin

    def begins_late(*given, **keywords):
        torch.cuda._sleep(10**8)  # 50 ms
        begin(*given, **keywords)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", begins_late)
    with Capture(graph, stream, at_once=at_once):
        torch.zeros(3)
    torch.cuda.current_stream().synchronize()
    assert stream.query()


def test_casts_of_a_capture_that_failed_are_forgotten(gpu):
    """What autocast keeps of them has never been computed."""
    given, runs = [ids.to("cuda") for ids in IDS[:8]], []
    for graphed in (False, True):
        table = te.TieredEmbeddingBag(ROWS, WIDTH, mode="sum", capacity=40, optimizer=te.SGD(lr=0.5))
        top, raised = nn.Linear(WIDTH, 1, bias=False), []
        with torch.no_grad():
            top.weight.copy_(torch.linspace(0.5, 1.5, WIDTH))

        def step(ids, table=table, top=top, raised=raised):
            out = top(table(ids))
            if torch.cuda.is_current_stream_capturing() and not raised:
                raise raised.append(True) or ValueError("the step's own")
            out.square().sum().backward()
            return out

        train, outs = te.graph_step(step) if graphed else step, []
        for ids in given:
            with torch.autocast("cuda", torch.bfloat16):
                try:
                    out = train(ids)
                except ValueError:
                    out = train(ids)
            outs.append(out.detach().clone())
        assert len(raised) == graphed
        runs.append([*outs, *bits(table)])
    assert_same_bits(*runs)


def test_memory_of_captures_that_failed_is_given_back(gpu):
    def fail():
        with pytest.raises(RuntimeError), Capture(torch.cuda.CUDAGraph(), torch.cuda.Stream()):
            torch.zeros(1 << 26).sum().item()  # 256 MiB

    reserved = []
    for _ in range(3):
        fail()
        gc.collect()
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[-1] - reserved[0] < 1 << 26


def test_a_capture_that_failed_leaves_gradients_as_they_were(gpu):
    table = te.TieredEmbeddingBag(ROWS, WIDTH, mode="sum", capacity=40, optimizer=te.SGD(lr=0.5))
    scale, raised = nn.Parameter(torch.ones(WIDTH)), []

    def step(ids):
        scale.grad = None
        (table(ids) * scale).sum().backward()
        if torch.cuda.is_current_stream_capturing() and not raised:
            raise raised.append(True) or ValueError("the step's own")

    train = te.graph_step(step)
    for ids in IDS[:3]:
        train(ids.to("cuda"))
    grad, value = scale.grad, scale.grad.clone()
    with pytest.raises(ValueError, match="own"):
        train(IDS[3].to("cuda"))
    assert scale.grad is grad
    assert torch.equal(grad, value)


# --- losses that are kept ---------------------------------------------------------------------------------------------


def kept_loss(run, given):
    return [run.step(given[0])]


def kept_losses(run, given):
    return [run.step(ids) for ids in given[:3]]


def kept_output(run, given):
    return [nn.functional.relu(run.table(given[0]).detach() * run.scale)]


def kept_by_retain_graph(run, given):
    loss = (run.table(given[0]).detach() * run.scale).sum()
    loss.backward(retain_graph=True)
    run.scale.grad = None
    return [loss]


def kept_of_a_loop(run, given):
    for ids in torch.utils.data.DataLoader(given[:3], batch_size=None):
        loss = run.step(ids)
    return [loss]


KEPT = [kept_loss, kept_losses, kept_output, kept_by_retain_graph, kept_of_a_loop]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("keep", KEPT)
def test_a_kept_loss_is_told_before_the_capture_and_its_end_cures(device, captures, monkeypatch, keep, ahead):  # noqa: F811
    if ahead and device == "cpu":
        pytest.skip("nothing stands in for a capture that plans ahead")
    begun, enter = [], Capture.__enter__
    # not of eager plans, which are recorded by themselves
    monkeypatch.setattr(Capture, "__enter__", lambda each: begun.extend([each] * (not each.at_once)) or enter(each))
    given = [ids.to(device) for ids in IDS]
    twin, run = Run(), Run(ahead=ahead)
    del keep(twin, given)[:]
    kept, told = keep(run, given), []
    train, last = (
        te.graph_step(run.step),
        17 if device == "cuda" else 7,
    )  # there the capture stands for its replay alone
    for ids in te.prefetch(given[3:last], run.table) if ahead else given[3:last]:
        try:
            train(ids)
        except UnsupportedError as error:
            assert not begun
            told.append(str(error))
            del kept[:]
            train(ids)
    assert len(told) == 1
    assert "1 parameter(s) of the step, the first of shape (4,)" in told[0]
    assert "loss.detach()" in told[0]
    assert begun
    for ids in given[3:last]:
        twin.step(ids)
    assert_same_bits(run.numbers(), twin.numbers())


@pytest.mark.parametrize("ahead", [False, True])
def test_a_loss_kept_from_another_stream_does_not_keep_a_step_from_being_captured(gpu, ahead):
    given = [ids.to("cuda") for ids in IDS]
    twin, run = Run(), Run(ahead=ahead)
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        kept = run.step(given[0])
    torch.cuda.current_stream().wait_stream(other)
    twin.step(given[0])
    train = te.graph_step(run.step)
    run.train(given[1:15], step=train)
    for ids in given[1:15]:
        twin.step(ids)
    assert train.summary().captured
    assert_same_bits(run.numbers(), twin.numbers())
    assert kept.requires_grad


def test_a_loss_that_the_step_stores_does_not_keep_it_from_being_captured_off_the_default_stream(gpu):
    given = [ids.to("cuda") for ids in IDS]
    twin, run, stored = Run(), Run(), {}

    def step(ids):
        stored["loss"] = run.step(ids)

    train = te.graph_step(step)
    with torch.cuda.stream(torch.cuda.Stream()):
        run.train(given[:12], step=train)
    for ids in given[:12]:
        twin.step(ids)
    assert train.summary().captured
    assert_same_bits(run.numbers(), twin.numbers())
    with pytest.raises(UnsupportedError, match="that the step itself stores"):
        run.train(given[:12], step=te.graph_step(lambda ids: stored.update(eager=twin.step(ids))))


def test_a_kept_loss_that_is_overwritten_by_captured_steps_is_none(gpu):
    given = [ids.to("cuda") for ids in IDS]
    twin, run = Run(), Run()
    train = te.graph_step(run.step)
    for ids in given[:3]:
        loss = run.step(ids)
    for ids in given[3:12]:
        loss = train(ids)
    for ids in given[:12]:
        twin.step(ids)
    assert not loss.requires_grad
    assert_same_bits(run.numbers(), twin.numbers())


def test_a_loss_that_no_eager_step_has_shown_is_told_by_the_capture(gpu):
    """A backward that reaches no table shows nothing."""
    table = te.TieredEmbeddingBag(ROWS, WIDTH, mode="sum", capacity=40)
    table.requires_grad_(False)
    scale = nn.Parameter(torch.ones(WIDTH))

    def step(ids):
        scale.grad = None
        loss = (table(ids) * scale).sum()
        loss.backward()
        return loss

    given = [ids.to("cuda") for ids in IDS]
    kept = step(given[0])
    train = te.graph_step(step)
    for ids in given[1:4]:
        train(ids)
    with pytest.raises(UnsupportedError, match="del that loss") as told:
        train(given[4])
    del kept, told
    gc.collect()
    assert torch.equal(train(given[4]).clone(), step(given[4]).detach())


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.NAdam, torch.optim.RMSprop])
def test_an_optimizer_that_cannot_be_captured_is_named_before_the_capture(gpu, kind, ahead):
    """And the steps that were refused have changed nothing."""
    run, twin = Run(ahead=ahead), Run()
    run.dense, twin.dense = (kind([each.scale], lr=0.01) for each in (run, twin))
    train, told, given = te.graph_step(run.step), [], [ids.cuda() for ids in IDS[:8]]
    for ids in te.prefetch(given, run.table) if ahead else given:
        try:
            train(ids)
        except UnsupportedError as error:
            told.append(str(error))
            run.step(ids)
    for ids in given:
        twin.step(ids)
    assert told
    for text in told:
        assert f"step() of {kind.__name__}" in text
        assert f"{kind.__name__}(…, capturable=True)" in text
    assert_same_bits(run.numbers(), twin.numbers())


def test_a_step_is_captured_once_its_optimizer_can_be(gpu):
    """Though the one that could not be is alive, as where a scheduler has it."""
    run = Run()
    refused = run.dense = torch.optim.Adam([run.scale], lr=0.01)
    train = te.graph_step(run.step)
    for ids in [each.cuda() for each in IDS[:14]]:
        try:
            train(ids)
        except UnsupportedError:
            run.dense = torch.optim.Adam([run.scale], lr=0.01, capturable=True)
            train(ids)
    assert refused is not run.dense
    assert train.summary().captured == 1
    assert train.summary().replayed >= 5


# --- on any device ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam])
def test_optimizers_that_torch_captures_are_let_be(kind):
    param = nn.Parameter(torch.zeros(2, device="cpu"))
    capturable = {"capturable": True} if kind is torch.optim.Adam else {}
    check_optimizers([kind([param], lr=0.1, **capturable)])


def test_the_param_groups_that_cannot_be_captured_are_named():
    first, second = (nn.Parameter(torch.zeros(2, device="cpu")) for _ in range(2))
    optimizer = torch.optim.AdamW([{"params": [first], "capturable": True}, {"params": [second]}], lr=0.1)
    with pytest.raises(UnsupportedError, match=r"AdamW.*param groups \[1\] have capturable=False"):
        check_optimizers([optimizer])


@pytest.mark.parametrize("text", REASONS)
def test_errors_of_captures_are_explained(text):
    with pytest.raises(RuntimeError) as raised:
        raise RuntimeError(f"CUDA error: something {text} something")
    with pytest.raises(UnsupportedError, match="in test_errors_of_captures_are_explained: ") as told:
        explain(raised.value)
    assert REASONS[text] in str(told.value)
    assert "test_capture_failures.py, line" in str(told.value)
    assert told.value.__cause__ is raised.value


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes differ"), ValueError(next(iter(REASONS))), UnsupportedError(next(iter(REASONS)))]
)
def test_errors_that_are_not_of_the_capture_are_left_alone(error):
    explain(error)


def raises_as_captures(out):
    raise RuntimeError(next(iter(REASONS)))


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("plant", [raises_as_captures, left_on_other_stream])
def test_an_error_that_is_explained_goes_when_it_is_dropped(device, captures, plant, ahead):  # noqa: F811
    """With all that its traceback holds: no batch stays in flight until the collector comes."""
    if device == "cpu" and (ahead or plant is left_on_other_stream):
        pytest.skip("nothing stands in for it")
    run, alive, told = Run(), [], []

    def step(ids):
        out = run.table(ids)
        if torch.cuda.is_current_stream_capturing() and not alive:
            alive.append(weakref.ref(out))
            plant(out)
        out.sum().backward()

    train, given = te.graph_step(step), [ids.to(device) for ids in IDS[:8]]
    gc.collect()
    gc.disable()
    try:
        for ids in te.prefetch(given, run.table) if ahead else given:
            if not told:
                try:
                    train(ids)
                except UnsupportedError as error:
                    told.append(str(error))
        assert [reference() for reference in alive] == [None]
        assert len(told) == 1
    finally:
        gc.enable()


def test_leaves_are_those_that_the_backward_of_this_thread_reaches(device, captures):  # noqa: F811
    table = te.TieredEmbeddingBag(ROWS, WIDTH, mode="sum", capacity=40, optimizer=te.SGD(lr=0.5))
    scale, unused = (nn.Parameter(torch.ones(WIDTH)) for _ in range(2))
    leaves = Leaves(scale.device)
    other = te.TieredEmbeddingBag(ROWS, WIDTH, mode="sum", capacity=40, optimizer=te.SGD(lr=0.5))

    def elsewhere():
        (other(IDS[0].to(device)) * unused).sum().backward()

    def run(factor):
        (table(IDS[0].to(device)) * scale * factor).sum().backward()
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    with torch.autograd.set_multithreading_enabled(False):
        for factor in (torch.ones(WIDTH), of_one_run := torch.ones(WIDTH, requires_grad=True)):
            with leaves.observe():
                run(factor)
    assert [leaf is scale for leaf in leaves] == [True]
    assert of_one_run.grad is not None
