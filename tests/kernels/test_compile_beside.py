"""Kernels of updates are compiled by a fork of the process that needs them: what comes of that, of one that is killed,
and what is left of it. Each in a process of its own, with nothing compiled."""

from __future__ import annotations

import functools
import itertools
import json
import os
import shutil
import textwrap
import time
from pathlib import Path

import forks
import numpy as np
import pytest
import torch
from numba import typeof

import tieredemb as te
from tieredemb.kernels import compile_beside
from tieredemb.kernels.parallel_cpu import Pass
from tieredemb.lookup.history import History
from tieredemb.lookup.optimizer_cpu import update_calls

ROOT = Path(__file__).parents[2]

PROLOGUE = """
    import json, os, signal, sys
    import torch
    from numba.core import event
    import tieredemb as te
    from tieredemb.kernels import compile_beside as beside

    compiled = []

    class Listener(event.Listener):
        def on_start(self, each):
            function = each.data["dispatcher"].py_func
            if function.__module__.startswith("tieredemb.lookup.optimizers"):
                compiled.append(function.__name__)
        def on_end(self, each): pass

    event.register("numba:compile", Listener())
    forked = []
    fork = os.fork

    def counted():
        pid = fork()
        if pid:
            forked.append(pid)
        return pid

    os.fork = counted
    os.sched_getaffinity = lambda _: {0, 1}

    def trained(bag):
        for _ in range(3):
            bag(torch.arange(40).view(8, 5)).square().sum().backward()
        return [round(x, 6) for x in bag.state_dict()["weight"].flatten().tolist()]

    def made():
        return te.TieredEmbeddingBag(100, 2, mode="sum", capacity=50, optimizer=te.SGD(lr=0.01), seed=1)
"""


