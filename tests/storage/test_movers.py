"""Threads that move rows between cold storage and buffers, without the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from tieredemb.kernels.constants import TOLD_NUMBER, TOLD_WORDS
from tieredemb.storage import movers
from tieredemb.storage.base import RowLayout, Told
from tieredemb.storage.host import HostMemory
from tieredemb.storage.movers_cpu import ALONE, CHUNK

LAYOUT = RowLayout(rows=40_000, width=9, state_width=1)


@pytest.fixture
def threads():
    """Sets how many threads torch may use, and so how many move rows."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def open_rows(layout=LAYOUT):
    """Rows all of whose words are their key plus 1."""
    cold = HostMemory().open(layout, name="", identity={})
    cold.weight[:] = np.arange(1, LAYOUT.rows + 1)[:, None]
    cold.state[:] = np.arange(1, LAYOUT.rows + 1)[:, None]
    return cold


def room(rows, layout=LAYOUT):
    return torch.zeros(rows, layout.width), torch.zeros(rows, layout.state_width + 1, dtype=torch.int32)


@pytest.mark.parametrize("count", [2, 3, 8, 40])
@pytest.mark.parametrize("rows", [0, 1, ALONE, ALONE + 1, 11 * CHUNK, 11 * CHUNK + 1, 40_000])
@pytest.mark.parametrize("width", [9, 48])  # whole cache lines are copied otherwise
def test_every_row_moves_once_on_any_number_of_threads(threads, width, count, rows):
    threads(count)
    layout = replace(LAYOUT, width=width)
    cold = open_rows(layout)
    for seed in range(5):
        keys = torch.from_numpy(np.random.default_rng(seed).permutation(LAYOUT.rows)[:rows])
        weight, state = room(rows, layout)
        cold.gather(keys, weight, state)
        assert (weight == (keys + 1)[:, None]).all()
        assert (state == (keys + 1)[:, None]).all()
        cold.scatter(keys, -weight, state + 7, torch.ones(rows, dtype=torch.uint8))
        cold.finish()
        others = np.setdiff1d(np.arange(LAYOUT.rows), keys)
        assert (cold.weight[keys] == -(keys + 1).numpy()[:, None]).all()
        assert (cold.state[keys] == (keys + 8).numpy()[:, None]).all()
        assert (cold.weight[others] == others[:, None] + 1).all()
        cold.scatter(keys, weight, state, torch.ones(rows, dtype=torch.uint8))


