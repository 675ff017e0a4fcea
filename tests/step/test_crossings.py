"""What the host does in one warm step: Python calls of the package, the files that they are in, and changes of file in
their sequence. The counts are the same on every machine.

Calls are time of the host, which is most of a small step; files and crossings are what a reader of a step goes through.
When a test of this module fails:

- A count above its limit: find the new calls and take them out. Print what `tests/counters.py` counts, `Calls.files`,
  here and at the last commit that passes, and compare. A limit is raised only for something that users asked for and
  that cannot be had otherwise, in a commit that says so.
- A count below its limit: write the count into `LIMITS` as the new limit, in the commit that made it fall. Otherwise
  the next change could use up what this one has won.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from counters import Calls, calls_of_a_step

import tieredemb as te

sys.path.append(str(Path(__file__).parents[2]))  # the benchmarks are no part of the installed package

from benchmarks.warm_steps import PATHS

ROWS, IDS = 1000, 10
LIMITS = {  # Python calls of a warm step, and files that they are in
    "collection of 4": (113, 25),
    "4 converted, following Adam": (331, 44),
    "26 converted, following SGD": (664, 41),
    "collection of 4, prefetched": (154, 31),
    "sharded collection of 4, on 2 ranks": (470, 46),
}
SLACK = 0.02  # of a limit: this much below it, a count is not yet a new limit


# --- calls and files of a step ----------------------------------------------------------------------------------------


def of_rank(rank, size, name):
    return calls_of_a_step(PATHS["cpu"][name])


def advice(kind, count, limit):
    """What to do about a count, or None where it is at its limit or a little below."""
    if count > limit:
        return f"{count:g} {kind} are above the limit of {limit}: take the new ones out (see this module's docstring)"
    if count < (1 - SLACK) * limit:
        return f"{count:g} {kind} are below the limit of {limit}: good; make {count:g} the limit in LIMITS"
    return None


@pytest.mark.parametrize("name", LIMITS)
def test_step_makes_few_calls_in_few_files(name, request):
    path = PATHS["cpu"][name]
    if path.ranks == 1:
        counts = calls_of_a_step(path)
    else:
        counts = request.getfixturevalue("worlds")(path.ranks).run(of_rank, name)[0]
    found = map(advice, ("Python calls", "files"), counts, LIMITS[name])
    assert not [each for each in found if each]


def test_every_step_has_limits():
    assert list(LIMITS) == list(PATHS["cpu"])


def test_limits_only_fall():
    assert (
        advice("calls", 101, 100)
        == "101 calls are above the limit of 100: take the new ones out (see this module's docstring)"
    )
    assert advice("calls", 97, 100) == "97 calls are below the limit of 100: good; make 97 the limit in LIMITS"
    assert advice("calls", 100, 100) is advice("calls", 98, 100) is None


# --- changes of file --------------------------------------------------------------------------------------------------


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
    assert 5 <= backward.crossings <= 21 + warm.marks
    assert 10 <= lookup.crossings <= 40


def test_step_that_brings_rows_stays_in_few_files(warm):
    with Calls() as forward:
        warm(*batch(4)).sum().backward()
    assert forward.crossings <= 81


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
    assert backward.crossings <= 21 + warm.marks
    steps.close()