def ran(script, cache, **environment):
    """The last line that a script prints, as JSON, and all that it did."""
    done = forks.run(
        textwrap.dedent(PROLOGUE) + textwrap.dedent(script), timeout=240, base=forks.TORCH,
        env=os.environ | {"PYTHONPATH": str(ROOT), "NUMBA_CACHE_DIR": str(cache)} | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done


TRAIN = """
    rows = trained(made())
    print(json.dumps([compiled, len(forked), rows]))
"""


@pytest.fixture(scope="module")
def forwards(tmp_path_factory):
    """A folder where all kernels are compiled but those of updates, and the rows that a training without a fork has."""
    cache = tmp_path_factory.mktemp("kernels")
    (compiled, forks, rows), _ = ran(TRAIN, cache, TIEREDEMB_COMPILE_BESIDE="0")
    assert compiled[0] == "segments_update"
    assert forks == 0
    for path in cache.rglob("sgd_cpu.segments_update*"):
        path.unlink()
    return cache, rows


@pytest.fixture
def run(forwards, tmp_path):
    cache = tmp_path / "kernels"
    shutil.copytree(forwards[0], cache)
    return functools.partial(ran, cache=cache)


@pytest.fixture
def expected(forwards):
    return forwards[1]


def test_a_fork_compiles_the_update_and_this_process_finds_it(run, expected):
    (compiled, forks, rows), done = run(TRAIN)
    assert (compiled, forks, rows) == ([], 1, expected)
    assert done.stderr.count("compiling CPU kernels") == 1  # for the one that was waited for, and the fork is silent
    (compiled, forks, rows), done = run(TRAIN)
    assert (compiled, forks, rows) == ([], 0, expected)
    assert done.stderr == ""


FAILING = {
    "killed at work": """
        states[0] = beside.AT_WORK
        os._exit(1)
    """,
    "not begun": "os._exit(0)",
    "not coming on": """
        states[0] = beside.AT_WORK
        if not fork():
            os.closerange(0, 3)
            beside.select.poll().poll(20_000)
        os._exit(0)
    """,
}


@pytest.mark.parametrize("work", FAILING.values(), ids=FAILING)
def test_what_a_fork_does_not_bring_is_compiled_here(run, expected, work):
    body = textwrap.indent(textwrap.dedent(work).strip(), "    ")
    script = f"beside.PATIENCE = 1.0\ndef fails(wanted, states, told):\n{body}\nbeside._compile_all = fails\n"
    (compiled, forks, rows), _ = run(script + textwrap.dedent(TRAIN))
    assert forks == 1
    assert compiled[0] == "segments_update"
    assert rows == expected


def test_where_no_process_can_be_had_kernels_are_compiled_here(run, expected):
    (compiled, _, rows), _ = run(
        """
        def none():
            raise BlockingIOError(11, "Resource temporarily unavailable")
        os.fork = none
        before = set(os.listdir("/proc/self/fd"))
        rows = trained(made())
        assert set(os.listdir("/proc/self/fd")) == before
        print(json.dumps([compiled, 0, rows]))
        """
    )
    assert compiled[0] == "segments_update"
    assert rows == expected


def test_a_fork_leaves_nothing_and_ends_nothing_of_its_parent(run, tmp_path):
    """No child, no open file; what the parent has to do for its objects and at its end it does once."""
    marks = tmp_path / "ended"
    found, _ = run(
        f"""
        import atexit, gc, weakref
        gc.disable()
        class Held: pass
        held = Held()
        held.itself = held
        def note(what):
            with open({str(marks)!r}, "a") as file:
                file.write(what)
        weakref.finalize(held, note, "c")
        atexit.register(note, "e")
        del held
        before = set(os.listdir("/proc/self/fd"))
        trained(made())
        try:
            os.waitpid(-1, os.WNOHANG)
            has_child = True
        except ChildProcessError:
            has_child = False
        print(json.dumps([has_child, len(set(os.listdir("/proc/self/fd")) - before)]))
        """
    )
    assert found == [False, 0]
    assert sorted(marks.read_text()) == ["c", "e"]


def test_a_process_that_ends_early_does_not_wait_for_its_fork(run):
    """Nor does who reads its output, which the fork has closed."""
    script = """
        from numba.core.dispatcher import Dispatcher
        compile, parent = Dispatcher.compile, os.getpid()
        def slow(self, kinds):
            if os.getpid() != parent:
                beside.select.poll().poll(20_000)
                os._exit(0)
            return compile(self, kinds)
        Dispatcher.compile = slow
        made()
        print(json.dumps(len(forked)))
    """
    start = time.monotonic()
    forks, done = run(script)
    assert (forks, done.stderr) == (1, "")
    assert time.monotonic() - start < 20


def test_a_forked_child_of_the_user_takes_none_of_its_parents_news(run, expected):
    (status, compiled, rows), _ = run(
        """
        bag = made()
        from tieredemb.lookup.optimizers.sgd_cpu import segments_update
        [kinds] = [kinds for kernel, kinds in beside._known if kernel is segments_update]
        child = fork()
        if child == 0:
            segments_update.compile(kinds)  # finds it, or compiles it
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        compiled.clear()
        print(json.dumps([status, compiled, trained(bag)]))
        """
    )
    assert (status, compiled, rows) == (0, [], expected)


@pytest.mark.parametrize(("affinity", "processes", "switch", "may"), [
    (2, "1", "1", True), (1, "1", "1", False), (8, "8", "1", False), (8, "4", "1", True), (2, "1", "0", False),
])  # fmt: skip
def test_a_fork_takes_a_core_that_is_left(monkeypatch, affinity, processes, switch, may):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(affinity)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    monkeypatch.setenv("TIEREDEMB_COMPILE_BESIDE", switch)
    assert compile_beside._may_fork() == may


OPTIMIZERS = [te.SGD(lr=0.1), te.SGD(lr=0.1, momentum=0.9), te.Adam(lr=0.1), te.AdamW(lr=0.1), te.Adagrad(lr=0.1),
              te.SparseAdam(lr=0.1), te.RowWiseAdagrad(lr=0.1), te.SparseLion(lr=0.1)]  # fmt: skip
FORMATS = [{}, {"dtype": torch.bfloat16}, {"dtype": torch.float16, "rounding": "stochastic"}]


@pytest.mark.parametrize(("optimizer", "rows"), [*zip(OPTIMIZERS, itertools.cycle(FORMATS), strict=False)], ids=repr)
def test_what_is_compiled_beside_is_what_updates_call(monkeypatch, optimizer, rows):
    """The same kernels for the same types: others would be compiled for nothing."""
    bag = te.TieredEmbeddingBag(100, 4, mode="sum", capacity=50, optimizer=optimizer, device="cpu", **rows)
    group = bag.tables.groups[0]
    foreseen = update_calls(group.cache.hot, group.space, optimizer, group.kept, group.rounding(group.cache.hot.key))
    called = []

    def heard(one_pass):
        kernel, args = one_pass.call
        called.append((kernel, tuple(map(typeof, args))))
        run(one_pass)

    append, run = History.append_call, Pass.run
    appended = []
    monkeypatch.setattr(Pass, "run", heard)
    monkeypatch.setattr(History, "append_call", lambda *given: appended.append(append(*given)) or appended[-1])
    for _ in range(2):
        bag(torch.arange(40).view(8, 5)).square().sum().backward()
    called += [(kernel, tuple(map(typeof, args))) for kernel, args in appended]
    assert len(foreseen) == (3 if group.kept is not None else 1)
    for kernel, args in foreseen:
        assert (kernel, tuple(map(typeof, args))) in called
    assert np.isfinite(bag.state_dict()["weight"].float().numpy()).all()
