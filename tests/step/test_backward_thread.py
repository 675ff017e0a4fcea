"""Loops over one GPU, and collections sharded over several, run backward passes on the thread that begins them, and
leave autograd as they found it."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from contextlib import ExitStack

import pytest
import torch
from torch import nn

import tieredemb
from tieredemb.step.backward_thread import backward_on_this_thread, disable_autograd_threads

GPU, OTHER, CPU = torch.device("cuda", 0), torch.device("cuda", 1), torch.device("cpu")


def has_threads() -> bool:
    return torch._C._is_multithreading_enabled()


@pytest.fixture(autouse=True)
def autograd_is_as_before():
    before = has_threads()
    yield
    now = has_threads()
    torch._C._set_multithreading_enabled(before)
    assert now == before


@pytest.mark.parametrize("devices", [[CPU], [GPU, OTHER], []])
def test_without_one_gpu_autograd_keeps_its_threads(devices):
    with backward_on_this_thread(nn.Linear(2, 2), devices):
        assert has_threads()


@pytest.mark.parametrize("before", [True, False])
def test_an_error_in_the_loop_leaves_autograd_as_before(before):
    torch._C._set_multithreading_enabled(before)

    def fail_inside():
        with backward_on_this_thread(nn.Module(), [GPU, CPU]):
            assert not has_threads()
            raise ValueError("of the loop")

    with pytest.raises(ValueError, match="of the loop"):
        fail_inside()
    assert has_threads() == before
    torch._C._set_multithreading_enabled(True)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_loops_may_end_in_any_order(order):
    loops = [ExitStack() for _ in range(3)]
    for loop in loops:
        loop.enter_context(backward_on_this_thread(nn.Module(), [GPU]))
    for number in order:
        assert not has_threads()
        loops[number].close()
    assert has_threads()


def test_a_loop_that_another_thread_ends_is_forgotten():
    loop = ExitStack()
    loop.enter_context(backward_on_this_thread(nn.Module(), [GPU]))
    found = []
    ends = threading.Thread(target=lambda: (loop.close(), found.append(has_threads())))
    ends.start()
    ends.join()
    assert found == [True]
    assert not has_threads()
    with backward_on_this_thread(nn.Module(), [GPU]):  # the next loop of this thread
        pass
    assert has_threads()


@pytest.mark.parametrize("before", [True, False])
def test_threads_are_disabled_until_that_is_ended(before):
    torch._C._set_multithreading_enabled(before)
    restore = disable_autograd_threads()
    assert not has_threads()
    restore()
    assert has_threads() == before
    torch._C._set_multithreading_enabled(not before)
    restore()  # once is enough
    assert has_threads() == (not before)
    torch._C._set_multithreading_enabled(True)


def test_an_owner_that_is_forgotten_ends_it():
    owner = nn.Module()
    weakref.finalize(owner, disable_autograd_threads())
    assert not has_threads()
    del owner
    gc.collect()
    assert has_threads()


@pytest.mark.parametrize("first", ["loop", "other"])
def test_a_loop_inside_changes_nothing(first):
    restore, loop = disable_autograd_threads(), ExitStack()
    loop.enter_context(backward_on_this_thread(nn.Module(), [GPU]))
    ends = {"loop": loop.close, "other": restore}
    ends.pop(first)()
    assert not has_threads()
    ends.popitem()[1]()
    assert has_threads()


def test_other_threads_keep_autograds():
    restore, found = disable_autograd_threads(), []
    other = threading.Thread(target=lambda: found.append(has_threads()))
    other.start()
    other.join()
    restore()
    assert found == [True]


@pytest.mark.parametrize("how", ["end", "break", "error"])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_backward_runs_on_the_thread_of_the_loop(gpu, depth, how):
    bag = tieredemb.TieredEmbeddingBag(50, 4, optimizer=tieredemb.SGD(lr=0.1), capacity=9, device=gpu)
    head, threads = nn.Linear(4, 1, device=gpu), set()
    model = nn.Sequential(bag, head)
    loop = tieredemb.prefetch(torch.randint(50, (6, 8, 3), device=gpu), model, depth)
    try:
        for number, ids in enumerate(loop):
            output = model(ids)
            output.register_hook(lambda _: threads.add(threading.get_ident()))
            output.sum().backward()
            if number == 3 and how == "break":
                break
            if number == 3 and how == "error":
                raise ValueError("of the loop")
    except ValueError:
        pass
    assert (threads == {threading.get_ident()}) == (depth > 0)
    assert has_threads()


def test_captured_steps_in_a_loop_leave_autograd_as_before(gpu):
    bag = tieredemb.TieredEmbeddingBag(50, 4, optimizer=tieredemb.SGD(lr=0.1), capacity=30, device=gpu)

    def step(ids):
        loss = bag(ids).square().mean()
        loss.backward()
        return loss.detach()

    train = tieredemb.graph_step(step)
    for ids in tieredemb.prefetch(torch.randint(50, (9, 8, 3), device=gpu), bag):
        train(ids)
    assert has_threads()
