"""Tables of more than 2^31 elements on a GPU: the last rows are read, trained and written back as the first ones are.
Skips without a GPU; TIEREDEMB_REQUIRE_CUDA=1 fails.
"""

from __future__ import annotations

import pytest
import torch
from devices import equal

import tieredemb as te

pytestmark = pytest.mark.usefixtures("gpu")

ROWS, WIDTH = 17_000_000, 128
BEYOND = 2**31 // WIDTH  # the first row whose elements an int32 does not count


def edge_rows():
    return torch.tensor([[0, 1, 7, BEYOND - 1, BEYOND, BEYOND + 1, 2 * BEYOND // 3, ROWS - 2, ROWS - 1]]).T


def rows_of_the_cpu(ids, dtype):
    """What the rows start as; of its own table the CPU touches these alone."""
    table = te.TieredEmbedding(ROWS, WIDTH, capacity=100, dtype=dtype, seed=5, device="cpu")
    with torch.no_grad():
        return table(ids.flatten().cpu())


def need(size_bytes):
    free, _ = torch.cuda.mem_get_info()
    if free < size_bytes:
        pytest.skip(f"needs {size_bytes / 2**30:.0f} GiB of GPU memory, {free / 2**30:.0f} GiB are free")


def train_three_times(bag, ids, others):
    """Three steps of -1; in between other rows pass through the cache."""
    for _ in range(3):
        bag(ids).sum().backward()
        with torch.no_grad():
            bag(others)
    with torch.no_grad():
        return bag(ids)


def test_cold_table_of_more_than_2_31_elements():
    keywords = {"optimizer": te.SGD(lr=1.0), "seed": 5, "placement": "cached", "storage": te.UnifiedMemory()}
    bag = te.TieredEmbeddingBag(ROWS, WIDTH, mode="sum", capacity=16, **keywords)
    ids, others = edge_rows(), torch.arange(ROWS - 500, ROWS - 100)[:, None]
    expected = rows_of_the_cpu(ids, torch.float32)
    with torch.no_grad():
        assert equal(bag(ids), expected)
    out = train_three_times(bag, ids, others)
    for _ in range(3):
        expected = expected - 1
    assert equal(out, expected)
    assert bag.stats().evictions > 0
    bag.close()


def test_resident_table_of_more_than_2_31_elements():
    need(3 * ROWS * WIDTH * 2)
    keywords = {"optimizer": te.SGD(lr=1.0), "seed": 5, "placement": "resident", "dtype": torch.bfloat16}
    bag = te.TieredEmbeddingBag(ROWS, WIDTH, mode="sum", capacity=1.0, **keywords)
    ids, others = edge_rows(), torch.arange(ROWS - 500, ROWS - 100)[:, None]
    expected = rows_of_the_cpu(ids, torch.bfloat16)
    with torch.no_grad():
        assert equal(bag(ids), expected)
    out = train_three_times(bag, ids, others)
    for _ in range(3):
        expected = (expected.float() - 1).bfloat16()
    assert equal(out, expected)
    stats = bag.stats()
    assert stats.hits == stats.lookups
    bag.close()
