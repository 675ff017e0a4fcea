"""Passes over rows on several threads: what an interrupt leaves of them."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from tieredemb.kernels.cpu import Pass, parallel_for

BOUNDS = [0, 10, 20, 30, 40]


@pytest.fixture(autouse=True)
def _four_threads():
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(threads)


def test_parallel_for_returns_results_in_the_order_of_its_ranges():
    assert parallel_for(lambda lo, hi: (lo, hi), BOUNDS) == [(0, 10), (10, 20), (20, 30), (30, 40)]


def test_parallel_for_raises_what_a_thread_has_raised():
    def kernel(lo: int, hi: int) -> None:
        if lo == 10:
            raise MemoryError("planted")

    with pytest.raises(MemoryError, match="planted"):
        parallel_for(kernel, BOUNDS)


def test_interrupted_parallel_for_leaves_no_range_running():
    begun, running = threading.Event(), []

    def kernel(lo: int, hi: int) -> None:
        if lo == 30:  # this thread's
            assert begun.wait(10)
            raise KeyboardInterrupt
        running.append(lo)
        begun.set()
        time.sleep(0.05)
        running.remove(lo)

    with pytest.raises(KeyboardInterrupt):
        parallel_for(kernel, BOUNDS)
    assert running == []


def test_interrupted_pass_goes_on_with_what_is_left():
    runs: list[int] = []
    fails = [True]

    def kernel(lo: int, hi: int, done: object) -> None:
        if lo == 30 and fails:
            fails.clear()
            raise KeyboardInterrupt
        runs.append(lo)
        done[lo] = 1

    rows = Pass(kernel, BOUNDS)
    assert not rows.begun
    with pytest.raises(KeyboardInterrupt):
        rows.run()
    rows.run()
    rows.run()
    assert rows.begun
    assert sorted(runs) == [0, 10, 20, 30]  # each once
