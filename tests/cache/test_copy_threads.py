"""Threads that copy rows between cold storage and buffers, without the interpreter."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from dataclasses import replace

import forks
import numpy as np
import pytest
import torch

from tieredemb.cache.device import copy_threads
from tieredemb.cache.device.copy_threads import MissReport
from tieredemb.cache.device.copy_threads_cpu import (
    ALONE,
    CHUNK,
    END,
    LINE,
    SLEEP,
    job_begin,
    job_finish,
    others_wake,
)
from tieredemb.cache.device.row_copies import RowCopies
from tieredemb.kernels.constants import REPORT_NUMBER, REPORT_WORDS
from tieredemb.storage.base import RowLayout
from tieredemb.storage.host import HostMemory

LAYOUT = RowLayout(rows=40_000, width=9, state_width=1)


@pytest.fixture
def threads():
    """Sets how many threads torch may use, and so how many copy rows."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def open_rows(layout=LAYOUT):
    """Rows all of whose words are their key plus 1."""
    cold = HostMemory().open(layout, name="", identity={})
    cold.weight[:] = np.arange(1, LAYOUT.rows + 1)[:, None]
    cold.state[:] = np.arange(1, LAYOUT.rows + 1)[:, None]
    return RowCopies(cold)


def room(rows, layout=LAYOUT):
    return torch.zeros(rows, layout.width), torch.zeros(rows, layout.state_width + 1, dtype=torch.int32)


@pytest.mark.parametrize("count", [2, 3, 8, 40])
@pytest.mark.parametrize("rows", [0, 1, ALONE, ALONE + 1, 11 * CHUNK, 11 * CHUNK + 1, 40_000])
@pytest.mark.parametrize("width", [9, 48])  # whole cache lines are copied otherwise
def test_every_row_is_copied_once_on_any_number_of_threads(threads, width, count, rows):
    threads(count)
    layout = replace(LAYOUT, width=width)
    copies = open_rows(layout)
    for seed in range(5):
        keys = torch.from_numpy(np.random.default_rng(seed).permutation(LAYOUT.rows)[:rows])
        weight, state = room(rows, layout)
        copies.gather(keys, weight, state)
        assert (weight == (keys + 1)[:, None]).all()
        assert (state == (keys + 1)[:, None]).all()
        copies.scatter(keys, -weight, state + 7, torch.ones(rows, dtype=torch.uint8))
        copies.finish()
        others = np.setdiff1d(np.arange(LAYOUT.rows), keys)
        assert (copies.cold.weight[keys] == -(keys + 1).numpy()[:, None]).all()
        assert (copies.cold.state[keys] == (keys + 8).numpy()[:, None]).all()
        assert (copies.cold.weight[others] == others[:, None] + 1).all()
        copies.scatter(keys, weight, state, torch.ones(rows, dtype=torch.uint8))


def test_rows_being_written_are_there_for_whoever_asks_next(threads):
    threads(3)
    copies, keys, dirty = open_rows(), torch.arange(0, LAYOUT.rows, 2), torch.ones(LAYOUT.rows // 2, dtype=torch.uint8)
    for turn in range(2, 12):
        weight, state = room(len(keys))
        copies.scatter(keys, weight + turn, state + turn, dirty)
        if turn % 3 == 0:
            copies.finish()
            assert (copies.cold.weight[keys] == turn).all()
        elif turn % 3 == 1:
            copies.scatter(keys[:5] + 1, weight[:5] - turn, state[:5] + turn, dirty[:5])
            assert (copies.cold.weight[keys] == turn).all()
            copies.finish()
            assert (copies.cold.weight[keys[:5] + 1] == -turn).all()
        some = room(7)
        copies.gather(keys[-7:], *some)
        assert (some[0] == turn).all()
        assert (some[1] == turn).all()


def test_jobs_of_many_threads_are_done_one_by_one(threads):
    threads(6)
    copies, wrong = open_rows(), []

    def move(seed):
        random = np.random.default_rng(seed)
        for _ in range(60):
            keys = torch.from_numpy(random.permutation(LAYOUT.rows)[: random.integers(0, 6000)])
            weight, state = room(len(keys))
            copies.gather(keys, weight, state)
            if not ((weight == (keys + 1)[:, None]).all() and (state == (keys + 1)[:, None]).all()):
                wrong.append(seed)

    threads_of_test = [threading.Thread(target=move, args=(seed,)) for seed in range(5)]
    for thread in threads_of_test:
        thread.start()
    for thread in threads_of_test:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads_of_test)
    assert wrong == []


