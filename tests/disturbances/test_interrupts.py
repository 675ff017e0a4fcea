"""Ctrl-C before every line, and real signals at random moments: the rule of `disturbed` holds, row by row.

`pytest --campaign` goes through every line; without it lines are sampled evenly.
"""

from __future__ import annotations

import contextlib
import copy
import random
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from disturbed import (
    PACKAGE,
    Disturbance,
    LineInterrupts,
    Pair,
    batch,
    contents,
    make,
    make_following,
    make_member,
    positions,
    same,
    train,
)
from torch._C import _len_torch_function_stack, _pop_torch_function_stack, _push_on_torch_function_stack
from torch.overrides import _get_current_function_mode_stack

import tieredemb as te
from tieredemb.errors import BrokenCacheError, StorageError, UncleanFileError
from tieredemb.kernels import recorder
from tieredemb.modules.forwards import LISTENERS
from tieredemb.pipeline.plan_executors import WorkerExecutor

SAMPLED = 40  # lines of a call that are interrupted without --campaign


@pytest.fixture(params=["host", "file"])
def pair(request, device, tmp_path):
    def build() -> Any:
        if request.param == "file":
            return make(te.File(str(tmp_path / "rows"), recover=True))
        return make(te.HostMemory() if device == "cpu" else None)

    pair = Pair(build, tmp_path)
    for number in range(3):
        pair.run(lambda module, number=number: train(module, number), Disturbing())
    with torch.autograd.set_multithreading_enabled(False):  # backward on this thread, whose lines are seen
        yield pair
    pair.module.close()


class Disturbing(LineInterrupts):
    """Counts lines, and interrupts none without `at`."""


def forward(module: Any, number: int) -> None:
    with torch.no_grad():
        module(*batch(number))


def accumulated(module: Any, number: int) -> None:
    with module.accumulate():
        for part in range(2):
            train(module, number + part)


def load_state(module: Any, number: int) -> None:
    module.load_state_dict({name: torch.full_like(value, number % 7) for name, value in module.state_dict().items()})


def state(module: Any, number: int) -> None:
    before = module.state_dict()
    assert same(list(before.values()), list(module.state_dict().values()))


def copied(module: Any, number: int) -> None:
    if module.tables.groups[0].cache.cold.in_memory:
        train(copy.deepcopy(module), number)


def resize(module: Any, number: int) -> None:
    """As a division of the capacity does."""
    module.tables.resize([4 + number % 7, 11 - number % 7][: len(module.tables.groups)])


ACTS = {
    "train": train,
    "forward": forward,
    "larger than the cache": lambda module, number: train(module, number, samples=20),
    "accumulate": accumulated,
    "flush": lambda module, number: module.flush(),
    "state_dict": state,
    "load_state_dict": load_state,
    "deepcopy": copied,
    "resize": resize,
}


def campaign(pair: Pair, act: Any, request: Any, most: int = SAMPLED) -> None:
    # kernels are compiled the first time; a plan may be recorded after some, and an update of such plans after more
    for _ in range(2 * recorder.TIMES + 3):
        counting = Disturbing()
        pair.run(lambda module: act(module, 100), counting)
    disturbed = reached = 0
    chosen = positions(counting.count, most, all_of_them=request.config.getoption("--campaign"))
    for number, at in enumerate(chosen):
        interrupts = Disturbing(at)
        disturbed += pair.run(lambda module, number=number: act(module, 101 + number), interrupts)
        reached += interrupts.count > at
    assert disturbed == reached
    assert reached >= len(chosen) / 3  # acts differ: some have fewer lines than the one that was counted


@pytest.mark.parametrize("name", ACTS)
def test_interrupt_before_any_line_is_all_or_nothing(pair, name, request):
    campaign(pair, ACTS[name], request)


