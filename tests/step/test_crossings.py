"""How far a call is spread: changes of file in the sequence of the package's Python calls of one warm step.

Who reads a step follows them. A count that rises by more than a few is a wall in the wrong place; look at the sequence
(`Calls.files`) before the number here is raised.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest
import torch

import tieredemb as te

PACKAGE = str(Path(te.__file__).parent)
ROWS, IDS = 1000, 10


class Calls:
    """The files of the package whose functions this thread calls inside, in order."""

    def __init__(self):
        self.files = []

    def __enter__(self):
        sys.setprofile(self._hear)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)

    def _hear(self, frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            self.files.append(frame.f_code.co_filename)

    @property
    def crossings(self):
        return sum(one != other for one, other in itertools.pairwise(self.files))


def collection(storage=None):
    tables = [te.TableConfig(name=name, num_embeddings=ROWS, embedding_dim=8, mode="sum") for name in "abc"]
    return te.TieredEmbeddingBagCollection(tables, capacity=0.5, optimizer=te.Adagrad(lr=0.1), storage=storage)


def batch(seed):
    random = torch.Generator().manual_seed(seed)
    return torch.randint(ROWS, (3 * IDS,), generator=random), torch.arange(3 * IDS + 1)


MARKS = {"host": 0, "file": 2}  # a file is told of changes, in a plan and in an update


@pytest.fixture(params=MARKS)
def warm(request, tmp_path):
    """Rows of four batches have been used, and are hot."""
    module = collection(te.File(str(tmp_path / "rows")) if request.param == "file" else None)
    module.marks = MARKS[request.param]
    for seed in (0, 1, 2, 3, 0, 1):
        module(*batch(seed)).sum().backward()
    with torch.autograd.set_multithreading_enabled(False):  # backward on this thread, whose calls are seen
        yield module
    module.close()


def test_warm_step_stays_in_few_files(warm):
    with Calls() as forward:
        out = warm(*batch(2))
    loss = out.sum()
    with Calls() as backward:
        loss.backward()
    with torch.no_grad(), Calls() as lookup:
        warm(*batch(3))
    assert 10 <= forward.crossings <= 40
    assert 5 <= backward.crossings <= 20 + warm.marks
    assert 10 <= lookup.crossings <= 40


def test_step_that_brings_rows_stays_in_few_files(warm):
    with Calls() as forward:
        warm(*batch(4)).sum().backward()
    assert forward.crossings <= 80


def test_prefetched_step_stays_in_few_files(warm):
    steps = iter(te.prefetch([batch(seed) for seed in (0, 1, 2, 3, 0)], warm))
    for _ in range(3):
        warm(*next(steps)).sum().backward()
    with Calls() as following:
        given = next(steps)
    with Calls() as forward:
        out = warm(*given)
    loss = out.sum()
    with Calls() as backward:
        loss.backward()
    assert following.crossings <= 25  # the plan itself is another thread's
    assert forward.crossings <= 20
    assert backward.crossings <= 20 + warm.marks
    steps.close()
