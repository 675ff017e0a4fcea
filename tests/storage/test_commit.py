"""Memory that is committed by all threads."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tieredemb.storage.commit import touch_in_parallel, zero_in_parallel
from tieredemb.storage.unified import BLOCK_BYTES


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


@pytest.mark.parametrize("size", [1, BLOCK_BYTES, 40 * BLOCK_BYTES + 1])
def test_every_block_is_touched(size):
    memory = np.full(size, 7, np.uint8)
    touch_in_parallel(memory, BLOCK_BYTES)
    touched = np.flatnonzero(memory == 0)
    assert touched.tolist() == list(range(0, size, BLOCK_BYTES))
