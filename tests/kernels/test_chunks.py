"""Chunks that threads take one by one: each of them once, by threads with numbers of their own."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
import torch

from tieredemb.kernels.chunks import each


@pytest.fixture(params=[1, 2, 5])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("count", [0, 1, 7, 100])
def test_each_chunk_is_worked_on_once_and_counted(threads, count):
    done, advanced = Counter(), []

    def work(chunk, thread):
        assert 0 <= thread < threads
        done[chunk] += 1
        return chunk

    each(work, iter(range(count)), advanced.append)
    assert done == Counter(range(count))
    assert sum(advanced) == sum(range(count))


def test_threads_that_work_at_a_time_have_different_numbers(threads):
    met, numbers = threading.Barrier(threads, timeout=30), []

    def work(_, thread):
        met.wait()
        numbers.append(thread)
        return 0

    each(work, range(threads))
    assert sorted(numbers) == list(range(threads))


def test_chunks_are_made_by_who_calls_a_round_at_a_time(threads):
    made, most_ahead, done = [], [], []

    def chunks():
        for chunk in range(200):
            assert threading.current_thread() is threading.main_thread()
            most_ahead.append(len(made) - len(done))
            made.append(chunk)
            yield chunk

    def work(chunk, _):
        done.append(chunk)
        return 0

    each(work, chunks())
    assert max(most_ahead) < 8 * threads


def test_error_of_any_chunk_is_raised_and_no_later_round_begins(threads):
    done = []

    def work(chunk, _):
        if chunk == 3:
            raise OSError("planted")
        done.append(chunk)
        return 0

    with pytest.raises(OSError, match="planted"):
        each(work, range(1000))
    assert len(done) < 8 * threads
