"""Requests to one rank in messages of one size: what a host finds in them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from devices import equal
from sharding.ranks import SHAPES, batch_of, padded, sharding_of, tables_of

from tieredemb.sharding.bags import parts_of
from tieredemb.sharding.header import Bound
from tieredemb.sharding.host_bags import HostFinder
from tieredemb.sharding.layout import Layout
from tieredemb.sharding.request import RequestLayout
from tieredemb.step.batch import Batch
from tieredemb.step.planned_forwards import identity

RANKS, BOUND = 3, 300
MOST = 9  # samples of any rank
TABLES = tables_of(modes=("sum", "mean"), rows=(1, 3, 17, 40, 25, 9, 31), padding=(None, 0, 2))


def some(rank):
    return (5, 0, MOST)[rank]


def messages_of(rank, sharding, shape, rows=None):
    """The parts of a width, and the messages of all ranks to one, of each part."""
    layout = Layout(TABLES, RANKS, sharding_of(sharding, TABLES))
    parts = parts_of(layout, range(len(TABLES)), [4 * t for t in range(len(TABLES))])
    received = [[] for _ in parts]
    for other in range(RANKS):
        ids, offsets, *_ = batch_of(TABLES, 0, other, samples=some, shape=shape)
        batch = Batch(ids, offsets, len(offsets), True, some(other), None, (ids, offsets))
        for part, bags, its in zip(parts, HostFinder(layout, parts)(batch)[0], received, strict=True):
            its.append(padded(part, bags, Bound(BOUND, rows), MOST)[rank])
    sizes = [part.message_size(Bound(BOUND, rows), MOST) for part in parts]
    return parts, list(torch.cat([torch.stack(its) for its in received], 1).split(sizes, 1))  # as they are received


def request_of(parts, received, rank, *, device="cpu", rows=None):
    requests = RequestLayout(parts, rank, RANKS, torch.device(device))
    request = requests.of(MOST, [Bound(BOUND, rows)] * len(parts))
    request.take(received)
    return request


def gradients_of(parts, rank, rows=None):
    """Of each part what its owner may receive in a backward, without factors."""
    sizes = [part.gradient_sizes(Bound(BOUND, rows), MOST, rank)[1] for part in parts]
    return [[torch.randn(sum(its), 4)] for its in sizes]


@pytest.mark.parametrize("sharding", ["rows", "tables", "copies", "every other"])
def test_a_deferred_update_reads_nothing_of_a_later_forward(sharding):
    parts, received = messages_of(1, sharding, "some equal")
    request = request_of(parts, received, 1)
    mine, stack = request.separated(), request.batch.stack
    assert len({identity(each.batch.given) for each in (request, mine, request.separated())}) == 3
    kept = [bags.edges.clone() for bags in stack.pooled]
    for bags in stack.pooled:
        bags.edges.zero_()  # a replay for the next forward
    own = mine.batch.stack
    assert all(map(equal, [bags.edges for bags in own.pooled], kept))
    assert own.row is stack.row  # a plan and a lookup read these, which are not put off
    assert own.picked is stack.picked


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sharding", ["rows", "every other"])
@pytest.mark.parametrize("rank", range(RANKS))
def test_a_row_goes_back_once_and_gradients_need_no_order(rank, sharding, shape):
    """Ids that were requested before are inverted: the others' rows go back, in their order; and the row of each id in
    the output is where its gradient will be."""
    rows = BOUND - 7
    parts, received = messages_of(rank, sharding, shape, rows)
    request = request_of(parts, received, rank, rows=rows)
    plain = request_of(*messages_of(rank, sharding, shape), rank)
    count, stack = int(plain.batch.offsets[-1]), request.batch.stack
    assert equal(request.batch.ids[:count], plain.batch.ids[:count])
    assert equal(request.batch.offsets, plain.batch.offsets)
    assert bool((stack.row < stack.rows).all())
    (row_wise,) = [number for number, part in enumerate(parts) if not part.is_table_wise]
    features = len(parts[row_wise].space.features)
    of_entry = {int(row) - stack.bags: j for j, row in enumerate(stack.row[:count]) if row >= stack.bags}
    firsts, requested = 0, 0
    for block, piece in enumerate(received[row_wise]):
        ids = piece[features : features + BOUND][: int(piece[:features].sum())]
        first = [position for position, each in enumerate(ids.tolist()) if each >= 0]
        picked = stack.picked[block * rows : block * rows + len(first)].tolist() if count else []
        assert picked == [of_entry[block * BOUND + position] for position in first][: len(picked)]
        firsts, requested = firsts + len(first), requested + len(ids)
    assert len(of_entry) == requested
    assert firsts < requested or shape != "long"
    assert parts[row_wise].row_sizes(Bound(BOUND, rows), MOST, rank) == ([rows] * RANKS, [rows] * RANKS)
    grads = gradients_of(parts, rank, rows)
    found = request.gradient(SimpleNamespace(weigh=None), grads)
    assert equal(found[stack.bags :], grads[row_wise][0])
    assert len(found) == stack.rows
