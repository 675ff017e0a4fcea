"""Memory that is committed by all threads."""

from __future__ import annotations

import ctypes
import gc
import itertools
import mmap
import weakref

import forks
import numpy as np
import pytest
import torch

from tieredemb.storage import commit
from tieredemb.storage.commit import Commit, zero_in_parallel
from tieredemb.storage.unified import BLOCK_BYTES

NO_HUGE_PAGES = 15  # MADV_NOHUGEPAGE


@pytest.mark.parametrize("size", [0, 1, 4097, 40 << 20])
@pytest.mark.parametrize("threads", [1, 3])
def test_memory_is_zeroed_whole_by_any_number_of_threads(size, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        memory = np.full(size + 2, 7, np.uint8)
        zero_in_parallel(memory[1:-1])
    finally:
        torch.set_num_threads(before)
    assert not memory[1:-1].any()
    assert memory[[0, -1]].tolist() == [7, 7]


@pytest.mark.parametrize("blocks", [0, 1, 16, 17, 40])
@pytest.mark.parametrize("threads", [1, 3])
def test_every_block_is_committed_and_no_byte_changes(blocks, threads):
    memory = np.frombuffer(mmap.mmap(-1, max(1, blocks * BLOCK_BYTES)), np.uint8)
    ctypes.CDLL(None).madvise(ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(len(memory)), NO_HUGE_PAGES)
    memory = memory[: blocks * BLOCK_BYTES]
    assert not resident(memory).any()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        Commit(memory, BLOCK_BYTES).wait()
    finally:
        torch.set_num_threads(before)
    assert resident(memory)[:: BLOCK_BYTES // mmap.PAGESIZE].sum() == blocks
    assert not memory.any()


def resident(memory):
    """Which pages of `memory` are there."""
    found = np.zeros(-(-len(memory) // mmap.PAGESIZE), np.uint8)
    if len(memory):
        place = ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(len(memory)), ctypes.c_void_p(found.ctypes.data)
        assert ctypes.CDLL(None).mincore(*place) == 0
    return found & 1


def test_commit_ends_when_it_is_told_to_and_lets_go_of_the_memory(monkeypatch):
    monkeypatch.setattr(commit, "_parts", lambda count, size: itertools.repeat((0, 1)))  # without an end
    memory = np.zeros(BLOCK_BYTES, np.uint8)
    held = weakref.ref(memory)
    begun = Commit(memory, BLOCK_BYTES)
    assert any(thread.is_alive() for thread in begun._threads)
    begun.end()
    assert not any(thread.is_alive() for thread in begun._threads)
    del memory
    gc.collect()
    assert held() is None


def test_commit_ends_with_the_main_thread():
    code = """
import itertools, numpy
from tieredemb.storage import commit
commit._parts = lambda count, size: itertools.repeat((0, 1))
commit.Commit(numpy.zeros(1 << 20, numpy.uint8), 1 << 20)
"""
    assert forks.run(code, timeout=60).returncode == 0
