"""Arrays whose references kernels do not count."""

from __future__ import annotations

import re

import numba
import numpy as np
import pytest
import torch

import tieredemb as te
from tieredemb.kernels.cpu import borrowed, keep
from tieredemb.lookup.optimizers import sgd_cpu
from tieredemb.step.reading_cpu import bags_read

BLOCK = re.compile(r"^([\w.$-]+):.*$", re.MULTILINE)
LABEL = re.compile(r"label %([\w.$-]+)")
COUNTING = re.compile(r"call void @NRT_(in|de)cref\(")


def fresh(function):
    """Compiled now: code from numba's cache cannot be inspected."""
    return numba.njit(nogil=True, error_model="numpy")(function)


def counting_in_loops(code: str) -> list[str]:
    """The blocks of LLVM code that count references and can be reached from themselves."""
    found = []
    for function in code.split("\ndefine ")[1:]:
        labels, bodies = ["", *BLOCK.findall(function)], BLOCK.split(function)[::2]
        after = {label: set(LABEL.findall(body)) for label, body in zip(labels, bodies, strict=True)}
        for label, body in zip(labels, bodies, strict=True):
            reached, todo = set(), [label]
            while todo:
                new = after[todo.pop()] - reached
                reached |= new
                todo += new
            if label in reached and COUNTING.search(body):
                found.append(label)
    return found


def test_borrowed_arrays_are_the_same_memory():
    @fresh
    def double(arrays, factor):
        (first, count), second = borrowed(arrays)
        for i in range(count):
            first[i] *= factor
            second[0, i] = first[i]

    first, second = np.arange(4.0), np.zeros((1, 4))
    double(((first, 3), second), 2.0)
    assert first.tolist() == [0.0, 2.0, 4.0, 3.0]
    assert second.tolist() == [[0.0, 2.0, 4.0, 0.0]]


def test_kept_arrays_outlive_what_is_borrowed_from_them():
    @fresh
    def total(count):
        own = np.ones(count)
        ones = borrowed(own)
        other = np.full(count, 5.0)  # which would lie where `own` did
        found = ones.sum() + other[0]
        keep(own)
        return found

    assert all(total(1000) == 1005.0 for _ in range(10))


def counts_of_ranges(kernel, signature) -> int:
    """How often the code of each range counts a reference: once where it frees at its end what it has allocated."""
    again = fresh(kernel.py_func)
    again.compile(signature)
    [code] = again.inspect_llvm().values()
    [ranges] = [function for function in code.split("\ndefine ") if ".ranges(" in function.partition("\n")[0]]
    return len(COUNTING.findall(ranges))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kernels_of_dense_optimizers_count_no_references_in_a_loop(dtype):
    optimizer = te.SGD(lr=0.1, momentum=0.5)
    module = te.TieredEmbeddingBag(20, 4, capacity=1.0, optimizer=optimizer, dtype=dtype, device="cpu")
    for _ in range(2):
        module(torch.arange(8), torch.arange(0, 8, 2)).sum().backward()
    for kernel in (sgd_cpu.rows_catch_up, sgd_cpu.dense_update):
        # other tests of the process may have compiled it for other rows
        signature = next(each for each in kernel.signatures if ("int16" in str(each)) == (dtype == torch.float16))
        assert counts_of_ranges(kernel, signature) == 1


def test_reading_counts_no_references_in_a_loop():
    with torch.no_grad():
        te.TieredEmbeddingBag(20, 4, capacity=1.0, device="cpu")(torch.arange(8), torch.arange(0, 8, 2))
    assert counts_of_ranges(bags_read, bags_read.signatures[0]) == 1


def test_counting_in_loops_is_found():
    @numba.njit
    def kept(array, value):
        return array if value > 0 else None

    @fresh
    def walk(array, values):
        found = None
        for value in values:
            found = kept(array, value)
        return found

    walk(np.zeros(2), np.ones(3))
    [code] = walk.inspect_llvm().values()
    assert counting_in_loops(code)
