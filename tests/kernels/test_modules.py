"""Compiled files: made once, by whoever asks first, or ahead of that on a thread."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tieredemb.kernels.modules import Modules

FLAGS = ("-DROW=1",)


class Compiler:
    """Compiles as long as it is told to; knows what, and on which threads."""

    def __init__(self):
        self.may_end, self.has_begun = threading.Event(), threading.Event()
        self.compiled, self.threads, self.error = [], [], None
        self.may_end.set()

    def __call__(self, file, flags, device, name):
        self.threads.append(threading.current_thread())
        self.has_begun.set()
        assert self.may_end.wait(60)
        if self.error is not None:
            raise self.error
        self.compiled.append((file, flags, device, name))
        return object()


@pytest.fixture
def compiler():
    return Compiler()


@pytest.fixture
def modules(compiler):
    made = Modules(compiler)
    yield made
    compiler.may_end.set()


def test_a_file_is_compiled_once_for_its_flags_and_a_device(modules, compiler):
    first = modules.get("a.cu", FLAGS, 0, "one")
    assert modules.get("a.cu", FLAGS, 0, "another") is first
    others = [modules.get(*key, "one") for key in (("b.cu", FLAGS, 0), ("a.cu", (), 0), ("a.cu", FLAGS, 1))]
    assert len({id(each) for each in (first, *others)}) == len(compiler.compiled) == 4
    assert compiler.threads == [threading.current_thread()] * 4


def test_what_was_begun_ahead_is_waited_for(modules, compiler):
    compiler.may_end.clear()
    modules.prepare("a.cu", FLAGS, 0, "one")
    assert compiler.has_begun.wait(60)
    with ThreadPoolExecutor(3) as pool:
        found = [pool.submit(modules.get, "a.cu", FLAGS, 0, "one") for _ in range(3)]
        assert not any(each.done() for each in found)
        compiler.may_end.set()
        assert len({each.result(60) for each in found}) == 1
    modules.prepare("a.cu", FLAGS, 0, "one")
    assert len(compiler.compiled) == 1
    assert compiler.threads[0] is not threading.current_thread()


def test_all_that_was_begun_can_be_waited_for(modules, compiler):
    for file in ("a.cu", "b.cu", "c.cu"):
        modules.prepare(file, FLAGS, 0, "one")
    modules.wait_for_begun()
    assert sorted(file for file, *_ in compiler.compiled) == ["a.cu", "b.cu", "c.cu"]
    compiler.error = ValueError("no such kernel")
    modules.prepare("d.cu", FLAGS, 0, "one")
    modules.wait_for_begun()  # who needs it finds out


def test_a_failure_is_raised_by_each_call_and_forgotten(modules, compiler):
    compiler.error = ValueError("no such kernel")
    for _ in range(2):
        with pytest.raises(ValueError, match="no such kernel"):
            modules.get("a.cu", FLAGS, 0, "one")
    compiler.error = None
    assert modules.get("a.cu", FLAGS, 0, "one") is not None


def test_who_waits_for_another_thread_is_told_of_its_failure(modules, compiler):
    compiler.may_end.clear()
    compiler.error = ValueError("no such kernel")
    modules.prepare("a.cu", FLAGS, 0, "one")
    assert compiler.has_begun.wait(60)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(modules.get, "a.cu", FLAGS, 0, "one")
        compiler.may_end.set()
        with pytest.raises(ValueError, match="no such kernel"):
            found.result(60)