@pytest.mark.parametrize("name", ["train", "forward", "larger than the cache"])
def test_interrupt_of_what_is_being_recorded(gpu, device, pair, name, request, monkeypatch):
    if device == "cpu":
        pytest.skip("nothing is recorded on the CPU")

    def act(module: Any, number: int) -> None:
        module.tables.placed.now.recorded.clear()
        ACTS[name](module, number)

    pair.module.tables.placed.now.recorded.clear()
    campaign(pair, ACTS[name], request, 4)  # what is made at a first use must not be captured
    monkeypatch.setattr(recorder, "TIMES", 0)
    campaign(pair, act, request)


def written(module: Any, number: int) -> None:
    module.weight.data[number % 7 : number % 7 + 9].add_(0.25)


ACTS_OF_A_TABLE = {name: act for name, act in ACTS.items() if name != "accumulate"} | {"write": written}


@pytest.mark.parametrize("name", ACTS_OF_A_TABLE)
@pytest.mark.parametrize(
    "optimizer", [te.SparseAdam(lr=0.1), te.Adam(lr=0.1, weight_decay=0.1)], ids=["sparse", "dense"]
)
def test_interrupt_of_a_table_that_shares_its_cache(device, request, tmp_path, name, optimizer):
    pair = Pair(lambda: make_member(optimizer), tmp_path, make_member(optimizer, capacity=1.0))
    beside = pair.twin.beside
    before = contents(beside)
    with torch.autograd.set_multithreading_enabled(False):
        campaign(pair, ACTS_OF_A_TABLE[name], request)
    assert same(contents(beside), before)
    if pair.broken == 0:
        assert same(contents(pair.module.beside), before)


def stepped(module: Any, number: int) -> None:
    optimizer = module.engine.optimizer.optimizer
    optimizer.zero_grad()
    for part in range(2):
        train(module, number + part)
    torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
    optimizer.step()


def stepped_alone(module: Any, number: int) -> None:
    """A step without a gradient, which moves the rows of a dense optimizer."""
    optimizer = module.engine.optimizer.optimizer
    optimizer.zero_grad()
    train(module, number)
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()


def stepped_by_row(module: Any, number: int) -> None:
    """A step by gradients whose elements others have changed, and kept."""
    optimizer, params = module.engine.optimizer.optimizer, list(module.parameters())
    optimizer.zero_grad()
    train(module, number)
    kept = [p.grad.clone() for p in params]
    torch.nn.utils.clip_grad_value_(params, 0.1)
    train(module, number + 1)
    for p, grad in zip(params, kept, strict=True):
        p.grad = p.grad + grad
    optimizer.step()


def stepped_whole(module: Any, number: int) -> None:
    """A step that moves every row, table by table."""
    optimizer, params = module.engine.optimizer.optimizer, list(module.parameters())
    optimizer.zero_grad()
    train(module, number)
    sum(p.square().sum() for p in params).backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("kind", "act"),
    [
        (torch.optim.SparseAdam, stepped),
        (torch.optim.SparseAdam, stepped_by_row),
        (torch.optim.AdamW, stepped),
        (torch.optim.AdamW, stepped_alone),
        (torch.optim.AdamW, stepped_by_row),
        (torch.optim.AdamW, stepped_whole),
        (torch.optim.Adagrad, stepped_whole),
    ],
)
def test_an_interrupted_step_of_a_torch_optimizer_is_all_or_nothing(device, request, tmp_path, kind, act):
    pair = Pair(lambda: make_following(kind), tmp_path, make_following(kind, capacity=1.0))
    pair.run(lambda module: stepped(module, 0), Disturbing())
    with torch.autograd.set_multithreading_enabled(False):
        campaign(pair, act, request)


def test_an_interrupted_step_of_a_dense_optimizer_is_all_or_nothing(device, request, tmp_path):
    """Its forward changes rows, too: they replay the steps that they have missed."""
    optimizer = te.Adam(lr=0.1, weight_decay=0.1)
    path = str(tmp_path / "rows")

    def build() -> Any:
        return make(te.File(path, recover=True), optimizer=optimizer)

    pair = Pair(build, tmp_path, make(capacity=1.0, optimizer=optimizer))
    for number in range(3):
        pair.run(lambda module, number=number: train(module, number), Disturbing())
    with torch.autograd.set_multithreading_enabled(False):
        campaign(pair, train, request)
    pair.module.close()