def test_rows_being_written_are_there_for_whoever_asks_next(threads):
    threads(3)
    cold, keys, dirty = open_rows(), torch.arange(0, LAYOUT.rows, 2), torch.ones(LAYOUT.rows // 2, dtype=torch.uint8)
    for turn in range(2, 12):
        weight, state = room(len(keys))
        cold.scatter(keys, weight + turn, state + turn, dirty)
        if turn % 3 == 0:
            cold.finish()
            assert (cold.weight[keys] == turn).all()
        elif turn % 3 == 1:
            cold.scatter(keys[:5] + 1, weight[:5] - turn, state[:5] + turn, dirty[:5])
            assert (cold.weight[keys] == turn).all()
            cold.finish()
            assert (cold.weight[keys[:5] + 1] == -turn).all()
        some = room(7)
        cold.gather(keys[-7:], *some)
        assert (some[0] == turn).all()
        assert (some[1] == turn).all()


def test_jobs_of_many_threads_are_done_one_by_one(threads):
    threads(6)
    cold, wrong = open_rows(), []

    def move(seed):
        random = np.random.default_rng(seed)
        for _ in range(60):
            keys = torch.from_numpy(random.permutation(LAYOUT.rows)[: random.integers(0, 6000)])
            weight, state = room(len(keys))
            cold.gather(keys, weight, state)
            if not ((weight == (keys + 1)[:, None]).all() and (state == (keys + 1)[:, None]).all()):
                wrong.append(seed)

    movers_of_test = [threading.Thread(target=move, args=(seed,)) for seed in range(5)]
    for thread in movers_of_test:
        thread.start()
    for thread in movers_of_test:
        thread.join(60)
    assert not any(thread.is_alive() for thread in movers_of_test)
    assert wrong == []


class Word:
    """What a GPU would tell of `keys`, and the event that comes after it."""

    def __init__(self, keys, number=1):
        self.keys, self.came = keys, threading.Event()
        self.told = Told(torch.zeros(TOLD_WORDS + LAYOUT.rows, dtype=torch.int64), number, self)

    def comes(self):
        words = self.told.words
        words[TOLD_WORDS : TOLD_WORDS + len(self.keys)] = self.keys
        words[0] = len(self.keys)
        words[TOLD_NUMBER] = self.told.number
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
def test_rows_are_gathered_as_soon_as_they_are_told(threads, count, rows):
    """By nobody who holds the interpreter, where there are other threads."""
    threads(count)
    cold = open_rows()
    for number in range(1, 6):
        keys = torch.from_numpy(np.random.default_rng(number).permutation(LAYOUT.rows)[:rows])
        word, (weight, state) = Word(keys, number), room(9000)
        begun = cold.gather_when_told(word.told, weight, state)
        assert begun
        time.sleep(0.002 * number)
        assert not weight.any()
        word.comes()
        if count > 1 and rows >= CHUNK:
            wait_for(lambda weight=weight, state=state: weight[:rows].all() and state[:rows].all())
        cold.gather(keys, weight[:rows], state[:rows], begun=begun)
        assert (weight[:rows] == (keys + 1)[:, None]).all()
        assert (state[:rows] == (keys + 1)[:, None]).all()
        assert not weight[rows:].any()


def test_rows_told_of_that_have_no_room_are_not_gathered(threads):
    threads(3)
    cold, word, (weight, state) = open_rows(), Word(torch.arange(501)), room(500)
    assert cold.gather_when_told(word.told, weight, state)
    word.comes()
    cold.finish()
    assert not weight.any()
    assert not state.any()


def test_what_is_written_comes_before_what_is_told(threads):
    threads(3)
    cold, keys, dirty = open_rows(), torch.arange(8000), torch.ones(8000, dtype=torch.uint8)
    for number in range(1, 20):
        word, (weight, state) = Word(keys, number), room(8000)
        cold.scatter(keys, weight + number, state + number, dirty)
        word.comes()
        cold.gather(keys, weight, state, begun=cold.gather_when_told(word.told, weight, state))
        assert (weight == number).all()


def test_one_gpu_is_waited_for_at_a_time(threads):
    threads(3)
    first, second = Word(torch.arange(700)), Word(torch.arange(700, 1400))
    cold, other, (weight, state), some = open_rows(), open_rows(), room(700), room(700)
    assert cold.gather_when_told(first.told, weight, state)
    assert not other.gather_when_told(second.told, *some)
    first.comes()
    assert other.gather_when_told(second.told, *some)
    assert (weight == torch.arange(1, 701)[:, None]).all()  # that one is over
    second.comes()
    other.finish()
    assert (some[0] == torch.arange(701, 1401)[:, None]).all()


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_gpu_has_yet_to_tell_of_is_given_up_for_who_comes_first(threads, fails):
    """And gathered when it is asked for: nobody waits for another's GPU, nor for one that has failed."""
    threads(3)
    cold, other, keys = open_rows(), open_rows(), torch.arange(900)
    for number in range(1, 40):
        word, (weight, state), some = Word(keys, number), room(900), room(900)
        begun = cold.gather_when_told(word.told, weight, state)
        if fails:
            word.query = raises
        if number % 2:
            word.told.words[TOLD_NUMBER] = number  # which is on its way, and its event is not
            word.told.words[0] = 0
        other.gather(keys + 9, *some)
        assert (some[0] == torch.arange(10, 910)[:, None]).all()
        word.comes()
        cold.gather(keys, weight, state, begun=begun if number % 2 == 0 else None)
        assert (weight == torch.arange(1, 901)[:, None]).all()


def raises():
    raise RuntimeError("an illegal memory access")


def test_a_number_that_is_past_is_taken_for_its_word(threads):
    threads(3)
    cold, word, (weight, state) = open_rows(), Word(torch.arange(5)), room(900)
    assert cold.gather_when_told(word.told, weight, state)
    word.told.words[TOLD_NUMBER] = 2
    word.came.set()
    done = threading.Thread(target=cold.finish, daemon=True)
    done.start()
    done.join(20)
    assert not done.is_alive()


def test_a_finaliser_amid_a_job_moves_its_own_rows(threads, monkeypatch):
    """The garbage collector may close a module whenever Python runs, and so write its rows back."""
    threads(3)
    cold, other, keys = open_rows(), open_rows(), torch.arange(5000)
    begin, turns = movers.job_begin, []

    def collects(*job):
        if not turns:
            turns.append(job)
            other.scatter(keys, *(part + 3 for part in room(5000)), torch.ones(5000, dtype=torch.uint8))
            other.finish()
        begin(*job)

    monkeypatch.setattr(movers, "job_begin", collects)
    weight, state = room(5000)
    moved = threading.Thread(target=lambda: cold.gather(keys, weight, state), daemon=True)
    moved.start()
    moved.join(30)
    assert not moved.is_alive()
    assert (weight == (keys + 1)[:, None]).all()
    assert (other.weight[:5000] == 3).all()


@pytest.mark.parametrize("first", [False, True])
def test_a_finaliser_as_a_job_ends_moves_its_own_rows(threads, monkeypatch, first):
    threads(3)
    cold, other, dirty, ends, turns = open_rows(), open_rows(), torch.ones(9, dtype=torch.uint8), movers.job_finish, []

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

    monkeypatch.setattr(movers, "job_finish", finish)
    weight, state = room(900)
    cold.gather(torch.arange(900), weight, state)
    assert turns
    assert (weight == torch.arange(1, 901)[:, None]).all()
    assert (other.weight[:9] == 3).all()
    word, (weight, state) = Word(torch.arange(700)), room(700)
    begun = cold.gather_when_told(word.told, weight, state)
    word.comes()
    turns.clear()
    cold.gather(torch.arange(700), weight, state, begun=begun)
    assert begun.done
    assert (weight == torch.arange(1, 701)[:, None]).all()


def test_a_forked_child_has_threads_of_its_own(threads):
    threads(3)
    cold, keys = open_rows(), torch.arange(20_000)
    cold.gather(keys, *room(20_000))
    weight, state = room(20_000)
    child = os.fork()
    if child == 0:  # torch's own threads are lost here, so numpy compares
        cold.gather(keys, weight, state)
        os._exit(0 if (weight.numpy() == (keys.numpy() + 1)[:, None]).all() else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_the_process_ends_while_threads_sleep():
    code = (
        "import torch\nfrom tieredemb.storage.base import RowLayout\nfrom tieredemb.storage.host import HostMemory\n"
        "torch.set_num_threads(4)\ncold = HostMemory().open(RowLayout(rows=9000, width=4), name='', identity={})\n"
        "cold.gather(torch.arange(9000), torch.zeros(9000, 4), torch.zeros(9000, 1, dtype=torch.int32))\n"
        "from tieredemb.storage.movers import movers\nassert movers()._helpers == 3\nprint('done')"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (run.returncode, run.stdout) == (0, "done\n")
