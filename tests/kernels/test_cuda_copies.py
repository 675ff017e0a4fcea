"""Copies of several tensors by one launch. Skips without a GPU; TIEREDEMB_REQUIRE_CUDA=1 fails."""

from __future__ import annotations

import pytest
import torch

from tieredemb.kernels.constants import MOST_COPIED
from tieredemb.kernels.copies import copy_on_device

pytestmark = pytest.mark.usefixtures("gpu")
SIZES = [0, 1, 2, 3, 15, 16, 17, 1000, 12_345, 3_000_001]
DTYPES = [torch.int64, torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.float64]


def drawn(size, dtype=torch.int64):
    return torch.randint(-100, 100, (size,)).to(dtype)


def check(targets, sources):
    """Copies, and checks that targets have the sources' bytes, and nothing beside them was written."""
    around = [torch.full((len(each) + 2,), 7, dtype=each.dtype) for each in targets]
    inner = [each[1:-1] for each in around]
    copy_on_device(targets, sources)
    copy_on_device(inner, sources)
    for target, whole, source in zip(targets, around, sources, strict=True):
        assert torch.equal(target, source)
        assert torch.equal(whole[1:-1], source)
        assert [int(whole[0]), int(whole[-1])] == [int(torch.tensor(7).to(source.dtype))] * 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_targets_have_the_bytes_of_sources(dtype):
    sources = [drawn(size, dtype) for size in SIZES]
    check([torch.zeros_like(each) for each in sources], sources)


@pytest.mark.parametrize("count", [0, 1, 2, MOST_COPIED - 1, MOST_COPIED, MOST_COPIED + 1, 3 * MOST_COPIED + 5])
def test_any_number_of_tensors_may_be_given(count):
    sources = [drawn(number * 37 % 1001, DTYPES[number % len(DTYPES)]) for number in range(count)]
    check([torch.zeros_like(each) for each in sources], sources)


@pytest.mark.parametrize("begin", range(5))
def test_they_may_begin_anywhere(begin):
    for dtype in DTYPES:
        whole = drawn(1000, dtype)
        check([torch.zeros(1000 - begin, dtype=dtype)], [whole[begin:]])


def test_targets_count_as_changed():
    targets = [torch.zeros(5), torch.zeros(3, dtype=torch.int64)]
    before = [each._version for each in targets]
    copy_on_device(targets, [torch.ones(5), torch.ones(3, dtype=torch.int64)])
    assert all(each._version > version for each, version in zip(targets, before, strict=True))


def test_a_graph_may_contain_it():
    source, target, graph = drawn(1000), torch.zeros(1000, dtype=torch.int64), torch.cuda.CUDAGraph()
    copy_on_device([target], [source])
    with torch.cuda.graph(graph):
        copy_on_device([target], [source])
    source.copy_(drawn(1000))
    graph.replay()
    assert torch.equal(target, source)