def test_interrupted_save_leaves_a_whole_checkpoint(pair, request, tmp_path):
    directory, loaded = str(tmp_path / "saved"), make(capacity=1.0)

    def act(module: Any) -> None:
        if module is pair.module:
            module.save_checkpoint(directory)

    counting = Disturbing()
    pair.run(act, counting)
    saved = contents(pair.twin)
    for at in positions(counting.count, SAMPLED, all_of_them=request.config.getoption("--campaign")):
        pair.run(lambda module, at=at: train(module, at), Disturbing())
        now = contents(pair.twin)
        pair.run(act, Disturbing(at))
        loaded.load_checkpoint(directory)
        found = contents(loaded)
        assert same(found, now) or same(found, saved)
        saved = found


def test_interrupted_load_is_mended_by_another(pair, request, tmp_path):
    directory = str(tmp_path / "saved")
    pair.twin.save_checkpoint(directory)

    def act(module, number):
        module.load_checkpoint(directory)

    counting = Disturbing()
    pair.run(lambda module: act(module, 0), counting)
    for at in positions(counting.count, SAMPLED, all_of_them=request.config.getoption("--campaign")):
        pair.run(lambda module, at=at: train(module, at), Disturbing())
        pair.run(lambda module: act(module, 0), Disturbing(at))
    assert pair.broken  # some of it cannot be taken back


def test_interrupted_close_loses_nothing(pair, request, tmp_path):
    directory = str(tmp_path / "kept")

    def go_on() -> None:
        pair.module.close()
        pair.module = pair._build()
        if not pair.module.tables.groups[0].cache.cold.in_memory:
            assert same(contents(pair.module), contents(pair.twin))
        pair.module.load_checkpoint(directory)
        assert same(contents(pair.module), contents(pair.twin))

    counting = Disturbing()
    pair.module.save_checkpoint(directory)
    with counting.on():
        pair.module.close()
    go_on()
    for at in positions(counting.count, SAMPLED, all_of_them=request.config.getoption("--campaign")):
        pair.run(lambda module, at=at: train(module, at), Disturbing())
        pair.module.save_checkpoint(directory)
        with contextlib.suppress(KeyboardInterrupt), Disturbing(at).on():
            pair.module.close()
        go_on()


def test_interrupted_prefetch_leaves_whole_steps(pair, request, monkeypatch):
    def loop(module, number):
        for ids, offsets in te.prefetch([batch(number + i) for i in range(4)], module):
            module(ids, offsets).square().sum().backward()

    counting = Disturbing()
    pair.run(lambda module: loop(module, 0), counting)
    for number, at in enumerate(positions(counting.count, SAMPLED, all_of_them=request.config.getoption("--campaign"))):
        after = [contents(pair.twin)]
        for i in range(4):
            train(pair.twin, 4 * number + i)
            after.append(contents(pair.twin))
        # by turns on a thread of their own, as where storage is slow, which takes locks that this one may have
        monkeypatch.setattr(WorkerExecutor, "QUICK", 0.004 * (number % 2))
        with contextlib.suppress(KeyboardInterrupt), Disturbing(at).on():
            loop(pair.module, 4 * number)
        if pair._is_broken():
            pair._mend()
        done = next((i for i, state in enumerate(after) if same(state, contents(pair.module))), None)
        assert done is not None, f"no number of whole steps: {at}"
        for i in range(done, 4):
            train(pair.module, 4 * number + i)
        assert same(contents(pair.module), after[-1])
        for module in (pair.module, pair.twin):
            module(*batch(0))  # listeners of what is gone leave
        assert LISTENERS == [], f"a loop that has ended hears of forwards: {at}"