class Report:
    """What a GPU would report of `keys`, and the event that comes after it."""

    def __init__(self, keys, number=1):
        self.keys, self.came = keys, threading.Event()
        self.miss_report = MissReport(torch.zeros(REPORT_WORDS + LAYOUT.rows, dtype=torch.int64), number, self)

    def comes(self):
        words = self.miss_report.words
        words[REPORT_WORDS : REPORT_WORDS + len(self.keys)] = self.keys
        words[0] = len(self.keys)
        words[REPORT_NUMBER] = self.miss_report.number
        self.came.set()

    def query(self):
        return self.came.is_set()

    def synchronize(self):
        assert self.came.wait(20)


def wait_for(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.parametrize("count", [1, 2, 8])
@pytest.mark.parametrize("rows", [0, 1, CHUNK, 9000])
def test_rows_are_gathered_as_soon_as_they_are_reported(threads, count, rows):
    """By nobody who holds the interpreter, where there are other threads."""
    threads(count)
    copies = open_rows()
    for number in range(1, 6):
        keys = torch.from_numpy(np.random.default_rng(number).permutation(LAYOUT.rows)[:rows])
        report, (weight, state) = Report(keys, number), room(9000)
        begun = copies.gather_when_reported(report.miss_report, weight, state)
        assert begun
        time.sleep(0.002 * number)
        assert not weight.any()
        report.comes()
        if count > 1 and rows >= CHUNK:
            wait_for(lambda weight=weight, state=state: weight[:rows].all() and state[:rows].all())
        copies.gather(keys, weight[:rows], state[:rows], begun=begun)
        assert (weight[:rows] == (keys + 1)[:, None]).all()
        assert (state[:rows] == (keys + 1)[:, None]).all()
        assert not weight[rows:].any()


def test_reported_rows_that_have_no_room_are_not_gathered(threads):
    threads(3)
    copies, report, (weight, state) = open_rows(), Report(torch.arange(501)), room(500)
    assert copies.gather_when_reported(report.miss_report, weight, state)
    report.comes()
    copies.finish()
    assert not weight.any()
    assert not state.any()


def test_rows_are_written_before_reported_ones_are_gathered(threads):
    threads(3)
    copies, keys, dirty = open_rows(), torch.arange(8000), torch.ones(8000, dtype=torch.uint8)
    for number in range(1, 20):
        report, (weight, state) = Report(keys, number), room(8000)
        copies.scatter(keys, weight + number, state + number, dirty)
        report.comes()
        copies.gather(keys, weight, state, begun=copies.gather_when_reported(report.miss_report, weight, state))
        assert (weight == number).all()


def test_one_report_is_waited_for_at_a_time(threads):
    threads(3)
    first, second = Report(torch.arange(700)), Report(torch.arange(700, 1400))
    copies, other, (weight, state), some = open_rows(), open_rows(), room(700), room(700)
    assert copies.gather_when_reported(first.miss_report, weight, state)
    assert not other.gather_when_reported(second.miss_report, *some)
    first.comes()
    assert other.gather_when_reported(second.miss_report, *some)
    assert (weight == torch.arange(1, 701)[:, None]).all()  # that one is over
    second.comes()
    other.finish()
    assert (some[0] == torch.arange(701, 1401)[:, None]).all()


def test_a_report_that_has_yet_to_come_is_given_up_for_the_next_job(threads):
    """And its rows are gathered when they are needed: no job waits for another's GPU, nor for one that has failed."""
    threads(3)
    copies, other, keys = open_rows(), open_rows(), torch.arange(900)
    for number in range(1, 40):
        report, (weight, state), some = Report(keys, number), room(900), room(900)
        begun = copies.gather_when_reported(report.miss_report, weight, state)
        other.gather(keys + 9, *some)
        assert not begun.is_done
        assert (some[0] == torch.arange(10, 910)[:, None]).all()
        report.comes()
        copies.gather(keys, weight, state, begun=begun)
        assert (weight == torch.arange(1, 901)[:, None]).all()


@pytest.mark.parametrize("comes", [False, True])
def test_a_reported_gather_does_not_wait_for_rows_being_written(threads, monkeypatch, comes):
    """The thread that waits for its report does, and the job before is done where it is given up, too."""
    threads(3)
    copies, keys, dirty = open_rows(), torch.arange(8000), torch.ones(8000, dtype=torch.uint8)
    finish, waited = copy_threads.job_finish, []
    monkeypatch.setattr(copy_threads, "job_finish", lambda board: waited.append(board) or finish(board))
    for number in range(1, 20):
        report, (weight, state) = Report(keys, number), room(8000)
        copies.scatter(keys, weight + number, state + number, dirty)
        waited.clear()
        begun = copies.gather_when_reported(report.miss_report, weight, state)
        assert not waited
        if comes:
            report.comes()
            wait_for(lambda weight=weight, number=number: (weight == number).all())
        copies.finish()
        assert begun.is_done == comes
        assert (copies.cold.weight[:8000] == number).all()


@pytest.mark.parametrize("opens", [False, True])
def test_a_wait_for_a_report_that_was_interrupted_takes_no_other_job_for_its_own(threads, monkeypatch, opens):
    """Rows that were being written are no rows that were gathered."""
    threads(3)
    copies, keys, dirty = open_rows(), torch.arange(8000), torch.ones(8000, dtype=torch.uint8)
    report, (weight, state) = Report(keys), room(8000)
    copies.scatter(keys, weight + 5, state + 5, dirty)
    wait, found = copy_threads.job_await, []

    def interrupted(board):
        found.append(copy_threads.copy_threads()._job)
        if opens:
            wait(board)
        raise KeyboardInterrupt

    monkeypatch.setattr(copy_threads, "job_await", interrupted)
    with pytest.raises(KeyboardInterrupt):
        copies.gather_when_reported(report.miss_report, weight, state)
    report.comes()
    copies.finish()
    assert found[0].is_done == opens
    copies.gather(keys, weight, state, begun=found[0])
    assert (weight == 5).all()


def test_waiting_for_a_report_ends_with_it_or_with_the_error_of_the_gpu():
    report = Report(torch.arange(3))
    comes = threading.Timer(0.05, report.comes)
    comes.start()
    report.miss_report.wait()
    assert report.came.is_set()
    assert report.miss_report.is_there
    failed = Report(torch.arange(3))
    failed.query = raises
    assert not failed.miss_report.is_there
    with pytest.raises(RuntimeError, match="illegal memory access"):
        failed.miss_report.wait()


def raises():
    raise RuntimeError("an illegal memory access")


def test_one_thread_is_woken_up_for_a_job_and_wakes_up_the_others():
    """Whoever begins a job goes on at once."""
    memory = np.zeros((END + LINE) // 8, np.int64)
    board, c = -(-memory.ctypes.data // LINE) * LINE, ctypes.CDLL(None)
    sleeping = ctypes.c_void_p(board + SLEEP)
    assert c.sem_init(sleeping, 0, 0) == 0

    def woken():
        value = ctypes.c_int()
        c.sem_getvalue(sleeping, ctypes.byref(value))
        return value.value

    job_begin(board, 5)
    assert woken() == 1
    others_wake(board)
    assert woken() == 5
    others_wake(board)
    assert woken() == 5
    job_finish(board)
    job_begin(board, 5)
    job_finish(board)  # with all of it done, nobody need wake up
    others_wake(board)
    assert woken() == 6


def test_a_report_of_a_later_number_ends_the_wait(threads):
    threads(3)
    copies, report, (weight, state) = open_rows(), Report(torch.arange(5)), room(900)
    assert copies.gather_when_reported(report.miss_report, weight, state)
    report.miss_report.words[REPORT_NUMBER] = 2
    report.came.set()
    done = threading.Thread(target=copies.finish, daemon=True)
    done.start()
    done.join(20)
    assert not done.is_alive()


def test_a_finaliser_amid_a_job_copies_its_own_rows(threads, monkeypatch):
    """The garbage collector may close a module whenever Python runs, and so write its rows back."""
    threads(3)
    copies, other, keys = open_rows(), open_rows(), torch.arange(5000)
    begin, turns = copy_threads.job_begin, []

    def collects(*job):
        if not turns:
            turns.append(job)
            other.scatter(keys, *(part + 3 for part in room(5000)), torch.ones(5000, dtype=torch.uint8))
            other.finish()
        begin(*job)

    monkeypatch.setattr(copy_threads, "job_begin", collects)
    weight, state = room(5000)
    gathers = threading.Thread(target=lambda: copies.gather(keys, weight, state), daemon=True)
    gathers.start()
    gathers.join(30)
    assert not gathers.is_alive()
    assert (weight == (keys + 1)[:, None]).all()
    assert (other.cold.weight[:5000] == 3).all()


@pytest.mark.parametrize("first", [False, True])
def test_a_finaliser_as_a_job_ends_copies_its_own_rows(threads, monkeypatch, first):
    threads(3)
    copies, other, dirty = open_rows(), open_rows(), torch.ones(9, dtype=torch.uint8)
    ends, turns = copy_threads.job_finish, []

    def collects():
        if not turns:
            turns.append(True)
            other.scatter(torch.arange(9), *(part + 3 for part in room(9)), dirty)
            other.finish()

    def finish(board):
        if first:
            collects()
        done = ends(board)
        if not first:
            collects()
        return done

    monkeypatch.setattr(copy_threads, "job_finish", finish)
    weight, state = room(900)
    copies.gather(torch.arange(900), weight, state)
    assert turns
    assert (weight == torch.arange(1, 901)[:, None]).all()
    assert (other.cold.weight[:9] == 3).all()
    report, (weight, state) = Report(torch.arange(700)), room(700)
    begun = copies.gather_when_reported(report.miss_report, weight, state)
    report.comes()
    turns.clear()
    copies.gather(torch.arange(700), weight, state, begun=begun)
    assert begun.is_done
    assert (weight == torch.arange(1, 701)[:, None]).all()


def test_a_forked_child_has_threads_of_its_own(threads):
    threads(3)
    copies, keys = open_rows(), torch.arange(20_000)
    copies.gather(keys, *room(20_000))
    weight, state = room(20_000)
    child = os.fork()
    if child == 0:  # torch's own threads are lost here, so numpy compares
        copies.gather(keys, weight, state)
        os._exit(0 if (weight.numpy() == (keys.numpy() + 1)[:, None]).all() else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_the_process_ends_while_threads_sleep():
    code = (
        "import torch\nfrom tieredemb.cache.device.copy_threads import copy_threads\n"
        "from tieredemb.cache.device.row_copies import RowCopies\n"
        "from tieredemb.storage.base import RowLayout\nfrom tieredemb.storage.host import HostMemory\n"
        "torch.set_num_threads(6)\ncold = HostMemory().open(RowLayout(rows=9000, width=4), name='', identity={})\n"
        "weight, state = torch.zeros(9000, 4), torch.zeros(9000, 1, dtype=torch.int32)\n"
        "RowCopies(cold).gather(torch.arange(9000), weight, state)\n"
        "assert copy_threads()._helpers == 3\nprint('done')"
    )
    run = forks.run(code)
    assert (run.returncode, run.stdout) == (0, "done\n")
