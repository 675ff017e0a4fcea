"""Kernels over ranges: on helpers, amid an interrupt, in a thread that ends, after a fork, beside each other."""

from __future__ import annotations

import gc
import os
import threading
import time

import numpy as np
import pytest
import torch

from tieredemb.kernels import helpers_cpu
from tieredemb.kernels.native import atomic_add, atomic_load, sleep_microseconds
from tieredemb.kernels.parallel_cpu import Pass, even_bounds, over_ranges, parallel_for

BOUNDS = [0, 10, 20, 20, 30, 40]


@pytest.fixture(autouse=True)
def _four_threads():
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(threads)


@over_ranges
def ranges_note(lo, hi, runs, begins, pair):
    """Counts the runs of each element, and notes where its range begins."""
    first, factor = pair
    for i in range(lo, hi):
        runs[i] += 1
        begins[i] = first + factor * lo


@over_ranges
def ranges_meet(lo, hi, address, expected, met):
    """Each range waits until all of them are at work."""
    here = atomic_add(address, 1) + 1
    looks = 0
    while here < expected and looks < 30_000:
        sleep_microseconds(np.uint32(1000))
        here = atomic_load(address)
        looks += 1
    met[lo] = here


@over_ranges
def ranges_fail(lo, hi, runs, failing):
    if lo == failing[0]:
        raise MemoryError
    runs[lo] += 1


def noted(bounds: list[int]) -> tuple[np.ndarray, np.ndarray]:
    runs, begins = np.zeros(bounds[-1], np.int64), np.zeros(bounds[-1], np.int64)
    parallel_for(ranges_note, bounds, runs, begins, (3, 2))
    return runs, begins


def helpers() -> int:
    return sum(thread.name == "tieredemb-helper" for thread in threading.enumerate())


@pytest.mark.parametrize("bounds", [[0, 1], [0, 0, 7], BOUNDS, list(range(0, 5001, 5))], ids=len)
def test_each_range_is_run_once_and_told_where_it_begins(bounds):
    for _ in range(200):
        runs, begins = noted(bounds)
        assert (runs == 1).all()
        expected = np.repeat(bounds[:-1], np.diff(bounds))
        np.testing.assert_array_equal(begins, 3 + 2 * expected)


def test_nothing_is_run_over_no_ranges():
    for bounds in ([0], [0, 0]):
        runs, _ = noted(bounds)
        assert len(runs) == 0


def test_helpers_work_at_the_same_time():
    for _ in range(5):
        count, met = np.zeros(1, np.int64), np.zeros(40, np.int64)
        parallel_for(ranges_meet, [0, 10, 20, 30, 40], count.ctypes.data, 4, met)
        assert met[[0, 10, 20, 30]].tolist() == [4, 4, 4, 4]


def test_one_thread_calls_nobody(monkeypatch):
    monkeypatch.setattr(helpers_cpu, "_boards", helpers_cpu._Boards())
    torch.set_num_threads(1)
    before = helpers()
    assert (noted(BOUNDS)[0] == 1).all()
    assert even_bounds(1_000_000, 1) == [0, 1_000_000]
    assert helpers() == before


@pytest.mark.parametrize(("n", "grain", "ranges"), [(0, 4, 1), (7, 4, 1), (8, 4, 2), (65, 4, 16), (10**6, 4, 16)])
def test_bounds_are_even_and_no_finer_than_the_grain(n, grain, ranges):
    bounds = even_bounds(n, grain)
    assert (bounds[0], bounds[-1], len(bounds)) == (0, n, ranges + 1)
    sizes = np.diff(bounds)
    assert sizes.max() - sizes.min() <= 1
    assert ranges == 1 or sizes.min() >= grain


def test_a_range_that_fails_is_told_and_the_others_are_run():
    runs = np.zeros(40)
    with pytest.raises(MemoryError, match="a CPU kernel did not get the memory"):
        parallel_for(ranges_fail, BOUNDS, runs, np.array([10]))
    assert runs[[0, 10, 20, 30]].tolist() == [1, 0, 1, 1]


def test_a_pass_goes_on_with_what_is_left():
    runs, failing = np.zeros(40), np.array([30])
    rows = Pass(ranges_fail, BOUNDS, runs, failing)
    assert not rows.begun
    with pytest.raises(MemoryError):
        rows.run()
    assert rows.begun
    failing[0] = -1
    rows.run()
    rows.run()
    assert runs[[0, 10, 20, 30]].tolist() == [1, 1, 1, 1]


def test_threads_beside_each_other_have_helpers_of_their_own():
    wrong = []

    def work() -> None:
        for _ in range(300):
            runs, begins = noted(BOUNDS)
            wrong.extend(runs[runs != 1])
            if begins[39] != 3 + 2 * 30:
                wrong.append(begins[39])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_helpers_end_with_the_thread_that_they_help():
    gc.collect()
    before = helpers()
    while (time.sleep(0.2), helpers())[1] != before:  # those of threads of other tests are ending
        before = helpers()
    during = []

    def work() -> None:
        noted(BOUNDS)
        during.append(helpers())

    for _ in range(5):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert min(during) > before
    end = time.monotonic() + 10
    while helpers() > before and time.monotonic() < end:
        time.sleep(0.01)
    assert helpers() == before


def test_a_pass_may_be_ended_by_another_thread():
    runs, failing = np.zeros(40), np.array([10])
    rows = Pass(ranges_fail, BOUNDS, runs, failing)

    def begin() -> None:
        with pytest.raises(MemoryError):
            rows.run()

    first = threading.Thread(target=begin)
    first.start()
    first.join()
    failing[0] = -1
    rows.run()
    assert runs[[0, 10, 20, 30]].tolist() == [1, 1, 1, 1]


def test_a_forked_child_has_helpers_of_its_own():
    noted(BOUNDS)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = int(not (helpers() == 0 and (noted(BOUNDS)[0] == 1).all() and helpers() == 3))
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