def test_interrupts_that_lines_stand_for_leave_no_lock_taken():
    """A signal is handled before a block's last call returns or after the lock is given back, never in between."""
    lock = threading.Lock()

    def value(of: int) -> int:
        with lock:
            return of + 1

    def nothing(of: int) -> None:
        with lock:
            of += 1

    def amid(of: int) -> int:
        for _ in range(of):
            with lock:
                return of + 1
        return 0

    def tried(of: int) -> int:
        with lock, contextlib.nullcontext():
            try:
                return of + 1
            finally:
                of -= 1

    def caught(of: int) -> None:
        with lock:
            try:
                raise ValueError
            except ValueError:
                pass

    def left(of: int) -> None:
        for i in range(of):
            with lock:
                if i == 0:
                    continue
                break

    for function in (value, nothing, amid, tried, caught, left):
        for at in range(20):
            interrupts = LineInterrupts(at, inside=__file__)
            with contextlib.suppress(KeyboardInterrupt), interrupts.on():
                function(3)
            assert not lock.locked(), f"{function.__name__}, line {at}"
            assert sys.exc_info()[1] is None, f"{function.__name__}, line {at}"
        assert interrupts.count > 2


class Signals(Disturbance):
    """A real signal after a random time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self._modes = _get_current_function_mode_stack()

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        signal.setitimer(signal.ITIMER_REAL, self.seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def is_over(self) -> None:
        """torch sets the default device aside in many calls, and an interrupt there loses it (torch/overrides.py)."""
        while _len_torch_function_stack():
            _pop_torch_function_stack()
        for mode in self._modes:
            _push_on_torch_function_stack(mode)


def test_real_signals_in_training_are_all_or_nothing(pair, request):
    """A handler that raises, as Python's own for Ctrl-C does, comes where the interpreter looks for signals."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    handler, draw = signal.signal(signal.SIGALRM, interrupt), random.Random(1)
    try:
        wanted = 1000 if request.config.getoption("--campaign") else 60
        disturbed = tried = 0
        while disturbed < wanted and tried < 20 * wanted:
            tried += 1
            disturbed += pair.run(lambda module, tried=tried: train(module, tried), Signals(draw.uniform(1e-5, 4e-3)))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    assert disturbed == wanted


def test_call_of_a_signal_handler_amid_another_is_refused_and_loses_nothing(tmp_path):
    """It must not take the change that it interrupts for one that was interrupted."""
    module, twin = make(), make(capacity=1.0)
    refused = []

    def save(*_: object) -> None:
        try:
            module.save_checkpoint(str(tmp_path / "saved"))
        except StorageError as error:
            refused.append(str(error))

    handler, draw = signal.signal(signal.SIGALRM, save), random.Random(2)
    try:
        for number in range(300):
            signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-5, 1e-3))
            train(module, number)
            signal.setitimer(signal.ITIMER_REAL, 0)
            train(twin, number)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    assert refused
    assert all("amid another call" in text for text in refused)
    assert same(contents(module), contents(twin))


class Calling(LineInterrupts):
    """Calls `handler` before a line, as Python does where a signal has come."""

    def __init__(self, at: int | None = None, handler: Callable[[], object] = int) -> None:
        super().__init__(at)
        self._handler = handler

    def _line(self, frame: Any, event: str, arg: Any) -> Any:
        if event != "line" or not self.hit():
            return self._line
        sys.settrace(None)
        self._handler()
        return None


@pytest.mark.parametrize("differentiable", [True, False])
def test_step_of_a_signal_handler_amid_a_forward_is_taken_or_refused(differentiable):
    """Before any line: rows are those of a twin that takes the step, or does not."""
    module, twin, taken = make(), make(capacity=1.0), 0
    refused: list[str] = []

    def handler() -> None:
        nonlocal taken
        with torch.enable_grad():
            try:
                train(module, number)
            except StorageError as error:
                refused.append(str(error))
            else:
                train(twin, number)
                taken += 1

    def forward_alone() -> None:
        with torch.set_grad_enabled(differentiable):
            module(*batch(number + 1 + number % 3))

    number = 0
    counting = Calling()
    for _ in range(3):
        handler()
        forward_alone()
    with counting.on():
        forward_alone()
    for number in range(counting.count):
        with Calling(number, handler).on():
            forward_alone()
        assert same(contents(module), contents(twin)), f"before line {number}"
    assert taken
    assert refused
    assert all("amid another call" in text for text in refused)


def test_update_of_a_file_whose_close_was_interrupted_marks_it(tmp_path, monkeypatch):
    """The forward came before, so that no plan marks the file again."""
    path = tmp_path / "rows"
    bag = te.TieredEmbeddingBag(40, 4, capacity=40, storage=te.File(str(path)), optimizer=te.SGD(lr=1.0))
    out = bag(torch.arange(9)[None]).sum()

    def interrupt() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(bag.tables.groups[0].cache, "close", interrupt)
        with pytest.raises(KeyboardInterrupt):
            bag.close()
    out.backward()
    shutil.copy(path, tmp_path / "crashed")
    with pytest.raises(UncleanFileError):
        te.TieredEmbeddingBag(40, 4, storage=te.File(str(tmp_path / "crashed")), optimizer=te.SGD(lr=1.0))
    bag.close()


def test_update_after_the_close_is_refused(device):
    bag = te.TieredEmbeddingBag(40, 4, capacity=40, optimizer=te.SGD(lr=1.0))
    out = bag(torch.arange(9)[None]).sum()
    bag.close()
    with pytest.raises(StorageError, match="was closed"):
        out.backward()


def test_update_of_a_broken_cache_says_so(device, monkeypatch):
    bag = te.TieredEmbeddingBag(40, 4, capacity=40, optimizer=te.SGD(lr=1.0))
    out = bag(torch.arange(9)[None]).sum()
    with monkeypatch.context() as patched:
        patched.setattr(bag.tables, "_write_weight", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            bag.load_state_dict(bag.state_dict())
    with pytest.raises(BrokenCacheError):
        out.backward()


def test_close_beside_training_leaves_a_clean_file(tmp_path):
    """Nothing comes between the mark and the end."""
    for number in range(20):
        path = str(tmp_path / f"rows{number}")
        module = make(te.File(path))
        train(module, 0)

        def steps(module: Any = module) -> None:
            with contextlib.suppress(StorageError):
                for step in range(10_000):
                    train(module, step)

        thread = threading.Thread(target=steps)
        thread.start()
        module.close()
        thread.join()
        make(te.File(path)).close()  # clean, or it would be refused


def test_interrupt_where_a_history_gets_more_room(device, monkeypatch):
    """Of a dense optimizer's steps, before every line of the file that keeps them on the host."""
    if device == "cuda":
        pytest.skip("a GPU keeps its steps by a kernel, and makes room between steps")
    monkeypatch.setattr("tieredemb.lookup.history._FIRST_CAPACITY", 4)
    inside = PACKAGE + "lookup/history.py"

    def made() -> Any:
        module = make(optimizer=te.Adam(lr=0.01))
        for number in range(3):
            train(module, number)
        return module

    with torch.autograd.set_multithreading_enabled(False):
        counting, twin = LineInterrupts(inside=inside), made()
        with counting.on():
            train(twin, 0)
        train(twin, 1)
        assert counting.count > 20
        for at in range(counting.count):
            module, interrupts = made(), LineInterrupts(at, inside=inside)
            with contextlib.suppress(KeyboardInterrupt), interrupts.on():
                train(module, 0)
            module.flush()  # which ends a step that has begun
            if module.tables.groups[0].steps[0] < 4:
                train(module, 0)
            train(module, 1)
            assert same(contents(module), contents(twin)), vars(interrupts)
